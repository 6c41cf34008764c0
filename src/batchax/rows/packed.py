"""Packed rows: the elements of all rows one after another, and nothing else.

An operation that acts on each element of a row alone does so whatever row an element is of.
Packed, it is the operation on one long row, and there the rules for padded rows serve: behind
the last row there may be padding. Besides those, values that differ between rows are given to
each element of a row, and reductions over a row become reductions over segments.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.bodies import bind_call, program_called
from batchax.jaxprs.evaluate import walk
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import Eqn, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, Positions, move_axis
from batchax.kernel.interpreter import batch_equation
from batchax.rows.index import RowIndex, take_clipped
from batchax.rows.layouts import REDUCED, Constant, flatten
from batchax.rows.packed_forms import (
    Index,
    Names,
    Packed,
    PackedSizes,
    can_hold,
    has_several,
    index_of,
    merge,
    merged_shape,
    merged_size,
    names_of,
    packed_move,
)
from batchax.rows.padded import Operation, Row, fold_known, run_equation
from batchax.rows.row_rules import Rows, in_packed_rows, size_of_rule
from batchax.rows.segments import reduce_rows
from batchax.rows.sizes import Dim, Shape, depends_on_sizes, has_symbols, is_symbolic, ragged_axis
from batchax.rules.reductions import reduce_few_or_many


@dataclass(frozen=True)
class PackedRows:
    """All rows of a batch, for the sizes that there are."""

    axis: Axis  # the axis being mapped, whose lanes are rows
    index: Index  # where they are, by the name of each size
    # Of packed arrays that are ragged along several axes, by their sizes.
    room: Mapping[Names, int] = field(default_factory=dict)

    @cached_property
    def bounds(self) -> dict[str, int]:
        return {name: own.bound for name, own in self.index.items()}

    def of(self, dim: Dim) -> RowIndex:
        return index_of(self.index, dim)

    def holds(self, shape: Shape) -> bool:
        """Whether values of that shape are packed: see `can_hold`."""
        return can_hold(self.room, shape)

    def along(self, names: Names) -> RowIndex:
        """Where rows are that are ragged along axes of these sizes."""
        if len(names) == 1:
            return self.index[names[0]]
        lengths, bounds = self._several(names)
        return RowIndex.of_axes(lengths, self.room[names], bounds)

    def _several(self, names: Names) -> tuple[list[Any], list[int]]:
        index = [self.index[name] for name in names]
        return [x.lengths for x in index], [x.bound for x in index]

    def merged(self, names: Names) -> PackedRows:
        lengths, bounds = self._several(names)
        index = RowIndex.of(math.prod(lengths), self.room[names], math.prod(bounds))
        return PackedRows(self.axis, {str(merged_size(names)): index})

    def cut(self, x: Packed) -> Value:
        """The array of a value; if it is packed, no derivative passes through what is no row's."""
        if x.axis is not None or not has_symbols(x.shape):
            return x.value
        names, rows, shape = names_of(x.shape), self, x.shape
        if names is not None and len(names) > 1:
            shape = merged_shape(shape)
            rows = self.merged(names)
        return Operation(None, rows.sizes).cut(x.value, shape)

    def inside(self) -> PackedRows:
        """These for a program that is staged within another."""
        index = {name: own.inside() for name, own in self.index.items()}
        return PackedRows(self.axis, index, self.room)

    @cached_property
    def sizes(self) -> PackedSizes:
        """The sizes of packed arrays, as those of one long row."""
        totals = {
            name: np.int32(own.capacity) if own.exact else own.total
            for name, own in self.index.items()
        }
        exact = frozenset(name for name, own in self.index.items() if own.exact)
        room = {name: own.capacity for name, own in self.index.items()}
        row_of = {name: functools.partial(getattr, own, "rows") for name, own in self.index.items()}
        count = next((len(own.starts) for own in self.index.values()), 0)
        return PackedSizes(room, totals, exact, of_row=self.bounds, row_of=row_of, count=count)

    def size_of_rows(self, dim: Dim) -> jax.Array:
        lengths = {name: jnp.asarray(own.lengths) for name, own in self.index.items()}
        return _compat.evaluate_size(dim, lengths)


def run_and_note(rows: PackedRows, eqn: Eqn, operands: Sequence[Packed]) -> list[Packed]:
    """As `run_packed`, while notes may be taken."""
    if not (recording.is_on() and depends_on_sizes(eqn)):  # others are batched as in any program
        return run_packed(rows, eqn, operands)
    with recording.equation(rows.axis, eqn, list(map(_rows_along, operands)), False) as record:
        recording.note(service="own", rule="rows.packed")
        outs = run_packed(rows, eqn, operands)
        record.out_axes = tuple(map(_rows_along, outs))
        record.in_types = [jax.typeof(x.value) for x in operands]
        record.out_types = [jax.typeof(x.value) for x in outs]
    return outs


def _rows_along(x: Packed) -> Position:
    return ragged_axis(x.shape) if x.axis is None else x.axis


def run_packed(rows: PackedRows, eqn: Eqn, values: Sequence[Packed]) -> list[Packed]:
    """The results of an equation that `packing.can_pack` accepts, for all rows."""
    shapes = [v.aval.shape for v in eqn.outvars]
    if not depends_on_sizes(eqn):
        operands, axes = [v.value for v in values], [v.axis for v in values]
        outs = fold_known(eqn, operands)
        out_axes: Positions = [None] * len(shapes)
        if outs is None:
            outs, out_axes = batch_equation(rows.axis, eqn, operands, axes)
        return [Packed(*out) for out in zip(outs, shapes, out_axes, strict=True)]
    name = eqn.primitive.name
    if has_several(eqn) and not facts_of(eqn.primitive).again:
        return _merged(rows, eqn, values)
    if name == "dim_as_value":
        sizes = rows.size_of_rows(eqn.params["dim"])
        return [Packed(lax.convert_element_type(sizes, eqn.outvars[0].aval.dtype), (), 0)]
    if name == "iota" and is_symbolic(shapes[0][eqn.params["dimension"]]):
        return [_places(rows, eqn)]
    if facts_of(eqn.primitive).again:
        return _run_again(rows, eqn, values)
    if (size := size_of_rule(eqn)) is not None:
        return _by_rule(rows, eqn, size, values)
    if (move := packed_move(eqn, rows.bounds)) is not None:
        return [Packed(move(rows.index, Operation(eqn, rows.sizes), values), shapes[0])]
    at = ragged_axis(values[0].shape) if values else None
    if name in REDUCED and at is not None and at in eqn.params["axes"]:
        return [_reduce(rows, eqn, values[0], at)]
    operands = [_for_each_element(rows, eqn, v, shapes[0]) for v in values]
    if name == "broadcast_in_dim" and values[0].axis is not None:
        return [Packed(operands[0].value, shapes[0])]
    outs = run_equation(rows.sizes, eqn, operands)
    return [Packed(row.value, row.shape) for row in outs]


def _merged(rows: PackedRows, eqn: Eqn, values: Sequence[Packed]) -> list[Packed]:
    """The results of an equation of rows that are ragged along several axes."""
    merged = merge(eqn)
    assert merged is not None
    operands = []
    names, one_axis = merged
    for x, v in zip(values, one_axis.invars, strict=True):
        shape = tuple(v.aval.shape)
        if not has_symbols(x.shape) and shape != x.shape:  # of one element along ragged axes
            value = x.value if x.axis is None else move_axis(x.value, x.axis, 0)
            lanes = () if x.axis is None else value.shape[:1]
            x = Packed(lax.reshape(value, (*lanes, *shape)), shape, None if x.axis is None else 0)
        operands.append(replace(x, shape=shape))
    outs = run_packed(rows.merged(names), one_axis, operands)
    return [replace(x, shape=eqn.outvars[0].aval.shape) for x in outs]


def _by_rule(rows: PackedRows, eqn: Eqn, size: str, values: Sequence[Packed]) -> list[Packed]:
    recording.note(service="user", rule=eqn.params["rule"].for_rows.__qualname__)
    op = Operation(eqn, rows.sizes)
    operands = []
    for x in values:
        if has_symbols(x.shape):  # what is behind the last row is not the rule's to see
            operands.append((op.masked(Row(op.cut(x.value, x.shape), x.shape), 0), True))
        elif x.axis is None:
            operands.append((x.value, None))
        else:
            operands.append((move_axis(x.value, x.axis, 0), False))
    outs, said = in_packed_rows(eqn, Rows(rows.index[size]), operands)
    return [
        Packed(x, v.aval.shape, 0 if s is False else None)
        for x, s, v in zip(outs, said, eqn.outvars, strict=True)
    ]


def _run_again(rows: PackedRows, eqn: Eqn, values: Sequence[Packed]) -> list[Packed]:
    """A program that is recomputed in reverse, packed as it would be by itself."""
    body = program_called(eqn)
    flat = flatten(body)
    moving = [i for i, v in enumerate(values) if not isinstance(v.value, np.ndarray)]

    def run(*arrays: Value) -> tuple[list[Any], list[Packed]]:
        given = dict(zip(moving, arrays, strict=True))
        env = {i: Packed(x, flat.shapes[i]) for i, x in flat.consts.items()}
        env.update((i, replace(v, value=given.get(i, v.value))) for i, v in enumerate(values))

        def read(i: int | Constant) -> Packed:
            return Packed(i.value, i.shape) if isinstance(i, Constant) else env[i]

        inner = rows.inside()
        with recording.run(body.jaxpr):
            run_step = lambda step, xs: run_and_note(inner, step.eqn, xs)
            walk(flat.steps, env, read, run_step, Constant)
        results = list(map(read, flat.outputs))
        return [x.value for x in results], [replace(x, value=None) for x in results]

    given = [values[i].value for i in moving]
    program, layouts = _compat.stage_described(run, list(map(jax.typeof, given)))
    outs = bind_call(eqn.primitive, eqn.params, program, given)
    return [replace(x, value=out) for x, out in zip(layouts, outs, strict=True)]


def _places(rows: PackedRows, eqn: Eqn) -> Packed:
    """Each element's place in its row, as counted by an `iota` over the row."""
    aval, at = eqn.outvars[0].aval, eqn.params["dimension"]
    index = rows.of(aval.shape[at])
    places = jnp.asarray(index.places, aval.dtype)
    bounds = rows.sizes.bounds_of(aval.shape)
    return Packed(lax.broadcast_in_dim(places, bounds, (at,)), aval.shape)


def _reduce(rows: PackedRows, eqn: Eqn, x: Packed, at: int) -> Packed:
    name, axes = eqn.primitive.name, eqn.params["axes"]
    index = rows.of(x.shape[at])
    value = x.value
    others = tuple(a for a in axes if a != at)
    if others:  # those first: what is left is smaller
        value = reduce_few_or_many(eqn, value, others)
    value = move_axis(value, at - sum(a < at for a in others), 0)
    op = Operation(eqn, rows.sizes)
    own = x.shape[at], *value.shape[1:]
    value = op.cut(value, own)
    lengths = None
    if not str(own[0]).isidentifier():  # between rows there are elements of none
        lengths = jnp.maximum(rows.size_of_rows(own[0]), 0).astype(np.int32)
    return Packed(reduce_rows(REDUCED[name], value, index, lengths), eqn.outvars[0].aval.shape, 0)


def _for_each_element(rows: PackedRows, eqn: Eqn, x: Packed, shape: Shape) -> Row:
    """An operand as it is in one long row: what differs between rows, for each element."""
    if x.axis is None:
        return Row(x.value, x.shape)
    at = ragged_axis(shape)
    assert at is not None
    index = rows.of(shape[at])
    dims = eqn.params.get("broadcast_dimensions", range(len(x.shape)))
    if len(x.shape) == 0:
        dims = ()
    # Given as many axes as the result has, of size one where the operand does not vary.
    value = move_axis(x.value, x.axis, 0)
    spread = [1] * len(shape)
    for d, size in zip(dims, x.shape, strict=True):
        spread[d] = size
    assert spread[at] == 1
    del spread[at]
    value = move_axis(lax.reshape(value, (value.shape[0], *spread)), 0, at)
    value = take_clipped(value, index.rows, at, indices_are_sorted=True)
    bounds = rows.sizes.bounds_of(shape)
    value = lax.broadcast_in_dim(value, bounds, tuple(range(len(bounds))))
    return Row(Operation(eqn, rows.sizes).cut(value, shape), tuple(shape))
