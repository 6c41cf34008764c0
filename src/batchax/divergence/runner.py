"""Runs lanes that diverge as the policy decides: what an axis carries, and rules ask.

A loop, a nested loop or branches come in from the rules; what must keep lanes together is looked
for; `decide` chooses; and the module of the decision runs it. Where lanes are masked the rules do
that, as without any of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jax.extend.core.primitives import scan_p

from batchax import _compat
from batchax.analysis.thresholds import ANY_MACHINE, TABLE, Thresholds, thresholds_here
from batchax.config import config
from batchax.divergence.bounded import TailCompaction, bounded_divergent, run_with_tail
from batchax.divergence.branches import run_branches
from batchax.divergence.compact import Compact
from batchax.divergence.costs import (
    CANNOT_MOVE,
    HOST,
    NAME,
    VARYING,
    WITH_DERIVATIVE,
    Step,
    calls_back,
    can_move,
    may_part,
    price_at_most,
    reject_collectives,
    why_together,
)
from batchax.divergence.flat import run_flat
from batchax.divergence.loops import VARIES_LESS, Waiting, bind, divergent_loop
from batchax.divergence.policy import (
    NOTHING_ASKED,
    SHOWN,
    BoundedTail,
    ControlFlow,
    Decision,
    Loop,
    LoopDecision,
    Masked,
    Request,
    Window,
    decide,
)
from batchax.errors import ArgumentTypeError
from batchax.execution.bounded_loop import LoopSignature, as_while
from batchax.frontend.options import is_word, not_one_of
from batchax.jaxprs.error_format import show
from batchax.jaxprs.types import ClosedJaxpr, Values
from batchax.kernel import recording
from batchax.kernel.axis import AnyLoop, Axis, BoundedLoop, Branches, PlacedOutputs, WhileLoop
from batchax.kernel.named_axes import any_uses_axis, may_be_spread, varying_of

BatchSize = int | Literal["auto"] | None


@dataclass(frozen=True)
class Runner(Request):
    """How lanes that diverge run. Hashable: jaxprs that are batched with it are cached."""

    # the row by which it is chosen; None where nothing was measured
    thresholds: Thresholds | None = None

    @classmethod
    def here(cls, option: Compact | None) -> Runner:
        """That of an option, for the default device; None: the default."""
        if option is None:
            return cls(thresholds=thresholds_here())
        default = thresholds_here() if option == NOTHING_ASKED else None
        return cls(option, thresholds=TABLE["compact"], default=default)

    @property
    def explicit(self) -> bool:
        """Whether the user asked for lanes to run apart, whatever it costs."""
        return self.thresholds is not None and self.thresholds.explicit

    def inside(self, recompiled: bool = False) -> Runner:
        """How lanes run inside a loop or a branch that lanes diverge in."""
        recompiled |= self.recompiled
        return replace(self, nesting=self.nesting + 1, max_width=None, recompiled=recompiled)

    def with_max_width(self, width: int) -> Runner:
        return replace(self, max_width=width)

    def decide(self, control_flow: ControlFlow) -> Decision:
        """How the lanes of a loop, a nested loop, or a branch run."""
        assert self.thresholds is not None
        return decide(control_flow, self.thresholds, self)

    def why_lockstep(self, axis: Axis, loop: AnyLoop) -> str:
        """Why lanes stay together in a loop, and in what is inside it; empty if they may diverge.

        An estimate, before anything is batched: where it is too low, `decide` is not called, and
        lanes are masked.
        """
        if self.explicit:  # and what cannot be done raises
            return ""
        t = self.thresholds
        if t is None:
            return _UNMEASURED
        if not isinstance(axis.size, int):
            return "the number of lanes is symbolic"
        # Most scans hold nothing in which lanes could diverge. To price one takes as long as to
        # batch it. Reports show the reason below.
        unreported = loop.primitive is scan_p and not recording.is_on()
        if unreported and not may_part.in_program(loop.params["jaxpr"]):
            return _NOTHING_PARTS
        if axis.size >= t.kernel_lanes > 0:
            return ""
        with _compat.named_scope(axis.name, axis.size):  # the cost of a rule is that of its program
            most = WITH_DERIVATIVE * price_at_most(loop).of(axis.size)
        # Below these no loop, and no branch, is run apart for its work.
        enough = most >= min(t.min_window_work, t.min_branch_work, t.min_work)
        return "" if enough else "a step of all lanes costs too little for lanes to run apart"

    def run_nest(self, axis: Axis, loop: AnyLoop) -> PlacedOutputs | None:
        """Returns the results of a nested loop, in which each lane advances independently."""
        if self.thresholds is None:
            return None
        return run_flat(axis, loop, self.thresholds.min_work)

    def plan(
        self,
        size: int,
        test: ClosedJaxpr | None,
        body: ClosedJaxpr,
        differs: Sequence[bool],
        bounded: bool = False,
    ) -> LoopDecision:
        """How so many lanes of a loop run; see `Loop`."""
        chosen = self.decide(Loop(size, test, body, tuple(differs), bounded))
        assert isinstance(chosen, LoopDecision)
        return chosen

    def run(
        self, axis: Axis, divergent: WhileLoop | BoundedLoop | Branches
    ) -> PlacedOutputs | None:
        """The results of all lanes; None where they are to be masked."""
        match divergent:
            case WhileLoop(test, body):
                programs = [test, body]
            case Branches(programs):
                pass
            case BoundedLoop():
                programs = [p for p in (divergent.test, *divergent.steps) if p is not None]
        why = self._why_together(programs, divergent)
        if why:
            recording.note(why=why)
            return None
        match divergent:
            case WhileLoop():
                return self._run_loop(axis, divergent)
            case BoundedLoop():
                return self._run_bounded_loop(axis, divergent)
            case Branches():
                return run_branches(axis, divergent)

    def _why_together(
        self, programs: Sequence[Any], divergent: WhileLoop | BoundedLoop | Branches
    ) -> str:
        """Why lanes stay together, whatever it costs; empty if they need not."""
        if self.explicit:
            reject_collectives(programs, _WHERE[type(divergent)])
            nested = self.nesting and isinstance(divergent, BoundedLoop)
            calls = calls_back(programs) and not isinstance(divergent, Branches)
            return HOST if calls else _AROUND if nested else ""
        if self.thresholds is None:
            return _UNMEASURED
        # Lanes that leave the loop around it leave this one, too, and a second window would have
        # to be compiled.
        nested = self.nesting and not isinstance(divergent, Branches)
        return why_together(programs) or (_AROUND if nested else "")

    def _run_loop(self, axis: Axis, loop: WhileLoop) -> PlacedOutputs | None:
        given = (*loop.test_consts, *loop.body_consts, *loop.carry)
        if not can_move(axis, given):
            recording.note(why=CANNOT_MOVE)
            return None
        differs = [a is not None for a in (*loop.body_at, *[0] * len(loop.carry))]
        plan = self.plan(axis.size, loop.test, loop.body, differs)
        if isinstance(plan, Masked):
            recording.note(why=plan.reason)
            return None
        results = range(len(loop.carry))
        if any(varying_of(given)) and Waiting.of(axis, loop).varies_less(results):
            recording.note(why=VARIES_LESS)
            return None
        recording.note(divergence=SHOWN[type(plan)], widths=plan.widths)
        outs = bind(*divergent_loop(axis, loop, plan))
        return outs[len(outs) - len(loop.carry) :], [0] * len(loop.carry)

    def _run_bounded_loop(self, axis: Axis, loop: BoundedLoop) -> PlacedOutputs | None:
        programs = [p for p in (loop.test, *loop.steps, *loop.guarded) if p is not None]
        form, size = loop.form, axis.size
        why = NAME if any_uses_axis(axis, *programs) else ""
        why = why or "its steps are shown as they are taken" * (form.steps.callback is not None)
        why = why or CANNOT_MOVE * (not can_move(axis, loop.args))
        why = why or VARYING * any(varying_of(loop.args))
        if why:
            recording.note(why=why)
            return None
        tail = self._apart(axis, loop)
        axis, apart = replace(axis, name=None), None if isinstance(tail, Masked) else tail
        if loop.test is None or form.kept is not None:  # an example is differentiated
            counts_and_records = loop.test is None and isinstance(form, LoopSignature) and form.kept
            if apart is None or counts_and_records:
                masked = isinstance(tail, Masked)
                recording.note(why=tail.reason if masked else "it keeps each of its steps")
                return None
            placed = run_with_tail(apart, loop)
            recording.note(divergence="compact", widths=(size, apart.width))
            return placed
        body = loop.steps[0]
        whole, finish = as_while(axis, loop.args, loop.axes, test=loop.test, body=body, form=form)
        differs = [a is not None for a in (*whole.body_at, *[0] * len(whole.carry))]
        plan = self.plan(size, whole.test, whole.body, differs, bounded=True)
        if isinstance(plan, Masked):
            recording.note(why=plan.reason, divergence="masked")
            if apart is None:
                return None
        else:
            recording.note(divergence=SHOWN[type(plan)], widths=plan.widths)
        return finish(bounded_divergent(axis, loop, whole, plan, apart))

    def _apart(self, axis: Axis, loop: BoundedLoop) -> TailCompaction | Masked:
        """How lanes are run that others leave behind in what is differentiated."""
        at, n_carry = loop.form.split(loop.axes), loop.form.n_carry
        differs = [a is not None for a in (*at.consts, *[0] * n_carry, *at.xs)]
        step = Step.of(None, loop.steps[0], differs)
        plan = self.decide(
            BoundedTail(axis.size, step, loop.steps, loop.form.steps.most, axis.in_loop)
        )
        if isinstance(plan, Masked):
            return plan
        assert isinstance(plan, Window)
        return TailCompaction(
            replace(axis, name=None), plan.widths[-1], plan.patience, self.explicit
        )


def runner_of(option: Any, values: Values, spread: bool = False) -> Runner | None:
    """What the option `divergence` makes of lanes that diverge; None: they are masked.

    It runs when a batched function is called, and not before: the default depends on the
    device, and to ask for the device initializes JAX's backends.

    Args:
      option: one that `check_divergence` let pass.
      values: the arguments.
      spread: whether each of several devices runs its lanes separately.
    """
    option = resolved(option)
    if isinstance(option, str):
        if option in ("predicate", "serial"):
            return None
        option = Compact() if option == "compact" else None
    runner = option if isinstance(option, Runner) else Runner.here(option)
    thresholds = runner.default or runner.thresholds
    if spread or thresholds is None or not may_be_spread(values, thresholds.max_devices):
        return runner
    # Where lanes may be spread over devices, to move one would be to send it.
    return replace(runner, default=None) if runner.explicit else None


def check_divergence(option: object) -> None:
    """Rejects values that the option `divergence` does not take.

    Raises:
      ArgumentTypeError: it is neither a word nor a `Compact`.
      OptionError: it is another word.
    """
    if not (isinstance(option, Compact | Runner) or is_word(option, *_WORDS)):
        raise not_one_of("divergence", option, *_WORDS, other="batchax.Compact(...)")


def resolved(option: Any) -> Any:
    """`option`, with what `batchax.config` says in the place of "auto"."""
    return config.divergence if isinstance(option, str) and option == "auto" else option


def is_explicit(option: object) -> bool:
    """Whether the user asks for lanes to run apart, and does not leave it to batchax."""
    return isinstance(option, Compact) or is_word(option, "compact")


def lanes_at_a_time(option: object, batch_size: BatchSize) -> BatchSize:
    """`batch_size`, which is 1 where lanes run sequentially.

    Raises:
      ArgumentTypeError: another number was passed.
    """
    if not is_word(option, "serial"):
        return batch_size
    if batch_size is not None and batch_size != 1:
        raise ArgumentTypeError(
            f'divergence="serial" runs one lane at a time, but batch_size is {show(batch_size)}. '
            "Omit batch_size, or omit divergence."
        )
    return 1


_WORDS = "auto", "predicate", "compact", "serial"


def for_any_machine(option: object) -> Any:
    """`option`, with "auto" as what decides alike wherever a job resumes."""
    if not (isinstance(option, str) and option == "auto"):
        return option
    return Runner(thresholds=TABLE[ANY_MACHINE]._replace(max_devices=1 << 30))


_NOTHING_PARTS = "it holds no loop or branch in which lanes could diverge"
_UNMEASURED = "what pays is measured on CPUs and GPUs alone"
_AROUND = "a loop around it has a window"
_WHERE = {
    WhileLoop: "a loop that ends at its own step in each lane",
    BoundedLoop: "a bounded loop that ends at its own step in each lane",
    Branches: "a branch that not every lane takes",
}
