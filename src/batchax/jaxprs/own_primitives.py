"""What the primitives of batchax's own do, as ordinary operations of JAX.

Such a primitive exists only so that a derivative or an outer batch axis can treat what it does
as one thing. Compilers get the operations it stands for, and so does whoever reads a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.interpreters import mlir

from batchax import _compat
from batchax.jaxprs.words import ClosedJaxpr, Eqn


@dataclass(frozen=True)
class _Own:
    operations: Callable[..., Any]
    called: str


_own: dict[_compat.Primitive, _Own] = {}


def stands_for(
    primitive: _compat.Primitive,
    operations: Callable[..., Any],
    called: str,
    on_cpu: Callable[..., Any] | None = None,
) -> None:
    """Says that `primitive` is lowered as the function `operations` of operands and parameters.

    Users call what it does `called`. For a CPU it is lowered as the function `on_cpu`, if given.
    """
    _own[primitive] = _Own(operations, called)
    several = primitive.multiple_results
    mlir.register_lowering(primitive, mlir.lower_fun(operations, multiple_results=several))
    if on_cpu is not None:
        lowering = mlir.lower_fun(on_cpu, multiple_results=several)
        mlir.register_lowering(primitive, lowering, platform="cpu")


def is_own(primitive: _compat.Primitive) -> bool:
    """Whether `primitive` is one of batchax's own."""
    return primitive in _own


def shown(primitive: _compat.Primitive) -> str:
    """What a message calls a primitive: one of batchax's own, what users know it by."""
    own = _own.get(primitive)
    return primitive.name if own is None else own.called


def operations_of(eqn: Eqn) -> ClosedJaxpr | None:
    """The program that an equation stands for; None if its primitive is not batchax's own.

    That program may hold primitives of batchax's own, too.
    """
    own = _own.get(eqn.primitive)
    if own is None:
        return None

    def run(*operands: Any) -> Any:
        out = own.operations(*operands, **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    with eqn.ctx.manager:  # of the mesh that was in scope, and its axes inside `shard_map`
        mesh = jax.sharding.get_abstract_mesh()
        names = [(name, mesh.shape[name]) for name in mesh.manual_axes]
        return _compat.stage(run, [v.aval for v in eqn.invars], names)


def expanded(prim: Any, avals: Any) -> ClosedJaxpr:
    """The program that a `call_hi_primitive` stands for, of operands of these types.

    That primitive of JAX's runs operations that their authors describe by an object, its
    parameter `prim` (``jax.experimental.hijax``).
    """

    def run(*operands: Any) -> list[Any]:
        return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, operands)))

    return _compat.stage(run, avals)
