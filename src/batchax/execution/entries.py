"""Entries of an array along one of its axes, by numbers that are known when the program runs.

All are within bounds. These functions are made of what ``lax.dynamic_index_in_dim`` and its kin
come to, which take two to five times as long to trace.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.words import Value


def part_of(x: Value, start: Any, axis: int, width: int) -> Any:
    """So many entries of `x` along an axis, from one on."""
    sizes = list(x.shape)
    sizes[axis] = width
    part = lax.dynamic_slice(x, _places(x, start, axis), sizes, allow_negative_indices=False)
    return _compat.unconsumed(part)  # of keys, no step reads those of another


def put_part(array: Value, part: Value, start: Any, axis: int = 0) -> Any:
    """`array` with other entries along an axis, from one on."""
    places = _places(array, start, axis)
    return lax.dynamic_update_slice(array, part, places, allow_negative_indices=False)


def entry_of(x: Value, t: Any, axis: int = 0) -> Any:
    """Entry `t` along an axis."""
    return lax.squeeze(part_of(x, t, axis, 1), [axis])


def put_entry(array: Value, entry: Any, t: Any, axis: int = 0) -> Any:
    """`array` with another entry `t` along an axis."""
    return put_part(array, lax.expand_dims(entry, [axis]), t, axis)


def _places(x: Value, start: Any, axis: int) -> list[Any]:
    start = np.int32(start) if isinstance(start, int) else start
    places: list[Any] = [np.zeros((), start.dtype)] * x.ndim
    places[axis] = start
    return places
