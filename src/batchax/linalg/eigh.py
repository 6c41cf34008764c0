"""Eigenvalues and eigenvectors of Hermitian matrices, by the method of Jacobi.

The elements above the diagonal are rows of one array, and a round of disjoint rotations makes each
row of at most four others: a table of places says of which, and so one loop holds all rounds.
(Demmel and Veselic 1992, "Jacobi's method is more accurate than QR".)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.types import Aval, Value, Values
from batchax.linalg.elements import (
    Rounds,
    column,
    fold,
    in_order,
    largest,
    parts,
    rounds,
    rows,
    scale,
    squares,
    turned,
    whole,
)

_MOST_SWEEPS = 30  # 6 to 8 are usual


def serves(lane: Sequence[Aval], params: dict[str, Any]) -> bool:
    """Whether it is the default algorithm, of all eigenvalues."""
    subset = params["subset_by_index"]
    whole_range = subset is None or tuple(subset) == (0, lane[0].shape[0])
    # The parameter `implementation` of `lax.linalg.eigh` is called `algorithm` in the equation.
    chosen = params.get("algorithm", params.get("implementation"))
    return whole_range and chosen is None


def eigh(a: Value, *, lower: bool, **_: Any) -> list[Any]:
    """Returns eigenvectors and eigenvalues, in ascending order, of `a`, ``[n, n, lanes]``.

    A lane does not depend on its neighbors. Matrices with a NaN or an infinity have NaN for all
    results.
    """
    if jnp.iscomplexobj(a):
        # The upper triangle, of what is the conjugate of the lower one.
        a = jnp.conj(jnp.swapaxes(a, 0, 1)) if lower else a
    elif lower:
        a = jnp.swapaxes(a, 0, 1)
    # A rotation is left out where the element that it would remove is negligible next to the
    # diagonal elements of its row and column: so small eigenvalues of a graded definite matrix are
    # as accurate as the large ones.
    planes = parts(a)
    values, *vectors = _decomposed(planes)
    return [whole(vectors), values]


class _Tables(NamedTuple):
    """Says which rows each row is made of, after a round."""

    # Rows are the elements above the diagonal, those of the diagonal, and a row of zeros. Each is
    # ``a * (b * x0 + t * x1) + s * (b * x2 + t * x3)``; the factors are rows, too.
    above: np.ndarray
    sources: np.ndarray  # of each row, the rows x0 to x3
    conjugate: np.ndarray  # of each source, -1 if it is the conjugate of the element
    factors: np.ndarray  # of each row, the factors a, b, s, t
    signs: np.ndarray  # of the factors s and t
    imaginary: np.ndarray  # the sign of the imaginary part of s and t
    # Of each pair, the rows of its elements on (first, second) and above (between) the diagonal.
    first: np.ndarray
    second: np.ndarray
    between: np.ndarray


_COSINE, _SINE, _TANGENT, _KEPT = range(4)  # the kinds of factors


@functools.cache
def _tables(n: int) -> _Tables:
    order = rounds(n)
    above = np.stack(np.triu_indices(n, 1))
    row = np.zeros((n, n), int)
    row[above[0], above[1]] = row[above[1], above[0]] = np.arange(above.shape[1])
    diagonal = above.shape[1]
    nothing = diagonal + n
    none = n // 2  # a pair without a row: its cosine is 1, its sine 0

    def factor(kind: int, pair: int) -> int:
        return kind * (none + 1) + pair

    one, zero = factor(_COSINE, none), factor(_SINE, none)
    made = []
    for i, j in above.T:
        a, b = (int(order.comes_from[x]) for x in (i, j))
        c, d = (int(order.partner[x]) for x in (a, b))
        # Both rows come from one pair: the element between them is what the rotation removes.
        if c == b:
            kept = factor(_KEPT, order.pair[a])
            made.append(
                ([row[a, b], *[nothing] * 3], [a > b, 0, 0, 0], [one, kept, zero, zero], 0, 0)
            )
            continue
        four = [(a, b), (a, d), (c, b), (c, d)]
        sources = [nothing if x == y else row[x, y] for x, y in four]
        cosines = [factor(_COSINE, order.pair[x]) for x in (a, b)]
        sines = [factor(_SINE, order.pair[x]) for x in (a, b)]
        signs = order.side[[a, b]]
        made.append((sources, [x > y for x, y in four], [*cosines, *sines], signs, 1))
    for i in range(n):
        a = int(order.comes_from[i])
        beside = int(order.partner[a])
        # Of the diagonal element, the tangent times that between it and its partner.
        other = nothing if beside == a else row[a, beside]
        tangent = factor(_TANGENT, order.pair[a])
        made.append(
            (
                [diagonal + a, other, nothing, nothing],
                [0] * 4,
                [one, one, zero, tangent],
                [0, order.side[a]],
                -order.side[a],
            )
        )
    made.append(([nothing] * 4, [0] * 4, [one, one, zero, zero], 0, 0))
    fill = lambda x: np.broadcast_to(x, (2,))
    return _Tables(
        above,
        np.array([x[0] for x in made]).T,
        np.array([1 - 2 * np.array(x[1], int) for x in made]).T,
        np.array([x[2] for x in made]).T,
        np.array([fill(x[3]) for x in made]).T,
        np.array([fill(x[4]) for x in made]).T,
        np.array([*diagonal + order.pairs[:, 0], nothing]),
        np.array([*diagonal + order.pairs[:, 1], nothing]),
        np.array([*row[order.pairs[:, 0], order.pairs[:, 1]], nothing]),
    )


def _decomposed(planes: Sequence[Any]) -> list[Any]:
    n = planes[0].shape[0]
    table = _tables(n)
    order = rounds(n)
    elements = [x[table.above[0], table.above[1]] for x in planes]
    diagonal = planes[0][np.arange(n), np.arange(n)]
    real = jnp.concatenate([elements[0], diagonal])
    size = largest([jnp.concatenate([real, *elements[1:]])])
    finite = size < jnp.inf
    by = scale(size)
    bring = lambda x: jnp.where(finite, x * by, 0)
    state = [jnp.concatenate([bring(real), jnp.zeros((1, *by.shape), by.dtype)])]
    state += [
        jnp.concatenate([bring(x), jnp.zeros((n + 1, *by.shape), by.dtype)]) for x in elements[1:]
    ]
    identity = np.eye(n, dtype=by.dtype)[..., None]
    vectors = [
        jnp.broadcast_to(identity, (n, n, *by.shape)),
        *(jnp.zeros_like(x) for x in planes[1:]),
    ]

    def sweep(carry: tuple[Value, Value, Values, Values]) -> tuple[Value, Value, Values, Values]:
        count, active, state, vectors = carry
        one = lambda _, x: _round(table, order, x[0], x[1], active)
        state, vectors = lax.fori_loop(0, order.number, one, (state, vectors))
        return count + 1, active & _left(table, state), state, vectors

    goes_on = lambda carry: carry[1].any() & (carry[0] < _MOST_SWEEPS)
    start = (0, _left(table, state), state, vectors)
    _, active, state, vectors = lax.while_loop(goes_on, sweep, start)
    values = state[0][-n - 1 : -1]
    values, *vectors = in_order(values, vectors)
    bad = active | ~finite
    values = jnp.where(bad, jnp.nan, values / by)
    return [values, *(jnp.where(bad, jnp.nan, jnp.swapaxes(x, 0, 1)) for x in vectors)]


def _large(square: Value, first: Value, second: Value) -> jax.Array:
    """Whether an element of this square is not negligible between two of the diagonal."""
    info = jnp.finfo(square.dtype)
    return square > jnp.maximum(float(info.eps) ** 2 * jnp.abs(first * second), info.tiny)


def _left(table: _Tables, state: Sequence[Any]) -> jax.Array:
    """Returns which lanes have elements left that are not negligible."""
    number = table.above.shape[1]
    if number == 0:
        return jnp.zeros(state[0].shape[1:], bool)
    i, j = table.above + number
    between = squares([x[:number] for x in state])
    large = jnp.where(_large(between, rows(state[0], i), rows(state[0], j)), 1, 0)
    return fold(jnp.maximum, large) > 0


def _round(
    table: _Tables, order: Rounds, state: Values, vectors: Values, active: Value
) -> tuple[Values, Values]:
    """Returns the elements and eigenvectors once all pairs of a round are rotated."""
    factors = _factors(table, state, active)
    x = [[rows(p, at) for p in state] for at in table.sources]
    a, b = (rows(factors[0], at) for at in table.factors[:2])
    sign = [column(s, a) for s in table.signs]
    turn = [column(s, a) for s in table.imaginary]
    s, t = ([rows(f, at) for f in factors] for at in table.factors[2:])
    s, t = [s[0] * sign[0], *s[1:]], [t[0] * sign[1], *t[1:]]
    if len(state) == 1:
        state = [a * (b * x[0][0] + t[0] * x[1][0]) + s[0] * (b * x[2][0] + t[0] * x[3][0])]
    else:
        t[1] = t[1] * turn[1]
        s[1] = -s[1] * turn[0]
        for source, conjugate in zip(x, table.conjugate, strict=True):
            source[1] = source[1] * column(conjugate, a)
        plus = lambda x, y: [
            b * x[0] + t[0] * y[0] - t[1] * y[1],
            b * x[1] + t[0] * y[1] + t[1] * y[0],
        ]
        top, bottom = plus(x[0], x[1]), plus(x[2], x[3])
        real = a * top[0] + s[0] * bottom[0] - s[1] * bottom[1]
        imaginary = a * top[1] + s[0] * bottom[1] + s[1] * bottom[0]
        above = np.arange(real.shape[0])[:, None] < table.above.shape[1]
        state = [real, jnp.where(above, imaginary, 0)]
    pairs = len(factors[0]) // 4
    sine = [x[pairs : 2 * pairs] for x in factors]
    return state, turned(order, factors[0][:pairs], sine, vectors)


def _factors(table: _Tables, state: Sequence[Any], active: Value) -> list[Any]:
    """Returns of each kind a factor for each pair, and of the pair that no row is in."""
    info = jnp.finfo(state[0].dtype)
    between = [rows(x, table.between) for x in state]
    first, second = rows(state[0], table.first), rows(state[0], table.second)
    apart = second - first
    square = squares(between)
    turns = active & _large(square, first, second)
    # The smaller root of the two: the tangent of the angle that is at most 45 degrees.
    length = jnp.abs(apart) + jnp.sqrt(apart * apart + 4 * square)
    twice = jnp.where(apart < 0, -2, 2) / jnp.maximum(length, info.tiny)
    # No more than 1 but where squares vanish.
    tangent = [jnp.where(turns, jnp.clip(twice * x, -1, 1), 0) for x in between]
    # Computed once, not for each of the rows that they are factors of.
    tangent = lax.optimization_barrier(tangent)
    square = squares(tangent)
    cosine = lax.optimization_barrier(1 / jnp.sqrt(1 + square))
    nowhere = functools.reduce(jnp.logical_and, [x == 0 for x in tangent])
    kept = jnp.where(nowhere, 1, 0).astype(square.dtype)
    of_sine = [x * cosine for x in tangent]
    real = jnp.concatenate([cosine, of_sine[0], tangent[0], kept])
    nothing = jnp.zeros_like(kept)
    rest = [
        jnp.concatenate([nothing, s, t, nothing])
        for s, t in zip(of_sine[1:], tangent[1:], strict=True)
    ]
    return lax.optimization_barrier([real, *rest])
