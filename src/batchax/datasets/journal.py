"""Which units are done: a file of lines, of which each is durable before anyone relies on it.

A process may be killed in the middle of a line. That line, the last one and without an end, counts
for nothing; whoever writes next marks it as torn and goes on after it. A line that is damaged in
any other way was whole once: what it said is lost, and that is told.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from batchax.datasets import partials
from batchax.datasets.checksums import foreign, is_whole, sealed, unsealed
from batchax.datasets.durable import append, make_folder, open_own, read_own, writing
from batchax.datasets.parts import Record, Unit, packed, unpacked
from batchax.errors import StorageError

_TORN = b" torn\n"


class Journal:
    """What one writer says of units: `<folder>/<writer>.jsonl`. Threads may share it."""

    def __init__(self, folder: Path, writer: str):
        self._path = folder / f"{writer}.jsonl"
        self._file: int | None = None
        self._at_start_of_line = False
        self._lock = threading.Lock()

    def append(self, record: Record) -> Record:
        """Says that a unit is done. Durable when it returns; see `append_many`."""
        return self.append_many([record])[0]

    def append_many(self, records: Sequence[Record]) -> list[Record]:
        """Says that units are done, by one sync for all; returns them with the time of that."""
        now = time.time()
        records = [r if r.ended else dataclasses.replace(r, ended=now) for r in records]
        self._append(map(self._entry, records))
        return records

    def withdraw(self, records: Iterable[Record], reason: str) -> None:
        """Says that what these records say is no longer so, and why."""
        self._append(
            {"unit": r.unit.number, "withdrawn": r.ended, "reason": reason} for r in records
        )

    def close(self) -> None:
        """Closes the file; what is appended later opens it again."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

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
        }
        if record.quarantined:
            entry["quarantined"] = packed(record.quarantined)
        if record.reduced:
            name = f"{number:08d}-{record.attempt}-{self._path.stem}.bin"
            path = self._path.parent.parent / partials.FOLDER / name
            entry["reduced"] = partials.written(record.reduced, path)
        return entry

    def _append(self, entries: Iterable[dict[str, Any]]) -> None:
        with self._lock:
            lines = b"".join(map(sealed, entries))
            if not lines:
                return
            if self._file is None:
                self._file = self._open()
            if not self._at_start_of_line:
                lines = _TORN + lines
            self._at_start_of_line = False
            append(self._path, self._file, lines)
            self._at_start_of_line = True

    def _open(self) -> int:
        make_folder(self._path.parent)
        with writing(self._path):
            file = open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            size = os.fstat(file).st_size
            self._at_start_of_line = size == 0 or os.pread(file, 1, size - 1) == b"\n"
        return file


def read_journal(folder: Path) -> dict[int, Record]:
    """The record of each unit that is done: of all writers, the first that was not withdrawn."""
    return read_attempts(folder)[0]


def read_attempts(folder: Path) -> tuple[dict[int, Record], dict[int, list[Record]]]:
    """The same; and all records of units that were written more than once, and differ."""
    entries = [(entry, path.stem) for path in _files(folder) for entry in _entries(path)]
    with foreign(folder):
        return _done(entries, folder)


def _done(
    entries: Sequence[tuple[dict[str, Any], str]], folder: Path
) -> tuple[dict[int, Record], dict[int, list[Record]]]:
    withdrawn = {(e["unit"], e["withdrawn"]) for e, _ in entries if "withdrawn" in e}
    done: dict[int, Record] = {}
    differ: dict[int, list[Record]] = {}
    for entry, writer in entries:
        number = entry["unit"]
        if "withdrawn" in entry or (number, entry["ended"]) in withdrawn:
            continue
        record = _record(entry, folder, writer)
        first = done.setdefault(number, record)
        if first is record:
            continue
        if number in differ or first.checksums != record.checksums:
            differ.setdefault(number, [first]).append(record)
        if record.ended < first.ended:
            done[number] = record
    return done, differ


def sizes(folder: Path) -> dict[str, int]:
    """The size of each file of the journal."""
    return {path.name: path.stat().st_size for path in _files(folder)}


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def _entries(path: Path) -> list[dict[str, Any]]:
    try:
        lines = read_own(path).split(b"\n")[:-1]  # what has no end of a line is torn
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} could not be read: {error.strerror}.") from error
    whole = [is_whole(line) for line in lines]
    damaged = list(_damaged(lines, whole))
    if damaged:
        warnings.warn(
            f"{path} is damaged in {'line' if len(damaged) == 1 else 'lines'} "
            f"{', '.join(map(str, damaged[:5]))}{', ...' if len(damaged) > 5 else ''}. Units that "
            "only these lines say are done are computed again. Run `batchax verify` on the output: "
            "the disk may have damaged that, too.",
            stacklevel=2,
        )
    with foreign(path):
        return unsealed(line for line, good in zip(lines, whole, strict=True) if good)


def _damaged(lines: Sequence[bytes], whole: Sequence[bool]) -> Iterator[int]:
    """The numbers of lines that were whole once."""
    for number, (line, good) in enumerate(zip(lines, whole, strict=True), 1):
        if not good and not line.endswith(_TORN.rstrip(b"\n")):
            yield number


def _record(entry: dict[str, Any], folder: Path, writer: str) -> Record:
    reduced = entry.get("reduced")
    return Record(
        Unit(entry["unit"], entry["start"], entry["stop"]),
        entry["checksums"],
        entry["attempt"],
        entry["seconds"],
        tuple(unpacked(entry["quarantined"])) if "quarantined" in entry else (),
        partials.Reduced(reduced, folder.parent / partials.FOLDER) if reduced else {},
        entry["ended"],
        writer,
    )
