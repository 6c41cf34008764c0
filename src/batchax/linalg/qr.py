"""QR factors, by Householder's reflections.

(Golub and Van Loan 2013, "Matrix Computations", 5.2, with the signs of LAPACK's `larfg`.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.types import Aval, Params, Value, Values
from batchax.linalg.elements import conjugate, parts, power_of_two, rows, squares, times, whole


def serves(lane: Sequence[Aval], params: Params) -> bool:
    return not params["pivoting"] and 0 not in lane[0].shape


def qr(a: Value, *, full_matrices: bool, **_: Any) -> list[Any]:
    """Returns the factors, as `lax.linalg.qr` has them, of `a`, ``[m, n, lanes]``."""
    m, n, _ = a.shape
    planes = parts(a)
    both = _decomposed(planes)
    left = m if full_matrices else min(m, n)
    upper = np.arange(m)[:, None, None] <= np.arange(n)[:, None]
    r = [jnp.where(upper, x[:, :n], 0)[:left] for x in both]
    q = [jnp.swapaxes(x, 0, 1) for x in conjugate([x[:left, n:] for x in both])]
    return [whole(q), whole(r)]


class _Reflection(NamedTuple):
    """Takes all that is below the first row away from the first column."""

    vector: list[Any]  # what comes off each column is a multiple of it, ``[m]``
    multiples: list[Any]  # for each column, ``[m + n]``
    corner: list[Any]  # what is left in the first row of the first column


_Step = tuple[Values, _Reflection, Value, Values]
"""The matrices, the reflection to apply to them, how many rows are done, and these rows."""


def _decomposed(planes: Sequence[Any]) -> list[Any]:
    """Returns the second factor and next to it the conjugate transpose of the first, a square
    matrix.
    """
    # After each reflection the first row is finished. It goes last, as nothing but zeros, and the
    # first column goes last, so that it is always the first that are reflected: a loop with places
    # known when it is compiled is vectorized.
    m, n, lanes = planes[0].shape
    count, width = min(m, n), m + n
    identity = jnp.broadcast_to(np.eye(m, dtype=planes[0].dtype)[..., None], (m, m, lanes))
    beside = [identity, *(jnp.zeros_like(identity) for _ in planes[1:])]
    state = [jnp.concatenate([x, y], 1) for x, y in zip(planes, beside, strict=True)]
    # What comes first goes last in the first step already.
    from_end = lambda x: jnp.roll(x, (1, 1), (0, 1)).reshape(m * width, lanes)
    nothing = lambda *shape: [jnp.zeros((*shape, lanes), x.dtype) for x in planes]
    none = _Reflection(nothing(m), nothing(width), nothing())
    row, column = (x.ravel() for x in np.indices((m, width)))
    row, column = (row + 1) % m, (column + 1) % width
    last = (row == 0)[:, None]

    # A step computes a reflection and the next one applies it: of what is the result of a step the
    # compiler makes no copies, one for each element that it is needed for.
    def step(i: Value, carry: _Step) -> _Step:
        state, reflection, done, finished = carry
        vector, multiples, corner = reflection
        away = times([rows(x, row) for x in vector], [rows(x, column) for x in multiples])
        pairs = list(zip(state, away, strict=True))
        new = [rows(x, row * width + column) - y for x, y in pairs]
        # The first row as it is now, in the order of the columns.
        top = times([x[:1] for x in vector], multiples)
        top = [x[:width] - y for x, y in zip(state, top, strict=True)]
        top = [jnp.concatenate([x[None], y[1:]]) for x, y in zip(corner, top, strict=True)]
        finished = [
            lax.dynamic_update_index_in_dim(x, y, i - 1, 0)
            for x, y in zip(finished, top, strict=True)
        ]
        new = [jnp.where(last & (done > 0), 0, x) for x in new]
        return new, _reflection(new, width, done), done + 1, finished

    start = [from_end(x) for x in state], none, nothing()[0], nothing(count, width)
    state, _, _, finished = lax.fori_loop(0, count + 1, step, start)
    # What is column ``c`` at first is at ``c - i`` in row ``i``.
    turned = (np.arange(width) - np.arange(count)[:, None]) % width
    turned = (turned + width * np.arange(count)[:, None]).ravel()
    rest = [x.reshape(m, width, lanes)[: m - count] for x in state]
    rest = [jnp.roll(x, count, 1) for x in rest]
    straight = [
        rows(x.reshape(count * width, lanes), turned).reshape(count, width, lanes) for x in finished
    ]
    return [jnp.concatenate(x) for x in zip(straight, rest, strict=True)]


def _reflection(state: Sequence[Any], width: int, done: Value) -> _Reflection:
    """Returns the reflection for the first column of matrices of `width`; some rows are done."""
    state = [x.reshape(-1, width, x.shape[-1]) for x in state]
    column = [x[:, 0] for x in state]
    # Numbers are brought near 1 before they are squared.
    size = _fold(jnp.maximum, functools.reduce(jnp.maximum, map(jnp.abs, column)))
    info = jnp.finfo(size.dtype)
    by = jnp.where(size < jnp.inf, jnp.clip(power_of_two(size), info.tiny, 1 / info.tiny), 1)
    near = [x * (1 / by) for x in column]
    top, below = ([x[0] for x in near], [x[1:] for x in near])
    # In the last row there is nothing below. (Rows that are done may be NaN where others are.)
    tail = _fold(jnp.add, squares(below)) if len(below[0]) else jnp.zeros_like(size)
    tail = jnp.where(done == len(below[0]), 0, tail)
    length = jnp.sqrt(tail + squares(top))
    # Nothing is to be reflected; not so where something is NaN.
    idle = functools.reduce(jnp.logical_and, [tail == 0, *(x == 0 for x in top[1:])])
    beta = jnp.where(idle, 1, jnp.where(jnp.signbit(top[0]), length, -length))
    # What is taken off is ``v t (v^H a) / beta``.
    t = [jnp.where(idle, 0, beta - top[0]), *(jnp.where(idle, 0, -x) for x in top[1:])]
    apart = [jnp.where(idle, 1, top[0] - beta), *top[1:]]
    if len(state) == 1:
        vector = [below[0] / apart[0]]
    else:
        square = squares(apart)
        vector = [x / square for x in times(below, conjugate(apart))]
    vector = [jnp.where(idle, 0, x) for x in vector]
    ahead = [jnp.ones_like(column[0][:1]), *(jnp.zeros_like(x[:1]) for x in column[1:])]
    vector = [jnp.concatenate([x, y]) for x, y in zip(ahead, vector, strict=True)]
    sums = [_fold(jnp.add, x) for x in times([x[:, None] for x in conjugate(vector)], state)]
    multiples = [x / beta for x in times(conjugate(t), sums)]
    corner = [jnp.where(idle, column[0][0], beta * by), *(jnp.zeros_like(x[0]) for x in column[1:])]
    return _Reflection(vector, multiples, corner)


def _fold(combine: Callable[[Any, Any], Any], x: Value) -> jax.Array:
    # Written out: there are few rows, and a loop of loops would take longer.
    return functools.reduce(combine, [x[i] for i in range(x.shape[0])])
