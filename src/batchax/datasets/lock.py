"""Of all processes one at a time writes to a job, and the others are told which."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from pathlib import Path
from typing import NamedTuple

from batchax.datasets.durable import open_own, read_own, writing
from batchax.errors import JobError, StorageError

# Somebody who only looks whether a lock is held, holds it for a moment. On a busy machine that is
# longer, and so is each pause: it is looked so often, not for so long.
_LOOKS, _PAUSE = 25, 0.01


class Holder(NamedTuple):
    """Who took a lock, and when, in seconds since 1970."""

    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        own = self.host == socket.gethostname()
        who = f"process {self.pid}" + ("" if own else f" on {self.host}")
        if own and self.pid == os.getpid():
            who = "this process"
        return f"{who}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


class LockedError(JobError):
    """Somebody else has the lock."""


class Lock:
    """A lock on a file, which says in it who has it. Several may have one that is `shared`.

    The system lets go of it when the process ends, however it ends. A child that the process forks
    does not have it: it would keep it after the parent's end.
    """

    def __init__(self, path: Path, shared: bool = False):
        with writing(path):
            file = open_own(path, os.O_RDWR | os.O_CREAT)
            try:
                if not _taken(file, shared):
                    raise LockedError(
                        f"{path} is held by {last_holder(path) or 'another process'}."
                    )
                holder = Holder(os.getpid(), socket.gethostname(), time.time())
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(holder._asdict()).encode(), 0)
            except BaseException:
                os.close(file)
                raise
        self._file: int | None = file
        self._path = path
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether this process has it."""
        return self._file is not None

    @property
    def holds(self) -> bool:
        """Whether it keeps others away: one whose file was deleted keeps away nobody."""
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        """Lets go of it, if it is held."""
        _held.discard(self)
        if self._file is not None:
            os.close(self._file)
        self._file = None


_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _not_in_children() -> None:
    for lock in list(_held):
        lock.release()  # the child's copy is closed; the parent has its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_not_in_children)


def last_holder(path: Path) -> Holder | None:
    """Who took the lock last; who has it, if it is held."""
    try:
        return Holder(**json.loads(read_own(path)))
    except (OSError, StorageError, ValueError, TypeError):
        return None  # nobody yet, or somebody is writing it down


def is_held(path: Path) -> bool:
    """Whether anybody has the lock."""
    try:
        file = open_own(path, os.O_RDONLY)  # to lock it, this is enough
    except FileNotFoundError:
        return False
    try:
        return not _locked(file)
    finally:
        os.close(file)


def _taken(file: int, shared: bool) -> bool:
    for _ in range(_LOOKS):
        if _locked(file, shared):
            return True
        time.sleep(_PAUSE)
    return _locked(file, shared)


def _locked(file: int, shared: bool = False) -> bool:
    import fcntl  # which not all systems have on which batchax can be imported

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
