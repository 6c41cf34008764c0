"""Rows of traced lengths in size classes: each is padded to the least of a few bounds that it fits.

The bounds are the greatest length, half of it, and so on. Which class a row is in is known when
the program runs, so rows run in *blocks*: a block has the same number of elements whatever its
class, as twice as many rows fit where each is half as long. How many blocks there are at most
follows from the room that packed rows have, since a row fills more than half of its place, but
in the last class. A chunk loop runs one block after another, each by the program of its class;
its derivatives are chunk loops as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.execution.chunk_loop import (
    WHOLE,
    ActiveMask,
    ChunkBody,
    ChunkLoop,
    Gathered,
    chunk_loop,
)
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.axis import Axis, Position, axis_to_front
from batchax.kernel.captured import closed_over
from batchax.kernel.inner import batch_function, returning_alike
from batchax.rows.blocks import Blocks, Dims, Elements, SizeClasses
from batchax.rows.class_switch import class_switch
from batchax.rows.found_places import find_found
from batchax.rows.packed import Packed, PackedRows
from batchax.rows.sizes import Sizes, ragged_axes, ragged_axis
from batchax.rules.hazards import find_collective


def obstacle(axis: Axis, program: ClosedJaxpr, in_chunks: bool) -> str | None:
    """Why a program cannot run in blocks of rows that are in no order; None if it can."""
    jaxpr = program.jaxpr
    if in_chunks:
        return "batch_size was given, too, and rows run in blocks of their own"
    if axis.mesh_axis is not None or axis.spmd_name is not None:
        return "rows are spread over a mesh"
    if _compat.calls_back(program.effects):
        return "the function calls the host, which blocks would do in another order, and too often"
    if find_found(program):
        return "the function finds sizes, as batchax.compress does"
    if find_collective(jaxpr) is not None:
        return "the function has a collective over a named axis, which all rows must take part in"
    if _compat.makes_references(program.effects):
        return "the function makes references (jax.new_ref)"
    if any(map(closed_over, jaxpr.eqns)):
        return "a derivative rule in the function closes over values of the row"
    return None


def run_in_classes(
    rows: PackedRows,
    classes: SizeClasses,
    one_row: Callable[..., list[Any]],
    arguments: Sequence[Packed],
    shapes: Sequence[tuple[Any, ...]],
) -> list[Packed]:
    """The results of a function of one padded row for all rows: see `regions.RunPadded`.

    `classes` are those that rows may be in.
    """
    lengths = {name: jnp.asarray(each.index.lengths) for name, each in rows.segments.items()}
    given = [*(Packed(x, (), 0) for x in lengths.values()), *arguments]
    whole = [ragged_axis(x.shape) is None and x.axis is None for x in given]
    move = _Moving(rows, classes)
    operands = [x.value if w else move.into_blocks(x) for x, w in zip(given, whole, strict=True)]
    number = move.blocks.number
    used = number < np.int32(len(classes.rows))
    used, number, *operands = _compat.varying_alike([used, number, *operands])

    def padded_row(k: int, *values: Any) -> list[Any]:
        sizes = classes.sizes(k, dict(zip(lengths, values, strict=False)))
        return one_row(sizes, *values[len(lengths) :])

    def of_class(k: int, *xs: Any) -> tuple[list[Any], list[Position]]:
        lanes = replace(rows.axis, size=classes.rows[k])
        args = [
            x if w else _rows_of_block(classes, k, x, each.shape)
            for x, w, each in zip(xs, whole, given, strict=True)
        ]
        axes = [None if w else 0 for w in whole]
        outs, at = batch_function(lanes, functools.partial(padded_row, k), args, axes)
        return [
            _block_of_rows(classes, axis_to_front(lanes, x, a), shape)
            for x, a, shape in zip(outs, at, shapes, strict=True)
        ], at

    types = [
        jax.typeof(x) if w else jax.typeof(x).update(shape=x.shape[1:])
        for x, w in zip(operands, whole, strict=True)
    ]
    staged = [
        _compat.stage_described(functools.partial(of_class, k), types)
        for k in range(len(classes.rows))
    ]
    programs = returning_alike([program for program, _ in staged])
    types = programs[0].out_avals

    def one_block(start: Any, used: Any, number: Any, *xs: Any) -> list[Any]:
        given = [x if w else lax.squeeze(x, (0,)) for x, w in zip(xs, whole, strict=True)]
        outs = class_switch(lax.squeeze(number, (0,)), programs, given)
        return [lax.expand_dims(x, (0,)) for x in outs]

    specs = (ActiveMask(first=True), Gathered(0), *(WHOLE if w else Gathered(0) for w in whole))
    body = ChunkBody(lambda width: one_block)
    loop = ChunkLoop(body, specs, (Gathered(0),) * len(shapes), classes.blocks, 1)
    outs = chunk_loop(loop, [used, number, *operands])
    results = []
    for i, (x, shape) in enumerate(zip(outs, shapes, strict=True)):
        x = move.out_of_blocks(_compat.weakly(x) if types[i].weak_type else x, shape)
        # What rows share is the same in each of them: the first stands for all.
        shared = ragged_axis(shape) is None and all(at[i] is None for _, at in staged)
        results.append(Packed(x.value[0], shape) if shared else x)
    return results


class _Moving:
    """Values of all rows moved into blocks, and back."""

    def __init__(self, rows: PackedRows, classes: SizeClasses) -> None:
        self.rows = rows
        self.lengths = {name: each.index.lengths for name, each in rows.segments.items()}
        self.blocks = Blocks(classes, self.lengths)
        self._bounds = Sizes({name: each.index.bound for name, each in rows.segments.items()}, {})

    def into_blocks(self, given: Packed) -> Any:
        """Blocks are in front; then come the elements of a block, or the slots for its rows."""
        at, x = ragged_axes(given.shape), given.value
        if not at:
            assert given.axis is not None
            return self.blocks.take(jnp.moveaxis(x, given.axis, 0))
        dims = [given.shape[k] for k in at]
        if given.axis is None:
            return self.blocks.split(jnp.moveaxis(x, at[0], 0), dims, self._packed(dims))
        x, bounds = _collapsed(x, at)
        return self.blocks.split(x, dims, self._padded(dims, bounds))

    def out_of_blocks(self, x: Value, shape: tuple[Any, ...]) -> Packed:
        """A result, from what it is in blocks."""
        at = ragged_axes(shape)
        if not at:
            return Packed(self.blocks.put(x), shape, 0)
        dims = [shape[k] for k in at]
        if self.rows.holds(shape):
            x = self.blocks.join(x, dims, self._packed(dims))
            return Packed(jnp.moveaxis(x, 0, at[0]), shape)
        bounds = list(map(self._bounds.bound, dims))
        x = self.blocks.join(x, dims, self._padded(dims, bounds))
        return Packed(_expanded(x, at, [self.rows.axis.size, *bounds]), shape, 0)

    def _packed(self, dims: Dims) -> Elements:
        segments = self.rows.along(tuple(map(str, dims)))
        index, pieces, places = segments.index, segments.rows, [segments.places]
        each = math.prod(index.before)  # pieces of a row
        for bound in reversed(index.before):
            places.insert(0, pieces % np.int32(bound))
            pieces = pieces // np.int32(bound)
        return Elements(index.starts[::each], list(map(self._size, dims)), pieces, places, None)

    def _padded(self, dims: Dims, bounds: Sequence[int]) -> Elements:
        rows, *places = np.indices((self.rows.axis.size, *bounds), np.int32)
        starts = np.arange(self.rows.axis.size, dtype=np.int32) * np.int32(math.prod(bounds))
        sizes = list(map(self._size, dims))
        return Elements(starts, sizes, rows.reshape(-1), [x.reshape(-1) for x in places], bounds)

    def _size(self, dim: Any) -> Any:
        """The size `dim` of each row; of NumPy where lengths are known."""
        size = _compat.evaluate_size(dim, self.lengths)
        numpy = np if isinstance(size, (np.ndarray, np.generic)) else jnp
        return numpy.maximum(numpy.asarray(size, np.int32), np.int32(0))


def _collapsed(x: Value, at: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Padded rows, with the rows in front, as one axis, and the bounds of their ragged axes."""
    together = range(1, len(at) + 1)
    x = jnp.moveaxis(x, [k + 1 for k in at], together)
    return lax.collapse(x, 0, len(at) + 1), x.shape[1 : len(at) + 1]


def _expanded(x: Value, at: Sequence[int], sizes: Sequence[int]) -> Any:
    """The reverse of `_collapsed`; `sizes` are the number of rows and the bounds."""
    x = x.reshape(*sizes, *x.shape[1:])
    return jnp.moveaxis(x, range(1, len(at) + 1), [k + 1 for k in at])


def _rows_of_block(classes: SizeClasses, k: int, x: Value, shape: Sequence[Any]) -> Any:
    """The rows of a block of class `k`, padded and in front."""
    at, count = ragged_axes(shape), classes.rows[k]
    widths = [int(classes.widths(shape[a])[k]) for a in at]
    return _expanded(x[: count * math.prod(widths)], at, [count, *widths])


def _block_of_rows(classes: SizeClasses, x: Value, shape: Sequence[Any]) -> Any:
    """The reverse of `_rows_of_block`, with as much room as a block of any class needs."""
    at = ragged_axes(shape)
    x, _ = _collapsed(x, at)
    size = classes.elements([shape[a] for a in at]) if at else classes.rows[-1]
    if x.shape[0] == size:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys: there is no zero
        return x[np.minimum(np.arange(size), x.shape[0] - 1)]
    return jnp.pad(x, [(0, size - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
