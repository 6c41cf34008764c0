"""The files of a job, in a folder beside its output.

`job.json` says what is computed, and is written once; `journal/` says which units are done, and
`done.json` that all are; `lock` says who is at work.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchax.datasets import partials
from batchax.datasets.checksums import foreign, is_whole, sealed, unsealed
from batchax.datasets.durable import read_own, remove_file, replace_file
from batchax.datasets.journal import sizes
from batchax.datasets.parts import Bad, packed, unpacked
from batchax.datasets.plan import Plan
from batchax.errors import ArgumentTypeError, JobError, StorageError

_FORMAT = 1  # what a later version that writes something else can tell this one by

_SHARD = "lock-"  # and the name of a shard


@dataclass(frozen=True)
class JobFiles:
    """Where the files of the job are that computes an output.

    Attributes:
      out: the output.
    """

    out: Path

    def __post_init__(self) -> None:
        if self.out.name in ("", ".."):
            raise ArgumentTypeError(
                f"{str(self.out)!r} cannot be an output, which has a name of its own: results go "
                "to a new file or folder."
            )

    @property
    def folder(self) -> Path:
        """The folder of the job."""
        return self.out.with_name(f"{self.out.name}.job")

    @property
    def lock(self) -> Path:
        """Held by who writes."""
        return self.folder / "lock"

    def lock_of(self, shard: str) -> Path:
        """Held by who does this shard of the units, beside others who do theirs."""
        return self.folder / f"{_SHARD}{shard}"

    def shard_of(self, lock: Path) -> str:
        """Which shard a lock is of."""
        return lock.name.removeprefix(_SHARD)

    @property
    def locks_of_shards(self) -> list[Path]:
        """Those that somebody has taken since the job was one process's alone."""
        return sorted(self.folder.glob(f"{_SHARD}*"))

    @property
    def journal(self) -> Path:
        """The folder of the journal."""
        return self.folder / "journal"

    @property
    def partials(self) -> Path:
        """The folder of large arrays: parts of reductions, and these."""
        return self.folder / partials.FOLDER

    @property
    def quarantine(self) -> Path:
        """What went wrong with which row, for people; a rendering of the journal."""
        return self.folder / "quarantine.jsonl"

    @property
    def ok(self) -> Path:
        """For each row whether it has a result; there if one has none."""
        return self.folder / "ok.npy"

    @property
    def preparing(self) -> Path:
        """There from before the output is made; without `job.json`, it may be half made."""
        return self.folder / "preparing"

    @property
    def _description(self) -> Path:
        return self.folder / "job.json"

    @property
    def _end(self) -> Path:
        return self.folder / "done.json"

    @property
    def is_begun(self) -> bool:
        """Whether somebody began to make the output."""
        return any(map(os.path.lexists, (self._description, self.preparing)))

    def read(self) -> Description | None:
        """What is computed; None if no job was begun."""
        try:
            content = _read(self._description)
        except FileNotFoundError:
            return None
        if content is None:
            raise JobError(
                f"{self._description} is damaged, and so nobody knows how {self.out} was made. Put "
                f"a copy back, or delete {self.out} and {self.folder} to compute it again."
            )
        if content.get("format") != _FORMAT:
            raise JobError(
                f"{self.folder} was written by another version of batchax, of which this one "
                f"({content.get('format')} and not {_FORMAT}) cannot read what it says. Go on with "
                "that version, or use another out=."
            )
        with foreign(self._description):
            return Description(Plan.from_json(content["plan"]), content["store"], content["call"])

    def write(self, description: Description) -> None:
        """Begins the job: from now on it can be resumed."""
        plan, store, call = description.plan.to_json(), description.store, description.call
        content = {"format": _FORMAT, "plan": plan, "store": store, "call": call}
        replace_file(self._description, sealed(content))

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
        except (FileNotFoundError, StorageError):
            return None

    def withdraw_end(self) -> None:
        """The job has not ended, since something that was done is so no longer."""
        remove_file(self._end)

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
        replace_file(self._end, sealed({"journal": sizes(self.journal), **content}))


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


def _read(path: Path) -> dict[str, Any] | None:
    """What a sealed file says; None if it is damaged."""
    try:
        line = read_own(path).rstrip(b"\n")
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        raise StorageError(f"{path} could not be read: {error.strerror}.") from error
    if not is_whole(line):
        return None
    with foreign(path):
        return unsealed([line])[0]
