"""Rows in regions of the program, each of which holds them in one layout."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.cache import Cache
from batchax.contractions.contracted import factored, run_adding
from batchax.contractions.deferred import DeferredContraction
from batchax.errors import UnsupportedError
from batchax.execution.call import Call, Outputs, Strategy
from batchax.frontend.arguments import Mapped
from batchax.frontend.outputs import check_unbatched, place
from batchax.frontend.reductions import Reduction
from batchax.frontend.rows import Layout, RowOptions
from batchax.jaxprs.evaluate import walk
from batchax.jaxprs.types import Value
from batchax.kernel import recording
from batchax.kernel.axis import Position, Positions, axis_to_front
from batchax.kernel.inner import MappedProgram, example_aval, stage_function
from batchax.rows.call import RowCall, Shorter, SizesOf, as_ragged, capacity_of, with_room
from batchax.rows.groups import of_one_row
from batchax.rows.index import pack_rows, pad_rows
from batchax.rows.layouts import (
    Constant,
    Costs,
    RowProgram,
    RowStep,
    choose_packed,
    differing_values,
    flatten,
)
from batchax.rows.near import shortened
from batchax.rows.packed import PackedRows, run_and_note
from batchax.rows.packed_forms import Names, Packed, names_of
from batchax.rows.padded import CannotPad, Row, run_equation
from batchax.rows.ragged import Ragged
from batchax.rows.size_classes import (
    choose_classes,
    choose_groups,
    find_classes,
    obstacle,
    run_in_classes,
)
from batchax.rows.sizes import Sizes, has_symbols, is_symbolic, ragged_axes

RunPadded = Callable[..., list[Packed]]
"""``run(rows, one_row=, arguments=, shapes=)``: a function of one padded row run for all rows,
which are padded to several bounds. `one_row` is the function, of `Sizes` and padded arrays, and
`shapes` are those of its results. `arguments` that are ragged are packed, or padded with the rows
in front. Ragged results are packed, if rows hold such values packed, others padded."""


@dataclass(frozen=True)
class Region:
    packed: bool  # whether it holds rows packed, or else padded
    steps: list[RowStep]


def find_regions(steps: Sequence[RowStep], packed: Sequence[bool | None]) -> list[Region]:
    """The steps in an order that seldom changes between packed and padded.

    A region takes all steps that are ready. Steps for which `packed` is None run in any region.
    """
    waiting = list(zip(steps, packed, strict=True))
    missing = {v for step in steps for v in step.outputs}
    regions: list[Region] = []
    is_packed = next((p for p in packed if p is not None), True)
    while waiting:
        taken: list[RowStep] = []
        left = []
        for step, chosen in waiting:
            if chosen in (None, is_packed) and missing.isdisjoint(step.used):
                taken.append(step)
                missing.difference_update(step.outputs)
            else:
                left.append((step, chosen))
        if taken:
            regions.append(Region(is_packed, taken))
        waiting, is_packed = left, not is_packed
    return regions


def regions_of_groups(
    program: RowProgram, packed: Sequence[bool | None], batched: Sequence[bool]
) -> list[Region]:
    """As `find_regions`, for rows in groups.

    Values that all rows share are computed first, or each group of rows would recompute them.
    """
    differs = differing_values(program, batched)
    pairs = zip(program.steps, packed, strict=True)
    own = {step: p for step, p in pairs if any(differs[i] for i in step.outputs)}
    shared = [step for step in program.steps if step not in own]
    regions = find_regions(list(own), list(own.values()))
    return [Region(True, shared), *regions] if shared else regions


def run_regions(
    rows: PackedRows,
    bounds: Mapping[str, int],
    program: RowProgram,
    regions: Sequence[Region],
    arguments: Sequence[Packed],
    in_groups: RunPadded | None = None,
    reductions: Mapping[int, Reduction] | None = None,
) -> list[Packed]:
    """The results of a program for all rows.

    Ragged ones are packed if they have the size of a row, others, such as ``n - 1``, padded.
    Padded rows run `in_groups`, each with the bound of its group; if None, all with one bound.
    Results with one of `reductions`, by number, may be those, as a `_Total`.
    """
    values = _Values(rows, bounds)
    constants = {i: Packed(x, program.shapes[i]) for i, x in program.consts.items()}
    for number, value in [*enumerate(arguments), *constants.items()]:
        values.put(number, value, packed=rows.holds(value.shape))
    last_use = {
        v: k for k, region in enumerate(regions) for step in region.steps for v in step.used
    }
    last_use.update((v, len(regions)) for v in program.outputs if isinstance(v, int))
    for k, region in enumerate(regions):
        live = {v for v, last in last_use.items() if last > k}
        if region.packed:
            _run_packed(values, region)
        else:
            others = {v for r in regions if r is not region for step in r.steps for v in step.used}
            own = {v: x for v, x in (reductions or {}).items() if v not in others}
            _run_padded(values, region, live, program, in_groups, own)
        values.keep_only(live)
    results = []
    for v in program.outputs:
        if isinstance(v, Constant):
            results.append(Packed(v.value, v.shape))
        else:  # packed, if rows of these sizes are; of rows that are shorter what there is
            packed = rows.holds(program.shapes[v]) or values.has_packed(v)
            results.append(values.get(v, packed))
    return results


class _Values:
    """Values by number, packed and padded as they have been needed."""

    def __init__(self, rows: PackedRows, bounds: Mapping[str, int]) -> None:
        self.rows, self.bounds = rows, bounds
        self.left_padded: set[int] = set()  # by a region: their padding may hold anything
        self._found: dict[tuple[int, bool], Packed] = {}  # by number, and whether it is packed

    def put(self, number: int, value: Packed, packed: bool) -> None:
        self._found[number, packed] = value

    def get(self, number: int, packed: bool) -> Packed:
        """A value; if it is ragged, packed, or else padded with the rows in front."""
        value = self._found.get((number, packed))
        if value is None:
            value = self._found[number, not packed]
            if has_symbols(value.shape):
                value = self._moved(number, value, packed)
            self._found[number, packed] = value
        return value

    def has_packed(self, number: int) -> bool:
        return (number, True) in self._found

    def among_all(self, number: int) -> list[Value]:
        """The array that has the rows of a value one after another, and where each begins there.

        Nothing where there is none, or rows are not packed along their first axis.
        """
        x = self._found.get((number, True))
        names = None if x is None else names_of(x.shape)
        if x is None or names is None or ragged_axes(x.shape) != [0]:
            return []
        return [x.value, jnp.asarray(self.rows.along(names).starts)]

    def keep_only(self, numbers: set[int]) -> None:
        self._found = {k: v for k, v in self._found.items() if k[0] in numbers}

    def _moved(self, number: int, x: Packed, packed: bool) -> Packed:
        at, names = tuple(ragged_axes(x.shape)), names_of(x.shape)
        if names is None:  # rows that are shorter are where those are that they are part of
            (axis,), dim = at, x.shape[at[0]]
            index, bound = self.rows.of(dim), Sizes(self.bounds, {}).bound(dim)
            if packed:
                padded = with_room(x.value, axis + 1, index.bound)
                return Packed(pack_rows(padded, index, axis), x.shape)
            self.left_padded.add(number)
            padded = pad_rows(x.value, index, axis)
            return Packed(lax.slice_in_dim(padded, 0, bound, axis=axis + 1), x.shape, 0)
        index = self.rows.along(names)
        if packed:
            return Packed(pack_rows(x.value, index, at), x.shape)
        return Packed(pad_rows(x.value, index, at), x.shape, 0)


def _run_packed(values: _Values, region: Region) -> None:
    outer_names = _compat.current_name_stack()
    for step in region.steps:
        eqn = step.eqn
        operands = [
            Packed(v.value, v.shape) if isinstance(v, Constant) else values.get(v, packed=True)
            for v in step.inputs
        ]
        with _compat.user_source(eqn.source_info, outer_names), eqn.ctx.manager:
            outs = run_and_note(values.rows, eqn, operands)
        for number, out in zip(step.outputs, outs, strict=True):
            values.put(number, out, packed=True)


def _run_padded(
    values: _Values,
    region: Region,
    live: set[int],
    program: RowProgram,
    in_groups: RunPadded | None,
    reductions: Mapping[int, Reduction],
) -> None:
    """A region as a function of one padded row, batched as any function is."""
    made = {v for step in region.steps for v in step.outputs}
    needed = sorted({v for step in region.steps for v in step.used} - made)
    results = sorted(made & live)
    packed = {v for v in needed if in_groups and values.rows.holds(program.shapes[v])}
    operands = {v: values.get(v, v in packed) for v in needed}
    constants = {v: x for v, x in operands.items() if isinstance(x.value, np.ndarray)}
    inputs = {v: x for v, x in operands.items() if v not in constants}
    scans = [] if in_groups else [s for s in region.steps if s.eqn.primitive.name == "scan"]
    read = {v for step in scans for v in step.used if v in inputs}
    among = {v: pair for v in sorted(read) if (pair := values.among_all(v))}

    def one_row(sizes: Sizes, *args: Value) -> list[Any]:
        env = {v: Row(x.value, x.shape) for v, x in constants.items()}
        rest = args[len(inputs) :]
        pairs = dict(zip(among, zip(rest[::2], rest[1::2], strict=True), strict=True))
        for (v, given), x in zip(inputs.items(), args, strict=False):
            zero = has_symbols(given.shape) and (v in packed or v not in values.left_padded)
            env[v] = Row(x, given.shape, 0 if zero else None, packed=pairs.get(v))

        constant = lambda v: Row(v.value, v.shape)
        walk(region.steps, env, constant, functools.partial(_run_step, sizes), Constant)
        return [env[v].value for v in results]

    if in_groups:
        shapes = [program.shapes[v] for v in results]
        given = list(inputs.values())
        outs = in_groups(values.rows, one_row=one_row, arguments=given, shapes=shapes)
        for v, out in zip(results, outs, strict=True):
            is_padded = has_symbols(out.shape) and out.axis is not None
            if is_padded:
                values.left_padded.add(v)
            values.put(v, out, not is_padded)
        return
    every = {name: values.rows.index[name].lengths for name in values.bounds}
    axes: list[Position] = [*[0] * len(every), *(x.axis for x in inputs.values())]
    axes += [None, 0] * len(among)
    arrays = [*map(jnp.asarray, every.values()), *(x.value for x in inputs.values())]
    arrays += [x for pair in among.values() for x in pair]
    padded_row = of_one_row(one_row, every, values.bounds)
    row_axis, added = values.rows.axis, [v in reductions for v in results]
    avals = [example_aval(row_axis, jax.typeof(x), a) for x, a in zip(arrays, axes, strict=True)]
    staged = stage_function(row_axis, padded_row, avals)
    if any(added):
        staged = factored(row_axis, staged, axes, added, traced=True)
    outs, out_axes = run_adding(MappedProgram(row_axis, staged, arrays, axes), added)
    for v, x, axis in zip(results, outs, out_axes, strict=True):
        shape = program.shapes[v]
        if isinstance(x, DeferredContraction):
            values.put(v, _Total(x.of_all(reductions[v]), shape), packed=False)
            continue
        if has_symbols(shape):
            x, axis = axis_to_front(values.rows.axis, x, axis), 0
            values.left_padded.add(v)
        values.put(v, Packed(x, shape, axis), packed=False)


@dataclass(frozen=True)
class _Total(Packed):
    """A result of which all rows are reduced, by what the user asks for."""


class _Placed(NamedTuple):
    """Holds the batch axes of results, and which are reduced already."""

    positions: Positions
    totals: Sequence[bool]


def _reductions(call: RowCall, program: RowProgram) -> dict[int, Reduction]:
    """The reductions that add up rows, by the numbers of the results that nothing else returns."""
    each = zip(program.outputs, call.described, call.outputs.added or repeat(False), strict=False)
    return {
        v: output.spec.reduction
        for v, output, added in each
        if added
        and isinstance(v, int)
        and program.outputs.count(v) == 1
        and not has_symbols(program.shapes[v])
    }


def _run_step(sizes: Sizes, step: RowStep, operands: Sequence[Row]) -> list[Row]:
    try:
        return run_equation(sizes, step.eqn, operands)
    except CannotPad as error:
        for caller in step.callers:
            error.within(caller)
        raise


Classes = int | Literal["auto"] | None
"""How many size buckets rows may be in: so many, as many as pay, or none."""


kept_in_regions = Cache("calls outside of jit, of rows, batched", most=64)


@dataclass(frozen=True)
class InRegions(Strategy):
    """Region by region, each of which holds rows in one layout."""

    compiles: ClassVar[bool] = True

    layout: Layout  # the user's option, which regions follow where they can
    classes: Classes = None  # how many size buckets padded rows may be in

    @property
    def cache(self) -> Cache | None:
        return kept_in_regions

    def run(self, call: Call) -> tuple[list[Any], _Placed]:
        assert isinstance(call, RowCall)
        room: dict[Names, int] = {(size.name,): size.capacity for size in call.sizes}
        for m, own in reversed(call.arguments):  # of several the first
            if len(own) > 1:
                room[tuple(size.name for size in own)] = capacity_of(m.value)
        several = {names: each for names, each in room.items() if len(names) > 1}
        program, regions, in_groups, called, is_long = self._find_regions(call, several)
        even = {names: _even_room(each) if is_long else each for names, each in room.items()}
        index = {size.name: size.index_in(even[size.name,]).inside() for size in call.sizes}
        rows = PackedRows(call.axis, index, {names: even[names] for names in several})
        for region in regions if recording.is_on() else ():
            name = "packed" if region.packed else called
            recording.fact("region", layout=name, steps=region.steps, rows=call.noted)
        arguments = [_held(rows, m, own) for m, own in call.arguments]
        reductions = _reductions(call, program)
        with recording.run(call.staged.jaxpr):
            outs = run_regions(
                rows, call.bounds, program, regions, arguments, in_groups, reductions
            )
        arrays = list(map(rows.cut, outs))
        for k, out in enumerate(outs):
            if out.axis is None and has_symbols(out.shape) and names_of(out.shape) is None:
                own = Shorter.of(out.shape, call.sizes, call.arguments)
                arrays[k] = shortened(out.value, own, program, k, [x.value for x in arguments])
            elif out.axis is None and has_symbols(out.shape):
                names, at = names_of(out.shape) or (), ragged_axes(out.shape)[0]
                arrays[k] = _with_own_room(arrays[k], at, room[names])
        totals = [isinstance(out, _Total) for out in outs]
        return arrays, _Placed([out.axis for out in outs], totals)

    def check(self, call: Call, said: _Placed) -> None:
        check_unbatched(call.axis, call.described, said.positions)

    def finish(self, call: Call, arrays: list[Value], said: _Placed) -> Outputs:
        assert isinstance(call, RowCall)
        results = []
        for x, shape, axis, total, output in zip(
            arrays, call.shapes, *said, call.described, strict=True
        ):
            if total:
                results.append(x)
            elif not has_symbols(shape):
                results.append(place(call.axis, output, jnp.asarray(x), axis))
            elif axis is not None:
                results.append(as_ragged(x, shape, call.sizes, call.arguments))
            elif names_of(shape) is None:
                own = Shorter.of(shape, call.sizes, call.arguments)
                results.append(Ragged(x, own.lengths, own.bound, axis=own.axis))
            else:
                at = ragged_axes(shape)
                # By name: JAX may return a function's jaxpr that it traced in an earlier call,
                # whose sizes are of another scope.
                by_name = {str(s.symbol): s for s in call.sizes}
                several = [by_name[str(shape[k])] for k in at]
                lengths, bounds = [s.lengths for s in several], tuple(s.bound for s in several)
                results.append(Ragged(x, lengths, bounds, axis=tuple(at)))
        return results, call.outputs

    def _find_regions(
        self, call: RowCall, several: Mapping[Names, int]
    ) -> tuple[RowProgram, list[Region], RunPadded | None, str, bool]:
        """The program in regions, how padded ones run, and what that is called.

        Also whether packed ones compute much for each element. Arrays that are ragged along
        `several` axes hold so many elements.
        """
        program = flatten(call.staged, call.bounds)
        batched = [m.axis is not None for m in call.mapped]
        room = {size.name: size.capacity for size in call.sizes}
        sizes = Sizes(room, {}), Sizes(call.bounds, {})
        full = all(size.index.full for size in call.sizes)
        costs = Costs(*sizes, call.sizes[0].rows, several, full)
        packed = choose_packed(program, batched, costs, self.layout)
        in_groups, called = self._in_groups(call, program, packed, batched, costs)
        each = zip(program.steps, packed, strict=True)
        steps = [step for step, p in each if p]
        is_long = _is_long(costs, steps, differing_values(program, batched))
        if in_groups is None:
            return program, find_regions(program.steps, packed), None, called, is_long
        return program, regions_of_groups(program, packed, batched), in_groups, called, is_long

    def _in_groups(
        self,
        call: RowCall,
        program: RowProgram,
        packed: Sequence[bool | None],
        batched: Sequence[bool],
        costs: Costs,
    ) -> tuple[RunPadded | None, str]:
        groups = classes = None
        if self.classes == "auto" and call.lengths_known:
            lengths = {size.name: np.asarray(size.lengths) for size in call.sizes}
            groups = choose_groups(program, packed, batched, costs, lengths)
        elif self.classes == "auto":
            classes = choose_classes(program, packed, batched, costs)
        elif self.classes is not None:
            classes = find_classes(program, packed, batched, costs, self.classes)
        if groups is not None:
            return groups.run, "in groups"
        if classes is not None:
            return functools.partial(run_in_classes, classes=classes), "in size buckets"
        return None, "padded"


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


# Where packed arrays have an even number of elements. Rows: softplus.
_MANY = 2**16  # numbers, from which on XLA for CPUs splits an array in parts, one for each core
_FEW = 4  # numbers of an element: of more, a loop over them is vectorized in any case
_LONG = 2.0  # nanoseconds for each number, from which on to move it is little


def _is_long(costs: Costs, steps: Sequence[RowStep], differs: Sequence[bool]) -> bool:
    """Whether packed steps compute much for each number, of many elements of a few numbers."""
    work = 0.0
    for step in (step for step in steps if step.eqn.outvars):
        shape = step.eqn.outvars[0].aval.shape
        each = math.prod(d for d in shape if not is_symbolic(d))
        if has_symbols(shape) and 0 < each <= _FEW and each * costs.held > _MANY:
            work += costs.of(step, packed=True, differs=differs) / (each * costs.held)
    return work > _LONG


def _even_room(capacity: int) -> int:
    """At least so many elements, in an even number.

    Where parts of an array differ, XLA for CPUs does not vectorize a long chain of operations: a
    softplus of 126,555 elements takes 4x as long as of 126,560.
    """
    return -(-capacity // 16) * 16 if capacity % 2 else capacity


def _with_own_room(x: Value, axis: int, capacity: int) -> jax.Array:
    """The first elements of a packed array, so many."""
    if x.shape[axis] == capacity:
        return x
    # Written in two parts, of which one is even: a slice would be one loop with what makes `x`, of
    # an odd number of elements. Both read `x`, which is computed once, before.
    most = lax.slice_in_dim(x, 0, capacity - 1, axis=axis)
    last = lax.slice_in_dim(x, capacity - 1, capacity, axis=axis)
    out = lax.full((*x.shape[:axis], capacity, *x.shape[axis + 1 :]), 0, x.dtype)
    out, most, last = _compat.varying_alike([out, most, last])
    out = lax.dynamic_update_slice_in_dim(out, most, 0, axis)
    return lax.dynamic_update_slice_in_dim(out, last, capacity - 1, axis)


def most_classes(call: RowCall, options: RowOptions, in_chunks: bool) -> Classes:
    """How many size buckets rows may be in; None where they are in none."""
    room = [size.capacity for size in call.sizes]
    if not (call.axis.size and max(call.bounds.values()) and all(room)):
        return None  # there is nothing to put anywhere
    why = obstacle(call.axis, call.staged, in_chunks)
    if options.buckets is None:
        # Outside of `jit` the operations of each group would be compiled one by one.
        compiled = call.traced and _compat.compiled_later()
        auto = options.layout == Layout.AUTO and compiled and why is None
        return "auto" if auto else None
    if why is not None:
        raise UnsupportedError(
            "buckets: the lengths of rows are traced here, so rows would be put into buckets while "
            f"they run, but {why}. Remove buckets, or call vmap where lengths are known, outside "
            "of jit."
        )
    assert isinstance(options.buckets, int)  # groups need known lengths, and run one by one
    return options.buckets
