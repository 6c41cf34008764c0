"""The files of a job on a disk."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from batchax.datasets.durable import (
    append,
    discard,
    make_folder,
    open_own,
    own_folder,
    read_own,
    remove_file,
    remove_unfinished,
    replace_file,
    writing,
)
from batchax.datasets.lock import Holder, Lock, is_held, last_holder
from batchax.datasets.place import TORN, AnyLock, Log
from batchax.errors import StorageError


class Disk:
    """Files of this machine, or of a network's, under paths."""

    shared = True

    def read(self, path: Path) -> bytes:
        return read_own(path)

    def replace(self, path: Path, content: bytes) -> None:
        replace_file(path, content)

    def create(self, path: Path, content: bytes) -> None:
        # Only ever asked of who has a lock, which on a disk nobody else can have.
        replace_file(path, content)

    def remove(self, path: Path) -> None:
        remove_file(path)

    def remove_all(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def discard(self, path: Path) -> None:
        discard(path)

    def mark(self, path: Path) -> None:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))

    def unmark(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def put_first(self, path: Path, content: bytes) -> None:
        path.parent.mkdir(mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(path, flags, 0o600), "wb") as file:
            file.write(content)

    def folders(self, folder: Path, prefix: str) -> list[Path]:
        return list(folder.glob(f"{prefix}*"))

    def set_aside(self, path: Path, folder: Path) -> None:
        os.replace(path, folder / f"half-made-{secrets.token_hex(4)}")

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def sizes(self, folder: Path, prefix: str = "", suffix: str = "") -> dict[str, int]:
        names = sorted(folder.glob(f"{prefix}*{suffix}"))
        return {path.name: path.stat().st_size for path in names}

    def make_folder(self, folder: Path) -> None:
        make_folder(own_folder(folder))

    def clean(self, folder: Path, *inside: Path) -> None:
        for each in (folder, *map(own_folder, inside)):
            remove_unfinished(each)

    def log(self, folder: Path, writer: str) -> Log:
        return _AppendedFile(folder / f"{writer}.jsonl")

    def logs(self, folder: Path) -> Iterator[tuple[str, str, bytes]]:
        for path in sorted(own_folder(folder).glob("*.jsonl")):
            try:
                yield path.stem, str(path), read_own(path)
            except StorageError:
                raise
            except OSError as error:
                raise StorageError(f"{path} could not be read: {error.strerror}.") from error

    def log_sizes(self, folder: Path) -> dict[str, int]:
        return self.sizes(folder, suffix=".jsonl")

    def lock(self, path: Path, shared: bool = False) -> AnyLock:
        return Lock(path, shared)

    def is_held(self, path: Path) -> bool:
        return is_held(path)

    def last_holder(self, path: Path) -> Holder | None:
        return last_holder(path)


DISK = Disk()


class _AppendedFile:
    """A log as a file. A line that a killed writer left unfinished is marked as torn."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._at_start_of_line = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The lock of the system does that."""

    def append(self, lines: bytes) -> None:
        with self._lock:
            if self._file is None:
                self._file = self._open()
            if not self._at_start_of_line:
                lines = TORN + lines
            self._at_start_of_line = False
            append(self._path, self._file, lines)
            self._at_start_of_line = True

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _open(self) -> int:
        make_folder(own_folder(self._path.parent))
        with writing(self._path):
            file = open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            size = os.fstat(file).st_size
            self._at_start_of_line = size == 0 or os.pread(file, 1, size - 1) == b"\n"
        return file
