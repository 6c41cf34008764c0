"""What it takes to run a program for some lanes: to begin its operations, and their work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from batchax.divergence.widths import launch_time
from batchax.programs.cost import Cost, cost_of_program
from batchax.programs.dear_branches import NARROWEST
from batchax.programs.shapes import bytes_of
from batchax.programs.weights import TOGETHER

_KEPT = 0.01  # nanoseconds for a byte: lanes come again soon, to what is in a cache
_MOVED = 0.03
_ROW = 2.0  # for an entry, whatever its size
# A block of a dear branch works so many times as long as it takes to begin, or has the most lanes;
# all lanes fill so many blocks at most.
_ENOUGH, _WIDEST = 2.0, 256
_BLOCKS = 8
STEPS_INSIDE = 4  # of a loop whose steps nobody knows: few, or it would have been cut


class Price(NamedTuple):
    """The price of a program, in nanoseconds: roughly."""

    begin: float
    """however many lanes there are"""
    lane: float
    """for each lane"""

    def of(self, lanes: float) -> float:
        """For so many lanes."""
        return self.begin + lanes * self.lane


def price_of(program: Any, differs: Sequence[bool]) -> Price:
    """The price of a program; lanes have some operands of their own."""
    cost = cost_of_program(program.jaxpr, differs=tuple(differs), steps=STEPS_INSIDE)
    return price_of_cost(cost + Cost(launches=1))


def price_of_cost(cost: Cost) -> Price:
    """The price of what costs so much for each lane."""
    return Price(launch_time(cost.launches), TOGETHER.time(cost))


def price_of_keeping(avals: Sequence[Any]) -> Price:
    """The price of keeping what lanes hold that are elsewhere, where others compute."""
    return Price(0.0, _KEPT * bytes_of(avals))


def price_of_copying(avals: Sequence[Any]) -> Price:
    """The price of keeping what is updated in place elsewhere: two are read, one is written."""
    return Price(0.0, TOGETHER.time(Cost(bytes=3 * bytes_of(avals))))


def price_of_moving(read: Sequence[Any], written: Sequence[Any]) -> Price:
    """The price of moving what some lanes read and write to where they run, and back."""
    rows = len(read) + 2 * len(written)
    moved = bytes_of(read) + bytes_of(written)
    return Price(launch_time(rows), _ROW * rows + _MOVED * moved)


def width_of_block(work: Price, moves: Price, lanes: int) -> int:
    """How many lanes make a block of a dear branch, so that to begin it is little beside them."""
    width, lane = NARROWEST, work.lane + moves.lane
    while width < _WIDEST and width * lane < _ENOUGH * (work.begin + moves.begin):
        width *= 2
    return min(max(width, lanes // _BLOCKS), max(1, lanes // 2))


def dearest_block(work: Price, moves: Price) -> Price:
    """The price of a block of some of the lanes, if no lane costs more than this."""
    begin, lane = work.begin + moves.begin, work.lane + moves.lane
    return Price(begin + max(NARROWEST * lane, 2 * _ENOUGH * begin), lane / _BLOCKS)


def total(prices: Sequence[Price]) -> Price:
    """The price of programs one after another."""
    return Price(sum(p.begin for p in prices), sum(p.lane for p in prices))


def dearest_of(prices: Sequence[Price]) -> Price:
    """The price of the dearest of several programs, or a little more."""
    return Price(max(p.begin for p in prices), max(p.lane for p in prices))
