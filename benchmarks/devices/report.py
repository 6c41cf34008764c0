"""What lanes on several devices cost beside `shard_map` by hand, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.devices.measure import DEVICES, DeviceResult
from benchmarks.report import how_hlo_differs, interval, made_with, named, size

TITLE = "bx.vmap(mesh=) against shard_map by hand"
RUN_GOAL, TRACE_GOAL = 1.03, 1.1


def line(result: DeviceResult) -> str:
    """One workload on one line of a terminal."""
    return report.line(result.result)


def summary(results: Sequence[DeviceResult]) -> str:
    """What the numbers say, as a Markdown list."""
    every = [r.result for r in results]
    staged = sum(r.same for r in results)
    optimized = sum(r.hlo == "same" for r in every)
    slower = [r for r in every if r.run.low > RUN_GOAL]
    traced = [r for r in every if r.trace.value > TRACE_GOAL]
    points = [
        f"{len(results)} workloads on {DEVICES} devices: the staged program is the same for "
        f"{staged}, the optimized one for {optimized}"
        + named((r for r in every if r.hlo != "same"), how_hlo_differs, "; not for"),
        f"Slower than {RUN_GOAL}, beyond the interval" + named(slower, lambda r: interval(r.run)),
        f"Tracing takes more than {TRACE_GOAL}x the time"
        + named(
            traced,
            lambda r: (
                f"{r.trace.value:.2f}, {1000 * r.ours.trace_seconds:.1f} ms against "
                f"{1000 * r.other.trace_seconds:.1f}"
            ),
        ),
        "More temporaries"
        + named(
            (r for r in every if r.ours.temporary_bytes > r.other.temporary_bytes),
            lambda r: f"{size(r.ours.temporary_bytes)} against {size(r.other.temporary_bytes)}",
        ),
        f"Of {DEVICES} devices each computes at most "
        f"{max(r.flops[DEVICES] / r.flops[1] for r in results):.4f} of what one alone would",
    ]
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[DeviceResult], folder: Path) -> list[Path]:
    """Writes `devices.md` into `folder`."""
    page = folder / "devices.md"
    page.write_text(_page(results))
    return [page]


def _page(results: Sequence[DeviceResult]) -> str:
    heads = ["workload", "tracing", "running", "staged", "HLO", "temporaries"]
    heads += [f"FLOPs of one of {n}" for n in results[0].flops]
    rows = [heads, ["---"] + ["---:"] * 2 + ["---"] * 2 + ["---:"] * (len(heads) - 5)]
    for r in results:
        x = r.result
        rows.append(
            [x.name, interval(x.trace), interval(x.run), "same" if r.same else "differs", x.hlo]
            + [f"{size(x.ours.temporary_bytes)} / {size(x.other.temporary_bytes)}"]
            + [f"{flops:,.0f}" for flops in r.flops.values()]
        )
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"""# {TITLE}

{made_with()}

{summary(results)}

[`bx.vmap(mesh=)`](../guides/devices.md) is compared with `jax.shard_map` by hand: around
`jax.vmap`, around `lax.map` for chunks, and around a gradient and a `psum`. Uneven batches are
padded and cut by hand. The {DEVICES} devices share the cores of one CPU
(`--xla_force_host_platform_device_count`), so run times do not show scaling. FLOPs do: those of the
program of one device, with 1, 2, and 4 devices.

Both sides run interleaved in one process, on arguments that are in place. Ratios are batchax's
median over the other, with a 95% bootstrap interval. *Tracing* is `jax.make_jaxpr`, in CPU time.
*Staged* is `bx.same_program`. *HLO* compares optimized programs without names and source lines.
*Temporaries* are memory on a device besides arguments and outputs, batchax first.

The gradient of a whole `shard_map` takes JAX longer to trace than one inside. The row by hand
("of all") shows the same. batchax slices chunks out of the batch, and `lax.map` reshapes the batch.

{table}
"""
