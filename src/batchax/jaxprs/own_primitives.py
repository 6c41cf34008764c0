"""What the primitives of batchax do, as ordinary operations of JAX.

Such a primitive exists only so that a derivative or an outer batch axis can treat what it does
as one thing. Compilers and readers of jaxprs get the operations it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.interpreters import mlir
from jax.sharding import AbstractMesh

from batchax import _compat
from batchax.cache import Cache
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, HighOperation, Value, Values


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
    elsewhere: Callable[..., Callable[..., Any] | None] | None = None,
) -> None:
    """Lowers `primitive` as the function `operations` of operands and parameters, called `called`
    in messages. `on_cpu`, and what `elsewhere` returns for platforms other than the default one,
    take its place there. These may depend on nothing but the types of operands and the parameters:
    they are staged once for all that are equal.
    """
    _own[primitive] = _Own(operations, called)
    several = primitive.multiple_results
    ordinary = mlir.lower_fun(operations, multiple_results=several)
    mlir.register_lowering(primitive, ordinary)
    if on_cpu is not None:
        mlir.register_lowering(primitive, _lowering(primitive, on_cpu), platform="cpu")
    if elsewhere is None:
        return

    def run(*operands: Value, **params: Any) -> Value | list[Value]:
        function = elsewhere(**params)
        assert function is not None
        return function(*operands)

    other = _lowering(primitive, run)

    def lower_for(platform: str | None) -> Callable[..., Any]:
        def lower(
            ctx: mlir.LoweringRuleContext, *operands: Value, **params: Any
        ) -> Sequence[object]:
            # Parameters were chosen for the default platform, and hold for it. `jax.export` lowers
            # for others, too.
            default = jax.default_backend()
            decided = default == platform or (platform is None and default not in _PLATFORMS)
            rule = ordinary if decided or elsewhere(**params) is None else other
            return rule(ctx, *operands, **params)

        return lower

    for platform in (None, *_PLATFORMS):
        mlir.register_lowering(primitive, lower_for(platform), platform=platform)


_PLATFORMS = ("cpu", "gpu", "tpu")


def as_decided(
    decided: Callable[..., list[Any]], elsewhere: Callable[..., list[Any]], operands: Values
) -> list[Any]:
    """Runs `decided` on the default platform, for which it was chosen, and `elsewhere` on others.

    For operations whose derivative would leave out what a primitive runs `elsewhere`.
    """
    default = jax.default_backend()
    names = ("cuda", "rocm") if default == "gpu" else (default,)
    chosen = dict.fromkeys(names, decided)
    return list(lax.platform_dependent(*operands, **chosen, default=elsewhere))


def _lowering(primitive: _compat.Primitive, function: Callable[..., Any]) -> Callable[..., Any]:
    """Lowers `primitive` as a function, staged as it is outside of ``shard_map``."""
    several = primitive.multiple_results
    lowering = mlir.lower_fun(_staged_once(primitive, function), multiple_results=several)

    def lower(ctx: mlir.LoweringRuleContext, *operands: Value, **params: Any) -> Sequence[object]:
        token = _divided.set(_compat.is_divided(ctx))
        try:
            if not any(map(_compat.varying_axes, ctx.avals_in)):
                return lowering(ctx, *operands, **params)
            # Inside ``shard_map`` JAX checks which values vary along the mesh. Here the types say
            # nothing of it, and the mesh is empty, so that nothing in the function has to be cast.
            types: list[Aval] = list(ctx.avals_in)
            plain = [ShapedArray(x.shape, x.dtype) for x in types]
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
                return lowering(ctx.replace(avals_in=plain), *operands, **params)
        finally:
            _divided.reset(token)

    return lower


def _staged_once(primitive: _compat.Primitive, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, staged once for operands of the same types: a draw or a sort is many
    operations in many places.
    """
    several = primitive.multiple_results

    def run(*operands: Value, **params: Any) -> Value | list[Value]:
        # Operands inside ``shard_map`` say where they vary, and must be staged as they are.
        if _compat.checked_axes():
            return function(*operands, **params)
        types = tuple(map(jax.typeof, operands))
        named = tuple(sorted(params.items()))
        key = primitive, function, types, named, divided(), _compat.trace_context()

        def listed(*xs: Value) -> list[Any]:
            out = function(*xs, **params)
            return list(out) if several else [out]

        outs = _compat.inlined(_programs.get(key, lambda: _compat.stage(listed, types)), operands)
        return outs if several else outs[0]

    return run


_programs = Cache("what primitives of batchax do on some platforms", most=512)

_divided: ContextVar[bool] = ContextVar("batchax_divided", default=False)


def divided() -> bool:
    """Whether what is staged is for a program that its compiler divides among devices."""
    # Inside ``shard_map`` each device has its own arrays: `is_divided` is false there.
    return _divided.get()


def is_own(primitive: _compat.Primitive) -> bool:
    return primitive in _own


def shown(primitive: _compat.Primitive) -> str:
    """Returns what a message calls a primitive; one of batchax by what users know it by."""
    own = _own.get(primitive)
    return primitive.name if own is None else own.called


def operations_of(eqn: Eqn) -> ClosedJaxpr | None:
    """Stages the program that an equation of batchax stands for; returns None for others."""
    own = _own.get(eqn.primitive)
    if own is None:
        return None

    def run(*operands: Value) -> Value | list[Value]:
        out = own.operations(*operands, **eqn.params)
        return out if eqn.primitive.multiple_results else [out]

    with eqn.ctx.manager:  # of the mesh that was in scope, and its axes inside `shard_map`
        mesh = jax.sharding.get_abstract_mesh()
        names = [(name, mesh.shape[name]) for name in mesh.manual_axes]
        return _compat.stage(run, [v.aval for v in eqn.invars], names)


def expanded(prim: HighOperation, avals: Sequence[Aval]) -> ClosedJaxpr:
    """Stages the program that a `call_hi_primitive` (of ``jax.experimental.hijax``) stands for."""

    def run(*operands: Value) -> list[Any]:
        return jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, operands)))

    return _compat.stage(run, avals)
