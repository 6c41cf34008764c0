"""Functions that need a program for each length, or for each answer to a comparison.

What padding cannot make exact, and what needs the length as a number, is staged for each length
that occurs, where lengths are known, or for each that a row may have, where they are traced: then
which of these programs a row runs is known when the program runs. Where the function only asks
whether a row is long (`jnp.gradient` does, to reject less than two elements), lengths are divided
by the answer, and each part has a program for any length in it, on padded rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, eval_jaxpr

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.call import Call, Outputs, apply_passes, execute
from batchax.execution.chunked import Chunking
from batchax.execution.on_devices import chunk_lanes
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import (
    AUTO,
    FlatOutputs,
    OutputArray,
    check_unbatched,
    place,
)
from batchax.frontend.rows import Layout
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, move_axis
from batchax.kernel.inner import stage_described
from batchax.kernel.named_axes import any_uses_axis
from batchax.programs.canonical_form import same_results
from batchax.rows.arguments import (
    RowSize,
    SizesOf,
    all_known,
    find_sizes,
    index_in,
    row_avals,
    sizes_in_errors,
)
from batchax.rows.buckets import Placed, check_constants, groups_of, in_front, run_in_groups
from batchax.rows.building import known_lengths
from batchax.rows.call import RowCall, place_ragged, refuse_order, why_grouped
from batchax.rows.dynamic_sizes import with_lengths
from batchax.rows.index import RowIndex, pack_rows, pad_rows
from batchax.rows.layouts import flatten
from batchax.rows.numpy_patches import rows_of_one_length
from batchax.rows.padded import Row, run_padded
from batchax.rows.ragged import Ragged
from batchax.rows.sizes import Sizes, asked_by, find_found, is_symbolic
from batchax.rules.calls import calls_library


def executed_as_arrays(call: Call, chunking: Chunking | None) -> tuple[list[Any], FlatOutputs]:
    """What a call of arrays returns that stands for rows, so many of them at a time.

    A padded row is computed by a program that was staged for one mesh, so it stays where it is.
    """
    return execute(apply_passes([chunk_lanes(chunking, where_types_say=False)], call))


def padded_arguments(
    mapped: Sequence[Mapped], sizes_of: Sequence[SizesOf], sizes: Sequence[RowSize]
) -> list[Mapped]:
    """The lengths of rows, for each size, and the arguments, each row padded to the longest."""
    arguments = [
        Mapped(f"the lengths {size.name}", jnp.asarray(size.index.lengths), 0) for size in sizes
    ]
    for m, own in zip(mapped, sizes_of, strict=True):
        if own:
            padded = pad_rows(m.value.data, index_in(m.value, own), m.value.axis)
            m = Mapped(m.path, padded, 0)
        arguments.append(m)
    return arguments


def execute_padded(call: RowCall, chunking: Chunking | None) -> tuple[list[Any], FlatOutputs]:
    """What a call returns, each of whose rows is padded to the longest."""
    if recording.is_on():
        steps = flatten(call.staged).steps
        recording.fact("region", layout=Layout.PADDED, steps=steps, rows=call.noted)
    recording.found_program(call.axis, call.staged, call.mapped)
    staged, bounds = call.staged, call.bounds
    shapes = [v.aval.shape for v in staged.jaxpr.invars]

    def padded_row(*values: Any) -> tuple[list[Any], FlatOutputs]:
        lengths = dict(zip(bounds, values, strict=False))
        arguments = [
            Row(x, shape, 0 if own else None)
            for x, shape, own in zip(values[len(bounds) :], shapes, call.sizes_of, strict=True)
        ]
        sizes = Sizes(bounds, lengths)
        rows = run_padded(sizes, staged.jaxpr, staged.consts, arguments)
        return with_lengths(sizes, rows, call.outputs, list, call)

    arguments = padded_arguments(call.mapped, call.sizes_of, call.sizes)
    outs, outputs = executed_as_arrays(Call(call.axis, padded_row, arguments), chunking)
    return outputs.rebuild(outs), call.outputs


Lengths = tuple[Any, ...]
"""The length of a row, for each of the sizes that rows have: a number, or a symbol."""


def group_by_length(call: Call, chunking: Chunking | None, why: str = "") -> Outputs:
    """The outputs of a function of one row, by a batch for each length of rows.

    Args:
      call: of a function of one row, some of whose arguments are `Ragged`.
      chunking: how many rows of one length run at a time; None for all.
      why: Why rows of any length cannot run together, if they cannot.

    Raises:
      UnsupportedError: lengths are traced; or the function uses the name of the axis, which
        stands for all rows; or outputs are of different kinds for different lengths.
      AxisError: `out_axes` asks for what an output cannot be.
    """
    axis, one_row, mapped = call.axis, call.function, call.mapped
    _check_known(mapped)
    sizes_of, sizes = find_sizes(mapped)
    groups, lengths = _groups_and_lengths(axis, sizes)
    recording.fact(
        "groups", lengths=lengths, rows=[len(rows) for rows in groups], why=why, branches=False
    )
    stage = functools.partial(stage_at, call, sizes_of, sizes)
    staged = [stage(at) for at in lengths]
    programs, outputs = [program for program, _ in staged], staged[-1][1]
    described = outputs.described
    _check_programs(axis, programs, lengths)
    if len(groups) > 1:
        for program in programs:
            refuse_order(program)
    check_constants([each for _, each in staged])
    for at in _more_lengths(lengths):
        try:
            more, _ = stage(at)
        except Exception:  # no row has this length, so the function need not work for it
            continue
        if kinds(more) == kinds(programs[0]):
            programs.append(more)
    shapes = [symbolic_shape(kind) for kind in zip(*map(_shapes, programs), strict=True)]
    of_groups = [
        place_for_lengths(axis, output, shape, same)
        for output, shape, same in zip(described, shapes, same_results(programs), strict=True)
    ]

    def one_row_in_group(*values: Any) -> tuple[list[Any], FlatOutputs]:
        arrays, outputs = one_row(*values)
        return arrays, replace(outputs, described=of_groups)

    def run_group(g: int, group: Axis, part: list[Mapped]) -> tuple[list[Placed], FlatOutputs]:
        arrays = Call(group, one_row_in_group, list(map(_dense, part)))
        outs, _ = executed_as_arrays(arrays, chunking)
        return [_of_group(group, x, shape) for x, shape in zip(outs, shapes, strict=True)], outputs

    # What the name of the axis stands for is all rows, in each of the groups.
    with _compat.named_scope(axis.name, axis.size):
        nameless = replace(axis, name=None)
        in_turn = any(calls_library(program.jaxpr) for program in programs)
        outs, _ = run_in_groups(nameless, mapped, groups, run_group, in_turn)
    return [
        x if isinstance(x, Ragged) else place(axis, output, x, position)
        for (x, position), output in zip(outs, described, strict=True)
    ], outputs


def stage_at(
    call: Call, sizes_of: Sequence[SizesOf], sizes: Sequence[RowSize], at: Lengths
) -> tuple[ClosedJaxpr, FlatOutputs]:
    axis, mapped = call.axis, call.mapped
    avals = row_avals(axis, mapped, sizes_of, sizes, at)
    with rows_of_one_length(axis.name), sizes_in_errors(mapped, sizes_of, sizes):
        return stage_described(axis, call.function, avals, [m.path for m in mapped])


def _check_known(mapped: Sequence[Mapped]) -> None:
    if not all_known(mapped):
        raise UnsupportedError(
            "the function needs rows grouped by their length, and the lengths are traced here: "
            "call it outside of jit, or close over the Ragged so that its lengths are known."
        )


def _groups_and_lengths(
    axis: Axis, sizes: Sequence[RowSize]
) -> tuple[list[np.ndarray], list[Lengths]]:
    if not axis.size:  # a group of no rows, for what the outputs are
        return [np.zeros(0, np.int32)], [tuple(size.bound for size in sizes)]
    lengths = [np.asarray(size.lengths) for size in sizes]
    groups = groups_of(*lengths)
    return groups, [tuple(int(x[rows[0]]) for x in lengths) for rows in groups]


def _more_lengths(lengths: Sequence[Lengths]) -> Iterator[Lengths]:
    """Lengths that no row has, to see how outputs change: longer ones, one size at a time."""
    longest = lengths[-1]
    for i, n in enumerate(longest):
        for longer in (n + 1, 2 * n + 16):
            yield (*longest[:i], longer, *longest[i + 1 :])


def _shapes(program: ClosedJaxpr) -> list[tuple[int, ...]]:
    return [getattr(aval, "shape", ()) for aval in program.out_avals]


def kinds(program: ClosedJaxpr) -> list[Any]:
    return [
        (getattr(aval, "dtype", None), len(shape))
        for aval, shape in zip(program.out_avals, _shapes(program), strict=True)
    ]


def _check_programs(
    axis: Axis,
    programs: Sequence[ClosedJaxpr],
    lengths: Sequence[Lengths],
) -> None:
    for program, at in zip(programs, lengths, strict=True):
        if kinds(program) != kinds(programs[0]):
            raise UnsupportedError(
                "the function returns "
                f"{', '.join(a.str_short() for a in programs[0].out_avals) or 'nothing'} for a row "
                f"of length {_shown(lengths[0])}, and "
                f"{', '.join(a.str_short() for a in program.out_avals) or 'nothing'} for one of "
                f"length {_shown(at)}. Let it return the same number of arrays, of the same dtypes "
                "and numbers of axes, for each row."
            )
        if any_uses_axis(axis, program):
            raise UnsupportedError(
                f"the function uses the axis {axis.name!r}, whose lanes are all rows, but it can "
                "only run for rows of one length at a time. Compute what rows share outside of "
                "this vmap, or reduce over them with out_axes=batchax.Reduce(...)."
            )


def _shown(at: Lengths) -> str:
    return " and ".join(map(str, at))


def symbolic_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[Any, ...]:
    """The shape of an output for each row, with a symbol for what differs with the length."""
    (n,) = jax.export.symbolic_shape("n")
    return tuple(dims[0] if len(set(dims)) == 1 else n for dims in zip(*shapes, strict=True))


def place_for_lengths(
    axis: Axis, output: OutputArray, shape: tuple[Any, ...], same: bool
) -> OutputArray:
    """Where an output goes in each group; `same`, if programs of all lengths compute it alike."""
    output = in_front(place_ragged(output, shape))
    shared = output.spec is None or output.spec is AUTO
    if not shared or same:
        return output
    check_unbatched(axis, [output], [0])
    return replace(output, spec=0)


def _dense(m: Mapped) -> Mapped:
    """Rows of one length, all at the bound, as an array with the rows in front."""
    if not isinstance(m.value, Ragged):
        return m
    x, at, axes = m.value.data, m.value.element_axis, m.value.axes
    x = x.reshape(*x.shape[:at], len(m.value), *m.value.each_bound, *x.shape[at + 1 :])
    together = range(at + 1, at + 1 + len(axes))
    return Mapped(m.path, jnp.moveaxis(move_axis(x, at, 0), together, [k + 1 for k in axes]), 0)


def _of_group(group: Axis, x: Value, shape: tuple[Any, ...]) -> Placed:
    """An output of rows of one length."""
    ragged = [i for i, dim in enumerate(shape) if not isinstance(dim, int)]
    if not ragged:
        return x, 0 if np.ndim(x) > len(shape) else None
    at, count = ragged[0], len(ragged)
    sizes = [x.shape[k + 1] for k in ragged]
    x = jnp.moveaxis(x, [0, *(k + 1 for k in ragged)], range(at, at + count + 1))
    flat = x.reshape(*x.shape[:at], group.size * math.prod(sizes), *x.shape[at + count + 1 :])
    lengths = [np.full(group.size, size, np.int32) for size in sizes]
    return Ragged(flat, lengths, tuple(sizes), axis=tuple(ragged)), 0


MOST_LENGTHS = 33  # programs, one for each length: that of a row without elements is one


def are_few(sizes: Sequence[RowSize]) -> bool:
    """Whether there may be a program for each length of rows, or for all lengths together."""
    programs = math.prod(size.bound + 1 for size in sizes)
    return programs <= MOST_LENGTHS and not any(size.of_lanes for size in sizes)


def run_specialized(call: Call, chunking: Chunking | None, error: Exception) -> Outputs | None:
    """The outputs of a function of one row, by branches of which each row runs one.

    There is a branch for each part of the lengths to which the function's questions have one
    answer; or, where it needs the length as a number, for each length.

    Rows of a length that the function does not take (of no elements, of which there is no greatest)
    have what ``jnp.take`` fills in for what is not there: NaN, or the least number.

    Args:
      call: of a function of one row, some of whose arguments are `Ragged`.
      chunking: how many rows run at a time; None for all.
      error: why there is no program for all lengths.

    Returns:
      None if it cannot be: lengths or parts may be too many, or the function works for none, or not
      for the longest; or it uses the name of the axis, or references, or returns arrays of other
      kinds for some; or it is asked that all rows share an output, which is not known of all.
    """
    sizes = find_sizes(call.mapped)[1]
    if not all(size.bound for size in sizes):
        return None
    lengths, outs, why = AllLengths(sizes), None, why_grouped(error)
    if len(sizes) == 1 and not sizes[0].of_lanes:
        parts = _parts_by_answer(call, np.arange(lengths.count), error)
        outs = None if parts is None else _switched(call, chunking, lengths, parts, why)
    if outs is None and are_few(sizes):
        part_of = _part_of_one(call, lengths)
        parts = [part_of(lengths.count - 1)]
        if parts[0].staged is not None:  # or it is wrong
            parts = [*map(part_of, range(lengths.count - 1)), *parts]
            outs = _switched(call, chunking, lengths, parts, why)
    return outs


MOST_KNOWN = 8  # programs for known lengths, one for each, where fewer serve for parts of them


def run_by_answer(call: Call, chunking: Chunking | None, error: Exception) -> Outputs | None:
    """As `run_specialized`, for many known lengths: by the answers of the function, if these serve.

    Returns:
      None where rows run by length: lengths are few, or the function needs them as numbers; or it
      takes no row of some length, of which JAX says why.
    """
    sizes = find_sizes(call.mapped)[1]
    own = np.unique(np.asarray(sizes[0].lengths))
    if len(sizes) != 1 or sizes[0].of_lanes or len(own) <= MOST_KNOWN:
        return None
    lengths = AllLengths(sizes)
    parts = _parts_of_many(call, np.arange(lengths.count))
    taken = [part.numbers for part in parts or () if part.staged is not None]
    if parts is None or not np.isin(own, np.concatenate([np.zeros(0), *taken])).all():
        return None
    return _switched(call, chunking, lengths, parts, why_grouped(error))


def _switched(
    call: Call, chunking: Chunking | None, lengths: AllLengths, parts: Sequence[_Part], why: str
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
        refuse_order(program)
    check_constants([outputs for _, outputs in staged])
    sizes_of, sizes = find_sizes(call.mapped)
    avals = {k: own for part in parts for k, own in part.avals().items()}
    of_groups = [lengths.of(int(part.numbers[-1])) for part in parts if part.staged is not None]
    recording.fact("groups", lengths=of_groups, rows=[sizes[0].rows], why=why, branches=True)
    results = [_Result(lengths, list(avals), own) for own in zip(*avals.values(), strict=True)]
    same = same_results(programs) if each else [False] * len(results)
    placed = [
        place_for_lengths(axis, output, result.shape, alike)
        for output, result, alike in zip(outputs.described, results, same, strict=True)
    ]
    branches = [_branch(part.run(sizes_of, call.mapped, lengths), results) for part in parts]
    which = np.repeat(np.arange(len(parts), dtype=np.int32), [len(p.numbers) for p in parts])

    def padded_row(*values: Any) -> tuple[list[Any], FlatOutputs]:
        own, arrays = values[: len(sizes)], values[len(sizes) :]
        place = lengths.place(own)
        branch = place if each else jnp.asarray(which)[place]
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


Run = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""The results for a row of the lengths, and arrays with room for the longest, that it is given."""


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
        return tuple(self.along[:, k].tolist())

    def named(self, k: int) -> dict[str, int]:
        return {size.name: n for size, n in zip(self.sizes, self.of(k), strict=True)}

    def place(self, own: Sequence[Any]) -> Any:
        k = own[0]
        for count, n in zip(self._each[1:], own[1:], strict=True):
            k = k * count + n
        return k


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
        own_lengths = [known_lengths(size.lengths) for size in self._lengths.sizes]
        table = np.asarray  # known lengths stay known, in `jit`, too
        if any(own is None for own in own_lengths):
            own_lengths, table = [size.index.lengths for size in self._lengths.sizes], jnp.asarray
        place = self._lengths.place(own_lengths)
        lengths = [
            own.lengths if isinstance(own, RowSize) else table(own)[place] for own in self._own
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


MOST_PARTS = 12


@dataclass(frozen=True)
class _Part:
    """Rows of some lengths, which have one program.

    Attributes:
      numbers: those of the lengths, in order (`AllLengths`).
      staged: the function of one such row, and what describes its outputs; None if it takes none.
      program: for one length that function; for several, one of the length and of arrays with room
        for the longest.
    """

    numbers: np.ndarray
    staged: tuple[ClosedJaxpr, FlatOutputs] | None = None
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

    def run(
        self, sizes_of: Sequence[SizesOf], mapped: Sequence[Mapped], lengths: AllLengths
    ) -> Run | None:
        """The branch of these rows; None if the function does not take them."""
        program, most = self.program, lengths.named(int(self.numbers[-1]))
        if self.staged is None or program is None:
            return None

        def run(own: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
            cropped = []
            for x, sizes, m in zip(arrays, sizes_of, mapped, strict=True):
                for axis, size in zip(m.value.axes, sizes, strict=True) if sizes else ():
                    x = lax.slice_in_dim(x, 0, most[size.name], axis=axis)
                cropped.append(x)
            given = cropped if len(self.numbers) == 1 else [*own, *cropped]
            return eval_jaxpr(program.jaxpr, program.consts, *given)

        return run


def _at_length(aval: Any, length: Any) -> Any:
    dims = [
        max(int(_compat.evaluate_size(dim, dict.fromkeys(_compat.symbols(dim), length))), 0)
        if is_symbolic(dim)
        else dim
        for dim in aval.shape
    ]
    return jax.ShapeDtypeStruct(dims, aval.dtype)


def _parts_by_answer(call: Call, lengths: np.ndarray, error: Exception) -> list[_Part] | None:
    """Parts of the lengths, in each of which all questions of the function have one answer."""
    asked = asked_by(error)
    answers = None if asked is None else asked.answers()
    if answers is None or len(answers) != len(lengths):
        return None
    runs = np.split(lengths, np.flatnonzero(answers[1:] != answers[:-1]) + 1)
    if len(runs) == 1 or len(runs) > MOST_PARTS:
        return None
    part_of = _part_of_one(call, AllLengths(find_sizes(call.mapped)[1]))
    parts: list[_Part] = []
    for run in runs:
        few = len(run) <= 2
        own = list(map(part_of, run)) if few else _parts_of_many(call, run)
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


def _part_of_one(call: Call, lengths: AllLengths) -> Callable[[Any], _Part]:
    sizes_of, sizes = find_sizes(call.mapped)

    def part_of(number: Any) -> _Part:
        try:
            staged = stage_at(call, sizes_of, sizes, lengths.of(int(number)))
        except Exception:  # maybe no row has this length, and so the function need not take it
            return _Part(np.array([number]))
        return _Part(np.array([number]), staged, staged[0])

    return part_of
