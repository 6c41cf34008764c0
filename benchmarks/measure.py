"""Measuring two programs that compute the same: one workload under both vmaps, say.

Both sides run in turns, so that whatever else the machine does meets both
alike, and are compared by the ratio of their medians. The interval given with
a ratio is a 95% bootstrap interval over the turns.
"""

from __future__ import annotations

import functools
import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import batchax as bx
from benchmarks.hlo import normalised_hlo, operations
from benchmarks.programs import primitives
from benchmarks.workload import Workload


@dataclass(frozen=True)
class Effort:
    """How much work goes into one measurement."""

    traces: int
    runs: int
    seconds_per_run: float
    most_lanes: int | None = None
    times_lanes: int = 1
    """how many times as many lanes part ways as on a CPU"""
    share_of_steps: float = 1.0
    """of the outer steps that loops of loops take on a CPU"""
    longest: float = 5.0
    """seconds for one set of turns, so that a run of everything takes minutes"""
    least: int = 5
    """turns there are, however long they take"""


FULL = Effort(traces=31, runs=31, seconds_per_run=0.01)
QUICK = Effort(traces=5, runs=5, seconds_per_run=0.001, most_lanes=16)
# A step of a loop takes as long for few lanes as for thousands there, and far longer than a step
# of few lanes takes on a CPU.
ON_A_GPU = Effort(
    traces=5,
    runs=7,
    seconds_per_run=0.01,
    times_lanes=16,
    share_of_steps=1 / 5,
    longest=1.5,
    least=3,
)


def full() -> Effort:
    """That of a measurement on the device on which programs run by default."""
    return FULL if jax.default_backend() == "cpu" else ON_A_GPU


def one_by_one_is_a_way() -> bool:
    """Whether anybody would run one lane after another: on a GPU that takes hours."""
    return jax.default_backend() == "cpu"


@dataclass(frozen=True)
class Ratio:
    """batchax's median over that of the other program, with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Side:
    """One of the two programs."""

    trace_seconds: float
    run_seconds: float
    equations: int  # of the jaxpr, and of all programs inside it
    operations: Counter[str]
    temporary_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Result:
    """Both programs: batchax's, and what it is compared with."""

    name: str
    family: str
    ours: Side
    other: Side
    trace: Ratio
    run: Ratio
    hlo: str
    """"same", "same operations" (in another order or layout) or "differs"."""


def measure(workload: Workload, effort: Effort) -> Result:
    """Traces, compiles and runs `workload` under ``bx.vmap`` and ``jax.vmap``."""
    lanes = min(workload.lanes, effort.most_lanes or workload.lanes)
    makers = [functools.partial(workload.batched_by, vmap) for vmap in (bx.vmap, jax.vmap)]
    return compare(workload.name, workload.family, makers, workload.data(lanes), effort)


def compare(
    name: str,
    family: str,
    makers: Sequence[Callable[[], Any]],
    args: Any,
    effort: Effort,
    staging: Callable[[Any], Callable[..., Any]] = jax.make_jaxpr,
) -> Result:
    """Traces, compiles and runs two functions of `args`, ours first.

    Each of the `makers` makes its function anew, so that it is traced anew. `staging` is
    what is timed as tracing: from a function to one of the same arguments.
    """
    args = jax.block_until_ready(args)

    def tracing(make: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: staging(make())(*args)

    jaxprs = [jax.make_jaxpr(make())(*args) for make in makers]
    for make in makers:
        tracing(make)()  # the first time fills JAX's caches
    # Tracing is work of one thread, whose own clock leaves other programs out.
    trace_times = in_turns(list(map(tracing, makers)), effort.traces, time.thread_time)

    compiled = [jax.jit(make()).lower(*args).compile() for make in makers]
    programs = [repeated(c, args, 1) for c in compiled]
    once = np.median(in_turns(programs, 5, time.perf_counter))
    # As often for both: the first call after the other program's is slower than the next.
    often = max(1, min(1000, round(effort.seconds_per_run / once)))
    programs = [repeated(c, args, often) for c in compiled]
    run_times = in_turns(programs, effort.runs, time.perf_counter)
    hlo = [normalised_hlo(c.as_text() or "") for c in compiled]
    ours, theirs = (
        _side(jaxpr, text, c.memory_analysis(), np.median(traces), np.median(runs))
        for jaxpr, text, c, traces, runs in zip(
            jaxprs, hlo, compiled, trace_times, run_times, strict=True
        )
    )
    return Result(
        name,
        family,
        ours,
        theirs,
        ratio_of_medians(*trace_times),
        ratio_of_medians(*run_times),
        "same"
        if hlo[0] == hlo[1]
        else "same operations"
        if ours.operations == theirs.operations
        else "differs",
    )


def in_turns(
    functions: Sequence[Callable[[], Any]],
    turns: int,
    clock: Callable[[], float],
    effort: Effort = FULL,
) -> list[list[float]]:
    """Seconds of each of `turns` calls of each function, who begins alternating.

    There are fewer turns, but `effort.least` at least, where they would take longer than
    `effort.longest`. A function that returns a number says how often it did its work.
    """
    times: list[list[float]] = [[] for _ in functions]
    order = list(enumerate(functions))
    deadline = time.monotonic() + effort.longest
    gc.collect()
    gc.disable()
    try:
        for turn in range(turns):
            if turn >= effort.least and time.monotonic() > deadline:
                break
            for which, function in order:
                start = clock()
                done = function()
                seconds = clock() - start
                times[which].append(seconds / (done if isinstance(done, int) else 1))
            order.reverse()
    finally:
        gc.enable()
    return times


def ratio_of_medians(a: list[float], b: list[float]) -> Ratio:
    """The ratio of the medians; its interval resamples turns, which pair `a` and `b`.

    Where one has fewer turns, each is resampled by itself.
    """
    generator = np.random.default_rng(0)
    drawn = generator.integers(len(a), size=(2000, len(a)))
    paired = len(a) == len(b)
    other = drawn if paired else generator.integers(len(b), size=(2000, len(b)))
    ratios = np.median(np.asarray(a)[drawn], axis=1) / np.median(np.asarray(b)[other], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(a) / np.median(b)), float(low), float(high))


def repeated(compiled: Any, args: Any, often: int) -> Callable[[], int]:
    """Runs a program `often` times and waits for each; returns how often."""

    def run() -> int:
        for _ in range(often):
            jax.block_until_ready(compiled(*args))
        return often

    return run


def _side(jaxpr: Any, hlo: str, memory: Any, trace: Any, run: Any) -> Side:
    equations = sum(1 for _ in primitives(jaxpr.jaxpr))
    temporary = memory.temp_size_in_bytes
    total = temporary + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return Side(float(trace), float(run), equations, operations(hlo), temporary, total)
