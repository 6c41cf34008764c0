"""The steps of writing, by name, so that a test can end the process at any of them.

Whatever is written passes through these: that a process dies at one of them, and at which
occurrence, is what the tests choose.
"""

from __future__ import annotations

from collections.abc import Callable

BEFORE_WRITE = "before a write"
IN_WRITE = "in the middle of a write"
AFTER_WRITE = "after a write is durable"
IN_JOURNAL = "in the middle of a journal line"
BEFORE_RENAME = "before a file gets its name"
BEFORE_END = "before the completion mark"

STEPS = (BEFORE_WRITE, IN_WRITE, AFTER_WRITE, IN_JOURNAL, BEFORE_RENAME, BEFORE_END)


def _go_on(step: str) -> None:
    """Does nothing."""


_at_step: Callable[[str], None] = _go_on


def reached(step: str) -> None:
    """Called by whatever writes."""
    _at_step(step)


def watch(at_step: Callable[[str], None] = _go_on) -> None:
    """From now on `at_step` is called with the name of each step; without it, nothing is."""
    global _at_step
    _at_step = at_step
