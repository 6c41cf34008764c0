"""Writing at indices: padding writes nothing, and nothing is written out of the row's bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    room_at_end,
    within,
)
from batchax.rows.padded_rules.moving import overwritten
from batchax.rows.padded_rules.reduction import highest, lowest
from batchax.rows.sizes import has_symbols, is_symbolic

CLIP = lax.GatherScatterMode.CLIP


def _replace(old: Any, new: Any) -> Any:
    return new


WRITES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any] | None]] = {
    "scatter": (_replace, None),
    "scatter-add": (lax.add, lambda dtype: 0),
    "scatter-sub": (lax.sub, lambda dtype: 0),
    "scatter-mul": (lax.mul, lambda dtype: 1),
    "scatter-min": (lax.min, highest),
    "scatter-max": (lax.max, lowest),
}
"""What each kind writes, and by the dtype what leaves an element as it is; None for nothing."""


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
    partial = any(
        own != size and (is_symbolic(own) or is_symbolic(size))
        for axis, (own, size) in enumerate(zip(x.shape, sizes, strict=True))
        if axis in shown
    )
    if not partial and not has_symbols([*indices.shape, *(x.shape[axis] for axis in indexed)]):
        return op.bind(x.value, indices.value, updates.value)
    applies = name == "scatter" and update_jaxpr is not None  # a function of what is there
    combine, neutral = WRITES[name]
    if np.ndim(indices.value) == 1 and not applies:
        update = lax.expand_dims(jnp.asarray(updates.value), dnums.inserted_window_dims)
        at, live = indices.value, None
        starts: list[Any] = [0] * len(x.shape)
        for k, axis in enumerate(indexed):
            starts[axis] = within(op, at[k], rooms[k], sizes[axis])
        if mode != CLIP and not all(isinstance(start, int) for start in starts):
            live = in_bounds(as_index(at), last_places(op, rooms))[0]
        return overwritten(op, x.value, update, starts, x.shape, sizes, combine, live)
    array, update = jnp.asarray(x.value), updates.value
    if partial:
        if neutral is None:
            raise op.refuse(
                "it sets windows whose size depends on the row, at several places. Write each "
                "element at an index of its own, or set one window after another."
            )
        update = op.filled(updates, neutral(update.dtype))
        for axis in range(array.ndim):
            array = room_at_end(op, array, axis, x.shape[axis] - sizes[axis], sizes[axis])
    at = _dropped(op, as_index(indices.value), indices.shape, rooms, mode, array.shape[indexed[0]])
    out = op.bind(array, at, update, mode=FILL_OR_DROP, indices_are_sorted=False)
    return lax.slice(out, (0,) * out.ndim, op.sizes.bounds_of(x.shape)) if partial else out


def _dropped(op: Operation, at: Any, shape: Any, rooms: Any, mode: Any, out_of_bounds: int) -> Any:
    """Indices, where nothing is to be written each another one from `out_of_bounds` on."""
    limits = last_places(op, rooms)
    if mode == CLIP:
        at = jnp.clip(at, 0, limits)
    live = in_bounds(at, limits)
    belongs = op.sizes.mask(shape, op.sizes.padded_axes(shape))
    if belongs is not None:
        live = live & belongs[..., :1]
    # Different ones: it may have been promised that indices are unique.
    count = math.prod(live.shape)
    nowhere = out_of_bounds + lax.iota(np.int32, count).reshape(live.shape)
    return jnp.where(live, at, nowhere.astype(at.dtype))


@padded_rule("dynamic_update_slice")
def _dynamic_update_slice(op: Operation, x: Row, update: Row, *starts: Row) -> Any:
    places = [
        within(op, row.value, own - size, size)
        for row, own, size in zip(starts, x.shape, update.shape, strict=True)
    ]
    array = jnp.asarray(x.value)
    return overwritten(op, array, update.value, places, x.shape, update.shape, _replace)
