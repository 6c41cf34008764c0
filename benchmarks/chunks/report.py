"""What was measured of batches in chunks, in words, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.chunks.measure import ChunkedResult, Measured
from benchmarks.chunks.plot import plot
from benchmarks.chunks.ways import LAX_MAP, OF_CHUNKS, OF_STEPS
from benchmarks.chunks.workload import GRADIENT, ScanWorkload
from benchmarks.chunks.workloads import CURVE, EXAMPLE
from benchmarks.report import interval, made_with, named, size

TITLE = "bx.vmap in chunks against lax.map and others"
BYTES_GOAL, TIME_GOAL = 40e6, 1.5


def line(result: ChunkedResult) -> str:
    """One workload on one line of a terminal."""
    _, rival = _yardstick(result)
    return (
        f"{result.name:50} {_time(result.ours)}, {size(result.ours.temporary_bytes):>7}  "
        f"over {_yardstick(result)[0]} {interval(rival.ratio)}, {size(rival.temporary_bytes)}"
    )


def _yardstick(result: ChunkedResult) -> tuple[str, Measured]:
    """What the goals compare with: ``lax.map`` at the same chunk size, or ``lax.scan``."""
    name = "lax.scan" if isinstance(result.workload, ScanWorkload) else LAX_MAP
    return name, result.ways[name]


def summary(results: Sequence[ChunkedResult]) -> str:
    """What the numbers say, the worst cases by name, as a Markdown list."""
    chunks, steps, _ = _sorted(results)
    points = []
    for of, rival in ((chunks, "lax.map"), (steps, "lax.scan")):
        for use in dict.fromkeys(r.use for r in of):
            points += _against(rival, use, [r for r in of if r.use == use])
    points += _goals(chunks)
    if chunks:
        points.append(
            "Temporaries, of batchax, that grow by more than a tenth with twice the lanes"
            + named(
                (r for r in chunks if r.bytes_of_twice > 1.1 * r.ours.temporary_bytes + 1000),
                lambda r: f"{size(r.ours.temporary_bytes)} to {size(r.bytes_of_twice)}",
            )
        )
    return "\n".join(f"- {p}." for p in points)


def _against(rival: str, use: str, results: Sequence[ChunkedResult]) -> list[str]:
    """How one use of all workloads compares with the rival that the goals name."""
    points = []
    for leading, where in ((True, "axes all leading"), (False, "axes not leading")):
        chosen = [r for r in results if r.leading == leading]
        if not chosen:
            continue
        ratios = {id(r): _yardstick(r)[1].ratio for r in chosen}
        median = np.median([ratio.value for ratio in ratios.values()])
        points.append(
            f"{use.capitalize()}, {where}: {median:.2f} times the time of `{rival}` at the median "
            f"of {len(chosen)}; slower beyond the interval"
            + named(
                (r for r in chosen if ratios[id(r)].low > 1),
                lambda r, ratios=ratios: interval(ratios[id(r)]),
            )
        )
    return points


def _goals(results: Iterable[ChunkedResult]) -> list[str]:
    """Whether the example keeps to the memory and the time that it should."""
    for r in results:
        if (r.workload.name, r.use) == (EXAMPLE.name, GRADIENT):
            rival = r.ways[LAX_MAP]
            kept = r.ours.temporary_bytes < BYTES_GOAL and rival.ratio.value <= TIME_GOAL
            return [
                f"Gradient of the {EXAMPLE.name}, {r.workload.lanes} lanes in chunks of "
                f"{r.workload.chunk}: {size(r.ours.temporary_bytes)} of temporaries, with twice "
                f"the lanes {size(r.bytes_of_twice)}, where `{LAX_MAP}` takes "
                f"{size(rival.temporary_bytes)}, in {interval(rival.ratio)} times its time. The "
                f"goal, less than {size(BYTES_GOAL)} in at most {TIME_GOAL} times, is "
                + ("met" if kept else "not met")
            ]
    return []


def write(results: Sequence[ChunkedResult], folder: Path) -> list[Path]:
    """Writes `chunks.md`, and `chunks.png` if there is a curve."""
    page, picture = folder / "chunks.md", folder / "chunks.png"
    page.write_text(_page(results))
    *_, curve = _sorted(results)
    if not curve:
        return [page]
    plot(curve, picture)
    return [page, picture]


def _sorted(results: Sequence[ChunkedResult]) -> tuple[list[ChunkedResult], ...]:
    """Results of chunks, of steps, and those that make the curve over chunk sizes."""
    curve = [r for r in results if r.workload.name in CURVE]
    steps = [r for r in results if isinstance(r.workload, ScanWorkload)]
    return [r for r in results if r not in curve and r not in steps], steps, curve


def _page(results: Sequence[ChunkedResult]) -> str:
    chunks, steps, curve = _sorted(results)
    absent = (
        ""
        if any(way.name == "NetKet" for way in OF_CHUNKS)
        else "\nNetKet was not installed, and is left out: `pip install netket` first to have it "
        "measured.\n"
    )
    return f"""# {TITLE}

{made_with()}

{summary(results)}

{_curve_section(curve)}## All workloads

All ways get the same function, data, and chunk size, and run interleaved in one process. The column
`bx.vmap` shows its time, its *temporaries* (memory besides arguments and outputs), and those with
twice the lanes if they differ. Other cells show the time of `bx.vmap` over that way's, with a 95%
bootstrap interval, and that way's temporaries. Below 1, `bx.vmap` is faster.

- *forward*: the outputs for all lanes.
- *gradient*: `jax.vjp` with given cotangents.
- *value and gradient*: both, as in a training step. `lax.map` stores residuals. `bx.vmap`, and
  `lax.map` with `jax.checkpoint`, recompute them. optax and NetKet compute both at once.

`lax.map` gets axes other than the first moved to the front. optax runs `micro_vmap`, or
`microbatch` for gradients. It does not support remainders and other axes. NetKet runs
`vmap_chunked` and `vjp_chunked`. `jax.vmap` runs the whole batch.
{absent}
{_table(chunks)}

## Steps

`bx.scan` along the given axes, and `lax.scan` with those axes moved to the front and back.

{_table(steps)}
"""


def _curve_section(curve: Sequence[ChunkedResult]) -> str:
    if not curve:
        return ""
    head = ["use", "chunk", *_way_names(curve)]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for r in sorted(curve, key=lambda r: (r.workload.uses.index(r.use), r.workload.chunk)):
        cells = [r.ways.get(name) for name in head[2:]]
        rows.append(
            [
                r.use,
                str(r.workload.chunk),
                *(f"{_time(m)}, {size(m.temporary_bytes)}" if m else "" for m in cells),
            ]
        )
    return f"""## Over chunk sizes

![Time and temporaries over chunk sizes](chunks.png)

The {EXAMPLE.name}, {EXAMPLE.lanes} lanes: median time and temporaries.

{_as_markdown(rows)}

"""


def _table(results: Sequence[ChunkedResult]) -> str:
    names = _way_names(results)
    rows = [["workload", *names], ["---", *["---:"] * len(names)]]
    last = None
    for r in results:
        w = r.workload
        if w is not last:
            last = w
            batch = f"{w.lanes} steps" if isinstance(w, ScanWorkload) else f"{w.lanes} / {w.chunk}"
            axes = f"axes {', '.join(map(str, w.in_axes))} to {w.out_axes}"
            rows.append([f"**{w.name}** ({batch}, {axes})", *[""] * len(names)])
        rows.append([r.use, _own_cell(r), *(_cell(r.ways.get(n)) for n in names[1:])])
    return _as_markdown(rows) if results else "Nothing was measured."


def _way_names(results: Sequence[ChunkedResult]) -> list[str]:
    """The ways that took part in any of the results, in the order of the tables of ways."""
    found = {name for r in results for name in r.ways}
    return [way.name for way in (*OF_CHUNKS, *OF_STEPS) if way.name in found]


def _own_cell(result: ChunkedResult) -> str:
    once, twice = size(result.ours.temporary_bytes), size(result.bytes_of_twice)
    return f"{_time(result.ours)}, {once}" + (f" ({twice})" if twice != once else "")


def _cell(rival: Measured | None) -> str:
    return "" if rival is None else f"{interval(rival.ratio)}, {size(rival.temporary_bytes)}"


def _time(measured: Measured) -> str:
    return f"{1000 * measured.seconds:.3g} ms"


def _as_markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
