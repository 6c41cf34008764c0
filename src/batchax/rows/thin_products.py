"""Products of long rows with small matrices, as sums of outer products.

XLA calls a library for ``x @ w`` with `x` of shape (n, 3), which on a CPU takes two to five times
as long as adding three products of a column and a row, and stores what surrounds it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.jaxprs.types import Eqn, Value, Values
from batchax.kernel.own_primitive import with_tangent_rule
from batchax.rows.sizes import has_symbols

# Packed, rows of 3 through a (3, 3) matrix take 0.3x the time of the library, and their gradient
# 0.4x; (3, 32) 0.4x, (5, 5) 0.8x. With 6 to 8 terms the gradient of three layers in padded rows
# took 1.1x to 2x the time.
_MOST_TERMS, _MOST_RESULTS = 5, 64
_DTYPES = {np.dtype(np.float32), np.dtype(np.float64)}


def small_operand(eqn: Eqn) -> int | None:
    """Which operand is a small matrix, if the other has elements of a row, and terms are faster."""
    if eqn.primitive is not lax.dot_general_p or eqn.params["out_sharding"] is not None:
        return None
    (contracted, (batch, _)), precision = eqn.params["dimension_numbers"], eqn.params["precision"]
    operands = [v.aval for v in eqn.invars]
    long = [has_symbols(x.shape) for x in operands]
    # An algorithm may ask for less, or more, than the products of this dtype.
    named = precision is not None and not isinstance(precision, (lax.Precision, tuple))
    same = {*(x.dtype for x in operands), eqn.outvars[0].aval.dtype} <= _DTYPES
    if batch or named or not same or sum(long) != 1 or len(contracted[0]) != 1:
        return None
    small = long.index(False)
    shape, (at,) = operands[small].shape, contracted[small]
    return small if _pays(shape[at], math.prod(shape) // max(1, shape[at])) else None


def _pays(terms: int, results: int) -> bool:
    return 2 <= terms <= _MOST_TERMS and results <= _MOST_RESULTS


def thin_product(operands: Sequence[Value], small: int, dimension_numbers: Any) -> jax.Array:
    """What `lax.dot_general` returns, where operand `small` is; see `small_operand`."""
    (contracted, _) = dimension_numbers
    x = jnp.moveaxis(operands[1 - small], contracted[1 - small][0], -1)
    w = jnp.moveaxis(operands[small], contracted[small][0], 0)
    out = _product(x, w.reshape(w.shape[0], -1)).reshape(*x.shape[:-1], *w.shape[1:])
    free = range(x.ndim - 1, out.ndim)
    return out if small else jnp.moveaxis(out, free, range(len(free)))


def _product(x: Value, w: Value) -> jax.Array:
    (out,) = _terms(x, w) if _pays(*w.shape) else [x @ w]
    return out


def _add_terms(x: Value, w: Value) -> list[Any]:
    rows = lax.expand_dims(w, range(1, x.ndim))
    outer = (x[..., i, None] * rows[i] for i in range(w.shape[0]))
    return [functools.reduce(lax.add, outer)]


def _tangents(
    primals: Values, moving: Sequence[int], tangents: Values
) -> tuple[list[Any], list[Any]]:
    (x, w), dots = primals, []
    for i, t in zip(moving, tangents, strict=True):
        if i:  # in reverse it is contracted along the rows
            dots.append(x @ t)
        else:  # The transpose of terms would add arrays that have zeros around a column.
            ahead = lambda ws, xs: [_product(xs[0], ws[0])]
            back = lambda ws, cts: [_product(cts[0], ws[0].T)]
            dots += linear_with_transpose(ahead, back, [w], [t], "thin product")
    return _terms(x, w), [functools.reduce(lax.add, dots)]


_terms = jax.jit(with_tangent_rule(_add_terms, _tangents))
