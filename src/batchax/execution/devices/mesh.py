"""Lanes spread over the devices of a mesh that the user names: `vmap(mesh=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.execution.devices.local_rows import on_own_devices
from batchax.execution.devices.processes import check_spans
from batchax.execution.devices.shards import Shards
from batchax.execution.devices.telling import typed_mesh
from batchax.jaxprs.spoken import brief, show
from batchax.jaxprs.words import Value
from batchax.kernel.looking import in_jit
from batchax.kernel.varying import mesh_around


@dataclass(frozen=True)
class OnMesh:
    """What the option `mesh` of `vmap` asks for.

    Attributes:
      mesh: a mesh; None for one of all devices, which is looked for at each call.
      names: the axes of the mesh that lanes are spread over; empty for all of them.
    """

    mesh: Mesh | AbstractMesh | None
    names: tuple[Any, ...] = ()

    @property
    def devices(self) -> tuple[Any, tuple[Any, ...]]:
        """The mesh, and the names of the axes that lanes are spread over."""
        mesh = self.mesh
        if mesh is None:
            mesh = Mesh(np.array(jax.devices()), ("devices",))
        check_spans(mesh)
        return mesh, self.names or tuple(mesh.axis_names)

    def shards(
        self, lanes: Any, values: Sequence[Value], own: Sequence[range] = ()
    ) -> Shards | None:
        """What so many lanes are spread over; None if there are none.

        Args:
          lanes: how many.
          values: the arguments.
          own: the lanes of each process, where rows are its own.

        Raises:
          UnsupportedError: the number of lanes is a symbol, devices are taken already, another mesh
            is set, or the mesh is one of some processes.
        """
        if not isinstance(lanes, int):
            raise UnsupportedError(
                f"mesh was given, but the number of lanes is {lanes}, a symbolic size. Export the "
                "function for a known size, or leave mesh out."
            )
        if lanes == 0:
            return None
        taken = mesh_around()
        if AxisType.Manual in taken.axis_types:
            raise UnsupportedError(
                "mesh was given inside a jax.shard_map over "
                f"{', '.join(map(repr, taken.manual_axes))}, or another vmap with mesh: there each "
                "device runs a program of its own. Leave mesh out of the inner one."
            )
        mesh, names = self._as_types_tell(values)
        return Shards(mesh, names, lanes, on_own_devices(mesh, names, own) if own else ())

    def _as_types_tell(self, values: Sequence[Value]) -> tuple[Any, tuple[Any, ...]]:
        """The mesh with its axes of those types that JAX goes by here, and names.

        Whether types of arrays tell of a mesh is not for the mesh to say that is given: they do as
        the mesh that is set has it, and if none is, as arguments are. What is given plain is
        computed plain. What is differentiated outside of `jit` is, too: JAX cannot tell devices
        there from types alone.
        """
        mesh, names = self.devices
        around = jax.sharding.get_abstract_mesh()
        if not around.empty:
            told = around if _compat.tracing() else jax.sharding.get_mesh()
        else:
            plain = _compat.tracing() and not in_jit()
            told = next(filter(None, map(typed_mesh, () if plain else values)), None)
        if told is not None and told.size == mesh.size:
            if self.mesh is None:
                return told, tuple(told.axis_names)
            if told.shape == mesh.shape:
                return mesh.update(axis_types=told.axis_types), names
        if around.empty:
            return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names)), names
        raise UnsupportedError(
            f"mesh has {_in_words(mesh)}, and jax.set_mesh has set one of {_in_words(around)}: JAX "
            "runs programs on the mesh that is set, and on no other. Pass that one, or call the "
            "function where it is not set."
        )


def _in_words(mesh: Any) -> str:
    axes = " and ".join(f"{name!r} of size {size}" for name, size in mesh.shape.items())
    return f"the axis {axes}" if len(mesh.shape) == 1 else f"the axes {axes}"


def find_mesh(mesh: Any) -> OnMesh | None:
    """What the option `mesh` asks for; None where it asks for nothing.

    Raises:
      ArgumentTypeError: it is not a mesh.
      AxisError: the mesh has no axis of that name.
    """
    if mesh is None:
        return None
    if isinstance(mesh, str) and mesh == "all":
        return OnMesh(None)
    names: Any = ()
    if isinstance(mesh, tuple) and len(mesh) == 2 and _is_mesh(mesh[0]):
        mesh, names = mesh
        names = names if isinstance(names, tuple) else (names,)
        missing = [name for name in names if name not in mesh.axis_names]
        if missing or not names or len(set(names)) < len(names):
            axes = "axis" if len(mesh.axis_names) == 1 else "axes"
            raise AxisError(
                f"mesh: the mesh has the {axes} {', '.join(map(repr, mesh.axis_names))}; "
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
