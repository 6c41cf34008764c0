"""Files of a job on a disk: durable writes, locks, and appended logs."""

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
from typing import Any, NamedTuple

from batchax.errors import JobError, StorageError

BEFORE_WRITE = "before a write"
IN_WRITE = "in the middle of a write"
AFTER_WRITE = "after a write is durable"
IN_JOURNAL = "in the middle of a journal line"
BEFORE_RENAME = "before a file gets its name"
BEFORE_END = "before the completion mark"

STEPS = (BEFORE_WRITE, IN_WRITE, AFTER_WRITE, IN_JOURNAL, BEFORE_RENAME, BEFORE_END)


def _go_on(step: str) -> None:
    """Does nothing."""


_at_step: Callable[[str], None] = _go_on


def reached(step: str) -> None:
    _at_step(step)


def watch(at_step: Callable[[str], None] = _go_on) -> None:
    """From now on `at_step` is called with the name of each step; without it, nothing is."""
    global _at_step
    _at_step = at_step


_UNFINISHED = ".{}.{}.unfinished"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """An error of the system in this block becomes one that names `path` and says what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        told = StorageError(f"{path} could not be written: {_reason(error)}")
        told.errno = error.errno
        raise told from error


def _reason(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"no space is left for it ({error.strerror}). Free some, and call again: what was "
            "committed is kept, and the job goes on from there."
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{error.strerror}. Choose an output that this process may write to."
    return f"{error.strerror or error}."


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file to. When the block ends, that file is durable, and called `path`.

    If the block raises, `path` is what it was.
    """
    beside = path.with_name(_UNFINISHED.format(path.name, secrets.token_hex(4)))
    reached(BEFORE_WRITE)
    with writing(path):
        try:
            yield beside
            _sync(beside)
            reached(BEFORE_RENAME)
            os.replace(beside, path)
        except BaseException:
            _remove(beside)
            raise
        _sync(path.parent)
    reached(AFTER_WRITE)


def replace_file(path: Path, content: bytes) -> None:
    """Makes `path` a file with this content, durably."""
    with replacing(path) as beside, open(beside, "xb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        reached(IN_WRITE)
        file.write(content[len(content) // 2 :])


def give_name(partial: Path, path: Path) -> None:
    """Gives a file or folder that is whole its name, durably, unless another process did."""
    with writing(path):
        if not os.path.lexists(partial):
            return
        if os.path.lexists(path):
            raise JobError(
                f"{path} was made by something else while its results were computed, in {partial}. "
                "Move it away, and make the call again."
            )
        reached(BEFORE_RENAME)
        with contextlib.suppress(FileNotFoundError):  # somebody else gave it its name
            os.rename(partial, path)
        _sync(path.parent)
    reached(AFTER_WRITE)


def append(path: Path, file: int, content: bytes) -> None:
    """Appends to a file that is open, at `path`; durable when it returns."""
    with writing(path):
        _write_all(file, content[: len(content) // 2])
        reached(IN_JOURNAL)
        _write_all(file, content[len(content) // 2 :])
        os.fsync(file)


def open_own(path: Path, flags: int) -> int:
    """Opens a file of ours: a regular one. A link, a pipe or a device in its place is none, and
    what is written to it would reach whatever it stands for.
    """
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


def read_own(path: Path) -> bytes:
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def own_folder(path: Path) -> Path:
    """A folder of ours, or the place for one: a link in its place is none."""
    if path.is_symlink():
        raise _not_ours(path)
    return path


def _not_ours(path: Path) -> StorageError:
    return StorageError(
        f"{path} is a link, or is not a file or folder, so batchax did not make it and does not "
        "read or write through it. Look who put it there, and delete it."
    )


def _write_all(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def make_folder(path: Path) -> None:
    """Makes a folder, and those that it is to be in, durably."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with writing(path):
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def remove_file(path: Path) -> None:
    """Removes a file, durably; that there is none is no error."""
    with writing(path):
        path.unlink(missing_ok=True)
        _sync(path.parent)


def discard(path: Path) -> None:
    """Removes a file or folder of ours, if there is one: others see all of it, or nothing.

    What a process leaves that is killed here, `remove_unfinished` removes.
    """
    with writing(own_folder(path)):
        if not os.path.lexists(path):
            return
        reached(BEFORE_RENAME)
        os.rename(path, path.with_name(_UNFINISHED.format(path.name, secrets.token_hex(4))))
        _sync(path.parent)
        reached(AFTER_WRITE)
        remove_unfinished(path.parent, path.name)


def remove_unfinished(folder: Path, name: str | None = None) -> None:
    """Removes what writers that were killed left in a folder: of one file or folder, or of all.

    Nobody else may write there now.
    """
    for path in folder.glob(_UNFINISHED.format("*" if name is None else glob.escape(name), "*")):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        remove_file(path)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


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


TORN = b" torn\n"
"""The end of a line of a log that was never whole, and says nothing."""


class OvertakenError(StorageError):
    """Somebody else wrote in the meantime where this process was about to.

    Whoever is told so looks whether it may still write, and then tries again.
    """


class UnreachableError(StorageError):
    """A store does not answer, or not as it should, and so nobody knows what it holds.

    That is no damage: whoever looks what is there looks again later.
    """


def is_torn(line: bytes) -> bool:
    """Whether a line, without its end, was never whole."""
    return line.endswith(TORN.rstrip(b"\n"))


class Place:
    """Where the files of a job lie: on a disk; `Objects` is the same in object storage.

    What is written is durable on return, except for what `mark` and `put_first` write, which need
    not outlive the machine.
    """

    shared = True  # whether other processes see the same files

    def read(self, path: Any) -> bytes:
        """What a file holds. Raises FileNotFoundError if there is none."""
        return read_own(path)

    def replace(self, path: Any, content: bytes) -> None:
        replace_file(path, content)

    def create(self, path: Any, content: bytes) -> None:
        """Puts a file where there is none; raises OvertakenError if another writer put one."""
        # Only the holder of a lock does this, and on a disk there is no other holder.
        replace_file(path, content)

    def remove(self, path: Any) -> None:
        remove_file(path)

    def remove_all(self, folder: Any) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    def discard(self, path: Any) -> None:
        discard(path)

    def mark(self, path: Any) -> None:
        """Puts an empty file; raises FileExistsError, or FileNotFoundError without its folder."""
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))

    def unmark(self, path: Any) -> None:
        path.unlink(missing_ok=True)

    def put_first(self, path: Any, content: bytes) -> None:
        """Puts the first file of a new folder, which only this user may read."""
        path.parent.mkdir(mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(path, flags, 0o600), "wb") as file:
            file.write(content)

    def folders(self, folder: Any, prefix: str) -> list[Any]:
        return list(folder.glob(f"{prefix}*"))

    def set_aside(self, path: Any, folder: Any) -> None:
        """Moves a file or folder into another folder, under a name of its own."""
        os.replace(path, folder / f"half-made-{secrets.token_hex(4)}")

    def exists(self, path: Any) -> bool:
        return os.path.lexists(path)

    def sizes(self, folder: Any, prefix: str = "", suffix: str = "") -> dict[str, int]:
        """The files in a folder: their names, in order, and sizes."""
        names = sorted(folder.glob(f"{prefix}*{suffix}"))
        return {path.name: path.stat().st_size for path in names}

    def make_folder(self, folder: Any) -> None:
        make_folder(own_folder(folder))

    def clean(self, folder: Any, *inside: Any) -> None:
        """Removes what killed writers left unfinished. No process may write there now."""
        for each in (folder, *map(own_folder, inside)):
            remove_unfinished(each)

    def log(self, folder: Any, writer: str) -> Any:
        return _AppendedFile(folder / f"{writer}.jsonl")

    def logs(self, folder: Any) -> Iterator[tuple[str, str, bytes]]:
        """All logs: the writer, what it is called in messages, and its lines."""
        for path in sorted(own_folder(folder).glob("*.jsonl")):
            try:
                yield path.stem, str(path), read_own(path)
            except StorageError:
                raise
            except OSError as error:
                raise StorageError(f"{path} could not be read: {error.strerror}.") from error

    def log_sizes(self, folder: Any) -> dict[str, int]:
        """How much there is of each log: it never becomes less."""
        return self.sizes(folder, suffix=".jsonl")

    def lock(self, path: Any, shared: bool = False) -> Any:
        """Takes a lock. Raises LockedError if another process has it."""
        return Lock(path, shared)

    def is_held(self, path: Any) -> bool:
        return is_held(path)

    def last_holder(self, path: Any) -> Holder | None:
        """Who took a lock last; who has it, if it is held."""
        return last_holder(path)


DISK = Place()


class _AppendedFile:
    """A log as a file. A line that a killed writer left unfinished is marked as torn."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._at_start_of_line = False
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Keeps who had this log before from appending: on a disk, the lock does that."""

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
