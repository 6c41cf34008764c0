"""What a branch costs that lanes may take apart, and what is chosen by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from batchax.kernel.divergence import Divergence

NOTHING = "computes nothing"


class BranchCost(NamedTuple):
    """What a branch costs, in nanoseconds for each lane.

    Attributes:
      work: to run it.
      copied: to run it where each lane has a copy of what all lanes share, as under ``jax.vmap``.
      alone: to run it for one lane, in a loop that is one function.
      beginning: to begin its operations, not divided among lanes.
      begun: the part of it that is not one loop with what selects the results. Whatever is in that
        loop a processor computes for the lanes that take the branch, and for no others.
      moving: to move what it reads and returns.
      starting: to begin its operations, however many lanes run at a time.
      chunk: how many lanes run at a time.
      lanes: how many there are.
      others: what the other branches take that is begun likewise.
      operations: how many it has, to be compiled.
      alike: how many lanes at least run each of them in the way that all do.
      held: bytes that its derivative would keep if all lanes ran at once, with what the branch
        reads of its own; 0 where no derivative is taken.
    """

    work: float
    copied: float
    alone: float
    beginning: float
    begun: float
    moving: float
    starting: float
    chunk: int
    lanes: int
    others: float
    operations: int
    alike: int
    held: int = 0

    @property
    def apart(self) -> float:
        """To move what it reads and returns, and run it in a chunk that is full."""
        return self.work + self.moving + self.starting / self.chunk


class Choice(NamedTuple):
    """How a branch runs that lanes may take apart, by what it costs.

    Attributes:
      apart: whether for the lanes that take it, whatever their number.
      decided: whether for those, or for all, as it is decided while the program runs.
      most: the share of the lanes from which on all run, where that is decided.
      back: that share for derivatives; None: all run, masked.
      few: of how many lanes that take it each runs by itself, where it is none of these; 0: none.
      inside: how lanes that part ways are run inside of a branch that is compiled twice.
      masked: why all lanes run it, where it is none of these.
    """

    apart: Callable[[BranchCost], bool]
    decided: Callable[[BranchCost], bool]
    most: float
    back: Callable[[BranchCost], float | None]
    few: Callable[[BranchCost], int]
    inside: Divergence
    masked: Callable[[BranchCost], str]
