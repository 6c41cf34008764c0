"""Which rows are in which block, and their elements moved into blocks and back.

Rows are in size classes, and a block has slots for rows of one class. Every way between packed
rows, padded rows and blocks is a gather, and so is its transpose.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value
from batchax.rows.sizes import Sizes
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose

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
        halved = tuple({n: max(1, b >> k) for n, b in bounds.items()} for k in range(number))
        # A row of class k that is not the last is longer, in one of its sizes, than half of the
        # bound of its class. So those of a full block take more than half the room of `rows` rows
        # of the greatest length.
        longer = sum(2 * room[n] // (rows * max(b, 1)) for n, b in bounds.items())
        fewest = longer + count // (rows << (number - 1))
        blocks = min(fewest + len(bounds), count // rows) + number  # the last of each is not full
        return cls(halved, tuple(rows << k for k in range(number)), blocks)

    def sizes(self, k: int, values: Mapping[str, Any]) -> Sizes:
        """What symbols stand for in class `k`."""
        return Sizes(self.bounds[k], values)

    def widths(self, dim: Any) -> np.ndarray:
        """The room that a row has in each class along a dimension of size `dim`."""
        return np.array([self.sizes(k, {}).bound(dim) for k in range(len(self.rows))], np.int32)

    def elements(self, dims: Dims) -> int:
        """The elements of a block along dimensions of the sizes `dims`."""
        each = np.array([self.widths(dim) for dim in dims], np.int64)
        return int((each.prod(0) * np.array(self.rows)).max())


@dataclass(frozen=True)
class Elements:
    """Where rows are along an axis of an array, which holds all of their ragged axes.

    Attributes:
      starts: of each row.
      sizes: of each row, along each of its axes.
      rows: of each element of the axis the row.
      places: of each element its place there, along each axis.
      room: how many places there are along each axis.
    """

    starts: Any
    sizes: Sequence[Any]
    rows: Any
    places: Sequence[Any]
    room: Sequence[int]

    @property
    def inside(self) -> Any:
        """Which elements of the axis belong to a row."""
        inside = self.rows < self.starts.shape[0]
        for size, place in zip(self.sizes, self.places, strict=True):
            inside &= place < jnp.take(size, self.rows, mode="clip")
        return inside


class Blocks:
    """The block and the slot of each row, and the row in each slot of each block."""

    def __init__(self, classes: SizeClasses, lengths: Mapping[str, Any]) -> None:
        self.classes = classes
        capacity = jnp.array(classes.rows, np.int32)
        count, number = len(next(iter(lengths.values()))), len(capacity)
        fits = [
            jnp.stack([lengths[n] <= b for n, b in bounds.items()]).all(0)
            for bounds in classes.bounds[1:]
        ]
        nothing = jnp.zeros(count, np.int32)
        self.class_of_row = sum((x.astype(np.int32) for x in fits), nothing)
        kinds = np.arange(number, dtype=np.int32)
        rows = (self.class_of_row[:, None] == kinds[None]).sum(0, dtype=np.int32)
        last_row = jnp.cumsum(rows, dtype=np.int32)
        filled = (rows + capacity - 1) // capacity
        last_block = jnp.cumsum(filled, dtype=np.int32)
        first_row, first_block = last_row - rows, last_block - filled
        order = jnp.argsort(self.class_of_row, stable=True).astype(np.int32)
        rank = jnp.argsort(order).astype(np.int32) - first_row[self.class_of_row]
        room = capacity[self.class_of_row]
        self.block, self.slot = first_block[self.class_of_row] + rank // room, rank % room

        blocks = np.arange(classes.blocks, dtype=np.int32)
        self.number = (blocks[:, None] >= last_block[None]).sum(1, dtype=np.int32)
        self.kind = jnp.minimum(self.number, np.int32(number - 1))  # of those that hold none, too
        first = first_row[self.kind] + (blocks - first_block[self.kind]) * capacity[self.kind]
        slots = np.arange(classes.rows[-1], dtype=np.int32)[None]
        places = first[:, None] + slots
        self.own = (slots < capacity[self.kind][:, None]) & (places < last_row[self.kind][:, None])
        # In place of a row that is missing the first of the block is run again.
        places = jnp.where(self.own, places, first[:, None])
        self.row = jnp.take(order, places, mode="clip")
        self.own &= (self.number < number)[:, None]

    @property
    def _slots(self) -> Any:
        """Where each row is among the slots of all blocks."""
        return self.block * np.int32(self.classes.rows[-1]) + self.slot

    def take(self, x: Value) -> Any:
        """An array with the rows in front as one with blocks and slots in front."""
        out = moved(x, self.row.reshape(-1), self._slots)
        return out.reshape(*self.row.shape, *x.shape[1:])

    def put(self, x: Value) -> Any:
        """What `take` made."""
        back = jnp.where(self.own, self.row, -1).reshape(-1)
        return moved(lax.collapse(x, 0, 2), self._slots, back)

    def split(self, x: Value, dims: Dims, elements: Elements) -> Any:
        """Rows along axis 0 in blocks: block, place in the block."""
        there, _ = self._places(dims, elements)
        out = moved(x, there, self._at(dims, elements))
        return out.reshape(self.classes.blocks, self.classes.elements(dims), *x.shape[1:])

    def join(self, x: Value, dims: Dims, elements: Elements) -> Any:
        """What `split` made."""
        there = self._at(dims, elements)
        _, back = self._places(dims, elements)
        return moved(lax.collapse(x, 0, 2), there, back)

    def _widths(self, dims: Dims) -> list[Any]:
        return [jnp.maximum(jnp.asarray(self.classes.widths(dim)), 1) for dim in dims]

    def _at(self, dims: Dims, elements: Elements) -> Any:
        """Where in the blocks each element is; -1 for those of no row."""
        widths = [width[self.class_of_row] for width in self._widths(dims)]
        first = self.block * self.classes.elements(dims) + self.slot * math.prod(widths)
        of_elements = lambda x: jnp.take(x, elements.rows, mode="clip")
        place = of_elements(first) + linear(elements.places, list(map(of_elements, widths)))
        return jnp.where(elements.inside, place, -1)

    def _places(self, dims: Dims, elements: Elements) -> tuple[Any, Any]:
        """The element at each place of the blocks; the same but for rows that run again.

        -1 where there is none.
        """
        widths = [width[self.kind][:, None] for width in self._widths(dims)]
        rest = np.arange(self.classes.elements(dims), dtype=np.int32)[None]
        slot = rest // math.prod(widths)
        of_slots = lambda x: jnp.take_along_axis(x, slot, 1, mode="clip")
        inside, places = slot < self.row.shape[1], []
        for width, size in reversed(list(zip(widths, elements.sizes, strict=True))):
            places.insert(0, rest % width)
            rest = rest // width
            inside &= places[0] < of_slots(size[self.row])
        start = of_slots(elements.starts[self.row])
        there = jnp.where(inside, start + linear(places, elements.room), -1)
        return there.reshape(-1), jnp.where(of_slots(self.own), there, -1).reshape(-1)


def linear(places: Sequence[Any], room: Sequence[Any]) -> Any:
    """The place of an element among all of a row, the last axis of which is the fastest."""
    at = places[0]
    for place, size in zip(places[1:], room[1:], strict=True):
        at = at * size + place
    return at


def moved(x: Value, there: Any, back: Any) -> Any:
    """The entries `there` of `x` along axis 0, zero for -1; in reverse those at `back` are taken.

    JAX would transpose a gather to a scatter, which on a CPU takes a hundred times as long.
    """
    of = lambda k: lambda indices, xs: [_take_or_zero(xs[0], indices[k])]
    if not is_inexact(x):
        return of(0)([there, back], [x])[0]
    return linear_with_transpose(of(0), of(1), [there, back], [x], "rows in blocks")[0]


def _take_or_zero(x: Value, index: Any) -> Any:
    if not x.shape[0]:  # there is nothing that an index could be clipped to
        return jnp.zeros((len(index), *x.shape[1:]), x.dtype)
    taken = jnp.take(x, index, axis=0, mode="clip")
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys: there is no zero
        return taken
    hit = lax.broadcast_in_dim(index >= 0, taken.shape, (0,))
    return lax.select(hit, taken, lax.full_like(taken, 0))
