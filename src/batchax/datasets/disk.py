"""Files of a job on a disk: durable writes, locks, and appended logs.

A job's files are on a disk or in object storage: `objects` has the same functions, and `place_of`
names the module for a path. A write is durable on return, except for `mark` and `put_first`, whose
files need not outlive the machine.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import secrets
import shutil
import socket
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from batchax.errors import JobError, StorageError

T = TypeVar("T")

_UNFINISHED = ".{}.{}.unfinished"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a system error in this block into one that names `path` and the fix."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        why = f"{error.strerror or error}."
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why = (
                f"no space is left for it ({error.strerror}). Free some, and make the same call "
                "again: it resumes from the committed units."
            )
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            why = f"{error.strerror}. Choose an output that this process may write to."
        failure = StorageError(f"{path} could not be written: {why}")
        failure.errno = error.errno
        raise failure from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to.

    At the end the file is durable, and renamed to `path`. If the block raises, `path` stays as it
    was.
    """
    beside = path.with_name(_UNFINISHED.format(path.name, secrets.token_hex(4)))
    with writing(path):
        try:
            yield beside
            # Sync before the rename, or a crash may leave a complete name with incomplete contents.
            # The folder is synced last, so that the rename is durable.
            _sync(beside)
            os.replace(beside, path)
        except BaseException:
            _remove(beside)
            raise
        _sync(path.parent)


def replace_file(path: Path, content: bytes) -> None:
    with replacing(path) as beside:
        file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _write_all(file, content)
        finally:
            os.close(file)


replace = create = replace_file  # only the holder of a lock creates, and there is no other holder


def read(path: Path, part: tuple[int, int] | None = None) -> bytes:
    """Reads a file, or a part of it. Raises FileNotFoundError if there is none."""
    start, stop = part or (0, None)
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        raise StorageError(f"{path} could not be read: {error.strerror or error}.") from error


exists = os.path.lexists


def give_name(partial: Path, path: Path) -> None:
    """Renames a complete file or folder, durably, unless another process has."""
    with writing(path):
        if not exists(partial):
            return
        if exists(path):
            raise JobError(
                f"{path} was made by something else while its results were computed, in {partial}. "
                "Move it away, and make the call again."
            )
        with contextlib.suppress(FileNotFoundError):  # another process gave it its name
            os.rename(partial, path)
        _sync(path.parent)


def open_own(path: Path, flags: int) -> int:
    """Opens a regular file: a write to a link, pipe, or device would reach something else."""
    others = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        file = os.open(path, flags | others, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_ours(path) from None
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _not_ours(path)
    return file


def own_folder(path: Path) -> Path:
    """Returns the path of a folder that need not exist, and raises if it is a link."""
    if path.is_symlink():
        raise _not_ours(path)
    return path


def _not_ours(path: Path) -> StorageError:
    return StorageError(
        f"{path} is a link, or is not a file or folder, so batchax did not make it and "
        "does not read or write through it. Check who put it there, and delete it."
    )


def _write_all(file: int, content: bytes) -> None:
    # A system call may write fewer bytes than it was given.
    while content:
        content = content[os.write(file, content) :]


def make_folder(path: Path) -> None:
    if path.is_dir():
        return
    make_folder(path.parent)
    with writing(path):
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def make_own_folder(path: Path) -> None:
    make_folder(own_folder(path))


def remove(path: Path) -> None:
    with writing(path):
        path.unlink(missing_ok=True)
        _sync(path.parent)


def remove_all(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def discard(path: Path) -> None:
    """Removes a file or folder atomically: other processes see all of it, or nothing."""
    with writing(own_folder(path)):
        if not exists(path):
            return
        # If the process is killed after the rename, `remove_unfinished` removes the rest.
        os.rename(path, path.with_name(_UNFINISHED.format(path.name, secrets.token_hex(4))))
        _sync(path.parent)
        remove_unfinished(path.parent, path.name)


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Removes what killed writers left in a folder, of one file or of all.

    No other process may write there now.
    """
    for path in folder.glob(_UNFINISHED.format("*" if name is None else glob.escape(name), "*")):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        remove(path)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def mark(path: Path) -> None:
    """Creates an empty file. Raises FileExistsError, or FileNotFoundError without its folder."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def unmark(path: Path) -> None:
    path.unlink(missing_ok=True)


def put_first(path: Path, content: bytes) -> None:
    """Writes the first file of a new folder that only this user may read."""
    path.parent.mkdir(mode=0o700)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(file, "wb") as opened:
        opened.write(content)


def folders(folder: Path, prefix: str) -> list[Path]:
    return list(folder.glob(f"{prefix}*"))


def sizes(folder: Path, prefix: str = "", suffix: str = "") -> dict[str, int]:
    paths = sorted(folder.glob(f"{prefix}*{suffix}"))
    return {path.name: path.stat().st_size for path in paths}


def clean(folder: Path, *inside: Path) -> None:
    """Removes unfinished files of killed writers. No other process may write there now."""
    for each in (folder, *map(own_folder, inside)):
        remove_unfinished(each)


# A process that only checks a lock holds it for a moment, which is longer on a busy machine. A
# pause is longer there, too, so the number of attempts is limited and not the time.
_ATTEMPTS, _PAUSE = 25, 0.01


class Holder(NamedTuple):
    pid: int
    host: str
    since: float

    def __str__(self) -> str:
        here = self.host == socket.gethostname()
        who = f"process {self.pid}" + ("" if here else f" on {self.host}")
        if here and self.pid == os.getpid():
            who = "this process"
        return f"{who}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


class LockedError(JobError):
    """Signals that another process has the lock."""


class Lock:
    """Locks a file that names its holder.

    Several processes may hold a `shared` lock. A forked child does not hold it.
    """

    def __init__(self, path: Path, shared: bool = False) -> None:
        with writing(path):
            # flock, since the system releases it when the process ends in any way. A child would
            # keep it after its parent ends.
            file = open_own(path, os.O_RDWR | os.O_CREAT)
            try:
                for _ in range(_ATTEMPTS):
                    if _locked(file, shared):
                        break
                    time.sleep(_PAUSE)
                else:
                    holder = last_holder(path) or "another process"
                    raise LockedError(f"{path} is held by {holder}.")
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
        return self._file is not None

    @property
    def holds(self) -> bool:
        """Returns whether it excludes others, which ends if its file is deleted."""
        if self._file is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self._path))
        except OSError:
            return False

    def release(self) -> None:
        _held.discard(self)
        if self._file is not None:
            os.close(self._file)
        self._file = None


lock = Lock
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


def _release_in_child() -> None:
    for each in list(_held):
        each.release()  # the child's copy is closed; the parent has its own


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)


def last_holder(path: Path) -> Holder | None:
    try:
        return Holder(**json.loads(read(path)))
    except (OSError, StorageError, ValueError, TypeError):
        return None  # the lock was not taken yet, or its holder is being written down


def is_held(path: Path) -> bool:
    try:
        file = open_own(path, os.O_RDONLY)  # to lock it, this is enough
    except FileNotFoundError:
        return False
    try:
        return not _locked(file)
    finally:
        os.close(file)


def _locked(file: int, shared: bool = False) -> bool:
    import fcntl  # which not all systems have on which batchax can be imported

    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


TORN = b" torn\n"  # the end of a line of a log that a killed writer left unfinished


class OvertakenError(StorageError):
    """Signals that another process has written where this one was about to write.

    The caller checks whether it may still write, and tries again.
    """


def not_overtaken(check: Callable[[], None], work: Callable[[], T]) -> T:
    """Returns what `work` does; `check` raises an error if this process must not write."""
    while True:
        check()
        try:
            return work()
        except OvertakenError:
            continue  # by who has taken the lock, or by one who had it


class UnreachableError(StorageError):
    """Signals that a store does not answer, so its content is unknown.

    This is not damage: the caller tries again later.
    """


def log_sizes(folder: Path) -> dict[str, int]:
    return sizes(folder, suffix=".jsonl")


def logs(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Yields the writer of each log, its name for messages, and its lines."""
    for path in sorted(own_folder(folder).glob("*.jsonl")):
        yield path.stem, str(path), read(path)


def log(folder: Path, writer: str) -> _AppendedFile:
    return _AppendedFile(folder / f"{writer}.jsonl")


class _AppendedFile:
    """Appends to a log file. A line that a killed writer left incomplete is marked as torn."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._at_start_of_line = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Excludes earlier writers: on a disk, the lock does that."""

    def append(self, lines: bytes) -> None:
        with self._lock, writing(self._path):
            if self._file is None:
                self._file = self._open()
            # The last line has no end if its writer was killed, or if the write before this one
            # failed.
            if not self._at_start_of_line:
                lines = TORN + lines
            self._at_start_of_line = False
            _write_all(self._file, lines)
            os.fsync(self._file)
            self._at_start_of_line = True

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None

    def _open(self) -> int:
        make_own_folder(self._path.parent)
        file = open_own(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        size = os.fstat(file).st_size
        self._at_start_of_line = size == 0 or os.pread(file, 1, size - 1) == b"\n"
        return file
