"""Collectives that reduce over a named axis, and what asks about the axis itself.

Over the axis being mapped a collective is an ordinary reduction of the batch
axis, and its result is unbatched. Names of other axes (an outer ``vmap``, a
mesh axis of ``shard_map``) stay with the primitive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position, shift_dims
from batchax.kernel.named_axes import as_names
from batchax.kernel.registry import register_rule
from batchax.rules.lanes import Groups, over_all_lanes, take, times

REDUCTIONS: dict[str, tuple[Callable[..., Any], bool]] = {
    # primitives: (the same over dimensions of an array, whether equal values add up)
    "psum psum_invariant unreduced_psum": (lax.reduce_sum, True),
    "pmax unreduced_pmax": (lax.reduce_max, False),
    "pmin unreduced_pmin": (lax.reduce_min, False),
}


enter(
    """
    : axis_index pmax pmin psum psum_invariant unreduced_pmax unreduced_pmin unreduced_psum
    """
)
CASTS = enter(
    """
    cast alias: pvary reduced_vary_cast
    cast: preduced vary_unreduced_cast
    """,
    names="axes",
)


def _reducing_collective(
    primitive: _compat.Primitive, reduce: Callable[..., Any], adds_up: bool
) -> None:
    @register_rule(primitive)
    def rule(axis: Axis, args: Any, positions: Any, /, **params: Any) -> tuple[Any, Any]:
        (x,), (position,) = args, positions
        dims = tuple(a for a in params["axes"] if isinstance(a, int))
        names = tuple(a for a in params["axes"] if not isinstance(a, int))
        if axis.name not in names:
            if position is None or not dims:
                return primitive.bind(x, **params), position
            dims = shift_dims(dims, position)
            out = primitive.bind(x, **{**params, "axes": (*dims, *names)})
            return out, position - sum(d < position for d in dims)

        groups = params.get("axis_index_groups")
        others = tuple(name for name in names if name != axis.name)
        if groups is not None and others:
            return over_all_lanes(axis, x, position, names, rule, params, "axes")
        if groups is not None:
            return _reduce_groups(x, position, Groups(groups), reduce, adds_up)
        if position is not None:
            x = reduce(x, (*shift_dims(dims, position), position))
        else:
            x = reduce(x, dims) if dims else x
            x = times(x, axis.size) if adds_up else x
        return (primitive.bind(x, **{**params, "axes": others}) if others else x), None


def _reduce_groups(
    x: Value, position: Position, groups: Groups, reduce: Callable[..., Any], adds_up: bool
) -> tuple[Any, Position]:
    """The reduction over the group of each lane."""
    if position is None and groups.equal:
        return (times(x, groups.sizes[0]) if adds_up else x), None
    if position is None:
        if not adds_up:
            return x, None
        sizes = np.array(groups.sizes)[groups.of_lane].reshape(-1, *(1,) * np.ndim(x))
        return times(lax.expand_dims(x, (0,)), sizes), 0
    if groups.equal:
        by_group = reduce(groups.split(x, position), (position + 1,))
    else:
        parts = [reduce(take(x, np.array(g), position), (position,)) for g in groups.lanes]
        by_group = jnp.stack(parts, position)
    return take(by_group, groups.of_lane, position), position


def _cast(primitive: _compat.Primitive) -> None:
    @register_rule(primitive)
    def rule(
        axis: Axis, args: Any, positions: Any, /, *, axes: Sequence[Any], **params: Any
    ) -> tuple[Any, Any]:
        (x,), (position,) = args, positions
        already = _compat.varying_axes(jax.typeof(x)) if primitive.name == "pvary" else ()
        others = tuple(name for name in axes if name != axis.name and name not in already)
        return (primitive.bind(x, axes=others, **params) if others else x), position


for _names, (_reduce, _adds_up) in REDUCTIONS.items():
    for _name in _names.split():
        if (_primitive := _compat.find_primitive(_name)) is not None:
            _reducing_collective(_primitive, _reduce, _adds_up)

for _name in CASTS:
    if (_primitive := _compat.find_primitive(_name)) is not None:
        _cast(_primitive)


@register_rule(lax.axis_index_p)
def _axis_index(
    axis: Axis, args: Any, positions: Any, /, *, axis_name: Any
) -> tuple[Any, Position]:
    if axis.name in as_names(axis_name):
        sharding = None if axis.mesh_axis is None else PartitionSpec(axis.mesh_axis)
        return lax.broadcasted_iota(np.int32, (axis.size,), 0, out_sharding=sharding), 0
    return lax.axis_index_p.bind(axis_name=axis_name), None
