"""The command: measure workloads, show progress, write the report."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks import report
from benchmarks.measure import FULL, QUICK, Result, measure
from benchmarks.workloads import WORKLOADS


def main(arguments: list[str] | None = None) -> list[Result]:
    """Runs the benchmarks as the command line asks; returns what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=report.TITLE)
    parser.add_argument("--quick", action="store_true", help="few lanes, few repetitions")
    parser.add_argument(
        "--only", metavar="NAME", action="append", help="workloads whose name or family has this"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="where benchmarks.md and benchmarks.png go (default: docs for a run of everything, "
        "nowhere for --quick and --only)",
    )
    options = parser.parse_args(arguments)
    chosen = [
        w
        for w in WORKLOADS.values()
        if not options.only or any(part in f"{w.family}: {w.name}" for part in options.only)
    ]
    if not chosen:
        parser.error("no workload has that in its name. There are: " + ", ".join(WORKLOADS))

    start = time.monotonic()
    results = []
    for i, workload in enumerate(chosen, 1):
        began = time.monotonic()
        result = measure(workload, QUICK if options.quick else FULL)
        results.append(result)
        print(f"[{i:2}/{len(chosen)}] {report.line(result)} {time.monotonic() - began:6.1f} s")
    print(f"\n{report.summary(results)}\nTook {time.monotonic() - start:.0f} s.")

    out = options.out
    if out is None and not options.quick and not options.only:
        out = Path("docs")
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        report.write(results, out)
        print(f"Wrote {out / 'benchmarks.md'} and {out / 'benchmarks.png'}.")
    return results


if __name__ == "__main__":
    main()
