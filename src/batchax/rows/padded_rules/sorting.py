"""Sorting: padding holds what sorts last, and comes after what is equal to it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from batchax.jaxprs.neutral import highest, lowest
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.moving import pad_end
from batchax.rows.sizes import is_symbolic


@padded_rule("sort")
def _sort(op: Operation, *rows: Row, dimension: int, num_keys: int, **params: Any) -> Any:
    if op.sizes.is_exact(rows[0].shape[dimension]):
        return op.bind(*(row.value for row in rows))
    last = [_last(row.value.dtype) for row in rows[:num_keys]]
    keys = [op.filled(row, value, (dimension,)) for row, value in zip(rows, last, strict=False)]
    # Stably: what is equal in the row, NaN for one, comes before the padding.
    return op.bind(*keys, *(row.value for row in rows[num_keys:]), is_stable=True)


def _last(dtype: Any) -> Any:
    """What no value of `dtype` sorts after."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return complex(jnp.nan, jnp.nan)
    return jnp.nan if jnp.issubdtype(dtype, jnp.floating) else highest(dtype)


@padded_rule("top_k")
def _top_k(op: Operation, x: Row, *, axis: int, k: Any, **params: Any) -> Any:
    if is_symbolic(k):
        raise op.refuse(
            f"it takes {k} elements, which differs from row to row. Sort the row and slice the "
            "result."
        )
    if op.sizes.is_exact(x.shape[axis]):
        return op.bind(x.value)
    # Of equal elements the first is taken. `top_k` has an order of all floats, NaNs included, in
    # which a negative NaN is least.
    dtype = x.value.dtype
    least = -np.nan if jnp.issubdtype(dtype, jnp.inexact) else lowest(dtype)
    return op.bind(pad_end(op.filled(x, least, (axis,)), axis, k - x.value.shape[axis]))
