"""Attempts at units, as others see them: files in a folder of the call.

An attempt has a file while it runs. If its worker ends, the file stays, and tells those who wait
for the unit that it was being computed, rather than waiting in a queue. Once a unit that was begun
twice is done, another file says so: who is still at work on it drops what they have.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchax.errors import JobError

_NAME = "engine-{}"


class EndedError(Exception):
    """A process ended in the middle of an attempt, and did not say why."""


@dataclass(frozen=True)
class Attempts:
    """The attempts of a call.

    Attributes:
      folder: of the call. Once it is gone, all of them are over.
      digest: of what is to be done. Others may write to the folder, and what a worker loads is
        code: so it is told by who made the call what to load.
    """

    folder: Path
    digest: str = ""

    @classmethod
    def of_new_call(cls, job: Path, call: bytes) -> Attempts:
        """In the folder of a job. What calls that were killed left there is removed.

        Args:
          job: the folder.
          call: what is to be done.
        """
        for folder in job.glob(_NAME.format("*")):
            shutil.rmtree(folder, ignore_errors=True)
        folder = job / _NAME.format(secrets.token_hex(4))
        folder.mkdir()
        attempts = cls(folder, hashlib.sha256(call).hexdigest())
        attempts._call.write_bytes(call)
        return attempts

    @property
    def call(self) -> bytes:
        """What is to be done.

        Raises:
          JobError: what is there is something else.
        """
        call = self._call.read_bytes()
        if hashlib.sha256(call).hexdigest() != self.digest:
            raise JobError(
                f"{self._call} was changed after the call was made, and so is not loaded: look who "
                "else may write to that folder."
            )
        return call

    @property
    def _call(self) -> Path:
        return self.folder / "call.pickle"

    @contextlib.contextmanager
    def running(self, unit: int, attempt: int) -> Iterator[None]:
        """While the block runs, others see that the attempt does.

        Raises:
          EndedError: it was running before, and did not come to its end.
        """
        path = self._running(unit, attempt)
        with contextlib.suppress(FileNotFoundError):  # the call is over
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            except FileExistsError:
                raise EndedError("its worker ended") from None
        try:
            yield
        finally:
            self.forget(unit, attempt)

    def is_running(self, unit: int, attempt: int) -> bool:
        """Whether it runs, or did when its worker ended."""
        return self._running(unit, attempt).exists()

    def forget(self, unit: int, attempt: int) -> None:
        """An attempt that ended may run again."""
        self._running(unit, attempt).unlink(missing_ok=True)

    def is_over(self, unit: int) -> bool:
        """Whether nobody waits for it any more."""
        return self._over(unit).exists() or not self.folder.exists()

    def end(self, unit: int) -> None:
        """Nobody does."""
        self._over(unit).touch()

    def end_all(self) -> None:
        """Nobody waits for any."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _running(self, unit: int, attempt: int) -> Path:
        return self.folder / f"{unit}-{attempt}"

    def _over(self, unit: int) -> Path:
        return self.folder / f"{unit}-over"
