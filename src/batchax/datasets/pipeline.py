"""Units read, computed, and written at the same time; units and batches of streams."""

from __future__ import annotations

import functools
import queue
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from batchax.datasets.disk import not_overtaken
from batchax.datasets.plan import ENDLESS, Data, Plan, Record, Unit, checksum
from batchax.datasets.row_function import Program, RowFunction, program_of
from batchax.datasets.sources import taken
from batchax.datasets.units import Computed, Policy, begin_batch, begin_unit
from batchax.errors import JobError, StorageError, UnsupportedError
from batchax.jaxprs.types import Tree
from batchax.rows.converters import dense

T = TypeVar("T")
C = TypeVar("C")  # what is computed of a unit

AHEAD = 2  # units that are read before they are computed
WRITERS = 4  # what one disk takes at a time: synced writes overlap
LOOK = 0.2  # seconds after which those who wait look whether to stop
_JOIN = 1.0  # seconds that who reads may take to end, once work is to end
_PAUSE = 0.1  # seconds before what failed is tried again, and twice as long after that


@dataclass
class Stop:
    error: BaseException | None = None  # what went wrong first
    requested: threading.Event = field(default_factory=threading.Event)

    @property
    def now(self) -> bool:
        return self.error is not None or self.requested.is_set()

    def because(self, error: BaseException) -> None:
        self.error = self.error or error


def run_units(
    units: Iterable[Unit],
    read: Callable[[Unit], T],
    begin: Callable[[Unit, T], Callable[[], C]],
    write: Callable[[C], Record],
    record: Callable[[Sequence[Record]], None],
    stop: Stop,
    lasting: bool = True,
) -> None:
    """Runs units until none is left, one fails, or `stop` is set, and finishes begun ones.

    `begin` starts a computation in this thread, and returns a function that waits for it. `lasting`
    writes wait for a disk, and so run in threads.
    """
    ready: queue.Queue[Any] = queue.Queue(AHEAD)
    written: queue.Queue[Record | None] = queue.Queue()
    # Bounds the results that wait for a writer, and so memory.
    room = threading.Semaphore(WRITERS + 1)

    def keep(computed: C) -> None:
        if lasting:
            room.acquire()
            writers.submit(write_one, computed)
        else:
            record([write(computed)])

    def write_one(computed: C) -> None:
        try:
            written.put(write(computed))
        except BaseException as error:
            stop.because(error)
        finally:
            room.release()

    def keep_journal() -> None:
        while True:
            # All records that are ready share one sync.
            records = drained(written)
            try:
                if real := [r for r in records if r is not None]:
                    record(real)
            except BaseException as error:
                stop.because(error)
            if None in records:
                return

    reader = _reading_thread(((unit, read(unit)) for unit in units), ready, stop)
    journal = threading.Thread(target=keep_journal, name="batchax-journal", daemon=True)
    journal.start()
    with ThreadPoolExecutor(WRITERS, "batchax-write") as writers:
        waiting: Callable[[], C] | None = None

        def finish() -> None:
            nonlocal waiting
            finished, waiting = waiting, None
            if finished is not None:
                computed = finished()
                finished = None  # else a unit more would be held
                keep(computed)

        try:
            while not stop.now:
                try:
                    # With a computation in flight, do not wait for the reader: finish it instead.
                    item = ready.get(timeout=LOOK if waiting is None else 0)
                except queue.Empty:
                    finish()
                    continue
                if isinstance(item, StopIteration):
                    break
                if isinstance(item, BaseException):
                    raise item
                begun = begin(*item)
                item = None
                finish()
                waiting, begun = begun, None  # only the consumer holds the batch
        except BaseException as error:
            stop.because(error)
        try:
            finish()  # what was begun before something failed
        except BaseException as error:
            stop.because(error)
    written.put(None)
    journal.join()
    # A stream may block its reader for any time. The reader passes nothing on any more.
    reader.join(_JOIN if stop.now else None)
    if stop.error is not None:
        raise stop.error


def _reading_thread(
    read: Iterator[tuple[Unit, Any]], ready: queue.Queue[Any], stop: Stop
) -> threading.Thread:
    """Puts the items of an iterator into a queue, followed by the error that ends it."""

    # The thread has no reference to its caller, so that a caller that is collected ends it.
    def read_ahead() -> None:
        end: BaseException = StopIteration()
        try:
            for item in read:
                put(ready, item, stop)
                del item  # no other reference may hold it
                if stop.now:
                    break
        except BaseException as error:
            end = error
        finally:
            if (close := getattr(read, "close", None)) is not None:
                close()
            put(ready, end, stop)

    thread = threading.Thread(target=read_ahead, name="batchax-read", daemon=True)
    thread.start()
    return thread


def put(into: queue.Queue[Any], item: object, stop: Stop) -> None:
    while not stop.now:
        try:
            into.put(item, timeout=LOOK)
            return
        except queue.Full:
            continue


def drained(of: queue.Queue[T] | queue.SimpleQueue[T], timeout: float | None = None) -> list[T]:
    """Drains a queue after waiting for the first item; empty at the timeout."""
    items = []
    try:
        items.append(of.get(timeout=timeout))
        while True:
            items.append(of.get_nowait())
    except queue.Empty:
        return items


def trying(work: Callable[[], T], retries: int, stop: Stop) -> T:
    pause = _PAUSE
    for _ in range(retries):
        try:
            return work()
        except (StorageError, OSError):
            if stop.requested.wait(pause):
                break
            pause *= 2
    return work()


@contextmanager
def interruptible(stop: Stop, say: Callable[[str], None]) -> Iterator[None]:
    """Sets `stop` on Ctrl-C; a second one ends work at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        if stop.requested.is_set():
            raise KeyboardInterrupt
        stop.requested.set()
        say("Interrupted: what is being computed is finished and kept. Once more ends at once.")

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def read_mapped(
    function: RowFunction, unit: Unit, retries: int, stop: Stop, fresh: bool = True
) -> list[Any]:
    parts = []
    for m in function.inputs.mapped:
        read = functools.partial(m.source.read, m.axis, unit.start, unit.stop, fresh)
        parts.append(trying(read, retries, stop))
    return parts


@dataclass(frozen=True, eq=False)
class Work:
    function: RowFunction  # of a row
    plan: Plan  # which rows are a unit
    store: Any  # keeps results
    policy: Policy  # what becomes of rows that fail
    retries: int  # how many times reading and writing are tried again
    stop: Stop = field(default_factory=Stop)  # may say that nothing is to be tried again
    check: Callable[[], None] = lambda: None  # raises an error if nothing may be written
    keeps_sums: bool = False  # whether the journal gets checksums of the rows that are read
    taken: StreamUnits | None = None  # the units, if they are of streams
    _compiling: threading.Lock = field(default_factory=threading.Lock)
    _sums: dict[int, list[int]] = field(default_factory=dict)  # of units that are computed

    @property
    def program(self) -> Program:
        with self._compiling:
            program = program_of(self.function, self.plan.batch_size)
            program.compiled()
            return program

    def read(self, unit: Unit) -> list[Any]:
        if self.taken is not None:
            parts = self.taken.read(unit)
        else:
            parts = read_mapped(self.function, unit, self.retries, self.stop, fresh=False)
        if self.keeps_sums:
            self._sums[unit.number] = list(map(checksum, parts))
        return parts

    def _passed(self, unit: Unit) -> list[Any]:
        """Reads the rows of passed columns in the form of the store."""
        parts = []
        by_name = {leaf.name: leaf for leaf in self.store.leaves}
        for name, source in self.function.inputs.passed.items():
            read = functools.partial(source.arrow, unit.start, unit.stop)
            part = trying(read, self.retries, self.stop)
            parts.append(part if by_name[name].passed else dense(part, source.name))
        return parts

    def begin(self, unit: Unit, data: Sequence[Data]) -> Callable[[], Computed]:
        return begin_unit(self.program, unit, data, self.policy)

    def write(self, computed: Computed) -> Record:
        passed: list[Any] = self._passed(computed.unit)
        results: list[Any] = list(computed.results)
        read = self._sums.pop(computed.unit.number, [])
        read = [*read, *map(checksum, passed)] if read else ()
        if self.function.flat:
            # Each row of the inputs has as many rows in every result: lengths are the same.
            index = np.repeat(np.arange(computed.unit.rows), results[0].lengths)
            results, passed = [x.data for x in results], [x.take(index) for x in passed]
        results += passed
        write = functools.partial(self.store.write, computed.unit, results)
        trying(lambda: not_overtaken(self.check, write), self.retries, self.stop)
        return Record(
            computed.unit,
            list(map(checksum, results)) if self.store.lasts else [],
            seconds=computed.seconds,
            quarantined=computed.bad,
            reduced=computed.reduced,
            read=read,
        )


_MOST_HELD = 16  # units that wait: more are not lost with a process that is killed
_Taken = tuple[Unit, list[np.ndarray]]


class StreamUnits:
    """Yields unfinished units of streams, whose rows the user `named`; reading all sets `rows`."""

    def __init__(
        self,
        function: RowFunction,
        plan: Plan,
        done: Mapping[int, Record],
        named: bool,
    ) -> None:
        self.rows: int | None = None
        self._streams = function.inputs.streams
        self._leaves = [m.source for m in function.inputs.mapped]
        self._plan, self._done, self._named = plan, dict(done), named
        self._ready: dict[int, list[np.ndarray]] = {}  # of units that were handed out

    @property
    def total(self) -> int | None:
        totals = [stream.total for stream in self._streams]
        return totals[0] if totals[0] is not None and len(set(totals)) == 1 else None

    def __iter__(self) -> Iterator[Unit]:
        last, held = max(self._done, default=-1), list[_Taken]()
        for unit, rows in self._all():
            held.append((unit, rows))
            # Hold units back until all finished ones are compared, as a different stream must not
            # add results. Only a few, since more would be lost if the process is killed.
            while held and (unit.number > last or len(held) > _MOST_HELD):
                yield self._handed_out(*held.pop(0))
        for each in held:
            yield self._handed_out(*each)

    def _handed_out(self, unit: Unit, rows: list[np.ndarray]) -> Unit:
        self._ready[unit.number] = rows
        return unit

    def read(self, unit: Unit) -> list[np.ndarray]:
        return self._ready.pop(unit.number)

    def _all(self) -> Iterator[_Taken]:
        """Yields unfinished units with their rows, and compares the rows of the others."""
        size, first, last = self._plan.unit_rows, 0, max(self._done, default=-1)
        for number in range(max(1, ENDLESS // size)):
            record = self._done.get(number)
            # Rows with the user's name need no comparison: they are skipped.
            if record is not None and self._named:
                count = min(stream.skip(record.unit.rows) for stream in self._streams)
                rows = None
            else:
                rows = taken(self._leaves, size, first)
                count = len(rows[0])
            if record is not None:
                self._compare(record, count, rows)
            elif count and rows is not None:
                yield Unit(number, first, first + count), rows
            del rows
            first += count
            if count < size:
                break
        if first <= last * size:
            raise self._ends_early(first)
        if any(len(x) for x in taken(self._leaves, 1, first)):
            if first > ENDLESS - size:
                raise UnsupportedError(
                    f"{self._streams[0].name} has more than {first:,} rows, whose numbers do not "
                    "fit into an int32. Map them in several calls."
                )
            raise self._goes_on(first)
        self.rows = first

    def _compare(self, record: Record, count: int, rows: list[np.ndarray] | None) -> None:
        unit = record.unit
        if count < unit.rows:
            raise self._ends_early(unit.start + count)
        if count > unit.rows:
            raise self._goes_on(unit.stop)
        if rows is not None and list(map(checksum, rows)) != list(record.read):
            raise self._other(f"gives other rows from {unit.start:,} to {unit.stop:,} than before")

    def _ends_early(self, rows: int) -> JobError:
        return self._other(f"ends after {rows:,} rows, and more of them are done")

    def _goes_on(self, rows: int) -> JobError:
        return self._other(f"goes on after {rows:,} rows, where it ended before")

    def _other(self, what: str) -> JobError:
        return JobError(
            f"{self._streams[0].name} {what}. Results of both are never mixed. Pass the stream "
            "that the job started with, from its first row on; or pass another out=, or "
            "overwrite=True to remove those results and start over."
        )


_Read = tuple[Unit, Sequence[Any]]
_JOIN_READER = 5.0  # seconds that a thread may take to end, if what it reads from lets it wait


class Batches(Iterator[Any]):
    """What `batchax.map_batches` returns: an iterator of batches of results, in order.

    It holds a thread, which ends with the last batch, an exception, `close`, a ``with`` statement,
    or when the iterator is deleted.

    Attributes:
      rows: how many rows were handed out, and passed over before them: as `start` of another
        call this goes on after them.

    Example:
      >>> with bx.map_batches(jnp.sum, np.ones((5, 3)), batch_size=2) as batches:
      ...     print(next(batches), batches.rows)
      [3. 3.] 2
    """

    def __init__(
        self,
        function: RowFunction | None,
        read: Iterator[_Read],
        batch_size: int,
        start: int,
        ahead: int,
    ) -> None:
        self.rows = start
        self._function, self._ahead, self._batch_size = function, ahead, batch_size
        self._stop = Stop()
        self._ready: queue.Queue[Any] = queue.Queue(max(1, ahead))
        self._begun: deque[tuple[Unit, Callable[[], list[Any]]]] = deque()
        self._end: BaseException | None = None
        weakref.finalize(self, self._stop.requested.set)
        self._thread = _reading_thread(read, self._ready, self._stop)

    def __next__(self) -> Tree:
        try:
            self._begin_some()
            if not self._begun:
                assert self._end is not None
                raise self._end
            unit, wait = self._begun.popleft()
            results = wait()
        except BaseException:
            self.close()
            raise
        self.rows += unit.rows
        assert self._function is not None
        return self._function.tree_of(results)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it: nothing more is read or computed.

        Example:
          >>> batches = bx.map_batches(jnp.sum, np.ones((5, 3)), batch_size=2)
          >>> batches.close()
          >>> list(batches)
          []
        """
        self._stop.requested.set()
        self._begun.clear()
        self._end = StopIteration()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_READER)

    def _begin_some(self) -> None:
        """Begins as many batches as may be ahead; waits for the first if none is begun."""
        while self._end is None and len(self._begun) <= self._ahead:
            try:
                item = self._ready.get(timeout=0 if self._begun else LOOK)
            except queue.Empty:
                if self._begun:
                    return
                if self._stop.now:  # another thread closed it
                    self._end = StopIteration()
                continue
            if isinstance(item, BaseException):
                self._end = item
                return
            assert self._function is not None
            program = program_of(self._function, self._batch_size)
            unit, data = item
            self._begun.append((unit, begin_batch(program, unit, data)))


def of_sources(
    function: RowFunction, batch_size: int, start: int, last: str, retries: int
) -> Iterator[_Read]:
    rows, stop = function.inputs.rows, Stop()
    for number, first in enumerate(range(start, rows, batch_size)):
        unit = Unit(number, first, min(first + batch_size, rows))
        if unit.rows < batch_size and last == "drop":
            return
        yield unit, read_mapped(function, unit, retries, stop)


def of_streams(function: RowFunction, batch_size: int, start: int, last: str) -> Iterator[_Read]:
    streams, leaves = function.inputs.streams, [m.source for m in function.inputs.mapped]
    try:
        for number, first in enumerate(range(start, 2**62, batch_size)):
            rows = taken(leaves, batch_size, first)
            count = len(rows[0])
            if count == 0 or (count < batch_size and last == "drop"):
                return
            yield Unit(number, first, first + count), rows
            del rows
            if count < batch_size:
                return
    finally:
        for stream in streams:
            stream.close()
