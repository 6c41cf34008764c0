"""Files that are whole or not there, and stay when the machine stops.

A file is written beside the one that it is to be, synced, and renamed: whoever looks finds the old
one or the new one. What is appended is synced before anyone relies on it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from batchax.datasets.steps import (
    AFTER_WRITE,
    BEFORE_RENAME,
    BEFORE_WRITE,
    IN_JOURNAL,
    IN_WRITE,
    reached,
)
from batchax.errors import JobError, StorageError

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
            beside.unlink(missing_ok=True)
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
    """Gives a file or folder that is whole its name, durably; who finds it done has nothing to do.

    Raises:
      JobError: something else has that name.
    """
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

    Raises:
      StorageError: it is no regular file.
      OSError: it cannot be opened.
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
    """What a file of ours holds, as `open_own` opens it."""
    with open(open_own(path, os.O_RDONLY), "rb") as file:
        return file.read()


def own_folder(path: Path) -> Path:
    """A folder of ours, or the place for one: a link in its place is none.

    Raises:
      StorageError: it is a link.
    """
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
        if path.is_dir():
            shutil.rmtree(path)
        else:
            remove_file(path)


def _sync(path: Path) -> None:
    """Makes a file, or the names in a folder, durable."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
