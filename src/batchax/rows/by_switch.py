"""Rows of traced lengths whose function has no form for any length: a branch for each length.

What padding cannot make exact, such as a Fourier transform of the row, and what needs the length as
a number, such as ``jnp.linspace(0, 1, n)``, is staged for each length that a row may have. Which of
these programs a row runs is known when the program runs. There are as many as the bound of the
lengths, and so this is for small bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
from batchax.frontend.arguments import Mapped
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


def are_few(sizes: Sequence[RowSize]) -> bool:
    """Whether there may be a program for each length of rows, or for all lengths together."""
    programs = math.prod(size.bound + 1 for size in sizes)
    return programs <= MOST_LENGTHS and not any(size.of_lanes for size in sizes)


def run_by_switch(call: Call, chunking: Chunking | None) -> Outputs | None:
    """The outputs of a function of one row, by a branch for each length that a row may have.

    Rows of a length that the function does not take (of no elements, of which there is no greatest)
    have what ``jnp.take`` fills in for what is not there: NaN, or the least number.

    Args:
      call: of a function of one row, some of whose arguments are `Ragged`.
      chunking: how many rows run at a time; None for all.

    Returns:
      None if it cannot be: lengths may be too many, or the function works for none, or uses the
      name of the axis, or references, or returns arrays of other kinds for some.
    """
    mapped = call.mapped
    sizes_of, sizes = find_sizes(mapped)
    if not are_few(sizes) or not all(size.bound for size in sizes):
        return None
    lengths = AllLengths(sizes)
    staged = _staged(lambda k: stage_at(call, sizes_of, sizes, lengths.of(k)), lengths.count)
    longest = lengths.count - 1
    if longest not in staged:
        return None
    for k in [k for k in staged if 0 in lengths.of(k)]:
        if not takes_nothing(staged[k][0], staged[longest][0]):
            del staged[k]
    programs = [program for program, _ in staged.values()]
    runs = [
        _run(sizes_of, mapped, lengths.named(k), staged[k][0]) if k in staged else None
        for k in range(lengths.count)
    ]
    shapes = {k: program.out_avals for k, (program, _) in staged.items()}
    return switched(
        call, chunking, lengths, list(staged.values()), shapes, same_results(programs), runs
    )


Run = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""The results for a row of the lengths, and arrays with room for the longest, that it is given."""


def switched(
    call: Call,
    chunking: Chunking | None,
    lengths: AllLengths,
    staged: Sequence[tuple[ClosedJaxpr, FlatOutputs]],
    avals: Mapping[int, Sequence[Any]],
    same: Sequence[bool],
    runs: Sequence[Run | None],
    which: np.ndarray | None = None,
) -> Outputs | None:
    """The outputs of a call by branches, of which each row runs one.

    Args:
      call: of a function of one row.
      chunking: how many rows run at a time; None for all.
      lengths: those that rows may have.
      staged: the function for rows of some lengths, and what describes its outputs; the longest
        ones last.
      avals: for each number of lengths that the function takes, what it returns.
      same: of each result, whether all branches compute it alike.
      runs: the branches; None for rows that the function does not take.
      which: the branch of each number of lengths; None if that is the number.

    Returns:
      None if it cannot be: the function uses the name of the axis, or references, or returns arrays
      of other kinds for some rows.
    """
    axis = call.axis
    programs = [program for program, _ in staged]
    alike = all(kinds(program) == kinds(programs[0]) for program in programs)
    if not alike or any(any_uses_axis(axis, program) for program in programs):
        return None
    if any(_compat.makes_references(program.effects) for program in programs):
        return None
    for program in programs:
        refuse_order(program)
    check_constants([outputs for _, outputs in staged])
    sizes_of, sizes = find_sizes(call.mapped)
    ends = np.flatnonzero(np.diff(which, append=-1)) if which is not None else range(lengths.count)
    of_groups = [lengths.of(int(k)) for k in ends if int(k) in avals]
    recording.fact("groups", lengths=of_groups, rows=[sizes[0].rows])
    outputs = staged[-1][1]
    results = [_Result(lengths, list(avals), each) for each in zip(*avals.values(), strict=True)]
    placed = [
        place_for_lengths(axis, output, result.shape, alike)
        for output, result, alike in zip(outputs.described, results, same, strict=True)
    ]
    branches = [_branch(run, results) for run in runs]

    def padded_row(*values: Any) -> tuple[list[Any], FlatOutputs]:
        own, arrays = values[: len(sizes)], values[len(sizes) :]
        place = lengths.place(own)
        branch = place if which is None else jnp.asarray(which, np.int32)[place]
        return lax.switch(branch, branches, own, arrays), replace(outputs, described=placed)

    arguments = padded_arguments(call.mapped, sizes_of, sizes)
    with _compat.named_scope(axis.name, axis.size):
        rows = Call(replace(axis, name=None), padded_row, arguments)
        outs, _ = executed_as_arrays(rows, chunking)
    return [
        result.packed(x)
        if result.axes
        else place(axis, output, x, 0 if np.ndim(x) > len(result.shape) else None)
        for x, result, output in zip(outs, results, outputs.described, strict=True)
    ], outputs


class AllLengths:
    """All lengths that rows may have, by number: the last are the longest.

    Attributes:
      sizes: of rows.
      count: how many there are.
    """

    def __init__(self, sizes: Sequence[RowSize]) -> None:
        self.sizes = sizes
        self._each = tuple(size.bound + 1 for size in sizes)
        self.count = math.prod(self._each)
        self.along = np.indices(self._each, np.int32).reshape(len(sizes), -1)

    def of(self, k: int) -> tuple[int, ...]:
        """The lengths of that number."""
        return tuple(self.along[:, k].tolist())

    def named(self, k: int) -> dict[str, int]:
        """Those lengths by the names of sizes."""
        return {size.name: n for size, n in zip(self.sizes, self.of(k), strict=True)}

    def place(self, own: Sequence[Any]) -> Any:
        """The number of such lengths."""
        k = own[0]
        for count, n in zip(self._each[1:], own[1:], strict=True):
            k = k * count + n
        return k


def _staged(
    stage: Callable[[int], tuple[ClosedJaxpr, FlatOutputs]], count: int
) -> dict[int, tuple[ClosedJaxpr, FlatOutputs]]:
    """The program for all lengths that the function takes, by their number."""
    staged = {}
    for k in range(count - 1, -1, -1):
        try:
            staged[k] = stage(k)
        except Exception:  # maybe no row has these lengths, and so the function need not take them
            if k == count - 1:  # it is wrong
                break
    return dict(sorted(staged.items()))


def takes_nothing(program: ClosedJaxpr, longest: ClosedJaxpr) -> bool:
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
    """A result for rows of all lengths.

    Attributes:
      shape: for one row, with a symbol for what differs with the length.
      axes: those of that.
      bounds: the shape of an array that has room for that of each row.
    """

    def __init__(self, lengths: AllLengths, taken: list[int], avals: Sequence[Aval]) -> None:
        shapes = [getattr(aval, "shape", ()) for aval in avals]
        self.shape = symbolic_shape(shapes)
        self.axes = tuple(i for i, dim in enumerate(self.shape) if is_symbolic(dim))
        self.bounds = tuple(map(max, *shapes)) if len(shapes) > 1 else shapes[0]
        self.dtype, self._lengths = jnp.result_type(avals[-1]), lengths
        self._own = [self._size_of([s[at] for s in shapes], taken) for at in self.axes]

    def _size_of(self, own: Sequence[int], taken: list[int]) -> RowSize | np.ndarray:
        """What a result has along an axis: a size of the rows, or what it comes to, by number."""
        for size, along in zip(self._lengths.sizes, self._lengths.along, strict=True):
            if np.array_equal(along[taken], own):
                return size
        all_own = np.zeros(self._lengths.count, np.int32)
        all_own[taken] = own
        return all_own

    def padded(self, x: Any) -> Any:
        """The result of one row as part of an array with room for that of each."""
        room = [(0, most - d, 0) for most, d in zip(self.bounds, x.shape, strict=True)]
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # which XLA pads as numbers only
            words = jax.random.key_data(x)
            words = lax.pad(words, lax.full((), 0, words.dtype), [*room, (0, 0, 0)])
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        return lax.pad(x, lax.full((), 0, x.dtype), room)

    def missing(self) -> Any:
        """What stands for the result of a row that there is none of."""
        nothing = jnp.zeros(1, self.dtype)
        filled = nothing.at[1].get(mode="fill")
        return lax.broadcast(filled, self.bounds)

    def packed(self, x: Any) -> Ragged:
        """Padded results of rows, the rows in front, as rows."""
        bounds = tuple(self.bounds[at] for at in self.axes)
        place = self._lengths.place([size.index.lengths for size in self._lengths.sizes])
        lengths = [
            own.lengths if isinstance(own, RowSize) else jnp.asarray(own)[place]
            for own in self._own
        ]
        first = self._own[0]
        if len(lengths) == 1 and isinstance(first, RowSize):
            capacity, index = first.capacity, first.index
        else:
            capacity = len(x) * math.prod(bounds)
            index = RowIndex.of_axes(lengths, capacity, bounds)
        return Ragged(pack_rows(x, index, self.axes, capacity), lengths, bounds, axis=self.axes)


def _branch(run: Run | None, results: Sequence[_Result]) -> Callable[..., list[Any]]:
    def branch(own: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        if run is None:
            return [result.missing() for result in results]
        # Numbers of Python's come out as they are written in the program.
        outs = map(jnp.asarray, run(own, arrays))
        return [result.padded(x) for result, x in zip(results, outs, strict=True)]

    return branch


def _run(
    sizes_of: Sequence[SizesOf],
    mapped: Sequence[Mapped],
    lengths: dict[str, int],
    program: ClosedJaxpr,
) -> Run:
    """A program of rows of those lengths, on arrays with room for the longest."""

    def run(_: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        own = cropped(sizes_of, mapped, lengths, arrays)
        return eval_jaxpr(program.jaxpr, program.consts, *own)

    return run


def cropped(
    sizes_of: Sequence[SizesOf],
    mapped: Sequence[Mapped],
    lengths: Mapping[str, int],
    arrays: Sequence[Any],
) -> list[Any]:
    """Arrays with room for the longest rows, as arrays with room for rows of those lengths."""
    own = []
    for x, sizes, m in zip(arrays, sizes_of, mapped, strict=True):
        for axis, size in zip(m.value.axes, sizes, strict=True) if sizes else ():
            x = lax.slice_in_dim(x, 0, lengths[size.name], axis=axis)
        own.append(x)
    return own
