"""Complex numbers as two arrays: apart, their parts are vectorised."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Value


def parts(x: Value) -> list[Any]:
    """The real part and, of complex numbers, the imaginary one."""
    return [jnp.real(x), jnp.imag(x)] if jnp.iscomplexobj(x) else [x]


def whole(planes: Sequence[Value]) -> Any:
    """The opposite of `parts`."""
    return planes[0] if len(planes) == 1 else lax.complex(planes[0], planes[1])


def conjugate(planes: Sequence[Value]) -> list[Any]:
    """The conjugates."""
    return [planes[0], *(-x for x in planes[1:])]


def squares(planes: Sequence[Value]) -> Any:
    """The squares of the sizes."""
    return functools.reduce(jnp.add, [x * x for x in planes])


def times(x: Sequence[Value], y: Sequence[Value]) -> list[Any]:
    """The products."""
    if len(x) == 1:
        return [x[0] * y[0]]
    return [x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]]
