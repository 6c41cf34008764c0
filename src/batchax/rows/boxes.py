"""Groups of rows that are ragged along several axes, which take little room padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

_MOST_SHAPES = 256  # that are merged two by two; of more, those that are nearly equal are one


Weight = Callable[[np.ndarray], np.ndarray]
"""What a row weighs that is padded to each of some shapes, an array of shape (shapes, axes)."""


def find_boxes(needed: np.ndarray, most: int) -> list[np.ndarray]:
    """The rows in at most so many groups, each of which is padded to its greatest size per axis.

    Args:
      needed: the size of each row along each axis, shape (rows, axes).
      most: how many groups there may be.

    Returns:
      The indices of the rows of each group, increasing; groups that take least room are first.
    """
    groups = next(fewer_boxes(needed, most, lambda shapes: shapes.prod(1)))
    return sorted(groups, key=lambda rows: int(needed[rows].max(0).prod()))


def fewer_boxes(needed: np.ndarray, most: int, weight: Weight) -> Iterator[list[np.ndarray]]:
    """As `find_boxes`, for least weight; then in one group less, and so on.

    Two groups at a time become one, those whose rows weigh least more for it. Along one axis
    the best groups are found by a dynamic programme (`buckets.py`); for several axes that is a hard
    problem.
    """
    shapes, number, counts = _few(needed)
    merged = np.arange(len(shapes))  # the group of each shape
    sizes = shapes.copy()
    weights = weight(sizes).astype(float)
    alive = np.ones(len(shapes), bool)
    growth = np.full((len(shapes), len(shapes)), np.inf)

    def update(i: int) -> None:
        together = weight(np.maximum(sizes, sizes[i])) * (counts + counts[i])
        grown = together - weights * counts - weights[i] * counts[i]
        grown[~alive] = np.inf
        grown[i] = np.inf
        growth[i], growth[:, i] = grown, grown

    for i in range(len(shapes)):
        update(i)
    while True:
        i, j = np.unravel_index(np.argmin(growth), growth.shape)
        if alive.sum() <= most and growth[i, j] > 0:
            yield [np.flatnonzero(merged[number] == k) for k in np.flatnonzero(alive)]
        if alive.sum() <= 1:
            return
        sizes[i], counts[i] = np.maximum(sizes[i], sizes[j]), counts[i] + counts[j]
        weights[i] = weight(sizes[i : i + 1])[0]
        merged[merged == j] = i
        alive[j] = False
        growth[j], growth[:, j] = np.inf, np.inf
        update(int(i))


def _few(needed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shapes that rows have, rounded up if they are many; the one of each row; how many have it."""
    step = 1
    while True:
        shapes, number, counts = np.unique(
            -(-needed // step) * step, axis=0, return_inverse=True, return_counts=True
        )
        if len(shapes) <= _MOST_SHAPES:
            return shapes, number.reshape(-1), counts
        step *= 2
