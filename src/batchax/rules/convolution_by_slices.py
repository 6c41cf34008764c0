"""Convolutions of lanes that share neither images nor kernels, as products of slices: for CPUs.

In groups, one for each lane, XLA has a slow convolution. It is also a sum over the places of the
kernel, of a slice of the images times what the kernel has there; or for each place of the result,
a slice of the images contracted with the kernel. There are few of the first where kernels are
small, and of the second in the gradient of a small kernel, where the cotangent is the kernel. Each
is one product for all lanes, of slices that need no memory of their own for long.

What pays is told by measurements of float32 and float64: images of 8 to 32 pixels a side, of 1 to
128 channels, kernels of 1 to 5, 8 to 256 lanes. A sum over more than a few places, each of many
channels, is added up in memory, and takes up to twice the time of the groups.
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

_MOST_SLICES = 25  # of one image or one channel: they are written out in the program
_MOST_CONTRACTED = 9


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
    images, channels = (lhs.shape[d] for d in params["dimension_numbers"].lhs_spec[:2])
    places = _places(lane, params)
    kernel, result = map(math.prod, places)
    if places.adds:
        return kernel == 1 or (channels == 1 and kernel <= _MOST_SLICES)
    return 0 < result <= (_MOST_SLICES if images == 1 else _MOST_CONTRACTED)


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
    numbers = params["dimension_numbers"]
    images, channels, *spatial = (d + 1 for d in numbers.lhs_spec)
    _, inputs, *window = (d + 1 for d in numbers.rhs_spec)
    places = _places(lane, params)
    strides, steps = params["window_strides"], params["rhs_dilation"]
    padding = [(0, 0, 0)] * len(lhs.shape)
    for d, (low, high), apart in zip(
        spatial, params["padding"], params["lhs_dilation"], strict=True
    ):
        padding[d] = (low, high, apart - 1)
    lhs = lax.pad(lhs, jnp.zeros((), lhs.dtype), padding)
    product = functools.partial(lax.dot_general, precision=params["precision"])

    if places.adds:
        terms = []
        for place in itertools.product(*map(range, places.kernel)):
            there = _sliced(lhs, spatial, place, steps, places.result, strides)
            weights = _sliced(rhs, window, place, (1,) * len(place), (1,) * len(place))
            weights = lax.squeeze(weights, window)
            contracted = inputs - sum(d < inputs for d in window)
            terms.append(product(there, weights, (([channels], [contracted]), ([0], [0]))))
        # Dimensions as those of images, without channels, and features last.
        order = [d for d in range(1, lhs.ndim) if d != channels]
        dims = [order.index(d) + 1 for d in (images, *spatial)]
        dims.insert(1, lhs.ndim - 1)
        out = functools.reduce(jnp.add, terms)
    else:
        contract = ([channels, *spatial], [inputs, *window])
        each = [
            product(
                _sliced(lhs, spatial, place, strides, places.kernel, steps),
                rhs,
                (contract, ([0], [0])),
            )
            for place in itertools.product(*map(range, places.result))
        ]
        out = jnp.stack(each, -1)
        out = lax.reshape(out, (*out.shape[:3], *places.result))
        dims = [*range(1, out.ndim)]
    placed = [0] * out.ndim
    for d, source in zip(numbers.out_spec, dims, strict=True):
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
) -> Any:
    """The elements of `x` at `place` times `by`, as many as `sizes`, along `dims`."""
    strides = (1,) * len(sizes) if strides is None else strides
    start, limit, stride = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    for d, p, apart, n, s in zip(dims, place, by, sizes, strides, strict=True):
        start[d] = p * apart
        limit[d], stride[d] = start[d] + (n - 1) * s + 1, s
    return lax.slice(x, start, limit, stride)
