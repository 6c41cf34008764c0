"""The programs that an equation of a staged program runs, and how often."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Literal

from batchax import _compat
from batchax.jaxprs.bodies import Body, bodies_of
from batchax.jaxprs.primitive_facts import expanded, facts_of, operations_of
from batchax.jaxprs.types import Atom, Eqn, Jaxpr, Program, Value, Var


@dataclass(frozen=True)
class Inner(Body):
    """Describes a body, and what is known about it without running it."""

    most: int | None = None  # the largest number of runs; None if unknown
    # known integers among its inputs
    integers: Mapping[Any, int] = field(default_factory=dict, compare=False)

    def differing(self, operands: Sequence[bool] | None) -> list[bool] | None:
        """Returns which inputs may differ between lanes, from which operands do."""
        if operands is None:
            return None
        inputs = len(self.jaxpr.invars)
        marks = [operands[i] for i in self.operands]
        if self.times is None or self.role == "condition" or len(marks) != inputs:
            # Of lanes that may take different numbers of steps, what is carried differs; a
            # condition does not return what is carried.
            return [*marks[: self.same], *[True] * (inputs - self.same)]
        carry = slice(self.same, self.same + self.carried)
        while True:
            marked = [v for v, mark in zip(self.jaxpr.invars, marks, strict=True) if mark]
            found = map(depending(self.jaxpr, marked), self.jaxpr.outvars[: self.carried])
            merged = [a or b for a, b in zip(marks[carry], found, strict=True)]
            if merged == marks[carry]:
                return marks
            marks[carry] = merged


def depending(program: Jaxpr, values: Iterable[Var]) -> Callable[[Atom], bool]:
    """Returns a function that tests whether a value of a jaxpr depends on one of `values`."""
    own = set(values)
    is_own = lambda v: not isinstance(v, Literal) and v in own
    for eqn in program.eqns:
        if any(map(is_own, eqn.invars)):
            own.update(eqn.outvars)
    return is_own


def programs_in(eqn: Eqn, integers: Mapping[Any, int] | None = None) -> list[Inner]:
    """Lists the jaxprs that an equation runs.

    Primitives of batchax run the operations that they stand for. Derivative rules are not included,
    and neither are the functions in reductions and scatters. `integers` determine the steps of a
    `while` that counts up to a bound.
    """
    integers = integers or {}
    if eqn.primitive.name == "call_hi_primitive":
        own = expanded(eqn.params["_prim"], [v.aval for v in eqn.invars])
    else:
        own = operations_of(eqn)
    if own is not None:
        inputs = tuple(range(len(eqn.invars)))
        inside = _passed_on(own, eqn.invars, integers)
        return [Inner("call", own, inputs, (), len(inputs), most=1, integers=inside)]
    bodies = bodies_of(eqn)
    if [body.role for body in bodies] == ["condition", "body"]:
        test, body = bodies
        return _tested_and_run(eqn, test, body, integers)
    return [
        _inner(body, body.times, body.times, _known_inside(eqn, body, integers)) for body in bodies
    ]


def devices_of(eqn: Eqn) -> int:
    """Returns how many devices run the jaxpr of an equation, each for its shards."""
    mesh, names = eqn.params.get("mesh"), eqn.params.get("newly_manual_axes")
    return 1 if mesh is None or not names else math.prod(mesh.shape[name] for name in names)


def _inner(body: Body, times: object, most: object, integers: Mapping[Any, int]) -> Inner:
    is_size = lambda n: isinstance(n, int) or jax.export.is_symbolic_dim(n)
    times, most = (n if is_size(n) else None for n in (times, most))
    return Inner(**{**vars(body), "times": times, "most": most, "integers": integers})


def _known_inside(eqn: Eqn, body: Body, integers: Mapping[Any, int]) -> dict[Any, int]:
    return _passed_on(body.program, [eqn.invars[i] for i in body.operands[: body.same]], integers)


def _passed_on(
    program: Program, operands: Sequence[Atom], integers: Mapping[Any, int]
) -> dict[Any, int]:
    inside = integers_in(program)
    for var, operand in zip(_compat.jaxpr_of(program).invars, operands, strict=False):
        value = _integer(operand, integers)
        if value is not None:
            inside[var] = value
    return inside


# --- how many steps a loop that counts takes ---------------------------------------------------


def _tested_and_run(eqn: Eqn, test: Body, body: Body, integers: Mapping[Any, int]) -> list[Inner]:
    of_test, of_body = (_known_inside(eqn, part, integers) for part in (test, body))
    start = [_integer(eqn.invars[i], integers) for i in body.carry_operands]
    tested, before = test.jaxpr.invars[test.same :], body.jaxpr.invars[body.same :]
    carried = _Carry(start, tested, before, body.jaxpr.outvars)
    steps, most = _steps(carried, test.jaxpr, body.jaxpr, of_test, of_body)
    # The predicate is evaluated once more than the body.
    once_more = lambda n: None if n is None else n + 1
    return [
        _inner(test, once_more(steps), once_more(most), of_test),
        _inner(body, steps, most, of_body),
    ]


@dataclass(frozen=True)
class _Carry:
    """Holds the carry of a `while` at the start, as tested, and before and after a step."""

    start: list[int | None]
    tested: Sequence[Any]
    before: Sequence[Any]
    after: Sequence[Any]


def _steps(
    carried: _Carry,
    test: Jaxpr,
    body: Jaxpr,
    of_test: dict[Any, int],
    of_body: dict[Any, int],
) -> tuple[int | None, int | None]:
    """Returns the steps of a loop that runs while a counter is below a bound, and their maximum.

    The first is None if there are other conditions; both are if there is no such counter.
    """
    # A carry that a step returns unchanged has its first value.
    fixed = [
        start if after is before else None
        for start, before, after in zip(carried.start, carried.before, carried.after, strict=True)
    ]
    of_test = integers_in(test, of_test | _given(carried.tested, fixed))
    of_body = of_body | _given(carried.before, fixed)
    conjuncts = _conjuncts(test, test.outvars[0])
    counts = []
    for counter, bound in filter(None, (_below(test, v, of_test) for v in conjuncts)):
        if counter not in carried.tested:
            continue
        place = carried.tested.index(counter)
        start = carried.start[place]
        stride = _added(body, carried.before[place], carried.after[place], of_body)
        if start is not None and stride is not None and stride >= 1:
            # The number of strides from the start to the bound, rounded up.
            counts.append(max(0, -((start - bound) // stride)))
    most = min(counts, default=None)
    return (most if len(conjuncts) == 1 else None), most


def _conjuncts(test: Jaxpr, variable: Atom) -> list[Any]:
    """Lists the booleans that must all be true for `variable` to be true."""
    made = None if isinstance(variable, Literal) else _maker(test, variable)
    if made is not None and made.primitive.name == "some_active":
        return _conjuncts(test, made.invars[1])  # in a branch, which counts as if lanes take it
    if made is None or not (made.primitive.name == "and" or facts_of(made.primitive).alias):
        return [variable]
    return [v for operand in made.invars for v in _conjuncts(test, operand)]


def _given(variables: Sequence[Any], values: list[int | None]) -> dict[Any, int]:
    return {v: n for v, n in zip(variables, values, strict=True) if n is not None}


def _below(test: Jaxpr, condition: Atom, integers: Mapping[Any, int]) -> tuple[Any, int] | None:
    """Returns the variable, and its upper bound if the boolean `condition` is true."""
    made = None if isinstance(condition, Literal) else _maker(test, condition)
    if made is None or made.primitive.name not in _COMPARISONS:
        return None
    low, high = made.invars
    # x > y is y < x, and `<=` raises the bound by one.
    name = made.primitive.name
    if name in ("gt", "ge"):
        low, high = high, low
    bound = _integer(high, integers)
    if bound is None or isinstance(low, Literal):
        return None
    while (made := _maker(test, low)) is not None and facts_of(made.primitive).alias:
        low = made.invars[0]
    return low, bound + (name in ("le", "ge"))


_COMPARISONS = frozenset(["lt", "le", "gt", "ge"])


def _added(body: Jaxpr, before: Var, after: Var, integers: Mapping[Any, int]) -> int | None:
    """Returns what a step adds to a variable; None if that is not a known integer."""
    made = _maker(body, after)
    if made is None or made.primitive.name != "add" or before not in made.invars:
        return None
    first, second = made.invars
    return _integer(second if first is before else first, integers_in(body, integers))


def _maker(jaxpr: Jaxpr, variable: Atom) -> Eqn | None:
    return next((eqn for eqn in jaxpr.eqns if variable in eqn.outvars), None)


# --- known integers ----------------------------------------------------------------------------

_OF_TWO: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": max,
    "min": min,
}


def integers_in(program: Program, inputs: Mapping[Any, int] | None = None) -> dict[Any, int]:
    """Finds the scalar integers of a program that are known without running it."""
    jaxpr, integers = _compat.jaxpr_of(program), integers_given(program, inputs)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        keeps = facts_of(eqn.primitive).alias
        if not (keeps or name in _OF_TWO) or not _is_integer(eqn.outvars[0].aval):
            continue
        values = [n for v in eqn.invars if (n := _integer(v, integers)) is not None]
        if len(values) == len(eqn.invars):
            integers[eqn.outvars[0]] = _OF_TWO[name](*values) if name in _OF_TWO else values[0]
    return integers


def integers_given(program: Program, inputs: Mapping[Any, int] | None = None) -> dict[Any, int]:
    """Returns the known integers among constants and inputs, from which others follow."""
    integers = dict(inputs or {})
    for var, value in zip(
        _compat.jaxpr_of(program).constvars, getattr(program, "consts", ()), strict=False
    ):
        if _is_integer(value):
            integers[var] = int(value)
    return integers


def _integer(operand: Value, integers: Mapping[Any, int]) -> int | None:
    if not isinstance(operand, Literal):
        return integers.get(operand)
    return int(operand.val) if _is_integer(operand.aval) else None


def _is_integer(x: Value) -> bool:
    """Returns whether an array, or a type, is a single integer that can be read."""
    kind = getattr(getattr(x, "dtype", None), "kind", None)
    return kind in ("i", "u") and x.shape == () and not isinstance(x, Tracer)
