"""How much lanes have wasted by waiting for those that are in a loop inside another.

Both ways count the same, in nanoseconds by a model. On a CPU sums are numbers that the loop
carries. A GPU is given an operation for each sum and one for each step of what is computed of it,
and each takes as long as a step of the lanes themselves: there each lane counts the steps it has
waited, which is one operation with what else is done for each, and the only sum is that of the
predicate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from batchax.execution.gathered_lanes import count_active

_NOBODY = np.float32(1e-6)  # lanes: what is divided by must not be zero


def keeps_by_lane() -> bool:
    """Whether the device is one where each lane counts for itself."""
    return jax.default_backend() != "cpu"


class Summed(NamedTuple):
    """What is wasted as a number.

    Attributes:
      everyone: how many lanes are active, in this loop or around it.
      limit: how much may be wasted.
    """

    everyone: Any
    limit: Any

    def begun(self, runs: Any, one_function: bool) -> Any:
        """Nothing is wasted, and these lanes are in the loop."""
        return self._count(runs, one_function), np.float32(0)

    def goes_on(self, _: Any, kept: Any) -> Any:
        """Whether the loop has another step."""
        count, wasted = kept
        return lax.bitwise_and(lax.gt(count, np.float32(0)), lax.lt(wasted, self.limit))

    def left(self, kept: Any) -> Any:
        """How long the next step may take: whoever waits waits for loops further inside, too."""
        count, wasted = kept
        others = lax.max(lax.sub(self.everyone, count), _NOBODY)
        return lax.div(lax.sub(self.limit, wasted), others)

    def after(self, kept: Any, runs: Any, taken: Any, one_function: bool) -> Any:
        """After a step that took so long; these are still in the loop."""
        count = self._count(runs, one_function)
        return count, lax.add(kept[1], lax.mul(taken, lax.sub(self.everyone, count)))

    def _count(self, runs: Any, one_function: bool) -> Any:
        return count_active(runs, np.float32, one_function=one_function)


class OfEachLane(NamedTuple):
    """What is wasted as the steps that each lane has waited: of a loop that holds no others.

    Attributes:
      active: which lanes are, in this loop or around it.
      limit: how much may be wasted.
    """

    active: Any
    limit: Any

    def begun(self, runs: Any, _: bool) -> Any:
        """Nobody has waited."""
        return lax.full(runs.shape, 0, np.float32)

    def goes_on(self, runs: Any, waited: Any) -> Any:
        """Whether the loop has another step."""
        both = lambda a, b: (lax.bitwise_or(a[0], b[0]), lax.add(a[1], b[1]))
        anyone, wasted = lax.reduce((runs, waited), (np.False_, np.float32(0)), both, (0,))
        return lax.bitwise_and(anyone, lax.lt(wasted, self.limit))

    def left(self, _: Any) -> None:
        """Of no use: no step holds loops."""

    def after(self, waited: Any, runs: Any, taken: Any, _: bool) -> Any:
        """After a step that took so long; these are still in the loop."""
        waits = lax.bitwise_and(self.active, lax.bitwise_not(runs))
        return lax.add(waited, lax.mul(taken, lax.convert_element_type(waits, np.float32)))
