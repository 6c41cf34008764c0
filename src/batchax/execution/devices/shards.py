"""Lanes within each device's shard, where the batch axis is sharded over a mesh.

A chunk of consecutive lanes lies on one device. To take such chunks from an axis that
is spread over several, each chunk would have to be sent to all of them. So the function
is staged and batched inside ``jax.shard_map``: each device runs the loop over the lanes
it has, and what is reduced over the batch is reduced over the devices once, at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from batchax import _compat
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Position, inserted

T = TypeVar("T")


@dataclass(frozen=True)
class Shards:
    """What the batch axis is sharded over.

    All shards have as many lanes. Where the lanes do not come out even a shard repeats its last;
    repeated lanes are left out of what lanes are reduced to, and of results.

    Attributes:
      mesh: a mesh of devices.
      names: the axes of the mesh that the lanes are spread over.
      lanes: how many there are.
      given: the lanes of each shard, where processes have numbers of their own; otherwise the first
        shards are full.
    """

    mesh: Any
    names: tuple[Any, ...]
    lanes: int
    given: tuple[range, ...] = ()

    @property
    def count(self) -> int:
        """Number of shards."""
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def each(self) -> int:
        """Number of lanes of a shard, with those that repeat another."""
        return max(map(len, self.given), default=-(-self.lanes // self.count))

    @functools.cached_property
    def of_each(self) -> tuple[range, ...]:
        """The lanes of each shard."""
        starts = (min(i * self.each, self.lanes) for i in range(self.count))
        return self.given or tuple(range(i, min(i + self.each, self.lanes)) for i in starts)

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """The lane at each place of all shards: those of a shard, and then the last of them again.

        A shard of no lanes repeats the last lane before, if there is one.
        """
        place = np.arange(self.each)
        lanes = [np.minimum(r.start + place, max(r.stop - 1, 0)) for r in self.of_each]
        return np.concatenate(lanes)

    @property
    def repeated(self) -> int:
        """Number of lanes that repeat another."""
        return self.each * self.count - self.lanes

    @property
    def most_repeated(self) -> int:
        """Number of lanes that repeat another on the shard that has most of these."""
        return self.each - min(map(len, self.of_each))

    def own_lanes(self) -> Any:
        """Inside: the index of this shard's first lane, and that after its last."""
        ends = jnp.asarray([(r.start, r.stop) for r in self.of_each], np.int32)
        return lax.dynamic_index_in_dim(ends, lax.axis_index(self.names), keepdims=False)

    def filled_up(self, x: Value, axis: int) -> Any:
        """From all lanes along `axis` to those of all shards, with lanes that repeat another."""
        return _taken(x, self.slots, axis)

    def without_repeated(self, x: Value, axis: int) -> Any:
        """What `filled_up` was given."""
        if self.repeated and is_sharded(x, axis):  # such types allow shards of one size only
            x = with_whole_axis(x, axis)
        places = np.empty(self.lanes, int)
        for i, lanes in enumerate(self.of_each):
            places[lanes] = i * self.each + np.arange(len(lanes))
        return _taken(x, places, axis)

    def part_of_this(self, x: Value, axis: int) -> Any:
        """Inside: this shard's part of what `filled_up` returned."""
        first = lax.axis_index(self.names) * np.int32(self.each)
        return lax.dynamic_slice_in_dim(x, first, self.each, axis)

    def gathered(self, x: Value, axis: int) -> Any:
        """Inside: the lanes of all shards, on each."""
        return lax.all_gather(x, self.names, axis=axis, tiled=True)

    def spec(self, position: Position) -> PartitionSpec:
        """How an array with lanes at `position` is sharded; None: the same on every device."""
        if position is None:
            return PartitionSpec()
        return PartitionSpec(*inserted((None,) * position, position, self.names))


def _taken(x: Value, indices: np.ndarray, axis: int) -> Any:
    """`x` at these places along `axis`: slices of what lies together, one after another."""
    if np.array_equal(indices, np.arange(x.shape[axis])):
        return x
    runs = np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)
    return lax.concatenate(
        [lax.slice_in_dim(x, run[0], run[-1] + 1, axis=axis) for run in runs], axis
    )


def is_sharded(x: Value, axis: int) -> bool:
    """Whether an array is sharded along an axis by its type."""
    spec = jax.typeof(x).sharding.spec
    return axis < len(spec) and spec[axis] is not None


def with_whole_axis(x: Value, position: int) -> Any:
    """An array that is sharded by its type, but not along that axis."""
    sharding: Any = jax.typeof(x).sharding
    spec = [None if d == position else entry for d, entry in enumerate(sharding.spec)]
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*spec)))


def on_shards(
    shards: Shards,
    run: Callable[..., tuple[list[Any], list[Position], T]],
    args: Sequence[Value],
    positions: Sequence[Position],
    compiled: bool = True,
) -> tuple[list[Any], T]:
    """Runs a function on each shard of its arguments.

    Args:
      shards: what lanes are sharded over.
      run: from one shard of each argument to those of the outputs, where the outputs carry the
        batch axis, and what else it has to say; an output that carries none is the same on all
        shards.
      args: the arguments, filled up with lanes that repeat the last one.
      positions: where they carry the batch axis.
      compiled: whether it is to be compiled even outside of `jit`.

    Returns:
      The outputs, and what else `run` said.
    """
    outputs = _compat.Outputs()

    def one_shard(*xs: Any) -> tuple[Any, tuple[list[Position], T]]:
        outs, at, more = run(*xs)
        return outputs.told(outs, [shards.spec(a) for a in at]), (at, more)

    def on_all(one_shard: Callable[..., Any]) -> list[Any]:
        mapped = jax.shard_map(
            one_shard,
            mesh=shards.mesh,
            in_specs=tuple(shards.spec(a) for a in positions),
            out_specs=outputs,
            axis_names=set(shards.names),
            check_vma=False,  # what is gathered is the same everywhere, which JAX cannot see
        )
        return (jax.jit(mapped) if compiled else mapped)(*args).arrays

    outs, (at, more) = _compat.described(one_shard, on_all)
    outs = [
        x if a is None else shards.without_repeated(x, a) for x, a in zip(outs, at, strict=True)
    ]
    return outs, more
