"""`scan` and `while`.

What of a carry is batched is found by running the body: a carry starts as its
initial value is, and becomes batched only if some iteration makes it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax
from jax.extend.core.primitives import scan_p, while_p

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.primitive_facts import enter
from batchax.kernel import recording
from batchax.kernel.axis import Axis, AxisPosition, lanes_vary_over, match_axis, move_axis
from batchax.kernel.divergence import PlacedOutputs, WhileLoop
from batchax.kernel.inner import ANYWHERE, batch_inner, batched_aval, remembered, returning
from batchax.kernel.interpreter import interpret
from batchax.kernel.registry import register_rule
from batchax.kernel.varying import (
    Varying,
    settle_varying,
    types_varying,
    vary_over,
    varying_of,
)
from batchax.rules.in_place import masked_in_place, updates_in_place
from batchax.rules.lane_calls import is_seen, with_active
from batchax.rules.mask_plan import MaskPlan, plan_masking
from batchax.rules.masking import run_masked, select_lanes
from batchax.rules.parting import run_parting
from batchax.rules.unvmap import asked_of_each_lane


@register_rule(scan_p)
def _scan(axis: Axis, args: Any, axes: Any, /, *, jaxpr: Any, **params: Any) -> PlacedOutputs:
    n_consts, n_carry = _compat.scan_counts(params)
    args, axes = list(args), list(axes)
    for i in range(n_consts + n_carry, len(args)):
        if axes[i] == 0:  # where the axis of the scan has to be
            if _compat.is_reference(args[i]):
                raise UnsupportedError(
                    "a scan runs over a reference (jax.new_ref) whose batch axis is 0, which is "
                    "where the axis of the scan must be, and a reference cannot be transposed. "
                    "Batch the reference along another axis, or scan over an array."
                )
            args[i], axes[i] = move_axis(args[i], 0, 1), 1
    consts, carry, xs = _split(args, n_consts, n_carry)
    consts_at, carry_at, xs_at = _split(axes, n_consts, n_carry)

    inside = [None if a is None else a - 1 for a in xs_at]
    varying = varying_of(args)
    body, settled, ys_at = settle(axis, jaxpr, consts_at, carry_at, inside, varying)
    carry = _matched(axis, carry, carry_at, settled, body.in_avals[n_consts:])
    outs = scan_p.bind(*consts, *carry, *xs, jaxpr=body, **params)
    return outs, [*settled, *(None if a is None else a + 1 for a in ys_at)]


enter(
    """
    linear costly nests: scan
    endless costly nests: while
    """
)


@register_rule(while_p)
def _while(
    axis: Axis,
    args: Any,
    axes: Any,
    /,
    *,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
) -> PlacedOutputs:
    if axis.divergence is not None:
        cond_jaxpr = asked_of_each_lane(cond_jaxpr, body_jaxpr)
    test_consts, body_consts, carry = _split(args, cond_nconsts, body_nconsts)
    test_at, body_at, carry_at = _split(axes, cond_nconsts, body_nconsts)
    test_vary, varying = map(varying_of, (test_consts, [*body_consts, *carry]))
    # A predicate may itself be an array (of an inner vmap); its axes lead each carry.
    lowest = len(cond_jaxpr.out_avals[0].shape)
    together = replace(axis, divergence=None)  # enough to find what differs between lanes
    body, settled, _ = settle(together, body_jaxpr, body_at, carry_at, (), varying, lowest)
    with recording.part("condition"):
        varies = (*test_vary, *types_varying(body.out_avals))
        test, (predicate_at,) = batch_inner(
            together, cond_jaxpr, (*test_at, *settled), varying=varies
        )
    counts = {"cond_nconsts": cond_nconsts, "body_nconsts": body_nconsts}
    if predicate_at is not None:
        # Lanes end at different steps. What the body computes for finished lanes is
        # dropped, so every carry depends on the lane.
        front: list[AxisPosition] = [0] * len(carry)
        carry = _matched(axis, carry, carry_at, front)
        loop = WhileLoop(cond_jaxpr, body_jaxpr, test_consts, test_at, body_consts, body_at, carry)
        args, axes = [*test_consts, *body_consts, *carry], [*test_at, *body_at, *front]
        params = {"cond_jaxpr": cond_jaxpr, "body_jaxpr": body_jaxpr, **counts}
        return run_parting(axis, while_p, args, axes, params, loop, _every_step)

    if recording.is_on():
        asked_of_all = asked_of_each_lane(cond_jaxpr, body_jaxpr) is not cond_jaxpr
        recording.note(divergence="asked of all" if asked_of_all else "together")
    # All lanes take the same steps, and may part ways in one.
    body, settled, _ = settle(axis, body_jaxpr, body_at, carry_at, (), varying, lowest)
    carry = _matched(axis, carry, carry_at, settled, body.out_avals)
    operands = (*test_consts, *body_consts, *carry)
    return while_p.bind(*operands, cond_jaxpr=test, body_jaxpr=body, **counts), settled


def _every_step(axis: Axis, loop: WhileLoop) -> PlacedOutputs:
    """Every step that some lane takes, for all lanes; those that are done keep their carry."""
    operands = (*loop.test_consts, *loop.body_consts, *loop.carry)
    masked = MaskedBody.of(axis, loop.test, loop.body, tuple(loop.body_at))
    calls = any(map(is_seen, (loop.test, loop.body)))
    references = any(map(_compat.is_reference, operands))
    as_it_is = masked.plan.runs_as_it_is and not (calls or references)
    outs = _selecting(axis, loop) if as_it_is else _masking(masked, loop)
    return outs, [0] * len(outs)


def _selecting(axis: Axis, loop: WhileLoop) -> list[Any]:
    """The last carry, where all lanes take each step, and those that are done drop what it makes.

    JAX's `while` does just this if it is given a predicate for each lane.
    """
    n_body, front = len(loop.body_consts), [0] * len(loop.carry)
    test_vary, body_vary = varying_of(loop.test_consts), varying_of(loop.body_consts)

    def programs(vary: Varying) -> tuple[Any, Varying]:
        varying = (*body_vary, *vary)
        body, _ = batch_inner(axis, loop.body, (*loop.body_at, *front), front, varying)
        with recording.part("condition"):
            varying = (*test_vary, *vary)
            test, _ = batch_inner(axis, loop.test, (*loop.test_at, *front), (0,), varying)
        (selecting,) = types_varying(test.out_avals)
        return (body, test), tuple(v | selecting for v in types_varying(body.out_avals))

    body, test = settle_varying(varying_of(loop.carry), programs)
    varying = types_varying(body.in_avals[n_body:])
    return while_p.bind(
        *loop.test_consts,
        *loop.body_consts,
        *vary_over(loop.carry, varying),
        cond_nconsts=len(loop.test_consts),
        cond_jaxpr=test,
        body_nconsts=n_body,
        body_jaxpr=returning(body, varying),
    )


def _masking(masked: MaskedBody, loop: WhileLoop) -> list[Any]:
    """The last carry, where the body takes the mask, or what it is given is made harmless."""
    axis, front = masked.axis, [0] * len(loop.carry)
    # A reference may be an operand only once, so what both programs use is shared.
    consts, consts_at = list(loop.body_consts), list(loop.body_at)
    places = []  # of the predicate's constants among those of the loop
    for x, a in zip(loop.test_consts, loop.test_at, strict=True):
        place = next((i for i, y in enumerate(consts) if x is y), len(consts))
        if place == len(consts):
            consts.append(x)
            consts_at.append(a)
        places.append(place)
    tested, tested_at = [*loop.test_consts, *loop.carry], [*loop.test_at, *front]
    carry = [predicate(axis, loop.test, tested, tested_at), *loop.carry]
    at, own = (tuple(consts_at), tuple(places)), varying_of(consts)

    def programs(vary: Varying) -> tuple[Any, Varying]:
        any_active, step = _masked_loop(masked, loop.test, *at, (*own, *vary))
        return (any_active, step), types_varying(step.out_avals)

    any_active, step = settle_varying(varying_of(carry), programs)
    varying = types_varying(any_active.in_avals)
    _, *outs = while_p.bind(
        *consts,
        *vary_over(carry, varying),
        cond_nconsts=0,
        cond_jaxpr=any_active,
        body_nconsts=len(consts),
        body_jaxpr=returning(step, varying),
    )
    return outs


@dataclass(frozen=True)
class MaskedBody:
    """The body of a loop for lanes of which some have finished it.

    Attributes:
      axis: the axis of the lanes.
      body: the program of one example.
      positions: where each of its constants has the batch axis; carries have it in front.
      plan: what finished lanes need in it.
      calls: whether it calls the host. It is run `with_active` then, as the plan knows.
    """

    axis: Axis
    body: _compat.ClosedJaxpr
    positions: tuple[AxisPosition, ...]
    plan: MaskPlan
    calls: bool

    @classmethod
    def of(
        cls,
        axis: Axis,
        test: _compat.ClosedJaxpr,
        body: _compat.ClosedJaxpr,
        positions: tuple[AxisPosition, ...],
    ) -> MaskedBody:
        """The body of a loop with the predicate `test`, masked as it needs to be."""
        # Nothing counts as differentiable: a `while` has no reverse mode, in which a NaN would
        # spread, and in forward mode tangents are carried, and selected as all that is.
        calls = is_seen(body)
        program = with_active(axis, body) if calls else body
        plan = plan_masking(
            program.jaxpr,
            [*[0] * calls, *positions, *[0] * len(body.out_avals)],
            differentiable=(),
            updated=range(calls),
            updates=updates_in_place(body, len(positions)),
            may_take_mask=not test.out_avals[0].shape,  # unless an example has lanes of its own
        )
        return cls(axis, body, positions, plan, calls)

    def step(self, active: Any, consts: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
        """The next carry of the lanes that are active, and the last one of the others."""
        front: list[AxisPosition] = [0] * len(carry)
        positions = [*self.positions, *front]
        program, kept = self.body, frozenset()
        if self.calls:
            program, positions = with_active(self.axis, program), [0, *positions]
            consts = [_of_each_lane(active), *consts]
        written = _compat.written_inputs(program.jaxpr)
        if self.plan.takes_mask:
            program, kept = masked_in_place(self.axis, program, len(consts))

        def run(operands: list[Any], positions: list[AxisPosition]) -> PlacedOutputs:
            mask, mask_at = ([active], [0]) if self.plan.takes_mask else ([], [])
            values, places = [*mask, *operands], [*mask_at, *positions]
            return interpret(self.axis, program.jaxpr, program.consts, values, places)

        new, at = run_masked(active, run, [*consts, *carry], positions, self.plan, written)
        new = _matched(self.axis, new, at, front)
        return [
            x if k in kept else select_lanes(active, 0, x, old)
            for k, (x, old) in enumerate(zip(new, carry, strict=True))
        ]


def _masked_loop(
    masked: MaskedBody,
    cond_jaxpr: Any,
    consts_at: tuple[AxisPosition, ...],
    places: tuple[int, ...],
    varying: Varying,
) -> tuple[Any, Any]:
    """Predicate and body of a loop whose carry begins with the lanes still running.

    `places`: where the constants of the predicate are among those of the loop, which begin
    with those of the body. `varying`: over which axes of a mesh the operands vary: constants,
    lanes that run, carry.
    """
    axis, body_jaxpr, n_body = masked.axis, masked.body, len(masked.positions)
    front = [0] * len(body_jaxpr.out_avals)

    def step(*operands: Any) -> list[Any]:
        consts, (active,), carry = _split(operands, len(consts_at), 1)
        carry = masked.step(active, consts[:n_body], carry)
        tested = [*(consts[i] for i in places), *carry]
        tested_at = [*(consts_at[i] for i in places), *front]
        return [active & predicate_if(axis, active, cond_jaxpr, tested, tested_at), *carry]

    def any_active(active: Any, *_: Any) -> list[Any]:
        return [lax.reduce_or(active, tuple(range(active.ndim)))]

    def build() -> tuple[Any, Any]:
        types = dict(zip(places, cond_jaxpr.in_avals, strict=False))
        types.update(enumerate(body_jaxpr.in_avals[:n_body]))
        consts = [batched_aval(axis, types[i], a) for i, a in enumerate(consts_at)]
        carry = [batched_aval(axis, a, 0) for a in body_jaxpr.out_avals]
        active = batched_aval(axis, cond_jaxpr.out_avals[0], 0)
        avals = list(map(_compat.type_varying_over, [*consts, active, *carry], varying))
        return _compat.stage(any_active, avals[len(consts) :]), _compat.stage(step, avals)

    how = masked.plan  # not the body itself, which would then never be freed
    key = axis, how, cond_jaxpr, consts_at, places, varying, lanes_vary_over(axis)
    return remembered(body_jaxpr, key, build)


def predicate_if(axis: Axis, active: Any, cond_jaxpr: Any, operands: Any, positions: Any) -> Any:
    """As `predicate`, which calls the host for lanes that are active only."""
    if is_seen(cond_jaxpr):
        cond_jaxpr = with_active(axis, cond_jaxpr)
        operands, positions = [_of_each_lane(active), *operands], [0, *positions]
    return predicate(axis, cond_jaxpr, operands, positions)


def _of_each_lane(active: Any) -> Any:
    """Whether a lane is active: one that has lanes of its own is if any of them is."""
    return active if active.ndim == 1 else lax.reduce_or(active, tuple(range(1, active.ndim)))


def predicate(axis: Axis, cond_jaxpr: Any, operands: Any, positions: Any) -> Any:
    """The predicate of each lane, lanes first."""
    with recording.part("condition"):
        (active,), (at,) = interpret(axis, cond_jaxpr.jaxpr, cond_jaxpr.consts, operands, positions)
    return match_axis(axis, active, at, 0)


def settle(
    axis: Axis,
    body: Any,
    consts_at: Any,
    carry_at: Any,
    xs_at: Any,
    varying: Varying = (),
    lowest: int = 0,
) -> tuple[Any, list[AxisPosition], list[AxisPosition]]:
    """The batched body, and where it receives and returns the batch axis of each carry.

    A carry that is batched stays so. Its axis goes where the body leaves it, but
    never before dimension `lowest`, so that it is moved once and not in each
    iteration. `varying` says over which axes of a mesh the operands vary; each carry
    comes to vary, from the start, over all that some iteration makes it vary over.
    """
    first, n = len(consts_at), len(carry_at)
    varying = varying or (frozenset(),) * (first + n + len(xs_at))
    before, after = varying[:first], varying[first + n :]

    def batched(vary: Varying) -> tuple[Any, Varying]:
        made = _settle_axes(
            axis, body, consts_at, carry_at, xs_at, (*before, *vary, *after), lowest
        )
        return made, types_varying(made[0].out_avals[:n])

    program, carry_at, ys_at = settle_varying(varying[first : first + n], batched)
    carry = types_varying(program.in_avals[first : first + n])
    return returning(program, (*carry, *[frozenset()] * len(ys_at))), carry_at, ys_at


def _settle_axes(
    axis: Axis, body: Any, consts_at: Any, carry_at: Any, xs_at: Any, varying: Varying, lowest: int
) -> tuple[Any, list[AxisPosition], list[AxisPosition]]:
    """As `settle`, for operands of which it is known what they vary over."""

    def allowed(a: AxisPosition) -> AxisPosition:
        return a if a is None else max(a, lowest)

    def batch(carry_at: Any, wanted: Any) -> tuple[Any, Any]:
        return batch_inner(axis, body, (*consts_at, *carry_at, *xs_at), wanted, varying)

    def pinned(carry_at: Any) -> list[Any]:
        ys = len(body.out_avals) - len(carry_at)
        return [*(ANYWHERE if a is None else a for a in carry_at), *[ANYWHERE] * ys]

    n, carry_at, wanted = len(carry_at), list(map(allowed, carry_at)), ANYWHERE
    if axis.divergence is not None:
        # Programs of lanes that part ways are long: they are made once the axes are found.
        together = replace(axis, divergence=None)
        _, carry_at, _ = _settle_axes(together, body, consts_at, carry_at, xs_at, varying, lowest)
        wanted = pinned(carry_at)
    batched, out = batch(carry_at, wanted)
    while list(out[:n]) != carry_at:
        # What has the axis goes where the body leaves it, once; what comes to have it, too.
        free = wanted is ANYWHERE
        carry_at = [
            allowed(new) if old is None or (free and new is not None) else old
            for old, new in zip(carry_at, out[:n], strict=True)
        ]
        wanted = pinned(carry_at)
        batched, out = batch(carry_at, wanted)
    return batched, carry_at, list(out[n:])


def _matched(
    axis: Axis, values: Sequence[Any], sources: Any, destinations: Any, types: Sequence[Any] = ()
) -> list[Any]:
    """Values with their batch axes where they are to be; None is left as it is.

    They vary over what values of these `types` do, if any are given.
    """
    matched = [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(values, sources, destinations, strict=True)
    ]
    return vary_over(matched, types_varying(types[: len(matched)])) if types else matched


def _split(items: Any, n_first: int, n_second: int) -> tuple[list[Any], list[Any], list[Any]]:
    items = list(items)
    return items[:n_first], items[n_first : n_first + n_second], items[n_first + n_second :]
