"""What the search found: quantiles of each half of the programs, and those that lose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import figures, made_with, ratio
from benchmarks.search.drafted import HALVES
from benchmarks.search.measure import Found

TITLE = "Drafted programs: bx.vmap as it is against jax.vmap"
_LOSES = 1.05
_LONG_TO_COMPILE = 0.2  # seconds
_LONG_TO_TRACE = 0.005
_MOST_ROWS = 22

ASPECTS: dict[str, tuple[Callable[[Found], float], Callable[[Found], bool]]] = {
    "running": (lambda r: r.run.value, lambda r: True),
    "compiling, above 0.2 s": (
        lambda r: r.compiling,
        lambda r: max(r.compile_seconds) > _LONG_TO_COMPILE,
    ),
    "tracing, above 5 ms": (lambda r: r.tracing, lambda r: max(r.trace_seconds) > _LONG_TO_TRACE),
}
"""What is compared: the ratio, and of which programs."""


def line(result: Found) -> str:
    """One program on one line of a terminal."""
    if result.failed:
        return f"{result.name:55} {result.failed}"
    masked = f", masked {result.masked.value:.2f}" if result.masked else ""
    run = "same program" if result.same else f"running {ratio(result.run)}{masked}"
    compiling = f"{result.compiling:.2f} of {result.compile_seconds[1]:.2f} s"
    tracing = f"{result.tracing:.2f} of {1000 * result.trace_seconds[1]:.0f} ms"
    return f"{result.name:55} {run:40} compiling {compiling}  tracing {tracing}"


def summary(results: Sequence[Found]) -> str:
    """Quantiles of each half, as a table in Markdown."""
    heads = ["", "half", "programs", "median", "90%", "99%", "worst"]
    rows = [heads, ["---"] * 2 + ["---:"] * 5]
    for aspect, (value, counts) in ASPECTS.items():
        for half in HALVES:
            values = [value(r) for r in results if r.half == half and not r.failed and counts(r)]
            if values:
                quantiles = np.percentile(values, [50, 90, 99, 100])
                rows.append([aspect, half, str(len(values)), *map(figures, quantiles)])
    return _table(rows)


def write(results: Sequence[Found], folder: Path) -> list[Path]:
    """Writes `search.md` into `folder`."""
    page = folder / "search.md"
    page.write_text(_page(results))
    return [page]


def _page(results: Sequence[Found]) -> str:
    whole = [r for r in results if not r.failed]
    failed = "".join(f"\n- {r.name}: {r.failed}" for r in results if r.failed)
    return f"""# {TITLE}

{made_with().replace("make bench`", "make search`").replace("benchmarks`", "benchmarks search`")}

Each function of one example is batched with `bx.vmap`, with no option, and with `jax.vmap`. Ratios
are batchax's CPU time over that of `jax.vmap`, in one process, interleaved; below 1 batchax is
faster. Thresholds of the cost model may be set by the programs of the half *tuned*, and never by
those of the half *held out*; a hash of the name decides. Of {len(whole)} programs,
{sum(r.same for r in whole)} compile to the same program as with `jax.vmap`, which counts as 1, and
{sum(r.run.value < 0.5 for r in whole)} are at least 2x faster.

{summary(whole)}

## Programs slower than {_LOSES}x

*Masked* is the ratio with `divergence="predicate"`: close to 1, the policy of divergence is what
loses. Intervals are 95% bootstrap intervals.

{_losers(whole)}

## Programs that take more than twice as long to compile

Where either takes more than 0.2 s.

{_slow(whole, "compiling", 2, lambda r: r.compile_seconds, _LONG_TO_COMPILE)}

## Programs that trace slower than 1.3x

The twenty slowest of those above 5 ms.

{_slow(whole, "tracing", 1.3, lambda r: r.trace_seconds, _LONG_TO_TRACE)}
{failed}
"""


def _losers(results: Sequence[Found]) -> str:
    rows = [["program", "half", "running", "masked", "`jax.vmap`, ms"]]
    rows += [["---", "---", "---:", "---:", "---:"]]
    for r in sorted(results, key=lambda r: -r.run.value):
        if r.run.value > _LOSES:
            masked = ratio(r.masked) if r.masked else ""
            rows.append([r.name, r.half, ratio(r.run), masked, f"{1000 * r.run_seconds[1]:.3g}"])
    return _table(rows)


def _slow(
    results: Sequence[Found], what: str, most: float, seconds: Callable[[Found], Any], long: float
) -> str:
    rows = [["program", "half", what, "`jax.vmap`, ms", "`bx.vmap`, ms"]]
    rows += [["---", "---", "---:", "---:", "---:"]]
    for r in sorted(results, key=lambda r: -getattr(r, what)):
        if getattr(r, what) > most and max(seconds(r)) > long and len(rows) < _MOST_ROWS:
            ours, theirs = (f"{1000 * s:.0f}" for s in seconds(r))
            rows.append([r.name, r.half, f"{getattr(r, what):.2f}", theirs, ours])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
