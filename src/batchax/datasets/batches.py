"""Batches of results, one after another, as whoever iterates over them asks for them.

A thread reads ahead, the device computes ahead, and each holds a few batches. Nothing is computed
in a thread that the caller does not know of: so JAX is set as it is where batches are asked for.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from batchax.datasets.parts import Rows, Unit
from batchax.datasets.pipeline import LOOK, Stop, put, trying
from batchax.datasets.program import program_of
from batchax.datasets.row_function import RowFunction
from batchax.datasets.streams import arrays_of, taken
from batchax.datasets.units import begin_batch

_Read = tuple[Unit, Sequence[Any]]
_JOIN = 5.0  # seconds that a thread may take to end, if what it reads from lets it wait


class Batches(Iterator[Any]):
    """What `batchax.map_batches` returns: an iterator of batches of results, in order.

    It holds a thread, which ends with the last batch, an exception, `close`, a ``with`` statement,
    or when nobody has the iterator any more.

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
        self._thread = threading.Thread(
            target=_read_ahead,
            args=(read, self._ready, self._stop),
            name="batchax-read",
            daemon=True,
        )
        weakref.finalize(self, self._stop.asked.set)
        self._thread.start()

    def __next__(self) -> Any:
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

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends it: nothing more is read or computed.

        Example:
          >>> batches = bx.map_batches(jnp.sum, np.ones((5, 3)), batch_size=2)
          >>> batches.close()
          >>> list(batches)
          []
        """
        self._stop.asked.set()
        self._begun.clear()
        self._end = StopIteration()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def _begin_some(self) -> None:
        """Begins as many batches as may be ahead; waits for the first, if none is begun."""
        while self._end is None and len(self._begun) <= self._ahead:
            try:
                item = self._ready.get(timeout=0 if self._begun else LOOK)
            except queue.Empty:
                if self._begun:
                    return
                if self._stop.now:  # somebody else closed it
                    self._end = StopIteration()
                continue
            if isinstance(item, BaseException):
                self._end = item
                return
            assert self._function is not None
            program = program_of(self._function, self._batch_size)
            unit, data = item
            self._begun.append((unit, begin_batch(program, unit, data)))


def _read_ahead(read: Iterator[_Read], ready: queue.Queue[Any], stop: Stop) -> None:
    """Reads, in a thread that does not hold the iterator which it reads for."""
    end: BaseException = StopIteration()
    try:
        for item in read:
            put(ready, item, stop)
            del item  # nobody else is to hold it
            if stop.now:
                break
    except BaseException as error:
        end = error
    finally:
        close = getattr(read, "close", None)
        if close is not None:
            close()
        put(ready, end, stop)


def of_sources(
    function: RowFunction, batch_size: int, start: int, last: str, retries: int
) -> Iterator[_Read]:
    """Batches of rows that can be read in any order."""
    rows, stop = function.inputs.rows, Stop()
    for number, first in enumerate(range(start, rows, batch_size)):
        unit = Unit(number, first, min(first + batch_size, rows))
        if unit.rows < batch_size and last == "drop":
            return
        parts: list[np.ndarray | Rows] = []
        for m in function.inputs.mapped:
            one = lambda m=m: m.source.read(m.axis, unit.start, unit.stop)
            parts.append(trying(one, retries, stop))
        yield unit, parts


def of_streams(function: RowFunction, batch_size: int, start: int, last: str) -> Iterator[_Read]:
    """Batches of rows that come one after another."""
    streams, leaves = function.inputs.streams, [m.source for m in function.inputs.mapped]
    try:
        for number, first in enumerate(range(start, 2**62, batch_size)):
            parts = taken(streams, batch_size, first)
            count = len(next(iter(parts.values()))[0])
            if count == 0 or (count < batch_size and last == "drop"):
                return
            yield Unit(number, first, first + count), arrays_of(leaves, parts)
            del parts
            if count < batch_size:
                return
    finally:
        for stream in streams:
            stream.close()
