"""What ragged batches cost, in words, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import interval, made_with, named, size
from benchmarks.rows.measure import (
    COUNT,
    LOOP,
    PACKED,
    PADDED,
    RowResult,
    tail_waste,
    waste,
)
from benchmarks.rows.workloads import TAIL_BOUND

TITLE = "bx.vmap of a Ragged against rows padded or packed by hand"


def line(result: RowResult) -> str:
    """One comparison on one line of a terminal."""
    return f"{result.name:42} {result.way:20} running {interval(result.run)}"


def summary(results: Sequence[RowResult]) -> str:
    """What the numbers say, as a Markdown list."""
    points = []
    padded = [r for r in results if r.way == PADDED]
    token_wise = [r for r in padded if r.workload.token_wise]
    if token_wise:
        times = [1 / r.run.value for r in token_wise]
        points.append(
            f"Work for each element by itself is {min(times):.1f}x to {max(times):.1f}x faster "
            f"than with rows padded by hand, which hold {waste():.1f} elements for each true one"
        )
    others = [r for r in padded if not r.workload.token_wise]
    if others:
        points.append("Other work against rows padded by hand: " + _range(others))
    packed = [r for r in results if r.way == PACKED]
    if packed:
        points.append("Against rows packed by hand: " + _range(packed))
    loops = [r for r in results if r.way == LOOP]
    if loops:
        median = np.median([r.run.value for r in loops])
        points.append(
            f"Against a compiled function called for each row: {median:.2f} at the median; slower "
            "beyond the interval"
            + named((r for r in loops if r.run.low > 1), lambda r: interval(r.run))
        )
    others = [r for r in results if r.way not in (PADDED, PACKED, LOOP)]
    if others:
        points.append(
            "The encoder against others: " + "; ".join(f"{r.way} {interval(r.run)}" for r in others)
        )
    points.append(
        "More temporaries"
        + named(
            (r for r in results if r.compared and _temporaries(r)[0] > _temporaries(r)[1]),
            lambda r: f"{r.way}: {' against '.join(map(size, _temporaries(r)))}",
        )
    )
    return "\n".join(f"- {p}." for p in points)


def _range(results: Sequence[RowResult]) -> str:
    ratios = [r.run.value for r in results]
    return f"{np.median(ratios):.2f} at the median, from {min(ratios):.2f} to {max(ratios):.2f}"


def write(results: Sequence[RowResult], folder: Path) -> list[Path]:
    """Writes `rows.md` and `rows.png` into `folder`."""
    page, picture = folder / "rows.md", folder / "rows.png"
    plot(results, picture)
    page.write_text(_page(results))
    return [page, picture]


def _temporaries(result: RowResult) -> tuple[int, int]:
    assert result.compared is not None
    return result.compared.ours.temporary_bytes, result.compared.other.temporary_bytes


def _page(results: Sequence[RowResult]) -> str:
    return f"""# {TITLE}

{made_with()}

{summary(results)}

![Run time of each way, relative to bx.vmap of a Ragged](rows.png)

The {COUNT} rows have lognormal lengths. Padded to the longest, they hold {waste():.1f} elements for
each true one. The 96 rows of the *longer tail*, padded to {TAIL_BOUND}, hold {tail_waste():.1f}.
The *transformer encoder* has 16 rows of mean length 64, the longest 256. PyTorch's layer runs on
padded rows and on nested tensors, without derivatives and `torch.compile`. Images are ragged along
two axes. For convolutions to 8 channels, their sizes are known when the program is compiled. In all
other programs, lengths are traced ([ragged batches](../guides/ragged.md)).

- *padded by hand*: computes on padded rows, and masks them where needed.
- *packed by hand*: computes on all elements in one array, with `jax.ops.segment_sum` for sums.
- *a call for each row*: a Python loop over the function, compiled before for each length.
- *buckets=4*: rows run in four size buckets.
- *gradient*: of a sum of squares with respect to the weights.

Rows by hand are already padded, or have the row of each element. `bx.vmap` converts its rows in the
measured time. Ratios are batchax's median over the other, with a 95% bootstrap interval: below 1,
batchax is faster. All sides run interleaved in one process. *Temporaries* are memory besides
arguments and outputs, batchax's first.

{_table(results)}
"""


def _table(results: Sequence[RowResult]) -> str:
    heads = ["workload", "against", "running", "batchax", "other", "temporaries"]
    lines = [heads, ["---", "---", "---:", "---:", "---:", "---:"]]
    for r in results:
        memory = " / ".join(map(size, _temporaries(r))) if r.compared else ""
        own, other = (f"{1000 * s:.2f} ms" for s in r.seconds)
        lines.append([r.name, r.way, interval(r.run), own, other, memory])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def plot(results: Sequence[RowResult], path: Path) -> None:
    """A bar for each way and workload: how many times as long as batchax it takes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(r.name for r in results))
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(names) + 1.5))
    for k, (way, colour) in enumerate(((PADDED, "C0"), (PACKED, "C2"), (LOOP, "C7"))):
        own: dict[str, Any] = {r.name: 1 / r.run.value for r in results if r.way == way}
        places = [i + 0.27 * (k - 1) for i, name in enumerate(names) if name in own]
        axes.barh(places, [own[n] for n in names if n in own], 0.25, label=way, color=colour)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("time relative to bx.vmap of a Ragged (above 1: batchax is faster)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
