"""Files of a job in object storage: requests, leases, and logs of objects.

An object's name may have slashes, but there are no folders. An object is put whole, so `clean` and
`make_own_folder` have nothing to do. Functions with names as in `disk` do the same here.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import secrets
import socket
import sys
import threading
import time
import urllib.parse
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from batchax.datasets import disk
from batchax.datasets.addresses import Address, ObjectPath, masked, needed
from batchax.datasets.disk import (
    TORN,
    Holder,
    LockedError,
    OvertakenError,
    UnreachableError,
)
from batchax.errors import StorageError

T = TypeVar("T")

RETRIES = {  # of a request, by the library
    "max_retries": 4,
    "retry_timeout": datetime.timedelta(seconds=60),
    "backoff": {
        "init_backoff": datetime.timedelta(milliseconds=100),
        "max_backoff": datetime.timedelta(seconds=5),
        "base": 2,
    },
}
TIMEOUTS = {"connect_timeout": "10s", "timeout": "60s"}
_ENDPOINTS = (  # variables of the environment
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "AZURITE_BLOB_STORAGE_URL",
    "GOOGLE_BASE_URL",
)


class Version(NamedTuple):
    """Identifies a version of an object, among all under its name."""

    e_tag: str | None
    version: str | None

    @property
    def name(self) -> str:
        """Returns the same name for each answer: not all have the version, or quotes around the
        tag.
        """
        return (self.e_tag or self.version or "").strip('"')


class Meta(NamedTuple):
    size: int  # in bytes
    version: Version
    modified: float  # when it was put, by the clock of the store, in seconds since 1970


def read(path: ObjectPath, part: tuple[int, int] | None = None) -> bytes:
    return read_version(path, part)[0]


def read_version(path: ObjectPath, part: tuple[int, int] | None = None) -> tuple[bytes, Version]:
    def get() -> tuple[bytes, Version]:
        options: Any = None if part is None else {"range": part}
        got = _obstore().get(_bucket(path), path.key, options=options)
        return bytes(got.bytes()), _version(got.meta)

    return _request(path, "read", get)


def meta(path: ObjectPath) -> Meta:
    return _meta(_request(path, "looked at", lambda: _obstore().head(_bucket(path), path.key)))


def put(path: ObjectPath, content: bytes, mode: str | dict[str, str] = "overwrite") -> Version:
    def ask() -> Version:
        return _version(
            _obstore().put(_bucket(path), path.key, content, mode=mode, use_multipart=False)
        )

    return _request(path, "written", ask)


def put_new(path: ObjectPath, content: bytes) -> Version:
    """Puts an object where there is none. Raises FileExistsError for another one."""
    return _unless_lost(path, content, "create")


def put_over(path: ObjectPath, content: bytes, before: Version) -> Version:
    """Replaces this version of an object. Raises FileExistsError for another version."""
    condition = {name: x for name, x in before._asdict().items() if x is not None}
    return _unless_lost(path, content, condition)


def remove(path: ObjectPath) -> None:
    with contextlib.suppress(FileNotFoundError):
        _request(path, "removed", lambda: _obstore().delete(_bucket(path), path.key))


def below(path: ObjectPath) -> Iterator[tuple[ObjectPath, Meta]]:
    """Yields all objects whose names begin with this one and a slash, in any order."""

    def listed() -> list[Any]:
        chunks = _obstore().list(_bucket(path), path.key or None)
        return [entry for chunk in chunks for entry in chunk]

    for entry in _request(path, "listed", listed):
        yield ObjectPath(path.scheme, path.bucket, entry["path"]), _meta(entry)


def exists(path: ObjectPath) -> bool:
    try:
        meta(path)
        return True
    except FileNotFoundError:
        pass
    # A prefix under which objects lie exists like a folder.
    some = lambda: next(iter(_obstore().list(_bucket(path), path.key, chunk_size=1)), [])
    return bool(len(_request(path, "listed", some)))


def _unless_lost(path: ObjectPath, content: bytes, mode: str | dict[str, str]) -> Version:
    try:
        return put(path, content, mode)
    # The answer to an earlier, successful attempt may be lost: equal content is our own.
    except (FileExistsError, FileNotFoundError):
        try:
            there, version = read_version(path)
        except FileNotFoundError:
            raise FileExistsError(f"{path} is gone") from None
        if there == content:
            return version
        raise FileExistsError(f"{path} is another one") from None


def _request(path: ObjectPath, done: str, ask: Callable[[], T]) -> T:
    """Sends a request. Its errors become Python's, or a sentence without secrets."""
    errors = needed("obstore.exceptions", f"{path.scheme}://")
    try:
        return ask()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist") from None
    except (errors.AlreadyExistsError, errors.PreconditionError):
        raise FileExistsError(f"{path} is another one") from None
    except StorageError:
        raise
    except (errors.BaseError, OSError, ValueError) as error:
        # Without the cause: its text would be in the traceback.
        message = f"{path} could not be {done}: {without_secrets(error)}"
        raise UnreachableError(message) from None


def without_secrets(error: BaseException) -> str:
    """Returns the first lines of a library's error, without credentials."""
    said = masked(str(error).split("\n\nDebug source")[0].strip())
    return f"{' '.join(said.split())[:400] or type(error).__name__}."


def _version(entry: Mapping[str, Any]) -> Version:
    return Version(entry["e_tag"], entry["version"])


def _meta(entry: Mapping[str, Any]) -> Meta:
    return Meta(entry["size"], _version(entry), entry["last_modified"].timestamp())


def _obstore() -> ModuleType:
    return needed("obstore", "an address such as s3://bucket/key")


def _bucket(path: ObjectPath) -> object:
    try:
        return _opened(path.scheme, path.bucket, os.getpid())
    except (ImportError, StorageError):
        raise
    except Exception as error:
        raise UnreachableError(
            f"{path.scheme}://{path.bucket} cannot be opened: {without_secrets(error)} Keys, "
            "regions and addresses of servers are taken from the environment."
        ) from None


@functools.cache
def _opened(scheme: str, bucket: str, process: int) -> object:
    """Opens a client with the settings of the environment. Threads may share it."""
    # Cached by process: a forked child lacks the threads of its parent's client.
    stores = needed("obstore.store", f"{scheme}://")
    if scheme == "memory":
        return stores.MemoryStore()
    return stores.from_url(
        f"{scheme}://{bucket}", retry_config=RETRIES, client_options=_client_options()
    )


def _client_options() -> dict[str, Any]:
    """Returns timeouts, and allows plain HTTP if the environment names such a server."""
    schemes = [_checked(name, os.environ.get(name)) for name in _ENDPOINTS]
    return {**TIMEOUTS, **({"allow_http": True} if "http" in schemes else {})}


def _checked(name: str, address: str | None) -> str | None:
    """Returns the scheme of a server's address. Invalid ones are not repeated in messages."""
    if not address:
        return None
    try:
        # Otherwise the library ends the thread, or repeats the address with its password.
        parts = urllib.parse.urlsplit(address)
        scheme = parts.scheme if parts.hostname and parts.port != 0 else ""
    except ValueError:  # it is no port
        scheme = ""
    if scheme not in ("http", "https") or any(map(str.isspace, address)):
        raise UnreachableError(
            f"{name} in the environment is not the address of a server, and is not repeated, since "
            "it may hold a password. Set it to an address such as https://host:9000, with letters "
            "such as / and @ in a password percent-encoded."
        )
    return scheme


LASTS = 30.0  # seconds for which a lease that is not renewed keeps others away
_RENEWALS = 4  # in that time
_PROC = "/proc"


class Lease:
    """Locks in object storage: the holder renews the lease, and others take it if it does not.

    `path` is that of the lease. `against` returns leases that must not be held.
    """

    # The holder puts its name and a growing number. Each renewal, and each takeover after `LASTS`
    # seconds without one, is conditional on the version before. So one process has the lease, and a
    # former holder finds out when it checks before each write. Ages are by the clock of the store,
    # as clocks differ. A holder on this machine whose process is gone has lost it at once.
    def __init__(
        self, path: ObjectPath, against: Callable[[], Iterable[ObjectPath]] = lambda: ()
    ) -> None:
        self._path, self._lock = path, threading.Lock()
        self._lease = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": _machine(),
            "since": time.time(),
            "token": secrets.token_hex(8),
        }
        self._renewed = 0
        self._version: Version | None = self._taken()
        try:
            # Checked after this lease is put: of two that exclude each other, at least one sees the
            # other.
            for other in against():
                if is_held(other):
                    raise LockedError(
                        f"{other} is held by {last_holder(other) or 'another process'}."
                    )
        except BaseException:
            self.release()
            raise
        self._stop = threading.Event()
        _held.add(self)
        args = weakref.ref(self), self._stop, LASTS / _RENEWALS
        threading.Thread(target=_renew, args=args, name="batchax-lease", daemon=True).start()

    @property
    def held(self) -> bool:
        return self._version is not None

    @property
    def holds(self) -> bool:
        """Returns whether it excludes others now, by a request to the store."""
        with self._lock:
            if self._version is None:
                return False
            try:
                content, version = read_version(self._path)
                own = _read(content).get("token") == self._lease["token"]
            except FileNotFoundError:
                own, version = False, None
            self._version = version if own else None  # that of a renewal whose answer was lost
            return own

    def renew(self) -> bool:
        """Renews the lease; returns False if it is lost."""
        with self._lock:
            if self._version is None:
                return False
            self._renewed += 1
            try:
                self._version = put_over(self._path, self._content(), self._version)
                return True
            except FileExistsError:
                pass
        return self.holds  # it may have been our own, of a request whose answer was lost

    def release(self) -> None:
        _held.discard(self)
        if hasattr(self, "_stop"):
            self._stop.set()
        with self._lock:
            version, self._version = self._version, None
            if version is None:
                return
            self._lease["released"] = True
            with contextlib.suppress(FileExistsError, StorageError):  # it is another's, or will be
                put_over(self._path, self._content(), version)

    def _taken(self) -> Version:
        content = self._content()
        try:
            return put_new(self._path, content)
        except FileExistsError:
            pass
        try:
            there, version = read_version(self._path)
        except FileNotFoundError:
            raise LockedError(f"{self._path} is being taken by another process.") from None
        if _is_held(self._path, there):
            raise LockedError(f"{self._path} is held by {_holder(there) or 'another process'}.")
        try:
            return put_over(self._path, content, version)
        except FileExistsError:
            raise LockedError(f"{self._path} was just taken by another process.") from None

    def _content(self) -> bytes:
        return json.dumps({**self._lease, "renewed": self._renewed}).encode()


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


def _forget_in_child() -> None:
    for lease in list(_held):
        lease._version = None  # the parent holds it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


class NoLease:
    """Stands for a shared lock: leases of the processes that share it exclude others."""

    held = holds = True

    def release(self) -> None:
        self.held = self.holds = False


def is_held(path: ObjectPath) -> bool:
    try:
        return _is_held(path, read(path))
    except FileNotFoundError:
        return False


def last_holder(path: ObjectPath) -> Holder | None:
    try:
        return _holder(read(path))
    except (OSError, StorageError):
        return None


def _is_held(path: ObjectPath, content: bytes) -> bool:
    lease = _read(content)
    if lease.get("released") or not lease:
        return False
    if lease.get("machine") == _machine() and not _runs(lease.get("pid")):
        return False
    try:
        return _now(path) - meta(path).modified < LASTS
    except FileNotFoundError:
        return False


def _now(path: ObjectPath) -> float:
    """Returns the time by the clock of the store, from an object that is put now."""
    probe = path.with_name(f"time-{secrets.token_hex(4)}")
    try:
        put(probe, b"")
        return meta(probe).modified
    finally:
        remove(probe)


def _holder(content: bytes) -> Holder | None:
    lease = _read(content)
    try:
        return Holder(int(lease["pid"]), str(lease["host"]), float(lease["since"]))
    except (LookupError, TypeError, ValueError):
        return None


def _read(content: bytes) -> dict[str, Any]:
    try:
        lease = json.loads(content)
    except ValueError:
        return {}
    return lease if isinstance(lease, dict) else {}


def _machine() -> str:
    # Process numbers are only comparable within one boot and one PID namespace.
    try:
        with open(f"{_PROC}/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.stat(f'{_PROC}/self/ns/pid').st_ino}"
    except OSError:  # a system without that, as macOS
        return f"{socket.gethostname()} {uuid.getnode():x}"


def _runs(pid: object) -> bool:
    """Returns whether a process runs. Another one may have its number: then the age decides."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's, or the number is none
        return pid < 2**31
    return True


_AT_A_TIME = 16  # requests, where many objects are read


def replace(path: ObjectPath, content: bytes) -> None:
    put(path, content)


def create(path: ObjectPath, content: bytes) -> None:
    try:
        put_new(path, content)
    except FileExistsError:
        raise OvertakenError(f"{path} was just written by another process.") from None


def remove_all(folder: ObjectPath) -> None:
    for path, _ in below(folder):
        remove(path)


discard = remove_all


def mark(path: ObjectPath) -> None:
    put_new(path, secrets.token_hex(8).encode())  # which no other process has


unmark = remove
put_first = replace


def folders(folder: ObjectPath, prefix: str) -> list[ObjectPath]:
    names = {path.key[len(folder.key) + 1 :].split("/")[0] for path, _ in below(folder)}
    return [folder / name for name in sorted(names) if name.startswith(prefix)]


def sizes(folder: ObjectPath, prefix: str = "", suffix: str = "") -> dict[str, int]:
    return {
        path.name: meta.size
        for path, meta in sorted(below(folder))
        if path.parent == folder and path.name.startswith(prefix) and path.name.endswith(suffix)
    }


def clean(*_: ObjectPath) -> None:
    """Does nothing."""


make_own_folder = clean


def logs(folder: ObjectPath) -> Iterator[tuple[str, str, bytes]]:
    paths = [path for path, _ in sorted(below(folder))]
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for path, content in zip(paths, pool.map(read, paths), strict=True):
            yield path.parent.name, str(path), content


def log_sizes(folder: ObjectPath) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for path, meta in below(folder):
        sizes[path.parent.name] = sizes.get(path.parent.name, 0) + meta.size
    return sizes


def lock(path: ObjectPath, shared: bool = False) -> Lease | NoLease:
    """Locks a job or a shard of it, which exclude each other."""
    if shared:
        return NoLease()
    main = path.with_name("lock")
    if path != main:
        return Lease(path, against=lambda: [main])
    folder = path.parent
    return Lease(path, against=lambda: [folder / x for x in sizes(folder, "lock-")])


def log(folder: ObjectPath, writer: str) -> _Segments:
    return _Segments(folder / writer)


class _Segments:
    """Writes a log as numbered objects, each put where there is none."""

    def __init__(self, folder: ObjectPath) -> None:
        # A writer finds out that way if another one has appended since it looked. A process that
        # takes over a log first puts an empty segment, which takes the next number of a writer that
        # was suspended and continues.
        self._folder, self._next, self._lock = folder, -1, threading.Lock()

    def begin(self) -> None:
        with self._lock:
            while True:
                self._look()
                try:
                    self._put(secrets.token_hex(8).encode() + TORN)
                    return
                except OvertakenError:
                    continue

    def append(self, lines: bytes) -> None:
        with self._lock:
            if self._next < 0:
                self._look()
            self._put(lines)

    def close(self) -> None:
        """Does nothing."""

    def _look(self) -> None:
        numbers = [int(path.name.partition(".")[0]) for path, _ in below(self._folder)]
        self._next = max(numbers, default=-1) + 1

    def _put(self, content: bytes) -> None:
        path = self._folder / f"{self._next:08d}.jsonl"
        try:
            put_new(path, content)
        except FileExistsError:
            self._next = -1
            raise OvertakenError(
                f"{path} was written by another process, which took the job over."
            ) from None
        self._next += 1


def place_of(path: Address) -> ModuleType:
    """Returns the module, this one or `disk`, that reads and writes files at `path`."""
    return sys.modules[__name__] if isinstance(path, ObjectPath) else disk
