"""A lock in a store of objects: a lease, which its holder renews, and others take when it does not.

The holder puts its name and a number that only grows; each renewal is put on the condition that the
lease is what it put last. Whoever finds a lease that has not been renewed for `LASTS` seconds puts
its own in its place, on the condition that it is still that one. So one of several who try has it,
and who had it before finds that out when it looks, which it does before each write.

How old a lease is, is asked of the clock of the store: clocks of machines may differ. A holder on
this very machine whose process is gone has let go of it at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
import uuid
import weakref
from typing import Any

from batchax.datasets import objects
from batchax.datasets.addresses import ObjectPath
from batchax.datasets.lock import Holder, LockedError
from batchax.datasets.objects import Version
from batchax.errors import StorageError

LASTS = 30.0  # seconds for which a lease that is not renewed keeps others away
_RENEWALS = 4  # in that time
_PROC = "/proc"


class Lease:
    """A lease at a name in a store.

    Args:
      path: of the lease.
      against: others that must not be held, found by what is returned; asked once this is put, so
        that of two who want what excludes the other at least one sees the other's.

    Raises:
      LockedError: it, or one of `against`, is held.
    """

    def __init__(self, path: ObjectPath, against: Any = lambda: ()) -> None:
        self._path, self._lock = path, threading.Lock()
        self._told = {**_this_process(), "since": time.time(), "token": secrets.token_hex(8)}
        self._renewed = 0
        self._version: Version | None = self._taken()
        try:
            for other in against():
                if is_leased(other):
                    raise LockedError(f"{other} is held by {last_holder(other) or 'somebody'}.")
        except BaseException:
            self.release()
            raise
        self._stop = threading.Event()
        _held.add(self)
        args = weakref.ref(self), self._stop, LASTS / _RENEWALS
        threading.Thread(target=_renew, args=args, name="batchax-lease", daemon=True).start()

    @property
    def held(self) -> bool:
        """Whether this process has it, as far as it knows."""
        return self._version is not None

    @property
    def holds(self) -> bool:
        """Whether it keeps others away, now: the store is asked."""
        with self._lock:
            if self._version is None:
                return False
            try:
                content, version = objects.read_version(self._path)
            except FileNotFoundError:
                self._version = None
                return False
            if not self._is_own(content):
                self._version = None
                return False
            self._version = version  # of a renewal whose answer was lost
            return True

    def renew(self) -> bool:
        """Says that the holder is still there; False if it does not hold it any more."""
        with self._lock:
            if self._version is None:
                return False
            self._renewed += 1
            try:
                self._version = objects.replace(self._path, self._content(), self._version)
                return True
            except FileExistsError:
                pass
        return self.holds  # it may have been our own, of a request whose answer was lost

    def release(self) -> None:
        """Lets go of it, if it is held."""
        _held.discard(self)
        if hasattr(self, "_stop"):
            self._stop.set()
        with self._lock:
            version, self._version = self._version, None
            if version is None:
                return
            self._told["released"] = True
            with contextlib.suppress(FileExistsError, StorageError):  # it is another's, or will be
                objects.replace(self._path, self._content(), version)

    def forget(self) -> None:
        """Without letting go of it: a child that was forked does not have it."""
        self._version = None

    def _taken(self) -> Version:
        content = self._content()
        try:
            return objects.create(self._path, content)
        except FileExistsError:
            pass
        try:
            there, version = objects.read_version(self._path)
        except FileNotFoundError:
            raise LockedError(f"{self._path} is being taken by somebody else.") from None
        if _is_held(self._path, there):
            raise LockedError(f"{self._path} is held by {_holder(there) or 'somebody'}.")
        try:
            return objects.replace(self._path, content, version)
        except FileExistsError:
            raise LockedError(f"{self._path} was just taken by somebody else.") from None

    def _content(self) -> bytes:
        return json.dumps({**self._told, "renewed": self._renewed}).encode()

    def _is_own(self, content: bytes) -> bool:
        return _read(content).get("token") == self._told["token"]


def _renew(lease: weakref.ref[Lease], stop: threading.Event, pause: float) -> None:
    while not stop.wait(pause):
        held = lease()
        if held is None:
            return
        with contextlib.suppress(StorageError):  # it is tried again, and if others have it by
            if not held.renew():  # then, that is seen
                return
        del held


_held: weakref.WeakSet[Lease] = weakref.WeakSet()


def _not_in_children() -> None:
    for lease in list(_held):
        lease.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_not_in_children)


class NoLease:
    """Of a lock that is shared: what keeps others away are the leases of those who share it."""

    held = holds = True

    def release(self) -> None:
        self.held = self.holds = False


def is_leased(path: ObjectPath) -> bool:
    """Whether anybody has it."""
    try:
        return _is_held(path, objects.read(path))
    except FileNotFoundError:
        return False


def last_holder(path: ObjectPath) -> Holder | None:
    """Who took it last; who has it, if it is held."""
    try:
        return _holder(objects.read(path))
    except (OSError, StorageError):
        return None


def _is_held(path: ObjectPath, content: bytes) -> bool:
    told = _read(content)
    if told.get("released") or not told:
        return False
    if told.get("machine") == _machine() and not _runs(told.get("pid"), told.get("started")):
        return False
    try:
        return _now(path) - objects.meta(path).modified < LASTS
    except FileNotFoundError:
        return False


def _now(path: ObjectPath) -> float:
    """The time, by the clock of the store: of something that is put there now."""
    probe = path.with_name(f"time-{secrets.token_hex(4)}")
    try:
        objects.put(probe, b"")
        return objects.meta(probe).modified
    finally:
        objects.remove(probe)


def _holder(content: bytes) -> Holder | None:
    told = _read(content)
    try:
        return Holder(int(told["pid"]), str(told["host"]), float(told["since"]))
    except (LookupError, TypeError, ValueError):
        return None


def _read(content: bytes) -> dict[str, Any]:
    try:
        told = json.loads(content)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _this_process() -> dict[str, Any]:
    pid = os.getpid()
    return {
        "pid": pid,
        "host": socket.gethostname(),
        "machine": _machine(),
        "started": _started(pid),
    }


def _machine() -> str:
    """Where numbers of processes mean the same."""
    try:
        with open(f"{_PROC}/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat(f'{_PROC}/self/ns/pid').st_ino}"
    except OSError:  # a system without that, as macOS
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _started(pid: int) -> str | None:
    """When a process began, in ticks since the machine did: numbers of processes come again.

    None if it has ended, or the system does not tell.
    """
    try:
        with open(f"{_PROC}/{pid}/stat", "rb") as file:
            state, *rest = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else rest[18].decode()


def _runs(pid: Any, started: Any) -> bool:
    """Whether a process of this machine may still run."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    if started is not None:
        return _started(pid) == started
    if os.name != "posix":
        return True  # how old the lease is decides
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's, or the number is none
        return pid < 2**31
    return True
