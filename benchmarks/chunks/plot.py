"""The picture: time and temporaries over chunk sizes, a line for each way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.chunks.measure import ChunkedResult
from benchmarks.chunks.ways import OURS
from benchmarks.chunks.workloads import EXAMPLE

STYLES = {
    "bx.vmap": ("tab:blue", "-", "o"),
    'bx.vmap, residuals="keep"': ("tab:cyan", "-", "v"),
    "lax.map": ("tab:orange", "-", "s"),
    "lax.map, checkpoint": ("tab:red", "--", "^"),
    "optax": ("tab:green", ":", "D"),
    "NetKet": ("tab:purple", ":", "P"),
    "jax.vmap": ("0.35", "-.", None),
}
"""Of each way: colour, line and marker."""


def plot(results: Sequence[ChunkedResult], path: Path) -> None:
    """Draws a column for each use of a workload, over the sizes of its chunks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    uses = list(dict.fromkeys(r.use for r in results))
    fig, axes = plt.subplots(
        2, len(uses), sharex=True, sharey="row", squeeze=False, figsize=(5.5 * len(uses), 8)
    )
    for column, use in enumerate(uses):
        of_use = sorted((r for r in results if r.use == use), key=lambda r: r.workload.chunk)
        time, memory = axes[0][column], axes[1][column]
        for name, (colour, dashes, marker) in STYLES.items():
            found = [(r.workload.chunk, r.ways[name]) for r in of_use if name in r.ways]
            if not found:
                continue
            sizes = [chunk for chunk, _ in found]
            style = dict(color=colour, linestyle=dashes, marker=marker, markersize=5, label=name)
            style["zorder"] = 3 if name == OURS else 2  # lines that coincide hide one another
            time.plot(sizes, [1e3 * m.seconds for _, m in found], **style)
            memory.plot(sizes, [m.temporary_bytes / 1e6 for _, m in found], **style)
        time.set_title(use, fontsize=11)
        memory.set_xlabel("lanes in a chunk")
        memory.set_xscale("log", base=2)
        memory.set_xticks([r.workload.chunk for r in of_use])
        memory.xaxis.set_major_formatter("{x:g}")
        for ax in (time, memory):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.grid(which="both", color="0.93")
    axes[0][0].set_ylabel("time (ms)")
    axes[1][0].set_ylabel("temporaries (MB)")
    handles = {
        label: handle
        for column in axes[0]
        for handle, label in zip(*column.get_legend_handles_labels(), strict=True)
    }
    fig.legend(handles.values(), handles.keys(), loc="lower center", ncols=4, fontsize=9)
    fig.suptitle(
        f"{EXAMPLE.name}, {EXAMPLE.lanes} lanes, over chunk sizes (log scales)", fontsize=12
    )
    fig.tight_layout(rect=(0, 0.06, 1, 1))
    fig.savefig(path, dpi=110)
    plt.close(fig)
