"""`Auto`: lanes part ways where that surely pays, and are masked elsewhere.

Nobody knows before a loop runs how many steps its lanes take. So it has to cost next to nothing
where they all take as many, in time and in compiling. What a step costs is read off its program,
before it is compiled:

- A loop with dear steps has its lanes in a window from the first step on: the body is compiled
  once, as it would be for all lanes, and as wide a window as this one keeps a device as busy as all
  lanes do.
- Where a step is many operations, all of which take as long for a window as for many lanes, all
  lanes run first, and those that are left in a window. The body is compiled twice, beside which
  what moves lanes is little. So do the lanes of a bounded loop whose step is a few dear operations:
  what ends it for `jax.vmap` is compiled about as long as what moves lanes. They are counted
  seldom, for a loop of equal counts is to take no longer than a masked one. Where a bounded loop
  is differentiated, they go on in blocks, and so do the steps back over what they did alone.
- Where a step is too cheap to move lanes, neighbours run until the last of them is done, and then
  the next ones: nobody is moved. Those of a step that a compiler can make one function of are few,
  and the last of them are left behind, to go on together with others that are.
- All other loops are the masked loops that they would be.

On a GPU a step takes as long for a few lanes as for thousands. So of these the second is what
there is, for loops of any steps, wherever the last lanes alone save much.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from batchax.divergence.bounded_apart import Apart
from batchax.divergence.bounded_parting import bounded_parting, run_apart
from batchax.divergence.branch_cost import NOTHING, BranchCost, Choice
from batchax.divergence.branches import run_branches
from batchax.divergence.compact import AROUND, WINDOWS_OF_NESTS, Compact
from batchax.divergence.cut import price_inside
from batchax.divergence.flatten import run_flat
from batchax.divergence.limits import CANNOT_MOVE, NAME, VARYING, can_move, why_together
from batchax.divergence.most import (
    WITH_DERIVATIVE,
    dearest_step,
    may_be_one_function,
    price_of_branches,
    price_of_loops,
)
from batchax.divergence.nest import Dear, Inner, Nest
from batchax.divergence.what_pays import Limits, limits_here
from batchax.divergence.widths import (
    Step,
    different,
    largest,
    microseconds,
    most_left,
    power_of_two,
)
from batchax.divergence.window import Plan
from batchax.execution.bounded_as_while import as_while
from batchax.execution.bounded_forms import Form
from batchax.frontend.options import is_word
from batchax.jaxprs.words import Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis
from batchax.kernel.divergence import AnyLoop, BoundedLoop, Branches, PlacedOutputs, WhileLoop
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.varying import may_be_spread, varying_of
from batchax.programs.cost import STEPS
from batchax.programs.dear_branches import time_to_move
from batchax.programs.one_function import fits_for_lanes
from batchax.rules.many_lanes import least_lanes


@dataclass(frozen=True)
class Auto(Compact):
    """As `Compact`, where it surely pays. Nothing is refused: what it cannot do is masked."""

    limits: Limits = field(default_factory=lambda: limits_here() or Limits())
    asked: ClassVar[bool] = False
    _decided: bool = field(default=False, repr=False, kw_only=True)

    def leaves(self, values: Sequence[Value]) -> bool:
        """Whether lanes may be spread over devices: to move one would be to send it."""
        return may_be_spread(values, self.limits.devices)

    def concerns(self, axis: Axis, loop: AnyLoop) -> bool:
        if limits_here() is None or not isinstance(axis.size, int):
            return False
        limits = self.limits
        enough = min(limits.busy * limits.cores, limits.counting, limits.last)
        dear = dearest_step(loop) * axis.size >= enough
        few = price_of_branches(loop).of(axis.size) >= limits.beginning
        cheap = axis.size >= limits.together and may_be_one_function(loop)
        return dear or few or cheap or self._may_run_flat(axis, loop)

    def run(self, axis: Axis, parting: WhileLoop | BoundedLoop | Branches) -> PlacedOutputs | None:
        match parting:
            case WhileLoop(test, body):
                programs = [test, body]
            case Branches(programs):
                pass
            case BoundedLoop():
                programs = [p for p in (parting.test, *parting.steps) if p is not None]
        why = why_together(programs)
        if limits_here() is None:
            why = "what pays is measured on CPUs and GPUs alone"
        if why:
            recording.note(why=why)
            return None
        if isinstance(parting, Branches):
            inside = replace(self.inside(), _decided=True)
            masked = self._few, inside, self._why_masked
            choice = Choice(self._pays, self._decides, self._share(), self._most_back, *masked)
            return run_branches(axis, parting, None, choice)
        if self._nesting:
            # Who leaves the loop around it leaves this one, too; a second window is to be compiled.
            recording.note(why=AROUND)
            return None
        return super().run(axis, parting)

    def _run_bounded_loop(self, axis: Axis, loop: BoundedLoop) -> PlacedOutputs | None:
        programs = [p for p in (loop.test, *loop.steps, *loop.guarded) if p is not None]
        form, size = loop.form, axis.size
        why = NAME if any_uses_axis(axis, *programs) else ""
        why = why or "its steps are shown as they are taken" * (form.steps.told is not None)
        why = why or CANNOT_MOVE * (not can_move(axis, loop.args))
        why = why or VARYING * any(varying_of(loop.args))
        if why:
            recording.note(why=why)
            return None
        axis, apart = replace(axis, name=None), self._apart(axis, loop)
        if loop.test is None or form.kept is not None:  # an example is differentiated
            counts_and_records = loop.test is None and isinstance(form, Form) and form.kept
            if apart is None or counts_and_records:
                recording.note(why=CHEAP if apart is None else "it keeps each of its steps")
                return None
            placed = run_apart(apart, loop)
            recording.note(divergence="compact", widths=(size, apart.width))
            return placed
        body = loop.steps[0]
        whole, finish = as_while(axis, loop.args, loop.axes, test=loop.test, body=body, form=form)
        differs = [a is not None for a in (*whole.body_at, *[0] * len(whole.carry))]
        plan = self.plan(size, whole.test, whole.body, differs, bounded=True)
        if plan.widths == (size,):
            recording.note(why=plan.why, divergence="masked")
            if apart is None:
                return None
        else:
            way = "neighbours" if plan.neighbours else "compact"
            recording.note(divergence=way, widths=plan.widths)
        return finish(bounded_parting(axis, loop, whole, plan, apart))

    def _apart(self, axis: Axis, loop: BoundedLoop) -> Apart | None:
        """How lanes are run that others leave behind in what is differentiated; None: masked."""
        at, n_carry = loop.form.split(loop.axes), loop.form.n_carry
        differs = [a is not None for a in (*at.consts, *[0] * n_carry, *at.xs)]
        # A step, together with the step back over it.
        step = Step.of(None, loop.steps[0], differs)
        work, begun = WITH_DERIVATIVE * step.work, WITH_DERIVATIVE * step.begun
        step = replace(step, work=work, begun=begun, moving=step.moving / WITH_DERIVATIVE)
        least = least_lanes(axis.size, loop.steps)
        width = self._from_the_start(axis.size, step, least)
        if width == axis.size:
            width = self._of_blocks(axis.size, step, least)
        return Apart(replace(axis, name=None), width, step.moving) if width < axis.size else None

    def run_nest(self, axis: Axis, loop: AnyLoop) -> PlacedOutputs | None:
        if limits_here() is None or self._meets:
            return None
        if not (recording.is_on() or self._may_run_flat(axis, loop)):
            return None  # a listing is told what it would cost
        return run_flat(axis, loop, self.limits.nest)

    def plan_of_nest(self, size: int, nest: Nest, length: int | None) -> Plan:
        plan, price = super().plan_of_nest(size, nest, length), price_inside(nest)
        if plan.widths == (size,) and self._may_be_one_function(price.lane * size, nest.inside):
            loops = (part for part in nest.parts if isinstance(part, Inner))
            long = price.lane * size >= self.limits.leaving
            if long and all(self._in_turn(size, loop) for loop in loops):
                return replace(plan, why=IN_TURN)
            return replace(plan, one_function=True)
        if price.of(size) < self.limits.places:
            return replace(plan, why=CHEAP_INSIDE)
        (width,) = plan.widths
        around = price.lane * (length or self.limits.around)
        moving = time_to_move([*nest.own, *nest.slots])
        if width < size and moving > self.limits.carried * around:
            if moving > self.limits.staying_on * around:  # a window saves half, and compiles long
                plan = replace(plan, widths=(size,))
            else:  # all lanes run first, and the step is compiled once more for the last of them
                last = max(width, size // _LEFT)
                plan = replace(plan, widths=(size, last), most_left=last)
        blocks = [part.block.of(size) for part in nest.parts if isinstance(part, Dear)]
        if min(blocks, default=math.inf) < self.limits.waiting:
            return replace(plan, why=SOON_OVER)
        return plan

    def _in_turn(self, size: int, loop: Inner) -> bool:
        """Whether few neighbours at a time take a loop inside in one function, on one core.

        Of so many lanes, these wait at each step of the loop around it for the work of others, of
        which little is in vain. At places of their own all lanes do each step, most in vain.
        """
        test, body = (loop.eqn.params[name] for name in ("cond_jaxpr", "body_jaxpr"))
        differs = (*loop.differs, *[True] * len(body.out_avals))
        return self.plan(size, test, body, differs).one_function

    def _width_of_nest(self, size: int, nest: Nest, length: int | None) -> int:
        limits, lane = self.limits, price_inside(nest).lane
        width = super()._width_of_nest(size, nest, length)
        loops = nest.inside is not None and all(fits_for_lanes(p.jaxpr) for p in nest.inside)
        if loops and not limits.whole:
            # The compiler divides them among cores, and in a narrow window these would wait for
            # each other.
            while width * lane < limits.busy * limits.cores and width < size:
                width *= 2
        return width if width * WINDOWS_OF_NESTS <= size else size

    def _may_run_flat(self, axis: Axis, loop: AnyLoop) -> bool:
        least = self.limits.nest
        # The dearest of loops that take several steps is soon told, and mostly tells enough.
        surely = dearest_step(loop) * axis.size >= STEPS * least
        return surely or price_of_loops(loop).of(axis.size) >= least

    def _pays(self, branch: BranchCost) -> bool:
        """Whether a branch is to run for the lanes that take it, even if all of them do."""
        limits = self.limits
        if not branch.held and branch.others >= branch.begun and self._may_pay(branch):
            return True  # all lanes that take it save the others
        dear = branch.work >= limits.gain * branch.moving
        if not dear or branch.begun < limits.launched * branch.work:
            return False
        enough = limits.busy * limits.cores
        if branch.copied >= limits.copying * branch.apart:  # even if all lanes take it
            return branch.work * branch.lanes >= enough
        if 0 < branch.held < limits.cached:  # to compute it again takes longer than to read it
            return False
        return branch.work * branch.chunk >= enough

    def _decides(self, branch: BranchCost) -> bool:
        """Whether it is decided while the program runs for whom a branch does."""
        if self._decided or branch.others >= branch.begun or not self._may_pay(branch):
            return False
        surely = branch.work >= self.limits.surely * branch.moving
        once = branch.alike <= branch.chunk and (surely or self._copies(branch))
        if once and self._pays(branch):
            return False  # as fast in blocks, and compiled once
        return branch.work * branch.lanes >= self.limits.compiling * branch.operations

    def _copies(self, branch: BranchCost) -> bool:
        """Whether most that a short branch does is to copy what lanes share, which blocks do not.

        Where all lanes take it blocks may take longer than masked lanes, but not than copies. To
        compile it twice is most of what a short one compiles for.
        """
        limits, in_blocks = self.limits, branch.apart * self.limits.slower
        return branch.operations < limits.long and branch.copied >= limits.copies * in_blocks

    def _most_back(self, branch: BranchCost) -> float | None:
        """From which share of the lanes on derivatives run for all; None: they always do.

        In chunks and decided they compute the branch once more, which takes no longer than the
        copies of what all share that `jax.vmap` makes.
        """
        if branch.copied < self.limits.copying * branch.work:
            return None
        return self._share() * branch.work / branch.apart

    def _share(self) -> float:
        """From which share of the lanes on all run, where it is decided while the program runs."""
        # XLA may run all lanes on all cores, and chunks on one.
        return self.limits.most / self.limits.slower

    def _may_pay(self, branch: BranchCost) -> bool:
        """Whether it pays to run a branch for the lanes that take it, if they are few."""
        return not self._why_not(branch)

    def _why_not(self, branch: BranchCost) -> str:
        """Why it does not; empty if it does."""
        limits, every = self.limits, branch.work * branch.lanes
        if branch.work < limits.perhaps * branch.moving:
            price = branch.work / branch.moving
            return f"costs {price:.2g} of moving a lane, limit {limits.perhaps:.2g}"
        if branch.begun < limits.launched * branch.work:
            return "what selects results is one loop with most of it, for no lane but its own"
        if every < limits.counting:
            return f"{microseconds(every)} for all lanes, limit {microseconds(limits.counting)}"
        return ""

    def _why_masked(self, branch: BranchCost) -> str:
        """Why no lane is taken apart in a branch of this cost."""
        if not branch.work:
            return NOTHING
        why = self._why_not(branch)
        if why or self._decided:
            return why or "it is in a branch that is compiled twice"
        compiled = microseconds(self.limits.compiling * branch.operations)
        every = microseconds(branch.work * branch.lanes)
        return f"{every} for all lanes, limit {compiled} for compiling its operations twice"

    def _few(self, branch: BranchCost) -> int:
        """Of how many lanes that take a branch each runs it by itself; of more all run, masked."""
        limits = self.limits
        masked = branch.beginning + branch.lanes * branch.work
        if masked < limits.beginning or branch.begun < limits.launched * branch.work:
            return 0
        few = int(masked / (limits.singly * branch.alone))
        return min(few, branch.lanes) if few * limits.share >= branch.lanes else 0

    def plan(
        self, size: int, test: Any, body: Any, differs: Sequence[bool], bounded: bool = False
    ) -> Plan:
        step = Step.of(test, body, differs)
        why = CHEAP
        left, neighbours, one_function = 0, False, False
        programs = [p for p in (test, body) if p]
        least = least_lanes(size, programs)
        pause = self.limits.asking
        if step.moving <= (self.limits.later if bounded else self.limits.moving):
            widths: tuple[int, ...] = (self._from_the_start(size, step, least),)
            last = self._of_the_last(size, step, body, bounded)
            if bounded and widths != (size,):
                widths, pause = (size, *widths), 1
                left = most_left(widths, step.overhead)
            elif widths == (size,) and least <= last < size:
                widths = (size, last)
                alone = self.limits.slower == 1
                left = most_left(widths, step.overhead) if alone else last
        else:
            why = f"to move a lane costs as much as {step.moving:.2g} of its steps"
            widths = (size,)
        if widths == (size,):
            widths = (self._in_one_function(size, step, programs),)
            one_function = neighbours = widths[0] < size
            many = neighbours and step.work * size >= self.limits.leaving
            left = widths[0] // _LEFT if many else 0
        if widths == (size,) and step.moving > self.limits.moving:
            widths = (self._of_neighbours(size, step, least),)
            neighbours = widths[0] < size
        if widths == (size,) and least > size // min(self.limits.windows):
            why = "fewer lanes would run its operations one after another, by a library"
        return Plan(
            widths, None, left, step.moving, False, why, neighbours, one_function, pause=pause
        )

    def _in_one_function(self, size: int, step: Step, programs: Sequence[Any]) -> int:
        """How many neighbours at a time run in one function, on one core; `size` if none do."""
        if size < self.limits.together:
            return size
        if not self._may_be_one_function(step.work * size, programs):
            return size
        if step.staying > self.limits.staying and largest(programs) > 1:
            return size
        return min(self._numbers(programs), max(1, size // 2))

    def _may_be_one_function(self, work: float, programs: Sequence[Any] | None) -> bool:
        """Whether what takes so long for all lanes can be one function, on one core."""
        limits = self.limits
        if programs is None:
            return False
        most = limits.one_core if limits.cores > limits.few else 4 * limits.one_core
        return work <= most and all(fits_for_lanes(p.jaxpr) for p in programs)

    def _numbers(self, programs: Sequence[Any]) -> int:
        """How many lanes fill what a processor computes at once in such a function."""
        together, numbers = self.limits.together, largest(programs)
        if numbers * _VECTOR > 2 * together:  # one lane does
            return 1
        return max(min(together, 2 * together // numbers) // _VECTOR * _VECTOR, _VECTOR)

    def _from_the_start(self, size: int, step: Step, least: int) -> int:
        """The width of a window that keeps a device as busy as all lanes do; `size` for none.

        It has `least` lanes, of which fewer would run some operation otherwise.
        """
        limits = self.limits
        begun = max(limits.begun * step.overhead, least)
        width = self._fitting(size, max(begun, limits.busy * limits.cores / step.work))
        if width < size and limits.cores <= limits.few and step.begun >= step.work / 2:
            # One core takes no longer for these than two take for all lanes, which are masked.
            width = min(width, max(1, size // limits.narrower, math.ceil(begun)))
        return width

    def _of_blocks(self, size: int, step: Step, least: int) -> int:
        """How many lanes make a block of those that others have left behind; `size` for none."""
        limits = self.limits
        if step.work * size < limits.last:
            return size
        begun = step.overhead * limits.slower
        width = self._fitting(size, max(limits.part * begun, least))
        return width if size + begun >= limits.saved * (width + begun) else size

    def _of_neighbours(self, size: int, step: Step, least: int) -> int:
        """How many are copied to where they are computed, which a cache holds; `size` if none."""
        limits = self.limits
        if step.staying > limits.staying:
            return size
        begun = limits.begun * step.overhead * limits.slower
        return self._fitting(size, max(begun, least))

    def _fitting(self, size: int, enough: float) -> int:
        every = (max(1, size // n) for n in self.limits.windows)
        return next((width for width in every if enough <= width < size), size)

    def _of_the_last(self, size: int, step: Step, body: Any, bounded: bool) -> int:
        """The width of a window for the lanes that others have left behind; `size` for none.

        They must save much alone, and their step be most of what is compiled then, or what ends a
        bounded loop, of which there is no other copy.
        """
        limits, begun = self.limits, step.overhead
        few = bounded and len(body.out_avals) <= limits.rows
        few = few and step.work * size >= limits.last
        long = different(body.jaxpr) >= limits.long
        width = power_of_two(begun) * (1 if long else limits.roomy)
        width = min(width, size // 2) or size
        saves = size + begun >= limits.saved * (width + begun)
        return width if saves and (few or long) else size


def for_any_machine(option: Any) -> Any:
    """`option`, with "auto" as what decides alike wherever a job goes on."""
    if not is_word(option, "auto"):
        return option
    return Auto(limits=Auto().limits._replace(cores=_CORES, devices=sys.maxsize))


IN_TURN = "neighbours take the loops inside in turn, and wait for few others at each step"
CHEAP_INSIDE = "a step of the loops inside costs less than to enter and leave them one by one"
SOON_OVER = "the branch is over sooner than who waits before it is told from others"
CHEAP = "a step costs too little, or lanes are too few, for a window"
_CORES = 8
_LEFT = 8  # of so many neighbours, or lanes of a nest, one may be left
_VECTOR = 8  # lanes that a processor computes at once
