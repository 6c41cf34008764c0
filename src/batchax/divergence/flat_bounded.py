"""A bounded loop, or the sweep back over one, around loops that lanes leave one by one.

Its values are those of the operations that it stands for: a ``while`` that runs flat. That has no
derivative in reverse, so derivatives are those of the bounded loop of one example, batched
(`flat_derivatives.py`); a bounded loop and a sweep again, they come here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero

from batchax.divergence.flat import FlatLoop
from batchax.divergence.flat_derivatives import tangents_of_lanes, why_meeting_back
from batchax.divergence.limits import NAME
from batchax.divergence.policy import Flattened
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.derivatives import with_values
from batchax.kernel.divergence import AnyLoop, PlacedOutputs
from batchax.kernel.inner import batch_inner, example_aval, stage_function
from batchax.kernel.interpreter import interpret
from batchax.kernel.varying import varying_of
from batchax.kernel.written_out import written_out


def run_flat_bounded(axis: Axis, loop: AnyLoop) -> PlacedOutputs | None:
    """The results of a bounded loop or a sweep for all lanes, each at a place of its own.

    None if lanes take its steps together.
    """
    types = [
        example_aval(axis, jax.typeof(x), a) for x, a in zip(loop.args, loop.axes, strict=True)
    ]
    program = stage_function(axis, lambda *xs: loop.primitive.bind(*xs, **loop.params), types)
    (eqn,) = program.jaxpr.eqns
    operations = written_out(eqn)
    if operations is None:
        recording.note(why=NAME)
        return None
    at = tuple(loop.axes)
    front: list[Position] = [0] * len(program.out_avals)
    with recording.paused(axis):
        flat, _ = batch_inner(axis, operations, at, front, varying_of(loop.args))
    loops = [eqn.params["loop"] for eqn in flat.jaxpr.eqns if "loop" in eqn.params]
    flat_loops = [inner for inner in loops if isinstance(inner, FlatLoop)]
    if not flat_loops:
        return None
    plan = flat_loops[0].plan
    assert isinstance(plan, Flattened)
    recording.note(divergence="flat", widths=plan.widths)
    if recording.is_on():
        recording.note(back=why_meeting_back(program, at))
    only_branches = all(inner.nest.only_branches for inner in flat_loops)
    return _with_derivatives(axis, flat, program, at, only_branches)(*loop.args), front


def _with_derivatives(
    axis: Axis,
    flat: ClosedJaxpr,
    program: ClosedJaxpr,
    at: Sequence[Position],
    only_branches: bool,
) -> Any:
    """`flat`, which does what `program` does for one example, with the derivatives of that.

    Where they are taken of lanes that meet at each step, branches, if there are `only_branches` to
    wait before, run for the lanes that take them.
    """
    way: Any = axis.divergence
    inside = replace(axis, divergence=way.inside())
    meeting = replace(axis, divergence=way.in_lockstep() if only_branches else None)

    @jax.custom_jvp
    def run(*xs: Any) -> list[Any]:
        return eval_jaxpr(flat.jaxpr, flat.consts, *xs)

    def together(*xs: Any) -> list[Any]:
        with recording.paused(axis):
            outs, out_axes = interpret(meeting, program.jaxpr, program.consts, xs, at)
        return [match_axis(meeting, x, a, 0) for x, a in zip(outs, out_axes, strict=True)]

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def _(primals: Sequence[Value], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        both = None
        if not any(varying_of(primals)):  # inside ``shard_map`` what is shared would need a cast
            moved = [tangents[i] for i in moving]
            both = tangents_of_lanes(inside, program, primals, at, moving, moved)
        if both is None:
            some = lambda *ms: together(*with_values(primals, moving, ms))
            return jax.jvp(some, [primals[i] for i in moving], [tangents[i] for i in moving])
        outs, dots = both
        none = lambda x: np.zeros(x.shape, jax.dtypes.float0)
        return outs, [none(x) if t is None else t for x, t in zip(outs, dots, strict=True)]

    return run
