"""A call of a function that has a user's batching rule, as a primitive, and its derivatives.

The call holds the jaxpr of the function for one example, and the rule. Derivatives of the call are
calls again: of the same jaxpr and rule, with one more derivative to take. So the rule is available
whenever a batch axis is added, however often the call has been differentiated before: the function
is batched by the rule first, and the derivatives are then taken of the result. Residuals of reverse
mode are recomputed from its operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer, eval_jaxpr
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.evaluate import Rewriter, plan
from batchax.jaxprs.types import Aval, ClosedJaxpr, Value, Values
from batchax.kernel.axis import Axis, Position, RuleOutputs, axis_to_front, match_axis
from batchax.kernel.inner import (
    batch_function,
    batched_aval,
    captured_tracers,
)
from batchax.kernel.own_primitive import Flat, declare, pullback_of, tangents_of, transposed
from batchax.kernel.reverse_rules import staged_with_reverse_rules, with_reverse_rules
from batchax.rules.custom_derivatives import reached
from batchax.rules.masking import is_inexact

Flags = Sequence[bool]
"""For each of some values whether it is batched; the batch axis is then the first."""

BatchedFlat = Callable[..., tuple[list[Any], Flags]]
"""A function of batches, which also says which of its results are batched."""


@dataclass(frozen=True)
class Tangents:
    """Describes a differentiation step: to tangents of the results `of`.

    Operands are those before it, then tangents of the `moving` ones.
    """

    moving: tuple[int, ...]
    of: tuple[int, ...]

    def function(self, before: Flat) -> Flat:
        def run(*xs: Value) -> list[Any]:
            primals, tangents = xs[: -len(self.moving)], xs[-len(self.moving) :]
            # What a rule calls may have reverse mode alone, and its tangents are transposed later.
            reversible = staged_with_reverse_rules(before)
            return tangents_of(reversible, primals, self.moving, tangents, self.of)[1]

        return run

    def types(self, before: Sequence[Any]) -> list[Any]:
        return [before[k].to_tangent_aval() for k in self.of]

    def values_before(self, flags: Flags) -> list[bool]:
        return list(flags[: -len(self.moving)])

    def flags_before(self, flags: Flags) -> list[bool]:
        before = self.values_before(flags)
        for i, batched in zip(self.moving, flags[-len(self.moving) :], strict=True):
            before[i] |= batched
        return before

    def batched(self, axis: Axis, before: BatchedFlat, flags: Flags) -> BatchedFlat:
        """Differentiates `before`, a function of batches with operands of `flags_before`."""
        together = self.flags_before(flags)
        # A tangent is batched as its operand is.
        targets = [*together, *(together[i] for i in self.moving)]

        def run(*xs: Value) -> tuple[list[Any], Flags]:
            given = list(map(functools.partial(spread, axis), xs, flags, targets))
            outs, out_flags = _compat.described(
                before, lambda arrays: self.function(arrays)(*given)
            )
            return outs, [out_flags[k] for k in self.of]

        return run


@dataclass(frozen=True)
class Cotangents:
    """Describes a differentiation step: to cotangents of the `linear` operands.

    Operands are the others of the function before, then cotangents of its results `of`. With
    `pulls_back`, the step before is to tangents, and these are the `linear` operands.
    """

    linear: tuple[int, ...]
    linear_types: tuple[Any, ...]
    of: tuple[int, ...]
    pulls_back: bool

    def function(self, before: Flat) -> Flat:
        def run(*xs: Value) -> list[Any]:
            others, cotangents = xs[: -len(self.of)], xs[-len(self.of) :]
            pull = transposed(before, others, self.linear, self.linear_types, self.of)
            return pull(cotangents)

        return run

    def types(self, before: Sequence[Any]) -> list[Any]:
        return list(self.linear_types)

    def values_before(self, flags: Flags) -> list[bool]:
        others = iter(flags[: -len(self.of)])
        count = len(flags) - len(self.of) + len(self.linear)
        return [False if i in self.linear else next(others) for i in range(count)]

    def flags_before(self, flags: Flags) -> list[bool]:
        """Returns which operands must be batched: linear ones are, as each lane has cotangents."""
        return [f or i in self.linear for i, f in enumerate(self.values_before(flags))]

    def batched(self, axis: Axis, before: BatchedFlat, flags: Flags) -> BatchedFlat:
        """Transposes `before`, a function of batches."""
        types = [batched_aval(axis, aval, 0) for aval in self.linear_types]

        def run(*xs: Value) -> tuple[list[Any], Flags]:
            others, cotangents = xs[: -len(self.of)], xs[-len(self.of) :]
            pull, out_flags = _compat.described(
                before, lambda arrays: transposed(arrays, others, self.linear, types, self.of)
            )
            targets = [out_flags[k] for k in self.of]
            given = map(
                functools.partial(spread, axis), cotangents, flags[-len(self.of) :], targets
            )
            outs = pull(list(given))
            return outs, [True] * len(self.linear)

        return run


class _SameOperands:
    """A step with the operands of the function before it."""

    def values_before(self, flags: Flags) -> Flags:
        return flags

    def flags_before(self, flags: Flags) -> Flags:
        return flags


@dataclass(frozen=True)
class MappedStep(_SameOperands):
    """Describes a step to many directions of derivatives of one example.

    `mapped` operands have the directions along axis 0, as do all results.
    """

    axis: Axis
    # The primal operands are the same in all directions.
    mapped: tuple[bool, ...]

    def function(self, before: Flat) -> Flat:
        """Maps the function `before` this step over all directions."""
        axes = [0 if m else None for m in self.mapped]

        def run(*xs: Value) -> list[Any]:
            outs, out_axes = batch_function(self.axis, before, xs, axes)
            return [match_axis(self.axis, x, a, 0) for x, a in zip(outs, out_axes, strict=True)]

        return run

    def types(self, before: Sequence[Any]) -> list[Any]:
        return [batched_aval(self.axis, aval, 0) for aval in before]

    def batched(self, axis: Axis, before: BatchedFlat, flags: Flags) -> BatchedFlat:
        """Maps `before`, a function of batches, over all directions."""
        # Directions come after the lanes, which stay in front.
        axes = [int(f) if m else None for m, f in zip(self.mapped, flags, strict=True)]

        def run(*xs: Value) -> tuple[list[Any], Flags]:
            (outs, out_axes), out_flags = _compat.described(
                before, lambda arrays: batch_function(self.axis, arrays, xs, axes)
            )
            placed = map(
                functools.partial(match_axis, self.axis), outs, out_axes, map(int, out_flags)
            )
            return list(placed), out_flags

        return run


@dataclass(frozen=True)
class Primals(_SameOperands):
    """Describes a differentiation step: to the results, as derivative rules inside return them.

    A rule applies once: JAX differentiates further what the rule computed. Operands are those of
    the function before, of which `moving` ones have tangents.
    """

    moving: tuple[int, ...]

    def function(self, before: Flat) -> Flat:
        # By reverse mode, which `jax.custom_vjp` has alone.
        return lambda *xs: pullback_of(before, xs, self.moving, ())[0]

    def types(self, before: Sequence[Any]) -> list[Any]:
        return list(before)

    def batched(self, axis: Axis, before: BatchedFlat, flags: Flags) -> BatchedFlat:
        """Applies the step to `before`, a function of batches; see `Tangents.batched`."""
        return lambda *xs: _compat.described(before, lambda arrays: self.function(arrays)(*xs))


@dataclass(frozen=True)
class Pullback:
    """Describes two steps in one: to `tangents`, and from them to their `cotangents`."""

    # In one step, this is reverse mode, which functions without a forward mode have as well.
    tangents: Tangents
    cotangents: Cotangents

    @property
    def of(self) -> tuple[int, ...]:
        return tuple(self.tangents.of[j] for j in self.cotangents.of)

    def function(self, before: Flat) -> Flat:
        def run(*xs: Value) -> list[Any]:
            primals, given = xs[: -len(self.of)], xs[-len(self.of) :]
            _, pull = pullback_of(before, primals, self.tangents.moving, self.of)
            return list(pull(list(given)))

        return run

    def flags_before(self, flags: Flags) -> Flags:
        return self.tangents.flags_before(self.cotangents.flags_before(flags))

    def batched(self, axis: Axis, before: BatchedFlat, flags: Flags) -> BatchedFlat:
        """Pulls cotangents back through `before`, a function of batches."""
        targets = self.flags_before(flags)

        def run(*xs: Value) -> tuple[list[Any], Flags]:
            n, to = len(targets), functools.partial(spread, axis)
            primals = list(map(to, xs[:n], flags[:n], targets))
            (_, pull), out_flags = _compat.described(
                before,
                lambda arrays: pullback_of(arrays, primals, self.tangents.moving, self.of),
            )
            cotangents = map(to, xs[n:], flags[n:], [out_flags[k] for k in self.of])
            outs = list(pull(list(cotangents)))
            return outs, [True] * len(outs)

        return run


DerivativeStep = Tangents | Primals | Cotangents | MappedStep
"""A step after a function: its `function` for one example, and `batched`, and their `types`.

`values_before` says which operands of the function before it are batched where its own are as
`flags`, and `flags_before` which have to be.
"""


def spread(axis: Axis, x: Value, batched: bool, target: bool) -> Value:
    """Repeats or sums a value along its lanes, as is wanted.

    Cotangents of a shared result add up.
    """
    if target and not batched:
        return match_axis(axis, x, None, 0)
    return x.sum(0) if batched and not target else x


custom_call_p = declare("custom_batched_call")

# The last are those that JAX will have (jax_custom_jvp3, jax_custom_vjp3), among others.
_MAY_HAVE_RULES = frozenset(("custom_jvp_call", "custom_vjp_call", "call_hi_primitive"))
has_derivative_rules = Anywhere(lambda eqn: eqn.primitive.name in _MAY_HAVE_RULES)


def per_example(jaxpr: ClosedJaxpr, steps: Sequence[DerivativeStep]) -> Flat:
    def program(*xs: Value) -> list[Any]:
        return eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *xs)

    return after(steps, program)


def after(steps: Sequence[DerivativeStep], function: Flat) -> Flat:
    return functools.reduce(lambda before, step: step.function(before), merged(steps), function)


def merged(steps: Sequence[DerivativeStep]) -> Sequence[DerivativeStep | Pullback]:
    """Merges steps to tangents with those that pull cotangents back through them."""
    result: list[DerivativeStep | Pullback] = []
    for step in steps:
        match result, step:
            case [*_, Tangents() as last], Cotangents(pulls_back=True):
                result[-1] = Pullback(last, step)
            case _:
                result.append(step)
    return result


def result_types(jaxpr: ClosedJaxpr, steps: Sequence[DerivativeStep]) -> list[Any]:
    return functools.reduce(lambda before, step: step.types(before), steps, list(jaxpr.out_avals))


_effects_had: ContextVar[bool] = ContextVar("batchax_effects_had", default=False)


@contextmanager
def effects_had(had: bool) -> Iterator[None]:
    """Marks recomputation in a derivative: `had` drops effects that have occurred already."""
    token = _effects_had.set(had or _effects_had.get())
    try:
        yield
    finally:
        _effects_had.reset(token)


def call(jaxpr: ClosedJaxpr, rule: Hashable, operands: Values) -> list[Any]:
    """Calls a program with a user's batching rule, for one example."""
    if _effects_had.get():
        jaxpr = without_effects(jaxpr)
    return custom_call_p.bind(*operands, jaxpr=jaxpr, steps=(), rule=rule)


def with_captured(
    jaxpr: ClosedJaxpr, closed: Sequence[Any], rule: Callable[..., Any] | None
) -> tuple[ClosedJaxpr, list[Any]]:
    """Adds the tracers that only `rule` closes over as unused inputs of a program.

    `closed` are those of the function, its first operands.
    """
    closed_ids = set(map(id, closed))
    # When the rule runs, their trace may be over, so their values must be operands.
    more = [t for t in captured_tracers(rule) if id(t) not in closed_ids and _compat.is_live(t)]
    if not more:
        return jaxpr, list(closed)
    slots = _compat.stage(lambda *xs: list(xs), list(map(jax.typeof, more))).jaxpr.invars
    own = jaxpr.jaxpr.invars
    invars = [*own[: len(closed)], *slots, *own[len(closed) :]]
    return _compat.close(jaxpr.jaxpr.replace(invars=invars)), [*closed, *more]


# Equations that only effects need are dropped.
def without_effects(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    needed = plan(jaxpr.jaxpr.eqns, jaxpr.jaxpr.outvars, keeps=lambda _: False)
    return Rewriter(jaxpr, [step.eqn for step in needed]).program()


def jvp(
    primals: Values,
    tangents: Values,
    *,
    jaxpr: ClosedJaxpr,
    steps: tuple[DerivativeStep, ...],
    rule: Hashable,
) -> tuple[Sequence[Any], list[Any]]:
    moving = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
    types = result_types(jaxpr, steps)
    of = _differentiable(jaxpr, steps, moving, types)
    dots: list[Any] = [ad.Zero(aval.to_tangent_aval()) for aval in types]
    given = [_compat.varying_as(tangents[i], jax.typeof(primals[i])) for i in moving]
    if of and not any(isinstance(x, Tracer) for x in primals):
        # No axis can appear later over which these are batched.
        jaxpr = with_reverse_rules(jaxpr)
        outs, found_dots = tangents_of(per_example(jaxpr, steps), primals, moving, given, of)
    else:
        # Effects occur with the results, not with the tangents.
        whole, jaxpr = jaxpr, without_effects(jaxpr)
        _reject_effects(jaxpr, of)
        call = dict(jaxpr=jaxpr, rule=rule)
        first = len(primals) - _count_linear(steps)
        if not of:
            found_dots = []
        elif all(i >= first for i in moving):  # what is linear is its own derivative
            linear = map(ad.instantiate_zeros, tangents[first:])
            found_dots = custom_call_p.bind(*primals[:first], *linear, steps=steps, **call)
            of = tuple(range(len(types)))
        else:
            further = (*steps, Tangents(moving, of))
            found_dots = custom_call_p.bind(*primals, *given, steps=further, **call)
        if of and has_derivative_rules.in_program(jaxpr):
            steps = (*steps, Primals(moving))
        outs = custom_call_p.bind(*primals, steps=steps, jaxpr=whole, rule=rule)
    for k, dot in zip(of, found_dots, strict=True):
        dots[k] = dot
    return outs, dots


def _differentiable(
    jaxpr: ClosedJaxpr,
    steps: Sequence[DerivativeStep],
    moving: Sequence[int],
    types: Sequence[Aval],
) -> tuple[int, ...]:
    """Returns which results have a derivative with respect to the `moving` operands."""
    hits = [True] * len(types)
    if not steps:
        hits = reached(jaxpr.jaxpr, [i in moving for i in range(len(jaxpr.in_avals))])
    return tuple(
        k for k, (aval, hit) in enumerate(zip(types, hits, strict=True)) if hit and is_inexact(aval)
    )


def _count_linear(steps: Sequence[DerivativeStep]) -> int:
    """Returns how many trailing operands a call is linear in."""
    for step in reversed(steps):
        if isinstance(step, Primals):
            return 0
        if not isinstance(step, MappedStep):
            return len(step.moving if isinstance(step, Tangents) else step.of)
    return 0


def _reject_effects(jaxpr: ClosedJaxpr, of: Sequence[int]) -> None:
    if of and _compat.ordered_by_lane(jaxpr.effects):
        raise UnsupportedError(
            "a function with a batching rule is differentiated whose results depend on input "
            "or output (io_callback, or ordered callbacks in a loop or branch): its "
            "derivative recomputes the results, which would do that twice. Do it outside of "
            "the function, or define a derivative with def_jvp or def_vjp."
        )


def transpose(
    cotangents: Values,
    *operands: Value,
    jaxpr: ClosedJaxpr,
    steps: tuple[DerivativeStep, ...],
    rule: Hashable,
) -> list[Any]:
    linear = tuple(i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
    of = tuple(k for k, ct in enumerate(cotangents) if type(ct) is not ad.Zero)
    results: list[Value] = [None] * len(operands)
    if not of:
        for i in linear:
            results[i] = ad.Zero(operands[i].aval)
        return results
    types = tuple(operands[i].aval for i in linear)
    others = [x for i, x in enumerate(operands) if i not in linear]
    last = operands[len(operands) - len(linear) :]
    pulls_back = (
        bool(steps)
        and isinstance(steps[-1], Tangents)
        and len(linear) == len(steps[-1].moving)
        and all(map(ad.is_undefined_primal, last))
    )
    further = (*steps, Cotangents(linear, types, of, pulls_back))
    given = [cotangents[k] for k in of]
    outs = custom_call_p.bind(*others, *given, jaxpr=jaxpr, steps=further, rule=rule)
    for i, ct in zip(linear, outs, strict=True):
        results[i] = ct
    return results


def without_primals(steps: tuple[DerivativeStep, ...]) -> tuple[DerivativeStep, ...]:
    """Drops a last step to primals, which has the results of the function before it."""
    return steps[:-1] if steps and isinstance(steps[-1], Primals) else steps


def to_front(axis: Axis, x: Value, position: Position) -> Value:
    return x if position is None else axis_to_front(axis, x, position)


def positions(outs: Values, flags: Flags) -> RuleOutputs:
    return outs, [0 if batched else None for batched in flags]
