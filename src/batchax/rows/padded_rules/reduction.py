"""Reductions and running ones: padding holds what changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.rows.padded import Operation, Row, padded_rule


def lowest(dtype: Any) -> Any:
    """What no value of `dtype` is less than."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return -jnp.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """What no value of `dtype` is more than."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.inf
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lowest,
    "min": highest,
    "and": lambda dtype: True if dtype == jnp.bool_ else -1,
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "logsumexp": lowest,
}
"""For each kind of reduction, by the dtype of its operand, a value that changes no result."""


@padded_rule(
    "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor"
)
def _reduce(op: Operation, x: Row, *, axes: Any, **params: Any) -> Any:
    kind = op.eqn.primitive.name.removeprefix("reduce_")
    return op.bind(op.filled(x, _neutral(op, kind, x), axes))


@padded_rule("argmax", "argmin")
def _arg(op: Operation, x: Row, *, axes: Any, **params: Any) -> Any:
    # Of equal elements the first counts, and padding is last.
    return op.bind(op.filled(x, _neutral(op, op.eqn.primitive.name.removeprefix("arg"), x), axes))


@padded_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(op: Operation, x: Row, *, axis: int, **params: Any) -> Any:
    # In reverse it begins with the padding.
    kind = op.eqn.primitive.name.removeprefix("cum")
    return op.bind(op.filled(x, _neutral(op, kind, x), (axis,)))


def _neutral(op: Operation, kind: str, x: Row) -> Any:
    dtype = op.eqn.invars[0].aval.dtype
    if kind in ("and", "or", "xor") and dtype != jnp.bool_ and kind == "and":
        return -1 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
    return NEUTRAL[kind](dtype)


@padded_rule("reduce")
def _reduce_by_function(op: Operation, *rows: Row, dimensions: Any, **params: Any) -> Any:
    # The function leaves what it is given together with an initial value as it is.
    count = len(rows) // 2
    operands, starts = rows[:count], [row.value for row in rows[count:]]
    filled = []
    for x, start in zip(operands, starts, strict=True):
        mask = op.sizes.mask(x.shape, dimensions)
        value = jnp.asarray(x.value)
        filled.append(
            value if mask is None else lax.select(mask, value, lax.full_like(value, start))
        )
    return op.bind(*filled, *starts)
