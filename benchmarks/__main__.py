"""The command: measure workloads, show progress, write the reports."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks import bounded, history, report
from benchmarks.around import report as around_report
from benchmarks.around.measure import measured as measured_around
from benchmarks.around.workloads import WORKLOADS as AROUND
from benchmarks.chunks import report as chunks_report
from benchmarks.chunks.measure import measured as measured_in_chunks
from benchmarks.chunks.workloads import CURVE
from benchmarks.chunks.workloads import WORKLOADS as CHUNKED
from benchmarks.cluster import report as cluster_report
from benchmarks.datasets import report as datasets_report
from benchmarks.datasets.measure import WORKLOADS as ON_DISK
from benchmarks.datasets.measure import measured as measured_on_disk
from benchmarks.devices import report as devices_report
from benchmarks.devices.measure import measured as measured_on_devices
from benchmarks.devices.workloads import WORKLOADS as ON_DEVICES
from benchmarks.divergence import report as divergence_report
from benchmarks.divergence.measure import WORKLOADS as DIVERGING
from benchmarks.divergence.measure import measured as measured_diverging
from benchmarks.libraries import report as libraries_report
from benchmarks.libraries.measure import measured as measured_of_libraries
from benchmarks.libraries.program import PROGRAMS as OF_LIBRARIES
from benchmarks.measure import FULL, QUICK, measure
from benchmarks.nests import report as nests_report
from benchmarks.nests.measure import WORKLOADS as NESTS
from benchmarks.nests.measure import measured as measured_nest
from benchmarks.ranks import report as ranks_report
from benchmarks.ranks.measure import measured as measured_with_ranks
from benchmarks.ranks.workloads import WORKLOADS as WITH_RANKS
from benchmarks.rows import report as rows_report
from benchmarks.rows.measure import measured as measured_with_rows
from benchmarks.rows.workloads import WORKLOADS as WITH_ROWS
from benchmarks.rules import report as rules_report
from benchmarks.rules.measure import measured as measured_with_rule
from benchmarks.rules.workloads import WORKLOADS as WITH_RULE
from benchmarks.search import report as search_report
from benchmarks.search.drafted import PROGRAMS as DRAFTED
from benchmarks.search.measure import measured as measured_draft
from benchmarks.slow import report as slow_report
from benchmarks.slow.measure import WORKLOADS as SLOW
from benchmarks.slow.measure import measured as measured_slow
from benchmarks.workloads import WORKLOADS


@dataclass(frozen=True)
class Part:
    """One of the benchmarks.

    Attributes:
      title: what it compares.
      workloads: what is measured, by the name that --only looks at.
      measure: ``(workload, quick) -> results``.
      line: one result on one line.
      summary: all results in words.
      write: ``(results, folder) -> files``.
      of_a_device: whether it is measured with ``--device``, too: the others are of what a CPU does,
        or of disks and processes.
      by_itself: whether it is measured only where it is named.
    """

    title: str
    workloads: dict[str, Any]
    measure: Callable[[Any, bool], Iterable[Any]]
    line: Callable[[Any], str]
    summary: Callable[[Sequence[Any]], str]
    write: Callable[[Sequence[Any], Path], Sequence[Path]]
    of_a_device: bool = False
    by_itself: bool = False


PARTS = {
    "vmap": Part(
        report.TITLE,
        {f"{w.family}: {w.name}": w for w in WORKLOADS.values()},
        lambda w, quick: [measure(w, QUICK if quick else FULL)],
        report.line,
        report.summary,
        report.write,
    ),
    "around": Part(
        around_report.TITLE,
        {f"around: {name}": w for name, w in AROUND.items()},
        measured_around,
        around_report.line,
        around_report.summary,
        around_report.write,
    ),
    "chunks": Part(
        chunks_report.TITLE,
        {f"chunks: {name}": w for name, w in (CHUNKED | CURVE).items()},
        measured_in_chunks,
        chunks_report.line,
        chunks_report.summary,
        chunks_report.write,
    ),
    "slow": Part(
        slow_report.TITLE,
        {f"slow: {name}": w for name, w in SLOW.items()},
        measured_slow,
        slow_report.line,
        slow_report.summary,
        slow_report.write,
    ),
    "rules": Part(
        rules_report.TITLE,
        {f"rules: {name}": w for name, w in WITH_RULE.items()},
        measured_with_rule,
        report.line,
        rules_report.summary,
        rules_report.write,
    ),
    "ranks": Part(
        ranks_report.TITLE,
        {f"ranks: {name}": w for name, w in WITH_RANKS.items()},
        measured_with_ranks,
        report.line,
        ranks_report.summary,
        ranks_report.write,
    ),
    "rows": Part(
        rows_report.TITLE,
        {f"rows: {name}": w for name, w in WITH_ROWS.items()},
        measured_with_rows,
        rows_report.line,
        rows_report.summary,
        rows_report.write,
    ),
    "divergence": Part(
        divergence_report.TITLE,
        {f"divergence: {name}": w for name, w in DIVERGING.items()},
        measured_diverging,
        divergence_report.line,
        divergence_report.summary,
        divergence_report.write,
        of_a_device=True,
    ),
    "nests": Part(
        nests_report.TITLE,
        {f"nests: {name}": w for name, w in NESTS.items()},
        measured_nest,
        nests_report.line,
        nests_report.summary,
        nests_report.write,
        of_a_device=True,
    ),
    "devices": Part(
        devices_report.TITLE,
        {f"devices: {name}": w for name, w in ON_DEVICES.items()},
        measured_on_devices,
        devices_report.line,
        devices_report.summary,
        devices_report.write,
    ),
    "datasets": Part(
        datasets_report.TITLE,
        {f"datasets: {name}": w for name, w in ON_DISK.items()},
        measured_on_disk,
        datasets_report.line,
        datasets_report.summary,
        datasets_report.write,
    ),
    "cluster": Part(
        cluster_report.TITLE,
        {f"cluster: {name}": w for name, w in cluster_report.WORKLOADS.items()},
        cluster_report.measure,
        cluster_report.line,
        cluster_report.summary,
        cluster_report.write,
    ),
    "bounded": Part(
        bounded.TITLE,
        {f"bounded: {name}": w for name, w in bounded.WORKLOADS.items()},
        bounded.measured,
        bounded.line,
        bounded.summary,
        bounded.write,
    ),
    "programs": Part(
        libraries_report.TITLE,
        {f"programs: {name}": program for name, program in OF_LIBRARIES.items()},
        measured_of_libraries,
        libraries_report.line,
        libraries_report.summary,
        libraries_report.write,
        by_itself=True,
    ),
    "search": Part(
        search_report.TITLE,
        {f"search: {name}": program for name, program in DRAFTED.items()},
        measured_draft,
        search_report.line,
        search_report.summary,
        search_report.write,
        by_itself=True,
    ),
}


def main(arguments: list[str] | None = None) -> list[Any]:
    """Runs the benchmarks as the command line asks; returns what was measured."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="; ".join(f"{name}: {part.title}" for name, part in PARTS.items()) + ".",
    )
    parser.add_argument(
        "part", nargs="?", choices=list(PARTS), help="default: all but programs and search"
    )
    parser.add_argument("--quick", action="store_true", help="few lanes, few repetitions")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="workloads whose name or family has this"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="where the pages and pictures go (default: docs/benchmarks for a run of everything, "
        "nowhere for --quick and --only)",
    )
    parser.add_argument(
        "--history",
        metavar="FILE",
        type=Path,
        help="adds the ratios to this file, under the commit that is checked out; pages are then "
        "written with --out only",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="the kind of device on which programs run: cpu, gpu or tpu (default: cpu). For others "
        "than cpu, what is measured are "
        + " and ".join(name for name, part in PARTS.items() if part.of_a_device)
        + ", and pages go to docs/benchmarks/DEVICE",
    )
    parser.add_argument(
        "--minutes",
        metavar="M",
        type=float,
        default=float("inf"),
        help="no workload begins later than this; the pages are of those that did",
    )
    options = parser.parse_args(arguments)
    if jax.default_backend() != options.device:
        parser.error(
            f"--device is {options.device}, and JAX runs programs on {jax.default_backend()} here: "
            "install JAX for that device, or set JAX_PLATFORMS"
        )
    elsewhere = options.device != "cpu"
    until = time.monotonic() + 60 * options.minutes
    out = options.out
    if out is None and not (options.quick or options.only or options.history):
        out = Path("docs/benchmarks") / (options.device if elsewhere else "")

    results, known, ratios = [], [], {}
    every = [
        name
        for name, part in PARTS.items()
        if (part.of_a_device or not elsewhere) and not part.by_itself
    ]
    for name in [options.part] if options.part else every:
        part = PARTS[name]
        known += part.workloads
        chosen = {
            label: work
            for label, work in part.workloads.items()
            if not options.only or any(text in label for text in options.only)
        }
        if chosen:
            labeled = _run(part, chosen, options.quick, until)
            found = [result for _, result in labeled]
            results += found
            for label, result in labeled:
                ratios |= history.ratios_in(label, result)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                print(f"Wrote {' and '.join(map(str, part.write(found, out)))}.")
    if not results:
        parser.error("no workload has that in its name. There are: " + ", ".join(known))
    if options.history is not None:
        history.append(options.history, history.run_of(ratios, report.made_with()))
    return results


def _run(part: Part, chosen: dict[str, Any], quick: bool, until: float) -> list[tuple[str, Any]]:
    start = time.monotonic()
    results = []
    print(f"{part.title}:")
    for i, (label, work) in enumerate(chosen.items(), 1):
        began = time.monotonic()
        if began > until:
            print(f"No time left: {', '.join(list(chosen)[i - 1 :])}")
            break
        for result in part.measure(work, quick):
            results.append((label, result))
            print(f"[{i:2}/{len(chosen)}] {part.line(result)} {time.monotonic() - began:6.1f} s")
            began = time.monotonic()
    print(f"\n{part.summary([result for _, result in results])}")
    print(f"Took {time.monotonic() - start:.0f} s.")
    return results


if __name__ == "__main__":
    main()
