"""Which rows fail by themselves, of some that fail together: found by parting them in halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def fail_alone(
    rows: Sequence[int],
    error: Exception,
    tried: Callable[[Sequence[int]], Exception | None],
    most: int,
) -> dict[int, Exception]:
    """Of rows that fail together those that fail by themselves, each with its error.

    Args:
      rows: the rows.
      error: what they fail with.
      tried: runs some of them; returns what they fail with, or None.
      most: how many to look for.
    """
    if len(rows) == 1:
        return {rows[0]: error}
    alone: dict[int, Exception] = {}
    half = len(rows) // 2
    for part in (rows[:half], rows[half:]):
        again = tried(part)
        if again is not None:
            alone |= fail_alone(part, again, tried, most - len(alone))
        if len(alone) >= most:
            break
    return alone
