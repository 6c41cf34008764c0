"""Products of matrices: what is contracted over has zeros in its padding."""

from __future__ import annotations

from typing import Any

from batchax.rows.padded import Operation, Row, padded_rule


@padded_rule("dot_general")
def _dot_general(op: Operation, x: Row, y: Row, *, dimension_numbers: Any, **params: Any) -> Any:
    # Zeros not only where it is contracted: the derivative with respect to one operand is
    # contracted over the free axes of the other, where zero times NaN would be NaN.
    return op.cut(op.bind(op.filled(x, 0), op.filled(y, 0)), op.out_shape)
