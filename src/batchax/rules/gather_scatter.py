"""Gathers and scatters.

A gather reads windows of an operand at places given by an array of indices; a
scatter writes them. Their dimension numbers have the same five parts, here
called `window` (dimensions of the result, or of the updates, that lie within a
window), `removed` (operand dimensions of which a window has one element, not
shown in it), `indexed` (operand dimensions that an index addresses), `paired`
and `index_paired` (dimensions of operand and indices that run together).

Where all lanes share the indices, the batch axis is one more dimension of the
windows; where each has its own, it is one more dimension of the indices, paired
with that of the operand. It is transposed only where the order of the
dimensions leaves no other way.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import (
    Axis,
    Position,
    Positions,
    RuleOutputs,
    broadcast_axis,
    inserted,
    match_axis,
    move_axis,
    sharding_on_mesh,
    shift_dims,
    slot_after,
)
from batchax.kernel.registry import Rule, register_rule

enter(
    """
    linear: gather
    linear combines: scatter-add scatter-sub
    combines: scatter scatter-max scatter-min scatter-mul
    """
)


@register_rule(lax.gather_p)
def gather(
    axis: Axis,
    args: Values,
    axes: Any,
    /,
    *,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Sequence[int],
    unique_indices: bool,
    indices_are_sorted: bool,
    **params: Any,
) -> RuleOutputs:
    (operand, indices), (position, index_position) = args, axes
    # Dimensions of the operand are in the result's window (kept), removed, or paired with those of
    # the indices.
    window, removed, _, paired, _ = dimension_numbers
    # Shared indices: the batch axis is one more window dimension of full size.
    if index_position is None:
        count = _before(position, _others(len(slice_sizes), removed + paired))
        out_position = slot_after(window, count)
        dnums = _with_shared_indices(dimension_numbers, position, out_position)
        slice_sizes = inserted(slice_sizes, position, axis.size)
    # Indices by lane: the batch axis is one more dimension of the indices, paired with that of the
    # operand if it has one.
    else:
        indices, index_position = _before_index_vector(indices, index_position)
        lanes = _others(len(window) + np.ndim(indices) - 2, window)
        out_position = slot_after(lanes, index_position)
        dnums = _with_own_indices(dimension_numbers, position, index_position, out_position)
        if position is not None:
            slice_sizes = inserted(slice_sizes, position, 0 if axis.size == 0 else 1)
        # With a shared operand, indices of different lanes may coincide.
        unique_indices = unique_indices and position is not None
        indices_are_sorted = indices_are_sorted and position == index_position == 0
    emit = functools.partial(
        lax.gather_p.bind,
        dimension_numbers=dnums,
        slice_sizes=slice_sizes,
        unique_indices=unique_indices,
        indices_are_sorted=indices_are_sorted,
        **params,
    )
    spec = jax.typeof(operand).sharding.spec
    if axis.mesh_axis is not None and position is None and not any(spec):
        # JAX wants to be told how the result is sharded, as the derivative adds up over devices.
        entries: list[Any] = [None] * (len(window) + np.ndim(indices) - 1)
        entries[out_position] = axis.mesh_axis
        out_sharding = sharding_on_mesh(axis, jax.typeof(indices).sharding)
        out_sharding = out_sharding.update(spec=PartitionSpec(*entries))
        auto_axes: Any = jax.sharding.auto_axes
        emit = auto_axes(emit, out_sharding=out_sharding)
    return emit(operand, indices), out_position


def _scatter(primitive: _compat.Primitive) -> Rule:
    @register_rule(primitive)
    def rule(
        axis: Axis,
        args: Values,
        axes: Positions,
        /,
        *,
        dimension_numbers: lax.ScatterDimensionNumbers,
        indices_are_sorted: bool,
        **params: Any,
    ) -> RuleOutputs:
        place = _place_shared if axes[1] is None else _place_own
        (operand, indices, updates), (position, index_position, update_position) = place(
            axis, dimension_numbers, args, axes
        )
        if index_position is None:
            dnums = _with_shared_indices(dimension_numbers, position, update_position)
        else:
            dnums = _with_own_indices(dimension_numbers, position, index_position, update_position)
            indices_are_sorted = indices_are_sorted and position == index_position == 0
        out = primitive.bind(
            operand,
            indices,
            updates,
            dimension_numbers=dnums,
            indices_are_sorted=indices_are_sorted,
            **params,
        )
        return out, position

    return rule


scatter = _scatter(lax.scatter_p)
for _primitive in (
    lax.scatter_add_p,
    lax.scatter_sub_p,
    lax.scatter_mul_p,
    lax.scatter_min_p,
    lax.scatter_max_p,
):
    _scatter(_primitive)


def _place_shared(axis: Axis, dnums: Any, args: Values, axes: Any) -> tuple[Any, Any]:
    """Places batch axes of operand and updates, for indices that lanes share.

    Both must have the axis at the same place among the window dimensions.
    """
    (operand, indices, updates), (position, _, update_position) = args, axes
    window, removed, _, paired, _ = dnums
    if position is None:
        count = _before(update_position, window)
        rank = len(window) + len(removed) + len(paired)
        position = slot_after(_others(rank, removed + paired), count)
        operand = broadcast_axis(axis, operand, position)
    else:
        count = _before(position, _others(operand.ndim - 1, removed + paired))
        if update_position is None or _before(update_position, window) != count:
            target = slot_after(window, count)
            updates = match_axis(axis, updates, update_position, target)
            update_position = target
    return (operand, indices, updates), (position, None, update_position)


def _place_own(axis: Axis, dnums: Any, args: Values, axes: Any) -> tuple[Any, Any]:
    """Places batch axes for indices of each lane.

    Indices and updates must have the axis at the same place among the index dimensions.
    """
    (operand, indices, updates), (position, index_position, update_position) = args, axes
    if position is None:
        operand, position = broadcast_axis(axis, operand, 0), 0
    indices, index_position = _before_index_vector(indices, index_position)
    window = dnums[0]
    lanes = _others(len(window) + indices.ndim - 2, window)
    if update_position is not None:
        # Of the two it is the indices that move, as they are seldom larger.
        index_target = _before(update_position, lanes)
        indices, index_position = move_axis(indices, index_position, index_target), index_target
    else:
        update_position = slot_after(lanes, index_position)
        updates = broadcast_axis(axis, updates, update_position)
    return (operand, indices, updates), (position, index_position, update_position)


def _with_shared_indices(dnums: Any, position: int, window_position: int) -> Any:
    """Updates dimension numbers for batch axes of operand and windows."""
    window, removed, indexed, paired, index_paired = dnums
    window = shift_dims(window, window_position)
    return type(dnums)(
        inserted(window, _before(window_position, window), window_position),
        shift_dims(removed, position),
        shift_dims(indexed, position),
        shift_dims(paired, position),
        index_paired,
    )


def _with_own_indices(
    dnums: Any, position: Position, index_position: int, window_position: int
) -> Any:
    """Updates dimension numbers for batch axes of the indices, and of the operand if it has one."""
    window, removed, indexed, paired, index_paired = dnums
    window = shift_dims(window, window_position)
    index_paired = shift_dims(index_paired, index_position)
    if position is not None:
        removed = shift_dims(removed, position)
        indexed = shift_dims(indexed, position)
        paired = shift_dims(paired, position)
        count = _before(position, paired)
        paired = inserted(paired, count, position)
        index_paired = inserted(index_paired, count, index_position)
    return type(dnums)(window, removed, indexed, paired, index_paired)


def _before_index_vector(indices: Value, position: int) -> tuple[Any, int]:
    """Moves the batch axis away from the last dimension, which holds the parts of an index."""
    if position == indices.ndim - 1:
        return move_axis(indices, position, 0), 0
    return indices, position


def _others(rank: int, dims: Collection[int]) -> list[int]:
    return [d for d in range(rank) if d not in dims]


def _before(position: int, dims: Collection[int]) -> int:
    return sum(d < position for d in dims)
