"""`Compact`: lanes that are done with a loop leave it, and branches not taken are not run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchax.engine.arguments import is_position
from batchax.engine.axis import Axis
from batchax.engine.divergence import Branches, Loop, Placed
from batchax.errors import ArgumentTypeError, AxisError


@dataclass(frozen=True)
class Compact:
    """How lanes that part ways are run, for ``vmap(..., divergence=Compact(...))``.

    Attributes:
      width: how many lanes a loop holds at a time, and how many of those that take the same
        branch run together. None: chosen by the cost of the program.
      threshold: the share of the lanes in a loop that must be done before others take their
        places, between 0 and 1. Small: lanes seldom wait, and often move.

    Raises:
      ArgumentTypeError: (a TypeError) `width` is not an int, or `threshold` not a number.
      AxisError: (a ValueError) `width` is less than one, or `threshold` not in 0..1.
    """

    width: int | None = None
    threshold: float = 0.25

    def __post_init__(self) -> None:
        if self.width is not None and not is_position(self.width):
            raise ArgumentTypeError(
                f"width must be a positive int or None, got {self.width!r} of type "
                f"{type(self.width).__name__}."
            )
        if self.width is not None and self.width < 1:
            raise AxisError(f"width is {self.width}, but a loop must hold at least one lane.")
        if isinstance(self.threshold, bool) or not isinstance(self.threshold, (int, float)):
            raise ArgumentTypeError(
                f"threshold must be a number between 0 and 1, got {self.threshold!r} of type "
                f"{type(self.threshold).__name__}."
            )
        if not 0 <= self.threshold <= 1:
            raise AxisError(
                f"threshold is {self.threshold!r}, but it is a share of lanes: give a number "
                "between 0 and 1."
            )

    def run_loop(self, axis: Axis, loop: Loop) -> list[Any] | None:
        return None

    def run_branches(self, axis: Axis, branches: Branches) -> Placed | None:
        return None


def find_divergence(option: Any) -> Compact | None:
    """What the option `divergence` of ``vmap`` asks for; None if lanes are to be masked.

    Raises:
      ArgumentTypeError: it is none of what it may be.
    """
    if isinstance(option, Compact):
        return option
    if option == "predicate":
        return None
    if option == "compact":
        return Compact()
    raise ArgumentTypeError(
        f'divergence must be "predicate", "compact" or a batchax.Compact(...), got {option!r}.'
    )
