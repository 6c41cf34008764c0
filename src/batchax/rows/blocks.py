"""Which rows are in which block, where blocks of one class are of the same size.

On a CPU a short loop over rows finds that, and another one where their elements are. Running sums,
gathers, and a scatter are thirty kernels, and XLA takes ten milliseconds to compile each.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.execution.gathered_lanes import taken_at
from batchax.execution.slices import entry_of, part_of, put_entry, put_part
from batchax.jaxprs.types import Aval, Value, Values
from batchax.kernel.axis import Axis, Positions
from batchax.kernel.inner import batch_function, repeat
from batchax.kernel.own_primitive import NoDerivative, own_primitive
from batchax.rows.index import WINDOW, Ints


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

    @property
    def in_one_line(self) -> bool:
        """Whether rows follow one another and have one ragged axis."""
        return self.bounds is None and len(self.places) == 1


@dataclass(frozen=True)
class _Blocks:
    """Which blocks there are."""

    # For each class but the first, the bound of each size: a row is in the last one that it fits.
    bounds: tuple[tuple[int, ...], ...]
    capacity: tuple[int, ...]  # for each class how many of its rows a block holds
    count: int
    # Of elements in one line, the bounds of a row for each class, and the elements of a block.
    lines: tuple[tuple[tuple[int, ...], int], ...] = ()

    @property
    def slots(self) -> int:
        return self.capacity[-1]

    def classes_of(self, lengths: Values) -> Any:
        fits = [
            functools.reduce(
                lax.bitwise_and,
                (lax.le(n, np.int32(b)) for n, b in zip(lengths, of_class, strict=True)),
            )
            for of_class in self.bounds
        ]
        kinds = [lax.convert_element_type(x, np.int32) for x in fits]
        return functools.reduce(lax.add, kinds, lax.full_like(lengths[0], 0, np.int32))


def find_blocks(
    lengths: Values,
    bounds: Sequence[Sequence[int]],
    capacity: Sequence[int],
    count: int,
    elements: Sequence[Elements] = (),
) -> tuple[RowsOfBlocks, list[Places]]:
    """At least one row in `count` blocks, and where its elements are in them.

    Rows have these `lengths`; `bounds` are those of each class but the first, and a block holds
    `capacity` rows of each class.
    """
    lines = [each for each in elements if each.in_one_line]
    blocks = _Blocks(
        tuple(map(tuple, bounds)),
        tuple(capacity),
        count,
        tuple((tuple(map(int, each.of_class[0])), each.room) for each in lines),
    )
    given = [x for each in lines for x in (each.starts, each.row, *each.places, *each.sizes)]
    operands = _compat.varying_alike([*lengths, *given])
    used, number, *found = places_in_blocks_p.bind(*operands, blocks=blocks)
    in_blocks, found = found[: len(lengths)], found[len(lengths) :]
    of_rows, *of_lines = itertools.starmap(Places, zip(found[::2], found[1::2], strict=True))
    rows, found_lines = RowsOfBlocks(used, number, in_blocks, of_rows), iter(of_lines)
    return rows, [
        next(found_lines) if each.in_one_line else _elements(rows, blocks.slots, each)
        for each in elements
    ]


def _rows(lengths: Values, blocks: _Blocks) -> RowsOfBlocks:
    kind = blocks.classes_of(lengths)
    number, slots, count = len(blocks.capacity), blocks.slots, kind.shape[0]
    capacities = np.array(blocks.capacity, np.int32)
    is_kind = (kind[:, None] == np.arange(number, dtype=np.int32)[None]).astype(np.int32)
    so_far = jnp.cumsum(is_kind, 0, dtype=np.int32)  # the rows of each class, up to each row
    of_class, rank = so_far[-1], (so_far * is_kind).sum(1, dtype=np.int32) - np.int32(1)
    filled = lax.div(of_class + capacities - np.int32(1), capacities)
    ends = jnp.cumsum(filled, dtype=np.int32)
    first, room = ends - filled, taken(capacities, kind)
    block, slot = taken(first, kind) + lax.div(rank, room), lax.rem(rank, room)

    numbers = np.arange(blocks.count, dtype=np.int32)
    of_block = (numbers[:, None] >= ends[None]).sum(1, dtype=np.int32)
    own = jnp.minimum(of_block, np.int32(number - 1))
    before = (numbers - taken(first, own)) * taken(capacities, own)
    held = jnp.clip(taken(of_class, own) - before, np.int32(0), taken(capacities, own))
    at = block * np.int32(slots) + slot
    row = jnp.zeros(blocks.count * slots, np.int32).at[at].set(np.arange(count, dtype=np.int32))
    row = row.reshape(-1, slots)
    row = jnp.where(np.arange(slots, dtype=np.int32)[None] < held[:, None], row, row[:, :1])
    row = row.reshape(-1)
    in_blocks = [taken(x, row) for x in lengths]
    return RowsOfBlocks(of_block < np.int32(number), own, in_blocks, Places(at, row))


def _places(*operands: Value, blocks: _Blocks) -> list[Any]:
    lengths, rest = _parts(operands, blocks)
    rows = _rows(lengths, blocks)
    found = [rows.used, rows.number, *rows.lengths, *rows.places]
    for (starts, row, place, own), (widths, room) in zip(rest, blocks.lines, strict=True):
        line = Elements(starts, row, [place], [own], None, [np.asarray(widths)], room)
        found += _elements(rows, blocks.slots, line)
    return found


def _parts(operands: Values, blocks: _Blocks) -> tuple[Values, list[Values]]:
    """The lengths, and the operands of each line of elements."""
    count = len(operands) - 4 * len(blocks.lines)
    lines = range(count, len(operands), 4)
    return operands[:count], [operands[k : k + 4] for k in lines]


def _places_on_cpu(*operands: Value, blocks: _Blocks) -> list[Any]:
    lengths, rest = _parts(operands, blocks)
    found = _rows_by_loop(lengths, blocks)
    _, number, *_, at, row = found
    for (starts, row_of, _, own), (widths, room) in zip(rest, blocks.lines, strict=True):
        line = starts, own, row_of.shape[0], widths, room
        found += _line_by_loop(number, at, row, blocks, *line)
    return found


def _rows_by_loop(lengths: Values, blocks: _Blocks) -> list[Any]:
    kind = blocks.classes_of(lengths)
    capacities, slots, count = np.array(blocks.capacity, np.int32), blocks.slots, kind.shape[0]
    wide, lanes = np.int32(slots), np.arange(slots, dtype=np.int32)

    def place(i: Value, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """In the block of the row's class that is being filled; the next block, if it is full."""
        free, following, of_block, at, row = state
        k = entry_of(kind, i)
        to = entry_of(following, k)
        held = lax.rem(to, wide)
        full = lax.bitwise_or(lax.eq(held, np.int32(0)), lax.eq(held, entry_of(capacities, k)))
        to = lax.select(full, lax.mul(free, wide), to)
        block, held = lax.div(to, wide), lax.rem(to, wide)
        first = lax.sub(to, held)
        # It stands in for rows that are missing behind it.
        behind = lax.ge(lanes, lax.broadcast(held, (slots,)))
        rows = lax.select(behind, lax.broadcast(i, (slots,)), part_of(row, first, 0, slots))
        return (
            lax.select(full, lax.add(free, np.int32(1)), free),
            put_entry(following, lax.add(to, np.int32(1)), k),
            put_entry(of_block, k, block),
            put_entry(at, to, i),
            put_part(row, rows, first),
        )

    zeros = lambda size: lax.full((size,), 0, np.int32)
    state = (
        np.int32(0),
        zeros(len(capacities)),
        zeros(blocks.count),
        kind,
        zeros(blocks.count * slots),
    )
    filled, _, number, at, row = repeat(count, place, state)
    used = lax.lt(lax.iota(np.int32, blocks.count), lax.broadcast(filled, (blocks.count,)))
    return [used, number, *(taken_at(x, row, 0) for x in lengths), at, row]


def _types(*avals: Aval, blocks: _Blocks) -> list[Any]:
    lengths, rest = _parts(avals, blocks)
    of = lambda size: lengths[0].update(shape=(size,), dtype=np.dtype(np.int32))
    used = of(blocks.count).update(dtype=np.dtype(bool))
    in_blocks = [of(blocks.count * blocks.slots)] * len(lengths)
    types = [used, of(blocks.count), *in_blocks, of(lengths[0].shape[0]), in_blocks[0]]
    for (_, row, _, _), (_, room) in zip(rest, blocks.lines, strict=True):
        types += [of(row.shape[0]), of(blocks.count * room)]
    return types


def _batched(
    axis: Axis, args: Values, axes: Positions, /, *, blocks: _Blocks
) -> tuple[Any, Positions]:
    return batch_function(axis, functools.partial(_places, blocks=blocks), args, axes)


def taken(x: Value, at: Value) -> Any:
    return jnp.take(x, at, axis=0, mode="clip")


places_in_blocks_p = own_primitive(
    "places_in_blocks",
    called="where rows are in blocks",
    operations=_places,
    compute=jax.jit(_places, static_argnames="blocks"),
    on_cpu=_places_on_cpu,
    types=_types,
    rule=_batched,
    transpose=NoDerivative("where rows are in blocks is transposed, which is not linear."),
)


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


def _line_by_loop(
    number: Value,
    at_of_row: Value,
    row: Value,
    blocks: _Blocks,
    starts: Value,
    own: Value,
    capacity: int,
    widths: Sequence[int],
    size: int,
) -> list[Any]:
    slots, zero, one = np.int32(blocks.slots), np.int32(0), np.int32(1)
    window, end = np.int32(WINDOW), np.int32(blocks.count * size)
    of_class, lanes = np.array(widths, np.int32), np.arange(WINDOW, dtype=np.int32)
    nowhere = lax.full((WINDOW,), -1, np.int32)
    wide = lambda x: lax.broadcast(x, (WINDOW,))

    def fill(_: Value, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """`WINDOW` places of the row in a slot of a block; the next row overwrites those beyond."""
        block, slot, place, at, there = state
        left = lax.lt(block, np.int32(blocks.count))
        here = lax.min(block, np.int32(blocks.count - 1))
        width, of_slot = (
            entry_of(of_class, entry_of(number, here)),
            lax.add(lax.mul(here, slots), slot),
        )
        of_row = entry_of(row, of_slot)
        places = lax.add(wide(place), lanes)
        elements = lax.add(wide(entry_of(starts, of_row)), places)
        inside = lax.bitwise_and(
            lax.lt(places, wide(entry_of(own, of_row))), lax.lt(elements, wide(np.int32(capacity)))
        )
        to = lax.add(lax.mul(here, np.int32(size)), lax.add(lax.mul(slot, width), place))
        there = put_part(there, lax.select(inside, elements, nowhere), lax.select(left, to, end))
        # Another row may stand in for one that is missing.
        is_own = lax.bitwise_and(left, lax.eq(entry_of(at_of_row, of_row), of_slot))
        begin = lax.min(lax.index_in_dim(elements, 0, keepdims=False), np.int32(capacity))
        inside = lax.bitwise_and(inside, wide(is_own))
        placed = lax.select(inside, lax.add(wide(to), lanes), part_of(at, begin, 0, WINDOW))
        at = put_part(at, placed, begin)

        place = lax.add(place, window)
        ends = lax.ge(place, width)
        slot, place = lax.select(ends, lax.add(slot, one), slot), lax.select(ends, zero, place)
        beyond = lax.ge(lax.mul(slot, width), np.int32(size))
        full = lax.bitwise_or(lax.ge(slot, slots), beyond)
        block, slot = lax.select(full, lax.add(block, one), block), lax.select(full, zero, slot)
        return block, slot, place, at, there

    steps = max(min(blocks.slots, -(-size // width)) * -(-width // WINDOW) for width in widths)
    # A window longer, as a slice that reaches beyond the end would be moved back.
    filled = [lax.full((length + WINDOW,), -1, np.int32) for length in (capacity, int(end))]
    state = zero, zero, zero, *filled
    *_, at, there = repeat(blocks.count * steps, fill, state)
    return [at[:capacity], there[: int(end)]]
