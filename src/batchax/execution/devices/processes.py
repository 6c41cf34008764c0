"""Arrays, meshes, rows (`local`) and calls of several processes that run one program."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from batchax.cache import cached
from batchax.errors import AxisError, UnsupportedError
from batchax.execution.devices import meetings
from batchax.frontend.arguments import LocalRows, Mapped, MappedRows, OwnRows
from batchax.jaxprs.types import Tree, Value
from batchax.kernel.interpreter import in_jit


def of_several_processes(mesh: Mesh | AbstractMesh) -> bool:
    return jax.process_count() > 1 and (isinstance(mesh, AbstractMesh) or mesh.is_multi_process)


def check_spans(mesh: Mesh | AbstractMesh) -> None:
    """Rejects a mesh of some of the processes, which would wait for the others."""
    count = jax.process_count()
    if count == 1 or isinstance(mesh, AbstractMesh):
        return
    processes = {device.process_index for device in mesh.devices.flat}
    if processes not in ({jax.process_index()}, set(range(count))):
        raise UnsupportedError(
            f"mesh has devices of process {', '.join(map(str, sorted(processes)))} of {count}, and "
            f"this is process {jax.process_index()}. Pass a mesh of devices of all processes, such "
            'as mesh="all", or of jax.local_devices() alone.'
        )


def from_all(x: np.ndarray) -> np.ndarray:
    """Stacks the arrays that all processes pass along a new first axis.

    All of them must call it, with arrays of one shape and dtype.
    """
    if jax.process_count() == 1:
        return x[None]
    each, everywhere = _by_process()
    own = jax.make_array_from_callback((jax.process_count(), *x.shape), each, lambda _: x[None])
    return np.asarray(put_by_program(own, everywhere))


@cached("meshes of the devices of processes", most=1)
def _by_process() -> tuple[NamedSharding, NamedSharding]:
    """Returns shardings for one part on each process's devices, and for the whole on all."""
    devices: list[list[Any]] = [[] for _ in range(jax.process_count())]
    for device in jax.devices():
        devices[device.process_index].append(device)
    # Use all devices: programs on several devices of a process run in order, also on CPUs. With one
    # device each, data that another program sends meanwhile could be taken for this.
    least = min(map(len, devices))
    mesh = Mesh(np.array([own[:least] for own in devices]), ("processes", "devices"))
    return NamedSharding(mesh, PartitionSpec("processes")), NamedSharding(mesh, PartitionSpec())


def put_by_program(x: Value, sharding: Sharding) -> jax.Array:
    return jax.jit(_same, out_shardings=sharding)(x)


def _same(x: Value) -> Value:
    return x


def own_rows(mesh: Mesh | AbstractMesh, mapped: Sequence[Mapped]) -> list[int]:
    """Returns the number of local rows of this process, for the others.

    It is -1 if arguments disagree, which other processes must learn, too, and empty without local
    rows. Raises UnsupportedError if the call is traced, or other rows have different lengths.
    """
    own = _local(mapped)
    if not own:
        return []
    if isinstance(mesh, AbstractMesh) or in_jit():
        raise UnsupportedError(
            f"{own[0][0].path} is batchax.local(x), and the call is inside of jit, or its mesh is "
            "abstract: how many rows each process has is not known there. Call the function of "
            "vmap outside of jit; what it runs is compiled and remembered all the same."
        )
    if any(isinstance(m, MappedRows) for m in mapped):
        raise UnsupportedError(
            f"{own[0][0].path} is batchax.local(x), next to rows of different lengths, which "
            "are distributed by lengths that all processes must know. Pass all rows on all "
            "processes, or pad the others: x.to_padded()."
        )
    counts = {x.shape[axis] for _, x, axis in own}
    return [*counts] if len(counts) == 1 else [-1]


def lanes_of_processes(
    mapped: Sequence[Mapped], numbers: Sequence[Sequence[int]], process: int
) -> tuple[list[Mapped], list[range]]:
    """Gives local rows their position among the rows of all processes.

    `numbers` holds `own_rows` of each. Returns the arguments, and the lanes of each process (none
    without local rows). Raises AxisError if arguments of a process disagree.
    """
    own = _local(mapped)
    if not own:
        return list(mapped), []
    counts = [count for (count,) in numbers]
    if min(counts) < 0:
        wrong = [str(p) for p, count in enumerate(counts) if count < 0]
        sizes = "".join(f"\n  {m.path}: {x.shape[axis]} rows" for m, x, axis in own)
        raise AxisError(
            "arguments that are batchax.local(x) must have one number of rows on each process, but "
            f"on process {', '.join(wrong)} they have several. Here there are{sizes}"
        )
    ends = [0, *accumulate(counts)]
    ranges = [range(a, b) for a, b in pairwise(ends)]
    if not ends[-1]:
        return [
            replace(m, value=m.value.array) if isinstance(m, OwnRows) else m for m in mapped
        ], []
    among = {id(m): _among_all(x, axis, ranges, ranges[process]) for m, x, axis in own}
    return [replace(m, value=among.get(id(m), m.value)) for m in mapped], ranges


def _local(mapped: Sequence[Mapped]) -> list[tuple[Mapped, LocalRows, int]]:
    return [(m, m.value, m.axis) for m in mapped if isinstance(m, OwnRows) and m.axis is not None]


def on_own_devices(mesh: Mesh, names: Sequence[Any], own: Sequence[range]) -> tuple[range, ...]:
    """Returns the lanes of each shard: each process shards its rows over its own devices.

    Raises UnsupportedError if a shard has devices of several processes.
    """
    # Order devices by shard: axes that shard lanes first, in the given order.
    order = [mesh.axis_names.index(name) for name in names]
    order += [i for i in range(mesh.devices.ndim) if i not in order]
    count = int(np.prod([mesh.shape[name] for name in names]))
    devices = np.transpose(mesh.devices, order).reshape(count, -1)
    processes = [{device.process_index for device in row} for row in devices]
    if any(len(ids) > 1 for ids in processes):
        raise UnsupportedError(
            "an argument is batchax.local(x), and the lanes of a shard would be on devices of "
            f"processes {', '.join(map(str, sorted(max(processes, key=len))))}. Pass a mesh whose "
            f"axes besides {', '.join(map(repr, names))} stay within a process."
        )
    owners = [ids.pop() for ids in processes]
    lanes = dict(zip(sorted(set(owners)), own, strict=True))
    # All shards have the same number of slots, given by the fullest.
    each = max(-(-len(r) // owners.count(p)) for p, r in lanes.items())
    left = dict(lanes)
    shards = []
    for p in owners:
        shards.append(left[p][:each])
        left[p] = left[p][each:]
    return tuple(shards)


def _among_all(x: LocalRows, axis: int, ranges: Sequence[range], here: range) -> LocalRows:
    shape = (*x.shape[:axis], ranges[-1].stop, *x.shape[axis + 1 :])
    array, first = x.array, here.start
    if not all(ranges):
        # A process without rows repeats a row of another one: the last before, or the very first.
        keys = jnp.issubdtype(array.dtype, jax.dtypes.extended)
        data = np.asarray(jax.random.key_data(array) if keys else array)
        ends = np.take(data, [0, -1], axis) if here else np.zeros(_with(data, axis, 2), data.dtype)
        rows = from_all(ends)
        if not here:
            lane = max(first - 1, 0)
            process = next(i for i, r in enumerate(ranges) if lane in r)
            row = np.take(rows[process], [0 if lane == ranges[process].start else 1], axis)
            array = (
                jax.random.wrap_key_data(jnp.asarray(row), impl=jax.random.key_impl(array))
                if keys
                else row
            )
            first = lane
    return LocalRows(array, shape, first)


def _with(x: np.ndarray, axis: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:axis], size, *x.shape[axis + 1 :])


@contextlib.contextmanager
def call_of_all(
    mesh: Mesh | AbstractMesh,
    fun: Callable[..., Any],
    arguments: Tree,
    mapped: Sequence[Mapped],
    options: Mapping[str, Any],
) -> Iterator[tuple[list[Mapped], list[range]]]:
    """Synchronizes a call with `mesh` among its processes.

    `options` are those of `vmap` that change the computation. Yields the arguments with local rows
    placed, and the lanes of each process (empty without local rows).
    """
    numbers = own_rows(mesh, mapped)
    # Inside `jit` the time of the call is unknown, so nothing is checked.
    if not of_several_processes(mesh) or isinstance(mesh, AbstractMesh) or in_jit():
        yield lanes_of_processes(mapped, [numbers], 0)
        return
    name = getattr(fun, "__qualname__", type(fun).__qualname__)
    local = {id(m.value): m.axis for m in mapped if isinstance(m, OwnRows)}
    lines = [
        f"function: {getattr(fun, '__module__', '')}.{name}",
        f"mesh: {_of_mesh(mesh)}",
        *(f"{option}: {value!r}" for option, value in options.items()),
        *_types(arguments, local),
    ]
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))  # addresses differ between processes
    together = meetings.of_this_process()
    with together.call(f"vmap of {name}", text, numbers) as of_all:
        yield lanes_of_processes(mapped, of_all, together.process)


def _types(arguments: Tree, local: Mapping[int, Any]) -> Iterator[str]:
    """Yields a line for each leaf. Local rows, by id, may differ in number between processes."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(arguments)
    for (kind, *path), x in leaves:
        name = f"{kind.key}{jax.tree_util.keystr(tuple(path))}"
        try:
            array = x.array if isinstance(x, LocalRows) else x
            dtype, shape = jax.typeof(array).dtype, list(array.shape)
        except (AttributeError, TypeError):  # passed to the function as it is
            yield f"{name}: {type(x).__name__}"
            continue
        if (axis := local.get(id(x))) is not None:
            shape[axis] = "rows"
        yield f"{name}: {dtype}[{', '.join(map(str, shape))}]"
    yield f"structure: {structure}"


@cached("descriptions of meshes", most=128)
def _of_mesh(mesh: Mesh) -> str:
    return f"{mesh}, devices {[device.id for device in mesh.devices.flat]}"
