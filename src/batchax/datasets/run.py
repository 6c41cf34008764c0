"""What `batchax.map` does, and what it returns."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from batchax.datasets.addresses import Address, needed
from batchax.datasets.engines.engine import Threads
from batchax.datasets.fingerprint import fingerprint
from batchax.datasets.job import AnyJob, Extend, JobInMemory, open_job
from batchax.datasets.pipeline import Stop, StreamUnits, Work, interruptible
from batchax.datasets.plan import (
    ALONE,
    Bad,
    Data,
    Leaf,
    Plan,
    Record,
    Rows,
    as_ragged,
    checksum,
    kept,
    whole_batches,
)
from batchax.datasets.row_function import RowFunction, fitting, staged_batch
from batchax.datasets.source import ByContent, Labels
from batchax.datasets.sources import as_source
from batchax.datasets.stores import open_store
from batchax.datasets.units import OutageError, Policy
from batchax.errors import (
    ArgumentTypeError,
    BatchaxError,
    JobError,
    RowError,
    StorageError,
    UnsupportedError,
)
from batchax.frontend.options import check_count, is_word, not_one_of
from batchax.jaxprs.error_format import brief, name_of
from batchax.jaxprs.types import Tree
from batchax.progress import Progress, duration
from batchax.rows.ragged import Ragged

Devices: TypeAlias = Literal["all"] | jax.sharding.Mesh | tuple[jax.sharding.Mesh, Any] | None
"""`mesh`, as for `vmap`."""


def check_batch_size(batch_size: object) -> None:
    if is_word(batch_size, "auto"):
        return
    if isinstance(batch_size, str):
        raise not_one_of("batch_size", batch_size, "auto", other="a positive int")
    check_count("batch_size", batch_size, 1, other='"auto"')


def of_this_process(mesh: Devices) -> Devices:
    if isinstance(mesh, str) and mesh == "all" and jax.process_count() > 1:
        return jax.sharding.Mesh(jax.local_devices(), ("devices",))
    if getattr(mesh, "is_multi_process", False):
        raise UnsupportedError(
            "mesh has devices of several processes, and each process that calls this does the "
            "whole dataset. Pass a mesh of this process's own: jax.local_devices()."
        )
    return mesh


def check_key(fun: Callable[..., Any], key: jax.Array | None, count: int) -> None:
    if key is None:
        return
    try:
        single = jax.random.key_data(key).ndim == 1
    except TypeError:
        single = False
    if not single:
        raise ArgumentTypeError(
            f"key must be one random key, of which each row gets its own, as jax.random.key(0) "
            f"makes it; got {brief(key)}."
        )
    with contextlib.suppress(ValueError):  # no signature
        parameters = inspect.signature(fun).parameters.values()
        kinds = [p.kind for p in parameters]
        if len(kinds) <= count and inspect.Parameter.VAR_POSITIONAL not in kinds:
            name = name_of(fun)
            raise ArgumentTypeError(
                f"key was passed, but {name} has no parameter for the key of a row besides those "
                f"for its {count} arrays: it comes first, or is called key."
            )


def _whole(x: Ragged | str | np.ndarray) -> Data:
    if isinstance(x, Ragged):
        return kept(x, len(x))
    return as_source(x, "the output").whole() if isinstance(x, str) else x


@dataclass(frozen=True)
class Report:
    """What `batchax.map` returns.

    Attributes:
      rows: how many rows there are.
      reused: how many of them an earlier call had done.
      quarantined: how many of them have no result; `bad` says which.
      outputs: where results are: what the function returns, with a path in place of each array;
        if they were kept in memory, an array of NumPy, or a `Ragged`. None for what is reduced.
      reduced: what the function returns, with what `batchax.Reduce` makes of all rows in place of
        each array that is reduced, and None in place of others.
      seconds: how long this call took.
      left: how many rows are left to other shards of the job.
      bad: the rows without a result, each with its number `row`, its `error` and a `traceback`.

    Example:
      >>> x = np.array([1.0, -1.0, 4.0])
      >>> report = bx.map(jnp.log, x, on_nonfinite="quarantine", progress=False)
      >>> print(report)
      3 rows, 1 quarantined, ...
      >>> report.bad[0].row
      1
    """

    rows: int
    reused: int
    quarantined: int
    outputs: Any
    reduced: Any
    seconds: float
    bad: Sequence[Bad] = field(default=(), repr=False)
    left: int = 0
    # of each result: its path in what the function returns, what is in `outputs`, its axis of rows
    _results: Sequence[tuple[str, Any, int]] = field(default=(), repr=False, compare=False)
    _labels: Labels = field(default_factory=Labels, repr=False, compare=False)

    def to_xarray(self) -> Any:
        """The results as an array of xarray, or a dataset with a variable for each.

        Variables are named by the path of the result in what the function returns. What is on a
        disk is read.

        The axis of rows has the name and the coordinates that it has in the first argument of
        `batchax.map` that is an array of xarray, and is called "row" if there is none.

        Example:
          >>> import xarray
          >>> x = xarray.DataArray(np.ones((2, 3)), dims=["day", "x"], coords={"day": [1, 4]})
          >>> sums = bx.map(jnp.sum, x, progress=False).to_xarray()
          >>> float(sums.sel(day=4)), sums.dims
          (3.0, ('day',))
        """
        xarray, arrays = needed("xarray", "to_xarray"), {}
        for name, x, axis in self._read():
            if isinstance(x, Rows):
                raise ArgumentTypeError(
                    "a result has rows of different lengths, for which xarray has no array. Read "
                    "report.outputs."
                )
            leaf = Leaf(name, x.shape, x.dtype, axis, rows_name=self._labels.dimension)
            arrays[name] = xarray.DataArray(x, dims=leaf.dimension_names)
        if set(arrays) == {""}:
            return arrays[""].assign_coords(self._labels.coordinates)
        return xarray.Dataset(arrays, coords=self._labels.coordinates)

    def _read(self) -> list[tuple[str, Any, int]]:
        if self.left:
            raise StorageError("some rows are left to other shards, so there is no table of all.")
        return [(name, _whole(x), axis) for name, x, axis in self._results if x is not None]

    def __str__(self) -> str:
        new = self.rows - self.reused - self.left
        whole = f"{self.rows:,} rows"
        parts = [f"{self.rows - self.left:,} of {whole}" if self.left else whole]
        if self.reused:
            parts.append(f"{self.reused:,} reused")
        if self.quarantined:
            parts.append(f"{self.quarantined:,} quarantined")
        if self.left:
            parts.append(f"{self.left:,} left to other shards")
        parts.append(duration(self.seconds))
        if new and self.seconds:
            parts.append(f"{new / self.seconds:,.0f} rows/s")
        return ", ".join(parts)


@dataclass(frozen=True)
class How:
    """Holds the options of `batchax.map` that do not change results."""

    out: Address | None  # where it is, from any folder
    named: Address | None  # what the user calls that
    kind: str  # of the store of the output
    batch_size: Any
    memory_limit: Any
    commit_rows: int | None
    policy: Policy
    max_errors: int | None
    retry_quarantined: bool
    overwrite: bool
    retries: int
    resume: str
    store_options: dict[str, Any]
    version: str | None
    by_content: bool
    stream_id: str | None  # what the user calls the rows of streams, if there are any
    progress: bool | Callable[[int, int], Any]
    engine: Threads
    begun: float  # when the call began


def run(function: RowFunction, how: How) -> Report:
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
                f"{function.inputs.rows:,}, so job.json was changed. Restore it, or delete the "
                "output and the folder of its job to start over."
            )
        if how.retry_quarantined and job.finished is None:
            own = how.engine.units(job.plan)
            bad = [k for k, r in job.done.items() if r.quarantined and k in own]
            job.withdraw(bad, "quarantined rows are tried again")
        _check_quarantined(function, how, job)
        if job.finished is not None:
            if function.inputs.streams and how.stream_id is None:
                _ = list(StreamUnits(function, job.plan, job.done, named=False))  # compares them
            return _report(function, how, job, job.plan.rows)
        reused = sum(r.unit.rows for r in job.done.values())
        while job.finished is None:
            _run_left(function, how, job, reused)
            for files in (f for source in function.inputs.sources for f in source.all_files):
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
    bad = _bad_rows(job)
    _check_how_many(how, len(bad))
    nonfinite = next((b for b in bad if b.is_nonfinite), None)
    if how.policy.on_nonfinite == "raise" and nonfinite is not None:
        names = ", ".join(m.source.name for m in function.inputs.mapped)
        raise RowError(
            f"row {nonfinite.row} of {names} fails: {nonfinite.error}. An earlier call "
            'quarantined it. Pass on_nonfinite="quarantine" to continue without it, or '
            "retry_quarantined=True to recompute it."
        )


def _check_how_many(how: How, quarantined: int) -> None:
    if how.max_errors is not None and quarantined > how.max_errors:
        raise RowError(
            f"{quarantined} rows have no result, and max_errors is {how.max_errors}. The file "
            "quarantine.jsonl in the folder of the job has the errors. Pass "
            "retry_quarantined=True to recompute them."
        )


def _bad_rows(job: AnyJob) -> list[Bad]:
    if job.finished is not None:
        return job.finished["bad"]
    return [b for _, r in sorted(job.done.items()) for b in r.quarantined]


def _job(function: RowFunction, how: How) -> AnyJob:
    leaves = _kept_leaves(function, how)
    plan = functools.partial(plan_of, function, how.batch_size, how.memory_limit, how.commit_rows)
    store = lambda plan: open_store(how.out, leaves, plan, how.kind, how.store_options)
    if how.out is None:
        made = plan()
        return JobInMemory(made, store(made))
    call = functools.partial(_fingerprint, function, how)
    shard, retry = how.engine.shard, how.retry_quarantined
    extend, resume = None, how.resume
    if resume == "extend":
        compare = functools.partial(_compare_rows, function)
        extend, resume = Extend(function.inputs.rows, compare), "auto"
    return open_job(how.out, call, plan, store, resume, shard, retry, how.overwrite, extend)


def _kept_leaves(function: RowFunction, how: How) -> list[Leaf]:
    """Lists the arrays that the store keeps: results, and passed columns."""
    leaves = [o.leaf for o in function.outputs if not o.reduces]
    if function.flat:
        leaves = [replace(leaf, ragged=None, flat=True) for leaf in leaves]
    passed = function.inputs.passed
    if not passed:
        return leaves
    if how.kind not in ("parquet", "zarr"):
        raise ArgumentTypeError(
            f"keep passes columns through to a folder of Parquet files, or numbers to Zarr; "
            f'out={str(how.named)!r} has no place for them. Use out="y.parquet".'
        )
    leaves = [replace(leaf, name=leaf.name or ALONE) for leaf in leaves]
    for name, source in passed.items():
        kind = source.arrow(0, 0).type
        number = str(kind).startswith(("int", "uint", "float", "double", "bool", "halffloat"))
        if how.kind == "parquet":
            leaves.append(Leaf(name, (function.inputs.rows,), np.dtype(object), passed=kind))
        elif number:
            leaves.append(Leaf(name, (function.inputs.rows,), np.dtype(kind.to_pandas_dtype())))
        else:
            raise ArgumentTypeError(
                f"{source.name} is of type {kind}, and Zarr as batchax writes it has numbers only. "
                'Use out="y.parquet", or remove it from keep=.'
            )
    return leaves


def _compare_rows(
    function: RowFunction, call: dict[str, Any], done: Mapping[int, Record], grown: Sequence[int]
) -> None:
    """Raises a JobError if the `grown` inputs do not begin with the rows that they had."""
    for i in grown:
        known_by, source, read = call["inputs"][i], function.inputs.sources[i], None
        mapped = function.inputs.mapped
        axis = mapped[i].axis if i < len(mapped) else 0
        rows = known_by["shape"][axis]
        # A checksum of the whole input, or those of the rows of each unit.
        if "crc32c" in known_by and axis == 0:
            same = source.content(rows)["crc32c"] == known_by["crc32c"]
        else:
            get = functools.partial(source.read, axis) if i < len(mapped) else source.arrow
            read = [(r.unit, r.read[i]) for r in done.values() if r.read]
            of = lambda unit, get=get: checksum(get(unit.start, unit.stop))
            same = len(read) == len(done) and all(of(unit) == crc for unit, crc in read)
        if not same:
            why = "they were changed"
            if read is not None and len(read) < len(done):
                why = "calls without it kept no checksums of them"
            raise JobError(
                f'resume="extend" adds rows to those that are done, and cannot keep the first '
                f"{rows:,} of {source.name}: {why}. Use another out=, or overwrite=True."
            )


def _fingerprint(function: RowFunction, how: How, plan: Plan) -> dict[str, Any]:
    inputs = function.inputs
    outputs = {o.path: o.described for o in function.outputs}
    key, labels = function.key, inputs.labels
    name = labels.dimension if labels and how.kind == "zarr" else None
    options = {
        "batch_size": how.batch_size,
        "commit_rows": how.commit_rows,
        "in_axes": [m.axis for m in inputs.mapped],
        "out_axes": outputs,
        # The kind of a key counts, too: the same numbers make other keys for rows.
        "key": None
        if key is None
        else f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}",
        # Neither policy stores a non-finite result, so one may resume a job of the other.
        "on_nonfinite": how.policy.on_nonfinite and "given",
        **{name: str(option) for name, option in function.options.items()},
        **({"stream_id": how.stream_id} if inputs.streams else {}),
        **({"store_options": how.store_options} if how.store_options else {}),
        **({"name of the rows": name} if name else {}),
        **({"keep": [*inputs.passed]} if inputs.passed else {}),
        **({"OutputRows": True} if function.flat else {}),
    }
    shared = map(as_source, inputs.shared, inputs.shared_paths)
    sources: list[Any] = [*inputs.sources, *shared]
    if how.by_content:
        sources = list(map(ByContent, sources))
    staged = staged_batch(function, plan.batch_size), function.of_row
    return fingerprint(function.fun, staged, sources, options, how.version)


def plan_of(
    function: RowFunction,
    batch_size: int | Literal["auto"],
    memory_limit: int | str | None,
    commit_rows: int | None,
) -> Plan:
    rows, commit_rows_given = function.inputs.rows, commit_rows
    size = fitting(function, memory_limit) if batch_size == "auto" else batch_size
    if batch_size == "auto" and commit_rows is not None:
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
    of_rows = [x for x in lengths if x is not None]
    if commit_rows_given is not None or not of_rows:
        return plan
    return plan.by_elements(np.sum(of_rows, axis=0))


def _run_left(function: RowFunction, how: How, job: AnyJob, reused: int) -> None:
    stop = Stop()
    taken = None
    if function.inputs.streams:
        taken = StreamUnits(function, job.plan, job.done, named=how.stream_id is not None)
    sums = how.resume == "extend" or taken is not None
    plan, store, policy = job.plan, job.store, how.policy
    work = Work(function, plan, store, policy, how.retries, stop, job.check, sums, taken)
    left: Iterable[int] = ()
    if taken is None:
        left = [k for k in how.engine.units(job.plan) if k not in job.done]
        units, total = map(job.plan.unit, left), job.plan.rows
    else:
        units, total = taken, taken.total
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
        job.check()  # raises if its folder was deleted
        if not stop.requested.is_set():
            raise JobError(
                f"The journal of the job of {how.out} no longer has all records of this process: "
                "it was deleted or cut during the call. The same call recomputes the units that "
                "are missing in it."
            )
        raise KeyboardInterrupt
    missing = job.plan.rows - _rows_done(job)
    others = f", {missing:,} are left to other shards" if missing else ""
    progress.close(f"{_rows_done(job):,} rows done{others}")


def _rows_done(job: AnyJob) -> int:
    return sum(r.unit.rows for r in job.done.values())


def _kept(job: AnyJob) -> str:
    return f"{_of(_rows_done(job), job)} {job.kept}"


def _of(rows: int, job: AnyJob) -> str:
    return f"{rows:,} rows" if job.plan.open else f"{rows:,} of {job.plan.rows:,} rows"


def _summary(function: RowFunction, job: AnyJob) -> dict[str, Any]:
    records, bad = [job.done[k] for k in sorted(job.done)], _bad_rows(job)
    rows = job.plan.rows - len(bad)
    reduced = {}
    for output in function.outputs:
        if output.reduces:
            parts = [output.state_of(r.reduced) for r in records] or [output.of_no_rows()]
            reduced[output.leaf.name] = output.finished(output.combined(parts), rows)
    return {"bad": bad, "reduced": reduced}


def _report(function: RowFunction, how: How, job: AnyJob, reused: int) -> Report:
    bad = _bad_rows(job)
    reduced = {} if job.finished is None else job.finished["reduced"]  # other shards have not
    kept = _as_named(job.store.result(), how)
    kept = kept if isinstance(kept, dict) else {"": kept}
    shown = lambda leaf, x: as_ragged(x, leaf.ragged or 0) if isinstance(x, Rows) else x
    outputs = [
        None if o.reduces else shown(o.leaf, kept.get(o.leaf.name or ALONE, kept.get("")))
        for o in function.outputs
    ]
    leaves = [o.leaf for o in function.outputs]
    labels = None if function.flat else function.inputs.labels
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
        _results=[(x.name, out, x.axis) for x, out in zip(leaves, outputs, strict=True)],
        _labels=labels or Labels(),
    )


def _as_named(paths: Tree, how: How) -> Tree:
    try:
        same = isinstance(how.named, Path) and how.named.absolute() == how.out
    except OSError:  # the folder of this process is gone
        same = False
    if not same:
        return paths
    named, out = str(how.named), str(how.out)
    return jax.tree.map(lambda x: x.replace(out, named) if isinstance(x, str) else x, paths)
