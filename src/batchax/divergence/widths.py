"""How many lanes run together, chosen by what a step costs.

A step of few lanes is mostly overhead, one of many waits for many. The figures are those of
the device on which programs run by default. Results do not depend on them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

_NARROWING = 8  # each window is so much narrower than the one before
_MOST_NESTED = 2  # loops inside so many loops are masked: each window is a program of its own


class _Worth(NamedTuple):
    """Work, in the unit of `cost.work`, from which on overhead matters little."""

    wide: float
    """of one step of a window that is refilled"""
    narrow: float
    """of one step of the narrowest window"""


_WORTH = {"cpu": _Worth(60_000, 1_000)}
_OTHER_DEVICES = _Worth(30_000_000, 3_000_000)


def choose_widths(size: int, work: float, width: int | None, nesting: int) -> tuple[int, ...]:
    """The widths of the windows of a loop, from that of all lanes down.

    Args:
      size: number of lanes.
      work: what a step costs a lane.
      width: of the first window after all lanes; None to choose.
      nesting: in how many such loops this one is.
    """
    if nesting >= _MOST_NESTED:
        return (size,)
    worth = _WORTH.get(jax.default_backend(), _OTHER_DEVICES)
    narrowest = _lanes(worth.narrow, work)
    widths = [size]
    w = _lanes(worth.wide, work) if width is None else width
    while w >= size:
        w //= _NARROWING
    while w >= 1 and (w >= narrowest or (width is not None and len(widths) == 1)):
        widths.append(w)
        w //= _NARROWING
    return tuple(widths[: 2 if nesting else None])


def _lanes(worth: float, work: float) -> int:
    """The power of two of lanes whose step is worth so much."""
    lanes = 1
    while lanes * work < worth:
        lanes *= 2
    return lanes
