"""What a job needs of the place where its files lie.

Files are put whole, over others or only where there are none; they are read, listed and removed; a
*log* is appended to by one writer; a *lock* keeps others away. On a disk (`disk.py`) these are
renamed files, appended ones and locks of the system. In a store of objects (`object_place.py`) they
are conditional puts, segments, and leases. Nobody else knows which it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from batchax.datasets.lock import Holder
from batchax.errors import StorageError

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


class Log(Protocol):
    """Lines that one writer appends. Threads may share it."""

    def begin(self) -> None:
        """From now on, whoever had this log before and goes on cannot append to it."""

    def append(self, lines: bytes) -> None:
        """Appends whole lines; durable when it returns.

        Raises:
          OvertakenError: somebody else appended meanwhile.
        """

    def close(self) -> None:
        """Closes it; what is appended later opens it again."""


class AnyLock(Protocol):
    """What keeps others away."""

    @property
    def held(self) -> bool:
        """Whether this process has it."""
        ...

    @property
    def holds(self) -> bool:
        """Whether it keeps others away, now: it may have been deleted, or taken."""
        ...

    def release(self) -> None:
        """Lets go of it, if it is held."""


class Place(Protocol):
    """What can be done where the files of a job lie. What is written is durable on return.

    Attributes:
      shared: whether other processes see the same files.
    """

    shared: bool

    def read(self, path: Any) -> bytes:
        """What a file holds. Raises FileNotFoundError if there is none."""
        ...

    def replace(self, path: Any, content: bytes) -> None:
        """Puts a file, over whatever is there."""

    def create(self, path: Any, content: bytes) -> None:
        """Puts a file where there is none.

        Raises:
          OvertakenError: there is another one, which this writer does not know of.
        """

    def remove(self, path: Any) -> None:
        """Removes a file; that there is none is no error."""

    def remove_all(self, folder: Any) -> None:
        """Removes a folder with all that is in it, as far as that is possible."""

    def discard(self, path: Any) -> None:
        """Removes a file or folder of ours; that there is none is no error.

        Raises:
          StorageError: it cannot be removed, or a link is in its place.
        """

    def mark(self, path: Any) -> None:
        """Puts an empty file, which need not outlive this machine.

        Raises:
          FileExistsError: there is one.
          FileNotFoundError: its folder is gone.
        """

    def unmark(self, path: Any) -> None:
        """Removes such a file; that there is none is no error."""

    def put_first(self, path: Any, content: bytes) -> None:
        """Puts the first file of a new folder, which need not outlive this machine."""

    def folders(self, folder: Any, prefix: str) -> list[Any]:
        """The folders in a folder whose names begin so."""
        ...

    def set_aside(self, path: Any, folder: Any) -> None:
        """Moves a file or folder into another folder, under a name of its own."""

    def exists(self, path: Any) -> bool:
        """Whether there is a file or folder of this name, be it a link that leads nowhere."""
        ...

    def sizes(self, folder: Any, prefix: str = "", suffix: str = "") -> dict[str, int]:
        """The files in a folder: their names, in order, and sizes."""
        ...

    def make_folder(self, folder: Any) -> None:
        """Makes a folder, where there are such things."""

    def clean(self, folder: Any, *inside: Any) -> None:
        """Removes what writers that were killed left unfinished. Nobody else may write there."""

    def log(self, folder: Any, writer: str) -> Log:
        """The log of a writer."""
        ...

    def logs(self, folder: Any) -> Iterator[tuple[str, str, bytes]]:
        """All logs: the writer, what it is called in messages, and its lines."""
        ...

    def log_sizes(self, folder: Any) -> dict[str, int]:
        """How much there is of each log: it never becomes less."""
        ...

    def lock(self, path: Any, shared: bool = False) -> AnyLock:
        """Takes a lock. Raises LockedError if somebody else has it."""
        ...

    def is_held(self, path: Any) -> bool:
        """Whether anybody has a lock."""
        ...

    def last_holder(self, path: Any) -> Holder | None:
        """Who took a lock last; who has it, if it is held."""
        ...


def is_torn(line: bytes) -> bool:
    """Whether a line, without its end, was never whole."""
    return line.endswith(TORN.rstrip(b"\n"))
