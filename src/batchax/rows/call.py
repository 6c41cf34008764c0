"""A call of a function of one row, staged for rows of any length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer

from batchax.execution.call import Call
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import FlatOutputs
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.inner import stage_described
from batchax.kernel.registry import call_key
from batchax.rows.arguments import (
    NotedSize,
    RowSize,
    SizesOf,
    capacity_for,
    find_sizes,
    row_avals,
    sizes_in_errors,
)
from batchax.rows.outputs import place_ragged
from batchax.rows.ragged import Ragged


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
        """A call some of whose arguments are `Ragged`."""
        sizes_of, sizes = find_sizes(call.mapped)
        return cls(call.axis, call.function, call.mapped, call.way, sizes_of=sizes_of, sizes=sizes)

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        """The shapes of the outputs for one row."""
        return [getattr(aval, "shape", ()) for aval in self.staged.out_avals]

    @property
    def bounds(self) -> dict[str, int]:
        """The greatest value of each size."""
        return {size.name: size.bound for size in self.sizes}

    @property
    def lengths(self) -> list[Any]:
        """The lengths of rows, for each size."""
        return [size.lengths for size in self.sizes]

    @property
    def arrays(self) -> list[Any]:
        """The arrays of the arguments."""
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
        """The arguments, each with its sizes if it is ragged."""
        return list(zip(self.mapped, self.sizes_of, strict=True))

    def _stage(self) -> tuple[ClosedJaxpr, FlatOutputs]:
        staged, outputs = self.staged_for([size.symbol for size in self.sizes])
        shapes = [a.shape for a in staged.out_avals]
        described = list(map(place_ragged, outputs.described, shapes))
        return staged, replace(outputs, described=described)

    def staged_for(self, dims: Sequence[Any]) -> tuple[ClosedJaxpr, FlatOutputs]:
        """The function staged for a row whose sizes are these, and what describes its outputs."""
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
