"""Slices: at fixed places, at places computed at run time, and updates of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import Axis, Position, inserted, match_axis
from batchax.kernel.registry import common_position, example_shape, register_rule
from batchax.rules.gather_scatter import gather, scatter

enter("linear moderate: dynamic_slice dynamic_update_slice slice")


@register_rule(lax.slice_p)
def slice_(
    axis: Axis,
    args: Any,
    axes: Any,
    /,
    *,
    start_indices: Any,
    limit_indices: Any,
    strides: Any,
) -> tuple[Any, Any]:
    (x,), (position,) = args, axes
    out = lax.slice_p.bind(
        x,
        start_indices=inserted(start_indices, position, 0),
        limit_indices=inserted(limit_indices, position, axis.size),
        strides=None if strides is None else inserted(strides, position, 1),
    )
    return out, position


@register_rule(lax.dynamic_slice_p)
def dynamic_slice(axis: Axis, args: Any, axes: Any, /, *, slice_sizes: Any) -> tuple[Any, Any]:
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
def dynamic_update_slice(axis: Axis, args: Any, axes: Any, /) -> tuple[Any, Any]:
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
    shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Any], axes: Sequence[Position]
) -> tuple[Sequence[Any], Sequence[Position], tuple[int, ...]]:
    """Starts, zero where a slice is as long as the dimension; and the dimensions of the others.

    A start is clamped so that the slice fits: a whole dimension starts at zero.
    """
    moving = tuple(d for d, (n, size) in enumerate(zip(shape, sizes, strict=True)) if n != size)
    zero = _zero(starts)
    starts = [s if d in moving else zero for d, s in enumerate(starts)]
    axes = [a if d in moving else None for d, a in enumerate(axes)]
    return starts, axes, moving


def _index_vectors(
    axis: Axis, starts: Sequence[Any], axes: Sequence[Position], moving: Sequence[int]
) -> Any:
    """The starts of the `moving` dimensions, a vector for each lane."""
    columns = [match_axis(axis, starts[d], axes[d], 0) for d in moving]
    return lax.stack_p.bind(*_compat.varying_alike(columns), axis=1)


def _zero(starts: Sequence[Any]) -> Any:
    return np.zeros((), jax.typeof(starts[0]).dtype if starts else np.int32)
