"""What a branch costs that lanes may take apart."""

from __future__ import annotations

from typing import NamedTuple

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
      cannot: why it cannot run for some lanes only; empty if it can.
      may_be_serial: whether it may run for one lane after another, as a single kernel.
      is_unknown: whether it holds a loop of unknown length, or calls the host.
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
    cannot: str = ""
    may_be_serial: bool = False
    is_unknown: bool = False
    held: int = 0

    @property
    def apart(self) -> float:
        """To move what it reads and returns, and run it in a chunk that is full."""
        return self.work + self.moving + self.starting / self.chunk
