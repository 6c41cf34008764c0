"""Arrays that a loop writes its results into."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.words import Aval, Value


def blank(aval: Aval, number: int, after: Value | None = None) -> Any:
    """An array of type `aval` of which every entry will be written over.

    What it holds depends on `number`, which should differ from array to array. Of arrays that
    hold the same value the compiler makes a single one, and then has to copy that for each loop
    that writes into it.

    A compiler makes what depends on nothing before all else, and it takes memory from then on. An
    array that is to be made `after` a value is there holds a number of that.
    """
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):  # random keys: they cannot hold a number
        sharding = None if aval.sharding.mesh.empty else aval.sharding
        return lax.empty(aval.shape, aval.dtype, out_sharding=sharding)
    if after is not None and aval.sharding.mesh.empty:
        # Of an operand of a branch a compiler makes the whole before it makes a result.
        return lax.cond(
            lax.ne(_corner(after), np.asarray(number % 100, after.dtype)),
            lambda x: _full_of(x, aval),
            lambda x: _full_of(x, aval),
            lax.stop_gradient(after),
        )
    # Small numbers differ in narrow dtypes too: in bfloat16, 300 and 301 are the same.
    value = number % 2 == 0 if aval.dtype == bool else number % 100
    return _compat.filled(aval, value)


def _corner(x: Value) -> Any:
    return lax.squeeze(lax.slice(x, [0] * x.ndim, [1] * x.ndim), range(x.ndim))


def _full_of(x: Value, aval: Aval) -> Any:
    first = lax.ne(_corner(x), np.asarray(0, x.dtype))
    return lax.broadcast(lax.convert_element_type(first, aval.dtype), aval.shape)
