"""An output that is held: whether it is still what it was, and holds what was written to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchax.errors import JobError, StorageError


class Held:
    """A file or folder that is to stay the one that it is.

    As long as it is open here, the system gives its number to no other. Of files in a folder, each
    of which is written once, what they were then is compared in the end.

    Args:
      path: of it, for messages.
      at: returns where it is now: others may give it its name.

    Raises:
      StorageError: it cannot be opened.
    """

    def __init__(self, path: Path, at: Callable[[], Path]) -> None:
        self._path, self._at = path, at
        self._written: dict[int, tuple[Sequence[str], int | None]] = {}  # there may be millions
        self._lock = threading.Lock()
        try:
            self._file: int | None = os.open(at(), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path} could not be opened: {error.strerror}.") from error

    def check(self) -> None:
        """Raises a JobError if something else has its path, or nothing."""
        if self._file is None:
            return
        try:
            same = os.path.samestat(os.fstat(self._file), os.stat(self._at()))
        except OSError:
            same = False
        if not same:
            raise JobError(
                f"{self._path} was deleted, moved, or replaced by something else while this "
                "process wrote to it, and so nothing more is written. Put it back, and make the "
                "call again; or delete it and the folder of its job to compute it again."
            )

    def written(self, number: int, files: Sequence[Path]) -> None:
        """The files of a unit are written, and are to be what they are."""
        if files:
            at = self._at()
            names = [str(file.relative_to(at)) for file in files]
            stamp = _stamp(at, names)
            with self._lock:
                self._written[number] = names, stamp

    def check_written(self) -> None:
        """Raises a JobError if such files were changed since."""
        for names, stamp in self._written.values():
            if stamp is None or _stamp(self._at(), names) != stamp:
                raise written_over(self._path, names[0])

    def close(self) -> None:
        """From now on it may be anything."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def written_over(out: Any, what: str) -> JobError:
    """The error of an output of which somebody changed a part that was written before."""
    return JobError(
        f"{out} does not hold what was written to it: somebody wrote over {what}, or deleted it, "
        f"while this process was at work. `batchax verify {out}` says what is damaged, and the "
        "same call computes it again."
    )


def _stamp(at: Path, names: Sequence[str]) -> int | None:
    """What tells files from what they are once somebody wrote to them; None if one is gone."""
    try:
        told = [os.stat(at / name) for name in names]
    except OSError:
        return None
    return hash(tuple((x.st_ino, x.st_size, x.st_mtime_ns) for x in told))
