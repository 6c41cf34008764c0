"""What changes no result of a reduction, and the dtype in which values are added up.

Padding holds what changes no result, and so do lanes that do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np


def lowest(dtype: np.dtype[Any]) -> Any:
    """Returns what no value of `dtype` is less than."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return -_infinity(dtype)
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min


def highest(dtype: np.dtype[Any]) -> Any:
    """Returns what no value of `dtype` is more than."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return _infinity(dtype)
    return True if dtype == jnp.bool_ else jnp.iinfo(dtype).max


def _infinity(dtype: np.dtype[Any]) -> float:
    """Returns infinity; of small floats without one, such as float8_e4m3fn, the largest number."""
    return np.inf if np.isinf(np.asarray(np.inf, dtype)) else float(jnp.finfo(dtype).max)


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which values of `dtype` are added up: float32 for smaller floats."""
    small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(np.float32) if small else dtype


NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "sum": lambda dtype: 0,
    "prod": lambda dtype: 1,
    "max": lowest,
    "min": highest,
    "and": lambda dtype: -1 if jnp.issubdtype(dtype, jnp.signedinteger) else highest(dtype),
    "or": lambda dtype: 0,
    "xor": lambda dtype: 0,
    "logsumexp": lowest,
}
"""For each kind of reduction, by the dtype of its operand, a value that changes no result."""
