"""How many lanes run together, chosen by what the operations of a step cost.

In a narrow window operations are mostly overhead; in a wide one many lanes that are done wait
for others. The figures are those of the device on which programs run by default. Results do not
depend on them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from batchax import _compat
from batchax.programs.cost import STEPS, Cost, cost_of_program
from batchax.programs.shapes import bytes_of
from batchax.programs.weights import TOGETHER

_NARROWING = 4  # the second window is this many times narrower than the first
_FEW = 8  # the share of all lanes that a window holds at most: in a wide one few leave for long
_LONGEST = 700  # operations in the programs of all windows together, about: each is compiled
_MOST_WINDOWS = 2
# A loop inside a loop has windows only if moving a lane costs no more than so many of its steps:
# it is entered often, and mostly for few steps.
MOST_STEPS_INSIDE = 8

_SHARED = 0.75  # the cost of a step of all lanes, as a share of that of as many lanes in windows

_LEAST = 0.1  # the time taken for a program that does nothing: it is divided by


class _Worth(NamedTuple):
    """What is worth running as one operation: in nanoseconds of lanes alone, and in bytes."""

    wide: float
    """work that an operation should do in a window that is refilled, to make up for its overhead"""
    narrow: float
    """the same in the narrowest window, which runs when few lanes are left"""
    memory: float
    """bytes that a window may take: what lies in a cache is worked on several times as fast"""


_WORTH = {"cpu": _Worth(20_000, 250, 4e5)}
_OTHER_DEVICES = _Worth(5_000_000, 500_000, 1e9)


def length(jaxpr: Any) -> int:
    """How many operations a program has, to be compiled: each counts once, in loops too."""
    inner = (p for eqn in jaxpr.eqns for p in jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(length(getattr(p, "jaxpr", p)) for p in inner)


def most_windows(length: int, nesting: int) -> int:
    """How many windows a loop may have besides that of all lanes.

    Each window is one more copy of the program of a step to compile.

    Args:
      length: operations in the program of a step.
      nesting: inside how many such loops this one is.
    """
    if nesting:
        return int(nesting == 1 and 4 * length <= _LONGEST)
    return min(_MOST_WINDOWS, max(1, _LONGEST // max(1, length)))


def choose_widths(
    size: int, grain: float, held: int, windows: int, width: int | None
) -> tuple[int, ...]:
    """The widths of the windows of a loop, from that of all lanes down.

    Args:
      size: number of lanes.
      grain: what an operation of a step costs a lane, on average.
      held: bytes of what a lane carries.
      windows: how many there may be besides that of all lanes.
      width: the width of the first of those; None to choose.
    """
    worth = _WORTH.get(jax.default_backend(), _OTHER_DEVICES)
    # Equations are fused into fewer operations, so half as many lanes make up for the overhead.
    wide, narrow = _lanes(worth.wide, grain), max(1, _lanes(worth.narrow, grain) // 2)
    # A window alone must not be too wide for the slowest lanes, with which it runs until the end.
    wide = min(wide, 8 * narrow) if windows == 1 else wide
    wide = min(wide, max(narrow, _lanes(worth.memory, held + 1) // 2), size // _FEW)
    if width is not None:
        wide, narrow = width, min(width, narrow)
    widths = []
    while wide >= narrow and len(widths) < windows:
        if wide < size:
            widths.append(wide)
        wide //= _NARROWING
    return (size, *widths)


def most_left(widths: Sequence[int], grain: float) -> int:
    """How many lanes may be left when they leave the run of all lanes for the first window.

    The overhead of an operation is as much as the work of `narrow` lanes. So a step of all lanes
    costs ``_SHARED * (size + narrow)``, however few are active (several cores may share it), and a
    lane in a full window costs ``(width + narrow) / width``. Lanes leave when that is cheaper.
    """
    if len(widths) == 1:
        return 0
    narrow = _lanes(_WORTH.get(jax.default_backend(), _OTHER_DEVICES).narrow, grain)
    size, width = widths[:2]
    share = _SHARED * (1 + narrow / size) / (1 + narrow / width)
    return max(min(size - 1, round(share * size)), width)


def steps_to_move(body: _compat.ClosedJaxpr, differs: Sequence[bool]) -> float:
    """How many steps of a lane, run among many, cost as much as moving it in and out of a window.

    `differs` says which operands of the body each lane has its own of.
    """
    step = cost_of_program(body.jaxpr, differs=differs, steps=STEPS)
    step += Cost(bytes=2 * bytes_of(body.out_avals))  # read, and written
    moving = time_to_move(itertools.compress(body.in_avals, differs))
    return moving / max(TOGETHER.time(step), _LEAST)


def time_to_move(arrays: Iterable[Any]) -> float:
    """What it costs to move arrays of a lane to the lanes it runs with, and back: nanoseconds."""
    each_way = (Cost(places=3, bytes=2 * bytes_of([a])) for a in arrays)  # read there, written here
    return TOGETHER.time(2 * sum(each_way, Cost()))


def _lanes(worth: float, grain: float) -> int:
    """The smallest power of two of lanes that do so much work in one operation."""
    lanes, grain = 1, max(grain, _LEAST)
    while lanes * grain < worth:
        lanes *= 2
    return lanes
