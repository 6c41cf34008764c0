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
                f"{what}: the optimized HLO is the same for {same} of {len(chosen)}; slower beyond "
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

The rule does what `bx.vmap` would have done, so both sides compute the same. They run interleaved
in one process. Ratios are times with [the rule](../guides/custom_rules.md) over those without, with
a 95% bootstrap interval: below 1, the rule is faster. LAPACK has separate threads, so *linear
solve* varies by more than its intervals.

- *call*, *gradient*: one example, where the rule does not run.
- *vmap*, *gradient of vmap*: all lanes, and the gradient of the sum of their results.
- *vmap of gradient*: with respect to the batched argument.
- *vmap of gradient by what is shared*: with respect to the unbatched argument. The rule runs on one
  lane where that shares expensive work.
- *vmap of tangents*: in the direction of the batched argument.

Gradients and tangents come with the value. A differentiated call recomputes the function. XLA
merges repeated straight-line operations, but not repeated loops. In the gradient of a vmap, the
operations of the rule have replaced the call.

*Tracing* is `jax.jit(...).lower`, in CPU time. *Running* is the compiled program. *Equations* are
those of the jaxpr and of all jaxprs inside, with the rule first where they differ. *HLO* compares
optimized programs without names and source lines. Where they differ, their numbers of instructions
follow. *Temporaries* are memory besides arguments and outputs.

{table(results)}
"""
