"""Chunks within each device's shard, where the batch axis is sharded over a mesh.

A chunk of consecutive lanes lies on one device. To take such chunks from an axis that
is spread over several, each chunk would have to be sent to all of them. So each device
runs the loop over the lanes it has, inside ``jax.shard_map``, and what is reduced over
the batch is reduced over the devices once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from batchax import _compat
from batchax.engine.axis import Axis, AxisPosition, inserted
from batchax.execution.chunk_loop import WHOLE, Body, Extreme, Loop, Result, Sum, Whole


@dataclass(frozen=True)
class Shards:
    """What the batch axis is sharded over.

    Attributes:
      mesh: a mesh of devices.
      names: the axes of the mesh that the lanes are spread over.
    """

    mesh: Any
    names: tuple[Any, ...]

    @property
    def count(self) -> int:
        """Number of shards."""
        return math.prod(self.mesh.shape[name] for name in self.names)


def find_shards(
    axis: Axis, args: Sequence[Any], positions: Sequence[AxisPosition]
) -> Shards | None:
    """What the lanes are sharded over, if that is known.

    The types of arrays say so where the mesh has axes of type Explicit; arrays outside
    of ``jit`` know; or the user said so, by `spmd_axis_name`, for a mesh that is set.
    """
    for x, position in zip(args, positions, strict=True):
        known = jax.typeof(x) if isinstance(x, Tracer) else x
        sharding = getattr(known, "sharding", None)
        if names := _shards(sharding, position):
            assert sharding is not None
            return _counted(sharding.mesh, names, axis.size)
    if axis.spmd_name is not None:
        mesh = jax.sharding.get_abstract_mesh()
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if all(types.get(name) in (AxisType.Auto, AxisType.Explicit) for name in axis.spmd_name):
            return _counted(mesh, axis.spmd_name, axis.size)
    return None


def _shards(sharding: Any, position: AxisPosition) -> tuple[Any, ...]:
    """The names of the mesh axes that axis `position` is sharded over."""
    if position is None or not isinstance(sharding, NamedSharding):
        return ()
    entry = sharding.spec[position] if position < len(sharding.spec) else None
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _counted(mesh: Any, names: tuple[Any, ...], size: int) -> Shards | None:
    shards = Shards(mesh, names)
    return shards if shards.count > 1 and size % shards.count == 0 else None


def on_shards(
    shards: Shards,
    loop: Loop,
    operands: Sequence[Any],
    run: Callable[[Loop, Sequence[Any]], list[Any]],
) -> list[Any]:
    """Runs a chunk loop on each shard of its lanes.

    `run` runs a loop over the lanes of one shard.
    """
    size = loop.size // shards.count
    outside = jax.sharding.get_abstract_mesh()

    def of_width(width: int) -> Any:
        function = loop.body.function(width)

        def run_chunk(start: Any, first: Any, *xs: Any) -> list[Any]:
            with _compat.mesh_replaced(outside, jax.sharding.get_abstract_mesh()):
                return function(start + first, *xs)

        return run_chunk

    def on_one(*xs: Any) -> list[Any]:
        # Made in here, under the mesh that one shard sees.
        local = replace(loop, body=Body(of_width), operands=(WHOLE, *loop.operands), size=size)
        first = lax.axis_index(shards.names) * np.int32(size)
        outs = run(local, [first, *xs])
        return [_entry(x, kind) for x, kind in zip(outs, loop.results, strict=True)]

    outs = jax.shard_map(
        on_one,
        mesh=shards.mesh,
        in_specs=tuple(_spec(shards, kind) for kind in loop.operands),
        out_specs=[_spec(shards, kind) for kind in loop.results],
        axis_names=set(shards.names),
    )(*operands)
    return [_of_all(x, kind) for x, kind in zip(outs, loop.results, strict=True)]


def _spec(shards: Shards, kind: Any) -> PartitionSpec:
    if isinstance(kind, Whole):
        return PartitionSpec()
    axis = 0 if isinstance(kind, (Sum, Extreme)) else kind.axis
    return PartitionSpec(*inserted((None,) * axis, axis, shards.names))


def _entry(x: Any, kind: Result) -> Any:
    """What one shard contributes to a result: of a reduction, one entry of all."""
    return x[None] if isinstance(kind, (Sum, Extreme)) else x


def _of_all(x: Any, kind: Result) -> Any:
    match kind:
        case Sum():
            return jnp.sum(x, axis=0, dtype=x.dtype)
        case Extreme("max"):
            return jnp.max(x, axis=0)
        case Extreme():
            return jnp.min(x, axis=0)
        case _:
            return x
