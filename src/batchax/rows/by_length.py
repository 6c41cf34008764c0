"""Rows of equal length together: an ordinary batch for each length that occurs.

For what no padding makes exact, such as a Fourier transform of the row, and for functions that
cannot be staged for a symbolic length. Lengths must be known, and each distinct one is a program
of its own to compile.

What kind of output there is must not depend on which lengths a batch happens to have. So the
function is staged for some lengths more: where the shape of an output changes with the length
it is ragged, and where what computes it changes it depends on the row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.call import Call, Outputs
from batchax.execution.chunked import Chunking
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import (
    AUTO,
    FlatOutputs,
    OutputArray,
    check_unbatched,
    place,
)
from batchax.jaxprs.words import ClosedJaxpr, Value
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
    row_avals,
    sizes_in_errors,
)
from batchax.rows.groups import Placed, check_constants, groups_of, in_front, run_in_groups
from batchax.rows.host_calls import refuse_order
from batchax.rows.in_padding import executed_as_arrays
from batchax.rows.outputs import place_ragged
from batchax.rows.ragged import Ragged
from batchax.rows.stand_ins import rows_of_one_length
from batchax.rules.in_turn import calls_library

Lengths = tuple[Any, ...]
"""The length of a row, for each of the sizes that rows have: a number, or a symbol."""


def run_by_length(call: Call, chunking: Chunking | None, why: str = "") -> Outputs:
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
    recording.fact("groups", lengths=lengths, rows=[len(rows) for rows in groups], why=why)
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
    """The function of a row staged for rows of such lengths, and what describes its outputs."""
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
    """The rows of each group, and how long they are."""
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
    """What must be the same for rows of all lengths."""
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
