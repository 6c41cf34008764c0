"""Rows in regions of the program, each of which holds them in one layout."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax.numpy as jnp

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.call import Call, Outputs, Way
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import check_unbatched, place
from batchax.frontend.rows import RowOptions
from batchax.jaxprs.words import Value
from batchax.kernel import recording
from batchax.kernel.axis import Position
from batchax.memo import Memo
from batchax.rows.arguments import SizesOf, capacity_of, with_room
from batchax.rows.call import RowCall
from batchax.rows.checks import known_lengths
from batchax.rows.class_choice import choose_classes, choose_groups, find_classes
from batchax.rows.layouts import Costs, Layout, choose_layouts
from batchax.rows.outputs import as_ragged
from batchax.rows.packed import Packed, PackedRows, Segments
from batchax.rows.ragged import Ragged
from batchax.rows.regions import (
    Region,
    RunPadded,
    find_regions,
    regions_of_groups,
    run_regions,
)
from batchax.rows.size_classes import obstacle, run_in_classes
from batchax.rows.sizes import Sizes, has_symbols, ragged_axes
from batchax.rows.steps import RowProgram, flatten

Classes = int | Literal["auto"] | None
"""How many size classes rows may be in: so many, as many as pay, or none."""


kept_in_regions = Memo("calls outside of jit, of rows, batched", most=64)


@dataclass(frozen=True)
class InRegions(Way):
    """Region by region, each of which holds rows in one layout.

    Attributes:
      layout: that of all regions, or "auto".
      classes: how many size classes padded rows may be in.
    """

    compiles: ClassVar[bool] = True

    layout: str
    classes: Classes = None

    @property
    def memo(self) -> Memo | None:
        return kept_in_regions

    def run(self, call: Call) -> tuple[list[Any], list[Position]]:
        assert isinstance(call, RowCall)
        segments = {size.name: Segments(size.index, size.capacity) for size in call.sizes}
        room = {
            tuple(size.name for size in own): capacity_of(m.value)
            for m, own in reversed(call.arguments)  # of several the first
            if len(own) > 1
        }
        rows = PackedRows(call.axis, segments, room)
        program, regions, in_groups, called = self._find_regions(call, rows)
        for region in regions if recording.is_on() else ():
            name = called if region.layout == "padded" else region.layout
            recording.fact("region", layout=name, steps=region.steps, rows=call.noted)
        arguments = [_held(rows, m, own) for m, own in call.arguments]
        with recording.run(call.staged.jaxpr):
            outs = run_regions(rows, call.bounds, program, regions, arguments, in_groups)
        return [rows.cut(out) for out in outs], [out.axis for out in outs]

    def check(self, call: Call, said: Any) -> None:
        check_unbatched(call.axis, call.described, said)

    def finish(self, call: Call, arrays: list[Value], said: Any) -> Outputs:
        assert isinstance(call, RowCall)
        results = []
        for x, shape, axis, output in zip(arrays, call.shapes, said, call.described, strict=True):
            if not has_symbols(shape):
                results.append(place(call.axis, output, jnp.asarray(x), axis))
            elif axis is not None:
                results.append(as_ragged(x, shape, call.sizes, call.arguments))
            else:
                at = ragged_axes(shape)
                own = [next(s for s in call.sizes if s.symbol == shape[k]) for k in at]
                lengths, bounds = [s.lengths for s in own], tuple(s.bound for s in own)
                results.append(Ragged(x, lengths, bounds, axis=tuple(at)))
        return results, call.outputs

    def _find_regions(
        self, call: RowCall, rows: PackedRows
    ) -> tuple[RowProgram, list[Region], RunPadded | None, str]:
        """The program in regions, how padded ones run, and what that is called."""
        program = flatten(call.staged)
        batched = [m.axis is not None for m in call.mapped]
        room = {size.name: size.capacity for size in call.sizes}
        packed, padded = Sizes(room, {}), Sizes(call.bounds, {})
        costs = Costs(packed, padded, call.sizes[0].rows, rows.room)
        only = self.layout if self.layout in ("packed", "padded") else None
        layouts = choose_layouts(program, batched, costs, only)
        in_groups, called = self._in_groups(call, program, layouts, batched, costs)
        if in_groups is None:
            return program, find_regions(program, layouts), None, called
        return program, regions_of_groups(program, layouts, batched), in_groups, called

    def _in_groups(
        self,
        call: RowCall,
        program: RowProgram,
        layouts: Sequence[Layout | None],
        batched: Sequence[bool],
        costs: Costs,
    ) -> tuple[RunPadded | None, str]:
        if self.classes is None:
            return None, "padded"
        lengths = {size.name: known_lengths(size.lengths) for size in call.sizes}
        of_numpy = {name: x for name, x in lengths.items() if x is not None}
        if self.classes == "auto" and len(of_numpy) == len(lengths):
            groups = choose_groups(program, layouts, batched, costs, of_numpy)
            return (None, "padded") if groups is None else (groups.run, "in groups")
        classes = (
            choose_classes(program, layouts, batched, costs)
            if self.classes == "auto"
            else find_classes(program, batched, costs, self.classes)
        )
        if classes is None:
            return None, "padded"
        return functools.partial(run_in_classes, classes=classes), "in size classes"


def _held(rows: PackedRows, m: Mapped, own: SizesOf) -> Packed:
    """An argument as it is held: packed, or padded, where it is ragged along several axes."""
    x = m.value
    if not own:
        shape = list(jnp.shape(x))
        if m.axis is not None:
            del shape[m.axis]
        return Packed(x, tuple(shape), m.axis)
    shape = x.shape_of_row([each.symbol for each in own])
    capacity = rows.along(tuple(size.name for size in own)).capacity
    data = with_room(x.data, x.element_axis, capacity)
    return replace(packed := Packed(data, shape), value=rows.cut(packed))


def most_classes(call: RowCall, options: RowOptions, in_chunks: bool) -> Classes:
    """How many size classes rows may be in; None where they are in none.

    Raises:
      UnsupportedError: the program cannot run in size classes, but was asked to.
    """
    room = [size.capacity for size in call.sizes]
    if not (call.axis.size and max(call.bounds.values()) and all(room)):
        return None  # there is nothing to put anywhere
    why = obstacle(call.axis, call.staged, in_chunks)
    if options.buckets is None:
        # Outside of `jit` the operations of each group would be compiled one by one.
        compiled = call.traced and _compat.compiled_later()
        auto = options.layout == "auto" and compiled and why is None
        return "auto" if auto else None
    if why is not None:
        raise UnsupportedError(
            "buckets was given, and the lengths of rows are traced here, so that they would be "
            f"put into buckets while they run; but {why}. Leave buckets out, or call vmap where "
            "lengths are known, outside of jit."
        )
    assert isinstance(options.buckets, int)  # groups need known lengths, and run one by one
    return options.buckets
