"""Which rows are in which block, and their elements moved into blocks and back.

Rows are in size buckets, and a block has slots for rows of one class. Every way between packed
rows, padded rows and blocks is a gather, and so is its transpose. Where lengths are known,
positions are computed when a program is staged, by NumPy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.execution.slices import entry_of, put_entry, put_part
from batchax.jaxprs.words import Value
from batchax.rows.index import PROGRAMS, WINDOW, IndexProgram, index_arrays, moved
from batchax.rows.sizes import Sizes


class RowsOfBlocks(NamedTuple):
    """Which rows are in which block; blocks are in the order of their first rows.

    Attributes:
      kind: the class of each row.
      block: where each row is.
      slot: its place there.
      number: the class of each block; as many as there are classes where it holds no row.
      held: how many rows each block holds.
      row: the row in each slot of each block, one block after another.
    """

    kind: Any
    block: Any
    slot: Any
    number: Any
    held: Any
    row: Any

    @property
    def numpy(self) -> Any:
        """NumPy where rows are known; JAX's if not."""
        return np if isinstance(self.number, np.ndarray) else jnp

    def slots(self, slots: int) -> tuple[Any, Any, Any]:
        """Where each row is among the slots of all blocks, and the row in each of these.

        The latter once more, but -1 for those that are run in place of rows that are missing, which
        are the first of their blocks.
        """
        row, own = _with_stand_ins(self, slots)
        back = self.numpy.where(own, row, np.int32(-1))
        return self.block * np.int32(slots) + self.slot, row.reshape(-1), back.reshape(-1)


class PlacesOfElements(NamedTuple):
    """Where elements are in blocks.

    Attributes:
      at: the place in all blocks of each element; -1 for those of no row.
      there: the element at each place of the blocks; -1 where there is none.
      back: the same, and -1 for those of rows that are run in place of missing ones.
    """

    at: Any
    there: Any
    back: Any


def find_blocks(
    lengths: Sequence[Any], limits: Sequence[Sequence[int]], rows: Sequence[int], blocks: int
) -> RowsOfBlocks:
    """The blocks that rows are in.

    Args:
      lengths: of the rows, for each of their sizes.
      limits: for each class, from that of the longest rows down, the bound of each size.
      rows: for each class how many rows a block holds.
      blocks: how many blocks there are.
    """
    how = {"limits": tuple(map(tuple, limits)), "rows": tuple(rows), "blocks": blocks}
    return RowsOfBlocks(*_computed("blocks", _blocks, lengths, **how))


def find_elements(
    rows: RowsOfBlocks,
    starts: Any,
    row_of: Any,
    sizes: Sequence[Any],
    places: Sequence[Any],
    widths: Sequence[Sequence[int]],
    room: Sequence[int] | None,
    size: int,
) -> PlacesOfElements:
    """Where elements are in blocks of rows.

    Args:
      rows: which are in which block.
      starts: where each row begins.
      row_of: the row of each element.
      sizes: of each row, along each of its axes.
      places: of each element its place there, along each axis.
      widths: for each axis the room that a row has in each class.
      room: the room that a row has along each axis outside of blocks; None where it has its own
        size.
      size: how many elements a block has room for.
    """
    how = {"widths": tuple(map(tuple, widths)), "room": room and tuple(room), "size": size}
    operands = [*rows, starts, row_of, *sizes, *places]
    return PlacesOfElements(*_computed("elements", _elements, operands, **how))


def _computed(find: str, by: Callable[..., list[Any]], operands: Any, **how: Any) -> list[Any]:
    if all(isinstance(x, np.ndarray) for x in operands):
        return by(np, *operands, **how)
    return index_arrays(find, [jnp.asarray(x, np.int32) for x in operands], **how)


def _with_stand_ins(rows: Any, slots: int) -> tuple[Any, Any]:
    """The row in each slot of each block, and which of these are not in place of missing ones."""
    row, held = rows.row.reshape(-1, slots), rows.held
    own = np.arange(slots, dtype=np.int32)[None] < held[:, None]
    return rows.numpy.where(own, row, row[:, :1]), own


def _blocks(numpy: Any, *lengths: Any, limits: Any, rows: Any, blocks: int) -> list[Any]:
    """As `find_blocks`, for all rows at once."""
    count, slots, most = len(lengths[0]), rows[-1], np.int32(len(lengths[0]) - 1)
    capacity = np.array(rows, np.int32)
    ints = lambda x: x.astype(np.int32)
    in_order = lambda x: ints(np.argsort(x, kind="stable") if numpy is np else jnp.argsort(x))
    sums = lambda x: numpy.cumsum(x, dtype=np.int32)
    fits = [
        functools.reduce(numpy.logical_and, (n <= b for n, b in zip(lengths, bounds, strict=True)))
        for bounds in limits[1:]
    ]
    kind: Any = sum(map(ints, fits), numpy.zeros(count, np.int32))
    classes = np.arange(len(rows), dtype=np.int32)
    of_class = ints((kind[:, None] == classes[None]).sum(0))
    first, order = sums(of_class) - of_class, in_order(kind)
    rank = in_order(order) - first[kind]
    # A row opens a block if those before it in its class fill theirs.
    room = numpy.take(capacity, kind)
    opens = rank % room == 0
    opener = order[first[kind] + rank // room * room]
    block, slot = (sums(opens) - np.int32(1))[opener], rank % room
    of_block = in_order(~opens)[np.minimum(np.arange(blocks, dtype=np.int32), most)]
    used = np.arange(blocks, dtype=np.int32) < ints(opens.sum())
    its_kind = kind[of_block]
    held = numpy.minimum(numpy.take(capacity, its_kind), of_class[its_kind] - rank[of_block])
    held = numpy.where(used, held, np.int32(0))
    there = (first[its_kind] + rank[of_block])[:, None] + np.arange(slots, dtype=np.int32)[None]
    row = order[numpy.minimum(there, most)]
    filled = np.arange(slots, dtype=np.int32)[None] < held[:, None]
    row = numpy.where(filled, row, np.int32(0)).reshape(-1)
    return [kind, block, slot, numpy.where(used, its_kind, np.int32(len(rows))), held, row]


def _blocks_on_cpu(*lengths: Value, limits: Any, rows: Any, blocks: int) -> list[Any]:
    """As `_blocks`, by a loop over rows, which is one function to compile."""
    count, slots, zero, one = lengths[0].shape[0], rows[-1], np.int32(0), np.int32(1)
    capacity = np.array(rows, np.int32)

    def step(i: Any, state: Any) -> Any:
        i = lax.convert_element_type(i, np.int32)  # in double precision loops count in 64 bits
        opened, last, filled, (kind, block, slot, number, held, row) = state
        own = zero
        for bounds in limits[1:]:
            fits = [entry_of(n, i) <= np.int32(b) for n, b in zip(lengths, bounds, strict=True)]
            own += lax.convert_element_type(functools.reduce(lax.bitwise_and, fits), np.int32)
        before = entry_of(filled, own)
        opens = before == entry_of(jnp.asarray(capacity), own)
        where = lax.select(opens, opened, entry_of(last, own))
        place = lax.select(opens, zero, before)
        placed = [
            put_entry(kind, own, i),
            put_entry(block, where, i),
            put_entry(slot, place, i),
            put_entry(number, own, where),
            put_entry(held, place + one, where),
            put_entry(row, i, where * np.int32(slots) + place),
        ]
        opened += lax.convert_element_type(opens, np.int32)
        return opened, put_entry(last, where, own), put_entry(filled, place + one, own), placed

    full = lambda size, value: lax.full((size,), value, np.int32)
    empty = [full(count, 0) for _ in range(3)]
    empty += [full(blocks, len(rows)), full(blocks, 0), full(blocks * slots, 0)]
    state = zero, full(len(rows), 0), jnp.asarray(capacity), empty
    return lax.fori_loop(zero, np.int32(count), step, state)[-1]


def _elements(numpy: Any, *operands: Any, widths: Any, room: Any, size: int) -> list[Any]:
    """As `find_elements`."""
    rows, axes = RowsOfBlocks(*operands[:6]), len(widths)
    starts, row_of, *rest = operands[6:]
    sizes, places = rest[:axes], rest[axes:]
    blocks, count = rows.number.shape[0], starts.shape[0]
    slots = rows.row.shape[0] // blocks
    take = functools.partial(numpy.take, mode="clip")

    # Of each class, which slot a place of a block is in, and where in the row it is.
    shape = np.maximum(np.array(widths, np.int32), 1)
    within, of_class = np.broadcast_to(np.arange(size, dtype=np.int32), (shape.shape[1], size)), []
    for width in shape[::-1]:
        of_class.insert(0, within % width[:, None])
        within = within // width[:, None]
    kind = numpy.minimum(rows.number, np.int32(shape.shape[1] - 1))
    slot = take(np.minimum(within, slots), kind, axis=0)
    row, _ = _with_stand_ins(rows, slots)
    ahead = np.arange(blocks, dtype=np.int32)[:, None] * np.int32(slots)
    own = take(row.reshape(-1), ahead + numpy.minimum(slot, np.int32(slots - 1)))
    inside, at_places = slot < slots, []
    for of_axis, length in zip(of_class, sizes, strict=True):
        at_places.append(take(of_axis, kind, axis=0))
        inside &= at_places[-1] < take(length, own)
    along = [take(length, own) for length in sizes] if room is None else list(map(np.int32, room))
    element = take(starts, own) + linear(at_places, along)
    if room is None:  # rows of traced lengths end where the array does
        inside &= element < np.int32(row_of.shape[0])
    there = numpy.where(inside, element, np.int32(-1))
    back = numpy.where(slot < rows.held[:, None], there, np.int32(-1))

    each = [take(width, rows.kind) for width in shape]  # of each row
    first = rows.block * np.int32(size) + rows.slot * math.prod(each)
    at = take(first, row_of) + linear(places, [take(width, row_of) for width in each])
    belongs = row_of < count
    for place, length in zip(places, sizes, strict=True):
        belongs &= place < take(length, row_of)
    at = numpy.where(belongs, at, np.int32(-1))
    return [at, there.reshape(-1), back.reshape(-1)]


def _elements_on_cpu(*operands: Value, size: int, widths: Any, room: Any) -> list[Any]:
    """As `_elements`, by two loops over a few elements at a time, for rows of one axis."""
    if len(widths) > 1:
        return _elements(jnp, *operands, size=size, widths=widths, room=room)
    rows, (starts, row_of, length, _) = RowsOfBlocks(*operands[:6]), operands[6:]
    blocks, count, capacity = rows.number.shape[0], starts.shape[0], row_of.shape[0]
    slots, classes = rows.row.shape[0] // blocks, len(widths[0])
    zero, one, window = np.int32(0), np.int32(1), np.int32(WINDOW)
    within, none = np.arange(WINDOW, dtype=np.int32), np.full(WINDOW, -1, np.int32)
    width = jnp.asarray(np.maximum(widths[0], 1).astype(np.int32))
    # So many rows of a class there are in a block; then comes what its rows leave of the block.
    held = np.array([min(slots, size // max(w, 1)) for w in widths[0]], np.int32)
    rest = jnp.asarray(np.int32(size) - held * np.maximum(widths[0], 1).astype(np.int32))
    held, last = jnp.asarray(held), np.int32(count - 1)
    full = lambda size: lax.full((size + WINDOW,), -1, np.int32)

    def of_element(state: Any) -> Any:
        row, place, at = state
        start = entry_of(starts, row)
        behind = entry_of(starts, lax.min(row + one, last))
        extent = lax.select(row < last, behind, np.int32(capacity)) - start
        its_width = entry_of(width, entry_of(rows.kind, row))
        first = entry_of(rows.block, row) * np.int32(size) + entry_of(rows.slot, row) * its_width
        values = lax.select(place + within < entry_of(length, row), first + place + within, none)
        at = put_part(at, values, start + place)
        leaves = place + window >= extent
        row += lax.convert_element_type(leaves, np.int32)
        return row, lax.select(leaves, zero, place + window), at

    def of_place(state: Any) -> Any:
        block, slot, place, there, back = state
        kind = lax.min(entry_of(rows.number, block), np.int32(classes - 1))
        in_slot, own = slot < entry_of(held, kind), slot < entry_of(rows.held, block)
        row = entry_of(rows.row, block * np.int32(slots) + lax.select(own, slot, zero))
        its_width = entry_of(width, kind)
        here = lax.select(in_slot, lax.min(entry_of(length, row), its_width), zero)
        values = lax.select(place + within < here, entry_of(starts, row) + place + within, none)
        to = block * np.int32(size) + slot * its_width + place
        there = put_part(there, values, to)
        back = put_part(back, lax.select(lax.broadcast(own, (WINDOW,)), values, none), to)
        extent = lax.select(in_slot, its_width, entry_of(rest, kind))
        leaves = place + window >= extent
        place = lax.select(leaves, zero, place + window)
        done = leaves & ~in_slot
        slot = lax.select(done, zero, slot + lax.convert_element_type(leaves, np.int32))
        return block + lax.convert_element_type(done, np.int32), slot, place, there, back

    at = lax.while_loop(lambda s: s[0] < count, of_element, (zero, zero, full(capacity)))[-1]
    start = zero, zero, zero, full(blocks * size), full(blocks * size)
    there, back = lax.while_loop(lambda s: s[0] < blocks, of_place, start)[-2:]
    return [at[:capacity], there[: blocks * size], back[: blocks * size]]


def _shapes_of_blocks(*lengths: Any, limits: Any, rows: Any, blocks: int) -> list[Any]:
    return [*[lengths[0].shape] * 3, *[(blocks,)] * 2, (blocks * rows[-1],)]


def _shapes_of_elements(*operands: Any, widths: Any, room: Any, size: int) -> list[Any]:
    places = (RowsOfBlocks(*operands[:6]).number.shape[0] * size,)
    return [operands[7].shape, places, places]


PROGRAMS["blocks"] = IndexProgram(
    functools.partial(_blocks, jnp), _blocks_on_cpu, _shapes_of_blocks
)
PROGRAMS["elements"] = IndexProgram(
    functools.partial(_elements, jnp), _elements_on_cpu, _shapes_of_elements
)


def linear(places: Sequence[Any], room: Sequence[Any]) -> Any:
    """The place of an element among all of a row, the last axis of which is the fastest."""
    at = places[0]
    for place, size in zip(places[1:], room[1:], strict=True):
        at = at * size + place
    return at


Dims = Sequence[Any]
"""The sizes of the ragged axes of a value, in order."""


@dataclass(frozen=True)
class SizeClasses:
    """Which classes rows may be in, and how many blocks they fill.

    Attributes:
      bounds: for each class, from that of the longest rows down, the bound of each size.
      rows: for each class how many of its rows a block holds.
      blocks: as many as all rows fill at most, whatever their lengths.
    """

    bounds: tuple[Mapping[str, int], ...]
    rows: tuple[int, ...]
    blocks: int

    @classmethod
    def of(
        cls, bounds: Mapping[str, int], room: Mapping[str, int], count: int, most: int, rows: int
    ) -> SizeClasses:
        """At most so many classes.

        Args:
          bounds: the greatest value of each size.
          room: how many elements packed rows have room for, by size.
          count: how many rows there are.
          most: how many classes there may be.
          rows: how many of the longest rows a block holds.
        """
        number = max(1, min(most, max(bounds.values()).bit_length()))
        whole = {n: _divisible(b, 1 << (number - 1)) for n, b in bounds.items()}
        halved = tuple({n: max(1, b >> k) for n, b in whole.items()} for k in range(number))
        # A row of class k that is not the last is longer, in one of its sizes, than half of the
        # bound of its class. So those of a full block take more than half the room of `rows` rows
        # of the greatest length.
        longer = sum(2 * room[n] // (rows * max(b, 1)) for n, b in bounds.items())
        fewest = longer + count // (rows << (number - 1))
        blocks = min(fewest + len(bounds), count // rows) + number  # the last of each is not full
        return cls(halved, tuple(rows << k for k in range(number)), blocks)

    def sizes(self, k: int, values: Mapping[str, Any]) -> Sizes:
        return Sizes(self.bounds[k], values)

    def widths(self, dim: Any) -> np.ndarray:
        """The room that a row has in each class along a dimension of size `dim`."""
        return np.array([self.sizes(k, {}).bound(dim) for k in range(len(self.rows))], np.int32)

    def elements(self, dims: Dims) -> int:
        each = np.array([self.widths(dim) for dim in dims], np.int64)
        return int((each.prod(0) * np.array(self.rows)).max())


_MOST_ADDED = 1 / 16  # of a bound


def _divisible(bound: int, by: int) -> int:
    """A bound that halves come out even of, if one is near.

    Rows of each class then fill a block to its end, and nothing is cut off or added, which would
    be a function to compile for each array and class.
    """
    rounded = -(-bound // by) * by
    return rounded if rounded - bound <= _MOST_ADDED * bound else bound


@dataclass(frozen=True)
class Elements:
    """Where rows are along an axis of an array, which holds all of their ragged axes.

    Attributes:
      starts: of each row.
      sizes: of each row, along each of its axes.
      rows: of each element of the axis the row.
      places: of each element its place there, along each axis.
      room: how many places there are along each axis; None where they are as many as the row has.
    """

    starts: Any
    sizes: Sequence[Any]
    rows: Any
    places: Sequence[Any]
    room: Sequence[int] | None


class Blocks:
    """The rows in blocks, and values of all rows moved into blocks and back.

    Attributes:
      classes: which rows may be in, and how many blocks there are.
      rows: which rows are in which block.
    """

    def __init__(self, classes: SizeClasses, lengths: Mapping[str, Any]) -> None:
        limits = [[each[name] for name in lengths] for each in classes.bounds]
        self.rows = find_blocks(list(lengths.values()), limits, classes.rows, classes.blocks)
        self.classes = classes
        self._of_elements: dict[Any, PlacesOfElements] = {}

    @property
    def number(self) -> Any:
        """The class of each block; as many as there are classes where it holds no row."""
        return self.rows.number

    def take(self, x: Value) -> Any:
        """An array with the rows in front as one with blocks and slots in front."""
        at, there, _ = self._slots
        return moved(x, 0, there, at).reshape(self.classes.blocks, -1, *x.shape[1:])

    def put(self, x: Value) -> Any:
        at, _, back = self._slots
        return moved(lax.collapse(x, 0, 2), 0, at, back)

    @cached_property
    def _slots(self) -> tuple[Any, Any, Any]:
        return self.rows.slots(self.classes.rows[-1])

    def split(self, x: Value, dims: Dims, elements: Elements) -> Any:
        """Rows along axis 0 in blocks: block, place in the block."""
        places = self._places(dims, elements)
        out = moved(x, 0, places.there, places.at)
        return out.reshape(self.classes.blocks, self.classes.elements(dims), *x.shape[1:])

    def join(self, x: Value, dims: Dims, elements: Elements) -> Any:
        places = self._places(dims, elements)
        return moved(lax.collapse(x, 0, 2), 0, places.at, places.back)

    def _places(self, dims: Dims, elements: Elements) -> PlacesOfElements:
        key = tuple(map(str, dims)), elements.rows.shape
        if key not in self._of_elements:
            widths = [self.classes.widths(dim).tolist() for dim in dims]
            parts = elements.starts, elements.rows, elements.sizes, elements.places
            size = self.classes.elements(dims)
            places = find_elements(self.rows, *parts, widths, elements.room, size)
            self._of_elements[key] = places
        return self._of_elements[key]
