"""Rows in size buckets or known groups: each is padded to the least of a few bounds that it fits.

Lengths are known, and each row is padded to the longest of its group. Or they are traced, and rows
run in *blocks*, as their bounds are the greatest length, half of it, and so on. A block has the
same number of elements whatever its class, as twice as many rows fit where each is half as long.
How many blocks there are at most follows from the room that packed rows have, since a row fills
more than half of its place, but in the last class. A chunk loop runs one block after another, each
by the program of its class; its derivatives are chunk loops as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.execution.chunk_loop import (
    WHOLE,
    ActiveMask,
    ChunkBody,
    ChunkLoop,
    Gathered,
    chunk_loop,
)
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import FlatOutputs, OutputArray
from batchax.frontend.rows import Layout
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.axis import Axis, Position, axis_to_front
from batchax.kernel.captured import closed_over
from batchax.kernel.inner import batch_function, returning_alike
from batchax.kernel.own_primitive import (
    pullback_of,
    tangents_of,
    with_tangent_rule,
    with_values,
)
from batchax.programs.cost import BLOCK, COMPILED_STEP, ROWS
from batchax.rows.arguments import with_room
from batchax.rows.blocks import Blocks, Dims, Elements, SizeClasses
from batchax.rows.buckets import Placed, Weight, cheapest_ends, fewer_boxes, run_in_groups
from batchax.rows.fold_ragged_axes import Names, can_hold, names_of
from batchax.rows.index import RowIndex, pack_rows, pad_rows
from batchax.rows.layouts import Costs, RowProgram, RowStep, differing_values
from batchax.rows.packed import Packed, PackedRows
from batchax.rows.ragged import Ragged
from batchax.rows.sizes import Sizes, find_found, has_symbols, ragged_axes, ragged_axis
from batchax.rules.masking import find_collective, is_inexact
from batchax.user_rules.own_derivatives import linear_with_transpose


@dataclass(frozen=True)
class KnownGroups:
    """Which rows are padded to which bounds.

    Attributes:
      rows: the indices of the rows of each group. Each row is in one.
      lengths: of all rows, for each size.
    """

    rows: Sequence[np.ndarray]
    lengths: Mapping[str, np.ndarray]

    def run(
        self,
        rows: PackedRows,
        one_row: Callable[..., list[Any]],
        arguments: Sequence[Packed],
        shapes: Sequence[tuple[Any, ...]],
    ) -> list[Packed]:
        """The results of a function of one padded row for all rows: see `regions.RunPadded`."""
        whole = Sizes({name: s.index.bound for name, s in rows.segments.items()}, {})
        outputs = FlatOutputs([OutputArray("a result", 0) for _ in shapes], list, [])
        weak: list[bool] = []

        def run_group(g: int, lanes: Axis, part: list[Mapped]) -> tuple[list[Placed], FlatOutputs]:
            lengths = {name: x[self.rows[g]] for name, x in self.lengths.items()}
            # Many operations have no meaning for size zero.
            bounds = {name: max(int(x.max()), 1) for name, x in lengths.items()}
            exact, room = exact_sizes(lengths, bounds), Sizes(bounds, {})

            def padded_row(*values: Any) -> list[Any]:
                own = dict(zip(lengths, values, strict=False))
                own.update((name, np.int32(bounds[name])) for name in exact)
                return one_row(Sizes(bounds, own, exact), *values[len(lengths) :])

            def along(shape: Sequence[Any]) -> tuple[list[np.ndarray], tuple[int, ...]]:
                names = names_of(shape) or ()
                return [lengths[name] for name in names], tuple(bounds[name] for name in names)

            def index(shape: Sequence[Any]) -> tuple[RowIndex, int]:
                sizes, most = along(shape)
                capacity = int(np.prod(sizes, 0, dtype=np.int64).sum())
                return RowIndex.of_axes(sizes, capacity, most), capacity

            values: list[Any] = list(map(jnp.asarray, lengths.values()))
            axes: list[Position] = [0] * len(values)
            for m, given in zip(part, arguments, strict=True):
                x, at = m.value, ragged_axes(given.shape)
                if isinstance(x, Ragged):
                    x = pad_rows(x.data, index(given.shape)[0], x.axes)
                else:
                    for k in at:
                        x = lax.slice_in_dim(x, 0, room.bound(given.shape[k]), axis=k + 1)
                values.append(x)
                axes.append(m.axis)
            outs, out_axes = batch_function(lanes, padded_row, values, axes)
            weak[:] = [getattr(x, "weak_type", False) for x in outs]
            placed: list[Placed] = []
            for x, axis, shape in zip(outs, out_axes, shapes, strict=True):
                at = tuple(ragged_axes(shape))
                if at:
                    x, axis = axis_to_front(lanes, x, axis), 0
                if at and rows.holds(shape):
                    x = Ragged(
                        pack_rows(x, index(shape)[0], at, index(shape)[1]), *along(shape), axis=at
                    )
                else:
                    for k in at:
                        x = with_room(x, k + 1, whole.bound(shape[k]))
                placed.append((x, axis))
            return placed, outputs

        # No two groups at once: each may call a library.
        mapped = list(map(self._mapped, arguments))
        joined, _ = run_in_groups(rows.axis, mapped, self.rows, run_group, in_turn=True)
        results = []
        for (x, axis), shape, is_weak in zip(joined, shapes, weak, strict=True):
            if isinstance(x, Ragged):
                capacity = rows.along(names_of(shape) or ()).capacity
                x, axis = with_room(x.data, x.element_axis, capacity), None
            results.append(Packed(_compat.weakly(x) if is_weak else x, shape, axis))
        return results

    def _mapped(self, x: Packed) -> Mapped:
        at = tuple(ragged_axes(x.shape))
        if not at or x.axis is not None:
            return Mapped("an argument", x.value, x.axis)
        lengths = [self.lengths[name] for name in names_of(x.shape) or ()]
        return Mapped("an argument", Ragged(x.value, lengths, axis=at), 0)


def exact_sizes(lengths: Mapping[str, Any], bounds: Mapping[str, int]) -> frozenset[str]:
    """Which sizes are those bounds in every row, as is known: nothing is padded along them."""
    of_numpy = {name: x for name, x in lengths.items() if isinstance(x, np.ndarray)}
    return frozenset(name for name, x in of_numpy.items() if (x == bounds[name]).all())


def _run(program: ClosedJaxpr, *operands: Any) -> list[Any]:
    return eval_jaxpr(program.jaxpr, program.consts, *operands)


def class_switch(
    number: Value, programs: Sequence[ClosedJaxpr], operands: Sequence[Value]
) -> list[Any]:
    """What one of `programs` returns, which take and return the same types.

    Its derivatives compute the program again: JAX would keep residuals of all programs.

    Args:
      number: which one, clipped to those that there are.
      programs: of each class.
      operands: of the program.
    """
    programs, consts = _compat.hoist_constants(*programs)
    runs = [functools.partial(_run, p) for p in programs]
    smooth = [k for k, aval in enumerate(programs[0].out_avals) if is_inexact(aval)]

    def switch(number: Any, *xs: Any) -> list[Any]:
        return list(lax.switch(number, runs, *xs))

    def rule(
        primals: Sequence[Value], moving: Sequence[int], dots: Sequence[Value]
    ) -> tuple[list[Any], list[Any]]:
        at = [i - 1 for i in moving]

        def forward(residuals: Any, dots: Any) -> list[Any]:
            of = lambda run: lambda xs, dots: tangents_of(run, xs, at, dots, smooth)[1]
            return lax.switch(residuals[0], list(map(of, runs)), residuals[1:], dots)

        def back(residuals: Any, cts: Any) -> list[Any]:
            of = lambda run: lambda xs, cts: [*pullback_of(run, xs, at, smooth)[1]([*cts])]
            return lax.switch(residuals[0], list(map(of, runs)), residuals[1:], cts)

        outs = switch(*primals)
        moved = linear_with_transpose(forward, back, primals, dots) if smooth else []
        return outs, with_values([None] * len(outs), smooth, moved)

    return with_tangent_rule(switch, rule)(*_compat.varying_alike([number, *consts, *operands]))


def obstacle(axis: Axis, program: ClosedJaxpr, in_chunks: bool) -> str | None:
    """Why a program cannot run in blocks of rows that are in no order; None if it can."""
    jaxpr = program.jaxpr
    if in_chunks:
        return "batch_size was given, too, and rows run in blocks of their own"
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


_MOST_CLASSES = 5  # that are chosen unasked: each computes blocks that are not full
_MOVED = 4  # places for each in blocks or packed rows: found by their indices, there and back
_MOST_LOSS = 1.15  # of the time of padded rows, for lengths that gain nothing
_WORTH_ON_CPU = 100_000.0  # nanoseconds of work, beside which to begin a block weighs little
_WORTH = 50_000_000.0  # the same where many rows run at a time
_RUNS = 1_000  # of a compiled program, over which the time to compile it is spread


def rows_in_block(program: RowProgram, batched: Sequence[bool], costs: Costs) -> int:
    """How many of the longest rows a block holds.

    The more, the less it weighs to begin a block; the fewer, the less is computed in vain, as the
    last block of each class is seldom full.
    """
    differs = differing_values(program, batched)
    steps = (s for s in program.steps if any(differs[i] for i in s.outputs))
    work = sum(costs.of(step, Layout.PADDED, differs) for step in steps) / costs.rows
    worth = _WORTH_ON_CPU if jax.default_backend() == "cpu" else _WORTH
    rows = 1
    while rows * work < worth and rows * _LEAST_BLOCKS < costs.rows:
        rows *= 2
    return rows


_LEAST_BLOCKS = 16  # that rows of one length should make


def find_classes(
    program: RowProgram, batched: Sequence[bool], costs: Costs, most: int
) -> SizeClasses:
    room, rows = costs.packed.bounds, rows_in_block(program, batched, costs)
    return SizeClasses.of(costs.padded.bounds, room, costs.rows, most, rows)


def choose_classes(
    program: RowProgram,
    layouts: Sequence[Layout | None],
    batched: Sequence[bool],
    costs: Costs,
) -> SizeClasses | None:
    """The size buckets that padded steps take least time in; None for one bound for all rows."""
    differs = differing_values(program, batched)
    steps = _padded_steps(program, layouts)
    bounds = costs.padded.bounds
    time = lambda bounds: float(_times(steps, costs, differs, bounds).sum())
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


def _filled(costs: Costs, names: Names) -> float:
    """The share of each size that rows have at the mean, if they fill the room that there is."""
    several = math.prod(costs.padded.bounds[name] for name in names)
    room = costs.room[names] if names in costs.room else costs.packed.bounds["".join(names)]
    return (room / several / costs.rows) ** (1 / len(names))


def _joined(program: RowProgram, costs: Costs) -> float:
    """Nanoseconds to put results together, of rows of all groups, that are held padded."""
    shapes = [program.shapes[i] for i in program.outputs if isinstance(i, int)]
    several = [s for s in shapes if has_symbols(s) and not can_hold(costs.room, s)]
    return sum(costs.move(shape) for shape in several)


_MOST_GROUPS = 8  # of rows of known lengths: what more of them gain is little


def choose_groups(
    program: RowProgram,
    layouts: Sequence[Layout | None],
    batched: Sequence[bool],
    costs: Costs,
    lengths: Mapping[str, np.ndarray],
) -> KnownGroups | None:
    """The groups that padded steps take least time in; None for one bound for all rows."""
    differs = differing_values(program, batched)
    steps = _padded_steps(program, layouts)
    if not steps:
        return None
    needed = np.maximum(np.stack(list(lengths.values()), 1), 1)
    time, fixed = _time_by_size(steps, costs, differs, list(lengths)), _compiling(1, steps)
    # Into groups, and back.
    moved = 2 * ROWS.place * costs.held + _joined(program, costs)
    best, least = None, costs.rows * _times(steps, costs, differs, costs.padded.bounds).sum()
    for groups in _groupings(needed, time):
        sizes = np.stack([needed[rows].max(0) for rows in groups])
        taken = float(np.dot(time(sizes), list(map(len, groups)))) + (len(groups) - 1) * fixed
        taken += (len(groups) > 1) * moved
        if taken < least:
            best, least = groups, taken
    return None if best is None else KnownGroups(best, lengths)


def _groupings(needed: np.ndarray, time: Weight) -> Iterable[list[np.ndarray]]:
    """Rows of these sizes in groups that take least time, of each number of groups there may be."""
    if needed.shape[1] > 1:
        yield from fewer_boxes(needed, _MOST_GROUPS, time)
        return
    candidates, number, counts = np.unique(needed[:, 0], return_inverse=True, return_counts=True)
    for most in range(1, min(_MOST_GROUPS, len(candidates)) + 1):
        ends = cheapest_ends(time(candidates[:, None]), counts, most)
        group = np.searchsorted(ends, number.reshape(-1))
        yield [np.flatnonzero(group == g) for g in range(len(ends))]


def _time_by_size(
    steps: Sequence[RowStep], costs: Costs, differs: Sequence[bool], names: Sequence[str]
) -> Weight:
    """Nanoseconds for steps of one padded row, for each of some sizes of rows along `names`.

    Of each step it is taken to be a power of each size.
    """
    bounds = costs.padded.bounds
    most = np.array([bounds[name] for name in names])
    fewer = np.maximum(most // _SMALLER, 1)
    greatest = _times(steps, costs, differs, bounds)
    smaller = [
        _times(steps, costs, differs, {**bounds, name: int(n)})
        for name, n in zip(names, fewer, strict=True)
    ]
    shrink = np.log(np.where(most > fewer, most / fewer, np.e))
    powers = np.log(greatest / np.stack(smaller)).T / shrink
    # Steps that grow alike are one.
    powers, number = np.unique(np.round(4 * powers) / 4, axis=0, return_inverse=True)
    together = np.bincount(number.reshape(-1), greatest, len(powers))
    return lambda sizes: np.exp(np.log(sizes / most) @ powers.T) @ together


_SMALLER = 4  # of the greatest size, at which the time that steps take is estimated, too


def _compiling(groups: int, steps: Sequence[RowStep]) -> float:
    """Nanoseconds of each run for which steps of so many groups are compiled."""
    return groups * len(steps) * COMPILED_STEP / _RUNS


def _padded_steps(program: RowProgram, layouts: Sequence[Layout | None]) -> list[RowStep]:
    pairs = zip(program.steps, layouts, strict=True)
    return [step for step, layout in pairs if layout == Layout.PADDED]


def _times(
    steps: Sequence[RowStep], costs: Costs, differs: Sequence[bool], bounds: Mapping[str, int]
) -> np.ndarray:
    """Nanoseconds for each step of one padded row, by the bounds of its sizes."""
    each = replace(costs, padded=Sizes(bounds, {}))
    return np.array([each.of(step, Layout.PADDED, differs) for step in steps]) / costs.rows + 1e-3
