"""How many lanes run together, chosen by what the operations of a step cost.

Operations on few lanes are mostly overhead, and many lanes wait for many. The figures are
those of the device on which programs run by default. Results do not depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from batchax import _compat
from batchax.divergence.cost import work
from batchax.programs.shapes import bytes_of

_NARROWING = 4  # a window is so much narrower than the one before
_LONGEST = 600  # operations in the programs of all windows together, about
_MOST_WINDOWS = 4
MOST_STEPS_INSIDE = 8  # loops inside loops are entered often, and mostly for few steps

_SHARED = 0.75  # what all lanes cost of as many in windows

_LEAST = 0.1  # work that a program is taken to do that does none

# What it costs to move a lane: for each of its arrays, and for each byte of those.
_ARRAY = 25.0
_BYTE = 0.2


class _Worth(NamedTuple):
    """Work of one operation, in the unit of `cost.work`, that makes up for its overhead."""

    wide: float
    """in a window that is refilled"""
    narrow: float
    """in the narrowest window, which runs when few lanes are left"""
    memory: float
    """bytes that a window may take: what lies in a cache is worked on several times as fast"""


_WORTH = {"cpu": _Worth(20_000, 250, 4e5)}
_OTHER_DEVICES = _Worth(5_000_000, 500_000, 1e9)


def most_windows(length: int, nesting: int) -> int:
    """How many windows a loop may have besides that of all lanes: each is compiled by itself.

    Args:
      length: operations in the program of a step.
      nesting: in how many such loops this one is.
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
      width: of the first after all lanes; None to choose.
    """
    worth = _WORTH.get(jax.default_backend(), _OTHER_DEVICES)
    wide, narrow = _lanes(worth.wide, grain), _lanes(worth.narrow, grain)
    # The last window decides how long few lanes are waited for.
    wide = min(wide, 2 * narrow * _NARROWING ** (windows - 1)) if windows else wide
    wide = max(narrow, min(wide, _lanes(worth.memory, held + 1) // 2))
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

    What is overhead in one operation is that of so many lanes in the other; and several cores
    may share what all lanes do.
    """
    if len(widths) == 1:
        return 0
    narrow = _lanes(_WORTH.get(jax.default_backend(), _OTHER_DEVICES).narrow, grain)
    size, width = widths[:2]
    share = _SHARED * (1 + narrow / size) / (1 + narrow / width)
    return max(min(size - 1, round(share * size)), width)


def steps_to_move(body: _compat.ClosedJaxpr, differs: Sequence[bool]) -> float:
    """How many steps of a lane, among many, cost as much as to take it in and out of a window.

    `differs` says which operands of the body each lane has its own of.
    """
    own = [a for a, d in zip(body.in_avals, differs, strict=True) if d]
    step = work(body.jaxpr, differs) + _BYTE / 2 * bytes_of(body.out_avals)
    return (_ARRAY * len(own) + _BYTE * bytes_of(own)) / max(step, _LEAST)


def _lanes(worth: float, grain: float) -> int:
    """The power of two of lanes of which an operation is worth so much."""
    lanes, grain = 1, max(grain, _LEAST)
    while lanes * grain < worth:
        lanes *= 2
    return lanes
