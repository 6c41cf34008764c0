"""What was measured, in words, as a table and as a picture."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import Ratio, Result

TITLE = "bx.vmap against jax.vmap"
TRACING_GOAL = 1.1


def line(result: Result) -> str:
    """One workload on one line of a terminal."""
    return (
        f"{result.name:41} tracing {interval(result.trace)}  running {interval(result.run)}  "
        f"HLO {result.hlo:15}"
    )


def summary(results: Sequence[Result]) -> str:
    """What the numbers say, the worst cases by name, as a Markdown list."""
    same = [r for r in results if r.hlo == "same"]
    points = [
        f"{len(results)} workloads; the optimized HLO is the same on {len(same)}"
        + named((r for r in results if r.hlo != "same"), how_hlo_differs, "; not on"),
        f"Tracing takes {_median(r.trace for r in results)}x the time of `jax.vmap` at the "
        "median; longest"
        + named(
            sorted(results, key=lambda r: -r.trace.value)[:5], lambda r: f"{r.trace.value:.2f}"
        ),
        f"Running takes {_median(r.run for r in results)}x the time at the median; slower "
        "beyond the interval"
        + named(
            sorted((r for r in results if r.run.low > 1), key=lambda r: -r.run.value),
            lambda r: interval(r.run),
        )
        + "; faster beyond it"
        + named(
            sorted((r for r in results if r.run.high < 1), key=lambda r: r.run.value),
            lambda r: interval(r.run),
        ),
    ]
    if same:
        points.append(
            "Where the HLO is the same, the ratio of run times would be 1 on a quiet machine; it "
            f"went from {min(r.run.value for r in same):.2f} to "
            f"{max(r.run.value for r in same):.2f}: that is the noise of these measurements."
        )
    points.append(
        "More memory than `jax.vmap` (arguments, outputs and temporaries)"
        + named(
            (r for r in results if r.ours.total_bytes > r.other.total_bytes),
            lambda r: f"{size(r.ours.total_bytes)} against {size(r.other.total_bytes)}",
        )
    )
    return "\n".join(f"- {p}" if p.endswith(".") else f"- {p}." for p in points)


def write(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes `benchmarks.md` and `benchmarks.png` into `folder`."""
    page, picture = folder / "vmap.md", folder / "vmap.png"
    plot(results, picture)
    page.write_text(_page(results))
    return [page, picture]


def made_with() -> str:
    """How, with what and where the numbers of a report were made."""
    device = jax.default_backend()
    option = "" if device == "cpu" else f" DEVICE={device}"
    cores = f"{os.cpu_count()} {'CPU' if device == 'cpu' else 'host'} cores ({platform.machine()})"
    where = cores if device == "cpu" else f"one {jax.devices()[0].device_kind}, with {cores}"
    return f"""\
Made by `make bench{option}` (`python -m benchmarks`) with JAX {jax.__version__}, Python
{platform.python_version()}, on {where}."""


def here() -> str:
    """On what, for the title of a page that there is for each kind of device."""
    device = jax.default_backend()
    return "" if device == "cpu" else f", on a {device.upper()}"


def compiles() -> bool:
    """Whether programs are compiled when they are measured, and not taken from a cache."""
    return jax.config.jax_compilation_cache_dir is None  # type: ignore[attr-defined]


def _page(results: Sequence[Result]) -> str:
    return f"""# {TITLE}

{made_with()}

{summary(results)}

![Ratios of tracing and run time for each workload](vmap.png)

Both vmaps batch the same function, interleaved in one process. Ratios are batchax's median over
that of `jax.vmap`, with a 95% bootstrap interval: below 1, batchax is faster.

- *Tracing*: `jax.make_jaxpr` of the batched function, in CPU time.
- *Running*: the compiled program.
- *HLO*: optimized programs without names and source lines. "same operations" differ in order or
  layout. Where programs differ, their numbers of instructions follow.
- *Equations*: those of the jaxpr and of all jaxprs inside, batchax's first where they differ.
- *Temporaries*: memory besides arguments and outputs.

{table(results)}
"""


def table(results: Sequence[Result]) -> str:
    """Every figure of every workload, in Markdown."""
    heads = ["workload", "tracing", "running", "HLO", "equations", "temporaries"]
    rows = [heads, ["---"] + ["---:"] * 2 + ["---"] + ["---:"] * 2]
    family = None
    for r in results:
        if r.family != family:
            family = r.family
            rows.append([f"**{family}**"] + [""] * (len(heads) - 1))
        rows.append(
            [
                r.name,
                interval(r.trace),
                interval(r.run),
                how_hlo_differs(r),
                _pair(r.ours.equations, r.other.equations),
                _pair(size(r.ours.temporary_bytes), size(r.other.temporary_bytes)),
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws the ratios of all workloads, with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (tracing, running) = plt.subplots(
        1, 2, sharey=True, figsize=(12, 2 + 0.2 * len(results)), layout="constrained"
    )
    same = np.array([r.hlo == "same" for r in results])
    _ratios(tracing, [r.trace for r in results], {None: ("tab:blue", same | ~same)})
    tracing.axvline(TRACING_GOAL, color="tab:green", linestyle="--", linewidth=1, label="goal 1.1")
    tracing.set_title("time to trace, batchax / jax.vmap (log scale)", fontsize=10)
    tracing.set_yticks(range(len(results)), [r.name for r in results], fontsize=8)
    tracing.set_ylim(len(results) - 0.5, -0.5)
    _ratios(
        running,
        [r.run for r in results],
        {"same optimized HLO": ("0.45", same), "another HLO": ("tab:orange", ~same)},
    )
    running.set_title("time to run, batchax / jax.vmap (log scale)", fontsize=10)
    families = [r.family for r in results]
    for i, family in enumerate(families):
        if i == 0 or family != families[i - 1]:
            tracing.axhline(i - 0.5, color="0.8", linewidth=0.8)
            running.axhline(i - 0.5, color="0.8", linewidth=0.8)
            running.annotate(
                family, (1.01, i), xycoords=("axes fraction", "data"), va="center", fontsize=8
            )
    for ax in (tracing, running):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -1.5 / len(results)), ncols=3)
    fig.suptitle(f"{TITLE}: medians with 95% intervals; left of 1 is faster", fontsize=11)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def _ratios(ax: Any, ratios: Sequence[Ratio], styles: dict[str | None, tuple[str, Any]]) -> None:
    """One point with its interval for each row; `styles`: label to colour and which rows."""
    value, low, high = np.array([(x.value, x.low, x.high) for x in ratios]).T
    rows = np.arange(len(ratios))
    for label, (colour, chosen) in styles.items():
        ax.errorbar(
            value[chosen],
            rows[chosen],
            xerr=[(value - low)[chosen], (high - value)[chosen]],
            fmt="o",
            markersize=4,
            linewidth=1.2,
            color=colour,
            label=label if chosen.any() else None,
        )
    median = float(np.median(value))
    ax.axvline(1, color="black", linewidth=0.8)
    ax.axvline(median, color="tab:red", linestyle=":", label=f"median {median:.2f}")
    # Intervals of a noisy machine may leave the picture, medians never do.
    left = min(0.8, max(low.min(), 0.25), value.min()) / 1.05
    right = max(1.25, min(high.max(), 4.0), value.max()) * 1.05
    ax.set_xscale("log")
    ax.set_xlim(left, right)
    wide = right / left > 3
    ticks = (0.125, 0.25, 0.5, 1, 2, 4, 8) if wide else (0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2)
    ax.set_xticks([t for t in ticks if left <= t <= right])
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.tick_params(axis="x", labelsize=8)
    ax.grid(axis="x", color="0.9")


def named(results: Iterable[Any], say: Callable[[Any], str], before: str = "") -> str:
    """The first results by name with what there is to say of each, after a colon."""
    listed = [f"{r.name} ({say(r)})" for r in results]
    if not listed and before:
        return ""
    more = len(listed) - _MOST_NAMED
    rest = [f"and {more} more"] if more > 0 else []  # which the table has
    return f"{before}: " + ("; ".join([*listed[:_MOST_NAMED], *rest]) or "none")


_MOST_NAMED = 3


def how_hlo_differs(result: Result) -> str:
    """Whether the compiled programs differ, and how many instructions each has."""
    if result.hlo != "differs":
        return result.hlo
    ours, theirs = (sum(side.operations.values()) for side in (result.ours, result.other))
    return f"differs, {ours} / {theirs}"


def _median(ratios: Iterable[Ratio]) -> str:
    return f"{np.median([r.value for r in ratios]):.2f}"


def interval(ratio: Ratio) -> str:
    """A ratio with its interval."""
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _pair(ours: object, theirs: object) -> str:
    return f"{ours}" if ours == theirs else f"{ours} / {theirs}"


def size(count: float) -> str:
    """A number of bytes in words."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def seconds(way: Any) -> str:
    """How long a way takes, in the unit that suits."""
    return f"{1000 * way.seconds:.3g} ms" if way.seconds < 1 else f"{way.seconds:.2f} s"


def figures(value: Any) -> str:
    """A ratio, in as many figures as mean something."""
    return f"{value:.2g}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def ratio(of: Ratio) -> str:
    """A ratio with its interval, in few figures."""
    return f"{figures(of.value)} ({figures(of.low)}-{figures(of.high)})"
