"""Rules for whole families of primitives, made from a few words about each.

`vectorized`, `broadcasting`, `reducing` and `leading` register the rule of a
primitive that acts on each element, on elements of several operands that
broadcast, that removes dimensions, or that takes leading batch dimensions.
They are what most primitives need, JAX's own and those of users.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from batchax._compat import Primitive
from batchax.errors import ArgumentTypeError, AxisError
from batchax.jaxprs.primitive_facts import describe
from batchax.jaxprs.spoken import brief, listed
from batchax.jaxprs.words import Value
from batchax.kernel.axis import (
    Axis,
    Position,
    expand_axis,
    expand_lanes,
    match_axis,
    move_axis,
    sharding_with_axis,
    shift_dims,
)
from batchax.kernel.registry import is_foreign, register_rule


def vectorized(primitive: Primitive) -> None:
    """Registers `primitive`, of operands of one shape, as acting on each element alone.

    Rows of a `Ragged` are treated so, too: packed or padded, it runs on all of them at once.

    Args:
      primitive: a ``jax.extend.core.Primitive``.

    Example:
      >>> from jax.extend.core import Primitive
      >>> cube_p = Primitive("cube")
      >>> _ = cube_p.def_impl(lambda x: x**3), cube_p.def_abstract_eval(lambda x: x)
      >>> bx.vectorized(cube_p)
      >>> print(bx.vmap(cube_p.bind)(jnp.arange(4)))
      [ 0  1  8 27]
    """

    def rule(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        shapes = [example_shape(x, a) for x, a in zip(args, axes, strict=True)]
        if len(set(shapes)) > 1:
            raise ArgumentTypeError(
                f"vectorized is for a primitive whose operands have one shape, and those of "
                f"`{primitive}` have {listed(shapes)}. Use batchax.broadcasting."
            )
        args, position = matched(axis, args, axes) if len(args) > 1 else (args, axes[0])
        return _alike(primitive, primitive.bind(*args, **params), position)

    _register(primitive, rule, "vectorized", elementwise=True)


def broadcasting(primitive: Primitive) -> None:
    """Registers `primitive`, of several operands, as acting on matching elements.

    The operands of the primitive must allow dimensions of size one and scalars
    to broadcast, as those of ``jax.lax.add`` do. Rows of a `Ragged` are treated so, too:
    packed or padded, it runs on all of them at once.

    Args:
      primitive: a ``jax.extend.core.Primitive``.

    Example:
      >>> from jax.extend.core import Primitive
      >>> hypot_p = Primitive("hypot")
      >>> _ = hypot_p.def_impl(jnp.hypot), hypot_p.def_abstract_eval(lambda x, y: x)
      >>> bx.broadcasting(hypot_p)
      >>> print(bx.vmap(hypot_p.bind, (0, None))(jnp.array([3.0, 0.0]), jnp.float32(4.0)))
      [5. 4.]
    """

    def rule(axis: Axis, args: Any, axes: Any, /, **params: Any) -> tuple[Any, Any]:
        args, out_axis = aligned(args, axes)
        return _alike(primitive, primitive.bind(*args, **params), out_axis)

    _register(primitive, rule, "broadcasting", elementwise=True)


def reducing(primitive: Primitive, neutral: Any = None) -> None:
    """Registers `primitive` as removing the dimensions named by its parameter `axes`.

    Args:
      primitive: a primitive of one operand, or of several of one shape.
      neutral: a value that changes no result, as zero does for a sum; or a function of the
        operand's dtype that returns one. Rows of a `Ragged`, padded with it, are then reduced
        all at once. Without it those of one length are, for as many lengths as there are.

    Example:
      >>> from jax.extend.core import Primitive
      >>> norm_p = Primitive("norm")  # of a vector
      >>> _ = norm_p.def_impl(lambda x, axes: jnp.sqrt(jnp.sum(x**2, axes)))
      >>> _ = norm_p.def_abstract_eval(lambda x, axes: jax.core.ShapedArray((), x.dtype))
      >>> bx.reducing(norm_p, neutral=0)
      >>> print(bx.vmap(lambda x: norm_p.bind(x, axes=(0,)))(jnp.array([[3.0, 4.0], [0.0, 2.0]])))
      [5. 2.]
    """

    def rule(axis: Axis, args: Any, axes_: Any, /, **params: Any) -> tuple[Any, Any]:
        if "axes" not in params:
            raise ArgumentTypeError(
                "reducing is for a primitive that has the dimensions it removes as a parameter "
                f"`axes`; `{primitive}` has {', '.join(map(repr, params)) or 'no parameters'}."
            )
        args, position = matched(axis, args, axes_) if len(args) > 1 else (args, axes_[0])
        dims = shift_dims(reduced_dims(primitive, params["axes"], args[0].ndim - 1), position)
        out_axis = position - sum(d < position for d in dims)
        if "input_shape" in params:
            params["input_shape"] = args[0].shape
        if "out_sharding" in params:
            sharding = params["out_sharding"]
            params["out_sharding"] = sharding_with_axis(sharding, out_axis, args, axes_)
        return _alike(primitive, primitive.bind(*args, **{**params, "axes": dims}), out_axis)

    of_dtype = neutral if neutral is None or callable(neutral) else lambda dtype: neutral
    _register(primitive, rule, "reducing", reduces=True, neutral=of_dtype)


def _register(primitive: Primitive, rule: Any, maker: str, **facts: Any) -> None:
    rule.__name__ = rule.__qualname__ = f"batchax.{maker}"  # as messages about it call it
    register_rule(primitive)(rule)
    if is_foreign(primitive):  # what JAX's are is said in the tables of their families
        describe([primitive], **facts)


def reduced_dims(primitive: Primitive, dims: Any, rank: int) -> tuple[int, ...]:
    """What a primitive registered as `reducing` removes of `rank` dimensions, from the front."""
    several = isinstance(dims, (tuple, list))
    if not (several and all(isinstance(d, (int, np.integer)) for d in dims)):
        raise ArgumentTypeError(
            "reducing is for a primitive whose parameter `axes` is a tuple of ints; that of "
            f"`{primitive}` is {brief(dims)}."
        )
    wrong = [d for d in dims if not -rank <= d < rank]
    if wrong:
        raise AxisError(
            f"the parameter `axes` of the primitive `{primitive}` is {dims}, but its operand has "
            f"{rank} dimension{'s' if rank != 1 else ''} for one example."
        )
    return tuple(d % rank for d in dims)


def _alike(primitive: Primitive, out: Any, out_axis: Any) -> tuple[Any, Any]:
    """What a primitive returned, with the batch axis of all results in one place."""
    return (out, [out_axis] * len(out)) if primitive.multiple_results else (out, out_axis)


def leading_rule(
    primitive: Primitive, ranks: Sequence[int], axis: Axis, args: Any, axes: Any, /, **params: Any
) -> tuple[Any, Any]:
    """The rule of a primitive that takes leading batch dimensions, alike in all operands.

    `ranks` is how many trailing dimensions of each operand the primitive works
    on: 2 for a matrix. Results have the leading dimensions of the operands.
    """
    # Where the batch axis may stay: anywhere before the dimensions that the primitive works on.
    in_place = range(np.ndim(args[0]) - (axes[0] is not None) - ranks[0] + 1)
    target = next((a for a in axes if a in in_place), 0)
    args = [match_axis(axis, x, a, target) for x, a in zip(args, axes, strict=True)]
    return _alike(primitive, primitive.bind(*args, **params), target)


def aligned(args: Any, axes: Any) -> tuple[list[Any], int]:
    """Operands whose batch axes are in one place and broadcast against each other.

    Unbatched operands get an axis of size one; unbatched scalars stay scalars.
    """
    # What has no axis may be a number of Python's.
    ranks = [np.ndim(x) if a is None else len(x.shape) - 1 for x, a in zip(args, axes, strict=True)]
    forms = set(zip(ranks, axes, strict=True)) - {(0, None)}
    if len(forms) == 1:  # aligned as they are: by far the most frequent case
        return list(args), forms.pop()[1]
    rank = max(ranks)
    whole = {a for n, a in forms if n == rank and a is not None}
    target = whole.pop() if len(whole) == 1 else common_position(args, axes)
    out = []
    for x, a, n in zip(args, axes, ranks, strict=True):
        if a is None:
            out.append(expand_axis(x, target) if n else x)
        elif n == rank:
            out.append(move_axis(x, a, target))
        else:  # one number per lane
            out.append(expand_lanes(x, target, rank))
    return out, target


def matched(axis: Axis, args: Any, axes: Any) -> tuple[list[Any], int]:
    """Operands of one shape with their batch axes in one place, repeated where there is none."""
    target = common_position(args, axes)
    return [match_axis(axis, x, a, target) for x, a in zip(args, axes, strict=True)], target


def example_shape(x: Value, position: Position) -> tuple[int, ...]:
    """The shape of one example of an operand."""
    shape = np.shape(x)
    return shape if position is None else shape[:position] + shape[position + 1 :]


def example_rank(args: Any, axes: Any) -> int:
    """The largest rank of the operands without their batch axes."""
    return max(np.ndim(x) - (a is not None) for x, a in zip(args, axes, strict=True))


def common_position(args: Any, axes: Any) -> int:
    """Where to align batch axes so that the least has to be moved.

    Only operands of the largest rank count; the others fit anywhere.
    """
    ndim = example_rank(args, axes) + 1
    full = [(x, a) for x, a in zip(args, axes, strict=True) if a is not None and x.ndim == ndim]
    positions = {a for _, a in full}
    if len(positions) <= 1:
        return positions.pop() if positions else 0
    # Counted in dimensions that are not of size one, as sizes may be symbolic.
    weight = Counter()
    for x, a in full:
        weight[a] += sum(d != 1 for d in x.shape)
    return min(weight, key=lambda a: (-weight[a], a))  # results are mostly wanted in front
