"""What was measured of programs of other libraries: a table for each half, and its quantiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.libraries.measure import Found
from benchmarks.libraries.program import COMPACT, PLAIN, SERIAL
from benchmarks.report import figures, made_with, ratio

TITLE = "Programs of other libraries: bx.vmap against what their users run"
_HALVES = "looked at", "held out"
_GAINS, _LOSES, _LONG = 1 / 1.5, 1.05, 2.0


def line(result: Found) -> str:
    """One program on one line of a terminal."""
    ways = "  ".join(f"{name} {ratio(r)}" for name, r in result.run.items())
    first = figures(result.first[PLAIN]) if PLAIN in result.first else "-"
    same = min(result.same.values(), default=1.0)
    differs = "" if same > 0.99 else f"  same {same:.2f}"
    failed = "".join(f"  {name} FAILED {why}" for name, why in result.failed.items())
    return f"{result.name:52} {_time(result.seconds):>8}  {ways}  first {first}{differs}{failed}"


def summary(results: Sequence[Found]) -> str:
    """What each half comes to, as a Markdown list."""
    points = []
    for half in _HALVES:
        every = [r for r in results if r.half == half and PLAIN in r.run]
        uneven = [r.run[PLAIN].value for r in every if r.uneven]
        if not every:
            continue
        slow = sum(r.run[PLAIN].value > _LOSES for r in every)
        first = sum(r.first[PLAIN] > _LONG for r in every)
        gain = sum(x < _GAINS for x in uneven)
        median = f"{np.median(uneven):.2f}" if uneven else "-"
        points.append(
            f"{half.capitalize()}: {len(every)} programs. Of {len(uneven)} with uneven lanes or "
            f"rows, {gain} are at least 1.5x faster (median ratio {median}). Slower than "
            f"{_LOSES}: {slow}. First calls above {_LONG:g}x: {first}."
        )
    return "\n".join(f"- {p}" for p in points)


def write(results: Sequence[Found], folder: Path) -> list[Path]:
    """Writes `programs.md` into `folder`."""
    page = folder / "programs.md"
    tables = "\n\n".join(
        f"## {half.capitalize()}\n\n{_table([r for r in results if r.half == half])}"
        for half in _HALVES
    )
    page.write_text(f"""# {TITLE}

{made_with()}

Each program is written as a user of the library writes it, and batched with `bx.vmap` in place of
`jax.vmap`, with no option. The cost model may be tuned by the programs that are *looked at*, and
never by those *held out*. Ratios are CPU time over that of `jax.vmap`, or of padded rows by hand
where `jax.vmap` cannot run the program, in one process and interleaved; below 1 batchax is faster.
Intervals are 95% bootstrap intervals. *First call* includes tracing and compiling. Lanes are uneven
where their counts of steps differ by 3x or more, or the lengths of rows by 2x.

{summary(results)}

{tables}
""")
    return [page]


def _table(results: Sequence[Found]) -> str:
    heads = ["program", "uneven", "today", PLAIN, '"compact"', SERIAL, "first call"]
    rows = [heads, ["---"] * 2 + ["---:"] * 5]
    for r in results:
        ways = [ratio(r.run[name]) if name in r.run else "" for name in (PLAIN, COMPACT, SERIAL)]
        first = figures(r.first[PLAIN]) if PLAIN in r.first else ""
        uneven = "yes" if r.uneven else "no"
        rows.append([r.name, uneven, _time(r.seconds), *ways, first])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
