"""A map, from the call to the report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from batchax.datasets.checksums import checksum
from batchax.datasets.fingerprint import fingerprint
from batchax.datasets.job import Job
from batchax.datasets.outputs import combined, finished
from batchax.datasets.parts import Record, Rows, Unit
from batchax.datasets.pipeline import Stop, interruptible, run_units, trying
from batchax.datasets.plan import Plan
from batchax.datasets.program import Program, RowFunction
from batchax.datasets.progress import Progress
from batchax.datasets.report import Report
from batchax.datasets.sources import as_source
from batchax.datasets.stores import open_store
from batchax.datasets.units import Computed, Policy, compute_unit
from batchax.errors import RowError
from batchax.rows.ragged import Ragged


@dataclass(frozen=True)
class How:
    """The options of `batchax.map` that say how it is done, not what.

    Attributes:
      begun: when the call began.
    """

    out: Path | None
    batch_size: Any
    memory_limit: Any
    commit_rows: int | None
    policy: Policy
    max_errors: int | None
    retries: int
    resume: str
    version: str | None
    progress: bool | Callable[[int, int], Any]
    begun: float


def run(function: RowFunction, how: How) -> Report:
    """Does all rows that are not done, and says what came of it.

    Raises:
      RowError, StorageError, JobError: see `batchax.map`.
    """
    job = _job(function, how)
    try:
        if job.finished is not None:
            return _report(function, how, job, job.plan.rows)
        reused = sum(r.unit.rows for r in job.done.values())
        _run_left(function, how, job, reused)
        job.finish(_summary(function, job))
        return _report(function, how, job, reused)
    finally:
        job.close()


def _job(function: RowFunction, how: How) -> Job | JobInMemory:
    leaves = [o.leaf for o in function.outputs if not o.reduces]
    plan = functools.partial(_plan, function, how)
    store = lambda plan: open_store(how.out, leaves, plan)
    if how.out is None:
        made = plan()
        return JobInMemory(made, store(made))
    return Job.open(how.out, _fingerprint(function, how), plan, store, how.resume)


def _fingerprint(function: RowFunction, how: How) -> dict[str, Any]:
    """What tells this call from others with other results."""
    inputs = function.inputs
    outputs = {o.path: o.reduces or o.leaf.axis for o in function.outputs}
    key = function.key
    options = {
        "batch_size": how.batch_size,
        "commit_rows": how.commit_rows,
        "in_axes": {m.path: m.axis for m in inputs.mapped},
        "out_axes": outputs,
        "key": None if key is None else np.asarray(jax.random.key_data(key)).tolist(),
        # Neither way has kept a result that is not finite: one may go on with what the other did.
        "on_nonfinite": how.policy.on_nonfinite and "given",
        **{name: str(option) for name, option in function.options.items()},
    }
    shared = map(as_source, inputs.shared, inputs.shared_paths)
    sources = [*(m.source for m in inputs.mapped), *shared]
    call, types = function.of_one_row()
    return fingerprint(function.fun, types, call, sources, options, how.version)


def _plan(function: RowFunction, how: How) -> Plan:
    rows, size = function.inputs.rows, how.batch_size
    if size == "auto":
        size = function.fitting(how.memory_limit)
        if how.commit_rows is not None:
            size = max(n for n in range(1, size + 1) if how.commit_rows % n == 0)
    size = max(1, min(size, rows))
    return Plan.of(rows, size, function.row_bytes, function.row_seconds, how.commit_rows)


def _run_left(function: RowFunction, how: How, job: Job | JobInMemory, reused: int) -> None:
    """Runs the units that are not done."""
    inputs, stop = function.inputs, Stop()
    quarantined = sum(len(r.quarantined) for r in job.done.values())
    name = getattr(function.fun, "__name__", type(function.fun).__name__)
    progress = Progress(how.progress, name, job.plan.rows, reused)
    if reused:
        progress.say(f"{reused:,} of {job.plan.rows:,} rows are done already")
    left = (job.plan.unit(k) for k in range(len(job.plan)) if k not in job.done)
    program: list[Program] = []

    def read(unit: Unit) -> list[np.ndarray | Rows]:
        parts = []
        for m in inputs.mapped:
            work = functools.partial(m.source.read, m.axis, unit.start, unit.stop)
            parts.append(trying(work, how.retries, stop))
        return parts

    def compute(unit: Unit, data: Sequence[np.ndarray | Rows]) -> Computed:
        if not program:  # nothing is compiled where nothing is left to do
            program.append(Program(function, job.plan.batch_size))
        return compute_unit(program[0], unit, data, how.policy)

    def write(computed: Computed) -> Record:
        trying(lambda: job.store.write(computed.unit, computed.results), how.retries, stop)
        return Record(
            computed.unit,
            list(map(checksum, computed.results)) if how.out else [],
            seconds=computed.seconds,
            quarantined=computed.bad,
            reduced=computed.reduced,
        )

    def record(records: Sequence[Record]) -> None:
        nonlocal quarantined
        job.record(records)
        for done in records:
            progress.advance(done.unit.rows, len(done.quarantined))
            quarantined += len(done.quarantined)
        if how.max_errors is not None and quarantined > how.max_errors:
            stop.because(_too_many(quarantined, how.max_errors, records))

    with interruptible(stop, progress.say):
        try:
            run_units(left, read, compute, write, record, stop)
        except BaseException as error:
            progress.close(f"stopped: {type(error).__name__}. {_kept(job)}")
            raise
    if len(job.done) < len(job.plan):
        progress.close(_kept(job))
        raise KeyboardInterrupt
    progress.close(f"{job.plan.rows:,} rows done")


def _kept(job: Job | JobInMemory) -> str:
    rows = sum(r.unit.rows for r in job.done.values())
    if isinstance(job, JobInMemory):
        return f"{rows:,} of {job.plan.rows:,} rows were done."
    return (
        f"{rows:,} of {job.plan.rows:,} rows are done and kept; the same call goes on from there."
    )


def _too_many(count: int, most: int, records: Sequence[Record]) -> RowError:
    last = next(r.quarantined[-1] for r in reversed(records) if r.quarantined)
    return RowError(
        f"{count} rows have no result, and max_errors is {most}. One of them is row {last.row}: "
        f"{last.error}"
    )


def _summary(function: RowFunction, job: Job | JobInMemory) -> dict[str, Any]:
    """What is kept of a job that is done."""
    records = [job.done[k] for k in sorted(job.done)]
    bad = [b for r in records for b in r.quarantined]
    rows = job.plan.rows - len(bad)
    reduced = {}
    for output in function.outputs:
        if output.reduces:
            parts = [r.reduced[output.leaf.name] for r in records]
            whole = combined(output.reduces, parts)
            reduced[output.leaf.name] = finished(output, whole, rows)
    return {"bad": bad, "reduced": reduced}


def _report(function: RowFunction, how: How, job: Job | JobInMemory, reused: int) -> Report:
    assert job.finished is not None
    bad, reduced = job.finished["bad"], job.finished["reduced"]
    kept = job.store.result()
    outputs = [
        None if o.reduces else _shown(kept[o.leaf.name] if isinstance(kept, dict) else kept)
        for o in function.outputs
    ]
    wholes = [reduced[o.leaf.name] if o.reduces else None for o in function.outputs]
    return Report(
        rows=job.plan.rows,
        reused=reused,
        quarantined=len(bad),
        outputs=function.tree_of(outputs),
        reduced=function.tree_of(wholes),
        seconds=time.monotonic() - how.begun,
        bad=bad,
    )


def _shown(x: Any) -> Any:
    return Ragged(*x) if isinstance(x, Rows) else x


class JobInMemory:
    """A job of which nothing is kept once the process ends."""

    def __init__(self, plan: Plan, store: Any) -> None:
        self.plan, self.store = plan, store
        self.done: dict[int, Record] = {}
        self.finished: dict[str, Any] | None = None
        store.prepare()

    def record(self, records: Sequence[Record]) -> None:
        """Notes units that are done."""
        self.done |= {r.unit.number: r for r in records}

    def finish(self, summary: dict[str, Any]) -> None:
        """Notes that all are."""
        self.finished = summary

    def close(self) -> None:
        """There is nothing to close."""
