"""Where rows of traced lengths are in packed arrays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.execution.slices import entry_of, put_entry, put_part
from batchax.jaxprs.words import Aval, Value
from batchax.rows.index_arrays import PROGRAMS, WINDOW, IndexProgram, index_arrays


def row_places(lengths: Value, capacity: int, bound: int) -> list[Any]:
    """Where rows are that follow one another in an array with room for `capacity` elements.

    Args:
      lengths: of the rows, int32 of shape (B,).
      capacity: an element that would be beyond is not there.
      bound: a row that is longer is cut off.

    Returns:
      Where each row begins and how many elements it has, of shape (B,); the row of each element
      and its place in padded rows that follow one another, of shape (capacity,). Elements of no row
      have row B, and a place beyond the last.
    """
    return index_arrays("rows", [lengths], capacity=capacity, bound=bound)


def _operations(lengths: Value, *, capacity: int, bound: int) -> list[Any]:
    clipped = jnp.clip(lengths, 0, min(bound, capacity))
    ends = jnp.minimum(jnp.cumsum(clipped, dtype=np.int32), capacity)
    starts = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends])[:-1]
    sizes = ends - starts

    def of_ended_rows(amounts: Any) -> Any:
        """For each element, the sum of `amounts` of the rows before its own."""
        marks = jnp.zeros(capacity, np.int32).at[ends].add(amounts, mode="drop")
        return jnp.cumsum(marks, dtype=np.int32)

    rows = of_ended_rows(np.int32(1))
    places = np.arange(capacity, dtype=np.int32) + of_ended_rows(bound - sizes)
    return [starts, sizes, rows, places]


def _on_cpu(lengths: Value, *, capacity: int, bound: int) -> list[Any]:
    count = lengths.shape[0]
    if not (count and capacity):
        return _operations(lengths, capacity=capacity, bound=bound)
    # Constants of their types: numbers of Python would be converted, each by an operation.
    zero, one, window = np.int32(0), np.int32(1), np.int32(WINDOW)
    room, last = np.int32(capacity), np.int32(count - 1)
    within = np.arange(WINDOW, dtype=np.int32)

    def step(_: Any, state: Any) -> Any:
        """A few elements of a row; what is written of the next one is written over later."""
        row, place, element, of_last, (starts, sizes, rows, places) = state
        in_row = row <= last
        start = element - place
        most = lax.min(np.int32(min(bound, capacity)), room - start)
        size = lax.clamp(zero, entry_of(lengths, lax.min(row, last)), most)
        start, size = (
            lax.select(in_row, x, y) for x, y in zip((start, size), of_last, strict=True)
        )
        starts = put_entry(starts, start, lax.min(row, last))
        sizes = put_entry(sizes, size, lax.min(row, last))
        to = lax.min(element, room)
        rows = put_part(rows, lax.broadcast(row, (WINDOW,)), to)
        places = put_part(places, row * np.int32(bound) + place + within, to)
        leaves = in_row & (size - place <= window)
        element += lax.select(leaves, size - place, window)
        place = lax.select(leaves, zero, place + window)
        row = lax.select(leaves, row + one, row)
        return row, place, element, (start, size), (starts, sizes, rows, places)

    empty = lambda size: lax.full((size,), 0, np.int32)
    arrays = empty(count), empty(count), empty(capacity + WINDOW), empty(capacity + WINDOW)
    steps = np.int32(count + capacity // WINDOW + 1)
    state = lax.fori_loop(zero, steps, step, (zero, zero, zero, (zero, zero), arrays))
    starts, sizes, rows, places = state[-1]
    return [starts, sizes, rows[:capacity], places[:capacity]]


def _shapes(lengths: Aval, *, capacity: int, bound: int) -> list[Any]:
    return [lengths.shape, lengths.shape, (capacity,), (capacity,)]


PROGRAMS["rows"] = IndexProgram(_operations, _on_cpu, _shapes)
