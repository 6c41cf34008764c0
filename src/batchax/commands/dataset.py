"""``batchax map``, ``status`` and ``verify``: datasets on disk."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchax.commands.words import Commands, Mistake, add_ways, batch_size, function, literal
from batchax.datasets.addresses import is_url
from batchax.datasets.inspect import follow, status, verify
from batchax.datasets.sources import open_path
from batchax.jaxprs.types import Tree
from batchax.map import map

# Options of `map` that a command line has under the same names.
_AS_GIVEN = (
    *("memory_limit", "commit_rows", "divergence", "small_matrices", "on_error", "on_nonfinite"),
    *("max_errors", "max_consecutive_errors", "retry_quarantined", "retries", "keep"),
    *("overwrite", "version", "inputs_by"),
)
_DONE, _FAILED, _WITH_BAD, _INTERRUPTED = 0, 1, 3, 130


def add_to(commands: Commands) -> None:
    command = commands.add_parser(
        "map",
        help="apply a function of one row to a dataset, from disk to disk",
        description="Applies a function of one row to all rows of a dataset. If it is interrupted, "
        "or killed, the same command resumes it.",
        epilog="example: batchax map model:score --in x.npy --in @weights.npz --out scores.zarr. "
        "Exit status: 0 done, 3 done except for quarantined rows, 1 failed, 130 interrupted.",
    )
    add_call(command)
    command.add_argument(
        "--overwrite",
        action="store_true",
        help="start over: remove the output and the job of an earlier map first",
    )
    command.add_argument(
        "--extend",
        action="store_true",
        help="if the inputs have more rows at their end than before, compute those, too",
    )
    command.add_argument(
        "--keep",
        nargs="+",
        default=[],
        metavar="COLUMN",
        help="columns of the Parquet file of an --in that are passed through to the output",
    )
    command.add_argument(
        "--shard",
        metavar="I/N",
        help="compute every N-th unit only; run the same command for each I, from 0 or from 1",
    )
    command.set_defaults(run=_map, failed=_FAILED)

    command = commands.add_parser(
        "status",
        help="print the progress of a map, while it runs and after",
        description="Prints how many rows of a map are done, to do, and quarantined, and the rate.",
    )
    command.add_argument("out", help="the output of the map")
    command.add_argument(
        "--follow",
        nargs="?",
        type=float,
        const=5.0,
        metavar="SECONDS",
        help="print it every so many seconds until all rows are done (default: 5)",
    )
    command.set_defaults(run=_status, failed=_FAILED)

    command = commands.add_parser(
        "verify",
        help="compare the output of a map with its checksums",
        description="Reads the output of a map and compares it with the checksums of its journal. "
        "The same map recomputes damaged units.",
    )
    command.add_argument("out", help="the output of the map")
    command.set_defaults(run=_verify, failed=_FAILED)


def add_call(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that `map` and `slurm` share to a parser."""
    command.add_argument(
        "function", help="the function of one row: module:name, or path/to/file.py:name"
    )
    command.add_argument(
        "--in",
        dest="inputs",
        action="append",
        default=[],
        metavar="FILE",
        help="an argument of the function, once for each, in order: x.npy, x.zarr:array, "
        "x.h5:name, x.parquet:column, a pattern in quotes, 'year=*/x.npy', or an address, "
        "s3://bucket/x.npy. @ in front marks a shared argument (an .npz file is a dict of its "
        "arrays)",
    )
    command.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="the output: y.zarr, y.npy, a folder y.parquet, or an address, s3://bucket/y.zarr",
    )
    command.add_argument(
        "--in-axes",
        nargs="*",
        metavar="AXIS",
        help="the axis of rows in each argument (default: 0); None for a shared argument",
    )
    command.add_argument(
        "--out-axes", default="0", metavar="AXIS", help="the axis of rows in results (default: 0)"
    )
    command.add_argument(
        "--batch-size",
        default="auto",
        metavar="ROWS",
        help='how many rows are computed at a time: a number, or "auto" (the default)',
    )
    command.add_argument(
        "--memory-limit", metavar="BYTES", help="the memory limit of a batch, such as 2GiB"
    )
    command.add_argument(
        "--commit-rows",
        type=int,
        metavar="ROWS",
        help="how many rows are committed at once, a multiple of --batch-size "
        "(default: half a second of work)",
    )
    add_ways(command, "rows", default="auto")
    command.add_argument(
        "--executor",
        metavar="WHO",
        help="processes:4, or dask:tcp://host:8786 (default: threads of this process)",
    )
    command.add_argument(
        "--on-error",
        choices=["raise", "quarantine"],
        default="raise",
        help="what happens if the function fails for a row: the map ends (raise, the default), or "
        "continues without the row (quarantine)",
    )
    command.add_argument(
        "--on-nonfinite",
        choices=["raise", "quarantine"],
        help="the same for a row whose results are not finite (default: nothing)",
    )
    command.add_argument(
        "--store-options",
        default="None",
        metavar="DICT",
        help="options of the format of the output, such as {'compression': 'zstd'} for Parquet",
    )
    command.add_argument(
        "--max-errors", type=int, metavar="ROWS", help="end if more rows than that are quarantined"
    )
    command.add_argument(
        "--max-consecutive-errors",
        type=int,
        default=20,
        metavar="ROWS",
        help="end if more rows than that fail in succession with one type of error, and "
        "quarantine none of them (default: 20)",
    )
    command.add_argument(
        "--retry-quarantined",
        action="store_true",
        help="recompute the rows that earlier calls quarantined",
    )
    command.add_argument(
        "--retries",
        type=int,
        default=2,
        metavar="TIMES",
        help="how often a failed read or write is tried again (default: 2)",
    )
    command.add_argument(
        "--version",
        metavar="TEXT",
        help="a version of a function with a host callback, whose code batchax cannot see: change "
        "this text with the code",
    )
    command.add_argument(
        "--inputs-by",
        choices=["file", "content"],
        default="file",
        help="how an input file is identified: by path, size and times (file, the default), or by "
        "a checksum of its content (content)",
    )
    command.add_argument(
        "--seed",
        type=int,
        metavar="NUMBER",
        help="the seed of a random key, from which each row gets its own",
    )
    command.add_argument("--no-progress", action="store_true", help="print no progress")


def _map(options: argparse.Namespace) -> int:
    call = call_of(options)
    executor = options.executor
    if options.shard is not None:
        if executor is not None:
            raise Mistake("--shard is for a process that computes by itself. Remove --executor.")
        executor = f"shard:{options.shard}"
    try:
        report = map(
            call.function,
            *call.arrays,
            out=options.out,
            in_axes=call.in_axes,
            out_axes=call.out_axes,
            batch_size=call.batch_size,
            executor=executor,
            key=call.key,
            store_options=literal(options.store_options, "--store-options"),
            resume="extend" if options.extend else "auto",
            progress=not options.no_progress,
            **{name: getattr(options, name) for name in _AS_GIVEN},
        )
    except KeyboardInterrupt:
        print("batchax: interrupted. The same command goes on.", file=sys.stderr)
        return _INTERRUPTED
    print(f"{options.out}: {report}")
    return _WITH_BAD if report.quarantined else _DONE


@dataclass(frozen=True)
class Call:
    """What a command line says is to be computed.

    Attributes:
      function: of one row.
      arrays: its arguments.
      in_axes, out_axes, batch_size, key: as for `batchax.map`.
    """

    function: Callable[..., Any]
    arrays: Sequence[Any]
    in_axes: Any
    out_axes: Any
    batch_size: Any
    key: Any


def call_of(options: argparse.Namespace) -> Call:
    """What is to be computed.

    Raises:
      Mistake: it is not said as it must be.
    """
    arrays = [_array(text) for text in options.inputs]
    if not arrays:
        raise Mistake("map needs a dataset: --in FILE, once for each argument of the function.")
    in_axes: Any = tuple(None if text.startswith("@") else 0 for text in options.inputs)
    if options.in_axes is not None:
        in_axes = tuple(literal(text, "--in-axes") for text in options.in_axes)
    key = None
    if options.seed is not None:
        import jax

        key = jax.random.key(options.seed)
    out_axes, size = literal(options.out_axes, "--out-axes"), batch_size(options.batch_size)
    return Call(function(options.function), arrays, in_axes, out_axes, size, key)


def _array(text: str) -> Tree:
    """An argument: the path of an array with rows, or what all rows share."""
    if not text.startswith("@"):
        return text
    if is_url(text[1:]):
        return open_path(text[1:], "--in")
    path = Path(text[1:])
    if path.suffix == ".npz" and path.exists():
        with np.load(path) as file:
            return dict(file)
    return path


def _status(options: argparse.Namespace) -> int:
    if options.follow is None:
        print(status(options.out))
        return _DONE
    if not options.follow > 0:
        raise Mistake(f"--follow: {options.follow:g} is no number of seconds to wait.")
    try:
        for line in follow(options.out, options.follow):
            print(line, flush=True)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return _DONE


def _verify(options: argparse.Namespace) -> int:
    result = verify(options.out)
    print(result)
    return _FAILED if result.damaged else _DONE
