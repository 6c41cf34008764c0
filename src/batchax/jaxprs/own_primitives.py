"""What the primitives of batchax's own do, as ordinary operations of JAX.

Such a primitive exists only so that a derivative or an outer batch axis can treat what it does
as one thing. Compilers get the operations it stands for, and so does whoever reads a program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.interpreters import mlir

from batchax import _compat

_operations: dict[_compat.Primitive, Callable[..., Any]] = {}


def stands_for(primitive: _compat.Primitive, operations: Callable[..., Any]) -> None:
    """Says that `primitive` is lowered as the function `operations` of operands and parameters."""
    _operations[primitive] = operations
    several = primitive.multiple_results
    mlir.register_lowering(primitive, mlir.lower_fun(operations, multiple_results=several))


def operations_of(eqn: Any) -> _compat.ClosedJaxpr | None:
    """The program that an equation stands for; None if its primitive is not batchax's own.

    That program may hold primitives of batchax's own, too.
    """
    operations = _operations.get(eqn.primitive)
    if operations is None:
        return None

    def run(*operands: Any) -> Any:
        out = operations(*operands, **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    with eqn.ctx.manager:  # of the mesh that was in scope, and its axes inside `shard_map`
        mesh = jax.sharding.get_abstract_mesh()
        names = [(name, mesh.shape[name]) for name in mesh.manual_axes]
        return _compat.stage(run, [v.aval for v in eqn.invars], names)


def expanded(prim: Any, avals: Any) -> _compat.ClosedJaxpr:
    """The program that a `call_hi_primitive` stands for, of operands of these types.

    That primitive of JAX's runs operations that their authors describe by an object, its
    parameter `prim` (``jax.experimental.hijax``).
    """

    def run(*operands: Any) -> list[Any]:
        return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, operands)))

    return _compat.stage(run, avals)
