"""Units read, computed and written at the same time, by threads of one process.

One thread reads ahead, the caller's computes, some write what was computed, and one says in the
journal what is durable: many units at once if they come fast. Between them only a few units wait,
so memory does not grow with the dataset.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from batchax.datasets.parts import Record, Unit
from batchax.errors import StorageError

T = TypeVar("T")

AHEAD = 2  # units that are read before they are computed
WRITERS = 4  # what one disk takes at a time: synced writes overlap
LOOK = 0.2  # seconds after which those who wait look whether to stop
_JOIN = 1.0  # seconds that who reads may take to end, once work is to end
_PAUSE = 0.1  # seconds before what failed is tried again, and twice as long after that


@dataclass
class Stop:
    """Whether work is to end before all of it is done, and why.

    Attributes:
      error: what went wrong first.
      asked: whether somebody asked for it.
    """

    error: BaseException | None = None
    asked: threading.Event = field(default_factory=threading.Event)

    @property
    def now(self) -> bool:
        """Whether nothing new is to be begun."""
        return self.error is not None or self.asked.is_set()

    def because(self, error: BaseException) -> None:
        """Ends work; the first reason stands."""
        self.error = self.error or error


def run_units(
    units: Iterable[Unit],
    read: Callable[[Unit], T],
    begin: Callable[[Unit, T], Callable[[], Any]],
    write: Callable[[Any], Record],
    record: Callable[[Sequence[Record]], None],
    stop: Stop,
    lasting: bool = True,
) -> None:
    """Runs units until there are none left, something fails, or somebody asks to stop.

    What was begun is finished and recorded in any case.

    Args:
      units: which, in the order in which they are read.
      read: reads what a unit needs.
      begin: begins to compute it, and returns what waits until it is computed; by then the next
        one was begun. In the caller's thread.
      write: keeps it, and returns what the journal is to say of it.
      record: makes that durable.
      stop: may be told to stop by others.
      lasting: whether to write is to wait for a disk, so that threads of their own do that.

    Raises:
      Exception: the first that any of the functions raised.
    """
    ready: queue.Queue[tuple[Unit, T] | None] = queue.Queue(AHEAD)
    written: queue.Queue[Record | None] = queue.Queue()
    room = threading.Semaphore(WRITERS + 1)

    def read_ahead() -> None:
        try:
            for unit in units:
                if stop.now:
                    break
                put(ready, (unit, read(unit)), stop)
        except BaseException as error:
            stop.because(error)
        put(ready, None, stop)

    def keep(computed: Any) -> None:
        if lasting:
            room.acquire()
            writers.submit(write_one, computed)
        else:
            record([write(computed)])

    def write_one(computed: Any) -> None:
        try:
            written.put(write(computed))
        except BaseException as error:
            stop.because(error)
        finally:
            room.release()

    def keep_journal() -> None:
        while True:
            records = _all_there(written)
            try:
                if real := [r for r in records if r is not None]:
                    record(real)
            except BaseException as error:
                stop.because(error)
            if None in records:
                return

    reader = threading.Thread(target=read_ahead, name="batchax-read", daemon=True)
    journal = threading.Thread(target=keep_journal, name="batchax-journal", daemon=True)
    reader.start()
    journal.start()
    with ThreadPoolExecutor(WRITERS, "batchax-write") as writers:
        waiting: Callable[[], Any] | None = None

        def finish() -> None:
            """The unit that was begun before, if there is one."""
            nonlocal waiting
            finished, waiting = waiting, None
            if finished is not None:
                computed = finished()
                finished = None  # else a unit more would be held
                keep(computed)

        try:
            while not stop.now:
                try:
                    item = ready.get(timeout=LOOK if waiting is None else 0)
                except queue.Empty:
                    finish()
                    continue
                if item is None:
                    break
                begun = begin(*item)
                item = None
                finish()
                waiting, begun = begun, None  # nobody else is to hold what was read
        except BaseException as error:
            stop.because(error)
        try:
            finish()  # what was begun before something failed
        except BaseException as error:
            stop.because(error)
    written.put(None)
    journal.join()
    # A stream may make it wait for a row for any time. It hands nothing out any more.
    reader.join(_JOIN if stop.now else None)
    if stop.error is not None:
        raise stop.error


def put(into: queue.Queue[Any], item: Any, stop: Stop) -> None:
    """Waits for room, as long as anybody takes things out."""
    while not stop.now:
        try:
            into.put(item, timeout=LOOK)
            return
        except queue.Full:
            continue


def _all_there(of: queue.Queue[T]) -> list[T]:
    """What is in a queue; waits for the first."""
    items = [of.get()]
    while True:
        try:
            items.append(of.get_nowait())
        except queue.Empty:
            return items


def trying(work: Callable[[], T], retries: int, stop: Stop) -> T:
    """What `work` returns, tried again a few times if storage fails."""
    pause = _PAUSE
    for _ in range(retries):
        try:
            return work()
        except (StorageError, OSError):
            if stop.asked.wait(pause):
                break
            pause *= 2
    return work()


@contextmanager
def interruptible(stop: Stop, say: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C asks to stop; a second one ends work at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(*_: Any) -> None:
        if stop.asked.is_set():
            raise KeyboardInterrupt
        stop.asked.set()
        say("Interrupted: what is being computed is finished and kept. Once more ends at once.")

    before = signal.signal(signal.SIGINT, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
