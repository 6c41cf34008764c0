"""`scan` and `while`: lanes that take the same steps take them together.

Where they end at different steps finished lanes are masked (`masked_loops`), or lanes part ways.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jax.extend.core.primitives import scan_p, while_p

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.words import Jaxpr
from batchax.kernel import recording
from batchax.kernel.axis import AnyLoop, Axis, PlacedOutputs, Position, WhileLoop, move_axis
from batchax.kernel.differing import asked_of_each_lane, predicate_is_batched
from batchax.kernel.inner import batch_inner, returning
from batchax.kernel.named_axes import (
    Varying,
    settle_varying,
    types_varying,
    vary_over,
    varying_of,
)
from batchax.kernel.registry import register_rule
from batchax.rules.carried_axes import match_carry, settle, split_operands
from batchax.rules.lane_calls import is_seen
from batchax.rules.masked_loops import MaskedBody, run_masking
from batchax.rules.parting import axis_for, run_parting


@register_rule(scan_p)
def _scan(axis: Axis, args: Any, axes: Any, /, *, jaxpr: Jaxpr, **params: Any) -> PlacedOutputs:
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
    loop = AnyLoop(scan_p, {"jaxpr": jaxpr, **params}, args, axes)
    axis = replace(axis_for(axis, loop), in_loop=True, columns=True)
    if axis.divergence is not None:
        placed = axis.divergence.run_nest(axis, loop)
        if placed is not None:
            return placed
    consts, carry, xs = split_operands(args, n_consts, n_carry)
    consts_at, carry_at, xs_at = split_operands(axes, n_consts, n_carry)

    inside = [None if a is None else a - 1 for a in xs_at]
    varying = varying_of(args)
    body, settled, ys_at = settle(axis, jaxpr, consts_at, carry_at, inside, varying)
    carry = match_carry(axis, carry, carry_at, settled, body.in_avals[n_consts:])
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
    asked_of_all = cond_jaxpr
    counts = {"cond_nconsts": cond_nconsts, "body_nconsts": body_nconsts}
    params = {"cond_jaxpr": cond_jaxpr, "body_jaxpr": body_jaxpr, **counts}
    axis = replace(axis_for(axis, AnyLoop(while_p, params, args, axes)), in_loop=True, columns=True)
    if axis.divergence is not None:
        cond_jaxpr = asked_of_each_lane(cond_jaxpr, body_jaxpr)
        params = {**params, "cond_jaxpr": cond_jaxpr}
        placed = axis.divergence.run_nest(axis, AnyLoop(while_p, params, args, axes))
        if placed is not None:
            return placed
    test_consts, body_consts, carry = split_operands(args, cond_nconsts, body_nconsts)
    test_at, body_at, carry_at = split_operands(axes, cond_nconsts, body_nconsts)
    test_vary, varying = map(varying_of, (test_consts, [*body_consts, *carry]))
    # A predicate may itself be an array (of an inner vmap); its axes lead each carry.
    lowest = len(cond_jaxpr.out_avals[0].shape)
    shared = None  # the predicate, if all lanes take the same steps
    if not predicate_is_batched(axis, cond_jaxpr, body_jaxpr, test_at, body_at, carry_at):
        together = replace(axis, divergence=None)  # enough to find what differs between lanes
        body, settled, _ = settle(together, body_jaxpr, body_at, carry_at, (), varying, lowest)
        with recording.part("condition"):
            varies = (*test_vary, *types_varying(body.out_avals))
            test, (predicate_at,) = batch_inner(
                together, cond_jaxpr, (*test_at, *settled), varying=varies
            )
        shared = test if predicate_at is None else None
    if shared is None:
        # Lanes end at different steps. What the body computes for finished lanes is
        # dropped, so every carry depends on the lane.
        front: list[Position] = [0] * len(carry)
        carry = match_carry(axis, carry, carry_at, front)
        loop = WhileLoop(cond_jaxpr, body_jaxpr, test_consts, test_at, body_consts, body_at, carry)
        masked = _every_step
        if axis.divergence and cond_jaxpr is not asked_of_all and not axis.divergence.explicit:

            def masked(axis: Axis, loop: WhileLoop) -> PlacedOutputs:
                # A loop that asks about all lanes masks its own, with less than it takes here.
                whole = {**params, "cond_jaxpr": asked_of_all}
                return _while(replace(axis, divergence=None), args, axes, **whole)

        given, at = [*test_consts, *body_consts, *carry], [*test_at, *body_at, *front]
        return run_parting(axis, while_p, given, at, params, loop, masked)

    if recording.is_on():
        asked_of_all = asked_of_each_lane(cond_jaxpr, body_jaxpr) is not cond_jaxpr
        recording.note(divergence="asked of all" if asked_of_all else "together")
    # All lanes take the same steps, and may part ways in one.
    body, settled, _ = settle(axis, body_jaxpr, body_at, carry_at, (), varying, lowest)
    carry = match_carry(axis, carry, carry_at, settled, body.out_avals)
    operands = (*test_consts, *body_consts, *carry)
    return while_p.bind(*operands, cond_jaxpr=shared, body_jaxpr=body, **counts), settled


def _every_step(axis: Axis, loop: WhileLoop) -> PlacedOutputs:
    """Every step that some lane takes, for all lanes; those that are done keep their carry."""
    operands = (*loop.test_consts, *loop.body_consts, *loop.carry)
    masked = MaskedBody.of(axis, loop.test, loop.body, tuple(loop.body_at))
    calls = any(map(is_seen, (loop.test, loop.body)))
    references = any(map(_compat.is_reference, operands))
    as_it_is = masked.plan.runs_as_it_is and not (calls or references)
    outs = _selecting(axis, loop) if as_it_is else run_masking(masked, loop)
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
