"""Rows of traced lengths whose function has no form for any length: a branch for each length.

What padding cannot make exact, such as a Fourier transform of the row, and what needs the length as
a number, such as ``jnp.linspace(0, 1, n)``, is staged for each length that a row may have. Which of
these programs a row runs is known when the program runs. There are as many as the bound of the
lengths, and so this is for small bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.execution.call import Call, Outputs
from batchax.execution.chunked import Chunking
from batchax.frontend.mapped import Mapped
from batchax.frontend.outputs import FlatOutputs, place
from batchax.jaxprs.words import Aval, ClosedJaxpr
from batchax.kernel import recording
from batchax.kernel.named_axes import any_uses_axis
from batchax.programs.canonical_form import same_results
from batchax.rows.arguments import RowSize, SizesOf, find_sizes
from batchax.rows.by_length import kinds, place_for_lengths, stage_at, symbolic_shape
from batchax.rows.groups import check_constants
from batchax.rows.host_calls import refuse_order
from batchax.rows.in_padding import executed_as_arrays, padded_arguments
from batchax.rows.index import RowIndex, pack_rows
from batchax.rows.ragged import Ragged
from batchax.rows.sizes import is_symbolic

MOST_LENGTHS = 33  # programs, one for each length: that of a row without elements is one


def are_few(size: RowSize) -> bool:
    """Whether there may be a program for each length of rows."""
    return not size.of_lanes and size.bound < MOST_LENGTHS


def run_by_switch(call: Call, chunking: Chunking | None) -> Outputs | None:
    """The outputs of a function of one row, by a branch for each length that a row may have.

    Rows of a length that the function does not take (of no elements, of which there is no greatest)
    have what ``jnp.take`` fills in for what is not there: NaN, or the least number.

    Args:
      call: of a function of one row, some of whose arguments are `Ragged`.
      chunking: how many rows run at a time; None for all.

    Returns:
      None if it cannot be: lengths may be too many, rows have several sizes, or the function works
      for none, or uses the name of the axis, or references, or returns arrays of other kinds for
      some.
    """
    axis, mapped = call.axis, call.mapped
    sizes_of, sizes = find_sizes(mapped)
    if len(sizes) != 1 or not are_few(sizes[0]):
        return None
    (size,) = sizes
    staged = _staged(lambda length: stage_at(call, sizes_of, sizes, (length,)), size.bound)
    if size.bound not in staged or not size.bound:
        return None
    if 0 in staged and not _takes_nothing(staged[0][0], staged[size.bound][0]):
        del staged[0]
    programs = [program for program, _ in staged.values()]
    alike = all(kinds(program) == kinds(programs[0]) for program in programs)
    if not alike or any(any_uses_axis(axis, program) for program in programs):
        return None
    if any(_compat.makes_references(program.effects) for program in programs):
        return None
    for program in programs:
        refuse_order(program)
    check_constants([outputs for _, outputs in staged.values()])
    recording.fact("groups", lengths=[(n,) for n in staged], rows=[size.rows])
    outputs = staged[size.bound][1]
    results = [
        _Result(size, list(staged), each)
        for each in zip(*(program.out_avals for program in programs), strict=True)
    ]
    placed = [
        place_for_lengths(axis, output, result.shape, same)
        for output, result, same in zip(
            outputs.described, results, same_results(programs), strict=True
        )
    ]
    branches = [
        _branch(sizes_of, mapped, n, staged[n][0] if n in staged else None, results)
        for n in range(size.bound + 1)
    ]

    def padded_row(length: Any, *arrays: Any) -> tuple[list[Any], FlatOutputs]:
        return lax.switch(length, branches, *arrays), replace(outputs, described=placed)

    arguments = padded_arguments(mapped, sizes_of, sizes)
    with _compat.named_scope(axis.name, axis.size):
        rows = Call(replace(axis, name=None), padded_row, arguments)
        outs, _ = executed_as_arrays(rows, chunking)
    return [
        result.packed(x)
        if result.axes
        else place(axis, output, x, 0 if np.ndim(x) > len(result.shape) else None)
        for x, result, output in zip(outs, results, outputs.described, strict=True)
    ], outputs


def _staged(
    stage: Callable[[int], tuple[ClosedJaxpr, FlatOutputs]], bound: int
) -> dict[int, tuple[ClosedJaxpr, FlatOutputs]]:
    """The program for each length that the function takes, by length."""
    staged = {}
    for length in range(bound, -1, -1):
        try:
            staged[length] = stage(length)
        except Exception:  # maybe no row has this length, and so the function need not take it
            if length == bound:  # it is wrong
                break
    return dict(sorted(staged.items()))


def _takes_nothing(program: ClosedJaxpr, longest: ClosedJaxpr) -> bool:
    """Whether the program of a row without elements can be compiled, and returns what others do.

    JAX stages a Fourier transform of no elements, and fails where it is compiled; and a Python loop
    over none may return a number of Python's.
    """
    if kinds(program) != kinds(longest):
        return False
    types = [v.aval for v in program.jaxpr.invars]
    consts = list(map(jax.typeof, program.consts))
    run = lambda consts, *xs: eval_jaxpr(program.jaxpr, consts, *xs)
    shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in (*consts, *types)]
    try:
        jax.jit(run).lower(shapes[: len(consts)], *shapes[len(consts) :])
    except Exception:
        return False
    return True


class _Result:
    """A result for rows of each length.

    Attributes:
      shape: for one row, with a symbol for what differs with the length.
      axes: those of that.
      bounds: the shape of an array that has room for that of each row.
    """

    def __init__(self, size: RowSize, lengths: Sequence[int], avals: Sequence[Aval]) -> None:
        shapes = [getattr(aval, "shape", ()) for aval in avals]
        self.shape = symbolic_shape(shapes)
        self.axes = tuple(i for i, dim in enumerate(self.shape) if is_symbolic(dim))
        self.bounds = tuple(map(max, *shapes)) if len(shapes) > 1 else shapes[0]
        self.aval, self._size = avals[-1], size
        self._own = [np.zeros(size.bound + 1, np.int32) for _ in self.axes]
        for own, at in zip(self._own, self.axes, strict=True):
            own[list(lengths)] = [shape[at] for shape in shapes]

    def padded(self, x: Any) -> Any:
        """The result of one row as part of an array with room for that of each."""
        room = [(0, most - d, 0) for most, d in zip(self.bounds, x.shape, strict=True)]
        return lax.pad(x, lax.full((), 0, x.dtype), room)

    def missing(self) -> Any:
        """What stands for the result of a row that there is none of."""
        nothing = jnp.zeros(1, self.aval.dtype)
        filled = nothing.at[1].get(mode="fill")
        return lax.broadcast(filled, self.bounds)

    def packed(self, x: Any) -> Ragged:
        """Padded results of rows, the rows in front, as rows."""
        size, bounds = self._size, tuple(self.bounds[at] for at in self.axes)
        lengths = [
            size.lengths
            if np.array_equal(own, np.arange(size.bound + 1))
            else jnp.asarray(own)[size.index.lengths]
            for own in self._own
        ]
        same = len(lengths) == 1 and lengths[0] is size.lengths
        capacity = size.capacity if same else size.rows * math.prod(bounds)
        index = size.index if same else RowIndex.of_axes(lengths, capacity, bounds)
        axis = self.axes if len(bounds) > 1 else self.axes[0]
        return Ragged(pack_rows(x, index, axis, capacity), lengths, bounds, axis=self.axes)


def _branch(
    sizes_of: Sequence[SizesOf],
    mapped: Sequence[Mapped],
    length: int,
    program: ClosedJaxpr | None,
    results: Sequence[_Result],
) -> Callable[..., list[Any]]:
    """What is done for a row of that length, of arrays with room for the longest."""

    def run(*arrays: Any) -> list[Any]:
        if program is None:
            return [result.missing() for result in results]
        own = []
        for x, sizes, m in zip(arrays, sizes_of, mapped, strict=True):
            for axis in m.value.axes if sizes else ():
                x = lax.slice_in_dim(x, 0, length, axis=axis)
            own.append(x)
        outs = eval_jaxpr(program.jaxpr, program.consts, *own)
        # Numbers of Python's come out as they are written in the program.
        return [result.padded(jnp.asarray(x)) for result, x in zip(results, outs, strict=True)]

    return run
