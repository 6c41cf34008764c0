"""How many lanes run together, chosen by what the operations of a step cost.

Operations on few lanes are mostly overhead, and many lanes wait for many. The figures are
those of the device on which programs run by default. Results do not depend on them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

_NARROWING = 8  # each window is so much narrower than the one before
_MOST_NESTED = 2  # loops inside so many loops are masked: each window is a program of its own


class _Worth(NamedTuple):
    """Work of one operation, in the unit of `cost.work`, that makes up for its overhead."""

    wide: float
    """in a window that is refilled"""
    narrow: float
    """in the narrowest window, which runs when few lanes are left"""


_WORTH = {"cpu": _Worth(20_000, 250)}
_OTHER_DEVICES = _Worth(5_000_000, 500_000)


def choose_widths(size: int, grain: float, width: int | None, nesting: int) -> tuple[int, ...]:
    """The widths of the windows of a loop, from that of all lanes down.

    Args:
      size: number of lanes.
      grain: what an operation of a step costs a lane, on average.
      width: of the first window after all lanes; None to choose.
      nesting: in how many such loops this one is.
    """
    if nesting >= _MOST_NESTED:
        return (size,)
    worth = _WORTH.get(jax.default_backend(), _OTHER_DEVICES)
    narrowest = _lanes(worth.narrow, grain)
    widths = [size]
    w = _lanes(worth.wide, grain) if width is None else width
    while w >= size:
        w //= _NARROWING
    while w >= 1 and (w >= narrowest or (width is not None and len(widths) == 1)):
        widths.append(w)
        w //= _NARROWING
    return tuple(widths[: 2 if nesting else None])


def _lanes(worth: float, grain: float) -> int:
    """The power of two of lanes of which an operation is worth so much."""
    lanes = 1
    while lanes * grain < worth:
        lanes *= 2
    return lanes
