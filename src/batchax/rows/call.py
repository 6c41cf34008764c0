"""A call of a function of one row, staged for rows of any length; its outputs and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import AxisError, BatchaxError, UnsupportedError
from batchax.execution.call import Call
from batchax.frontend.advice import SIZES_DIFFER
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import AUTO, FlatOutputs, OutputArray, Reduce
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.inner import stage_described
from batchax.kernel.registry import call_key
from batchax.rows.arguments import (
    NotedSize,
    RowSize,
    SizesOf,
    capacity_for,
    capacity_of,
    find_sizes,
    row_avals,
    sizes_in_errors,
)
from batchax.rows.building import elements_of
from batchax.rows.index import RowIndex, pack_rows
from batchax.rows.padded import CannotPad
from batchax.rows.ragged import Ragged
from batchax.rows.shifts import shorten, shorter
from batchax.rows.sizes import asked_for_number, is_symbolic, line_of, names_of, question_of
from batchax.rules.callbacks import calls_in


def place_ragged(output: OutputArray, shape: Sequence[Any]) -> OutputArray:
    """Where an output goes before it is packed.

    Args:
      output: what the function returned, and what `out_axes` says of it.
      shape: its shape for each row, with symbols for what depends on the row.

    Raises:
      AxisError: `out_axes` asks for what a ragged output cannot be.
    """
    ragged = [i for i, dim in enumerate(shape) if is_symbolic(dim)]
    if not ragged:
        return output
    shown = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    if output.spec is AUTO or output.spec == 0:
        return replace(output, spec=0)
    if isinstance(output.spec, Reduce):
        raise AxisError(
            f"out_axes gives {output.spec} for {output.path}, whose shape for each row is "
            f"{shown}: rows of different lengths cannot be reduced over the batch. Reduce over "
            "the row in the function first."
        )
    raise AxisError(
        f"out_axes gives {output.spec} for {output.path}, whose shape for each row is {shown}: a "
        "ragged output has its rows along axis 0. Pass 0 or batchax.AUTO."
    )


FoundLengths = tuple[Any, int | None]
"""A size that each row has found, and how many elements all rows have at most, if it is known."""


def as_ragged(
    padded: Any,
    shape: Sequence[Any],
    sizes: Sequence[RowSize],
    arguments: Sequence[tuple[Mapped, SizesOf]],
    sizes_found: Mapping[str, FoundLengths] | None = None,
) -> Ragged:
    """Padded rows as a `Ragged`.

    Args:
      padded: results of a function of one row, the rows in front.
      shape: that of one row.
      sizes: all that rows have.
      arguments: of the function, each with its sizes.
      sizes_found: those that rows have not, and found.
    """
    if isinstance(padded, Ragged):  # of rows of one length together, whose bound is their own
        padded = padded.to_padded()
    sizes_found = sizes_found or {}
    axes = tuple(i for i, dim in enumerate(shape) if is_symbolic(dim))
    dims = [shape[at] for at in axes]
    bounds = [padded.shape[at + 1] for at in axes]
    if len(dims) == 1:
        size = next((size for size in sizes if size.symbol == dims[0]), None)
        if size is not None:
            data = pack_rows(padded, size.index, axes[0], size.capacity)
            return Ragged(data, size.lengths, bounds[0], axis=axes[0])
    lengths = [
        sizes_found[str(dim)][0] if str(dim) in sizes_found else _lengths_of(dim, sizes)
        for dim in dims
    ]
    room = padded.shape[0] * math.prod(bounds)
    elements = elements_of(tuple(lengths))
    if elements is not None:
        room = int(elements.sum())
    elif any(str(dim) in sizes_found for dim in dims):
        most = sizes_found[str(dims[0])][1] if len(dims) == 1 else None
        room = room if most is None else min(room, most)
    else:
        room = min(room, _capacity(dims, bounds, sizes, arguments))
    index = RowIndex.of_axes(lengths, room, bounds)
    return Ragged(pack_rows(padded, index, axes, room), lengths, tuple(bounds), axis=axes)


def as_shorter(
    packed: Any,
    shape: Sequence[Any],
    sizes: Sequence[RowSize],
    arguments: Sequence[tuple[Mapped, SizesOf]],
) -> Ragged:
    """Rows that are where longer ones were, as a `Ragged`: see `as_ragged`."""
    (axis,) = (i for i, dim in enumerate(shape) if is_symbolic(dim))
    bounds = {size.name: size.bound for size in sizes}
    named = shorter(shape[axis], bounds)
    assert named is not None
    size = next(size for size in sizes if size.name == named[0])
    lengths, bound = _lengths_of(shape[axis], sizes), max(size.bound - named[1], 0)
    elements = elements_of((lengths,))
    if elements is None:
        room = _capacity([shape[axis]], [bound], sizes, arguments)
    else:
        room = int(elements.sum())
    data = shorten(packed, size.index, named[1], axis, lengths, room)
    return Ragged(data, lengths, bound, axis=axis)


def _lengths_of(dim: Any, sizes: Sequence[RowSize]) -> Any:
    """The size `dim` of each row."""
    for size in sizes:
        if dim == size.symbol:
            return size.lengths
    used = [size for size in sizes if size.name in _compat.symbols(dim)]
    lengths = {size.name: size.index.lengths for size in used}
    lengths_known = all(isinstance(x, np.ndarray) for x in lengths.values())
    numpy = np if lengths_known else jnp
    row_sizes = numpy.maximum(_compat.evaluate_size(dim, lengths), 0)
    return np.asarray(row_sizes, np.int32) if lengths_known else row_sizes


def _capacity(
    dims: Sequence[Any],
    bounds: Sequence[int],
    sizes: Sequence[RowSize],
    arguments: Sequence[tuple[Mapped, SizesOf]],
) -> int:
    """Room enough for all rows, which have axes of the sizes `dims`."""
    rows = sizes[0].rows
    capacity = rows * math.prod(bounds)
    for m, own in arguments:  # one may have some of these axes, and no more elements
        left = list(map(str, dims))
        if own and all(size.name in left and not left.remove(size.name) for size in own):
            others = [bound for dim, bound in zip(dims, bounds, strict=True) if str(dim) in left]
            capacity = min(capacity, capacity_of(m.value) * math.prod(others))
    names = frozenset().union(*map(_compat.symbols, dims))
    used = [size for size in sizes if size.name in names]
    if len(used) == 1:
        # Often less room is enough: ``a + b * length`` is at least the number of elements for every
        # length, and all lengths together are at most the capacity of rows of that size.
        total = used[0].capacity
        at = np.arange(used[0].bound + 1)
        each = [np.maximum(_compat.evaluate_size(dim, {used[0].name: at}), 0) for dim in dims]
        values = np.prod(each, axis=0)
        slope = int(np.max(-((values[0] - values[1:]) // at[1:]), initial=0))
        capacity = min(capacity, int(rows * values[0] + slope * total))
    return capacity


@dataclass(frozen=True, eq=False)
class RowCall(Call):
    """A function of one row, called for all rows: its program has a symbol for each size of rows.

    Attributes:
      sizes_of: the sizes of each argument, none for those that are not ragged.
      sizes: all that there are.
      gives_lengths: whether the lengths of rows are values like any other, the first ones; if not,
        a program for other lengths is another one.
    """

    sizes_of: Sequence[SizesOf] = ()
    sizes: Sequence[RowSize] = ()
    gives_lengths: bool = False

    @classmethod
    def of(cls, call: Call) -> RowCall:
        sizes_of, sizes = find_sizes(call.mapped)
        return cls(call.axis, call.function, call.mapped, call.way, sizes_of=sizes_of, sizes=sizes)

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        return [getattr(aval, "shape", ()) for aval in self.staged.out_avals]

    @property
    def bounds(self) -> dict[str, int]:
        return {size.name: size.bound for size in self.sizes}

    @property
    def lengths(self) -> list[Any]:
        return [size.lengths for size in self.sizes]

    @property
    def arrays(self) -> list[Any]:
        return [m.value.data if isinstance(m.value, Ragged) else m.value for m in self.mapped]

    @property
    def values(self) -> list[Any]:
        return [*self.lengths, *self.arrays] if self.gives_lengths else self.arrays

    @property
    def noted(self) -> list[tuple[NotedSize, ...]]:
        """What notes say of rows: for each ragged argument, its sizes."""
        return list(dict.fromkeys(tuple(s.noted for s in own) for own in self.sizes_of if own))

    @property
    def arguments(self) -> list[tuple[Mapped, SizesOf]]:
        return list(zip(self.mapped, self.sizes_of, strict=True))

    def _stage(self) -> tuple[ClosedJaxpr, FlatOutputs]:
        staged, outputs = self.staged_for([size.symbol for size in self.sizes])
        shapes = [a.shape for a in staged.out_avals]
        described = list(map(place_ragged, outputs.described, shapes))
        return staged, replace(outputs, described=described)

    def staged_for(self, dims: Sequence[Any]) -> tuple[ClosedJaxpr, FlatOutputs]:
        given, sizes_of = self.mapped[self.constants :], self.sizes_of[self.constants :]
        avals = row_avals(self.axis, given, sizes_of, self.sizes, dims)
        with sizes_in_errors(given, sizes_of, self.sizes):
            return stage_described(self.axis, self.function, avals, [m.path for m in given])

    @property
    def traced(self) -> bool:
        """Whether running it traces operations, rather than computing them at once."""
        lengths = (size.index.lengths for size in self.sizes)
        return any(isinstance(x, Tracer) for x in (*self.arrays, *self.staged.consts, *lengths))

    @property
    def tells_of_mesh(self) -> bool:
        """Whether types of what it is given tell of a mesh: one that is set, or of its arrays."""
        if not jax.sharding.get_abstract_mesh().empty:
            return True
        given = (*self.arrays, *self.staged.consts) if self.traced else ()
        return any(not jax.typeof(x).sharding.mesh.empty for x in given)

    def with_constants_passed(self) -> RowCall:
        call = super().with_constants_passed()
        assert isinstance(call, RowCall)
        added: list[SizesOf] = [()] * (call.constants - self.constants)
        return replace(call, sizes_of=[*added, *self.sizes_of])

    def with_values(self, values: Sequence[Value]) -> RowCall:
        if self.gives_lengths:
            count = len(self.sizes)
            return self.with_rows(values[:count], values[count:])
        given = zip(self.mapped, values, strict=True)
        return replace(
            self, mapped=[_put(m, x, getattr(m.value, "each_length", None)) for m, x in given]
        )

    def with_rows(self, lengths: Sequence[Any], arrays: Sequence[Value]) -> RowCall:
        """The same call of other rows, with such lengths for each size."""
        given = {size.name: x for size, x in zip(self.sizes, lengths, strict=True)}
        mapped = [
            _put(m, x, tuple(given[size.name] for size in own) or None)
            for (m, own), x in zip(self.arguments, arrays, strict=True)
        ]
        sizes = {
            size.name: replace(
                size,
                lengths=given[size.name],
                capacity=capacity_for(
                    [m.value for m, own in zip(mapped, self.sizes_of, strict=True) if size in own],
                    given[size.name],
                    size.bound,
                ),
            )
            for size in self.sizes
        }
        sizes_of = [tuple(sizes[size.name] for size in own) for own in self.sizes_of]
        return replace(self, mapped=mapped, sizes=list(sizes.values()), sizes_of=sizes_of)

    @property
    def key(self) -> Hashable:
        arguments = [
            (jax.typeof(x), m.axis, tuple(s.name for s in own), m.value.axis if own else None)
            for x, (m, own) in zip(self.arrays, self.arguments, strict=True)
        ]
        rows = [
            (
                size.name,
                size.bound,
                size.capacity,
                None if self.gives_lengths else size.index.lengths.tobytes(),
            )
            for size in self.sizes
        ]
        specs = tuple(output.spec for output in self.described)
        return call_key(self.axis, self.staged, self.way, specs, *arguments, *rows)


def _put(m: Mapped, array: Value, lengths: Any) -> Mapped:
    """An argument of this array; rows if it has such lengths, along each ragged axis."""
    if lengths is None:
        return m.put(array)
    old = m.value.each_length
    if array is m.value.data and all(x is y for x, y in zip(lengths, old, strict=True)):
        return m
    return m.put(Ragged(array, lengths, m.value.each_bound, axis=m.value.axes))


def refuse_order(program: ClosedJaxpr) -> None:
    """Refuses a program of a row with calls in order, where rows run in groups.

    Raises:
      UnsupportedError: it has one.
    """
    for call in (call for eqn in program.jaxpr.eqns for call in calls_in(eqn)):
        if _compat.in_order(call.effects):
            raise UnsupportedError(
                f"{_compat.user_line(call.source_info)}: a callback is to be called in order "
                "(ordered=True), and rows run in groups, by their lengths (buckets= or "
                'layout="grouped" was given, or the function needs lengths as numbers). Leave out '
                "ordered, or what groups them."
            )


def refuse_calls(program: ClosedJaxpr) -> None:
    """Refuses a program of a row that has a host callback, where rows are dealt out to devices.

    Raises:
      UnsupportedError: it does.
    """
    for call in (call for eqn in program.jaxpr.eqns for call in calls_in(eqn)):
        raise UnsupportedError(
            f"{_compat.user_line(call.source_info)}: a callback with effects is called for rows "
            "that are dealt out to devices (mesh was given): some have a row that is there twice, "
            "and would make its calls twice. Return values instead, or leave mesh out."
        )


def cannot_stage(error: Exception, sizes: Sequence[RowSize], works_for_known: Any) -> Exception:
    """What to raise where a function fails for symbolic sizes, and lengths are not known.

    Args:
      error: how it failed.
      sizes: those of rows.
      works_for_known: whether it can be staged for rows of some known length.
    """
    asked = asked_for_number(error)
    if isinstance(error, BatchaxError) and not asked:
        return error
    names = ", ".join(size.name for size in sizes)
    words = _words(sizes)
    row, length = words.row, words.length
    if asked or works_for_known():
        line = line_of(error)
        if str(error).startswith(SIZES_DIFFER):  # and they are alike for rows of known lengths
            return UnsupportedError(f"{line + ': ' if line else ''}{error}")
        before = _compat.looked_up_before(names_of(error))
        return UnsupportedError(
            f"{line + ': ' if line else ''}the function needs the {length} of a {row} as a number, "
            f"and here {row}s have a symbolic size ({names}), because their {length}s are traced: "
            f"{question_of(error)}."
            f"\nCall it outside of jit, or close over the {words.batch}, so that {length}s are "
            f"known: then {row}s of one {length} run together, and with buckets= those of which it "
            f"holds alike. To compute with a size use jnp.asarray({words.size})."
            + (
                f"\n{before[0]} was looked up beforehand, so that it is JAX's own. Call it as "
                f"{before[1]}, which takes symbolic sizes while {row}s are staged."
                if before
                else ""
            )
        )
    error.add_note(
        f"{row.capitalize()}s have a symbolic size ({names}) in the function, as their {length}s "
        "are traced."
        + (
            " Arguments whose rows have the same lengths share a size if in_axes says so: "
            'batchax.ragged("n") for each of them.'
            if len(sizes) > 1 and words is _ROWS
            else ""
        )
    )
    return error


@dataclass(frozen=True)
class _Words:
    """How messages speak of what has a size: the user may have given rows, or sizes alone."""

    row: str
    length: str
    batch: str
    size: str


_ROWS = _Words("row", "length", "Ragged", "x.shape[0]")
_LANES = _Words("lane", "size", "array of sizes", "n")


def _words(sizes: Sequence[RowSize]) -> _Words:
    return _LANES if all(size.of_lanes for size in sizes) else _ROWS


def cannot_pad(error: Exception, sizes: Sequence[RowSize], on_mesh: bool) -> Exception:
    words = _words(sizes)
    return UnsupportedError(
        f"{error}\n{words.row.capitalize()}s of one {words.length} could run together, but the "
        f"{words.length}s are traced here: call it outside of jit, or close over the "
        f"{words.batch}, so that they are known" + (", and leave mesh out." if on_mesh else ".")
    )


def why_grouped(error: Exception) -> str:
    """Why rows run grouped by their known lengths: the operation, and the user's line."""
    if isinstance(error, CannotPad):
        return str(error).rstrip(".")
    line = line_of(error)
    return f"{line + ': ' if line else ''}the function needs a length as a number: " + question_of(
        error
    )


def works_for_known(stage: Callable[[Sequence[int]], Any], sizes: Sequence[RowSize]) -> bool:
    """Whether rows of some lengths could be staged, where rows of any length cannot."""
    most = max(size.bound for size in sizes)
    for length in (most, most - 1, 4, 3, 2, 1):
        # Sizes of different names may differ, so they do here. None is 1 if there are several: JAX
        # repeats a single element along any number of others.
        lengths = [min(length - i, size.bound) for i, size in enumerate(sizes)]
        if min(lengths) < min(len(lengths), 2):
            continue
        try:
            stage(lengths)
        except Exception:
            continue
        return True
    return False
