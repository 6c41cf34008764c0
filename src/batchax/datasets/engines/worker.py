"""What a worker does: units, one at a time, of calls that it finds in files."""

from __future__ import annotations

import functools
import os
import pickle
import secrets
import socket
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from batchax.datasets.parts import Bad, Unit
from batchax.datasets.units import probe
from batchax.datasets.work import Work

_MOST_CALLS = 4  # that a worker keeps compiled


class Done(NamedTuple):
    """What a worker says of a unit that it has written down in its journal.

    Attributes:
      number: of the unit.
      rows: how many it has.
      bad: how many of them have no result.
      seconds: how long it took to compute.
    """

    number: int
    rows: int
    bad: int
    seconds: float


@dataclass(frozen=True)
class _Job:
    work: Work
    journal: Any


def run_unit(path: str, number: int, attempt: int = 0, known: Sequence[Bad] = ()) -> Done:
    """Reads, computes and keeps a unit, and writes that down.

    Args:
      path: of the file that says what is to be done.
      number: of the unit.
      attempt: how many times it was begun before.
      known: rows that are not to be computed.

    Raises:
      RowError: a row fails.
      StorageError: something cannot be read or written.
    """
    job = _job(path)
    work, unit = job.work, job.work.plan.unit(number)
    record = work.write(work.compute(unit, work.read(unit), known))
    job.journal.append(replace(record, attempt=attempt))
    return Done(number, unit.rows, len(record.quarantined), record.seconds)


def probe_rows(path: str, number: int, rows: Sequence[int]) -> None:
    """Computes these rows of a unit, and none of its others, and drops the results."""
    work = _job(path).work
    unit: Unit = work.plan.unit(number)
    probe(work.program, unit, work.read(unit), rows)


_jobs: OrderedDict[str, _Job] = OrderedDict()
_lock = threading.Lock()


def _job(path: str) -> _Job:
    with _lock:
        if path not in _jobs:
            call = pickle.loads(Path(path).read_bytes())
            _jobs[path] = _Job(call.work(), call.journal(_writer()))
            if len(_jobs) > _MOST_CALLS:
                _, old = _jobs.popitem(last=False)
                old.journal.close()
        _jobs.move_to_end(path)
        return _jobs[path]


@functools.cache
def _writer() -> str:
    """A name for the journals of this process, which no other has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
