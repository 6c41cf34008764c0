"""The files of a job, in a folder beside its output.

`job.json` says what is computed, and is written once; `journal/` says which units are done, and
`done.json` that all are; `lock` says who is at work.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchax.datasets import partials
from batchax.datasets.addresses import PARTIAL, Address, ObjectPath
from batchax.datasets.checksums import foreign, is_whole, sealed, unsealed
from batchax.datasets.journal import sizes
from batchax.datasets.parts import Bad, packed, unpacked
from batchax.datasets.place import Place, UnreachableError
from batchax.datasets.places import place_of
from batchax.datasets.plan import Plan
from batchax.errors import ArgumentTypeError, JobError, StorageError

_FORMAT = 1  # what a later version that writes something else can tell this one by

JOB = ".job"  # after the name of an output, the folder of its job
CALLS = "engine-"  # and a number: the folder of a call that other processes work for
_SHARD = "lock-"  # and the name of a shard


@dataclass(frozen=True)
class JobFiles:
    """Where the files of the job are that computes an output.

    In a store of objects, what is written again and again while the job runs lies in a folder that
    is named by the job: one who goes on with a job that was deleted meanwhile writes nothing into
    the next one's.

    Attributes:
      out: the output.
    """

    out: Address
    _names: list[str] = field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.out.name in ("", ".."):
            raise ArgumentTypeError(
                f"{str(self.out)!r} cannot be an output, which has a name of its own: results go "
                "to a new file or folder."
            )

    @property
    def place(self) -> Place:
        """What can be done where they lie."""
        return place_of(self.out)

    @property
    def folder(self) -> Address:
        """The folder of the job."""
        return self.out.with_name(f"{self.out.name}{JOB}")

    @property
    def here(self) -> Address:
        """Where the output is: on a disk it may have another name until it is whole."""
        if not isinstance(self.out, Path):
            return self.out
        partial = self.out.with_name(f"{self.out.name}{PARTIAL}")
        return partial if self.place.exists(partial) else self.out

    @property
    def _own(self) -> Address:
        """Where what this very job writes lies, and no other that has its place later."""
        if not isinstance(self.out, ObjectPath):
            return self.folder
        if not self._names:
            self.read()
        return self.folder / (self._names[0] if self._names else "none")

    @property
    def lock(self) -> Address:
        """Held by who writes."""
        return self.folder / "lock"

    def lock_of(self, shard: str) -> Address:
        """Held by who does this shard of the units, beside others who do theirs."""
        return self.folder / f"{_SHARD}{shard}"

    def shard_of(self, lock: Address) -> str:
        """Which shard a lock is of."""
        return lock.name.removeprefix(_SHARD)

    @property
    def locks_of_shards(self) -> list[Address]:
        """Those that somebody has taken since the job was one process's alone."""
        return [self.folder / name for name in self.place.sizes(self.folder, _SHARD)]

    def remove_calls(self) -> None:
        """Removes what calls that were killed left for their workers. None may be at work now."""
        for folder in self.place.folders(self.folder, CALLS):
            self.place.remove_all(folder)

    @property
    def journal(self) -> Address:
        """The folder of the journal."""
        return self._own / "journal"

    @property
    def partials(self) -> Address:
        """The folder of large arrays: parts of reductions, and these."""
        return self._own / partials.FOLDER

    @property
    def quarantine(self) -> Address:
        """What went wrong with which row, for people; a rendering of the journal."""
        return self.folder / "quarantine.jsonl"

    @property
    def ok(self) -> Address:
        """For each row whether it has a result; there if one has none."""
        return self.folder / "ok.npy"

    @property
    def preparing(self) -> Address:
        """There from before the output is made; without `job.json`, it may be half made."""
        return self.folder / "preparing"

    @property
    def removing(self) -> Address:
        """There from the moment when a call that starts over removes the output and the job."""
        return self.folder / "removing"

    def remove(self) -> None:
        """Removes the output and its job, whose lock this process has, but for the lock.

        A process that is killed here leaves `removing`, so the next call removes the rest. Nobody
        takes a part of the output for a whole one: it is unfinished before it is removed.
        """
        self.withdraw_end()
        for path in (self.here, self.journal, self.partials):
            self.place.discard(path)
        for path in (self.quarantine, self.ok, self.preparing, self._description, self.removing):
            self.place.remove(path)
        self._names.clear()

    @property
    def _description(self) -> Address:
        return self.folder / "job.json"

    @property
    def _end(self) -> Address:
        return self._own / "done.json"

    @property
    def is_begun(self) -> bool:
        """Whether somebody began to make the output."""
        return any(map(self.place.exists, (self._description, self.preparing)))

    @property
    def is_described(self) -> bool:
        """Whether it says still what is computed."""
        return self.place.exists(self._description)

    def read(self) -> Description | None:
        """What is computed; None if no job was begun."""
        try:
            content = _read(self._description)
        except FileNotFoundError:
            return None
        if content is None:
            raise JobError(
                f"{self._description} is damaged, and so nobody knows how {self.out} was made. Put "
                f"a copy back, or delete {self.here} and {self.folder} to compute it again."
            )
        if content.get("format") != _FORMAT:
            raise JobError(
                f"{self.folder} was written by another version of batchax, of which this one "
                f"({content.get('format')} and not {_FORMAT}) cannot read what it says. Go on with "
                "that version, or use another out=."
            )
        with foreign(self._description):
            self._names[:] = self._names or [str(content.get("name", ""))]
            return Description(Plan.from_json(content["plan"]), content["store"], content["call"])

    def write(self, description: Description) -> None:
        """Begins the job: from now on it can be resumed."""
        plan, store, call = description.plan.to_json(), description.store, description.call
        content = {"format": _FORMAT, "plan": plan, "store": store, "call": call}
        if isinstance(self.out, ObjectPath):
            self._names[:] = [secrets.token_hex(8)]
            content["name"] = self._names[0]
        self.place.create(self._description, sealed(content))

    def read_end(self) -> dict[str, Any] | None:
        """What was said at the end, see `write_end`.

        None if the job has not ended, the journal is less than it was, or that is damaged: then the
        job is to be ended again. That the journal is more says nothing: it may be of an attempt
        that others were faster than.
        """
        try:
            content = _read(self._end)
            now = sizes(self.journal)
            with foreign(self._end):
                if content is None or any(now.get(x, 0) < n for x, n in content["journal"].items()):
                    return None
                reduced = dict(partials.Reduced(content["reduced"], self.partials))
                bad = unpacked(content["bad"])
                return {**content["more"], "bad": bad, "reduced": reduced}
        except UnreachableError:
            raise
        except (FileNotFoundError, StorageError):
            return None

    def withdraw_end(self) -> None:
        """The job has not ended, since something that was done is so no longer."""
        self.place.remove(self._end)

    def write_end(
        self, bad: Sequence[Bad] = (), reduced: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        """Says that all is done.

        Args:
          bad: rows that have no result.
          reduced: for each reduction over the rows, an array.
          more: what is to be known besides, for JSON.
        """
        arrays = partials.written(reduced or {}, self.partials / "all.bin")
        content = {"bad": packed(bad), "reduced": arrays, "more": more}
        self.place.replace(self._end, sealed({"journal": sizes(self.journal), **content}))


@dataclass(frozen=True)
class Description:
    """What a job computes.

    Attributes:
      plan: which rows are committed at once.
      store: what the store says of itself.
      call: the fingerprint of the call.
    """

    plan: Plan
    store: dict[str, Any]
    call: dict[str, Any]

    def plan_at_end(self, end: dict[str, Any]) -> Plan:
        """The plan of a job of which that was said at its end."""
        return self.plan.ended(end["rows"]) if self.plan.open else self.plan


def _read(path: Address) -> dict[str, Any] | None:
    """What a sealed file says; None if it is damaged."""
    try:
        line = place_of(path).read(path).rstrip(b"\n")
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        raise StorageError(f"{path} could not be read: {error.strerror or error}.") from error
    if not is_whole(line):
        return None
    with foreign(path):
        return unsealed([line])[0]
