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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.buffers import blank
from batchax.execution.chunk_loop import ChunkBody, ChunkLoop, chunk_loop
from batchax.execution.operand_specs import WHOLE, Lanes
from batchax.kernel.axis import Axis, AxisPosition, axis_to_front
from batchax.kernel.captured import closed_over
from batchax.kernel.inner import batch_function
from batchax.rows.layouts import Costs, differing_values
from batchax.rows.packed import Packed, PackedRows
from batchax.rows.packing import is_packable, ragged_axis
from batchax.rows.sizes import Sizes
from batchax.rows.steps import RowProgram
from batchax.rules.hazards import find_collective
from batchax.rules.masking import is_inexact
from batchax.user_rules.linear import linear_with_transpose


@dataclass(frozen=True)
class SizeClasses:
    """Which classes rows may be in, and how many blocks they fill.

    Attributes:
      bounds: for each class, from that of the longest rows down, the bound of each size.
      rows: for each class how many of its rows a block holds.
      blocks: as many as all rows fill at most, whatever their lengths.
    """

    bounds: tuple[Mapping[str, int], ...]
    rows: tuple[int, ...]
    blocks: int

    @classmethod
    def of(
        cls, bounds: Mapping[str, int], room: Mapping[str, int], count: int, most: int, rows: int
    ) -> SizeClasses:
        """At most so many classes.

        Args:
          bounds: the greatest value of each size.
          room: how many elements packed rows have room for, by size.
          count: how many rows there are.
          most: how many classes there may be.
          rows: how many of the longest rows a block holds.
        """
        number = max(1, min(most, max(bounds.values()).bit_length()))
        halved = tuple({n: max(1, b >> k) for n, b in bounds.items()} for k in range(number))
        # A row that is not in the last class is longer, in one of its sizes, than half of the
        # bound of its class: so many times 2 ** k rows of class k take more than a bound's room.
        longer = sum(2 * room[n] // (rows * max(b, 1)) for n, b in bounds.items())
        fewest = longer + count // (rows << (number - 1))
        blocks = min(fewest + len(bounds), count // rows) + number  # the last of each is not full
        return cls(halved, tuple(rows << k for k in range(number)), blocks)

    def sizes(self, k: int, values: Mapping[str, Any]) -> Sizes:
        """What symbols stand for in class `k`."""
        return Sizes(self.bounds[k], values)

    def widths(self, dim: Any) -> np.ndarray:
        """The room that a row has in each class along a dimension of size `dim`."""
        return np.array([self.sizes(k, {}).bound(dim) for k in range(len(self.rows))], np.int32)

    def elements(self, dim: Any) -> int:
        """The elements of a block along a dimension of size `dim`."""
        return int((self.widths(dim) * np.array(self.rows)).max())


@dataclass(frozen=True)
class _Elements:
    """Where rows are along an axis of an array.

    Attributes:
      starts, sizes: of each row.
      rows, places: of each element of the axis: its row, and its place there.
    """

    starts: Any
    sizes: Any
    rows: Any
    places: Any

    @property
    def inside(self) -> Any:
        """Which elements of the axis belong to a row."""
        return (self.rows < self.sizes.shape[0]) & (self.places < self._of_rows(self.sizes))

    def _of_rows(self, x: Any) -> Any:
        return jnp.take(x, self.rows, mode="clip")


class _Blocks:
    """The block and the slot of each row, and the row in each slot of each block."""

    def __init__(self, classes: SizeClasses, lengths: Mapping[str, Any]) -> None:
        self.classes = classes
        capacity = jnp.array(classes.rows, np.int32)
        count, number = len(next(iter(lengths.values()))), len(capacity)
        fits = [
            jnp.stack([lengths[n] <= b for n, b in bounds.items()]).all(0)
            for bounds in classes.bounds[1:]
        ]
        nothing = jnp.zeros(count, np.int32)
        self.class_of_row = sum((x.astype(np.int32) for x in fits), nothing)
        kinds = np.arange(number, dtype=np.int32)
        rows = (self.class_of_row[:, None] == kinds).sum(0, dtype=np.int32)
        last_row = jnp.cumsum(rows, dtype=np.int32)
        filled = (rows + capacity - 1) // capacity
        last_block = jnp.cumsum(filled, dtype=np.int32)
        first_row, first_block = last_row - rows, last_block - filled
        order = jnp.argsort(self.class_of_row, stable=True).astype(np.int32)
        rank = jnp.argsort(order).astype(np.int32) - first_row[self.class_of_row]
        room = capacity[self.class_of_row]
        self.block, self.slot = first_block[self.class_of_row] + rank // room, rank % room

        blocks = np.arange(classes.blocks, dtype=np.int32)
        self.number = (blocks[:, None] >= last_block).sum(1, dtype=np.int32)
        self.kind = jnp.minimum(self.number, np.int32(number - 1))  # of those that hold none, too
        first = first_row[self.kind] + (blocks - first_block[self.kind]) * capacity[self.kind]
        slots = np.arange(classes.rows[-1], dtype=np.int32)
        places = first[:, None] + slots
        self.own = (slots < capacity[self.kind][:, None]) & (places < last_row[self.kind][:, None])
        # In place of a row that is missing the first of the block is run again.
        places = jnp.where(self.own, places, first[:, None])
        self.row = jnp.take(order, places, mode="clip")
        self.own &= (self.number < number)[:, None]

    @property
    def _slots(self) -> Any:
        """Where each row is among the slots of all blocks."""
        return self.block * np.int32(self.classes.rows[-1]) + self.slot

    def take(self, x: Any) -> Any:
        """An array with the rows in front as one with blocks and slots in front."""
        out = _moved(x, self.row.reshape(-1), self._slots)
        return out.reshape(*self.row.shape, *x.shape[1:])

    def put(self, x: Any) -> Any:
        """What `take` made."""
        back = jnp.where(self.own, self.row, -1).reshape(-1)
        return _moved(x.reshape(-1, *x.shape[2:]), self._slots, back)

    def split(self, x: Any, dim: Any, elements: _Elements) -> Any:
        """Rows along axis 0 in blocks: block, place in the block."""
        there, _ = self._places(dim, elements)
        out = _moved(x, there, self._elements(dim, elements))
        return out.reshape(self.classes.blocks, -1, *x.shape[1:])

    def join(self, x: Any, dim: Any, elements: _Elements) -> Any:
        """What `split` made."""
        there = self._elements(dim, elements)
        _, back = self._places(dim, elements)
        return _moved(x.reshape(-1, *x.shape[2:]), there, back)

    def _elements(self, dim: Any, elements: _Elements) -> Any:
        """Where in the blocks each element is; -1 for those of no row."""
        widths = jnp.asarray(self.classes.widths(dim))
        first = self.block * self.classes.elements(dim) + self.slot * widths[self.class_of_row]
        place = jnp.take(first, elements.rows, mode="clip") + elements.places
        return jnp.where(elements.inside, place, -1)

    def _places(self, dim: Any, elements: _Elements) -> tuple[Any, Any]:
        """The element at each place of the blocks; the same but for rows that run again.

        -1 where there is none.
        """
        widths = jnp.maximum(jnp.asarray(self.classes.widths(dim)), 1)[self.kind][:, None]
        places = np.arange(self.classes.elements(dim), dtype=np.int32)
        slot, place = places // widths, places % widths
        of_slots = lambda x: jnp.take_along_axis(x, slot, 1, mode="clip")
        start, size = (of_slots(x[self.row]) for x in (elements.starts, elements.sizes))
        there = jnp.where((place < size) & (slot < self.row.shape[1]), start + place, -1)
        return there.reshape(-1), jnp.where(of_slots(self.own), there, -1).reshape(-1)


def _moved(x: Any, there: Any, back: Any) -> Any:
    """The entries `there` of `x` along axis 0, zero for -1; in reverse those at `back` are taken.

    JAX would transpose a gather to a scatter, which on a CPU takes a hundred times as long.
    """
    of = lambda k: lambda indices, xs: [_take_or_zero(xs[0], indices[k])]
    if not is_inexact(x):
        return of(0)([there, back], [x])[0]
    return linear_with_transpose(of(0), of(1), [there, back], [x], "rows in blocks")[0]


def _take_or_zero(x: Any, index: Any) -> Any:
    taken = jnp.take(x, index, axis=0, mode="clip")
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys: there is no zero
        return taken
    hit = lax.broadcast_in_dim(index >= 0, taken.shape, (0,))
    return lax.select(hit, taken, lax.full_like(taken, 0))


def check_program(axis: Axis, program: _compat.ClosedJaxpr, in_chunks: bool) -> None:
    """Refuses what cannot run in blocks of rows that are in no order.

    Raises:
      UnsupportedError: says why.
    """
    jaxpr = program.jaxpr
    if in_chunks:
        why = "batch_size was given, too, and rows run in blocks of their own"
    elif axis.mesh_axis is not None or axis.spmd_name is not None:
        why = "rows are spread over a mesh"
    elif _compat.calls_back(program.effects):
        why = "the function calls the host, which blocks would do in another order, and too often"
    elif find_collective(jaxpr) is not None:
        why = "the function has a collective over a named axis, which all rows must take part in"
    elif _compat.makes_references(program.effects):
        why = "the function makes references (jax.new_ref)"
    elif any(map(closed_over, jaxpr.eqns)):
        why = "a derivative rule in the function closes over values of the row"
    else:
        return
    raise UnsupportedError(
        f"buckets was given, and the lengths of rows are traced here, so that they would be put "
        f"into buckets while they run; but {why}. Leave buckets out, or call vmap where lengths "
        "are known, outside of jit."
    )


def rows_in_block(program: RowProgram, batched: Sequence[bool], costs: Costs) -> int:
    """How many of the longest rows a block holds.

    The more, the less it weighs to begin a block; the fewer, the less is computed in vain, as the
    last block of each class is seldom full.
    """
    differs = differing_values(program, batched)
    steps = (s for s in program.steps if any(differs[i] for i in s.outputs))
    work = sum(costs.of(step, "padded", differs) for step in steps) / costs.rows
    worth = 100_000.0 if jax.default_backend() == "cpu" else 50_000_000.0  # nanoseconds
    rows = 1
    while rows * work < worth and rows * _LEAST_BLOCKS < costs.rows:
        rows *= 2
    return rows


_LEAST_BLOCKS = 16  # that rows of one length should make

OneRow = Callable[..., list[Any]]


def run_in_classes(
    rows: PackedRows,
    classes: SizeClasses,
    one_row: OneRow,
    arguments: Sequence[Packed],
    shapes: Sequence[tuple[Any, ...]],
) -> list[Packed]:
    """The results of a function of one padded row for all rows.

    Args:
      rows: those that there are.
      classes: which they may be in.
      one_row: the function, of sizes and padded arrays.
      arguments: of the function. Ragged ones are packed, or padded with the rows in front.
      shapes: of the results for one row.

    Returns:
      Ragged results packed, if they have the size of a row, others padded.
    """
    index = {name: segments.index for name, segments in rows.segments.items()}
    lengths = {name: jnp.asarray(each.lengths) for name, each in index.items()}
    blocks, own = _Blocks(classes, lengths), Sizes({}, lengths)
    count = rows.axis.size

    def elements_of(dim: Any, bound: int | None) -> _Elements:
        if bound is None:
            segments = rows.segments[str(dim)]
            return _Elements(
                jnp.asarray(segments.index.starts),
                lengths[str(dim)],
                segments.rows,
                segments.places,
            )
        all_rows = np.arange(count, dtype=np.int32)
        places = np.arange(count * bound, dtype=np.int32)
        return _Elements(jnp.asarray(all_rows * bound), own.size(dim), places // bound, places % bound)

    specs, operands = [], []
    for given in arguments:
        at = ragged_axis(given.shape)
        if at is not None:
            bound = None if given.axis is None else given.value.shape[at + 1]
            x = jnp.moveaxis(
                given.value, at if bound is None else at + 1, 0 if bound is None else 1
            )
            x = x if bound is None else x.reshape(-1, *x.shape[2:])
            x = blocks.split(x, given.shape[at], elements_of(given.shape[at], bound))
        elif given.axis is not None:
            x = blocks.take(jnp.moveaxis(given.value, given.axis, 0))
        else:
            x = given.value
        operands.append(x)
        specs.append(WHOLE if at is None and given.axis is None else Lanes(0))
    names = list(lengths)
    operands = [*(blocks.take(lengths[name]) for name in names), *operands]
    specs = [*[Lanes(0)] * len(names), *specs]
    kinds = [*[((), 0)] * len(names), *((given.shape, given.axis) for given in arguments)]

    def of_class(k: int) -> Callable[..., tuple[list[Any], list[AxisPosition]]]:
        lanes = replace(rows.axis, size=classes.rows[k])

        def padded_row(*values: Any) -> list[Any]:
            sizes = classes.sizes(k, dict(zip(names, values, strict=False)))
            return one_row(sizes, *values[len(names) :])

        def run(*xs: Any) -> tuple[list[Any], list[AxisPosition]]:
            given, axes = [], []
            for x, (shape, axis) in zip(xs, kinds, strict=True):
                at = ragged_axis(shape)
                if at is not None:
                    width = int(classes.widths(shape[at])[k])
                    x = x[: lanes.size * width].reshape(lanes.size, width, *x.shape[1:])
                    x = jnp.moveaxis(x, 1, at + 1)
                elif axis is not None:
                    x = x[: lanes.size]
                given.append(x)
                axes.append(None if at is None and axis is None else 0)
            outs, found = batch_function(lanes, padded_row, given, axes)
            return [
                _as_block(classes, axis_to_front(lanes, x, a), shape)
                for x, a, shape in zip(outs, found, shapes, strict=True)
            ], found

        return run

    types = [
        jax.typeof(x) if spec is WHOLE else jax.typeof(x).update(shape=x.shape[1:])
        for x, spec in zip(operands, specs, strict=True)
    ]
    staged = [_compat.stage_described(of_class(k), types) for k in range(len(classes.rows))]
    programs = [program for program, _ in staged]
    out_types = programs[0].out_avals

    def nothing(*xs: Any) -> list[Any]:
        return [blank(aval, 0) for aval in out_types]

    def one_block(start: Any, number: Any, *xs: Any) -> list[Any]:
        given = [x if s is WHOLE else lax.squeeze(x, (0,)) for x, s in zip(xs, specs, strict=True)]
        branches = [
            functools.partial(eval_jaxpr, program.jaxpr, program.consts) for program in programs
        ]
        outs = lax.switch(lax.squeeze(number, (0,)), [*branches, nothing], *given)
        return [lax.expand_dims(x, (0,)) for x in outs]

    loop = ChunkLoop(
        ChunkBody(lambda width: one_block),
        (Lanes(0), *specs),
        (Lanes(0),) * len(shapes),
        classes.blocks,
        1,
    )
    outs = chunk_loop(loop, [blocks.number, *operands])
    results = []
    for i, (x, shape) in enumerate(zip(outs, shapes, strict=True)):
        at = ragged_axis(shape)
        if at is None:
            x = blocks.put(x)
            x = _compat.weakly(x) if out_types[i].weak_type else x
            shared = all(found[i] is None for _, found in staged)
            results.append(Packed(x[0], shape, None) if shared else Packed(x, shape, 0))
            continue
        if is_packable(shape):
            x = blocks.join(x, shape[at], elements_of(shape[at], None))
            results.append(Packed(jnp.moveaxis(x, 0, at), shape))
            continue
        bound = int(classes.widths(shape[at])[0])
        x = blocks.join(x, shape[at], elements_of(shape[at], bound))
        x = x.reshape(count, bound, *x.shape[1:])
        results.append(Packed(jnp.moveaxis(x, 1, at + 1), shape, 0))
    return results


def _as_block(classes: SizeClasses, x: Any, shape: Sequence[Any]) -> Any:
    """A result of the rows of a block, of which there are as many elements in any class."""
    at = ragged_axis(shape)
    if at is None:
        return _with_room(x, classes.rows[-1])
    x = jnp.moveaxis(x, at + 1, 1)
    x = x.reshape(-1, *x.shape[2:])
    return _with_room(x, classes.elements(shape[at]))


def _with_room(x: Any, size: int) -> Any:
    if x.shape[0] == size:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys: there is no zero
        return x[np.minimum(np.arange(size), x.shape[0] - 1)]
    return jnp.pad(x, [(0, size - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
