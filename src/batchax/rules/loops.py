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
from batchax.engine import recording
from batchax.engine.axis import Axis, AxisPosition, match_axis, move_axis
from batchax.engine.divergence import Loop, Placed
from batchax.engine.inner import ANYWHERE, batch_inner, batched_aval, remembered
from batchax.engine.interpreter import interpret
from batchax.engine.registry import register_rule
from batchax.errors import UnsupportedError
from batchax.rules.hazards import hazards
from batchax.rules.in_order import run_in_order
from batchax.rules.in_place import masked_in_place, updates_in_place
from batchax.rules.masking import run_masked, select_lanes
from batchax.rules.unvmap import asked_of_each_lane


@register_rule(scan_p)
def _scan(axis: Axis, args: Any, axes: Any, /, *, jaxpr: Any, **params: Any) -> Placed:
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
    body, settled, ys_at = settle(axis, jaxpr, consts_at, carry_at, inside)
    carry = _matched(axis, carry, carry_at, settled)
    outs = scan_p.bind(*consts, *carry, *xs, jaxpr=body, **params)
    return outs, [*settled, *(None if a is None else a + 1 for a in ys_at)]


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
) -> Placed:
    if axis.divergence is not None:
        cond_jaxpr = asked_of_each_lane(cond_jaxpr)
    counts = {"cond_nconsts": cond_nconsts, "body_nconsts": body_nconsts}
    test_consts, body_consts, carry = _split(args, cond_nconsts, body_nconsts)
    test_at, body_at, carry_at = _split(axes, cond_nconsts, body_nconsts)

    # A predicate may itself be an array (of an inner vmap); its axes lead each carry.
    lowest = len(cond_jaxpr.out_avals[0].shape)
    together = replace(axis, divergence=None)  # enough to find what differs between lanes
    body, settled, _ = settle(together, body_jaxpr, body_at, carry_at, (), lowest)
    with recording.part("condition"):
        test, (predicate_at,) = batch_inner(together, cond_jaxpr, (*test_at, *settled))
    if predicate_at is None:
        if recording.is_on():
            asked_of_all = asked_of_each_lane(cond_jaxpr) is not cond_jaxpr
            recording.note(divergence="asked of all" if asked_of_all else "together")
        if axis.divergence is not None:  # lanes may part ways inside the loop
            body, settled, _ = settle(axis, body_jaxpr, body_at, carry_at, (), lowest)
        carry = _matched(axis, carry, carry_at, settled)
        operands = (*test_consts, *body_consts, *carry)
        return while_p.bind(*operands, cond_jaxpr=test, body_jaxpr=body, **counts), settled

    if _compat.ordered_by_lane(cond_jaxpr.effects | body_jaxpr.effects):
        programs = {"cond_jaxpr": cond_jaxpr, "body_jaxpr": body_jaxpr}
        return run_in_order(axis, while_p, args, axes, {**programs, **counts})

    # Lanes end at different steps. What the body computes for finished lanes is
    # dropped, so every carry depends on the lane.
    front: list[AxisPosition] = [0] * len(carry)
    carry = _matched(axis, carry, carry_at, front)
    if axis.divergence is not None:
        consts = test_consts, test_at, body_consts, body_at
        outs = axis.divergence.run_loop(axis, Loop(cond_jaxpr, body_jaxpr, *consts, carry))
        if outs is not None:
            return outs, front
    recording.note(divergence="masked")
    body_for = MaskedBody.of(axis, cond_jaxpr, body_jaxpr, tuple(body_at))
    if not (body_for.protected or body_for.told or any(map(_compat.is_reference, args))):
        # The loop of JAX does just this where the predicate is an array.
        if settled != front:
            body, _ = batch_inner(axis, body_jaxpr, (*body_at, *front), front)
        with recording.part("condition"):
            test, _ = batch_inner(axis, cond_jaxpr, (*test_at, *front), (0,))
        operands = (*test_consts, *body_consts, *carry)
        return while_p.bind(*operands, cond_jaxpr=test, body_jaxpr=body, **counts), front

    # A reference may be an operand only once, so what both programs use is shared.
    consts, consts_at = list(body_consts), list(body_at)
    places = []  # of the predicate's constants among those of the loop
    for x, a in zip(test_consts, test_at, strict=True):
        place = next((i for i, y in enumerate(consts) if x is y), len(consts))
        if place == len(consts):
            consts.append(x)
            consts_at.append(a)
        places.append(place)
    any_live, step = _masked_loop(body_for, cond_jaxpr, tuple(consts_at), tuple(places))
    live = predicate(axis, cond_jaxpr, [*test_consts, *carry], [*test_at, *front])
    _, *outs = while_p.bind(
        *consts,
        live,
        *carry,
        cond_nconsts=0,
        cond_jaxpr=any_live,
        body_nconsts=len(consts),
        body_jaxpr=step,
    )
    return outs, front


@dataclass(frozen=True)
class MaskedBody:
    """The body of a loop for lanes of which some have finished it.

    Attributes:
      axis: the axis of the lanes.
      body: the program of one example.
      positions: where each of its constants has the batch axis; carries have it in front.
      told: whether the body is told which lanes run, and leaves arrays that it updates in
        place as they are in the others.
      protected: whether finished lanes hold operands of a running lane in the body, so that a
        loop in it ends when that of the running lanes does.
    """

    axis: Axis
    body: _compat.ClosedJaxpr
    positions: tuple[AxisPosition, ...]
    told: bool
    protected: bool

    @classmethod
    def of(
        cls,
        axis: Axis,
        test: _compat.ClosedJaxpr,
        body: _compat.ClosedJaxpr,
        positions: tuple[AxisPosition, ...],
    ) -> MaskedBody:
        """The body of a loop with the predicate `test`, masked as it needs to be."""
        hazard, predicate = hazards(body.jaxpr), test.out_avals[0]
        # A body can be told which lanes run unless lanes meet in it, or the predicate, and then
        # all that it computes, varies over a mesh; or one example has several lanes of its own.
        apart = not (hazard.collective or _compat.varying_axes(predicate) or predicate.shape)
        told = apart and (hazard.endless or updates_in_place(body, len(positions)))
        protected = hazard.endless and not hazard.collective and not told
        return cls(axis, body, positions, told, protected)

    def step(self, live: Any, consts: Sequence[Any], carry: Sequence[Any]) -> list[Any]:
        """The next carry of the lanes that are live, and the last one of the others."""
        front: list[AxisPosition] = [0] * len(carry)
        positions = [*self.positions, *front]
        program, kept = self.body, frozenset()
        if self.told:
            program, kept = masked_in_place(self.axis, self.body, len(consts))

        def run(operands: list[Any], positions: list[AxisPosition]) -> Placed:
            told, told_at = ([live], [0]) if self.told else ([], [])
            values, places = [*told, *operands], [*told_at, *positions]
            return interpret(self.axis, program.jaxpr, program.consts, values, places)

        replaced = range(len(positions)) if self.protected else ()
        written = _compat.written_inputs(self.body.jaxpr)
        new, at = run_masked(live, run, [*consts, *carry], positions, replaced, written)
        new = _matched(self.axis, new, at, front)
        return [
            x if k in kept else select_lanes(live, 0, x, old)
            for k, (x, old) in enumerate(zip(new, carry, strict=True))
        ]


def _masked_loop(
    masked: MaskedBody,
    cond_jaxpr: Any,
    consts_at: tuple[AxisPosition, ...],
    places: tuple[int, ...],
) -> tuple[Any, Any]:
    """Predicate and body of a loop whose carry begins with the lanes still running.

    `places`: where the constants of the predicate are among those of the loop, which begin
    with those of the body.
    """
    axis, body_jaxpr, n_body = masked.axis, masked.body, len(masked.positions)
    front = [0] * len(body_jaxpr.out_avals)

    def step(*operands: Any) -> list[Any]:
        consts, (live,), carry = _split(operands, len(consts_at), 1)
        carry = masked.step(live, consts[:n_body], carry)
        tested = [*(consts[i] for i in places), *carry]
        tested_at = [*(consts_at[i] for i in places), *front]
        return [live & predicate(axis, cond_jaxpr, tested, tested_at), *carry]

    def any_live(live: Any, *_: Any) -> list[Any]:
        return [lax.reduce_or(live, tuple(range(live.ndim)))]

    def build() -> tuple[Any, Any]:
        types = dict(zip(places, cond_jaxpr.in_avals, strict=False))
        types.update(enumerate(body_jaxpr.in_avals[:n_body]))
        consts = [batched_aval(axis, types[i], a) for i, a in enumerate(consts_at)]
        carry = [batched_aval(axis, a, 0) for a in body_jaxpr.out_avals]
        live = batched_aval(axis, cond_jaxpr.out_avals[0], 0)
        return (
            _compat.stage(any_live, [live, *carry]),
            _compat.stage(step, [*consts, live, *carry]),
        )

    how = masked.told, masked.protected  # not the body itself, which would then never be freed
    return remembered(body_jaxpr, (axis, how, cond_jaxpr, consts_at, places), build)


def predicate(axis: Axis, cond_jaxpr: Any, operands: Any, positions: Any) -> Any:
    """The predicate of each lane, lanes first."""
    with recording.part("condition"):
        (live,), (at,) = interpret(axis, cond_jaxpr.jaxpr, cond_jaxpr.consts, operands, positions)
    return match_axis(axis, live, at, 0)


def settle(
    axis: Axis, body: Any, consts_at: Any, carry_at: Any, xs_at: Any, lowest: int = 0
) -> tuple[Any, list[AxisPosition], list[AxisPosition]]:
    """The batched body, and where it receives and returns the batch axis of each carry.

    A carry that is batched stays so. Its axis goes where the body leaves it, but
    never before dimension `lowest`, so that it is moved once and not in each
    iteration.
    """

    def allowed(a: AxisPosition) -> AxisPosition:
        return a if a is None else max(a, lowest)

    carry_at = [allowed(a) for a in carry_at]
    n, first = len(carry_at), True
    if axis.divergence is not None:
        # Programs of lanes that part ways are long: they are made once the axes are found.
        together = replace(axis, divergence=None)
        _, carry_at, _ = settle(together, body, consts_at, carry_at, xs_at, lowest)
        wanted = [*(ANYWHERE if a is None else a for a in carry_at)]
        wanted += [ANYWHERE] * (len(body.out_avals) - n)
        batched, out = batch_inner(axis, body, (*consts_at, *carry_at, *xs_at), wanted)
        if list(out[:n]) == carry_at:
            return batched, carry_at, list(out[n:])
    while True:
        batched, out = batch_inner(axis, body, (*consts_at, *carry_at, *xs_at))
        if list(out[:n]) == carry_at:
            return batched, carry_at, list(out[n:])
        found = [
            allowed(new) if old is None or (first and new is not None) else old
            for old, new in zip(carry_at, out[:n], strict=True)
        ]
        if found == carry_at:
            break
        carry_at, first = found, False
    wanted = [*(ANYWHERE if a is None else a for a in carry_at), *[ANYWHERE] * (len(out) - n)]
    batched, out = batch_inner(axis, body, (*consts_at, *carry_at, *xs_at), wanted)
    return batched, carry_at, list(out[n:])


def _matched(axis: Axis, values: Sequence[Any], sources: Any, destinations: Any) -> list[Any]:
    """Values with their batch axes where they are to be; None is left as it is."""
    return [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(values, sources, destinations, strict=True)
    ]


def _split(items: Any, n_first: int, n_second: int) -> tuple[list[Any], list[Any], list[Any]]:
    items = list(items)
    return items[:n_first], items[n_first : n_first + n_second], items[n_first + n_second :]
