"""Matrices brought to a size at which squares of their elements neither overflow nor vanish."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Value
from batchax.small.loops import fold


def largest(planes: Sequence[Value]) -> Any:
    """The largest of the sizes of all parts, for each lane, NaN where there is one."""
    sizes = functools.reduce(jnp.maximum, map(jnp.abs, planes))
    return fold(jnp.maximum, sizes.reshape(-1, sizes.shape[-1]))


def power_of_two(size: Value) -> Any:
    """The largest power of two that is no larger, 0 for numbers that are not normal."""
    exponent = np.asarray(np.inf, size.dtype).view(f"i{size.dtype.itemsize}")
    bits = lax.bitcast_convert_type(size, exponent.dtype) & exponent
    return lax.bitcast_convert_type(bits, size.dtype)


def scale(size: Value, below: int = 4) -> Any:
    """Powers of two that bring numbers of this size to where squares are safe, 1 for 0.

    As far up as that allows, so that the least numbers of a graded matrix stay normal: to `below`
    powers of two below the square root of what is too large.
    """
    info = jnp.finfo(size.dtype)
    power = power_of_two(size)
    top = 2.0 ** (info.maxexp // 2 - below)
    least = top * 2.0 ** (2 - info.maxexp)
    return jnp.where(power == 0, 1, top / jnp.maximum(power, least))
