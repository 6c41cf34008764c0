"""A bounded loop, or the sweep back over one, under vmap of batchax or of JAX.

If lanes take different numbers of steps the loop runs until the last is done, and the others are
masked. The mask of active lanes is part of the loop, so the batched loop is a bounded loop with the
derivatives of one. The same holds for the batched sweep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import Primitive

from batchax.errors import UnsupportedError
from batchax.execution.bounded_derivatives import loop_jvp, loop_transpose, sweep_jvp
from batchax.execution.bounded_loop import (
    LoopSignature,
    LoopStep,
    Operands,
    SweepSignature,
    bounded_loop,
    bounded_loop_p,
    loop_types,
    no_checkpoints,
    reverse_sweep,
    reverse_sweep_p,
    run_loop,
    run_sweep,
    sweep_types,
)
from batchax.execution.eager import jitted, whatever_jit
from batchax.execution.steps import entry_axis, steps_axes, whole_axis
from batchax.jaxprs.bodies import is_seen
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import ClosedJaxpr, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import (
    AnyLoop,
    Axis,
    BoundedLoop,
    PlacedOutputs,
    Position,
    Positions,
    match_axis,
)
from batchax.kernel.inner import ANYWHERE, batch_inner, emitted
from batchax.kernel.interpreter import interpret
from batchax.kernel.own_primitive import own_primitive
from batchax.rules.callbacks import with_active
from batchax.rules.loops import axis_for, predicate, predicate_if, run_divergent, settle
from batchax.rules.masking import (
    MaskPlan,
    hazards,
    is_inexact,
    plan_masking,
    run_masked,
    select_lanes,
)

Step = Callable[[Any, Values, Values, Values], tuple[Values, Values]]
"""As a `LoopStep`, of the lanes that are active: they come first."""


def _batched(primitive: Primitive) -> Callable[..., PlacedOutputs]:
    """Returns the batching rule of the loop, or of the sweep."""

    def batched(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> PlacedOutputs:
        nest = AnyLoop(primitive, params, args, axes)
        axis = axis_for(axis, nest)
        placed = None if axis.divergence is None else axis.divergence.run_nest(axis, nest)
        if placed is not None:  # each lane advances independently
            return placed
        guarded, form = params["guarded"], params["form"]
        if primitive is bounded_loop_p:
            loop = BoundedLoop(params["test"], [params["body"]], [guarded], form, args, axes)
        else:
            steps = [params["forward"], params["back"]]
            loop = BoundedLoop(None, steps, guarded, form, args, axes)
        return _batched_once(axis, loop)

    return batched


def _batched_once(axis: Axis, loop: BoundedLoop) -> PlacedOutputs:
    """Batches a loop, reusing the trace if JAX's cache returns the same body from another call."""
    programs = [p for p in (loop.test, *loop.steps, *loop.guarded) if p is not None]
    # Callbacks and effects depend on the call, so such a loop is batched each time.
    if loop.form.steps.callback is not None or any(p.effects for p in programs):
        return batch_bounded_loop(axis, loop)
    # The closure must not keep the operands of this call alive.
    bare = replace(loop, args=())
    run = lambda *args: batch_bounded_loop(axis, replace(bare, args=args))
    more = loop.test, *loop.guarded, loop.form
    outs, out_axes = emitted(axis, loop.steps[-1], loop.args, loop.axes, run, more)
    return outs, list(out_axes)


def batch_bounded_loop(axis: Axis, loop: BoundedLoop) -> PlacedOutputs:
    run = _batch_sweep if isinstance(loop.form, SweepSignature) else _batch_loop
    return run(axis, loop)


def _batch_sweep(axis: Axis, loop: BoundedLoop) -> PlacedOutputs:
    form: SweepSignature = loop.form
    loop = _with_common_checkpoints(loop)
    at = form.split(loop.axes)
    # With a batched count, each device or lane stops at another step: lanes are masked.
    if at.count is not None:
        (forward, back), operands = loop.steps, (loop.args, loop.axes)
        params = {"forward": forward, "back": back, "guarded": tuple(loop.guarded), "form": form}
        return run_divergent(axis, reverse_sweep_p, *operands, params, loop, every_step)
    recording.note(divergence="together")
    ahead = loop.steps[0], loop.guarded[0]
    entries = list(map(entry_axis, at.xs, form.x_axes))
    kept = dict(zip(form.kept, at.checkpoints[1:], strict=True))
    # Checkpoints of a value have the batch axis if the value has it at any step.
    carry = [0 if a is None and kept.get(i) is not None else a for i, a in enumerate(at.carry)]
    carry, _, *forward = _settled(axis, *ahead, at.consts, carry, entries)
    before = [*carry, *entries]
    returning, ys, *back = _settled(
        axis, loop.steps[1], loop.guarded[1], at.consts, at.returning, before
    )
    checkpoints = _stacked_at(carry, form)
    targets = at._replace(carry=carry, checkpoints=checkpoints, returning=returning)
    y_axes = steps_axes(ys, form.y_axes)
    outs = reverse_sweep_p.bind(
        *_placed(axis, loop, targets),
        forward=forward[0],
        back=back[0],
        guarded=(forward[1], back[1]),
        form=replace(form, x_axes=steps_axes(at.xs, form.x_axes), y_axes=y_axes),
    )
    return outs, [*returning, *map(whole_axis, ys, y_axes)]


def _batch_loop(axis: Axis, loop: BoundedLoop) -> PlacedOutputs:
    test, (body,), (guarded,), form = loop.test, loop.steps, loop.guarded, loop.form
    at = form.split(loop.axes)
    entries = list(map(entry_axis, at.xs, form.x_axes))
    carry, ys, *programs = _settled(axis, body, guarded, at.consts, at.carry, entries)
    decided_at, tested = at.count, test
    # The predicate is batched last, as the carry may become batched in a step.
    if test is not None and at.count is None:
        with recording.part("condition"):
            tested, (decided_at,) = batch_inner(axis, test, (*at.test, *carry))
    # A loop of no steps has no entry to take for a lane, and nothing to mask.
    if decided_at is not None and form.steps.most != 0:
        params = {"test": test, "body": body, "guarded": guarded, "form": form}
        equation = bounded_loop_p, loop.args, loop.axes, params
        return run_divergent(axis, *equation, loop, every_step)

    recording.note(divergence="together")
    y_axes = steps_axes(ys, form.y_axes)
    outs = bounded_loop_p.bind(
        *_placed(axis, loop, at._replace(carry=carry)),
        test=tested,
        body=programs[0],
        guarded=programs[1],
        form=replace(form, x_axes=steps_axes(at.xs, form.x_axes), y_axes=y_axes),
    )
    return outs, [*carry, *map(whole_axis, ys, y_axes), *_stacked_at(carry, form), None]


def every_step(axis: Axis, loop: BoundedLoop) -> PlacedOutputs:
    """Runs every step that some lane takes, for all lanes. Lanes that are done are masked."""
    if loop.test is not None:
        return run_while(axis, loop, lambda active, _: lax.reduce_or(active, (0,)))
    if any(hazards(program.jaxpr).collective for program in loop.steps):
        raise UnsupportedError(
            "a bounded loop that contains a collective over a batch axis, and that lanes leave "
            "at different steps, is differentiated one lane at a time (vmap of grad). Have all "
            "lanes leave at the same step, by a predicate made of collectives, or "
            "differentiate the batched function (grad of vmap)."
        )
    run = _run_sweep if isinstance(loop.form, SweepSignature) else _run_counted
    return run(axis, loop)


def run_while(axis: Axis, loop: BoundedLoop, goes_on: Callable[[Any, Any], Any]) -> PlacedOutputs:
    """Runs a loop with a predicate for all lanes while `goes_on` returns True.

    `goes_on` takes the mask of active lanes and the steps that each has taken, the first two
    entries of the carry.
    """
    form: LoopSignature = loop.form
    n = 1 + form.n_test
    test_at, lanes = form.split(loop.axes).test, of_lanes(axis, loop)

    def active_lanes(consts: Values, carry: Values, active: Value | None = None) -> Value:
        operands, positions = [*consts[1:n], *carry], [*test_at, *[0] * len(carry)]
        # The first test has no mask: all lanes are active.
        if active is None:
            return predicate(axis, loop.test, operands, positions)
        return predicate_if(axis, active, loop.test, operands, positions)

    def tested(step: Step) -> LoopStep:
        def run(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
            active, steps, *carry = carry
            new, ys = step(active, consts[n:], carry, x)
            # Steps and the mask only change for active lanes, so a lane that is done stays done.
            steps = steps + lax.convert_element_type(active, np.int32)
            active &= active_lanes(consts, new, active) & (steps < consts[0])
            return [active, steps, *new], ys

        return run

    consts = [lanes.count, *lanes.test, *lanes.consts]
    active = active_lanes(consts, lanes.carry) & (lanes.count > 0)
    program, guarded = _masked(axis, loop, 0, tested)
    results = bounded_loop(
        program,
        consts,
        [active, lax.full_like(active, 0, np.int32), *lanes.carry],
        lanes.xs,
        guarded=guarded,
        test=lambda _, carry: goes_on(*carry[:2]),
        count=np.int32(form.steps.most),  # the predicate ends the loop before that
        steps=form.steps,
        x_axes=_x_axes(loop),
        y_axes=steps_axes([0] * len(form.y_axes), form.y_axes),
        # the mask and the steps come first in the carry
        kept=None if form.kept is None else [2 + i for i in form.kept],
    )
    _, steps, *carry = results.carry
    return _results(form, [*carry, *results.ys, *results.checkpoints, steps])


def _run_counted(axis: Axis, loop: BoundedLoop) -> PlacedOutputs:
    """Runs a loop whose number of steps is known, up to the largest count of a lane."""
    form: LoopSignature = loop.form
    lanes = of_lanes(axis, loop)
    program, guarded = _masked(axis, loop, 0, _counted(0))
    results = bounded_loop(
        program,
        [lanes.count, *lanes.consts],
        lanes.carry,
        [lax.iota(np.int32, form.steps.most), *lanes.xs],
        guarded=guarded,
        count=lax.reduce_max(lanes.count, (0,)),
        steps=form.steps,
        x_axes=(0, *_x_axes(loop)),
        y_axes=steps_axes([0] * len(form.y_axes), form.y_axes),
        kept=form.kept,
        again=form.again,
    )
    # A count may be negative or above the bound.
    steps = lax.clamp(np.int32(0), lanes.count, np.int32(form.steps.most))
    return _results(form, [*results.carry, *results.ys, *results.checkpoints, steps])


def _run_sweep(axis: Axis, loop: BoundedLoop) -> PlacedOutputs:
    """Runs a sweep from the last step that some lane took.

    Each lane takes step t back together with step t of the others, as in the loop; lanes with fewer
    steps are masked until then.
    """
    form: SweepSignature = loop.form
    lanes = of_lanes(axis, loop)
    # Of a step back, the carry comes before the xs.
    (forward, forward_guarded), (back, back_guarded) = (
        _masked(axis, loop, i, _counted(first)) for i, first in enumerate((0, form.n_carry))
    )
    returned, ys = reverse_sweep(
        forward,
        back,
        [lanes.count, *lanes.consts],
        lanes.carry,
        lanes.checkpoints,
        lanes.returning,
        [lax.iota(np.int32, form.steps.most), *lanes.xs],
        kept=form.kept,
        guarded=(forward_guarded, back_guarded),
        count=lax.reduce_max(lanes.count, (0,)),
        steps=form.steps,
        x_axes=(0, *_x_axes(loop)),
        y_axes=steps_axes([0] * len(form.y_axes), form.y_axes),
    )
    return [*returned, *ys], [0] * form.n_results


def _counted(first: int) -> Callable[[Step], LoopStep]:
    # Entry `first` of the xs is the number of the step, and the first constant is the count of each
    # lane.
    def counted(step: Step) -> LoopStep:
        def run(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
            entries = [*x[:first], *x[first + 1 :]]
            return step(x[first] < consts[0], consts[1:], carry, entries)

        return run

    return counted


def _masked(
    axis: Axis, loop: BoundedLoop, i: int, made: Callable[[Step], LoopStep]
) -> tuple[LoopStep, LoopStep | None]:
    """Returns a step with finished lanes masked, and the one to differentiate, if it differs.

    `i` selects the program, and `made` wraps a step that takes the mask.
    """
    body, guarded, at = loop.steps[i], loop.guarded[i], loop.form.split(loop.axes)
    carried = [*at.returning, *at.carry] if i else at.carry
    positions = [*at.consts, *[0] * len(carried), *map(entry_axis, at.xs, loop.form.x_axes)]

    def plan(program: ClosedJaxpr, differentiated: bool) -> MaskPlan:
        calls = is_seen(program)
        jaxpr = (with_active(axis, program) if calls else program).jaxpr
        # Derivatives of masked lanes must be finite too: NaN times a zero cotangent is NaN. So all
        # inexact operands are replaced.
        inexact = {i for i, v in enumerate(jaxpr.invars) if is_inexact(v.aval)}
        needed, mine = inexact if differentiated else (), range(calls)
        at = [*[0] * calls, *positions]
        return plan_masking(jaxpr, at, needed, mine, may_take_mask=False)

    plain, safe = plan(body, False), plan(guarded, True)
    step = made(_masked_step(axis, body, positions, plain))
    if guarded is body and safe == plain:
        return step, None
    return step, made(_masked_step(axis, guarded, positions, safe))


def _masked_step(
    axis: Axis,
    program: ClosedJaxpr,
    positions: Positions,
    plan: MaskPlan,
) -> Step:
    """Builds a step of the active lanes. The others keep their carry, and return zeros."""

    calls = is_seen(program)
    if calls:
        program, positions = with_active(axis, program), [0, *positions]

    def run(operands: Values, positions: Positions) -> PlacedOutputs:
        return interpret(axis, program.jaxpr, program.consts, operands, positions)

    def step(active: Value, consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
        operands = [*[active] * calls, *consts, *carry, *x]
        outs, at = run_masked(active, run, operands, positions, plan, ())
        outs = [match_axis(axis, x, a, 0) for x, a in zip(outs, at, strict=True)]
        new, ys = outs[: len(carry)], outs[len(carry) :]
        # `ys` of inactive lanes are zero, so that sums over steps ignore them.
        new = [select_lanes(active, 0, x, old) for x, old in zip(new, carry, strict=True)]
        return new, [select_lanes(active, 0, y, lax.full_like(y, 0)) for y in ys]

    return step


def of_lanes(axis: Axis, loop: BoundedLoop) -> Operands:
    """Moves the batch axis of counts and all carried values to the front."""
    at = loop.form.split(loop.axes)
    carry, returning = [0] * len(at.carry), [0] * len(at.returning)
    targets = at._replace(
        count=None if at.count is None else 0,
        carry=carry,
        checkpoints=_stacked_at(carry, loop.form) if at.checkpoints else [],
        returning=returning,
    )
    return loop.form.split(_placed(axis, loop, targets))


def _results(form: LoopSignature, outs: list[Value]) -> PlacedOutputs:
    # Everything has the batch axis, except for the step numbers of checkpoints.
    stacked = _stacked_at([0] * form.n_carry, form)
    return outs, [*[0] * (form.n_carry + len(form.y_axes)), *stacked, 0]


def _stacked_at(carry_at: Positions, form: LoopSignature | SweepSignature) -> list[Position]:
    """Returns the batch axes of checkpoints, from those of the carry."""
    if form.kept is None:
        return []
    at = [carry_at[i] for i in form.kept]
    # Checkpoints are stacked along axis 0; the step numbers, shared by all lanes, come first.
    return [None, *(a if a is None else a + 1 for a in at)]


def _with_common_checkpoints(loop: BoundedLoop) -> BoundedLoop:
    """Drops the checkpoints of a sweep if their step numbers differ between lanes."""
    given, at = loop.form.split(loop.args), loop.form.split(loop.axes)
    if at.checkpoints[0] is None:
        return loop
    # Without checkpoints the sweep recomputes all carries from the first one.
    none = no_checkpoints(loop.steps[0], loop.form)
    given, at = given._replace(checkpoints=none), at._replace(checkpoints=[None] * len(none))
    return replace(loop, args=given.flat, axes=at.flat)


def _placed(axis: Axis, loop: BoundedLoop, targets: Operands) -> list[Value]:
    return [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(loop.args, loop.axes, targets.flat, strict=True)
    ]


def _settled(
    axis: Axis,
    body: ClosedJaxpr,
    guarded: ClosedJaxpr,
    consts_at: Positions,
    carry_at: Positions,
    entries_at: Positions,
) -> tuple[list[Position], list[Position], Any, Any]:
    """Settles the batch axes of carry and ys, and returns both programs batched so."""
    program, settled, ys_at = settle(axis, body, consts_at, carry_at, entries_at)
    if guarded is body:
        return settled, ys_at, program, program
    # One of the two may make a value depend on the lane where the other does not: both get the
    # same axes, those of either.
    # Ends at the fixed point: axes of the carry only change from None to a position.
    while True:
        _, more, kept_ys_at = settle(axis, guarded, consts_at, settled, entries_at)
        if more == settled:
            break
        _, settled, ys_at = settle(axis, body, consts_at, more, entries_at)
    ys_at = [b if a is None else a for a, b in zip(ys_at, kept_ys_at, strict=True)]
    out_axes = [ANYWHERE if a is None else a for a in (*settled, *ys_at)]
    inputs = (*consts_at, *settled, *entries_at)
    program, _ = batch_inner(axis, body, inputs, out_axes)
    kept, _ = batch_inner(axis, guarded, inputs, out_axes)
    return settled, ys_at, program, kept


def _x_axes(loop: BoundedLoop) -> tuple[Any, ...]:
    return steps_axes(loop.form.split(loop.axes).xs, loop.form.x_axes)


def _compiled(run: Callable[..., list[Any]]) -> Callable[..., list[Value]]:
    """Compiles `run`, cached without the parameter `guarded`, which it does not use."""

    @whatever_jit
    def compute(*operands: Value, **params: Any) -> list[Value]:
        values = {name: value for name, value in params.items() if name != "guarded"}
        # Programs compare by identity in JAX's cache, and a call outside of `jit` traces new ones.
        keys = map(value_key, values.values())
        return jitted((run, *keys), functools.partial(run, **params))(*operands)

    return compute


own_primitive(
    bounded_loop_p,
    called="bounded loop",
    operations=run_loop,
    compute=_compiled(run_loop),
    types=lambda count, *avals, test, body, guarded, form: loop_types(test, body, form, count),
    programs=("test", "body", "guarded"),
    step="body",
    facts="endless costly control",  # while its steps are not counted
    rule=_batched(bounded_loop_p),
    jvp=loop_jvp,
    transpose=loop_transpose,
)

own_primitive(
    reverse_sweep_p,
    called="derivative of a bounded loop",
    operations=run_sweep,
    compute=_compiled(run_sweep),
    types=lambda *avals, forward, back, guarded, form: sweep_types(back, form),
    programs=("forward", "back", "guarded"),
    step="back",
    facts="linear costly control",
    rule=_batched(reverse_sweep_p),
    jvp=sweep_jvp,
)
