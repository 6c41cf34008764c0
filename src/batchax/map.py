"""`map`: a function of one row over a dataset, from disk to disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from batchax import _compat
from batchax.datasets.addresses import Address, address
from batchax.datasets.arrays import Sliced
from batchax.datasets.engines.engine import DaskClient, find_engine
from batchax.datasets.row_function import RowFunction
from batchax.datasets.run import How, Report, check_batch_size, check_key, of_this_process, run
from batchax.datasets.stores import kind_of
from batchax.datasets.units import Policy, Streak
from batchax.divergence.compact import Compact
from batchax.divergence.runner import resolved
from batchax.errors import ArgumentTypeError, StorageError, UnsupportedError
from batchax.frontend.options import (
    check_callable,
    check_count,
    check_flags,
    check_one_of,
    check_progress,
    check_small_matrices,
    translate_argument_names,
)
from batchax.frontend.outputs import check_out_axes
from batchax.jaxprs.error_format import brief
from batchax.jaxprs.types import AxesTree, Tree

_ON_ERROR = ("raise", "quarantine")


@_compat.api_boundary
@translate_argument_names
def map(
    fun: Callable[..., Any],
    *arrays: Tree,
    out: str | Path | None = None,
    in_axes: AxesTree = 0,
    out_axes: AxesTree = 0,
    batch_size: int | Literal["auto"] = "auto",
    memory_limit: int | str | None = None,
    commit_rows: int | None = None,
    executor: str | Executor | DaskClient | None = None,
    mesh: Literal["all"] | jax.sharding.Mesh | tuple[jax.sharding.Mesh, Any] | None = None,
    key: jax.Array | None = None,
    divergence: Literal["auto", "predicate", "compact", "serial"] | Compact = "auto",
    small_matrices: Literal["auto", "library", "vectorized"] = "auto",
    on_error: Literal["raise", "quarantine"] = "raise",
    on_nonfinite: Literal["raise", "quarantine"] | None = None,
    max_errors: int | None = None,
    max_consecutive_errors: int | None = 20,
    retry_quarantined: bool = False,
    retries: int = 2,
    resume: Literal["auto", "never", "extend"] = "auto",
    overwrite: bool = False,
    store_options: dict[str, Any] | None = None,
    keep: Sequence[str] | dict[str, Any] = (),
    version: str | None = None,
    inputs_by: Literal["file", "content"] = "file",
    batched: bool = False,
    stream_id: str | None = None,
    progress: bool | Callable[[int, int], Any] = True,
) -> Report:
    """Applies a function of one row to all rows of a dataset, from disk to disk.

    Example:
      >>> np.save("x.npy", np.arange(12.0).reshape(4, 3))
      >>> report = bx.map(jnp.sum, "x.npy", out="sums.npy", progress=False)
      >>> report.rows, report.outputs
      (4, 'sums.npy')
      >>> print(np.load("sums.npy"))
      [ 3. 12. 21. 30.]

    Rows are read, computed, and written a batch at a time, so the dataset may be larger than
    memory. After an interruption, the same call resumes.

    Args:
      fun: A function of one row, as for `vmap`.
      *arrays: Pytrees of arrays with rows. Each leaf is one of

        - a NumPy or JAX array, a memory map, a `Ragged`, an Arrow column, or an object with
          `shape`, `dtype`, and slices (HDF5, Zarr, TensorStore, xarray).
        - a path: ``"x.npy"``, ``"x.zarr:group/array"``, ``"x.h5:dataset"``, ``"x.parquet:column"``,
          or a pattern, ``"data/year=*/x.npy"``.
        - an address in object storage: ``s3://``, ``gs://``, ``az://``, ``memory://``.
        - a stream, if all mapped arguments are streams, as for `map_batches`.
      out: The output, on a disk or in object storage (``"s3://bucket/y.zarr"``).

        - None (default): NumPy arrays in memory.
        - ``"y.zarr"``: a Zarr array, or a group with an array for each leaf of the result.
        - ``"y.npy"``: one array.
        - ``"y.parquet"``, ``"y/"``: a folder of Parquet files.
      in_axes: The axis of the rows, as for `vmap`. None for shared arguments.
      out_axes: The axis of the rows in results, as for `vmap`. `batchax.Reduce` reduces an output
        over all rows. Functions that return `batchax.OutputRows` need a Parquet output.
      batch_size: The number of rows that are computed at a time. "auto" (default): the number that
        fits `memory_limit`.
      memory_limit: Bytes, or a string such as "2GiB". Default: the free memory of the device.
      commit_rows: The number of rows that are committed at once, a multiple of `batch_size`.
        Default: about half a second of work.
      executor: What computes the units.

        - None (default): threads of this process.
        - "processes:4", or an executor of ``concurrent.futures`` with spawned processes.
        - a Dask client, or "dask:tcp://host:8786".
        - "shard:3/16": this process computes every sixteenth unit.
      mesh: The devices of this process that a batch is sharded over, as for `vmap`.
      key: A random key. Row `i` gets ``jax.random.fold_in(key, i)``, as the argument `key` of the
        function, or as its first argument if it has no such parameter after the first.
      divergence: As for `vmap`.
      small_matrices: As for `vmap`.
      on_error: What happens if the function fails for a row, because a callback raises.

        - "raise" (default): the call ends and names the row. It can resume.
        - "quarantine": the row is set aside. Its results are NaN or 0. ``ok.npy`` in the folder of
          the job marks rows with a result, and ``quarantine.jsonl`` has the errors.
      on_nonfinite: The same for rows with NaN or infinite results. None (default): nothing.
      max_errors: The largest number of quarantined rows. More end the call.
      max_consecutive_errors: The largest number of rows that fail in succession with one type of
        error. More end the call without quarantine, since a service may be down. None: no limit.
      retry_quarantined: Whether to recompute the units with rows that earlier calls quarantined.
      retries: How often a failed read or write is tried again.
      resume: What happens if an earlier call of this job exists.

        - "auto" (default): the call resumes it.
        - "never": the call raises.
        - "extend": as "auto", and rows that were added to the end of the inputs are computed. For
          inputs that are one file, the job must have begun with it.
      overwrite: Whether to remove the output and the job of an earlier call first. Only outputs of
        batchax that no process computes are removed.
      store_options: Options of the library that writes the output. Zarr: ``codecs``,
        ``chunk_shape``, and ``dimension_names``, as in ``zarr.json``, or a dict of these by array
        name. Parquet: those of ``pyarrow.parquet.ParquetWriter``, and ``row_group_size``.
      keep: Columns that are copied to the output: names of columns of the Parquet file of an
        argument, or of coordinates of an xarray array; or a dict of columns, ``{"id":
        "t.parquet:id", "name": frame["name"]}``.
      version: A version of the function, required if it has a host callback, whose code batchax
        cannot see.
      inputs_by: How an input file is identified when a call resumes. "file" (default): by path,
        size, and times. "content": by a checksum, for which batchax reads all of it.
      batched: Whether each item of a stream is a batch, with rows along axis 0.
      stream_id: A name for the rows of streams. Without it, a call that resumes compares finished
        rows by checksums. With it, the name is compared, and finished rows are skipped.
      progress: Whether to show the progress; or a function of the finished and the total number of
        rows (None for streams of unknown size).

    Returns:
      A report, with the attributes `rows`, `reused`, `quarantined`, `outputs`, `reduced`,
      `seconds`, `bad`, and `left`.

    Raises:
      ArgumentTypeError: An argument has the wrong type.
      AxisError: An axis is out of range, or numbers of rows differ.
      OptionError: An option is an unknown word or a number out of range.
      RowError: The function fails for a row, or for more than `max_errors`.
      StorageError: A file or object cannot be read or written.
      JobError: `out` belongs to another job, or is in use.
      KeyboardInterrupt: Ctrl-C, after the units in flight are committed.
    """
    begun = time.monotonic()
    check_callable("map", "a function of one row", fun)
    check_out_axes(out_axes)
    kind = kind_of(out)  # raises for other values before any work
    named = None if out is None else address(out, "out")
    place = _from_anywhere(named)
    check_batch_size(batch_size)
    check_count("commit_rows", commit_rows, 1, or_none=True)
    check_one_of("on_error", on_error, *_ON_ERROR)
    check_one_of("on_nonfinite", on_nonfinite, *_ON_ERROR, None)
    check_one_of("resume", resume, "auto", "never", "extend")
    check_count("max_errors", max_errors, or_none=True)
    check_count("max_consecutive_errors", max_consecutive_errors, or_none=True)
    check_count("retries", retries)
    check_one_of("inputs_by", inputs_by, "file", "content")
    if not (version is None or isinstance(version, str)):
        raise ArgumentTypeError(f"version must be a string or None, got {brief(version)}.")
    check_progress(progress, "rows")
    check_flags(batched=batched, retry_quarantined=retry_quarantined, overwrite=overwrite)
    check_key(fun, key, len(arrays))
    engine = find_engine(executor, place)
    check_small_matrices(small_matrices)
    options = {"divergence": resolved(divergence), "small_matrices": small_matrices}
    options |= {"mesh": of_this_process(mesh)}
    function = RowFunction.of(fun, arrays, in_axes, out_axes, key, options, batched, keep=keep)
    _check_streams(function, executor, stream_id)
    _check_apart(out, place, function)
    if overwrite:
        _check_overwritten(out, place, arrays, function, engine.shard)
    if resume == "extend" and (function.inputs.streams or engine.shard is not None):
        raise UnsupportedError(
            'resume="extend" does not support streams and shards: it compares the earlier rows of '
            "arrays, in a job of this process alone. Remove one of them."
        )
    how = How(
        out=place,
        named=named,
        kind=kind,
        batch_size=batch_size if batch_size == "auto" else int(batch_size),
        memory_limit=memory_limit,
        commit_rows=None if commit_rows is None else int(commit_rows),
        policy=Policy(on_error, on_nonfinite, Streak(max_consecutive_errors)),
        max_errors=max_errors,
        retry_quarantined=retry_quarantined,
        overwrite=overwrite,
        retries=retries,
        resume=resume,
        store_options=_json_of(store_options),
        version=version,
        by_content=inputs_by == "content",
        stream_id=stream_id,
        progress=progress,
        engine=engine,
        begun=begun,
    )
    return run(function, how)


def _from_anywhere(named: Address | None) -> Address | None:
    """The same place, whatever folder this process is in later; what has no name, as it is."""
    try:
        return named.absolute() if isinstance(named, Path) and named.name else named
    except OSError as error:
        raise StorageError(
            f"out={str(named)!r} is a path from the folder of this process, which no longer "
            "exists. Pass the full path."
        ) from error


def _check_streams(function: RowFunction, executor: object, stream_id: object) -> None:
    streams = function.inputs.streams
    if not (stream_id is None or isinstance(stream_id, str)):
        raise ArgumentTypeError(f"stream_id must be a string or None, and is {brief(stream_id)}.")
    if stream_id is not None and not streams:
        raise ArgumentTypeError(
            f"stream_id={brief(stream_id)} names the rows of a stream, but no argument is a "
            "stream. Remove stream_id."
        )
    if streams and executor is not None:
        raise UnsupportedError(
            f"executor does not support {streams[0].name}, a stream: other processes cannot read "
            "an iterator of this one. Remove executor; or save the rows, "
            "bx.map(lambda x: x, ..., out='rows.zarr'), and pass the path."
        )


def _check_apart(out: object, place: Address | None, function: RowFunction) -> None:
    """An input that holds the output changes with it, and the job could not go on."""
    if place is None:
        return
    place = place.resolve() if isinstance(place, Path) else place
    for source in function.inputs.sources:
        if source.would_hold(place):
            raise ArgumentTypeError(
                f"out={str(out)!r} lies in {source.name}, which would change while it is read. "
                "Pass an out= outside of it."
            )


def _check_overwritten(
    out: object, place: Address | None, arrays: Tree, function: RowFunction, shard: str | None
) -> None:
    """What starts over removes neither an input nor what other processes have done."""
    if shard is not None:
        raise UnsupportedError(
            "overwrite=True removes what other shards have done. Call map with overwrite=True and "
            "without executor; or delete the output and the folder of its job before the shards "
            "start."
        )
    place = place.resolve() if isinstance(place, Path) else place
    sources = function.inputs.sources
    for source in sources:
        if isinstance(source, Sliced) and source.files is None:  # such as Zarr behind xarray
            raise UnsupportedError(
                f"overwrite=True removes an output, and batchax cannot see from which files "
                f"{source.name} is read. Pass numpy.asarray of it, or delete the output yourself."
            )
    leaves = jax.tree.leaves(arrays)
    paths = [x.filename if isinstance(x, np.memmap) else x for x in leaves]
    shared = [
        (str(path), Path(path).resolve())
        for path, x in zip(paths, leaves, strict=True)
        if path is not None and isinstance(x, (Path, np.memmap))
    ]
    for name, path in [*((s.name, f.path) for s in sources for f in s.all_files), *shared]:
        if place == path or place in path.parents:
            raise ArgumentTypeError(
                f"out={str(out)!r} holds {name}, which overwrite=True would remove. Pass another "
                "out=."
            )


def _json_of(options: object) -> dict[str, Any]:
    """Store options as the job keeps them; codecs of zarr-python say what they are in JSON."""
    if options is not None and not isinstance(options, dict):
        raise ArgumentTypeError(
            f"store_options must be a dict of options by name, and is {brief(options)}."
        )
    try:
        return json.loads(json.dumps(options or {}, default=lambda x: x.to_dict()))
    except (TypeError, ValueError, AttributeError):
        raise ArgumentTypeError(
            "store_options must hold numbers, strings, lists and dicts, as JSON has them, since "
            f"the job keeps them; got {brief(options)}."
        ) from None
