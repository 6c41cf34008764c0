"""Measuring the programs of a workload in one process, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from benchmarks.measure import FULL, QUICK, Ratio, in_turns, ratio_of_medians, repeated
from benchmarks.slow.matrices import WORKLOADS as MATRICES
from benchmarks.slow.others import WORKLOADS as OTHERS
from benchmarks.slow.sums import WORKLOADS as SUMS
from benchmarks.slow.workload import OURS, Slow

WORKLOADS = {w.name: w for w in (*SUMS, *MATRICES, *OTHERS)}
_FIRST_CALLS = 3


@dataclass(frozen=True)
class Outcome:
    """The programs of a workload.

    Attributes:
      workload: what was measured.
      ratios: time of ``bx.vmap`` over that of each other program.
      compiled: tracing and compiling of ``bx.vmap`` over that of each other program.
      seconds: of each program.
      temporary_bytes: what each program allocates besides arguments and results.
    """

    workload: Slow
    ratios: Mapping[str, Ratio]
    compiled: Mapping[str, Ratio]
    seconds: Mapping[str, float]
    temporary_bytes: Mapping[str, int]

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.workload.name

    @property
    def reached(self) -> bool:
        """Whether the goal is reached."""
        return self.ratios[self.workload.rival].value <= self.workload.goal


def measured(workload: Slow, quick: bool) -> Iterator[Outcome]:
    """Compiles and runs all programs of a workload."""
    effort = QUICK if quick else FULL
    args = jax.block_until_ready(
        workload.data(min(workload.lanes, effort.most_lanes or workload.lanes))
    )

    def compiling(name: str) -> object:
        jax.jit(workload.ways()[name]).lower(*args).compile()
        return None

    names = list(workload.ways())
    first = in_turns(
        [lambda name=name: compiling(name) for name in names], _FIRST_CALLS, time.process_time
    )
    programs = [jax.jit(f).lower(*args).compile() for f in workload.ways().values()]
    runs = [repeated(program, args, 1) for program in programs]
    once = np.median(in_turns(runs, 5, time.perf_counter))
    often = max(1, min(1000, round(effort.seconds_per_run / once)))
    times = in_turns([repeated(p, args, often) for p in programs], effort.runs, time.perf_counter)
    ours, others = names.index(OURS), [name for name in names if name != OURS]
    yield Outcome(
        workload,
        {name: ratio_of_medians(times[ours], times[names.index(name)]) for name in others},
        {name: ratio_of_medians(first[ours], first[names.index(name)]) for name in others},
        {name: float(np.median(each)) for name, each in zip(names, times, strict=True)},
        {
            name: program.memory_analysis().temp_size_in_bytes
            for name, program in zip(names, programs, strict=True)
        },
    )
