"""`Compact`: lanes that are done with a loop leave it, and branches not taken are not run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax

from batchax import _compat
from batchax.divergence.bounded import run_bounded_loop
from batchax.divergence.branches import run_branches
from batchax.divergence.cut import price_inside
from batchax.divergence.flatten import run_flat
from batchax.divergence.lane_steps import LaneSteps
from batchax.divergence.limits import CANNOT_MOVE, HOST, calls_back, can_move, refuse_collectives
from batchax.divergence.loop_primitive import bind
from batchax.divergence.loops import parting_loop
from batchax.divergence.nest import Nest
from batchax.divergence.price import price_of_moving
from batchax.divergence.waiting import VARIES_LESS, Waiting
from batchax.divergence.widths import Step, choose_widths, most_left
from batchax.divergence.window import Plan
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.in_axes import is_position
from batchax.jaxprs.spoken import brief, show
from batchax.kernel import recording
from batchax.kernel.axis import Axis
from batchax.kernel.divergence import AnyLoop, BoundedLoop, Branches, PlacedOutputs, WhileLoop
from batchax.kernel.varying import varying_of
from batchax.programs.one_function import fits_for_lanes

# Nanoseconds of a step from which on lanes of loops in loops are apart, by the benchmark `nests`:
# to count who waits takes some operations in each step.
NEST = 10_000.0
# Their windows hold no fewer lanes, work as many times as long as it takes to begin operations, and
# all lanes fill as many.
_LEAST_OF_NESTS = 64
_WORTH = 4.0
WINDOWS_OF_NESTS = 4
_ONE_CORE = 50_000.0  # nanoseconds that the last lanes take at most which run on one core
_DEVICES = 1  # of which nobody knows how lanes that are traced are spread over more
AROUND = "a loop around it has a window"
_MANY = 32  # outer steps, over which what lanes need in all evens out


@_compat.api_boundary
@dataclass(frozen=True)
class Compact:
    """How lanes that part ways are run, for ``vmap(..., divergence=Compact(...))``.

    Attributes:
      width: how many lanes a loop holds at a time once some are done, and how many of those that
        take the same branch run together. None: chosen by the cost of the program.
      threshold: the share of the lanes in a loop that must be done before others take their
        places, between 0 and 1. Small: lanes seldom wait, and often move. None: when what was
        lost by waiting is worth the cost of moving.
      steps: a `LaneSteps`, to which the lane-steps of loops are added; None to count nothing.

    Raises:
      ArgumentTypeError: (a TypeError) an attribute has the wrong type.
      AxisError: (a ValueError) `width` is less than one, or `threshold` not in 0..1.

    Example:
      >>> def steps_to_one(n):
      ...     step = lambda n: jnp.where(n % 2, 3 * n + 1, n // 2)
      ...     one = lambda s: s[0] != 1
      ...     return jax.lax.while_loop(one, lambda s: (step(s[0]), s[1] + 1), (n, 0))[1]
      >>> print(bx.vmap(steps_to_one, divergence=bx.Compact(width=2))(jnp.arange(1, 8)))
      [ 0  1  7  2  5  8 16]
    """

    width: int | None = None
    threshold: float | None = None
    steps: LaneSteps | None = None
    asked: ClassVar[bool] = True
    _nesting: int = field(default=0, repr=False, kw_only=True)
    _most: int | None = field(default=None, repr=False, kw_only=True)
    _meets: bool = field(default=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.width is not None and not is_position(self.width):
            raise ArgumentTypeError(
                f"width must be a positive int or None, got {show(self.width)}."
            )
        if self.width is not None and self.width < 1:
            raise AxisError(f"width is {self.width}, but a loop must hold at least one lane.")
        if isinstance(self.threshold, bool) or not isinstance(
            self.threshold, (int, float, type(None))
        ):
            raise ArgumentTypeError(
                f"threshold must be a number between 0 and 1, or None, got {show(self.threshold)}."
            )
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise AxisError(
                f"threshold is {brief(self.threshold)}, but it is a share of lanes: give a number "
                "between 0 and 1."
            )
        if self.steps is not None and not isinstance(self.steps, LaneSteps):
            raise ArgumentTypeError(
                f"steps must be a batchax.LaneSteps or None, got {show(self.steps)}."
            )

    def inside(self) -> Compact:
        """How lanes are run in what is inside a loop or a branch that lanes part ways in.

        :meta private:
        """
        return replace(self, _nesting=self._nesting + 1, _most=None)

    def meeting(self) -> Compact:
        """As this, with lanes that take each step of a loop of loops together.

        :meta private:
        """
        return replace(self, _meets=True)

    def at_most(self, width: int) -> Compact:
        """As this, with no more than so many lanes at a time.

        :meta private:
        """
        return replace(self, _most=width)

    def concerns(self, axis: Axis, loop: AnyLoop) -> bool:
        """Whether lanes may part ways in a loop, or in what is inside it.

        :meta private:
        """
        return True  # and what cannot be done is refused

    def run_nest(self, axis: Axis, loop: AnyLoop) -> PlacedOutputs | None:
        """The results of a loop of loops, in which each lane is at a place of its own.

        :meta private:
        """
        return None if self._meets else run_flat(axis, loop, NEST)

    def plan_of_nest(self, size: int, nest: Nest, length: int | None) -> Plan:
        """How so many lanes of a loop of loops are run, each at a place of its own.

        Args:
          size: number of lanes.
          nest: the loop.
          length: how many steps it has, if all lanes take as many.

        :meta private:
        """
        price = price_inside(nest)
        many = length is not None and length > _MANY
        width = self.width or (size if many else self._width_of_nest(size, nest, length))
        width = min(width, size if self._most is None else self._most)
        moving = price_of_moving(nest.slots, nest.slots).lane / max(price.lane, 1.0)
        return Plan((min(width, size),), self.threshold, 0, moving, self.steps is not None)

    def _width_of_nest(self, size: int, nest: Nest, length: int | None) -> int:
        """In a window only the slowest lanes in sum have no others in their places at the end."""
        width, price = _LEAST_OF_NESTS, price_inside(nest)
        while width * price.lane < _WORTH * price.begin and width < size:
            width *= 2
        return width if width * WINDOWS_OF_NESTS <= size else size

    def run(self, axis: Axis, parting: WhileLoop | BoundedLoop | Branches) -> PlacedOutputs | None:
        """The results of all lanes; None where they are to be masked.

        :meta private:
        """
        match parting:
            case WhileLoop():
                return self._run_loop(axis, parting)
            case BoundedLoop():
                return self._run_bounded_loop(axis, parting)
            case Branches():
                return run_branches(axis, parting, self.width)

    def _run_loop(self, axis: Axis, loop: WhileLoop) -> PlacedOutputs | None:
        programs = loop.test, loop.body
        refuse_collectives(programs, "a loop that ends at its own step in each lane")
        given = (*loop.test_consts, *loop.body_consts, *loop.carry)
        if calls_back(programs) or not can_move(axis, given):
            recording.note(why=HOST if calls_back(programs) else CANNOT_MOVE)
            return None
        differs = [a is not None for a in (*loop.body_at, *[0] * len(loop.carry))]
        plan = self.plan(axis.size, *programs, differs)
        if plan.widths == (axis.size,) and self.steps is None:
            recording.note(why=plan.why)
            return None
        results = range(len(loop.carry))
        if any(varying_of(given)) and Waiting.of(axis, loop).varies_less(results):
            recording.note(why=VARIES_LESS)
            return None
        way = "neighbours" if plan.neighbours else "compact"
        recording.note(divergence=way, widths=plan.widths)
        outs = bind(*parting_loop(axis, loop, plan))
        return outs[len(outs) - len(loop.carry) :], [0] * len(loop.carry)

    def plan(
        self, size: int, test: Any, body: Any, differs: Sequence[bool], bounded: bool = False
    ) -> Plan:
        """How so many lanes of a loop are run.

        Args:
          size: number of lanes.
          test, body: the programs of a step.
          differs: which operands of the body each lane has its own of.
          bounded: whether it is a bounded loop as a ``while``.

        :meta private:
        """
        step = Step.of(test, body, differs)
        most = size if self._most is None else min(size, self._most)
        widths, why = choose_widths(size, most, step, self._nesting, self.width)
        left, counts = most_left(widths, step.overhead), self.steps is not None
        last = len(widths) > 2 and not counts and self._in_one(widths[-1] * step.work, test, body)
        return Plan(widths, self.threshold, left, step.moving, counts, why, last_in_one=last)

    def _in_one(self, work: float, *programs: Any) -> bool:
        """Whether steps that take so long are one function of a compiler, which has one core."""
        if jax.default_backend() != "cpu" or jax.device_count() > _DEVICES or work > _ONE_CORE:
            return False
        return all(fits_for_lanes(p.jaxpr) for p in programs if p is not None)

    def _run_bounded_loop(self, axis: Axis, loop: BoundedLoop) -> PlacedOutputs | None:
        programs = [p for p in (loop.test, *loop.steps) if p is not None]
        refuse_collectives(programs, "a bounded loop that ends at its own step in each lane")
        if self._nesting or calls_back(programs) or not can_move(axis, loop.args):
            cannot = HOST if calls_back(programs) else CANNOT_MOVE
            recording.note(why=AROUND if self._nesting else cannot)
            return None
        step, form = loop.steps[-1], loop.form
        others = len(step.in_avals) - form.n_consts
        consts_at = form.split(loop.axes).consts
        differs = [*(a is not None for a in consts_at), *[True] * others]
        plan = self.plan(axis.size, loop.test, step, differs)
        widths = plan.widths
        width = widths[1] if len(widths) > 1 else axis.size
        if width == axis.size:
            recording.note(why=plan.why)
            return None
        placed = run_bounded_loop(axis, loop, width)
        if placed is None:
            recording.note(why="the name of the axis is used, or lanes are spread over devices")
        else:
            recording.note(divergence="compact", widths=widths[:2])
        return placed
