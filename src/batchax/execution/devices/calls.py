"""Calls that several processes make together, and what must be the same on all of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from batchax.execution.devices import meetings
from batchax.execution.devices.local_rows import lanes_of_processes, own_rows
from batchax.execution.devices.processes import of_several_processes
from batchax.frontend.local_rows import LocalRows
from batchax.frontend.mapped import Mapped, OwnRows
from batchax.kernel.looking import in_jit
from batchax.memo import memoized


@contextlib.contextmanager
def call_of_all(
    mesh: Any,
    fun: Callable[..., Any],
    arguments: Any,
    mapped: Sequence[Mapped],
    options: Mapping[str, Any],
) -> Iterator[tuple[list[Mapped], list[range]]]:
    """A call with `mesh`, which all its processes make, if there are several.

    Inside of `jit` nobody knows when it is made.

    Args:
      mesh: the devices.
      fun: the function that is batched.
      arguments: of the call.
      mapped: those that are mapped.
      options: those of `vmap` that change what is computed.

    Returns:
      Inside: what is mapped, with local rows where they are among those of all; and the lanes of
      each process, where rows are its own, otherwise none.
    """
    numbers = own_rows(mesh, mapped)
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
    text = re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))  # each process has addresses of its own
    together = meetings.of_this_process()
    with together.call(f"vmap of {name}", text, numbers) as of_all:
        yield lanes_of_processes(mapped, of_all, together.process)


def _types(arguments: Any, local: Mapping[int, Any]) -> Iterator[str]:
    """A line for each leaf; of local rows (axes, by id) processes may have different numbers."""
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


@memoized("descriptions of meshes", most=128)
def _of_mesh(mesh: Mesh) -> str:
    return f"{mesh}, devices {[device.id for device in mesh.devices.flat]}"
