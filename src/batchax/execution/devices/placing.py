"""Moves values to the devices of a mesh, and results back: the option `mesh`.

Where the call is made determines how:

- inside of a compiled program XLA moves them. If types carry the mesh the sharding is an explicit
  constraint; else it is left to ``jit`` and ``shard_map``;
- a value that is differentiated outside of `jit` is moved as others are, but its cotangent goes
  back to the devices of the value;
- a JAX array is sent, from one process to others by a compiled program;
- of an array on the host, each device is given its part.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from batchax import _compat
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.execution.chunk_loop import (
    Combined,
    Extreme,
    Result,
    Sum,
    of_only_chunk,
    of_states,
)
from batchax.execution.devices.processes import (
    check_spans,
    of_several_processes,
    on_own_devices,
    put_by_program,
)
from batchax.execution.devices.shards import Shards, sharding_of, typed_mesh
from batchax.frontend.arguments import LocalRows
from batchax.jaxprs.error_format import brief, show
from batchax.jaxprs.primitive_facts import NEUTRAL, accumulator
from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import Position, Positions, inserted
from batchax.kernel.interpreter import in_jit
from batchax.kernel.named_axes import mesh_around
from batchax.rules.masking import is_inexact


def placed(shards: Shards, paths: Sequence[str], args: Values, positions: Positions) -> list[Value]:
    """Shards lanes over the mesh, and replicates the other arguments.

    Sharding over other axes of the mesh is kept, and the last shards are filled up by repeating the
    last lane. Raises AxisError if another axis of an argument is sharded over the mesh axes of the
    lanes.
    """
    for path, x, position in zip(paths, args, positions, strict=True):
        _check_free(shards, path, x, position)
    return [_placed(shards, x, position) for x, position in zip(args, positions, strict=True)]


def _placed(shards: Shards, x: Value, position: Position) -> Value:
    if isinstance(x, np.ndarray) and in_jit():
        x = jnp.asarray(x)
    # Inside `jit`, or for a mesh without devices, placement is part of the program.
    if isinstance(x, Tracer) or isinstance(shards.mesh, AbstractMesh):
        return _put_in_program(shards, x, position)
    # Each process may have the whole, of which its devices are given their parts.
    everywhere = isinstance(x, jax.Array) and x.is_fully_addressable and not in_jit()
    if isinstance(x, jax.Array) and not (everywhere and of_several_processes(shards.mesh)):
        return _sent(shards, x, position)
    return _from_host(shards, x, position)


def _put_in_program(shards: Shards, x: Value, position: Position) -> Value:
    types = dict(zip(shards.mesh.axis_names, shards.mesh.axis_types, strict=True))
    if any(types[name] == AxisType.Explicit for name in shards.names):
        spec = _with_other_axes(shards, x, position)
        return jax.sharding.reshard(
            _filled_up(shards, x, position), NamedSharding(shards.mesh, spec)
        )
    if isinstance(x, Tracer) and puts_traced(shards.mesh):
        return put_traced(shards, _filled_up(shards, x, position), position, _compat.value_of(x))
    return x if position is None else _filled_up_anywhere(shards, x, position)


def _sent(shards: Shards, x: jax.Array, position: Position) -> Value:
    sharding = NamedSharding(shards.mesh, _with_other_axes(shards, x, position))
    x = _filled_up(shards, x, position)
    if isinstance(x, Tracer) or x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    return put_by_program(x, sharding)  # `jax.device_put` rejects random keys


def _from_host(shards: Shards, x: Value, position: Position) -> jax.Array:
    """Copies a NumPy array, or own rows, to devices part by part, without a whole copy for each."""
    sharding = NamedSharding(shards.mesh, _with_other_axes(shards, x, position))
    shape, first = list(x.shape), 0
    if isinstance(x, LocalRows):
        x, first = x.array, x.first
    if position is not None:
        shape[position] = len(shards.slots)

    def held(index: Any) -> Value:
        if position is not None:
            lanes = shards.slots[index[position]] - first
            # A slice of NumPy is a view, and an array of indices would copy.
            together = lanes.size and lanes[-1] - lanes[0] + 1 == lanes.size
            lanes = slice(lanes[0], lanes[-1] + 1) if together else lanes
            index = (*index[:position], lanes, *index[position + 1 :])
        return x[index]

    return jax.make_array_from_callback(tuple(shape), sharding, held, dtype=jax.typeof(x).dtype)


def _filled_up(shards: Shards, x: Value, position: Position) -> Value:
    return x if position is None else shards.filled_up(x, position)


def puts_traced(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether traced values are moved to the devices of a mesh as other values are."""
    # Inside `jit`, XLA does that. JAX cannot move values from one process to others.
    return not (isinstance(mesh, AbstractMesh) or of_several_processes(mesh) or in_jit())


def put_traced(shards: Shards, x: Value, position: Position, value: Value) -> Value:
    """Moves an array that is differentiated to the mesh.

    `value` is what is known of its placement, or None.
    """
    # Uncommitted arrays may be moved by `jit` as needed.
    if value is None or not value.committed:
        return x
    typed = typed_mesh(x) is not None
    if value.devices() == set(shards.mesh.devices.flat) and not typed:
        return x
    # With `src`, the cotangent returns to the device that the array came from.
    source = value.sharding if len(value.devices()) == 1 or typed else None
    to = NamedSharding(shards.mesh, shards.spec(position))
    try:
        return jax.device_put(x, to, src=source)
    except ValueError:  # its tangents have another axis, inside of ``jax.vmap``
        return jax.device_put(x, NamedSharding(shards.mesh, PartitionSpec()), src=source)


def _filled_up_anywhere(shards: Shards, x: Value, position: int) -> Value:
    """Fills up a traced array with lanes that repeat the last one."""
    filled = shards.filled_up(x, position)
    types = shards.mesh.axis_types
    if (
        not shards.repeated
        or isinstance(shards.mesh, AbstractMesh)
        or set(types) != {AxisType.Auto}
    ):
        return filled
    # If lanes do not divide evenly, replicate the axis. Otherwise XLA places repeated lanes after
    # the others on the shards, which takes communication.
    spec = [PartitionSpec.UNCONSTRAINED] * filled.ndim
    return jax.lax.with_sharding_constraint(
        filled, NamedSharding(shards.mesh, PartitionSpec(*inserted(spec[1:], position, None)))
    )


def _with_other_axes(shards: Shards, x: Value, position: Position) -> PartitionSpec:
    """Returns the sharding with lanes over `shards`, and other axes of `x` as they are."""
    sharding = sharding_of(x)
    entries = list(shards.spec(position))
    if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == shards.mesh.axis_names:
        entries += [None] * (np.ndim(x) - len(entries))
        for i, entry in enumerate(sharding.spec):
            if i != position:
                entries[i] = entry
    return PartitionSpec(*entries)


def _check_free(shards: Shards, path: str, x: Value, position: Position) -> None:
    for i, entry in enumerate(getattr(sharding_of(x), "spec", ())):
        names = entry if isinstance(entry, tuple) else (entry,)
        taken = [name for name in names if name in shards.names]
        if taken and i != position:
            raise AxisError(
                f"{path}: axis {i} is sharded over {taken[0]!r}, an axis of the mesh that lanes "
                "are spread over. Spread the lanes over other axes, mesh=(mesh, names), or put the "
                "array elsewhere before, with jax.device_put."
            )


def combined(
    shards: Shards, kinds: Sequence[Result], xs: Values, returned: Sequence[bool]
) -> list[Value]:
    """Combines results of shards into those of all lanes, inside ``shard_map``.

    `returned` marks results that are outputs of all shards, and nothing else.
    """
    sums = [i for i, kind in enumerate(kinds) if isinstance(kind, Sum) and returned[i]]
    summed = dict(zip(sums, _summed(shards, [xs[i] for i in sums]), strict=True))
    of_all = [
        summed[i] if i in summed else _combined(shards, kind, x)
        for i, (kind, x) in enumerate(zip(kinds, xs, strict=True))
    ]
    return of_states(kinds, of_all, lambda spec, places: spec.folded(of_all[places]))


def _combined(shards: Shards, kind: Result, x: Value) -> Value:
    match kind:
        case Sum():
            return shards.summed(x)
        case Extreme():
            return _extreme(shards, kind, x)
        case Combined():
            return shards.gathered(x[None], 0)
        case _:
            return x


def _summed(shards: Shards, xs: Values) -> Sequence[Any]:
    """Sums over shards, for results that each shard returns."""

    def ahead(_: Values, xs: Values) -> list[Value]:
        return list(shards.summed(tuple(xs)))

    def back(_: Values, shares: Sequence[Any]) -> list[Value]:
        # JAX gives each shard an equal share of the cotangent of such a result. The transpose of
        # ``lax.psum`` would add the shares with an all-reduce; multiplying one is enough.
        return [x * np.asarray(shards.count, x.dtype) for x in shares]

    if not all(map(is_inexact, xs)):
        parts = [[x for x in xs if is_inexact(x) == inexact] for inexact in (True, False)]
        inexact, exact = iter(_summed(shards, parts[0])), iter(ahead((), parts[1]))
        return [next(inexact) if is_inexact(x) else next(exact) for x in xs]
    key = "sums over shards", shards.names, shards.count
    return linear_with_transpose(ahead, back, [], xs, key) if xs else []


def _extreme(shards: Shards, kind: Extreme, x: Value) -> Value:
    """Computes the extreme over shards, NaN if one of them has NaN."""
    # Devices have no all-reduce for the extreme of booleans or complex numbers: they are gathered.
    truth_or_complex = x.dtype == np.bool_ or jnp.issubdtype(x.dtype, jnp.complexfloating)
    if truth_or_complex:
        return _gathered_extreme(shards, kind, x)
    exchange, missing = (lax.pmax, 1) if kind.kind == "max" else (lax.pmin, -1)

    @jax.custom_jvp
    def extreme(x: Value) -> Value:
        if not is_inexact(x):
            return exchange(x, shards.names)
        wide = x.astype(accumulator(x.dtype))
        # An all-reduce may drop NaN (it does on CPUs), so a mark is communicated with the number.
        marks = jnp.where(jnp.isnan(wide), missing, 0).astype(wide.dtype)
        number = jnp.where(marks != 0, NEUTRAL[kind.kind](wide.dtype), wide)
        number, marks = exchange(jnp.stack([number, marks]), shards.names)
        return jnp.where(marks != 0, np.nan, number).astype(x.dtype)

    @extreme.defjvp
    def _(primals: Values, tangents: Values) -> tuple[Value, Value]:
        # Ties are only known if the values of all shards are in one array: the compiler may
        # recompute what it compares, with another last bit.
        return jax.jvp(functools.partial(_gathered_extreme, shards, kind), primals, tangents)

    return extreme(x)


def _gathered_extreme(shards: Shards, kind: Extreme, x: Value) -> Value:
    return of_only_chunk(shards.gathered(x[None], 0), replace(kind, axis=0))


@dataclass(frozen=True)
class OnMesh:
    """Holds the option `mesh` of `vmap`."""

    mesh: Mesh | AbstractMesh | None  # None for a mesh of all devices, built at each call
    names: tuple[Any, ...] = ()  # mesh axes that shard the lanes; empty for all

    @property
    def devices(self) -> tuple[Any, tuple[Any, ...]]:
        mesh = self.mesh
        if mesh is None:
            mesh = Mesh(np.array(jax.devices()), ("devices",))
        check_spans(mesh)
        return mesh, self.names or tuple(mesh.axis_names)

    def shards(self, lanes: object, values: Values, own: Sequence[range] = ()) -> Shards | None:
        """Returns how so many lanes are sharded; None for no lanes.

        `own` are the lanes of each process, if rows are local. Raises UnsupportedError for a
        symbolic size, devices that are taken, another mesh that is set, or a mesh of some
        processes.
        """
        if not isinstance(lanes, int):
            raise UnsupportedError(
                f"mesh does not support a symbolic size: the number of lanes is {lanes}. Export "
                "the function for a known size, or remove mesh."
            )
        if lanes == 0:
            return None
        taken = mesh_around()
        if AxisType.Manual in taken.axis_types:
            raise UnsupportedError(
                "mesh is not supported inside a jax.shard_map over "
                f"{', '.join(map(repr, taken.manual_axes))}, or another vmap with mesh: there each "
                "device runs a separate program. Remove mesh from the inner one."
            )
        mesh, names = self._as_types_tell(values)
        return Shards(mesh, names, lanes, on_own_devices(mesh, names, own) if own else ())

    def _as_types_tell(self, values: Values) -> tuple[Any, tuple[Any, ...]]:
        """Returns the mesh with axes of the types that JAX uses here, and the names."""
        mesh, names = self.devices
        # Types of arrays carry the mesh that is set or, if none is, that of the arguments, whatever
        # the axis types of the given mesh. Values that are differentiated outside of `jit` are
        # computed without: JAX cannot derive devices from types there.
        around = jax.sharding.get_abstract_mesh()
        if not around.empty:
            set_mesh = around if _compat.tracing() else jax.sharding.get_mesh()
        else:
            plain = _compat.tracing() and not in_jit()
            set_mesh = next(filter(None, map(typed_mesh, () if plain else values)), None)
        if set_mesh is not None and set_mesh.size == mesh.size:
            if self.mesh is None:
                return set_mesh, tuple(set_mesh.axis_names)
            if set_mesh.shape == mesh.shape:
                return mesh.update(axis_types=set_mesh.axis_types), names
        if around.empty:
            return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names)), names
        raise UnsupportedError(
            f"mesh has {_in_words(mesh)}, and jax.set_mesh has set one of {_in_words(around)}: JAX "
            "runs programs on the mesh that is set, and on no other. Pass that one, or call the "
            "function where it is not set."
        )


def _in_words(mesh: Mesh | AbstractMesh) -> str:
    axes = " and ".join(f"{name!r} of size {size}" for name, size in mesh.shape.items())
    return f"the axis {axes}" if len(mesh.shape) == 1 else f"the axes {axes}"


def find_mesh(mesh: Any) -> OnMesh | None:
    """Validates the option `mesh`; None for no mesh.

    Raises ArgumentTypeError if it is not a mesh, and AxisError for a missing axis.
    """
    if mesh is None:
        return None
    if isinstance(mesh, str) and mesh == "all":
        return OnMesh(None)
    names: Any = ()
    if isinstance(mesh, tuple) and len(mesh) == 2 and _is_mesh(mesh[0]):
        mesh, names = mesh
        names = names if isinstance(names, tuple) else (names,)
        known = mesh.axis_names
        missing = [x for x in names if not (isinstance(x, Hashable) and x in known)]
        if missing or not names or len(set(names)) < len(names):
            axes = "axis" if len(known) == 1 else "axes"
            raise AxisError(
                f"mesh: the mesh has the {axes} {', '.join(map(repr, known))}; "
                + (
                    f"lanes were to be spread over {', '.join(map(repr, missing))}."
                    if missing
                    else f"name one or more of them, each once; got {brief(names)}."
                )
            )
    if not _is_mesh(mesh):
        raise ArgumentTypeError(
            'mesh must be None, "all", a jax.sharding.Mesh, or a tuple of one and the name of an '
            f"axis, or of names; got {show(mesh)}."
        )
    return OnMesh(mesh, names)


def _is_mesh(x: Value) -> TypeGuard[Mesh | AbstractMesh]:
    return isinstance(x, (Mesh, AbstractMesh))
