"""What is known of files of input: that they are what they were, now and when a job goes on."""

from __future__ import annotations

import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from batchax.datasets.addresses import Address
from batchax.datasets.failures import reading
from batchax.datasets.job_files import JobFiles
from batchax.errors import StorageError

_SMALL = 2**24  # bytes: of so few, what they hold is read when a call is made


class _Seen(NamedTuple):
    """Of each file where it is below the path, which file it is, its size, and its time."""

    files: tuple[tuple[str, int, int, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, _, size, _ in self.files)

    @property
    def modified_ns(self) -> int:
        return max((modified for *_, modified in self.files), default=0)

    def digest(self) -> str:
        """Of names, sizes and times: files that were swapped are others."""
        told = sorted((name, size, modified) for name, _, size, modified in self.files)
        return hashlib.sha256(repr(told).encode()).hexdigest()


class Files:
    """What is known of files without reading them: that they are what they were when opened.

    Args:
      path: a file, or a folder of which all files count.
      name: of the argument, for messages.

    Attributes:
      path: the same, absolute and without links.
      count: of how many inputs these are one.

    Raises:
      StorageError: it cannot be looked at; or it is the output of a job that is not finished.
    """

    def __init__(self, path: Path, name: str) -> None:
        # One file has one path, from whatever folder and through whatever links it is named.
        self.path, self._name = path.resolve(), name
        self.count = 1
        refuse_unfinished(self.path, name)
        self._seen = self._look()

    def check(self) -> None:
        """Raises a StorageError if they were changed since they were opened."""
        try:
            same = self._look() == self._seen
        except StorageError:  # some of it is gone
            same = False
        if not same:
            raise StorageError(
                f"{self._name}: {self.path} was changed since it was opened. Let nothing write to "
                "it, and make the call again."
            )

    def identity(self) -> dict[str, Any]:
        """Where they are, how large all are together, when the latest was changed, and more.

        Of a folder, a digest of the names, sizes and times of all files. What is small is also
        known by what it holds: so that is the same which was written again, and holds the same.
        """
        seen = self._seen
        told = {"path": str(self.path), "size": seen.size, "modified_ns": seen.modified_ns}
        if self.path.is_dir():
            told["files"] = seen.digest()
        if seen.size * self.count <= _SMALL:
            told["sha256"] = self._content
        return told

    @cached_property
    def _content(self) -> str:
        digest = hashlib.sha256()
        with reading(self._name):
            for name, *_ in sorted(self._seen.files):
                content = (self.path / name if name else self.path).read_bytes()
                digest.update(f"{name!r} {len(content)} ".encode() + content)
        self.check()
        return digest.hexdigest()

    def _look(self) -> _Seen:
        with reading(self._name):
            if not self.path.is_dir():
                return _Seen((_described("", os.stat(self.path)),))
            return _Seen(
                tuple(
                    _described(os.path.relpath(os.path.join(folder, file), self.path), status)
                    for folder, _, names in os.walk(self.path)
                    for file in names
                    for status in [os.stat(os.path.join(folder, file))]
                )
            )


def refuse_unfinished(address: Address, name: str) -> None:
    """Refuses what a job has not computed yet, or what was lost since: it would count as zeros.

    Raises:
      StorageError: it is, or is in, the output of a job that is not finished, or of which a file is
        missing.
    """
    from batchax.datasets.stores import reopen_store  # which imports sources

    for path in (address, *address.parents):
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


def _described(name: str, status: os.stat_result) -> tuple[str, int, int, int]:
    return name, status.st_ino, status.st_size, status.st_mtime_ns
