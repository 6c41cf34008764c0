"""Units submitted to workers, a few at a time, until all are done.

Twice as many as there are workers are in flight: enough that none waits for the next, and few, so
that little is lost with whoever ends. A unit whose worker ended is run alone (`alone.py`); one that
takes far longer than others is begun a second time, and whichever is done first stands.
"""

from __future__ import annotations

import functools
import queue
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from batchax.datasets.engines.alone import run_alone
from batchax.datasets.engines.pools import Pool
from batchax.datasets.engines.worker import Done, run_unit
from batchax.datasets.parts import Unit
from batchax.datasets.pipeline import Stop

_LOOK = 0.2  # seconds after which it is looked who is slow, and whether somebody asked to stop
_SLOW = 10.0  # times the median, after which a unit is begun a second time
_KNOWN = 5  # units that say what the median is


@dataclass
class _Tried:
    """A unit that was submitted."""

    unit: Unit
    attempt: int
    begun: float
    generation: int
    twice: bool = False


class Submitting:
    """Submits units.

    Args:
      pool: to whom.
      path: of the file that says what is to be done.
      name: of what is done, for people.
      quarantine: whether rows that end their worker are left out.
      done: is told of each unit that is done, once.
      stop: may be told to stop by others.
    """

    def __init__(
        self,
        pool: Pool,
        path: str,
        name: str,
        quarantine: bool,
        done: Callable[[Done], None],
        stop: Stop,
    ) -> None:
        self._pool, self._path, self._name, self._stop = pool, path, name, stop
        self._quarantine, self._tell = quarantine, done
        self._running: dict[Any, _Tried] = {}
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: set[int] = set()
        self._seconds: deque[float] = deque(maxlen=101)

    def run(self, units: Iterable[Unit]) -> None:
        """Runs these units.

        Raises:
          Exception: the first that one of them raised. Units that were begun are waited for.
        """
        left = iter(units)
        waiting = next(left, None)
        with ThreadPoolExecutor(max(1, self._pool.workers), "batchax-alone") as self._alone:
            while (waiting and not self._stop.now) or self._units_running():
                room = 2 * self._pool.workers
                while waiting and not self._stop.now and len(self._running) < room:
                    self._submit(waiting, 0)
                    waiting = next(left, None)
                for future in self._some_that_ended():
                    self._take(future)
                if self._stop.now:
                    for future in list(self._running):
                        future.cancel()
                else:
                    self._begin_slow_ones_again()
        slow = bool(self._running)  # what was begun twice, and is done
        for future in self._running:
            future.cancel()
        self._pool.close(hurry=slow)
        if self._stop.error is not None:
            raise self._stop.error

    def _units_running(self) -> bool:
        return any(t.unit.number not in self._done for t in self._running.values())

    def _submit(self, unit: Unit, attempt: int) -> None:
        name = f"{self._name}-unit-{unit.number}"
        generation = self._pool.generation
        try:
            future = self._pool.submit(name, run_unit, self._path, unit.number, attempt)
        except self._pool.deaths:  # of somebody else, just now
            self._pool.make_anew()
            future = self._pool.submit(name, run_unit, self._path, unit.number, attempt)
        self._follow(future, _Tried(unit, attempt, time.monotonic(), generation))

    def _follow(self, future: Any, tried: _Tried) -> None:
        self._running[future] = tried
        future.add_done_callback(self._ended.put)

    def _some_that_ended(self) -> list[Any]:
        """Futures that have ended; waits a moment for one."""
        futures = []
        try:
            futures.append(self._ended.get(timeout=_LOOK))
            while True:
                futures.append(self._ended.get_nowait())
        except queue.Empty:
            return futures

    def _take(self, future: Any) -> None:
        """What came of a unit."""
        tried = self._running.pop(future, None)
        if tried is None:
            return
        try:
            done = future.result()
        except self._pool.deaths:
            self._after_death(tried)
        except CancelledError:
            if not self._stop.now and tried.unit.number not in self._done:
                self._submit(tried.unit, tried.attempt + 1)
        except BaseException as error:
            if tried.unit.number not in self._done:
                self._stop.because(error)
        else:
            if done.number not in self._done:
                self._done.add(done.number)
                self._seconds.append(time.monotonic() - tried.begun)
                self._tell(done)

    def _after_death(self, tried: _Tried) -> None:
        """Its worker ended: of this unit, or of another that was in it or in its pool."""
        if tried.generation == self._pool.generation:
            try:
                self._pool.make_anew()
            except Exception as error:
                self._stop.because(error)
        if self._stop.now or tried.unit.number in self._done:
            return
        attempt = tried.attempt + 1
        run = functools.partial(run_alone, self._path, tried.unit, attempt, self._quarantine)
        self._follow(
            self._alone.submit(run), _Tried(tried.unit, attempt, time.monotonic(), -1, True)
        )

    def _begin_slow_ones_again(self) -> None:
        if len(self._seconds) < _KNOWN:
            return
        most = max(1.0, _SLOW * statistics.median(self._seconds))
        now = time.monotonic()
        for tried in list(self._running.values()):
            if not tried.twice and now - tried.begun > most:
                tried.twice = True
                if tried.unit.number not in self._done:
                    self._submit(tried.unit, tried.attempt + 1)
