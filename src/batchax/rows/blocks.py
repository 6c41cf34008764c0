"""Which rows are in which block, where blocks of one class are of the same size."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.types import Value, Values
from batchax.rows.index import Ints


class Places(NamedTuple):
    """Where the elements of rows are in blocks, or where rows are among the slots of blocks."""

    at: Any  # the place in all blocks of each element; -1 for those of no row
    # The element at each place of the blocks; -1 where there is none. In place of a row that is
    # missing another row of the block runs, so an element may be at two places.
    there: Any


def back(at: Value, there: Value) -> Any:
    """As `there`, and -1 for the elements of rows that run in place of missing ones."""
    own = taken(at, jnp.maximum(there, np.int32(0))) == np.arange(there.shape[0], dtype=np.int32)
    return jnp.where(own & (there >= 0), there, np.int32(-1))


class RowsOfBlocks(NamedTuple):
    """Which rows are in which block: first blocks in any order, at last empty ones."""

    used: Any  # whether each block holds a row
    number: Any  # its class
    lengths: Sequence[Any]  # of each size, those of the row in each slot
    places: Places


class Elements(NamedTuple):
    """The elements of all rows, packed or padded, in order."""

    starts: Any  # where each row begins
    row: Any  # of each element, the row that it is of; beyond the last for those of none
    places: Sequence[Any]  # along each ragged axis, the place of each element in its row
    sizes: Sequence[Any]  # along each ragged axis, the size of each row
    bounds: tuple[int, ...] | None  # the size along each axis that rows are padded to, if they are
    widths: Sequence[Ints]  # the bounds of a row in blocks, along each axis for each class
    room: int  # how many elements a block holds

    @property
    def of_class(self) -> list[np.ndarray]:
        return [np.maximum(width, 1).astype(np.int32) for width in self.widths]


def find_blocks(
    lengths: Values,
    bounds: Sequence[Sequence[int]],
    capacity: Sequence[int],
    blocks: int,
    elements: Sequence[Elements] = (),
) -> tuple[RowsOfBlocks, list[Places]]:
    """At least one row in so many blocks, and where its elements are in them.

    Rows have these `lengths`; `bounds` are those of each class but the first, and a block holds
    `capacity` rows of each class.
    """
    kind, count = _classes(lengths, bounds), lengths[0].shape[0]
    number, slots, capacities = len(capacity), capacity[-1], np.array(capacity, np.int32)
    is_kind = (kind[:, None] == np.arange(number, dtype=np.int32)[None]).astype(np.int32)
    so_far = jnp.cumsum(is_kind, 0, dtype=np.int32)  # the rows of each class, up to each row
    of_class, rank = so_far[-1], (so_far * is_kind).sum(1, dtype=np.int32) - np.int32(1)
    filled = lax.div(of_class + capacities - np.int32(1), capacities)
    ends = jnp.cumsum(filled, dtype=np.int32)
    first, room = ends - filled, taken(capacities, kind)
    block, slot = taken(first, kind) + lax.div(rank, room), lax.rem(rank, room)

    numbers = np.arange(blocks, dtype=np.int32)
    of_block = (numbers[:, None] >= ends[None]).sum(1, dtype=np.int32)
    own = jnp.minimum(of_block, np.int32(number - 1))
    before = (numbers - taken(first, own)) * taken(capacities, own)
    held = jnp.clip(taken(of_class, own) - before, np.int32(0), taken(capacities, own))
    at = block * np.int32(slots) + slot
    row = jnp.zeros(blocks * slots, np.int32).at[at].set(np.arange(count, dtype=np.int32))
    row = row.reshape(-1, slots)
    row = jnp.where(np.arange(slots, dtype=np.int32)[None] < held[:, None], row, row[:, :1])
    row = row.reshape(-1)
    in_blocks = [taken(x, row) for x in lengths]
    rows = RowsOfBlocks(of_block < np.int32(number), own, in_blocks, Places(at, row))
    return rows, [_elements(rows, slots, each) for each in elements]


def _classes(lengths: Values, bounds: Sequence[Sequence[int]]) -> Any:
    """The class of each row: the last one that all of its sizes fit."""
    kind = lax.full_like(lengths[0], 0, np.int32)
    for of_class in bounds:
        each = [lax.le(n, np.int32(b)) for n, b in zip(lengths, of_class, strict=True)]
        fits = functools.reduce(lax.bitwise_and, each)
        kind = kind + lax.convert_element_type(fits, np.int32)
    return kind


def taken(x: Value, at: Value) -> Any:
    return jnp.take(x, at, axis=0, mode="clip")


def _elements(rows: RowsOfBlocks, slots: int, elements: Elements) -> Places:
    starts, row_of, places, sizes, bounds, _, size = elements
    each, count = elements.of_class, starts.shape[0]
    classes = len(each[0])

    # Of each place of a block, for each class: its slot, and where in the slot it is.
    slot = np.broadcast_to(np.arange(size, dtype=np.int32), (classes, size))
    within: list[Any] = []
    for width in reversed(each):
        within.insert(0, slot % width[:, None])
        slot = slot // width[:, None]
    slot = taken(np.minimum(slot, slots), rows.number)
    within = [taken(at, rows.number) for at in within]
    ahead = np.arange(len(rows.number), dtype=np.int32)[:, None] * np.int32(slots)
    row = taken(rows.places.there, ahead + jnp.minimum(slot, np.int32(slots - 1)))
    inside = slot < slots
    for at, own in zip(within, sizes, strict=True):
        inside &= at < taken(own, row)
    room = list(map(np.int32, bounds)) if bounds else [taken(own, row) for own in sizes]
    element = taken(starts, row) + linear(within, room)
    if not bounds:  # rows of traced lengths end where the array does
        inside &= element < np.int32(row_of.shape[0])
    there = jnp.where(inside, element, np.int32(-1))

    block, slot = lax.div(rows.places.at, np.int32(slots)), lax.rem(rows.places.at, np.int32(slots))
    of_row = [taken(width, taken(rows.number, block)) for width in each]
    first = block * np.int32(size) + slot * math.prod(of_row)
    own_row = jnp.minimum(row_of, np.int32(count - 1))
    at = taken(first, own_row) + linear(places, [taken(width, own_row) for width in of_row])
    belongs = row_of < np.int32(count)
    for place, own in zip(places, sizes, strict=True):
        belongs &= place < taken(own, own_row)
    at = jnp.where(belongs, at, np.int32(-1))
    return Places(at, there.reshape(-1))


def linear(places: Sequence[Any], room: Sequence[Any]) -> jax.Array:
    """The place of an element among all of a row, the last axis of which is the fastest."""
    at = places[0]
    for place, size in zip(places[1:], room[1:], strict=True):
        at = at * size + place
    return at
