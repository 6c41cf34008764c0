"""What barriers cost, from how many steps each lane takes in the innermost loop.

Counts are of (lanes, outer steps, ...), an axis for each loop around the innermost.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def masked(counts: np.ndarray) -> int:
    """Steps of the innermost loop where lanes wait for each other at each step of all others."""
    return int(counts.max(0).sum())


def free(counts: np.ndarray) -> int:
    """Steps of the innermost loop where no lane waits: those of the lane that takes most."""
    return int(_of_lanes(counts).max())


def bound(counts: np.ndarray) -> float:
    """What a way without barriers takes of the steps of masked lanes, at best."""
    return free(counts) / max(1, masked(counts))


def of_use(counts: np.ndarray) -> tuple[float, float]:
    """The share of lane-steps that some lane needs, of all with barriers and without."""
    total, lanes = int(counts.sum()), len(counts)
    return total / max(1, lanes * masked(counts)), total / max(1, lanes * free(counts))


def active(counts: np.ndarray, points: int = 200) -> dict[str, tuple[Any, Any]]:
    """Over time, the share of lanes that are active: (time, share) with barriers and without.

    Time is 1 where masked lanes are done. A share is that of the time before, the first no time.
    """
    lanes, whole = len(counts), max(1, masked(counts))
    flat = counts.reshape(lanes, -1)
    with_barriers = np.zeros(whole)
    start = 0
    for column in flat.T:
        longest = int(column.max())
        with_barriers[start : start + longest] = _left(column, longest)
        start += longest
    without = _left(_of_lanes(counts), free(counts))
    return {
        "with barriers": _thinned(with_barriers / lanes, whole, points),
        "without": _thinned(without / lanes, whole, points),
    }


def _left(counts: np.ndarray, steps: int) -> np.ndarray:
    """How many take more than 0, 1, ... steps."""
    return len(counts) - np.cumsum(np.bincount(counts, minlength=steps + 1))[:steps]


def _of_lanes(counts: np.ndarray) -> np.ndarray:
    return counts.reshape(len(counts), -1).sum(1)


def _thinned(shares: np.ndarray, whole: int, points: int) -> tuple[Any, Any]:
    """Means over stretches of the time."""
    if not len(shares):
        return np.zeros(1), np.zeros(1)
    pieces = np.array_split(shares, min(points, len(shares)))
    ends = np.cumsum([0, *map(len, pieces)])
    means = [piece.mean() for piece in pieces]
    return ends / whole, np.array([means[0], *means])
