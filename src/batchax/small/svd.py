"""Singular values and vectors, by the one-sided method of Jacobi.

Pairs of columns are rotated until all are orthogonal: their lengths are the singular values.
(Hestenes 1958; Demmel and Veselic 1992, "Jacobi's method is more accurate than QR".)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.words import Aval, Value
from batchax.small.order import in_order
from batchax.small.planes import conjugate, parts, squares, times, whole
from batchax.small.rotations import Rounds, rounds, turned
from batchax.small.rows import fold, rows
from batchax.small.scaling import largest, scale

_MOST_SWEEPS = 30  # 6 to 9 are usual


def serves(lane: Sequence[Aval], params: Any) -> bool:
    """Whether it is the default algorithm, of all singular values."""
    m, n = lane[0].shape
    subset = params["subset_by_index"]
    whole_range = subset is None or tuple(subset) == (0, min(m, n))
    return whole_range and params["algorithm"] is None and min(m, n) > 0


def svd(a: Value, *, full_matrices: bool, compute_uv: bool, **_: Any) -> list[Any]:
    """The singular values, in descending order, and the vectors, as `lax.linalg.svd_p` has them.

    A lane all of whose columns are orthogonal stays as it is, whatever its neighbours do. Matrices
    with a NaN or an infinity have NaN for all results.

    Args:
      a: ``[m, n, lanes]``, real or complex.
      full_matrices: whether the matrices of vectors are square.
      compute_uv: whether there are to be vectors.
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
    """The values, the left vectors and the right ones, each vector a row."""
    m, n, lanes = planes[0].shape
    order = rounds(n)
    size = largest(planes)
    finite = size < jnp.inf
    by = scale(size, 8)
    state = [jnp.swapaxes(jnp.where(finite, x * by, 0), 0, 1) for x in planes]
    if left:
        identity = jnp.broadcast_to(np.eye(n, dtype=by.dtype)[..., None], (n, n, lanes))
        beside = [identity, *(jnp.zeros_like(identity) for _ in planes[1:])]
        state = [jnp.concatenate([x, y], 1) for x, y in zip(state, beside, strict=True)]

    def sweep(carry: Any) -> Any:
        count, active, state = carry

        def one(_: Any, carry: Any) -> Any:
            state, oblique = carry
            state, more = _round(order, m, state, active)
            return state, jnp.maximum(oblique, more)

        oblique = jnp.zeros((order.pairs.shape[0] + 1, lanes), by.dtype)
        state, oblique = lax.fori_loop(0, order.number, one, (state, oblique))
        return count + 1, active & (fold(jnp.maximum, oblique) > 0), state

    goes_on = lambda carry: carry[1].any() & (carry[0] < _MOST_SWEEPS)
    start = (0, jnp.full((lanes,), n > 1), state)
    _, active, state = lax.while_loop(goes_on, sweep, start)
    lengths = jnp.sqrt(_sums(squares([x[:, :m] for x in state])))
    values, *state = in_order(-lengths, state)
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


def _sums(x: Any) -> Any:
    """The sums over the elements of vectors."""
    return fold(jnp.add, jnp.swapaxes(x, 0, 1))


def _round(order: Rounds, m: int, state: Sequence[Any], active: Any) -> Any:
    """The columns once all pairs of a round are rotated, and which were far from orthogonal."""
    info = jnp.finfo(state[0].dtype)
    # The last pair is one column twice, which is not rotated.
    first, second = ([rows(x, [*order.pairs[:, side], 0])[:, :m] for x in state] for side in (0, 1))
    one, two = _sums(squares(first)), _sums(squares(second))
    between = [_sums(x) for x in times(conjugate(first), second)]
    more = jnp.maximum(jnp.maximum(one, two), info.tiny)
    less = jnp.minimum(one, two) / more
    apart = (two - one) / more
    between = [x / more for x in between]
    pair = np.arange(len(order.pairs) + 1)[:, None] < len(order.pairs)
    size = functools.reduce(jnp.maximum, map(jnp.abs, between))
    turns = active & pair & (size > float(info.eps) * jnp.sqrt(less))
    length = jnp.abs(apart) + jnp.sqrt(apart * apart + 4 * squares(between))
    twice = jnp.where(apart < 0, -2, 2) / jnp.maximum(length, info.tiny)
    tangent = [jnp.where(turns, jnp.clip(twice * x, -1, 1), 0) for x in between]
    cosine = 1 / jnp.sqrt(1 + squares(tangent))
    sine = [x * cosine for x in tangent]
    return turned(order, cosine, sine, state), turns.astype(info.dtype)


def _completed(there: Any, u: Sequence[Any]) -> list[Any]:
    """Vectors that are orthogonal to the others, for those that are not there.

    The first of them is always the one that is computed, and goes last. It is what is left of the
    unit vector that is farthest from all that are there, made orthogonal twice, as in "twice is
    enough" (Parlett 1980, "The symmetric eigenvalue problem", 6.9).
    """
    m = u[0].shape[1]

    def one(_: Any, carry: Any) -> Any:
        u, there = carry
        near = fold(jnp.add, squares(u))
        least = fold(jnp.minimum, near)
        before = jnp.cumsum(near == least, 0)
        unit = jnp.where((near == least) & (before == 1), 1, 0).astype(near.dtype)
        vector = [unit, *(jnp.zeros_like(unit) for _ in u[1:])]
        for _ in range(2):
            along = [_sums(x) for x in times(conjugate(u), [x[None] for x in vector])]
            away = [fold(jnp.add, x) for x in times(u, [x[:, None] for x in along])]
            vector = [x - y for x, y in zip(vector, away, strict=True)]
        length = jnp.sqrt(fold(jnp.add, squares(vector)))
        vector = [jnp.where(there[0], x[0], y / length) for x, y in zip(u, vector, strict=True)]
        u = [jnp.concatenate([x[1:], y[None]]) for x, y in zip(u, vector, strict=True)]
        return u, jnp.concatenate([there[1:], jnp.ones_like(there[:1])])

    assert m >= len(there)
    return lax.fori_loop(0, len(there), one, (list(u), there))[0]
