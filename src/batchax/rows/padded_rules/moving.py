"""Elements moved along an axis to places that depend on sizes.

Where elements move by as much in every row, a static slice or pad does it. Where not, each
result is gathered from its place; so is, in reverse, each derivative, from the place that its
element went to. JAX would scatter there, a hundred times slower on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from batchax.jaxprs.words import Value
from batchax.rows.index import take_clipped
from batchax.rows.padded import Operation
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose


def moved(x: Value, axis: int, source: Any, target: Any) -> Any:
    """An array that holds ``x[source[i]]`` at place `i` of `axis`.

    Args:
      x: an array.
      axis: the axis along which elements move.
      source: for each place of the result, where its element is; negative for zero there.
      target: for each place of `x`, where its element goes; negative for nowhere. No two go to
        one place.
    """
    if not is_inexact(x):
        return _pick(x, axis, source)

    def forward(places: Sequence[Any], operands: Sequence[Value]) -> list[Any]:
        return [_pick(operands[0], axis, places[0])]

    def transpose(places: Sequence[Any], cotangents: Sequence[Value]) -> list[Any]:
        return [_pick(cotangents[0], axis, places[1])]

    return linear_with_transpose(forward, transpose, [source, target], [x])[0]


def _pick(x: Value, axis: int, places: Any) -> Any:
    shape = (*x.shape[:axis], places.shape[0], *x.shape[axis + 1 :])
    if x.shape[axis] == 0:
        return jnp.zeros(shape, x.dtype)
    taken = take_clipped(x, places, axis)
    return lax.select(_along(places >= 0, shape, axis), taken, lax.full_like(taken, 0))


def _along(mask: Any, shape: Sequence[int], axis: int) -> Any:
    return lax.broadcast_in_dim(mask, shape, (axis,))


def steps(count: int, start: Any, stride: int, limit: Any) -> Any:
    """`count` places from `start` on, `stride` apart; -1 for those outside of 0 to `limit`."""
    at = jnp.asarray(start, np.int32) + stride * jnp.arange(count, dtype=np.int32)
    return jnp.where((at >= 0) & (at < limit), at, -1)


def is_static(start: Any) -> bool:
    """Whether a place is known, and the same in every row."""
    return not isinstance(start, Tracer)


def window(
    op: Operation, x: Value, axis: int, start: Any, of: Any, dim: Any, stride: int = 1
) -> Any:
    """The elements of `x` along `axis` from `start` on.

    Args:
      op: the operation at hand.
      x: an array.
      axis: the axis, along which each row has the size `of`.
      start: where the window begins, within the row unless the window is empty.
      of: the size of the row.
      dim: the size of the window.
      stride: how far apart its elements are.
    """
    count, bound = op.sizes.bound(dim), x.shape[axis]
    if is_static(start):
        start = max(int(start), 0)
        end = start + (count - 1) * stride + 1 if count else start
        if end > bound:  # where no row of these lengths has such a window
            x = pad_end(x, axis, end - bound)
        return lax.slice_in_dim(x, start, end, stride, axis)
    start, size = jnp.asarray(start, np.int32), op.sizes.size(dim)
    source = steps(count, start, stride, op.sizes.size(of))
    source = jnp.where(jnp.arange(count, dtype=np.int32) < size, source, -1)
    back = jnp.arange(bound, dtype=np.int32) - start
    target = jnp.where((back >= 0) & (back % stride == 0), back // stride, -1)
    return moved(x, axis, source, jnp.where(target < size, target, -1))


def pad_end(x: Value, axis: int, count: int) -> Any:
    """`x` with `count` more elements along `axis`, which hold anything."""
    if count <= 0:
        return x
    config = [(0, 0, 0)] * x.ndim
    config[axis] = (0, count, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def padded(
    op: Operation,
    x: Value,
    value: Value,
    config: Sequence[tuple[Any, Any, int]],
    shape: Sequence[Any],
    out_bounds: Sequence[int],
) -> Any:
    """As ``lax.pad``, by amounts that may depend on the row.

    Args:
      op: the operation at hand.
      x: an array whose own padding holds `value`.
      value: a scalar.
      config: for each axis how much is added before, after and between elements.
      shape: that of `x` in a row.
      out_bounds: the shape of the result.
    """
    value = jnp.asarray(value, x.dtype)
    static, late = [], []
    for axis, ((low, high, inner), bound) in enumerate(zip(config, out_bounds, strict=True)):
        length = x.shape[axis] + max(x.shape[axis] - 1, 0) * inner
        low, high = op.sizes.value(low), op.sizes.value(high)
        if is_static(low):
            static.append((int(low), int(bound - length - low), int(inner)))
        else:
            static.append((0, 0, int(inner)))
            late.append((axis, low, length, bound))
    out = lax.pad(x, value, static) if any(map(any, static)) else x
    for axis, low, length, bound in late:
        source = steps(bound, -low, 1, length)
        placed = moved(out, axis, source, steps(length, low, 1, bound))
        inside = _along(source >= 0, placed.shape, axis)
        out = lax.select(inside, placed, lax.broadcast(value, placed.shape))
    return out


def overwritten(
    op: Operation,
    x: Value,
    update: Any,
    starts: Sequence[Any],
    shape: Sequence[Any],
    window_shape: Sequence[Any],
    combine: Any,
    written: Any = None,
) -> Any:
    """`x` with ``combine(x, update)`` in a window.

    Args:
      op: the operation at hand.
      x: an array.
      update: an array of as many dimensions, one element for each of the window.
      starts: where the window begins along each axis; it lies within the row.
      shape: that of `x` in a row.
      window_shape: that of `update` in a row.
      combine: what is written where, of two arrays.
      written: whether anything is; None for yes.
    """
    mask = None if written is None else lax.broadcast(written, x.shape)
    for axis, start in enumerate(starts):
        own, size, bound = shape[axis], window_shape[axis], x.shape[axis]
        if own == size:  # padding goes to padding
            continue
        count = update.shape[axis]
        if is_static(start):
            start = int(start)
            config = [(0, 0, 0)] * x.ndim
            config[axis] = (start, bound - start - count, 0)
            update = lax.pad(update, jnp.zeros((), update.dtype), config)
        else:
            start = jnp.asarray(start, np.int32)
            source = steps(bound, -start, 1, op.sizes.size(size))
            update = moved(update, axis, source, steps(count, start, 1, bound))
        at = jnp.arange(bound, dtype=np.int32)
        inside = (at >= start) & (at < start + op.sizes.size(size))
        inside = _along(inside, x.shape, axis)
        mask = inside if mask is None else lax.bitwise_and(mask, inside)
    new = combine(x, update)
    return new if mask is None else lax.select(mask, new, x)
