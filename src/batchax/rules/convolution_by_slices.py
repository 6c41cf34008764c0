"""Convolutions of lanes that share neither images nor kernels, as products of slices: for CPUs.

In groups, one for each lane, XLA has a slow convolution. It is also a sum over the places of the
kernel, of a slice of the images times what the kernel has there; or for each place of the result,
a slice of the images contracted with the kernel. There are few of the first where kernels are
small, and of the second in the gradient of a small kernel, where the cotangent is the kernel.
Slices are one product each, or side by side one product together ("im2col": Chellapilla et al.
2006), of a block of lanes at a time, as all slices of all lanes may take much memory.

What pays is told by measurements, of images of 7 to 56 pixels a side (1,000 in one dimension), of
1 to 128 channels, kernels of 1 to 7, and 8 to 64 lanes: slices of float32 take 0.1 to 0.65 of the
time of groups. Together they take 0.2 to 0.7 of a product for each where channels are few, and
more where channels are many.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Value
from batchax.programs.one_function import from_zero

_MOST_SLICES = 49  # they are written out in the program
_MANY_CHANNELS = 32  # from here on a product for each place of a kernel is large enough
_FEW_CHANNELS = 8  # of 64 bits, one image at a time takes less time from here on
_BLOCK = 2**23  # bytes of slices of the lanes that are computed at a time


class _Places(NamedTuple):
    """The sizes of the spatial dimensions: of the images with their padding, and of the others."""

    kernel: tuple[int, ...]
    result: tuple[int, ...]

    @property
    def adds(self) -> bool:
        """Whether it is a sum over the places of the kernel."""
        return math.prod(self.kernel) <= math.prod(self.result)


def pays(lane: Sequence[Any], groups: dict[str, int], params: Any) -> bool:
    """Whether slices take less time than groups on a CPU, by the types of one lane's operands."""
    lhs, rhs = lane
    dtype = lhs.dtype
    exact = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
    same = params["preferred_element_type"] in (None, dtype)
    if max(groups.values()) > 1 or not (exact and same) or 0 in (*lhs.shape, *rhs.shape):
        return False
    places = _places(lane, params)
    kernel, result = map(math.prod, places)
    if not places.adds:
        return 0 < result <= _MOST_SLICES
    wide = jnp.finfo(dtype).bits > 32
    few = not wide or _channels(lhs, params) <= _FEW_CHANNELS
    return kernel == 1 or (kernel <= _MOST_SLICES and few)


def _channels(lhs: Any, params: Any) -> int:
    return lhs.shape[params["dimension_numbers"].lhs_spec[1]]


def _places(lane: Sequence[Any], params: Any) -> _Places:
    """Of one lane's operands."""
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
        padded = low + (n - 1) * apart + 1 + high
        result.append(max(0, (padded - (k - 1) * step - 1) // stride + 1))
    return _Places(kernel, tuple(result))


def by_slices(lhs: Value, rhs: Value, lane: Sequence[Any], params: Any) -> Any:
    """The convolutions of all lanes, which come first in both operands and in the result.

    Args:
      lhs: the images of all lanes.
      rhs: their kernels.
      lane: the types of the operands of one lane.
      params: those of `conv_general_dilated`, but for the numbers of groups.
    """
    places = _places(lane, params)
    kernel = math.prod(places.kernel)
    many = _channels(lane[0], params)
    if places.adds and (many == 1 or many >= _MANY_CHANNELS or kernel == 1):
        return _one_by_one(lhs, rhs, places, params)
    wide = lane[0].size * lhs.dtype.itemsize * math.prod(min(places, key=math.prod))
    # The largest number of lanes that divides them, so that no lane is left over.
    lanes = lhs.shape[0]
    at_once = max(
        n for n in range(1, lanes + 1) if lanes % n == 0 and (n == 1 or n * wide <= _BLOCK)
    )
    together = lambda xs: _together(xs[0], xs[1], places, params)
    if at_once == lanes:
        return together((lhs, rhs))
    blocks = [x.reshape(lanes // at_once, at_once, *x.shape[1:]) for x in (lhs, rhs)]
    out = lax.map(together, tuple(blocks))
    return out.reshape(lanes, *out.shape[2:])


def _one_by_one(lhs: Value, rhs: Value, places: _Places, params: Any) -> Any:
    """The sum, over the places of the kernel, of products."""
    images, channels, *spatial = (d + 1 for d in params["dimension_numbers"].lhs_spec)
    _, inputs, *window = (d + 1 for d in params["dimension_numbers"].rhs_spec)
    lhs = _padded(lhs, spatial, params)
    ones = (1,) * len(window)
    contracted = inputs - sum(d < inputs for d in window)
    terms = []
    for place in itertools.product(*map(range, places.kernel)):
        there = _of_kernel(lhs, spatial, place, places, params)
        weights = lax.squeeze(_sliced(rhs, window, place, ones, ones), window)
        terms.append(_product(there, weights, ([channels], [contracted]), params))
    total = functools.reduce(jnp.add, terms)
    total = total if len(terms) == 1 else from_zero(total)
    return _of_sum(total, images, channels, spatial, params)


def _together(lhs: Value, rhs: Value, places: _Places, params: Any) -> Any:
    """One product of all slices, side by side."""
    images, channels, *spatial = (d + 1 for d in params["dimension_numbers"].lhs_spec)
    _, inputs, *window = (d + 1 for d in params["dimension_numbers"].rhs_spec)
    lhs = _padded(lhs, spatial, params)
    number = len(spatial)
    if places.adds:
        at, counts, cut = channels, places.kernel, _of_kernel  # with channels the fastest
    else:
        at, counts, cut = 1, places.result, _of_result
    slices = [
        cut(lhs, spatial, place, places, params) for place in itertools.product(*map(range, counts))
    ]
    side_by_side = jnp.stack(slices, at)
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


def _padded(lhs: Value, spatial: Sequence[int], params: Any) -> Any:
    padding = [(0, 0, 0)] * len(lhs.shape)
    around = zip(spatial, params["padding"], params["lhs_dilation"], strict=True)
    for d, (low, high), apart in around:
        padding[d] = (low, high, apart - 1)
    return lax.pad(lhs, jnp.zeros((), lhs.dtype), padding)


def _product(x: Value, y: Value, contract: Any, params: Any) -> Any:
    return lax.dot_general(x, y, (contract, ([0], [0])), precision=params["precision"])


def _of_sum(out: Value, images: int, channels: int, spatial: Sequence[int], params: Any) -> Any:
    """The result whose dimensions are those of the images, without channels, and features."""
    order = [d for d in range(1, out.ndim) if d != channels]
    dims = [order.index(d) + 1 for d in (images, *spatial)]
    return _in_order(out, [dims[0], out.ndim - 1, *dims[1:]], params)


def _in_order(out: Value, dims: Sequence[int], params: Any) -> Any:
    """`out`, of which `dims` are images, features, and spatial, as the convolution has them."""
    placed = [0] * out.ndim
    for d, source in zip(params["dimension_numbers"].out_spec, dims, strict=True):
        placed[d + 1] = source
    return lax.transpose(out, placed)


# As residuals the slices would take the memory of all of them at once.
differentiable = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
"""What computes slices again where it is differentiated."""


def _of_kernel(lhs: Value, spatial: Sequence[int], place: Any, places: _Places, params: Any) -> Any:
    """What the kernel has at `place` meets."""
    by, strides = params["rhs_dilation"], params["window_strides"]
    return _sliced(lhs, spatial, place, by, places.result, strides)


def _of_result(lhs: Value, spatial: Sequence[int], place: Any, places: _Places, params: Any) -> Any:
    """What `place` of the result is made of."""
    by, strides = params["window_strides"], params["rhs_dilation"]
    return _sliced(lhs, spatial, place, by, places.kernel, strides)


def _sliced(
    x: Value,
    dims: Sequence[int],
    place: Sequence[int],
    by: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int] | None = None,
) -> Any:
    """The elements of `x` at `place` times `by`, as many as `sizes`, along `dims`."""
    strides = (1,) * len(sizes) if strides is None else strides
    start, limit, stride = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    for d, p, apart, n, s in zip(dims, place, by, sizes, strides, strict=True):
        start[d] = p * apart
        limit[d], stride[d] = start[d] + (n - 1) * s + 1, s
    return lax.slice(x, start, limit, stride)
