"""Rows in size buckets: each is padded to the least of a few bounds that it fits.

Lengths are known, and each row is padded to the longest of its group (`groups.py`). Or they are
traced, and rows run in *blocks*, as their bounds are the greatest length, half of it, and so on. A
block has the same number of elements whatever its class, as twice as many rows fit where each is
half as long. How many blocks there are at most follows from the size of packed arrays, since a
row fills more than half of its place, but in the last class. A chunk loop runs one block after
another, each by the program of its class; its derivatives are chunk loops as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.analysis.cost import BLOCK, COMPILED_STEP, ROWS
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.execution.chunk_loop import (
    WHOLE,
    ActiveMask,
    ChunkBody,
    ChunkLoop,
    Gathered,
    chunk_loop,
)
from batchax.execution.slices import entry_of, put_entry, put_part
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.kernel.axis import Axis, Position, axis_to_front
from batchax.kernel.captured import closed_over
from batchax.kernel.inner import batch_function, returning_alike
from batchax.kernel.own_primitive import pullback_of, tangents_of, with_tangent_rule, with_values
from batchax.rows.buckets import Weight, fewer_boxes, lightest_groups
from batchax.rows.groups import KnownGroups, of_one_row
from batchax.rows.index import PROGRAMS, WINDOW, IndexProgram, index_arrays, moved
from batchax.rows.layouts import Costs, RowProgram, RowStep, differing_values
from batchax.rows.packed import Packed, PackedRows
from batchax.rows.packed_forms import Names, can_hold
from batchax.rows.sizes import Sizes, find_found, has_symbols, ragged_axes, ragged_axis
from batchax.rules.masking import find_collective, is_inexact

Dims = Sequence[Any]
"""The sizes of the ragged axes of a value, in order."""


@dataclass(frozen=True)
class SizeClasses:
    """Which classes rows may be in, and how many blocks they fill."""

    # For each class, from that of the longest rows down, the bound of each size.
    bounds: tuple[Mapping[str, int], ...]
    rows: tuple[int, ...]  # for each class how many of its rows a block holds
    blocks: int  # as many as all rows fill at most, whatever their lengths

    @classmethod
    def of(
        cls, bounds: Mapping[str, int], room: Mapping[str, int], count: int, most: int, rows: int
    ) -> SizeClasses:
        """At most so many classes, for `count` rows.

        Sizes have these bounds, and packed arrays hold so many elements (`room`), by size. A block
        holds so many `rows` of the longest.
        """
        number = max(1, min(most, max(bounds.values()).bit_length()))
        whole = {n: _divisible(b, 1 << (number - 1)) for n, b in bounds.items()}
        halved = tuple({n: max(1, b >> k) for n, b in whole.items()} for k in range(number))
        # A row of class k that is not the last is longer, in one of its sizes, than half of the
        # bound of its class. So those of a full block have more than half the elements of `rows`
        # rows of the greatest length.
        longer = sum(2 * room[n] // (rows * max(b, 1)) for n, b in bounds.items())
        fewest = longer + count // (rows << (number - 1))
        blocks = min(fewest + len(bounds), count // rows) + number  # the last of each is not full
        return cls(halved, tuple(rows << k for k in range(number)), blocks)

    def sizes(self, k: int, values: Mapping[str, Any]) -> Sizes:
        return Sizes(self.bounds[k], values)

    def widths(self, dim: Any) -> np.ndarray:
        """The bound of a dimension of size `dim` in each class."""
        return np.array([self.sizes(k, {}).bound(dim) for k in range(len(self.rows))], np.int32)

    def elements(self, dims: Dims) -> int:
        each = np.array([self.widths(dim) for dim in dims], np.int64)
        return int((each.prod(0) * np.array(self.rows)).max())


_MOST_ADDED = 1 / 16  # of a bound


def _divisible(bound: int, by: int) -> int:
    """A bound that can be halved without a remainder, if one is near.

    Rows of each class then fill a block to its end, and nothing is cut off or added, which would
    be a function to compile for each array and class.
    """
    rounded = -(-bound // by) * by
    return rounded if rounded - bound <= _MOST_ADDED * bound else bound


_MOST_CLASSES = 5  # that are chosen unasked: each computes blocks that are not full
_MOVED = 4  # places for each in blocks or packed rows: found by their indices, there and back
_MOST_LOSS = 1.15  # at most, of the time of padded rows, if no length is shorter
_WORTH_ON_CPU = 100_000.0  # nanoseconds of work, compared with which the start of a block is cheap
_WORTH = 50_000_000.0  # the same where many rows run at a time
_RUNS = 1_000  # of a compiled program, over which the time to compile it is spread
_LEAST_BLOCKS = 16  # that rows of one length should make


def find_classes(
    program: RowProgram, batched: Sequence[bool], costs: Costs, most: int
) -> SizeClasses:
    differs = differing_values(program, batched)
    steps = (s for s in program.steps if any(differs[i] for i in s.outputs))
    work = sum(costs.of(step, packed=False, differs=differs) for step in steps) / costs.rows
    worth = _WORTH_ON_CPU if jax.default_backend() == "cpu" else _WORTH
    # Of the longest rows a block holds so many. The more, the less it weighs to begin a block; the
    # fewer, the less is computed in vain, as the last block of each class is seldom full.
    rows = 1
    while rows * work < worth and rows * _LEAST_BLOCKS < costs.rows:
        rows *= 2
    return SizeClasses.of(costs.padded.bounds, costs.packed.bounds, costs.rows, most, rows)


def choose_classes(
    program: RowProgram, packed: Sequence[bool | None], batched: Sequence[bool], costs: Costs
) -> SizeClasses | None:
    """The size buckets that padded steps take least time in; None for one bound for all rows."""
    steps, time_of_each = _padded_steps(program, packed, batched, costs)
    bounds = costs.padded.bounds
    time = lambda bounds: float(time_of_each(bounds).sum())
    if not steps:
        return None
    mean = max(_filled(costs, names) for names in [*zip(costs.alone), *costs.room])
    least_length, greatest = max(0.0, 2 * mean - 1), min(1.0, 2 * mean)  # of the bound
    spread = max(greatest - least_length, 1e-9)

    padded = costs.rows * time(bounds)
    best, least = None, padded
    for most in range(2, _MOST_CLASSES + 1):
        classes = find_classes(program, batched, costs, most)
        if len(classes.rows) < most:
            break
        times = [time(each) for each in classes.bounds]
        places = classes.blocks * classes.rows[0] * costs.places(bounds)
        moved = ROWS.place * _MOVED * (places + costs.held) + _joined(program, costs)
        fixed = moved + _compiling(len(times), steps)
        if classes.blocks * (classes.rows[0] * times[0] + BLOCK) + fixed > _MOST_LOSS * padded:
            continue
        # Rows longer than the bound of the next class.
        longer = [min(1.0, max(0.0, (greatest - 0.5 ** (k + 1)) / spread)) for k in range(most - 1)]
        shares = [a - b for a, b in zip([*longer, 1.0], [0.0, *longer], strict=True)]
        # The last block of each class is half full, say.
        taken = fixed + sum(
            (share * costs.rows / held + 0.5) * (BLOCK + held * each)
            for share, held, each in zip(shares, classes.rows, times, strict=True)
        )
        if taken < least:
            best, least = classes, taken
    return best


_MOST_GROUPS = 8  # of rows of known lengths: what more of them gain is little


def choose_groups(
    program: RowProgram,
    packed: Sequence[bool | None],
    batched: Sequence[bool],
    costs: Costs,
    lengths: Mapping[str, np.ndarray],
) -> KnownGroups | None:
    """The groups that padded steps take least time in; None for one bound for all rows."""
    steps, times = _padded_steps(program, packed, batched, costs)
    if not steps:
        return None
    needed = np.maximum(np.stack(list(lengths.values()), 1), 1)
    time, fixed = _time_by_size(times, costs.padded.bounds, list(lengths)), _compiling(1, steps)
    # Into groups, and back.
    moved = 2 * ROWS.place * costs.held + _joined(program, costs)
    best, least = None, costs.rows * times(costs.padded.bounds).sum()
    groupings = (
        fewer_boxes(needed, _MOST_GROUPS, time)
        if len(lengths) > 1
        else (lightest_groups(needed, most, time) for most in range(1, _MOST_GROUPS + 1))
    )
    for groups in groupings:
        sizes = np.stack([needed[rows].max(0) for rows in groups])
        taken = float(np.dot(time(sizes), list(map(len, groups)))) + (len(groups) - 1) * fixed
        taken += (len(groups) > 1) * moved
        if taken < least:
            best, least = groups, taken
    return None if best is None else KnownGroups(best, lengths)


def _time_by_size(times: Times, bounds: Mapping[str, int], names: Sequence[str]) -> Weight:
    """Nanoseconds for steps of one padded row, for each of some sizes of rows along `names`.

    Of each step it is taken to be a power of each size.
    """
    most = np.array([bounds[name] for name in names])
    fewer = np.maximum(most // _SMALLER, 1)
    greatest = times(bounds)
    smaller = [times({**bounds, name: int(n)}) for name, n in zip(names, fewer, strict=True)]
    shrink = np.log(np.where(most > fewer, most / fewer, np.e))
    powers = np.log(greatest / np.stack(smaller)).T / shrink
    # Steps that grow alike are one.
    powers, number = np.unique(np.round(4 * powers) / 4, axis=0, return_inverse=True)
    together = np.bincount(number.reshape(-1), greatest, len(powers))
    return lambda sizes: np.exp(np.log(sizes / most) @ powers.T) @ together


_SMALLER = 4  # of the greatest size, at which the time that steps take is estimated, too


def _filled(costs: Costs, names: Names) -> float:
    """The share of each size that rows have at the mean, if packed arrays are full."""
    several = math.prod(costs.padded.bounds[name] for name in names)
    room = costs.room[names] if names in costs.room else costs.packed.bounds["".join(names)]
    return (room / several / costs.rows) ** (1 / len(names))


def _joined(program: RowProgram, costs: Costs) -> float:
    shapes = [program.shapes[i] for i in program.outputs if isinstance(i, int)]
    several = [s for s in shapes if has_symbols(s) and not can_hold(costs.room, s)]
    return sum(costs.move(shape) for shape in several)


def _compiling(groups: int, steps: Sequence[RowStep]) -> float:
    return groups * len(steps) * COMPILED_STEP / _RUNS


Times = Callable[[Mapping[str, int]], np.ndarray]
"""Nanoseconds for each of some steps of one padded row, by the bounds of its sizes."""


def _padded_steps(
    program: RowProgram, packed: Sequence[bool | None], batched: Sequence[bool], costs: Costs
) -> tuple[list[RowStep], Times]:
    steps = [step for step, p in zip(program.steps, packed, strict=True) if p is False]
    differs = differing_values(program, batched)

    def times(bounds: Mapping[str, int]) -> np.ndarray:
        each = replace(costs, padded=Sizes(bounds, {}))
        of_steps = [each.of(step, packed=False, differs=differs) for step in steps]
        return np.array(of_steps) / costs.rows + 1e-3

    return steps, times


def obstacle(axis: Axis, program: ClosedJaxpr, in_chunks: bool) -> str | None:
    """Why a program cannot run in blocks of rows that are in no order; None if it can."""
    jaxpr = program.jaxpr
    if in_chunks:
        return "batch_size splits rows into chunks, and buckets split them into blocks"
    if axis.mesh_axis is not None or axis.spmd_name is not None:
        return "rows are spread over a mesh"
    if _compat.calls_back(program.effects):
        return (
            "the function has a host callback, which blocks would call in another order, and often"
        )
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
    lengths = {name: jnp.asarray(each.lengths) for name, each in rows.index.items()}
    given = [*(Packed(x, (), 0) for x in lengths.values()), *arguments]
    whole = [ragged_axis(x.shape) is None and x.axis is None for x in given]
    move = _Moving(rows, classes)
    operands = [x.value if w else move.into_blocks(x) for x, w in zip(given, whole, strict=True)]
    number = move.blocks.number
    used = number < np.int32(len(classes.rows))
    used, number, *operands = _compat.varying_alike([used, number, *operands])

    def of_class(k: int, *xs: Value) -> tuple[list[Any], list[Position]]:
        lanes = replace(rows.axis, size=classes.rows[k])
        args = [
            x if w else _rows_of_block(classes, k, x, each.shape)
            for x, w, each in zip(xs, whole, given, strict=True)
        ]
        axes = [None if w else 0 for w in whole]
        padded_row = of_one_row(one_row, lengths, classes.bounds[k])
        outs, at = batch_function(lanes, padded_row, args, axes)
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

    def one_block(start: Value, used: Value, number: Value, *xs: Value) -> list[Any]:
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


def class_switch(number: Value, programs: Sequence[ClosedJaxpr], operands: Values) -> list[Any]:
    """What one of `programs` returns, which take and return the same types.

    Its derivatives compute the program again: JAX would keep residuals of all programs.
    """
    programs, consts = _compat.hoist_constants(*programs)
    runs = [functools.partial(eval_jaxpr, p.jaxpr, p.consts) for p in programs]
    smooth = [k for k, aval in enumerate(programs[0].out_avals) if is_inexact(aval)]

    def switch(number: Value, *xs: Value) -> list[Any]:
        return list(lax.switch(number, runs, *xs))

    def rule(primals: Values, moving: Sequence[int], dots: Values) -> tuple[list[Any], list[Any]]:
        at = [i - 1 for i in moving]

        def forward(residuals: Values, dots: Values) -> list[Any]:
            of = lambda run: lambda xs, dots: tangents_of(run, xs, at, dots, smooth)[1]
            return lax.switch(residuals[0], list(map(of, runs)), residuals[1:], dots)

        def back(residuals: Values, cts: Values) -> list[Any]:
            of = lambda run: lambda xs, cts: [*pullback_of(run, xs, at, smooth)[1]([*cts])]
            return lax.switch(residuals[0], list(map(of, runs)), residuals[1:], cts)

        outs = switch(*primals)
        moved = linear_with_transpose(forward, back, primals, dots) if smooth else []
        return outs, with_values([None] * len(outs), smooth, moved)

    return with_tangent_rule(switch, rule)(*_compat.varying_alike([number, *consts, *operands]))


def _rows_of_block(classes: SizeClasses, k: int, x: Value, shape: Sequence[Any]) -> Any:
    """The rows of a block of class `k`, padded and in front."""
    at, count = ragged_axes(shape), classes.rows[k]
    widths = [int(classes.widths(shape[a])[k]) for a in at]
    return _expanded(x[: count * math.prod(widths)], at, [count, *widths])


def _block_of_rows(classes: SizeClasses, x: Value, shape: Sequence[Any]) -> Any:
    """The reverse of `_rows_of_block`, with the size of the largest block of any class."""
    at = ragged_axes(shape)
    x, _ = _collapsed(x, at)
    size = classes.elements([shape[a] for a in at]) if at else classes.rows[-1]
    if x.shape[0] == size:
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # random keys have no zero
        return x[np.minimum(np.arange(size), x.shape[0] - 1)]
    return jnp.pad(x, [(0, size - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])


def _collapsed(x: Value, at: Sequence[int]) -> tuple[Any, tuple[int, ...]]:
    """Padded rows, with the rows in front, as one axis, and the bounds of their ragged axes."""
    together = range(1, len(at) + 1)
    x = jnp.moveaxis(x, [k + 1 for k in at], together)
    return lax.collapse(x, 0, len(at) + 1), x.shape[1 : len(at) + 1]


def _expanded(x: Value, at: Sequence[int], sizes: Sequence[int]) -> Any:
    x = x.reshape(*sizes, *x.shape[1:])
    return jnp.moveaxis(x, range(1, len(at) + 1), [k + 1 for k in at])


class _Moving:
    """Values of all rows moved into blocks, and back."""

    def __init__(self, rows: PackedRows, classes: SizeClasses) -> None:
        self.rows, self.classes = rows, classes
        self.lengths = {name: each.lengths for name, each in rows.index.items()}
        limits = tuple(tuple(each[name] for name in self.lengths) for each in classes.bounds)
        how = {"limits": limits, "rows": classes.rows, "blocks": classes.blocks}
        own = list(self.lengths.values())
        self.blocks = RowsOfBlocks(*find_positions("blocks", own, **how))
        self._slots = self.blocks.slots(classes.rows[-1])
        self._bounds = Sizes(rows.bounds, {})
        self._of_elements: dict[Any, PlacesOfElements] = {}

    def into_blocks(self, given: Packed) -> Any:
        """Blocks are in front; then come the elements of a block, or the slots for its rows."""
        at, x, bounds, size = ragged_axes(given.shape), given.value, None, -1
        if not at:
            assert given.axis is not None
            to, there, _ = self._slots
            x = jnp.moveaxis(x, given.axis, 0)
        else:
            dims = [given.shape[k] for k in at]
            if given.axis is None:
                x = jnp.moveaxis(x, at[0], 0)
            else:
                x, bounds = _collapsed(x, at)
            to, there, _ = self._places(dims, bounds)
            size = self.classes.elements(dims)
        x = moved(x, 0, there, to)
        return x.reshape(self.classes.blocks, size, *x.shape[1:])

    def out_of_blocks(self, x: Value, shape: tuple[Any, ...]) -> Packed:
        """A result, from what it is in blocks."""
        at, x = ragged_axes(shape), lax.collapse(x, 0, 2)
        if not at:
            to, _, back = self._slots
            return Packed(moved(x, 0, to, back), shape, 0)
        dims, packed = [shape[k] for k in at], self.rows.holds(shape)
        bounds = tuple(map(self._bounds.bound, dims))
        to, _, back = self._places(dims, None if packed else bounds)
        x = moved(x, 0, to, back)
        if packed:
            return Packed(jnp.moveaxis(x, 0, at[0]), shape)
        return Packed(_expanded(x, at, [self.rows.axis.size, *bounds]), shape, 0)

    def _places(self, dims: Dims, bounds: tuple[int, ...] | None) -> PlacesOfElements:
        """Where the elements of packed rows are in blocks, or of rows that are padded to bounds."""
        key = tuple(map(str, dims)), bounds
        if key in self._of_elements:
            return self._of_elements[key]
        if bounds is None:
            index = self.rows.along(tuple(map(str, dims)))
            row_of, places = index.rows, [index.places]
            starts = index.starts[:: math.prod(index.before)]
            for bound in reversed(index.before):
                places.insert(0, row_of % np.int32(bound))
                row_of = row_of // np.int32(bound)
        else:
            count = self.rows.axis.size
            row_of, *places = (x.reshape(-1) for x in np.indices((count, *bounds), np.int32))
            starts = np.arange(count, dtype=np.int32) * np.int32(math.prod(bounds))
        operands = [*self.blocks, starts, row_of, *map(self._size, dims), *places]
        widths = tuple(tuple(self.classes.widths(dim).tolist()) for dim in dims)
        how = {"widths": widths, "room": bounds, "size": self.classes.elements(dims)}
        self._of_elements[key] = PlacesOfElements(*find_positions("elements", operands, **how))
        return self._of_elements[key]

    def _size(self, dim: Any) -> Any:
        """The size `dim` of each row; of NumPy where lengths are known."""
        size = _compat.evaluate_size(dim, self.lengths)
        numpy = np if isinstance(size, (np.ndarray, np.generic)) else jnp
        return numpy.maximum(numpy.asarray(size, np.int32), np.int32(0))


# Which rows are in which block, and where their elements are there. Where lengths are known,
# positions are computed when a program is staged, by NumPy.
class RowsOfBlocks(NamedTuple):
    """Which rows are in which block; blocks are in the order of their first rows."""

    kind: Any  # the class of each row
    block: Any  # where each row is
    slot: Any  # its place there
    number: Any  # the class of each block; as many as there are classes where it holds no row
    held: Any  # how many rows each block holds
    row: Any  # the row in each slot of each block, one block after another

    @property
    def numpy(self) -> Any:
        """NumPy where rows are known; JAX's if not."""
        return np if isinstance(self.number, np.ndarray) else jnp

    def slots(self, slots: int) -> tuple[Any, Any, Any]:
        """Where each row is among the slots of all blocks, and the row in each of these.

        The latter once more, but -1 for those that stand in for missing rows: the first of their
        blocks.
        """
        row, own = _with_stand_ins(self, slots)
        back = self.numpy.where(own, row, np.int32(-1))
        return self.block * np.int32(slots) + self.slot, row.reshape(-1), back.reshape(-1)


class PlacesOfElements(NamedTuple):
    """Where elements are in blocks."""

    at: Any  # the place in all blocks of each element; -1 for those of no row
    there: Any  # the element at each place of the blocks; -1 where there is none
    back: Any  # the same, and -1 for those of rows that are run in place of missing ones


def _with_stand_ins(rows: Any, slots: int) -> tuple[Any, Any]:
    """The row in each slot of each block, and which of these are not in place of missing ones."""
    row, held = rows.row.reshape(-1, slots), rows.held
    own = np.arange(slots, dtype=np.int32)[None] < held[:, None]
    return rows.numpy.where(own, row, row[:, :1]), own


def find_positions(find: str, operands: Sequence[Any], **how: Any) -> list[Any]:
    """What `_blocks` or `_elements` finds, by NumPy if everything is known."""
    if all(isinstance(x, np.ndarray) for x in operands):
        return {"blocks": _blocks, "elements": _elements}[find](np, *operands, **how)
    return index_arrays(find, [jnp.asarray(x, np.int32) for x in operands], **how)


def _blocks(numpy: Any, *lengths: Any, limits: Any, rows: Any, blocks: int) -> list[Any]:
    """As `RowsOfBlocks` has them, of rows of these lengths, for each of their sizes.

    `limits` are the bounds of each size in each class, from that of the longest rows down, of which
    a block holds so many `rows`; there are so many `blocks`.
    """
    count, slots, most = len(lengths[0]), rows[-1], np.int32(len(lengths[0]) - 1)
    capacity = np.array(rows, np.int32)
    ints = lambda x: x.astype(np.int32)
    in_order = lambda x: ints(np.argsort(x, kind="stable") if numpy is np else jnp.argsort(x))
    sums = lambda x: numpy.cumsum(x, dtype=np.int32)
    fits = [
        functools.reduce(numpy.logical_and, (n <= b for n, b in zip(lengths, bounds, strict=True)))
        for bounds in limits[1:]
    ]
    kind: Any = sum(map(ints, fits), numpy.zeros(count, np.int32))
    classes = np.arange(len(rows), dtype=np.int32)
    of_class = ints((kind[:, None] == classes[None]).sum(0))
    first, order = sums(of_class) - of_class, in_order(kind)
    rank = in_order(order) - first[kind]
    # A row opens a block if the rows before it in its class fill the last one.
    room = numpy.take(capacity, kind)
    opens = rank % room == 0
    opener = order[first[kind] + rank // room * room]
    block, slot = (sums(opens) - np.int32(1))[opener], rank % room
    of_block = in_order(~opens)[np.minimum(np.arange(blocks, dtype=np.int32), most)]
    used = np.arange(blocks, dtype=np.int32) < ints(opens.sum())
    its_kind = kind[of_block]
    held = numpy.minimum(numpy.take(capacity, its_kind), of_class[its_kind] - rank[of_block])
    held = numpy.where(used, held, np.int32(0))
    there = (first[its_kind] + rank[of_block])[:, None] + np.arange(slots, dtype=np.int32)[None]
    row = order[numpy.minimum(there, most)]
    filled = np.arange(slots, dtype=np.int32)[None] < held[:, None]
    row = numpy.where(filled, row, np.int32(0)).reshape(-1)
    return [kind, block, slot, numpy.where(used, its_kind, np.int32(len(rows))), held, row]


def _blocks_on_cpu(*lengths: Value, limits: Any, rows: Any, blocks: int) -> list[Any]:
    """As `_blocks`, by a loop over rows, which is one function to compile."""
    count, slots, zero, one = lengths[0].shape[0], rows[-1], np.int32(0), np.int32(1)
    capacity = np.array(rows, np.int32)

    def step(i: Any, state: Any) -> Any:
        i = lax.convert_element_type(i, np.int32)  # in double precision loops count in 64 bits
        opened, last, filled, (kind, block, slot, number, held, row) = state
        own = zero
        for bounds in limits[1:]:
            fits = [entry_of(n, i) <= np.int32(b) for n, b in zip(lengths, bounds, strict=True)]
            own += lax.convert_element_type(functools.reduce(lax.bitwise_and, fits), np.int32)
        before = entry_of(filled, own)
        opens = before == entry_of(jnp.asarray(capacity), own)
        where = lax.select(opens, opened, entry_of(last, own))
        place = lax.select(opens, zero, before)
        placed = [
            put_entry(kind, own, i),
            put_entry(block, where, i),
            put_entry(slot, place, i),
            put_entry(number, own, where),
            put_entry(held, place + one, where),
            put_entry(row, i, where * np.int32(slots) + place),
        ]
        opened += lax.convert_element_type(opens, np.int32)
        return opened, put_entry(last, where, own), put_entry(filled, place + one, own), placed

    full = lambda size, value: lax.full((size,), value, np.int32)
    empty = [full(count, 0) for _ in range(3)]
    empty += [full(blocks, len(rows)), full(blocks, 0), full(blocks * slots, 0)]
    state = zero, full(len(rows), 0), jnp.asarray(capacity), empty
    return lax.fori_loop(zero, np.int32(count), step, state)[-1]


def _elements(numpy: Any, *operands: Value, widths: Any, room: Any, size: int) -> list[Any]:
    """As `PlacesOfElements` has them.

    Operands are those of `RowsOfBlocks`, where each row begins, and the row of each element; then
    for each axis the sizes of rows, and for each axis the places of elements. `widths` are the size
    of a padded row in each class along each axis, and `room` that outside of blocks; None if rows
    are packed. A block holds `size` elements.
    """
    rows, axes = RowsOfBlocks(*operands[:6]), len(widths)
    starts, row_of, *rest = operands[6:]
    sizes, places = rest[:axes], rest[axes:]
    blocks, count = rows.number.shape[0], starts.shape[0]
    slots = rows.row.shape[0] // blocks
    take = functools.partial(numpy.take, mode="clip")

    # Of each class, which slot a place of a block is in, and where in the row it is.
    shape = np.maximum(np.array(widths, np.int32), 1)
    within, of_class = np.broadcast_to(np.arange(size, dtype=np.int32), (shape.shape[1], size)), []
    for width in shape[::-1]:
        of_class.insert(0, within % width[:, None])
        within = within // width[:, None]
    kind = numpy.minimum(rows.number, np.int32(shape.shape[1] - 1))
    slot = take(np.minimum(within, slots), kind, axis=0)
    row, _ = _with_stand_ins(rows, slots)
    ahead = np.arange(blocks, dtype=np.int32)[:, None] * np.int32(slots)
    own = take(row.reshape(-1), ahead + numpy.minimum(slot, np.int32(slots - 1)))
    inside, at_places = slot < slots, []
    for of_axis, length in zip(of_class, sizes, strict=True):
        at_places.append(take(of_axis, kind, axis=0))
        inside &= at_places[-1] < take(length, own)
    along = [take(length, own) for length in sizes] if room is None else list(map(np.int32, room))
    element = take(starts, own) + linear(at_places, along)
    if room is None:  # rows of traced lengths end where the array does
        inside &= element < np.int32(row_of.shape[0])
    there = numpy.where(inside, element, np.int32(-1))
    back = numpy.where(slot < rows.held[:, None], there, np.int32(-1))

    each = [take(width, rows.kind) for width in shape]  # of each row
    first = rows.block * np.int32(size) + rows.slot * math.prod(each)
    at = take(first, row_of) + linear(places, [take(width, row_of) for width in each])
    belongs = row_of < count
    for place, length in zip(places, sizes, strict=True):
        belongs &= place < take(length, row_of)
    at = numpy.where(belongs, at, np.int32(-1))
    return [at, there.reshape(-1), back.reshape(-1)]


def _elements_on_cpu(*operands: Value, size: int, widths: Any, room: Any) -> list[Any]:
    """As `_elements`, by two loops over a few elements at a time, for rows of one axis."""
    if len(widths) > 1:
        return _elements(jnp, *operands, size=size, widths=widths, room=room)
    rows, (starts, row_of, length, _) = RowsOfBlocks(*operands[:6]), operands[6:]
    blocks, count, capacity = rows.number.shape[0], starts.shape[0], row_of.shape[0]
    slots, classes = rows.row.shape[0] // blocks, len(widths[0])
    zero, one, window = np.int32(0), np.int32(1), np.int32(WINDOW)
    within, none = np.arange(WINDOW, dtype=np.int32), np.full(WINDOW, -1, np.int32)
    width = jnp.asarray(np.maximum(widths[0], 1).astype(np.int32))
    # So many rows of a class there are in a block; then comes what its rows leave of the block.
    held = np.array([min(slots, size // max(w, 1)) for w in widths[0]], np.int32)
    rest = jnp.asarray(np.int32(size) - held * np.maximum(widths[0], 1).astype(np.int32))
    held, last = jnp.asarray(held), np.int32(count - 1)
    full = lambda size: lax.full((size + WINDOW,), -1, np.int32)

    def of_element(state: Values) -> Any:
        row, place, at = state
        start = entry_of(starts, row)
        behind = entry_of(starts, lax.min(row + one, last))
        extent = lax.select(row < last, behind, np.int32(capacity)) - start
        its_width = entry_of(width, entry_of(rows.kind, row))
        first = entry_of(rows.block, row) * np.int32(size) + entry_of(rows.slot, row) * its_width
        values = lax.select(place + within < entry_of(length, row), first + place + within, none)
        at = put_part(at, values, start + place)
        leaves = place + window >= extent
        row += lax.convert_element_type(leaves, np.int32)
        return row, lax.select(leaves, zero, place + window), at

    def of_place(state: Values) -> Any:
        block, slot, place, there, back = state
        kind = lax.min(entry_of(rows.number, block), np.int32(classes - 1))
        in_slot, own = slot < entry_of(held, kind), slot < entry_of(rows.held, block)
        row = entry_of(rows.row, block * np.int32(slots) + lax.select(own, slot, zero))
        its_width = entry_of(width, kind)
        here = lax.select(in_slot, lax.min(entry_of(length, row), its_width), zero)
        values = lax.select(place + within < here, entry_of(starts, row) + place + within, none)
        to = block * np.int32(size) + slot * its_width + place
        there = put_part(there, values, to)
        back = put_part(back, lax.select(lax.broadcast(own, (WINDOW,)), values, none), to)
        extent = lax.select(in_slot, its_width, entry_of(rest, kind))
        leaves = place + window >= extent
        place = lax.select(leaves, zero, place + window)
        done = leaves & ~in_slot
        slot = lax.select(done, zero, slot + lax.convert_element_type(leaves, np.int32))
        return block + lax.convert_element_type(done, np.int32), slot, place, there, back

    at = lax.while_loop(lambda s: s[0] < count, of_element, (zero, zero, full(capacity)))[-1]
    start = zero, zero, zero, full(blocks * size), full(blocks * size)
    there, back = lax.while_loop(lambda s: s[0] < blocks, of_place, start)[-2:]
    return [at[:capacity], there[: blocks * size], back[: blocks * size]]


def linear(places: Sequence[Any], room: Sequence[Any]) -> Any:
    """The place of an element among all of a row, the last axis of which is the fastest."""
    at = places[0]
    for place, size in zip(places[1:], room[1:], strict=True):
        at = at * size + place
    return at


def _shapes_of_blocks(*lengths: Any, limits: Any, rows: Any, blocks: int) -> list[Any]:
    return [*[lengths[0].shape] * 3, *[(blocks,)] * 2, (blocks * rows[-1],)]


def _shapes_of_elements(
    *operands: Value, widths: Any, room: tuple[int, ...] | None, size: int
) -> list[Any]:
    places = (RowsOfBlocks(*operands[:6]).number.shape[0] * size,)
    return [operands[7].shape, places, places]


PROGRAMS["blocks"] = IndexProgram(
    functools.partial(_blocks, jnp), _blocks_on_cpu, _shapes_of_blocks
)
PROGRAMS["elements"] = IndexProgram(
    functools.partial(_elements, jnp), _elements_on_cpu, _shapes_of_elements
)
