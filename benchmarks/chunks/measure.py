"""Measuring one workload under every way to run it in chunks, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.chunks.ways import OF_CHUNKS, OF_STEPS, Way
from benchmarks.chunks.workload import BOTH, FORWARD, ScanWorkload
from benchmarks.measure import QUICK, Effort, Ratio, in_turns, ratio_of_medians, repeated

FULL = Effort(traces=0, runs=31, seconds_per_run=0.03)


@dataclass(frozen=True)
class Measured:
    """One way on one workload.

    Attributes:
      seconds: the median.
      ratio: the median of batchax over it.
      temporary_bytes: what the compiled program allocates besides arguments and outputs.
    """

    seconds: float
    ratio: Ratio
    temporary_bytes: int


@dataclass(frozen=True)
class ChunkedResult:
    """All ways on one workload, for one use of it.

    Attributes:
      workload: what was measured.
      use: what of it.
      ways: by name, ours first.
      bytes_of_twice: our temporaries for twice the lanes.
    """

    workload: Any
    use: str
    ways: dict[str, Measured]
    bytes_of_twice: int

    @property
    def name(self) -> str:
        """What reports call it."""
        return f"{self.workload.name}, {self.use}"

    @property
    def ours(self) -> Measured:
        """What batchax did."""
        return next(iter(self.ways.values()))

    @property
    def leading(self) -> bool:
        """Whether all batch axes are the leading ones."""
        return not any((*self.workload.in_axes, self.workload.out_axes))


def ways_for(workload: Any) -> list[Way]:
    """The ways to run a workload of this kind."""
    return OF_STEPS if isinstance(workload, ScanWorkload) else OF_CHUNKS


def arguments(workload: Any, use: str) -> tuple[Any, ...]:
    """The arguments of the program for one use of a workload: cotangents first, if any."""
    args = workload.data(workload.lanes)
    if use == FORWARD:
        return args
    draw = np.random.default_rng(0)
    cotangents = jax.tree.map(
        lambda x: jnp.asarray(draw.normal(size=x.shape), x.dtype),
        jax.eval_shape(workload.plain(), *args),
    )
    return cotangents, *args


def programs(workload: Any, use: str) -> dict[str, Callable[..., Any]]:
    """The function of each way that can do it."""
    found = {}
    for way in ways_for(workload):
        if use == FORWARD:
            program = None if way.gradient_only else way.forward(workload)
        else:
            program = way.gradient(workload, use == BOTH)
        if program is not None:
            found[way.name] = program
    return found


def measured(workload: Any, quick: bool) -> Iterator[ChunkedResult]:
    """All that is measured of a workload."""
    workload, effort = (workload.small(), QUICK) if quick else (workload, FULL)
    for use in workload.uses:
        yield measure(workload, use, effort)


def measure(workload: Any, use: str, effort: Effort) -> ChunkedResult:
    """Compiles and runs `workload` in each way that can do it."""
    args = jax.block_until_ready(arguments(workload, use))
    compiled = {
        name: jax.jit(program).lower(*args).compile()
        for name, program in programs(workload, use).items()
    }
    once = in_turns([repeated(c, args, 1) for c in compiled.values()], 2, time.perf_counter)
    often = max(1, min(1000, round(effort.seconds_per_run / np.min(once))))
    runs = [repeated(c, args, often) for c in compiled.values()]
    times = dict(zip(compiled, in_turns(runs, effort.runs, time.perf_counter), strict=True))
    ours = next(iter(times.values()))
    return ChunkedResult(
        workload,
        use,
        {
            name: Measured(
                float(np.median(times[name])),
                ratio_of_medians(ours, times[name]),
                _temporaries(c),
            )
            for name, c in compiled.items()
        },
        _bytes_of_twice(workload, use),
    )


def _bytes_of_twice(workload: Any, use: str) -> int:
    twice = workload.of_lanes(2 * workload.lanes)
    ours = next(iter(programs(twice, use).values()))
    args = jax.eval_shape(lambda: arguments(twice, use))
    return _temporaries(jax.jit(ours).lower(*args).compile())


def _temporaries(compiled: Any) -> int:
    return compiled.memory_analysis().temp_size_in_bytes
