"""Operations that do little for each lane, and pay for each: gathers, small factorisations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchax.engine.recording import Record
from batchax.explain.explanation import Finding
from batchax.explain.findings.draft import BYTE, FACTORISATION, FLOP, PLACE, Draft
from batchax.explain.wording import count, show_flops
from batchax.programs.shapes import matrices_of, size_of

_FIRST_INDEX = {"dynamic_slice": 1, "dynamic_update_slice": 2, "gather": 1}
_SCATTERS = "scatter scatter-add scatter_add scatter-sub scatter_sub scatter_mul scatter-mul"
_SCATTERS += " scatter_min scatter-min scatter_max scatter-max"
_FIRST_INDEX |= dict.fromkeys(_SCATTERS.split(), 1)
_WRITES = frozenset(["dynamic_update_slice", *_SCATTERS.split()])


def gathers(draft: Draft) -> Iterator[Finding]:
    """Slices, gathers and updates at places that differ between lanes."""
    for eqn, record in draft.walk():
        first = _FIRST_INDEX.get(eqn.primitive)
        if first is None or eqn.service != "own" or not _own_places(record, first):
            continue
        if not any(name.startswith(("gather", "scatter")) for name in eqn.emitted):
            continue
        windows, each = _windows(record)
        number = windows * draft.lanes * _times_of_chunk(draft, record, eqn.times)
        writes = eqn.primitive in _WRITES
        became = "scatter" if writes else "gather"
        yield Finding(
            f"{became} at places of each lane",
            f"`{eqn.primitive}` {'writes' if writes else 'reads'} at other places in each of "
            f"{count(draft.lanes, 'lane')}: a {became} of {count(round(number), 'window')} of "
            f"{count(each, 'element')}.",
            _remedy_of_gather(eqn.primitive, each, writes),
            eqn.number,
            number * (PLACE * (10 if writes else 1) + BYTE * 10 * each),
        )


def _own_places(record: Record, first: int) -> bool:
    end = first + 1 if not record.eqn.primitive.name.startswith("dynamic") else None
    return any(a is not None for a in record.in_axes[first:end])


def _windows(record: Record) -> tuple[int, int]:
    """How many windows one lane reads or writes, and the elements of each."""
    eqn = record.eqn
    name = eqn.primitive.name
    moved = eqn.invars[1 if name == "dynamic_update_slice" else 2] if name in _WRITES else None
    elements = size_of((moved or eqn.outvars[0]).aval)
    if name.startswith("dynamic"):
        return 1, elements
    windows = math.prod(n for n in eqn.invars[1].aval.shape[:-1] if isinstance(n, int))
    return windows, elements // max(1, windows)


def _remedy_of_gather(name: str, each: int, writes: bool) -> str:
    together = "slice" if not writes else "update in place"
    remedy = (
        "If the places are the same in all lanes, compute them from arguments with in_axes=None: "
        f"it is one {together} for all of them then."
    )
    if each == 1 and not writes:
        remedy += " If they follow one another, take them with one jax.lax.dynamic_slice."
    if writes and name.startswith("scatter"):
        remedy += " If no lane writes twice to one place, say so with unique_indices=True."
    return remedy


# --- factorisations ----------------------------------------------------------------------------

_FACTORISATIONS = frozenset(
    """
    cholesky eig eigh geqrf hessenberg householder_product lu qr schur svd triangular_solve
    tridiagonal
    """.split()
)


def factorisations(draft: Draft) -> Iterator[Finding]:
    """Factorisations of matrices so small that to call the library costs more than they do."""
    for eqn, record in draft.walk():
        if eqn.primitive not in _FACTORISATIONS or record.in_axes[0] is None:
            continue
        if eqn.service != "own" or eqn.primitive not in eqn.emitted:
            continue
        each, rows, columns = matrices_of(record.eqn.invars[0].aval)
        number = each * draft.lanes * _times_of_chunk(draft, record, eqn.times)
        flops = eqn.work.flops / max(1, number)
        if FLOP * flops > FACTORISATION:
            continue
        yield Finding(
            "factorisation of small matrices",
            f"`{eqn.primitive}` of {count(round(number), 'matrix').replace('matrixs', 'matrices')} "
            f"of {rows} x {columns}, {show_flops(flops)} each, by a call of a library for each of "
            "them, which costs more than that.",
            "If matrices are the same in all lanes, compute them from arguments with in_axes=None. "
            + (
                "If not, write out the formula, element by element: under vmap each operation is "
                "for all lanes."
                if max(rows, columns) <= 3
                else "If not, write it with a Python loop over columns, which has no call for each "
                "lane: under vmap each of its operations is for all lanes."
            ),
            eqn.number,
            number * FACTORISATION,
        )


def _times_of_chunk(draft: Draft, record: Record, times: int | None) -> float:
    """How often a lane does what is done `times` times, chunks included."""
    size = record.axis.size
    chunks = math.ceil(draft.lanes / size) if isinstance(size, int) and size else 1
    return max(1.0, (times or 1) / chunks)
