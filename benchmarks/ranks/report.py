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
            f"difference is {min(more):.2f} to {max(more):.2f} ms; the optimized HLO is the same "
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

Each function is called with the same arguments under `bx.auto_vmap`
([declared ranks](../guides/auto_vmap.md)) and without it. *in_axes by hand* is `jax.vmap`, nested
for several batch dimensions. `jnp.vectorize` does not support pytrees. {_autovmap()}

Both sides run interleaved in one process. Ratios are batchax's median over the other, with a 95%
bootstrap interval: below 1, batchax is faster.

- *Tracing*: `jax.make_jaxpr` of a function that was decorated before, in CPU time.
- *Running*: the compiled program. Where the HLO is the same, the ratio is noise.
- *HLO*: optimized programs without names and source lines. "same operations" differ in order or
  layout. Where programs differ, their numbers of instructions follow.
- *Equations*: those of the jaxpr and of all jaxprs inside, batchax's first where they differ.
- *Temporaries*: memory besides arguments and outputs.

`bx.auto_vmap` merges adjacent batch dimensions that the same arguments have, by reshapes. XLA may
then compile another program. With dimensions merged by hand, the program is the same. For matrices
and vectors without a common batch dimension, `bx.vmap` swaps the operands of the product. Here that
adds a transposed copy of the matrices.

{table(results)}
"""
