"""Steps that decompositions of small matrices share: on one element, row or plane of all lanes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.jaxprs.types import Value, Values

State = TypeVar("State")
"""What a loop carries: arrays in lists and tuples."""


def rows(x: Value, places: Sequence[int] | np.ndarray) -> jax.Array:
    """Gathers the rows of `x` at `places`, which are in it."""
    places = np.asarray(places, np.int32)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, x.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    sizes = (1, *x.shape[1:])
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return lax.gather(x, places[:, None], numbers, sizes, mode=mode)


def column(numbers: Sequence[int] | np.ndarray, like: Value) -> np.ndarray:
    return np.asarray(numbers, like.dtype).reshape(-1, *(1,) * (like.ndim - 1))


def parts(x: Value) -> list[Any]:
    """Returns the real part and, of complex numbers, the imaginary one."""
    return [jnp.real(x), jnp.imag(x)] if jnp.iscomplexobj(x) else [x]


def whole(planes: Values) -> jax.Array:
    return planes[0] if len(planes) == 1 else lax.complex(planes[0], planes[1])


def conjugate(planes: Values) -> list[Any]:
    return [planes[0], *(-x for x in planes[1:])]


def squares(planes: Values) -> jax.Array:
    return functools.reduce(jnp.add, [x * x for x in planes])


def times(x: Values, y: Values) -> list[Any]:
    if len(x) == 1:
        return [x[0] * y[0]]
    return [x[0] * y[0] - x[1] * y[1], x[0] * y[1] + x[1] * y[0]]


def repeat(start: Value, stop: Value, body: Callable[[Any, State], State], state: State) -> State:
    """Computes ``state = body(i, state)`` for each number `i` from `start` on, below `stop`."""
    start = np.int32(start) if isinstance(start, int) else start
    step = lambda carry: (carry[0] + np.int32(1), body(*carry))
    return lax.while_loop(lambda carry: carry[0] < stop, step, (start, state))[1]


def each_pair(number: int, body: Callable[[Any, Any, State], State], state: State) -> State:
    """Computes ``state = body(i, j, state)`` for all `i` and `j` below `number`, `i` below `j`."""
    after = lambda i, state: repeat(i + 1, number, lambda j, x: body(i, j, x), state)
    return repeat(0, number - 1, after, state)


def row(x: Value, *at: Value) -> jax.Array:
    """Returns ``x[at]``, of numbers that are in it."""
    for i in at:
        x = lax.dynamic_index_in_dim(x, i, 0, keepdims=False, allow_negative_indices=False)
    return x


def put(x: Value, new: Value, *at: Value) -> jax.Array:
    rest = [np.int32(0)] * (x.ndim - len(at))
    new = lax.reshape(new, (1,) * len(at) + new.shape)
    return lax.dynamic_update_slice(x, new, [*at, *rest], allow_negative_indices=False)


def fold(combine: Callable[[Any, Any], Any], x: Value) -> jax.Array:
    return repeat(1, x.shape[0], lambda i, so_far: combine(so_far, row(x, i)), x[0])


def sums(number: int, terms: Callable[[Any], Values], blank: Value, count: int) -> list[Any]:
    """Sums `count` terms over all numbers below `number`, each like `blank`, of zeros."""
    add = lambda k, so_far: [x + y for x, y in zip(so_far, terms(k), strict=True)]
    return repeat(0, number, add, [blank] * count)


def in_order(values: Value, vectors: Sequence[Any]) -> list[Any]:
    """Sorts in ascending order."""
    n = values.shape[0]
    places = np.arange(n)[:, None]

    # The place of each is the number of smaller ones: with few rows that takes no sort.
    def count(i: Value, rank: Value) -> jax.Array:
        less = (values[i] < values) | ((values[i] == values) & (i < places))
        return rank + less.astype(rank.dtype)

    rank = lax.fori_loop(0, n, count, jnp.zeros(values.shape, "int32"))

    def put(i: Value, outs: Values) -> list[Any]:
        here = rank[i] == places
        spread = lambda x: here.reshape(n, *(1,) * (x.ndim - 2), -1)
        return [
            jnp.where(spread(x), x[i], out) for x, out in zip((values, *vectors), outs, strict=True)
        ]

    outs = [jnp.zeros_like(x) for x in (values, *vectors)]
    return lax.fori_loop(0, n, put, outs)


def scaled(x: Value, by: Value) -> jax.Array:
    if not jnp.iscomplexobj(x):
        return x * by
    # Part by part: infinity in one part makes no NaN in the other.
    return lax.complex(jnp.real(x) * by, jnp.imag(x) * by)


def largest(planes: Values) -> jax.Array:
    """Returns the largest of the sizes of all parts, for each lane, NaN where there is one."""
    # Sizes are taken row by row: those of all would be a second array, transposed once more where
    # lanes come first.
    planes = [x.reshape(-1, x.shape[-1]) for x in planes]
    more = lambda i, so_far: jnp.maximum(
        so_far, functools.reduce(jnp.maximum, [jnp.abs(row(x, i)) for x in planes])
    )
    return repeat(0, len(planes[0]), more, jnp.zeros_like(planes[0][0]))


def power_of_two(size: Value) -> jax.Array:
    """Returns the largest power of two that is no larger, 0 for numbers that are not normal."""
    # The bits of infinity are those of the exponent: what they leave of a number is a power of two.
    exponent = np.asarray(np.inf, size.dtype).view(f"i{size.dtype.itemsize}")
    bits = lax.bitcast_convert_type(size, exponent.dtype) & exponent
    return lax.bitcast_convert_type(bits, size.dtype)


def scale(size: Value, below: int = 4) -> jax.Array:
    """Returns powers of two that bring numbers of this size to where squares are safe, 1 for 0."""
    # As far up as that allows, so that the least numbers of a graded matrix stay normal: to `below`
    # powers of two below the square root of what is too large.
    info = jnp.finfo(size.dtype)
    power = power_of_two(size)
    top = 2.0 ** (info.maxexp // 2 - below)
    least = top * 2.0 ** (2 - info.maxexp)
    return jnp.where(power == 0, 1, top / jnp.maximum(power, least))


class Rounds(NamedTuple):
    """Holds rounds of pairs of neighbors, after each of which the places of all change."""

    # After `number` rounds each has met each other once and all are at their places again, as in a
    # round-robin tournament (Brent and Luk 1985, "The solution of singular-value and symmetric
    # eigenvalue problems on multiprocessor arrays").
    number: int
    pairs: np.ndarray  # of places, ``[pairs, 2]``
    partner: np.ndarray  # with which place each is paired; with itself where one is left over
    pair: np.ndarray  # which pair each place is in; the number of pairs where it is in none
    side: np.ndarray  # -1 at the first place of a pair, 1 at the second, 0 where one is left over
    comes_from: np.ndarray  # the place at which each was before


@functools.cache
def rounds(n: int) -> Rounds:
    odd = n % 2
    half = (n + odd) // 2
    comes_from = np.zeros(2 * half, np.int32)  # those at even places go up, at odd ones down
    for i in range(1, half):
        comes_from[2 * i] = 1 if i == 1 else 2 * i - 2
    for i in range(half):
        last = 1 if half == 1 else 2 * half - 2
        comes_from[2 * i + 1] = 2 * i + 3 if i < half - 1 else last
    partner = np.arange(2 * half, dtype=np.int32) ^ 1
    if odd:  # the partner of the first, which stays at its place, is left over
        comes_from, partner = comes_from[1:] - 1, partner[1:] - 1
        partner[0] = 0
    places = np.arange(n)
    pair = np.where(partner == places, n // 2, (places - odd) // 2).astype(np.int32)
    side = np.sign(places - partner)
    pairs = np.stack([places[odd::2], places[odd + 1 :: 2]], 1)
    return Rounds(n - 1 + odd, pairs, partner, pair, side, comes_from)


def turned(order: Rounds, cosine: Value, sine: Sequence[Any], vectors: Sequence[Any]) -> list[Any]:
    """Returns vectors, ``[places, elements, lanes]``, whose pairs are rotated, at their next
    places. Of `cosine` and `sine`, ``[pairs + 1, lanes]``, the last is 1 and 0, for places in no
    pair.
    """
    before = order.comes_from
    mine, other = ([rows(x, at) for x in vectors] for at in (before, order.partner[before]))
    pair = order.pair[before]
    c = rows(cosine, pair)[:, None]
    s = [rows(x, pair)[:, None] for x in sine]
    s[0] = s[0] * column(order.side[before], c)
    if len(s) == 1:
        return [c * mine[0] + s[0] * other[0]]
    return [
        c * mine[0] + s[0] * other[0] - s[1] * other[1],
        c * mine[1] + s[0] * other[1] + s[1] * other[0],
    ]
