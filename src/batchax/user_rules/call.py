"""A call of a function that has a batching rule of the user's, as a primitive.

The call holds the program of the function for one example, and the rule. Derivatives of
the call are calls again: of the same program and rule, with one more derivative to take.
So the rule is at hand whenever a batch axis turns up, however often the call has been
differentiated before: the function is batched by the rule first, and the derivatives are
then taken of that. What reverse mode needs of the function is computed again from its
operands, unless both calls are seen in one program (`together.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.evaluate import plan
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.axis import Axis, match_axis
from batchax.kernel.captured import captured_tracers
from batchax.kernel.inner import batch_function, batched_aval
from batchax.kernel.own_primitive import Flat, declare, tangents_of, transposed

Flags = Sequence[bool]
"""For each of some values whether it is batched; the batch axis is then the first."""

BatchedFlat = Callable[..., tuple[list[Any], Flags]]
"""A function of batches, which also says which of its results are batched."""


@dataclass(frozen=True)
class Tangents:
    """A step of differentiation: to the tangents of the results `of`.

    Operands are those of the function before, then tangents of those that are `moving`. If
    `values`, all results of the function before follow the tangents.
    """

    moving: tuple[int, ...]
    of: tuple[int, ...]
    values: bool = False

    def function(self, before: Flat) -> Flat:
        """The derivative of the function `before` this step."""

        def run(*xs: Any) -> list[Any]:
            primals, tangents = xs[: -len(self.moving)], xs[-len(self.moving) :]
            outs, dots = tangents_of(before, primals, self.moving, tangents, self.of)
            return [*dots, *outs] if self.values else dots

        return run

    def types(self, before: Sequence[Any]) -> list[Any]:
        """The types of its results, from those of the function before."""
        return [*(before[k].to_tangent_aval() for k in self.of), *(before if self.values else ())]

    def values_before(self, flags: Flags) -> list[bool]:
        """Which operands of the function before are batched themselves."""
        return list(flags[: -len(self.moving)])

    def flags_before(self, flags: Flags) -> list[bool]:
        """Which of them must be, for these to be."""
        before = self.values_before(flags)
        for i, batched in zip(self.moving, flags[-len(self.moving) :], strict=True):
            before[i] |= batched
        return before

    def batched(self, axis: Axis, before: BatchedFlat, flags: Flags) -> BatchedFlat:
        """The derivative of `before`, a function of batches.

        Args:
          axis: the axis being mapped.
          before: the function before this step, for operands of `flags_before`.
          flags: which operands are batched.
        """
        together = self.flags_before(flags)
        targets = [*together, *(together[i] for i in self.moving)]

        def run(*xs: Any) -> tuple[list[Any], Flags]:
            given = list(map(functools.partial(spread, axis), xs, flags, targets))
            outs, out_flags = _compat.described(
                before, lambda arrays: self.function(arrays)(*given)
            )
            return outs, [*(out_flags[k] for k in self.of), *(out_flags if self.values else ())]

        return run


@dataclass(frozen=True)
class Cotangents:
    """A step of differentiation: to the cotangents of the `linear` operands.

    Operands are the others of the function before, then cotangents of its results `of`.
    `linear_types` are the types of the linear operands.
    """

    linear: tuple[int, ...]
    linear_types: tuple[Any, ...]
    of: tuple[int, ...]

    def function(self, before: Flat) -> Flat:
        """The transpose of the function `before` this step."""

        def run(*xs: Any) -> list[Any]:
            others, cotangents = xs[: -len(self.of)], xs[-len(self.of) :]
            pull = transposed(before, others, self.linear, self.linear_types, self.of)
            return pull(cotangents)

        return run

    def types(self, before: Sequence[Any]) -> list[Any]:
        """The types of its results."""
        return list(self.linear_types)

    def values_before(self, flags: Flags) -> list[bool]:
        """Which operands of the function before are batched themselves."""
        others = iter(flags[: -len(self.of)])
        count = len(flags) - len(self.of) + len(self.linear)
        return [False if i in self.linear else next(others) for i in range(count)]

    def flags_before(self, flags: Flags) -> list[bool]:
        """Which of them must be: each lane has cotangents of its own."""
        return [f or i in self.linear for i, f in enumerate(self.values_before(flags))]

    def batched(self, axis: Axis, before: BatchedFlat, flags: Flags) -> BatchedFlat:
        """The transpose of `before`, a function of batches; see `Tangents.batched`."""
        types = [batched_aval(axis, aval, 0) for aval in self.linear_types]

        def run(*xs: Any) -> tuple[list[Any], Flags]:
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


@dataclass(frozen=True)
class MappedStep:
    """A step to many directions at once, of derivatives of one example.

    Operands are those of the function before; the `mapped` ones have the directions along
    axis 0, as do all results. What the function is called on is the same for all.
    """

    axis: Axis
    mapped: tuple[bool, ...]

    def function(self, before: Flat) -> Flat:
        """The function `before` this step, for all directions."""
        axes = [0 if m else None for m in self.mapped]

        def run(*xs: Any) -> list[Any]:
            outs, out_axes = batch_function(self.axis, before, xs, axes)
            return [match_axis(self.axis, x, a, 0) for x, a in zip(outs, out_axes, strict=True)]

        return run

    def types(self, before: Sequence[Any]) -> list[Any]:
        """The types of its results, from those of the function before."""
        return [batched_aval(self.axis, aval, 0) for aval in before]

    def values_before(self, flags: Flags) -> Flags:
        """Which operands of the function before are batched themselves."""
        return flags

    def flags_before(self, flags: Flags) -> Flags:
        """Which of them must be, for these to be."""
        return flags

    def batched(self, axis: Axis, before: BatchedFlat, flags: Flags) -> BatchedFlat:
        """`before`, a function of batches, for all directions; see `Tangents.batched`.

        They go behind the lanes of what has lanes.
        """
        axes = [int(f) if m else None for m, f in zip(self.mapped, flags, strict=True)]

        def run(*xs: Any) -> tuple[list[Any], Flags]:
            (outs, out_axes), out_flags = _compat.described(
                before, lambda arrays: batch_function(self.axis, arrays, xs, axes)
            )
            placed = map(
                functools.partial(match_axis, self.axis), outs, out_axes, map(int, out_flags)
            )
            return list(placed), out_flags

        return run


DerivativeStep = Tangents | Cotangents | MappedStep


def spread(axis: Axis, x: Value, batched: bool, target: bool) -> Any:
    """A value as batched as is wanted.

    Cotangents of a result that is the same for all lanes add up.
    """
    if target and not batched:
        return match_axis(axis, x, None, 0)
    return x.sum(0) if batched and not target else x


custom_call_p = declare("custom_batched_call")


def per_example(jaxpr: ClosedJaxpr, steps: Sequence[DerivativeStep]) -> Flat:
    """What a call computes for one example."""

    def program(*xs: Any) -> list[Any]:
        return eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *xs)

    return after(steps, program)


def after(steps: Sequence[DerivativeStep], function: Flat) -> Flat:
    """What becomes of a function of one example by derivatives of it."""
    return functools.reduce(lambda before, step: step.function(before), steps, function)


def result_types(jaxpr: ClosedJaxpr, steps: Sequence[DerivativeStep]) -> list[Any]:
    """The types of what a call computes for one example."""
    return functools.reduce(lambda before, step: step.types(before), steps, list(jaxpr.out_avals))


_effects_had: ContextVar[bool] = ContextVar("batchax_effects_had", default=False)


@contextmanager
def effects_had(had: bool) -> Iterator[None]:
    """While a derivative computes a rule again: `had` says that calls in it have had effects."""
    token = _effects_had.set(had or _effects_had.get())
    try:
        yield
    finally:
        _effects_had.reset(token)


def call(jaxpr: ClosedJaxpr, rule: Any, operands: Sequence[Value]) -> list[Any]:
    """The results, for one example, of a program with a batching rule of the user's."""
    if _effects_had.get():
        jaxpr = without_effects(jaxpr)
    return custom_call_p.bind(*operands, jaxpr=jaxpr, steps=(), rule=rule)


def with_captured(
    jaxpr: ClosedJaxpr, closed: Sequence[Any], rule: Any
) -> tuple[ClosedJaxpr, list[Any]]:
    """A program that also takes the tracers that only `rule` closes over, and does not use them.

    By the time the rule runs their trace may be over, and their values must be at hand.

    Args:
      jaxpr: a program whose first operands are what the function closes over.
      closed: those.
      rule: the user's rule.
    """
    closed_ids = set(map(id, closed))
    more = [t for t in captured_tracers(rule) if id(t) not in closed_ids and _compat.is_live(t)]
    if not more:
        return jaxpr, list(closed)
    slots = _compat.stage(lambda *xs: list(xs), list(map(jax.typeof, more))).jaxpr.invars
    own = jaxpr.jaxpr.invars
    invars = [*own[: len(closed)], *slots, *own[len(closed) :]]
    return _compat.close(jaxpr.jaxpr.replace(invars=invars)), [*closed, *more]


def without_effects(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    """A program with the equations only that its results need."""
    needed = plan(jaxpr.jaxpr.eqns, jaxpr.jaxpr.outvars, keeps=lambda _: False)
    eqns = [step.eqn for step in needed]
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return _compat.close(jaxpr.jaxpr.replace(eqns=eqns, effects=effects), jaxpr.consts)
