"""A dataset being computed: killed at any moment, and gone on with. `opening.py` opens it."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from batchax.datasets.checksums import checksum
from batchax.datasets.held import written_over
from batchax.datasets.job_files import JobFiles
from batchax.datasets.journal import Journal, read_attempts
from batchax.datasets.lock import LockedError
from batchax.datasets.parts import Bad, Record, alike
from batchax.datasets.place import AnyLock, OvertakenError, UnreachableError
from batchax.datasets.plan import Plan
from batchax.datasets.steps import BEFORE_END, reached
from batchax.errors import JobError, StorageError

if TYPE_CHECKING:
    from batchax.datasets.store import Store  # which needs libraries, and a job does not


class Job:
    """What is known of an output, beside it in a folder: what it is, and which units it has.

    Attributes:
      plan: which rows are committed at once: that of who began the job.
      store: where the results go.
      finished: what was said when all was done; None as long as it is not.
    """

    kept = "are done and kept; the same call goes on from there."

    def __init__(
        self,
        files: JobFiles,
        plan: Plan,
        store: Store,
        writer: str,
        locks: Sequence[AnyLock] = (),
        finished: dict[str, Any] | None = None,
    ):
        self.plan = plan
        self.store = store
        self.finished = finished
        self._counts_rows = plan.open  # as they come
        self._files = files
        self._locks = locks
        self._done: dict[int, Record] | None = None  # until it is asked for
        self._differ: dict[int, list[Record]] = {}
        self._journal = Journal(files.journal, writer)

    def begin(self, alone: bool) -> None:
        """Makes this the writer: what others left is mended, and what was kept is looked at.

        Args:
          alone: whether nobody else has a shard of it.
        """
        self._journal.begin()
        if alone:
            self._files.place.remove(self._files.preparing)
            self.store.clean()
        self.store.hold()
        # Several attempts at a unit may have left as many records of it.
        while lost := self.store.missing(r.unit for r in self.done.values()):
            self._journal.withdraw([self.done[k] for k in lost], "a file of it is missing")
            self.look_again()

    @property
    def done(self) -> dict[int, Record]:
        """The units that are done, by number."""
        if self._done is None:
            self._done = self._told()
        return self._done

    def _told(self) -> dict[int, Record]:
        """The units that all journals say are done."""
        done, self._differ = read_attempts(self._files.journal)
        for number, record in done.items():
            if record.unit.number != number or not self.plan.has(record.unit):
                raise JobError(
                    f"{self._files.journal} is not the journal of this job: it has a unit of rows "
                    f"{record.unit.start} to {record.unit.stop}, of which there is none. Put the "
                    f"right one back, or delete {self._files.here} and {self._files.folder} to "
                    "compute it again."
                )
        return done

    def record(self, records: Sequence[Record]) -> None:
        """Says that units are done, whose results are durable. So is this when it returns."""
        while True:
            self.check()
            try:
                records = self._journal.append_many(records)
                break
            except OvertakenError:
                continue  # by who has taken the lock, or by one who had it
            except StorageError:
                self.check()  # who deleted the folder since took the journal, too: that says why
                raise
        for record in records:
            self.done.setdefault(record.unit.number, record)

    def look_again(self) -> None:
        """Sees what others, who have journals of their own, have done since."""
        self._done = self._told()

    def settle(self) -> None:
        """Of units that were written more than once, keeps the records of what is there now.

        Where a program gives other bits each time, two attempts at a unit leave two records and
        one result. A unit with a result of which there is no record is not done any more.
        """
        for records in self._differ.values():
            try:
                sums = [checksum(x) for x in self.store.read(records[0].unit)]
            except UnreachableError:
                raise
            except StorageError:
                sums = None
            wrong = [r for r in records if list(r.checksums) != sums]
            self._journal.withdraw(wrong, "written over by another attempt")
        if self._differ:
            self.look_again()

    def withdraw(self, numbers: Iterable[int], reason: str) -> None:
        """Says that these units are not done: they are computed again."""
        records = [self.done[number] for number in numbers if number in self.done]
        if records:
            self.check()
            self._journal.withdraw(records, reason)
            self.look_again()

    def finish(self, summary: dict[str, Any]) -> None:
        """Says that all is done, and this of it, which is `finished` from now on.

        That is what `JobFiles.write_end` takes: `bad` rows, `reduced` arrays, and JSON.
        """
        self.check()
        missing = len(self.plan) - len(self.done)
        if missing:
            raise JobError(
                f"{missing} of {len(self.plan)} units of {self._files.out} are not done."
            )
        if not self._files.is_described:
            raise JobError(
                f"job.json in {self._files.folder} was deleted while this process was at work, and "
                f"so nobody will know how {self._files.out} was made. Put it back, and make the "
                "call again; or delete both to compute it again."
            )
        self.store.check_held(at_end=True)
        self.store.check()
        for file in self.store.missing(r.unit for r in self.done.values()).values():
            raise written_over(self._files.out, file)
        self.check_kept(min(self._with_sums, key=lambda r: r.ended, default=None))
        self._render_quarantine()
        reached(BEFORE_END)
        first, more = next(iter(self._with_sums), None), dict[str, Any]()
        self._end_store()
        if self._counts_rows:
            more["rows"] = self.plan.rows
        unit = first and [first.unit.number, list(first.checksums)]
        self._files.write_end(**summary, **more, unit=unit)
        self.finished = self._files.read_end()

    def _end_store(self) -> None:
        while True:
            self.check()
            try:
                return self.store.end(self.plan.rows)
            except OvertakenError:
                continue

    def close(self) -> None:
        """Leaves the job to others. What is not done yet, the same call goes on with."""
        if self._held:
            ended, shared = self.finished is not None, len(self._locks) > 1
            if not ended and not shared:
                self._render_quarantine()
            for lock in self._locks:
                lock.release()
            if not ended and shared:
                self._render_as_last()
        self._journal.close()
        self.store.let_go()

    def _render_as_last(self) -> None:
        """For a shard: who goes before others may not know what these say."""
        with contextlib.suppress(LockedError), contextlib.ExitStack() as stack:
            stack.callback(self._files.place.lock(self._files.lock).release)
            if self._files.read_end() is None:
                self.look_again()
                self._render_quarantine()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _held(self) -> bool:
        return bool(self._locks) and all(lock.held for lock in self._locks)

    def check(self) -> None:
        """Whether this process may write, now.

        Raises:
          JobError: it may not.
        """
        if not self._held:
            raise JobError(
                f"The job of {self._files.out} is not open for writing: it is finished, was "
                "closed, or was opened by the process that this one was forked from."
            )
        if not all(lock.holds for lock in self._locks):
            raise JobError(
                f"{self._files.lock} was deleted while this process was at work, or taken: others "
                f"may write to {self._files.out}, and so nothing more is written to it. If you "
                "deleted the folder of the job to begin again, end this process first."
            )
        self.store.check_held()

    @property
    def _with_sums(self) -> list[Record]:
        """The units that are done, by whose checksums another output is told from this one."""
        return [r for _, r in sorted(self.done.items()) if r.checksums]

    def check_kept(self, of: Record | None = None) -> None:
        """One unit of what is there is what was written: else somebody replaced the output.

        Args:
          of: that unit; None: the first.
        """
        of = of or next(iter(self._with_sums), None)
        if self.finished is not None:
            number, *either = self.finished.get("unit") or [None]
        elif of is not None:
            number = of.unit.number
            either = [list(r.checksums) for r in self._differ.get(number, [of])]
        else:
            number, either = None, []
        if number is None:
            return
        unit = self.plan.unit(number) if number not in self.done else self.done[number].unit
        if [checksum(x) for x in self.store.read(unit)] not in either:
            raise JobError(
                f"{self._files.out} does not hold what was written to it: rows {unit.start} to "
                f"{unit.stop} are others. If somebody put another output in its place, put the "
                f"right one back, or delete it and {self._files.folder} to compute it again; if "
                f"it was damaged, `batchax verify {self._files.out}` says what is to be computed "
                "again."
            )

    def _render_quarantine(self) -> None:
        bad = [b for _, r in sorted(self.done.items()) for b in r.quarantined]
        lines = _for_people(bad)
        if bad or self._files.place.exists(self._files.quarantine):
            content = "".join(f"{line}\n" for line in lines)
            self._files.place.replace(self._files.quarantine, content.encode())
            self._files.place.replace(self._files.ok, self._ok(bad))

    def _ok(self, bad: Sequence[Bad]) -> bytes:
        """For each row whether it has a result, as a file of NumPy's."""
        rows = self.plan.rows
        if self.plan.open:
            rows = max((r.unit.stop for r in self.done.values()), default=0)
        ok, file = np.zeros(rows, bool), io.BytesIO()
        for record in self.done.values():
            ok[record.unit.start : record.unit.stop] = True
        ok[[b.row for b in bad]] = False
        np.save(file, ok)
        return file.getvalue()


def _for_people(bad: Sequence[Bad]) -> Iterator[str]:
    """A line for each row; a traceback is in the first that has it."""
    seen: set[str] = set()
    for b in alike(bad):
        traceback = "" if b.traceback in seen else b.traceback
        yield json.dumps({"row": b.row, "error": b.error, "traceback": traceback})
        seen.add(b.traceback)
