"""What is around a compiled program, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.around.measure import PairResult
from benchmarks.report import interval, made_with

TITLE = "Around the compiled program: importing, tracing, calls outside of jit, progress"


def line(result: PairResult) -> str:
    """One pair on one line of a terminal."""
    pair = result.pair
    return f"{pair.name:40} against {pair.other:18} {interval(result.ratio)}"


def summary(results: Sequence[PairResult]) -> str:
    """What the numbers say, as a Markdown list."""
    missed = [r for r in results if r.ratio.value > r.pair.goal]
    listed = "; ".join(f"{r.pair.name} ({r.ratio.value:.2f})" for r in missed) or "none"
    points = [f"{len(results)} pairs; over their goal: {listed}"]
    for r in results:
        if r.pair.family == "importing":
            ours, other = r.seconds
            points.append(
                f"Importing takes {ours - other:.2f} s of CPU time more than "
                f"`{r.pair.other}` alone, which takes {other:.2f} s"
            )
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[PairResult], folder: Path) -> list[Path]:
    """Writes `around.md` into `folder`."""
    page = folder / "around.md"
    page.write_text(_page(results))
    return [page]


def _page(results: Sequence[PairResult]) -> str:
    rows = [
        "| what | against | ratio | goal | ms | ms, the other |",
        "| --- | --- | " + "---: | " * 4,
    ]
    family = None
    for r in results:
        if r.pair.family != family:
            family = r.pair.family
            rows.append(f"| **{family}** |  |  |  |  |  |")
        ours, other = (f"{1000 * x:.3g}" for x in r.seconds)
        cells = [r.pair.name, r.pair.other, interval(r.ratio), f"{r.pair.goal:g}", ours, other]
        rows.append("| " + " | ".join(cells) + " |")
    lines = "\n".join(row.rstrip() for row in rows)
    return f"""# {TITLE}

{made_with()}

{summary(results)}

Both sides of a pair run interleaved in one process (importing: each in a separate one).
Ratios are batchax's median over the other, with a 95% bootstrap interval. *Tracing* is
`jax.make_jaxpr` of a new function each time, in CPU time of its thread. *Calls outside
of jit* are on the clock, of a function that is traced again each time, and found again by what it
does; operations are run one by one. *Saying how far it is* is a compiled program with `progress=` a
function that does nothing.

{lines}
"""
