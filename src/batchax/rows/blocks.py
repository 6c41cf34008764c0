"""Which rows are in which block, and their elements moved into blocks and back.

Rows are in size classes, and a block has slots for rows of one class. Every way between packed
rows, padded rows and blocks is a gather, and so is its transpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value
from batchax.rows.block_places import PlacesOfElements, find_blocks, find_elements
from batchax.rows.index import take_clipped
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
        """What symbols stand for in class `k`."""
        return Sizes(self.bounds[k], values)

    def widths(self, dim: Any) -> np.ndarray:
        """The room that a row has in each class along a dimension of size `dim`."""
        return np.array([self.sizes(k, {}).bound(dim) for k in range(len(self.rows))], np.int32)

    def elements(self, dims: Dims) -> int:
        """The elements of a block along dimensions of the sizes `dims`."""
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
        return moved(x, there, at).reshape(self.classes.blocks, -1, *x.shape[1:])

    def put(self, x: Value) -> Any:
        """What `take` made."""
        at, _, back = self._slots
        return moved(lax.collapse(x, 0, 2), at, back)

    @cached_property
    def _slots(self) -> tuple[Any, Any, Any]:
        return self.rows.slots(self.classes.rows[-1])

    def split(self, x: Value, dims: Dims, elements: Elements) -> Any:
        """Rows along axis 0 in blocks: block, place in the block."""
        places = self._places(dims, elements)
        out = moved(x, places.there, places.at)
        return out.reshape(self.classes.blocks, self.classes.elements(dims), *x.shape[1:])

    def join(self, x: Value, dims: Dims, elements: Elements) -> Any:
        """What `split` made."""
        places = self._places(dims, elements)
        return moved(lax.collapse(x, 0, 2), places.at, places.back)

    def _places(self, dims: Dims, elements: Elements) -> PlacesOfElements:
        key = tuple(map(str, dims)), elements.rows.shape
        if key not in self._of_elements:
            widths = [self.classes.widths(dim).tolist() for dim in dims]
            parts = elements.starts, elements.rows, elements.sizes, elements.places
            size = self.classes.elements(dims)
            places = find_elements(self.rows, *parts, widths, elements.room, size)
            self._of_elements[key] = places
        return self._of_elements[key]


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
    taken = take_clipped(x, index, 0)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys: there is no zero
        return taken
    hit = lax.broadcast_in_dim(index >= 0, taken.shape, (0,))
    return lax.select(hit, taken, lax.full_like(taken, 0))
