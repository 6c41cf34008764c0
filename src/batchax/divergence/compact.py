"""`Compact`: what a user may ask of how lanes that diverge are run."""

from __future__ import annotations

from dataclasses import dataclass

from batchax import _compat
from batchax.divergence.lane_steps import LaneSteps
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.in_axes import is_position
from batchax.jaxprs.spoken import brief, show


@_compat.api_boundary
@dataclass(frozen=True)
class Compact:
    """How lanes that part ways are run, for ``vmap(..., divergence=Compact(...))``.

    Attributes:
      width: how many lanes a loop holds at a time once some are done, and how many of those that
        take the same branch run together. None: chosen by the cost of the program.
      threshold: the share of the lanes in a loop that must be done before others take their
        places, between 0 and 1. Small: lanes seldom wait, and often move. None: when what was
        lost by waiting is worth the cost of moving.
      steps: a `LaneSteps`, to which the lane-steps of loops are added; None to count nothing.

    Raises:
      ArgumentTypeError: (a TypeError) an attribute has the wrong type.
      AxisError: (a ValueError) `width` is less than one, or `threshold` not in 0..1.

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
        if self.width is not None and not is_position(self.width):
            raise ArgumentTypeError(
                f"width must be a positive int or None, got {show(self.width)}."
            )
        if self.width is not None and self.width < 1:
            raise AxisError(f"width is {self.width}, but a loop must hold at least one lane.")
        if isinstance(self.threshold, bool) or not isinstance(
            self.threshold, (int, float, type(None))
        ):
            raise ArgumentTypeError(
                f"threshold must be a number between 0 and 1, or None, got {show(self.threshold)}."
            )
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise AxisError(
                f"threshold is {brief(self.threshold)}, but it is a share of lanes: give a number "
                "between 0 and 1."
            )
        if self.steps is not None and not isinstance(self.steps, LaneSteps):
            raise ArgumentTypeError(
                f"steps must be a batchax.LaneSteps or None, got {show(self.steps)}."
            )
