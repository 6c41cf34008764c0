"""`LaneSteps`: a count of the steps that lanes took in loops."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import jax

_lock = threading.Lock()


class LaneSteps:
    """Counts the steps of lanes in the loops of ``vmap(..., divergence=Compact(steps=...))``.

    A loop that holds `w` lanes runs `w` lane-steps in each iteration; those of lanes that are
    not done are of use. Steps are counted while programs run, compiled ones too, and are added
    up until `reset`. Reading waits for what has been dispatched. Of loops of loops in which each
    lane is at a place of its own, the steps of the innermost ones are counted.

    Example:
      >>> def count_down(n):
      ...     return jax.lax.while_loop(lambda n: n > 0, lambda n: n - 1, n)
      >>> steps = bx.LaneSteps()
      >>> _ = bx.vmap(count_down, divergence=bx.Compact(steps=steps))(jnp.array([1, 5, 2]))
      >>> steps.useful
      8
      >>> 0.5 < steps.utilization <= 1
      True
    """

    def __init__(self) -> None:
        self._run = self._useful = 0

    @property
    def run(self) -> int:
        """How many lane-steps were computed."""
        jax.effects_barrier()
        return self._run

    @property
    def useful(self) -> int:
        """How many lane-steps some lane needed."""
        jax.effects_barrier()
        return self._useful

    @property
    def utilization(self) -> float:
        """The share of the lane-steps that were of use; 1 if there were none."""
        return self.useful / self.run if self.run else 1.0

    def reset(self) -> None:
        """Starts from zero.

        Example:
          >>> steps = bx.LaneSteps()
          >>> steps.reset()
          >>> steps
          LaneSteps(run=0, useful=0, utilization=100%)
        """
        jax.effects_barrier()
        self._run = self._useful = 0

    def __repr__(self) -> str:
        return (
            f"LaneSteps(run={self.run}, useful={self.useful}, utilization={self.utilization:.0%})"
        )

    def add(self, widths: Sequence[int], tallies: Sequence[Any]) -> None:
        """Stages the adding up of what each window of a loop counts when the program runs.

        :meta private:
        """

        def count(tallies: Any) -> None:
            for width, (iterations, high, low) in zip(widths, tallies, strict=True):
                with _lock:  # programs run in several threads
                    self._run += width * int(iterations)
                    self._useful += (int(high) << 32) + int(low)

        jax.debug.callback(count, tallies)
