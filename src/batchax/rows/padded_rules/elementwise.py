"""Operations on each element alone: padding stays padding."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.sizes import is_symbolic
from batchax.rules.elementwise import UNARY
from batchax.rules.masking import is_inexact

_KEEP_FILL = frozenset("convert_element_type copy neg real stop_gradient abs sign".split())


@padded_rule(*UNARY, "reduced_vary_cast", "pvary")
def _unary(op: Operation, x: Row, **params: Any) -> Row:
    keeps_zero = op.eqn.primitive.name in _KEEP_FILL and x.fill is not None and x.fill == 0
    return op.result(op.bind(x.value), 0 if keeps_zero else None)


@padded_rule(fact="elementwise")
def _nary(op: Operation, *rows: Row, **params: Any) -> Any:
    return op.bind(*(spread(op, row) for row in rows))


@padded_rule("device_put", "optimization_barrier")
def _together(op: Operation, *rows: Row, **params: Any) -> Any:
    return op.bind(*(row.value for row in rows))


@padded_rule("bitcast_convert_type")
def _bitcast(op: Operation, x: Row, **params: Any) -> Any:
    return op.bind(x.value)


def spread(op: Operation, row: Row) -> Any:
    """An operand's array, repeated along ragged axes where it has a single element.

    JAX would repeat those itself, but in reverse add up what padding sends back, too.
    """
    shape = op.out_shape
    if np.ndim(row.value) != len(shape):  # a scalar for all elements
        if row.known or not is_inexact(row.value) or not op.sizes.padded_axes(shape):
            return row.value
        return op.cut(lax.broadcast_in_dim(row.value, op.sizes.bounds_of(shape), ()), shape)
    repeated = [
        is_symbolic(dim) and not is_symbolic(own) for dim, own in zip(shape, row.shape, strict=True)
    ]
    if not any(repeated):
        return row.value
    whole = [
        dim if again else own for dim, own, again in zip(shape, row.shape, repeated, strict=True)
    ]
    bounds = op.sizes.bounds_of(whole)
    value = lax.broadcast_in_dim(row.value, bounds, tuple(range(len(bounds))))
    return op.cut(value, whole)
