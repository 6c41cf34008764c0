"""Stand-ins for functions of JAX on polynomials, whose coefficients are a row.

As those of `stand_ins`: what they do for sizes of rows is what JAX does for numbers.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import max_dim

from batchax import _compat
from batchax.rows.stand_ins import is_row, of_taken, padded_with, takes, with_zeros


@_compat.stands_in_for("polyval")
def _polyval(original: Any, p: Any, x: Any, *, unroll: int = 16) -> Any:
    # Since 0.12 JAX makes a list of coefficients, for which it needs their number.
    if not (np.ndim(p) and _compat.is_row_size(np.shape(p)[0])):
        return original(p, x, unroll=unroll)
    p, x = jnp.asarray(p), jnp.asarray(x)
    dtype = jnp.result_type(p, x)
    p, x = p.astype(dtype), x.astype(dtype)
    start = jnp.zeros(jnp.broadcast_shapes(p.shape[1:], x.shape), dtype)
    return lax.scan(lambda y, c: (y * x + c, None), start, p)[0]


@_compat.stands_in_for("polymul")
def _polymul(original: Any, a: Any, b: Any, *, trim_leading_zeros: bool = False) -> Any:
    if trim_leading_zeros or not (is_row(a) or is_row(b)):
        return original(a, b, trim_leading_zeros=trim_leading_zeros)
    return jnp.convolve(jnp.asarray(a) * 1.0, jnp.asarray(b) * 1.0)


@_compat.stands_in_for("polyder")
def _polyder(original: Any, p: Any, m: int = 1) -> Any:
    if not is_row(p) or not isinstance(m, int) or m < 1:
        return original(p, m)
    p = jnp.asarray(p) * 1.0
    return (p * _factors(p, range(m)))[: max_dim(p.shape[0] - m, 0)]


@_compat.stands_in_for("polyint")
def _polyint(original: Any, p: Any, m: int = 1, k: Any = None) -> Any:
    if not is_row(p) or not isinstance(m, int) or m < 1 or k is not None:
        return original(p, m, k)
    p = jnp.asarray(p) * 1.0
    return padded_with(0, p / _factors(p, range(-m, 0)), p.shape[0] + m, 0)


def _factors(p: Any, less: range) -> Any:
    """The product of the power that each coefficient stands beside, less each of these numbers."""
    power = jnp.asarray(p.shape[0]) - 1 - jnp.arange(p.shape[0])
    return math.prod((power - k).astype(p.dtype) for k in less)


@_compat.stands_in_for("vander")
def _vander(original: Any, x: Any, N: Any = None, increasing: bool = False) -> Any:
    size = np.shape(x)[0] if N is None and np.ndim(x) == 1 else N
    if not _compat.is_row_size(size):
        return original(x, N, increasing)
    x = jnp.asarray(x)
    powers = jnp.arange(size).astype(x.dtype)
    powers = powers if increasing else jnp.asarray(size, x.dtype) - 1 - powers
    return jnp.power(x[:, None], powers[None])


@_compat.stands_in_for("poly")
def _poly(original: Any, seq_of_zeros: Any) -> Any:
    # A product of as many factors as there are roots, one after another.
    shape = np.shape(seq_of_zeros)
    if len(shape) == 2 and _compat.is_row_size(shape[0]) and shape[0].is_known_to_be(shape[1]):
        seq_of_zeros = jnp.linalg.eigvals(seq_of_zeros)
    if not is_row(seq_of_zeros):
        return original(seq_of_zeros)
    roots = jnp.asarray(seq_of_zeros) * 1.0
    at = jnp.arange(roots.shape[0] + 1)

    def times(coefficients: Any, factor: Any) -> Any:
        root, degree = factor
        there = (at > 0) & (at <= degree + 1)
        before = jnp.where(there, jnp.roll(coefficients, 1), 0)
        return coefficients - jnp.where(there, root * before, 0), None

    return lax.scan(times, (at == 0).astype(roots.dtype), (roots, jnp.arange(roots.shape[0])))[0]


@_compat.stands_in_for("polydiv")
def _polydiv(original: Any, u: Any, v: Any, *, trim_leading_zeros: bool = False) -> Any:
    rows = (is_row(u) or is_row(v)) and np.ndim(u) == np.ndim(v) == 1
    if trim_leading_zeros or not rows or not takes(np.size(v), 1):
        return original(u, v, trim_leading_zeros=trim_leading_zeros)
    u, v = (jnp.asarray(x) * 1.0 for x in (u, v))
    u, v = (x.astype(jnp.promote_types(u.dtype, v.dtype)) for x in (u, v))
    steps, along = max_dim(u.shape[0] - v.shape[0] + 1, 0), jnp.arange(v.shape[0])

    def step(rest: Any, k: Any) -> Any:
        factor = jnp.take(rest, k, mode="clip") / v[0]
        return rest.at[k + along].add(-factor * v), factor

    rest, quotient = lax.scan(step, u, jnp.arange(steps))
    quotient = with_zeros(quotient, max_dim(steps, 1))
    return of_taken(quotient, v.shape[0], 1), of_taken(rest, v.shape[0], 1)


@_compat.stands_in_for("polyfit")
def _polyfit(
    original: Any,
    x: Any,
    y: Any,
    deg: int,
    rcond: Any = None,
    full: bool = False,
    w: Any = None,
    cov: Any = False,
) -> Any:
    # JAX makes a number of the cutoff, which depends on how many points there are.
    if not is_row(x) or rcond is not None or full or cov or not takes(x.shape[0], 1):
        return original(x, y, deg, rcond, full, w, cov)
    x, y = jnp.asarray(x) * 1.0, jnp.asarray(y) * 1.0
    powers = jnp.vander(x, deg + 1)
    weights = jnp.ones_like(x) if w is None else jnp.asarray(w)
    powers, y = powers * weights[:, None], (y.T * weights).T
    scale = jnp.sqrt((powers * powers).sum(0))
    cutoff = jnp.asarray(x.shape[0], x.dtype) * np.finfo(x.dtype).eps
    scaled, *_ = jnp.linalg.lstsq(powers / scale, y, cutoff)
    return of_taken((scaled.T / scale).T, x.shape[0], 1)


@_compat.stands_in_for("roots")
def _roots(original: Any, p: Any, *, strip_zeros: bool = True) -> Any:
    # The eigenvalues of a companion matrix. JAX asks whether there is more than one coefficient:
    # here a row has two at least, and roots that it has not got are cut off.
    if strip_zeros or not is_row(p):
        return original(p, strip_zeros=strip_zeros)
    p = jnp.asarray(p) * 1.0
    own = p.shape[0]
    size, count = jnp.asarray(own), max_dim(own - 1, 0)
    leading = jnp.where(jnp.all(p == 0), size, jnp.argmin(jnp.append(p == 0, False)))
    p = with_zeros(jnp.where(leading == size, 1, p), max_dim(own, 2))
    at = jnp.arange(p.shape[0])
    p = jnp.where(at + leading < size, jnp.take(p, at + leading, mode="clip"), 0)
    matrix = jnp.eye(p.shape[0] - 1, k=-1, dtype=p.dtype).at[0].set(-p[1:] / p[0])
    roots = lax.slice_in_dim(jnp.linalg.eigvals(matrix), 0, count)
    roots = lax.sort_key_val(roots == 0, roots)[1]
    none = jnp.asarray(complex(np.nan, np.nan), roots.dtype)
    return jnp.where(jnp.arange(count) < size - 1 - leading, roots, none)
