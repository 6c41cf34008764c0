"""Scans over rows in which each row takes its own steps.

A scan over a padded row takes as many steps as the longest row has, and the others are dropped. As
a ``while`` of one example it takes as many as the row has, and lanes may leave it one by one
(`divergence`). If a step is expensive, all lanes run first, in the order of their numbers of steps,
and then those that are left, in arrays half as wide. Which of these runs is decided where rows are
batched: one primitive holds all. The scan is what it stands for, and has the derivative, as a
``while`` has none in reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.analysis.cost import (
    COMPILED_STEP,
    LAUNCH,
    RUNS_OF_ROWS,
    STEPS,
    VECTORIZED,
    cost_of_program,
)
from batchax.analysis.one_function import fits_lowered_kernel, lower_for_kernel
from batchax.cache import cached_on
from batchax.execution.gathered_lanes import taken_at
from batchax.execution.slices import part_of, put_part
from batchax.jaxprs.bodies import with_inside
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Value, Values
from batchax.kernel.axis import AnyLoop, Axis, Position, Positions
from batchax.kernel.inner import batch_inner, inline_jaxpr
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.own_primitive import own_primitive
from batchax.rows.sizes import has_symbols
from batchax.rules.masking import hazards


class Steps(NamedTuple):
    """The steps of a row, and what it carries first."""

    begin: Value  # the number of the first, counted from the first element that is scanned
    end: Value  # that after the last one
    carry: Sequence[Value]


Run = Callable[[Steps, Values], list[Any]]


@cached_on("whether rows may take their own steps of a scan")
def may_take_own_steps(body: ClosedJaxpr) -> bool:
    danger = hazards(body.jaxpr)
    if danger.collective or danger.endless or body.effects:
        return False
    return not any(
        has_symbols(getattr(aval, "shape", ())) for aval in (*body.in_avals, *body.out_avals)
    )


def run_own_steps(scan: Run, loop: Run, steps: Steps, values: Values, most: int) -> list[Any]:
    """What both functions return of these values; `loop` may run in place of `scan`.

    `loop` takes the steps that it is given, of which a row has at most so many.
    """
    given = [steps.begin, steps.end, *steps.carry, *values]
    count = 2 + len(steps.carry)

    def flat(run: Run) -> Callable[..., list[Any]]:
        return lambda *xs: run(Steps(xs[0], xs[1], xs[2:count]), xs[count:])

    types = list(map(jax.typeof, given))
    stages = (_compat.stage(flat(run), types) for run in (scan, loop))
    programs, consts = _compat.hoist_constants(*stages)
    operands = _compat.varying_alike([*consts, *given])
    first = len(consts)
    return own_steps_p.bind(*operands, scan=programs[0], loop=programs[1], first=first, most=most)


def _batched(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    scan: ClosedJaxpr,
    loop: ClosedJaxpr,
    first: int,
    most: int,
) -> tuple[list[Any], Positions]:
    masked, out_axes = batch_inner(axis, scan, axes)
    leaving = _leaving(axis, loop, args, axes, out_axes)
    if leaving is None:
        leaving = _narrowing(axis, loop, args, axes, out_axes, first, most)
    if leaving is None:
        return inline_jaxpr(masked, args), out_axes
    # Lanes of an outer axis are masked: what is sorted here are those of this one.
    return own_steps_p.bind(*args, scan=masked, loop=leaving, first=0, most=0), out_axes


def _leaving(
    axis: Axis, loop: ClosedJaxpr, args: Values, axes: Positions, out_axes: Positions
) -> ClosedJaxpr | None:
    """The batched loop, if lanes leave it one by one, in a single kernel."""
    found = _find(loop, while_p.name)
    programs = [e.params[name] for e in found for name in ("cond_jaxpr", "body_jaxpr")]
    if not all(fits_lowered_kernel(lower_for_kernel(p).jaxpr) for p in programs):
        return None
    loops = [AnyLoop(while_p, e.params, args, axes) for e in found]
    if axis.divergence is None or any(axis.divergence.why_lockstep(axis, x) for x in loops):
        return None
    batched, _ = batch_inner(axis, loop, axes, out_axes)
    parts = [eqn.params["loop"] for eqn in _find(batched, "divergent_loop")]
    return batched if parts and all(own.in_kernel for own in parts) else None


def _narrowing(
    axis: Axis,
    loop: ClosedJaxpr,
    args: Values,
    axes: Positions,
    out_axes: Positions,
    first: int,
    most: int,
) -> ClosedJaxpr | None:
    """The loop of all lanes, masked, and then of the half that takes most steps.

    Lanes are in the order of their steps, so those that are left come first. In the worst case
    all take as many, and nothing more is computed than otherwise.
    """
    fits = most and axes[first + 1] is not None and all(a == 0 for a in out_axes)
    if not fits or not _pays(axis, loop, axes, most) or any_uses_axis(axis, loop):
        return None
    count, half = len(out_axes), axis.size // 2
    lanes = replace(axis, name=None, divergence=None)
    ended: list[Position] = [*axes[:first], None, 0, *out_axes, *axes[first + 2 + count :]]
    begun: list[Position] = [*axes[: first + 1], 0, *axes[first + 2 :]]
    whole, _ = batch_inner(lanes, loop, begun, out_axes)
    rest, _ = batch_inner(replace(lanes, size=half), loop, ended, out_axes)

    def run(*args: Value) -> list[Any]:
        (every,) = _compat.varying_alike([lax.iota(np.int32, axis.size)], like=args)
        _, order = lax.sort([lax.neg(args[first + 1]), every], num_keys=1)
        _, places = lax.sort([order, every], num_keys=1)
        pairs = zip(args, axes, strict=True)
        given = [x if a is None else taken_at(x, order, a) for x, a in pairs]
        end, others = given[first + 1], given[first + 2 + count :]
        # That of the slowest lane of those that do not run any more then.
        stop = lax.squeeze(part_of(end, np.int32(half), 0, 1), (0,))
        until = lax.min(end, lax.broadcast(stop, end.shape))
        outs = inline_jaxpr(whole, [*given[: first + 1], until, *given[first + 2 :]])
        few = [
            x if a is None else part_of(x, np.int32(0), a, half)
            for x, a in zip([*given[:first], stop, end, *outs, *others], ended, strict=True)
        ]
        slow = inline_jaxpr(rest, few)
        outs = [put_part(x, own, np.int32(0)) for x, own in zip(outs, slow, strict=True)]
        return [taken_at(x, places, 0) for x in outs]

    return _compat.stage(run, list(map(jax.typeof, args)))


def _pays(axis: Axis, loop: ClosedJaxpr, axes: Positions, most: int) -> bool:
    """Whether half of the lanes save, in a quarter of the steps, more than it costs to sort all.

    And than the step takes to compile once more.
    """
    found = _find(loop, while_p.name)
    if len(found) != 1 or not isinstance(axis.size, int) or axis.size < _LEAST:
        return False
    if axis.divergence is None or axis.mesh_axis is not None or axis.spmd_name is not None:
        return False
    (eqn,) = found
    pairs = zip(loop.jaxpr.invars, axes, strict=True)
    shared = {*loop.jaxpr.constvars, *(v for v, a in pairs if a is None)}
    body, given = eqn.params["body_jaxpr"].jaxpr, eqn.invars[eqn.params["cond_nconsts"] :]
    differs = tuple(not (isinstance(v, Literal) or v in shared) for v in given)
    carried = len(body.outvars)
    differs = (*differs[: len(differs) - carried], *[True] * carried)
    cost = cost_of_program(body, differs=differs, steps=STEPS)
    saved = most / 4 * (axis.size / 2) * VECTORIZED.time(cost)
    moved = sum(a is not None for a in axes) + 2 * carried
    sorting = _SORTED * axis.size + 2 * LAUNCH * moved
    operations = sum(1 for _ in with_inside(body.eqns))
    return saved >= 2 * sorting + operations * COMPILED_STEP / RUNS_OF_ROWS


# Programs: a GRU over 128 series.
_LEAST = 16  # lanes
_SORTED = 150.0  # nanoseconds to sort a lane, and back


def _find(program: ClosedJaxpr, primitive: str) -> list[Eqn]:
    return [eqn for eqn in program.jaxpr.eqns if eqn.primitive.name == primitive]


own_steps_p = own_primitive(
    "own_steps",
    called="a scan over a row",
    operations=lambda *operands, scan, **_: inline_jaxpr(scan, operands),
    on_cpu=lambda *operands, loop, **_: inline_jaxpr(loop, operands),
    types=lambda *avals, scan, **_: list(scan.out_avals),
    programs=("scan", "loop"),
    facts="costly control",
    rule=_batched,
)
