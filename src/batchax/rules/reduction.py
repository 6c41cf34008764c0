"""Primitives that combine the elements along some dimensions: reductions and running ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.words import Jaxpr, Value
from batchax.kernel.axis import Axis, axis_to_front, match_axis, shift_dims
from batchax.kernel.interpreter import interpret
from batchax.kernel.registry import matched, reducing, register_rule

REDUCTIONS = enter(
    """
    linear moderate: reduce_sum
    moderate: argmax argmin reduce_max reduce_min
    : reduce_and reduce_or reduce_prod reduce_xor
    """
)
CUMULATIVE = enter(
    """
    linear: cumsum
    : cumlogsumexp cummax cummin cumprod
    """
)
enter("additive: reduce_sum")
enter("combines: reduce")


def _cumulative(primitive: _compat.Primitive) -> None:
    @register_rule(primitive)
    def rule(
        batch: Axis, args: Any, positions: Any, /, *, axis: int, reverse: bool
    ) -> tuple[Any, Any]:
        (x,), (position,) = args, positions
        (dim,) = shift_dims((axis,), position)
        return primitive.bind(x, axis=dim, reverse=reverse), position


for _names, _make in ((REDUCTIONS, reducing), (CUMULATIVE, _cumulative)):
    for _name in _names:
        _primitive = _compat.find_primitive(_name)
        assert _primitive is not None
        _make(_primitive)


@register_rule(lax.reduce_p)
def _reduce(
    axis: Axis, args: Any, axes: Any, /, *, computation: Any, jaxpr: Jaxpr, dimensions: Any
) -> tuple[Any, Any]:
    n = len(args) // 2
    if any(a is not None for a in axes[n:]):
        return _reduce_from_batched_start(axis, args, axes, jaxpr, dimensions)
    operands, position = matched(axis, args[:n], axes[:n])
    dims = shift_dims(dimensions, position)
    outs = lax.reduce_p.bind(
        *operands, *args[n:], computation=computation, jaxpr=jaxpr, dimensions=dims
    )
    return outs, [position - sum(d < position for d in dims)] * n


def _reduce_from_batched_start(
    axis: Axis, args: Sequence[Value], axes: Any, jaxpr: Jaxpr, dimensions: Sequence[int]
) -> tuple[list[Any], list[int]]:
    """A reduction whose initial values differ from lane to lane.

    The primitive has one initial value for the whole array, so the elements are
    combined in pairs, the pairs in pairs and so on, all lanes and all results
    at once, and each lane's initial value last.
    """
    n = len(args) // 2
    operands = [axis_to_front(axis, x, a) for x, a in zip(args[:n], axes[:n], strict=True)]
    reduced = shift_dims(dimensions, 0)
    kept = [d for d in range(operands[0].ndim) if d not in reduced]
    shape = [operands[0].shape[d] for d in kept]
    length = math.prod(operands[0].shape[d] for d in reduced)
    width = math.prod(shape)

    # Flat, an element of every result after another: any part is one slice.
    values = [lax.reshape(lax.transpose(x, [*reduced, *kept]), (length * width,)) for x in operands]
    while length > 1:
        half = length // 2
        pairs = [lax.slice_in_dim(x, i * half * width, (i + 1) * half * width)
                 for i in (0, 1) for x in values]  # fmt: skip
        combined = _combine(jaxpr, pairs)
        if length % 2:
            odd = [lax.slice_in_dim(x, 2 * half * width, None) for x in values]
            combined = [lax.concatenate(xs, 0) for xs in zip(combined, odd, strict=True)]
        values, length = combined, length - half
    starts = [
        lax.reshape(lax.broadcast_in_dim(match_axis(axis, x, a, 0), shape, (0,)), (width,))
        for x, a in zip(args[n:], axes[n:], strict=True)
    ]
    values = _combine(jaxpr, [*starts, *values]) if length else starts
    return [lax.reshape(x, shape) for x in values], [0] * n


def _combine(computation: Any, values: list[Value]) -> list[Any]:
    """The computation of a reduction, on each element of flat arrays."""
    elements = Axis(values[0].size)
    outs, axes = interpret(
        elements, computation.jaxpr, computation.consts, values, [0] * len(values)
    )
    return [match_axis(elements, x, a, 0) for x, a in zip(outs, axes, strict=True)]
