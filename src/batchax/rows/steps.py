"""A program of one row as a flat list of steps, each of which may run in a layout of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import Literal

from batchax.jaxprs.bodies import program_called
from batchax.jaxprs.evaluate import plan
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Value


@dataclass(frozen=True)
class Constant:
    """An operand that is written in the program."""

    value: Value
    shape: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class RowStep:
    """One equation, between values that have numbers.

    Attributes:
      eqn: the equation.
      inputs: for each operand the number of its value, or a `Constant`.
      outputs: the numbers of its results.
      callers: the equations of the calls that it is in, innermost first.
    """

    eqn: Eqn
    inputs: tuple[int | Constant, ...]
    outputs: tuple[int, ...]
    callers: tuple[Any, ...] = ()

    @property
    def dead(self) -> tuple[int, ...]:
        """The numbers of the values that nothing needs after it: unknown, as regions share them."""
        return ()

    @property
    def used(self) -> tuple[int, ...]:
        """The numbers of the values it uses."""
        return tuple(i for i in self.inputs if not isinstance(i, Constant))


@dataclass(frozen=True)
class RowProgram:
    """A program: its arguments are the values 0, 1, ...

    Attributes:
      steps: in order.
      shapes: the shape of each value, by number.
      consts: values that the program holds, by number.
      outputs: what it returns: numbers, or constants.
    """

    steps: list[RowStep]
    shapes: dict[int, tuple[Any, ...]]
    consts: dict[int, Any]
    outputs: list[int | Constant]


def flatten(program: ClosedJaxpr) -> RowProgram:
    """The steps of `program`, with those of the programs it calls in place of calls."""
    shapes: dict[int, tuple[Any, ...]] = {}
    consts: dict[int, Any] = {}
    steps: list[RowStep] = []

    def number(shape: Any) -> int:
        shapes[len(shapes)] = tuple(shape)
        return len(shapes) - 1

    def walk(
        body: Any, arguments: Sequence[int | Constant], callers: tuple[Any, ...] = ()
    ) -> list[int | Constant]:
        env: dict[Any, int | Constant] = dict(zip(body.jaxpr.invars, arguments, strict=True))
        for v, x in zip(body.jaxpr.constvars, body.consts, strict=True):
            env[v] = number(v.aval.shape)
            consts[env[v]] = x  # pyright: ignore[reportArgumentType]

        def read(v: Any) -> int | Constant:
            return Constant(v.val, np.shape(v.val)) if isinstance(v, Literal) else env[v]

        for eqn, *_ in plan(body.jaxpr.eqns, body.jaxpr.outvars):
            inputs = tuple(map(read, eqn.invars))
            if facts_of(eqn.primitive).is_plain_call:
                inner = program_called(eqn)
                outs = walk(inner, inputs, (eqn, *callers))
                env.update(zip(eqn.outvars, outs, strict=True))
                continue
            outputs = tuple(number(v.aval.shape) for v in eqn.outvars)
            env.update(zip(eqn.outvars, outputs, strict=True))
            steps.append(RowStep(eqn, inputs, outputs, callers))
        return [read(v) for v in body.jaxpr.outvars]

    outputs = walk(program, [number(v.aval.shape) for v in program.jaxpr.invars])
    return RowProgram(steps, shapes, consts, outputs)
