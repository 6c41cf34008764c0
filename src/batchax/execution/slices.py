"""Scanning over slices of arrays along any of their axes, without moving the axis.

``lax.scan`` slices its operands along axis 0 only, and transposing an array to have
another axis there copies it. Here the body cuts its slice from the array itself. Left
at that, reverse mode would add up one full array for each step, so derivatives take
another *way*: through a transposed copy that is scanned. Nobody looks at its values, so
the compiler drops it unless something is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.own_primitive import own_primitive
from batchax.rules.masking import is_inexact


def scan_slices(
    step: Callable[[Any, Any, list[Any]], Any],
    carry: Any,
    xs: Sequence[Value],
    axes: Sequence[int | None],
    width: int | None,
    count: int,
    *,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> Any:
    """Runs `step` for each of `count` slices of `width` entries.

    Args:
      step: ``(index, carry, parts) -> (carry, ys)``, where `parts` are the slices.
      carry: what it starts from.
      xs: the arrays.
      axes: along which axis each is sliced; None for "the same at each step".
      width: how many entries a slice has; None for one, without the axis.
      count: how many slices are taken, from the first entry on.
      reverse: whether the last slice comes first.
      unroll: as for ``lax.scan``.

    Returns:
      The last carry, and the `ys` stacked along axis 0.
    """
    operands = [_operand(x, a, width, count) for x, a in zip(xs, axes, strict=True)]

    def body(carry: Any, scanned: Any) -> Any:
        index, ways = scanned
        parts = [part(index, way) for (_, part), way in zip(operands, ways, strict=True)]
        return step(index, carry, parts)

    scanned = lax.iota(np.int32, count), [way for way, _ in operands]
    return lax.scan(body, carry, scanned, length=count, reverse=reverse, unroll=unroll)


def _operand(
    x: Value, axis: int | None, width: int | None, count: int
) -> tuple[Any, Callable[[Any, Any], Any]]:
    """What ``lax.scan`` slices for an operand, if anything, and how a step gets its part.

    The second is a function of the index and of the slice that ``lax.scan`` took, the way of
    derivatives.
    """
    if axis is None:
        return None, lambda index, way: x

    if count == 0 or (axis == 0 and x.shape[0] == count * (width or 1)):
        return _slices_first(x, axis, width, count), lambda index, way: way
    if not is_inexact(x):  # no derivative, so no way for one
        return None, lambda index, way: _cut(x, index, axis, width)
    fixed = lax.stop_gradient(x)
    return _slices_first(x, axis, width, count), lambda index, way: with_derivative_of(
        _cut(fixed, index, axis, width), way
    )


def _cut(x: Value, index: Any, axis: int, width: int | None) -> Any:
    start = index if width is None else index * np.int32(width)
    part = lax.dynamic_slice_in_dim(x, start, width or 1, axis, allow_negative_indices=False)
    return lax.squeeze(part, [axis]) if width is None else part


def _slices_first(x: Value, axis: int, width: int | None, count: int) -> Any:
    """The slices of `x`, stacked."""
    if width is not None:
        x = lax.slice_in_dim(x, 0, width * count, axis=axis)
        x = x.reshape(*x.shape[:axis], count, width, *x.shape[axis + 1 :])
    # Left alone with axis 0: it may be a reference, whose axes cannot be moved.
    return x if axis == 0 else jnp.moveaxis(x, axis, 0)


def with_derivative_of(value: Value, other: Any) -> Any:
    """`value`, which equals `other`, with the derivatives of `other`, to all orders.

    A ``jax.custom_jvp`` function would lose those of second order: JAX drops its rule
    once it has been used.
    """
    return follow_p.bind(value, other)


def _jvp(primals: Sequence[Value], tangents: Sequence[Value]) -> tuple[Any, Any]:
    return follow_p.bind(*primals), tangents[1]


def _transpose(cotangent: Any, value: Value, other: Any) -> list[Any]:
    # In a derivative only `other` is linear, as `value` has no tangent. Both are where a program
    # is transposed that was not differentiated before (`jax.linear_transpose`).
    return [ad.Zero(value.aval) if ad.is_undefined_primal(value) else None, cotangent]


def _batched(axis: Axis, args: Any, axes: Any, /) -> tuple[Any, Position]:
    position = next(a for a in axes if a is not None)
    return follow_p.bind(
        *(match_axis(axis, x, a, position) for x, a in zip(args, axes, strict=True))
    ), position


follow_p = own_primitive(
    "follow",
    called="value with another's derivative",
    operations=lambda value, other: value,
    types=lambda value, other: value,
    programs=(),
    facts="",
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
    several=False,
)
