"""What it costs that lanes part ways, in words, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.divergence.measure import DivergenceResult, Way
from benchmarks.divergence.workload import BASE
from benchmarks.measure import ON_A_GPU, Ratio
from benchmarks.report import compiles, figures, here, made_with, named, ratio, seconds, size

TITLE = "Lanes that diverge: bx.vmap against jax.vmap, lax.map and by hand"
COLOURS = {
    "auto": "C3",
    "compact": "C0",
    "predicate": "C1",
    "lax.map": "C7",
}  # all others: by hand
COMPILED = (BASE, "auto", "compact")
BY_HAND = "C2"


def line(result: DivergenceResult) -> str:
    """One workload on one line of a terminal."""
    others = {**result.others, **result.yardsticks}
    return f"{result.name:40} {seconds(result.base):>9}; " + ", ".join(
        f"{name} {ratio(way.run)}" for name, way in others.items()
    )


def summary(results: Sequence[DivergenceResult]) -> str:
    """What the numbers say, as a Markdown list."""
    points = []
    for family in dict.fromkeys(r.family for r in results):
        chosen = [r for r in results if r.family == family]
        for way in COLOURS:
            ratios = [_Row(r.name, r.ways[way].run) for r in chosen if way in r.ways]
            if ratios:
                points.append(f"{family}, `{way}` over `{BASE}`: {_in_words(ratios)}")
    by_hand = [
        _Row(f"{r.name}, {name}", way.run)
        for r in results
        for name, way in r.others.items()
        if name not in COLOURS
    ]
    if by_hand:
        points.append(f"What is written by hand over `{BASE}`: {_in_words(by_hand)}")
    for r in results:
        if r.yardsticks:
            points.append(
                f"{r.name}: auto takes {seconds(r.ways['auto'])}, compact "
                f"{seconds(r.ways['compact'])}; as many lane-steps take "
                + "; ".join(f"{seconds(way)} in a {name}" for name, way in r.yardsticks.items())
            )
    counted = [r for r in results if r.utilization]
    if counted:
        compact, masked = np.median([r.utilization for r in counted], axis=0)
        points.append(
            f"Lane-steps that some lane needs: {compact:.0%} of those of compact and {masked:.0%} "
            f"of those of masked lanes at the median of {len(counted)}; fewer with compact"
            + named(
                (r for r in counted if r.utilization[0] < r.utilization[1]),  # type: ignore
                _utilization,
            )
        )
    for way in COMPILED[1:]:
        slower = {r.name: r.ways[way].compile_seconds / r.base.compile_seconds for r in results}
        if compiles():
            points.append(
                f"Compiling `{way}` takes {np.median(list(slower.values())):.1f}x the time of "
                f"`{BASE}` at the median, {max(slower.values()):.1f}x at most "
                f"({max(slower, key=slower.__getitem__)})"
            )
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[DivergenceResult], folder: Path) -> list[Path]:
    """Writes `divergence.md` and `divergence.png` into `folder`."""
    page, picture = folder / "divergence.md", folder / "divergence.png"
    plot(results, picture)
    page.write_text(_page(results))
    return [page, picture]


class _Row(NamedTuple):
    name: str
    run: Ratio


def _in_words(rows: Sequence[_Row]) -> str:
    """The median, and what is faster and slower than `jax.vmap` beyond its interval."""
    median = np.median([r.run.value for r in rows])
    slow = sorted((r for r in rows if r.run.low > 1), key=lambda r: -r.run.value)
    fast = sum(r.run.high < 1 for r in rows)
    return f"{figures(median)} at the median; faster: {fast} of {len(rows)}; slower" + named(
        slow, lambda r: ratio(r.run)
    )


def _page(results: Sequence[DivergenceResult]) -> str:
    turns = [r.turns for r in results]
    return f"""# {TITLE}{here()}

{made_with()}

{summary(results)}

![Time of each way over that of jax.vmap, and useful lane-steps](divergence.png)

Each function of one example runs for all lanes in several ways:

- *auto*: `bx.vmap(f)`.
- *compact*: `bx.vmap(f, divergence="compact")`.
- *jax.vmap*, and *predicate* (`divergence="predicate"`): all lanes run until the last is done, and
  all lanes run all branches.
- *lax.map*: lanes run sequentially.
- *compaction by hand*: a loop until half the lanes are done, then one of half as many, and so on.
- *refill by hand*: a loop of 64 lanes, where waiting lanes refill the slots of lanes that are done.
- *by hand*, for branches: lanes sorted by branch, in blocks of 64.
- *uniform loop*: the same number of lane-steps, where all lanes take equally many. It shows the
  least time, and computes something else.

Figures are times over that of `jax.vmap`: below 1, the way is faster. Intervals are 95% bootstrap
intervals over {min(turns)} to {max(turns)} interleaved turns. *Faster* and *slower* count rows
whose interval excludes 1.

- *Lanes*: on a GPU, {ON_A_GPU.times_lanes} times as many as names say.
- *Useful*: the share of lane-steps that some lane needs, of compact (by `bx.LaneSteps`) and of
  masked lanes. Branches have no steps.
- *Compiling*: the time to trace and compile, of `jax.vmap`, auto, and compact. It is left out for
  programs from a cache.
- *Temporaries*: memory besides arguments and outputs, of the same three.
- *Heavy-tailed counts*: 26 steps at the mean, and 2,000 for one lane. *Equal counts*: 27 steps.
- *Gradient*: the value, and the gradient of the sum of squares of all results.

Two costs of `jax.vmap` are not those of masking. Where branches differ between lanes, it copies
unbatched weights for each lane. In the rows *in place*, it copies the array in each step.

{_table(results)}
"""


def _table(results: Sequence[DivergenceResult]) -> str:
    ways = list(COLOURS)
    last = ["other ways", "useful", "compiling", "temporaries"]
    heads = ["workload", "lanes", BASE, *ways, *last]
    lines = [heads, ["---"] + ["---:"] * 6 + ["---"] + ["---:"] * 3]
    family = None
    for r in results:
        if r.family != family:
            family = r.family
            lines.append([f"**{family}**", *[""] * (len(lines[0]) - 1)])
        others = {**r.others, **r.yardsticks}
        lines.append(
            [
                r.name,
                f"{r.lanes:,}",
                seconds(r.base),
                *(ratio(r.ways[way].run) if way in r.ways else "" for way in ways),
                "; ".join(f"{n} {ratio(w.run)}" for n, w in others.items() if n not in ways),
                _utilization(r),
                _each(r, lambda way: f"{way.compile_seconds:.1f}") + " s" if compiles() else "",
                _each(r, _temporaries),
            ]
        )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _temporaries(way: Way) -> str:
    return size(way.temporary_bytes)


def _each(result: DivergenceResult, say: Callable[[Way], str]) -> str:
    return " / ".join(say(result.ways[way]) for way in COMPILED)


def _utilization(result: DivergenceResult) -> str:
    return " / ".join(f"{share:.0%}" for share in result.utilization or ())


def plot(results: Sequence[DivergenceResult], path: Path) -> None:
    """The ratios of all ways with their intervals, and beside them which lane-steps are of use."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, use) = plt.subplots(
        1,
        2,
        sharey=True,
        figsize=(12, 2 + 0.32 * len(results)),
        width_ratios=(3, 1),
        layout="constrained",
    )
    labels = set()
    for i, r in enumerate(results):
        for k, (name, way) in enumerate({**r.others, **r.yardsticks}.items()):
            label = (
                name if name in COLOURS else "uniform loop" if name in r.yardsticks else "by hand"
            )
            low, value, high = way.run.low, way.run.value, way.run.high
            times.errorbar(
                value,
                i + 0.1 * (k - 1),
                xerr=[[max(0, value - low)], [max(0, high - value)]],
                fmt="D" if name in r.yardsticks else "o",
                markersize=4.5,
                color="black" if name in r.yardsticks else COLOURS.get(name, BY_HAND),
                label=label if label not in labels else None,
            )
            labels.add(label)
        for share, y, colour in zip(r.utilization or (), (-0.17, 0.17), ("C3", "C0"), strict=False):
            use.barh(i + y, share, 0.3, color=colour)
    families = [r.family for r in results]
    for family in dict.fromkeys(families):
        first = families.index(family)
        times.axhline(first - 0.5, color="0.8", linewidth=0.8)
        use.axhline(first - 0.5, color="0.8", linewidth=0.8)
        use.annotate(family, (1.04, first), xycoords=("axes fraction", "data"), va="center")
    times.axvline(1, color="black", linewidth=0.8)
    times.set_xscale("log")
    times.xaxis.set_major_formatter("{x:g}")
    times.grid(axis="x", color="0.9")
    times.set_yticks(range(len(results)), [r.name for r in results], fontsize=8)
    times.set_ylim(len(results) - 0.5, -0.5)
    times.set_title("time over that of jax.vmap (log scale; left of 1 is faster)", fontsize=10)
    times.legend(fontsize=8)
    use.set_xlim(0, 1)
    use.xaxis.set_major_formatter("{x:.0%}")
    use.set_title("useful lane-steps", fontsize=10)
    bars = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in ("C3", "C0")]
    use.legend(bars, ["compact", "masked lanes"], fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)
