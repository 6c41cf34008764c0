"""Measuring drafted programs, some dozens to a process."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

import batchax as bx
from benchmarks.hlo import normalised_hlo
from benchmarks.measure import FULL, QUICK, Ratio, in_turns, ratio_of_medians, repeated

# Importing these fills the table.
from benchmarks.search import branches as branches
from benchmarks.search import dense as dense
from benchmarks.search import loops as loops
from benchmarks.search.drafted import PROGRAMS, half
from benchmarks.workload import Workload

_ENOUGH = 30  # programs of a process: XLA's compiler may crash after some hundred large ones
_STABLE = 1.04  # the interval's end over its beginning that is narrow enough
_CAP = 2.0  # seconds, about, after which no more turns are taken
_LOSES = 1.1  # of run time, from which on masked lanes are measured, too
_ALIKE = Ratio(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Found:
    """A program under both vmaps: seconds of processor time, `bx.vmap` first.

    Attributes:
      name: what it is.
      half: "tuned" or "held out".
      same: whether the compiled programs are the same, which are not run then.
      run: the ratio of run times.
      masked: that of ``divergence="predicate"``, where `run` loses.
      run_seconds, compile_seconds, trace_seconds: each of both; of tracing the best of three.
      failed: what the process died of.
    """

    name: str
    half: str
    same: bool = False
    run: Ratio = _ALIKE
    masked: Ratio | None = None
    run_seconds: tuple[float, float] = (0.0, 0.0)
    compile_seconds: tuple[float, float] = (0.0, 0.0)
    trace_seconds: tuple[float, float] = (0.0, 0.0)
    failed: str = ""

    @property
    def compiling(self) -> float:
        """The ratio of times to compile."""
        return self.compile_seconds[0] / self.compile_seconds[1]

    @property
    def tracing(self) -> float:
        """The ratio of times to trace and lower."""
        return self.trace_seconds[0] / self.trace_seconds[1]


def measured(program: Workload, quick: bool) -> Iterator[Found]:
    """What is found of a program: in this process if quick, otherwise in one of many."""
    if quick:
        yield _found(program.name, quick=True)
        return
    try:
        yield _pool().submit(_found, program.name).result()
    except BrokenProcessPool as error:
        _pool.cache_clear()
        yield Found(program.name, half(program.name), failed=str(error))


@functools.cache
def _pool() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, _compile_anew, max_tasks_per_child=_ENOUGH)
    atexit.register(pool.shutdown)
    return pool


def _compile_anew() -> None:
    jax.config.update("jax_enable_compilation_cache", False)


def _found(name: str, quick: bool = False) -> Found:
    program = PROGRAMS[name]
    lanes = min(program.lanes, 16) if quick else program.lanes
    args = jax.block_until_ready(program.data(lanes))
    makers = [functools.partial(program.batched_by, vmap) for vmap in (bx.vmap, jax.vmap)]
    lowered: list[list[Any]] = [[] for _ in makers]

    def lowering(which: int) -> Callable[[], None]:
        return lambda: lowered[which].append(jax.jit(makers[which]()).lower(*args))

    lowerings = [lowering(which) for which in range(len(makers))]
    traces = in_turns(lowerings, 1 if quick else 4, time.thread_time)
    compiled: list[list[Any]] = [[] for _ in makers]

    def compiling(which: int) -> Callable[[], None]:
        return lambda: compiled[which].append(lowered[which].pop().compile())

    compilings = [compiling(which) for which in range(len(makers))]
    compiles = in_turns(compilings, 1, time.process_time)
    if not quick and max(map(min, compiles)) < 1:
        again = in_turns(compilings, 1, time.process_time)
        compiles = [a + b for a, b in zip(compiles, again, strict=True)]
    ours, theirs = (some[0] for some in compiled)
    result = Found(
        name,
        half(name),
        compile_seconds=(min(compiles[0]), min(compiles[1])),
        # The first time fills caches of JAX.
        trace_seconds=(min(traces[0][-3:]), min(traces[1][-3:])),
    )
    if normalised_hlo(ours.as_text()) == normalised_hlo(theirs.as_text()):
        return replace(result, same=True)
    run, seconds = _compared(ours, theirs, args, quick)
    if not quick and run.value > _LOSES:
        bx.config.update("divergence", "predicate")
        masked = jax.jit(makers[0]()).lower(*args).compile()
        bx.config.update("divergence", "auto")
        result = replace(result, masked=_compared(masked, theirs, args, quick)[0])
    return replace(result, run=run, run_seconds=seconds)


def _compared(ours: Any, theirs: Any, args: Any, quick: bool) -> tuple[Ratio, tuple[float, float]]:
    """The ratio of run times, interleaved until it is stable, or a cap."""
    effort = QUICK if quick else FULL
    programs = [repeated(c, args, 1) for c in (ours, theirs)]
    once = np.median(in_turns(programs, 3, time.perf_counter))
    often = max(1, min(1000, round(effort.seconds_per_run / once)))
    programs = [repeated(c, args, often) for c in (ours, theirs)]
    times: list[list[float]] = [[], []]
    began = time.process_time()
    while True:
        turns = in_turns(programs, effort.least, time.process_time)
        times = [a + b for a, b in zip(times, turns, strict=True)]
        ratio = ratio_of_medians(*times)
        if quick or ratio.high / ratio.low < _STABLE or time.process_time() - began > _CAP:
            return ratio, (float(np.median(times[0])), float(np.median(times[1])))
