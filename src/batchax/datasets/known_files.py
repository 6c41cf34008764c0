"""What is known of files of input: that they are what they were, now and when a job goes on."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from batchax.datasets.addresses import PARTIAL, Address
from batchax.datasets.failures import reading
from batchax.datasets.job_files import JobFiles
from batchax.errors import StorageError

_BEFORE, _WRITE, _AFTER = 1, 2, 4  # flags of sync_file_range(2)
_SMALL = 2**24  # bytes: of so few, what they hold is read when a call is made


_File = tuple[str, int, int, int, int]
"""What is known of a file without reading it: where it is below a path, its size, when it was
written to, when it or what is known of it was changed, both in nanoseconds, and its inode. Whoever
writes may set the first of these times to what it was, and nobody the second."""


class Files:
    """What is known of files without reading them: that they are what they were when opened.

    Args:
      path: a file, or a folder of which all files count.
      name: of the argument, for messages.
      linked: files elsewhere that it is read from, too.

    Attributes:
      path: the same, absolute and without links.
      count: of how many inputs these are one.

    Raises:
      StorageError: it cannot be looked at; or it is the output of a job that is not finished.
    """

    def __init__(self, path: Path, name: str, linked: Sequence[Path] = ()) -> None:
        # One file has one path, from whatever folder and through whatever links it is named.
        self.path, self._name = path.resolve(), name
        self.count = 1
        self._linked = linked
        refuse_unfinished(self.path, name)
        for file in (self.path, *linked):
            if file.is_file():
                _write_out(file)
        self._seen = self._look()

    def check(self) -> None:
        """Raises a StorageError if they were changed since they were opened."""
        try:
            same = self._look() == self._seen
        except StorageError:  # some of it is gone
            same = False
        if not same:
            raise self._changed()

    def check_content(self) -> None:
        """The same, and what is small holds what it did when `identity` was asked for.

        Of what another process has mapped to write to it, a file system in memory moves no time.
        """
        self.check()
        if "_content" in vars(self) and self._digest() != self._content:
            raise self._changed()

    def _changed(self) -> StorageError:
        return StorageError(
            f"{self._name}: {self.path} was changed since it was opened. Let nothing write to "
            "it, and make the call again."
        )

    def identity(self) -> dict[str, Any]:
        """Where they are, how large all are together, when the latest was changed, and more.

        Of a folder, a digest of the names, sizes and times of all files. What is small is also
        known by what it holds: so that is the same which was written again, and holds the same.
        """
        seen = self._seen
        told: dict[str, Any] = {"path": str(self.path), "size": sum(file[1] for file in seen)}
        told["modified_ns"] = max((file[2] for file in seen), default=0)
        told["changed_ns"] = max((file[3] for file in seen), default=0)
        if self.path.is_dir() or self._linked:  # files that were swapped are others
            told["files"] = hashlib.sha256(repr(sorted(f[:4] for f in seen)).encode()).hexdigest()
        if told["size"] * self.count <= _SMALL:
            told["sha256"] = self._content
        return told

    @cached_property
    def _content(self) -> str:
        return self._digest()

    def _digest(self) -> str:
        digest = hashlib.sha256()
        with reading(self._name):
            for name, *_ in sorted(self._seen):
                content = (self.path / name if name else self.path).read_bytes()
                digest.update(f"{name!r} {len(content)} ".encode() + content)
        self.check()
        return digest.hexdigest()

    def _look(self) -> list[_File]:
        with reading(self._name):
            if not self.path.is_dir():
                linked = [_described(str(path), os.stat(path)) for path in self._linked]
                return [_described("", os.stat(self.path)), *linked]
            return [
                _described(os.path.relpath(os.path.join(folder, file), self.path), status)
                for folder, _, names in os.walk(self.path, followlinks=True)
                for file in names
                for status in [os.stat(os.path.join(folder, file))]
            ]


def refuse_unfinished(address: Address, name: str) -> None:
    """Refuses what a job has not computed yet, or what was lost since: it would count as zeros.

    Raises:
      StorageError: it is, or is in, the output of a job that is not finished, or of which a file is
        missing.
    """
    from batchax.datasets.stores import reopen_store  # which imports sources

    for path in (address, *address.parents):
        if path.name.endswith(PARTIAL) and path in (address, address.parent):
            raise StorageError(
                f"{name}: {path} is the output of a job that is not finished, or a copy of it. The "
                "call that began it goes on with it. Rename it if it is something else."
            )
        job = JobFiles(path) if path.name else None
        if job is None or not job.is_begun:
            continue
        end, description = job.read_end(), job.read()
        if end is None or description is None:
            raise StorageError(
                f"{name}: {path} is the output of a job that is not finished, and rows "
                f"that are still to come would count as zeros. `batchax status {path}` says "
                "how far it is; the call that began it goes on with it."
            )
        units = description.plan_at_end(end).units
        for file in reopen_store(path, description.store).missing(units).values():
            raise StorageError(
                f"{name}: {file} is missing, and its rows would count as zeros, or not at all. "
                f"Restore it, or make the call that wrote {path} again: it computes these rows."
            )


def _described(name: str, status: os.stat_result) -> _File:
    times = status.st_mtime_ns, status.st_ctime_ns
    return name, status.st_size, *times, status.st_ino


def _write_out(path: Path) -> None:
    """Has the system write what another process wrote to a memory map of the file.

    From then on its next write to a page is noticed, and moves the time of the file, which writes
    to a page that is to be written out anyway do not.
    """
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        if sys.platform != "linux":
            return os.fsync(file.fileno())
        whole = ctypes.c_int64(0), ctypes.c_int64(0)
        # Unlike fsync it does not wait until the disk itself has it: microseconds if nothing waits.
        ctypes.CDLL(None).sync_file_range(file.fileno(), *whole, _BEFORE | _WRITE | _AFTER)
