"""``batchax slurm``: a script that has Slurm do a map, as an array of shards."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from batchax.commands.dataset import add_call, call_of
from batchax.commands.words import Commands, Mistake
from batchax.datasets.addresses import at_home
from batchax.datasets.row_function import RowFunction
from batchax.datasets.run import plan_of
from batchax.datasets.stores import kind_of

_SHARDS = 16  # the default
_NO_TIME = 60  # seconds before the end of its time, when a task gets a signal

_SCRIPT = """#!/bin/bash
{directives}
# {rows:,} rows are {units:,} units of {unit_rows:,}{average}, {each:,} or fewer for each task.
# Submit it with sbatch; any task may die, and be run again.

code=0
srun {command} --shard "$SLURM_ARRAY_TASK_ID/{shards}" || code=$?
batchax status {out} || true

# 130: stopped by Slurm, at the end of its time or by preemption. The same script resumes it.
if [ "$code" = 130 ]; then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
fi
# 3: done, except for rows that are quarantined.
if [ "$code" = 3 ]; then
    code=0
fi
exit "$code"
"""


def add_to(commands: Commands) -> None:
    command = commands.add_parser(
        "slurm",
        help="print a Slurm script that runs a map",
        description="Prints a script for sbatch: an array of tasks, each of which computes a shard "
        "of the units of a map. A task that dies, or whose time is over, runs again and resumes. "
        "It takes the arguments of map, opens the inputs to count units, and computes nothing.",
        epilog="example: batchax slurm model:score --in x.zarr --out y.zarr --shards 64 "
        "--sbatch=--gres=gpu:1 --sbatch=--time=04:00:00 > score.sh",
    )
    add_call(command)
    command.add_argument(
        "--shards",
        type=int,
        metavar="N",
        help=f"how many tasks; fewer are created if they take as long (default: at most {_SHARDS})",
    )
    command.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="a line for sbatch, such as --sbatch=--gres=gpu:1",
    )
    command.set_defaults(run=_slurm, failed=1, given=command)


def _slurm(options: argparse.Namespace) -> int:
    call = call_of(options)
    kind_of(options.out)
    asked = _SHARDS if options.shards is None else options.shards
    if asked < 1:
        raise Mistake(f"--shards: {asked} is no number of tasks.")
    if options.executor is not None:
        raise Mistake("slurm makes shards, each of which computes by itself. Remove --executor.")
    if options.out.startswith("memory:"):
        raise Mistake("--out: what is in the memory of one task no other task sees.")
    how = {"divergence": options.divergence, "small_matrices": options.small_matrices, "mesh": None}
    function = RowFunction.of(
        call.function, tuple(call.arrays), call.in_axes, call.out_axes, call.key, how
    )
    plan = plan_of(function, call.batch_size, options.memory_limit, options.commit_rows)
    units = len(plan)
    each = max(1, -(-units // asked))
    shards = max(1, -(-units // each))  # with more of them some have less to do, and none is faster
    if plan.ends is None:  # tasks must cut the units that were counted here, whatever they run on
        options.batch_size, options.commit_rows = str(plan.batch_size), plan.unit_rows
    directives = [
        f"--job-name=batchax-{function.name}",
        f"--array=0-{shards - 1}",
        "--requeue",
        "--open-mode=append",
        f"--signal=INT@{_NO_TIME}",
        *options.sbatch,
    ]
    script = _SCRIPT.format(
        directives="\n".join(f"#SBATCH {x}" for x in directives),
        rows=plan.rows,
        units=units,
        unit_rows=plan.unit_rows,
        average="" if plan.ends is None else " on average",
        each=each,
        shards=shards,
        command=shlex.join(["batchax", "map", *_words(options)]),
        out=shlex.quote(options.out),
    )
    print(script, end="")
    return 0


def _words(options: argparse.Namespace) -> Iterator[str]:
    """The command line of `map` that says the same, with no bar of progress."""
    options.no_progress = True
    for action in options.given._actions:
        value = getattr(options, action.dest, None)
        if action.dest in ("help", "shards", "sbatch") or value == action.default:
            continue
        if not action.option_strings:
            yield str(value)
            continue
        name = action.option_strings[0]
        if isinstance(action, argparse._AppendAction):
            for each in getattr(options, action.dest):
                yield from (name, _from_anywhere(each))
        elif action.nargs == 0:
            yield name
        else:
            yield name
            yield from map(str, value if isinstance(value, list) else [value])


def _from_anywhere(path: str) -> str:
    """Tasks begin where sbatch was called, and home is home."""
    return at_home(path, "--in")
