"""Operations that do little for each lane, and pay for each: gathers, small factorisations."""

from __future__ import annotations

from collections.abc import Iterator

from batchax.explain.account import Finding
from batchax.explain.findings.draft import Draft
from batchax.explain.wording import count, show_flops
from batchax.kernel.recording import Record
from batchax.programs.cost import cost_of_equation
from batchax.programs.prices import SCATTERS, calls_of, windows_of
from batchax.programs.shapes import matrices_of, size_of
from batchax.programs.weights import FINDINGS
from batchax.small.table import chooses

_WRITES = SCATTERS | {"dynamic_update_slice"}
_FIRST_INDEX = dict.fromkeys(("dynamic_slice", "gather", *SCATTERS), 1)
_FIRST_INDEX["dynamic_update_slice"] = 2


def gathers(draft: Draft) -> Iterator[Finding]:
    """Slices, gathers and updates at places that differ between lanes."""
    for eqn, record in draft.walk():
        first = _FIRST_INDEX.get(eqn.primitive)
        if first is None or eqn.service != "own" or not _own_places(record, first):
            continue
        if not any(name.startswith(("gather", "scatter")) for name in eqn.emitted):
            continue
        windows, each = _windows(record)
        times = draft.lanes * _times_of_chunk(draft, record, eqn.times)
        number = round(windows * times)
        writes = eqn.primitive in _WRITES
        became = "scatter" if writes else "gather"
        yield Finding(
            f"{became} at places of each lane",
            f"`{eqn.primitive}` {'writes' if writes else 'reads'} at other places in each of "
            f"{count(draft.lanes, 'lane')}: a {became} of {count(number, 'window')} of "
            f"{count(each, 'element')}.",
            _remedy_of_gather(eqn.primitive, windows, each, writes),
            eqn.number,
            times * FINDINGS.time(cost_of_equation(record.eqn)),
        )


def _own_places(record: Record, first: int) -> bool:
    end = first + 1 if not record.eqn.primitive.name.startswith("dynamic") else None
    return any(a is not None for a in record.in_axes[first:end])


def _windows(record: Record) -> tuple[int, int]:
    """How many windows one lane reads or writes, and the elements of each."""
    eqn, windows = record.eqn, windows_of(record.eqn)
    name = eqn.primitive.name
    moved = eqn.invars[1 if name == "dynamic_update_slice" else 2] if name in _WRITES else None
    return windows, size_of((moved or eqn.outvars[0]).aval) // max(1, windows)


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

_SMALL = 16  # rows and columns: of larger matrices the arithmetic outweighs the call
_BY_COLUMNS = 8  # up to here a loop over columns, each for all lanes, is faster


def factorisations(draft: Draft) -> Iterator[Finding]:
    """Factorisations of small matrices. Their price: a call of the library for each."""
    for eqn, record in draft.walk():
        calls = calls_of(record.eqn)
        if not calls or not record.in_axes or record.in_axes[0] is None:
            continue
        if eqn.notes.get("small_matrices") == "together":
            continue
        each, rows, columns = matrices_of(record.eqn.invars[0].aval)
        if eqn.service != "own" or eqn.primitive not in eqn.emitted or max(rows, columns) > _SMALL:
            continue
        times = draft.lanes * _times_of_chunk(draft, record, eqn.times)
        number = round(each * times)
        kept_by = eqn.notes.get("small_matrices", "")
        if draft.options.get("small_matrices") == "library":
            kept_by = "choice" if chooses.is_true(record.eqn) else "option"
        option, remedy = _FASTER.get(kept_by, ("", ""))
        otherwise = _remedy_of_factorisation(eqn.primitive, max(rows, columns))
        yield Finding(
            "factorisation of small matrices",
            f"`{eqn.primitive}` of {number:,} matrices of {rows} x {columns}: a call of a library "
            f"for each, for {show_flops(eqn.work.flops / max(1, number))} of arithmetic.",
            remedy or otherwise,
            eqn.number,
            times * calls * FINDINGS.call,
            advice={"small_matrices": option} if option else {},
            otherwise=otherwise if option else "",
        )


# What makes it faster, by why the library runs: the option, or results that are read.
_FASTER = {
    "option": ("auto", 'Leave small_matrices="library" out.'),
    "choice": (
        "vectorized",
        'If any signs and bases of vectors are right, pass small_matrices="vectorized".',
    ),
}


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
    chunks = max(1, draft.each // size) if isinstance(size, int) and size else 1
    return max(1.0, (times or 1) / chunks)
