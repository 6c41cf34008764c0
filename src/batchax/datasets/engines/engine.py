"""Who runs the units of a job: this process, a pool, Dask, or a shard of an array of jobs."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import re
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

from batchax.datasets.addresses import Address, masked, needed
from batchax.datasets.engines.worker import (
    REPEATED,
    UNGUARDED,
    Attempts,
    Done,
    EndedError,
    reject_repeated,
    run_unit,
    saved,
)
from batchax.datasets.journal import JobFiles
from batchax.datasets.pipeline import LOOK, Stop, Work, drained, run_units
from batchax.datasets.plan import Plan, Record, Unit
from batchax.errors import ArgumentTypeError, JobError, OptionError, RowError, UnsupportedError
from batchax.jaxprs.error_format import brief, show

_KNOWN_SECONDS = 5.0  # seconds for which it is known how many workers a cluster has


DaskClient: TypeAlias = Any  # a `distributed.Client`: Dask has no types


class Pool:
    # the errors of units whose worker ended
    deaths: tuple[type[BaseException], ...] = (BrokenExecutor, EndedError)
    # the errors of units that the pool canceled by itself, or whose result was lost on the way
    lost: tuple[type[BaseException], ...] = (CancelledError,)
    generation = 0  # how many times its workers were started again

    def __init__(self, executor: Executor, own: bool = False) -> None:
        self._executor, self._own = executor, own

    @property
    def workers(self) -> int:
        return getattr(self._executor, "_max_workers", None) or os.cpu_count() or 1

    def submit(self, name: str, fun: Callable[..., Any], *args: Any) -> Future[Done]:
        """Submits ``fun(*args)`` and returns a future; dashboards show `name`."""
        if not self._own:
            return self._executor.submit(fun, *args)
        # The executor may start processes here, which inherit the signal mask of this thread:
        # Ctrl-C must not reach them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return self._executor.submit(fun, *args)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def cancel(self, futures: Sequence[Future[Done]]) -> None:
        """Cancels units that have not begun; others may continue."""
        for future in futures:
            future.cancel()

    def restart(self) -> None:
        """Starts a new pool, since a process that ends breaks its pool."""
        if not isinstance(self._executor, ProcessPoolExecutor):
            raise JobError(
                f"the workers of {brief(self._executor)} ended. Finished units are kept. To "
                "resume, make the same call with another executor."
            )
        workers = self.workers
        self.generation += 1
        if self._own:
            self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor, self._own = _spawned(workers), True

    def wait_until_ready(self) -> None:
        """Waits until the pool accepts units, after it canceled some on its own."""

    def close(self, hurry: bool = False) -> None:
        """Closes a pool that was made here; in a `hurry`, kills its running units."""
        if not self._own:
            return
        # Before Python 3.14, there is no public way to end busy processes.
        processes = list((getattr(self._executor, "_processes", None) or {}).values())
        self._executor.shutdown(wait=not hurry, cancel_futures=True)
        if hurry:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


class DaskPool(Pool):
    def __init__(self, client: DaskClient, own: bool = False) -> None:
        distributed = needed("distributed", "executor, to run units on a cluster,")
        self._client, self._own = client, own
        self.deaths = (distributed.scheduler.KilledWorker, EndedError)
        self.lost = (CancelledError, distributed.comm.CommClosedError)
        self._names = 0
        self._counted, self._workers = -_KNOWN_SECONDS, 1

    @property
    def workers(self) -> int:
        if time.monotonic() - self._counted > _KNOWN_SECONDS:
            self._counted = time.monotonic()
            try:
                self._workers = max(1, sum(self._client.nthreads().values()))
            except OSError:  # the connection is lost
                self.wait_until_ready()
        return self._workers

    def submit(self, name: str, fun: Callable[..., Any], *args: Any) -> Future[Done]:
        self._names += 1  # Dask gives one answer for one name
        key = f"{name}-{self._names}-{id(self):x}"
        if self._client.status != "running":
            self.wait_until_ready()
        return self._client.submit(fun, *args, key=key, pure=False)

    def cancel(self, futures: Sequence[Future[Done]]) -> None:
        if futures and self._client.status == "running":
            self._client.cancel(list(futures))

    def restart(self) -> None:
        """Does nothing, as Dask starts workers itself."""

    def wait_until_ready(self) -> None:
        while self._client.status == "connecting":
            time.sleep(0.1)
        if self._client.status != "running":
            raise JobError(
                "the scheduler of Dask has stopped. Finished units are kept. To resume, make the "
                "same call with another executor."
            )

    def close(self, hurry: bool = False) -> None:
        if self._own:
            self._client.close()


def find_pool(executor: Any) -> Callable[[], Pool]:
    if type(executor).__module__.split(".")[0] == "distributed":
        return functools.partial(DaskPool, executor)
    if isinstance(executor, str):
        kind, _, where = executor.partition(":")
        if kind == "processes" and re.fullmatch("0*[1-9][0-9]*", where):
            return lambda: Pool(_spawned(int(where)), own=True)
        if kind == "dask" and where:
            distributed = needed("distributed", f"executor={executor!r}")
            return lambda: DaskPool(_client_of(distributed, where), own=True)
    if not isinstance(executor, Executor):
        error = OptionError if isinstance(executor, str) else ArgumentTypeError
        raise error(
            "executor must be None, an executor of concurrent.futures, a client of Dask, or one of "
            f'"processes:4", "dask:tcp://host:8786", "shard:3/16"; got {masked(show(executor))}.'
        )
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise UnsupportedError(
            "executor forks its processes, and JAX does not survive that. Pass it "
            'mp_context=multiprocessing.get_context("spawn"), or pass executor="processes:4".'
        )
    return functools.partial(Pool, executor)


def _client_of(distributed: ModuleType, where: str) -> DaskClient:
    try:
        return distributed.Client(where, set_as_default=False)
    except (OSError, ValueError) as error:
        message = f'executor="dask:{where}": there is no scheduler of Dask ({error}).'
        raise JobError(
            f"{masked(message, where)} Start one, `dask scheduler`, and pass the address that it "
            "prints."
        ) from None


def _spawned(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    # A worker ends with its parent, also if that is killed.
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


_IN_VAIN = 4  # times that all workers may end one after the other, and nothing is done
_PAUSE = 0.1  # seconds before workers that ended in vain are started again, and twice that later
_ENDING = (
    "the workers end, again and again, before they begin a unit. Finished units are "
    "kept. If the system ends them, memory may be short: use fewer workers. Their "
    "output may have the cause."
)

_IN_WORKERS, _ALONE, _GIVEN_UP = range(3)  # how carefully a unit is run
_ENDS = "ends the process that computes it, at last while it runs alone"


def _rows(unit: Unit) -> str:
    return f"rows {unit.start} to {unit.stop - 1}"


@dataclass(eq=False)
class _Tried:
    unit: Unit  # the unit
    attempt: int  # which attempt at it this is
    care: int  # how carefully: how many processes ended with it
    generation: int  # of the pool that has it


class Submitting:
    """Submits units to a pool, and submits those whose worker ended again."""

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
        self._running: dict[Future[Done], _Tried] = {}
        self._ended: queue.SimpleQueue[Future[Done]] = queue.SimpleQueue()
        self._again: deque[tuple[Unit, int]] = deque()  # and how carefully
        self._suspects: deque[tuple[Unit, int]] = deque()  # to be run alone, and how carefully
        self._tries: Counter[int] = Counter()  # of units that were tried more than once
        self._examining = False  # these
        self._in_vain = 0  # workers that ended since one returned a result

    def run(self, units: Iterable[Unit]) -> None:
        self._left = iter(units)
        try:
            while True:
                if not self._stop.now:
                    self._submit_some()
                if not self._running:
                    break
                for future in drained(self._ended, LOOK):
                    self._take(future)
                if self._stop.now:
                    self._cancel(self._is_waiting)
        finally:
            left = bool(self._running)
            self._cancel(lambda tried: True)
            self._attempts.end_all()
            self._pool.close(hurry=left)
        if self._stop.error is not None:
            raise self._stop.error

    def _submit_some(self) -> None:
        """Submits units while there is space. Suspects run alone, last, or once there are many."""
        # Nothing runs besides a suspect, so that a death has one cause.
        if any(t.care >= _ALONE for t in self._running.values()):
            return
        # Two units for each worker keep it busy while results travel.
        room = 2 * self._pool.workers
        self._examining = bool(self._suspects) and (self._examining or len(self._suspects) >= room)
        while not self._examining and len(self._running) < room:
            if not self._again:
                unit = next(self._left, None)
                if unit is None:
                    break
                self._again.append((unit, _IN_WORKERS))
            self._submit(*self._again.popleft())
        if self._suspects and not self._running:
            self._examining = True
            self._submit(*self._suspects.popleft())

    def _submit(self, unit: Unit, care: int) -> None:
        attempt = self._tries[unit.number]
        args = [self._attempts, unit.number, attempt]
        if care == _GIVEN_UP:
            args.append(f"its unit, {_rows(unit)}, {_ENDS}")
        name = f"{self._name}-unit-{unit.number}"
        while True:
            try:
                future = self._pool.submit(name, run_unit, *args)
                break
            except (*self._pool.deaths, OSError) as error:  # of another unit; or none can start
                if self._ends_in_vain(2 * self._pool.workers):
                    raise JobError(f"{_ENDING} They end with {error!r}.") from error
                self._restart()
        self._running[future] = _Tried(unit, attempt, care, self._pool.generation)
        future.add_done_callback(self._ended.put)

    def _take(self, future: Future[Done]) -> None:
        tried = self._running.pop(future)
        try:
            done = future.result()
        except self._pool.deaths as error:
            self._after_death(tried, error)
        except self._pool.lost:
            if not self._stop.now:
                self._pool.wait_until_ready()
                self._try_again(tried, tried.care)
        except BaseException as error:
            self._stop.because(error)
        else:
            self._in_vain = 0
            self._tell(done)

    def _after_death(self, tried: _Tried, how: BaseException) -> None:
        """Handles the end of a worker, of this unit or of another in the same pool."""
        in_vain = self._is_waiting(tried)
        if not in_vain:
            self._in_vain = 0
        # Of the units of a pool that broke, the first restarts it.
        if tried.generation == self._pool.generation:
            try:
                self._restart()
            except Exception as error:
                self._stop.because(error)
        if self._stop.now:
            return
        # A unit that had not begun is not a suspect.
        care = tried.care if in_vain else tried.care + 1
        if in_vain and self._ends_in_vain(1):
            self._stop.because(JobError(_ENDING))
        elif care > _GIVEN_UP or (care == _GIVEN_UP and not self._quarantine):
            self._stop.because(
                RowError(
                    f"{_rows(tried.unit)} of {self._name}: the unit {_ENDS} ({how}). Finished "
                    "units are kept. Its rows may need more memory than is available: pass a "
                    'smaller batch_size and another out=. Or pass on_error="quarantine" to '
                    "continue without them."
                )
            )
        else:
            self._try_again(tried, care)

    def _ends_in_vain(self, attempts: int) -> bool:
        """Counts attempts that ended before they began; returns whether these are too many."""
        self._in_vain += attempts
        return self._in_vain > _IN_VAIN * 2 * self._pool.workers

    def _restart(self) -> None:
        """Restarts workers, after a pause if the last ones ended while they started."""
        if self._attempts.has(REPEATED):
            raise JobError(UNGUARDED)
        times = self._in_vain // (2 * self._pool.workers)
        self._stop.requested.wait(_PAUSE * 2**times if times else 0)
        self._pool.restart()

    def _try_again(self, tried: _Tried, care: int) -> None:
        self._tries[tried.unit.number] += 1
        (self._suspects if care else self._again).append((tried.unit, care))

    def _cancel(self, which: Callable[[_Tried], bool]) -> None:
        self._pool.cancel([future for future, tried in self._running.items() if which(tried)])

    def _is_waiting(self, tried: _Tried) -> bool:
        return not self._attempts.is_running(tried.unit.number, tried.attempt)


_SHARD = re.compile(r"shard:(\d+)/(\d+)")

Recording = Callable[[Sequence[Record]], None]
"""Writes records of units to the journal."""

Tell = Callable[[int, int], None]
"""Receives the number of rows that are done, and how many of them have no result."""


class Threads:
    """Runs units in threads of this process: one reads, one computes, some write."""

    # the name of this process's part of the job, if others have the other parts
    shard: str | None = None

    def units(self, plan: Plan) -> range:
        return range(len(plan))

    def run(self, work: Work, units: Iterable[Unit], record: Recording, tell: Tell) -> None:
        def written(records: Sequence[Record]) -> None:
            record(records)
            for done in records:
                tell(done.unit.rows, len(done.quarantined))

        run_units(units, work.read, work.begin, work.write, written, work.stop, work.store.lasts)


@dataclass(frozen=True)
class Shard(Threads):
    """Runs every `count`-th unit in threads of this process."""

    index: int  # the first of these
    count: int  # how many processes share the units

    @property
    def shard(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"shard-{self.index}-of-{self.count}"

    def units(self, plan: Plan) -> range:
        return range(self.index, len(plan), self.count)


@dataclass(frozen=True)
class Workers(Threads):
    make_pool: Callable[[], Pool]  # makes what they are submitted to
    out: Address  # the output

    def run(self, work: Work, units: Iterable[Unit], record: Recording, tell: Tell) -> None:
        attempts, quarantine = saved(work, self.out), work.policy.on_error == "quarantine"
        done = lambda unit: tell(unit.rows, unit.bad)
        name, pool = work.function.name, self.make_pool()
        Submitting(pool, attempts, name, quarantine, done, work.stop).run(units)


def find_engine(executor: object, out: Address | None) -> Threads:
    if executor is None:
        return Threads()
    if out is None:
        raise UnsupportedError(
            "executor does not support out=None: results of other processes do not reach the "
            'memory of this one. Pass a path, such as out="y.zarr".'
        )
    shard = _SHARD.fullmatch(executor) if isinstance(executor, str) else None
    if getattr(out, "scheme", "") == "memory" and (shard is None or shard[2] != "1"):
        raise UnsupportedError(
            f"executor does not support out={str(out)!r}, in the memory of this process, which no "
            "other process sees. Write to a disk or to object storage."
        )
    if shard is None:
        reject_repeated(JobFiles(out).folder)
        return Workers(find_pool(executor), out)
    index, count = map(int, shard.groups())
    if not count:
        raise OptionError(f"executor={brief(executor)}: there is one shard at least.")
    if index > count:
        raise OptionError(
            f"executor={brief(executor)}: of {count} shards, numbers go from 0 to {count - 1}, or "
            f"from 1 to {count}."
        )
    return Shard(index % count, count)  # whether they are counted from 0 or from 1
