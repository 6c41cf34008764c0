"""A ``while`` of one example in the form that windows run, as a primitive.

It has one predicate for each lane. It is a primitive for one reason: batched once more, its lanes
and those of the outer axis become one set of lanes, which share one window. Were its operations
batched instead, each by its rule, outer lanes would be masked, and would wait for the slowest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, ClassVar

import jax
import numpy as np
from jax import dtypes, lax
from jax.core import eval_jaxpr
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.analysis.cost import bytes_of
from batchax.analysis.one_function import lower_for_kernel
from batchax.divergence.policy import (
    Alone,
    FewAlone,
    Flattened,
    LoopDecision,
    Masked,
    NestDecision,
    Probed,
    Tiles,
    Window,
)
from batchax.divergence.tiles import run_in_tiles
from batchax.divergence.varying import alike, with_varying_values
from batchax.divergence.windows import Tally, counted, run_in_windows, until_few_are_left
from batchax.execution.call import without_references
from batchax.execution.gathered_lanes import count_active
from batchax.execution.names import index_as_input
from batchax.execution.slices import entry_of, put_entry
from batchax.jaxprs.primitive_facts import as_decided
from batchax.jaxprs.types import Aval, ClosedJaxpr, Tree, Value, Values
from batchax.kernel import recording
from batchax.kernel.axis import (
    Axis,
    PlacedOutputs,
    Position,
    Positions,
    WhileLoop,
    match_axis,
    move_axis,
)
from batchax.kernel.inner import (
    batch_inner,
    inline_jaxpr,
    remembered,
    stage_function,
    while_loop,
)
from batchax.kernel.interpreter import interpret
from batchax.kernel.named_axes import Varying, any_uses_axis, types_varying, varying_of
from batchax.kernel.own_primitive import Of, own_primitive, with_values
from batchax.rules.loops import MaskedBody, predicate, run_masking
from batchax.rules.masking import select_lanes

VARIES_LESS = "a result would vary over more axes of the mesh than it does"
"""Why lanes wait for each other where `Waiting.varies_less`."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """A loop whose lanes wait for each other."""

    axis: Axis  # the axis of the lanes
    program: ClosedJaxpr  # that of the loop for one example
    # what it is given, and where that has the batch axis
    operands: Values
    positions: Positions

    @classmethod
    def of(cls, axis: Axis, loop: WhileLoop) -> Waiting:
        """Of a ``while``."""
        n_test, n_body = len(loop.test_consts), len(loop.body_consts)

        def run(*operands: Value) -> list[Value]:
            return while_p.bind(
                *operands,
                cond_nconsts=n_test,
                cond_jaxpr=loop.test,
                body_nconsts=n_body,
                body_jaxpr=loop.body,
            )

        types = [*loop.test.in_avals[:n_test], *loop.body.in_avals]
        stage = lambda: stage_function(axis, run, types)
        program = remembered(loop.body, ("while", loop.test, axis), stage)
        operands = [*loop.test_consts, *loop.body_consts, *loop.carry]
        return cls(axis, program, operands, [*loop.test_at, *loop.body_at, *[0] * len(loop.carry)])

    def results(self, which: Sequence[int]) -> PlacedOutputs:
        """These results, from what of the loop they need."""
        return self._run(which, self.operands) if which else ([], [])

    def varies_less(self, which: Sequence[int]) -> bool:
        """Whether one of these results varies over fewer axes of a mesh than some operand.

        Inside ``shard_map`` a count that starts from zero differs between devices once lanes have
        their counts, and so does what is computed from it: it would vary over all of them.
        """
        over = frozenset().union(*varying_of(self.operands))
        return bool(over) and any(varies != over for varies in self._varying(which))

    def _varying(self, which: Sequence[int]) -> Varying:
        types = tuple(map(jax.typeof, self.operands))
        key = "varying", self.axis, tuple(which), tuple(self.positions), types
        stage = lambda: _compat.stage(lambda *xs: self._run(which, xs)[0], types)
        return types_varying(remembered(self.program, key, stage).out_avals)

    def _run(self, which: Sequence[int], operands: Values) -> PlacedOutputs:
        program, axis = self._of(tuple(which)), replace(self.axis, divergence=None)
        with recording.paused(axis):
            return interpret(axis, program.jaxpr, program.consts, operands, self.positions)

    def _of(self, which: tuple[int, ...]) -> ClosedJaxpr:
        def run(*xs: Value) -> list[Value]:
            outs = eval_jaxpr(self.program.jaxpr, self.program.consts, *xs)
            return [outs[k] for k in which]

        def build() -> ClosedJaxpr:
            return _compat.without_dead(stage_function(self.axis, run, self.program.in_avals))

        return remembered(self.program, ("results", self.axis, which), build)


@_compat.held_weakly
@dataclass(frozen=True)
class DivergentLoop:
    """What a loop does that lanes leave one by one; equal to another that does the same."""

    # the axis of the lanes. It has no name: what asks for the index of a lane is given it.
    axis: Axis
    # the programs of one example, of the predicate and of a step
    test: ClosedJaxpr
    body: ClosedJaxpr
    n_test: int  # how many of the operands besides the carry are those of the predicate
    positions: tuple[Position, ...]  # where each operand besides the carry has the batch axis
    plan: LoopDecision | NestDecision  # how the lanes are run
    is_bounded: ClassVar[bool] = False

    @property
    def but_for_body(self) -> tuple[Any, ...]:
        """A key among loops of the same body, which it does not hold: that is a weak key."""
        return self.axis, self.test, self.n_test, self.positions, self.plan

    def replanned(self, lanes: int, positions: tuple[Position, ...]) -> LoopDecision | NestDecision:
        """How so many lanes are run, whose operands besides the carry have these positions."""
        chosen = isinstance(self.plan, Window) and self.plan.widths[0] != self.axis.size
        if chosen and self.axis.divergence.explicit:
            return self.plan
        differs = [a is not None for a in positions[self.n_test :]]
        differs += [True] * len(self.body.out_avals)
        inside = self.axis.divergence
        around = replace(inside, nesting=inside.nesting - 1)
        return around.plan(lanes, self.test, self.body, differs, self.is_bounded)

    def differentiated(self, program: ClosedJaxpr, operands: Values) -> list[Any]:
        """What derivatives are taken of: `program`, which `run` staged, or masked lanes.

        A compiler that makes one function of a program is not told to by what derives from it.
        """
        if self.in_kernel or isinstance(self.plan, FewAlone):
            return self.masked(*operands)
        run = functools.partial(eval_jaxpr, program.jaxpr, program.consts)
        alike = self.is_asked or isinstance(self.plan, Masked)
        return run(*operands) if alike else as_decided(run, self.masked, operands)

    def carrying(self, results: Sequence[bool]) -> tuple[DivergentLoop, list[bool], list[bool]]:
        """The loop that carries what these results depend on; its operands, and its results."""
        test, body, operands, live = _compat.reduced_while(self.test, self.body, results)
        positions = tuple(compress(self.positions, operands))
        n_test = sum(operands[: self.n_test])
        smaller = replace(self, test=test, body=body, n_test=n_test, positions=positions)
        return smaller, operands, live

    def run(self, *operands: Value) -> list[Any]:
        """The last carry, from the operands besides the carry and the first carry."""
        plan = self.plan
        if isinstance(plan, Masked):
            return self.masked(*operands)
        consts, carry = operands[: len(self.positions)], operands[len(self.positions) :]
        if isinstance(plan, Alone):
            return self._sequentially(consts, carry)
        active = self._test(self.axis, consts, carry)
        slots = [*carry, *self.more_slots()]
        # What no step changes is read and not put back: XLA copies all of an array to which what
        # was read of it is put back.
        same, n = self._unchanged, len(consts)
        changed = [k for k in range(len(slots)) if k not in same]

        def step(width: int, given: Values, active: Value, carry: Values, tally: Tally) -> Tree:
            own = with_values(with_values(slots, same, given[n:]), changed, carry)
            active, own, tally = self._step(width, given[:n], active, own, tally)
            return active, [own[k] for k in changed], tally

        given = [*consts, *(slots[k] for k in same)], (*self.positions, *[0] * len(same))
        given = *given, active, [slots[k] for k in changed]
        if isinstance(plan, FewAlone):
            own, _, *state = given
            active, left = until_few_are_left(plan, step, own, *state)
            return self._sequentially(consts, with_values(slots, changed, left), active)
        if isinstance(plan, Tiles):
            ended, tallies = run_in_tiles(plan, step, *given), []
        else:
            window = plan.window if isinstance(plan, Flattened) else plan
            assert isinstance(window, Window)
            ended, tallies = run_in_windows(window, step, *given)
        outs = with_values(slots, changed, ended)
        steps = self.axis.divergence.option.steps
        if steps is not None:
            steps.add(plan.widths, tallies)
        types = self.body.out_avals
        return [as_weak_as(t, x) for t, x in zip(types, outs[: len(types)], strict=True)]

    def _sequentially(
        self, consts: Values, carry: Values, active: jax.Array | None = None
    ) -> list[Any]:
        """As `run`, in a single kernel: each active lane takes all its steps, as one example does.

        Lanes wait for no other lane, and none is moved. A lane that is done takes no step, and if
        it is known beforehand, it is not even looked at.
        """
        test, body = lower_for_kernel(self.test), lower_for_kernel(self.body)
        params = dict(cond_nconsts=self.n_test, cond_jaxpr=test, body_jaxpr=body)
        params["body_nconsts"] = len(consts) - self.n_test
        same, n = self._unchanged, len(consts)
        changed = [k for k in range(len(carry)) if k not in same]

        def run(end: Value, *operands: Value) -> list[Any]:
            def lane(i: jax.Array, state: Values) -> list[Any]:
                both = zip(operands, self.positions, strict=False)
                own = [x if a is None else entry_of(x, i, a) for x, a in both]
                every = with_values(list(operands[n : n + len(carry)]), changed, state)
                last = while_p.bind(*own, *(entry_of(x, i, 0) for x in every), **params)
                return [put_entry(x, last[k], i) for x, k in zip(state, changed, strict=True)]

            def first_from(i: jax.Array) -> jax.Array:
                if active is None:
                    return i
                done = lambda i: lax.bitwise_not(entry_of(operands[-1], i, 0))
                passed = lambda i: lax.bitwise_and(lax.lt(i, end), done(i))
                return while_loop(passed, lambda i: lax.add(i, np.int32(1)), i)

            once = lambda state: (first_from(lax.add(state[0], np.int32(1))), lane(*state))
            start = alike((np.int32(0), [operands[n + k] for k in changed]), operands)
            start = first_from(start[0]), start[1]
            return while_loop(lambda state: lax.lt(state[0], end), once, start)[1]

        operands = [np.int32(self.axis.size), *consts, *carry]
        operands += [] if active is None else [active]
        operands = _compat.varying_alike(operands, like=operands)
        types = [jax.typeof(operands[1 + n + k]) for k in changed]
        ended = _compat.single_kernel(run, types, operands)
        outs = with_values(list(carry), changed, ended)
        return [as_weak_as(t, x) for t, x in zip(self.body.out_avals, outs, strict=True)]

    @property
    def _unchanged(self) -> list[int]:
        """Which carries the body returns as they are, as the bound of a ``fori_loop``."""
        jaxpr, n = self.body.jaxpr, len(self.body.out_avals)
        pairs = zip(jaxpr.invars[len(jaxpr.invars) - n :], jaxpr.outvars, strict=True)
        return [k for k, (x, y) in enumerate(pairs) if x is y]

    def more_slots(self) -> list[Any]:
        """What all lanes hold at first besides what the loop of one example carries."""
        return []

    def masked(self, *operands: Value) -> list[Any]:
        """As `run`, with lanes that are masked until all are done."""
        consts, carry = operands[: len(self.positions)], operands[len(self.positions) :]
        test_at, body_at = self.positions[: self.n_test], self.positions[self.n_test :]
        body = MaskedBody.of(self.axis, self.test, self.body, body_at, may_move=True)
        consts = (consts[: self.n_test], test_at, consts[self.n_test :], body_at)
        return run_masking(body, WhileLoop(self.test, self.body, *consts, list(carry)))

    def _step(
        self,
        width: int,
        consts: Values,
        active: jax.Array,
        carry: Values,
        tally: Tally,
    ) -> tuple[Any, list[Any], Tally]:
        """One step of the lanes that are active; the others keep what they hold."""
        if tally:
            tally = counted(tally, count_active(active))
        axis, test, body = replace(self.axis, size=width), self.test, self.body
        if self.in_kernel:
            # No lanes are gathered there, nor put back to several places.
            axis = replace(axis, divergence=None)
            test, body = lower_for_kernel(test), lower_for_kernel(body)
        body = MaskedBody.of(axis, test, body, self.positions[self.n_test :])
        carry = body.step(active, consts[self.n_test :], carry)
        return lax.bitwise_and(active, self._test(axis, consts, carry)), carry, tally

    def _test(self, axis: Axis, consts: Values, carry: Values) -> Value:
        positions = [*self.positions[: self.n_test], *[0] * len(carry)]
        test = lower_for_kernel(self.test) if self.in_kernel else self.test
        return predicate(axis, test, [*consts[: self.n_test], *carry], positions)

    @property
    def is_asked(self) -> bool:
        """Whether lanes run as the user asks, on any platform, and not as was measured on one."""
        return self.axis.divergence.explicit and not isinstance(self.plan, Alone | Probed)

    @property
    def in_kernel(self) -> bool:
        """Whether all steps are in a single kernel."""
        return isinstance(self.plan, Tiles | Alone)


def as_weak_as(aval: Aval, x: Value) -> Value:
    """`x`, as weakly typed as `aval`: a loop may be given what is more so than its results."""
    if jax.typeof(x).weak_type == aval.weak_type:
        return x
    return _compat.weakly(x) if aval.weak_type else lax.convert_element_type(x, x.dtype)


def divergent_loop(
    axis: Axis, loop: WhileLoop, plan: LoopDecision
) -> tuple[DivergentLoop, list[Any]]:
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
        DivergentLoop(inside, loop.test, loop.body, len(loop.test_consts), positions, plan),
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

    def goes_on(active: Value, *_: Value) -> list[Any]:
        return [active.any()]

    def once(*operands: Value) -> list[Any]:
        test_consts, operands = operands[:n_test], operands[n_test:]
        body_consts, (active, *carry) = operands[:n_body], operands[n_body:]
        new = eval_jaxpr(loop.body.jaxpr, loop.body.consts, *body_consts, *carry)
        carry = [select_lanes(active, 0, x, old) for x, old in zip(new, carry, strict=True)]
        (more,) = eval_jaxpr(loop.test.jaxpr, loop.test.consts, *test_consts, *carry)
        return [active & more, *carry]

    def build() -> tuple[ClosedJaxpr, ClosedJaxpr]:
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


# To be one set, lanes of one axis that share an operand get copies of it. These may take so many
# times the bytes of what the lanes carry.
_MOST_REPEATED = 4


def bind(loop: DivergentLoop, operands: Values) -> list[Any]:
    """Runs the loop; it may be batched, and differentiated in forward mode."""
    program = _staged(loop, tuple(map(jax.typeof, operands)))
    return divergent_loop_p.bind(*operands, loop=loop, program=program)


def _staged(loop: DivergentLoop, types: tuple[Aval, ...]) -> ClosedJaxpr:
    stage = lambda: _compat.stage(loop.run, types)
    return remembered(loop.body, (loop.but_for_body, types), stage)


_WIDE = frozenset(map(np.dtype, ("int64", "uint64", "float64", "complex128")))


def _without_unread(results: Sequence[bool], params: dict[str, Any]) -> _compat.Reduced | None:
    """The loop without what nothing reads: it is not moved, nor written for each lane."""
    program = params["program"]

    def build() -> _compat.Reduced | None:
        loop, operands, live = params["loop"].carrying(results)
        if all(live):
            return None
        types = tuple(compress(program.in_avals, operands))
        smaller = _staged(loop, types)
        # Else it was traced with other settings than those of here.
        alike = smaller.out_avals == list(compress(program.out_avals, live))
        given = {"loop": loop, "program": smaller}
        return _compat.Reduced(operands, live, given) if alike else None

    # What is staged here is of no mesh, and of 64 bits only if these are on here.
    types = program.in_avals + program.out_avals
    narrow = dtypes.canonicalize_dtype(np.float64) != np.float64
    wide = narrow and any(t.dtype in _WIDE for t in types)
    if type(params["loop"]) is not DivergentLoop or wide or any(types_varying(types)):
        return None
    return remembered(program, ("read", tuple(results)), build)


def _compiled(*operands: Value, loop: DivergentLoop, program: ClosedJaxpr) -> list[Any]:
    compiled = remembered(program, "compiled", lambda: jax.jit(_function(program)))
    return compiled(*operands)


def _function(program: ClosedJaxpr) -> Callable[..., list[Value]]:
    # What is returned is remembered under `program` as a weak key, and must not hold it alive.
    jaxpr, consts = program.jaxpr, program.consts
    return lambda *operands: eval_jaxpr(jaxpr, consts, *operands)


def _elsewhere(*, loop: DivergentLoop, program: ClosedJaxpr) -> Callable[..., list[Any]] | None:
    """What runs where another platform is exported for: masked lanes, unless the user asked."""
    return None if loop.is_asked else loop.masked


def _batched(
    axis: Axis, args: Values, axes: Positions, /, *, loop: DivergentLoop, program: ClosedJaxpr
) -> tuple[list[Any], Positions]:
    merged = _merged(axis, loop, args, axes)
    if merged is None:
        # In a window lanes of the outer axis would wait, and a kernel is made of its lanes alone.
        if not loop.is_asked:
            types = tuple(program.in_avals)
            key = (*loop.but_for_body, types, "batched", axis.name, axis.size)

            def stage() -> ClosedJaxpr:
                with _compat.named_scope(axis.name, axis.size):
                    return _compat.stage(loop.masked, types)

            program = remembered(loop.body, key, stage)
        batched, out_axes = batch_inner(axis, program, axes)
        return inline_jaxpr(batched, args), out_axes
    both = (axis.size, loop.axis.size)
    outs = bind(*merged)
    return [lax.reshape(x, (*both, *x.shape[1:])) for x in outs], [0] * len(outs)


def _merged(
    axis: Axis, loop: DivergentLoop, args: Values, axes: Positions
) -> tuple[DivergentLoop, list[Any]] | None:
    """The loop of the lanes of both axes; None where it cannot be, or would copy too much."""
    together = isinstance(axis.size, int) and axis.mesh_axis is None and axis.spmd_name is None
    if not together or any_uses_axis(axis, loop.test, loop.body):
        return None
    count = len(loop.positions)
    lanes = axis.size * loop.axis.size

    def flat(x: Value, outer: Position, inner: Position) -> Value:
        """All lanes of `x` in a row, inner ones together."""
        if inner is not None:
            inner += outer is not None and outer <= inner
            outer = outer if outer is None else outer + (outer < inner)
            x = match_axis(axis, move_axis(x, inner, 0), outer, 0)
        else:
            x = match_axis(axis, x, outer, 0)
            x = match_axis(loop.axis, x, None, 1)
        return lax.reshape(x, (lanes, *x.shape[2:]))

    carry = [flat(x, a, 0) for x, a in zip(args[count:], axes[count:], strict=True)]
    consts = list(zip(args[:count], axes[:count], loop.positions, strict=True))
    repeated = sum(
        bytes_of([jax.typeof(x)]) * (loop.axis.size if inner is None else axis.size)
        for x, outer, inner in consts
        if (outer is None) != (inner is None)
    )
    if repeated > _MOST_REPEATED * bytes_of(map(jax.typeof, carry)):
        return None
    same = [outer is None and inner is None for _, outer, inner in consts]
    operands = [
        x if s else flat(x, outer, inner) for s, (x, outer, inner) in zip(same, consts, strict=True)
    ]
    plan = loop.replanned(lanes, loop.positions)
    wide = replace(loop.axis, size=lanes)
    positions = tuple(None if s else 0 for s in same)
    return replace(loop, axis=wide, positions=positions, plan=plan), [*operands, *carry]


divergent_loop_p = own_primitive(
    "divergent_loop",
    called="while",
    operations=lambda *operands, loop, program: inline_jaxpr(program, operands),
    compute=_compiled,
    elsewhere=_elsewhere,
    # Moving lanes reads and writes out of bounds by design, so `checkify` sees masked lanes.
    checked=lambda *operands, loop, program: loop.masked(*operands),
    types=lambda *avals, loop, program: list(program.out_avals),
    programs=("program",),
    facts="control",
    rule=_batched,
    jvp=Of(lambda *operands, loop, program: loop.differentiated(program, operands)),
)
_compat.register_unread_results(divergent_loop_p, _without_unread)
