"""How far a job is, and whether what it wrote is still what it was."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from batchax.datasets.addresses import Address, address
from batchax.datasets.disk import Holder, UnreachableError
from batchax.datasets.journal import Description, JobFiles, Journal, read_journal
from batchax.datasets.plan import Record, Unit, checksum
from batchax.datasets.store import Store, called
from batchax.datasets.stores import reopen_store
from batchax.errors import JobError, StorageError
from batchax.progress import duration

_RECENT = 200  # units that say how fast it goes
_SHOWN = 20  # units that are listed one by one


@dataclass(frozen=True)
class Status:
    out: Address  # its output
    rows: int | None  # of the dataset; None of a stream that has not ended
    done: int  # rows that are committed, with those in quarantine
    quarantined: int  # rows without a result
    finished: bool
    holder: Holder | None  # the process that runs it; of several shards the first
    rate: float | None  # rows a second, of the units that this process committed last
    shards: int = 0  # that are at work

    @property
    def to_do(self) -> int | None:
        return None if self.rows is None else self.rows - self.done

    @property
    def short(self) -> str:
        at_work = self.shards or int(self.holder is not None)
        parts = [self._done_of_all]
        if self.quarantined:
            parts.append(f"{self.quarantined:,} quarantined")
        parts.append(f"{at_work} at work" if at_work else "no process at work")
        if self.rate and at_work and self.to_do is not None:
            parts.append(f"{duration(self.to_do / self.rate)} left")
        return ", ".join(parts)

    @property
    def _done_of_all(self) -> str:
        if self.rows is None:
            return f"{self.done:,} rows of a stream"
        share = f" ({self.done / self.rows:.1%})" if self.rows else ""
        return f"{self.done:,} of {self.rows:,} rows{share}"

    def __str__(self) -> str:
        lines = [
            f"{self.out}: {self._state()}",
            f"  done         {self._done_of_all}",
            *([] if self.to_do is None else [f"  to do        {self.to_do:,}"]),
            f"  quarantined  {self.quarantined:,}",
        ]
        if self.rate:
            to_do = self.to_do if self.holder else None
            left = "" if to_do is None else f", {duration(to_do / self.rate)} left"
            rate = float(f"{self.rate:.3g}")
            lines.append(f"  rate         {rate:,.12g} rows a second{left}")
        return "\n".join(lines)

    def _state(self) -> str:
        if self.shards:
            return f"running in {self.shards} shard{'s' if self.shards > 1 else ''}"
        if self.holder:
            return f"running in {self.holder}"
        return "finished" if self.finished else "stopped; the same call continues with it"


def status(out: str | Address) -> Status:
    files = JobFiles(address(out, "out"))
    description = _description(files)
    end, plan = files.read_end(), description.plan
    done = list(read_journal(files.journal).values())
    rows = sum(r.unit.rows for r in done)
    place, locks = files.place, files.locks_of_shards
    holder = place.last_holder(files.lock)
    shards = [place.last_holder(x) for x in locks if place.is_held(x)]
    at_work = min(filter(None, shards), key=attrgetter("since"), default=None)
    if at_work is None and place.is_held(files.lock):
        at_work = holder
    last = at_work or holder
    return Status(
        out=files.out,
        rows=(end["rows"] if end else None) if plan.open else plan.rows,
        done=rows,
        quarantined=sum(len(r.quarantined) for r in done),
        finished=end is not None,
        holder=at_work,
        rate=_rate(done, last.since) if last else None,
        shards=len(shards),
    )


def _rate(done: Iterable[Record], since: float) -> float | None:
    """Returns rows a second since then, or over the latest units if there were many."""
    run = sorted((r for r in done if r.ended > since), key=attrgetter("ended"))
    if not run:
        return None
    if len(run) > _RECENT and run[-_RECENT].ended < run[-1].ended:  # several end at one time
        since = run[-_RECENT].ended
    rows = sum(r.unit.rows for r in run if r.ended > since)
    return rows / (run[-1].ended - since)


def follow(out: str | Address, seconds: float) -> Iterator[str]:
    """Yields the state of a job as a line when it changes, and in full once it is finished."""
    files, before = JobFiles(address(out, "out")), ""
    while True:
        now = status(files.out) if files.read() is not None else None
        if now is not None and now.finished and now.holder is None:  # no process writes it
            yield str(now)
            return
        line = f"{files.out}: not begun" if now is None else now.short
        if line != before:
            yield f"{time.strftime('%H:%M:%S')}  {line}"
        before = line
        time.sleep(seconds)


@dataclass(frozen=True)
class Damaged:
    unit: Unit
    reason: str

    def __str__(self) -> str:
        return f"rows {self.unit.start:,} to {self.unit.stop:,}: {self.reason}"


@dataclass(frozen=True)
class Verified:
    out: Address
    rows: int
    damaged: Sequence[Damaged]
    withdrawn: bool = True

    def __bool__(self) -> bool:
        return not self.damaged

    def __str__(self) -> str:
        if self:
            return f"{self.out}: {self.rows:,} rows are what was written."
        lost = sum(d.unit.rows for d in self.damaged)
        lines = [f"{self.out}: of {self.rows:,} rows, {lost:,} are not what was written:"]
        lines += [f"  {each}" for each in self.damaged[:_SHOWN]]
        if len(self.damaged) > _SHOWN:
            lines.append(f"  and {len(self.damaged) - _SHOWN:,} more such units")
        lines.append(
            "They count as not done now: the same call computes them again."
            if self.withdrawn
            else "A call is at work on it. Once it ends, verify again, and then make the same call."
        )
        return "\n".join(lines)


def verify(out: str | Address) -> Verified:
    """Reads back committed results of `out`, and compares them with their checksums.

    Damaged units then count as not done, so that the same call recomputes them. While another
    process is at work, which would not notice, nothing is withdrawn.
    """
    files = JobFiles(address(out, "out"))
    store = reopen_store(files.out, _description(files).store)
    with contextlib.ExitStack() as stack:
        journal = _own_journal(files, stack)
        records = read_journal(files.journal)
        damaged = list(_damaged(records.values(), store))
        if journal is not None and damaged:
            files.withdraw_end()
            for each in damaged:
                journal.withdraw([records[each.unit.number]], each.reason)
        if not damaged:
            # Without metadata the output is unreadable, so it is checked too.
            (store.check_ended if files.read_end() is not None else store.check)()
    rows = sum(r.unit.rows for r in records.values())
    return Verified(files.out, rows, damaged, journal is not None)


def _own_journal(files: JobFiles, stack: contextlib.ExitStack) -> Journal | None:
    try:
        stack.callback(files.place.lock(files.lock).release)
    except (JobError, StorageError):  # held, or on a disk that is only read
        return None
    journal = Journal(files.journal, "verify")
    journal.begin()
    stack.callback(journal.close)
    return journal


def _damaged(records: Iterable[Record], store: Store) -> Iterator[Damaged]:
    for record in sorted(records, key=attrgetter("unit")):
        try:
            sums = [checksum(result) for result in store.read(record.unit)]
            list(record.reduced.values())  # which compares their checksums
        except UnreachableError:
            raise
        except StorageError as error:
            yield Damaged(record.unit, str(error))
            continue
        for leaf, read, written in zip(store.leaves, sums, record.checksums, strict=True):
            if read != written:
                yield Damaged(record.unit, f"{called(leaf)} has other bytes than were written")
                break


def _description(files: JobFiles) -> Description:
    description = files.read()
    if description is None:
        raise JobError(
            f"There is no job of {files.out}: {files.folder} does not exist. Check the path "
            "that you passed to batchax.map as out."
        )
    return description
