"""The canonical form of programs, and which results are the same in several of them."""

from __future__ import annotations

from collections.abc import Sequence

# The rules of canonical forms are registered when their modules are imported.
from batchax import _compat
from batchax.jaxprs.words import ClosedJaxpr
from batchax.programs import canonical_bodies as canonical_bodies
from batchax.programs import canonical_contractions as canonical_contractions
from batchax.programs import canonical_shapes as canonical_shapes
from batchax.programs.canonical import CanonicalProgram
from batchax.programs.canonical_values import Table


def canonical(table: Table, program: ClosedJaxpr) -> CanonicalProgram:
    """A program, read into a table."""
    return CanonicalProgram(table, _compat.without_dead(program))


def same_results(programs: Sequence[ClosedJaxpr]) -> list[bool]:
    """For each result of these programs whether all compute it alike, of the same arguments."""
    table = Table()
    outputs = [canonical(table, program).outputs for program in programs]
    return [len(set(nodes)) == 1 for nodes in zip(*outputs, strict=True)]
