"""What the host knows of loops that call it: which run of a loop a call belongs to.

A call says how many steps are done, and nothing else. All runs of a loop make calls at the same
numbers, so the run that goes on to a number is one that was at the number before; and those that
were are as good as each other. So no state goes through a program, which may run again, and in
several threads at a time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

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


@dataclass(frozen=True)
class Told:
    """What a program calls, with the steps done and, if it is not known, how many there are.

    Anything may follow. Where nobody says whether the loop `ended` it did when all steps are done.
    """

    progress: LoopProgress
    ended: bool | None
    total: int | None

    @property
    def numbers(self) -> int:
        """How many numbers it is called with, before what may follow."""
        return 1 if self.total is not None else 2

    def __call__(self, done: Any, *more: Any) -> None:
        done, total = int(done), int(more[0]) if self.total is None else self.total
        ended = done == total if self.ended is None else self.ended
        _run_that_is_at(self.progress, done, total, ended).tell(done, ended)


class _Run:
    """One run of a loop, which was `at` that many steps when last heard of."""

    def __init__(self, progress: LoopProgress, total: int) -> None:
        self.at, self.heard = 0, time.monotonic()
        self._told, self._how, self._failed = 0, progress.how, False
        self._longest = 0.0
        self._progress, self._total = progress, total

    @functools.cached_property
    def _shown(self) -> Progress:
        told = self._progress
        return Progress(told.how, told.name, self._total, 0, told.unit, attended=True)

    def hear(self, at: int) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self.heard)
        self.at, self.heard = at, now

    def tell(self, done: int, ended: bool) -> None:
        """Whatever goes wrong with telling it, the program goes on."""
        try:
            if not self._failed:
                more, self._told = done - self._told, done
                shown = self._shown  # from the first step on, of which there is nothing to tell
                if done or ended:
                    shown.advance(more)
        except Exception as error:
            self._failed = True
            place = traceback.extract_tb(error.__traceback__)[-1]
            warnings.warn(
                f"progress={self._how!r} raised {error!r} at {place.filename}:{place.lineno}. The "
                "loop goes on, and does not say any more how far it is.",
                RuntimeWarning,
                stacklevel=2,
            )
        if ended:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._shown.close()

    def seems_left(self) -> bool:
        """Whether it was heard of so long ago that its program must have failed."""
        silence = time.monotonic() - self.heard
        return silence > 5.0 and silence > 10 * self._longest


_runs: defaultdict[Hashable, list[_Run]] = defaultdict(list)
_lock = threading.Lock()


def _run_that_is_at(progress: LoopProgress, done: int, total: int, ended: bool) -> _Run:
    """The run that goes on to `done`."""
    with _lock:
        before = [run for run in _runs[progress, total] if run.at < done]
        if before:
            run = max(before, key=lambda run: (run.at, run.heard))
            run.hear(done)
        else:
            _close_what_was_left()
            run = _Run(progress, total)
            run.at = done
            _runs[progress, total].append(run)
        if ended:
            _runs[progress, total].remove(run)
    return run


def _close_what_was_left() -> None:
    """Should one go on after all, it is a new run then."""
    for key, runs in list(_runs.items()):
        for run in [run for run in runs if run.seems_left()]:
            runs.remove(run)
            run.close()
        if not runs:
            del _runs[key]
