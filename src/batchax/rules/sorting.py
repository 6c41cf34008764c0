"""Primitives that order the elements along a dimension: sort, and the largest few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import Axis, Positions, RuleOutputs, shift_dims
from batchax.kernel.registry import matched, register_rule
from batchax.rules import sorting_network
from batchax.rules.sorting_by_image import pays, sorted_floats_p

enter(": approx_top_k sort top_k")


@register_rule(lax.sort_p)
def _sort(
    axis: Axis, args: Values, axes: Positions, /, *, dimension: int, num_keys: int, **params: Any
) -> RuleOutputs:
    if all(a is None for a in axes[:num_keys]):
        return _sort_by_shared_keys(args, axes, dimension, num_keys, **params)
    operands, position = matched(axis, args, axes)
    (dim,) = shift_dims((dimension,), position)
    if len(operands) == 1:  # what is equal is the same, except for zeros
        (x,) = operands
        if jnp.issubdtype(x.dtype, jnp.floating) and pays(x, axis.in_loop):
            return [sorted_floats_p.bind(x, dimension=dim)], [position]
    elif sorting_network.pays(operands, dim, num_keys, axis.in_loop):
        params |= dict(dimension=dim, num_keys=num_keys)
        return sorting_network.sorted_rows_p.bind(*operands, **params), [position] * len(operands)
    outs = lax.sort_p.bind(*operands, dimension=dim, num_keys=num_keys, **params)
    return outs, [position] * len(outs)


def _sort_by_shared_keys(
    args: Values, axes: Sequence[Any], dimension: int, num_keys: int, **params: Any
) -> tuple[list[Any], list[Any]]:
    """Sorts values that lanes share once, and gathers the others in that order."""
    shared = [x for x, a in zip(args, axes, strict=True) if a is None]
    # The sorted indices are the permutation.
    places = lax.broadcasted_iota(jnp.int32, shared[0].shape, dimension)
    *in_order, order = lax.sort_p.bind(
        *shared, places, dimension=dimension, num_keys=num_keys, **params
    )
    sorted_once = iter(in_order)
    outs = [
        next(sorted_once) if a is None else _reorder(x, a, order, dimension)
        for x, a in zip(args, axes, strict=True)
    ]
    return outs, list(axes)


def _reorder(x: Value, position: int, order: Value, dimension: int) -> jax.Array:
    """Permutes `x` along per-example `dimension`."""
    (dim,) = shift_dims((dimension,), position)
    others = tuple(d for d in range(order.ndim) if d != dimension)
    sizes = [1] * x.ndim
    sizes[position] = x.shape[position]
    return lax.gather(
        x,
        lax.expand_dims(order, (order.ndim,)),
        lax.GatherDimensionNumbers(
            offset_dims=(position,),
            collapsed_slice_dims=(dim,),
            start_index_map=(dim,),
            operand_batching_dims=shift_dims(others, position),
            start_indices_batching_dims=others,
        ),
        sizes,
        mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS,
    )


@register_rule(lax.top_k_p)
def _top_k(
    batch: Axis, args: Values, positions: Sequence[int], /, *, axis: int, **params: Any
) -> RuleOutputs:
    (x,), (position,) = args, positions
    (dim,) = shift_dims((axis,), position)
    return lax.top_k_p.bind(x, axis=dim, **params), [position] * 2
