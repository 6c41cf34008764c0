"""Sharding annotations and ``jax.shard_map``: each gains an entry for the batch axis."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.experimental.layout import Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from batchax import _compat
from batchax.errors import AxisError, UnsupportedError
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Jaxpr, Value, Values
from batchax.kernel.axis import (
    Axis,
    Position,
    Positions,
    RuleOutputs,
    inserted,
    is_in_types,
    sharding_with_axis,
)
from batchax.kernel.interpreter import interpret
from batchax.kernel.registry import register_rule

enter(
    """
    linear moderate: layout_constraint sharding_constraint
    : reshard
    """
)


@register_rule("sharding_constraint")
def _sharding_constraint(
    axis: Axis,
    args: Values,
    axes: Sequence[int],
    /,
    *,
    unconstrained_dims: Collection[int],
    **params: Any,
) -> RuleOutputs:
    (x,), (position,) = args, axes
    free = {d + (d >= position) for d in unconstrained_dims}
    if axis.spmd_name is None:
        free.add(position)  # where the lanes are, the annotation does not say
    sharding = batched_sharding(axis, params["sharding"], position)
    if free and isinstance(sharding, NamedSharding):
        entries = _entries(sharding, x.ndim)
        for d in free:
            entries[d] = PartitionSpec.UNCONSTRAINED
        sharding = _with_entries(sharding, entries)
    params["sharding"] = sharding
    params["layout"] = batched_layout(params["layout"], position)
    return _constraint_p.bind(x, unconstrained_dims=frozenset(free), **params), position


_constraint_p: Any = _compat.find_primitive("sharding_constraint")


@register_rule("reshard")
def _reshard(
    axis: Axis, args: Values, axes: Sequence[int], /, *, dst_sharding: NamedSharding, **params: Any
) -> RuleOutputs:
    sharding = sharding_with_axis(dst_sharding, axes[0], args, axes)
    if sharding.spec[axes[0]] is None and is_in_types(sharding, axis.mesh_axis):
        # What comes back from where types do not tell of the mesh, as inside functions of
        # `jax.random` from JAX 0.12 on, is sharded as lanes were before.
        entries = list(sharding.spec)
        entries[axes[0]] = axis.mesh_axis
        sharding = sharding.update(spec=PartitionSpec(*entries))
    return _reshard_p.bind(*args, dst_sharding=sharding, **params), axes[0]


_reshard_p: Any = _compat.find_primitive("reshard")


@register_rule("layout_constraint")
def _layout_constraint(
    axis: Axis, args: Values, axes: Positions, /, *, layout: object
) -> RuleOutputs:
    return _layout_p.bind(*args, layout=batched_layout(layout, axes[0])), axes[0]


_layout_p: Any = _compat.find_primitive("layout_constraint")


def batched_sharding(axis: Axis, sharding: Sharding | None, position: Position) -> Sharding | None:
    """Adds the batch axis at `position` to a sharding of one example.

    It is sharded over `spmd_axis_name`, if given.
    """
    if position is None or not isinstance(sharding, jax.sharding.Sharding):
        return sharding
    if isinstance(sharding, NamedSharding):
        names = axis.spmd_name or ()
        check_unused(axis, sharding.spec, "a sharding")
        entries = _entries(sharding, position)
        return _with_entries(sharding, inserted(entries, position, names or None))
    if sharding.is_fully_replicated:  # on one device, or whole on each: whatever the rank
        return sharding
    raise UnsupportedError(
        f"a sharding of type {type(sharding).__name__} inside a batched function cannot be "
        "given a batch axis; use jax.sharding.NamedSharding."
    )


def check_unused(axis: Axis, spec: PartitionSpec, what: str) -> None:
    """Raises AxisError for a spec that shards an example over the mesh axis of the batch."""
    used = {n for entry in spec for n in (entry if isinstance(entry, tuple) else (entry,))}
    twice = used & set(axis.spmd_name or ())
    if twice:
        raise AxisError(
            f"spmd_axis_name {axis.spmd_name} shards the batch, but {what} inside the batched "
            f"function, {spec}, uses {', '.join(map(repr, sorted(map(str, twice))))} for one "
            "example."
        )


def batched_layout(layout: object, position: Position) -> object:
    """Adds the batch axis to a layout of one example, as its slowest dimension."""
    if position is None or not isinstance(layout, Layout):
        return layout
    order = [d + (d >= position) for d in layout.major_to_minor]
    return layout.update(major_to_minor=(position, *order))


def _entries(sharding: NamedSharding, ndim: int) -> list[Any]:
    return [*sharding.spec, *[None] * (ndim - len(sharding.spec))]


def _with_entries(sharding: NamedSharding, entries: Sequence[object]) -> NamedSharding:
    return sharding.update(spec=sharding.spec.update(partitions=tuple(entries)))


enter(": shard_map")


@register_rule("shard_map")
def _shard_map(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    jaxpr: Jaxpr,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    **params: Any,
) -> RuleOutputs:
    manual = params["newly_manual_axes"]
    # Lanes that `spmd_axis_name` spreads over devices are this device's part of them inside.
    inner = _on_each_device(axis, params["mesh"], manual, jaxpr)
    spread = axis if inner is not axis else replace(axis, spmd_name=None)
    bound = _shard_map_p.get_bind_params(
        {**params, "jaxpr": jaxpr, "out_specs": out_specs, "in_specs": in_specs}
    )
    bound["in_specs"] = _batched_specs(spread, in_specs, axes)

    def body(*xs: Value) -> tuple[Any, list[Position]]:
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


def _batched_specs(
    axis: Axis, specs: Sequence[PartitionSpec], axes: Positions
) -> tuple[PartitionSpec, ...]:
    def batched(spec: PartitionSpec, position: Position) -> PartitionSpec:
        if position is None:
            return spec
        check_unused(axis, spec, "a shard_map specification")
        entries = [*spec, *[None] * (position - len(spec))]
        return PartitionSpec(*inserted(entries, position, axis.spmd_name))

    return tuple(map(batched, specs, axes))


def _on_each_device(
    axis: Axis, mesh: Mesh | AbstractMesh, manual: frozenset[Any], jaxpr: Any
) -> Axis:
    """Returns the part of the axis on one device while `spmd_axis_name` shards it."""
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
