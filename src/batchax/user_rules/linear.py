"""A linear function whose transpose is given, as a primitive.

What ``jax.custom_derivatives.linear_call`` is, but that can be batched by ``jax.vmap`` and
differentiated with respect to what it is not linear in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from batchax import _compat
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.inner import batch_inner, written_into
from batchax.kernel.own_primitive import own_primitive, tangents_of
from batchax.memo import Memo
from batchax.rules.batched_transpose import batched_transpose
from batchax.rules.custom_derivatives import in_reverse_alone

Linear = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""A function of residuals, and of values it is linear in."""


def linear_with_transpose(
    forward: Linear,
    transpose: Linear,
    residuals: Sequence[Value],
    operands: Sequence[Value],
    key: Hashable | None = None,
) -> list[Any]:
    """``forward(residuals, operands)``, whose transpose is ``transpose(residuals, cts)``.

    Functions given with equal keys do the same to operands of the same types: they are staged
    once.
    """
    residuals = list(map(_compat.unconsumed, residuals))  # derivatives use keys again
    residual_types = tuple(map(jax.typeof, residuals))
    linear = tuple(jax.typeof(x).to_tangent_aval() for x in operands)

    def stage(function: Linear, types: Sequence[Aval]) -> ClosedJaxpr:
        count = len(residual_types)
        run = lambda *xs: function(xs[:count], xs[count:])
        return _compat.stage(run, [*residual_types, *types])

    def both() -> tuple[ClosedJaxpr, ClosedJaxpr]:
        ahead = stage(forward, linear)
        return ahead, stage(transpose, list(ahead.out_avals))

    if key is None:
        return _bind(*both(), residuals, operands)
    ahead, back = _staged.get((key, residual_types, linear, _compat.trace_context()), both)
    return _bind(ahead, back, residuals, operands)


_staged = Memo("linear functions, and their transposes", most=1024)


def _bind(
    ahead: ClosedJaxpr,
    back: ClosedJaxpr,
    residuals: Sequence[Value],
    operands: Sequence[Value],
) -> list[Any]:
    """The call, with the constants of both programs as residuals of either."""
    (ahead, back), consts = _compat.hoist_constants(ahead, back)
    return linear_p.bind(
        *consts,
        *residuals,
        *operands,
        forward=ahead,
        transpose=back,
        count=len(consts) + len(residuals),
    )


def _run(*operands: Any, forward: Any, **_: Any) -> list[Any]:
    return written_into(forward, _of_one_mesh(operands))


def _of_one_mesh(operands: Sequence[Value]) -> Sequence[Any]:
    """Operands whose types all tell of the mesh of which some do.

    Zeros that JAX begins a cotangent with, and arrays from before a mesh was set, tell of none, and
    JAX writes a part into an array only where both tell of the same.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in operands]
    mesh = next((m for m in meshes if AxisType.Explicit in m.axis_types), None)
    if mesh is None:
        return operands
    return [
        jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)))
        if tells_of.empty
        else x
        for x, tells_of in zip(operands, meshes, strict=True)
    ]


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[list[Any], list[Any]]:
    count = params["count"]
    outs = linear_p.bind(*primals, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if all(i >= count for i in moving):
        linear = map(ad.instantiate_zeros, tangents[count:])
        return outs, linear_p.bind(*primals[:count], *linear, **params)
    # What it is not linear in has the derivative that its operations have.
    given = [tangents[i] for i in moving]

    def function(*xs: Any) -> list[Any]:
        return _run(*xs, **params)

    return outs, tangents_of(function, primals, moving, given, range(len(outs)))[1]


def _transpose(cotangents: Any, *operands: Any, forward: Any, transpose: Any, count: int) -> Any:
    others = operands[:count]
    given = map(ad.instantiate_zeros, cotangents)
    if in_reverse_alone.in_program(forward):
        # To batch what it becomes would be to batch `forward` as well, which nobody can run.
        outs = _run(*others, *given, forward=transpose)
    else:
        outs = linear_p.bind(*others, *given, forward=transpose, transpose=forward, count=count)
    return [
        out if ad.is_undefined_primal(x) else None
        for x, out in zip(operands, [*others, *outs], strict=True)
    ]


def _batched(
    axis: Axis, args: Any, axes: Any, /, *, forward: Any, transpose: Any, count: int
) -> tuple[list[Any], Sequence[Position]]:
    ahead, out_axes = batch_inner(axis, forward, axes)

    def back(*xs: Any) -> list[Any]:
        positions = [*axes[:count], *out_axes]
        cotangents = range(count, len(xs))
        return batched_transpose(axis, transpose.jaxpr, xs, positions, cotangents, axes[count:])

    back_program = _compat.stage(back, [*map(jax.typeof, args[:count]), *ahead.out_avals])
    return _bind(ahead, back_program, args[:count], args[count:]), out_axes


linear_p = own_primitive(
    "linear_with_transpose",
    called="linear function with a transpose",
    operations=_run,
    types=lambda *avals, forward, transpose, count: list(forward.out_avals),
    programs=("forward",),
    facts="",
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
)
