"""Bounded loops that lanes leave one by one where that pays, and have derivatives in reverse.

Values are those of a ``while`` that lanes leave. What is differentiated is the bounded loop, whose
lanes begin together (`bounded_apart.py`), or are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import jax
from jax import lax

from batchax.divergence.bounded_apart import Apart
from batchax.divergence.loop_primitive import bind
from batchax.divergence.loops import PartingLoop, as_weak_as, parting_loop
from batchax.divergence.policy import Masked, Tiles, Window
from batchax.execution.bounded_as_while import as_while
from batchax.execution.bounded_batching import every_step
from batchax.execution.bounded_forms import Form, SweepForm
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.axis import Axis
from batchax.kernel.divergence import BoundedLoop, PlacedOutputs, WhileLoop
from batchax.kernel.inner import remembered


@dataclass(frozen=True)
class BoundedParting(PartingLoop):
    """A bounded loop as the ``while`` that it is in each lane.

    Attributes:
      bounded: its predicate, its body, and the body that is differentiated in place of that.
      form: what its operands are.
      apart: how lanes that are left behind are run where it is differentiated; None: masked.
    """

    bounded: tuple[ClosedJaxpr | None, ClosedJaxpr, ClosedJaxpr]
    form: Form
    apart: Apart | None
    is_bounded: ClassVar[bool] = True

    @property
    def but_for_body(self) -> tuple[Any, ...]:
        """As that of any loop. The body of the ``while`` was made of the bounded one."""
        _, body, guarded = self.bounded
        return *super().but_for_body, None if guarded is body else guarded, self.apart

    def differentiated(self, program: ClosedJaxpr, operands: Sequence[Value]) -> list[Any]:
        """The bounded loop, in which lanes begin together."""
        loop = self._bounded_loop(operands)
        if self.apart is None:
            return self._placed(every_step(self._around, loop))
        return self._placed(run_apart(replace(self.apart, axis=self._around), loop))

    def masked(self, *operands: Any) -> list[Any]:
        """As `run`, with lanes that are masked until all are done."""
        return self._placed(every_step(self._around, self._bounded_loop(operands)))

    @property
    def _around(self) -> Axis:
        divergence = None if self.apart is None else self.apart.axis.divergence
        return replace(self.axis, divergence=divergence)

    def _bounded_loop(self, operands: Sequence[Value]) -> BoundedLoop:
        form, (test, body, guarded) = self.form, self.bounded
        n_consts = len(self.positions)
        at = [*self.positions, *[0] * (len(operands) - n_consts)]

        def arguments(xs: Sequence[Any]) -> list[Any]:
            count, *tested = xs[: self.n_test]
            _, *given = xs[self.n_test : n_consts]
            _, *carry = xs[n_consts : n_consts + 1 + form.n_carry]
            return [count, *tested, *given[: form.n_consts], *carry, *given[form.n_consts :]]

        return BoundedLoop(test, [body], [guarded], form, arguments(operands), arguments(at))

    def _placed(self, placed: PlacedOutputs) -> list[Any]:
        (*outs, steps), _ = placed
        types = self.body.out_avals
        return [as_weak_as(t, x) for t, x in zip(types, [steps, *outs], strict=True)]


def bounded_parting(
    axis: Axis,
    loop: BoundedLoop,
    whole: WhileLoop,
    plan: Window | Tiles | Masked,
    apart: Apart | None,
) -> list[Any]:
    """The carry of the ``while`` that a bounded loop is, of all lanes in the end."""
    parting, operands = parting_loop(axis, whole, plan)
    of_while = {f.name: getattr(parting, f.name) for f in fields(PartingLoop)}
    programs = loop.test, loop.steps[0], loop.guarded[0]
    return bind(BoundedParting(**of_while, bounded=programs, form=loop.form, apart=apart), operands)


def run_apart(apart: Apart, loop: BoundedLoop) -> PlacedOutputs:
    """The results of a bounded loop or a sweep whose lanes begin together, and end apart."""
    bare = replace(loop, args=())

    def build() -> Any:
        def run(args: Sequence[Value]) -> list[Any]:
            given = replace(bare, args=args)
            if isinstance(loop.form, SweepForm):
                placed = apart.sweep(given)
            elif loop.test is None:
                placed = apart.counted(given)
            else:
                placed = apart.loop(given, _windows(apart, given))
            outs, at = placed
            positions[:] = at
            return outs

        # Compiled as one program, in which what only derivatives need is dropped.
        positions: list[Any] = []
        return jax.jit(run), positions

    key = (apart, loop.test, *loop.guarded, loop.form, tuple(loop.axes), "apart")
    run, positions = remembered(loop.steps[-1], key, build)
    outs = run(list(loop.args))
    return outs, list(positions)


def _windows(apart: Apart, loop: BoundedLoop) -> Any:
    form = replace(loop.form, kept=None)
    args = [lax.stop_gradient(x) for x in loop.args]
    whole, _ = as_while(apart.axis, args, loop.axes, test=loop.test, body=loop.steps[0], form=form)

    def run(state: Sequence[Value]) -> Sequence[Value]:
        begun = replace(whole, carry=[lax.stop_gradient(x) for x in state])
        plan = Window((apart.width,), apart.patience)
        outs = bind(*parting_loop(apart.axis, begun, plan))
        return outs[len(outs) - len(state) :]

    return run
