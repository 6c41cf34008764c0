"""Units of rows that come one after another: taken in order, and compared where they are done.

A stream cannot be asked for the rows of a unit. So who goes on with a job takes its rows from the
first on. The journal has a checksum of the rows that each unit was computed of: those of units that
are done are compared with it, and nothing is computed before all of them were. Where the user has
given the stream a name, that stands for all of its rows: those that are done are passed over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from batchax.datasets.checksums import checksum
from batchax.datasets.parts import ENDLESS, Record, Unit
from batchax.datasets.plan import Plan
from batchax.datasets.row_function import RowFunction
from batchax.datasets.streams import arrays_of, taken
from batchax.datasets.units import Computed
from batchax.datasets.work import Work
from batchax.errors import JobError, UnsupportedError

_MOST_HELD = 16  # units that wait: more are not lost with a process that is killed
_Taken = tuple[Unit, list[np.ndarray]]


class StreamUnits:
    """The units of the streams of a call that are not done.

    Args:
      function: whose arguments they are.
      plan: of the job, with as many rows as there may be.
      done: the records of units that are done.
      named: whether the user has named the rows.
      out: the output, for messages.

    Attributes:
      rows: how many there are, once all were taken.
    """

    def __init__(
        self,
        function: RowFunction,
        plan: Plan,
        done: Mapping[int, Record],
        named: bool,
        out: Any,
    ) -> None:
        self.rows: int | None = None
        self._streams = function.inputs.streams
        self._leaves = [m.source for m in function.inputs.mapped]
        self._plan, self._done, self._named, self._out = plan, dict(done), named, out
        self._ready: dict[int, list[np.ndarray]] = {}
        self._sums: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    @property
    def total(self) -> int | None:
        """How many rows there are, if the streams say so."""
        totals = [stream.total for stream in self._streams]
        return totals[0] if totals[0] is not None and len(set(totals)) == 1 else None

    def __iter__(self) -> Iterator[Unit]:
        """Those that are not done. `read` has the rows of each that was handed out."""
        last, held = max(self._done, default=-1), list[_Taken]()
        for unit, rows in self._all():
            held.append((unit, rows))
            # All that are done were looked at; or somebody says of many that they are not.
            while held and (unit.number > last or len(held) > _MOST_HELD):
                yield self._handed_out(*held.pop(0))
        for each in held:
            yield self._handed_out(*each)

    def read(self, unit: Unit) -> list[np.ndarray]:
        """The rows of a unit, once."""
        with self._lock:
            return self._ready.pop(unit.number)

    def sums(self, unit: Unit) -> list[int]:
        """Of the rows of that unit the checksums, once."""
        with self._lock:
            return self._sums.pop(unit.number)

    def _handed_out(self, unit: Unit, rows: list[np.ndarray]) -> Unit:
        sums = list(map(checksum, rows))
        with self._lock:
            self._ready[unit.number], self._sums[unit.number] = rows, sums
        return unit

    def _all(self) -> Iterator[_Taken]:
        """The units that are not done, with their rows. Of the others it is seen that they are."""
        size, first, last = self._plan.unit_rows, 0, max(self._done, default=-1)
        for number in range(max(1, ENDLESS // size)):
            record = self._done.get(number)
            if record is not None and self._named:
                count = min(stream.skip(record.unit.rows) for stream in self._streams)
                rows = None
            else:
                parts = taken(self._streams, size, first)
                rows = arrays_of(self._leaves, parts)
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
        if any(len(x) for x in arrays_of(self._leaves, taken(self._streams, 1, first))):
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
            f"{self._streams[0].name} {what}. Results of both are never mixed. Give the stream "
            "that the job was begun with, from its first row on; or use another out=, or delete "
            f"{self._out} and {self._out}.job to compute it again."
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamWork(Work):
    """The work of units of streams.

    Attributes:
      taken: the units.
    """

    taken: StreamUnits

    def read(self, unit: Unit) -> list[Any]:
        """The rows of a unit, which were taken."""
        return list(self.taken.read(unit))

    def write(self, computed: Computed) -> Record:
        """Keeps results; the journal is to say of which rows."""
        return replace(super().write(computed), read=self.taken.sums(computed.unit))
