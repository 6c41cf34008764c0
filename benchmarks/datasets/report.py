"""What was measured of datasets on disk, in words and as tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.datasets.by_hand import AgainstByHand, table
from benchmarks.datasets.measure import STEADY, Killed, Memory, Timed, Units
from benchmarks.datasets.ways import NEEDS, OURS, WAYS
from benchmarks.report import interval, made_with, size

TITLE = "bx.map against its limits, loops by hand, and other libraries"
GOAL = 1.05
_LIMITS = ("reading", "computing", "writing")
Measured = Timed | Killed | Memory | Units | AgainstByHand


def line(result: Measured) -> str:
    """One result on one line of a terminal."""
    if isinstance(result, Memory):
        peaks = ", ".join(f"{gb:g} GB: {size(x)}" for gb, x in result.peak.items())
        return f"{'peak memory by input':41} {peaks}"
    if isinstance(result, Killed):
        return f"{'killed halfway, called again':41} {_killed(result)}"
    if isinstance(result, AgainstByHand):
        ways = [f"{way} {interval(result.against(way))}" for way in list(result.seconds)[1:]]
        return f"{result.work.name:41} {', '.join(ways)} of the loop by hand"
    if isinstance(result, Units):
        return f"{f'many units: {result.count:,}':41} {_units(result)}"
    steady = f"{interval(result.steady)} of {result.slowest} alone"
    return f"{result.work.name:41} {steady}"


def summary(results: Sequence[Measured]) -> str:
    """What the numbers say, as a Markdown list."""
    points = []
    for r in results:
        if isinstance(r, Timed):
            points.append(
                f"{r.work.name}, over {r.slowest} alone: {interval(r.steady)}, from a quarter of "
                f"the rows on{_missed(r)}"
            )
        elif isinstance(r, Killed):
            points.append(f"Seconds of a call after one that was killed halfway: {_killed(r)}")
        elif isinstance(r, Memory):
            peaks = " and ".join(f"{size(x)} for {gb:g} GB" for gb, x in r.peak.items())
            before = size(max(r.before.values()))
            points.append(f"Peak memory of the process: {peaks} of input; {before} before the map")
        elif isinstance(r, Units):
            points.append(f"{r.count:,} units of one row, in .npy: {_units(r)}")
    if missing := {way for r in results if isinstance(r, Timed | Killed) for way in r.missing}:
        points.append(f"Not installed, so not measured: {', '.join(sorted(missing))}")
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


def _killed(r: Killed) -> str:
    each = (f"{way} {r.again[way]:.3g} of {r.whole[way]:.3g}" for way in r.whole)
    return ", ".join(each)


def _table(timed: Sequence[Timed], ways: Sequence[str]) -> str:
    """Seconds of whole calls; of all ways but ours with the ratio of ours over them."""
    missing = {way for r in timed for way in r.missing}
    ways = [way for way in ways if way not in missing]
    lines = [["function", *(f"{way}, s" for way in ways)], ["---", *["---:"] * len(ways)]]
    for r in timed:
        cells = [_spread(r.seconds[OURS])]
        cells += [f"{_spread(r.seconds[way])}; {interval(r.against(way))}" for way in ways[1:]]
        lines.append([r.work.name, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _page(results: Sequence[Measured]) -> str:
    timed = [r for r in results if isinstance(r, Timed)]
    by_hand = table([r for r in results if isinstance(r, AgainstByHand)])
    alone = [["function", "rows", *_LIMITS, "`bx.map`", "over the slowest"]]
    alone.append(["---", *["---:"] * 6])
    for r in timed:
        seconds = [_spread(r.seconds[limit]) for limit in (*_LIMITS, STEADY)]
        alone.append([r.work.name, f"{r.rows:,}", *seconds, interval(r.steady)])
    limits = "\n".join("| " + " | ".join(row) + " |" for row in alone)
    loops = _table(timed, [way for way in WAYS if way not in NEEDS])
    libraries = _table(timed, [OURS, *NEEDS])
    killed = [["call", "whole, s", "killed halfway, then called again, s"], ["---", "---:", "---:"]]
    for r in (r for r in results if isinstance(r, Killed)):
        killed += [[way, f"{r.whole[way]:.3g}", f"{r.again[way]:.3g}"] for way in r.whole]
    after_kills = "\n".join("| " + " | ".join(row) + " |" for row in killed)
    return f"""# {TITLE}

{made_with()}

{summary(results)}

[Maps over datasets on disk](../guides/datasets.md). All ways run a function interleaved in one
process, and input files are dropped from the page cache before each run. Seconds are medians, with
the shortest and the longest in brackets. Where these differ much, the machine or its disk was busy.
Ratios are batchax's median over the other, with a 95% bootstrap interval.

## Against reading, computing, and writing alone

*Reading*, *computing*, and *writing* run alone for all units, with the code, threads, syncs, and
checksums of `bx.map`. *`bx.map`* is the time for all rows at the rate after the first quarter.
Computing uses all cores, so reading and writing at the same time slow it down.

{limits}

## Against Dask, xarray, and Hugging Face datasets

Whole calls, with tracing and compiling, until results are on disk. All compute the same batches
with `jit(vmap)`. Dask runs `map_blocks` on blocks of a unit's rows, in threads. xarray uses Dask
(`dask="parallelized"`). Both write to a mapped file, flushed at the end. `datasets.map` reads and
writes Arrow. Files in Zarr or Arrow are synced one by one. The second figure in a cell is the time
of `bx.map` over that library's. Slow ways have fewer turns.
[What each of them also does](../coming_from/dask_xarray_datasets.md).

{libraries}

{after_kills}

The second table shows calls in new processes: one without a kill, and one after a call that was
killed halfway.

## Against loops by hand

The loops read a unit's rows at a time, and compute batches of the same size as `bx.map`. They
cannot resume.

{loops}

Input files are in the page cache, and all options are defaults. Cells are seconds. The loop by hand
is the shortest: memory maps and `jit(vmap)`, without syncs, until the file is unmapped. Calls of
`bx.map` include tracing, compiling, and syncs. Without an output file, results stay in memory.
`bx.map_batches` passes them to a loop that does nothing.

{by_hand}
"""
