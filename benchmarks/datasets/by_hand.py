"""`bx.map` with nothing but its defaults, and the loop that one writes by hand, over files that are
in the system's memory: what reading, writing, computing and many tiny rows cost beside that.

The loop is the shortest that does it: a memory map, `jit` of `vmap` over slices of 8 MiB, a memory
map. It syncs nothing, can go on with nothing, and sees no change of its input.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx
from benchmarks.datasets.workloads import network
from benchmarks.measure import Ratio, ratio_of_medians

TURNS = 5
_SLICE = 8 * 2**20  # bytes


@dataclass(frozen=True)
class ByHand:
    """A function of one row over a file.

    Attributes:
      name: what reports call it.
      make: makes the function, anew each time, so that it is compiled each time.
      columns: numbers of a row.
      rows: how many.
      results: numbers of a result.
      on_disk: whether results go to a file.
    """

    name: str
    make: Callable[[], Callable[[Any], Any]]
    columns: int
    rows: int
    results: int
    on_disk: bool


def _mean() -> Callable[[Any], Any]:
    return lambda x: jnp.stack([x.mean(), x.max()])


def _twice() -> Callable[[Any], Any]:
    return lambda x: x * 2


WORKLOADS = {
    w.name: w
    for w in (
        ByHand("read 400 MB", _mean, 1024, 97_656, 2, False),
        ByHand("read 1.6 GB", _mean, 1024, 390_625, 2, False),
        ByHand("read 400 MB, results on disk", _mean, 1024, 97_656, 2, True),
        ByHand("write 400 MB", _twice, 1024, 97_656, 1024, True),
        ByHand("compute", network(1024), 256, 16_384, 64, True),
        ByHand("3 million rows of one number", _twice, 1, 3_000_000, 1, True),
    )
}


@dataclass(frozen=True)
class AgainstByHand:
    """Seconds of each turn of whole calls, in each way."""

    work: ByHand
    seconds: dict[str, list[float]]

    def against(self, way: str) -> Ratio:
        """The way over the loop by hand."""
        return ratio_of_medians(self.seconds[way], self.seconds[LOOP])


LOOP = "the loop by hand"


def measured_by_hand(work: ByHand, folder: Path, quick: bool) -> AgainstByHand:
    """All ways in turns."""
    x, rows = folder / "x.npy", max(64, work.rows // 100) if quick else work.rows
    dataset = np.lib.format.open_memmap(x, "w+", np.float32, (rows, work.columns))
    part = np.random.default_rng(0).standard_normal((min(rows, 8192), work.columns), "f4")
    for start in range(0, rows, len(part)):
        dataset[start : start + len(part)] = part[: rows - start]
    dataset.flush()
    del dataset
    ways = {LOOP: _loop, "`bx.map`": _map, "`bx.map_batches`": _batches}
    if work.on_disk:
        ways["`bx.map` to Zarr"] = _to_zarr
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways.items())
    _let_go()  # compiled
    for _ in range(1 if quick else TURNS):
        for name, way in order:
            out = folder / "out"
            out.mkdir()
            begun = time.perf_counter()
            way(work, x, out / "y")
            _let_go()
            seconds[name].append(time.perf_counter() - begun)
            shutil.rmtree(out)
        order.reverse()
    return AgainstByHand(work, seconds)


@jax.jit
def _nothing(x: Any) -> Any:
    return x + 1


def _let_go() -> None:
    """JAX holds what it computed last from until it computes something else. With the last rows
    that is the whole file: to unmap 1.6 GB takes 50 ms, which whoever comes next would pay.
    """
    _nothing(1.0).block_until_ready()


def table(results: Sequence[AgainstByHand]) -> str:
    """Markdown: seconds of the loop, and each way over it."""
    ways = ["`bx.map`", "`bx.map` to Zarr", "`bx.map_batches`"]
    lines = [["what", f"{LOOP}, s", *ways], ["---", *["---:"] * 4]]
    for r in results:
        median = f"{np.median(r.seconds[LOOP]):.3g}"
        cells = [_ratio(r.against(way)) if way in r.seconds else "" for way in ways]
        lines.append([r.work.name, median, *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def _loop(work: ByHand, x: Path, out: Path) -> None:
    dataset, batched = np.load(x, mmap_mode="r"), jax.jit(jax.vmap(work.make()))
    shape = len(dataset), work.results
    if work.on_disk:
        results = np.lib.format.open_memmap(out, "w+", np.float32, shape)
    else:
        results = np.empty(shape, np.float32)
    step = max(1, _SLICE // (4 * (work.columns + work.results)))
    for start in range(0, len(dataset), step):
        results[start : start + step] = batched(dataset[start : start + step])


def _map(work: ByHand, x: Path, out: Path) -> None:
    place = out.with_suffix(".npy") if work.on_disk else None
    bx.map(work.make(), x, out=place, progress=False)


def _to_zarr(work: ByHand, x: Path, out: Path) -> None:
    bx.map(work.make(), x, out=out.with_suffix(".zarr"), progress=False)


def _batches(work: ByHand, x: Path, out: Path) -> None:
    """Handed out, and let go of: as for a loop that takes no time."""
    for batch in bx.map_batches(work.make(), x):
        batch.block_until_ready()
