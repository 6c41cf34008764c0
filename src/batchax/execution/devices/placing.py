"""Values on their way to the devices of a mesh.

Who puts them there depends on where the call is made:

- inside of a program the compiler does. Where types name the mesh they are told to; else it is left
  to ``jit`` and ``shard_map``;
- what is differentiated outside of `jit` is put as other values are, but its cotangent goes back to
  where the user has it;
- an array of JAX's is sent, from one process to others by a program;
- of what is on the host, each device is given what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from batchax import _compat
from batchax.errors import AxisError
from batchax.execution.devices.processes import of_several_processes, put_by_program
from batchax.execution.devices.shards import Shards
from batchax.execution.devices.telling import sharding_of, typed_mesh
from batchax.frontend.local_rows import LocalRows
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Position, inserted
from batchax.kernel.looking import in_jit


def placed(
    shards: Shards, paths: Sequence[str], args: Sequence[Value], positions: Sequence[Position]
) -> list[Any]:
    """The arguments where shards want them: lanes spread over the mesh, all else on each device.

    What is sharded over other axes of the mesh stays as it is. Lanes that fill up the last shards
    repeat the last lane.

    Raises:
      AxisError: another axis of an argument is sharded over axes that lanes are spread over.
    """
    for path, x, position in zip(paths, args, positions, strict=True):
        _check_free(shards, path, x, position)
    return [_placed(shards, x, position) for x, position in zip(args, positions, strict=True)]


def _placed(shards: Shards, x: Value, position: Position) -> Any:
    if isinstance(x, np.ndarray) and in_jit():
        x = jnp.asarray(x)
    if isinstance(x, Tracer) or isinstance(shards.mesh, AbstractMesh):
        return _put_in_program(shards, x, position)
    # Each process may have the whole, of which its devices are given their parts.
    everywhere = isinstance(x, jax.Array) and x.is_fully_addressable and not in_jit()
    if isinstance(x, jax.Array) and not (everywhere and of_several_processes(shards.mesh)):
        return _sent(shards, x, position)
    return _from_host(shards, x, position)


def _put_in_program(shards: Shards, x: Value, position: Position) -> Any:
    types = dict(zip(shards.mesh.axis_names, shards.mesh.axis_types, strict=True))
    if any(types[name] == AxisType.Explicit for name in shards.names):
        spec = _with_other_axes(shards, x, position)
        return jax.sharding.reshard(
            _filled_up(shards, x, position), NamedSharding(shards.mesh, spec)
        )
    if isinstance(x, Tracer) and puts_traced(shards.mesh):
        return put_traced(shards, _filled_up(shards, x, position), position, _compat.value_of(x))
    return x if position is None else _filled_up_anywhere(shards, x, position)


def _sent(shards: Shards, x: jax.Array, position: Position) -> Any:
    sharding = NamedSharding(shards.mesh, _with_other_axes(shards, x, position))
    x = _filled_up(shards, x, position)
    if isinstance(x, Tracer) or x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    return put_by_program(x, sharding)  # `jax.device_put` refuses random keys


def _from_host(shards: Shards, x: Value, position: Position) -> jax.Array:
    """An array of NumPy, or own rows, on devices. No copy of the whole is made for one."""
    sharding = NamedSharding(shards.mesh, _with_other_axes(shards, x, position))
    shape, first = list(x.shape), 0
    if isinstance(x, LocalRows):
        x, first = x.array, x.first
    if position is not None:
        shape[position] = len(shards.slots)

    def held(index: Any) -> Any:
        """What one device holds."""
        if position is not None:
            lanes = shards.slots[index[position]] - first
            together = lanes.size and lanes[-1] - lanes[0] + 1 == lanes.size
            lanes = slice(lanes[0], lanes[-1] + 1) if together else lanes
            index = (*index[:position], lanes, *index[position + 1 :])
        return x[index]

    return jax.make_array_from_callback(tuple(shape), sharding, held, dtype=jax.typeof(x).dtype)


def _filled_up(shards: Shards, x: Value, position: Position) -> Any:
    return x if position is None else shards.filled_up(x, position)


def puts_traced(mesh: Any) -> bool:
    """Whether what is traced is put on the devices of a mesh as other values are.

    Inside of `jit` that is for the compiler to do; from one process to others JAX cannot.
    """
    return not (isinstance(mesh, AbstractMesh) or of_several_processes(mesh) or in_jit())


def put_traced(shards: Shards, x: Value, position: Position, value: Value) -> Any:
    """An array that is differentiated, with its lanes where shards want them.

    What the user put on other devices is put there, and the cotangent of what was on one of them
    goes back. All else `jit` puts where it is needed.

    value: what is known of where it is; None if nothing is.
    """
    if value is None or not value.committed:
        return x
    typed = typed_mesh(x) is not None
    if value.devices() == set(shards.mesh.devices.flat) and not typed:
        return x
    source = value.sharding if len(value.devices()) == 1 or typed else None
    to = NamedSharding(shards.mesh, shards.spec(position))
    try:
        return jax.device_put(x, to, src=source)
    except ValueError:  # its tangents have another axis, inside of ``jax.vmap``
        return jax.device_put(x, NamedSharding(shards.mesh, PartitionSpec()), src=source)


def _filled_up_anywhere(shards: Shards, x: Value, position: int) -> Any:
    """A traced array with lanes that fill up the last shards.

    Where lanes do not come out even each device has all of them. Left to itself the compiler puts
    the repeated lanes behind the others on the shards, which takes exchanges between devices.
    """
    filled = shards.filled_up(x, position)
    types = shards.mesh.axis_types
    if (
        not shards.repeated
        or isinstance(shards.mesh, AbstractMesh)
        or set(types) != {AxisType.Auto}
    ):
        return filled
    spec = [PartitionSpec.UNCONSTRAINED] * filled.ndim
    return jax.lax.with_sharding_constraint(
        filled, NamedSharding(shards.mesh, PartitionSpec(*inserted(spec[1:], position, None)))
    )


def _with_other_axes(shards: Shards, x: Value, position: Position) -> PartitionSpec:
    """Lanes over the axes of `shards`, and whatever `x` is sharded over besides."""
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
