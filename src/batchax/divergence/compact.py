"""What a user may ask of how lanes that diverge are run, and the count of their steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from batchax import _compat
from batchax.errors import ArgumentTypeError, OptionError
from batchax.frontend.options import check_count
from batchax.jaxprs.error_format import brief, show
from batchax.jaxprs.types import Values

_lock = threading.Lock()


class LaneSteps:
    """Counts the steps of lanes in loops, as the `steps` of a `Compact`.

    A loop that holds `w` lanes runs `w` lane-steps in each iteration. Those of lanes that are not
    done are useful. Steps are counted while programs run, compiled ones too, and added up until
    `reset`. Of nested loops whose lanes advance independently, the steps of the innermost loops are
    counted.

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
        """The number of computed lane-steps."""
        jax.effects_barrier()
        return self._run

    @property
    def useful(self) -> int:
        """The number of lane-steps that a lane needed."""
        jax.effects_barrier()
        return self._useful

    @property
    def utilization(self) -> float:
        """The share of the lane-steps that were useful; 1 if there were none."""
        return self.useful / self.run if self.run else 1.0

    def reset(self) -> None:
        """Resets both counts to zero.

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

        def count(tallies: Sequence[Values]) -> None:
            for width, (iterations, high, low) in zip(widths, tallies, strict=True):
                with _lock:  # programs run in several threads
                    self._run += width * int(iterations)
                    self._useful += (int(high) << 32) + int(low)

        jax.debug.callback(count, tallies)


@_compat.api_boundary
@dataclass(frozen=True)
class Compact:
    """Configures ``divergence=`` of `vmap`: how diverging lanes are compacted.

    Attributes:
      width: The number of lanes that a loop holds at a time once some are done, and of lanes that
        take a branch together. None (default): chosen by the cost model.
      threshold: The share of finished lanes in a loop, between 0 and 1, at which waiting lanes
        refill their slots. None (default): when the wasted steps cost as much as moving lanes.
      steps: A `LaneSteps`, which counts the lane-steps of loops, or None.

    Raises:
      ArgumentTypeError: (a TypeError) An attribute has the wrong type.
      OptionError: (a ValueError) `width` is less than one, or `threshold` is not between 0 and 1.

    Example:
      >>> def steps_to_one(n):
      ...     step = lambda n: jnp.where(n % 2, 3 * n + 1, n // 2)
      ...     one = lambda s: s[0] != 1
      ...     return jax.lax.while_loop(one, lambda s: (step(s[0]), s[1] + 1), (n, 0))[1]
      >>> print(bx.vmap(steps_to_one, divergence=bx.Compact(width=2))(jnp.arange(1, 8)))
      [ 0  1  7  2  5  8 16]
    """

    width: int | None = None
    threshold: float | None = None
    steps: LaneSteps | None = None

    def __post_init__(self) -> None:
        check_count("width", self.width, 1, or_none=True)
        if self.width is not None:
            object.__setattr__(self, "width", int(self.width))
        if isinstance(self.threshold, bool) or not isinstance(
            self.threshold, (int, float, type(None))
        ):
            raise ArgumentTypeError(
                f"threshold must be a number between 0 and 1, or None, got {show(self.threshold)}."
            )
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise OptionError(
                f"threshold is {brief(self.threshold)}, but it is a share of lanes. Pass a number "
                "between 0 and 1."
            )
        if self.steps is not None and not isinstance(self.steps, LaneSteps):
            raise ArgumentTypeError(
                f"steps must be a batchax.LaneSteps or None, got {show(self.steps)}."
            )
