"""Operations that make, move, arrange, read or write the elements of a row.

Places follow from the row's own size. Where elements move by as much in every row, a static slice
or pad moves them. Where not, each result is gathered from its place; so is, in reverse, each
derivative, from the place that its element went to. JAX would scatter there, a hundred times slower
on a CPU. What is out of bounds follows from the row's own size; padding writes nothing and sorts
last.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from batchax import _compat
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.jaxprs.primitive_facts import highest, lowest
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.rows.index import moved
from batchax.rows.padded import Operation, Results, Row, padded_rule
from batchax.rows.places_where import places_where
from batchax.rows.sizes import (
    Dim,
    Limited,
    Shape,
    Sizes,
    found_places_p,
    has_symbols,
    is_symbolic,
    may_differ,
)
from batchax.rules.masking import is_inexact


def _along(mask: Value, shape: Sequence[int], axis: int) -> jax.Array:
    return lax.broadcast_in_dim(mask, shape, (axis,))


def steps(count: int, start: Value, stride: int, limit: Value) -> jax.Array:
    """`count` places from `start` on, `stride` apart; -1 for those outside of 0 to `limit`."""
    at = jnp.asarray(start, np.int32) + stride * jnp.arange(count, dtype=np.int32)
    return jnp.where((at >= 0) & (at < limit), at, -1)


def is_static(start: Value) -> bool:
    return not isinstance(start, Tracer)


def window(
    op: Operation, x: Value, axis: int, start: Value, of: Dim, dim: Dim, stride: int = 1
) -> jax.Array:
    """The elements of `x` along `axis` from `start` on, as many as `dim`, `stride` apart.

    Along the axis a row has the size `of`, and the window is within it unless it is empty.
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


def pad_end(x: Value, axis: int, count: int) -> jax.Array:
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
    shape: Shape,
    out_bounds: Sequence[int],
) -> jax.Array:
    """As ``lax.pad``, by amounts that may depend on the row, to an array of shape `out_bounds`.

    In a row `x` has that `shape`; its own padding holds `value`. `config` is that of ``lax.pad``.
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
    update: Value,
    starts: Sequence[Any],
    shape: Shape,
    window_shape: Shape,
    combine: Callable[..., Any],
    written: Value | None = None,
) -> jax.Array:
    """`x` with ``combine(x, update)`` in a window that begins at `starts`, within the row.

    In a row `x` and `update` have these shapes. Unless `written` nothing is; None is for yes.
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
def _slice(
    op: Operation,
    x: Row,
    *,
    start_indices: Shape,
    limit_indices: Shape,
    strides: tuple[int, ...] | None,
) -> Results:
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
def _rev(op: Operation, x: Row, *, dimensions: tuple[int, ...]) -> Row:
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
def _concatenate(op: Operation, *rows: Row, dimension: int) -> Row:
    fill = None if is_symbolic(op.out_shape[dimension]) else _fill_of_all(rows)
    return op.result(join(op, rows, dimension), fill)


def _fill_of_all(rows: Sequence[Row]) -> Value:
    fill = rows[0].fill
    return fill if all(row.fill is not None and row.fill == fill for row in rows) else None


def join(op: Operation, rows: Sequence[Row], axis: int) -> jax.Array:
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
def _tile(op: Operation, x: Row, *, reps: Shape) -> Value:
    value = jnp.asarray(x.value)
    for axis, (count, dim) in enumerate(zip(reps, x.shape, strict=True)):
        bound = op.sizes.bound(op.out_shape[axis])
        if op.sizes.is_exact(dim):
            only = [op.sizes.bound(count) if i == axis else 1 for i in range(value.ndim)]
            value = lax.tile(value, only)
        elif is_symbolic(count):
            size = jnp.maximum(op.sizes.size(dim), 1)
            value = jnp.take(value, jnp.arange(bound, dtype=np.int32) % size, axis, mode="clip")
        elif count != 1:
            shape = [*op.out_shape[:axis], *x.shape[axis:]]
            value = join(op, [Row(value, tuple(shape))] * count, axis)
    return op.cut(value, op.out_shape)


@padded_rule("split")
def _split(op: Operation, x: Row, *, sizes: Shape, axis: int) -> list[Any]:
    outs, start = [], 0
    for i, dim in enumerate(sizes):
        own = x.shape[axis]
        out = window(op, jnp.asarray(x.value), axis, op.sizes.value(start), own, dim)
        outs.append(op.cut(out, op.eqn.outvars[i].aval.shape))
        start = start + dim
    return outs


@padded_rule("pad")
def _pad(
    op: Operation, x: Row, value: Row, *, padding_config: Sequence[tuple[Dim, Dim, int]]
) -> Value:
    fill = value.value
    array = op.filled(x, fill) if value.known else op.masked(x, fill)
    bounds = op.sizes.bounds_of(op.out_shape)
    out = padded(op, jnp.asarray(array), fill, padding_config, x.shape, bounds)
    return op.cut(out, op.out_shape)


@padded_rule("dim_as_value")
def _dim_as_value(op: Operation, *, dim: Dim) -> jax.Array:
    value = op.sizes.value(dim)
    aval = op.eqn.outvars[0].aval
    return lax.convert_element_type(value, aval.dtype)


@padded_rule("transpose", "squeeze")
def _rearranged(op: Operation, x: Row, **params: Any) -> Row:
    out = op.keeping_zeros([x], op.bind)
    out.fill = x.fill
    return out


@padded_rule("broadcast_in_dim")
def _broadcast_in_dim(
    op: Operation, x: Row, *, broadcast_dimensions: Sequence[int], **params: Any
) -> Row:
    at = dict(zip(broadcast_dimensions, x.shape, strict=True))
    whole = op.sizes.padded_axes(op.out_shape)
    repeated = [axis for axis in whole if at.get(axis) != op.out_shape[axis]]
    if not repeated:
        return op.keeping_zeros([x], op.bind)
    out = op.bind(x.value)
    return op.result(out if x.known else op.cut(out, op.out_shape, repeated))


@padded_rule("stack")
def _stack(op: Operation, *rows: Row, **params: Any) -> Row:
    return op.result(op.bind(*(row.value for row in rows)), _fill_of_all(rows))


@padded_rule("unstack")
def _unstack(op: Operation, x: Row, *, axis: int, **params: Any) -> list[Row]:
    if is_symbolic(x.shape[axis]):
        raise op.reject(
            f"it takes apart an axis of size {x.shape[axis]}, which differs from row to row. "
            "Index the axis instead."
        )
    return [op.result(out, x.fill, i) for i, out in enumerate(op.bind(x.value))]


@padded_rule("reshape")
def _reshape(
    op: Operation, x: Row, *, new_sizes: Shape, dimensions: Sequence[int] | None, **params: Any
) -> Results:
    if may_differ(math.prod(x.shape), math.prod(new_sizes)):
        raise op.reject(
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


def _leads(op: Operation, dims: Shape) -> bool:
    """Whether elements of a row stay together: nothing but the first dimension is padded."""
    inner = [dim for dim in dims if not (isinstance(dim, int) and dim == 1)][1:]
    return all(map(op.sizes.is_exact, inner))


def _places(op: Operation, news: Sequence[Any], olds: Sequence[Any]) -> jax.Array:
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


FILL_OR_DROP = lax.GatherScatterMode.FILL_OR_DROP
CLIP = lax.GatherScatterMode.CLIP
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


@padded_rule("gather")
def _gather(
    op: Operation,
    x: Row,
    indices: Row,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Shape,
    mode: lax.GatherScatterMode,
    **params: Any,
) -> Results:
    if mode == IN_BOUNDS and np.ndim(indices.value) == 1:
        # `x[i]`: of a row alone JAX stages a dynamic slice, which keeps inside in reverse, too.
        mode = CLIP
    indexed = dimension_numbers.start_index_map
    sizes = [slice_sizes[axis] for axis in indexed]
    rooms = [x.shape[axis] - size for axis, size in zip(indexed, sizes, strict=True)]
    # A window that is shorter in some rows than in others may begin where the longest cannot.
    if not has_symbols([*indices.shape, *(x.shape[axis] for axis in indexed), *sizes]):
        out = op.bind(x.value, indices.value, mode=mode)
        pairs = zip(x.shape, slice_sizes, strict=True)
        if any((is_symbolic(own) or is_symbolic(dim)) and own != dim for own, dim in pairs):
            return op.cut(out, op.out_shape)
        # What is read does not depend on the place in the row: the padding of the result is that of
        # the operand.
        return op.result(out, None if mode == FILL_OR_DROP else x.fill)
    at = as_index(indices.value)
    if np.ndim(at) == 1 and mode != FILL_OR_DROP:
        starts = [indices.value[k] for k in range(len(indexed))]
        out = _window(op, x, dict(zip(indexed, starts, strict=True)), slice_sizes)
        removed = dimension_numbers.collapsed_slice_dims
        out = lax.squeeze(out, removed) if removed else out
        exact = all(_fits(op, *window) for window in zip(starts, rooms, sizes, strict=True))
    else:
        array = jnp.asarray(x.value)
        for axis, room, size in zip(indexed, rooms, sizes, strict=True):
            # Where rows are short, the bound of a window may exceed that of the rows.
            reach = op.sizes.bound(room) + op.sizes.bound(size)
            array = pad_end(array, axis, reach - array.shape[axis])
        exact = not has_symbols(rooms)
        places = at if exact else _moved_inside(op, at, rooms, mode)
        # Indices that were unique or sorted may not be so once they are moved inside, and those in
        # the padding may be anything.
        out = op.bind(array, places, unique_indices=False, indices_are_sorted=False)
        dims = [
            x.shape[k] for k in indexed if slice_sizes[k] == 1 and is_found(op.sizes, x.shape[k])
        ]
        for dim in dims:  # of no elements nothing can be read, whatever the index
            there = jnp.asarray(op.sizes.size(dim)) > 0
            none = jnp.zeros(1, out.dtype).at[1].get(mode="fill")
            out = jnp.where(there, out, none)
    if mode == IN_BOUNDS and not exact:
        batch = [axis for axis in range(out.ndim) if axis not in dimension_numbers.offset_dims]
        out = dropped_in_reverse(out, in_bounds(at, last_places(op, rooms, at))[..., 0], batch)
    return op.cut(out, op.out_shape)


def is_found(sizes: Sizes, dim: Dim) -> bool:
    return is_symbolic(dim) and not sizes.found_of.keys().isdisjoint(_compat.symbols(dim))


def _moved_inside(
    op: Operation, at: Value, rooms: Sequence[Any], mode: lax.GatherScatterMode
) -> jax.Array:
    limits = last_places(op, rooms, at)
    if mode == FILL_OR_DROP:
        return jnp.where(in_bounds(at, limits), at, -1)
    return jnp.clip(at, 0, jnp.maximum(limits, 0))


def dropped_in_reverse(x: Value, kept: Value, axes: Sequence[int]) -> jax.Array:
    """`x`, through which derivatives flow in reverse only where `kept`, which has its `axes`.

    For indices with mode "promise_in_bounds", JAX reads the nearest element, but adds nothing to it
    in reverse.
    """
    if not is_inexact(x):
        return x

    def transpose(masks: Sequence[Any], cotangents: Values) -> list[Any]:
        (cotangent,) = cotangents
        mask = lax.broadcast_in_dim(masks[0], cotangent.shape, tuple(axes))
        return [lax.select(mask, cotangent, lax.full_like(cotangent, 0))]

    return linear_with_transpose(lambda masks, xs: list(xs), transpose, [kept], [x])[0]


@padded_rule("dynamic_slice")
def _dynamic_slice(op: Operation, x: Row, *starts: Row, slice_sizes: Shape) -> Value:
    places = {axis: row.value for axis, row in enumerate(starts)}
    return op.cut(_window(op, x, places, slice_sizes), op.out_shape)


def _window(op: Operation, x: Row, starts: dict[int, Any], sizes: Sequence[Any]) -> jax.Array:
    """The part of `x` that begins at `starts`, by axis, moved to lie within the row."""
    out = jnp.asarray(x.value)
    for axis, (own, size) in enumerate(zip(x.shape, sizes, strict=True)):
        if own != size:
            start = within(op, starts.get(axis, 0), own - size, size)
            out = window(op, out, axis, start, own, size)
    return out


def _fits(op: Operation, start: Value, room: Dim, size: Dim) -> bool:
    """Whether it is known that a window that begins at `start` is within every row, or empty."""
    if not isinstance(start, (int, np.ndarray, np.integer)):
        return False
    values = op.sizes.in_every_row(room, size)
    return values is not None and bool(
        np.all((start >= 0) & (start <= values[0]) | (values[1] <= 0))
    )


def within(op: Operation, start: Value, room: Dim, size: Dim) -> Value:
    """Where a window of a size begins that is to begin at `start`, moved to lie in the row."""
    if _fits(op, start, room, size):
        return int(start)
    at = as_index(start)
    return jnp.clip(at, 0, jnp.asarray(jnp.maximum(op.sizes.value(room), 0), at.dtype))


def last_places(op: Operation, rooms: Sequence[Any], at: Value) -> jax.Array:
    """The greatest index in each indexed dimension, where windows may be moved by `rooms`.

    Of the type of the indices `at`, and with as many dimensions.
    """
    limits = jnp.stack([jnp.asarray(op.sizes.value(room), at.dtype) for room in rooms])
    return lax.expand_dims(limits, range(at.ndim - 1))


def in_bounds(at: Value, limits: Value) -> jax.Array:
    return jnp.all((at >= 0) & (at <= limits), -1, keepdims=True)


def as_index(at: Value) -> jax.Array:
    """Indices in a type that has -1 and the size of any row."""
    at = jnp.asarray(at)
    if at.dtype in (np.int32, np.int64):
        return at
    if jnp.issubdtype(at.dtype, jnp.unsignedinteger) and at.dtype.itemsize >= 4:
        at = jnp.minimum(at, np.iinfo(np.int32).max)
    return at.astype(np.int32)


def _replace(old: Value, new: Value) -> Value:
    return new


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "scatter": _replace,
    "scatter-add": lax.add,
    "scatter-sub": lax.sub,
    "scatter-mul": lax.mul,
    "scatter-min": lax.min,
    "scatter-max": lax.max,
}
"""What each kind writes, of what is there and the update."""


@padded_rule(*WRITES)
def _scatter(
    op: Operation,
    x: Row,
    indices: Row,
    updates: Row,
    *,
    dimension_numbers: lax.ScatterDimensionNumbers,
    mode: lax.GatherScatterMode,
    update_jaxpr: ClosedJaxpr | None,
    **params: Any,
) -> jax.Array:
    name, dnums = op.eqn.primitive.name, dimension_numbers
    indexed = dnums.scatter_dims_to_operand_dims
    removed = (*dnums.inserted_window_dims, *dnums.operand_batching_dims)
    shown = [axis for axis in range(len(x.shape)) if axis not in removed]
    sizes: list[Any] = [1] * len(x.shape)
    for axis, dim in zip(shown, dnums.update_window_dims, strict=True):
        sizes[axis] = updates.shape[dim]
    rooms = [x.shape[axis] - sizes[axis] for axis in indexed]
    partial = [
        axis
        for axis in shown
        if x.shape[axis] != sizes[axis] and has_symbols([x.shape[axis], sizes[axis]])
    ]
    if not partial and not has_symbols([*indices.shape, *(x.shape[axis] for axis in indexed)]):
        return op.bind(x.value, indices.value, updates.value)
    applies = name == "scatter" and update_jaxpr is not None
    at = as_index(indices.value)
    if np.ndim(at) == 1 and not applies:  # else a function of what is there
        update = lax.expand_dims(jnp.asarray(updates.value), dnums.inserted_window_dims)
        starts: list[Any] = [0] * len(x.shape)
        for k, axis in enumerate(indexed):
            starts[axis] = within(op, indices.value[k], rooms[k], sizes[axis])
        written = None
        if mode != CLIP and not all(isinstance(start, int) for start in starts):
            written = in_bounds(at, last_places(op, rooms, at))[0]
        array = jnp.asarray(x.value)
        return overwritten(op, array, update, starts, x.shape, sizes, WRITES[name], written)
    if partial:
        raise op.reject(
            "it writes parts of several lines of an array, and how large they are differs from row "
            "to row. Write one part, or whole lines."
        )
    at, written = _targets(op, at, indices.shape, rooms, mode)
    # Each to another place out of bounds: the user may have declared that indices are unique.
    beyond = op.sizes.bound(x.shape[indexed[0]])
    nowhere = beyond + lax.iota(np.int32, math.prod(written.shape)).reshape(written.shape)
    at = jnp.where(written, at, nowhere.astype(at.dtype))
    return op.bind(x.value, at, updates.value, mode=FILL_OR_DROP, indices_are_sorted=False)


def _targets(
    op: Operation, at: Value, shape: Shape, rooms: Shape, mode: lax.GatherScatterMode
) -> tuple[Any, Any]:
    """Where windows begin; and which are written, as one more dimension of size one."""
    limits = last_places(op, rooms, at)
    if mode == CLIP:
        at = jnp.clip(at, 0, limits)
    written = in_bounds(at, limits)
    belongs = op.sizes.mask(shape, op.sizes.padded_axes(shape))
    return at, written if belongs is None else written & belongs[..., :1]


@padded_rule("dynamic_update_slice")
def _dynamic_update_slice(op: Operation, x: Row, update: Row, *starts: Row) -> jax.Array:
    places = [
        within(op, row.value, own - size, size)
        for row, own, size in zip(starts, x.shape, update.shape, strict=True)
    ]
    array = jnp.asarray(x.value)
    return overwritten(op, array, update.value, places, x.shape, update.shape, _replace)


@padded_rule("sort")
def _sort(op: Operation, *rows: Row, dimension: int, num_keys: int, **params: Any) -> list[Any]:
    if op.sizes.is_exact(rows[0].shape[dimension]):
        return op.bind(*(row.value for row in rows))
    last = [greatest_of(row.value.dtype) for row in rows[:num_keys]]
    keys = [op.filled(row, value, (dimension,)) for row, value in zip(rows, last, strict=False)]
    # Stably: what is equal in the row, NaN for one, comes before the padding.
    return op.bind(*keys, *(row.value for row in rows[num_keys:]), is_stable=True)


def greatest_of(dtype: np.dtype[Any]) -> Value:
    """What no value of `dtype` sorts after."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(jnp.nan, jnp.nan)
    return jnp.nan if jnp.issubdtype(dtype, jnp.floating) else highest(dtype)


@padded_rule("top_k")
def _top_k(op: Operation, x: Row, *, axis: int, k: Dim, **params: Any) -> list[jax.Array]:
    if is_symbolic(k):
        raise op.reject(
            f"it takes {k} elements, which differs from row to row. Sort the row and slice the "
            "result."
        )
    if op.sizes.is_exact(x.shape[axis]):
        return op.bind(x.value)
    # Of equal elements the first is taken. `top_k` has an order of all floats, NaNs included, in
    # which a negative NaN is least.
    dtype = x.value.dtype
    least = -np.nan if jnp.issubdtype(dtype, jnp.inexact) else lowest(dtype)
    return op.bind(pad_end(op.filled(x, least, (axis,)), axis, k - x.value.shape[axis]))


@padded_rule(found_places_p.name)
def _found_places(
    op: Operation, condition: Row, *, size: Dim, limit: int | None, called: str
) -> Row:
    if str(size) in op.sizes.values and not op.sizes.again:
        raise op.reject(
            f"{called} is in a function under jax.jit that is called more than once, and JAX takes "
            "the sizes that it finds for one. Call it without jax.jit: what is in a vmap is "
            "compiled as a whole."
        )
    mask = jnp.asarray(op.filled(condition, False))
    bound = op.sizes.most_found(str(size), condition.shape[0], limit)
    places, count = op.sizes.before.get(str(size)) or places_where(mask, bound)
    if places.shape[0] != bound:
        places, _ = places_where(mask, bound)
    limited = None if limit is None else Limited(called, limit, count)
    op.sizes.find(str(size), condition.shape[0], count, limited)
    return op.result(places)
