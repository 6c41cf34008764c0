"""Convolutions, primitives that slide a window over their operands, and Fourier transforms."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.sharding import NamedSharding

from batchax import _compat
from batchax.analysis.one_function import from_zero
from batchax.cache import Cache
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.evaluate import Inside, Rewriter, rewritten
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Params, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import (
    Axis,
    Positions,
    RuleOutputs,
    move_axis,
    sharding_with_axis,
)
from batchax.kernel.inner import example_aval
from batchax.kernel.interpreter import lane_after_lane
from batchax.kernel.registry import register_rule
from batchax.linalg.pays import pays_back

_MOST_SLICES = 49  # they are written out in the program
# Up to so many take no longer to compile than a loop. Programs: gradient over 32 images.
_FEW_SLICES = 2
_MANY_CHANNELS = 32  # from here on a product for each place of a kernel is large enough
# Up to so many channels: microseconds that a lane gains for each product, and seconds that it takes
# longer to compile, by measurements of images of 8 to 28 pixels a side and kernels of 3.
_GAINS = (1, (0.0005, 0.03)), (4, (0.001, 0.2)), (math.inf, (0.0001, 0.25))
_FEW_CHANNELS = 8  # of 64 bits, one image at a time takes less time from here on
_BLOCK = 2**23  # bytes of slices of the lanes that are computed at a time


class _Places(NamedTuple):
    """Holds the sizes of the kernel and of the result in spatial dimensions."""

    kernel: tuple[int, ...]
    result: tuple[int, ...]

    @property
    def adds(self) -> bool:
        """Returns whether to sum over positions of the kernel, not of the result."""
        return math.prod(self.kernel) <= math.prod(self.result)


def pays(axis: Axis, lane: Sequence[Any], groups: dict[str, int], params: dict[str, Any]) -> bool:
    """Returns whether slices beat groups on a CPU, by the types of one lane's operands."""
    lhs, rhs = lane
    dtype = lhs.dtype
    exact = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
    same = params["preferred_element_type"] in (None, dtype)
    if max(groups.values()) > 1 or not (exact and same) or 0 in (*lhs.shape, *rhs.shape):
        return False
    places = _places(lane, params)
    kernel, result = map(math.prod, places)
    channels, images = _channels(lhs, params), lhs.shape[params["dimension_numbers"].lhs_spec[0]]
    # In the gradient of a kernel channels take the place of images.
    gain, seconds = next(pair for most, pair in _GAINS if max(channels, images) <= most)
    # Slices take longer to compile, so there must be enough lanes to gain that back in some calls.
    products = result * rhs.size * images
    wide = jnp.finfo(dtype).bits > 32
    if not (wide or pays_back(gain * products, seconds, axis.size, axis.in_loop)):
        return False
    if not places.adds:
        return 0 < result <= _MOST_SLICES
    few = not wide or channels <= _FEW_CHANNELS
    return kernel == 1 or (kernel <= _MOST_SLICES and few)


def _channels(lhs: jax.ShapeDtypeStruct, params: dict[str, Any]) -> int:
    return lhs.shape[params["dimension_numbers"].lhs_spec[1]]


def _places(lane: Sequence[Any], params: dict[str, Any]) -> _Places:
    lhs, rhs = lane
    numbers = params["dimension_numbers"]
    kernel = tuple(rhs.shape[d] for d in numbers.rhs_spec[2:])
    sizes = (lhs.shape[d] for d in numbers.lhs_spec[2:])
    result = []
    for n, k, (low, high), apart, step, stride in zip(
        sizes,
        kernel,
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        params["window_strides"],
        strict=True,
    ):
        # Sizes include dilation of the image and of the kernel.
        padded = low + (n - 1) * apart + 1 + high
        result.append(max(0, (padded - (k - 1) * step - 1) // stride + 1))
    return _Places(kernel, tuple(result))


def by_slices(lhs: Value, rhs: Value, lane: Sequence[Any], params: dict[str, Any]) -> jax.Array:
    """Convolves all lanes, which come first in operands and result, by slices.

    `lane` holds the operand types of one lane; `params` exclude the group counts.
    """
    places = _places(lane, params)
    kernel = math.prod(places.kernel)
    many = _channels(lane[0], params)
    # With large products, one for each position of the kernel; otherwise one for all slices.
    if places.adds and (many == 1 or many >= _MANY_CHANNELS or kernel == 1):
        return _one_by_one(lhs, rhs, places, params)
    wide = lane[0].size * lhs.dtype.itemsize * math.prod(min(places, key=math.prod))
    # The largest number of lanes within the limit that divides them evenly.
    lanes = lhs.shape[0]
    at_once = max(
        n for n in range(1, lanes + 1) if lanes % n == 0 and (n == 1 or n * wide <= _BLOCK)
    )
    if at_once == lanes:
        return _together(lhs, rhs, places, params)

    def block(xs: Values) -> jax.Array:
        images, kernels = (
            x.reshape(at_once, *whole.shape[1:]) for x, whole in zip(xs, (lhs, rhs), strict=True)
        )
        return _together(images, kernels, places, params)

    # Without dimensions of size 1, whose place XLA chooses, and copies the operands for the loop.
    wider = ([n for n in x.shape[1:] if n > 1] for x in (lhs, rhs))
    blocks = [
        x.reshape(lanes // at_once, at_once, *own) for x, own in zip((lhs, rhs), wider, strict=True)
    ]
    out = lax.map(block, tuple(blocks))
    return out.reshape(lanes, *out.shape[2:])


def _one_by_one(lhs: Value, rhs: Value, places: _Places, params: Params) -> jax.Array:
    """Sums products over the positions of the kernel."""
    images, channels, *spatial = (d + 1 for d in params["dimension_numbers"].lhs_spec)
    _, inputs, *window = (d + 1 for d in params["dimension_numbers"].rhs_spec)
    lhs = _padded(lhs, spatial, params)
    ones = (1,) * len(window)
    by, strides = params["rhs_dilation"], params["window_strides"]
    # The dimension of input channels, after the window dimensions are removed.
    contracted = inputs - sum(d < inputs for d in window)
    terms = []
    for place in itertools.product(*map(range, places.kernel)):
        there = _sliced(lhs, spatial, place, by, places.result, strides)
        weights = lax.squeeze(_sliced(rhs, window, place, ones, ones), window)
        terms.append(_product(there, weights, ([channels], [contracted]), params))
    total = functools.reduce(jnp.add, terms)
    total = total if len(terms) == 1 else from_zero(total)
    return _of_sum(total, images, channels, spatial, params)


def _together(lhs: Value, rhs: Value, places: _Places, params: dict[str, Any]) -> jax.Array:
    """Computes a single product of all slices, stacked."""
    images, channels, *spatial = (d + 1 for d in params["dimension_numbers"].lhs_spec)
    _, inputs, *window = (d + 1 for d in params["dimension_numbers"].rhs_spec)
    lhs = _padded(lhs, spatial, params)
    number = len(spatial)
    # A slice has what meets an element of the kernel, or what makes up an element of the result.
    at, counts, sizes = 1, places.result, places.kernel
    by, strides = params["window_strides"], params["rhs_dilation"]
    if places.adds:
        at = channels  # with channels the fastest
        counts, sizes, by, strides = sizes, counts, strides, by
    side_by_side = _side_by_side(lhs, spatial, counts, by, sizes, strides, at)
    shape = side_by_side.shape
    side_by_side = side_by_side.reshape(*shape[:at], *counts, *shape[at + 1 :])
    if places.adds:
        contract = ([*range(at, at + number), at + number], [*window, inputs])
        out = _product(side_by_side, rhs, contract, params)
        return _of_sum(out, images, channels, spatial, params)
    contract = ([channels + number, *(d + number for d in spatial)], [inputs, *window])
    out = _product(side_by_side, rhs, contract, params)
    # The lanes, the places, images and features.
    return _in_order(out, [number + 1, number + 2, *range(1, number + 1)], params)


def _side_by_side(
    x: Value,
    dims: Sequence[int],
    counts: Sequence[int],
    by: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    at: int,
) -> jax.Array:
    """Stacks the slices of `x` that start at each of `counts` places, along axis `at`."""
    places = list(itertools.product(*map(range, counts)))
    if len(places) <= _FEW_SLICES or max(strides) > 1 or at > 1:
        return jnp.stack([_sliced(x, dims, place, by, sizes, strides) for place in places], at)
    # XLA makes a function for each slice that is written out, and one for a loop over them. The
    # loop has slices in front: to move them behind other dimensions takes longer.
    shape = list(x.shape)
    for d, n in zip(dims, sizes, strict=True):
        shape[d] = n
    starts = np.zeros((len(places), x.ndim), np.int32)
    starts[:, list(dims)] = np.array(places) * np.array(by)
    slices = lax.map(lambda start: lax.dynamic_slice(x, list(start), shape), starts)
    return jnp.moveaxis(slices, 0, at)


def _padded(lhs: Value, spatial: Sequence[int], params: dict[str, Any]) -> jax.Array:
    padding = [(0, 0, 0)] * len(lhs.shape)
    around = zip(spatial, params["padding"], params["lhs_dilation"], strict=True)
    for d, (low, high), apart in around:
        padding[d] = (low, high, apart - 1)
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), padding)


def _product(
    x: Value, y: Value, contract: tuple[Sequence[int], Sequence[int]], params: dict[str, Any]
) -> jax.Array:
    return lax.dot_general(x, y, (contract, ([0], [0])), precision=params["precision"])


def _of_sum(
    out: Value, images: int, channels: int, spatial: Sequence[int], params: dict[str, Any]
) -> jax.Array:
    """Moves the dimensions of a sum to those of the result."""
    order = [d for d in range(1, out.ndim) if d != channels]
    dims = [order.index(d) + 1 for d in (images, *spatial)]
    return _in_order(out, [dims[0], out.ndim - 1, *dims[1:]], params)


def _in_order(out: Value, dims: Sequence[int], params: dict[str, Any]) -> jax.Array:
    """Orders the dimensions `dims` (images, features, spatial) as the convolution has them."""
    placed = [0] * out.ndim
    for d, source in zip(params["dimension_numbers"].out_spec, dims, strict=True):
        placed[d + 1] = source
    return lax.transpose(out, placed)


# As residuals the slices would take the memory of all of them at once.
differentiable = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
"""What computes slices again where it is differentiated."""


def _sliced(
    x: Value,
    dims: Sequence[int],
    place: Sequence[int],
    by: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int] | None = None,
) -> jax.Array:
    """Slices `sizes` elements of `x`, starting at `place` times `by`, along `dims`."""
    strides = (1,) * len(sizes) if strides is None else strides
    start, limit, stride = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    for d, p, apart, n, s in zip(dims, place, by, sizes, strides, strict=True):
        start[d] = p * apart
        limit[d], stride[d] = start[d] + (n - 1) * s + 1, s
    return lax.slice(x, start, limit, stride)


enter(": conv_general_dilated")


@register_rule(lax.conv_general_dilated_p)
def _conv_general_dilated(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    out_sharding: NamedSharding | None,
    **params: Any,
) -> RuleOutputs:
    (lhs, rhs), (lhs_axis, rhs_axis) = args, axes
    params["dimension_numbers"] = dimension_numbers
    groups = {"feature_group_count": feature_group_count, "batch_group_count": batch_group_count}
    if axis.size == 0:  # no dimension may be cut into no groups
        return _empty(args, axes, {**params, **groups, "out_sharding": None}), 0

    in_groups = lambda x, w: _in_groups(axis, (x, w), axes, out_sharding, groups, params)
    lanes_are_sharded = axis.mesh_axis is not None or axis.spmd_name is not None
    # With one unbatched operand, lanes join its images or channels, without groups.
    if lhs_axis is None or rhs_axis is None or lanes_are_sharded:
        return in_groups(lhs, rhs)
    lane = [example_aval(axis, jax.typeof(x), a) for x, a in zip(args, axes, strict=True)]
    # The choice of slices is for CPUs. Other platforms have kernels for groups.
    others = {"default": lambda x, w: move_axis(*in_groups(x, w), 0)}
    if out_sharding is None and pays(axis, lane, groups, params):

        def of_platform(lhs: Value, rhs: Value) -> jax.Array:
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
        whole = {"out_sharding": out_sharding, **groups, **params}
        in_turn = lambda *xs: lane_after_lane(axis, lax.conv_general_dilated_p, xs, axes, whole)[0]
        return lax.platform_dependent(lhs, rhs, cpu=in_turn, **others), 0
    return in_groups(lhs, rhs)


# Networks have the same convolution many times over.
_by_platform = Cache("convolutions of lanes that share nothing", most=256)


def _hashable(params: dict[str, Any]) -> tuple[Hashable, ...]:
    return tuple(sorted(params.items()))


def _is_wide(x: Value) -> bool:
    """Returns whether XLA on CPUs has no kernel for groups of this dtype."""
    return jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).bits == 64


def _in_groups(
    axis: Axis,
    args: Values,
    axes: Positions,
    out_sharding: NamedSharding | None,
    groups: dict[str, int],
    params: dict[str, Any],
) -> tuple[Any, int]:
    """Convolves all lanes at once, with lanes as images, as channels, or as groups."""
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
    # In a loop, the layout of the operands is not chosen again by XLA for each step.
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


def _needs_channels_last(
    lhs: Value, rhs: Value, groups: dict[str, int], params: dict[str, Any]
) -> bool:
    """Returns whether moving channels last is faster, in a loop on a CPU."""
    # Measured for images of 7 to 28 pixels a side (500 in 1D), 1 to 32 channels, and kernels of 1
    # to 5. With few products, groups, or three spatial dimensions, the library takes longer.
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


def _channels_last(
    lhs: Value, rhs: Value, groups: dict[str, int], params: dict[str, Any]
) -> jax.Array:
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


def with_channels_last(program: ClosedJaxpr) -> ClosedJaxpr:
    """Moves channels last in the convolutions of a loop's step, which derivatives have elsewhere.

    XLA for CPUs does so outside of loops and branches alone. In these it has a loop over numbers
    for other orders. Benchmark: rows, images, two convolutions, 32 channels, gradient.
    """
    if jax.default_backend() != "cpu" or not _moves_channels.in_program(program):
        return program
    change = lambda: rewritten(program, _with_channels_last)
    return _channels_moved.get("channels last", change, owner=program.jaxpr)


_channels_moved = Cache("programs with channels last", most=256)


def _is_moved(eqn: Eqn) -> bool:
    if eqn.primitive is not lax.conv_general_dilated_p or eqn.params["out_sharding"] is not None:
        return False
    groups = {name: eqn.params[name] for name in _GROUPS}
    lhs, rhs = (v.aval for v in eqn.invars)
    first, *spatial, last = range(lhs.ndim)
    moved = eqn.params["dimension_numbers"] != lax.ConvDimensionNumbers(
        (first, last, *spatial), (last, last - 1, *range(last - 1)), (first, last, *spatial)
    )
    return moved and _needs_channels_last(lhs, rhs, groups, eqn.params)


_GROUPS = "feature_group_count", "batch_group_count"
_moves_channels = Anywhere(_is_moved)


def _with_channels_last(eqn: Eqn, inside: Inside) -> Eqn | list[Eqn]:
    if not _is_moved(eqn):
        return eqn.replace(params=inside()) if _moves_channels.in_equation(eqn) else eqn
    params = {k: v for k, v in eqn.params.items() if k not in (*_GROUPS, "out_sharding")}
    groups = {name: eqn.params[name] for name in _GROUPS}
    run = lambda lhs, rhs: [_channels_last(lhs, rhs, groups, params)]
    with eqn.ctx.manager, _compat.in_source(eqn.source_info.traceback):
        program = _compat.stage(run, [v.aval for v in eqn.invars])
    writer = Rewriter(program)
    writer.inline(program, eqn.invars, eqn.outvars)
    return writer.eqns


def _merge(x: Value, position: int, dim: int, outside: bool) -> jax.Array:
    """Merges the batch axis into per-example dimension `dim`.

    `outside`: lanes are its slow part.
    """
    order = [d for d in range(x.ndim) if d != position]
    order.insert(dim if outside else dim + 1, position)
    shape = [x.shape[d] for d in order]
    shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
    # One equation moves and merges.
    return lax.reshape(x, shape, dimensions=None if order == sorted(order) else order)


def _merged_sharding(example: Value, batched: Any, dim: int, position: int) -> NamedSharding | None:
    """Returns the sharding of a result whose dimension `dim` also holds the lanes."""
    if example is None or batched.spec[position] is None:
        return example
    spec = [*example.spec, *[None] * (dim + 1 - len(example.spec))]
    spec[dim] = batched.spec[position]
    return example.update(spec=example.spec.update(partitions=tuple(spec)))


def _empty(args: Values, axes: Positions, params: dict[str, Any]) -> jax.Array:
    avals = [example_aval(Axis(0), jax.typeof(x), a) for x, a in zip(args, axes, strict=True)]
    one = jax.eval_shape(lambda *xs: lax.conv_general_dilated_p.bind(*xs, **params), *avals)
    return lax.full((0, *one.shape), 0, one.dtype)


enter(
    """
    linear: reduce_window_sum
    : reduce_window_max reduce_window_min
    combines: reduce_window select_and_gather_add select_and_scatter select_and_scatter_add
    """
)

enter("library: fft")


@register_rule(lax.fft_p)
def _fft(
    axis: Axis, args: Values, axes: Sequence[int], /, *, fft_lengths: Sequence[int], **params: Any
) -> RuleOutputs:
    (x,), (position,) = args, axes
    # The transform is over the last dimensions, where the batch axis must not be.
    if position >= x.ndim - len(fft_lengths):
        x, position = move_axis(x, position, 0), 0
    return lax.fft_p.bind(x, fft_lengths=fft_lengths, **params), position
