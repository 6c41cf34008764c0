"""What arrays, types and programs tell of where lanes are."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from batchax.errors import UnsupportedError
from batchax.execution.devices.shards import Shards, with_whole_axis
from batchax.jaxprs.inside import with_inside
from batchax.jaxprs.words import Jaxpr, Value
from batchax.kernel.axis import Axis, Position


def find_shards(
    axis: Axis, args: Sequence[Value], positions: Sequence[Position], jaxpr: Jaxpr
) -> Shards | None:
    """What the lanes are sharded over, if that is known, and if `jaxpr` can run on each shard.

    It cannot where it calls ``jax.shard_map`` itself, for one lane, with all devices of a mesh.

    The types of arrays say so where the mesh has axes of type Explicit; arrays outside
    of ``jit`` know; or the user said so, by `spmd_axis_name`, for a mesh that is set.
    """
    shards = _find_shards(axis, args, positions)
    return None if shards is None or _needs_all_devices(jaxpr, shards.names) else shards


def _find_shards(axis: Axis, args: Sequence[Value], positions: Sequence[Position]) -> Shards | None:
    for x, position in zip(args, positions, strict=True):
        sharding = sharding_of(x)
        if names := _shards(sharding, position):
            assert sharding is not None
            return _counted(sharding.mesh, names, axis.size)
    if axis.spmd_name is not None:
        mesh = jax.sharding.get_abstract_mesh()
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if all(types.get(name) in (AxisType.Auto, AxisType.Explicit) for name in axis.spmd_name):
            return _counted(mesh, axis.spmd_name, axis.size)
    return None


def sharding_of(x: Value) -> Any:
    """How an array is sharded, as far as that is known: of a traced one, what its type tells."""
    return getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "sharding", None)


def _shards(sharding: Any, position: Position) -> tuple[Any, ...]:
    """The names of the mesh axes that axis `position` is sharded over."""
    if position is None or not isinstance(sharding, NamedSharding):
        return ()
    entry = sharding.spec[position] if position < len(sharding.spec) else None
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _counted(mesh: Any, names: tuple[Any, ...], size: int) -> Shards | None:
    shards = Shards(mesh, names, size)
    # Where types name the mesh (axes of type Explicit), slices and results of a chunk would not
    # have one type, even with a single device.
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    typed = all(types[name] == AxisType.Explicit for name in names)
    several = shards.count > 1 or typed
    return shards if several and size % shards.count == 0 else None


def _needs_all_devices(jaxpr: Jaxpr, names: Collection[Any]) -> bool:
    """Whether a program inside ``shard_map`` over `names` could not call it as it does."""
    return any(
        not isinstance(eqn.params["mesh"], AbstractMesh)
        or not eqn.params["newly_manual_axes"].isdisjoint(names)
        for eqn in _shard_maps(jaxpr)
    )


def _shard_maps(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations of ``shard_map`` in a program, and in programs inside it."""
    is_one = lambda eqn: eqn.primitive.name == "shard_map"
    return filter(is_one, with_inside(jaxpr.eqns, lambda eqn: not is_one(eqn)))


def lanes_for_all(
    axis: Axis, args: Sequence[Value], positions: Sequence[Position], jaxpr: Jaxpr
) -> tuple[int, list[Any]]:
    """For lanes that are not run on shards, though they may be sharded.

    Returns:
      The number of devices that each ``shard_map`` in `jaxpr` spreads lanes over, by
      `spmd_axis_name`; and the arguments, so that any lanes can be sliced from them.
    """
    parts = {
        math.prod(eqn.params["mesh"].shape.get(name, 1) for name in axis.spmd_name or ())
        for eqn in _shard_maps(jaxpr)
    }
    if axis.mesh_axis is not None:
        args = [
            x if a is None else with_whole_axis(x, a) for x, a in zip(args, positions, strict=True)
        ]
    return math.lcm(*parts), list(args)


def typed_mesh(x: Value) -> Any:
    """The mesh that the type of an argument tells of, if it does."""
    mesh = getattr(sharding_of(x), "mesh", None)
    return mesh if AxisType.Explicit in getattr(mesh, "axis_types", ()) else None


def check_shared(args: Sequence[Value], consts: Sequence[Value]) -> None:
    """Refuses what the function uses for every lane and a shard cannot be given.

    Args:
      args: arguments that are not mapped.
      consts: what the function closes over.
    """
    for x in (*args, *consts):
        sharding: Any = getattr(jax.typeof(x), "sharding", None)
        if any(entry is not None for entry in getattr(sharding, "spec", ())):
            raise UnsupportedError(
                "each device of a mesh is to run its lanes (batch_size or mesh was given), and the "
                f"function uses an array of shape {x.shape} that is the same for every lane but "
                f"sharded by its type, as {sharding.spec}. Put it on every device before, with "
                "jax.sharding.reshard(array, jax.P()), or leave them out."
            )
    for x in consts:
        mesh: Any = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            raise UnsupportedError(
                "each device of a mesh is to run its lanes (batch_size or mesh was given), and the "
                f"function closes over an array of shape {x.shape} whose type tells of that mesh. "
                "Pass it as an argument, with None in in_axes."
            )
