"""A ``while`` of one example in the form that windows run: with one predicate for each lane."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.divergence.policy import Flattened, Masked, Tiles, Window
from batchax.divergence.tiles import run_in_tiles
from batchax.divergence.varying import with_varying_values
from batchax.divergence.window import Tally, counted, run_in_windows
from batchax.execution.gathered_lanes import count_active
from batchax.execution.names import index_as_input
from batchax.execution.references import without_references
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.derivatives import with_values
from batchax.kernel.divergence import WhileLoop
from batchax.kernel.inner import remembered
from batchax.kernel.named_axes import any_uses_axis
from batchax.programs.for_lanes import for_lanes
from batchax.rules.masked_loops import MaskedBody, predicate, run_masking
from batchax.rules.masking import select_lanes


@_compat.held_weakly
@dataclass(frozen=True)
class PartingLoop:
    """What a loop does that lanes leave one by one; equal to another that does the same.

    Attributes:
      axis: the axis of the lanes. It has no name: what asks for the index of a lane is given it.
      test, body: the programs of one example, of the predicate and of a step.
      n_test: how many of the operands besides the carry are those of the predicate.
      positions: where each operand besides the carry has the batch axis.
      plan: how the lanes are run.
    """

    axis: Axis
    test: ClosedJaxpr
    body: ClosedJaxpr
    n_test: int
    positions: tuple[Position, ...]
    plan: Window | Tiles | Flattened | Masked
    is_bounded: ClassVar[bool] = False

    @property
    def but_for_body(self) -> tuple[Any, ...]:
        """A key among loops of the same body, which it does not hold: that is a weak key."""
        return self.axis, self.test, self.n_test, self.positions, self.plan

    def replanned(self, lanes: int, positions: tuple[Position, ...]) -> Any:
        """How so many lanes are run, whose operands besides the carry have these positions."""
        chosen = isinstance(self.plan, Window) and self.plan.widths[0] != self.axis.size
        if chosen and self.axis.divergence.explicit:
            return self.plan
        differs = [a is not None for a in positions[self.n_test :]]
        differs += [True] * len(self.body.out_avals)
        return self.axis.divergence.plan(lanes, self.test, self.body, differs, self.is_bounded)

    def differentiated(self, program: ClosedJaxpr, operands: Sequence[Value]) -> list[Any]:
        """What derivatives are taken of: `program`, which `run` staged, or masked lanes.

        A compiler that makes one function of a program is not told to by what derives from it.
        """
        if isinstance(self.plan, Tiles) and self.plan.kernel:
            return self.masked(*operands)
        if isinstance(self.plan, Window) and self.plan.last_in_kernel:
            return self.without_kernels().run(*operands)
        return eval_jaxpr(program.jaxpr, program.consts, *operands)

    def without_kernels(self) -> PartingLoop:
        """As this, with each operation left to the compiler."""
        if not (isinstance(self.plan, Window) and self.plan.last_in_kernel):
            return self
        return replace(self, plan=replace(self.plan, last_in_kernel=False))

    def tangents(
        self, operands: Sequence[Value], moving: Sequence[int], tangents: Sequence[Value]
    ) -> tuple[list[Any], list[Any]] | None:
        """The results and their tangents, if these have a transpose; None: see `differentiated`.

        Those of integers are None. `tangents` are those of the operands that are `moving`.
        """
        return None

    def run(self, *operands: Any) -> list[Any]:
        """The last carry, from the operands besides the carry and the first carry."""
        plan = self.plan
        if isinstance(plan, Masked):
            return self.masked(*operands)
        consts, carry = operands[: len(self.positions)], operands[len(self.positions) :]
        active = self._test(self.axis, consts, carry)
        slots = [*carry, *self.more_slots()]
        # What no step changes is read and not put back: XLA copies all of an array to which what
        # was read of it is put back.
        same, n = self._unchanged, len(consts)
        changed = [k for k in range(len(slots)) if k not in same]

        def step(width: int, given: Any, active: Any, carry: Any, tally: Tally) -> Any:
            own = with_values(with_values(slots, same, given[n:]), changed, carry)
            active, own, tally = self._step(width, given[:n], active, own, tally)
            return active, [own[k] for k in changed], tally

        given = [*consts, *(slots[k] for k in same)], (*self.positions, *[0] * len(same))
        given = *given, active, [slots[k] for k in changed]
        if isinstance(plan, Tiles):
            ended, tallies = run_in_tiles(plan, step, *given), []
        else:
            window = plan.window if isinstance(plan, Flattened) else plan
            ended, tallies = run_in_windows(window, step, *given)
        outs = with_values(slots, changed, ended)
        steps = self.axis.divergence.steps
        if steps is not None:
            steps.add(plan.widths, tallies)
        types = self.body.out_avals
        return [as_weak_as(t, x) for t, x in zip(types, outs[: len(types)], strict=True)]

    @property
    def _unchanged(self) -> list[int]:
        """Which carries the body returns as they are, as the bound of a ``fori_loop``."""
        jaxpr, n = self.body.jaxpr, len(self.body.out_avals)
        pairs = zip(jaxpr.invars[len(jaxpr.invars) - n :], jaxpr.outvars, strict=True)
        return [k for k, (x, y) in enumerate(pairs) if x is y]

    def more_slots(self) -> list[Any]:
        """What all lanes hold at first besides what the loop of one example carries."""
        return []

    def masked(self, *operands: Any) -> list[Any]:
        """As `run`, with lanes that are masked until all are done."""
        consts, carry = operands[: len(self.positions)], operands[len(self.positions) :]
        test_at, body_at = self.positions[: self.n_test], self.positions[self.n_test :]
        body = MaskedBody.of(self.axis, self.test, self.body, body_at)
        consts = (consts[: self.n_test], test_at, consts[self.n_test :], body_at)
        return run_masking(body, WhileLoop(self.test, self.body, *consts, list(carry)))

    def _step(
        self,
        width: int,
        consts: Sequence[Value],
        active: Any,
        carry: Sequence[Value],
        tally: Tally,
    ) -> tuple[Any, list[Any], Tally]:
        """One step of the lanes that are active; the others keep what they hold."""
        if tally:
            tally = counted(tally, count_active(active))
        axis, test, body = replace(self.axis, size=width), self.test, self.body
        assert isinstance(self.plan, Window | Tiles)
        if self._for_kernel:
            test, body = for_lanes(test), for_lanes(body)
        if self.plan.in_kernel(width):
            axis = masked_inside(axis)
        body = MaskedBody.of(axis, test, body, self.positions[self.n_test :])
        carry = body.step(active, consts[self.n_test :], carry)
        return lax.bitwise_and(active, self._test(axis, consts, carry)), carry, tally

    def _test(self, axis: Axis, consts: Sequence[Value], carry: Sequence[Value]) -> Any:
        positions = [*self.positions[: self.n_test], *[0] * len(carry)]
        test = for_lanes(self.test) if self._for_kernel else self.test
        return predicate(axis, test, [*consts[: self.n_test], *carry], positions)

    @property
    def _for_kernel(self) -> bool:
        """Whether some steps are in a single kernel: programs are as these must be, for all."""
        match self.plan:
            case Tiles(kernel=kernel) | Flattened(kernel=kernel):
                return kernel
            case Window(last_in_kernel=kernel):
                return kernel
        return False


def masked_inside(axis: Axis) -> Axis:
    """`axis`, for lanes of which all run each branch, and each loop until the last is done.

    In one function of the compiler no lanes are gathered, nor put back to several places.
    """
    return replace(axis, divergence=None)


def as_weak_as(aval: Aval, x: Any) -> Any:
    """`x`, as weakly typed as `aval`: a loop may be given what is more so than its results."""
    if jax.typeof(x).weak_type == aval.weak_type:
        return x
    return _compat.weakly(x) if aval.weak_type else lax.convert_element_type(x, x.dtype)


def parting_loop(
    axis: Axis, loop: WhileLoop, plan: Window | Tiles | Masked
) -> tuple[PartingLoop, list[Any]]:
    """`loop` as one that lanes leave one by one, and its operands.

    Its carry may begin with more values than that of `loop` has.
    """
    # A primitive may hold no reference: JAX asks it for a rule, to turn what it makes into values.
    plain = functools.partial(without_references, name=axis.name, size=axis.size)
    loop = replace(loop, test=plain(loop.test), body=plain(loop.body))
    loop = with_varying_values(with_index(axis, _with_onepredicate(axis, loop)))
    positions = (*loop.test_at, *loop.body_at)
    inside = replace(axis, name=None, divergence=axis.divergence.inside())
    operands = [*loop.test_consts, *loop.body_consts, *loop.carry]
    return (
        PartingLoop(inside, loop.test, loop.body, len(loop.test_consts), positions, plan),
        operands,
    )


def _with_onepredicate(axis: Axis, loop: WhileLoop) -> WhileLoop:
    """A loop whose predicate is one boolean for each lane, not an array of them.

    It is an array where each lane is itself a batch, of an inner vmap: each element says when
    an inner lane is done. The array joins the carry, and the lane goes on while any is true.
    """
    if not loop.test.out_avals[0].shape:
        return loop
    n_test, n_body = len(loop.test_consts), len(loop.body_consts)

    def goes_on(active: Any, *_: Any) -> list[Any]:
        return [active.any()]

    def once(*operands: Any) -> list[Any]:
        test_consts, operands = operands[:n_test], operands[n_test:]
        body_consts, (active, *carry) = operands[:n_body], operands[n_body:]
        new = eval_jaxpr(loop.body.jaxpr, loop.body.consts, *body_consts, *carry)
        carry = [select_lanes(active, 0, x, old) for x, old in zip(new, carry, strict=True)]
        (more,) = eval_jaxpr(loop.test.jaxpr, loop.test.consts, *test_consts, *carry)
        return [active & more, *carry]

    def build() -> Any:
        types = [*loop.test.out_avals, *loop.body.out_avals]
        consts = [*loop.test.in_avals[:n_test], *loop.body.in_avals[:n_body]]
        with _compat.named_scope(axis.name, axis.size):
            return _compat.stage(goes_on, types), _compat.stage(once, [*consts, *types])

    test, body = remembered(loop.body, ("one predicate", loop.test), build)
    operands = [*loop.test_consts, *loop.carry]
    active = predicate(axis, loop.test, operands, [*loop.test_at, *[0] * len(loop.carry)])
    consts, consts_at = [*loop.test_consts, *loop.body_consts], [*loop.test_at, *loop.body_at]
    return WhileLoop(test, body, (), (), consts, consts_at, [active, *loop.carry])


def with_index(axis: Axis, loop: WhileLoop) -> WhileLoop:
    """A loop that is given the index of the lane, if it asks for it.

    In a window the place of a lane is not its index.
    """
    if not any_uses_axis(axis, loop.test, loop.body):
        return loop
    lanes = lax.iota(np.int32, axis.size)
    test, body = (index_as_input(axis, program) for program in (loop.test, loop.body))
    return replace(
        loop,
        test=test,
        body=body,
        test_consts=[lanes, *loop.test_consts],
        test_at=[0, *loop.test_at],
        body_consts=[lanes, *loop.body_consts],
        body_at=[0, *loop.body_at],
    )
