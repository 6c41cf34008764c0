"""Reading and writing at indices, sorting, and the places where a condition holds.

What is out of bounds follows from the row's own size; padding writes nothing and sorts last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.neutral import highest, lowest
from batchax.jaxprs.words import Value
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.positions import overwritten, pad_end, window
from batchax.rows.sizes import (
    Limited,
    Sizes,
    found_places_p,
    has_symbols,
    is_symbolic,
    places_where,
)
from batchax.rules.masking import is_inexact
from batchax.user_rules.own_derivatives import linear_with_transpose

FILL_OR_DROP = lax.GatherScatterMode.FILL_OR_DROP
CLIP = lax.GatherScatterMode.CLIP
IN_BOUNDS = lax.GatherScatterMode.PROMISE_IN_BOUNDS


@padded_rule("gather")
def _gather(
    op: Operation,
    x: Row,
    indices: Row,
    *,
    dimension_numbers: Any,
    slice_sizes: Any,
    mode: Any,
    **params: Any,
) -> Any:
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
            # Where rows are short, a window's bound may exceed theirs.
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


def is_found(sizes: Sizes, dim: Any) -> bool:
    """Whether a size is of elements that the program found."""
    return is_symbolic(dim) and not sizes.found_of.keys().isdisjoint(_compat.symbols(dim))


def _moved_inside(op: Operation, at: Any, rooms: Sequence[Any], mode: Any) -> Any:
    limits = last_places(op, rooms, at)
    if mode == FILL_OR_DROP:
        return jnp.where(in_bounds(at, limits), at, -1)
    return jnp.clip(at, 0, jnp.maximum(limits, 0))


def dropped_in_reverse(x: Value, kept: Any, axes: Sequence[int]) -> Any:
    """`x`, through which derivatives flow in reverse only where `kept`, which has its `axes`.

    JAX reads at an index out of bounds, where it was promised there are none, what is nearest;
    but in reverse it adds nothing there.
    """
    if not is_inexact(x):
        return x

    def transpose(masks: Sequence[Any], cotangents: Sequence[Value]) -> list[Any]:
        (cotangent,) = cotangents
        mask = lax.broadcast_in_dim(masks[0], cotangent.shape, tuple(axes))
        return [lax.select(mask, cotangent, lax.full_like(cotangent, 0))]

    return linear_with_transpose(lambda masks, xs: list(xs), transpose, [kept], [x])[0]


@padded_rule("dynamic_slice")
def _dynamic_slice(op: Operation, x: Row, *starts: Row, slice_sizes: Any) -> Any:
    places = {axis: row.value for axis, row in enumerate(starts)}
    return op.cut(_window(op, x, places, slice_sizes), op.out_shape)


def _window(op: Operation, x: Row, starts: dict[int, Any], sizes: Sequence[Any]) -> Any:
    """The part of `x` that begins at `starts`, by axis, moved to lie within the row."""
    out = jnp.asarray(x.value)
    for axis, (own, size) in enumerate(zip(x.shape, sizes, strict=True)):
        if own != size:
            start = within(op, starts.get(axis, 0), own - size, size)
            out = window(op, out, axis, start, own, size)
    return out


def _fits(op: Operation, start: Any, room: Any, size: Any) -> bool:
    """Whether it is known that a window that begins at `start` is within every row, or empty."""
    if not isinstance(start, (int, np.ndarray, np.integer)):
        return False
    values = op.sizes.in_every_row(room, size)
    return values is not None and bool(
        np.all((start >= 0) & (start <= values[0]) | (values[1] <= 0))
    )


def within(op: Operation, start: Any, room: Any, size: Any) -> Any:
    """Where a window of a size begins that is to begin at `start`, in a row with room for it."""
    if _fits(op, start, room, size):
        return int(start)
    at = as_index(start)
    return jnp.clip(at, 0, jnp.asarray(jnp.maximum(op.sizes.value(room), 0), at.dtype))


def last_places(op: Operation, rooms: Sequence[Any], at: Any) -> Any:
    """The greatest index in each indexed dimension, where windows may be moved by `rooms`.

    Of the type of the indices `at`, and with as many dimensions.
    """
    limits = jnp.stack([jnp.asarray(op.sizes.value(room), at.dtype) for room in rooms])
    return lax.expand_dims(limits, range(at.ndim - 1))


def in_bounds(at: Any, limits: Any) -> Any:
    """Whether each index vector is within the row, as one more dimension of size one."""
    return jnp.all((at >= 0) & (at <= limits), -1, keepdims=True)


def as_index(at: Any) -> Any:
    """Indices in a type that has -1 and the size of any row."""
    at = jnp.asarray(at)
    if at.dtype in (np.int32, np.int64):
        return at
    if jnp.issubdtype(at.dtype, jnp.unsignedinteger) and at.dtype.itemsize >= 4:
        at = jnp.minimum(at, np.iinfo(np.int32).max)
    return at.astype(np.int32)


def _replace(old: Any, new: Any) -> Any:
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
    dimension_numbers: Any,
    mode: Any,
    update_jaxpr: Any,
    **params: Any,
) -> Any:
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
    at, written = _targets(op, at, indices.shape, rooms, mode)
    for axis in partial:
        at, written, dnums = _by_element(op, at, written, dnums, axis, updates.shape)
    # Each to another place out of bounds: it may have been promised that indices are unique.
    beyond = op.sizes.bound(x.shape[dnums.scatter_dims_to_operand_dims[0]])
    nowhere = beyond + lax.iota(np.int32, math.prod(written.shape)).reshape(written.shape)
    at = jnp.where(written, at, nowhere.astype(at.dtype))
    changes = {"mode": FILL_OR_DROP, "indices_are_sorted": False, "dimension_numbers": dnums}
    return op.bind(x.value, at, updates.value, **changes)


def _targets(op: Operation, at: Any, shape: Any, rooms: Any, mode: Any) -> tuple[Any, Any]:
    """Where windows begin; and which are written, as one more dimension of size one."""
    limits = last_places(op, rooms, at)
    if mode == CLIP:
        at = jnp.clip(at, 0, limits)
    written = in_bounds(at, limits)
    belongs = op.sizes.mask(shape, op.sizes.padded_axes(shape))
    return at, written if belongs is None else written & belongs[..., :1]


def _by_element(
    op: Operation, at: Any, written: Any, dnums: Any, axis: int, shape: Sequence[Any]
) -> tuple[Any, Any, Any]:
    """Indices of windows as indices of windows that have one element along `axis`.

    Args:
      op: the operation at hand.
      at: the indices.
      written: which of them are written to.
      dnums: the dimension numbers.
      axis: a dimension of the operand that windows have.
      shape: that of the updates in a row.

    Returns:
      The indices, which are written to, and the dimension numbers.
    """
    removed = (*dnums.inserted_window_dims, *dnums.operand_batching_dims)
    shown = [i for i in range(len(dnums.update_window_dims) + len(removed)) if i not in removed]
    dim = dnums.update_window_dims[shown.index(axis)]
    window = tuple(d for d in dnums.update_window_dims if d != dim)
    new = dim - sum(d < dim for d in window)  # of the dimensions that are not of windows
    count = op.sizes.bound(shape[dim])
    size = jnp.asarray(op.sizes.size(shape[dim]), at.dtype)
    own = lax.iota(at.dtype, count)
    along = [1] * (at.ndim + 1)
    along[new] = count
    own = own.reshape(along)
    indexed = tuple(dnums.scatter_dims_to_operand_dims)
    at, written = jnp.expand_dims(at, new), jnp.expand_dims(written, new)
    if axis in indexed:
        step = jnp.asarray([i == axis for i in indexed], at.dtype)
        at = at + own * lax.expand_dims(step, range(at.ndim - 1))
    else:
        indexed = (*indexed, axis)
        whole = jnp.broadcast_to(own, (*at.shape[:new], count, *at.shape[new + 1 : -1], 1))
        at = jnp.broadcast_to(at, (*whole.shape[:-1], at.shape[-1]))
        at = jnp.concatenate([at, whole], -1)
    paired = tuple(d + (d >= new) for d in dnums.scatter_indices_batching_dims)
    dnums = dnums._replace(
        update_window_dims=window,
        inserted_window_dims=tuple(sorted((*dnums.inserted_window_dims, axis))),
        scatter_dims_to_operand_dims=indexed,
        scatter_indices_batching_dims=paired,
    )
    return at, written & (own < size), dnums


@padded_rule("dynamic_update_slice")
def _dynamic_update_slice(op: Operation, x: Row, update: Row, *starts: Row) -> Any:
    places = [
        within(op, row.value, own - size, size)
        for row, own, size in zip(starts, x.shape, update.shape, strict=True)
    ]
    array = jnp.asarray(x.value)
    return overwritten(op, array, update.value, places, x.shape, update.shape, _replace)


@padded_rule("sort")
def _sort(op: Operation, *rows: Row, dimension: int, num_keys: int, **params: Any) -> Any:
    if op.sizes.is_exact(rows[0].shape[dimension]):
        return op.bind(*(row.value for row in rows))
    last = [_last(row.value.dtype) for row in rows[:num_keys]]
    keys = [op.filled(row, value, (dimension,)) for row, value in zip(rows, last, strict=False)]
    # Stably: what is equal in the row, NaN for one, comes before the padding.
    return op.bind(*keys, *(row.value for row in rows[num_keys:]), is_stable=True)


def _last(dtype: Any) -> Any:
    """What no value of `dtype` sorts after."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(jnp.nan, jnp.nan)
    return jnp.nan if jnp.issubdtype(dtype, jnp.floating) else highest(dtype)


@padded_rule("top_k")
def _top_k(op: Operation, x: Row, *, axis: int, k: Any, **params: Any) -> Any:
    if is_symbolic(k):
        raise op.refuse(
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
    op: Operation, condition: Row, *, size: Any, limit: int | None, called: str
) -> Any:
    if str(size) in op.sizes.values and not op.sizes.again:
        raise op.refuse(
            f"{called} is in a function under jax.jit that is called more than once, and JAX takes "
            "the sizes that it finds for one. Call it without jax.jit: what is in a vmap is "
            "compiled as a whole."
        )
    mask = jnp.asarray(op.filled(condition, False))
    count = jnp.sum(mask, dtype=np.int32)
    limited = None if limit is None else Limited(called, limit, count)
    bound = op.sizes.find(str(size), condition.shape[0], count, limited)
    return op.result(places_where(mask, bound))
