"""A dataset being computed, which the same call resumes after a kill."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from batchax.datasets.addresses import Address
from batchax.datasets.disk import LockedError, not_overtaken, own_folder
from batchax.datasets.fingerprint import differences, growth
from batchax.datasets.journal import JOB, Description, JobFiles, Journal, read_attempts
from batchax.datasets.plan import Bad, Plan, Record, alike, checksum
from batchax.datasets.store import Store, written_over
from batchax.datasets.stores import reopen_store
from batchax.errors import JobError, StorageError


class Job:
    kept = "are done and kept; the same call resumes."

    def __init__(
        self,
        files: JobFiles,
        plan: Plan,
        store: Store,
        writer: str,
        locks: Sequence[Any] = (),
        finished: dict[str, Any] | None = None,
    ) -> None:
        self.plan = plan
        self.store = store
        self.finished = finished
        self._counts_rows = plan.open  # as they come
        self._files = files
        self._locks = locks
        self._done: dict[int, Record] | None = None  # until it is read
        self._differ: dict[int, list[Record]] = {}
        self._journal = Journal(files.journal, writer)

    def begin(self, alone: bool) -> None:
        """Makes this process the writer, of the job `alone` or of a shard."""
        self._journal.begin()
        if alone:
            self._files.place.remove(self._files.preparing)
            self.store.clean()
        self.store.guard()
        # Several attempts at a unit may have left as many records, which are withdrawn one by one.
        while lost := self.store.missing(r.unit for r in self.done.values()):
            self._journal.withdraw([self.done[k] for k in lost], "a file of it is missing")
            self.look_again()

    @property
    def done(self) -> dict[int, Record]:
        if self._done is None:
            self._done = self._read_done()
        return self._done

    def _read_done(self) -> dict[int, Record]:
        done, self._differ = read_attempts(self._files.journal)
        for number, record in done.items():
            if record.unit.number != number or not self.plan.has(record.unit):
                raise JobError(
                    f"{self._files.journal} is not the journal of this job: it has a unit of rows "
                    f"{record.unit.start} to {record.unit.stop}, which the job does not have. "
                    f"Restore the right journal, or delete {self._files.here} and "
                    f"{self._files.folder} to start over."
                )
        return done

    def record(self, records: Sequence[Record]) -> None:
        try:
            records = not_overtaken(self.check, lambda: self._journal.append_many(records))
        except StorageError:
            self.check()  # who deleted the folder since took the journal, too: that says why
            raise
        for record in records:
            self.done.setdefault(record.unit.number, record)

    def look_again(self) -> None:
        """Reads what other processes, with their journals, have done since."""
        self._done = self._read_done()

    def settle(self) -> None:
        """Withdraws units whose attempts wrote different bits, as it is unknown which are there."""
        for records in self._differ.values():
            self._journal.withdraw(records, "another attempt has other results")
        if self._differ:
            self.look_again()

    def withdraw(self, numbers: Iterable[int], reason: str) -> None:
        records = [self.done[number] for number in numbers if number in self.done]
        if records:
            self.check()
            self._journal.withdraw(records, reason)
            self.look_again()

    def finish(self, summary: dict[str, Any]) -> None:
        """Records that all is done; `summary` is for `JobFiles.write_end`."""
        self.check()
        missing = len(self.plan) - len(self.done)
        if missing:
            raise JobError(
                f"{missing} of {len(self.plan)} units of {self._files.out} are not done."
            )
        if not self._files.is_described:
            raise JobError(
                f"job.json in {self._files.folder} was deleted during the call, so the job of "
                f"{self._files.out} cannot be identified. Restore job.json and call again, or "
                "delete both to start over."
            )
        # Check everything before the end is recorded: later calls only read it.
        self.store.verify_unchanged(at_end=True)
        self.store.check()
        for file in self.store.missing(r.unit for r in self.done.values()).values():
            raise written_over(self._files.out, file)
        self.check_kept(min(self._with_sums, key=lambda r: r.ended, default=None))
        self._render_quarantine()
        first, more = next(iter(self._with_sums), None), dict[str, Any]()
        not_overtaken(self.check, lambda: self.store.end(self.plan.rows))
        if self._counts_rows:
            more["rows"] = self.plan.rows
        unit = first and [first.unit.number, list(first.checksums)]
        self._files.write_end(**summary, **more, unit=unit)
        self.finished = self._files.read_end()

    def extend(self, to: Description) -> None:
        """Turns this into an unfinished job of more rows; its last unit may get some of them."""
        # If the process is killed here, the old job, unfinished, or the new one is there.
        self._files.withdraw_end()
        others = [k for k, r in self.done.items() if not to.plan.has(r.unit)]
        self.withdraw(others, "rows were added")
        not_overtaken(self.check, self.store.reopen)
        self._files.write(to, again=True)

    def close(self) -> None:
        if self._held:
            ended, shared = self.finished is not None, len(self._locks) > 1
            if not ended and not shared:
                self._render_quarantine()
            for lock in self._locks:
                lock.release()
            if not ended and shared:
                self._render_as_last()
        self._journal.close()
        self.store.release()

    def _render_as_last(self) -> None:
        """Renders the quarantine again for a shard, as earlier shards did not see later ones."""
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
        """Raises a JobError if this process must not write."""
        if not self._held:
            raise JobError(
                f"The job of {self._files.out} is not open for writing: it is finished, was "
                "closed, or was opened by the process that this one was forked from."
            )
        if not all(lock.holds for lock in self._locks):
            raise JobError(
                f"{self._files.lock} was deleted while this process was at work, or taken: others "
                f"may write to {self._files.out}, and so nothing more is written to it. If you "
                "deleted the folder of the job to start over, end this process first."
            )
        self.store.verify_unchanged()

    @property
    def _with_sums(self) -> list[Record]:
        return [r for _, r in sorted(self.done.items()) if r.checksums]

    def check_kept(self, of: Record | None = None) -> None:
        """Checks one unit against its checksum, to notice that the output was replaced."""
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
                f"{unit.stop} differ. If another output took its place, restore the right "
                f"one, or delete it and {self._files.folder} to start over. If it was damaged, "
                f"`batchax verify {self._files.out}` lists the units to recompute."
            )

    def _render_quarantine(self) -> None:
        bad = [b for _, r in sorted(self.done.items()) for b in r.quarantined]
        if bad or self._files.place.exists(self._files.quarantine):
            content = "".join(f"{line}\n" for line in _for_people(bad))
            self._files.place.replace(self._files.quarantine, content.encode())
            self._files.place.replace(self._files.ok, self._ok(bad))

    def _ok(self, bad: Sequence[Bad]) -> bytes:
        rows = self.plan.rows
        if self.plan.open:
            rows = max((r.unit.stop for r in self.done.values()), default=0)
        ok, file = np.zeros(rows, bool), io.BytesIO()
        for record in self.done.values():
            ok[record.unit.start : record.unit.stop] = True
        ok[[b.row for b in bad]] = False
        np.save(file, ok)
        return file.getvalue()


class JobInMemory:
    """Has the methods of `Job`, and keeps nothing once the process ends."""

    kept = "were done."

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.store = plan, store
        self.done: dict[int, Record] = {}
        self.finished: dict[str, Any] | None = None
        store.prepare()

    def record(self, records: Sequence[Record]) -> None:
        self.done |= {r.unit.number: r for r in records}

    def finish(self, summary: dict[str, Any]) -> None:
        self.finished = summary

    def _nothing(self, *_: object) -> None:
        """No other process reads or writes it."""

    check = look_again = settle = withdraw = close = _nothing


AnyJob = Job | JobInMemory


def _for_people(bad: Sequence[Bad]) -> Iterator[str]:
    """Yields a line for each row; a traceback is in the first that has it."""
    seen: set[str] = set()
    for b in alike(bad):
        traceback = "" if b.traceback in seen else b.traceback
        yield json.dumps({"row": b.row, "error": b.error, "traceback": traceback})
        seen.add(b.traceback)


class Extend(NamedTuple):
    """Describes inputs that may have more rows than when the job began."""

    rows: int
    # of the fingerprint of the call before, its records, and the numbers of inputs that have more
    # rows: raises a JobError if their earlier rows are not what they were
    compare: Callable[[dict[str, Any], Mapping[int, Record], Sequence[int]], None]


_PATIENCE = 60.0  # seconds that a shard waits for another that begins the job


def open_job(out: Address, *args: Any, **kwargs: Any) -> Job:
    """Opens the job of `out`, a new or an existing one (see `_Opening`).

    Any process may read a finished job. Another job belongs to this process until it is closed, or
    to the processes of its shards.
    """
    return _Opening(JobFiles(out), *args, **kwargs).job()


@dataclass
class _Opening:
    files: JobFiles
    fingerprint: Callable[[Plan], dict[str, Any]]  # of the call with such a plan
    plan: Callable[[], Plan]  # makes that of a new job
    store: Callable[[Plan], Store]  # nothing is on disk before its `prepare`
    resume: str = "auto"
    shard: str | None = None  # the name of this process's part, if others have the other parts
    retry_quarantined: bool = False  # whether a job that finished without some rows is unfinished
    overwrite: bool = False  # whether the output and its job are removed first
    extend: Extend | None = None  # adds rows to the job, if the inputs have more

    def job(self) -> Job:
        files = self.files
        if self.overwrite and files.read() is not None:
            self.plan = functools.cache(self.plan)
            self.fingerprint = functools.cache(self.fingerprint)
            self.store(self.plan())  # before anything is removed, since arguments may be wrong
            self.fingerprint(self.plan())
            self._remove(begin=True)
        end = time.monotonic() + (_PATIENCE if self.shard else 0)
        while True:
            try:
                # A killed call may have removed part of the output.
                if files.place.exists(files.removing):  # by a call that was killed
                    self._remove()
                if files.read() is None:
                    job = self._begun()
                    if self.shard is None:
                        return job
                    job.close()  # which has it alone
                elif self.extend is not None:
                    self._extend(self.extend)
                return self._opened("auto" if self.shard else self.resume, self.shard)
            except LockedError:  # by another shard, which begins it
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def _extend(self, extend: Extend) -> None:
        # Check before the lock is taken, and again after: another process may have added the rows.
        files = self.files
        has_more = lambda x: x is not None and not x.plan.open and x.plan.rows < extend.rows
        if not has_more(files.read()):
            return
        with contextlib.ExitStack() as on_error:
            locks = self._locked(on_error)
            description, end = files.read(), files.read_end()
            if description is None or not has_more(description):  # another process added them
                return
            plan = replace(description.plan, rows=extend.rows, extended=True)
            call = self.fingerprint(plan)
            changed, grown = growth(description.call, call)
            if plan.ends is not None:
                changed.append(
                    "rows of different lengths, which are committed by elements, were added"
                )
            if changed:
                raise self._other_call(changed)
            described = self.store(plan).describe()  # raises for an output that cannot grow
            kept = self._checked(description, reopen_store(files.out, description.store))
            with Job(files, description.plan, kept, "main", locks, end) as job:
                job.check_kept()
                job.finished = None
                job.begin(alone=True)
                whole = {k: r for k, r in job.done.items() if plan.has(r.unit)}
                extend.compare(description.call, whole, grown)
                job.extend(Description(plan, described, call))

    def _opened(self, resume: str, shard: str | None) -> Job:
        files = self.files
        description = files.read()
        assert description is not None
        if resume == "never":
            raise JobError(
                f'{files.folder} holds a job already, and resume="never" does not resume it. '
                "Pass another out=, or overwrite=True to start over."
            )
        changed = differences(description.call, self.fingerprint(description.plan))
        if changed:
            raise self._other_call(changed)
        with contextlib.ExitStack() as on_error:
            kept, locks = self._checked(description, self.store(description.plan)), []
            end, plan = self._end(description, kept)
            if end is None:
                locks = self._locked(on_error, shard)
                # Another process may have finished the job before this one got the lock.
                end, plan = self._end(description, kept)
                if end is None and files.read_end() is not None:
                    files.withdraw_end()
            if end is not None:  # perhaps by the last holder of the lock
                on_error.close()
                locks = []
            job = Job(files, plan, kept, shard or "main", locks, end)
            if locks:
                on_error.callback(kept.release)
                job.begin(alone=shard is None)
            job.check_kept()
            on_error.pop_all()
            return job

    def _remove(self, begin: bool = False) -> None:
        """Removes the output and its job. A killed call may have done the `begin`."""
        files = self.files
        with contextlib.ExitStack() as stack:
            self._locked(stack)
            description = files.read()
            if begin and description is not None:
                self._check_own(description)
                files.place.replace(files.removing, b"")
            if files.place.exists(files.removing):
                files.remove()

    def _check_own(self, description: Description) -> None:
        """Raises a JobError if the output differs from that of its job, or holds something else."""
        files = self.files
        why = "overwrite=True removes what batchax made, and"
        if files.here != files.out and files.place.exists(files.out):
            raise JobError(
                f"{why} {files.out} is something else: the results are in {files.here}. Move "
                f"{files.out} away, or use another out=."
            )
        if not files.place.exists(files.here):
            return
        if isinstance(files.here, Path):
            own_folder(files.here)
        store, end = reopen_store(files.out, description.store), files.read_end()
        (store.check if end is None else store.check_ended)()
        plan = description.plan if end is None else description.plan_at_end(end)
        with Job(files, plan, store, "main", finished=end) as job:
            job.check_kept()
        if (foreign := store.foreign()) is not None:
            raise JobError(
                f"{why} batchax did not make {foreign}. Move it out of the output, or use another "
                "out=."
            )

    def _begun(self) -> Job:
        files = self.files
        self._check_not_foreign()
        plan = self.plan()  # before anything is on disk, since arguments may be wrong
        kept, call = self.store(plan), self.fingerprint(plan)
        if not files.place.exists(files.folder):  # which may be a link, as those in it may not
            files.place.make_own_folder(files.folder)
        with contextlib.ExitStack() as on_error:
            locks = self._locked(on_error)
            if files.read() is not None:  # another process was faster
                on_error.close()
                return self._opened(self.resume, None)
            self._check_not_foreign()
            # job.json is written last: without it, the output may be incomplete, and is prepared
            # again.
            self._prepare(kept)
            files.write(Description(plan, kept.describe(), call))
            on_error.callback(kept.release)
            job = Job(files, plan, kept, "main", locks)
            job.begin(alone=True)
            on_error.pop_all()
            return job

    def _locked(self, on_error: contextlib.ExitStack, shard: str | None = None) -> list[Any]:
        files, locks = self.files, list[Any]()
        main = [(files.lock, shard is not None)]
        for path, shared in [*main, *([(files.lock_of(shard), False)] if shard else [])]:
            try:
                locks.append(files.place.lock(path, shared))
            except LockedError as error:
                on_error.close()
                raise LockedError(
                    f"Another call is at work on {files.out}: {error} Wait for it, or end it: the "
                    "same call continues with what it has committed."
                ) from None
            on_error.callback(locks[-1].release)
        files.remove_calls()
        if shard is None:
            for path in files.locks_of_shards:
                files.place.remove(path)
            files.place.clean(files.folder, files.partials)
        return locks

    def _other_call(self, changed: Sequence[str]) -> JobError:
        files = self.files
        return JobError(
            f"{files.out} holds results of another call: {'; '.join(changed)}. Results of both are "
            "never mixed. Pass another out=, or overwrite=True to remove those results and start "
            "over."
        )

    def _end(self, description: Description, kept: Store) -> tuple[dict[str, Any] | None, Plan]:
        """Returns the summary of the finished job, or None if units are to be recomputed; and its
        plan.
        """
        end = self.files.read_end()
        if end is None or (self.retry_quarantined and end["bad"]):
            return None, description.plan
        plan = description.plan_at_end(end)
        return (None, description.plan) if kept.missing(plan.units) else (end, plan)

    def _checked(self, description: Description, kept: Store) -> Store:
        files = self.files
        ended = files.read_end() is not None
        # In object storage there is no folder, so until something is written there is nothing.
        if (ended or isinstance(files.out, Path)) and not files.place.exists(files.here):
            raise JobError(
                f"{files.out} is missing, but {files.folder} has its journal. Restore it, or "
                "delete that folder to start over."
            )
        (kept.check_ended if ended else kept.check)()
        return kept

    def _check_not_foreign(self) -> None:
        files = self.files
        if files.place.exists(files.journal):
            raise JobError(
                f"job.json is missing from {files.folder}, so the job cannot be identified. "
                f"Restore it, or delete {files.here} and {files.folder} to start over."
            )
        if files.place.exists(files.here) and not files.place.exists(files.preparing):
            raise JobError(
                f"{files.here} is there already, and is the output of something else: there is no "
                f"job in {files.folder}. Use another out=, or delete it."
            )
        out = files.out.resolve() if isinstance(files.out, Path) else files.out
        for folder in out.parents:
            name = folder.name.removesuffix(JOB)
            if name and JobFiles(folder.with_name(name)).is_described:
                raise JobError(
                    f"{files.out} lies in {folder}, which is of another call of map, and holds "
                    "what that one writes alone. Pass an out= outside of that folder."
                )

    def _prepare(self, store: Store) -> None:
        """Prepares the output, which a killed process may have done already."""
        files = self.files
        files.place.replace(files.preparing, b"")
        if files.place.exists(files.here):
            return store.check()  # which raises if it is another
        try:
            store.prepare()
        except BaseException:
            if not files.place.exists(files.here):
                files.place.remove(files.preparing)
            raise
