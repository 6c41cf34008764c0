"""Rows of traced lengths whose function asks whether a row is long: a program for each answer.

`jnp.gradient` asks, to refuse less than two elements, and so does an ``if n > 5``. Lengths are
parted by the answer, and each part has a program for any length in it, on padded rows. Which of
these a row runs is known when it runs. So there are a few programs, whatever the bound is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray, eval_jaxpr

from batchax import _compat
from batchax.execution.call import Call, Outputs
from batchax.execution.chunked import Chunking
from batchax.frontend.outputs import FlatOutputs
from batchax.jaxprs.words import ClosedJaxpr
from batchax.rows.arguments import find_sizes
from batchax.rows.by_length import stage_at
from batchax.rows.by_switch import AllLengths, Run, cropped, switched, takes_nothing
from batchax.rows.comparisons import asked_by
from batchax.rows.found_places import find_found
from batchax.rows.padded import Row, run_padded
from batchax.rows.sizes import Sizes, is_symbolic

MOST_PARTS = 12


@dataclass(frozen=True)
class _Part:
    """Rows of some lengths, which have one program.

    Attributes:
      lengths: those, in order.
      staged: the function of one such row, and what describes its outputs; None if it takes none.
      program: for one length that function; for several, one of the length and of arrays with room
        for the longest.
    """

    lengths: np.ndarray
    staged: tuple[ClosedJaxpr, FlatOutputs] | None = None
    program: ClosedJaxpr | None = None

    def avals(self) -> dict[int, list[Any]]:
        """For each length, what the function returns for a row of that length."""
        if self.staged is None:
            return {}
        of_row = self.staged[0].out_avals
        return {int(n): [_at_length(aval, n) for aval in of_row] for n in self.lengths}


def _at_length(aval: Any, length: Any) -> Any:
    dims = [
        max(int(_compat.evaluate_size(dim, dict.fromkeys(_compat.symbols(dim), length))), 0)
        if is_symbolic(dim)
        else dim
        for dim in aval.shape
    ]
    return jax.ShapeDtypeStruct(dims, aval.dtype)


def run_by_answer(call: Call, chunking: Chunking | None, error: Exception) -> Outputs | None:
    """The outputs of a function of one row, by a branch for each part of the lengths of rows.

    Rows of a length that the function does not take have what ``jnp.take`` fills in for what is not
    there: NaN, or the least number.

    Args:
      call: of a function of one row, some of whose arguments are `Ragged`.
      chunking: how many rows run at a time; None for all.
      error: why there is no program for all lengths.

    Returns:
      None if it cannot be: the function failed for another reason, or there are too many parts, or
      rows have several sizes; or the longest are not taken, or it is asked that all rows share an
      output, or branches cannot be (`switched`).
    """
    sizes_of, sizes = find_sizes(call.mapped)
    if len(sizes) != 1 or sizes[0].of_lanes or not sizes[0].bound:
        return None
    (size,) = sizes
    parts = _parts_by_answer(call, np.arange(size.bound + 1), error)
    if parts is None or parts[-1].staged is None:
        return None
    last, outputs = parts[-1].staged
    if any(output.spec is None for output in outputs.described):
        return None  # whether all rows have one result is not known for all lengths
    first = parts[0]
    if not first.lengths.any() and first.staged is not None:
        parts[0] = first if takes_nothing(first.staged[0], last) else _Part(first.lengths)

    def run_of(part: _Part) -> Run | None:
        program = part.program
        if part.staged is None or program is None:
            return None

        def run(own: Any, arrays: Any) -> list[Any]:
            arrays = cropped(sizes_of, call.mapped, {size.name: int(part.lengths[-1])}, arrays)
            given = arrays if len(part.lengths) == 1 else (*own, *arrays)
            return eval_jaxpr(program.jaxpr, program.consts, *given)

        return run

    which = np.repeat(np.arange(len(parts)), [len(part.lengths) for part in parts])
    avals = {n: of_row for part in parts for n, of_row in part.avals().items()}
    staged = [part.staged for part in parts if part.staged is not None]
    not_same = [False] * len(last.out_avals)
    runs = list(map(run_of, parts))
    return switched(call, chunking, AllLengths(sizes), staged, avals, not_same, runs, which)


def _parts_by_answer(call: Call, lengths: np.ndarray, error: Exception) -> list[_Part] | None:
    """Parts of the lengths, in each of which all questions of the function have one answer."""
    asked = asked_by(error)
    answers = None if asked is None else asked.answers()
    if answers is None or len(answers) != len(lengths):
        return None
    runs = np.split(lengths, np.flatnonzero(answers[1:] != answers[:-1]) + 1)
    if len(runs) == 1 or len(runs) > MOST_PARTS:
        return None
    parts: list[_Part] = []
    for run in runs:
        own = list(map(_part_of_one(call), run)) if len(run) <= 2 else _parts_of_many(call, run)
        if own is None or len(parts) + len(own) > MOST_PARTS:
            return None
        parts += own
    return parts


def _parts_of_many(call: Call, lengths: np.ndarray) -> list[_Part] | None:
    """One part for all of the lengths, or as many as it takes."""
    sizes_of, sizes = find_sizes(call.mapped, lengths)
    (size,) = sizes
    try:
        staged, outputs = stage_at(call, sizes_of, sizes, (size.symbol,))
        if find_found(staged):
            return None
        bounds = {size.name: size.bound}

        def padded(length: Any, *arrays: Any) -> list[Any]:
            shapes = [v.aval.shape for v in staged.jaxpr.invars]
            given = zip(arrays, shapes, sizes_of, strict=True)
            rows = [Row(x, shape, 0 if own else None) for x, shape, own in given]
            sizes = Sizes(bounds, {size.name: length})
            return [row.value for row in run_padded(sizes, staged.jaxpr, staged.consts, rows)]

        room = Sizes(bounds, {})
        avals = [v.aval.update(shape=room.bounds_of(v.aval.shape)) for v in staged.jaxpr.invars]
        program = _compat.stage(padded, [ShapedArray((), np.dtype(np.int32)), *avals])
    except Exception as error:
        return _parts_by_answer(call, lengths, error)
    return [_Part(lengths, (staged, outputs), program)]


def _part_of_one(call: Call) -> Any:
    sizes_of, sizes = find_sizes(call.mapped)

    def part_of(length: Any) -> _Part:
        lengths = np.array([length])
        try:
            staged = stage_at(call, sizes_of, sizes, (int(length),))
        except Exception:  # maybe no row has this length, and so the function need not take it
            return _Part(lengths)
        return _Part(lengths, staged, staged[0])

    return part_of
