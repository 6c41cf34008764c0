"""Measuring all ways of a nest together, in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import batchax as bx
from benchmarks.measure import (
    QUICK,
    Ratio,
    full,
    in_turns,
    one_by_one_is_a_way,
    ratio_of_medians,
)
from benchmarks.nests import peers, steps
from benchmarks.nests.programs import WORKLOADS as PROGRAMS
from benchmarks.nests.samplers import WORKLOADS as SAMPLERS
from benchmarks.nests.workload import BASE, Nest, not_installed

WORKLOADS = {w.name: w for w in (*SAMPLERS, *PROGRAMS)}
FEW_STEPS = 3
THREADS = "threads"
CLOSE = 1e-3  # results that are as close as this are the same


@dataclass(frozen=True)
class Way:
    """One way to run a nest.

    Attributes:
      seconds: the median of its run times.
      run: the ratio of its time over that of `jax.vmap`.
      first: seconds of processor time of the first call: tracing, compiling and running.
      first_ratio: `first` over that of `jax.vmap`.
      same: the share of lanes' outer steps whose results and counts are those of `jax.vmap`; None
        for peers, which draw other numbers.
      draws_per_second: effective ones, of the coordinate with the fewest; None but for samplers.
    """

    seconds: float
    run: Ratio
    first: float
    first_ratio: float
    same: float | None = None
    draws_per_second: float | None = None


@dataclass(frozen=True)
class NestResult:
    """All ways of one nest.

    Attributes:
      name: as tables call it.
      family: the part of the table it is in.
      lanes: how many.
      steps: how many outer steps.
      ways: by name.
      peers: what does the same task by other means.
      bound: the steps of a way without barriers over those of masked lanes.
      of_use: the share of lane-steps that some lane needs, with barriers and without.
      compact_of_use: the same as `bx.LaneSteps` counts it for compact: of the innermost
        loops, where these are flat, and of all loops elsewhere.
      active: see `steps.active`.
      turns: how often each way was run.
    """

    name: str
    family: str
    lanes: int
    steps: int
    ways: dict[str, Way]
    peers: dict[str, Way]
    bound: float
    of_use: tuple[float, float]
    compact_of_use: float
    active: dict[str, tuple[Any, Any]] = field(repr=False)
    turns: int

    @property
    def others(self) -> dict[str, Way]:
        """All but `jax.vmap`."""
        return {n: w for n, w in {**self.ways, **self.peers}.items() if n != BASE}


def measured(nest: Nest, quick: bool) -> Iterator[NestResult]:
    """The result of a nest; none where something is missing that it needs."""
    if missing := nest.missing():
        print(f"{nest.name}: left out, needs {', '.join(missing)}")
        return
    effort = QUICK if quick else full()
    lanes = min(nest.lanes, effort.most_lanes or nest.lanes)
    count = FEW_STEPS if quick else max(FEW_STEPS, round(effort.share_of_steps * nest.steps))
    args = jax.block_until_ready(nest.data(lanes, count))
    programs = {name: _compiled(f, args) for name, f in nest.ways().items()}
    if one_by_one_is_a_way():
        programs[THREADS] = _on_threads(nest, args, lanes)
    ours = list(programs)
    for name, peer in nest.peers.items():
        if missing := not_installed(peer.needs):
            print(f"{nest.name}: {name} left out, needs {', '.join(missing)}")
        else:
            programs[name] = _peer(peer.make, args)
    jax.jit(lambda *args: nest.ways()[BASE](*args)).lower(*args)  # fills JAX's caches
    first, runs, out = {}, [], {}
    for name, start in programs.items():
        began = time.process_time()  # leaves other programs out
        run = start()
        out[name] = jax.block_until_ready(run())
        first[name] = time.process_time() - began
        runs.append(_often(run, effort.seconds_per_run))
    turns = min(nest.turns, effort.runs)
    times = dict(zip(programs, in_turns(runs, turns, time.perf_counter, effort), strict=True))
    expected = nest.inner_steps(args, out[BASE])
    ways = {
        name: Way(
            float(np.median(seconds)),
            ratio_of_medians(seconds, times[BASE]),
            first[name],
            first[name] / first[BASE],
            _same(out[name], out[BASE], count) if name in ours else None,
            _effective(nest, out[name], name in ours, float(np.median(seconds))),
        )
        for name, seconds in times.items()
    }
    yield NestResult(
        nest.name,
        nest.family,
        lanes,
        count,
        {name: way for name, way in ways.items() if name in ours},
        {name: way for name, way in ways.items() if name not in ours},
        steps.bound(expected),
        steps.of_use(expected),
        _compact_of_use(nest, args),
        steps.active(expected),
        len(times[BASE]),
    )


Start = Callable[[], Callable[[], Any]]
"""Begins from nothing: what it returns is called as often as one likes."""


def _compiled(function: Callable[..., Any], args: Any) -> Start:
    def start() -> Callable[[], Any]:
        compiled = jax.jit(lambda *args: function(*args))
        return lambda: compiled(*args)

    return start


def _on_threads(nest: Nest, args: Any, lanes: int) -> Start:
    pieces = np.array_split(np.arange(lanes), min(lanes, os.cpu_count() or 1))
    own = [jax.block_until_ready(nest.of_lanes(args, piece)) for piece in pieces]
    return lambda: peers.on_threads(lambda *args: nest.one_by_one(*args), own)


def _peer(make: Callable[..., Callable[[], Any]], args: Any) -> Start:
    return lambda: make(*args)


def _often(run: Callable[[], Any], seconds: float) -> Callable[[], int]:
    """Runs as often as it takes to last so long, and says how often."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    often = max(1, min(1000, round(seconds / (time.perf_counter() - start))))

    def repeatedly() -> int:
        for _ in range(often):
            jax.block_until_ready(run())
        return often

    return repeatedly


def _same(got: Any, expected: Any, count: int) -> float:
    """The share of lanes' outer steps in which all leaves are the same."""
    cells: Any = True
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        close = np.isclose(x, y, CLOSE, CLOSE, equal_nan=True)
        if close.shape[1:2] != (count,):  # of the whole lane
            close = np.broadcast_to(
                close.reshape(len(close), -1).all(1)[:, None], (len(close), count)
            )
        cells = cells & close.reshape(*close.shape[:2], -1).all(-1)
    return float(np.mean(cells))


def _effective(nest: Nest, out: Any, ours: bool, seconds: float) -> float | None:
    if nest.draws is None:
        return None
    from blackjax.diagnostics import effective_sample_size

    draws = np.asarray(nest.draws(out) if ours else out)
    if draws.shape[1] < 4:
        return None
    return float(np.nanmin(effective_sample_size(draws)) / seconds)


def _compact_of_use(nest: Nest, args: Any) -> float:
    counter = bx.LaneSteps()
    fun = bx.vmap(lambda *args: nest.fun(*args), nest.in_axes, divergence=bx.Compact(steps=counter))
    jax.block_until_ready(jax.jit(fun)(*args))
    return counter.utilization
