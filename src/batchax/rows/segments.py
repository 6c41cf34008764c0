"""Reductions of packed rows: each row is a segment of one array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Value

REDUCTIONS = {
    "reduce_sum": jax.ops.segment_sum,
    "reduce_max": jax.ops.segment_max,
    "reduce_min": jax.ops.segment_min,
}
"""The reductions over segments; JAX cannot differentiate its product over segments."""


def reduce_segments(kind: str, x: Value, rows: Any, count: int) -> Any:
    """`x` reduced over each of the `count` rows, along axis 0.

    Args:
      kind: one of `REDUCTIONS`.
      x: packed rows, along axis 0.
      rows: the row of each element, in order; `count` for those that belong to none.
    """
    if kind in ("reduce_max", "reduce_min") and jnp.issubdtype(x.dtype, jnp.inexact):
        return _extreme(kind, count, x, rows)
    return _reduce(kind, x, rows, count)


def _reduce(kind: str, x: Value, rows: Any, count: int) -> Any:
    reduce = REDUCTIONS[kind]
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int32)
        return reduce(x, rows, count, indices_are_sorted=True, mode="drop") > 0
    return reduce(x, rows, count, indices_are_sorted=True, mode="drop")


def _extreme(kind: str, count: int, x: Value, rows: Any) -> Any:
    """The greatest or least of each row, with a derivative: JAX has none of it over segments."""

    @jax.custom_jvp
    def extreme(x: Value, rows: Any) -> Any:
        return _reduce(kind, x, rows, count)

    @extreme.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        # As that of `reduce_max`: elements equal to the extreme share its derivative evenly.
        (x, rows), (dx, _) = primals, tangents
        # A compiler may compute `x` again where it is compared, and round it otherwise: then no
        # element would equal the extreme.
        x = lax.optimization_barrier(x)
        best = extreme(x, rows)
        at_best = jnp.equal(x, best.at[rows].get(mode="fill", fill_value=0))
        dot = _reduce("reduce_sum", jnp.where(at_best, dx, 0), rows, count)
        ties = _reduce("reduce_sum", at_best.astype(x.dtype), rows, count)
        return best, jnp.where(ties > 0, dot / jnp.maximum(ties, 1), 0)

    return extreme(x, rows)
