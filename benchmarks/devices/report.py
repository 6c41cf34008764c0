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
    optimised = sum(r.hlo == "same" for r in every)
    slower = [r for r in every if r.run.low > RUN_GOAL]
    traced = [r for r in every if r.trace.value > TRACE_GOAL]
    points = [
        f"{len(results)} workloads on {DEVICES} devices: the staged program is the same for "
        f"{staged}, the optimised one for {optimised}"
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

[Lanes on several devices](devices.md) against what one writes by hand: `jax.shard_map` around
`jax.vmap`, around `lax.map` with `batch_size` for chunks, around the gradient and a `psum` for a
mean gradient. Uneven batches are filled up, and cut, by hand. The devices are {DEVICES} of a CPU
(`--xla_force_host_platform_device_count`), which share its cores: run times compare the two sides,
and say nothing of scaling. For that there are FLOPs, counted in the program that one device runs,
each step of a loop as often as it runs, with 1, 2 and 4 devices.

Both sides run in one process, interleaved, on arguments that are where they are needed. Ratios are
batchax's median over the other, with a 95% bootstrap interval. *Tracing* is `jax.make_jaxpr`,
traced again each time, in CPU time of its thread: batchax stages the function, and emits the
batched operations from that. *Staged* is `bx.same_program`; *HLO* compares the optimised programs
without names and source lines. *Temporaries* is what the compiled program allocates on a device
besides arguments and outputs, batchax first.

A gradient of what `vmap` returns is that of a whole `shard_map`, which JAX takes longer to trace
than one inside, as the row by hand says, too ("of all"); gradients of each example are inside.
Chunks are cut out of the batch where they are; `lax.map` reshapes the batch, and scans that.

{table}
"""
