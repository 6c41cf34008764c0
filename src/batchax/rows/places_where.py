"""Where vectors of bools are true: the places, in order, and how many there are.

On a CPU one loop finds them, which XLA compiles as one function in the time that it takes for an
addition. Running sums and a scatter are twenty functions, each to be compiled.
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
from batchax.kernel.own_primitive import NoDerivative, Of, own_primitive


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
    lanes, room = math.prod(leading), size + 1
    # As it is, if it has one axis of lanes: another shape would be another array to compute.
    rows, zero, last = condition.reshape(lanes, count), np.int32(0), np.int32(size)
    if not (lanes and count):
        return [jnp.zeros((*leading, size), np.int32), jnp.zeros(leading, np.int32)]

    # JAX counts steps in 64 bits where there are such integers.
    def of_lane(lane: Value, state: tuple[Any, Any]) -> tuple[Any, Any]:
        places, counts = state
        lane = lax.convert_element_type(lane, np.int32)
        to = lane * np.int32(room)

        def step(place: Value, state: tuple[Any, Any]) -> tuple[Any, Any]:
            places, found = state
            place = lax.convert_element_type(place, np.int32)
            # Each place is written: one where nothing is true is written over by the next.
            places = put_entry(places, place, to + lax.min(found, last))
            is_true = lax.dynamic_slice(rows, [lane, place], [1, 1], allow_negative_indices=False)
            return places, found + lax.convert_element_type(lax.reshape(is_true, ()), np.int32)

        places, found = lax.fori_loop(zero, np.int32(count), step, (places, zero))
        return put_entry(places, zero, to + lax.min(found, last)), put_entry(counts, found, lane)

    state = lax.full((lanes * room,), 0, np.int32), lax.full((lanes,), 0, np.int32)
    places, counts = lax.fori_loop(zero, np.int32(lanes), of_lane, state)
    return [places.reshape(*leading, room)[..., :size], counts.reshape(leading)]


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
    programs=(),
    facts="",
    rule=_batched,
    jvp=Of(None),
    transpose=NoDerivative("where a condition is true is transposed, which is not linear."),
)
