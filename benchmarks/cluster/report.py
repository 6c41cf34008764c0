"""What engines cost, in words and as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster.overhead import ENGINES, UNIT, WORKERS, EngineResult, measured
from benchmarks.cluster.simulated import BACK, DEATHS, UNITS, Case, Simulated, simulated
from benchmarks.cluster.simulated import WORKERS as MANY
from benchmarks.report import made_with

TITLE = "Engines of bx.map, and a thousand workers on paper"
GOALS = {"processes": 0.02, "Dask": 0.05}
_RECORD = 250  # bytes of a line of the journal
_READ = 5e-6  # seconds to read one, as measured for a hundred thousand


@dataclass(frozen=True)
class Everything:
    """All engines, and then the cases that are simulated with what was measured of them."""


WORKLOADS = {"engines": Everything()}


def measure(_: Any, quick: bool) -> Iterator[EngineResult | Simulated]:
    """The results."""
    found = {}
    for engine in ENGINES:
        found[engine] = measured(engine, quick)
        yield found[engine]
    task = found["Dask"].seconds
    units = 20_000 if quick else UNITS
    for case in (
        Case("shards, units of 0.5 s", UNIT, 0.0),
        Case("one scheduler, units of 0.5 s", UNIT, task),
        Case("one scheduler, units of 10 s", 10.0, task),
        Case("one scheduler, units of 60 s", 60.0, task),
    ):
        yield simulated(case, units=units)


def line(result: EngineResult | Simulated) -> str:
    """One result on one line of a terminal."""
    if isinstance(result, Simulated):
        return f"{result.case.name:32} lost {result.lost:8.1%}, scheduler busy {result.busy:.0%} "
    return f"{result.name:32} overhead {_spread(result.overhead)}, {result.seconds * 1e3:.2f} ms "


def summary(results: Sequence[EngineResult | Simulated]) -> str:
    """What the numbers say, as a Markdown list."""
    engines, played = _parted(results)
    points = [
        f"Units of {UNIT} s take longer by {statistics.median(e.overhead):.1%} with {e.name}"
        + (f" (goal {GOALS[e.name]:.0%})" if e.name in GOALS else "")
        for e in engines
    ]
    points += [
        f"{p.workers:,} workers, {p.units:,} units, a death every {DEATHS:.0f} s, "
        f"{p.case.name}: {p.lost:.1%} longer than the work itself, {p.again:,} recomputed units"
        for p in played
    ]
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[EngineResult | Simulated], folder: Path) -> list[Path]:
    """Writes `cluster.md` into `folder`."""
    page = folder / "cluster.md"
    page.write_text(_page(results))
    return [page]


def _parted(results: Sequence[Any]) -> tuple[list[EngineResult], list[Simulated]]:
    return (
        [r for r in results if isinstance(r, EngineResult)],
        [r for r in results if isinstance(r, Simulated)],
    )


def _spread(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):.1%}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1%} to {max(values):.1%})"


def _page(results: Sequence[EngineResult | Simulated]) -> str:
    engines, played = _parted(results)
    of_task = lambda e: f"{e.seconds * 1e3:.2f} ms" if e.seconds else "-"
    tasks = "\n".join(f"| {e.name} | {_spread(e.overhead)} | {of_task(e)} |" for e in engines)
    cases = "\n".join(
        f"| {p.case.name} | {p.hours:,.2f} h | {p.lost:.1%} | {p.again:,} | {p.busy:.0%} |"
        for p in played
    )
    task = next((p.case.task for p in played if p.case.task), 0.0)
    most = played[0].units if played else UNITS
    return f"""# {TITLE}

{made_with()}

{summary(results)}

## Measured

{WORKERS} workers run on one machine, with units that sleep for {UNIT} s. *Overhead* is the
additional time for each unit, by the times in the journal: the median, the least, and the most of
some runs. It includes the executor, reading and writing a row, and two syncs of the disk. *Task* is
the executor's time for an empty task.

| engine | overhead | task |
| --- | ---: | ---: |
{tasks}

Threads of one process read ahead and write behind. A worker of another executor reads, computes,
and writes sequentially.

## Simulated

[The program](../../benchmarks/cluster/simulated.py) simulates {MANY:,} workers and {most:,} units,
event by event. It assumes:

- The times of units are lognormal around their mean.
- Every {DEATHS:.0f} s on average a worker dies, and loses its current and its waiting unit. It is
  back, compiled, after {BACK:.0f} s.
- One scheduler handles one task at a time, in the time measured for Dask ({task * 1e3:.2f} ms).
- Storage is never the bottleneck.

| | takes | longer than the work | recomputed units | scheduler busy |
| --- | ---: | ---: | ---: | ---: |
{cases}

**The scheduler** breaks first. It sends at most {1 / task if task else 0:,.0f} units a second, so
{MANY:,} workers need units of {MANY * task:.1f} s or more. `commit_rows` sets how many rows that
is. Shards need no scheduler, so their units may be short.

**A death** loses at most two units, and the time until the worker is back.

**The journal** has about {_RECORD} bytes for each unit, in a file for each writer. {most:,} units
are {most * _RECORD / 2**30:.1f} GiB. To resume or finish such a job takes about
{most * _READ:,.0f} s and {most * 1024 / 2**30:,.0f} GiB of memory. Beyond a million units, use
longer units.
"""
