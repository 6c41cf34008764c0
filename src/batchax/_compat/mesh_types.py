"""Types inside ``shard_map``, outputs of `jax.shard_map`, and processes of one program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src.config import _check_vma as check_vma
from jax._src.distributed import global_state
from jax.interpreters import mlir
from jax.sharding import AxisType

from batchax._compat.jaxprs import is_reference
from batchax._compat.types import Aval, Value


def checked_axes() -> frozenset[Hashable]:
    """Returns the mesh axes of the enclosing ``shard_map`` whose types show what varies."""
    # No public function returns whether it was called with ``check_vma``.
    if not check_vma.value:
        return frozenset()
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(aval: Aval) -> frozenset[Hashable]:
    """Returns the ``shard_map`` mesh axes that a value of this type varies over."""
    # Types do not expose this publicly.
    aval = getattr(aval, "inner_aval", aval)
    return aval.mat.varying if hasattr(aval, "mat") else frozenset()


def varying_as(x: Value, aval: Aval) -> Value:
    """Casts `x` to vary over the ``shard_map`` mesh axes that `aval` varies over."""
    # Operations of JAX insert this cast themselves, and primitives of batchax do not.
    return varying_over(x, varying_axes(aval))


def varying_alike(xs: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """Casts `xs` to vary over every mesh axis that any of them, or of `like`, varies over."""
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in (*xs, *like)))
    return [varying_over(x, axes) for x in xs]


def on_mesh_in_scope(x: Value) -> Value:
    """Gives an array the mesh with Explicit axes that is set, if its type carries none."""
    # JAX writes a part into an array only if both carry the same.
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types or not jax.typeof(x).sharding.mesh.empty:
        return x
    spec = jax.sharding.PartitionSpec(*[None] * x.ndim)
    return jax.sharding.reshard(x, jax.sharding.NamedSharding(mesh, spec))


def varying_over(x: Value, axes: frozenset[Hashable]) -> Value:
    """Casts `x` to vary over more mesh axes; references stay as they are."""
    missing = axes - varying_axes(jax.typeof(x))
    if not missing or is_reference(x):
        return x
    return jax.lax.pcast(x, tuple(missing), to="varying")


def type_varying_over(aval: Aval, axes: frozenset[Hashable]) -> Aval:
    """Returns the type of values that also vary over these mesh axes."""
    return with_varying_axes(aval, varying_axes(aval) | axes)


def with_varying_axes(aval: Aval, axes: frozenset[Hashable]) -> Aval:
    """Returns the type of values that vary over exactly these mesh axes."""
    # No public function changes this in a type.
    if axes == varying_axes(aval):
        return aval
    if hasattr(aval, "inner_aval"):
        return aval.update(inner_aval=with_varying_axes(aval.inner_aval, axes))
    if aval.sharding.mesh.empty:  # of a number, or what was staged without a mesh
        mesh = jax.sharding.get_abstract_mesh()
        aval = aval.update(sharding=jax.sharding.NamedSharding(mesh, aval.sharding.spec))
    return aval.update(manual_axis_type=aval.mat.update(varying=axes))


def scalar_like(aval: Aval, dtype: np.dtype[Any]) -> Aval:
    """Returns the type of a scalar that varies over the same mesh axes as `aval`."""
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec())
    return aval.update(shape=(), dtype=dtype, weak_type=False, sharding=sharding)


def filled(aval: Aval, value: Value, dtype: np.dtype[Any] | None = None) -> Value:
    # Since JAX 0.12, ``lax.full`` omits the mesh if nothing is sharded over it.
    dtype, sharding = dtype or aval.dtype, aval.sharding
    if sharding.mesh.empty:
        return lax.full(aval.shape, value, dtype)
    x = lax.full(aval.shape, value, dtype, sharding=sharding)
    return jax.sharding.reshard(x, sharding) if jax.typeof(x).sharding.mesh.empty else x


@jax.tree_util.register_pytree_node_class
class Outputs:
    """Holds the outputs of a function for `jax.shard_map`, or their sharding."""

    # JAX takes `out_specs` before it runs the function, which may determine them, but reads the
    # leaves only afterwards. So one such object, without leaves, is passed as `out_specs`, and the
    # function sets it.
    def __init__(self, arrays: Sequence[Any] = ()) -> None:
        self.arrays = list(arrays)

    def with_sharding(self, arrays: Sequence[Any], specs: Sequence[Any]) -> Outputs:
        """Wraps the outputs; this object now holds their sharding."""
        self.arrays = list(specs)
        return Outputs(arrays)

    def tree_flatten(self) -> tuple[list[Any], None]:
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Sequence[Any]) -> Outputs:
        return cls(arrays)


def is_divided(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether a program is being lowered for devices among which XLA divides it."""
    # The context of a lowering rule has no public names for this.
    context: Any = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return getattr(context, "num_devices", 1) > 1
    rest = [size for name, size in mesh.shape.items() if name not in context.manual_axes]
    return any(size > 1 for size in rest)


def shared_store() -> Any:
    """Returns the client of JAX's key-value store; None without ``jax.distributed.initialize``."""
    # Processes find each other by it, and it works while devices are busy or programs are lowered.
    # Public JAX starts it, and has no name for it.
    return global_state.client
