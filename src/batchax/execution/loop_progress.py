"""Whom a loop tells how far it is, and what that shows: what the host has of the option `progress`.

A compiled program calls with numbers: how many steps are done, and how many there are. It keeps no
state, for it may run again, and in several threads at a time; so nobody knows which of its runs it
is that calls. A function of the user's is passed the numbers, whichever run they are of. A bar is
of the loop, not of a run: it shows how far the run is that is furthest.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from batchax.frontend.options import check_progress
from batchax.jaxprs.spoken import brief, name_of
from batchax.progress import How, Progress


@dataclass(frozen=True)
class LoopProgress:
    """Whom a loop tells how far it is. Equal to one that tells the same.

    Attributes:
      how: True, or a function of the user's, which is known by identity.
      name: what the loop does.
      unit: what its steps are, in the plural.
    """

    how: How = field(compare=False)
    name: str
    unit: str
    _identity: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # A method is another object each time that it is looked up.
        owner = getattr(self.how, "__self__", self.how)
        object.__setattr__(self, "_identity", (id(owner), getattr(self.how, "__name__", None)))

    def derivative(self, name: str) -> LoopProgress:
        """That of a loop which computes a derivative of this one."""
        return replace(self, name=f"{name} of {self.name.removeprefix('tangents of ')}")

    def tell(self, done: int, total: int, over: bool) -> None:
        """So many steps are done of a loop, which may be over before all of them are.

        Whatever goes wrong with telling it, the program goes on.
        """
        over = over or done == total
        shown = _shown(self, total, done, over)
        if shown.failed:
            return
        try:
            if not callable(self.how):
                shown.advance(done)
            elif done or over:  # of the start there is nothing to tell
                self.how(done, total)
        except Exception as error:
            shown.failed = True
            place = traceback.extract_tb(error.__traceback__)[-1]
            warnings.warn(
                f"progress={brief(self.how)} raised {brief(error)} at "
                f"{place.filename}:{place.lineno}. The "
                "loop goes on, and does not say any more how far it is.",
                RuntimeWarning,
                stacklevel=2,
            )
        if over:
            shown.close()


@dataclass(frozen=True)
class Told:
    """What a program calls, with the steps done and, if it is not known, how many there are.

    Anything may follow. What is known is not passed by the program: each number takes time.
    """

    progress: LoopProgress
    total: int | None
    over: bool

    @property
    def numbers(self) -> int:
        """How many numbers it is called with, before what may follow."""
        return 1 if self.total is not None else 2

    def __call__(self, done: Any, *more: Any) -> None:
        total = int(more[0]) if self.total is None else self.total
        self.progress.tell(int(done), total, self.over)


def find_progress(how: How, fun: Any, unit: str) -> LoopProgress | None:
    """What the option `progress` asks for, of a loop over steps of `fun`; None for nothing.

    Raises:
      ArgumentTypeError: it is neither a bool nor callable.
    """
    check_progress(how, unit)
    name = name_of(fun)
    return None if how is False else LoopProgress(how, name, unit)


class _Shown:
    """What is shown of a loop, from the first call on to one that says it is over."""

    def __init__(self, of: LoopProgress, total: int) -> None:
        self.failed, self._done = False, 0
        self._heard, self._longest = time.monotonic(), 0.0
        self._bar = None
        if not callable(of.how):
            self._bar = Progress(of.how, of.name, total, 0, of.unit, attended=True)

    def hear(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._heard)
        self._heard = now

    def advance(self, done: int) -> None:
        with _lock:
            more = done - self._done
            if self._bar is not None and more > 0:
                self._done = done
                self._bar.advance(more)

    def close(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.close()

    def seems_left(self) -> bool:
        """Whether the last call was so long ago that the program must have failed."""
        silence = time.monotonic() - self._heard
        return silence > 5.0 and silence > 10 * self._longest


_running: dict[tuple[LoopProgress, int], _Shown] = {}
_lock = threading.RLock()


def _shown(of: LoopProgress, total: int, done: int, over: bool) -> _Shown:
    """What is shown of a loop of so many steps, which is begun anew when none is done."""
    loop = of, total
    with _lock:
        if not done:  # what is there is of a run that failed, if not of another thread's
            _forget(loop)
        if loop not in _running:
            for other in [other for other, shown in _running.items() if shown.seems_left()]:
                _forget(other)
            _running[loop] = _Shown(*loop)
        shown = _running[loop]
        shown.hear()
        if over:
            del _running[loop]
    return shown


def _forget(loop: tuple[LoopProgress, int]) -> None:
    left = _running.pop(loop, None)
    if left is not None:
        left.close()
