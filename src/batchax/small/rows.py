"""Rows of arrays by tables of places."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from batchax.jaxprs.words import Value


def rows(x: Value, places: Any) -> Any:
    """The rows of `x` at `places`, which are in it."""
    places = np.asarray(places, np.int32)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, x.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    sizes = (1, *x.shape[1:])
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, places[:, None], numbers, sizes, mode=mode)


def column(numbers: Any, like: Value) -> Any:
    """A number for each row of `like`."""
    return np.asarray(numbers, like.dtype).reshape(-1, *(1,) * (like.ndim - 1))
