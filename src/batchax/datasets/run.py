"""A map, from the call to the report."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from batchax.datasets.addresses import Address
from batchax.datasets.bad_rows import OutageError, Policy
from batchax.datasets.engines.engine import Threads
from batchax.datasets.fingerprint import fingerprint
from batchax.datasets.jobs import AnyJob, JobInMemory
from batchax.datasets.labels import Labels
from batchax.datasets.opening import open_job
from batchax.datasets.outputs import combined, finished, of_no_rows, state_of
from batchax.datasets.parts import Bad, Leaf, Rows, elements_in
from batchax.datasets.pipeline import Stop, interruptible
from batchax.datasets.plan import Plan, whole_batches
from batchax.datasets.program import fitting, staged_batch
from batchax.datasets.ragged_parts import as_ragged
from batchax.datasets.report import Report
from batchax.datasets.row_function import RowFunction
from batchax.datasets.source import ByContent
from batchax.datasets.sources import as_source
from batchax.datasets.stores import open_store
from batchax.datasets.stream_units import StreamUnits, StreamWork
from batchax.datasets.tables import Results
from batchax.datasets.work import Work
from batchax.errors import BatchaxError, JobError, RowError
from batchax.progress import Progress


@dataclass(frozen=True)
class How:
    """The options of `batchax.map` that say how it is done, not what.

    Attributes:
      out: where it is, from any folder.
      named: what the user calls that.
      kind: of the store of the output.
      stream_id: what the user calls the rows of streams, if there are any.
      begun: when the call began.
    """

    out: Address | None
    named: Address | None
    kind: str
    batch_size: Any
    memory_limit: Any
    commit_rows: int | None
    policy: Policy
    max_errors: int | None
    retry_quarantined: bool
    overwrite: bool
    retries: int
    resume: str
    version: str | None
    by_content: bool
    stream_id: str | None
    progress: bool | Callable[[int, int], Any]
    engine: Threads
    begun: float


def run(function: RowFunction, how: How) -> Report:
    """Does all rows that are not done, and says what came of it.

    Raises:
      RowError, StorageError, JobError: see `batchax.map`.
    """
    try:
        return _run(function, how)
    except BatchaxError as error:
        error.args = _as_named(error.args, how)
        raise


def _run(function: RowFunction, how: How) -> Report:
    job = _job(function, how)
    try:
        if not (function.inputs.streams or job.plan.rows == function.inputs.rows):
            raise JobError(
                f"job.json of {how.out} has {job.plan.rows:,} rows, and the inputs have "
                f"{function.inputs.rows:,}, so somebody changed it. Put the right one back, or "
                "delete the output and the folder of its job to compute it again."
            )
        if how.retry_quarantined and job.finished is None:
            own = how.engine.units(job.plan)
            bad = [k for k, r in job.done.items() if r.quarantined and k in own]
            job.withdraw(bad, "quarantined rows are tried again")
        _check_quarantined(function, how, job)
        if job.finished is not None:
            if function.inputs.streams and how.stream_id is None:
                _ = list(_taken(function, how, job))  # which compares them
            return _report(function, how, job, job.plan.rows)
        reused = sum(r.unit.rows for r in job.done.values())
        while job.finished is None:
            _run_left(function, how, job, reused)
            for files in (f for m in function.inputs.mapped for f in m.source.all_files):
                files.check_content()
            if len(job.done) < len(job.plan):
                break
            job.settle()
            if len(job.done) == len(job.plan):
                job.finish(_summary(function, job))
        return _report(function, how, job, reused)
    finally:
        job.close()
        for stream in function.inputs.streams:
            stream.close()


def _check_quarantined(function: RowFunction, how: How, job: AnyJob) -> None:
    """Whether the rows that earlier calls quarantined are what this one lets pass."""
    bad = _bad_rows(job)
    _check_how_many(how, len(bad))
    nonfinite = next((b for b in bad if b.is_nonfinite), None)
    if how.policy.on_nonfinite == "raise" and nonfinite is not None:
        names = ", ".join(m.source.name for m in function.inputs.mapped)
        raise RowError(
            f"row {nonfinite.row} of {names} fails: {nonfinite.error}. An earlier call quarantined "
            'it. Pass on_nonfinite="quarantine" to go on without it, or retry_quarantined=True to '
            "compute it again."
        )


def _check_how_many(how: How, quarantined: int) -> None:
    if how.max_errors is not None and quarantined > how.max_errors:
        raise RowError(
            f"{quarantined} rows have no result, and max_errors is {how.max_errors}. The file "
            "quarantine.jsonl in the folder of the job says what went wrong. Pass "
            "retry_quarantined=True to compute them again."
        )


def _bad_rows(job: AnyJob) -> list[Bad]:
    if job.finished is not None:
        return job.finished["bad"]
    return [b for _, r in sorted(job.done.items()) for b in r.quarantined]


def _job(function: RowFunction, how: How) -> AnyJob:
    leaves = [o.leaf for o in function.outputs if not o.reduces]
    plan = functools.partial(plan_of, function, how.batch_size, how.memory_limit, how.commit_rows)
    store = lambda plan: open_store(how.out, leaves, plan, how.kind)
    if how.out is None:
        made = plan()
        return JobInMemory(made, store(made))
    call = functools.partial(_fingerprint, function, how)
    shard, retry = how.engine.shard, how.retry_quarantined
    return open_job(how.out, call, plan, store, how.resume, shard, retry, how.overwrite)


def _fingerprint(function: RowFunction, how: How, plan: Plan) -> dict[str, Any]:
    """What tells this call from others with other results."""
    inputs = function.inputs
    outputs = {o.path: o.described for o in function.outputs}
    key = function.key
    options = {
        "batch_size": how.batch_size,
        "commit_rows": how.commit_rows,
        "in_axes": [m.axis for m in inputs.mapped],
        "out_axes": outputs,
        "key": None if key is None else _described_key(key),
        # Neither way has kept a result that is not finite: one may go on with what the other did.
        "on_nonfinite": how.policy.on_nonfinite and "given",
        **{name: str(option) for name, option in function.options.items()},
        **({"stream_id": how.stream_id} if inputs.streams else {}),
    }
    shared = map(as_source, inputs.shared, inputs.shared_paths)
    sources: list[Any] = [*(m.source for m in inputs.mapped), *shared]
    if how.by_content:
        sources = list(map(ByContent, sources))
    staged = staged_batch(function, plan.batch_size), function.of_row
    return fingerprint(function.fun, staged, sources, options, how.version)


def _described_key(key: Any) -> str:
    """Of what kind it is counts, too: the same numbers give rows other keys."""
    return f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}"


def plan_of(
    function: RowFunction, batch_size: Any, memory_limit: Any, commit_rows: int | None
) -> Plan:
    """The plan of a new job; see the options of `batchax.map`."""
    rows, size, asked = function.inputs.rows, batch_size, commit_rows
    if size == "auto":
        size = fitting(function, memory_limit)
        if commit_rows is not None:
            size = max(n for n in range(1, size + 1) if commit_rows % n == 0)
    if commit_rows is not None:
        commit_rows = whole_batches(commit_rows, size)
        if size > rows:
            commit_rows = max(1, rows)  # they are one batch
    size = max(1, min(size, rows))
    plan = Plan.of(rows, size, function.row_bytes, function.row_seconds, commit_rows)
    if function.inputs.streams:
        return replace(plan, open=True)
    lengths = [m.source.lengths for m in function.inputs.mapped]
    of_rows = [elements_in(x) for x in lengths if x is not None]
    if asked is not None or not of_rows:
        return plan
    return plan.by_elements(np.sum(of_rows, axis=0))


def _run_left(function: RowFunction, how: How, job: AnyJob, reused: int) -> None:
    """Runs the units that are not done."""
    stop = Stop()
    work = Work(function, job.plan, job.store, how.policy, how.retries, stop, job.check)
    taken = _taken(function, how, job) if function.inputs.streams else None
    left: Iterable[int] = ()
    if taken is None:
        left = [k for k in how.engine.units(job.plan) if k not in job.done]
        units, total = map(job.plan.unit, left), job.plan.rows
    else:
        work, units, total = StreamWork(**vars(work), taken=taken), taken, taken.total
    quarantined, before = len(_bad_rows(job)), set(job.done)
    progress = Progress(how.progress, function.name, total, reused)
    if reused:
        progress.say(f"{_of(reused, job)} are done already")

    def tell(rows: int, bad: int) -> None:
        nonlocal quarantined
        progress.advance(rows, bad)
        quarantined += bad
        try:
            _check_how_many(how, quarantined)
        except RowError as error:
            stop.because(error)

    with interruptible(stop, progress.say):
        try:
            try:
                how.engine.run(work, units, job.record, tell)
            finally:
                job.look_again()
        except BaseException as error:
            if isinstance(error, OutageError):  # other workers may not have seen so many yet
                fails = lambda r, kind=error.kind: any(b.kind == kind for b in r.quarantined)
                new = [k for k, r in job.done.items() if k not in before and fails(r)]
                job.withdraw(new, "rows in succession failed")
            progress.close(f"stopped: {type(error).__name__}. {_kept(job)}")
            raise
    if taken is not None and taken.rows is not None:
        job.plan = job.plan.ended(taken.rows)
        left = range(len(job.plan))
    if (taken is not None and taken.rows is None) or any(k not in job.done for k in left):
        progress.close(_kept(job))
        job.check()  # if somebody deleted its folder, that is why
        if not stop.asked.is_set():
            raise JobError(
                f"The journal of the job of {how.out} says no longer what this process wrote down "
                "in it: somebody deleted or cut it meanwhile. The same call computes again what "
                "it does not say."
            )
        raise KeyboardInterrupt
    missing = job.plan.rows - _rows_done(job)
    others = f", {missing:,} are left to other shards" if missing else ""
    progress.close(f"{_rows_done(job):,} rows done{others}")


def _taken(function: RowFunction, how: How, job: AnyJob) -> StreamUnits:
    named = how.stream_id is not None
    return StreamUnits(function, job.plan, job.done, named, how.out)


def _rows_done(job: AnyJob) -> int:
    return sum(r.unit.rows for r in job.done.values())


def _kept(job: AnyJob) -> str:
    return f"{_of(_rows_done(job), job)} {job.kept}"


def _of(rows: int, job: AnyJob) -> str:
    return f"{rows:,} rows" if job.plan.open else f"{rows:,} of {job.plan.rows:,} rows"


def _summary(function: RowFunction, job: AnyJob) -> dict[str, Any]:
    """What is kept of a job that is done."""
    records, bad = [job.done[k] for k in sorted(job.done)], _bad_rows(job)
    rows = job.plan.rows - len(bad)
    reduced = {}
    for output in function.outputs:
        if output.reduces:
            parts = [state_of(output, r.reduced) for r in records] or [of_no_rows(output)]
            whole = combined(output, parts)
            reduced[output.leaf.name] = finished(output, whole, rows)
    return {"bad": bad, "reduced": reduced}


def _report(function: RowFunction, how: How, job: AnyJob, reused: int) -> Report:
    bad = _bad_rows(job)
    reduced = {} if job.finished is None else job.finished["reduced"]  # other shards have not
    kept = _as_named(job.store.result(), how)
    outputs = [
        None if o.reduces else _shown(o.leaf, kept[o.leaf.name] if isinstance(kept, dict) else kept)
        for o in function.outputs
    ]
    leaves = [o.leaf for o in function.outputs]
    results = Results(
        [leaf.name for leaf in leaves], outputs, [leaf.axis for leaf in leaves], _labels(function)
    )
    wholes = [reduced.get(o.leaf.name) for o in function.outputs]
    return Report(
        rows=job.plan.rows,
        reused=reused,
        quarantined=len(bad),
        outputs=function.tree_of(outputs),
        reduced=function.tree_of(wholes),
        seconds=time.monotonic() - how.begun,
        bad=bad,
        left=0 if job.finished else job.plan.rows - _rows_done(job),
        _results=results,
    )


def _as_named(told: Any, how: How) -> Any:
    """Texts with the output as the user named it, where that leads to the same place still."""
    try:
        same = isinstance(how.named, Path) and how.named.absolute() == how.out
    except OSError:  # the folder of this process is gone
        same = False
    if not same:
        return told
    named, out = str(how.named), str(how.out)
    return jax.tree.map(lambda x: x.replace(out, named) if isinstance(x, str) else x, told)


def _labels(function: RowFunction) -> Labels:
    """What rows are called in the first argument that says so."""
    labels = (m.source.labels(m.axis) for m in function.inputs.mapped)
    return next((x for x in labels if x is not None), Labels())


def _shown(leaf: Leaf, x: Any) -> Any:
    return as_ragged(x, leaf.ragged or 0) if isinstance(x, Rows) else x
