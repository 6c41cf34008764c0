"""Which units are done: a file of lines, of which each is durable before anyone relies on it.

A process may be killed in the middle of a line. That line, the last one and without an end, counts
for nothing; whoever writes next marks it as torn and goes on after it. A line that is damaged in
any other way was whole once: what it said is lost, and that is told.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from batchax.datasets import partials
from batchax.datasets.addresses import Address
from batchax.datasets.checksums import foreign, is_whole, sealed, unsealed
from batchax.datasets.parts import Record, Unit, packed, unpacked
from batchax.datasets.place import is_torn
from batchax.datasets.places import place_of


class Journal:
    """What one writer says of units: its log in a folder. Threads may share it."""

    def __init__(self, folder: Address, writer: str):
        self._folder, self._writer = folder, writer
        self._log = place_of(folder).log(folder, writer)

    def begin(self) -> None:
        """From now on, who wrote it before and goes on cannot any more."""
        self._log.begin()

    def append(self, record: Record) -> Record:
        """Says that a unit is done. Durable when it returns; see `append_many`."""
        return self.append_many([record])[0]

    def append_many(self, records: Sequence[Record]) -> list[Record]:
        """Says that units are done, by one sync for all; returns them with the time of that."""
        now = time.time()
        new = lambda r: dataclasses.replace(r, ended=r.ended or now, ids=[secrets.token_hex(8)])
        records = [r if r.ids else new(r) for r in records]
        self._append(map(self._entry, records))
        return records

    def withdraw(self, records: Iterable[Record], reason: str) -> None:
        """Says that what these records say is no longer so, and why."""
        self._append(
            {"unit": r.unit.number, "withdrawn": id, "reason": reason}
            for r in records
            for id in r.ids
        )

    def close(self) -> None:
        """Closes it; what is appended later opens it again."""
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
            path = self._folder.parent / partials.FOLDER / name
            entry["reduced"] = partials.written(record.reduced, path)
        return entry

    def _append(self, entries: Iterable[dict[str, Any]]) -> None:
        lines = b"".join(map(sealed, entries))
        if lines:
            self._log.append(lines)


def read_journal(folder: Address) -> dict[int, Record]:
    """The record of each unit that is done: of all writers, the first that was not withdrawn."""
    return read_attempts(folder)[0]


def read_attempts(folder: Address) -> tuple[dict[int, Record], dict[int, list[Record]]]:
    """The same; and all records of units that were written more than once, and differ."""
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
        if "withdrawn" in entry or (number, _id(entry)) in withdrawn:
            continue
        record = _record(entry, folder, writer)
        first = done.setdefault(number, record)
        if first is record:
            continue
        if number in differ or first.checksums != record.checksums:
            differ.setdefault(number, [first]).append(record)
        else:
            ids = [*first.ids, *record.ids]
            first = done[number] = dataclasses.replace(first, ids=ids)
            record = dataclasses.replace(record, ids=ids)
        if record.ended < first.ended:
            done[number] = record
    return done, differ


def sizes(folder: Address) -> dict[str, int]:
    """How much there is of each log of the journal."""
    return place_of(folder).log_sizes(folder)


def _entries(name: str, text: bytes) -> list[dict[str, Any]]:
    lines = text.split(b"\n")[:-1]  # what has no end of a line is torn
    whole = [is_whole(line) for line in lines]
    damaged = list(_damaged(lines, whole))
    if damaged:
        warnings.warn(
            f"{name} is damaged in {'line' if len(damaged) == 1 else 'lines'} "
            f"{', '.join(map(str, damaged[:5]))}{', ...' if len(damaged) > 5 else ''}. Units that "
            "only these lines say are done are computed again. Run `batchax verify` on the output: "
            "the disk may have damaged that, too.",
            stacklevel=2,
        )
    with foreign(name):
        return unsealed(line for line, good in zip(lines, whole, strict=True) if good)


def _damaged(lines: Sequence[bytes], whole: Sequence[bool]) -> Iterator[int]:
    """The numbers of lines that were whole once."""
    for number, (line, good) in enumerate(zip(lines, whole, strict=True), 1):
        if not good and not is_torn(line):
            yield number


def _id(entry: dict[str, Any]) -> Any:
    """By what a record is withdrawn: of versions before 0.2 the time, which may come again."""
    return entry.get("id", entry["ended"])


def _record(entry: dict[str, Any], folder: Address, writer: str) -> Record:
    reduced = entry.get("reduced")
    return Record(
        Unit(entry["unit"], entry["start"], entry["stop"]),
        entry["checksums"],
        entry["attempt"],
        entry["seconds"],
        tuple(unpacked(entry["quarantined"])) if "quarantined" in entry else (),
        partials.Reduced(reduced, folder.parent / partials.FOLDER) if reduced else {},
        entry["ended"],
        [_id(entry)],
        writer,
        entry.get("read", ()),
    )
