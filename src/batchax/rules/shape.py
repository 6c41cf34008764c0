"""Primitives that arrange elements, and slices of arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Sharding

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Values
from batchax.kernel.axis import (
    Axis,
    Positions,
    RuleOutputs,
    inserted,
    match_axis,
    move_axis,
    sharding_with_axis,
    shift_dims,
)
from batchax.kernel.registry import common_position, example_shape, register_rule
from batchax.rules.gather_scatter import gather, scatter

enter(
    """
    linear moderate: broadcast_in_dim concatenate device_put optimization_barrier pad rev split
      stack tile transpose unstack
    linear moderate alias: reshape squeeze
    : dce_sink stage tie with_memory_space_constraint xla_metadata_value
    """
)
enter("additive: broadcast_in_dim")
# Without operands there is nothing to batch.
enter(
    """
    linear moderate: dim_as_value iota
    : after_all create_token empty empty2 platform_index
    """
)


def _pass_on(name: str) -> None:
    """Registers by name, as some primitives exist only after an import."""

    @register_rule(name)
    def rule(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
        primitive: Any = _compat.find_primitive(name)
        return primitive.bind(*args, **params), axes[0]


# Each passes its operand on as it is, with something said about it.
for _name in "stage with_memory_space_constraint xla_metadata_value".split():
    _pass_on(_name)


@register_rule(lax.broadcast_in_dim_p)
def broadcast_in_dim(
    axis: Axis,
    args: Values,
    axes: Sequence[int],
    /,
    *,
    shape: Sequence[int],
    broadcast_dimensions: Sequence[int],
    sharding: Sharding | None,
) -> RuleOutputs:
    (x,), (position,) = args, axes
    if position and not axis.columns:
        # As in jax.vmap. Products of a shared matrix with vectors leave lanes last; with dimensions
        # in front of the vector's, later products would have to move what they contract.
        x, position = move_axis(x, position, 0), 0
    out_position = 1 + max(broadcast_dimensions[:position], default=-1)
    dims = shift_dims(broadcast_dimensions, out_position)
    out = lax.broadcast_in_dim_p.bind(
        x,
        shape=inserted(shape, out_position, axis.size),
        broadcast_dimensions=inserted(dims, position, out_position),
        sharding=sharding_with_axis(sharding, out_position, args, axes),
    )
    return out, out_position


@register_rule(lax.reshape_p)
def reshape(
    axis: Axis,
    args: Values,
    axes: Sequence[int],
    /,
    *,
    new_sizes: Sequence[int],
    dimensions: Sequence[int],
    sharding: Sharding | None,
) -> RuleOutputs:
    (x,), (position,) = args, axes
    # Where as many elements as before vary slower than the batch axis, the order
    # of all elements is the same and nothing has to move.
    slower = math.prod(x.shape[:position])
    splits = [i for i in range(len(new_sizes) + 1) if math.prod(new_sizes[:i]) == slower]
    if dimensions is not None:
        dimensions, out_position = (position, *shift_dims(dimensions, position)), 0
    elif splits:
        out_position = splits[0]
    else:
        x, out_position = move_axis(x, position, 0), 0
    out = lax.reshape_p.bind(
        x,
        new_sizes=inserted(new_sizes, out_position, axis.size),
        dimensions=dimensions,
        sharding=sharding_with_axis(sharding, out_position, args, axes),
    )
    return out, out_position


@register_rule(lax.transpose_p)
def transpose(
    axis: Axis, args: Values, axes: Sequence[int], /, *, permutation: Sequence[int]
) -> RuleOutputs:
    (x,), (position,) = args, axes
    # Elements move in any case; in front the batch axis serves most rules best.
    out = lax.transpose_p.bind(x, permutation=(position, *shift_dims(permutation, position)))
    return out, 0


@register_rule(lax.squeeze_p)
def squeeze(
    axis: Axis, args: Values, axes: Sequence[int], /, *, dimensions: Sequence[int]
) -> RuleOutputs:
    (x,), (position,) = args, axes
    out = lax.squeeze_p.bind(x, dimensions=shift_dims(dimensions, position))
    return out, position - sum(d < position for d in dimensions)


@register_rule(lax.rev_p)
def rev(
    axis: Axis, args: Values, axes: Sequence[int], /, *, dimensions: Sequence[int]
) -> RuleOutputs:
    (x,), (position,) = args, axes
    return lax.rev_p.bind(x, dimensions=shift_dims(dimensions, position)), position


@register_rule(lax.tile_p)
def tile(axis: Axis, args: Values, axes: Sequence[int], /, *, reps: Sequence[int]) -> RuleOutputs:
    (x,), (position,) = args, axes
    return lax.tile_p.bind(x, reps=inserted(reps, position, 1)), position


@register_rule(lax.pad_p)
def pad(
    axis: Axis, args: Values, axes: Positions, /, *, padding_config: Sequence[tuple[int, int, int]]
) -> RuleOutputs:
    (x, value), (position, value_position) = args, axes
    if position is None:
        x, position = match_axis(axis, x, None, 0), 0
    padding_config = inserted(padding_config, position, (0, 0, 0))
    if value_position is None:
        return lax.pad_p.bind(x, value, padding_config=padding_config), position
    # Padding takes a single number, so a number for each lane is selected in.
    zero = np.zeros((), x.dtype)
    padded = lax.pad(x, zero.item() if x.weak_type else zero, padding_config)
    inside = lax.pad(lax.full_like(x, True, dtype=bool), False, padding_config)
    padding = lax.broadcast_in_dim(
        value, padded.shape, (position,), out_sharding=jax.typeof(padded).sharding
    )
    return lax.select_n(inside, padding, padded), position


@register_rule(lax.concatenate_p)
def concatenate(axis: Axis, args: Values, axes: Positions, /, *, dimension: int) -> RuleOutputs:
    position = common_position(args, axes)
    args = [match_axis(axis, x, a, position) for x, a in zip(args, axes, strict=True)]
    return lax.concatenate_p.bind(*args, dimension=dimension + (dimension >= position)), position


@register_rule(lax.split_p)
def split(
    batch: Axis, args: Values, positions: Sequence[int], /, *, sizes: Sequence[int], axis: int
) -> RuleOutputs:
    (x,), (position,) = args, positions
    outs = lax.split_p.bind(x, sizes=sizes, axis=axis + (axis >= position))
    return outs, [position] * len(outs)


@register_rule(lax.stack_p)
def stack(batch: Axis, args: Values, positions: Positions, /, *, axis: int) -> RuleOutputs:
    position = common_position(args, positions)
    args = [match_axis(batch, x, a, position) for x, a in zip(args, positions, strict=True)]
    # Where lanes need no move, whole arrays are put one after the other: nothing is interleaved.
    if axis < position + all(own == position for own in positions):
        return lax.stack_p.bind(*args, axis=axis), position + 1
    return lax.stack_p.bind(*args, axis=axis + 1), position


@register_rule(lax.unstack_p)
def unstack(batch: Axis, args: Values, positions: Sequence[int], /, *, axis: int) -> RuleOutputs:
    (x,), (position,) = args, positions
    outs = lax.unstack_p.bind(x, axis=axis + (axis >= position))
    return outs, [position - (axis < position)] * len(outs)


_tie_p: Any = _compat.find_primitive("tie")
_dce_sink_p: Any = _compat.find_primitive("dce_sink")


@register_rule(_tie_p)
def tie(axis: Axis, args: Values, axes: Positions, /) -> RuleOutputs:
    return _tie_p.bind(*args), axes[1]  # the second operand, to be used after the first


@register_rule(_dce_sink_p)
def dce_sink(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> RuleOutputs:
    return _dce_sink_p.bind(*args, **params), []


@register_rule(lax.optimization_barrier_p)
def optimization_barrier(axis: Axis, args: Values, axes: Positions, /) -> RuleOutputs:
    outs = lax.optimization_barrier_p.bind(*args)
    if len(outs) < len(args):  # references pass the barrier but are no results
        axes = [a for x, a in zip(args, axes, strict=True) if not _compat.is_reference(x)]
    return outs, list(axes)


@register_rule(lax.device_put_p)
def device_put(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    devices: Sequence[object],
    srcs: Sequence[object],
    copy_semantics: Sequence[object],
) -> RuleOutputs:
    def batched(places: Sequence[object]) -> tuple[Any, ...]:
        return tuple(
            sharding_with_axis(place, a, [x], [a])
            if a is not None and isinstance(place, jax.sharding.NamedSharding)
            else place
            for place, x, a in zip(places, args, axes, strict=True)
        )

    outs = lax.device_put_p.bind(
        *args, devices=batched(devices), srcs=batched(srcs), copy_semantics=copy_semantics
    )
    return outs, list(axes)


enter("linear moderate: dynamic_slice dynamic_update_slice slice")


@register_rule(lax.slice_p)
def slice_(
    axis: Axis,
    args: Values,
    axes: Sequence[int],
    /,
    *,
    start_indices: Sequence[int],
    limit_indices: Sequence[int],
    strides: Sequence[int] | None,
) -> RuleOutputs:
    (x,), (position,) = args, axes
    out = lax.slice_p.bind(
        x,
        start_indices=inserted(start_indices, position, 0),
        limit_indices=inserted(limit_indices, position, axis.size),
        strides=None if strides is None else inserted(strides, position, 1),
    )
    return out, position


@register_rule(lax.dynamic_slice_p)
def dynamic_slice(
    axis: Axis, args: Values, axes: Positions, /, *, slice_sizes: tuple[int, ...]
) -> RuleOutputs:
    (operand, *starts), (position, *start_axes) = args, axes
    starts, start_axes, moving = _starts_that_matter(
        example_shape(operand, position), slice_sizes, starts, start_axes
    )
    if all(a is None for a in start_axes):
        if position is not None:
            starts = inserted(starts, position, _zero(starts))
            slice_sizes = inserted(slice_sizes, position, axis.size)
        operands = _compat.varying_alike([operand, *starts])
        return lax.dynamic_slice_p.bind(*operands, slice_sizes=slice_sizes), position
    dims = tuple(range(len(slice_sizes)))
    return gather(
        axis,
        [operand, _index_vectors(axis, starts, start_axes, moving)],
        [position, 0],
        dimension_numbers=lax.GatherDimensionNumbers(
            offset_dims=dims, collapsed_slice_dims=(), start_index_map=moving
        ),
        slice_sizes=slice_sizes,
        unique_indices=True,
        indices_are_sorted=True,
        mode=lax.GatherScatterMode.CLIP,
        fill_value=None,
    )


@register_rule(lax.dynamic_update_slice_p)
def dynamic_update_slice(axis: Axis, args: Values, axes: Positions, /) -> RuleOutputs:
    (operand, update, *starts), (position, update_position, *start_axes) = args, axes
    update_shape = example_shape(update, update_position)
    starts, start_axes, moving = _starts_that_matter(
        example_shape(operand, position), update_shape, starts, start_axes
    )
    if all(a is None for a in start_axes):
        if position is not None or update_position is not None:
            target = common_position([operand, update], [position, update_position])
            operand = match_axis(axis, operand, position, target)
            update = match_axis(axis, update, update_position, target)
            starts = inserted(starts, target, _zero(starts))
            position = target
        operands = _compat.varying_alike([operand, update, *starts])
        return lax.dynamic_update_slice_p.bind(*operands), position
    if jax.typeof(operand).weak_type and not all(jax.typeof(x).weak_type for x in args):
        # The result of a scatter is weakly typed where its operand is.
        operand = lax.convert_element_type(operand, operand.dtype)
    return scatter(
        axis,
        [operand, _index_vectors(axis, starts, start_axes, moving), update],
        [position, 0, update_position],
        dimension_numbers=lax.ScatterDimensionNumbers(
            update_window_dims=tuple(range(len(update_shape))),
            inserted_window_dims=(),
            scatter_dims_to_operand_dims=moving,
        ),
        update_jaxpr=None,
        update_consts=(),
        unique_indices=True,
        indices_are_sorted=True,
        mode=lax.GatherScatterMode.CLIP,
    )


def _starts_that_matter(
    shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Any], axes: Positions
) -> tuple[Sequence[Any], Positions, tuple[int, ...]]:
    """Zeroes the starts of slices of full length; returns the dimensions of the others."""
    # JAX clamps a start so that the slice fits: a full slice starts at zero.
    moving = tuple(d for d, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n != size)
    zero = _zero(starts)
    starts = [s if d in moving else zero for d, s in enumerate(starts)]
    axes = [a if d in moving else None for d, a in enumerate(axes)]
    return starts, axes, moving


def _index_vectors(
    axis: Axis, starts: Sequence[Any], axes: Positions, moving: Sequence[int]
) -> jax.Array:
    """Stacks the starts of the `moving` dimensions into a vector for each lane."""
    columns = [match_axis(axis, starts[d], axes[d], 0) for d in moving]
    return lax.stack_p.bind(*_compat.varying_alike(columns), axis=1)


def _zero(starts: Values) -> np.ndarray:
    return np.zeros((), jax.typeof(starts[0]).dtype if starts else np.int32)
