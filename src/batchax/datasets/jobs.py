"""What a map asks of a job, and the job that has no files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from batchax.datasets.parts import Record
from batchax.datasets.plan import Plan
from batchax.datasets.store import Store


class AnyJob(Protocol):
    """Which units of an output are done, wherever that is kept.

    Attributes:
      kept: after "7 of 9 rows", what becomes of them if the call ends now.
      plan: which rows are committed at once.
      store: where the results go.
      finished: what was said when all was done; None as long as it is not.
    """

    kept: str
    plan: Plan
    store: Store
    finished: dict[str, Any] | None

    @property
    def done(self) -> Mapping[int, Record]:
        """The records of units that are done, by their numbers."""
        ...

    def check(self) -> None:
        """Raises a JobError if this process may not write, now."""

    def record(self, records: Sequence[Record]) -> None:
        """Notes units that are done."""

    def look_again(self) -> None:
        """Sees what others have done since."""

    def settle(self) -> None:
        """Of units that were written more than once, keeps the records of what is there now."""

    def withdraw(self, numbers: Iterable[int], reason: str) -> None:
        """Says that these units are not done: they are computed again."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Says that all is done, and this of it, which is `finished` from now on."""

    def close(self) -> None:
        """Leaves the job to others."""


class JobInMemory:
    """A job of which nothing is kept once the process ends."""

    kept = "were done."

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan, self.store = plan, store
        self.done: dict[int, Record] = {}
        self.finished: dict[str, Any] | None = None
        store.prepare()

    def check(self) -> None:
        """It may always."""

    def record(self, records: Sequence[Record]) -> None:
        """Notes units that are done."""
        self.done |= {r.unit.number: r for r in records}

    def look_again(self) -> None:
        """Nobody else does anything."""

    def settle(self) -> None:
        """Nobody else wrote anything."""

    def withdraw(self, numbers: Iterable[int], reason: str) -> None:
        """Nothing is kept when the call ends."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Notes that all are."""
        self.finished = summary

    def close(self) -> None:
        """There is nothing to close."""
