"""``jax.shard_map``: each specification gains an entry for the batch axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.errors import AxisError, UnsupportedError
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel.axis import Axis, Position, inserted
from batchax.kernel.interpreter import interpret
from batchax.kernel.registry import register_rule
from batchax.rules.sharding import check_unused

enter(": shard_map")


@register_rule("shard_map")
def _shard_map(
    axis: Axis,
    args: Any,
    axes: Any,
    /,
    *,
    jaxpr: Any,
    in_specs: Any,
    out_specs: Any,
    **params: Any,
) -> tuple[list[Any], Sequence[Position]]:
    manual = params["newly_manual_axes"]
    inner = _on_each_device(axis, params["mesh"], manual, jaxpr)
    spread = axis if inner is not axis else replace(axis, spmd_name=None)
    bound = _shard_map_p.get_bind_params(
        {**params, "jaxpr": jaxpr, "out_specs": out_specs, "in_specs": in_specs}
    )
    bound["in_specs"] = _batched_specs(spread, in_specs, axes)

    def body(*xs: Any) -> tuple[Any, list[Position]]:
        # Run among the manual axes of the mesh: only here are values of the right type.
        outs, out_axes = interpret(inner, jaxpr, (), xs, axes)
        specs = _batched_specs(spread, out_specs, out_axes)
        same = _compat.stage(lambda *ys: list(ys), [jax.typeof(y) for y in outs])
        returned = {**params, "jaxpr": same.jaxpr, "in_specs": in_specs, "out_specs": specs}
        (with_specs,) = _shard_map_p.get_bind_params(returned)["subfuns"]
        return with_specs(*outs), out_axes

    outs, out_axes = _compat.described(
        body, lambda body: _shard_map_p.bind(*args, **{**bound, "subfuns": (body,)})
    )
    return list(outs), out_axes


_shard_map_p: Any = _compat.find_primitive("shard_map")


def _batched_specs(axis: Axis, specs: Any, axes: Sequence[Position]) -> tuple[Any, ...]:
    def batched(spec: Any, position: Position) -> Any:
        if position is None:
            return spec
        check_unused(axis, spec, "a shard_map specification")
        entries = [*spec, *[None] * (position - len(spec))]
        return PartitionSpec(*inserted(entries, position, axis.spmd_name))

    return tuple(map(batched, specs, axes))


def _on_each_device(axis: Axis, mesh: Any, manual: frozenset[Any], jaxpr: Any) -> Axis:
    """The part of the axis that one device holds while `spmd_axis_name` shards it."""
    if axis.spmd_name is None or not manual.issuperset(axis.spmd_name):
        return axis  # this shard_map does not divide the lanes
    if axis.name is not None and axis.name in _compat.named_axes(jaxpr.effects):
        raise UnsupportedError(
            f"a collective over the mapped axis {axis.name!r} inside shard_map would reach the "
            f"lanes of one device only, because spmd_axis_name {axis.spmd_name} shards them."
        )
    parts = math.prod(mesh.shape[name] for name in axis.spmd_name)
    if axis.size % parts:
        raise AxisError(
            f"spmd_axis_name {axis.spmd_name} divides the batch among {parts} devices, but there "
            f"are {axis.size} lanes."
        )
    return replace(axis, size=axis.size // parts)
