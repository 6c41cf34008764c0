"""Branches that run for the lanes that take them, and their derivatives.

A branch that costs much more than moving its operands and results is a loop over chunks of the
lanes that take it (`execution.chunk_loop`). Nothing is computed for lanes that do not, and if there
are none that do, no chunk runs. Where chunks cost more than masked lanes if most take it, both are
compiled, and while the program runs the lanes that take it are counted: by their number all run,
masked, or these in chunks, or none. Where what takes time is to begin its operations, few lanes
that take it run sequentially (`execution.chunk_singly`). Other branches run for all lanes, masked.

A chunk loop recomputes each chunk in its derivative. That is right where it takes longer to write
and read what a derivative needs than to recompute it. Of a sort, say, it does not: there it is
saved, of each lane that takes the branch, and what is left of the derivative is linear. That is the
choice of what to save in reverse mode (Griewank and Walther, "Revolve", 2000), made once for each
branch: all of it, or nothing. Where neither is never slower, all lanes run, masked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Literal

from batchax import _compat
from batchax.analysis.cost import (
    ALONE,
    STEPS,
    VECTORIZED,
    Cost,
    Lanes,
    Nanoseconds,
    bytes_of,
    cost_of_program,
)
from batchax.analysis.one_function import fits_single_kernel
from batchax.divergence import policy
from batchax.divergence.costs import (
    CANNOT_MOVE,
    NAME,
    BranchCost,
    can_move,
    launch_time,
    length,
    time_begun,
    time_to_move,
)
from batchax.divergence.policy import Masked, Serial
from batchax.errors import UnsupportedError
from batchax.execution.chunk_loop import (
    WHOLE,
    ActiveMask,
    AllAtOnce,
    ChunkBody,
    ChunkLoop,
    Gathered,
    chunk_loop,
)
from batchax.execution.gathered_lanes import fitting_width
from batchax.execution.names import index_as_input
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.evaluate import variables_in, variables_read
from batchax.jaxprs.types import Aval, ClosedJaxpr, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Branches, PlacedOutputs, Position, Positions, match_axis
from batchax.kernel.inner import closed_over
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.own_primitive import Linearized, tangents_of, with_tangent_rule, with_values
from batchax.linalg.pays import LOOP_STEPS
from batchax.rules.branches import after_branches, one_branch, select_results
from batchax.rules.linalg import least_lanes
from batchax.rules.masking import hazards, is_inexact

RunLanes = Callable[[ClosedJaxpr, Positions, Any, Values], list[Any]]
"""Runs a program for active lanes, of where operands have the batch axis, a mask, and operands."""

# How many times as long as to write and read it, it must take to compute what is kept.
_WORTH = 8.0


class Derivative(NamedTuple):
    """How a branch and its derivatives are run."""

    run: RunLanes  # for the lanes that take it
    masked: RunLanes  # for all lanes
    # Whether derivatives are for those that take it, or it is decided while the program runs
    # whether they are
    pays: bool
    work: float  # nanoseconds that the branch takes for a lane


def run_differentiable(
    strategy: Derivative,
    program: ClosedJaxpr,
    positions: Positions,
    active: Value,
    operands: Values,
) -> list[Any]:
    """The results of a program for the lanes that are active, at the front.

    Of a function whose derivative in reverse is a rule nothing can be kept: there is no other.

    Args:
      strategy: how it is run.
      program: what one example does, without effects.
      positions: where operands have the batch axis.
      active: which lanes run it.
      operands: its operands.
    """
    run = strategy.run
    if only_in_reverse.in_program(program):
        return run(program, positions, active, operands)

    def rule(primals: Values, moving: Sequence[int], dots: Values) -> tuple[list[Any], list[Any]]:
        active, *xs = primals
        moving, count = [i - 1 for i in moving], len(program.out_avals)
        of = [k for k, aval in enumerate(program.out_avals) if is_inexact(aval)]
        try:
            split = Linearized.of(program, moving, of)
        except ValueError:  # there is none, nor a derivative in reverse
            split = None
        saved = [] if split is None else split.residuals
        pays = strategy.pays
        if split is None or not pays or time_to_move(saved) * _WORTH > strategy.work:
            of_all = run if pays else strategy.masked
            function = lambda *xs: of_all(program, positions, active, xs)
            return tangents_of(function, xs, moving, dots, range(count))
        outs = run(split.values, positions, active, xs)
        outs, residuals = outs[:count], outs[count:]
        operands = [*(xs[i] for i in split.reads), *residuals, *dots]
        at = [*(positions[i] for i in split.reads), *[0] * len(residuals)]
        at += [positions[i] for i in moving]
        moved = run(split.tangents, at, active, operands)
        return outs, with_values([None] * count, of, moved)

    branch = with_tangent_rule(lambda active, *xs: run(program, positions, active, xs), rule)
    return branch(active, *operands)


only_in_reverse = Anywhere(
    lambda eqn: eqn.primitive.name in ("custom_vjp_call", "custom_vjp_call_jaxpr")
)
"""Whether a program calls a function whose derivative is a rule for cotangents."""


_NARROWEST = 16  # lanes in a chunk
_VECTOR = 64  # numbers of a lane that fill vectors without those of other lanes
# Nanoseconds of work that make a chunk wide enough, so that beginning it costs little, and the most
# lanes in it.
_CHUNK_ON_CPU = (500_000.0, 1024)
_CHUNK = (50_000_000.0, 16_384)


def run_branches(axis: Axis, branches: Branches) -> PlacedOutputs | None:
    """What each lane's branch returns; None if all branches are to be masked.

    Args:
      axis: the axis being mapped, whose `divergence` says how each branch runs.
      branches: the branches, and what they are given.
    """
    if not can_move(axis, (branches.index, *branches.operands)):
        recording.note(why=CANNOT_MOVE)
        return None
    parts = [_Part(axis, program, branches) for program in branches.programs]
    for part in parts:
        part.choose(Nanoseconds(sum(p.begun for p in parts if p is not part)))
    if recording.is_on():
        masked = ((i, p.plan) for i, p in enumerate(parts) if isinstance(p.plan, Masked))
        recording.note(why={i: plan.reason for i, plan in masked})
    if all(isinstance(part.plan, Masked) for part in parts):
        return None
    index, operands, positions = branches.index, branches.operands, branches.positions
    numbers = lambda which: [i for i, part in enumerate(parts) if which(part)]
    recording.note(
        divergence="grouped",
        apart=numbers(lambda part: not isinstance(part.plan, Masked)),
        decided=numbers(lambda part: part.is_decided),
    )
    results = []
    for i, (part, program) in enumerate(zip(parts, branches.programs, strict=True)):
        before = branches.programs[:i]
        with recording.part(f"branch {i}"):
            if not isinstance(part.plan, Masked):
                part.operands = after_branches(before, results, program, part.operands)
                placed = part.run(lax.eq(index, np.asarray(i, index.dtype)))
            else:
                mine = after_branches(before, results, program, operands)
                placed = one_branch(axis, index, i, program, mine, positions)
            results.append(placed)
    return select_results(axis, index, branches.programs, results)


class _Part:
    """One branch, and how it runs (`plan`).

    `read` are the variables that it reads, `used` the operands of these that are arrays, and `made`
    the variables of what it computes. What it only hands on is not moved.
    """

    def __init__(
        self,
        axis: Axis,
        program: ClosedJaxpr,
        branches: Branches,
    ) -> None:
        self.width, self.index = axis.divergence.option.width, branches.index
        self.share = 1 / len(branches.programs)
        self.axis, self.operands, self.positions = axis, branches.operands, branches.positions
        self.program = program
        if any_uses_axis(axis, program):
            self._take_index()
        jaxpr = self.program.jaxpr
        self.read = {v for eqn in jaxpr.eqns for v in variables_read(eqn)}
        self.used = [
            k
            for k, (v, x) in enumerate(zip(jaxpr.invars, self.operands, strict=True))
            if v in self.read and isinstance(x, jax.Array)
        ]
        computed = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        made = (v for v in variables_in(jaxpr.outvars) if v in computed)
        self.made = list(dict.fromkeys(made))
        differs = list(map(_differs, self.positions))
        cost = cost_of_program(jaxpr, differs=differs, steps=STEPS)
        self.work, self.launches = VECTORIZED.time(cost), cost.launches
        self.begun = time_begun(jaxpr, differs)
        self.plan: policy.Gathered | Serial | Masked = Masked("")

    @property
    def is_decided(self) -> bool:
        """Whether it is decided while the program runs for which lanes it does."""
        plan = self.plan
        return isinstance(plan, Serial) or (
            isinstance(plan, policy.Gathered) and bool(plan.all_from)
        )

    def choose(self, others: Nanoseconds) -> None:
        """Finds how it runs, with other branches that take so long for a lane."""
        self.cost = self._cost(others)
        self.plan = self.axis.divergence.decide(self.cost)

    def _take_index(self) -> None:
        """Makes the index of the lane an operand, if that is all the name is used for."""
        try:
            program = index_as_input(self.axis, self.program)
        except UnsupportedError:
            return
        lanes = lax.iota(np.int32, self.axis.size)
        (lanes,) = _compat.varying_alike([lanes], like=[self.index])
        self.program = program
        self.operands, self.positions = [lanes, *self.operands], [0, *self.positions]

    def _why_not_apart(self) -> str:
        """Why it cannot be run for some lanes; empty if it can."""
        if _compat.makes_references(self.program.effects):
            # To make values of references undoes derivative rules in the program.
            return "it makes a reference"
        if any(map(closed_over, self.program.jaxpr.eqns)):
            # It would find values of all lanes, not of a chunk.
            return "a derivative rule in it closes over values"
        # Inside `shard_map` the operands of the loop are all cast to vary over the same axes of the
        # mesh. A program that casts a value itself must not be given one that varies already.
        mesh_axes = _compat.varying_axes(jax.typeof(self.index))
        if any(_compat.varying_axes(jax.typeof(self.operands[k])) != mesh_axes for k in self.used):
            return "what it reads is the same on all devices, and what selects it is not"
        # A batching rule of the user's may be told the name, and use it.
        return NAME if any_uses_axis(self.axis, self.program) else ""

    def _moved(self) -> list[Aval]:
        mine = (k for k in self.used if self.positions[k] is not None)
        return [*(self.program.in_avals[k] for k in mine), *(v.aval for v in self.made)]

    def _cost(self, others: Nanoseconds) -> BranchCost:
        jaxpr, size, moved = self.program.jaxpr, self.axis.size, self._moved()
        own = cost_of_program(jaxpr, differs=(True,) * len(jaxpr.invars), steps=STEPS)
        endless = hazards(jaxpr).endless
        return BranchCost(
            work=self.work,
            copied=VECTORIZED.time(own),
            alone=ALONE.time(own + Cost(bytes=2 * bytes_of(moved))),
            beginning=launch_time(self.launches),
            begun=self.begun,
            moving=time_to_move(moved),
            starting=launch_time(self.launches + 2 * len(self.used) + len(self.made)),
            chunk=Lanes(self._chunk()),
            lanes=Lanes(size),
            others=others,
            operations=length(jaxpr),
            alike=Lanes(least_lanes(size, [self.program])),
            cannot=self._why_not_apart(),
            # If there are many all run, those that do not take it as well.
            may_be_serial=not (endless or self.program.effects) and fits_single_kernel(jaxpr),
            is_unknown=endless or _compat.calls_back(self.program.effects),
            share=self.share,
            steps=self.axis.in_loop * LOOP_STEPS ** (self.axis.divergence.nesting > 0),
        )

    def _chunk(self) -> int:
        """How many lanes make a chunk. In a step of a loop few of the lanes come to a branch."""
        most, size = _chunk(self.work), self.axis.size
        return fitting_width(most, size // 4, 1) if self.axis.in_loop else fitting_width(most, size)

    def _gains_nothing_by_width(self) -> bool:
        """Whether single lanes take no longer than wide chunks, and less to compile.

        So it is on a CPU where the branch is a long sort, say: rows are sorted one after another.
        """
        cost = self.cost
        if jax.default_backend() != "cpu" or cost.copied > cost.work:  # lanes share an operand
            return False
        wide = all(aval.size >= _VECTOR for aval in self._moved())
        return wide and cost.starting * _WORTH <= cost.work

    def _of_used(self) -> ClosedJaxpr:
        """The branch, from what it reads to what it computes."""
        jaxpr = self.program.jaxpr.replace(outvars=self.made)
        inputs = [jaxpr.invars[k] for k in self.used]
        if not self.read.intersection(jaxpr.invars) - set(inputs):
            return _compat.close(jaxpr.replace(invars=inputs), self.program.consts)
        # Numbers stay in it; what outlives a trace holds none of its arrays.
        others = [None if isinstance(x, jax.Array) else x for x in self.operands]

        def run(*xs: Value) -> list[Any]:
            return eval_jaxpr(jaxpr, self.program.consts, *with_values(others, self.used, xs))

        types = [self.program.in_avals[k] for k in self.used]
        return _compat.stage(run, types, _compat.names_in_scope())

    def run(self, active: Value) -> PlacedOutputs:
        """What the branch returns for the lanes that are `active`, and zeros for the others."""
        size, plan = self.axis.size, self.plan
        serial = plan.most if isinstance(plan, Serial) else 0
        if serial:
            chunk = size
        elif _compat.calls_back(self.program.effects):
            chunk = 1  # in a wider one the lanes that stand in for missing ones would call, too
        elif self.width is not None:
            chunk = min(self.width, size)
        else:
            chunk = 1 if self._gains_nothing_by_width() else self._chunk()
        share = plan.all_from if isinstance(plan, policy.Gathered) else None
        back = plan.all_from_back if isinstance(plan, policy.Gathered) else None
        inside = self.axis.divergence.inside(recompiled=share is not None)
        axis, explicit = replace(self.axis, name=None, divergence=inside), inside.explicit

        # It outlives this trace, and so does not close over `self`, which holds operands.
        def run(program: ClosedJaxpr, positions: Positions, active: Value, xs: Values) -> list[Any]:
            def of_width(width: int) -> Callable[..., list[Any]]:
                lanes = replace(axis, size=width)

                def run_chunk(start: Value, counts: Value, *xs: Value) -> list[Any]:
                    outs, at = interpret(lanes, program.jaxpr, program.consts, xs, positions)
                    return [match_axis(lanes, x, a, 0) for x, a in zip(outs, at, strict=True)]

                return run_chunk

            def of_all(surely: bool, axis: Axis, width: int) -> Callable[..., list[Any]]:
                lanes = replace(axis, size=width)
                return lambda _, active, *xs: _masked(lanes, program, positions, active, xs, surely)

            specs = (ActiveMask(), *(WHOLE if at is None else Gathered(at) for at in positions))
            results = (Gathered(0),) * len(program.out_avals)
            every = ChunkBody(functools.partial(of_all, True, axis))
            how: dict[str, Any] = {"serial": serial}
            if share is not None:
                how["all_at_once"] = AllAtOnce(every, share, back)
            if not (explicit or _compat.calls_back(program.effects)):
                plain = replace(axis, divergence=None)
                how["masked"] = ChunkBody(functools.partial(of_all, False, plain))
            loop = ChunkLoop(ChunkBody(of_width), specs, results, size, chunk, **how)
            return chunk_loop(loop, [active, *xs])

        program, positions, used, made = self.program, self.positions, self.used, self.made
        of_used, at = self._of_used(), [positions[k] for k in used]
        operands = [self.operands[k] for k in used]
        if _compat.calls_back(program.effects):
            outs = run(of_used, at, active, operands)
        else:
            masked_all = functools.partial(_masked, axis)
            derivative = Derivative(run, masked_all, self._derivative_pays(), self.work)
            outs = run_differentiable(derivative, of_used, at, active, operands)
        jaxpr = program.jaxpr
        env = dict(zip(jaxpr.invars, zip(self.operands, positions, strict=True), strict=True))
        env |= {v: (_typed(x, v.aval), 0) for v, x in zip(made, outs, strict=True)}
        env |= {v: (x, None) for v, x in zip(jaxpr.constvars, program.consts, strict=True)}
        placed = [(v.val, None) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]
        return [x for x, _ in placed], [a for _, a in placed]

    def _derivative_pays(self) -> bool:
        """Whether derivatives run in blocks, too."""
        plan = self.plan
        if self.axis.divergence.explicit or not isinstance(plan, policy.Gathered):
            return self.axis.divergence.explicit
        return plan.all_from is None or plan.all_from_back is not None


def _masked(
    axis: Axis,
    program: ClosedJaxpr,
    positions: Positions,
    active: Value,
    xs: Values,
    surely: bool = False,
) -> list[Any]:
    """Runs a program for all lanes; those that are not active get anything.

    With `surely` some lane is active.
    """
    index = lax.convert_element_type(active, np.int32)
    outs, at = one_branch(axis, index, 1, program, xs, positions, surely=surely)
    return [match_axis(axis, x, a, 0) for x, a in zip(outs, at, strict=True)]


def _chunk(work: Nanoseconds) -> int:
    processor = jax.default_backend() == "cpu"
    enough, widest = _CHUNK_ON_CPU if processor else _CHUNK
    width = _NARROWEST
    while width < widest and width * work < enough:
        width *= 2
    return width


def _differs(position: Position) -> bool:
    return position is not None


def _typed(x: Value, aval: Aval) -> Value:
    return _compat.weakly(x) if aval.weak_type else x
