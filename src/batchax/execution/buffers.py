"""Arrays that a loop writes its results into."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from batchax import _compat
from batchax.jaxprs.words import Aval


def blank(aval: Aval, number: int) -> Any:
    """An array of type `aval` of which every entry will be written over.

    What it holds depends on `number`, which should differ from array to array. Of arrays that
    hold the same value the compiler makes a single one, and then has to copy that for each loop
    that writes into it.
    """
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):  # random keys: they cannot hold a number
        sharding = None if aval.sharding.mesh.empty else aval.sharding
        return lax.empty(aval.shape, aval.dtype, out_sharding=sharding)
    # Small numbers differ in narrow dtypes too: in bfloat16, 300 and 301 are the same.
    value = number % 2 == 0 if aval.dtype == bool else number % 100
    return _compat.filled(aval, value)
