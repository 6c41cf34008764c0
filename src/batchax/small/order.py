"""Vectors in the order of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def in_order(values: Any, vectors: Sequence[Any]) -> list[Any]:
    """The same in ascending order: each is put where as many are less as there are."""
    n = values.shape[0]
    places = np.arange(n)[:, None]

    def count(i: Any, rank: Any) -> Any:
        less = (values[i] < values) | ((values[i] == values) & (i < places))
        return rank + less.astype(rank.dtype)

    rank = lax.fori_loop(0, n, count, jnp.zeros(values.shape, "int32"))

    def put(i: Any, outs: Any) -> Any:
        here = rank[i] == places
        spread = lambda x: here.reshape(n, *(1,) * (x.ndim - 2), -1)
        return [
            jnp.where(spread(x), x[i], out) for x, out in zip((values, *vectors), outs, strict=True)
        ]

    outs = [jnp.zeros_like(x) for x in (values, *vectors)]
    return lax.fori_loop(0, n, put, outs)
