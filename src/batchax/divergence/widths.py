"""How many lanes run together, chosen by what the operations of a step cost.

Operations on few lanes are mostly overhead, and many lanes wait for many. The figures are
those of the device on which programs run by default. Results do not depend on them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from batchax.divergence.cost import bytes_of, work
from batchax.engine.axis import Axis
from batchax.engine.divergence import Loop

_NARROWING = 8  # a window is so much narrower than the one before
_LONGEST = 600  # operations in the programs of all windows together, about
_MOST_WINDOWS = 3
_STEPS = 4  # for how many steps a byte that moves is worth an operation


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
    return min(_MOST_WINDOWS, max(1, _LONGEST // length))


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


def worth_moving(axis: Axis, loop: Loop, nesting: int) -> bool:
    """Whether a lane that waits for others costs more than taking it in and out of a window."""
    given = zip(
        (*loop.test_consts, *loop.body_consts, *loop.carry),
        (*loop.test_at, *loop.body_at, *[0] * len(loop.carry)),
        strict=True,
    )
    held = sum(bytes_of([jax.typeof(x)]) for x, a in given if a is not None) / axis.size
    step = work(loop.test.jaxpr) + work(loop.body.jaxpr)
    # Loops inside loops are entered often, and mostly for few steps.
    return held < (_STEPS if nesting else 16 * _STEPS) * step


def _lanes(worth: float, grain: float) -> int:
    """The power of two of lanes of which an operation is worth so much."""
    lanes = 1
    while lanes * grain < worth:
        lanes *= 2
    return lanes
