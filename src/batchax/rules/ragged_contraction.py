"""`ragged_dot_general`: a contraction in which rows of one operand belong to groups.

One dimension of the first operand, the ragged one, is cut into groups of the
given sizes; its kind says what the groups do. Where it is free, the second
operand has a slice for each group. Where it is contracted, the result has.
Group sizes are the same for the whole ragged dimension, or differ along the
dimensions before it (its prefix: batch dimensions, then those of its own kind).
"""

from __future__ import annotations

from typing import Any

from jax import lax

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import (
    Axis,
    Position,
    broadcast_axis,
    match_axis,
    move_axis,
    shift_dims,
)
from batchax.kernel.registry import register_rule
from batchax.rules.contraction import batched_dimensions

_ragged_dot_general_p: Any = _compat.find_primitive("ragged_dot_general")


enter(": ragged_dot_general")


@register_rule(_ragged_dot_general_p)
def _ragged_dot_general(
    axis: Axis,
    args: Any,
    axes: Any,
    /,
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    **params: Any,
) -> tuple[Any, Any]:
    (lhs, rhs, sizes), (lhs_axis, rhs_axis, sizes_axis) = args, axes
    numbers = ragged_dot_dimension_numbers
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    is_free = ragged not in contract and ragged not in batch

    if sizes_axis is not None:
        # Sizes may differ along the prefix of the ragged dimension, so the lanes
        # must be there: free and before it, or a batch dimension of both operands.
        if lhs_axis is None or (rhs_axis is None and is_free and lhs_axis > ragged):
            lhs, lhs_axis = match_axis(axis, lhs, lhs_axis, 0), 0
        if rhs_axis is None and not is_free:
            rhs, rhs_axis = broadcast_axis(axis, rhs, 0), 0

    dims, position = batched_dimensions(
        numbers.dot_dimension_numbers,
        (lhs.ndim, rhs.ndim),
        (lhs_axis, rhs_axis),
        numbers.rhs_group_dimensions,
    )
    if lhs_axis is not None:
        (ragged,) = shift_dims((ragged,), lhs_axis)
    grouped = numbers.rhs_group_dimensions
    batched_numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=dims,
        lhs_ragged_dimensions=[ragged],
        rhs_group_dimensions=grouped if rhs_axis is None else shift_dims(grouped, rhs_axis),
    )
    sizes = _sizes_along(_prefix(lhs.ndim, ragged, dims), lhs, lhs_axis, axis, sizes, sizes_axis)
    out = _ragged_dot_general_p.bind(
        lhs, rhs, sizes, ragged_dot_dimension_numbers=batched_numbers, **params
    )
    return out, position + (ragged in dims[0][0])  # groups that are contracted lead the result


def _prefix(ndim: int, ragged: int, dims: Any) -> list[int]:
    """The dimensions of the first operand along which group sizes may differ."""
    (contract, _), (batch, _) = dims
    if ragged in batch:
        return list(batch[: batch.index(ragged)])
    if ragged in contract:
        return [*batch, *contract[: contract.index(ragged)]]
    return [*batch, *(d for d in range(ragged) if d not in contract and d not in batch)]


def _sizes_along(
    prefix: list[int],
    lhs: Any,
    lhs_axis: Position,
    axis: Axis,
    sizes: Any,
    sizes_axis: Position,
) -> Any:
    """Group sizes, in one of the two forms: the same everywhere or along all of `prefix`."""
    if lhs_axis not in prefix:
        return sizes
    place = prefix.index(lhs_axis)
    rank = sizes.ndim - (sizes_axis is not None)
    if rank > 1:
        return match_axis(axis, sizes, sizes_axis, place)
    if sizes_axis is None:
        return sizes
    shape = [*(lhs.shape[d] for d in prefix), sizes.shape[1 - sizes_axis]]
    return lax.broadcast_in_dim(move_axis(sizes, sizes_axis, 0), shape, (place, len(prefix)))
