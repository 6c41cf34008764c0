"""The bounded loop: a loop that ends on a value, but after a known number of steps at most.

``lax.while_loop`` has no derivative in reverse: nobody knows how much it would have to keep.
Where the number of steps has a bound, room for that many can be set aside, and room for their
square root is enough: the carry is kept at the start of each *segment* of about
``sqrt(length)`` steps, and in reverse each segment is computed again from there (Griewank,
"Achieving logarithmic growth of temporal and spatial complexity in reverse automatic
differentiation", 1992, goes on to do so to any depth).

The loop is one primitive, because of its derivatives. They are bounded loops again: over the
same steps in forward mode, and in reverse over the segments, in each of which one loop computes
the steps and another goes back over them. So they can be differentiated and batched in turn, and
cost what the steps cost that were taken. Their steps are known by number, not by a value: such a
loop takes `count` steps, from the first on or back to the first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import mapped_aval, unmapped_aval

from batchax import _compat
from batchax.execution.eager import compile_program, whatever_jit
from batchax.jaxprs.bodies import Body, describe_bodies
from batchax.jaxprs.own_primitives import stands_for
from batchax.jaxprs.program_key import program_key

Values = Sequence[Any]
LoopStep = Callable[[Values, Values, Values], tuple[Values, Values]]
"""A function of constants, the carry and entries of the xs, to the carry and the ys."""


@dataclass(frozen=True)
class Form:
    """What the operands and results of a bounded loop are.

    Attributes:
      n_test: number of constants of the predicate.
      n_consts: number of constants of the body.
      n_carry: number of values in the carry.
      length: how many steps there are at most.
      x_axes: where each of the xs has the axis of the steps.
      y_axes: where each of the ys gets it.
      reverse: whether the loop goes back from its last step to the first.
      record: whether the carry at the start of each segment is among the results.
    """

    n_test: int
    n_consts: int
    n_carry: int
    length: int
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    reverse: bool
    record: bool

    @property
    def segment(self) -> int:
        """How many steps a segment has."""
        return segment_length(self.length)

    @property
    def n_segments(self) -> int:
        """How many segments the steps are in."""
        return -(-self.length // self.segment)

    def split(self, operands: Values) -> tuple[Any, Values, Values, Values, Values]:
        """The bound, the constants of predicate and body, the carry and the xs."""
        a = 1 + self.n_test
        b = a + self.n_consts
        c = b + self.n_carry
        operands = list(operands)
        return operands[0], operands[1:a], operands[a:b], operands[b:c], operands[c:]

    def results(self, outs: Values) -> Results:
        """What the primitive returned, a flat list, as `Results`."""
        a = self.n_carry
        b = a + len(self.y_axes)
        return Results(list(outs[:a]), list(outs[a:b]), list(outs[b:-1]), outs[-1])


class Results(NamedTuple):
    """What a bounded loop returns.

    Attributes:
      carry: the carry after the last step.
      ys: what the steps returned, stacked; zeros where no step was taken.
      checkpoints: the carry at the start of each segment, stacked, if it was to be recorded.
        For a segment that was not begun it may be anything.
      steps: how many steps were taken.
    """

    carry: list[Any]
    ys: list[Any]
    checkpoints: list[Any]
    steps: Any


def segment_length(length: int) -> int:
    """About the square root: a number of steps that divides `length`, if one is near."""
    root = max(math.isqrt(max(length - 1, 0)) + 1, 1)
    return next((k for k in range(root, 2 * root) if length % k == 0), root) if length else 1


bounded_loop_p = _compat.Primitive("bounded_loop")
bounded_loop_p.multiple_results = True


def bounded_loop(
    body: LoopStep,
    consts: Values,
    carry: Values,
    xs: Values = (),
    *,
    test: Callable[[Values, Values], Any] | None = None,
    test_consts: Values = (),
    guarded: LoopStep | None = None,
    count: Any,
    length: int,
    x_axes: Sequence[int] = (),
    y_axes: Sequence[int] = (),
    reverse: bool = False,
    record: bool = False,
) -> Results:
    """Runs a bounded loop; it may be differentiated and batched.

    Args:
      body: what one step does.
      consts: what is the same at each step.
      carry: the first carry.
      xs: arrays with an entry for each step.
      test: the predicate, a function of `test_consts` and the carry; None: always true.
      test_consts: its constants.
      guarded: a function that computes what `body` does and is differentiated in its place. A
        batched loop has one in which the operands of masked lanes are replaced: derivatives may
        need that where values do not.
      count: how many steps to take, or fewer if `test` says so.
      length: how many that may be at most.
      x_axes: where each of the `xs` has the axis of the steps.
      y_axes: where each of the ys gets it.
      reverse: whether the first step is number ``count - 1`` and the last number 0; there is
        no `test` then.
      record: whether to return checkpoints.
    """
    programs, carry, xs = _settle(
        body, guarded, test, consts, test_consts, carry, xs, x_axes, count
    )
    staged, kept, tested = programs
    held = [*staged.consts, *([] if kept is staged else kept.consts)]
    if held or (tested is not None and tested.consts):
        # A derivative rule in a program closes over these. The primitive is differentiated and
        # batched with respect to its operands only, so they become operands.
        own, n_held = len(staged.consts), len(held)
        more_tested = [] if tested is None else tested.consts
        return bounded_loop(
            _opened(staged, slice(own), n_held),
            [*held, *consts],
            carry,
            xs,
            test=None if tested is None else _opened_test(tested),
            test_consts=[*more_tested, *test_consts],
            guarded=None if kept is staged else _opened(kept, slice(own, n_held), n_held),
            count=count,
            length=length,
            x_axes=x_axes,
            y_axes=y_axes,
            reverse=reverse,
            record=record,
        )
    sizes = len(test_consts), len(consts), len(carry), length
    form = Form(*sizes, tuple(x_axes), tuple(y_axes), reverse, record)
    operands = [count, *test_consts, *consts, *carry, *xs]
    outs = bounded_loop_p.bind(*operands, test=tested, body=staged, guarded=kept, form=form)
    return form.results(outs)


def _opened(program: _compat.ClosedJaxpr, own: slice, n_held: int) -> LoopStep:
    """A step of `program` whose constants come first, `own` among `n_held`."""

    def step(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
        outs = eval_jaxpr(program.jaxpr, consts[:n_held][own], *consts[n_held:], *carry, *x)
        return outs[: len(carry)], outs[len(carry) :]

    return step


def _opened_test(program: _compat.ClosedJaxpr) -> Callable[[Values, Values], Any]:
    n = len(program.consts)
    return lambda consts, carry: eval_jaxpr(program.jaxpr, consts[:n], *consts[n:], *carry)[0]


def _settle(
    body: LoopStep,
    guarded: LoopStep | None,
    test: Callable[[Values, Values], Any] | None,
    consts: Values,
    test_consts: Values,
    carry: Values,
    xs: Values,
    x_axes: Sequence[int],
    count: Any,
) -> tuple[Any, list[Any], list[Any]]:
    """The programs of a step, of a guarded one and of the predicate; first carry and xs.

    Inside ``shard_map`` the type of a carry must be the same before and after a step. So the
    first carry is cast to vary over the axes of the mesh that a step makes it vary over. It, the
    xs and the ys also vary over those that the number of steps varies over.
    """
    known, test_known = list(map(jax.typeof, consts)), list(map(jax.typeof, test_consts))
    n, n_test = len(known), len(test_known)
    carry, xs = list(carry), list(xs)
    deciding = [jax.typeof(count)]
    while True:
        types = list(map(jax.typeof, carry))
        tested = None
        if test is not None:
            predicate = lambda *xs: [test(xs[:n_test], xs[n_test:])]
            tested = _compat.stage(predicate, [*test_known, *types])
            deciding = [jax.typeof(count), tested.out_avals[0]]
        xs = [_varied(x, deciding) for x in xs]
        whole = zip(map(jax.typeof, xs), x_axes, strict=True)
        entries = [mapped_aval(aval.shape[a], a, aval) for aval, a in whole]

        def staged(step: LoopStep, types: Sequence[Any] = types) -> _compat.ClosedJaxpr:
            def run(*xs: Any) -> list[Any]:
                rest = xs[n + len(types) :]
                new, ys = step(xs[:n], xs[n : n + len(types)], rest)
                new = [_varied(x, [t]) for x, t in zip(new, types, strict=True)]
                return [*new, *(_varied(y, deciding) for y in ys)]

            return _compat.stage(run, [*known, *types, *entries])

        plain = staged(body)
        kept = plain if guarded is None else staged(guarded)
        varied = [
            _varied(x, [a, b, *deciding])
            for x, a, b in zip(carry, plain.out_avals, kept.out_avals, strict=False)
        ]
        if all(new is old for new, old in zip(varied, carry, strict=True)):
            return (plain, kept, tested), carry, xs
        carry = varied


def _varied(x: Any, like: Sequence[Any]) -> Any:
    """`x`, cast to vary over the axes of the mesh that values of these types vary over."""
    return functools.reduce(_compat.varying_as, like, x)


def run(*operands: Any, test: Any, body: Any, guarded: Any, form: Form) -> list[Any]:
    """The bounded loop as ordinary operations of JAX."""
    count, test_consts, consts, carry, xs = form.split(operands)
    avals = result_types(test, body, form, jax.typeof(count))
    count = lax.clamp(np.int32(0), count, np.int32(form.length))
    after = lambda n: n + np.int32(1)
    before = lambda n: n - np.int32(1)
    at = before if form.reverse else lambda n: n
    move = before if form.reverse else after

    # Steps with a number below `n` have been taken; or, in reverse, are yet to be taken.
    def going_on(n: Any, end: Any, carry: Values) -> Any:
        more = n > end if form.reverse else n < end
        if test is None:
            return more
        return more & eval_jaxpr(test.jaxpr, test.consts, *test_consts, *carry)[0]

    def steps(n: Any, end: Any, carry: Values, ys: Values) -> tuple[Any, Values, Values]:
        """The steps from `n` to `end`, or until the predicate is false."""

        def step(state: Any) -> Any:
            n, carry, ys = state
            t = at(n)
            x = [entry_of(x, t, a) for x, a in zip(xs, form.x_axes, strict=True)]
            outs = eval_jaxpr(body.jaxpr, body.consts, *consts, *carry, *x)
            new, entries = outs[: form.n_carry], outs[form.n_carry :]
            ys = [put_entry(y, e, t, a) for y, e, a in zip(ys, entries, form.y_axes, strict=True)]
            return move(n), new, ys

        return lax.while_loop(lambda s: going_on(s[0], end, s[1]), step, (n, carry, ys))

    blank = list(map(zeros, avals[form.n_carry : -1]))
    ys, kept = blank[: len(form.y_axes)], blank[len(form.y_axes) :]
    first, last = np.int32(0), count
    if form.reverse:
        first, last = last, first
    n = _varied(jnp.asarray(first, np.int32), [avals[-1]])
    if form.length == 0:
        outs = [*carry, *ys, *kept, n]
    elif not form.record:
        n, carry, ys = steps(n, last, carry, ys)
        outs = [*carry, *ys, n]
    else:
        size = np.int32(form.segment)

        def segment(state: Any) -> Any:
            n, carry, ys, kept = state
            j = lax.div(at(n), size)
            kept = [put_entry(all_, x, j, 0) for all_, x in zip(kept, carry, strict=True)]
            end = j * size if form.reverse else lax.min((j + np.int32(1)) * size, count)
            return *steps(n, end, carry, ys), kept

        n, carry, ys, kept = lax.while_loop(
            lambda s: going_on(s[0], last, s[1]), segment, (n, carry, ys, kept)
        )
        outs = [*carry, *ys, *kept, n]
    if form.reverse:
        outs[-1] = _varied(count, [avals[-1]])
    return list(map(_typed, outs, avals))


def entry_of(x: Any, t: Any, axis: int) -> Any:
    """Entry `t` along an axis."""
    return lax.dynamic_index_in_dim(x, t, axis, keepdims=False, allow_negative_indices=False)


def put_entry(array: Any, entry: Any, t: Any, axis: int) -> Any:
    """`array` with another entry `t` along an axis."""
    return lax.dynamic_update_index_in_dim(array, entry, t, axis, allow_negative_indices=False)


def zeros(aval: Any) -> Any:
    """Zeros of this type, sharded and varying over the axes of a mesh as it says."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return _varied(lax.full(aval.shape, 0, aval.dtype, sharding=sharding), [aval])


def _typed(x: Any, aval: Any) -> Any:
    """`x`, weakly typed if `aval` is."""
    return _compat.weakly(x) if aval.weak_type and not jax.typeof(x).weak_type else x


def result_types(test: Any, body: Any, form: Form, count: Any) -> list[Any]:
    """The types of what `run` returns: last carry, ys, checkpoints if recorded, steps."""
    outs = body.out_avals
    ys = [
        unmapped_aval(form.length, a, aval)
        for a, aval in zip(form.y_axes, outs[form.n_carry :], strict=True)
    ]
    carry = body.in_avals[form.n_consts : form.n_consts + form.n_carry]
    kept = [unmapped_aval(form.n_segments, 0, aval.strip_weak_type()) for aval in carry]
    decided = count if test is None else test.out_avals[0]
    steps = _compat.scalar_like(decided, np.dtype(np.int32))
    return [*outs[: form.n_carry], *ys, *(kept if form.record else ()), steps]


@bounded_loop_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, test: Any, body: Any, guarded: Any, form: Form) -> Any:
    effects = body.effects if test is None else body.effects | test.effects
    return result_types(test, body, form, avals[0]), effects


@bounded_loop_p.def_impl
@whatever_jit
def _impl(*operands: Any, test: Any, body: Any, guarded: Any, form: Form) -> list[Any]:
    key = program_key(body), None if test is None else program_key(test), form
    program = functools.partial(run, test=test, body=body, guarded=guarded, form=form)
    return compile_program(key, program, operands)(*operands)


def _to_lojax(*operands: Any, **params: Any) -> list[Any]:
    """What JAX, from 0.12 on, calls if a program holds primitives that it lowers before others."""
    traced = any(isinstance(x, Tracer) for x in operands)
    return run(*operands, **params) if traced else _impl(*operands, **params)


bounded_loop_p.to_lojax = _to_lojax
stands_for(bounded_loop_p, run)


def _bodies(eqn: Any) -> tuple[Body, ...]:
    # As calls: how often they run, and which operand is which, the operations it stands for say.
    programs = (eqn.params[name] for name in ("test", "body", "guarded"))
    return tuple(Body("call", program, (), (), 0) for program in programs if program is not None)


describe_bodies(bounded_loop_p, _bodies)
