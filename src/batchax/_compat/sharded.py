"""What `jax.shard_map` is told of outputs, and whether a compiler divides a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


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
