"""Measuring a program: CPU time of all ways, in turns, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import batchax as bx

# Importing these fills the table.
from benchmarks.libraries import games as games
from benchmarks.libraries import networks as networks
from benchmarks.libraries import samplers as samplers
from benchmarks.libraries import solvers as solvers
from benchmarks.libraries.program import BEFORE, Program
from benchmarks.measure import QUICK, Effort, Ratio, in_turns, ratio_of_medians, repeated

# Of chains that take a third of a second 15 turns are enough for an interval of 5%, and 7 are not.
_EFFORT = Effort(traces=0, runs=15, seconds_per_run=0.02, longest=15.0, least=3)
_FEW = 16
_CLOSE = 2e-2


@dataclass(frozen=True)
class Found:
    """A program in all ways.

    Attributes:
      name: of the program.
      half: "looked at" or "held out".
      uneven: see `Program`.
      seconds: what it takes as it is run today.
      run: by way, CPU time over that.
      first: by way, that of the first call: tracing, compiling and running.
      same: by way, the share of numbers in the results that are those of today.
      failed: by way, what it raised.
    """

    name: str
    half: str
    uneven: bool
    seconds: float
    run: dict[str, Ratio]
    first: dict[str, float]
    same: dict[str, float]
    failed: dict[str, str]


def measured(program: Program, quick: bool) -> Iterator[Found]:
    """The result of a program; none where a library is missing."""
    if missing := program.missing():
        print(f"{program.name}: left out, needs {', '.join(missing)}")
        return
    effort = QUICK if quick else _EFFORT
    lanes = min(program.lanes, _FEW) if quick else program.lanes
    args = jax.block_until_ready(program.data(lanes))
    first: dict[str, float] = {}
    outs: dict[str, Any] = {}
    failed: dict[str, str] = {}
    runs: dict[str, Callable[[], int]] = {}
    jax.block_until_ready(jax.jit(lambda: 0)())
    # Libraries initialize themselves before a first call is measured. Each call gets a new
    # function, as JAX caches the trace of a function, and a first call includes tracing.
    before, given = program.ways(args)[BEFORE]
    jax.eval_shape(before, *given)
    for name, (fun, given) in program.ways(args).items():
        compiled = jax.jit(fun)
        began = time.process_time()
        try:
            outs[name] = jax.block_until_ready(compiled(*given))
        except Exception as error:  # one program that fails does not end a run of all
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            continue
        first[name] = time.process_time() - began
        began = time.perf_counter()
        repeated(compiled, given, 1)()
        once = time.perf_counter() - began
        runs[name] = repeated(compiled, given, max(1, round(effort.seconds_per_run / once)))
    turns = in_turns(list(runs.values()), effort.runs, time.process_time, effort)
    times = dict(zip(runs, turns, strict=True))
    base, others = times[BEFORE], [name for name in times if name != BEFORE]
    yield Found(
        program.name,
        program.half,
        program.uneven,
        float(np.median(base)),
        {name: ratio_of_medians(times[name], base) for name in others},
        {name: first[name] / first[BEFORE] for name in others},
        {name: _same(outs[name], outs[BEFORE]) for name in others},
        failed,
    )


def _same(got: Any, expected: Any) -> float:
    """The share of numbers that are the same. Of padded rows, those of the rows are compared."""
    is_rows = lambda x: isinstance(x, bx.Ragged)
    pairs = zip(*(jax.tree.leaves(x, is_leaf=is_rows) for x in (got, expected)), strict=True)
    same = [_close(*pair) for found, padded in pairs for pair in _alike(found, padded)]
    return float(np.mean(np.concatenate(same)))


def _alike(found: Any, expected: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of arrays of one shape: of rows, each with its part of what was computed by hand."""
    if not isinstance(found, bx.Ragged) or isinstance(expected, bx.Ragged):
        yield found, expected
        return
    rows, flat = list(found.rows()), np.asarray(expected)
    if len(flat) == len(rows):  # padded
        yield from (
            (row, x[tuple(map(slice, np.shape(row)))]) for row, x in zip(rows, flat, strict=True)
        )
        return
    # One after another. Between two rows there is their difference.
    ends = np.cumsum([len(row) + 1 for row in rows]) - 1
    yield from ((row, flat[end - len(row) : end]) for row, end in zip(rows, ends, strict=True))


def _close(found: Any, expected: Any) -> np.ndarray:
    assert np.shape(found) == np.shape(expected)
    return np.isclose(found, expected, _CLOSE, _CLOSE, equal_nan=True).ravel()
