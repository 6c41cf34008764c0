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
from batchax.nonfinite.links import KIND, Lanes, Link, find_origins, has_elements, link, nowhere

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
    """The equations of a program, numbered from 1 as they are met.

    Attributes:
      known: The equations.
      numbers: By the identity of the equation and of those around it.
      of_lanes: The numbers of those, and of inputs, whose values have an axis of lanes.
    """

    known: list[Place] = field(default_factory=list)
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    of_lanes: set[int] = field(default_factory=set)

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
    """A value, and the link by which its origin is found; None if it is known to be finite."""

    value: Value
    link: Link | None = None


@dataclass(frozen=True)
class Watch:
    """What is to be seen of an equation: its operands, when it is met in these iterations.

    Attributes:
      place: the number of the equation.
      iterations: of the loops around it, outermost first.
      lane: The lane of which operands are wanted; None for all of them.
      axes: Where operands have the axis of lanes.
    """

    place: int
    iterations: Any
    lane: int | None = None
    axes: Sequence[int | None] = ()

    def in_lane(self, operands: Sequence[Value]) -> list[Value]:
        """The operands of the lane."""
        axes = self.axes or [None] * len(operands)
        return [
            x if axis is None else jnp.take(x, self.lane or 0, axis)
            for x, axis in zip(operands, axes, strict=True)
        ]


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
      lanes: The lanes of a program that was batched; None for a program of one example.
    """

    def __init__(
        self,
        places: Places,
        depth: int,
        watch: Watch | None = None,
        seen: Sequence[Any] = (),
        around: tuple[Any, ...] = (),
        lanes: Lanes | None = None,
    ) -> None:
        self._places, self._depth, self._watch = places, depth, watch
        self._around, self._lanes = around, lanes
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
        return Marked(x, self._link(x, None, number) if self._marks(x) else None)

    def _link(self, x: Value, eqn: Eqn | None, number: int, *more: Any) -> Link:
        """The link of a result of an equation, or of another value."""
        axis = None if self._lanes is None else self._lanes.axis_of(eqn, jax.typeof(x))
        if axis is not None:
            self._places.of_lanes.add(number)
        return link(x, number, *more, axis=axis, lanes=self._lanes)

    def whole(self, values: Sequence[Marked]) -> list[Any]:
        """The origins of values; None for those that cannot be bad, and where nobody asks."""
        find_origins([v.link for v in values if v.link is not None], self._depth, self._lanes)
        return [
            None if not self._marks(v.value) else v.link.origin if v.link else self.nowhere
            for v in values
        ]

    def _marks(self, x: Value) -> bool:
        """Whether `x` may be bad, and somebody asks: nobody does who watches an equation."""
        return self._watch is None and _may_be_bad(x)

    @property
    def nowhere(self) -> Any:
        """The origin of what is finite."""
        return nowhere(self._depth, self._lanes)

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
        return [self._result(x, eqn, number, operands, iterations) for x in outs]

    def _inside(self, eqn: Eqn, seen: Sequence[Any]) -> Evaluator:
        """An evaluator for a program in an equation."""
        around = (*self._around, eqn)
        return Evaluator(self._places, self._depth, self._watch, seen, around, self._lanes)

    def _result(
        self, x: Value, eqn: Eqn, number: int, operands: Sequence[Marked], iterations: Any
    ) -> Marked:
        """A result of an equation: what is bad in it comes from an operand, or from here."""
        if not self._marks(x):
            return Marked(x)
        if _is_as_bad(eqn):
            return Marked(x, operands[0].link)
        parents = [o.link for o in operands if o.link is not None]
        return Marked(x, self._link(x, eqn, number, iterations, parents))

    def _see(self, number: int, iterations: tuple[Any, ...], values: Sequence[Value]) -> None:
        if self._watch is None or self._watch.place != number:
            return
        if self._watch.axes and len(self._watch.axes) != len(values):
            return
        views = list(map(_view, self._watch.in_lane(values)))
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
        self.whole(operands)  # once, for all that the loop is given
        of_sliced = self.whole(sliced)

        def step(state: Any, parts: Any) -> tuple[Any, Any]:
            count, values, origins, seen = state
            inner = self._inside(eqn, seen)
            index = length - 1 - count if reverse else count
            args = [
                *operands[: body.same],
                *map(_whole, values, origins),
                *map(self._part, parts, of_sliced),
            ]
            outs = inner.run(program.jaxpr, _plain(program.consts), args, (*iterations, index))
            values, marks = [o.value for o in outs], inner.whole(outs)
            return (count + 1, values[:n], marks[:n], inner.seen), (values[n:], marks[n:])

        start = jnp.int32(0), [c.value for c in carry], self.whole(carry), self.seen
        state, (ys, marks) = lax.scan(
            step, start, [s.value for s in sliced], length=length, reverse=reverse
        )
        _, last, origins, self.seen = state
        firsts = [None if m is None or not length else _worst_of(m) for m in marks]
        return [*map(_whole, last, origins), *map(_whole, ys, firsts)]

    def _part(self, x: Value, origin: Any) -> Marked:
        """What a step takes of a value."""
        if origin is None:
            return Marked(x)
        return Marked(x, self._link(x, None, 0, (), [Link(None, origin=origin)]))

    def _while(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        test, body = bodies_of(eqn)
        of_test, of_body = _compat.close(test.program), _compat.close(body.program)
        fixed = [operands[i].value for i in test.operands[: test.same]]
        same = [operands[i] for i in body.operands[: body.same]]
        carry = [operands[i] for i in body.carry_operands]
        self.whole(operands)

        def go_on(state: Any) -> Any:
            return eval_jaxpr(of_test.jaxpr, of_test.consts, *fixed, *state[1])[0]

        def step(state: Any) -> Any:
            count, values, origins, seen = state
            inner = self._inside(eqn, seen)
            args = [*same, *map(_whole, values, origins)]
            outs = inner.run(of_body.jaxpr, _plain(of_body.consts), args, (*iterations, count))
            return count + 1, [o.value for o in outs], inner.whole(outs), inner.seen

        start = jnp.int32(0), [c.value for c in carry], self.whole(carry), self.seen
        _, last, origins, self.seen = lax.while_loop(go_on, step, start)
        return list(map(_whole, last, origins))

    def _cond(
        self, eqn: Eqn, operands: list[Marked], iterations: tuple[Any, ...]
    ) -> Sequence[Marked]:
        index, *others = operands
        origins = self.whole(others)

        def branch(body: Any) -> Any:
            program = _compat.close(body.program)

            def run(values: Any, origins: Any, seen: Any) -> Any:
                inner = self._inside(eqn, seen)
                args = list(map(_whole, values, origins))
                outs = inner.run(program.jaxpr, _plain(program.consts), args, iterations)
                return [o.value for o in outs], inner.whole(outs), inner.seen

            return run

        branches = [branch(body) for body in bodies_of(eqn)]
        values = [o.value for o in others]
        which = jnp.asarray(index.value, np.int32)
        outs, marks, self.seen = lax.switch(which, branches, values, origins, self.seen)
        return list(map(_whole, outs, marks))


_ONLY_MOVE = ("transpose", "rev", "neg", "copy")
_WITH_RULES = ("custom_jvp_call", "custom_vjp_call")  # calls, if nobody differentiates them
_INSIDE = {"scan": Evaluator._scan, "while": Evaluator._while, "cond": Evaluator._cond}


def _plain(values: Sequence[Value]) -> list[Marked]:
    return [Marked(x) for x in values]


def _whole(x: Value, origin: Any) -> Marked:
    """A value whose origin is known; None if it cannot be bad, or nobody asks."""
    return Marked(x, None if origin is None else Link(None, origin=origin))


def _worst_of(origins: Any) -> Any:
    """Of the origins of the parts of a value, the first of the worst."""
    first = jnp.argmax(origins[..., KIND : KIND + 1], 0, keepdims=True)
    return jnp.take_along_axis(origins, first, 0)[0]


def _may_be_bad(x: Value) -> bool:
    return jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _is_as_bad(eqn: Eqn) -> bool:
    """Whether the result is as its operand, if not in place and sign: then it is not looked at."""
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if eqn.primitive.name == "broadcast_in_dim":
        return has_elements(after)
    alike = facts_of(eqn.primitive).alias or eqn.primitive.name in _ONLY_MOVE
    return alike and before.dtype == after.dtype


def operand_types(eqn: Eqn, watch: Watch | None = None) -> list[Any]:
    """The types of the operands of an equation, in a lane if one is watched."""
    types = [v.aval for v in eqn.invars]
    if watch is None or not watch.axes:
        return types
    return [
        t if axis is None else t.update(shape=(*t.shape[:axis], *t.shape[axis + 1 :]))
        for t, axis in zip(types, watch.axes, strict=True)
    ]


def blank_view(eqn: Eqn, watch: Watch | None = None) -> list[Any]:
    """What is seen of the operands of an equation before it is met."""
    types = operand_types(eqn, watch)
    return [jnp.zeros_like(_view(jnp.zeros((), t.dtype), t.shape)) for t in types]


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
