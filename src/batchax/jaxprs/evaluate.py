"""The evaluator: a program run equation by equation, each in a way of the caller's.

Batching, padding rows, masking lanes and comparing programs all walk through a program so; they
differ in what stands for a value, and in what they do with an equation.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Literal

from batchax import _compat
from batchax.jaxprs.types import Eqn, Jaxpr, Values


def evaluate(
    jaxpr: Jaxpr,
    consts: Values,
    args: Values,
    run_equation: Callable[[Any, list[Any]], Iterable[Any]],
    number: Callable[[Any], Any] = lambda literal: literal.val,
    keeps: Callable[[Any], Any] = operator.attrgetter("effects"),
) -> list[Any]:
    """Evaluates `jaxpr`, with `run_equation` for each equation that a result or an effect needs.

    `consts`, `args` and what `number` makes of a `Literal` may be anything that `run_equation`
    takes. `keeps` is as for `plan`.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return number(v) if type(v) is Literal else env[v]

    walk(
        plan(jaxpr.eqns, jaxpr.outvars, keeps),
        env,
        read,
        lambda step, operands: run_equation(step.eqn, operands),
    )
    return list(map(read, jaxpr.outvars))


def variables_in(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if type(v) is not Literal]


def variables_read(eqn: Eqn) -> list[Any]:
    return variables_in(eqn.invars)


def variables_used(jaxpr: Jaxpr) -> set[Any]:
    """Returns the variables that a program reads, or returns."""
    used = {v for eqn in jaxpr.eqns for v in variables_read(eqn)}
    return used.union(variables_in(jaxpr.outvars))


class Step(NamedTuple):
    """An equation, what it reads, what it makes, and what nothing after it reads."""

    eqn: Eqn
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    dead: Collection[Any]


def walk(
    steps: Iterable[Any],
    env: dict[Any, Any],
    read: Callable[[Any], Any],
    run_step: Callable[[Any, list[Any]], Iterable[Any]],
) -> None:
    """Runs steps one after another, from what `env` holds; there it leaves what they make."""
    names, stack = None, (outer := _compat.current_name_stack())
    # JAX has one object for all equations of the same surroundings, or of the same names.
    for surroundings, alike in itertools.groupby(steps, lambda step: step.eqn.ctx):
        with surroundings.manager:
            for step in alike:
                source = step.eqn.source_info
                if source.name_stack is not names:
                    names = source.name_stack
                    stack = outer + names
                operands = [read(v) for v in step.inputs]
                with _compat.in_source(source.traceback, name_stack=stack):
                    outs = run_step(step, operands)
                env.update(zip(step.outputs, outs, strict=True))
                for v in step.dead:
                    del env[v]
                operands = outs = None  # these would keep dead values alive


def bind_equation(eqn: Eqn, operands: Values, **changes: Any) -> Sequence[Any]:
    """Emits an equation again, on other operands and with `changes` to its parameters."""
    primitive, params = eqn.primitive, {**eqn.params, **changes} if changes else eqn.params
    out = primitive.bind(*operands, **primitive.get_bind_params(params))
    return out if primitive.multiple_results else [out]


def plan(
    eqns: Sequence[Eqn],
    outvars: Iterable[Any],
    keeps: Callable[[Any], Any] = operator.attrgetter("effects"),
    reads: Callable[[Any], Iterable[Any]] | None = None,
) -> list[Step]:
    """Lists those of `eqns` that `outvars` need, each with the variables that are dead after it.

    `keeps` says which are needed anyhow, `reads` which variables one needs (by default its
    operands).
    """
    # From the last equation backwards: a variable whose last reader this is, is dead after it.
    # Dropping values then keeps eager runs within the memory that ordinary Python code needs.
    live = set(variables_in(outvars))
    steps = []
    for eqn in reversed(eqns):
        inputs, outputs = eqn.invars, eqn.outvars
        if live.isdisjoint(outputs) and not keeps(eqn):
            continue
        used = {v for v in inputs if type(v) is not Literal} if reads is None else set(reads(eqn))
        steps.append(Step(eqn, inputs, outputs, used.union(outputs) - live))
        live |= used
    return steps[::-1]
