"""Measuring all ways of a workload together, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.divergence.branches import WORKLOADS as BRANCHES
from benchmarks.divergence.branches import BranchWorkload
from benchmarks.divergence.loops import WORKLOADS as LOOPS
from benchmarks.divergence.workload import BASE, LoopWorkload
from benchmarks.measure import QUICK, Effort, Ratio, full, in_turns, ratio_of_medians, repeated

WORKLOADS: dict[str, LoopWorkload | BranchWorkload] = {**LOOPS, **BRANCHES}
FEW_STEPS = 20


@dataclass(frozen=True)
class Way:
    """One way to run a workload.

    Attributes:
      seconds: the median of its run times.
      run: the ratio of its time over that of `jax.vmap`: below 1 where it is faster.
      compile_seconds: to trace, lower and compile it, once.
      temporary_bytes: what the compiled program allocates besides arguments and outputs.
    """

    seconds: float
    run: Ratio
    compile_seconds: float
    temporary_bytes: int


@dataclass(frozen=True)
class DivergenceResult:
    """All ways of one workload.

    Attributes:
      name: as tables call it.
      family: the part of the table it is in.
      ways: by name, `jax.vmap` included.
      yardsticks: what does as much work but computes something else.
      utilization: which share of the lane-steps some lane needed, of those of compact and of
        those of masking; None where no lane-steps are counted.
      turns: how often each way was run.
      lanes: how many.
    """

    name: str
    family: str
    ways: dict[str, Way]
    yardsticks: dict[str, Way]
    utilization: tuple[float, float] | None
    turns: int
    lanes: int

    @property
    def base(self) -> Way:
        return self.ways[BASE]

    @property
    def others(self) -> dict[str, Way]:
        """All ways but `jax.vmap`."""
        return {name: way for name, way in self.ways.items() if name != BASE}


def measured(workload: LoopWorkload | BranchWorkload, quick: bool) -> Iterator[DivergenceResult]:
    """The result of each use of a workload."""
    effort = QUICK if quick else full()
    lanes = effort.times_lanes * min(workload.lanes, effort.most_lanes or workload.lanes)
    args = jax.block_until_ready(workload.arguments(lanes, FEW_STEPS if quick else None))
    for use, ways in workload.uses().items():
        values = use == "values"
        yardsticks = workload.yardsticks if values else {}
        turns = min(workload.turns, effort.runs)
        found, turns = _compare(ways | yardsticks, args, effort, turns)
        yield DivergenceResult(
            workload.name if values else f"{workload.name}, {use}",
            workload.family,
            {name: way for name, way in found.items() if name not in yardsticks},
            {name: found[name] for name in yardsticks},
            workload.utilization(args) if values else None,
            turns,
            lanes,
        )


def _compare(
    functions: dict[str, Callable[..., Any]], args: Any, effort: Effort, turns: int
) -> tuple[dict[str, Way], int]:
    """Every function, and how many turns they had."""
    jax.jit(lambda *args: functions[BASE](*args)).lower(*args)  # fills JAX's caches
    compiled, compile_seconds, programs = [], [], []
    for function in functions.values():
        start = time.perf_counter()
        compiled.append(jax.jit(lambda *args: function(*args)).lower(*args).compile())
        compile_seconds.append(time.perf_counter() - start)
        # Times lie far apart: a program has its turn as often as it is short.
        start = time.perf_counter()
        repeated(compiled[-1], args, 2)()
        once = (time.perf_counter() - start) / 2
        often = max(1, min(1000, round(effort.seconds_per_run / once)))
        programs.append(repeated(compiled[-1], args, often))
    times = dict(zip(functions, in_turns(programs, turns, time.perf_counter, effort), strict=True))
    ways = {
        name: Way(
            float(np.median(seconds)),
            ratio_of_medians(seconds, times[BASE]),
            compiling,
            program.memory_analysis().temp_size_in_bytes,
        )
        for (name, seconds), compiling, program in zip(
            times.items(), compile_seconds, compiled, strict=True
        )
    }
    return ways, len(times[BASE])
