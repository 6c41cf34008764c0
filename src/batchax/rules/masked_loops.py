"""Loops whose lanes end at different steps, as one loop in which finished lanes are masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import (
    Axis,
    PlacedOutputs,
    Position,
    WhileLoop,
    lanes_vary_over,
    match_axis,
)
from batchax.kernel.inner import batched_aval, remembered, returning
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import Varying, settle_varying, types_varying, vary_over, varying_of
from batchax.rules.carried_axes import match_carry, split_operands
from batchax.rules.in_place import masked_in_place, updates_in_place
from batchax.rules.lane_calls import is_seen, with_active
from batchax.rules.mask_plan import MaskPlan, plan_masking
from batchax.rules.masking import run_masked, select_lanes


def run_masking(masked: MaskedBody, loop: WhileLoop) -> list[Any]:
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
    body: ClosedJaxpr
    positions: tuple[Position, ...]
    plan: MaskPlan
    calls: bool

    @classmethod
    def of(
        cls,
        axis: Axis,
        test: ClosedJaxpr,
        body: ClosedJaxpr,
        positions: tuple[Position, ...],
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

    def step(self, active: Any, consts: Sequence[Value], carry: Sequence[Value]) -> list[Any]:
        """The next carry of the lanes that are active, and the last one of the others."""
        front: list[Position] = [0] * len(carry)
        positions = [*self.positions, *front]
        program, kept = self.body, frozenset()
        if self.calls:
            program, positions = with_active(self.axis, program), [0, *positions]
            consts = [_of_each_lane(active), *consts]
        written = _compat.written_inputs(program.jaxpr)
        if self.plan.takes_mask:
            program, kept = masked_in_place(self.axis, program, len(consts))

        def run(operands: list[Value], positions: list[Position]) -> PlacedOutputs:
            mask, mask_at = ([active], [0]) if self.plan.takes_mask else ([], [])
            values, places = [*mask, *operands], [*mask_at, *positions]
            return interpret(self.axis, program.jaxpr, program.consts, values, places)

        new, at = run_masked(active, run, [*consts, *carry], positions, self.plan, written)
        new = match_carry(self.axis, new, at, front)
        return [
            x if k in kept else select_lanes(active, 0, x, old)
            for k, (x, old) in enumerate(zip(new, carry, strict=True))
        ]


def _masked_loop(
    masked: MaskedBody,
    cond_jaxpr: Any,
    consts_at: tuple[Position, ...],
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
        consts, (active,), carry = split_operands(operands, len(consts_at), 1)
        carry = masked.step(active, consts[:n_body], carry)
        tested = [*(consts[i] for i in places), *carry]
        tested_at = [*(consts_at[i] for i in places), *front]
        more = predicate_if(axis, active, cond_jaxpr, tested, tested_at)
        return [lax.bitwise_and(active, more), *carry]

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
