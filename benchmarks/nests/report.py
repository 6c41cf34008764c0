"""What barriers cost loops of loops, in words, as a table and as pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.nests.measure import NestResult
from benchmarks.nests.workload import BASE, DIVERGENCES
from benchmarks.report import compiles, figures, here, made_with, ratio, seconds

TITLE = "Nested loops: bx.vmap against jax.vmap, sequential lanes, and other libraries"
COLUMNS = (*DIVERGENCES, "lax.map", "threads")
COLOURS = dict(zip(COLUMNS, ("C1", "C3", "C0", "0.5", "0.7"), strict=True))
PEERS = "C2"


def line(result: NestResult) -> str:
    """One nest on one line of a terminal."""
    return (
        f"{result.name:36} {seconds(result.ways[BASE]):>8}, bound {result.bound:.2f}; "
        + ", ".join(f"{name} {ratio(way.run)}" for name, way in result.others.items())
        + "; first call "
        + ", ".join(f"{name} {way.first_ratio:.2f}" for name, way in result.others.items())
    )


def summary(results: Sequence[NestResult]) -> str:
    """What the numbers say, as a Markdown list."""
    points = []
    for name in dict.fromkeys(name for r in results for name in r.others):
        rows = [r for r in results if name in r.others]
        ratios = [r.others[name].run for r in rows]
        median = np.median([x.value for x in ratios])
        points.append(
            f"`{name}` takes {median:.2f}x the time of `jax.vmap` at the median of {len(rows)}"
            f", from {min(x.value for x in ratios):.2g}x to {max(x.value for x in ratios):.2g}x"
        )
    bounds = [r.bound for r in results]
    points.append(
        f"Without barriers, masked lanes need {np.median(bounds):.2f}x the steps at the median, "
        f"from {min(bounds):.2g}x to {max(bounds):.2g}x"
    )
    for name in DIVERGENCES if compiles() else ():
        ratios = [r.ways[name].first_ratio for r in results]
        slowest = results[int(np.argmax(ratios))].name
        points.append(
            f"The first call by `{name}` takes {np.median(ratios):.1f}x the time of that of "
            f"`jax.vmap` at the median, {max(ratios):.1f}x at most ({slowest})"
        )
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[NestResult], folder: Path) -> list[Path]:
    """Writes `nests.md`, `nests.png` and `nests-use.png` into `folder`."""
    page, ratios, use = (folder / name for name in ("nests.md", "nests.png", "nests-use.png"))
    plot_ratios(results, ratios)
    plot_use(results, use)
    page.write_text(_page(results))
    return [page, ratios, use]


def _page(results: Sequence[NestResult]) -> str:
    turns = [r.turns for r in results]
    return f"""# {TITLE}{here()}

{made_with()} {_load()}

{summary(results)}

![Time of each way over that of jax.vmap, and the bound](nests.png)

Each program is a loop of few, long steps. Each step has a loop whose length differs between lanes.
With `jax.vmap`, all lanes wait for the slowest lane in each outer step. Columns are times over that
of `jax.vmap`: below 1, the way is faster. Intervals are 95% bootstrap intervals over {min(turns)}
to {max(turns)} turns in one process.

- *predicate*, *auto*, *compact*: `bx.vmap` with this `divergence=`. The default is "auto".
- *lax.map*: lanes run sequentially. *threads*: the same, with a part of the lanes on each core.
- *other libraries*: the same target, draws, chains, and step sizes, with that library's random
  numbers. [FSM-MCMC](https://github.com/HWDance/jax-fsm-mcmc) writes samplers as state machines.
- *bound*: the innermost steps of the slowest lane, over those that masked lanes take. A way that
  masks all lanes cannot take less. A way that also compacts them can.
- *useful*: the share of innermost lane-steps that some lane needs: with barriers, without, and in
  compact, by `bx.LaneSteps`.
- *first call*: CPU time to trace, compile, and run once: seconds of `jax.vmap`, and ratios of
  predicate, auto, and compact.
- *same*: the share of outer steps in which these three have the counts of `jax.vmap` and, to a
  thousandth, its results. Samplers and adaptive solvers are chaotic, so chains that round
  differently diverge after some draws. Both are right.

{_table(results)}

The share of active lanes over the innermost steps of masked lanes. The dotted line is the mean that
`bx.LaneSteps` measured for compact:

![Share of lanes that are active over time, with barriers and without](nests-use.png)
{_samplers(results)}"""


def _load() -> str:
    """What else the machine did."""
    if not hasattr(os, "getloadavg"):
        return ""
    load = os.getloadavg()[2]
    busy = " More than there are cores: figures vary by more than their intervals say."
    return f"Programs that ran at a time, these and others: {load:.1f} at the mean." + (
        busy if load > (os.cpu_count() or 1) else ""
    )


def _table(results: Sequence[NestResult]) -> str:
    heads = [
        "program",
        "lanes x steps",
        BASE,
        *COLUMNS,
        "other libraries",
        "bound",
        "useful",
        "first call",
    ]
    heads.append("same")
    rows = [heads, ["---"] + ["---:"] * (2 + len(COLUMNS)) + ["---"] + ["---:"] * 4]
    family = None
    for r in results:
        if r.family != family:
            family = r.family
            rows.append([f"**{family}**", *[""] * (len(heads) - 1)])
        firsts = [figures(r.ways[way].first_ratio) for way in DIVERGENCES]
        rows.append(
            [
                r.name,
                f"{r.lanes} x {r.steps}",
                seconds(r.ways[BASE]),
                *(ratio(r.ways[way].run) if way in r.ways else "" for way in COLUMNS),
                "; ".join(f"{name} {ratio(way.run)}" for name, way in r.peers.items()),
                f"{r.bound:.2f}",
                " / ".join(f"{share:.0%}" for share in (*r.of_use, r.compact_of_use)),
                f"{r.ways[BASE].first:.1f} s; " + " / ".join(firsts) if compiles() else "",
                " / ".join(f"{r.ways[way].same:.0%}" for way in DIVERGENCES),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _samplers(results: Sequence[NestResult]) -> str:
    """Effective draws a second of all ways of samplers, where they were counted."""
    counted = [r for r in results if any(w.draws_per_second for w in r.ways.values())]
    if not counted:
        return ""
    names = list(dict.fromkeys(name for r in counted for name in (BASE, *r.others)))
    rows = [["sampler", *names], ["---"] + ["---:"] * len(names)]
    for r in counted:
        every = {**r.ways, **r.peers}
        speeds = [every[name].draws_per_second if name in every else None for name in names]
        rows.append([r.name, *("" if x is None else f"{x:.3g}" for x in speeds)])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"""
Effective draws per second of the coordinate with the fewest, by BlackJAX's estimate from all
chains. There is no warm-up.

{table}
"""


def plot_ratios(results: Sequence[NestResult], path: Path) -> None:
    """The ratios of all ways with their intervals, and the bound of each nest."""
    plt = _pyplot()
    figure, ax = plt.subplots(figsize=(10, 2 + 0.5 * len(results)), layout="constrained")
    labels: set[str] = set()
    for i, r in enumerate(results):
        for k, (name, way) in enumerate(r.others.items()):
            colour = COLOURS.get(name, PEERS)
            label = name if name in COLOURS else "other libraries"
            low, value, high = way.run.low, way.run.value, way.run.high
            y = i + 0.1 * (k - 3)
            ax.errorbar(
                value,
                y,
                xerr=[[max(0, value - low)], [max(0, high - value)]],
                fmt="o",
                markersize=4.5,
                color=colour,
                label=label if label not in labels else None,
            )
            labels.add(label)
            if label == "other libraries":
                ax.annotate(f" {name}", (high, y), fontsize=7, va="center", color=colour)
        ax.plot([r.bound] * 2, [i - 0.4, i + 0.4], color="black", label="" if i else "bound")
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.grid(axis="x", color="0.9")
    ax.set_yticks(range(len(results)), [r.name for r in results], fontsize=8)
    ax.set_ylim(len(results) - 0.5, -0.5)
    ax.set_title("time over that of jax.vmap (log scale; left of 1 is faster)", fontsize=10)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_use(results: Sequence[NestResult], path: Path) -> None:
    """The share of lanes that are active over time, a panel for each nest."""
    plt = _pyplot()
    columns = min(4, len(results))
    rows = -(-len(results) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(3.2 * columns, 2.2 * rows), layout="constrained", squeeze=False
    )
    for ax in panels.flat[len(results) :]:
        ax.set_axis_off()
    for ax, r in zip(panels.flat, results, strict=False):
        for (name, (time, share)), colour in zip(r.active.items(), ("C3", "C0"), strict=True):
            ax.fill_between(time, share, step="pre", alpha=0.5, color=colour, label=name)
        ax.axhline(
            r.compact_of_use, color="black", linestyle=":", label="compact, mean of all loops"
        )
        ax.set_xlim(0, 1)
        ax.set_ylim(0, 1)
        ax.yaxis.set_major_formatter("{x:.0%}")
        ax.tick_params(labelsize=7)
        ax.set_title(r.name, fontsize=8)
    panels[0, 0].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
