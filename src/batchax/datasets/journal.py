"""The files of a job, in a folder next to its output.

`job.json` says what is computed, and is written once; `journal/` says which units are done, and
`done.json` that all are; `lock` says who is at work.
"""

from __future__ import annotations

import base64
import dataclasses
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the names of more dtypes)
import numpy as np

from batchax.datasets.addresses import PARTIAL, Address, ObjectPath
from batchax.datasets.disk import TORN, UnreachableError, own_folder
from batchax.datasets.objects import place_of
from batchax.datasets.plan import (
    Bad,
    Plan,
    Record,
    Unit,
    crc32c,
    foreign,
    is_whole,
    packed,
    sealed,
    unpacked,
    unsealed,
)
from batchax.errors import ArgumentTypeError, JobError, StorageError

PARTIALS = "partials"  # of a job
_IN_LINE = 4096  # bytes of all arrays of a record; the journal is read whole when a job goes on


def written_arrays(reduced: Mapping[str, Any], path: Address) -> dict[str, Any]:
    """Writes arrays for the journal, and returns their entries.

    Large ones are durable at `path`.
    """
    arrays = {name: np.asarray(x) for name, x in reduced.items()}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ArgumentTypeError(
                f"the reduction {name!r} is kept as an array of numbers, and is "
                f"{type(reduced[name]).__name__}."
            )
    entries = {
        name: {"dtype": x.dtype.name, "shape": x.shape, "crc32c": crc32c(x)}
        for name, x in arrays.items()
    }
    content = {name: x.tobytes() for name, x in arrays.items()}
    if sum(map(len, content.values())) <= _IN_LINE:
        for name, data in content.items():
            entries[name]["data"] = base64.b64encode(data).decode()
        return entries
    # The file is durable before the line that refers to it.
    place = place_of(path)
    place.make_own_folder(path.parent)
    place.replace(path, b"".join(content.values()))
    start = 0
    for name, data in content.items():
        entries[name] |= {"file": path.name, "start": start}
        start += len(data)
    return entries


class Reduced(Mapping[str, np.ndarray]):
    """Maps names to the arrays that `written_arrays` wrote, read on use."""

    def __init__(self, entries: Mapping[str, Any], folder: Address) -> None:
        self._entries = entries
        self._folder = folder

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        dtype, shape, path = np.dtype(entry["dtype"]), entry["shape"], self._folder
        if "data" in entry:
            data = base64.b64decode(entry["data"])
        else:
            path, start = path / entry["file"], entry["start"]
            stop = start + dtype.itemsize * int(np.prod(shape))
            if isinstance(self._folder, Path):
                own_folder(self._folder)
            try:
                data = place_of(path).read(path, (start, stop)) if start < stop else b""
            except FileNotFoundError:
                data = b""
        if crc32c(data) != entry["crc32c"]:
            raise StorageError(
                f"{path} is missing or damaged: it holds a part of a reduction. Run `batchax "
                "verify` on the output, and then the same call again, which recomputes its rows."
            )
        return np.frombuffer(data, dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Journal:
    """Appends what one writer reports about units to its log. Threads may share it."""

    def __init__(self, folder: Address, writer: str) -> None:
        self._folder, self._writer = folder, writer
        # Each line is durable before any process relies on it. An incomplete line, left by a kill,
        # counts for nothing, and the next writer marks it as torn. Any other damaged line was
        # complete once: its content is lost, and a warning is shown.
        self._log = place_of(folder).log(folder, writer)

    def begin(self) -> None:
        """Excludes earlier writers of this log from now on."""
        self._log.begin()

    def append(self, record: Record) -> Record:
        return self.append_many([record])[0]

    def append_many(self, records: Sequence[Record]) -> list[Record]:
        """Records finished units with one sync, and returns the records with their time."""
        now = time.time()
        new = lambda r: dataclasses.replace(r, ended=r.ended or now, ids=[secrets.token_hex(8)])
        records = [r if r.ids else new(r) for r in records]
        self._append(map(self._entry, records))
        return records

    def withdraw(self, records: Iterable[Record], reason: str) -> None:
        self._append(
            {"unit": r.unit.number, "withdrawn": id, "reason": reason}
            for r in records
            for id in r.ids
        )

    def close(self) -> None:
        self._log.close()

    def _entry(self, record: Record) -> dict[str, Any]:
        number, start, stop = record.unit
        entry: dict[str, Any] = {
            "unit": number,
            "start": start,
            "stop": stop,
            "checksums": list(record.checksums),
            "attempt": record.attempt,
            "seconds": record.seconds,
            "ended": record.ended,
            "id": record.ids[0],
        }
        if record.quarantined:
            entry["quarantined"] = packed(record.quarantined)
        if record.read:
            entry["read"] = list(record.read)
        if record.reduced:
            name = f"{number:08d}-{record.attempt}-{self._writer}.bin"
            path = self._folder.parent / PARTIALS / name
            entry["reduced"] = written_arrays(record.reduced, path)
        return entry

    def _append(self, entries: Iterable[dict[str, Any]]) -> None:
        lines = b"".join(map(sealed, entries))
        if lines:
            self._log.append(lines)


def read_journal(folder: Address) -> dict[int, Record]:
    """Returns the record of each finished unit: the first of all writers that is not withdrawn."""
    return read_attempts(folder)[0]


def read_attempts(folder: Address) -> tuple[dict[int, Record], dict[int, list[Record]]]:
    """Returns the same, and all records of units that were written several times and differ."""
    logs = place_of(folder).logs(folder)
    entries = [(entry, writer) for writer, name, text in logs for entry in _entries(name, text)]
    with foreign(folder):
        return _done(entries, folder)


def _done(
    entries: Sequence[tuple[dict[str, Any], str]], folder: Address
) -> tuple[dict[int, Record], dict[int, list[Record]]]:
    withdrawn = {(e["unit"], e["withdrawn"]) for e, _ in entries if "withdrawn" in e}
    done: dict[int, Record] = {}
    differ: dict[int, list[Record]] = {}
    for entry, writer in entries:
        number = entry["unit"]
        if "withdrawn" in entry or (number, entry["id"]) in withdrawn:
            continue
        record = _record(entry, folder, writer)
        first = done.setdefault(number, record)
        if first is record:
            continue
        # Attempts that wrote the same bits count as one, whose record is the earliest.
        if number in differ or first.checksums != record.checksums:
            differ.setdefault(number, [first]).append(record)
        else:
            ids = [*first.ids, *record.ids]
            first = done[number] = dataclasses.replace(first, ids=ids)
            record = dataclasses.replace(record, ids=ids)
        if record.ended < first.ended:
            done[number] = record
    return done, differ


def _entries(name: str, text: bytes) -> list[dict[str, Any]]:
    lines = text.split(b"\n")[:-1]  # what has no end of a line is torn
    whole = [is_whole(line) for line in lines]
    both = zip(lines, whole, strict=True)
    torn = TORN.rstrip(b"\n")
    damaged = [n for n, (line, good) in enumerate(both, 1) if not (good or line.endswith(torn))]
    if damaged:
        warnings.warn(
            f"{name} is damaged in {'line' if len(damaged) == 1 else 'lines'} "
            f"{', '.join(map(str, damaged[:5]))}{', ...' if len(damaged) > 5 else ''}. Units "
            "that only these lines record as done are recomputed. Run `batchax verify` on the "
            "output: the disk may have damaged that, too.",
            stacklevel=2,
        )
    with foreign(name):
        return unsealed(line for line, good in zip(lines, whole, strict=True) if good)


def _record(entry: dict[str, Any], folder: Address, writer: str) -> Record:
    reduced = entry.get("reduced")
    return Record(
        Unit(entry["unit"], entry["start"], entry["stop"]),
        entry["checksums"],
        entry["attempt"],
        entry["seconds"],
        tuple(unpacked(entry["quarantined"])) if "quarantined" in entry else (),
        Reduced(reduced, folder.parent / PARTIALS) if reduced else {},
        entry["ended"],
        [entry["id"]],
        writer,
        entry.get("read", ()),
    )


_FORMAT = 1  # what a later version that writes something else can tell this one by

JOB = ".job"  # after the name of an output, the folder of its job
CALLS = "engine-"  # and a number: the folder of a call that other processes work for
_SHARD = "lock-"  # and the name of a shard


class JobFiles:
    """Locates the files of the job of an output."""

    def __init__(self, out: Address) -> None:
        if out.name in ("", ".."):
            raise ArgumentTypeError(
                f"{str(out)!r} cannot be an output. Pass the path of a new file or folder."
            )
        # In object storage, files that change while a job runs are in a folder named by the job. A
        # process that continues a deleted job then does not write into the next one.
        self.out, self.place = out, place_of(out)
        self.folder = folder = out.with_name(f"{out.name}{JOB}")
        self.lock = folder / "lock"  # held by who writes
        self.quarantine = folder / "quarantine.jsonl"  # what failed, rendered for people
        self.ok = folder / "ok.npy"  # for each row whether it has a result; there if one has none
        # There from before the output is made; without `job.json`, it may be half made.
        self.preparing = folder / "preparing"
        # There from the moment when a call that starts over removes the output and the job.
        self.removing = folder / "removing"
        self._description = folder / "job.json"
        self._names: list[str] = []  # of the folder of this very job, once it is known

    @property
    def here(self) -> Address:
        """Returns the path of the output: on a disk, it has another name until it is complete."""
        if not isinstance(self.out, Path):
            return self.out
        partial = self.out.with_name(f"{self.out.name}{PARTIAL}")
        return partial if self.place.exists(partial) else self.out

    @property
    def _own(self) -> Address:
        if not isinstance(self.out, ObjectPath):
            return self.folder
        if not self._names:
            self.read()
        return self.folder / (self._names[0] if self._names else "none")

    def lock_of(self, shard: str) -> Address:
        return self.folder / f"{_SHARD}{shard}"

    @property
    def locks_of_shards(self) -> list[Address]:
        """Lists locks that shards have taken since one process had the job alone."""
        return [self.folder / name for name in self.place.sizes(self.folder, _SHARD)]

    def remove_calls(self) -> None:
        for folder in self.place.folders(self.folder, CALLS):
            self.place.remove_all(folder)

    @property
    def journal(self) -> Address:
        return self._own / "journal"

    @property
    def partials(self) -> Address:
        return self._own / PARTIALS

    def remove(self) -> None:
        """Removes the output and its job, except for the lock, which this process holds."""
        # The end is withdrawn first, so a partial output is not taken for a complete one. If the
        # process is killed here, `removing` remains, and the next call removes the rest.
        self.withdraw_end()
        for path in (self.here, self.journal, self.partials):
            self.place.discard(path)
        for path in (self.quarantine, self.ok, self.preparing, self._description, self.removing):
            self.place.remove(path)
        self._names.clear()

    @property
    def _end(self) -> Address:
        return self._own / "done.json"

    @property
    def is_described(self) -> bool:
        return self.place.exists(self._description)

    def read(self) -> Description | None:
        try:
            content = _read(self._description)
        except FileNotFoundError:
            return None
        if content is None:
            raise JobError(
                f"{self._description} is damaged, so the job of {self.out} cannot be identified. "
                f"Restore it, or delete {self.here} and {self.folder} to start over."
            )
        if content.get("format") != _FORMAT:
            raise JobError(
                f"{self.folder} was written by another version of batchax, in format "
                f"{content.get('format')}, and this version reads {_FORMAT}. Resume with that "
                "version, or pass another out=."
            )
        with foreign(self._description):
            self._names[:] = self._names or [str(content.get("name", ""))]
            return Description(Plan.from_json(content["plan"]), content["store"], content["call"])

    def write(self, description: Description, again: bool = False) -> None:
        """Begins the job, which can be resumed from now on, or changes it `again`."""
        plan = dataclasses.asdict(description.plan)
        store, call = description.store, description.call
        content = {"format": _FORMAT, "plan": plan, "store": store, "call": call}
        if isinstance(self.out, ObjectPath):
            if not again:
                self._names[:] = [secrets.token_hex(8)]
            content["name"] = self._names[0]
        put = self.place.replace if again else self.place.create
        put(self._description, sealed(content))

    def read_end(self) -> dict[str, Any] | None:
        """Returns what `write_end` recorded.

        None if the job has not ended, or must be ended again.
        """
        try:
            content = _read(self._end)
            now = self.place.log_sizes(self.journal)
            with foreign(self._end):
                # The journal has less than at the end, so some of it was lost. More does not
                # matter: a slower attempt may have added it.
                if content is None or any(now.get(x, 0) < n for x, n in content["journal"].items()):
                    return None
                reduced = dict(Reduced(content["reduced"], self.partials))
                bad = unpacked(content["bad"])
                return {**content["more"], "bad": bad, "reduced": reduced}
        except UnreachableError:
            raise
        except (FileNotFoundError, StorageError):
            return None

    def withdraw_end(self) -> None:
        self.place.remove(self._end)

    def write_end(
        self, bad: Sequence[Bad] = (), reduced: Mapping[str, Any] | None = None, **more: object
    ) -> None:
        """Records that all is done, with arrays of reductions and `more` as JSON."""
        arrays = written_arrays(reduced or {}, self.partials / "all.bin")
        content = {"bad": packed(bad), "reduced": arrays, "more": more}
        sizes = self.place.log_sizes(self.journal)
        self.place.replace(self._end, sealed({"journal": sizes, **content}))


@dataclass(frozen=True)
class Description:
    plan: Plan  # which rows are committed at once
    store: dict[str, Any]  # what the store says of itself
    call: dict[str, Any]  # the fingerprint of the call

    def plan_at_end(self, end: dict[str, Any]) -> Plan:
        return self.plan.ended(end["rows"]) if self.plan.open else self.plan


def _read(path: Address) -> dict[str, Any] | None:
    line = place_of(path).read(path).rstrip(b"\n")
    if not is_whole(line):
        return None
    with foreign(path):
        return unsealed([line])[0]
