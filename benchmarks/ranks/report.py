"""What declared ranks cost, in words and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.measure import Result
from benchmarks.ranks.measure import AUTOVMAP, BY_HAND, MERGED_BY_HAND, VECTORIZE, jax_autovmap
from benchmarks.report import how_hlo_differs, interval, made_with, named, size, table

TITLE = "bx.auto_vmap against in_axes by hand, jnp.vectorize and jax-autovmap"


def summary(results: Sequence[Result]) -> str:
    """What the numbers say, as a Markdown list."""
    points = []
    for way in (BY_HAND, MERGED_BY_HAND, VECTORIZE, AUTOVMAP):
        chosen = [replace(r, name=r.family) for r in results if r.name == f"{r.family}, {way}"]
        if not chosen:
            continue
        same = sum(r.hlo == "same" for r in chosen)
        more = [1000 * (r.ours.trace_seconds - r.other.trace_seconds) for r in chosen]
        points += [
            f"Against {way}, {len(chosen)} call{'s' * (len(chosen) > 1)}: tracing takes "
            f"{np.median([r.trace.value for r in chosen]):.2f}x the time at the median, the "
            f"difference is {min(more):.2f} to {max(more):.2f} ms; the optimised HLO is the same "
            f"for {same}"
            + named((r for r in chosen if r.hlo != "same"), how_hlo_differs, "; not for")
            + "; more equations"
            + named(
                (r for r in chosen if r.ours.equations > r.other.equations),
                lambda r: f"{r.ours.equations} against {r.other.equations}",
            )
            + "; slower beyond the interval"
            + named(
                sorted((r for r in chosen if r.run.low > 1), key=lambda r: -r.run.value),
                lambda r: f"{interval(r.run)}, HLO {r.hlo}",
            )
            + "; more temporaries"
            + named(
                (r for r in chosen if r.ours.temporary_bytes > r.other.temporary_bytes),
                lambda r: f"{size(r.ours.temporary_bytes)} against {size(r.other.temporary_bytes)}",
            )
        ]
    return "\n".join(f"- {p}." for p in points)


def write(results: Sequence[Result], folder: Path) -> list[Path]:
    """Writes `ranks.md` into `folder`."""
    page = folder / "ranks.md"
    page.write_text(_page(results))
    return [page]


def _autovmap() -> str:
    if jax_autovmap is None:
        return "jax-autovmap has none: it was not installed."
    return f"jax-autovmap is version {jax_autovmap.__version__}."


def _page(results: Sequence[Result]) -> str:
    return f"""# {TITLE}

{made_with()}

{summary(results)}

What [declared ranks](auto_vmap.md) cost: each function is called with the same arguments under
`bx.auto_vmap` and under what one would use without it. *in_axes by hand* is `jax.vmap`, nested
where there are several batch dimensions, written for that one call. `jnp.vectorize` has no figures
where an argument is a tree. {_autovmap()}

Both sides run in one process, interleaved. Ratios are batchax's median over the other, below 1
where batchax is faster, with a 95% bootstrap interval; other programs on the machine meet both
sides alike, and widen it. *Tracing* is `jax.make_jaxpr`, traced again each time, in CPU time
of its thread; the decorated function is made once. *Running* is the compiled program, on the clock.
Where the HLO is the same, a ratio of run times is noise.

Neighbouring batch dimensions that the same arguments have become one, which takes a reshape for
each argument and each output. The other ways keep them apart, and the compiled programs differ:
reshapes are free by themselves, but the compiler may find another program around them. With the
dimensions merged by hand it is the same. A product of matrices and vectors that share no batch
dimension is one product under both vmaps, with the operands the other way round under `bx.vmap`:
here that is a transposed copy of the matrices.

Counts are of equations in the jaxpr and all programs inside it, with batchax's first where they
differ. *HLO* compares the optimised programs without names and source lines; "same operations" have
another order or layout, and where the programs differ, the number of instructions follows.
*Temporaries* is what the compiled program allocates besides arguments and outputs.

{table(results)}
"""
