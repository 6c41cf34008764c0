"""Gradients of loops that end early, against other loops that have some."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import batchax as bx
from benchmarks.measure import FULL, QUICK, Ratio, in_turns, ratio_of_medians, repeated
from benchmarks.report import interval, made_with, size
from benchmarks.workload import normal

TITLE = "Gradients of bx.bounded_while against other loops with checkpoints"
MOST = 4096
STEPS = 30, 300, 4000
OURS = "bounded_while"

Step = Callable[[Any, Any], Any]
Loop = Callable[[Any, Any, Any], Any]
"""From a number of steps, the first value and parameters to the last value."""


def _bounded(step: Step) -> Loop:
    def run(count: Any, x: Any, p: Any) -> Any:
        body = lambda c: (c[0] + 1, step(c[1], p))
        return bx.bounded_while(lambda c: c[0] < count, body, (jnp.int32(0), x), MOST)[1]

    return run


def _equinox(step: Step) -> Loop:
    import equinox.internal as eqxi

    def run(count: Any, x: Any, p: Any) -> Any:
        body = lambda c: (c[0] + 1, step(c[1], p))
        start = jnp.int32(0), x
        going_on = lambda c: c[0] < count
        return eqxi.while_loop(going_on, body, start, max_steps=MOST, kind="checkpointed")[1]

    return run


def _masked(step: Step) -> Loop:
    def run(count: Any, x: Any, p: Any) -> Any:
        body = lambda x, i: (jnp.where(i < count, step(x, p), x), None)
        return lax.scan(body, x, jnp.arange(MOST))[0]

    return run


TIME_STEP = 2.0**-10  # sums of it are exact


def _slope(y: Any, p: Any) -> Any:
    return jnp.sin(p * y)


def _heun(y: Any, p: Any) -> Any:
    a = _slope(y, p)
    return y + TIME_STEP / 2 * (a + _slope(y + TIME_STEP * a, p))


def _diffrax(count: Any, y: Any, p: Any) -> Any:
    """As many steps of Heun's method as `_heun` takes."""
    import diffrax

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, p: _slope(y, p)),
        diffrax.Heun(),
        0.0,
        count * TIME_STEP,
        TIME_STEP,
        y,
        args=p,
        max_steps=MOST,
        adjoint=diffrax.RecursiveCheckpointAdjoint(),
    )
    return solution.ys[0]


def _loops(step: Step) -> dict[str, Loop]:
    return {OURS: _bounded(step), "Equinox": _equinox(step), "scan": _masked(step)}


@dataclass(frozen=True)
class BoundedWorkload:
    """A step, the loops that take it, and what they start from.

    Attributes:
      name: what reports call it.
      loops: by name, ours first.
      data: the first value, and the parameters.
    """

    name: str
    loops: Callable[[], dict[str, Loop]]
    data: Callable[[], tuple[Any, Any]]


WORKLOADS = {
    w.name: w
    for w in (
        BoundedWorkload(
            "tanh of 256 numbers",
            lambda: _loops(lambda x, p: jnp.tanh(p * x)),
            lambda: (normal(256), normal(256, seed=1)),
        ),
        BoundedWorkload(
            "tanh of 4,096 numbers",
            lambda: _loops(lambda x, p: jnp.tanh(p * x)),
            lambda: (normal(4096), normal(4096, seed=1)),
        ),
        BoundedWorkload(
            "product with a 128x128 matrix",
            lambda: _loops(lambda x, p: jnp.tanh(p @ x)),
            lambda: (normal(128), normal(128, 128, seed=1) / 12),
        ),
        BoundedWorkload(
            "Heun's method, 1,024 numbers",
            lambda: {OURS: _bounded(_heun), "diffrax": _diffrax, "scan": _masked(_heun)},
            lambda: (normal(1024), normal(1024, seed=1)),
        ),
    )
}


@dataclass(frozen=True)
class BoundedResult:
    """All loops of one workload, for one number of steps.

    Attributes:
      name: the workload.
      steps: how many steps are taken.
      seconds: how long ours takes.
      ratios: by loop, its time over that of ours.
      temporaries: by loop, the bytes that its program allocates besides arguments and outputs.
      compiling: by loop, the seconds to trace, lower and compile it, once.
    """

    name: str
    steps: int
    seconds: float
    ratios: dict[str, Ratio]
    temporaries: dict[str, int]
    compiling: dict[str, float]


def measured(workload: BoundedWorkload, quick: bool) -> Iterator[BoundedResult]:
    """One result for each number of steps."""
    effort, data = QUICK if quick else FULL, workload.data()
    programs, temporaries, compiling = {}, {}, {}
    for name, loop in workload.loops().items():
        loss = lambda count, x, p, loop=loop: (loop(count, x, p) ** 2).sum()
        start = time.perf_counter()
        compiled = jax.jit(jax.value_and_grad(loss, (1, 2))).lower(np.int32(1), *data).compile()
        compiling[name] = time.perf_counter() - start
        temporaries[name] = compiled.memory_analysis().temp_size_in_bytes
        programs[name] = compiled
    for steps in STEPS[:1] if quick else STEPS:
        args, runs = (np.int32(steps), *data), []
        for compiled in programs.values():
            repeated(compiled, args, 1)()
            start = time.perf_counter()
            repeated(compiled, args, 1)()
            once = time.perf_counter() - start
            runs.append(repeated(compiled, args, max(1, round(effort.seconds_per_run / once))))
        times = dict(zip(programs, in_turns(runs, effort.runs, time.perf_counter), strict=True))
        ratios = {name: ratio_of_medians(own, times[OURS]) for name, own in times.items()}
        del ratios[OURS]
        seconds = float(np.median(times[OURS]))
        yield BoundedResult(workload.name, steps, seconds, ratios, temporaries, compiling)


def line(result: BoundedResult) -> str:
    """One result on one line of a terminal."""
    others = ", ".join(f"{name} {interval(ratio)}" for name, ratio in result.ratios.items())
    return f"{result.name:30} {result.steps:5} steps {_time(result):>9}; ratios of time: {others}"


def summary(results: Sequence[BoundedResult]) -> str:
    """What the numbers say, as a Markdown list."""
    points = []
    for other in dict.fromkeys(name for r in results for name in r.ratios):
        chosen = [r for r in results if other in r.ratios]
        times = [r.ratios[other].value for r in chosen]
        memory = [r.temporaries[other] / r.temporaries[OURS] for r in chosen]
        points.append(
            f"{other} takes {np.median(times):.2f}x the time of batchax at the median "
            f"({min(times):.2f}x to {max(times):.0f}x), and {min(memory):.2f}x to "
            f"{max(memory):.2f}x the temporaries"
        )
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[BoundedResult], folder: Path) -> list[Path]:
    """Writes `bounded.md` into `folder`."""
    page = folder / "bounded.md"
    page.write_text(_page(results))
    return [page]


def _time(result: BoundedResult) -> str:
    return f"{1000 * result.seconds:.3g} ms"


def _page(results: Sequence[BoundedResult]) -> str:
    rows = [
        "| step | steps taken | bx | Equinox, diffrax | scan | temporaries | compiling |",
        "| --- | " + "---: | " * 6,
    ]
    for r in results:
        checkpointed, masked = (interval(ratio) for ratio in r.ratios.values())
        temporaries = " / ".join(map(size, r.temporaries.values()))
        compiling = " / ".join(f"{s:.1f}" for s in r.compiling.values()) + " s"
        cells = [r.name, f"{r.steps:,}", _time(r), checkpointed, masked, temporaries, compiling]
        rows.append("| " + " | ".join(cells) + " |")
    lines = "\n".join(row.rstrip() for row in rows)
    return f"""# {TITLE}

{made_with()}

{summary(results)}

Value and gradient of an unbatched loop that takes at most {MOST:,} steps and stops earlier, with
respect to its first value and its parameters:

- *bx*: `bx.bounded_while`.
- *Equinox*: `equinox.internal.while_loop(..., kind="checkpointed")`.
- *diffrax*, for a step of an ODE solver: `diffeqsolve` with its default adjoint and constant steps.
  It stores more besides the state.
- *scan*: a `lax.scan` of {MOST:,} steps that selects whether each counts.

batchax, Equinox, and diffrax store enough values to recompute each step at most once. Ratios are
times over that of `bx`, with a 95% bootstrap interval: above 1, `bx` is faster. All run interleaved
in one process. *Temporaries* (memory besides arguments and outputs) and *compiling* (once, with
tracing) are in the order of the columns.

{lines}
"""
