"""Which lanes each device has, where the batch axis is sharded over a mesh.

A chunk of consecutive lanes lies on one device. To take such chunks from an axis that is sharded
over several, each chunk would have to be sent to all of them. So the function is traced and batched
inside ``jax.shard_map``: each device runs the loop over its lanes, and reductions over the batch
are reduced over the devices once, at the end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import with_inside
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import ClosedJaxpr, Jaxpr, Tree, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, inserted

T = TypeVar("T")


@dataclass(frozen=True)
class Shards:
    """Describes how the batch axis is sharded.

    All shards have as many slots; if lanes do not divide evenly, a shard repeats its last lane,
    which is left out of reductions and results.
    """

    mesh: Any  # a mesh of devices
    names: tuple[Any, ...]  # mesh axes that shard the lanes
    lanes: int  # their number
    # by shard, if processes have their own; otherwise the first shards are full
    given: tuple[range, ...] = ()

    @property
    def count(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def each(self) -> int:
        return max(map(len, self.given), default=-(-self.lanes // self.count))

    @functools.cached_property
    def of_each(self) -> tuple[range, ...]:
        starts = (min(i * self.each, self.lanes) for i in range(self.count))
        return self.given or tuple(range(i, min(i + self.each, self.lanes)) for i in starts)

    @functools.cached_property
    def slots(self) -> np.ndarray:
        """Returns the lane in each slot of all shards.

        A shard repeats its last lane, or the last one before it if it has none.
        """
        place = np.arange(self.each)
        lanes = [np.minimum(r.start + place, max(r.stop - 1, 0)) for r in self.of_each]
        return np.concatenate(lanes)

    @property
    def repeated(self) -> int:
        return self.each * self.count - self.lanes

    @property
    def most_repeated(self) -> int:
        return self.each - min(map(len, self.of_each))

    def own_lanes(self) -> Value:
        """Returns the first lane of this shard, and that after its last, inside ``shard_map``."""
        ends = jnp.asarray([(r.start, r.stop) for r in self.of_each], np.int32)
        return lax.dynamic_index_in_dim(ends, lax.axis_index(self.names), keepdims=False)

    def filled_up(self, x: Value, axis: int) -> Value:
        """Maps all lanes along `axis` to the slots of all shards."""
        return _taken(x, self.slots, axis)

    def without_repeated(self, x: Value, axis: int) -> Value:
        if self.repeated and is_sharded(x, axis):  # such types allow shards of one size only
            x = with_whole_axis(x, axis)
        places = np.empty(self.lanes, int)
        for i, lanes in enumerate(self.of_each):
            places[lanes] = i * self.each + np.arange(len(lanes))
        return _taken(x, places, axis)

    def part_of_this(self, x: Value, axis: int) -> Value:
        """Slices this shard's part of the result of `filled_up`, inside ``shard_map``."""
        first = lax.axis_index(self.names) * np.int32(self.each)
        return lax.dynamic_slice_in_dim(x, first, self.each, axis)

    def gathered(self, x: Value, axis: int) -> Value:
        exchange = functools.partial(lax.all_gather, axis_name=self.names, axis=axis, tiled=True)
        return in_parts(exchange, x)

    def summed(self, xs: Tree) -> Tree:
        """Sums the arrays of a pytree over all shards, inside ``shard_map``."""
        return in_parts(lambda xs: lax.psum(xs, self.names), xs)

    def spec(self, position: Position) -> PartitionSpec:
        """Returns the spec of an array with lanes at `position`; None: replicated."""
        if position is None:
            return PartitionSpec()
        return PartitionSpec(*inserted((None,) * position, position, self.names))


def in_parts(exchange: Callable[[Any], Any], xs: Tree) -> Tree:
    """Applies a linear collective to a pytree, with complex arrays as two real ones."""
    # XLA for CPUs crashes when it compiles an all-reduce or reduce-scatter (the transpose of an
    # all-gather) of a complex number broadcast to an array (JAX 0.10.2 to 0.12.0).
    leaves, structure = jax.tree.flatten(xs)
    return structure.unflatten(map(_joined, exchange([_split(x) for x in leaves])))


def _split(x: Value) -> Value | tuple[Value, Value]:
    return (jnp.real(x), jnp.imag(x)) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x


def _joined(x: Value) -> Value:
    return lax.complex(*x) if isinstance(x, tuple) else x


def check_callbacks(shards: Shards, jaxpr: Jaxpr) -> None:
    """Raises UnsupportedError for callbacks if XLA partitions other axes of the mesh:

    JAX cannot lower them.
    """
    types = zip(shards.mesh.axis_names, shards.mesh.axis_types, strict=True)
    others = [name for name, t in types if t != AxisType.Manual and name not in shards.names]
    for eqn in with_inside(jaxpr.eqns) if others else ():
        if facts_of(eqn.primitive).on_host:
            raise UnsupportedError(
                f"{_compat.user_line(eqn.source_info)}: the function contains a host callback, and "
                f"mesh leaves the mesh axis {others[0]!r} to the compiler, where JAX supports no "
                "callbacks. Pass the mesh alone, so that lanes are spread over all of its axes, or "
                "a mesh without other axes."
            )


def with_shared_in_parts(staged: ClosedJaxpr) -> ClosedJaxpr:
    """Passes traced complex constants into ``shard_map`` as two real arrays."""

    def entered(x: Value) -> Value:
        if not isinstance(x, Tracer):
            return x
        around = jax.sharding.use_abstract_mesh(jax.typeof(x).sharding.mesh)
        # JAX sums their cotangents over the shards, as it does those of shared arguments (see
        # `in_parts`).
        with _compat.within_trace_of([x]), around:
            x = _split(x)
        return _joined(x)

    return _compat.close(staged.jaxpr, list(map(entered, staged.consts)))


def _taken(x: Value, indices: np.ndarray, axis: int) -> Value:
    """Takes `x` at these places along `axis`, by slices of consecutive runs."""
    if np.array_equal(indices, np.arange(x.shape[axis])):
        return x
    again = np.ones(len(indices), bool)
    again[np.unique(indices, return_index=True)[1]] = False
    # A new run begins where indices are not consecutive, or where repetition begins or ends.
    ends = np.flatnonzero((np.diff(indices) != 1) | (np.diff(again) != 0)) + 1
    # A lane that repeats another uses the random keys of that on purpose.
    parts = [
        lax.slice_in_dim(
            _compat.unconsumed(x) if repeated[0] else x, run[0], run[-1] + 1, axis=axis
        )
        for run, repeated in zip(np.split(indices, ends), np.split(again, ends), strict=True)
    ]
    return lax.concatenate(parts, axis)


def is_sharded(x: Value, axis: int) -> bool:
    spec = jax.typeof(x).sharding.spec
    return axis < len(spec) and spec[axis] is not None


def with_whole_axis(x: Value, position: int) -> Value:
    sharding: Any = jax.typeof(x).sharding
    spec = [None if d == position else entry for d, entry in enumerate(sharding.spec)]
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec(*spec)))


def on_shards(
    shards: Shards,
    run: Callable[..., tuple[list[Any], list[Position], T]],
    args: Values,
    positions: Positions,
    compiled: bool = True,
) -> tuple[list[Value], T]:
    """Runs a function on each shard of its arguments, inside ``shard_map``.

    `run` returns outputs, their batch axes (None: the same on all shards), and details, which are
    returned too. `compiled`: compiles even outside of `jit`.
    """
    outputs = _compat.Outputs()

    # JAX sums cotangents of what all shards share, with an all-reduce.
    split = lambda x, a: _split(x) if a is None else x
    parts = [split(x, a) for x, a in zip(args, positions, strict=True)]

    def one_shard(*xs: Value) -> tuple[Any, tuple[list[Position], T]]:
        outs, at, more = run(*map(_joined, xs))
        return outputs.with_sharding(outs, [shards.spec(a) for a in at]), (at, more)

    def on_all(one_shard: Callable[..., Any]) -> list[Value]:
        mapped = jax.shard_map(
            one_shard,
            mesh=shards.mesh,
            in_specs=tuple(shards.spec(a) for a in positions),
            out_specs=outputs,
            axis_names=set(shards.names),
            check_vma=False,  # what is gathered is the same everywhere, which JAX cannot see
        )
        return (jax.jit(mapped) if compiled else mapped)(*parts).arrays

    outs, (at, more) = _compat.described(one_shard, on_all)
    outs = [
        x if a is None else shards.without_repeated(x, a) for x, a in zip(outs, at, strict=True)
    ]
    return outs, more


def find_shards(axis: Axis, args: Values, positions: Positions, jaxpr: Jaxpr) -> Shards | None:
    """Returns how lanes are sharded, if that is known and `jaxpr` can run on each shard.

    Types say so for mesh axes of type Explicit, arrays outside of ``jit`` do, or `spmd_axis_name`
    for a mesh that is set.
    """
    shards = _find_shards(axis, args, positions)
    # A function that calls ``jax.shard_map`` itself, for one lane, needs all devices of its mesh.
    return None if shards is None or _needs_all_devices(jaxpr, shards.names) else shards


def _find_shards(axis: Axis, args: Values, positions: Positions) -> Shards | None:
    for x, position in zip(args, positions, strict=True):
        sharding = sharding_of(x)
        if names := _shards(sharding, position):
            assert isinstance(sharding, NamedSharding)
            return _counted(sharding.mesh, names, axis.size)
    if axis.spmd_name is not None:
        mesh = jax.sharding.get_abstract_mesh()
        types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if all(types.get(name) in (AxisType.Auto, AxisType.Explicit) for name in axis.spmd_name):
            return _counted(mesh, axis.spmd_name, axis.size)
    return None


def sharding_of(x: Value) -> Sharding | None:
    """Returns the sharding of an array, if known: of a traced one, that in its type."""
    return getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "sharding", None)


def _shards(sharding: Sharding | None, position: Position) -> tuple[Any, ...]:
    if position is None or not isinstance(sharding, NamedSharding):
        return ()
    entry = sharding.spec[position] if position < len(sharding.spec) else None
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def _counted(mesh: Mesh | AbstractMesh, names: tuple[Any, ...], size: int) -> Shards | None:
    shards = Shards(mesh, names, size)
    # Where types name the mesh (axes of type Explicit), slices and results of a chunk would not
    # have one type, even with a single device.
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    typed = all(types[name] == AxisType.Explicit for name in names)
    several = shards.count > 1 or typed
    return shards if several and size % shards.count == 0 else None


def _needs_all_devices(jaxpr: Jaxpr, names: Collection[Any]) -> bool:
    """Returns whether a ``shard_map`` inside could not run within one over `names`."""
    return any(
        not isinstance(eqn.params["mesh"], AbstractMesh)
        or not eqn.params["newly_manual_axes"].isdisjoint(names)
        for eqn in _shard_maps(jaxpr)
    )


def _shard_maps(jaxpr: Jaxpr) -> Iterator[Any]:
    is_one = lambda eqn: eqn.primitive.name == "shard_map"
    return filter(is_one, with_inside(jaxpr.eqns, lambda eqn: not is_one(eqn)))


def lanes_for_all(
    axis: Axis, args: Values, positions: Positions, jaxpr: Jaxpr
) -> tuple[int, list[Value]]:
    """Prepares possibly sharded lanes that do not run on shards.

    Returns the number of devices that each ``shard_map`` in `jaxpr` shards lanes over by
    `spmd_axis_name`, and arguments from which any lanes can be sliced.
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


def typed_mesh(x: Value) -> Mesh | AbstractMesh | None:
    mesh = getattr(sharding_of(x), "mesh", None)
    return mesh if AxisType.Explicit in getattr(mesh, "axis_types", ()) else None


def check_shared(args: Values, consts: Values) -> None:
    """Raises UnsupportedError for shared values that cannot be passed to a shard.

    `args` are unmapped arguments, and `consts` the values that the function closes over.
    """
    for x in (*args, *consts):
        sharding: Any = getattr(jax.typeof(x), "sharding", None)
        if any(entry is not None for entry in getattr(sharding, "spec", ())):
            raise UnsupportedError(
                "with batch_size or mesh, each device runs its own lanes, but the function uses a "
                f"shared array of shape {x.shape} that is sharded by its type, as {sharding.spec}. "
                "Put it on every device with jax.sharding.reshard(array, jax.P()), or remove "
                "batch_size and mesh."
            )
    for x in consts:
        mesh: Any = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            raise UnsupportedError(
                "with batch_size or mesh, each device runs its own lanes, but the function closes "
                f"over an array of shape {x.shape} whose type carries that mesh. Pass it as an "
                "argument, with None in in_axes."
            )
