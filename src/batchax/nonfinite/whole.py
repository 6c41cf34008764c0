"""A function that contains a `vmap`, such as the gradient of a mean over lanes, looked at as it is.

Its program is batched already, so it is evaluated once. Each value has a mark for each lane: of
those with an axis of lanes for what is in that lane, of others the same mark for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from batchax.frontend.arguments import check_untraced
from batchax.jaxprs.words import Aval, Eqn, Value
from batchax.nonfinite.find import NonFinite, Program, causes_shown
from batchax.nonfinite.links import FIRST_LOOP, KIND, PLACE, Lanes, kind_of, link
from batchax.nonfinite.origins import Evaluator, Marked, Places, Watch, blank_view, loop_depth
from batchax.staging import Staged, stage


def find_whole(
    fun: Callable[..., Any], args: Any, kwargs: Any, names: Sequence[str], lengths_known: bool
) -> NonFinite:
    """Runs a function that contains a `vmap`, and says what of its results is not finite.

    Args:
      fun: The function.
      args, kwargs: The call's arguments.
      names: The names of its positional parameters.
      lengths_known: Whether lengths of rows are known.

    Raises:
      ArgumentTypeError: There is no `vmap` in it, or one that `jax.jit` remembers.
    """
    check_untraced("find_nonfinite looks at values", (args, kwargs))
    staged = stage(fun, args, kwargs, names, lengths_known=lengths_known)
    staged.check_vmap("find_nonfinite")
    program = _Batched(staged)
    outs = jax.jit(jaxpr_as_fun(staged.traced.jaxpr))(*staged.arrays)
    kinds = [int(kind_of(x)) if program.may_be_bad(x) else 0 for x in outs]
    bad = [i for i, kind in enumerate(kinds) if kind]
    marks = program.origins() if bad else []
    first: dict[int | None, tuple[int, np.ndarray]] = {}
    for i in sorted(bad, key=lambda i: -kinds[i]):
        rows = np.array(marks[i])  # lane, entry
        rows[:, KIND] = kinds[i]
        lanes = [k for k, row in enumerate(rows) if row[PLACE] in program.places.of_lanes]
        for lane in lanes or [None]:
            first.setdefault(lane, (i, rows[lane or 0]))
    if any(lane is not None for lane in first):
        first.pop(None, None)
    lanes = sorted(lane for lane in first if lane is not None)
    ordered = [(lane, *first[lane]) for lane in lanes or first]
    operands = {lane: program.operands(row, lane) for lane, row in causes_shown(ordered)}
    told = program.described()
    faults = [told.fault(lane, i + 1, row, operands.get(lane)) for lane, i, row in ordered]
    return NonFinite(np.array(lanes, int), faults, program.lanes.size, whole=True)


class _Batched:
    """A batched program, and where its values have the axis of lanes."""

    def __init__(self, staged: Staged) -> None:
        self._staged, self._recorder = staged, staged.recorder
        self.places, self._jaxpr = Places(), staged.traced.jaxpr
        self._depth = loop_depth(self._jaxpr.jaxpr)
        axes = [details["axis"] for about, details in self._recorder.facts if about == "rows"]
        axes += [x.axis for x in (*self._recorder.programs, *self._recorder.records)]
        self.lanes = Lanes(axes[0].size, self._axis_of)
        example = next(iter(self._recorder.programs), None)
        self._positions = {} if example is None else example.arguments

    @staticmethod
    def may_be_bad(x: Value) -> bool:
        return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)

    def _axis_of(self, eqn: Eqn | None, aval: Aval) -> int | None:
        """Where a value has the axis of lanes: as its record says, or the only one of that size."""
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
        self, arrays: Sequence[Value], watch: Watch | None = None, seen: Sequence[Any] = ()
    ) -> tuple[Evaluator, list[Marked]]:
        places = self.places if watch is None else Places()
        evaluator = Evaluator(places, self._depth, watch, seen, lanes=self.lanes)
        inner = self._jaxpr.jaxpr

        def given(k: int, v: Any, x: Value) -> Marked:
            if watch is not None or not self.may_be_bad(x):
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
        if watch is None:
            outs = [o if o.link else evaluator.input(o.value, closed_over) for o in outs]
        return evaluator, outs

    def origins(self) -> list[Any]:
        """For each result where it comes from, for each lane."""

        def run(*arrays: Any) -> list[Any]:
            evaluator, outs = self._evaluated(arrays)
            return evaluator.whole(outs)

        return jax.jit(run)(*self._staged.arrays)

    def operands(self, row: np.ndarray, lane: int | None) -> list[str]:
        """What an equation was given in a lane, or in all together, for people."""
        place = int(row[PLACE])
        eqn = self.places.place(place).eqn
        axes = [None if lane is None else self._axis_of(eqn, v.aval) for v in eqn.invars]
        watch = Watch(place, row[FIRST_LOOP:], lane, axes)
        blank = blank_view(eqn, watch)
        seen = jax.jit(lambda *arrays: self._evaluated(arrays, watch, blank)[0].seen)
        views = list(map(np.asarray, seen(*self._staged.arrays)))
        return self.described().shown(place, views, watch)

    def described(self) -> Program:
        """The names of what origins number."""
        return Program(self.places, self._staged.paths, self._staged.results)
