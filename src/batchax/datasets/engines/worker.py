"""What a worker does: units, one at a time, of calls that it finds in files."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from batchax.datasets.engines.attempts import Attempts
from batchax.datasets.units import not_computed
from batchax.datasets.work import Work
from batchax.errors import JobError

_MOST_CALLS = 4  # that a worker keeps compiled


class Done(NamedTuple):
    """What a worker says of a unit that it has written down in its journal.

    Attributes:
      number: of the unit.
      rows: how many it has.
      bad: how many of them have no result.
      seconds: how long it took to read, compute and write.
    """

    number: int
    rows: int
    bad: int
    seconds: float


@dataclass(frozen=True)
class _Job:
    """What a worker keeps of a call; `call` is a `Call`, which this module does not import."""

    call: Any
    work: Work
    journal: Any


def run_unit(attempts: Attempts, number: int, attempt: int = 0, given_up: str = "") -> Done | None:
    """Reads, computes and keeps a unit, and writes that down.

    Args:
      attempts: at the units of the call.
      number: of the unit.
      attempt: which attempt at it this is.
      given_up: why none of its rows is to be read and computed, if so.

    Returns:
      None if the unit is over, and what was computed dropped.

    Raises:
      RowError: a row fails.
      StorageError: something cannot be read or written.
      JobError: here the call would compute something else, or of something else.
      EndedError: a worker ended in the middle of this very attempt.
    """
    if attempts.is_over(number):
        return None
    with _here(attempts) as job, attempts.running(number, attempt):
        begun, work = time.monotonic(), job.work
        unit = work.plan.unit(number)
        if given_up:
            computed = not_computed(work.function.outputs, unit, given_up)
        else:
            computed = work.begin(unit, work.read(unit))()
        if attempts.is_over(number):
            return None
        record = work.write(computed)
        job.journal.append(replace(record, attempt=attempt))
        return Done(number, unit.rows, len(record.quarantined), time.monotonic() - begun)


@contextlib.contextmanager
def _here(attempts: Attempts) -> Iterator[_Job]:
    """The job of a call, with its program compiled, and this process as the call wants it."""
    try:
        with _undisturbed():
            job = _job(attempts)
            with job.call.settings():
                _ = job.work.program
                yield job
    except Exception as error:
        raise portable(error) from None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C in a terminal reaches the processes of a pool, too: what they do is to be kept."""
    in_pool = multiprocessing.parent_process() is not None
    if not in_pool or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def portable(error: Exception) -> Exception:
    """An error that can be handed to another process."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:
        pass
    return JobError("".join(traceback.format_exception(error)))


_jobs: OrderedDict[Attempts, _Job] = OrderedDict()
_lock = threading.Lock()


def _job(attempts: Attempts) -> _Job:
    with _lock:
        if attempts not in _jobs:
            call = pickle.loads(attempts.call)
            with call.settings():
                work = replace(call.work(), check=functools.partial(_check, attempts))
                _jobs[attempts] = _Job(call, work, call.journal(_writer()))
            if len(_jobs) > _MOST_CALLS:
                _, old = _jobs.popitem(last=False)
                old.journal.close()
        _jobs.move_to_end(attempts)
        return _jobs[attempts]


def _check(attempts: Attempts) -> None:
    if not attempts.is_there:
        raise JobError(f"the call is over: {attempts.folder} is gone.")


@functools.cache
def _writer() -> str:
    """A name for the journals of this process, which no other has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
