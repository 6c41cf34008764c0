"""Rules for whole families of primitives, made from a few words about each.

`vectorized`, `broadcasting` and `reducing` register the rule of a primitive
that acts on each element, on elements of several operands that broadcast, or
that removes dimensions. They are what most primitives need, JAX's own and
those of users.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax

from batchax._compat import Primitive
from batchax.engine.axis import Axis, AxisPosition, expand_axis, move_axis
from batchax.engine.registry import register_rule


def vectorized(primitive: Primitive) -> None:
    """Registers `primitive`, of one operand, as acting on each element alone."""

    @register_rule(primitive)
    def rule(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        out = primitive.bind(*args, **params)
        if primitive.multiple_results:
            return out, [axes[0]] * len(out)
        return out, axes[0]


def broadcasting(primitive: Primitive) -> None:
    """Registers `primitive`, of several operands, as acting on matching elements.

    The operands of the primitive must allow dimensions of size one and scalars
    to broadcast, as those of ``jax.lax.add`` do.
    """

    @register_rule(primitive)
    def rule(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        args, out_axis = aligned(args, axes)
        out = primitive.bind(*args, **params)
        if primitive.multiple_results:
            return out, [out_axis] * len(out)
        return out, out_axis


def reducing(primitive: Primitive) -> None:
    """Registers `primitive` as removing the dimensions named by its `axes`."""

    @register_rule(primitive)
    def rule(axis: Axis, args: Any, axes_: Any, /, *, axes: Any, **params: Any) -> tuple[Any, Any]:
        (x,), (position,) = args, axes_
        dims = tuple(d + (d >= position) for d in axes)
        out = primitive.bind(x, axes=dims, **params)
        return out, position - sum(d < position for d in dims)


def aligned(args: Any, axes: Any) -> tuple[list[Any], AxisPosition]:
    """Operands whose batch axes are in one place and broadcast against each other.

    The place is that of the largest batched operand, which is then not moved.
    Unbatched operands get an axis of size one; unbatched scalars stay scalars.
    """
    first = next(a for a in axes if a is not None)
    rank = max(np.ndim(x) - (a is not None) for x, a in zip(args, axes, strict=True))
    if all(
        a == first and np.ndim(x) == rank + 1 if a is not None else np.ndim(x) == 0
        for x, a in zip(args, axes, strict=True)
    ):
        return list(args), first
    target = max(
        (
            (np.size(x), -i, a)
            for i, (x, a) in enumerate(zip(args, axes, strict=True))
            if a is not None and np.ndim(x) == rank + 1
        ),
        default=(0, 0, 0),
    )[2]
    out = []
    for x, a in zip(args, axes, strict=True):
        if a is not None and np.ndim(x) < rank + 1:  # one number per lane
            dims = [d for d in range(rank + 1) if d != target]
            x = lax.expand_dims(x, dims) if dims else x
        elif a is not None:
            x = move_axis(x, a, target)
        elif np.ndim(x):
            x = expand_axis(x, target)
        out.append(x)
    return out, target
