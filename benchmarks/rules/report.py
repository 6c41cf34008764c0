"""What a rule costs, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.measure import Result
from benchmarks.report import interval, made_with, named, size, table
from benchmarks.rules.workloads import USES, WORKLOADS

TITLE = "bx.custom_vmap against the function without a rule"


def summary(results: Sequence[Result]) -> str:
    """What the numbers say, as a Markdown list."""
    points = []
    for use in USES:
        chosen = [r for r in results if r.name == f"{r.family}, {use}"]
        if chosen:
            more = [1000 * (r.ours.trace_seconds - r.other.trace_seconds) for r in chosen]
            points.append(
                f"Tracing, {use}: {np.median([r.trace.value for r in chosen]):.2f}x the time "
                f"at the median of {len(chosen)}, {min(more):.2f} to {max(more):.2f} ms more"
            )
    for loops, what in ((False, "Straight-line functions"), (True, "Functions with a loop")):
        chosen = [r for r in results if WORKLOADS[r.family].loops == loops]
        if chosen:
            same = sum(r.hlo == "same" for r in chosen)
            slower = sorted((r for r in chosen if r.run.low > 1), key=lambda r: -r.run.value)
            larger = [r for r in chosen if r.ours.temporary_bytes > r.other.temporary_bytes]
            points.append(
                f"{what}: the optimised HLO is the same for {same} of {len(chosen)}; slower beyond "
                "the interval"
                + named(slower, lambda r: interval(r.run))
                + "; more temporaries"
                + named(
                    larger,
                    lambda r: (
                        f"{size(r.ours.temporary_bytes)} against {size(r.other.temporary_bytes)}"
                    ),
                )
            )
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes `rules.md` into `folder`."""
    page = folder / "rules.md"
    page.write_text(_page(results))
    return [page]


def _page(results: Sequence[Result]) -> str:
    return f"""# {TITLE}

{made_with()}

{summary(results)}

What [a batching rule of your own](custom_rules.md) costs by itself: the rule does what `bx.vmap`
would have done, so both sides compute the same, from the same data, in one process, interleaved.
Ratios are the median with the rule over that without, below 1 where the rule is faster, with a 95%
bootstrap interval; what else the machine does meets both sides alike, and widens it. (LAPACK has
separate threads: on a busy machine ratios of *linear solve* vary from run to run by more than
their intervals.) *Tracing* is
tracing and lowering (`jax.jit(...).lower`), again each time, in CPU time of its thread.
*Running* is the compiled program, on the clock.

- *call*, *gradient*: of one example, which no rule has a part in;
- *vmap*, *gradient of vmap*: of all lanes, and of the sum of their results;
- *vmap of gradient*: by the argument of which each lane has its own;
- *vmap of gradient by what is shared*: by the other one. Each lane has its own cotangent of it; the
  rule is run on one lane where that shares expensive work, else as if each had its own argument;
- *vmap of tangents*: in the direction of the argument of which each lane has its own.

Gradients and tangents come with the value. A call that is differentiated computes the function
again from its arguments: of straight-line operations the compiler finds those that occur twice, and
keeps one; a loop it keeps twice. In the gradient of a vmap there is no call any more, but what the
rule has made of it.

Counts are of equations in the jaxpr and all programs inside it, with the rule first where they
differ. *HLO* compares the optimised programs without names and source lines; where they differ,
the number of instructions follows. *Temporaries* is what the compiled program allocates besides
arguments and outputs.

{table(results)}
"""
