"""Writing at indices: padding writes nothing, and nothing is written out of the row's bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.indexing import (
    FILL_OR_DROP,
    as_index,
    in_bounds,
    last_places,
    within,
)
from batchax.rows.padded_rules.moving import overwritten
from batchax.rows.sizes import has_symbols

CLIP = lax.GatherScatterMode.CLIP


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
