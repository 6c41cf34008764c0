"""Operations that arrange axes, and make rows."""

from __future__ import annotations

from typing import Any

from jax import lax

from batchax.rows.padded import Operation, Row, padded_rule


@padded_rule("dim_as_value")
def _dim_as_value(op: Operation, *, dim: Any) -> Any:
    value = op.sizes.value(dim)
    aval = op.eqn.outvars[0].aval
    return lax.convert_element_type(value, aval.dtype)


@padded_rule("iota")
def _iota(op: Operation, **params: Any) -> Any:
    return op.bind()


@padded_rule("transpose", "squeeze", "expand_dims")
def _rearranged(op: Operation, x: Row, **params: Any) -> Row:
    return op.result(op.bind(x.value), x.fill)


@padded_rule("broadcast_in_dim")
def _broadcast_in_dim(op: Operation, x: Row, **params: Any) -> Row:
    out = op.bind(x.value)
    return op.result(out if x.known else op.cut(out, op.out_shape))
