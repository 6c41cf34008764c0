"""The files of a job in a store of objects."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from batchax.datasets import objects
from batchax.datasets.addresses import ObjectPath
from batchax.datasets.leases import Lease, NoLease, is_leased, last_holder
from batchax.datasets.lock import Holder
from batchax.datasets.place import TORN, AnyLock, Log, OvertakenError
from batchax.datasets.steps import (
    AFTER_WRITE,
    BEFORE_RENAME,
    BEFORE_WRITE,
    IN_JOURNAL,
    IN_WRITE,
    reached,
)

_AT_A_TIME = 16  # requests, where many objects are read


class Objects:
    """Objects of a bucket, under names with slashes.

    There are no folders, and what is put is whole, so nothing is ever unfinished.
    """

    def __init__(self, shared: bool) -> None:
        self.shared = shared

    def read(self, path: ObjectPath) -> bytes:
        return objects.read(path)

    def replace(self, path: ObjectPath, content: bytes) -> None:
        for step in (BEFORE_WRITE, IN_WRITE, BEFORE_RENAME):  # those of a disk, before the one put
            reached(step)
        objects.put(path, content)
        reached(AFTER_WRITE)

    def create(self, path: ObjectPath, content: bytes) -> None:
        reached(BEFORE_WRITE)
        try:
            objects.create(path, content)
        except FileExistsError:
            raise OvertakenError(f"{path} was written by somebody else just now.") from None
        reached(AFTER_WRITE)

    def remove(self, path: ObjectPath) -> None:
        objects.remove(path)

    def remove_all(self, folder: ObjectPath) -> None:
        for path, _ in objects.below(folder):
            objects.remove(path)

    def discard(self, path: ObjectPath) -> None:
        self.remove_all(path)

    def mark(self, path: ObjectPath) -> None:
        objects.create(path, secrets.token_hex(8).encode())  # which nobody else's has

    def unmark(self, path: ObjectPath) -> None:
        objects.remove(path)

    def put_first(self, path: ObjectPath, content: bytes) -> None:
        objects.put(path, content)

    def folders(self, folder: ObjectPath, prefix: str) -> list[ObjectPath]:
        names = {path.key[len(folder.key) + 1 :].split("/")[0] for path, _ in objects.below(folder)}
        return [folder / name for name in sorted(names) if name.startswith(prefix)]

    def set_aside(self, path: ObjectPath, folder: ObjectPath) -> None:
        to = folder / f"half-made-{secrets.token_hex(4)}"
        for part, _ in list(objects.below(path)):
            objects.put(to / part.key[len(path.key) + 1 :], objects.read(part))
            objects.remove(part)

    def exists(self, path: ObjectPath) -> bool:
        return objects.exists(path)

    def sizes(self, folder: ObjectPath, prefix: str = "", suffix: str = "") -> dict[str, int]:
        return {
            path.name: meta.size
            for path, meta in sorted(objects.below(folder))
            if path.parent == folder and path.name.startswith(prefix) and path.name.endswith(suffix)
        }

    def make_folder(self, folder: ObjectPath) -> None:
        """There are none."""

    def clean(self, folder: ObjectPath, *inside: ObjectPath) -> None:
        """Nothing is unfinished."""

    def log(self, folder: ObjectPath, writer: str) -> Log:
        return _Segments(folder / writer)

    def logs(self, folder: ObjectPath) -> Iterator[tuple[str, str, bytes]]:
        paths = [path for path, _ in sorted(objects.below(folder))]
        with ThreadPoolExecutor(_AT_A_TIME) as pool:
            for path, content in zip(paths, pool.map(objects.read, paths), strict=True):
                yield path.parent.name, str(path), content

    def log_sizes(self, folder: ObjectPath) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for path, meta in objects.below(folder):
            sizes[path.parent.name] = sizes.get(path.parent.name, 0) + meta.size
        return sizes

    def lock(self, path: ObjectPath, shared: bool = False) -> AnyLock:
        """The lock of a job, or of a shard of it: these exclude the job's, and it excludes them."""
        if shared:
            return NoLease()
        main = path.with_name("lock")
        if path != main:
            return Lease(path, against=lambda: [main])
        folder = path.parent
        return Lease(path, against=lambda: [folder / x for x in self.sizes(folder, "lock-")])

    def is_held(self, path: ObjectPath) -> bool:
        return is_leased(path)

    def last_holder(self, path: ObjectPath) -> Holder | None:
        return last_holder(path)


OBJECTS, IN_MEMORY = Objects(shared=True), Objects(shared=False)


class _Segments:
    """A log as objects with numbers, each put where there is none.

    So who appends finds out if somebody else has appended since it looked: who takes over a log
    puts a segment first that says nothing, and so takes the number of a writer that was stopped and
    goes on.
    """

    def __init__(self, folder: ObjectPath) -> None:
        self._folder, self._next, self._lock = folder, -1, threading.Lock()

    def begin(self) -> None:
        with self._lock:
            while True:
                self._look()
                try:
                    self._put(secrets.token_hex(8).encode() + TORN)  # a line that says nothing
                    return
                except OvertakenError:
                    continue

    def append(self, lines: bytes) -> None:
        with self._lock:
            if self._next < 0:
                self._look()
            reached(IN_JOURNAL)
            self._put(lines)

    def close(self) -> None:
        """Nothing is open."""

    def _look(self) -> None:
        numbers = [int(path.name.partition(".")[0]) for path, _ in objects.below(self._folder)]
        self._next = max(numbers, default=-1) + 1

    def _put(self, content: bytes) -> None:
        path = self._folder / f"{self._next:08d}.jsonl"
        try:
            objects.create(path, content)
        except FileExistsError:
            self._next = -1
            raise OvertakenError(
                f"{path} was written by somebody else, who took the job over."
            ) from None
        self._next += 1
