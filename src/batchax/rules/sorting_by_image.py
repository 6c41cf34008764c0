"""Sorting floats as the integers that order them, on a CPU.

XLA sorts on a CPU by calls of a comparison, which for floats has many instructions: NaN come last,
zeros of either sign are equal. Bits of floats, read as integers, order alike once those of negative
numbers but the sign are inverted, and for integers alone XLA calls a library. Rows of 8 to 1,024
floats sort 3x to 5x faster, and compile 0.25 s longer. What a CPU takes to be equal to
zero, a negative zero and numbers that are too small to be normal, stays among zeros as it is: where
there are such, floats are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.types import Value, Values
from batchax.kernel.axis import Axis, RuleOutputs, shift_dims
from batchax.kernel.own_primitive import NoDerivative, own_primitive
from batchax.linalg.pays import pays_back


def pays(x: Value, in_loop: int) -> bool:
    """Returns whether faster calls pay back the longer compilation."""
    if not all(isinstance(n, int) for n in x.shape):  # a symbol: the size is unknown
        return True
    return pays_back(_GAIN, _COMPILING, math.prod(x.shape), in_loop)


_GAIN = 0.06  # microseconds for each element
_COMPILING = 0.25  # seconds


def _operations(x: Value, *, dimension: int) -> jax.Array:
    return lax.sort(x, dimension=dimension)


def _on_cpu(x: Value, *, dimension: int) -> jax.Array:
    size, normal = magnitude(x)
    dtype = np.dtype(size.dtype)
    bits = lax.bitcast_convert_type(x, dtype)
    # Zeros of both signs compare equal, and subnormal numbers may, as XLA compiles comparisons.
    other_zeros = jnp.any((size < normal) & (bits != np.array(0, dtype)))
    compared = lambda x: lax.sort(x, dimension=dimension)
    return lax.cond(other_zeros, compared, lambda x: _by_image(x, dtype, dimension), x)


def magnitude(x: Value) -> tuple[Any, Any]:
    """Returns the bits of floats without the sign, as integers, and of the least normal number."""
    dtype = np.dtype(f"int{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, dtype)
    normal = np.asarray(jnp.finfo(x.dtype).tiny, x.dtype).view(dtype)
    return bits & np.array(np.iinfo(dtype).max, dtype), normal


def _by_image(x: Value, dtype: np.dtype[Any], dimension: int) -> jax.Array:
    nan = lax.full_like(x, np.nan)  # the last one: another may be negative
    bits = lax.bitcast_convert_type(lax.select(lax.ne(x, x), nan, x), dtype)
    order = lax.sort(image(bits, dtype), dimension=dimension)
    return lax.bitcast_convert_type(image(order, dtype), x.dtype)


def image(bits: Value, dtype: np.dtype[Any]) -> jax.Array:
    """Maps bits of floats to integers of the same order, and back."""
    # For negative floats all other bits are flipped: larger magnitudes come first.
    sign = lax.shift_right_arithmetic(bits, lax.full_like(bits, 8 * dtype.itemsize - 1))
    return bits ^ (sign & np.array(np.iinfo(dtype).max, dtype))


def _batched(axis: Axis, args: Values, axes: Sequence[int], /, *, dimension: int) -> RuleOutputs:
    (x,), (position,) = args, axes
    (dim,) = shift_dims((dimension,), position)
    return sorted_floats_p.bind(x, dimension=dim), position


sorted_floats_p = own_primitive(
    "sorted_floats",
    called="sort",
    operations=_operations,
    types=lambda x, *, dimension: x,
    rule=_batched,
    transpose=NoDerivative("a sort is transposed, which is not linear. Differentiate it instead."),
    on_cpu=_on_cpu,
    several=False,
)
