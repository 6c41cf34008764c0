"""A dataset being computed: begun once, killed at any moment, and gone on with."""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from batchax.datasets.addresses import Address
from batchax.datasets.checksums import checksum
from batchax.datasets.fingerprint import differences
from batchax.datasets.job_files import Description, JobFiles
from batchax.datasets.journal import Journal, read_attempts
from batchax.datasets.lock import LockedError
from batchax.datasets.parts import Bad, Record, alike
from batchax.datasets.place import AnyLock, OvertakenError, UnreachableError
from batchax.datasets.plan import Plan
from batchax.datasets.steps import BEFORE_END, reached
from batchax.errors import ArgumentTypeError, JobError, StorageError

if TYPE_CHECKING:
    from batchax.datasets.store import Store  # which needs libraries, and a job does not

RESUME = ("auto", "must", "never")
_PATIENCE = 60.0  # seconds that a shard waits for another that begins the job


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

    @classmethod
    def open(
        cls,
        out: Address,
        fingerprint: dict[str, Any],
        plan: Callable[[], Plan],
        store: Callable[[Plan], Store],
        resume: str = "auto",
        shard: str | None = None,
    ) -> Job:
        """The job that computes `out`: a new one, or the one that is there.

        A job that is finished is only read, and by anyone; any other is this process's alone, until
        it is closed, or of those who each have a shard of it.

        Args:
          out: the output.
          fingerprint: of the call, see `fingerprint`.
          plan: makes a plan, for a new job.
          store: makes a store for a plan; nothing is on disk before its `prepare`.
          resume: "auto"; "must" refuses to begin a job, "never" to go on with one.
          shard: a name for this process's part of the job, if others have the other parts.

        Raises:
          JobError: if `out` is the output of something else or of another call, somebody else is
            at work on it, or `resume` says no.
          StorageError: if it cannot be read or written.
        """
        if resume not in RESUME:
            raise ArgumentTypeError(f"resume must be one of {RESUME}, and is {resume!r}.")
        files, call = JobFiles(out), json.loads(json.dumps(fingerprint))
        end = time.monotonic() + (_PATIENCE if shard else 0)
        while True:
            try:
                if files.read() is None:
                    job = cls._begun(files, call, plan, store, resume)
                    if shard is None:
                        return job
                    job.close()  # which has it alone
                return cls._opened(files, call, store, "auto" if shard else resume, shard)
            except LockedError:  # by another shard, which begins it
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    @classmethod
    def _opened(
        cls,
        files: JobFiles,
        call: dict[str, Any],
        store: Callable[[Plan], Store],
        resume: str,
        shard: str | None,
    ) -> Job:
        description = files.read()
        assert description is not None
        _check(files, description, call, resume)
        with contextlib.ExitStack() as on_error:
            end, locks = files.read_end(), []
            if end is None:
                locks = _locked(files, on_error, shard)
                end = files.read_end()
            if end is not None:  # perhaps by who had the lock
                on_error.close()
                locks = []
            kept, plan = _checked(files, description, store), description.plan
            if end is not None and plan.open:
                plan = plan.ended(end["rows"])
            job = cls(files, plan, kept, shard or "main", locks, end)
            if locks:
                job._journal.begin()
                if shard is None:
                    files.place.remove(files.preparing)
                    kept.clean()
                _ = job.done  # it is told here if the journal cannot be read
            job._check_kept()
            on_error.pop_all()
            return job

    @classmethod
    def _begun(
        cls,
        files: JobFiles,
        call: dict[str, Any],
        plan: Callable[[], Plan],
        store: Callable[[Plan], Store],
        resume: str,
    ) -> Job:
        if resume == "must":
            raise JobError(
                f'There is no job to go on with: {files.folder} holds none. With resume="auto" '
                "one is begun."
            )
        _check_not_foreign(files)
        new_plan = plan()  # before anything is on disk, since arguments may be wrong
        kept = store(new_plan)
        files.place.make_folder(files.folder)
        with contextlib.ExitStack() as on_error:
            locks = _locked(files, on_error)
            if files.read() is not None:  # somebody else was faster
                on_error.close()
                return cls._opened(files, call, store, resume, None)
            _check_not_foreign(files)
            _prepare(files, kept)
            files.write(Description(new_plan, kept.describe(), call))
            files.place.remove(files.preparing)
            job = cls(files, new_plan, kept, "main", locks)
            job._journal.begin()
            on_error.pop_all()
            return job

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
                    f"right one back, or delete {self._files.out} and {self._files.folder} to "
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
        self._render_quarantine()
        reached(BEFORE_END)
        first, more = self._first, dict[str, Any]()
        if self._counts_rows:
            self._end_store()
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

    @property
    def _first(self) -> Record | None:
        """The first unit that is done, by whose checksums another output is told from this one."""
        return next((r for _, r in sorted(self.done.items()) if r.checksums), None)

    def _check_kept(self) -> None:
        """One unit of what is there is what was written: else somebody replaced the output."""
        if self.finished is not None:
            number, *either = self.finished.get("unit") or [None]
        elif self._first is not None:
            number = self._first.unit.number
            either = [list(r.checksums) for r in self._differ.get(number, [self._first])]
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


def _locked(
    files: JobFiles, on_error: contextlib.ExitStack, shard: str | None = None
) -> list[AnyLock]:
    """Takes the job's lock alone, or with others who have other shards."""
    locks: list[AnyLock] = []
    main = [(files.lock, shard is not None)]
    for path, shared in [*main, *([(files.lock_of(shard), False)] if shard else [])]:
        try:
            locks.append(files.place.lock(path, shared))
        except LockedError as error:
            on_error.close()
            raise LockedError(
                f"Another call is at work on {files.out}: {error} Wait for it, or end it: the same "
                "call goes on with what it has committed."
            ) from None
        on_error.callback(locks[-1].release)
    if shard is None:
        for path in files.locks_of_shards:
            files.place.remove(path)
        files.place.clean(files.folder, files.partials)
    return locks


def _check(files: JobFiles, description: Description, call: dict[str, Any], resume: str) -> None:
    if resume == "never":
        raise JobError(
            f'{files.folder} holds a job already, and resume="never" says not to go on with one. '
            f"Use another out=, or delete {files.out} and {files.folder} to begin again."
        )
    changed = differences(description.call, call)
    if changed:
        raise JobError(
            f"{files.out} holds results of another call: {'; '.join(changed)}. Results of both are "
            f"never mixed. Use another out=, or delete {files.out} and {files.folder} to compute "
            "it again."
        )


def _checked(files: JobFiles, description: Description, store: Callable[[Plan], Store]) -> Store:
    if not files.place.exists(files.out):
        raise JobError(
            f"{files.out} is gone, and {files.folder} says what was in it. Put it back, or delete "
            "that folder, too, to compute it again."
        )
    kept = store(description.plan)
    kept.check()
    return kept


def _check_not_foreign(files: JobFiles) -> None:
    if files.place.exists(files.journal):
        raise JobError(
            f"{files.folder} has a journal, but job.json is gone, and so nobody knows of what. Put "
            f"it back, or delete {files.out} and {files.folder} to compute it again."
        )
    if files.place.exists(files.out) and not files.place.exists(files.preparing):
        raise JobError(
            f"{files.out} is there already, and is the output of something else: there is no job "
            f"in {files.folder}. Use another out=, or delete it."
        )


def _prepare(files: JobFiles, store: Store) -> None:
    """Makes the output. Who was killed in the middle of it may have left a part."""
    files.place.replace(files.preparing, b"")
    if files.place.exists(files.out):
        try:
            return store.check()
        except UnreachableError:
            raise
        except (JobError, StorageError):
            # Nothing is ever deleted: whoever has a use for it finds it here.
            files.place.set_aside(files.out, files.folder)
    try:
        store.prepare()
    except BaseException:
        if not files.place.exists(files.out):
            files.place.remove(files.preparing)
        raise
