"""Where the batch axis is, of arrays that have an axis of steps and of their entries; both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from batchax.kernel.axis import Position


def entry_axis(position: Position, steps_axis: int) -> Position:
    """Where an entry of an array has the batch axis, which is at `position` of the array."""
    return position if position is None or position <= steps_axis else position - 1


def whole_axis(position: Position, steps_axis: int | None) -> Position:
    """Where an array of entries has the batch axis, which is at `position` of an entry.

    If they are added up (`steps_axis` is None), the sum has it where an entry does.
    """
    if position is None or steps_axis is None:
        return position
    return position + (steps_axis <= position)


def steps_axes(positions: Sequence[Position], axes: Sequence[int | None]) -> tuple[Any, ...]:
    """Where arrays with a batch axis have the axis of the steps, if they have one."""
    return tuple(
        s if s is None else s + (a is not None and a <= s)
        for a, s in zip(positions, axes, strict=True)
    )
