"""Arrays of the processes that run one program, and meshes of their devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from batchax.errors import UnsupportedError
from batchax.jaxprs.words import Value
from batchax.memo import memoized


def of_several_processes(mesh: Any) -> bool:
    """Whether a mesh has devices of several processes."""
    return jax.process_count() > 1 and (isinstance(mesh, AbstractMesh) or mesh.is_multi_process)


def check_spans(mesh: Any) -> None:
    """Refuses a mesh of some processes.

    Those would wait for what only all processes can say.

    Raises:
      UnsupportedError: it is neither of all processes nor of this one alone.
    """
    count = jax.process_count()
    if count == 1 or isinstance(mesh, AbstractMesh):
        return
    processes = {device.process_index for device in mesh.devices.flat}
    if processes not in ({jax.process_index()}, set(range(count))):
        raise UnsupportedError(
            f"mesh has devices of process {', '.join(map(str, sorted(processes)))} of {count}, and "
            f"this is process {jax.process_index()}. Give a mesh of devices of all processes, such "
            'as mesh="all", or of jax.local_devices() alone.'
        )


def from_all(x: np.ndarray) -> np.ndarray:
    """What each process passes here, one after another along a new first axis.

    All must call it, with arrays of one shape and dtype. Each device holds all
    that is returned.
    """
    if jax.process_count() == 1:
        return x[None]
    each, everywhere = _by_process()
    own = jax.make_array_from_callback((jax.process_count(), *x.shape), each, lambda _: x[None])
    return np.asarray(put_by_program(own, everywhere))


@memoized("meshes of the devices of processes", most=1)
def _by_process() -> tuple[NamedSharding, NamedSharding]:
    """A part for each process, on its devices; and the whole on all.

    One device of each would do, but programs that use several devices of a process are run in turn,
    also where devices are CPUs: what is sent meanwhile by another could be taken for this.
    """
    devices: list[list[Any]] = [[] for _ in range(jax.process_count())]
    for device in jax.devices():
        devices[device.process_index].append(device)
    least = min(map(len, devices))
    mesh = Mesh(np.array([own[:least] for own in devices]), ("processes", "devices"))
    return NamedSharding(mesh, PartitionSpec("processes")), NamedSharding(mesh, PartitionSpec())


def put_by_program(x: Value, sharding: Any) -> Any:
    """An array sharded otherwise, by a program that all processes run."""
    return jax.jit(_same, out_shardings=sharding)(x)


def _same(x: Value) -> Any:
    return x
