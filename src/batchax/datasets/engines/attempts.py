"""Attempts at units, as others see them: files in a folder of the call.

An attempt has a file while it runs. If its worker ends, the file stays, and tells those who wait
for the unit that it was being computed, rather than waiting in a queue. Once a unit that was begun
twice is done, another file says so: who is still at work on it drops what they have.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from batchax.datasets.addresses import Address
from batchax.datasets.job_files import CALLS
from batchax.datasets.place import Place
from batchax.datasets.places import place_of
from batchax.errors import JobError

_CALL = "call.pickle"


_REPEATED = "repeated"
UNGUARDED = (
    "the script calls bx.map where it is imported, and the processes of executor= import it, so "
    "each makes the same call again. Put the call below `if __name__ == '__main__':`."
)


def refuse_repeated(job: Address) -> None:
    """Raises a JobError in a worker that imports the script which started it, and so makes the call
    again. The attempts of that call, in the folder of the job, are told.
    """
    frames = (frame for frame, _ in traceback.walk_stack(None))
    names = ((frame.f_globals.get("__name__"), frame.f_code.co_name) for frame in frames)
    if ("__mp_main__", "<module>") not in names:
        return
    place = place_of(job)
    for folder in place.folders(job, CALLS):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            place.mark(folder / _REPEATED)
    raise JobError(UNGUARDED)


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

    folder: Address
    digest: str = ""

    @classmethod
    def of_new_call(cls, job: Address, call: bytes) -> Attempts:
        """In the folder of a job.

        Args:
          job: the folder.
          call: what is to be done.
        """
        place = place_of(job)
        folder = job / f"{CALLS}{secrets.token_hex(4)}"
        place.put_first(folder / _CALL, call)
        return cls(folder, hashlib.sha256(call).hexdigest())

    @property
    def call(self) -> bytes:
        """What is to be done.

        Raises:
          JobError: what is there is something else.
        """
        call = self._place.read(self._call)
        if hashlib.sha256(call).hexdigest() != self.digest:
            raise JobError(
                f"{self._call} was changed after the call was made, and so is not loaded: look who "
                "else may write to that folder."
            )
        return call

    @property
    def is_there(self) -> bool:
        """Whether the call goes on."""
        return self._place.exists(self._call)

    @property
    def _call(self) -> Address:
        return self.folder / _CALL

    @property
    def _place(self) -> Place:
        return place_of(self.folder)

    @contextlib.contextmanager
    def running(self, unit: int, attempt: int) -> Iterator[None]:
        """While the block runs, others see that the attempt does.

        Raises:
          EndedError: it was running before, and did not come to its end.
        """
        with contextlib.suppress(FileNotFoundError):  # the call is over
            try:
                self._place.mark(self._running(unit, attempt))
            except FileExistsError:
                raise EndedError("its worker ended") from None
        try:
            yield
        finally:
            self.forget(unit, attempt)

    def is_running(self, unit: int, attempt: int) -> bool:
        """Whether it runs, or did when its worker ended."""
        return self._place.exists(self._running(unit, attempt))

    def forget(self, unit: int, attempt: int) -> None:
        """An attempt that ended may run again."""
        self._place.unmark(self._running(unit, attempt))

    def is_over(self, unit: int) -> bool:
        """Whether nobody waits for it any more."""
        return self._place.exists(self._over(unit)) or not self.is_there

    def end(self, unit: int) -> None:
        """Nobody does."""
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            self._place.mark(self._over(unit))

    @property
    def is_repeated(self) -> bool:
        """Whether a worker that began made the call of `map` again, see `refuse_repeated`."""
        return self._place.exists(self.folder / _REPEATED)

    def end_all(self) -> None:
        """Nobody waits for any."""
        self._place.remove_all(self.folder)

    def _running(self, unit: int, attempt: int) -> Address:
        return self.folder / f"{unit}-{attempt}"

    def _over(self, unit: int) -> Address:
        return self.folder / f"{unit}-over"
