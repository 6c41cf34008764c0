"""Who runs the units of a job: what the option `executor` of `map` says."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from batchax.datasets.addresses import Address
from batchax.datasets.engines.attempts import refuse_repeated
from batchax.datasets.engines.call import saved
from batchax.datasets.engines.pools import Pool, find_pool
from batchax.datasets.engines.submitting import Submitting
from batchax.datasets.job_files import JobFiles
from batchax.datasets.parts import Record, Unit
from batchax.datasets.pipeline import run_units
from batchax.datasets.places import place_of
from batchax.datasets.plan import Plan
from batchax.datasets.work import Work
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.jaxprs.spoken import brief

_SHARD = re.compile(r"shard:(\d+)/(\d+)")

Tell = Callable[[int, int], None]
"""Is told of rows that are done, and of how many of them are without a result."""


class Threads:
    """Threads of this process: one reads, one computes, some write.

    Attributes:
      shard: the name of this process's part of the job, if others have the other parts.
    """

    shard: str | None = None

    def units(self, plan: Plan) -> range:
        """The numbers of the units that are to be done here."""
        return range(len(plan))

    def run(
        self,
        work: Work,
        units: Iterable[Unit],
        record: Callable[[Sequence[Record]], None],
        tell: Tell,
    ) -> None:
        """Runs units.

        Args:
          work: what there is to do for each.
          units: which.
          record: writes down what was done here.
          tell: is told of what was written down.
        """

        def written(records: Sequence[Record]) -> None:
            record(records)
            for done in records:
                tell(done.unit.rows, len(done.quarantined))

        lasts = work.store.lasts
        run_units(units, work.read, work.begin, work.write, written, work.stop, lasts)


@dataclass(frozen=True)
class Shard(Threads):
    """The same, for every so-manieth unit.

    Attributes:
      index: the first of these.
      count: how many processes share the units.
    """

    index: int
    count: int

    @property
    def shard(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"shard-{self.index}-of-{self.count}"

    def units(self, plan: Plan) -> range:
        if len(plan) < self.count and plan.rows:
            each = -(-plan.rows // self.count)
            warnings.warn(
                f"there are {len(plan)} units for {self.count} shards: "
                f"{self.count - len(plan)} of these have nothing to do. For units of fewer rows "
                f"begin the job with commit_rows={each} and a batch_size that divides it (in the "
                f"command --commit-rows {each} --batch-size {each}).",
                stacklevel=2,
            )
        return range(self.index, len(plan), self.count)


@dataclass(frozen=True)
class Workers(Threads):
    """Other processes, to which units are submitted.

    Attributes:
      make_pool: makes what they are submitted to.
      out: the output.
    """

    make_pool: Callable[[], Pool]
    out: Address

    def run(
        self,
        work: Work,
        units: Iterable[Unit],
        record: Callable[[Sequence[Record]], None],
        tell: Tell,
    ) -> None:
        attempts, quarantine = saved(work, self.out), work.policy.on_error == "quarantine"
        done = lambda unit: tell(unit.rows, unit.bad)
        name, pool = work.function.name, self.make_pool()
        Submitting(pool, attempts, name, quarantine, done, work.stop).run(units)


def find_engine(executor: Any, out: Address | None) -> Threads:
    """The engine that `executor` names.

    Raises:
      ArgumentTypeError: it names none.
      UnsupportedError: results are to stay in memory, or processes are forked.
    """
    if executor is None:
        return Threads()
    if out is None:
        raise UnsupportedError(
            "executor was given, and out=None: results of other processes do not come to the "
            'memory of this one. Give a path, such as out="y.zarr".'
        )
    shard = _SHARD.fullmatch(executor) if isinstance(executor, str) else None
    if not place_of(out).shared and (shard is None or shard[2] != "1"):
        raise UnsupportedError(
            f"executor was given, and out={str(out)!r} is in the memory of this process, which no "
            "other process sees. Write to a disk or to a store of objects."
        )
    if shard is None:
        refuse_repeated(JobFiles(out).folder)
        return Workers(find_pool(executor), out)
    index, count = map(int, shard.groups())
    if not count:
        raise ArgumentTypeError(f"executor={brief(executor)}: there is one shard at least.")
    if index > count:
        raise ArgumentTypeError(
            f"executor={brief(executor)}: of {count} shards, numbers go from 0 to {count - 1}, or "
            f"from 1 to {count}."
        )
    return Shard(index % count, count)  # whether they are counted from 0 or from 1
