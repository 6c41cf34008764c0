"""Where rows of traced lengths are in packed arrays, computed by one short loop on a CPU.

Written as sums and scatters it is 30 functions, each of which XLA compiles by itself, and takes
longer to run. A loop of small steps is one function (`docs/decisions/short_loops.md`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Aval, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import NoDerivative, Of, own_primitive


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
    return row_places_p.bind(lengths, capacity=capacity, bound=bound)


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
    zero, one, window = np.int32(0), np.int32(1), np.int32(_WINDOW)
    room, last = np.int32(capacity), np.int32(count - 1)
    within = np.arange(_WINDOW, dtype=np.int32)

    def at(x: Any, place: Any) -> Any:
        return lax.dynamic_index_in_dim(x, place, 0, False, allow_negative_indices=False)

    def put(x: Any, values: Any, place: Any) -> Any:
        return lax.dynamic_update_slice(x, values, [place], allow_negative_indices=False)

    def step(_: Any, state: Any) -> Any:
        """A few elements of a row; what is written of the next one is written over later."""
        row, place, element, of_last, (starts, sizes, rows, places) = state
        in_row = row <= last
        start = element - place
        most = lax.min(np.int32(min(bound, capacity)), room - start)
        size = lax.clamp(zero, at(lengths, lax.min(row, last)), most)
        start, size = (
            lax.select(in_row, x, y) for x, y in zip((start, size), of_last, strict=True)
        )
        starts, sizes = (
            put(x, lax.reshape(y, (1,)), lax.min(row, last))
            for x, y in ((starts, start), (sizes, size))
        )
        to = lax.min(element, room)
        rows = put(rows, lax.broadcast(row, (_WINDOW,)), to)
        places = put(places, row * np.int32(bound) + place + within, to)
        leaves = in_row & (size - place <= window)
        element += lax.select(leaves, size - place, window)
        place = lax.select(leaves, zero, place + window)
        row = lax.select(leaves, row + one, row)
        return row, place, element, (start, size), (starts, sizes, rows, places)

    empty = lambda size: lax.full((size,), 0, np.int32)
    arrays = empty(count), empty(count), empty(capacity + _WINDOW), empty(capacity + _WINDOW)
    steps = np.int32(count + capacity // _WINDOW + 1)
    state = lax.fori_loop(zero, steps, step, (zero, zero, zero, (zero, zero), arrays))
    starts, sizes, rows, places = state[-1]
    return [starts, sizes, rows[:capacity], places[:capacity]]


_WINDOW = 16  # elements that are written at once


def _types(lengths: Aval, *, capacity: int, bound: int) -> list[Any]:
    elements: Any = lengths.update(shape=(capacity,))
    return [lengths, lengths, elements, elements]


def _batched(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, list[Position]]:
    run = lambda lengths: _operations(lengths, **params)
    return batch_function(axis, run, args, axes)


row_places_p = own_primitive(
    "row_places",
    called="where rows are",
    operations=_operations,
    on_cpu=_on_cpu,
    types=_types,
    programs=(),
    facts="",
    rule=_batched,
    jvp=Of(None),
    transpose=NoDerivative("where rows are is transposed, which is not linear."),
)
