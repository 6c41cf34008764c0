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
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core.primitives import cond_p

from batchax import _compat
from batchax.analysis.cost import BLOCK, COMPILED_STEP, ROWS, RUNS_OF_ROWS
from batchax.custom_rules.own_derivatives import linear_with_transpose
from batchax.execution.chunk_loop import (
    WHOLE,
    ActiveMask,
    ChunkBody,
    ChunkLoop,
    Gathered,
    chunk_loop,
)
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.kernel.axis import Axis, Position, axis_to_front
from batchax.kernel.inner import batch_function, closed_over, inline_jaxpr, returning_alike
from batchax.kernel.own_primitive import pullback_of, tangents_of, with_tangent_rule, with_values
from batchax.rows.blocks import Elements, back, find_blocks
from batchax.rows.buckets import Weight, fewer_boxes, lightest_groups
from batchax.rows.call import with_room
from batchax.rows.groups import KnownGroups, of_one_row
from batchax.rows.index import moved
from batchax.rows.layouts import Costs, RowProgram, RowStep, differing_values
from batchax.rows.packed import PackedRows
from batchax.rows.packed_forms import Names, Packed, can_hold
from batchax.rows.sizes import Dim, Shape, Sizes, find_found, has_symbols, ragged_axes, ragged_axis
from batchax.rules.masking import find_collective, is_inexact


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

    def widths(self, dim: Dim) -> np.ndarray:
        """The bound of a dimension of size `dim` in each class."""
        return np.array([self.sizes(k, {}).bound(dim) for k in range(len(self.rows))], np.int32)

    def elements(self, dims: Shape) -> int:
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
# At most, of the estimated time with fewer classes: each class takes as long to compile as the
# first. programs: energies and forces of 300 molecules, attention over 64 sets (first calls).
_GAIN_OF_A_CLASS = 0.9
_LEAST_BLOCKS = 16  # that rows of one length should make


def find_classes(
    program: RowProgram,
    packed: Sequence[bool | None],
    batched: Sequence[bool],
    costs: Costs,
    most: int,
) -> SizeClasses:
    """At most so many size buckets, and how many rows a block of each holds."""
    rows = _longest_in_block(_PaddedSteps(program, packed, batched, costs))
    return SizeClasses.of(costs.padded.bounds, costs.packed.bounds, costs.rows, most, rows)


def _longest_in_block(steps: _PaddedSteps) -> int:
    costs = steps.costs
    work, shared = (
        float(each(costs.padded.bounds).sum()) for each in (steps.times, steps.of_block)
    )
    worth = _WORTH_ON_CPU if jax.default_backend() == "cpu" else _WORTH
    worth *= (BLOCK + shared) / BLOCK
    # Of the longest rows a block holds so many. The more, the less it weighs to begin a block; the
    # fewer, the less is computed in vain, as the last block of each class is seldom full.
    rows = 1
    while rows * work < worth and rows * _LEAST_BLOCKS < costs.rows:
        rows *= 2
    return rows


def choose_classes(
    program: RowProgram, packed: Sequence[bool | None], batched: Sequence[bool], costs: Costs
) -> SizeClasses | None:
    """The size buckets that padded steps take least time in; None for one bound for all rows."""
    padded_steps = _PaddedSteps(program, packed, batched, costs)
    steps = padded_steps.steps
    if not steps:
        return None
    bounds, rows = costs.padded.bounds, _longest_in_block(padded_steps)
    by_size = [
        _time_by_size(each, bounds, list(bounds))
        for each in (padded_steps.times, padded_steps.of_block)
    ]

    def times(bounds: Mapping[str, int]) -> tuple[float, float]:
        """Nanoseconds for each row, and for each block."""
        each, shared = (float(time(np.array([[*bounds.values()]]))[0]) for time in by_size)
        return each, shared + BLOCK

    mean = max(_filled(costs, names) for names in [*zip(costs.alone), *costs.room])
    least_length, greatest = max(0.0, 2 * mean - 1), min(1.0, 2 * mean)  # of the bound
    spread = max(greatest - least_length, 1e-9)

    def run(classes: SizeClasses, shares: Sequence[float], last: float) -> float:
        """Nanoseconds for blocks, if such shares of all rows are of each class."""
        of_class = zip(shares, classes.rows, map(times, classes.bounds), strict=True)
        return sum(
            (share * costs.rows / held + last) * (shared + held * each)
            for share, held, (each, shared) in of_class
        )

    each, shared = times(bounds)
    padded = costs.rows * each + shared
    best, least = None, padded
    for most in range(2, _MOST_CLASSES + 1):
        classes = SizeClasses.of(bounds, costs.packed.bounds, costs.rows, most, rows)
        if len(classes.rows) < most:
            break
        places = classes.blocks * classes.rows[0] * costs.places(bounds)
        moved = ROWS.place * _MOVED * (places + costs.held) + _joined(program, costs)
        fixed = moved + _compiling(most, steps)
        # As many rows as fit the longest class; the rest have no elements.
        longest = min(1.0, 2 * mean)
        shares = [longest, *[0.0] * (most - 2), 1.0 - longest]
        if fixed + run(classes, shares, 1.0) > _MOST_LOSS * padded:
            continue
        # Rows longer than the bound of the next class.
        longer = [min(1.0, max(0.0, (greatest - 0.5 ** (k + 1)) / spread)) for k in range(most - 1)]
        shares = [a - b for a, b in zip([*longer, 1.0], [0.0, *longer], strict=True)]
        taken = fixed + run(classes, shares, 0.5)  # the last block of each class is half full, say
        if taken < _GAIN_OF_A_CLASS * least:
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
    padded_steps = _PaddedSteps(program, packed, batched, costs)
    steps, bounds = padded_steps.steps, costs.padded.bounds
    if not steps:
        return None
    needed = np.maximum(np.stack(list(lengths.values()), 1), 1)
    time, shared = (
        _time_by_size(each, bounds, list(lengths))
        for each in (padded_steps.times, padded_steps.of_block)
    )
    fixed = _compiling(1, steps)
    # Into groups, and back.
    moved = 2 * ROWS.place * costs.held + _joined(program, costs)
    most_time = padded_steps.times(bounds).sum() * costs.rows + padded_steps.of_block(bounds).sum()
    best, least = None, most_time
    groupings = (
        fewer_boxes(needed, _MOST_GROUPS, time)
        if len(lengths) > 1
        else (lightest_groups(needed, most, time) for most in range(1, _MOST_GROUPS + 1))
    )
    for groups in groupings:
        sizes = np.stack([needed[rows].max(0) for rows in groups])
        taken = float(np.dot(time(sizes), list(map(len, groups)))) + (len(groups) - 1) * fixed
        taken += float(shared(sizes).sum()) + (len(groups) > 1) * moved
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
    places = ROWS.place * costs.rows * max(costs.padded.bounds.values())
    return sum(places + costs.move(shape, packed=False) for shape in several)


def _compiling(groups: int, steps: Sequence[RowStep]) -> float:
    return groups * len(steps) * COMPILED_STEP / RUNS_OF_ROWS


Times = Callable[[Mapping[str, int]], np.ndarray]
"""Nanoseconds for each of some steps of one padded row, by the bounds of its sizes."""


class _PaddedSteps:
    """The steps that run padded, and what they take."""

    def __init__(
        self,
        program: RowProgram,
        packed: Sequence[bool | None],
        batched: Sequence[bool],
        costs: Costs,
    ) -> None:
        self.steps = [step for step, p in zip(program.steps, packed, strict=True) if p is False]
        self.costs = costs
        self._differs = differing_values(program, batched)

    def times(self, bounds: Mapping[str, int]) -> np.ndarray:
        """Nanoseconds for each step of one padded row, by the bounds of its sizes."""
        costs = replace(self.costs, padded=Sizes(bounds, {}))
        each = [costs.of(step, packed=False, differs=self._differs) for step in self.steps]
        return np.array(each) / costs.rows + 1e-3

    def of_block(self, bounds: Mapping[str, int]) -> np.ndarray:
        """Nanoseconds for each step of however many padded rows of these bounds."""
        costs = replace(self.costs, padded=Sizes(bounds, {}))
        return np.array([costs.of_block(step, self._differs) for step in self.steps]) + 1e-3


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
    move = _Moving(rows, classes, given, shapes)
    moved = zip(given[len(lengths) :], whole[len(lengths) :], strict=True)
    operands = [*move.lengths_in_blocks, *(x.value if w else move.into_blocks(x) for x, w in moved)]
    blocks = move.blocks
    used, number, *operands = _compat.varying_alike([blocks.used, blocks.number, *operands])

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
        if len(programs) == 1:
            return inline_jaxpr(programs[0], xs)
        # A number out of bounds is that of no program: to clamp it is one more kernel.
        return cond_p.bind(number, *xs, branches=tuple(programs))

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


def _rows_of_block(classes: SizeClasses, k: int, x: Value, shape: Shape) -> jax.Array:
    """The rows of a block of class `k`, padded and in front."""
    at, count = ragged_axes(shape), classes.rows[k]
    widths = [int(classes.widths(shape[a])[k]) for a in at]
    return _expanded(x[: count * math.prod(widths)], at, [count, *widths])


def _block_of_rows(classes: SizeClasses, x: Value, shape: Shape) -> jax.Array:
    """The reverse of `_rows_of_block`, with the size of the largest block of any class."""
    at = ragged_axes(shape)
    x = _collapsed(x, at)
    size = classes.elements([shape[a] for a in at]) if at else classes.rows[-1]
    return with_room(x, 0, size)


def _collapsed(x: Value, at: Sequence[int]) -> jax.Array:
    """Padded rows, with the rows in front, as one axis."""
    together = range(1, len(at) + 1)
    x = jnp.moveaxis(x, [k + 1 for k in at], together)
    return lax.collapse(x, 0, len(at) + 1)


def _expanded(x: Value, at: Sequence[int], sizes: Sequence[int]) -> jax.Array:
    x = x.reshape(*sizes, *x.shape[1:])
    return jnp.moveaxis(x, range(1, len(at) + 1), [k + 1 for k in at])


Key: TypeAlias = tuple[tuple[Dim, ...], tuple[int, ...] | None]


class _Moving:
    """Values of all rows moved into blocks, and back."""

    def __init__(
        self,
        rows: PackedRows,
        classes: SizeClasses,
        given: Sequence[Packed],
        results: Sequence[Shape],
    ) -> None:
        """For values that are `given`, and for results of these shapes."""
        self.rows, self.classes = rows, classes
        self.lengths = {name: jnp.asarray(each.lengths) for name, each in rows.index.items()}
        ragged = [self._key(x.shape, None if x.axis is None else x.value.shape) for x in given]
        ragged += [self._key_of_result(shape) for shape in results]
        keys = {str(key): key for key in ragged if key[0]}
        bounds = [[each[name] for name in self.lengths] for each in classes.bounds[1:]]
        lengths, counts = list(self.lengths.values()), (classes.rows, classes.blocks)
        elements = itertools.starmap(self._elements, keys.values())
        self.blocks, found = find_blocks(lengths, bounds, *counts, list(elements))
        self._places = dict(zip(keys, found, strict=True))

    def _key(self, shape: Shape, padded: Sequence[int] | None) -> Key:
        """Of which sizes the ragged axes are, and what rows are padded to, if they are."""
        at = ragged_axes(shape)
        bounds = None if padded is None else tuple(padded[k + 1] for k in at)
        return tuple(shape[k] for k in at), bounds

    def _key_of_result(self, shape: Shape) -> Key:
        if self.rows.holds(shape):
            return self._key(shape, None)
        return self._key(shape, (0, *Sizes(self.rows.bounds, {}).bounds_of(shape)))

    @property
    def lengths_in_blocks(self) -> list[jax.Array]:
        return [x.reshape(self.classes.blocks, -1) for x in self.blocks.lengths]

    def into_blocks(self, given: Packed) -> jax.Array:
        """Blocks are in front; then come the elements of a block, or the slots for its rows."""
        at, x = ragged_axes(given.shape), given.value
        if not at:
            assert given.axis is not None
            places = self.blocks.places
            x = jnp.moveaxis(x, given.axis, 0)
        else:
            key = self._key(given.shape, None if given.axis is None else x.shape)
            x = jnp.moveaxis(x, at[0], 0) if given.axis is None else _collapsed(x, at)
            places = self._places[str(key)]
        x = moved(x, 0, places.there, places.at)
        blocks = self.classes.blocks
        return x.reshape(blocks, x.shape[0] // blocks, *x.shape[1:])

    def out_of_blocks(self, x: Value, shape: tuple[Dim, ...]) -> Packed:
        """A result, from what it is in blocks."""
        at, x = ragged_axes(shape), lax.collapse(x, 0, 2)
        key = self._key_of_result(shape)
        places = self._places[str(key)] if at else self.blocks.places
        x = moved(x, 0, places.at, back, *places, key="out of blocks")
        if not at:
            return Packed(x, shape, 0)
        if key[1] is None:
            return Packed(jnp.moveaxis(x, 0, at[0]), shape)
        return Packed(_expanded(x, at, [self.rows.axis.size, *key[1]]), shape, 0)

    def _elements(self, dims: Shape, bounds: tuple[int, ...] | None) -> Elements:
        """The elements of packed rows, or of rows that are padded to bounds."""
        count = self.rows.axis.size
        sizes = [self._size(dim) for dim in dims]
        # Of each element of all rows: which row it is of, and where it is there along each axis.
        if bounds is None:
            index = self.rows.along(tuple(map(str, dims)))
            if len(dims) == 1:
                sizes = [jnp.asarray(index.lengths)]
            row_of, places = jnp.asarray(index.rows), [jnp.asarray(index.places)]
            starts = jnp.asarray(index.starts_of_rows)
            for bound in reversed(index.pieces[1:]):
                places.insert(0, row_of % np.int32(bound))
                row_of = row_of // np.int32(bound)
        else:
            row_of, *places = (x.reshape(-1) for x in np.indices((count, *bounds), np.int32))
            starts = np.arange(count, dtype=np.int32) * np.int32(math.prod(bounds))
        widths, room = list(map(self.classes.widths, dims)), self.classes.elements(dims)
        return Elements(starts, row_of, places, sizes, bounds, widths, room)

    def _size(self, dim: Dim) -> jax.Array:
        size = jnp.asarray(_compat.evaluate_size(dim, self.lengths), np.int32)
        return jnp.maximum(size, np.int32(0))
