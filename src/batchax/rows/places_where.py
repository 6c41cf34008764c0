"""Where vectors of bools are true: the places, in order, and how many there are.

On a CPU one loop finds them, which XLA compiles as one kernel in the time that it takes for an
addition. Running sums and a scatter are twenty kernels.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.execution.slices import put_entry
from batchax.jaxprs.types import Aval, Value, Values
from batchax.kernel.axis import Axis, Positions, axis_to_front
from batchax.kernel.inner import repeat
from batchax.kernel.own_primitive import NoDerivative, own_primitive


def places_where(condition: Value, size: int) -> list[Any]:
    """Where a vector of bools is true, and how many elements are, also of more than `size`.

    It is the first `size` places, int32, then zeros.
    """
    return places_where_p.bind(condition, size=size)


def _places(condition: Value, *, size: int) -> list[Any]:
    if condition.ndim > 1:
        return jax.vmap(lambda x: _places(x, size=size))(condition)
    so_far = jnp.cumsum(condition, dtype=np.int32)
    target = jnp.where(condition, so_far - 1, size)
    own = jnp.arange(condition.shape[0], dtype=np.int32)
    places = jnp.zeros(size, np.int32).at[target].set(own, mode="drop")
    return [places, jnp.sum(condition, dtype=np.int32)]


def _places_on_cpu(condition: Value, *, size: int) -> list[Any]:
    *leading, count = condition.shape
    # Behind the places of each lane is an entry for what is written and does not count.
    lanes, room, last = math.prod(leading), size + 1, np.int32(size)
    if not (lanes and count):
        return [jnp.zeros((*leading, size), np.int32), jnp.zeros(leading, np.int32)]

    # As it is, if it has one axis of lanes: another shape would be another array to compute.
    rows = condition.reshape(lanes, count)

    def of_lane(lane: Value, state: tuple[Any, Any]) -> tuple[Any, Any]:
        places, counts = state
        first = lax.mul(lane, np.int32(room))
        to = lambda found: lax.add(first, lax.min(found, last))

        def step(place: Value, state: tuple[Any, Any]) -> tuple[Any, Any]:
            places, found = state
            # Each place is written: one where nothing is true is written over by the next.
            places, at = put_entry(places, place, to(found)), [lane, place]
            is_true = lax.dynamic_slice(rows, at, [1, 1], allow_negative_indices=False)
            is_true = lax.convert_element_type(lax.reshape(is_true, ()), np.int32)
            return places, lax.add(found, is_true)

        places, found = repeat(count, step, (places, np.int32(0)))
        return put_entry(places, np.int32(0), to(found)), put_entry(counts, found, lane)

    state = lax.full((lanes * room,), 0, np.int32), lax.full((lanes,), 0, np.int32)
    places, counts = repeat(lanes, of_lane, state)
    places = lax.slice_in_dim(lax.reshape(places, (*leading, room)), 0, size, axis=-1)
    return [places, lax.reshape(counts, leading)]


def _types(condition: Aval, *, size: int) -> list[Any]:
    *leading, _ = condition.shape
    shapes = (*leading, size), tuple(leading)
    return [condition.update(shape=shape, dtype=np.dtype(np.int32)) for shape in shapes]


def _batched(axis: Axis, args: Values, axes: Positions, /, *, size: int) -> tuple[Any, Positions]:
    return places_where(axis_to_front(axis, args[0], axes[0]), size), [0, 0]


places_where_p = own_primitive(
    "places_where",
    called="where a condition is true",
    operations=_places,
    on_cpu=_places_on_cpu,
    types=_types,
    rule=_batched,
    transpose=NoDerivative("where a condition is true is transposed, which is not linear."),
)
