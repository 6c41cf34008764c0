"""Products with real numbers, of complex ones part by part, as LAPACK has them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from batchax.jaxprs.words import Value


def scaled(x: Value, by: Value) -> Any:
    """`x` times real `by`: infinity in one part of a complex number makes no NaN in the other."""
    if not jnp.iscomplexobj(x):
        return x * by
    return lax.complex(jnp.real(x) * by, jnp.imag(x) * by)
