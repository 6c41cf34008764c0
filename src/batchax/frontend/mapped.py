"""What is mapped, argument by argument, and what arguments say together of their lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from batchax.errors import AxisError, UnsupportedError
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.varying import as_lanes

Self = TypeVar("Self", bound="Mapped")


@dataclass(frozen=True, eq=False)
class Mapped:
    """An argument of a batched function: an array, where it came from, and its batch axis.

    Attributes:
      path: what messages call it.
      value: an array of JAX's, or of NumPy's where lanes go to devices; a reference.
      axis: its batch axis; None if all lanes have it alike.
      spec: what `in_axes` says of a batch of rows.
      given: the user's own, if `value` stands for it.
      typed: whether the type of its value may tell where lanes are.
    """

    typed: ClassVar[bool] = True

    path: str
    value: Value
    axis: Position
    spec: Any = None
    given: Any = None

    @property
    def lanes(self) -> Any:
        """How many lanes there are, if it says so."""
        return None if self.axis is None else self.value.shape[self.axis]

    def with_own_axis(self: Self) -> Self | None:
        """The same with an axis that is not negative; None if the array has no such axis."""
        if self.axis is None:
            return self
        ndim = len(self.value.shape)
        if 0 <= self.axis < ndim:
            return self
        return replace(self, axis=self.axis % ndim) if -ndim <= self.axis < 0 else None

    def sharded_over(self) -> tuple[Any, ...]:
        """The mesh axis that its type says lanes are sharded over, or None; if it says anything."""
        if self.axis is None or not self.typed:
            return ()
        spec = getattr(getattr(jax.typeof(self.value), "sharding", None), "spec", ())
        return (spec[self.axis] if self.axis < len(spec) else None,)

    def put(self: Self, value: Value) -> Self:
        """The same argument, whose value is now elsewhere, or in another form."""
        if value is self.value:
            return self
        return replace(self, value=value, given=self.value if self.given is None else self.given)


class LaneIndices(Mapped):
    """The index of each lane, once it is known how many there are."""

    typed: ClassVar[bool] = False

    @property
    def lanes(self) -> Any:
        return None

    def with_own_axis(self: Self) -> Self:
        return self


class MappedRows(Mapped):
    """A batch of rows of different lengths, which no type describes."""

    typed: ClassVar[bool] = False


class OwnRows(Mapped):
    """Rows that this process has by itself: not where other processes have theirs."""

    typed: ClassVar[bool] = False


def find_mesh_axis(mapped: Sequence[Mapped], spmd_axis_name: Any) -> tuple[Any, Any]:
    """The mesh axis that types of arguments say the mapped axis is sharded over, and its mesh.

    Raises:
      AxisError: the arguments say different things, or not what `spmd_axis_name` says.
    """
    entries = {m.path: entry for m in mapped for entry in m.sharded_over()}
    mesh_axes = set(entries.values())
    if len(mesh_axes) > 1:
        raise AxisError(
            "the mapped axes must be sharded over one mesh axis, but they are sharded as\n"
            + "\n".join(f"  {path}: {entry!r}" for path, entry in entries.items())
            + "\nUse jax.sharding.reshard on the arguments that differ."
        )
    mesh_axis = next(iter(mesh_axes), None)
    if None not in (mesh_axis, spmd_axis_name) and spmd_axis_name not in (mesh_axis, (mesh_axis,)):
        raise AxisError(
            f"spmd_axis_name {spmd_axis_name} was given, but the mapped axes are sharded over "
            f"{mesh_axis!r} by their types. Leave spmd_axis_name out."
        )
    if mesh_axis is None:
        return None, None
    sharded = next(m for m in mapped if m.sharded_over())
    return mesh_axis, jax.typeof(sharded.value).sharding.mesh


def with_lane_indices(mapped: Sequence[Mapped], axis: Axis) -> list[Mapped]:
    """The arguments with the indices of all lanes where they want that of a lane.

    Raises:
      UnsupportedError: lanes are sharded by their types over a mesh that is not set.
    """
    of_indices = [m for m in mapped if isinstance(m, LaneIndices)]
    if not of_indices:
        return list(mapped)
    indices = jnp.arange(axis.size, dtype=np.int32)
    if axis.mesh_axis is not None:  # as the types of the arguments have it
        sharded = next(m for m in mapped if m.axis is not None and m not in of_indices)
        if jax.sharding.get_abstract_mesh().empty:
            raise UnsupportedError(
                f"{of_indices[0].path} needs the index of each lane, and {sharded.path} is sharded "
                f"over {axis.mesh_axis!r}, an axis of type Explicit, of a mesh that is not set. "
                "Call it inside `with jax.set_mesh(mesh):`."
            )
        on_mesh = jax.typeof(sharded.value).sharding.update(spec=PartitionSpec(axis.mesh_axis))
        indices = jax.sharding.reshard(indices, on_mesh)
    (indices,) = as_lanes(axis, [indices], [0])
    return [Mapped(m.path, indices, 0) if m in of_indices else m for m in mapped]
