"""Where the elements of each row are, and rows between packed and padded arrays.

Packed, the elements of all rows follow one another along an axis; padded, each row has an
array of the same size. Both ways are gathers, each the transpose of the other, which is said
to JAX: left to itself it would transpose a gather to a scatter, a hundred times slower on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose


@dataclass(frozen=True)
class RowIndex:
    """Where the rows of a packed array are.

    Attributes:
      starts: where each row begins, int32 of shape (B,).
      lengths: how many elements each has, int32 of shape (B,); within the array and the bound.
      bound: no row is longer.
      exact: whether it is known that rows fill the packed array to its end.
    """

    starts: Any
    lengths: Any
    bound: int
    exact: bool

    @classmethod
    def of(cls, lengths: Any, capacity: int, bound: int) -> RowIndex:
        """For rows of these lengths in an array with room for `capacity` elements."""
        if not isinstance(lengths, Tracer):  # checked when the Ragged was made
            known = np.asarray(lengths).astype(np.int32)
            starts = (np.cumsum(known) - known).astype(np.int32)
            return cls(starts, known, bound, int(known.sum()) == capacity)
        clipped = jnp.clip(lengths.astype(jnp.int32), 0, min(bound, capacity))
        ends = jnp.minimum(jnp.cumsum(clipped), capacity)
        starts = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends])[:-1]
        return cls(starts, ends - starts, bound, False)

    def row_of(self, capacity: int) -> Any:
        """The row of each element of the packed array; B for those that belong to none."""
        ends = self.starts + self.lengths
        if not isinstance(ends, (jax.Array, Tracer)):
            rows = np.repeat(np.arange(len(ends), dtype=np.int32), self.lengths)
            return np.pad(rows, (0, capacity - len(rows)), constant_values=len(ends))
        # A row ends at each of `ends`: as many as have ended is the number of the row.
        marks = jnp.zeros(capacity, jnp.int32).at[ends].add(1, mode="drop")
        return jnp.cumsum(marks)

    def place_of(self, capacity: int) -> Any:
        """The place within its row of each element of the packed array."""
        rows = self.row_of(capacity)
        numpy = np if isinstance(rows, np.ndarray) else jnp
        if not len(self.starts):
            return numpy.zeros(capacity, np.int32)
        at = numpy.minimum(rows, len(self.starts) - 1)
        return numpy.arange(capacity, dtype=np.int32) - numpy.asarray(self.starts)[at]

    def mask(self) -> Any:
        """Which elements of padded rows belong to the row: shape (B, bound)."""
        return jnp.asarray(self.lengths)[:, None] > jnp.arange(self.bound, dtype=jnp.int32)


def pad_rows(data: Any, index: RowIndex, axis: int, fill_value: Any = 0) -> Any:
    """Packed rows, along `axis` of `data`, as an array of padded rows with the rows in front."""
    rows, bound, capacity = index.starts.shape[0], index.bound, data.shape[axis]
    shape = (rows, *data.shape[:axis], bound, *data.shape[axis + 1 :])
    if fill_value is None or jnp.issubdtype(data.dtype, jax.dtypes.prng_key):
        fill_value = 0
    if capacity == 0 or rows == 0 or bound == 0:
        return jnp.full(shape, fill_value, data.dtype)
    filled = _linear_gather(_pad, _pack, index, data, axis, capacity)
    if isinstance(fill_value, (int, float)) and fill_value == 0:
        return filled  # as it is
    mask = lax.broadcast_in_dim(index.mask(), filled.shape, (0, axis + 1))
    return jnp.where(mask, filled, jnp.asarray(fill_value, data.dtype))


def pack_rows(padded: Any, index: RowIndex, axis: int, capacity: int) -> Any:
    """Padded rows, with the rows in front, one after another along `axis`; then zeros."""
    return _linear_gather(_pack, _pad, index, padded, axis, capacity)


def _linear_gather(
    forward: Any, transpose: Any, index: RowIndex, x: Any, axis: int, capacity: int
) -> Any:
    def with_index(gather: Any) -> Any:
        def run(residuals: Any, operands: Any) -> list[Any]:
            own = index
            if residuals:
                own = replace(index, starts=residuals[0], lengths=residuals[1])
            return [gather(own, operands[0], axis, capacity)]

        return run

    known = isinstance(index.starts, np.ndarray)
    residuals = [] if known else [index.starts, index.lengths]
    if not is_inexact(x):
        return with_index(forward)(residuals, [x])[0]
    ways = with_index(forward), with_index(transpose)
    return linear_with_transpose(*ways, residuals, [x])[0]


def _pad(index: RowIndex, data: Any, axis: int, capacity: int) -> Any:
    rows, bound = index.starts.shape[0], index.bound
    if rows == 0 or bound == 0 or capacity == 0:
        return jnp.zeros((rows, *data.shape[:axis], bound, *data.shape[axis + 1 :]), data.dtype)
    places = jnp.arange(bound, dtype=jnp.int32)
    at = jnp.clip(jnp.asarray(index.starts)[:, None] + places, 0, capacity - 1)
    taken = jnp.moveaxis(_take(data, at, axis), axis, 0) if axis else _take(data, at, 0)
    return _zero_unless(taken, index.mask(), (0, axis + 1))


def _pack(index: RowIndex, padded: Any, axis: int, capacity: int) -> Any:
    rows, bound = padded.shape[0], index.bound
    shape = (*padded.shape[1 : axis + 1], capacity, *padded.shape[axis + 2 :])
    if rows == 0 or bound == 0 or capacity == 0:
        return jnp.zeros(shape, padded.dtype)
    row, place = index.row_of(capacity), index.place_of(capacity)
    belongs = jnp.asarray(row < rows)
    row, place = jnp.minimum(jnp.asarray(row), rows - 1), jnp.clip(jnp.asarray(place), 0, bound - 1)
    together = jnp.moveaxis(padded, axis + 1, 1)
    flat = together.reshape(rows * bound, *together.shape[2:])
    packed = jnp.moveaxis(_take(flat, row * bound + place, 0), 0, axis)
    return packed if index.exact else _zero_unless(packed, belongs, (axis,))


def _take(x: Any, at: Any, axis: int) -> Any:
    """As ``jnp.take`` for indices that are known to be in bounds."""
    return jnp.take(x, at, axis=axis, mode="clip")


def _zero_unless(x: Any, belongs: Any, dims: tuple[int, ...]) -> Any:
    belongs = lax.broadcast_in_dim(belongs, x.shape, dims)
    return lax.select(belongs, x, lax.full_like(x, 0))
