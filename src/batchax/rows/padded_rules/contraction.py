"""Products of matrices: what is contracted over has zeros in its padding."""

from __future__ import annotations

from typing import Any

from batchax.rows.padded import Operation, Row, padded_rule


@padded_rule("dot_general")
def _dot_general(op: Operation, x: Row, y: Row, *, dimension_numbers: Any, **params: Any) -> Any:
    # Zeros not only where it is contracted: the derivative with respect to one operand is
    # contracted over the free axes of the other, where zero times NaN would be NaN.
    return op.cut(op.bind(op.filled(x, 0), op.filled(y, 0)), op.out_shape)


@padded_rule("ragged_dot_general")
def _ragged_dot_general(op: Operation, x: Row, y: Row, sizes: Row, **params: Any) -> Any:
    # Beyond the row are groups of no elements, and elements of no group.
    filled = [op.filled(operand, 0) for operand in (x, y, sizes)]
    return op.cut(op.bind(*filled), op.out_shape)
