"""Singular values and vectors, by the one-sided method of Jacobi.

Pairs of columns are rotated until all are orthogonal: their lengths are the singular values.
(Hestenes 1958; Demmel and Veselic 1992, "Jacobi's method is more accurate than QR".)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.types import Aval, Value, Values
from batchax.linalg.elements import (
    conjugate,
    each_pair,
    fold,
    in_order,
    largest,
    parts,
    put,
    repeat,
    row,
    scale,
    squares,
    sums,
    times,
    whole,
)

_MOST_SWEEPS = 30  # 6 to 9 are usual


def serves(lane: Sequence[Aval], params: dict[str, Any]) -> bool:
    """Whether it is the default algorithm, of all singular values."""
    m, n = lane[0].shape
    subset = params["subset_by_index"]
    whole_range = subset is None or tuple(subset) == (0, min(m, n))
    return whole_range and params["algorithm"] is None and min(m, n) > 0


def svd(a: Value, *, full_matrices: bool, compute_uv: bool, **_: Any) -> list[Any]:
    """Returns singular values, in descending order, and vectors, as `lax.linalg.svd_p` has them.

    A lane does not depend on its neighbors. Matrices with a NaN or an infinity have NaN for all
    results.
    """
    m, n, _ = a.shape
    if m < n:  # of the conjugate transpose, whose left vectors are the right ones of this
        adjoint = jnp.conj(jnp.swapaxes(a, 0, 1))
        values, *both = svd(adjoint, full_matrices=full_matrices, compute_uv=compute_uv)
        return [values, *(jnp.conj(jnp.swapaxes(x, 0, 1)) for x in reversed(both))]
    planes = parts(a)
    left = (m if full_matrices else n) if compute_uv else 0
    values, *vectors = _decomposed(left, planes)
    if not compute_uv:
        return [values]
    half = len(planes)
    u = [jnp.swapaxes(x, 0, 1) for x in vectors[:half]]
    return [values, whole(u), whole(conjugate(vectors[half:]))]


def _decomposed(left: int, planes: Sequence[Any]) -> list[Any]:
    """Returns the values, the left vectors and the right ones, each vector a row."""
    m, n, lanes = planes[0].shape
    size = largest(planes)
    finite = size < jnp.inf
    by = scale(size, 8)
    state = [jnp.swapaxes(jnp.where(finite, x * by, 0), 0, 1) for x in planes]
    if left:
        identity = jnp.broadcast_to(np.eye(n, dtype=by.dtype)[..., None], (n, n, lanes))
        beside = [identity, *(jnp.zeros_like(identity) for _ in planes[1:])]
        state = [jnp.concatenate([x, y], 1) for x, y in zip(state, beside, strict=True)]
    none = jnp.zeros((lanes,), bool)

    def sweep(carry: tuple[Value, Value, Values]) -> tuple[Value, Value, Values]:
        count, active, state = carry

        def pair(i: Value, j: Value, carry: tuple[Value, Values]) -> tuple[Value, Values]:
            oblique, state = carry
            turns, state = _orthogonal(i, j, m, state, active)
            return oblique | turns, state

        return (count + 1, *each_pair(n, pair, (none, state)))

    goes_on = lambda carry: carry[1].any() & (carry[0] < _MOST_SWEEPS)
    _, active, state = lax.while_loop(goes_on, sweep, (0, jnp.full((lanes,), n > 1), state))
    square = lambda k: [squares([lax.dynamic_index_in_dim(x, k, 1, False) for x in state])]
    (length,) = sums(m, square, jnp.zeros((n, lanes), by.dtype), 1)
    values, *state = in_order(-jnp.sqrt(length), state)
    values = -values
    bad = active | ~finite
    clean = lambda x: jnp.where(bad, jnp.nan, x)
    if not left:
        return [clean(values / by)]
    divisor = jnp.where(values == 0, 1, values)[:, None]
    u = [x[:, :m] / divisor for x in state]
    u = [jnp.pad(x, ((0, left - n), (0, 0), (0, 0))) for x in u]
    there = jnp.pad(values > 0, ((0, left - n), (0, 0)))
    complete = functools.partial(_completed, there)
    u = lax.cond(there.all(), lambda u: u, complete, u)
    return [clean(values / by), *map(clean, u), *(clean(x[:, m:]) for x in state)]


def _orthogonal(
    i: Value, j: Value, m: int, state: Sequence[Any], active: Value
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns which lanes have columns `i` and `j` far from orthogonal, and all columns once
    rotated.
    """
    # A column is a row of `state`, with what makes it of the columns of the matrix behind it.
    info = jnp.finfo(state[0].dtype)
    first, second = ([row(x, k) for x in state] for k in (i, j))

    def products(k: Value) -> list[Any]:
        x, y = ([row(z, k) for z in column] for column in (first, second))
        return [squares(x), squares(y), *times(conjugate(x), y)]

    blank = jnp.zeros(active.shape, info.dtype)
    one, two, *between = sums(m, products, blank, 2 + len(state))
    more = jnp.maximum(jnp.maximum(one, two), info.tiny)
    less = jnp.minimum(one, two) / more
    apart = (two - one) / more
    between = [x / more for x in between]
    size = functools.reduce(jnp.maximum, map(jnp.abs, between))
    # Relative to both lengths, so that small singular values of a graded matrix are accurate, too.
    turns = active & (size > float(info.eps) * jnp.sqrt(less))

    def rotated(state: Values) -> Values:
        length = jnp.abs(apart) + jnp.sqrt(apart * apart + 4 * squares(between))
        twice = jnp.where(apart < 0, -2, 2) / jnp.maximum(length, info.tiny)
        tangent = [jnp.where(turns, jnp.clip(twice * x, -1, 1), 0) for x in between]
        cosine = 1 / jnp.sqrt(1 + squares(tangent))
        sine = [x * cosine for x in tangent]
        of_first, of_second = times(conjugate(sine), second), times(sine, first)
        new = []
        for x, y, z, here, there in zip(state, of_first, of_second, first, second, strict=True):
            new.append(put(put(x, cosine * here - y, i), cosine * there + z, j))
        return new

    return turns, lax.cond(turns.any(), rotated, lambda state: state, list(state))


def _completed(there: Value, u: Sequence[Any]) -> list[Any]:
    """Returns vectors with those that are not there, which are 0, orthogonal to the others."""
    # One after another is what is left of the unit vector that is farthest from all that are there,
    # made orthogonal twice, as in "twice is enough" (Parlett 1980, "The symmetric eigenvalue
    # problem", 6.9).
    left, m, lanes = u[0].shape
    nothing = jnp.zeros((lanes,), u[0].dtype)

    def away(vector: Values, from_: Values) -> list[jax.Array]:
        def product(k: Value) -> list[Any]:
            x, y = ([row(z, k) for z in of] for of in (from_, vector))
            return times(conjugate(x), y)

        along = times(from_, sums(m, product, nothing, len(u)))
        return [x - y for x, y in zip(vector, along, strict=True)]

    def one(i: Value, u: Values) -> list[Any]:
        square = lambda k: [squares([row(x, k) for x in u])]
        (near,) = sums(left, square, jnp.zeros_like(u[0][0]), 1)
        unit = np.arange(m, dtype=np.int32)[:, None] == lax.argmin(near, 0, "int32")
        unit = unit.astype(near.dtype)
        start = [unit, *(jnp.zeros_like(unit) for _ in u[1:])]
        step = lambda k, vector: away(vector, [row(x, lax.rem(k, np.int32(left))) for x in u])
        vector = repeat(0, 2 * left, step, start)
        length = jnp.sqrt(fold(jnp.add, squares(vector)))
        has = row(there, i)
        pairs = zip(u, vector, strict=True)
        return [put(x, jnp.where(has, row(x, i), y / length), i) for x, y in pairs]

    return repeat(0, left, one, list(u))
