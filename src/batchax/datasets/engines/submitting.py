"""Units submitted to workers, a few at a time, until all are done.

Twice as many as there are workers are in flight: enough that none waits for the next, and few, so
that little is lost with whoever ends. A unit whose worker ended is run again in a process of its
own (`apart.py`), and if that ends, too, while nothing else runs: so it is not blamed for what
another one did, or for memory that both took. If that ends, the unit is given up. One that takes
far longer than others is begun a second time, and whichever is done first stands.
"""

from __future__ import annotations

import queue
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

from batchax.datasets.engines.apart import run_apart
from batchax.datasets.engines.attempts import UNGUARDED, Attempts
from batchax.datasets.engines.pools import Pool
from batchax.datasets.engines.worker import Done, run_unit
from batchax.datasets.parts import Unit
from batchax.datasets.pipeline import Stop
from batchax.errors import JobError, RowError

_LOOK = 0.2  # seconds after which it is looked who is slow, and whether somebody asked to stop
_SLOW = 10.0  # times the median, after which a unit is begun a second time
_LEAST = 1.0  # seconds: what takes less is not slow, whatever the median is
_KNOWN = 5  # units that say what the median is
_RECENT = 101  # units of which the median is taken
_IN_VAIN = 4  # times that all workers may end one after the other, and nothing is done
_PAUSE = 0.1  # seconds before workers that ended in vain are started again, and twice that later
_ENDING = (
    "the workers end, again and again, before they have begun a unit. What was done is kept. If "
    "the system ends them, memory may be short: take fewer workers. What they print may say more."
)

_IN_WORKERS, _APART, _ALONE, _GIVEN_UP = range(4)  # how carefully a unit is run
_ENDS = "ends the process that computes it, at last with nothing else beside it"


def _rows(unit: Unit) -> str:
    return f"rows {unit.start} to {unit.stop - 1}"


@dataclass(eq=False)
class _Tried:
    """An attempt at a unit, that was submitted.

    Attributes:
      unit: the unit.
      attempt: which attempt at it this is.
      care: how carefully: how many processes ended with it.
      generation: of the pool that has it.
      submitted: when.
      seen: when it was first seen to run.
      twice: whether it was so slow that there is another attempt.
      over: whether that was faster.
    """

    unit: Unit
    attempt: int
    care: int
    generation: int
    submitted: float
    seen: float | None = None
    twice: bool = False
    over: bool = False


class Submitting:
    """Submits units.

    Args:
      pool: to whom.
      attempts: at the units of the call.
      name: of what is done, for people.
      quarantine: whether rows of units that end their workers are left out.
      done: is told of each unit that is done, once.
      stop: may be told to stop by others.
    """

    def __init__(
        self,
        pool: Pool,
        attempts: Attempts,
        name: str,
        quarantine: bool,
        done: Callable[[Done], None],
        stop: Stop,
    ) -> None:
        self._pool, self._attempts, self._name, self._stop = pool, attempts, name, stop
        self._quarantine, self._tell = quarantine, done
        self._running: dict[Any, _Tried] = {}
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._again: deque[tuple[Unit, int]] = deque()  # and how carefully
        self._suspects: deque[tuple[Unit, int]] = deque()  # to be run alone, and how carefully
        self._tries: Counter[int] = Counter()  # of units that were tried more than once
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._examining = False  # these
        self._in_vain = 0  # workers that ended since somebody had something of them

    def run(self, units: Iterable[Unit]) -> None:
        """Runs these units.

        Raises:
          Exception: the first that one of them raised. Units that were begun are waited for.
        """
        self._left = iter(units)
        try:
            while True:
                if not self._stop.now:
                    self._submit_some()
                if all(t.over for t in self._running.values()):
                    break  # at nothing, or at what is done already
                for future in self._some_that_ended():
                    self._take(future)
                if self._stop.now:
                    self._cancel(self._is_waiting)
                else:
                    self._begin_slow_ones_again()
        finally:
            left = bool(self._running)
            self._cancel(lambda tried: True)
            self._attempts.end_all()
            self._pool.close(hurry=left)
        if self._stop.error is not None:
            raise self._stop.error

    def _submit_some(self) -> None:
        """Submits units as long as there is room for them.

        Suspects are run one at a time when there is nothing else, or when they have become many.
        """
        if any(t.care >= _ALONE for t in self._running.values()):
            return
        room = 2 * self._pool.workers
        self._examining = bool(self._suspects) and (self._examining or len(self._suspects) >= room)
        while not self._examining and len(self._running) < room:
            if not self._again:
                unit = next(self._left, None)
                if unit is None:
                    break
                self._again.append((unit, _IN_WORKERS))
            self._submit(*self._again.popleft())
        if self._suspects and all(t.over for t in self._running.values()):
            self._examining = True
            self._submit(*self._suspects.popleft())

    def _submit(self, unit: Unit, care: int) -> None:
        attempt = self._tries[unit.number]
        fun = run_apart if care in (_APART, _ALONE) else run_unit
        args = [self._attempts, unit.number, attempt]
        if care == _GIVEN_UP:
            args.append(f"its unit, {_rows(unit)}, {_ENDS}")
        name = f"{self._name}-unit-{unit.number}"
        while True:
            try:
                future = self._pool.submit(name, fun, *args)
                break
            except (*self._pool.deaths, OSError) as error:  # of somebody else; or none can start
                if self._ends_in_vain(2 * self._pool.workers):
                    raise JobError(f"{_ENDING} They end with {error!r}.") from error
                self._make_anew()
        now = time.monotonic()
        self._running[future] = _Tried(unit, attempt, care, self._pool.generation, now)
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
        """What came of an attempt."""
        tried = self._running.pop(future)
        try:
            done = future.result()
        except self._pool.deaths as error:
            self._after_death(tried, error)
        except CancelledError:
            if not self._stop.now and not tried.over:
                self._pool.wait_until_there()
                self._try_again(tried, tried.care)
        except BaseException as error:
            if not tried.over:
                self._stop.because(error)
        else:
            if done is not None and not tried.over:
                self._is_done(tried, done)

    def _is_done(self, tried: _Tried, done: Done) -> None:
        self._in_vain = 0
        self._seconds.append(done.seconds)
        if self._tries.pop(done.number, 0):
            self._attempts.end(done.number)
            for other in self._running.values():
                other.over = other.over or other.unit == tried.unit
            self._again = deque(x for x in self._again if x[0] != tried.unit)
            self._suspects = deque(x for x in self._suspects if x[0] != tried.unit)
            self._cancel(lambda other: other.over and self._is_waiting(other))
        self._tell(done)

    def _after_death(self, tried: _Tried, how: BaseException) -> None:
        """Its worker ended: of this unit, or of another that was in it or in its pool."""
        in_vain = self._is_waiting(tried)
        if not in_vain:
            self._in_vain = 0
        if tried.generation == self._pool.generation:
            try:
                self._make_anew()
            except Exception as error:
                self._stop.because(error)
        if self._stop.now or tried.over:
            return
        care = tried.care if in_vain else tried.care + 1
        if in_vain and self._ends_in_vain(1):
            self._stop.because(JobError(_ENDING))
        elif care > _GIVEN_UP or (care == _GIVEN_UP and not self._quarantine):
            self._stop.because(
                RowError(
                    f"{_rows(tried.unit)} of {self._name}: the unit {_ENDS} ({how}). What was "
                    "done is kept. Its rows may need more memory than there is: pass a smaller "
                    'batch_size and another out=. Or pass on_error="quarantine" to go on without '
                    "them."
                )
            )
        else:
            self._try_again(tried, care)

    def _ends_in_vain(self, attempts: int) -> bool:
        """Notes attempts that ended before they had begun; whether these are too many."""
        self._in_vain += attempts
        return self._in_vain > _IN_VAIN * 2 * self._pool.workers

    def _make_anew(self) -> None:
        """Starts workers again: after a while, if the last ones had ended while they started."""
        if self._attempts.is_repeated:
            raise JobError(UNGUARDED)
        times = self._in_vain // (2 * self._pool.workers)
        self._stop.asked.wait(_PAUSE * 2**times if times else 0)
        self._pool.make_anew()

    def _try_again(self, tried: _Tried, care: int) -> None:
        self._tries[tried.unit.number] += 1
        (self._again if care <= _APART else self._suspects).append((tried.unit, care))

    def _cancel(self, which: Callable[[_Tried], bool]) -> None:
        self._pool.cancel([future for future, tried in self._running.items() if which(tried)])

    def _is_waiting(self, tried: _Tried) -> bool:
        return not self._attempts.is_running(tried.unit.number, tried.attempt)

    def _begin_slow_ones_again(self) -> None:
        if len(self._seconds) < _KNOWN:
            return
        most = max(_LEAST, _SLOW * statistics.median(self._seconds))
        now = time.monotonic()
        for tried in self._running.values():
            if tried.twice or tried.care or now - tried.submitted < most:
                continue
            if tried.seen is None and not self._is_waiting(tried):
                tried.seen = now  # it may have begun just now: clocks of workers may be wrong
            if tried.seen is not None and now - tried.seen > most:
                tried.twice = True
                self._try_again(tried, _IN_WORKERS)
