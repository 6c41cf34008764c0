"""Ratios over commits: a file with a line for each run, and a page that charts them.

What is kept are ratios of what runs in one process in turns: seconds of two nights, on two
machines, say nothing of a commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import json
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.measure import Ratio

BEFORE = 10  # runs that the latest is compared with
MARGIN = 1.1  # beyond which a change is told: nights differ by less on one machine


@dataclass(frozen=True)
class Run:
    """What the benchmarks of one commit came to.

    Attributes:
      commit: its hash.
      date: when it was measured, as ISO 8601 has it.
      made_with: how, with what and where.
      ratios: by what was measured.
    """

    commit: str
    date: str
    made_with: str
    ratios: dict[str, Ratio] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One measurement over all runs.

    Attributes:
      name: of what was measured.
      points: the run, by its place in the history, and the ratio.
    """

    name: str
    points: Sequence[tuple[int, Ratio]]

    @property
    def usual(self) -> float:
        """The median of the runs before the latest; where there is none, the latest."""
        *before, latest = [ratio.value for _, ratio in self.points]
        return statistics.median(before[-BEFORE:] or [latest])

    @property
    def change(self) -> float:
        """The latest over what is usual."""
        return self.points[-1][1].value / self.usual

    @property
    def verdict(self) -> str:
        """Whether the latest's interval is "slower" or "faster" by the margin, or neither: ""."""
        latest = self.points[-1][1]
        if latest.low > self.usual * MARGIN:
            return "slower"
        return "faster" if latest.high < self.usual / MARGIN else ""


def ratios_in(name: str, result: Any) -> dict[str, Ratio]:
    """All ratios in a result of a benchmark, whatever it is made of, each with a name."""
    own = getattr(result, "name", name)
    return dict(_ratios_in(name if own in name else f"{name}: {own}", result))


def _ratios_in(name: str, x: Any) -> Iterator[tuple[str, Ratio]]:
    if isinstance(x, Ratio):
        yield name, x
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from _ratios_in(f"{name}, {key}", value)
    elif dataclasses.is_dataclass(x):
        for each in dataclasses.fields(x):
            yield from _ratios_in(f"{name}, {each.name}", getattr(x, each.name))


def append(file: Path, run: Run) -> None:
    """Adds a run as the last line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    ratios = {name: [r.value, r.low, r.high] for name, r in run.ratios.items()}
    with open(file, "a") as opened:
        opened.write(json.dumps({**vars(run), "ratios": ratios}) + "\n")


def read(file: Path) -> list[Run]:
    """All runs, the oldest first; of those of one commit the last one."""
    runs: dict[str, Run] = {}
    for line in file.read_text().splitlines():
        said = json.loads(line)
        said["ratios"] = {name: Ratio(*numbers) for name, numbers in said["ratios"].items()}
        runs.pop(said["commit"], None)
        runs[said["commit"]] = Run(**said)
    return list(runs.values())


def lines_of(runs: Sequence[Run]) -> list[Line]:
    """What the latest run measured, what became slower most first."""
    found = [
        Line(name, [(i, run.ratios[name]) for i, run in enumerate(runs) if name in run.ratios])
        for name in (runs[-1].ratios if runs else ())
    ]
    order = {"slower": 0, "": 1, "faster": 2}
    return sorted(found, key=lambda line: (order[line.verdict], -line.change, line.name))


def this_commit() -> str:
    """The commit that is checked out, with a mark if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run_of(ratios: dict[str, Ratio], made_with: str) -> Run:
    """What was measured now, of the commit that is checked out."""
    return Run(this_commit(), datetime.now(UTC).isoformat(timespec="seconds"), made_with, ratios)


def page(runs: Sequence[Run]) -> str:
    """A page that opens offline, with a chart for each measurement."""
    lines = lines_of(runs)
    said = [
        f"{sum(line.verdict == word for line in lines)} {word}" for word in ("slower", "faster")
    ]
    rows = "\n".join(_row(line, runs) for line in lines)
    latest = runs[-1] if runs else Run("none", "", "")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>batchax: benchmarks over commits</title>
<style>
:root {{ color-scheme: light dark; font: 15px/1.4 system-ui, sans-serif }}
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ padding: .2rem .6rem; text-align: left; border-bottom: 1px solid #8884 }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }}
svg {{ display: block; color: #2563a8 }}
.slower {{ color: #c0392b }} .faster {{ color: #1e8449 }}
</style>
<h1>Benchmarks over commits</h1>
<p>Commits: {len(runs)}, the latest {html.escape(latest.commit)} of {html.escape(latest.date)}.
{html.escape(latest.made_with)} Against the median of the {BEFORE} commits before it:
{" and ".join(said)}, by more than {MARGIN - 1:.0%} with its whole interval.</p>
<p>Ratios are those of the benchmarks' tables, mostly batchax's time over another's; the band is
their 95% interval, the thin line 1.</p>
<table>
<tr><th>measured<th>over commits<th>latest<th>change</tr>
{rows}
</table>
</html>
"""


def _row(line: Line, runs: Sequence[Run]) -> str:
    said = f' class="number {line.verdict}"' if line.verdict else ' class="number"'
    return (
        f"<tr><td>{html.escape(line.name)}<td>{chart(line, runs)}"
        f'<td class="number">{line.points[-1][1].value:.2f}'
        f"<td{said}>{line.change - 1:+.0%}{f' {line.verdict}' if line.verdict else ''}</tr>"
    )


def chart(line: Line, runs: Sequence[Run], width: int = 320, height: int = 48) -> str:
    """One measurement over all runs, as SVG: the interval as a band, and where the ratio is 1."""
    ratios = [ratio for _, ratio in line.points]
    least = min(1.0, *(ratio.low for ratio in ratios))
    most = max(1.0, *(ratio.high for ratio in ratios), least + 1e-9)
    across = lambda i: 4 + (width - 8) * (i / max(1, len(runs) - 1))
    up = lambda value: height - 4 - (height - 8) * (value - least) / (most - least)
    at = lambda i, value: f"{across(i):.1f},{up(value):.1f}"
    band = [at(i, r.high) for i, r in line.points] + [at(i, r.low) for i, r in line.points[::-1]]
    dots = "".join(
        f'<circle cx="{across(i):.1f}" cy="{up(r.value):.1f}" r="2">'
        f"<title>{html.escape(runs[i].commit)}: {r.value:.3f} ({r.low:.3f} to {r.high:.3f})</title>"
        "</circle>"
        for i, r in line.points
    )
    return (
        f'<svg width="{width}" height="{height}" role="img" aria-label="{html.escape(line.name)}">'
        f'<path d="M4 {up(1):.1f}H{width - 4}" stroke="currentColor" opacity=".3"/>'
        f'<polygon points="{" ".join(band)}" fill="currentColor" opacity=".2"/>'
        f'<polyline points="{" ".join(at(i, r.value) for i, r in line.points)}" fill="none" '
        f'stroke="currentColor"/><g fill="currentColor">{dots}</g></svg>'
    )


def main(arguments: list[str] | None = None) -> None:
    """Writes the page beside the file of the history."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description=page.__doc__)
    parser.add_argument("file", type=Path, help="that python -m benchmarks --history wrote")
    file = parser.parse_args(arguments).file
    runs = read(file)
    file.with_suffix(".html").write_text(page(runs))
    print(f"Wrote {file.with_suffix('.html')}, of {len(runs)} commits.")
    for line in lines_of(runs):
        if line.verdict:
            print(f"{line.verdict}: {line.name}, {line.change - 1:+.0%}")


if __name__ == "__main__":
    main()
