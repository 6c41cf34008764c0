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

{WORKERS} workers on one machine, and units of {UNIT} s that sleep: there are too few CPUs to
keep busy. *Overhead* is by how much longer a unit takes than that, from when all workers have
begun to when all are done, by the times in the journal: the median, least and most of some runs.
It is everything between one unit and the next: the engine, reading and writing a row, two syncs of
the disk. *Task* is what the engine takes for one that does nothing.

| engine | overhead | task |
| --- | ---: | ---: |
{tasks}

Threads of one process read ahead and write behind, so between units there is nothing; a worker of
an engine reads, computes and writes one unit after another.

## Simulated

{MANY:,} workers and {most:,} units, played through event by event ([the
program](../../benchmarks/cluster/simulated.py)). Assumed: the times of units are spread
log-normally around their mean; every {DEATHS:.0f} s on average a worker dies, loses what it was
computing and what waited for it, and is back, compiled, after {BACK:.0f} s; one scheduler handles
one task at a time, in the time that Dask was measured to take ({task * 1e3:.2f} ms); storage keeps
up with everybody.

| | takes | longer than the work | recomputed units | scheduler busy |
| --- | ---: | ---: | ---: | ---: |
{cases}

**What breaks first** is the scheduler. It hands out {1 / task if task else 0:,.0f} units a second
at most, so {MANY:,} workers need units of {MANY * task:.1f} s or more: `commit_rows` says how
many rows that is. Shards ask no scheduler, and their units may be as short as the disk likes.

**Deaths** cost little: each loses two units at most, and what its worker does not do until it is
back.

**The journal** has a line of about {_RECORD} bytes for each unit, in a file for each writer,
synced by that writer alone. {most:,} units are {most * _RECORD / 2**30:.1f} GiB, and to go on
with such a job, or to finish it, takes about {most * _READ:,.0f} s, and a kilobyte of memory for
each: {most * 1024 / 2**30:,.0f} GiB. Beyond a million units, longer ones are better here, too.
"""
