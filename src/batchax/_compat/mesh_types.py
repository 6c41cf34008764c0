"""Types inside ``shard_map``, outputs of `jax.shard_map`, and processes of one program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import lax
from jax._src.config import _check_vma as check_vma
from jax._src.distributed import global_state

from batchax._compat.jaxprs import is_reference


def checked_axes() -> frozenset[Hashable]:
    """The axes of the mesh of the ``shard_map`` around over which types say what varies.

    Whether it was called with ``check_vma`` no public function says.
    """
    if not check_vma.value:
        return frozenset()
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def varying_axes(aval: Any) -> frozenset[Hashable]:
    """The axes of a ``shard_map`` mesh that a value of this type varies over.

    Types do not say so publicly.
    """
    aval = getattr(aval, "inner_aval", aval)
    return aval.mat.varying if hasattr(aval, "mat") else frozenset()


def varying_as(x: Any, aval: Any) -> Any:
    """`x`, cast to vary over the axes of a ``shard_map`` mesh that `aval` varies over.

    Operations of JAX insert this cast themselves, primitives of our own do not.
    """
    return varying_over(x, varying_axes(aval))


def varying_alike(xs: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """`xs`, cast to vary over every mesh axis that any of them, or of `like`, varies over."""
    axes = frozenset().union(*(varying_axes(jax.typeof(x)) for x in (*xs, *like)))
    return [varying_over(x, axes) for x in xs]


def varying_over(x: Any, axes: frozenset[Hashable]) -> Any:
    """`x`, cast to vary over these axes of a mesh, too; references stay as they are."""
    missing = axes - varying_axes(jax.typeof(x))
    if not missing or is_reference(x):
        return x
    return jax.lax.pcast(x, tuple(missing), to="varying")


def type_varying_over(aval: Any, axes: frozenset[Hashable]) -> Any:
    """The type `aval` of values that vary over these axes of a mesh, too."""
    return with_varying_axes(aval, varying_axes(aval) | axes)


def with_varying_axes(aval: Any, axes: frozenset[Hashable]) -> Any:
    """The type `aval` of values that vary over these axes of a mesh.

    No public function makes a type from another with this changed.
    """
    if axes == varying_axes(aval):
        return aval
    if hasattr(aval, "inner_aval"):
        return aval.update(inner_aval=with_varying_axes(aval.inner_aval, axes))
    if aval.sharding.mesh.empty:  # of a number, or what was staged without a mesh
        mesh = jax.sharding.get_abstract_mesh()
        aval = aval.update(sharding=jax.sharding.NamedSharding(mesh, aval.sharding.spec))
    return aval.update(manual_axis_type=aval.mat.update(varying=axes))


def scalar_like(aval: Any, dtype: Any) -> Any:
    """The type of a scalar that varies over the same mesh axes as values of type `aval`."""
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec())
    return aval.update(shape=(), dtype=dtype, weak_type=False, sharding=sharding)


def filled(aval: Any, value: Any, dtype: Any = None) -> Any:
    """An array of the shape and the sharding that a type has, each entry of it `value`.

    Since JAX 0.12 ``lax.full`` leaves a mesh out of a type that nothing is sharded over.
    """
    dtype, sharding = dtype or aval.dtype, aval.sharding
    if sharding.mesh.empty:
        return lax.full(aval.shape, value, dtype)
    x = lax.full(aval.shape, value, dtype, sharding=sharding)
    return jax.sharding.reshard(x, sharding) if jax.typeof(x).sharding.mesh.empty else x


@jax.tree_util.register_pytree_node_class
class Outputs:
    """The outputs of a function for `jax.shard_map`, and how they are sharded.

    JAX wants to know the second, `out_specs`, before it runs the function, where it may depend on
    what the function finds out. It looks at the leaves only afterwards: one such object is given as
    `out_specs`, of no leaves yet, and the function tells it.
    """

    def __init__(self, arrays: Sequence[Any] = ()) -> None:
        self.arrays = list(arrays)

    def told(self, arrays: Sequence[Any], specs: Sequence[Any]) -> Outputs:
        """These outputs of the function; this object now stands for how they are sharded."""
        self.arrays = list(specs)
        return Outputs(arrays)

    def tree_flatten(self) -> tuple[list[Any], None]:
        return self.arrays, None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Sequence[Any]) -> Outputs:
        return cls(arrays)


def is_divided(ctx: Any) -> bool:
    """Whether a program that is being lowered is for devices among which its compiler divides it.

    Args:
      ctx: what a lowering rule is given; what it says of devices has no public name.
    """
    context = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return getattr(context, "num_devices", 1) > 1
    rest = [size for name, size in mesh.shape.items() if name not in context.manual_axes]
    return any(size > 1 for size in rest)


def shared_store() -> Any:
    """The client of that store; None where ``jax.distributed.initialize`` was not called.

    It is what processes find each other by, and works while their devices are busy or programs are
    lowered. Public JAX starts it, and has no name for it.
    """
    return global_state.client
