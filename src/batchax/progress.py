"""Shows progress: a bar in a terminal or notebook, plain lines, or calls of a function."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_EVERY = 10.0  # seconds between plain lines
_REDRAWN = 0.1  # seconds between two looks of a bar, which takes milliseconds to draw

How = bool | Callable[[int, Any], Any]


class Progress:
    """Shows what is done, rate, and time left; nothing if `how` is False.

    Args:
      how: True, False, or a function that is called with how many are done and how many there are.
      name: of what is being done.
      total: how many there are; None if unknown.
      reused: how many of them were done before, which say nothing of the rate.
      unit: what is counted.
      attended: whether nothing is written except to a terminal or notebook, and the caller may
        end without `close`, so that the output stays as other code left it.
    """

    def __init__(
        self,
        how: How,
        name: str,
        total: int | None,
        reused: int = 0,
        unit: str = "rows",
        attended: bool = False,
    ) -> None:
        self._how, self._name, self._reused = how, name, reused
        self._total = total
        self._unit, self._done, self._bad = unit, reused, 0
        self._begun = self._said = time.monotonic()
        self._lock = threading.Lock()
        self._shown = how is True and (not attended or _watched())
        self._bar = _Bar(name, total, reused, attended) if self._shown and _draws() else None

    def advance(self, count: int, bad: int = 0) -> None:
        """So many more are done, of which some have no result."""
        with self._lock:
            self._done += count
            self._bad += bad
            if callable(self._how):
                self._how(self._done, self._total)
            elif self._bar is not None:
                self._bar.update(self._done, self._state)
            elif self._shown and time.monotonic() - self._said > _EVERY:
                self._said = time.monotonic()
                self.say(self._line())

    def say(self, text: str) -> None:
        """A line for people, if any are wanted."""
        if self._bar is not None:
            self._bar.print(text)
        elif self._shown and sys.stderr is not None:  # as in a process without a terminal
            with _nobody_reads():
                print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def close(self, text: str | None = None) -> None:
        """The end, with a last line or, if lines were written, with how far it came."""
        if text is None and self._bar is None and self._said > self._begun:
            text = self._line()
        if self._bar is not None:
            self._bar.close(self._done, self._state())
            self._bar = None
        if text is not None:
            self.say(text)

    def _state(self) -> str:
        seconds = time.monotonic() - self._begun
        rate = (self._done - self._reused) / seconds if seconds > 0 else 0.0
        left = (self._total - self._done) / rate if rate and self._total else float("inf")
        parts = [f"{rate:,.{0 if rate >= 10 else 2}f} {self._unit}/s"]
        if left != float("inf"):
            parts.append(f"{duration(left)} left")
        if self._reused:
            parts.append(f"{self._reused:,} reused")
        if self._bad:
            parts.append(f"{self._bad:,} quarantined")
        return ", ".join(parts)

    def _line(self) -> str:
        if self._total is None:
            return f"{self._done:,} {self._unit}, {self._state()}"
        share = self._done / self._total if self._total else 1.0
        return f"{self._done:,} of {self._total:,} {self._unit} ({share:.0%}), {self._state()}"


class _Bar:
    """One of the bars that are shown together.

    Next to others it is shown once it has been there for a while: a loop inside another one may be
    over many times in a second.
    """

    def __init__(self, name: str, total: int | None, done: int, attended: bool) -> None:
        self._what, self._attended = (name, total), attended
        self._bars: Any = None
        self._drawn = time.monotonic()
        with _lock:
            if _shown is None:
                self._draw(done, "")

    def update(self, done: int, state: Callable[[], str]) -> None:
        if time.monotonic() - self._drawn > _REDRAWN:
            with _lock:
                self._draw(done, state())
            self._drawn = time.monotonic()

    def print(self, text: str) -> None:
        with _lock, _nobody_reads():
            bars = _bars_shown(self._attended) if self._bars is None else self._bars
            bars.console.print(text, highlight=False, markup=False)

    def close(self, done: int, state: str) -> None:
        with _lock:
            if self._bars is None:
                return
            self._draw(done, state)
            if len(self._bars.tasks) > 1:  # what it was a part of goes on
                self._bars.remove_task(self._task)
            else:
                _stop()

    def _draw(self, done: int, state: str) -> None:
        with _nobody_reads():
            if self._bars is None:
                bars, (name, total) = _bars_shown(self._attended), self._what
                self._task = bars.add_task(name, total=total, state="")
                self._bars = bars
            self._bars.update(self._task, completed=done, state=state, refresh=True)


def _nobody_reads() -> contextlib.AbstractContextManager[None]:
    """Lets work go on where what is written to is closed, or a terminal that is gone."""
    return contextlib.suppress(OSError, ValueError)


_lock = threading.RLock()
_shown: Any = None  # the bars of rich: a terminal has one place for all of them


def _bars_shown(attended: bool) -> Any:
    global _shown
    if _shown is None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bars

        # A bar that may stay open must not hold on to the terminal: no thread that draws,
        # no streams in place of the user, and the cursor stays.
        bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            console=Console(stderr=True),
            auto_refresh=not attended,
            redirect_stdout=not attended,
            redirect_stderr=not attended,
        )
        bars.start()
        if attended:
            bars.console.show_cursor(True)
        _shown = bars
    return _shown


@atexit.register
def _stop() -> None:
    """Leaves the bars as they are, with a new line after them."""
    global _shown
    with _lock, _nobody_reads():
        bars, _shown = _shown, None
        if bars is not None:
            bars.stop()


def _watched() -> bool:
    """Whether standard error is a terminal or a notebook."""
    if _in_notebook():
        return True
    with contextlib.suppress(AttributeError, ValueError):  # there is none, or it is closed
        return sys.stderr.isatty()
    return False


def _in_notebook() -> bool:
    shell = getattr(builtins, "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def _draws() -> bool:
    """Whether bars are drawn: the output is watched, and the libraries are installed."""
    needed = ["rich", "ipywidgets"] if _in_notebook() else ["rich"]
    return _watched() and all(map(importlib.util.find_spec, needed))


def duration(seconds: float) -> str:
    """A time for people: "3 h 20 min", "41 s"."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours / 24:.1f} days"
