"""`scan` and `while`: lanes that take the same steps, and lanes that do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
from jax import lax
from jax.extend.core.primitives import scan_p, while_p

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import is_seen, with_inside
from batchax.jaxprs.primitive_facts import enter, facts_of
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import (
    AnyLoop,
    Axis,
    BoundedLoop,
    Branches,
    PlacedOutputs,
    Position,
    Positions,
    WhileLoop,
    lanes_vary_over,
    match_axis,
    move_axis,
)
from batchax.kernel.differing import (
    asked_of_each_lane,
    differences_are_exact,
    differing_in_steps,
    predicate_is_batched,
    unmasked,
)
from batchax.kernel.inner import (
    ANYWHERE,
    ZERO_IF_MAPPED,
    batch_inner,
    batched_aval,
    remembered,
    returning,
)
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import Varying, settle_varying, types_varying, vary_over, varying_of
from batchax.kernel.registry import register_rule
from batchax.linalg.pays import LOOP_STEPS
from batchax.rules.callbacks import with_active
from batchax.rules.contraction import has_long_rows, layout_of_steps
from batchax.rules.in_place import masked_in_place, updates_in_place
from batchax.rules.masking import (
    MaskPlan,
    hazards,
    is_inexact,
    plan_masking,
    run_masked,
    select_lanes,
)

Item = TypeVar("Item")
DivergentFlow = TypeVar("DivergentFlow", WhileLoop, BoundedLoop, Branches)


def axis_for(axis: Axis, loop: AnyLoop) -> Axis:
    """Removes the divergence policy from `axis` if lanes cannot diverge in a loop."""
    # With a policy, programs are batched twice: once to find what differs between lanes.
    why = "" if axis.divergence is None else axis.divergence.why_lockstep(axis, loop)
    if not why:
        return axis
    recording.note(why=why)
    return replace(axis, divergence=None)


def run_divergent(
    axis: Axis,
    primitive: _compat.Primitive,
    args: Values,
    axes: Positions,
    params: dict[str, Any],
    divergent: DivergentFlow,
    masked: Callable[[Axis, DivergentFlow], PlacedOutputs],
) -> PlacedOutputs:
    """Runs an equation in which lanes diverge: by the axis's policy, else `masked`.

    `divergent` is the equation as a policy takes it. Raises UnsupportedError for ordered effects if
    lanes depend on each other or on a reference.
    """
    programs = [p for v in params.values() for p in (v if isinstance(v, tuple) else [v])]
    programs = [p.jaxpr for p in programs if isinstance(p, ClosedJaxpr)]
    if any(_compat.in_order(program.effects) for program in programs):
        _reject_order(programs)
    if axis.divergence is None:
        recording.note_new(why=_NONE_LEAVES)
    placed = None if axis.divergence is None else axis.divergence.run(axis, divergent)
    if placed is None:
        recording.note(divergence="masked")
        placed = masked(axis, divergent)
    return placed


_NONE_LEAVES = (
    'nothing may part them here: divergence="predicate", several devices, or what is around it'
)


def _reject_order(programs: Sequence[Any]) -> None:
    """Raises UnsupportedError for ordered effects of lanes that cannot run sequentially."""
    # Where they can, they do before any rule is called (`kernel/interpreter.py`).
    where = "a branch that not every lane takes, or a loop that ends at its own step in each lane,"
    if any(hazards(program).collective for program in programs):
        raise UnsupportedError(
            f"{where} holds both a callback in order (ordered=True) and a collective over a "
            "named axis: its lanes would have to run sequentially for the order, and together "
            "for the collective. Move one of the two out of it."
        )
    raise UnsupportedError(
        f"{where} holds both a callback in order (ordered=True) and a reference "
        "(jax.new_ref): its lanes run sequentially, and a reference cannot be split into "
        "lanes. Read the reference before and write it after."
    )


def settle(
    axis: Axis,
    body: ClosedJaxpr,
    consts_at: Positions,
    carry_at: Positions,
    xs_at: Positions,
    varying: Varying = (),
    lowest: int = 0,
) -> tuple[ClosedJaxpr, list[Position], list[Position]]:
    """Returns the batched body, and the batch axes of each carry and each y.

    `varying` are the mesh axes of the operands; carries vary from the start over what any iteration
    adds.
    """
    # A batched carry stays batched. Its axis goes where the body leaves it, but not before
    # dimension `lowest`, so that it moves once and not in each iteration.
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
    return returning(program, (*carry, *[frozenset()] * len(ys_at))), list(carry_at), ys_at


def _settle_axes(
    axis: Axis,
    body: ClosedJaxpr,
    consts_at: Positions,
    carry_at: Positions,
    xs_at: Positions,
    varying: Varying,
    lowest: int,
) -> tuple[ClosedJaxpr, list[Position], list[Position]]:
    def allowed(a: Position) -> Position:
        return a if a is None else max(a, lowest)

    def batch(
        axis: Axis, carry_at: Positions, outs_at: Sequence[Any]
    ) -> tuple[ClosedJaxpr, Positions]:
        return batch_inner(axis, body, (*consts_at, *carry_at, *xs_at), outs_at, varying)

    def pinned(carry_at: Positions) -> list[Any]:
        return [*(free if a is None else a for a in carry_at), *[free] * (outs - n)]

    def settled(
        axis: Axis, carry_at: Positions, made: tuple[ClosedJaxpr, Positions], *, moves: bool
    ) -> tuple[ClosedJaxpr, Positions, Positions]:
        batched, out = made
        # Carries only become batched, and move once, so this ends.
        while list(out[:n]) != carry_at:
            # What has the axis goes where the body leaves it, once; what comes to have it, too.
            carry_at = [
                allowed(new) if old is None or (moves and new is not None) else old
                for old, new in zip(carry_at, out[:n], strict=True)
            ]
            moves = False
            batched, out = batch(axis, carry_at, pinned(carry_at))
        return batched, carry_at, out

    n, carry_at, free = len(carry_at), list(map(allowed, carry_at)), ANYWHERE
    outs = len(body.out_avals)
    known = carry_at
    # Mostly it is known which carries become batched, and each stays where it is. A shared integer
    # is mostly the counter of a loop, and stays shared.
    new = [t for t, a in zip(body.out_avals, carry_at, strict=False) if a is None]
    if any(axis.divergence or is_inexact(t) for t in new) and differences_are_exact(axis, body):
        given = tuple(a is not None for a in (*consts_at, *carry_at, *xs_at))
        differs = differing_in_steps(body.jaxpr, len(consts_at), n, given).results[:n]
        known = [lowest if a is None and d else a for a, d in zip(carry_at, differs, strict=True)]
    if axis.divergence is not None:
        batched, out = batch(axis, known, [free] * outs)
        if list(out[:n]) == known and (lowest or layout_of_steps(axis, batched) == "as it is"):
            return batched, known, list(out[n:])
    # Programs of lanes that diverge are long: they are made once the axes are found.
    together = axis if axis.divergence is None else replace(axis, divergence=None)
    made = batch(together, known, [free] * outs)
    if all((a is None) == (b is None) for a, b in zip(known, made[1], strict=False)):
        carry_at = known
    elif known != carry_at:
        made = batch(together, carry_at, [free] * outs)
    layout = "as it is" if lowest else layout_of_steps(axis, made[0])
    if layout == "columns":
        carry_at = [
            1 if a == 0 and len(t.shape) == 1 else a
            for a, t in zip(carry_at, body.out_avals, strict=False)
        ]
        made = batch(together, carry_at, [free] * outs)
    elif layout != "as it is":
        how = {"columns": False, "lanes_first": layout == "rows"}
        axis, together = (replace(a, **how) for a in (axis, together))
        free, carry_at = ZERO_IF_MAPPED, [None if a is None else 0 for a in carry_at]
        made = batch(together, carry_at, [free] * outs)
    batched, carry_at, out = settled(together, carry_at, made, moves=True)
    if axis.divergence is not None:
        made = batch(axis, carry_at, pinned(carry_at))
        batched, carry_at, out = settled(axis, carry_at, made, moves=False)
    return batched, list(carry_at), list(out[n:])


def match_carry(
    axis: Axis,
    values: Values,
    sources: Positions,
    destinations: Positions,
    types: Sequence[Aval] = (),
) -> list[Any]:
    """Moves batch axes to their destinations; None is left as it is.

    With `types`, values are cast to vary as these do.
    """
    values = [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(values, sources, destinations, strict=True)
    ]
    return vary_over(values, types_varying(types[: len(values)])) if types else values


def split_operands(
    items: Sequence[Item], n_first: int, n_second: int
) -> tuple[list[Item], list[Item], list[Item]]:
    items = list(items)
    return items[:n_first], items[n_first : n_first + n_second], items[n_first + n_second :]


def run_masking(masked: MaskedBody, loop: WhileLoop) -> list[Any]:
    """Runs a loop whose body takes the mask, or whose operands are made safe."""
    axis, front = masked.axis, [0] * len(loop.carry)
    # A reference may be an operand only once, so what both programs use is shared.
    consts, consts_at = list(loop.body_consts), list(masked.positions)
    places = []  # of the predicate's constants among those of the loop
    for x, a in zip(loop.test_consts, loop.test_at, strict=True):
        place = next((i for i, y in enumerate(consts) if x is y), len(consts))
        if place == len(consts):
            consts.append(x)
            consts_at.append(a)
        places.append(place)
    tested, tested_at = [*loop.test_consts, *loop.carry], [*loop.test_at, *front]
    n_body, carry_at = len(loop.body_consts), masked.carry_at
    consts[:n_body] = match_carry(axis, loop.body_consts, loop.body_at, masked.positions)
    moved = match_carry(axis, loop.carry, front, carry_at)
    carry = [predicate(axis, loop.test, tested, tested_at), *moved]
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
    return match_carry(axis, outs, carry_at, front)


@dataclass(frozen=True)
class MaskedBody:
    """Describes the body of a loop that some lanes have finished."""

    axis: Axis
    body: ClosedJaxpr
    positions: tuple[Position, ...]  # of its constants
    carry_at: tuple[int, ...]  # the batch axes of its carries
    plan: MaskPlan  # what finished lanes need
    calls: bool  # whether it has host callbacks, and so runs `with_active`

    @classmethod
    def of(
        cls,
        axis: Axis,
        test: ClosedJaxpr,
        body: ClosedJaxpr,
        positions: tuple[Position, ...],
        *,
        may_move: bool = False,
    ) -> MaskedBody:
        """Plans the body of a loop with the predicate `test`.

        Its constants have lanes at `positions`, and its carries in front. If they `may_move`, those
        that it returns are where lanes are faster.
        """
        # Nothing counts as differentiable: a `while` has no reverse mode, in which a NaN would
        # spread, and in forward mode tangents are carried, and selected as all that is.
        calls = is_seen(body)
        program = with_active(axis, body) if calls else body
        carried = [*positions, *[0] * len(body.out_avals)]
        axis = replace(axis, lanes_first=axis.lanes_first or has_long_rows(body, carried))
        plan = plan_masking(
            program.jaxpr,
            [*[0] * calls, *carried],
            differentiable=(),
            updated=range(calls),
            updates=updates_in_place(body, len(positions)),
            may_take_mask=not test.out_avals[0].shape,  # unless an example has an inner batch
        )
        carry_at = (0,) * len(body.out_avals)
        if may_move and plan.runs_as_it_is and not calls and _lanes_last_pays(axis, test, body):
            consts = body.in_avals[: len(positions)]
            positions = tuple(
                None if a is None else len(t.shape) for a, t in zip(positions, consts, strict=True)
            )
            carry_at = tuple(len(t.shape) for t in body.out_avals)
            axis = replace(axis, columns=True)
        return cls(axis, body, positions, carry_at, plan, calls)

    def step(self, active: Value, consts: Values, carry: Values) -> list[Any]:
        """Computes the next carry of active lanes, and keeps that of the others."""
        positions: list[Position] = [*self.positions, *self.carry_at]
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
        new = match_carry(self.axis, new, at, self.carry_at)
        return [
            x if k in kept else select_lanes(active, a, x, old)
            for k, (x, old, a) in enumerate(zip(new, carry, self.carry_at, strict=True))
        ]


_NARROW = 32  # numbers in the last dimension, of which XLA vectorizes no fewer
_FEWEST_LANES = 48  # of fewer, the loops over lanes are short, too
_REDUCED = 1 << 14  # numbers of all lanes that are read in strides: they lie in the first cache
_PAIRS = 512  # that a product of two matrices of a lane multiplies: a library does more faster


def _lanes_last_pays(axis: Axis, test: ClosedJaxpr, body: ClosedJaxpr) -> bool:
    """Returns whether masked steps are faster with the lanes last.

    XLA's CPU compiler makes one loop over all numbers of operations on arrays of one shape, but
    loops over each dimension where a mask is spread over the numbers of a lane. If the innermost
    one is short, it is unrolled, and nothing is vectorized: steps on vectors of 2 to 32 numbers
    took 2 to 10 times as long. Search: tanh of 8.
    """
    if jax.default_backend() != "cpu" or axis.mesh_axis is not None or axis.spmd_name is not None:
        return False
    lanes = axis.size
    if not isinstance(lanes, int) or lanes < _FEWEST_LANES or test.out_avals[0].shape:
        return False
    types = [t for t in (*body.in_avals, *body.out_avals) if t.shape]
    if any(t.shape[-1] > _NARROW for t in types) or not any(t.size > 1 for t in body.out_avals):
        return False
    every = [eqn for program in (test, body) for eqn in with_inside(program.jaxpr.eqns)]
    return all(_may_have_lanes_last(eqn, lanes) for eqn in every)


def _may_have_lanes_last(eqn: Eqn, lanes: int) -> bool:
    """Returns whether an operation is no slower with its lanes last."""
    facts, name = facts_of(eqn.primitive), eqn.primitive.name
    if facts.elementwise or facts.alias or facts.is_plain_call or name in _MOVES:
        return True
    read = max((v.aval.size for v in eqn.invars if hasattr(v.aval, "size")), default=0)
    if name == "dot_general":
        x, y = (v.aval for v in eqn.invars)
        (terms, _), _ = eqn.params["dimension_numbers"]
        others = y.size // max(1, math.prod(x.shape[d] for d in terms))
        return x.size * others <= _PAIRS or min(x.ndim, y.ndim) < 2
    return name.startswith("reduce_") and read * lanes <= _REDUCED


_MOVES = frozenset(
    """
    broadcast_in_dim concatenate copy iota pad reshape rev slice split squeeze stack transpose
    """.split()
)


def _masked_loop(
    masked: MaskedBody,
    cond_jaxpr: ClosedJaxpr,
    consts_at: tuple[Position, ...],
    places: tuple[int, ...],
    varying: Varying,
) -> tuple[Any, Any]:
    """Builds predicate and body of a loop whose carry begins with the mask of active lanes.

    `places` locates constants of the predicate among those of the loop, which begin with those of
    the body. `varying` are the mesh axes of constants, mask, and carry.
    """
    axis, body_jaxpr, n_body = masked.axis, masked.body, len(masked.positions)
    carry_at = masked.carry_at

    def step(*operands: Value) -> list[Any]:
        consts, (active,), carry = split_operands(operands, len(consts_at), 1)
        carry = masked.step(active, consts[:n_body], carry)
        tested = [*(consts[i] for i in places), *carry]
        tested_at = [*(consts_at[i] for i in places), *carry_at]
        # A finished lane stays finished, whatever its predicate returns.
        more = predicate_if(axis, active, cond_jaxpr, tested, tested_at)
        return [lax.bitwise_and(active, more), *carry]

    def any_active(active: Value, *_: Value) -> list[Any]:
        return [lax.reduce_or(active, tuple(range(active.ndim)))]

    def build() -> tuple[Any, Any]:
        types = dict(zip(places, cond_jaxpr.in_avals, strict=False))
        types.update(enumerate(body_jaxpr.in_avals[:n_body]))
        consts = [batched_aval(axis, types[i], a) for i, a in enumerate(consts_at)]
        carry = [
            batched_aval(axis, t, a) for t, a in zip(body_jaxpr.out_avals, carry_at, strict=True)
        ]
        active = batched_aval(axis, cond_jaxpr.out_avals[0], 0)
        avals = list(map(_compat.type_varying_over, [*consts, active, *carry], varying))
        return _compat.stage(any_active, avals[len(consts) :]), _compat.stage(step, avals)

    how = masked.plan, carry_at  # not the body itself, which would then never be freed
    key = axis, how, cond_jaxpr, consts_at, places, varying, lanes_vary_over(axis)
    return remembered(body_jaxpr, key, build)


def predicate_if(
    axis: Axis, active: Value, cond_jaxpr: Any, operands: Values, positions: Positions
) -> jax.Array:
    """Evaluates the predicate, with host callbacks for active lanes only."""
    if is_seen(cond_jaxpr):
        cond_jaxpr = with_active(axis, cond_jaxpr)
        operands, positions = [_of_each_lane(active), *operands], [0, *positions]
    return predicate(axis, cond_jaxpr, operands, positions)


def _of_each_lane(active: Value) -> jax.Array:
    """Reduces a mask to one entry a lane: with inner lanes, a lane is active if any of them is."""
    return active if active.ndim == 1 else lax.reduce_or(active, tuple(range(1, active.ndim)))


def predicate(axis: Axis, cond_jaxpr: Any, operands: Values, positions: Positions) -> jax.Array:
    """Evaluates the predicate of each lane, lanes first."""
    with recording.part("condition"):
        (active,), (at,) = interpret(axis, cond_jaxpr.jaxpr, cond_jaxpr.consts, operands, positions)
    return match_axis(axis, active, at, 0)


@register_rule(scan_p)
def _scan(
    axis: Axis, args: Values, axes: Positions, /, *, jaxpr: ClosedJaxpr, **params: Any
) -> PlacedOutputs:
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
    axis = _inside(axis_for(axis, loop), params["length"])
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


def _inside(axis: Axis, steps: int) -> Axis:
    steps = max(1, steps) if isinstance(steps, int) else LOOP_STEPS  # or a symbol
    # Costs that recur at each step multiply, and lanes may be last from step to step.
    return replace(axis, in_loop=max(1, axis.in_loop) * steps, columns=True, lanes_first=False)


enter(
    """
    linear costly control: scan
    endless costly control: while
    """
)


@register_rule(while_p)
def _while(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    cond_nconsts: int,
    cond_jaxpr: ClosedJaxpr,
    body_nconsts: int,
    body_jaxpr: ClosedJaxpr,
) -> PlacedOutputs:
    asked_of_all, body_of_all, around = cond_jaxpr, body_jaxpr, axis
    counts = {"cond_nconsts": cond_nconsts, "body_nconsts": body_nconsts}
    params = {"cond_jaxpr": cond_jaxpr, "body_jaxpr": body_jaxpr, **counts}
    axis = _inside(axis_for(axis, AnyLoop(while_p, params, args, axes)), LOOP_STEPS)
    if axis.divergence is not None:
        cond_jaxpr = asked_of_each_lane(cond_jaxpr, body_jaxpr)
        if cond_jaxpr is not asked_of_all:
            body_jaxpr = unmasked(body_jaxpr)
        params = {**params, "cond_jaxpr": cond_jaxpr, "body_jaxpr": body_jaxpr}
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
        # Batching the body once shows which carries are batched, and so whether the predicate is.
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
                whole = {**params, "cond_jaxpr": asked_of_all, "body_jaxpr": body_of_all}
                return _while(replace(around, divergence=None), args, axes, **whole)

        given, at = [*test_consts, *body_consts, *carry], [*test_at, *body_at, *front]
        return run_divergent(axis, while_p, given, at, params, loop, masked)

    if recording.is_on():
        asked_of_all = asked_of_each_lane(cond_jaxpr, body_jaxpr) is not cond_jaxpr
        recording.note(divergence="asked of all" if asked_of_all else "together")
    # All lanes take the same steps, and may diverge in one.
    body, settled, _ = settle(axis, body_jaxpr, body_at, carry_at, (), varying, lowest)
    carry = match_carry(axis, carry, carry_at, settled, body.out_avals)
    operands = (*test_consts, *body_consts, *carry)
    return while_p.bind(*operands, cond_jaxpr=shared, body_jaxpr=body, **counts), settled


def _every_step(axis: Axis, loop: WhileLoop) -> PlacedOutputs:
    """Runs every step that some lane takes for all lanes. Finished lanes keep their carry."""
    operands = (*loop.test_consts, *loop.body_consts, *loop.carry)
    masked = MaskedBody.of(axis, loop.test, loop.body, tuple(loop.body_at), may_move=True)
    calls = any(map(is_seen, (loop.test, loop.body)))
    references = any(map(_compat.is_reference, operands))
    as_it_is = masked.plan.runs_as_it_is and not (calls or references or any(masked.carry_at))
    outs = _selecting(masked.axis, loop) if as_it_is else run_masking(masked, loop)
    return outs, [0] * len(outs)


def _selecting(axis: Axis, loop: WhileLoop) -> list[Any]:
    """Returns the last carry of a loop that drops results of finished lanes."""
    # JAX's `while` does that when its predicate has an entry for each lane.
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
