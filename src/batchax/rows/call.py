"""A call of a function of one row, staged for rows of any length."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.core import Tracer

from batchax import _compat
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import FlatOutputs, OutputArray
from batchax.kernel.axis import Axis
from batchax.kernel.lasting import call_key
from batchax.rows.arguments import RowSize, capacity_of
from batchax.rows.ragged import Ragged


@dataclass(frozen=True, eq=False)
class Call:
    """A function of one row, staged, and what it was called with.

    Attributes:
      axis: the axis being mapped, whose lanes are rows.
      staged: the function, with a symbol for each size of rows.
      mapped: its arguments.
      sizes_of: the size of each, None for those that are not ragged.
      sizes: all that there are.
      outputs: how to rebuild what it returned.
    """

    axis: Axis
    staged: _compat.ClosedJaxpr
    mapped: list[Mapped]
    sizes_of: list[RowSize | None]
    sizes: list[RowSize]
    outputs: FlatOutputs

    @property
    def described(self) -> Sequence[OutputArray]:
        """The arrays that it returned."""
        return self.outputs.described

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        """The shapes of the outputs for one row."""
        return [getattr(aval, "shape", ()) for aval in self.staged.out_avals]

    @property
    def bounds(self) -> dict[str, int]:
        """The greatest value of each size."""
        return {size.name: size.bound for size in self.sizes}

    @property
    def values(self) -> list[Any]:
        """The arrays of the arguments."""
        return [m.value.data if isinstance(m.value, Ragged) else m.value for m in self.mapped]

    @cached_property
    def traced(self) -> bool:
        """Whether running it traces operations, rather than computing them at once."""
        lengths = (size.index.lengths for size in self.sizes)
        return any(isinstance(x, Tracer) for x in (*self.values, *self.staged.consts, *lengths))

    @property
    def tells_of_mesh(self) -> bool:
        """Whether types of what it is given tell of the mesh of a program around it."""
        given = (*self.values, *self.staged.consts) if self.traced else ()
        return any(not jax.typeof(x).sharding.mesh.empty for x in given)

    def with_constants_passed(self) -> Call:
        """The same call, of a program that holds no values."""
        (program,), consts = _compat.hoist_constants(self.staged)
        given = [Mapped("a constant", x, None) for x in consts]
        sizes_of = [*[None] * len(given), *self.sizes_of]
        return replace(self, staged=program, mapped=[*given, *self.mapped], sizes_of=sizes_of)

    def with_values(self, lengths: Sequence[Any], values: Sequence[Any]) -> Call:
        """The same call of other arrays, with such lengths of rows for each size."""
        mapped: list[Mapped] = []
        batches: dict[int, Ragged] = {}
        for m, x, size in zip(self.mapped, values, self.sizes_of, strict=True):
            if size is not None:
                k = self.sizes.index(size)
                x = Ragged(x, lengths[k], m.value.max_length, axis=m.value.axis)
                batches.setdefault(k, x)
            mapped.append(replace(m, value=x))
        sizes = [replace(size, batch=batches[k]) for k, size in enumerate(self.sizes)]
        sizes_of = [None if s is None else sizes[self.sizes.index(s)] for s in self.sizes_of]
        return replace(self, mapped=mapped, sizes=sizes, sizes_of=sizes_of)

    def without_values(self) -> Call:
        """The same call with types for arrays: what is kept for long must not hold those."""
        sizes = [replace(size, batch=jax.tree.map(jax.typeof, size.batch)) for size in self.sizes]
        return replace(
            self,
            mapped=[replace(m, value=jax.tree.map(jax.typeof, m.value)) for m in self.mapped],
            sizes=sizes,
            sizes_of=[None if s is None else sizes[self.sizes.index(s)] for s in self.sizes_of],
        )

    def key(self, lengths: bool = True) -> Hashable:
        """Equal for calls that do the same, whatever the values, if nothing is traced.

        `lengths`: whether the rows have the same lengths, too.
        """
        arguments = [
            (jax.typeof(x), m.axis, None if size is None else (size.name, m.value.axis))
            for x, m, size in zip(self.values, self.mapped, self.sizes_of, strict=True)
        ]
        rows = [
            (
                size.name,
                size.bound,
                capacity_of(size.batch),
                size.index.lengths.tobytes() if lengths else None,
            )
            for size in self.sizes
        ]
        return call_key(self.axis, self.staged, *arguments, *rows)
