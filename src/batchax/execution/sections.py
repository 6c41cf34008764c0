"""Sections of a traced jaxpr: what must run for all lanes before the rest can.

A jaxpr without collectives over the mapped axis is one section. A collective needs a value of every
lane, so it cuts the jaxpr: the equations before it run chunk by chunk, then the collective, then
the equations after it.

A stage holds what can run before the next collectives. Whether a value depends on the batch is
known once it is computed. So stages are planned one at a time, from the values that are known.

Sums over the batch, and extremes, are accumulated by the chunk loop, floats of less than 32 bits in
float32. The states of other reductions are combined there, too, except for derivatives, which need
the state of each chunk. A mean is the sum over all lanes divided once, so that a last chunk with
fewer lanes has its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from batchax import _compat
from batchax.cache import cached
from batchax.contractions.contracted import run_adding
from batchax.contractions.deferred import DeferredContraction
from batchax.execution.chunk_loop import (
    SUM,
    WHOLE,
    ChunkBody,
    ChunkLoop,
    Combined,
    Extreme,
    Lanes,
    Result,
)
from batchax.execution.devices.shards import Shards
from batchax.execution.eager import may_call_python
from batchax.execution.memory import Auto
from batchax.execution.progress import LoopProgress
from batchax.frontend import reductions
from batchax.frontend.outputs import AUTO, OutputArray, Reduce, is_added
from batchax.frontend.reductions import Reduction
from batchax.jaxprs.bodies import Anywhere, control_flow
from batchax.jaxprs.evaluate import bind_equation, evaluate, plan, variables_in, variables_read
from batchax.jaxprs.types import Aval, Eqn, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position, Positions, move_axis
from batchax.kernel.differing import (
    differing_in,
    differing_through,
    differs_of,
    has_other_rule,
)
from batchax.kernel.inner import MappedProgram, closed_over
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import uses_axis, varying_of
from batchax.linalg.pays import LOOP_STEPS
from batchax.rules.collectives import REDUCTIONS
from batchax.rules.custom_derivatives import reached
from batchax.rules.masking import safe_lanes_p

Env = dict[Any, tuple[Any, Position]]
"""Variables whose values for all lanes are known, and where their batch axes are."""


@dataclass(frozen=True)
class Section:
    """Holds equations of a program with their inputs and outputs.

    It has the attributes of an open and a closed jaxpr that an interpreter reads.
    """

    eqns: Sequence[Eqn]
    invars: Sequence[Any]
    outvars: Sequence[Any]
    constvars: Sequence[Any] = ()
    consts: Values = ()

    @property
    def jaxpr(self) -> Section:
        # Sections are closed, so a section is its own jaxpr.
        return self

    def replace(self, **changes: Any) -> Section:
        return replace(self, **changes)


def section_for(
    eqns: Sequence[Eqn], outvars: Sequence[Any], given: Collection[Any], effects: bool = True
) -> Section:
    """Builds the section that computes `outvars` from variables that are `given`.

    It includes all equations with effects, unless `effects` is false.
    """

    def reads(eqn: Eqn) -> list[Any]:
        return [v for v in variables(eqn) if v not in given]

    results = set(variables_in(outvars))
    steps = plan(eqns, results.difference(given), lambda eqn: effects and eqn.effects, reads)
    taken = [step.eqn for step in steps]
    used = results.union(*map(variables, taken))
    return Section(taken, [v for v in given if v in used], list(outvars))


def run_shared(axis: Axis, eqns: Sequence[Eqn], env: Env) -> list[Eqn]:
    """Runs, once, the equations that do not depend on the batch; returns the others."""
    shared, rest, defined = [], [], set()

    def is_shared(v: Var) -> bool:
        return v in defined or (v in env and env[v][1] is None)

    for eqn in eqns:
        if all(map(is_shared, variables(eqn))) and not uses_axis(axis, eqn):
            shared.append(eqn)
            defined.update(eqn.outvars)
        else:
            rest.append(eqn)
    run_whole(axis, shared, env)
    return rest


def run_whole(axis: Axis, eqns: Sequence[Eqn], env: Env) -> None:
    """Runs equations for all lanes at once, and adds their results to `env`."""
    if not eqns:
        return
    outvars = [v for eqn in eqns for v in eqn.outvars]
    section = section_for(eqns, outvars, env)
    values = [env[v] for v in section.invars]
    outs, axes = interpret(axis, section, (), [x for x, _ in values], [a for _, a in values])
    env.update(zip(outvars, zip(outs, axes, strict=True), strict=True))


def find_cuts(
    axis: Axis, eqns: Sequence[Eqn], loops: Collection[int]
) -> tuple[list[Any], set[Any], list[Any]]:
    """Returns the first collectives over `axis`, what depends on them, and equations that do not.

    `loops` holds ids of loops that need all lanes as well.
    """
    cuts, blocked, free = [], set(), []
    # In order: whatever reads a blocked variable must wait, too, and so must a callback with
    # ordered=True after another one that waits.
    calls_wait = False
    for eqn in eqns:
        ordered = _compat.in_order(eqn.effects)
        waits = not blocked.isdisjoint(variables(eqn)) or (ordered and calls_wait)
        cuts_here = not waits and (id(eqn) in loops or uses_axis(axis, eqn))
        if not (waits or cuts_here):
            free.append(eqn)
            continue
        cuts += [eqn] if cuts_here else []
        blocked.update(eqn.outvars)
        calls_wait |= ordered
    return cuts, blocked, free


def divergent_loops(eqns: Sequence[Eqn], env: Env, most: int) -> set[int]:
    """Returns the ids of ``while`` loops among `eqns` that lanes leave at different steps.

    A lane of a loop may hold `most` bytes.
    """

    def differs(v: Var | Literal) -> bool:
        return not isinstance(v, Literal) and (v not in env or env[v][1] is not None)

    divergent = set()
    for eqn in eqns:
        if not control_flow(eqn.primitive).test or _compat.ordered_by_lane(eqn.effects):
            continue
        # A loop with much data for each lane would keep that for all lanes at once.
        if bytes_per_lane(v for v in eqn.invars if differs(v)) > most:
            continue
        if differing_in(eqn, tuple(map(differs, eqn.invars))).parts:
            divergent.add(id(eqn))
    return divergent


def crossing(eqns: Sequence[Eqn], free: Sequence[Eqn], cuts: Sequence[Eqn]) -> list[Any]:
    computed = {v for eqn in free for v in eqn.outvars}
    before = {id(eqn) for eqn in (*free, *cuts)}
    later = dict.fromkeys(v for eqn in eqns if id(eqn) not in before for v in variables(eqn))
    return [v for v in later if v in computed]


def variables(eqn: Eqn) -> list[Any]:
    """Lists the variables that an equation reads, now or in a derivative rule."""
    return variables_read(eqn) + closed_over(eqn)


def bytes_per_lane(vs: Iterable[Any]) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in vs)


_ONE_ARRAY = jax.tree.structure(0)


class Partial(NamedTuple):
    """Describes what one chunk adds to a reduction."""

    specs: list[Result]  # how a chunk loop collects each array
    structure: Any  # of the state
    result: Any  # the type of the reduction of all lanes at once


def partial_result(
    reduction: Reduction,
    x: Value,
    axis: int,
    index: Value | None = None,
    real: Value | None = None,
) -> tuple[list[Value], Partial]:
    """Returns the arrays that one chunk adds to a reduction of `x` along `axis`.

    `index` holds the indices of the lanes, if the reduction uses them, and `real` the lanes that
    count; None: all.
    """
    if isinstance(x, DeferredContraction):
        of_one = (1, *x.like.shape), x.like.dtype, x.like.weak_type
        result = _result_type(reduction, 0, *of_one)
        return [x.state(reduction, real)], Partial([SUM], _ONE_ARRAY, result)
    result = result_type(reduction, x, axis)
    states, at = reductions.states_of(reduction, x, axis, index, real)
    arrays, structure = jax.tree.flatten(states)
    operation = reductions.operation_of(reduction)
    held = operation and operation.held
    specs: list[Result]
    # Extremes are kept by lane, as their derivative needs the lanes that attain them.
    if held in ("max", "min"):
        specs = [Extreme(held, at) for _ in arrays]
    else:
        state = reductions.folded(reduction, states, at)
        arrays, none = jax.tree.leaves(state), reductions.neutral_like(reduction, state)
        specs = [
            SUM if held == "sum" else Combined(reduction, structure, k, number)
            for k, number in enumerate(jax.tree.leaves(none))
        ]
    return arrays, Partial(specs, structure, result)


def finish(reduction: Reduction, part: Partial, results: Values, size: int) -> Value:
    """Completes a reduction from what a chunk loop collected."""
    state = jax.tree.unflatten(part.structure, results)
    return reductions.finished(reduction, state, size).astype(part.result.dtype)


def result_type(reduction: Reduction, x: Value, axis: int) -> Aval:
    aval = jax.typeof(x)
    shape = (*aval.shape[:axis], 1, *aval.shape[axis + 1 :])
    return _result_type(reduction, axis, shape, aval.dtype, aval.weak_type)


@cached("types of reductions", most=256)
def _result_type(
    reduction: Reduction, axis: int, shape: tuple[int, ...], dtype: np.dtype[Any], weak_type: bool
) -> Aval:
    one = jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)
    return jax.eval_shape(lambda x: reductions.of_all(reduction, x, axis), one)


@dataclass(frozen=True, eq=False)
class LanesToRun:
    """Describes the lanes that chunks are taken from."""

    axis: Axis
    batch_size: int | Auto
    # The variable of the lane index, or None. Its value for all lanes is the index of the first,
    # from which chunks count, and that after the last.
    index: Any
    repeated: int = 0  # lanes at the end that may repeat another, and do not count
    progress: LoopProgress | None = None  # gets the number of chunks done

    @property
    def are_one_chunk(self) -> bool:
        return isinstance(self.batch_size, int) and self.axis.size <= self.batch_size


class Found(NamedTuple):
    """Holds a value for all lanes; `position` is None if lanes share it."""

    value: Value
    position: Position


@dataclass(frozen=True)
class Target:
    """Names a variable that a section computes: at a position, or as a `Reduce`."""

    variable: Any
    how: Any

    @property
    def reduction(self) -> Reduction | None:
        return self.how.reduction if isinstance(self.how, Reduce) else None


class SectionBody:
    """Wraps a section as a chunk loop: its body, operands, and the specs of its results.

    The constructor traces the body to find the specs. A single chunk is run at once.
    """

    def __init__(
        self,
        lanes: LanesToRun,
        env: Env,
        eqns: Sequence[Eqn],
        targets: Sequence[Target],
        effects: bool = True,
        same: Sequence[Target] = (),
    ) -> None:
        # `same`: targets that do not depend on the batch, but are returned for each lane.
        self.targets = targets
        self.section = section_for(eqns, [t.variable for t in targets], env, effects)
        indexed = any(t.reduction is not None and t.reduction.index for t in targets)
        if (lanes.repeated or indexed) and lanes.index not in self.section.invars:
            self.section = self.section.replace(invars=[lanes.index, *self.section.invars])
        self.operands = [env[v][0] for v in self.section.invars]
        positions = [env[v][1] for v in self.section.invars]
        self._chunk = _Chunk(lanes, self.section, positions, targets, same)
        self.specs, self.reduced = self._chunk.specs, self._chunk.reduced

        operand_kinds = tuple(
            WHOLE if a is None or v is lanes.index else Lanes(a)
            for v, a in zip(self.section.invars, positions, strict=True)
        )
        body = ChunkBody(self._chunk.of_width)
        size = lanes.axis.size
        self.loop = ChunkLoop(body, operand_kinds, (), size, lanes.batch_size, lanes.progress)
        self.of_only_chunk: list[Any] | None = None
        if lanes.are_one_chunk:
            self.of_only_chunk = body.function(size)(np.int32(0), *self.operands)
            types = list(map(jax.typeof, self.of_only_chunk))
        else:
            avals = list(map(jax.typeof, self.operands))
            types = self.loop.program(avals, self.loop.width).out_avals
        self.types = self.of_targets(types)

    @property
    def results(self) -> tuple[Any, ...]:
        return tuple(spec for specs in self.specs.values() for spec in specs)

    def of_targets(self, results: Iterable[Value]) -> dict[Target, list[Value]]:
        """Groups results by target: a reduced one may have several."""
        each = iter(results)
        return {t: [next(each) for _ in self.specs[t]] for t in self.targets}

    @property
    def shared(self) -> list[Target]:
        return [t for t, specs in self.specs.items() if specs == [None]]

    def of_first_lane(self) -> dict[Target, Found]:
        """Computes the targets, which all lanes share, from the first lane."""
        # A mask that cuts derivatives lets those of any lane through, so it needs all lanes.
        cuts = any(map(_cuts_derivatives.in_equation, self.section.eqns))
        width = self.loop.size if cuts else 1
        parts = [
            lax.slice_in_dim(x, 0, width, axis=spec.axis) if isinstance(spec, Lanes) else x
            for x, spec in zip(self.operands, self.loop.operands, strict=True)
        ]
        outs, *_ = self._chunk.interpret(width, jnp.int32(0), parts)
        return {t: Found(x, None) for t, x in zip(self.targets, outs, strict=True)}


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Runs one chunk. Holds no values, as cached programs keep it alive."""

    lanes: LanesToRun  # those that chunks are taken from
    section: Any
    positions: Positions  # batch axes of the operands
    targets: Sequence[Target]
    same: Sequence[Target] = ()  # unbatched targets that are returned for each lane
    # of each target, noted by tracing; None if unbatched
    specs: dict[Target, list[Any]] = field(default_factory=dict)
    # what a chunk adds to reduced targets, noted by tracing
    reduced: dict[Target, Partial] = field(default_factory=dict)

    def of_width(self, width: int) -> Callable[..., list[Value]]:
        def run(start: Value, *xs: Value) -> list[Value]:
            outs, positions, index, real = self.interpret(width, start, xs)
            outputs = zip(self.targets, outs, positions, strict=True)
            return [
                result
                for target, x, position in outputs
                for result in (
                    self._of_each(target, x, width)
                    if target in self.same
                    else self._results(target, x, position, index, real)
                )
            ]

        return run

    def interpret(
        self, width: int, start: Value, xs: Values
    ) -> tuple[list[Value], list[Position], Any, Any]:
        """Returns the targets for `width` lanes, and their batch axes.

        Also the lane indices if used, and a mask of real lanes, None if all are.
        """
        chunk = dict(size=width, name=None, mesh_axis=None, bodies=None)
        # In a loop, costs that recur at each step count more than those paid once.
        in_loop = self.lanes.axis.in_loop or LOOP_STEPS * (not self.lanes.are_one_chunk)
        axis = replace(self.lanes.axis, in_loop=in_loop, **chunk)
        values = [
            # The index is the first lane of all, plus the start of the chunk.
            x[0] + start + lax.iota(np.int32, width) if v is self.lanes.index else x
            for v, x in zip(self.section.invars, xs, strict=True)
        ]
        index = real = None
        if self.lanes.index in self.section.invars:
            place = self.section.invars.index(self.lanes.index)
            index = values[place]
            if self.lanes.repeated:
                # The second entry of the index is the end of the lanes that count.
                real = lax.lt(index, lax.broadcast(xs[place][1], (width,)))
        if self._is_one_example(values):
            return *self._of_one_example(values), index, real
        program = MappedProgram(axis, self.section, values, self.positions)
        added = [is_added(target.how) for target in self.targets]
        return *run_adding(program, added), index, real

    def _is_one_example(self, values: Values) -> bool:
        """Returns whether each chunk is one example that runs without an axis.

        Branches and loops are then not masked.
        """
        # Rules that are not batchax's and host callbacks expect an axis, and a derivative rule may
        # close over values of all lanes. Inside ``shard_map`` values may vary already.
        if self.lanes.batch_size != 1 or recording.is_on() or any(varying_of(values)):
            return False
        eqns = self.section.eqns
        looked_for = has_other_rule, may_call_python
        if any(a.in_equation(eqn) for a in looked_for for eqn in eqns):
            return False
        # Where a derivative rule makes lanes differ although the values do not, its rule knows.
        return not any(map(closed_over, eqns)) and not (
            any(map(_has_own_derivative.in_equation, eqns))
            and reached(self.section, self._mapped) != self._differ(self.section.outvars)
        )

    def _of_one_example(self, values: Values) -> tuple[list[Value], list[Position]]:
        """Runs the only lane of a chunk, and returns targets with their batch axes."""
        own = [
            x if a is None else lax.index_in_dim(x, 0, a, keepdims=False)
            for x, a in zip(values, self.positions, strict=True)
        ]
        section: Any = self.section
        outs = evaluate(section, section.consts, own, bind_equation)
        batched = self._differ(section.outvars)
        outs = [lax.broadcast(x, (1,)) if b else x for x, b in zip(outs, batched, strict=True)]
        return outs, [0 if b else None for b in batched]

    @property
    def _mapped(self) -> list[bool]:
        return [a is not None for a in self.positions]

    def _differ(self, vs: Sequence[Any]) -> list[bool]:
        differs = dict(zip(self.section.invars, self._mapped, strict=True))
        for _ in differing_through(self.section, differs):
            pass
        return list(differs_of(differs, vs))

    def _of_each(self, target: Target, x: Value, width: int) -> list[Value]:
        self.specs[target] = [Lanes(0)]
        return [lax.broadcast(x, (width,))]

    def _results(
        self,
        target: Target,
        x: Value,
        position: Position,
        index: Value | None,
        real: Value | None,
    ) -> list[Value]:
        """Returns what a chunk computes for one target, and notes its specs."""
        reduction = target.reduction
        if position is None:
            self.specs[target] = [None]
        elif reduction is not None:
            arrays, part = partial_result(reduction, x, position, index, real)
            self.specs[target], self.reduced[target] = part.specs, part
            return arrays
        else:
            self.specs[target] = [Lanes(target.how)]
            x = move_axis(x, position, target.how)
        return [x]


_cuts_derivatives = Anywhere(lambda eqn: eqn.primitive is safe_lanes_p)
_has_own_derivative = Anywhere(
    lambda eqn: eqn.primitive.name in ("custom_jvp_call", "custom_vjp_call")
)

_SMALL = 256  # bytes that a loop cut out may hold of each lane, however little the batch has


@dataclass(frozen=True, eq=False)
class Setting:
    """Holds what all stages of a program have in common."""

    axis: Axis  # of all lanes
    lanes: LanesToRun  # those that run here: all, or those of one shard
    keep: bool  # whether reverse mode saves what each chunk computed
    shards: Shards | None  # how lanes are sharded, if they are
    batch_bytes: int  # bytes of the arguments for each lane

    def knows(self, env: Env, v: Var | Literal) -> bool:
        """Returns whether the value of a variable is known.

        Each chunk computes its own lane index.
        """
        return isinstance(v, Literal) or (v in env and v is not self.lanes.index)


@dataclass(frozen=True, eq=False)
class Stage:
    """Plans what runs up to the first collectives, inclusive."""

    free: Sequence[Eqn]  # run in chunks
    cuts: Sequence[Eqn]  # collectives, and loops that lanes leave, which run for all lanes
    known: Collection[int]  # numbers of outputs that are in place without chunks
    wanted: Mapping[int, Target]  # outputs that chunks compute, by number
    # what cuts need of chunks, by equation id and variable
    collected: Mapping[tuple[int, Any], Target]
    kept: Sequence[Target]  # saved for later stages, which recompute the rest

    @property
    def inside(self) -> list[Target]:
        return [*self.collected.values(), *self.kept]

    @property
    def targets(self) -> list[Target]:
        return list(dict.fromkeys([*self.wanted.values(), *self.inside]))

    def left_of(self, eqns: Iterable[Eqn]) -> list[Eqn]:
        """Lists the equations for later stages. Those with effects do not run again."""
        done = {id(eqn) for eqn in (*self.cuts, *(e for e in self.free if e.effects))}
        return [eqn for eqn in eqns if id(eqn) not in done]


def plan_stage(
    setting: Setting, eqns: Sequence[Eqn], env: Env, outputs: Mapping[int, tuple[Any, OutputArray]]
) -> Stage:
    """Plans the next stage. `eqns` and `outputs` are those that are left."""
    cuts, blocked, free = find_cuts(setting.axis, eqns, _loops_to_cut(setting, eqns, env))
    at_hand, targets = [], {}
    for i, (v, output) in outputs.items():
        if isinstance(v, Literal) or v not in blocked:
            if _is_placed(setting, env, v, output):
                at_hand.append(i)
            else:
                targets[i] = Target(v, how_wanted(v, output.spec))
    collected = {
        (id(eqn), v): target
        for eqn in cuts
        for v in variables(eqn)
        if (target := _collected(setting, env, eqn, v)) is not None
    }
    kept = [Target(v, 0) for v in _kept(setting, eqns, free, cuts)]
    return Stage(free, cuts, at_hand, targets, collected, kept)


def _loops_to_cut(setting: Setting, eqns: Sequence[Eqn], env: Env) -> set[int]:
    """Returns the loops to run with lanes drawn from all chunks, as finished lanes leave."""
    divergence = setting.axis.divergence
    explicit = divergence is not None and divergence.explicit
    if not explicit or isinstance(setting.lanes.batch_size, Auto):
        return set()
    # What each lane holds is then kept for all lanes at once. If that is much more than the batch
    # itself, the loop stays in chunks, which are there to save memory.
    return divergent_loops(eqns, env, 2 * setting.batch_bytes + _SMALL)


def _is_placed(setting: Setting, env: Env, v: Var | Literal, output: OutputArray) -> bool:
    if not setting.knows(env, v):
        return False
    position = None if isinstance(v, Literal) else env[v][1]
    if position is None:
        return True
    if isinstance(output.spec, Reduce):
        return setting.shards is None
    return how_wanted(v, output.spec) == position


def _collected(setting: Setting, env: Env, eqn: Eqn, v: Var) -> Target | None:
    """Returns what a cut needs of each chunk for a variable that it reads."""
    # A sum over lanes is accumulated by the chunks; other cuts need the whole batch.
    streams = _streams(eqn)
    if setting.knows(env, v) and not (streams and setting.shards and env[v][1] is not None):
        return None
    return Target(v, _STREAMED[eqn.primitive.name] if streams else 0)


def _kept(
    setting: Setting, eqns: Sequence[Eqn], free: Sequence[Eqn], cuts: Sequence[Eqn]
) -> list[Any]:
    """Lists variables to save for the equations after the cuts, instead of recomputing them."""
    needed = crossing(eqns, free, cuts)
    # Save everything if it is no larger than the arguments.
    if bytes_per_lane(needed) <= setting.batch_bytes:
        return needed
    # What has effects is not recomputed: it would do its input or output twice.
    effects = [v for eqn in free if eqn.effects for v in eqn.outvars]
    read = {v for eqn in eqns for v in variables(eqn)}
    return [v for v in effects if v in read]


def how_wanted(v: Any, spec: Any) -> int | Reduce:
    return spec if isinstance(spec, Reduce) else _position_wanted(v, spec)


def _position_wanted(v: Any, spec: Any) -> int:
    return 0 if spec is None or spec is AUTO else int(spec) % (len(v.aval.shape) + 1)


def placed_at(v: Any, spec: Any, position: Position) -> Position:
    """Returns the batch axis of an output after it is placed."""
    if isinstance(spec, Reduce) or spec is None or (spec is AUTO and position is None):
        return None
    return _position_wanted(v, spec)


def _streams(eqn: Eqn) -> bool:
    """Returns whether a collective over the batch is a reduction that chunks accumulate."""
    params = eqn.params
    return (
        eqn.primitive.name in _STREAMED
        and not any(isinstance(a, int) for a in params["axes"])
        and params.get("axis_index_groups") is None
    )


_STREAMED = {
    name: how
    for names, how in zip(REDUCTIONS, map(Reduce, ("sum", "max", "min")), strict=True)
    for name in names.split()
}
