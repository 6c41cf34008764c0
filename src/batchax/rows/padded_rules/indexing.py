"""Reading at indices: what is out of bounds follows from the row's own size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.words import Value
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.moving import pad_end, window
from batchax.rows.sizes import Sizes, has_symbols, is_symbolic
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose

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
        out = _dropped_in_reverse(out, in_bounds(at, last_places(op, rooms, at))[..., 0], batch)
    return op.cut(out, op.out_shape)


def is_found(sizes: Sizes, dim: Any) -> bool:
    """Whether a size is of elements that the program found."""
    return is_symbolic(dim) and not sizes.found_of.keys().isdisjoint(_compat.symbols(dim))


def _moved_inside(op: Operation, at: Any, rooms: Sequence[Any], mode: Any) -> Any:
    limits = last_places(op, rooms, at)
    if mode == FILL_OR_DROP:
        return jnp.where(in_bounds(at, limits), at, -1)
    return jnp.clip(at, 0, jnp.maximum(limits, 0))


def _dropped_in_reverse(x: Value, kept: Any, axes: Sequence[int]) -> Any:
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
