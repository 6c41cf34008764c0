"""What was measured of datasets on disk, in words and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.datasets.by_hand import AgainstByHand, table
from benchmarks.datasets.measure import STEADY, Memory, Timed, Units
from benchmarks.datasets.ways import WAYS
from benchmarks.report import interval, made_with, size

TITLE = "bx.map against its limits, and against loops by hand"
GOAL = 1.05
_LIMITS = ("reading", "computing", "writing")
Measured = Timed | Memory | Units | AgainstByHand


def line(result: Measured) -> str:
    """One result on one line of a terminal."""
    if isinstance(result, Memory):
        peaks = ", ".join(f"{gb:g} GB: {size(x)}" for gb, x in result.peak.items())
        return f"{'peak memory by input':41} {peaks}"
    if isinstance(result, AgainstByHand):
        ways = [f"{way} {interval(result.against(way))}" for way in list(result.seconds)[1:]]
        return f"{result.work.name:41} {', '.join(ways)} of the loop by hand"
    if isinstance(result, Units):
        return f"{f'{result.count:,} units':41} {_units(result)}"
    steady = f"{interval(result.steady)} of {result.slowest} alone"
    return f"{result.work.name:41} {steady}"


def summary(results: Sequence[Measured]) -> str:
    """What the numbers say, as a Markdown list."""
    points = []
    for r in results:
        if isinstance(r, Timed):
            points.append(
                f"{r.work.name}: {interval(r.steady)} times as long as {r.slowest} alone, once "
                f"under way{_missed(r)}"
            )
        elif isinstance(r, Memory):
            peaks = " and ".join(f"{size(x)} for {gb:g} GB" for gb, x in r.peak.items())
            before = size(max(r.before.values()))
            points.append(f"Peak memory of the process: {peaks} of input; {before} before the map")
        elif isinstance(r, Units):
            points.append(f"{r.count:,} units of one row, in .npy: {_units(r)}")
    timed = [r for r in results if isinstance(r, Timed)]
    if missing := {way for r in timed for way in r.missing}:
        points.append(f"Not measured, for it is not installed: {', '.join(sorted(missing))}")
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[Measured], folder: Path) -> list[Path]:
    """Writes `datasets.md` into `folder`."""
    page = folder / "datasets.md"
    page.write_text(_page(results))
    return [page]


def _missed(r: Timed) -> str:
    over = r.slowest == "computing" and r.steady.value > GOAL
    return f" (the goal is {GOAL})" if over else ""


def _units(r: Units) -> str:
    each = f"{r.seconds / r.count * 1e6:,.0f} µs each"
    lines = " and ".join(
        f"{seconds * 1e6:,.0f} µs where {group} {'is' if group == 1 else 'are'} synced at once"
        for group, seconds in r.journal.items()
    )
    return (
        f"{r.seconds:.1f} s, {each}; opened again when finished in {r.reopened:.3f} s. A line of "
        f"the journal takes {lines}"
    )


def _spread(seconds: Sequence[float]) -> str:
    return f"{np.median(seconds):.3g} ({min(seconds):.3g}-{max(seconds):.3g})"


def _page(results: Sequence[Measured]) -> str:
    timed = [r for r in results if isinstance(r, Timed)]
    by_hand = table([r for r in results if isinstance(r, AgainstByHand)])
    alone = [["function", "rows", *_LIMITS, "`bx.map`", "over the slowest"]]
    alone.append(["---", *["---:"] * 6])
    for r in timed:
        seconds = [_spread(r.seconds[limit]) for limit in (*_LIMITS, STEADY)]
        alone.append([r.work.name, f"{r.rows:,}", *seconds, interval(r.steady)])
    ways = [["function", *WAYS], ["---", *["---:"] * len(WAYS)]]
    for r in timed:
        cells = []
        for way in WAYS:
            if way in r.missing:
                cells.append("")
                continue
            times = "" if way == "bx.map to Zarr" else f"; {interval(r.against(way))}"
            cells.append(f"{_spread(r.seconds[way])}{times}")
        ways.append([r.work.name, *cells])
    tables = ["\n".join("| " + " | ".join(row) + " |" for row in rows) for rows in (alone, ways)]
    return f"""# {TITLE}

{made_with()}

{summary(results)}

[Functions of one row over datasets on disk](../guides/datasets.md). Everything of a function runs
in one process, in turns, and files of input are dropped from the system's memory before each.
Seconds are medians, with the shortest and the longest in brackets. Where these are far apart, that
is noise of the machine, of its disk or of what else runs on it: writing alone has it, too. Ratios
are batchax's median over the other, with a 95% bootstrap interval.

*Reading*, *computing* and *writing* are each done alone for all units, by the code that a map does
them with: the same library, the same threads, the same syncs and checksums. *`bx.map`* is the
seconds for all rows at its rate from when a quarter of them is done. Computing uses all cores, and
what reads and writes beside it takes some of their time.

{tables[0]}

Whole calls, each with what it stages and compiles, until results are on the disk: loops, Dask and
xarray write to a mapped file that is flushed at the end, what is in Zarr or Arrow is synced file by
file. The loops read a slice of as many rows as a unit has, and compute it in batches of the same
size as `bx.map`. Dask runs blocks of such slices in threads, and xarray (`dask="parallelized"`) has
Dask do it. `datasets.map` reads and writes Arrow. Of these, what takes long has fewer turns. The
second figure of a cell is `bx.map` to Zarr over that way. None of the others can go on after it was
killed.

{tables[1]}

Files that are in the system's memory, and nothing but defaults: seconds of the shortest loop by
hand (a memory map, `jit(vmap)`, a memory map, nothing synced), until the file is not mapped any
more, and whole calls over it, with what they stage, compile and sync. Without a file of results
they stay in memory; `bx.map_batches` hands them out to a loop that does nothing.

{by_hand}
"""
