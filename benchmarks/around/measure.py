"""Timing pairs in turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.around.workloads import Pair
from benchmarks.measure import Ratio, in_turns, ratio_of_medians


@dataclass(frozen=True)
class PairResult:
    """What was measured of a pair: the ratio, and the seconds of both."""

    pair: Pair
    ratio: Ratio
    seconds: tuple[float, float]


def measured(pair: Pair, quick: bool) -> Iterator[PairResult]:
    """One result."""
    both = pair.make(quick)
    for each in both:
        each()  # the first time fills caches
    times = in_turns(both, 3 if quick else pair.turns, pair.clock)
    ours, other = (float(np.median(x)) for x in times)
    yield PairResult(pair, ratio_of_medians(*times), (ours, other))
