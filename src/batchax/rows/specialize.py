"""Functions that need a program for each length, or for each answer to a comparison.

What padding cannot make exact, and what needs the length as a number, is staged for each length
that a row may have: then which of these programs a row runs is known when the program runs. Where
the function only asks whether a row is long (`jnp.gradient` does, to reject less than two
elements), lengths are divided by the answer, and each part has a program for any length in it, on
padded rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, eval_jaxpr

from batchax import _compat
from batchax.analysis.canonical_form import same_results
from batchax.errors import UnsupportedError
from batchax.execution.call import Call, Outputs
from batchax.execution.chunked import Chunking
from batchax.execution.devices.shards import Shards, is_sharded, with_whole_axis
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import FlatOutputs, place
from batchax.jaxprs.types import Aval, ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.named_axes import any_uses_axis
from batchax.rows.building import known_lengths
from batchax.rows.call import (
    RowCall,
    RowSize,
    SizesOf,
    as_ragged,
    index_in,
    reject_ordered,
    why_grouped,
)
from batchax.rows.dynamic_sizes import with_lengths
from batchax.rows.groups import check_constants, execute_as_arrays, kinds, place_for_lengths
from batchax.rows.index import pad_rows
from batchax.rows.layouts import flatten
from batchax.rows.padded import Row, run_padded
from batchax.rows.ragged import Ragged
from batchax.rows.sizes import (
    Sizes,
    comparison_of,
    find_found,
    has_symbols,
    is_symbolic,
    needs_number,
)

MOST_LENGTHS = 33  # programs, one for each length: that of a row without elements is one
MOST_PLACES = 2**16  # a table says which program a length has
MOST_KNOWN = 8  # programs for known lengths, one for each, where fewer serve for parts of them


def are_few(sizes: Sequence[RowSize]) -> bool:
    programs = math.prod(size.bound + 1 for size in sizes)
    return programs <= MOST_LENGTHS and not any(size.of_lanes for size in sizes)


def _padded_arguments(call: RowCall) -> list[Mapped]:
    """The lengths of rows, for each size, and the arguments, each row padded to the longest."""
    arguments = [
        Mapped(f"the lengths {size.name}", jnp.asarray(size.index.lengths), 0)
        for size in call.sizes
    ]
    for m, own in call.arguments:
        if own:
            padded = pad_rows(m.value.data, index_in(m.value, own), m.value.axis)
            m = Mapped(m.path, padded, 0)
        arguments.append(m)
    return arguments


def execute_padded(call: RowCall, chunking: Chunking | None) -> tuple[list[Any], FlatOutputs]:
    if recording.is_on():
        steps = flatten(call.staged).steps
        recording.fact("region", layout="padded", steps=steps, rows=call.noted)
    recording.found_program(call.axis, call.staged, call.mapped)
    staged, bounds = call.staged, call.bounds

    def padded_row(*values: Value) -> tuple[list[Any], FlatOutputs]:
        sizes = Sizes(bounds, dict(zip(bounds, values, strict=False)))
        rows = _run_padded_row(sizes, staged, call.sizes_of, values[len(bounds) :])
        return with_lengths(sizes, rows, call.outputs, list, call)

    rows = Call(call.axis, padded_row, _padded_arguments(call))
    outs, outputs = execute_as_arrays(rows, chunking)
    return outputs.rebuild(outs), call.outputs


def _run_padded_row(
    sizes: Sizes, program: ClosedJaxpr, sizes_of: Sequence[SizesOf], arrays: Sequence[Any]
) -> list[Row]:
    shapes = [v.aval.shape for v in program.jaxpr.invars]
    given = zip(arrays, shapes, sizes_of, strict=True)
    rows = [Row(x, shape, 0 if own else None) for x, shape, own in given]
    return run_padded(sizes, program.jaxpr, program.consts, rows)


def run_specialized(
    call: RowCall, chunking: Chunking | None, error: Exception, shards: Shards | None = None
) -> Outputs | Exception:
    """The outputs of a function of one row, by a branch for each part of the lengths.

    In a part all lengths have one answer to what the function asks, or there is one length. Rows of
    a length that the function does not take (of no elements, of which there is no greatest) have
    what ``jnp.take`` fills in for what is not there: NaN, or the least number. With `shards`, each
    device runs its own rows so, also where lengths are known: none of them groups its rows.

    Returns:
      The error of the function where lengths are known, and few, or needed as numbers: then rows
      run by length. Or where lengths are many, or the function uses the name of the axis, or
      returns what differs in kind with the length; or ``out_axes=None`` requires an output that all
      lengths share. It is the error of a part of the lengths, if a part needs them as numbers.
    """
    sizes = call.sizes
    lengths, why = AllLengths(sizes), why_grouped(error)
    by_answer = len(sizes) == 1 and not sizes[0].of_lanes
    if call.lengths_known and shards is None:
        own = np.unique(np.asarray(sizes[0].lengths))
        if not by_answer or len(own) <= MOST_KNOWN:
            return error
        parts = _parts_of_many(call, np.arange(lengths.count))
        if isinstance(parts, Exception):
            return error
        taken = [part.numbers for part in parts if part.staged is not None]
        if not np.isin(own, np.concatenate([own[:0], *taken])).all():
            return error
        return _switched(call, chunking, lengths, parts, why) or error
    parts = _parts_by_answer(call, np.arange(lengths.count), error) if by_answer else error
    run = lambda parts: _switched(call, chunking, lengths, parts, why, shards)
    outs = None if isinstance(parts, Exception) else run(parts)
    numbers = _few_lengths(call, lengths)
    if outs is None and numbers is not None:
        last = _single_parts(call, lengths, numbers[-1:])
        if last[0].staged is not None:  # or it is wrong
            outs = run([*_parts_among(call, lengths, numbers[:-1]), *last])
    return outs or (parts if isinstance(parts, Exception) else error)


def _switched(
    call: RowCall,
    chunking: Chunking | None,
    lengths: AllLengths,
    parts: Sequence[_Part],
    why: str,
    shards: Shards | None = None,
) -> Outputs | None:
    """The outputs of a call by a branch for each part of the lengths; see `run_specialized`."""
    axis, longest = call.axis, parts[-1].staged
    if longest is None:
        return None
    parts = [part.without_nothing(lengths, longest[0]) for part in parts]
    staged = [part.staged for part in parts if part.staged is not None]
    programs, outputs = [program for program, _ in staged], longest[1]
    alike = all(kinds(program) == kinds(programs[0]) for program in programs)
    if not alike or any(any_uses_axis(axis, program) for program in programs):
        return None
    if any(_compat.makes_references(program.effects) for program in programs):
        return None
    each = len(parts) == lengths.count
    if not each and any(output.spec is None for output in outputs.described):
        return None  # whether all rows have one result is not known for all lengths
    for program in programs:
        reject_ordered(program)
    check_constants([outputs for _, outputs in staged])
    sizes = call.sizes
    avals = {k: own for part in parts for k, own in part.avals().items()}
    of_groups = [lengths.of(int(part.numbers[-1])) for part in parts if part.staged is not None]
    recording.fact("groups", lengths=of_groups, rows=[sizes[0].rows], why=why, branches=True)
    results = [_Result(lengths, list(avals), own) for own in zip(*avals.values(), strict=True)]
    same = same_results(programs) if each else [False] * len(results)
    placed = [
        place_for_lengths(axis, output, result.shape, alike)
        for output, result, alike in zip(outputs.described, results, same, strict=True)
    ]
    stages_again = shards is not None and call.tells_of_mesh
    which = np.repeat(np.arange(len(parts), dtype=np.int32), [len(p.numbers) for p in parts])

    def padded_row(*values: Value) -> tuple[list[Any], FlatOutputs]:
        own, arrays = values[: len(sizes)], values[len(sizes) :]
        place = lengths.place(own)
        branch = place if each else jnp.asarray(which)[place]
        # On each device, where types tell of another mesh.
        own_parts = _staged_again(parts, call, arrays) if stages_again else parts
        branches = [_branch(part.run(call, lengths), results) for part in own_parts]
        return lax.switch(branch, branches, own, arrays), replace(outputs, described=placed)

    with _compat.named_scope(axis.name, axis.size):
        rows = Call(replace(axis, name=None), padded_row, _padded_arguments(call))
        outs, _ = execute_as_arrays(rows, chunking, shards)
    outs = [with_whole_axis(x, 0) if is_sharded(x, 0) else x for x in outs]
    return [
        result.packed(x)
        if has_symbols(result.shape)
        else place(axis, output, x, 0 if np.ndim(x) > len(result.shape) else None)
        for x, result, output in zip(outs, results, outputs.described, strict=True)
    ], outputs


Run = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""The results for a row, from its lengths and from arrays padded to the longest row."""


class AllLengths:
    """All lengths that rows may have, by number: the last are the longest."""

    def __init__(self, sizes: Sequence[RowSize]) -> None:
        self.sizes = sizes
        self._each = tuple(size.bound + 1 for size in sizes)
        self.count = math.prod(self._each)

    @cached_property
    def along(self) -> np.ndarray:
        return np.indices(self._each, np.int32).reshape(len(self.sizes), -1)

    def of(self, k: int) -> tuple[int, ...]:
        return tuple(self.along[:, k].tolist())

    def named(self, k: int) -> dict[str, int]:
        return {size.name: n for size, n in zip(self.sizes, self.of(k), strict=True)}

    def place(self, own: Sequence[Any]) -> Value:
        k = own[0]
        for count, n in zip(self._each[1:], own[1:], strict=True):
            k = k * count + n
        return k


def _takes_nothing(program: ClosedJaxpr, longest: ClosedJaxpr) -> bool:
    """Whether the program of a row without elements can be compiled, and returns what others do.

    JAX stages a Fourier transform of no elements, and fails where it is compiled.
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
    """A result for rows of all lengths."""

    def __init__(self, lengths: AllLengths, taken: list[int], avals: Sequence[Aval]) -> None:
        shapes = [getattr(aval, "shape", ()) for aval in avals]
        # The shape of an array that can hold the result of any row.
        self.bounds = tuple(map(max, *shapes)) if len(shapes) > 1 else shapes[0]
        self.dtype, self._lengths = jnp.result_type(avals[-1]), lengths
        self._tables: dict[str, np.ndarray] = {}  # what sizes come to, by number of the lengths
        self.shape = tuple(
            self._dim(axis, own, taken) for axis, own in enumerate(zip(*shapes, strict=True))
        )

    def _dim(self, axis: int, own: Sequence[int], taken: list[int]) -> Any:
        """The size of a result along an axis: a number, a size of the rows, or another size."""
        # A size that is 0 in all rows stays a size of rows.
        if len(set(own)) == 1 and (own[0] or all(size.bound for size in self._lengths.sizes)):
            return own[0]
        for size, along in zip(self._lengths.sizes, self._lengths.along, strict=True):
            if np.array_equal(along[taken], own):
                return size.symbol
        (dim,) = jax.export.symbolic_shape(f"n{axis}")
        self._tables[str(dim)] = table = np.zeros(self._lengths.count, np.int32)
        table[taken] = own
        return dim

    def padded(self, x: Value) -> jax.Array:
        room = [(0, most - d, 0) for most, d in zip(self.bounds, x.shape, strict=True)]
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # which XLA pads as numbers only
            words = jax.random.key_data(x)
            words = lax.pad(words, lax.full((), 0, words.dtype), [*room, (0, 0, 0)])
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        return lax.pad(x, lax.full((), 0, x.dtype), room)

    def missing(self) -> jax.Array:
        """What stands for the result of a row that there is none of."""
        nothing = jnp.zeros(1, self.dtype)
        filled = nothing.at[1].get(mode="fill")
        return lax.broadcast(filled, self.bounds)

    def packed(self, x: Value) -> Ragged:
        """Padded results of rows, the rows in front, as rows."""
        sizes = self._lengths.sizes
        own, table = [known_lengths(size.lengths) for size in sizes], np.asarray
        if any(x is None for x in own):  # known lengths stay known, in `jit`, too
            own, table = [size.index.lengths for size in sizes], jnp.asarray
        place = self._lengths.place(own)
        of_axes = {name: (table(values)[place], None) for name, values in self._tables.items()}
        return as_ragged(x, self.shape, sizes, (), of_axes)


def _branch(run: Run | None, results: Sequence[_Result]) -> Callable[..., list[Any]]:
    def branch(own: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        if run is None:
            return [result.missing() for result in results]
        # Numbers of Python's come out as they are written in the program.
        outs = map(jnp.asarray, run(own, arrays))
        return [result.padded(x) for result, x in zip(results, outs, strict=True)]

    return branch


MOST_PARTS = 12


@dataclass(frozen=True)
class _Part:
    """Rows of some lengths, which have one program."""

    numbers: np.ndarray  # those of the lengths, in order (`AllLengths`)
    # The function of one such row, and what describes its outputs; None if it takes none.
    staged: tuple[ClosedJaxpr, FlatOutputs] | None = None
    # For one length that function; for several, one of the length and of arrays padded to the
    # longest.
    program: ClosedJaxpr | None = None

    def without_nothing(self, lengths: AllLengths, longest: ClosedJaxpr) -> _Part:
        """This part; without a program, if that is of no elements and cannot be compiled."""
        if self.staged is None or len(self.numbers) > 1 or 0 not in lengths.of(self.numbers[0]):
            return self
        return self if _takes_nothing(self.staged[0], longest) else _Part(self.numbers)

    def avals(self) -> dict[int, list[Any]]:
        """For each number of lengths, what the function returns for such a row."""
        if self.staged is None:
            return {}
        of_row = self.staged[0].out_avals
        if len(self.numbers) == 1:
            return {int(self.numbers[0]): of_row}
        return {int(n): [_at_length(aval, n) for aval in of_row] for n in self.numbers}

    def run(self, call: RowCall, lengths: AllLengths) -> Run | None:
        """The branch of these rows; None if the function does not take them."""
        program, most = self.program, lengths.named(int(self.numbers[-1]))
        if self.staged is None or program is None:
            return None

        def run(own: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
            cropped = []
            for x, (m, sizes) in zip(arrays, call.arguments, strict=True):
                for axis, size in zip(m.value.axes, sizes, strict=True) if sizes else ():
                    x = lax.slice_in_dim(x, 0, most[size.name], axis=axis)
                cropped.append(x)
            given = cropped if len(self.numbers) == 1 else [*own, *cropped]
            return eval_jaxpr(program.jaxpr, program.consts, *given)

        return run


def _staged_again(parts: Sequence[_Part], call: RowCall, arrays: Sequence[Any]) -> list[_Part]:
    """These parts, of programs that are staged where a row is, whose `arrays` it has."""
    mapped = [
        m if own else replace(m, value=x, axis=None)
        for x, (m, own) in zip(arrays, call.arguments, strict=True)
    ]
    call = replace(call, mapped=mapped)
    lengths, again = AllLengths(call.sizes), []
    for part in parts:
        if part.staged is not None:
            single = len(part.numbers) == 1
            own = (
                _single_parts(call, lengths, part.numbers)
                if single
                else _parts_of_many(call, part.numbers)
            )
            assert not isinstance(own, Exception)
            (part,) = own
        again.append(part)
    return again


def _at_length(aval: Aval, length: int) -> jax.ShapeDtypeStruct:
    dims = [
        max(int(_compat.evaluate_size(dim, dict.fromkeys(_compat.symbols(dim), length))), 0)
        if is_symbolic(dim)
        else dim
        for dim in aval.shape
    ]
    return jax.ShapeDtypeStruct(dims, aval.dtype)


def _parts_by_answer(
    call: RowCall, lengths: np.ndarray, error: Exception
) -> list[_Part] | Exception:
    """Parts of the lengths, in each of which all questions of the function have one answer.

    An error where that cannot be: `error`, or that of a part which needs a number.
    """
    comparison = comparison_of(error)
    answers = None if comparison is None else comparison.answers()
    if answers is None or len(answers) != len(lengths):
        return error
    runs = np.split(lengths, np.flatnonzero(answers[1:] != answers[:-1]) + 1)
    if len(runs) == 1 or len(runs) > MOST_PARTS:
        return error
    parts: list[_Part] = []
    for run in runs:
        own = _single_parts(call, AllLengths(call.sizes), run) if len(run) <= 2 else None
        own = _parts_of_many(call, run) if own is None else own
        if isinstance(own, Exception):
            if len(run) > MOST_LENGTHS:
                return own if needs_number(own) else error
            # Such as rows that are shorter than the function takes, which raise its own error.
            own = _joined(_single_parts(call, AllLengths(call.sizes), run))
        parts += own
        if sum(part.staged is not None for part in parts) > MOST_PARTS:
            return error
    return parts


def _joined(parts: Sequence[_Part]) -> list[_Part]:
    """The parts of single lengths, where adjacent ones without a program are one part."""
    joined: list[_Part] = []
    for part in parts:
        if joined and part.staged is joined[-1].staged is None:
            joined[-1] = _Part(np.append(joined[-1].numbers, part.numbers))
        else:
            joined.append(part)
    return joined


def _parts_of_many(call: RowCall, lengths: np.ndarray) -> list[_Part] | Exception:
    """One part for all of the lengths, or as many as it takes; an error where that cannot be."""
    part = RowCall.of(call, lengths)
    (size,), bounds = part.sizes, part.bounds
    try:
        staged, outputs = part.staged_at((size.symbol,))
        if find_found(staged):
            return UnsupportedError("the function finds sizes")

        def padded(length: Value, *arrays: Value) -> list[Any]:
            sizes = Sizes(bounds, {size.name: length})
            return [row.value for row in _run_padded_row(sizes, staged, part.sizes_of, arrays)]

        room = Sizes(bounds, {})
        avals = [v.aval.update(shape=room.bounds_of(v.aval.shape)) for v in staged.jaxpr.invars]
        program = _compat.stage(padded, [ShapedArray((), np.dtype(np.int32)), *avals])
    except Exception as error:
        return _parts_by_answer(call, lengths, error)
    return [_Part(lengths, (staged, outputs), program)]


def _few_lengths(call: RowCall, lengths: AllLengths) -> Sequence[int] | None:
    """The numbers of the lengths that need a program, with the greatest; None if they are many."""
    sizes = call.sizes
    if not call.lengths_known:
        return range(lengths.count) if are_few(sizes) else None
    if lengths.count > MOST_PLACES or any(size.of_lanes for size in sizes):
        return None
    own = lengths.place([np.asarray(size.lengths) for size in sizes])
    numbers = np.unique([*own, lengths.count - 1]).tolist()
    return numbers if len(numbers) <= MOST_LENGTHS else None


def _parts_among(call: RowCall, lengths: AllLengths, numbers: Sequence[int]) -> list[_Part]:
    """A part for each of some lengths, and parts without a program for those between them."""
    parts: list[_Part] = []
    ends = [-1, *numbers]
    for before, number in zip(ends, [*numbers, lengths.count - 1], strict=True):
        if number > before + 1:
            parts.append(_Part(np.arange(before + 1, number)))
        parts += _single_parts(call, lengths, [number] if number in numbers else [])
    return parts


def _single_parts(call: RowCall, lengths: AllLengths, numbers: Iterable[Any]) -> list[_Part]:
    """A part for each of some lengths."""
    parts = []
    for number in numbers:
        part = _Part(np.array([number]))
        try:
            staged = call.staged_at(lengths.of(int(number)))
            part = replace(part, staged=staged, program=staged[0])
        except Exception:  # maybe no row has this length, and so the function need not take it
            pass
        parts.append(part)
    return parts
