"""Convolution, whose batch axis is merged into a dimension that the primitive has.

Images that differ from lane to lane are more images; kernels that differ are
more output channels; where both differ each lane is a group of channels (or of
images, where the convolution has those groups). Groups are the slow part of
the dimension they divide, so the lanes go inside the groups of an operand that
the other operand shares, and outside them where every lane has its own groups.

On a CPU, XLA has no kernel for groups of numbers of 64 bits: it computes what all lanes' images
give with all lanes' kernels, most of it times zero, which takes up to hundreds of times as
long, and makes a NaN of one lane one of all. There such lanes run one after another, unless
`convolution_by_slices.py` has a faster way, which it may have for numbers of 32 bits, too.

A convolution of few spatial dimensions is computed by a library there, if channels come last. Of
programs outside of loops, XLA moves the channels; inside of loops it does not (openxla/xla,
``conv_canonicalization.cc``), and writes loops over all elements instead, which take up to 15 times
as long where there are many channels. So there they are moved here.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.words import Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, move_axis, sharding_with_axis
from batchax.kernel.inner import example_aval
from batchax.kernel.interpreter import one_after_another
from batchax.kernel.registry import register_rule
from batchax.memo import Memo
from batchax.rules.convolution_by_slices import by_slices, differentiable, pays

enter(": conv_general_dilated")


@register_rule(lax.conv_general_dilated_p)
def _conv_general_dilated(
    axis: Axis,
    args: Any,
    axes: Any,
    /,
    *,
    dimension_numbers: Any,
    feature_group_count: int,
    batch_group_count: int,
    out_sharding: Any,
    **params: Any,
) -> tuple[Any, Any]:
    (lhs, rhs), (lhs_axis, rhs_axis) = args, axes
    params["dimension_numbers"] = dimension_numbers
    groups = {"feature_group_count": feature_group_count, "batch_group_count": batch_group_count}
    if axis.size == 0:  # no dimension may be cut into no groups
        return _empty(args, axes, {**params, **groups, "out_sharding": None}), 0

    in_groups = lambda x, w: _in_groups(axis, (x, w), axes, out_sharding, groups, params)
    lanes_are_sharded = axis.mesh_axis is not None or axis.spmd_name is not None
    if lhs_axis is None or rhs_axis is None or lanes_are_sharded:
        return in_groups(lhs, rhs)
    lane = [example_aval(axis, jax.typeof(x), a) for x, a in zip(args, axes, strict=True)]
    others = {"default": lambda x, w: move_axis(*in_groups(x, w), 0)}
    if out_sharding is None and pays(lane, groups, params):

        def of_platform(lhs: Value, rhs: Value) -> Any:
            slices = lambda x, w: by_slices(
                move_axis(x, lhs_axis, 0), move_axis(w, rhs_axis, 0), lane, params
            )
            return lax.platform_dependent(lhs, rhs, cpu=slices, **others)

        types = list(map(jax.typeof, args))
        stage = lambda: _compat.stage(lambda *xs: [differentiable(of_platform)(*xs)], types)
        if recording.is_on():  # what it is made of is listed where it is
            program = stage()
        else:
            key = axis.size, tuple(axes), tuple(types), *map(_hashable, (groups, params))
            program = _by_platform.get((key, _compat.trace_context()), stage)
        run = functools.partial(eval_jaxpr, propagate_source_info=False)
        return run(program.jaxpr, program.consts, lhs, rhs)[0], 0
    if _is_wide(lhs):
        one = functools.partial(
            lax.conv_general_dilated_p.bind, out_sharding=out_sharding, **groups, **params
        )
        in_turn = lambda *xs: one_after_another(axis, lambda *x: [one(*x)], xs, axes)[0]
        return lax.platform_dependent(lhs, rhs, cpu=in_turn, **others), 0
    return in_groups(lhs, rhs)


# Networks have the same convolution many times over.
_by_platform = Memo("convolutions of lanes that share nothing", most=256)


def _hashable(params: dict[str, Any]) -> Any:
    return tuple(sorted(params.items()))


def _is_wide(x: Value) -> bool:
    """Whether XLA has no kernel for groups of such numbers on a CPU."""
    return jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).bits == 64


def _in_groups(
    axis: Axis, args: Any, axes: Any, out_sharding: Any, groups: dict[str, int], params: Any
) -> tuple[Any, int]:
    """The convolutions of all lanes as one, of images, of channels, or in groups."""
    (lhs, rhs), (lhs_axis, rhs_axis) = args, axes
    groups, batch_group_count = dict(groups), groups["batch_group_count"]
    images, channels = params["dimension_numbers"].lhs_spec[:2]
    out_channels = params["dimension_numbers"].rhs_spec[0]
    result_images, result_channels = params["dimension_numbers"].out_spec[:2]
    # The lanes go outside the dimension they join, unless they follow it already.
    lhs_dim, result_dim, outside = images, result_channels, True
    if lhs_axis is not None and rhs_axis is not None:
        by_channels = batch_group_count == 1
        groups["feature_group_count" if by_channels else "batch_group_count"] *= axis.size
        lhs_dim = channels if by_channels else images
    elif lhs_axis is not None:
        outside = batch_group_count == 1 and lhs_axis != images + 1
        result_dim = result_images
    else:
        outside = max(groups.values()) == 1 and rhs_axis != out_channels + 1
    if lhs_axis is not None:
        lhs = _merge(lhs, lhs_axis, lhs_dim, outside)
    if rhs_axis is not None:
        rhs = _merge(rhs, rhs_axis, out_channels, outside)
    position = result_dim + (not outside)
    sharding = sharding_with_axis(out_sharding, position, args, axes)
    merged_sharding = _merged_sharding(out_sharding, sharding, result_dim, position)
    if axis.in_loop and merged_sharding is None and _needs_channels_last(lhs, rhs, groups, params):
        out = _channels_last(lhs, rhs, groups, params)
    else:
        out = lax.conv_general_dilated_p.bind(
            lhs, rhs, out_sharding=merged_sharding, **groups, **params
        )
    lanes_and_rest = (axis.size, out.shape[result_dim] // axis.size)
    shape = list(out.shape)
    shape[result_dim : result_dim + 1] = lanes_and_rest if outside else lanes_and_rest[::-1]
    return lax.reshape(out, shape, out_sharding=sharding), position


def _needs_channels_last(lhs: Value, rhs: Value, groups: dict[str, int], params: Any) -> bool:
    """Whether it takes less time, in a loop on a CPU, for channels to be moved.

    By measurements, of images of 7 to 28 pixels a side (500 in one dimension), of 1 to 32 channels
    and kernels of 1 to 5. Where few numbers are multiplied the library takes longer, as it does
    with groups and three spatial dimensions.
    """
    features = rhs.shape[params["dimension_numbers"].rhs_spec[0]]
    return (
        jax.default_backend() == "cpu"
        and jnp.issubdtype(lhs.dtype, jnp.floating)
        and not _is_wide(lhs)
        and max(groups.values()) == 1
        and lhs.ndim <= 4
        and features >= _LEAST_FEATURES
        and math.prod(rhs.shape) >= _LEAST_PRODUCTS
    )


_LEAST_FEATURES = 8
_LEAST_PRODUCTS = 288  # to a place of the result


def _channels_last(lhs: Value, rhs: Value, groups: dict[str, int], params: Any) -> Any:
    """The convolution of operands whose channels, and those of kernels, have been moved."""
    images, kernel, result = params["dimension_numbers"]
    first, *spatial, last = range(lhs.ndim)
    numbers = lax.ConvDimensionNumbers(
        (first, last, *spatial), (last, last - 1, *range(last - 1)), (first, last, *spatial)
    )
    out = lax.conv_general_dilated_p.bind(
        lax.transpose(lhs, (images[0], *images[2:], images[1])),
        lax.transpose(rhs, (*kernel[2:], kernel[1], kernel[0])),
        out_sharding=None,
        **groups,
        **params | {"dimension_numbers": numbers},
    )
    source = (first, last, *spatial)  # of images, features and spatial dimensions
    return lax.transpose(out, [source[result.index(d)] for d in range(lhs.ndim)])


def _merge(x: Value, position: int, dim: int, outside: bool) -> Any:
    """`x` with its batch axis made part of per-example dimension `dim`.

    `outside`: whether the lanes are the slow part of the dimension or the fast.
    """
    order = [d for d in range(x.ndim) if d != position]
    order.insert(dim if outside else dim + 1, position)
    shape = [x.shape[d] for d in order]
    shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    # One equation moves and merges.
    return lax.reshape(x, shape, dimensions=None if order == sorted(order) else order)


def _merged_sharding(example: Value, batched: Any, dim: int, position: int) -> Any:
    """The sharding of a result whose dimension `dim` holds the lanes as well."""
    if example is None or batched.spec[position] is None:
        return example
    spec = [*example.spec, *[None] * (dim + 1 - len(example.spec))]
    spec[dim] = batched.spec[position]
    return example.update(spec=example.spec.update(partitions=tuple(spec)))


def _empty(args: Any, axes: Any, params: dict[str, Any]) -> Any:
    """The result for a batch of no lanes."""
    avals = [example_aval(Axis(0), jax.typeof(x), a) for x, a in zip(args, axes, strict=True)]
    one = jax.eval_shape(lambda *xs: lax.conv_general_dilated_p.bind(*xs, **params), *avals)
    return lax.full((0, *one.shape), 0, one.dtype)
