"""Evaluating a program with, beside each value, where what is not finite in it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Eqn, Jaxpr, Value

FINITE, INFINITE, NAN = 0, 1, 2
KIND, PLACE, TURNED, FIRST_LOOP = 0, 1, 2, 3
"""What the integers of an origin are: the kind of value; the place it came from; of an infinity
that became a NaN, where it did; and for each loop around the place, the iteration."""

_SHOWN = 16  # elements of an operand that are shown one by one


@dataclass(frozen=True)
class Place:
    """An equation that may make what is not finite.

    Attributes:
      eqn: the equation.
      around: the calls, loops and branches that it is inside of, outermost first.
    """

    eqn: Eqn
    around: tuple[Any, ...]

    @property
    def line(self) -> str:
        """The line of the user's that made it, or made what it is in: JAX may have made it."""
        lines = (_compat.user_line(eqn.source_info) for eqn in (self.eqn, *self.around[::-1]))
        return next(filter(None, lines), "")


@dataclass
class Places:
    """The equations of a program, numbered from 1 as they are met."""

    known: list[Place] = field(default_factory=list)
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)

    def number(self, eqn: Eqn, around: tuple[Any, ...]) -> int:
        """The number of an equation."""
        key = tuple(map(id, (*around, eqn)))
        if key not in self.numbers:
            self.known.append(Place(eqn, around))
            self.numbers[key] = len(self.known)
        return self.numbers[key]

    def place(self, number: int) -> Place:
        """The equation with this number."""
        return self.known[number - 1]


@dataclass(frozen=True)
class Marked:
    """A value, and its origin; None if it is known to be finite."""

    value: Value
    origin: Any = None


@dataclass(frozen=True)
class Watch:
    """What is to be seen of an equation: its operands, when it is met in these iterations.

    Attributes:
      place: the number of the equation.
      iterations: of the loops around it, outermost first.
    """

    place: int
    iterations: Any


def loop_depth(jaxpr: Jaxpr) -> int:
    """How deep loops are nested in a program, at most."""
    return max((_depth_of(eqn) for eqn in jaxpr.eqns), default=0)


def _depth_of(eqn: Eqn) -> int:
    inside = [loop_depth(body.jaxpr) + body.is_repeated for body in bodies_of(eqn)]
    return max(inside, default=0)


class Evaluator:
    """Evaluates programs of one example.

    Args:
      places: numbers equations.
      depth: how deep loops are nested, at most.
      watch: an equation whose operands are wanted.
      seen: what was seen of them so far, as `blank_view` has it.
      around: what the program is inside of.
    """

    def __init__(
        self,
        places: Places,
        depth: int,
        watch: Watch | None = None,
        seen: Sequence[Any] = (),
        around: tuple[Any, ...] = (),
    ) -> None:
        self._places, self._depth, self._watch = places, depth, watch
        self._around = around
        self.seen = list(seen)

    def run(
        self,
        program: Any,
        consts: Sequence[Marked],
        args: Sequence[Marked],
        iterations: tuple[Any, ...] = (),
    ) -> list[Marked]:
        """The outputs of a program, inside loops that are in these iterations."""

        def run_equation(eqn: Eqn, operands: list[Marked]) -> Sequence[Marked]:
            return self._equation(eqn, operands, iterations)

        return evaluate(program, consts, args, run_equation, lambda v: Marked(v.val))

    def input(self, x: Value, number: int) -> Marked:
        """An argument, or what the function closes over: its place is a number below zero."""
        if not _may_be_bad(x):
            return Marked(x)
        kind = _kind(x)
        return Marked(x, self._origin(kind, jnp.where(kind > 0, np.int32(number), 0), ()))

    def whole(self, values: Sequence[Marked]) -> list[Any]:
        """The origins of values; None for those that cannot be bad."""
        return [
            None if not _may_be_bad(v.value) else self.nowhere if v.origin is None else v.origin
            for v in values
        ]

    @property
    def nowhere(self) -> Any:
        """The origin of what is finite."""
        return jnp.zeros(FIRST_LOOP + self._depth, np.int32)

    def _equation(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        name = eqn.primitive.name
        inside = _INSIDE.get(name)
        if inside is not None and not _compat.is_namesake(eqn.primitive):
            return inside(self, eqn, operands, iterations)
        if facts_of(eqn.primitive).body or name in _WITH_RULES:
            (body,) = bodies_of(eqn)
            if body.operands:
                program = _compat.close(body.program)
                args = [operands[i] for i in body.operands]
                inner = self._inside(eqn, self.seen)
                outs = inner.run(program.jaxpr, _plain(program.consts), args, iterations)
                self.seen = inner.seen
                return outs
        values = [x.value for x in operands]
        outs = bind_equation(eqn, values)
        number = self._places.number(eqn, self._around)
        self._see(number, iterations, values)
        return [self._result(x, number, operands, iterations) for x in outs]

    def _inside(self, eqn: Eqn, seen: Sequence[Any]) -> Evaluator:
        """An evaluator for a program in an equation."""
        return Evaluator(self._places, self._depth, self._watch, seen, (*self._around, eqn))

    def _result(
        self, x: Value, number: int, operands: Sequence[Marked], iterations: tuple[Any, ...]
    ) -> Marked:
        """A result of an equation: what is bad in it comes from an operand, or from here."""
        if not _may_be_bad(x):
            return Marked(x)
        kind = _kind(x)
        mark = self._origin(kind, np.int32(number), iterations)
        marks = [o.origin for o in operands if o.origin is not None]
        for worst in (INFINITE, NAN):  # of several operands a NaN is to blame, if there is one
            for origin in reversed(marks):
                turned = jnp.where((kind == NAN) & (origin[KIND] < NAN), number, origin[TURNED])
                handed_on = origin.at[KIND].set(kind).at[TURNED].set(turned)
                mark = jnp.where(origin[KIND] >= worst, handed_on, mark)
        return Marked(x, jnp.where(kind > 0, mark, 0))

    def _origin(self, kind: Any, place: Any, iterations: tuple[Any, ...]) -> Any:
        rest = [-1] * (self._depth - len(iterations))
        entries = [kind, place, 0, *iterations, *rest]
        return jnp.stack([jnp.asarray(entry, np.int32) for entry in entries])

    def _see(self, number: int, iterations: tuple[Any, ...], values: Sequence[Value]) -> None:
        if self._watch is None or self._watch.place != number:
            return
        views = list(map(_view, values))
        if [jax.typeof(x).shape for x in views] != [jax.typeof(x).shape for x in self.seen]:
            return  # staged for something else, where equations have other numbers
        now = jnp.asarray(True)
        for k, index in enumerate(iterations):
            now &= self._watch.iterations[k] == index
        self.seen = [jnp.where(now, x, old) for x, old in zip(views, self.seen, strict=True)]

    def _scan(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        (body,) = bodies_of(eqn)
        program, n = _compat.close(body.program), body.carried
        length, reverse = eqn.params["length"], eqn.params["reverse"]
        carry = [operands[i] for i in body.carry_operands]
        sliced = [operands[i] for i in body.sliced_operands]
        of_sliced = self.whole(sliced)

        def step(state: Any, parts: Any) -> tuple[Any, Any]:
            count, values, origins, seen = state
            inner = self._inside(eqn, seen)
            index = length - 1 - count if reverse else count
            args = [
                *operands[: body.same],
                *map(Marked, values, origins),
                *map(_part, parts, of_sliced),
            ]
            outs = inner.run(program.jaxpr, _plain(program.consts), args, (*iterations, index))
            values, marks = [o.value for o in outs], inner.whole(outs)
            return (count + 1, values[:n], marks[:n], inner.seen), (values[n:], marks[n:])

        start = jnp.int32(0), [c.value for c in carry], self.whole(carry), self.seen
        state, (ys, marks) = lax.scan(
            step, start, [s.value for s in sliced], length=length, reverse=reverse
        )
        _, last, origins, self.seen = state
        firsts = [None if m is None or not length else m[jnp.argmax(m[:, KIND])] for m in marks]
        return [*map(Marked, last, origins), *map(Marked, ys, firsts)]

    def _while(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        test, body = bodies_of(eqn)
        of_test, of_body = _compat.close(test.program), _compat.close(body.program)
        fixed = [operands[i].value for i in test.operands[: test.same]]
        same = [operands[i] for i in body.operands[: body.same]]
        carry = [operands[i] for i in body.carry_operands]

        def go_on(state: Any) -> Any:
            return eval_jaxpr(of_test.jaxpr, of_test.consts, *fixed, *state[1])[0]

        def step(state: Any) -> Any:
            count, values, origins, seen = state
            inner = self._inside(eqn, seen)
            args = [*same, *map(Marked, values, origins)]
            outs = inner.run(of_body.jaxpr, _plain(of_body.consts), args, (*iterations, count))
            return count + 1, [o.value for o in outs], inner.whole(outs), inner.seen

        start = jnp.int32(0), [c.value for c in carry], self.whole(carry), self.seen
        _, last, origins, self.seen = lax.while_loop(go_on, step, start)
        return list(map(Marked, last, origins))

    def _cond(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        index, *others = operands
        origins = self.whole(others)

        def branch(body: Any) -> Any:
            program = _compat.close(body.program)

            def run(values: Any, origins: Any, seen: Any) -> Any:
                inner = self._inside(eqn, seen)
                args = list(map(Marked, values, origins))
                outs = inner.run(program.jaxpr, _plain(program.consts), args, iterations)
                return [o.value for o in outs], inner.whole(outs), inner.seen

            return run

        branches = [branch(body) for body in bodies_of(eqn)]
        values = [o.value for o in others]
        which = jnp.asarray(index.value, np.int32)
        outs, marks, self.seen = lax.switch(which, branches, values, origins, self.seen)
        return list(map(Marked, outs, marks))


_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")  # calls, if nobody differentiates them
_INSIDE = {"scan": Evaluator._scan, "while": Evaluator._while, "cond": Evaluator._cond}


def _plain(values: Sequence[Value]) -> list[Marked]:
    return [Marked(x) for x in values]


def _part(x: Value, origin: Any) -> Marked:
    """What a step takes of a value."""
    if origin is None:
        return Marked(x)
    kind = _kind(x)
    return Marked(x, jnp.where(kind > 0, origin.at[KIND].set(kind), 0))


def _may_be_bad(x: Value) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _kind(x: Value) -> Any:
    """The worst that is in a value."""
    kinds = jnp.where(jnp.isnan(x), NAN, jnp.where(jnp.isinf(x), INFINITE, FINITE))
    return kinds.astype(np.int32).max(initial=FINITE)


def blank_view(eqn: Eqn) -> list[Any]:
    """What is seen of the operands of an equation before it is met."""
    return [jnp.zeros_like(_view(jnp.zeros((), v.aval.dtype), v.aval.shape)) for v in eqn.invars]


def _view(x: Value, shape: Any = None) -> Any:
    """A value of few elements; of others how many are NaN, infinite, and the least and greatest."""
    shape = jnp.shape(x) if shape is None else shape
    if all(isinstance(n, int) for n in shape) and np.prod(shape) <= _SHOWN:
        return jnp.broadcast_to(x, shape)
    if not jnp.issubdtype(x.dtype, jnp.number):
        return jnp.zeros(4)
    finite = jnp.isfinite(x)
    return jnp.stack(
        [
            jnp.isnan(x).sum().astype(float),
            jnp.isinf(x).sum().astype(float),
            jnp.min(x.real, where=finite, initial=np.inf).astype(float),
            jnp.max(x.real, where=finite, initial=-np.inf).astype(float),
        ]
    )
