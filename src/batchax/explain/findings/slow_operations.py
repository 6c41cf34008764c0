"""Operations that do little for each lane, and pay for each: gathers, small factorisations."""

from __future__ import annotations

import math
from collections.abc import Iterator

from batchax.explain.account import Finding
from batchax.explain.findings.draft import Draft
from batchax.explain.wording import count, show_flops
from batchax.kernel.recording import Record
from batchax.programs.shapes import matrices_of, size_of

# Nanoseconds of a window, and of each element in it.
_READ = 20.0
_WRITTEN = 30.0
_ELEMENT = 1.0

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
            _remedy_of_gather(eqn.primitive, windows, each, writes),
            eqn.number,
            number * ((_WRITTEN if writes else _READ) + _ELEMENT * each),
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


def _remedy_of_gather(name: str, windows: int, each: int, writes: bool) -> str:
    together = "slice" if not writes else "update in place"
    remedy = (
        "If the places are the same in all lanes, compute them from arguments with in_axes=None: "
        f"it is one {together} for all of them then."
    )
    if windows > 1 and each == 1 and not writes:
        remedy += " If they follow one another, take them with one jax.lax.dynamic_slice."
    if windows > 1 and writes and name.startswith("scatter"):
        remedy += " If no lane writes twice to one place, say so with unique_indices=True."
    return remedy


# --- factorisations ----------------------------------------------------------------------------

# Nanoseconds of one for a matrix of a few rows, nearly all of them for the call.
_CALL = {
    "cholesky": 100.0,
    "eig": 2_000.0,
    "eigh": 1_000.0,
    "geqrf": 200.0,
    "hessenberg": 500.0,
    "householder_product": 200.0,
    "lu": 200.0,
    "qr": 400.0,
    "schur": 2_000.0,
    "svd": 1_500.0,
    "triangular_solve": 100.0,
    "tridiagonal": 500.0,
}
_SMALL = 16  # rows and columns
_BY_COLUMNS = 8  # up to here a loop over columns, each for all lanes, is faster


def factorisations(draft: Draft) -> Iterator[Finding]:
    """Factorisations of small matrices. Their price: a call of the library for each."""
    for eqn, record in draft.walk():
        if eqn.primitive not in _CALL or not record.in_axes or record.in_axes[0] is None:
            continue
        each, rows, columns = matrices_of(record.eqn.invars[0].aval)
        if eqn.service != "own" or eqn.primitive not in eqn.emitted or max(rows, columns) > _SMALL:
            continue
        number = round(each * draft.lanes * _times_of_chunk(draft, record, eqn.times))
        yield Finding(
            "factorisation of small matrices",
            f"`{eqn.primitive}` of {number:,} matrices of {rows} x {columns}: a call of a library "
            f"for each, for {show_flops(eqn.work.flops / max(1, number))} of arithmetic.",
            _remedy_of_factorisation(eqn.primitive, max(rows, columns)),
            eqn.number,
            number * _CALL[eqn.primitive],
        )


def _remedy_of_factorisation(name: str, rows: int) -> str:
    shared = (
        "If the matrices are the same in all lanes, compute them from arguments with in_axes=None"
    )
    if name in ("cholesky", "triangular_solve") and rows <= _BY_COLUMNS:
        return (
            f"{shared}. If not, write it as a Python loop over columns: under vmap each of its "
            "operations is for all lanes, and there are no calls."
        )
    if name == "lu" and rows <= _BY_COLUMNS:
        return (
            f"{shared}. If they are symmetric and positive definite, use a Cholesky factorisation: "
            "it costs half, and as a Python loop over columns it has no calls."
        )
    if rows <= 2:
        return f"{shared}. If not, there is a formula: written out, it has no calls."
    return f"{shared}: they are factorised once then."


def _times_of_chunk(draft: Draft, record: Record, times: int | None) -> float:
    """How often each lane does what is done `times` times, once for each chunk among them."""
    size = record.axis.size
    chunks = max(1, draft.lanes // size) if isinstance(size, int) and size else 1
    return max(1.0, (times or 1) / chunks)
