"""Lanes with results that are not finite, and the equations that made them so."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from batchax.frontend.arguments import check_untraced
from batchax.frontend.in_axes import spread_in_axes, without_objects
from batchax.frontend.outputs import lanes_first
from batchax.jaxprs.error_format import spoken
from batchax.jaxprs.primitive_facts import shown
from batchax.jaxprs.types import Aval, AxesTree, Eqn, Tree, Value, Values
from batchax.kernel.recording import Recorder
from batchax.nonfinite.origins import (
    FIRST_LOOP,
    KIND,
    NAN,
    PLACE,
    TURNED,
    Evaluator,
    Lanes,
    Marked,
    Places,
    Watch,
    blank_view,
    kind_of,
    link,
    loop_depth,
    may_be_bad,
    operand_types,
)
from batchax.rows.ragged import Ragged
from batchax.staging import Staged, stage
from batchax.vmap import find_vmap, vmap

_WITH_VALUES = 5  # lanes of which the operands are shown, and causes that are listed
_NAMED = 8  # lanes of one cause that are numbered


@dataclass(frozen=True)
class Fault:
    """Where a result of a lane that is not finite comes from.

    Attributes:
      lane: the index of the lane; None if the result comes from several lanes together.
      output: which result: "out['loss']".
      kind: "nan" or "inf", of the result.
      primitive: of the equation that made it; "" if it came in, or if no equation makes it when
        the program is compiled with marks.
      line: of the user's source that made the equation.
      argument: the argument, or "a value that the function closes over", if it came in with that.
      iterations: of the loops around the equation, outermost first.
      turned: of an infinity that became a NaN, the equation that made it one, and its line.
      operands: the values that the equation was given in this lane, for people; None except for a
        few lanes, the first of each cause before others.
    """

    lane: int | None
    output: str
    kind: str
    primitive: str
    line: str
    argument: str
    iterations: tuple[int, ...]
    turned: str
    operands: Sequence[str] | None = None

    @property
    def cause(self) -> tuple[str, ...]:
        """What lanes have in common that are wrong for one reason."""
        made = self.primitive, self.line, self.argument, self.turned
        return self.output, self.kind, *made

    def __str__(self) -> str:
        return _describe([self])


def _describe(faults: Sequence[Fault]) -> str:
    """Tells the faults of lanes with one cause, and the operands of one of them."""
    one = next((f for f in faults if f.operands is not None), faults[0])
    line = one.line.rpartition(os.sep)[2]
    several = len(faults) > 1
    lanes = f"lanes {_numbers([f.lane for f in faults])}" if several else f"lane {one.lane}"
    lanes = "all lanes together" if one.lane is None else lanes
    if one.argument:
        return f"{lanes}: {one.output} is {one.kind}: it came in with {one.argument}"
    if not one.primitive:
        return (
            f"{lanes}: {one.output} is {one.kind}, and finite where each operation is looked at: "
            "it depends on how the program is compiled, or on calls of the host"
        )
    made = "an infinity made by" if one.turned else "made by"
    lines = [f"{lanes}: {one.output} is {one.kind}, {made} `{one.primitive}`"]
    of_lane = f" of lane {one.lane}" if several else ""
    loops = ", ".join(map(str, one.iterations))
    if len({f.iterations for f in faults}) == 1 and loops:
        lines[0] += f" in iteration {loops}"
    elif loops:
        lines.append(f"  in iteration {loops}{of_lane}")
    lines += [f"  {line}"] if line else []
    for k, x in enumerate(one.operands or ()):
        lines.append(f"  operand {k}{of_lane}: {x}")
    if one.turned:
        lines.append(f"  became a NaN by {one.turned}")
    return "\n".join(lines)


def _numbers(lanes: Sequence[int | None]) -> str:
    shown = ", ".join(map(str, lanes[:_NAMED]))
    return shown if len(lanes) <= _NAMED else f"{shown} and {len(lanes) - _NAMED:,} more"


@dataclass(frozen=True)
class NonFinite:
    """What `find_nonfinite` found. False if all is finite.

    Attributes:
      lanes: the indices of lanes with results that are not finite.
      faults: for each of them where the first such result comes from.
      size: how many lanes there are.
      whole: Whether results are those of a function that contains a `vmap`. Then `lanes` are those
        that results get what is not finite from.
      ambiguous: Whether the function was taken for one of one example, but calls a `vmap` and takes
        the whole batch, too. If it is meant to take that, pass `in_axes=None`.

    Example:
      >>> found = bx.find_nonfinite(jnp.log)(jnp.array([1.0, 0.0, -1.0]))
      >>> print(found.lanes)
      [1 2]
      >>> [(fault.kind, fault.primitive) for fault in found.faults]
      [('inf', 'log'), ('nan', 'log')]
    """

    lanes: np.ndarray
    faults: Sequence[Fault]
    size: int
    whole: bool = False
    ambiguous: bool = False

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __str__(self) -> str:
        note = (
            "The function calls a vmap, and was taken for one of one example. If it takes the "
            "whole batch, pass in_axes=None."
        )
        return "\n".join([*self._lines(), *[note] * self.ambiguous])

    def _lines(self) -> list[str]:
        if not self.faults:
            return [f"All results of {self.size:,} lanes are finite."]
        have = "make results" if self.whole else "have results"
        lines = [f"{len(self.lanes):,} of {self.size:,} lanes {have} that are not finite."]
        causes: dict[tuple[str, ...], list[Fault]] = {}
        for f in self.faults:
            causes.setdefault(f.cause, []).append(f)
        of_causes = sorted(causes.values(), key=len, reverse=True)
        lines += map(_describe, of_causes[:_WITH_VALUES])
        left = of_causes[_WITH_VALUES:]
        if left:
            lines.append(
                f"{sum(map(len, left)):,} lanes for {len(left):,} other causes: see .faults"
            )
        return lines


def causes_shown(faults: Sequence[tuple[Any, int, np.ndarray]]) -> list[tuple[Any, np.ndarray]]:
    """Returns the lanes, with their origins, whose operands are shown: the first of each cause."""
    made = [
        (lane, (i, *row[[PLACE, KIND, TURNED]]), row) for lane, i, row in faults if row[PLACE] > 0
    ]
    causes: dict[Any, tuple[Any, np.ndarray]] = {}
    for lane, cause, row in made:
        causes.setdefault(cause, (lane, row))
    return list(causes.values())[:_WITH_VALUES]


def check_fits(
    fun: Callable[..., Any],
    in_axes: AxesTree,
    options: dict[str, Any],
    args: tuple[Tree, ...],
    kwargs: dict[str, Any],
) -> None:
    """Stages a call, so that `vmap` raises its errors for what does not fit."""
    check_untraced("find_nonfinite looks at values", (args, kwargs))
    jax.eval_shape(lambda: without_objects(vmap(fun, in_axes, **options)(*args, **kwargs)))


def calls_vmap(fun: Callable[..., Any], args: tuple[Tree, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function takes these arguments as they are, and calls `vmap`."""
    recorder, within = Recorder(), find_vmap(fun, None)
    assert within is not None
    try:
        with recorder.active():
            jax.eval_shape(lambda: without_objects(within.whole(*args, **kwargs)))
    except Exception:  # the user's code may raise any, given a batch in place of an example
        return False
    return bool(recorder.facts)


def find(
    fun: Callable[..., Any],
    in_axes: AxesTree,
    options: dict[str, Any],
    args: tuple[Tree, ...],
    kwargs: dict[str, Any],
    lengths_known: bool = True,
) -> NonFinite:
    """Runs the batched function, and says what of it is not finite."""
    options = lanes_first(options)
    leaves, rebuild = spread_in_axes(fun, in_axes, args, kwargs)
    program = _Marking(fun, [leaf.path for leaf in leaves], rebuild)
    values, specs = [leaf.value for leaf in leaves], [leaf.spec for leaf in leaves]
    compiled = functools.partial(_compiled, values, specs, lengths_known)
    # What results are is seen in the program as it runs: with marks it is compiled otherwise.
    kinds = compiled(vmap(program.kinds, (specs,), **options))
    kinds = np.stack([np.asarray(x) for x in kinds], 1)
    size = len(kinds)
    if not kinds.any():
        return NonFinite(np.zeros(0, int), [], size)
    marks = compiled(vmap(program.origins, (specs,), **options))
    every = np.stack([np.asarray(x) for x in marks], 1)  # lane, output, entry
    worst = kinds.argmax(1)
    first = every[np.arange(size), worst]
    first[:, KIND] = kinds[np.arange(size), worst]
    lanes = np.flatnonzero(first[:, KIND])
    operands: dict[int, Sequence[str]] = {}
    made = lanes[first[lanes, PLACE] > 0]
    # One lane of each cause first; then others, up to as many as are shown.
    causes = np.stack([worst[made], *first[made][:, [PLACE, KIND, TURNED]].T], 1)
    firsts = made[np.sort(np.unique(causes, axis=0, return_index=True)[1])]
    shown = np.concatenate([firsts, np.setdiff1d(made, firsts)])[:_WITH_VALUES]
    # Operands take another run: to keep those of all equations would take far more memory.
    places = list(dict.fromkeys(first[shown, PLACE].tolist()))
    if places:
        of_places = vmap(program.operands(places), (0, specs), **options)
        seen = dict(
            zip(places, compiled(functools.partial(of_places, first[:, FIRST_LOOP:])), strict=True)
        )
        for lane in shown.tolist():
            place = int(first[lane, PLACE])
            operands[lane] = program.shown(place, [np.asarray(x)[lane] for x in seen[place]])
    faults = [
        program.fault(lane, int(worst[lane]), first[lane], operands.get(lane))
        for lane in lanes.tolist()
    ]
    return NonFinite(lanes, faults, size)


def _compiled(
    values: Values, specs: Sequence[Any], lengths_known: bool, run: Callable[..., Any]
) -> list[Any]:
    """Compiles and runs a function of the leaves."""
    # It sees values that are not arrays as they are; lengths of rows, too, where they are known.
    is_rows = lambda x: isinstance(x, Ragged)
    rows = filter(is_rows, jax.tree.leaves(list(values), is_leaf=is_rows))
    lengths = {id(n) for x in rows for n in x.each_length if lengths_known}
    flat, structure = jax.tree.flatten(list(values))
    mapped = jax.tree.leaves(
        [jax.tree.map(lambda _, s=s: s is not None, v) for v, s in zip(values, specs, strict=True)]
    )
    arrays = {
        i: x
        for i, (x, m) in enumerate(zip(flat, mapped, strict=True))
        if id(x) not in lengths
        and ((m and isinstance(x, (jax.Array, np.ndarray))) or _has_floats(x))
    }

    def of_arrays(*xs: Value) -> Tree:
        given = dict(zip(arrays, xs, strict=True))
        return run(structure.unflatten([given.get(i, x) for i, x in enumerate(flat)]))

    return jax.jit(of_arrays)(*arrays.values())


@dataclass
class Program:
    """Holds a program, and what the numbers in origins stand for."""

    places: Places  # its equations
    inputs: Sequence[str]  # names of its arguments
    outputs: Sequence[str]  # names of its results, which are numbered from 1

    def fault(
        self, lane: int | None, output: int, origin: np.ndarray, operands: Sequence[str] | None
    ) -> Fault:
        place, kind = int(origin[PLACE]), "nan" if origin[KIND] == NAN else "inf"
        of = self.places.place(place).eqn if place > 0 else None
        return Fault(
            lane,
            self.outputs[output - 1] if output else "",
            kind,
            shown(of.primitive) if of is not None else "",
            self._where(place) if of is not None else "",
            self._where(place) if of is None else "",
            tuple(int(i) for i in origin[FIRST_LOOP:] if i >= 0),
            self._turned(int(origin[TURNED])),
            operands,
        )

    def _turned(self, number: int) -> str:
        if not number:
            return ""
        place = self.places.place(number)
        return f"{spoken(place.eqn)} {place.line.rpartition(os.sep)[2]}".rstrip()

    def shown(
        self, place: int, views: Sequence[np.ndarray], watch: Watch | None = None
    ) -> list[str]:
        types = operand_types(self.places.place(place).eqn, watch)
        return [_shown(t, x) for t, x in zip(types, views, strict=True)]

    def _where(self, place: int) -> str:
        if place > 0:
            return self.places.place(place).line
        if place < -len(self.inputs):
            return "a value that the function closes over"
        return self.inputs[-1 - place] if place else ""


class _Marking(Program):
    """Is a function of one example that returns origins, of the leaves of its arguments."""

    def __init__(
        self,
        fun: Callable[..., Any],
        paths: Sequence[str],
        rebuild: Callable[[Values], tuple[tuple[Tree, ...], dict[str, Tree]]],
    ) -> None:
        super().__init__(Places(), [], [])
        self._fun, self._paths, self._rebuild = fun, paths, rebuild

    def origins(self, values: Values) -> list[Value]:
        """Returns where the results come from, those that may be bad."""
        self.places = Places()  # a function may be staged more than once: the last time counts
        evaluator, outs, names = self._evaluated(values, self.places)
        closed_over = -len(self.inputs) - 1
        outs = [evaluator.input(x.value, closed_over) if x.link is None else x for x in outs]
        origins = zip(names, evaluator.whole(outs), strict=True)
        by_name = {name: origin for name, origin in origins if origin is not None}
        self.outputs = [*by_name]
        return [evaluator.nowhere, *by_name.values()]  # so much of a lane without such results

    def kinds(self, values: Values) -> list[Value]:
        """Says whether results are finite, those that may be bad: as `origins` has them."""
        args, kwargs = self._rebuild(values)
        outs = map(jnp.asarray, jax.tree.leaves(without_objects(self._fun(*args, **kwargs))))
        return [jnp.int32(0), *(kind_of(x) for x in outs if jnp.issubdtype(x.dtype, jnp.inexact))]

    def operands(self, places: Sequence[int]) -> Callable[..., list[Values]]:
        """Returns a function from iterations, and the leaves, to what equations got in these."""
        blanks = [blank_view(self.places.place(place).eqn) for place in places]

        def seen(iterations: Value, values: Values) -> list[Values]:
            watches = [Watch(place, iterations) for place in places]
            return self._evaluated(values, Places(), watches, blanks)[0].seen

        return seen

    def _evaluated(
        self,
        values: Values,
        places: Places,
        watches: Sequence[Watch] = (),
        blanks: Sequence[Sequence[Any]] = (),
    ) -> tuple[Evaluator, list[Marked], list[str]]:
        flat, structure = jax.tree_util.tree_flatten_with_path(list(values))
        arrays = {i: x for i, (_, x) in enumerate(flat) if isinstance(x, Tracer) or _has_floats(x)}

        def of_arrays(*xs: Value) -> Tree:
            given = dict(zip(arrays, xs, strict=True))
            filled = [given.get(i, x) for i, (_, x) in enumerate(flat)]
            args, kwargs = self._rebuild(structure.unflatten(filled))
            return without_objects(self._fun(*args, **kwargs))

        program, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays.values())
        evaluator = Evaluator(places, loop_depth(program.jaxpr), watches, blanks)
        self.inputs = [
            self._paths[int(keys[0].idx)] + jax.tree_util.keystr(keys[1:])
            for i, (keys, _) in enumerate(flat)
            if i in arrays
        ]
        consts = [evaluator.input(c, -len(self.inputs) - 1) for c in program.consts]
        given = [evaluator.input(x, -1 - k) for k, x in enumerate(arrays.values())]
        outs = evaluator.run(program.jaxpr, consts, given)
        named = jax.tree_util.tree_flatten_with_path(shapes)[0]
        return evaluator, outs, ["out" + jax.tree_util.keystr(keys) for keys, _ in named]


def _has_floats(x: Value) -> bool:
    """Whether a leaf is an array of floats; at others the function may want to look."""
    is_array = isinstance(x, (jax.Array, np.ndarray, np.generic))
    return is_array and jnp.issubdtype(x.dtype, jnp.inexact)


def _shown(aval: Aval, x: np.ndarray) -> str:
    kind = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
    if x.shape == tuple(aval.shape):
        return f"{kind} {' '.join(np.array2string(x, precision=6, separator=', ').split())}"
    if not jnp.issubdtype(aval.dtype, jnp.number):
        return kind
    nans, infs, least, most = x
    return f"{kind} {nans:.0f} NaN, {infs:.0f} infinite, others from {least:.6g} to {most:.6g}"


def find_whole(
    fun: Callable[..., Any],
    args: tuple[Tree, ...],
    kwargs: dict[str, Any],
    names: Sequence[str],
    lengths_known: bool,
) -> NonFinite:
    """Runs a function that contains a `vmap`, and says what of its results is not finite."""
    check_untraced("find_nonfinite looks at values", (args, kwargs))
    staged = stage(fun, args, kwargs, names, lengths_known=lengths_known)
    staged.check_vmap("find_nonfinite")
    program = _Batched(staged)
    outs = jax.jit(jaxpr_as_fun(staged.traced.jaxpr))(*staged.arrays)
    kinds = [int(kind_of(x)) if may_be_bad(x) else 0 for x in outs]
    bad = [i for i, kind in enumerate(kinds) if kind]
    marks = program.origins() if bad else []
    first: dict[int | None, tuple[int, np.ndarray]] = {}
    for i in sorted(bad, key=lambda i: -kinds[i]):
        rows = np.array(marks[i])  # lane, entry
        rows[:, KIND] = kinds[i]
        lanes = [k for k, row in enumerate(rows) if row[PLACE] in program.places.of_lanes]
        for lane in lanes or [None]:
            first.setdefault(lane, (i, rows[lane or 0]))
    # Where lanes can be named, results that all lanes make together are left out.
    if any(lane is not None for lane in first):
        first.pop(None, None)
    lanes = sorted(lane for lane in first if lane is not None)
    ordered = [(lane, *first[lane]) for lane in lanes or first]
    operands = program.operands(causes_shown(ordered))
    described = program.described()
    faults = [described.fault(lane, i + 1, row, operands.get(lane)) for lane, i, row in ordered]
    return NonFinite(np.array(lanes, int), faults, program.lanes.size, whole=True)


class _Batched:
    """Holds a batched program, and where its values have the axis of lanes."""

    def __init__(self, staged: Staged) -> None:
        self._staged, self._recorder = staged, staged.recorder
        self.places, self._jaxpr = Places(), staged.traced.jaxpr
        self._depth = loop_depth(self._jaxpr.jaxpr)
        axes = [details["axis"] for about, details in self._recorder.facts if about == "rows"]
        axes += [x.axis for x in (*self._recorder.programs, *self._recorder.records)]
        self.lanes = Lanes(axes[0].size, self._axis_of)
        example = next(iter(self._recorder.programs), None)
        self._positions = {} if example is None else example.arguments

    def _axis_of(self, eqn: Eqn | None, aval: Aval) -> int | None:
        """Returns where a value has the axis of lanes: as its record says, or the only one of that
        size.
        """
        size, shape = self.lanes.size, aval.shape
        record = None if eqn is None else self._recorder.record_of(eqn.source_info.name_stack)
        if record is not None and record.axis.size == size:
            atoms = (*record.eqn.outvars, *record.eqn.invars)
            for v, axis in zip(atoms, (*record.out_axes, *record.in_axes), strict=False):
                example = list(v.aval.shape)
                if isinstance(axis, int) and [*example[:axis], size, *example[axis:]] == [*shape]:
                    return axis
        axes = [k for k, n in enumerate(shape) if n == size]
        return axes[0] if len(axes) == 1 else None

    def _evaluated(
        self, arrays: Values, watches: Sequence[Watch] = (), blanks: Sequence[Sequence[Any]] = ()
    ) -> tuple[Evaluator, list[Marked]]:
        places = Places() if watches else self.places
        evaluator = Evaluator(places, self._depth, watches, blanks, lanes=self.lanes)
        inner = self._jaxpr.jaxpr

        def given(k: int, v: Any, x: Value) -> Marked:
            if watches or not may_be_bad(x):
                return Marked(x)
            number = -1 - k
            axis = self._positions[v][1] if v in self._positions else self._axis_of(None, v.aval)
            if axis is not None and v.aval.shape[axis] != self.lanes.size:  # of packed rows
                axis = None
            if axis is not None:
                places.of_lanes.add(number)
            return Marked(x, link(x, number, axis=axis, lanes=self.lanes))

        consts = [evaluator.input(c, -len(arrays) - 1) for c in self._jaxpr.consts]
        inputs = [given(k, v, x) for k, (v, x) in enumerate(zip(inner.invars, arrays, strict=True))]
        outs = evaluator.run(inner, consts, inputs)
        closed_over = -len(arrays) - 1
        if not watches:
            outs = [o if o.link else evaluator.input(o.value, closed_over) for o in outs]
        return evaluator, outs

    def origins(self) -> list[Value]:
        """Returns where each result comes from, for each lane."""

        def run(*arrays: Value) -> list[Value]:
            evaluator, outs = self._evaluated(arrays)
            return evaluator.whole(outs)

        return jax.jit(run)(*self._staged.arrays)

    def operands(self, rows: Sequence[tuple[Any, np.ndarray]]) -> dict[Any, list[str]]:
        """Returns what equations got in lanes, or in all together, for people."""
        watches, blanks = [], []
        for lane, row in rows:
            eqn = self.places.place(int(row[PLACE])).eqn
            axes = [None if lane is None else self._axis_of(eqn, v.aval) for v in eqn.invars]
            watches.append(Watch(int(row[PLACE]), row[FIRST_LOOP:], lane, axes))
            blanks.append(blank_view(eqn, watches[-1]))
        if not rows:
            return {}
        seen = jax.jit(lambda *arrays: self._evaluated(arrays, watches, blanks)[0].seen)
        views = jax.tree.map(np.asarray, seen(*self._staged.arrays))
        shown = self.described().shown
        return {w.lane: shown(w.place, x, w) for w, x in zip(watches, views, strict=True)}

    def described(self) -> Program:
        return Program(self.places, self._staged.paths, self._staged.results)
