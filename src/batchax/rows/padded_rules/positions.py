"""Operations that move, arrange or make the elements of a row.

Places follow from the row's own size. Where elements move by as much in every row, a static slice
or pad moves them. Where not, each result is gathered from its place; so is, in reverse, each
derivative, from the place that its element went to. JAX would scatter there, a hundred times slower
on a CPU.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from batchax.jaxprs.words import Value
from batchax.rows.index import moved
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.sizes import is_symbolic, may_differ


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


@padded_rule("slice")
def _slice(op: Operation, x: Row, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    out = x.value
    whole = True
    for axis, (own, dim) in enumerate(zip(x.shape, op.out_shape, strict=True)):
        start, stride = start_indices[axis], 1 if strides is None else strides[axis]
        if own == dim:  # all of it: a shorter slice has another size
            continue
        out = window(op, jnp.asarray(out), axis, op.sizes.value(start), own, dim, stride)
        whole = whole and not is_symbolic(own) and not is_symbolic(dim)
    return op.result(out, x.fill) if whole else op.cut(out, op.out_shape)


@padded_rule("rev")
def _rev(op: Operation, x: Row, *, dimensions: Any) -> Any:
    ragged = [axis for axis in dimensions if not op.sizes.is_exact(x.shape[axis])]
    out = jnp.asarray(x.value)
    if len(ragged) < len(dimensions):
        out = lax.rev(out, tuple(axis for axis in dimensions if axis not in ragged))
    for axis in ragged:
        size = op.sizes.size(x.shape[axis])
        places = steps(out.shape[axis], size - 1, -1, size)
        out = moved(out, axis, places, places)
    return op.result(out, x.fill if not ragged else None)


@padded_rule("concatenate")
def _concatenate(op: Operation, *rows: Row, dimension: int) -> Any:
    joined = join(op, rows, dimension)
    fill = rows[0].fill
    same = all(row.fill is not None and row.fill == fill for row in rows)
    return op.result(joined, fill if same and not is_symbolic(op.out_shape[dimension]) else None)


def join(op: Operation, rows: Sequence[Row], axis: int) -> Any:
    """Rows one after another along `axis`."""
    arrays = [jnp.asarray(row.value) for row in rows]
    buffer = lax.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0]
    dims = [row.shape[axis] for row in rows]
    bound = op.sizes.bound(op.out_shape[axis])
    if all(map(op.sizes.is_exact, dims[:-1])) and buffer.shape[axis] == bound:
        return buffer  # padding is at the end already
    counts = [x.shape[axis] for x in arrays]
    sizes = [op.sizes.size(dim) for dim in dims]
    ends = list(itertools.accumulate(sizes))
    at = jnp.arange(bound, dtype=np.int32)
    source, target = at, []
    for count, size, end in zip(counts, sizes, ends, strict=True):
        source = source + jnp.where(at >= end, count - size, 0)
        own = jnp.arange(count, dtype=np.int32)
        target.append(jnp.where(own < size, own + (end - size), -1))
    return moved(buffer, axis, jnp.where(at < ends[-1], source, -1), jnp.concatenate(target))


@padded_rule("tile")
def _tile(op: Operation, x: Row, *, reps: Any) -> Any:
    value = jnp.asarray(x.value)
    for axis, (count, dim) in enumerate(zip(reps, x.shape, strict=True)):
        bound = op.sizes.bound(op.out_shape[axis])
        if op.sizes.is_exact(dim):
            value = lax.tile(value, _only(value, axis, op.sizes.bound(count)))
        elif is_symbolic(count):
            size = jnp.maximum(op.sizes.size(dim), 1)
            value = jnp.take(value, jnp.arange(bound, dtype=np.int32) % size, axis, mode="clip")
        elif count != 1:
            shape = [*op.out_shape[:axis], *x.shape[axis:]]
            value = join(op, [Row(value, tuple(shape))] * count, axis)
    return op.cut(value, op.out_shape)


def _only(x: Value, axis: int, count: int) -> tuple[int, ...]:
    return tuple(count if i == axis else 1 for i in range(x.ndim))


@padded_rule("split")
def _split(op: Operation, x: Row, *, sizes: Any, axis: int) -> list[Any]:
    outs, start = [], 0
    for i, dim in enumerate(sizes):
        own = x.shape[axis]
        out = window(op, jnp.asarray(x.value), axis, op.sizes.value(start), own, dim)
        outs.append(op.cut(out, op.eqn.outvars[i].aval.shape))
        start = start + dim
    return outs


@padded_rule("pad")
def _pad(op: Operation, x: Row, value: Row, *, padding_config: Any) -> Any:
    fill = value.value
    array = op.filled(x, fill) if value.known else op.masked(x, fill)
    bounds = op.sizes.bounds_of(op.out_shape)
    out = padded(op, jnp.asarray(array), fill, padding_config, x.shape, bounds)
    return op.cut(out, op.out_shape)


@padded_rule("dim_as_value")
def _dim_as_value(op: Operation, *, dim: Any) -> Any:
    value = op.sizes.value(dim)
    aval = op.eqn.outvars[0].aval
    return lax.convert_element_type(value, aval.dtype)


@padded_rule("iota")
def _iota(op: Operation, **params: Any) -> Any:
    return op.bind()


@padded_rule("transpose", "squeeze")
def _rearranged(op: Operation, x: Row, **params: Any) -> Row:
    return op.result(op.bind(x.value), x.fill)


@padded_rule("broadcast_in_dim")
def _broadcast_in_dim(op: Operation, x: Row, **params: Any) -> Row:
    out = op.bind(x.value)
    return op.result(out if x.known else op.cut(out, op.out_shape))


@padded_rule("empty", "empty2")
def _empty(op: Operation, **params: Any) -> Any:
    return op.bind()


@padded_rule("stack")
def _stack(op: Operation, *rows: Row, **params: Any) -> Row:
    fill = rows[0].fill
    same = all(row.fill is not None and row.fill == fill for row in rows)
    return op.result(op.bind(*(row.value for row in rows)), fill if same else None)


@padded_rule("unstack")
def _unstack(op: Operation, x: Row, *, axis: int, **params: Any) -> list[Row]:
    if is_symbolic(x.shape[axis]):
        raise op.refuse(
            f"it takes apart an axis of size {x.shape[axis]}, which differs from row to row. "
            "Index the axis instead."
        )
    return [op.result(out, x.fill, i) for i, out in enumerate(op.bind(x.value))]


@padded_rule("reshape")
def _reshape(op: Operation, x: Row, *, new_sizes: Any, dimensions: Any, **params: Any) -> Any:
    if may_differ(math.prod(x.shape), math.prod(new_sizes)):
        raise op.refuse(
            f"rows of shape {tuple(x.shape)} are reshaped to {tuple(new_sizes)}, which "
            "for some of them is another number of elements. Pad them first, with jnp.pad, or pass "
            "-1 for the size."
        )
    if dimensions is not None:
        order = tuple(dimensions)
        x = Row(lax.transpose(x.value, order), tuple(x.shape[i] for i in order), x.fill)
    bounds = op.sizes.bounds_of(new_sizes)
    groups = _groups(x.shape, new_sizes)
    moving = [not (_leads(op, olds) and _leads(op, news)) for olds, news in groups]
    total = [math.prod(op.sizes.bounds_of(olds)) for olds, _ in groups]
    new_total = [math.prod(op.sizes.bounds_of(news)) for _, news in groups]
    if not any(moving) and total == new_total:
        return op.result(lax.reshape(x.value, bounds), x.fill)
    out = lax.reshape(x.value, total)
    for axis, (olds, news) in enumerate(groups):
        if moving[axis]:
            out = moved(out, axis, _places(op, news, olds), _places(op, olds, news))
        else:
            out = pad_end(out, axis, new_total[axis] - total[axis])
            out = lax.slice_in_dim(out, 0, new_total[axis], axis=axis)
    return lax.reshape(out, bounds)


def _groups(olds: Sequence[Any], news: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Dimensions that go together: the elements of the first of each pair fill the second."""
    groups: list[tuple[list[Any], list[Any]]] = []
    products = list(itertools.accumulate(news, operator.mul))
    start, done, product = 0, 0, 1
    for i, dim in enumerate(olds):
        product = product * dim
        for j in range(done, len(news)):
            if products[j] == product:
                groups.append((list(olds[start : i + 1]), list(news[done : j + 1])))
                start, done = i + 1, j + 1
                break
    if start < len(olds) or done < len(news):  # of size one, or a product that was not found
        if not groups:
            groups.append(([], []))
        groups[-1][0].extend(olds[start:])
        groups[-1][1].extend(news[done:])
    return groups


def _leads(op: Operation, dims: Sequence[Any]) -> bool:
    """Whether elements of a row stay together: nothing but the first dimension is padded."""
    inner = [dim for dim in dims if not (isinstance(dim, int) and dim == 1)][1:]
    return all(map(op.sizes.is_exact, inner))


def _places(op: Operation, news: Sequence[Any], olds: Sequence[Any]) -> Any:
    """For each element of `news`, flattened, its place in `olds`; -1 for what is padding."""
    bounds = op.sizes.bounds_of(news)
    at = [c.ravel().astype(np.int32) for c in np.indices(bounds)]
    linear: Any = np.zeros(math.prod(bounds), np.int32)
    inside: Any = np.ones(math.prod(bounds), bool)
    for place, dim in zip(at, news, strict=True):
        size = op.sizes.size(dim)
        linear, inside = linear * size + place, inside & (place < size)
    in_olds: Any = 0
    stride = 1
    for dim in reversed(olds):
        size = jnp.maximum(op.sizes.size(dim), 1)
        in_olds = in_olds + linear % size * stride
        linear, stride = linear // size, stride * op.sizes.bound(dim)
    return jnp.where(inside, in_olds, -1)
