"""Mutable references: reading, writing and adding in place, by JAX's rules."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.errors import AxisError, UnsupportedError
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Tree, Values
from batchax.kernel.axis import Axis, Positions, RuleOutputs, match_axis, move_axis
from batchax.kernel.interpreter import by_rule_of_jax
from batchax.kernel.registry import register_rule, vectorized

enter(": addupdate broadcast_to freeze get new_ref swap")


for _name in ("new_ref", "freeze"):
    if (_primitive := _compat.find_primitive(_name)) is not None:
        vectorized(_primitive)


def _checked(name: str) -> None:
    """Registers JAX's rule for a reference, which is the first operand, with errors of batchax."""

    @register_rule(name)
    def rule(axis: Axis, args: Values, axes: Positions, /, *, tree: Tree) -> RuleOutputs:
        if name != "get" and axes[0] is None:
            raise AxisError(
                "the function writes a value that depends on the batch, or writes at an index that "
                "does, to a mutable reference that all lanes share, so the lanes would overwrite "
                "each other. Create the reference inside the function, or pass it as an argument "
                "with an axis in in_axes, so that each lane has its part."
            )
        first = len(args) - tree.num_leaves
        views = jax.tree.unflatten(tree, range(first, len(args)))
        if len(views) > 1 or not all(hasattr(view, "indices") for view in views):
            raise UnsupportedError(
                "the function reads or writes a reference through a view of it (ref.at[...], or a "
                "reshaped or reinterpreted reference), which cannot be batched: index the "
                "reference itself, with all indices at once."
            )
        args, axes = list(args), list(axes)
        if name != "get" and not views:  # JAX wants lanes where the reference has them
            args[1], axes[1] = match_axis(axis, args[1], axes[1], axes[0]), axes[0]
        if any(a is not None for a in axes[first:]):
            sizes = [n for d, n in enumerate(args[0].shape) if d != axes[0]]
            at = [(k, n) for k, n in zip(views[0].indices, sizes, strict=True) if type(k) is int]
            # Of one example JAX counts numbers from the end, and clamps them. Batched ones are
            # entries of an array of indices, which does neither.
            if all(np.ndim(args[k]) == (axes[k] is not None) for k, _ in at):
                for k, n in at:
                    args[k] = jnp.clip(jnp.where(args[k] < 0, args[k] + n, args[k]), 0, n - 1)
        primitive = _compat.find_primitive(name)
        assert primitive is not None
        return by_rule_of_jax(axis, primitive, args, axes, {"tree": tree})


for _name in ("get", "swap", "addupdate"):
    _checked(_name)


@register_rule("broadcast_to")
def _broadcast_to(
    axis: Axis, args: Values, axes: Sequence[int], /, *, shape: Sequence[int]
) -> RuleOutputs:
    """Broadcasts indices of a reference to one shape."""
    (x,), (position,) = args, axes
    x = move_axis(x, position, 0)
    dims = range(1 + len(shape) - (x.ndim - 1), 1 + len(shape))
    return lax.broadcast_in_dim(x, (axis.size, *shape), (0, *dims)), 0
