"""All kinds of findings, dearest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from batchax.explain.explanation import Finding
from batchax.explain.findings.chunks import chunk_sizes, memory
from batchax.explain.findings.copies import repeated, transposed
from batchax.explain.findings.draft import Draft
from batchax.explain.findings.fallbacks import one_lane_after_another, rules_of_jax
from batchax.explain.findings.lanes_apart import branches, loops
from batchax.explain.findings.ragged_rows import groups, padding, spare_room
from batchax.explain.findings.slow_operations import factorisations, gathers

Kind = Callable[[Draft], Iterator[Finding]]

_TOLD_IF_DEAR: tuple[Kind, ...] = (
    branches,
    loops,
    repeated,
    transposed,
    gathers,
    factorisations,
    chunk_sizes,
    memory,
    padding,
    spare_room,
)
# What one would not expect, however little it costs.
_TOLD_ALWAYS: tuple[Kind, ...] = (rules_of_jax, one_lane_after_another, groups)

_LEAST = 1_000.0  # nanoseconds
_LEAST_SHARE = 0.01  # of what the call costs


def find_findings(draft: Draft) -> tuple[Finding, ...]:
    """What costs more than it would have to, or that one would not expect, dearest first.

    Left out is what costs less than a microsecond or than one percent of the call.
    """
    least = max(_LEAST, _LEAST_SHARE * draft.price)
    found = [f for kind in _TOLD_IF_DEAR for f in kind(draft) if f.cost >= least]
    found += [f for kind in _TOLD_ALWAYS for f in kind(draft)]
    return tuple(sorted(found, key=lambda finding: -finding.cost))
