"""Which rows are in which block, where blocks of one class are of the same size.

On a CPU a short loop over rows finds that, which XLA compiles as one function, and another one
where their elements are. Running sums, gathers, and a scatter are thirty functions: to compile
these took longer than to compile what is done with rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.execution.slices import entry_of, part_of, put_entry, put_part
from batchax.jaxprs.types import Aval, Value, Values
from batchax.kernel.axis import Axis, Positions
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import NoDerivative, Of, own_primitive
from batchax.rows.index import WINDOW, Ints


class Places(NamedTuple):
    """Where the elements of rows are in blocks, or where rows are among the slots of blocks."""

    at: Any  # the place in all blocks of each element; -1 for those of no row
    there: Any  # the element at each place of the blocks; -1 where there is none
    back: Any  # the same, and -1 for those of rows that are run in place of missing ones


class RowsOfBlocks(NamedTuple):
    """Which rows are in which block: first blocks in any order, at last empty ones."""

    kind: Any  # the class of each row
    block: Any  # where each row is
    slot: Any  # its place there
    number: Any  # the class of each block; as many as there are classes where it holds no row
    held: Any  # how many rows each block holds
    taken: Any  # the row in each slot of each block, shape (blocks, slots); 0 where it is free

    @property
    def row(self) -> Any:
        """As `taken`, with the first row of a block in the place of those that are missing."""
        return jnp.where(self._own, self.taken, self.taken[:, :1])

    @property
    def _own(self) -> Any:
        return np.arange(self.taken.shape[1], dtype=np.int32)[None] < self.held[:, None]

    @property
    def places(self) -> Places:
        back = jnp.where(self._own, self.taken, np.int32(-1))
        at = self.block * np.int32(self.taken.shape[1]) + self.slot
        return Places(at, self.row.reshape(-1), back.reshape(-1))


def find_blocks(kind: Value, capacity: Sequence[int], blocks: int) -> RowsOfBlocks:
    """The blocks of rows, at least one, of these classes, of each of which one holds `capacity`."""
    (kind,) = _compat.varying_alike([kind])
    found = rows_of_blocks_p.bind(kind, capacity=tuple(capacity), blocks=blocks)
    return RowsOfBlocks(kind, *found)


def _blocks(kind: Value, *, capacity: Sequence[int], blocks: int) -> list[Any]:
    number, slots, count = len(capacity), capacity[-1], kind.shape[0]
    capacities = np.array(capacity, np.int32)
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
    row = jnp.zeros(blocks * slots, np.int32)
    row = row.at[block * np.int32(slots) + slot].set(np.arange(count, dtype=np.int32))
    return [block, slot, of_block, held, row.reshape(blocks, slots)]


def _blocks_on_cpu(kind: Value, *, capacity: Sequence[int], blocks: int) -> list[Any]:
    number, slots, count = len(capacity), capacity[-1], kind.shape[0]
    capacities, zero, one = np.array(capacity, np.int32), np.int32(0), np.int32(1)

    def place(i: Value, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """In the block of the row's class that is being filled; the next block, if it is full."""
        free, filling, left, block, slot, of_block, held, row = state
        i = lax.convert_element_type(i, np.int32)  # JAX counts steps in 64 bits, if there are such
        k = entry_of(kind, i)
        room, unfilled = entry_of(capacities, k), entry_of(left, k)
        full = unfilled == zero
        own = lax.select(full, free, entry_of(filling, k))
        to = lax.select(full, zero, room - unfilled)
        return (
            lax.select(full, free + one, free),
            put_entry(filling, own, k),
            put_entry(left, room - to - one, k),
            put_entry(block, own, i),
            put_entry(slot, to, i),
            put_entry(of_block, k - np.int32(number), own),
            put_entry(held, to + one, own),
            put_entry(row, i, own * np.int32(slots) + to),
        )

    # XLA makes a function for each array that it fills with a number. Those of rows are written to
    # the end, whatever they begin with; others begin with zero, as arrays that are alike are one.
    # Those that are read in the loop are short: it may copy them.
    few, zeros = (lax.full((size,), 0, np.int32) for size in (number, blocks * slots))
    state = zero, few, few, kind, kind, zeros, zeros, zeros
    state = lax.fori_loop(zero, np.int32(count), place, state)
    _, _, _, block, slot, of_block, held, row = state
    of_block, held = of_block[:blocks] + np.int32(number), held[:blocks]
    return [block, slot, of_block, held, row.reshape(blocks, slots)]


def _types(kind: Aval, *, capacity: Sequence[int], blocks: int) -> list[Any]:
    of = lambda *shape: kind.update(shape=shape, dtype=np.dtype(np.int32))
    rows = of(*kind.shape)
    return [rows, rows, of(blocks), of(blocks), of(blocks, capacity[-1])]


def _batched(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> tuple[Any, Positions]:
    return batch_function(axis, lambda kind: _blocks(kind, **params), args, axes)


def taken(x: Value, at: Value) -> Any:
    return jnp.take(x, at, axis=0, mode="clip")


rows_of_blocks_p = own_primitive(
    "rows_of_blocks",
    called="which rows are in which block",
    operations=_blocks,
    compute=jax.jit(_blocks, static_argnames=("capacity", "blocks")),
    on_cpu=_blocks_on_cpu,
    types=_types,
    programs=(),
    facts="",
    rule=_batched,
    jvp=Of(None),
    transpose=NoDerivative("rows of blocks are transposed, which is not linear."),
)


class Elements(NamedTuple):
    """The elements of all rows, packed or padded, in order."""

    starts: Any  # where each row begins
    row: Any  # of each element, the row that it is of; beyond the last for those of none
    places: Sequence[Any]  # along each ragged axis, the place of each element in its row
    sizes: Sequence[Any]  # along each ragged axis, the size of each row
    bounds: tuple[int, ...] | None  # the size along each axis that rows are padded to, if they are


def find_elements(
    blocks: RowsOfBlocks, elements: Elements, widths: Sequence[Ints], size: int
) -> Places:
    """Where elements are in blocks, of `size` elements each.

    `widths` are the bounds of a row, along each axis for each class.
    """
    starts, row, places, sizes, bounds = elements
    if bounds is not None or len(places) > 1:
        return _elements(blocks, elements, widths, size)
    operands = _compat.varying_alike([*blocks, starts, row, *places, *sizes])
    of_class = tuple(max(1, int(width)) for width in widths[0])
    return Places(*elements_of_blocks_p.bind(*operands, widths=of_class, size=size))


def _elements(
    blocks: RowsOfBlocks, elements: Elements, widths: Sequence[Ints], size: int
) -> Places:
    starts, row_of, places, sizes, bounds = elements
    each, rows = [np.maximum(width, 1).astype(np.int32) for width in widths], blocks.row
    slots, count, classes = rows.shape[1], starts.shape[0], len(each[0])

    # Of each place of a block, for each class: its slot, and where in the slot it is.
    slot = np.broadcast_to(np.arange(size, dtype=np.int32), (classes, size))
    within: list[Any] = []
    for width in reversed(each):
        within.insert(0, slot % width[:, None])
        slot = slot // width[:, None]
    number = jnp.minimum(blocks.number, np.int32(classes - 1))
    slot = taken(np.minimum(slot, slots), number)
    within = [taken(at, number) for at in within]
    ahead = np.arange(len(number), dtype=np.int32)[:, None] * np.int32(slots)
    row = taken(rows.reshape(-1), ahead + jnp.minimum(slot, np.int32(slots - 1)))
    inside = slot < slots
    for at, own in zip(within, sizes, strict=True):
        inside &= at < taken(own, row)
    room = list(map(np.int32, bounds)) if bounds else [taken(own, row) for own in sizes]
    element = taken(starts, row) + linear(within, room)
    if not bounds:  # rows of traced lengths end where the array does
        inside &= element < np.int32(row_of.shape[0])
    there = jnp.where(inside, element, np.int32(-1))
    back = jnp.where(slot < blocks.held[:, None], there, np.int32(-1))

    of_row = [jnp.take(width, blocks.kind, mode="clip") for width in each]
    first = blocks.block * np.int32(size) + blocks.slot * math.prod(of_row)
    own_row = jnp.minimum(row_of, np.int32(count - 1))
    at = taken(first, own_row) + linear(places, [taken(width, own_row) for width in of_row])
    belongs = row_of < np.int32(count)
    for place, own in zip(places, sizes, strict=True):
        belongs &= place < taken(own, own_row)
    at = jnp.where(belongs, at, np.int32(-1))
    return Places(at, there.reshape(-1), back.reshape(-1))


def linear(places: Sequence[Any], room: Sequence[Any]) -> jax.Array:
    """The place of an element among all of a row, the last axis of which is the fastest."""
    at = places[0]
    for place, size in zip(places[1:], room[1:], strict=True):
        at = at * size + place
    return at


def _packed_elements(*operands: Value, widths: Sequence[int], size: int) -> list[Any]:
    *found, starts, row, place, own = operands
    elements = Elements(starts, row, [place], [own], None)
    return [*_elements(RowsOfBlocks(*found), elements, [np.asarray(widths)], size)]


def _packed_elements_on_cpu(*operands: Value, widths: Sequence[int], size: int) -> list[Any]:
    _, _, _, number, held, row, starts, row_of, _, own = operands
    (blocks, slots), capacity = row.shape, row_of.shape[0]
    zero, window, nowhere = np.int32(0), np.int32(WINDOW), np.full(WINDOW, -1, np.int32)
    of_class, lanes = np.array(widths, np.int32), np.arange(WINDOW, dtype=np.int32)
    row, end = row.reshape(-1), np.int32(blocks * size)

    def fill(_: Value, state: tuple[Any, ...]) -> tuple[Any, ...]:
        """`WINDOW` places of the row in a slot of a block; the next row overwrites those beyond."""
        block, slot, place, at, there, back = state
        left = block < np.int32(blocks)
        block_there = lax.min(block, np.int32(blocks - 1))
        kind = lax.min(entry_of(number, block_there), np.int32(len(widths) - 1))
        width, is_own = entry_of(of_class, kind), slot < entry_of(held, block_there)
        # The first row of a block stands in for those that are missing.
        of_slot = entry_of(row, block_there * np.int32(slots) + lax.select(is_own, slot, zero))
        places, first = place + lanes, entry_of(starts, of_slot)
        inside = (places < entry_of(own, of_slot)) & (first + places < np.int32(capacity))
        to = lax.select(left, block_there * np.int32(size) + slot * width + place, end)
        element = lax.select(inside, first + places, nowhere)
        there = put_part(there, element, to)
        back = put_part(back, lax.select(inside & is_own, element, nowhere), to)
        begin = lax.min(first + place, np.int32(capacity))
        placed = lax.select(inside & is_own & left, to + lanes, part_of(at, begin, 0, WINDOW))
        at = put_part(at, placed, begin)

        place += window
        ends = place >= width
        slot, place = lax.select(ends, slot + np.int32(1), slot), lax.select(ends, zero, place)
        full = (slot >= np.int32(slots)) | (slot * width >= np.int32(size))
        block, slot = lax.select(full, block + np.int32(1), block), lax.select(full, zero, slot)
        return block, slot, place, at, there, back

    steps = max(min(slots, -(-size // width)) * -(-width // WINDOW) for width in widths)
    # A window longer, as a slice that reaches beyond the end would be moved back.
    # Arrays that are alike are one, and XLA makes a function for each.
    filled = lax.full((max(capacity, blocks * size) + WINDOW,), -1, np.int32)
    state = zero, zero, zero, filled, filled, filled
    *_, at, there, back = lax.fori_loop(zero, np.int32(blocks * steps), fill, state)
    return [at[:capacity], there[: blocks * size], back[: blocks * size]]


def _packed_types(*avals: Aval, widths: Sequence[int], size: int) -> list[Any]:
    *_, taken, _, row, _, _ = avals
    shapes = [(row.shape[0],), *[(taken.shape[0] * size,)] * 2]
    return [row.update(shape=shape, dtype=np.dtype(np.int32)) for shape in shapes]


def _batched_elements(
    axis: Axis, args: Values, axes: Positions, /, **params: Any
) -> tuple[Any, Positions]:
    return batch_function(axis, functools.partial(_packed_elements, **params), args, axes)


elements_of_blocks_p = own_primitive(
    "elements_of_blocks",
    called="where the elements of rows are in blocks",
    operations=_packed_elements,
    compute=jax.jit(_packed_elements, static_argnames=("widths", "size")),
    on_cpu=_packed_elements_on_cpu,
    types=_packed_types,
    programs=(),
    facts="",
    rule=_batched_elements,
    jvp=Of(None),
    transpose=NoDerivative("elements of blocks are transposed, which is not linear."),
)
