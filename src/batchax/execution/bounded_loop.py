"""The bounded loop, which ends on a value after at most a known number of steps.

``lax.while_loop`` has no derivative in reverse mode, because the memory it would need has no bound.
If the number of steps has a bound, about the square root of that many carries is enough
(`Checkpoints`): a loop that is differentiated records them as it runs.

The loop is one primitive, because its derivatives can then be differentiated and batched again,
and cost only the steps that ran. In forward mode the derivative is a bounded loop again; in reverse
mode it is a sweep back over the steps, a primitive, too. Both run a known number of steps, so such
a loop takes `count` steps.

Checkpoints are those of online binomial checkpointing. A sweep needs the carry before each step,
from the last step to the first. A few are saved, and the others are recomputed from the last one
before them. While the loop runs the number of its steps is unknown, so the set of saved carries
changes as it goes on (Stumm and Walther, "New algorithms for optimal online checkpointing", 2010).

Slots are filled in rounds. In the first the carries after 0, 1, ... steps go into all c slots, one
after another; in the second into those from the second slot on, and so on. So the first slot holds
its carry of the first round, the second that of the second, and between those at most
c - 1, c - 2, ... carries are missing. On the way back there is space for them, since later carries
are no longer needed. No step is recomputed more than once, and of n steps only n + 1 - c are, the
fewest possible. That holds for fewer than ``c * (c + 1) / 2`` steps, hence ``sqrt(2 * length)``
slots.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import mapped_aval, unmapped_aval

from batchax import _compat
from batchax.execution.progress import Steps
from batchax.execution.slices import entry_of, put_entry
from batchax.jaxprs.types import Aval, ClosedJaxpr, Tree, Value, Values
from batchax.kernel.axis import Axis, PlacedOutputs, WhileLoop, match_axis
from batchax.kernel.inner import inline_jaxpr, remembered
from batchax.kernel.own_primitive import declare, with_values


class Operands(NamedTuple):
    """Groups the operands of a loop or sweep, or facts about each, such as batch axes."""

    count: Any  # steps to take; of a loop, at most
    test: list[Any]  # constants of the predicate; empty for a sweep
    consts: list[Value]  # the same at each step
    carry: list[Value]  # the first carry
    checkpoints: list[Any]  # of a sweep: those that the loop recorded, see `Results`
    returning: list[Any]  # of a sweep: what is carried back, after the last step
    xs: list[Value]  # arrays with an entry for each step

    @property
    def flat(self) -> list[Value]:
        count, *groups = self
        return [count, *itertools.chain(*groups)]


def _split(operands: Values, *sizes: int) -> Operands:
    rest = iter(operands)
    groups = (list(itertools.islice(rest, n)) for n in sizes)
    return Operands._make([next(rest), *groups, list(rest)])


class Results(NamedTuple):
    carry: list[Value]  # after the last step
    ys: list[Value]  # stacked; zeros for steps that were not taken
    # If recorded: the number of steps before each, `UNUSED` for free slots, then the carries,
    # stacked.
    checkpoints: list[Any]
    steps: Any  # the number of steps taken


@dataclass(frozen=True)
class LoopSignature:
    n_test: int  # number of constants of the predicate
    n_consts: int  # number of constants of the body
    n_carry: int  # number of values in the carry
    steps: Steps  # the bound, and progress
    x_axes: tuple[int, ...]  # the axis of the steps in each of the xs
    y_axes: tuple[int, ...]  # the axis of the steps in each of the ys
    kept: tuple[int, ...] | None  # values of the carry in checkpoints; None: none recorded
    # Whether a derivative recomputes all carries: the loop then need not record checkpoints.
    again: bool = False

    @property
    def n_results(self) -> int:
        n_kept = 0 if self.kept is None else 1 + len(self.kept)
        return self.n_carry + len(self.y_axes) + n_kept + 1

    def split(self, operands: Values) -> Operands:
        return _split(operands, self.n_test, self.n_consts, self.n_carry, 0, 0)

    def results(self, outs: Values) -> Results:
        a = self.n_carry
        b = a + len(self.y_axes)
        return Results(list(outs[:a]), list(outs[a:b]), list(outs[b:-1]), outs[-1])


@dataclass(frozen=True)
class SweepSignature:
    n_consts: int  # number of constants of both programs
    n_carry: int  # number of values in the carry of the loop
    kept: tuple[int, ...]  # values of the carry in checkpoints; the sweep needs no others
    n_back: int  # number of values that are carried back
    steps: Steps  # the bound, and progress
    x_axes: tuple[int, ...]  # the axis of the steps in each of the xs
    y_axes: tuple[int | None, ...]  # the axis of the steps in each of the ys; None: they are summed

    @property
    def n_results(self) -> int:
        return self.n_back + len(self.y_axes)

    def split(self, operands: Values) -> Operands:
        sizes = self.n_consts, self.n_carry, 1 + len(self.kept), self.n_back
        return _split(operands, 0, *sizes)


UNUSED = np.iinfo(np.int32).max
"""The number of the step in a place where no carry is kept."""

_ONE = np.int32(1)


def n_checkpoints(length: int) -> int:
    """Returns the least c with ``c * (c + 1) / 2 > length``."""
    # Round k fills slots k to c - 1, so all rounds cover c (c + 1) / 2 steps, and the sweep then
    # recomputes no step twice (Stumm and Walther, 2010).
    return (math.isqrt(8 * length + 8) + 1) // 2


def blank_checkpoints(checkpoints: Sequence[Any]) -> list[Value]:
    numbers, *carries = checkpoints
    return [lax.full_like(numbers, UNUSED), *carries]


class Round(NamedTuple):
    """Assigns carries of a running loop to slots in rounds.

    Round k fills the slots from k to the last. `both` holds the step of its first carry, and its
    lowest slot, which is k.
    """

    # One array, not two numbers: XLA removes an unused array from a loop, but not two numbers that
    # depend on each other.
    both: Any

    @property
    def start(self) -> Value:
        """Returns the number of steps before the first carry of the round."""
        return self.both[0]

    @property
    def lowest(self) -> Value:
        return self.both[1]

    def place_of(self, number: Value) -> Value:
        """Returns the slot of the carry after so many steps."""
        return number - self.start + self.lowest

    def at(self, number: Value, count: int) -> Round:
        """Returns the round of the carry after `number` steps. The carry before is in this one."""
        full = self.place_of(number) == np.int32(count)
        following = jnp.stack([number, self.lowest + _ONE])
        return Round(jnp.where(full, following, self.both))

    def numbers(self, last: Value, count: int) -> Value:
        """Returns the number of steps before the carry in each slot, after `last` steps."""
        i = jnp.arange(count, dtype=np.int32)
        # Slots below `lowest` keep the first carry of an earlier round: round i starts after i
        # count - i (i - 1) / 2 steps.
        firsts = i * np.int32(count) - i * (i - _ONE) // np.int32(2)  # of all rounds
        before = self.lowest - _ONE
        shift = self.start - (np.int32(count) - before) - before  # of the round before this one
        older = jnp.where(self.lowest > 0, i + shift, np.int32(UNUSED))
        newer = i + self.start - self.lowest
        # Slots above the current one still hold carries of the previous round.
        numbers = jnp.where(i <= self.place_of(last), newer, older)
        return jnp.where(i < self.lowest, firsts, numbers)


class Stack(NamedTuple):
    """Holds checkpoints in a sweep, in order of their steps, the latest on top."""

    numbers: Any  # steps before each, in the order of the stack
    order: Any  # the slot of each
    places: list[Any]  # the carries, stacked by slot
    height: Any  # how many there are; slots from here on are free

    @classmethod
    def of(cls, checkpoints: Sequence[Any], first: Sequence[Any], count: Value) -> Stack:
        """Builds the stack of the checkpoints before step `count`; `first` is the first carry."""
        numbers, *places = checkpoints
        zero, order = np.int32(0), lax.iota(np.int32, numbers.shape[0])
        numbers = put_entry(numbers, zero, zero, 0)
        places = [put_entry(x, y, zero, 0) for x, y in zip(places, first, strict=True)]
        numbers, order = lax.sort(_compat.varying_alike([numbers, order]), num_keys=1)
        height = jnp.sum(numbers < count, dtype=np.int32)
        # The carry before the last step is always recorded (`Round`).
        # A loop that recorded fewer steps may leave no slot free for the others. Then only the
        # first carry is used: with all other slots free, any number of steps fits.
        latest = jnp.max(jnp.where(numbers == UNUSED, zero, numbers))
        height = lax.select(latest < count - _ONE, _ONE, lax.max(height, _ONE))
        return cls(numbers, order, places, height)

    @property
    def last(self) -> Value:
        return entry_of(self.numbers, self.height - _ONE, 0)

    def carry_at(self, below: Value) -> list[Value]:
        """Returns the carry so many entries below the top."""
        place = entry_of(self.order, self.height - _ONE - below, 0)
        return [entry_of(x, place, 0) for x in self.places]

    def leg(self, number: Value) -> tuple[Any, Callable[[Any], Any], Stack]:
        """Plans the leg from the carry on top to the one after `number` steps, or part of the way.

        Returns where it ends, the slot of each carry on the way by its step, and the stack with
        those carries, whose slots are to be filled.
        """
        here = self.last
        distance, free = number - here, np.int32(len(self.order)) - self.height
        # If all carries fit into the free slots, they are kept. Otherwise a single one is, as far
        # ahead as the rest before it will fit later; others take its slot until then.
        all_fit = distance <= free
        end = jnp.where(all_fit, number, here + lax.min(distance - free, free) + _ONE)
        first = jnp.where(all_fit, here + _ONE, end)
        height = self.height + end - first + _ONE

        def place_of(number: Value) -> Value:
            return entry_of(self.order, self.height + lax.max(number - first, np.int32(0)), 0)

        i = jnp.arange(len(self.order), dtype=np.int32)
        added = (i >= self.height) & (i < height)
        numbers = jnp.where(added, i - self.height + first, self.numbers)
        return end, place_of, self._replace(numbers=numbers, height=height)

    def run(self, number: Value) -> Value:
        """Counts the carries on top after `number` steps, one less, and so on without a gap."""
        i = jnp.arange(len(self.order), dtype=np.int32)
        # In a run without gaps, the number minus the position in the stack is constant.
        in_run = (i < self.height) & (self.numbers - i == number - self.height + _ONE)
        return jnp.sum(in_run, dtype=np.int32)


LoopStep = Callable[[Values, Values, Values], tuple[Values, Values]]
"""A function of constants, the carry and entries of the xs, to the carry and the ys."""


bounded_loop_p = declare("bounded_loop")


def bounded_loop(
    body: LoopStep,
    consts: Values,
    carry: Values,
    xs: Values = (),
    *,
    test: Callable[[Values, Values], Any] | None = None,
    test_consts: Values = (),
    guarded: LoopStep | None = None,
    count: Value,
    steps: Steps,
    x_axes: Sequence[int] = (),
    y_axes: Sequence[int] = (),
    kept: Sequence[int] | None = None,
    again: bool = False,
) -> Results:
    """Runs a bounded loop, which can be differentiated and batched.

    `test` is the predicate, of `test_consts` and the carry; None: always true. It takes at most
    `count` steps. `guarded` computes what `body` does and is differentiated in its place: a batched
    loop replaces operands of masked lanes there. `kept` lists values of the carry to checkpoint,
    None for no checkpoints, and `again` has derivatives recompute all carries.
    """
    (staged, safe), tested, carry, xs = settle(
        body, guarded, consts, carry, xs, x_axes, count, test, test_consts
    )
    # Traced constants become operands, so that the primitive is differentiated by them.
    (staged, safe), held = _compat.hoist_constants(staged, safe)
    test_held: list[Any] = []
    if tested is not None:
        (tested,), test_held = _compat.hoist_constants(tested)
    test_consts, consts = [*test_held, *test_consts], [*held, *consts]
    sizes = len(test_consts), len(consts), len(carry), steps
    kept = None if kept is None else tuple(kept)
    form = LoopSignature(*sizes, tuple(x_axes), tuple(y_axes), kept, again)
    operands = [count, *test_consts, *consts, *carry, *xs]
    outs = bounded_loop_p.bind(*operands, test=tested, body=staged, guarded=safe, form=form)
    return form.results(outs)


def settle(
    body: LoopStep,
    guarded: LoopStep | None,
    consts: Values,
    carry: Values,
    xs: Values,
    x_axes: Sequence[int],
    count: Value,
    test: Callable[[Values, Values], Any] | None = None,
    test_consts: Values = (),
    first_entries: Sequence[Any] = (),
) -> tuple[tuple[Any, Any], Any, list[Value], list[Value]]:
    """Traces a step, a guarded step, and the predicate; with the first carry and the xs.

    `first_entries` are types of entries in front of those of the xs.
    """
    const_types = list(map(jax.typeof, consts))
    test_const_types = list(map(jax.typeof, test_consts))
    n, n_test = len(const_types), len(test_const_types)
    carry, xs = list(carry), list(xs)
    deciding = [jax.typeof(count)]
    # Inside ``shard_map`` a carry must have the same type before and after a step. The first carry
    # is cast to vary over the mesh axes that a step adds, until none is added. Carry, xs, and ys
    # also vary over those of the number of steps and the predicate.
    while True:
        types = list(map(jax.typeof, carry))
        tested = None
        if test is not None:
            predicate = lambda *xs: [test(xs[:n_test], xs[n_test:])]
            tested = _compat.stage(predicate, [*test_const_types, *types])
            deciding = [jax.typeof(count), tested.out_avals[0]]
        xs = [varied(x, deciding) for x in xs]
        whole = zip(map(jax.typeof, xs), x_axes, strict=True)
        entries = [*first_entries, *(mapped_aval(aval.shape[a], a, aval) for aval, a in whole)]

        def staged(step: LoopStep, types: Sequence[Aval] = types) -> ClosedJaxpr:
            def run(*xs: Value) -> list[Value]:
                rest = xs[n + len(types) :]
                new, ys = step(xs[:n], xs[n : n + len(types)], rest)
                new = [varied(x, [t]) for x, t in zip(new, types, strict=True)]
                return [*new, *(varied(y, deciding) for y in ys)]

            return _compat.stage(run, [*const_types, *types, *entries])

        plain = staged(body)
        kept = plain if guarded is None else staged(guarded)
        cast = [
            varied(x, [a, b, *deciding])
            for x, a, b in zip(carry, plain.out_avals, kept.out_avals, strict=False)
        ]
        if all(new is old for new, old in zip(cast, carry, strict=True)):
            return (plain, kept), tested, carry, xs
        carry = cast


def varied(x: Value, like: Sequence[Any]) -> Value:
    return functools.reduce(_compat.varying_as, like, x)


def run_loop(
    *operands: Value,
    test: ClosedJaxpr | None,
    body: ClosedJaxpr,
    guarded: ClosedJaxpr,
    form: LoopSignature,
) -> list[Value]:
    count, test_consts, consts, carry, _, _, xs = form.split(operands)
    avals = loop_types(test, body, form, jax.typeof(count))
    *blank, n = map(zeros, avals[form.n_carry :])
    ys, kept = blank[: len(form.y_axes)], blank[len(form.y_axes) :]
    most = form.steps.most
    # With a bound of zero there is no entry of the xs to read.
    if most == 0:
        form.steps.end(n, results=carry)
        kept = blank_checkpoints(kept) if kept else []
        return list(map(_typed, [*carry, *ys, *kept, n], avals))
    total = None if test is not None else count
    count, places = lax.min(count, np.int32(most)), n_checkpoints(most)

    def going_on(state: Tree) -> Value:
        n, carry, *_ = state
        if test is None:
            return n < count
        return (n < count) & inline_jaxpr(test, [*test_consts, *carry])[0]

    def step(state: Tree) -> Tree:
        n, carry, ys, now, kept = state
        form.steps.begin(n, total)
        # Step n reads entry n of the xs and writes entry n of the ys.
        x = [entry_of(x, n, a) for x, a in zip(xs, form.x_axes, strict=True)]
        outs = inline_jaxpr(body, [*consts, *carry, *x])
        new, entries = outs[: form.n_carry], outs[form.n_carry :]
        ys = [put_entry(y, e, n, a) for y, e, a in zip(ys, entries, form.y_axes, strict=True)]
        n = n + np.int32(1)
        if form.kept is not None:
            now = now.at(n, places)
            # Random keys may be used again by the sweep, which `unconsumed` allows.
            pairs = zip(kept, (_compat.unconsumed(new[i]) for i in form.kept), strict=True)
            kept = [put_entry(all_, x, now.place_of(n), 0) for all_, x in pairs]
        return n, new, ys, now, kept

    # XLA removes unused checkpoints, as in forward mode.
    first = None if form.kept is None else Round(jnp.stack([n, n]))
    n, carry, ys, last, arrays = lax.while_loop(going_on, step, (n, carry, ys, first, kept[1:]))
    form.steps.end(n, total, carry)
    kept = [] if last is None else [last.numbers(n, places), *arrays]
    return list(map(_typed, [*carry, *ys, *kept, n], avals))


def zeros(aval: Aval) -> Value:
    """Returns zeros of this type, with its sharding and varying mesh axes."""
    return varied(_compat.filled(aval, 0), [aval])


def _typed(x: Value, aval: Aval) -> Value:
    return _compat.weakly(x) if aval.weak_type and not jax.typeof(x).weak_type else x


def loop_types(
    test: ClosedJaxpr | None, body: ClosedJaxpr, form: LoopSignature, count: Aval
) -> list[Aval]:
    """Returns result types: last carry, ys, checkpoints if recorded, and the number of steps."""
    outs = body.out_avals
    ys = [
        unmapped_aval(form.steps.most, a, aval)
        for a, aval in zip(form.y_axes, outs[form.n_carry :], strict=True)
    ]
    carry = body.in_avals[form.n_consts : form.n_consts + form.n_carry]
    # The number of steps varies over the mesh axes of what decides it.
    decided = count if test is None else test.out_avals[0]
    steps = _compat.scalar_like(decided, np.dtype(np.int32))
    return [*outs[: form.n_carry], *ys, *checkpoint_types(steps, carry, form), steps]


def no_checkpoints(body: ClosedJaxpr, form: LoopSignature | SweepSignature) -> list[Value]:
    """Returns empty checkpoints of one example, so that a sweep makes its own."""
    carry = body.in_avals[form.n_consts : form.n_consts + form.n_carry]
    types = checkpoint_types(jax.typeof(np.int32(0)), carry, form)
    return blank_checkpoints(list(map(zeros, types)))


def checkpoint_types(
    steps: Aval, carry: Values, form: LoopSignature | SweepSignature
) -> list[Aval]:
    if form.kept is None:
        return []
    size, kept = n_checkpoints(form.steps.most), (carry[i] for i in form.kept)
    return [unmapped_aval(size, 0, aval.strip_weak_type()) for aval in (steps, *kept)]


reverse_sweep_p = declare("reverse_sweep")


def reverse_sweep(
    forward: LoopStep,
    back: LoopStep,
    consts: Values,
    carry: Values,
    checkpoints: Values | None,
    returning: Values,
    xs: Values,
    *,
    kept: Sequence[int] | None = None,
    guarded: tuple[LoopStep | None, LoopStep | None] = (None, None),
    count: Value,
    steps: Steps,
    x_axes: Sequence[int],
    y_axes: Sequence[int | None],
) -> tuple[list[Value], list[Value]]:
    """Runs a sweep back over the steps of a bounded loop; can be differentiated and batched.

    `forward` is a step without ys. `back` maps the carry back (`returning`) over a step, whose
    carry before it and xs are its entries, and is linear in `returning` and some xs. `checkpoints`
    are from a loop of at least as many steps, or None. `kept` lists the values of the carry in
    them, None for all; others must not matter to `back`. A y whose axis is None is summed over the
    steps. Returns what is carried back before the first step, and the ys.
    """
    # Settle mesh types of the forward step first, as its carry is an entry of the reverse step.
    programs, _, carry, xs = settle(forward, guarded[0], consts, carry, xs, x_axes, count)
    types = [jax.typeof(x).strip_weak_type() for x in carry]
    more, _, returning, _ = settle(
        back, guarded[1], consts, returning, xs, x_axes, count, first_entries=types
    )
    programs, held = _compat.hoist_constants(*programs, *more)
    sizes = len(held) + len(consts), len(carry), tuple(range(len(carry)) if kept is None else kept)
    form = SweepSignature(*sizes, len(returning), steps, tuple(x_axes), tuple(y_axes))
    number = _compat.scalar_like(jax.typeof(count), np.dtype(np.int32))
    types = checkpoint_types(number, types, form)
    if checkpoints is None:
        checkpoints = blank_checkpoints(list(map(zeros, types)))
    checkpoints = [varied(x, [aval]) for x, aval in zip(checkpoints, types, strict=True)]
    outs = reverse_sweep_p.bind(
        *(count, *held, *consts, *carry, *checkpoints, *returning, *xs),
        forward=programs[0],
        back=programs[2],
        guarded=(programs[1], programs[3]),
        form=form,
    )
    return outs[: len(returning)], outs[len(returning) :]


def run_sweep(
    *operands: Value,
    forward: ClosedJaxpr,
    back: ClosedJaxpr,
    guarded: Sequence[ClosedJaxpr],
    form: SweepSignature,
) -> list[Value]:
    count, _, consts, carry, checkpoints, returning, xs = form.split(operands)
    ys = list(map(zeros, sweep_types(back, form)[form.n_back :]))
    if form.steps.most == 0:
        return [*returning, *ys]
    one = np.int32(1)
    count = lax.clamp(np.int32(0), count, np.int32(form.steps.most))

    def entries(t: Value) -> list[Value]:
        return [entry_of(x, t, a) for x, a in zip(xs, form.x_axes, strict=True)]

    def whole(kept: Values) -> list[Value]:
        """Fills in the values of the carry that checkpoints lack; they are not read."""
        return list(map(_compat.unconsumed, with_values(carry, form.kept, kept)))

    def ahead(stack: Stack, t: Value) -> Stack:
        """Puts the carry before step `t` on top of the stack, or one on the way."""
        end, place_of, longer = stack.leg(t)

        def step(state: Tree) -> Tree:
            n, kept, places = state
            new = inline_jaxpr(forward, [*consts, *whole(kept), *entries(n)])
            new = [_compat.unconsumed(new[i]) for i in form.kept]  # keys are used again
            place = place_of(n + one)
            places = [put_entry(p, x, place, 0) for p, x in zip(places, new, strict=True)]
            return n + one, new, places

        first = stack.last, stack.carry_at(np.int32(0)), stack.places
        *_, places = lax.while_loop(lambda s: s[0] < end, step, first)
        return longer._replace(places=places)

    # Invariants at the start of a turn, which goes back over step `t` and maybe some before it:
    # - `returning` and `ys` are the derivative of all steps after `t`.
    # - The stack holds carries before steps up to `t`, each once, in order, and the first carry is
    #   at the bottom: it never leaves. So each step can be reached from the top by `forward`.
    # - Places above `height` are free.
    # `ahead` puts the carry before `t` on top. It takes the steps from the top to there once more
    # and keeps all carries on the way if they fit, for the turns that follow. If not, it keeps one,
    # as far away as what is missing before it will fit later. `run` is how many on top lie without
    # a gap: the turn goes back over them all, and then their places are free.
    #
    # Bound: each turn goes back over one step at least, so there are at most `count` turns. No step
    # is taken more than twice (once by the loop, once here), with ``sqrt(2 * most)`` places, as the
    # loop recorded them (`Round`; Stumm and Walther, 2010). Of a loop that recorded fewer steps
    # only the first carry is used (`Stack.of`). Any number of steps fits then, and more are taken
    # again, as where the number of places is given (Griewank and Walther, "Revolve", 2000).
    #
    # All numbers of steps are values: a sweep batched once more has lanes at different turns.
    def turn(state: Tree) -> Tree:
        t, stack, *rest = state
        stack = ahead(stack, t)
        run = stack.run(t)

        def step(state: Tree) -> Tree:
            i, returning, ys = state
            form.steps.begin(count - one - (t - i), count)
            x = [*whole(stack.carry_at(i)), *entries(t - i)]
            outs = inline_jaxpr(back, [*consts, *returning, *x])
            returning, step_ys = outs[: form.n_back], outs[form.n_back :]
            ys = [
                lax.add(y, e) if a is None else put_entry(y, e, t - i, a)
                for y, e, a in zip(ys, step_ys, form.y_axes, strict=True)
            ]
            return i + one, returning, ys

        _, *rest = lax.while_loop(lambda s: s[0] < run, step, (t - t, *rest))
        return t - run, stack._replace(height=stack.height - run), *rest

    stack = Stack.of(checkpoints, [carry[i] for i in form.kept], count)
    first = count - one, stack, returning, ys
    last, *_, returning, ys = lax.while_loop(lambda s: s[0] >= 0, turn, first)
    form.steps.end(count, count, [last])
    return [*returning, *ys]


def sweep_types(back: ClosedJaxpr, form: SweepSignature) -> list[Aval]:
    outs = back.out_avals
    ys = [
        aval.strip_weak_type() if a is None else unmapped_aval(form.steps.most, a, aval)
        for a, aval in zip(form.y_axes, outs[form.n_back :], strict=True)
    ]
    return [*(aval.strip_weak_type() for aval in outs[: form.n_back]), *ys]


def as_while(
    axis: Axis,
    args: Values,
    axes: Sequence[Any],
    /,
    *,
    test: ClosedJaxpr | None,
    body: ClosedJaxpr,
    form: LoopSignature,
) -> tuple[WhileLoop, Callable[[Values], PlacedOutputs]]:
    """Converts a bounded loop to a ``while`` in each lane.

    Returns it, and a function from its last carry to the results. No checkpoints are recorded.
    """
    given, at = form.split(args), form.split(axes)
    programs = remembered(body, (test, form, "while"), lambda: _programs(test, body, form))
    counts = match_axis(axis, given.count, at.count, 0)
    counts = lax.clamp(np.int32(0), counts, np.int32(form.steps.most))
    arrays = [match_axis(axis, x, None, 0) for x in map(zeros, _arrays(test, body, form))]
    going_on, step = programs
    first = [match_axis(axis, x, a, 0) for x, a in zip(given.carry, at.carry, strict=True)]
    loop = WhileLoop(
        test=going_on,
        body=step,
        test_consts=[given.count, *given.test],
        test_at=[at.count, *at.test],
        body_consts=[given.count, *given.consts, *given.xs],
        body_at=[at.count, *at.consts, *at.xs],
        # The carry: the number of steps, the carry of the loop, and the ys so far.
        carry=[lax.full_like(counts, 0), *first, *arrays],
    )

    def finish(last: Values) -> PlacedOutputs:
        steps, *outs = last
        return [*outs, steps], [0] * (len(outs) + 1)

    return loop, finish


def _arrays(test: ClosedJaxpr | None, body: ClosedJaxpr, form: LoopSignature) -> list[Aval]:
    count = jax.typeof(np.int32(0))
    return loop_types(test, body, form, count)[form.n_carry : -1]


def _programs(
    test: ClosedJaxpr | None, body: ClosedJaxpr, form: LoopSignature
) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    n_test, n_consts, n_carry = form.n_test, form.n_consts, form.n_carry
    number = jax.typeof(np.int32(0))
    body_types = list(body.in_avals)
    entries = body_types[n_consts + n_carry :]
    xs = [unmapped_aval(form.steps.most, a, t) for a, t in zip(form.x_axes, entries, strict=True)]
    state = [number, *body_types[n_consts : n_consts + n_carry], *_arrays(test, body, form)]
    test_types = [] if test is None else list(test.in_avals[:n_test])

    def going_on(count: Value, *values: Value) -> list[Value]:
        consts, (n, *rest) = values[:n_test], values[n_test:]
        more = n < lax.min(count, np.int32(form.steps.most))
        if test is None:
            return [more]
        return [more & inline_jaxpr(test, [*consts, *rest[:n_carry]])[0]]

    def step(count: Value, *values: Value) -> list[Value]:
        consts, values = values[:n_consts], values[n_consts:]
        xs, (n, *rest) = values[: len(entries)], values[len(entries) :]
        carry, ys = rest[:n_carry], rest[n_carry:]
        x = [entry_of(x, n, a) for x, a in zip(xs, form.x_axes, strict=True)]
        outs = inline_jaxpr(body, [*consts, *carry, *x])
        new, step_ys = outs[:n_carry], outs[n_carry:]
        ys = [put_entry(y, e, n, a) for y, e, a in zip(ys, step_ys, form.y_axes, strict=True)]
        return [n + np.int32(1), *new, *ys]

    return (
        _compat.stage(going_on, [number, *test_types, *state]),
        _compat.stage(step, [number, *body_types[:n_consts], *xs, *state]),
    )
