"""In which order pairs are rotated."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from batchax.small.rows import column, rows


class Rounds(NamedTuple):
    """Rounds of pairs of neighbours, after each of which the places of all are changed.

    After `number` rounds each has met each other once and all are at their places again, as in a
    round-robin tournament (Brent and Luk 1985, "The solution of singular-value and symmetric
    eigenvalue problems on multiprocessor arrays").

    Attributes:
      number: of rounds.
      pairs: of places, ``[pairs, 2]``.
      partner: with which place each is paired; with itself where one is left over.
      pair: which pair each place is in; the number of pairs where it is in none.
      side: -1 at the first place of a pair, 1 at the second, 0 where one is left over.
      comes_from: the place at which each was before.
    """

    number: int
    pairs: np.ndarray
    partner: np.ndarray
    pair: np.ndarray
    side: np.ndarray
    comes_from: np.ndarray


@functools.cache
def rounds(n: int) -> Rounds:
    """The rounds in which `n` meet."""
    odd = n % 2
    half = (n + odd) // 2
    comes_from = np.zeros(2 * half, np.int32)  # those at even places go up, at odd ones down
    for i in range(1, half):
        comes_from[2 * i] = 1 if i == 1 else 2 * i - 2
    for i in range(half):
        last = 1 if half == 1 else 2 * half - 2
        comes_from[2 * i + 1] = 2 * i + 3 if i < half - 1 else last
    partner = np.arange(2 * half, dtype=np.int32) ^ 1
    if odd:  # whoever would meet the first, which stays at its place, is left over
        comes_from, partner = comes_from[1:] - 1, partner[1:] - 1
        partner[0] = 0
    places = np.arange(n)
    pair = np.where(partner == places, n // 2, (places - odd) // 2).astype(np.int32)
    side = np.sign(places - partner)
    pairs = np.stack([places[odd::2], places[odd + 1 :: 2]], 1)
    return Rounds(n - 1 + odd, pairs, partner, pair, side, comes_from)


def turned(order: Rounds, cosine: Any, sine: Sequence[Any], vectors: Sequence[Any]) -> list[Any]:
    """Vectors whose pairs are rotated, at their places of the next round.

    Args:
      order: the rounds.
      cosine: of each pair, ``[pairs + 1, lanes]``, 1 for the last one, that nobody is in.
      sine: its real part and, of complex numbers, the imaginary one; 0 for the last one.
      vectors: the parts of the vectors, ``[places, elements, lanes]``.
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
