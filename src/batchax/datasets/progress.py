"""How far a map is: a bar in a terminal, plain lines elsewhere, or a function of the user's."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_EVERY = 10.0  # seconds between plain lines


class Progress:
    """Shows rows done, rate, and time left; nothing if it is told to show nothing.

    Args:
      how: True, False, or a function that is called with the rows done and those there are.
      name: of what is being done.
      total: how many rows there are.
      reused: how many of them were done before, which say nothing of the rate.
    """

    def __init__(
        self, how: bool | Callable[[int, int], Any], name: str, total: int, reused: int
    ) -> None:
        self._how, self._name, self._total, self._reused = how, name, total, reused
        self._done, self._bad = reused, 0
        self._begun = self._said = time.monotonic()
        self._lock = threading.Lock()
        self._bar = _bar(name, total, reused) if how is True else None

    def advance(self, rows: int, bad: int = 0) -> None:
        """So many more rows are done, of which some have no result."""
        with self._lock:
            self._done += rows
            self._bad += bad
            if callable(self._how):
                self._how(self._done, self._total)
            elif self._bar is not None:
                self._bar.update(self._done, self._state())
            elif self._how and time.monotonic() - self._said > _EVERY:
                self._said = time.monotonic()
                self.say(self._line())

    def say(self, text: str) -> None:
        """A line for people, if any are wanted."""
        if self._how is True:
            if self._bar is not None:
                self._bar.print(text)
            elif sys.stderr is not None:  # as in a process without a terminal
                with contextlib.suppress(OSError):  # nobody reads it any more: work goes on
                    print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def close(self, text: str) -> None:
        """The last line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self.say(text)

    def _state(self) -> str:
        seconds = time.monotonic() - self._begun
        rate = (self._done - self._reused) / seconds if seconds > 0 else 0.0
        left = (self._total - self._done) / rate if rate else float("inf")
        parts = [f"{rate:,.0f} rows/s"]
        if left != float("inf"):
            parts.append(f"{duration(left)} left")
        if self._reused:
            parts.append(f"{self._reused:,} reused")
        if self._bad:
            parts.append(f"{self._bad:,} quarantined")
        return ", ".join(parts)

    def _line(self) -> str:
        share = self._done / self._total if self._total else 1.0
        return f"{self._done:,} of {self._total:,} rows ({share:.0%}), {self._state()}"


class _Bar:
    """A bar of rich."""

    def __init__(self, name: str, total: int, done: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        self._bars = Bars(
            *columns, TextColumn("{task.fields[state]}"), console=Console(stderr=True)
        )
        self._task = self._bars.add_task(name, total=total, completed=done, state="")
        self._bars.start()

    def update(self, done: int, state: str) -> None:
        self._bars.update(self._task, completed=done, state=state)

    def print(self, text: str) -> None:
        self._bars.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._bars.stop()


def _bar(name: str, total: int, done: int) -> _Bar | None:
    """A bar, where somebody sees it and rich is installed."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        return _Bar(name, total, done)
    except ImportError:
        return None


def duration(seconds: float) -> str:
    """A time for people: "3 h 20 min", "41 s"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.1f} days"
