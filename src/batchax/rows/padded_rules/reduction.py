"""Reductions and running ones: padding holds what changes nothing."""

from __future__ import annotations

from typing import Any

from batchax.jaxprs.neutral import NEUTRAL
from batchax.jaxprs.primitive_facts import facts_of
from batchax.kernel.registry import reduced_dims
from batchax.rows.padded import Operation, Row, padded_rule


@padded_rule(
    "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_xor"
)
def _reduce(op: Operation, x: Row, *, axes: Any, **params: Any) -> Any:
    kind = op.eqn.primitive.name.removeprefix("reduce_")
    return op.bind(op.filled(x, _neutral(op, kind), axes))


@padded_rule(fact="reduces")
def _reduce_to_neutral(op: Operation, *rows: Row, axes: Any, **params: Any) -> Any:
    """A third party's reduction, known by a word: `batchax.reducing`."""
    axes = reduced_dims(op.eqn.primitive, axes, len(rows[0].shape))
    if all(op.sizes.is_exact(row.shape[a]) for row in rows for a in axes):
        return op.bind(*(row.value for row in rows))
    neutral = facts_of(op.eqn.primitive).neutral
    if neutral is None:
        raise op.refuse(
            "what could be in the padding of a row without changing its result is not known. "
            "Say it where the primitive is registered: batchax.reducing(primitive, neutral=...)."
        )
    values = [op.filled(row, neutral(row.value.dtype), axes) for row in rows]
    return op.bind(*values)


@padded_rule("argmax", "argmin")
def _arg(op: Operation, x: Row, *, axes: Any, **params: Any) -> Any:
    # Of equal elements the first counts, and padding is last.
    return op.bind(op.filled(x, _neutral(op, op.eqn.primitive.name.removeprefix("arg")), axes))


@padded_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(op: Operation, x: Row, *, axis: int, **params: Any) -> Any:
    # Padding comes last, and changes nothing before it, but with `reverse` it comes first.
    kind = op.eqn.primitive.name.removeprefix("cum")
    return op.bind(op.filled(x, _neutral(op, kind), (axis,)))


def _neutral(op: Operation, kind: str) -> Any:
    return NEUTRAL[kind](op.eqn.invars[0].aval.dtype)


@padded_rule("reduce")
def _reduce_by_function(op: Operation, *rows: Row, dimensions: Any, **params: Any) -> Any:
    # The initial value is neutral for the function: combined with it, a value stays what it is. So
    # it is what the padding holds.
    count = len(rows) // 2
    operands, starts = rows[:count], [row.value for row in rows[count:]]
    pairs = zip(operands, starts, strict=True)
    filled = [op.masked(x, start, dimensions) for x, start in pairs]
    return op.bind(*filled, *starts)
