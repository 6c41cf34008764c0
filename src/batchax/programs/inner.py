"""The programs that an equation of a staged program runs, and how often."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.core import Tracer
from jax.extend.core import Literal, jaxprs_in_params

from batchax import _compat
from batchax.engine.own_primitives import expanded, operations_of
from batchax.engine.primitive_facts import facts_of


@dataclass(frozen=True)
class Inner:
    """A program that an equation runs.

    Attributes:
      role: "body" of a `scan` or `while`, "condition" of a `while`, "branch 0" and so on of
        a `cond`, or "call".
      jaxpr: the program; constants of its own are its `constvars`.
      times: how often it runs; None if that is known only when it has run.
      integers: those of its inputs that are integers known without running anything.
    """

    role: str
    jaxpr: Any
    times: int | None
    integers: Mapping[Any, int] = field(default_factory=dict, compare=False)


def programs_in(eqn: Any, integers: Mapping[Any, int] | None = None) -> list[Inner]:
    """The programs that an equation runs.

    A derivative rule beside a program is none of them, nor is the function with which a
    reduction or a scatter combines two elements. One of batchax's own primitives runs the
    operations that it stands for.

    Args:
      eqn: the equation.
      integers: the integers known in the program that it is from, as `integers_in` finds
        them. With them a `while` that counts up to a bound has its number of steps.
    """
    name, known = eqn.primitive.name, integers or {}
    if facts_of(eqn.primitive).combines:
        return []
    if name in _LOOPS_AND_BRANCHES:
        return _LOOPS_AND_BRANCHES[name](eqn, known)
    if name == "call_hi_primitive":
        own = expanded(eqn.params["_prim"], [v.aval for v in eqn.invars])
    else:
        own = operations_of(eqn)
    if own is not None:
        return [_call(own, eqn.invars, known)]
    if name == "custom_linear_solve":  # the others are for derivatives
        return [Inner("call", _open(eqn.params["jaxprs"].solve), 1)]
    return [_call(p, eqn.invars, known) for p in list(jaxprs_in_params(eqn.params))[:1]]


def _call(program: Any, operands: Any, known: Mapping[Any, int]) -> Inner:
    return Inner("call", _open(program), 1, _passed_on(program, operands, known))


def _open(program: Any) -> Any:
    return getattr(program, "jaxpr", program)


def _passed_on(program: Any, operands: Any, known: Mapping[Any, int]) -> dict[Any, int]:
    """The integers that the first inputs of a program are known to be."""
    found = integers_in(program)
    for var, operand in zip(_open(program).invars, operands, strict=False):
        value = _integer(operand, known)
        if value is not None:
            found[var] = value
    return found


# --- loops and branches ------------------------------------------------------------------------


def _scan(eqn: Any, known: Mapping[Any, int]) -> list[Inner]:
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    consts = eqn.invars[: _compat.scan_counts(eqn.params)[0]]
    times = length if isinstance(length, int) else None
    return [Inner("body", _open(body), times, _passed_on(body, consts, known))]


def _while(eqn: Any, known: Mapping[Any, int]) -> list[Inner]:
    n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_test, of_body = eqn.invars[:n_test], eqn.invars[n_test : n_test + n_body]
    of_test, of_body = _passed_on(test, of_test, known), _passed_on(body, of_body, known)
    start = [_integer(v, known) for v in eqn.invars[n_test + n_body :]]
    test, body = _open(test), _open(body)
    carried = _Carry(start, test.invars[n_test:], body.invars[n_body:], body.outvars)
    steps = _steps(carried, test, body, of_test, of_body)
    return [
        Inner("condition", test, None if steps is None else steps + 1, of_test),
        Inner("body", body, steps, of_body),
    ]


def _cond(eqn: Any, known: Mapping[Any, int]) -> list[Inner]:
    return [
        Inner(f"branch {i}", _open(p), 1, _passed_on(p, eqn.invars[1:], known))
        for i, p in enumerate(eqn.params["branches"])
    ]


_LOOPS_AND_BRANCHES: dict[str, Callable[..., list[Inner]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}


# --- how many steps a loop that counts takes ---------------------------------------------------


@dataclass(frozen=True)
class _Carry:
    """A carry of a `while`: at the start, tested, before a step, and after it."""

    start: list[int | None]
    tested: list[Any]
    before: list[Any]
    after: list[Any]


def _steps(
    carried: _Carry,
    test: Any,
    body: Any,
    of_test: dict[Any, int],
    of_body: dict[Any, int],
) -> int | None:
    """The steps of a loop that goes on while a counter is below a bound; None of others."""
    fixed = [
        start if after is before else None
        for start, before, after in zip(carried.start, carried.before, carried.after, strict=True)
    ]
    of_test = of_test | _given(carried.tested, fixed)
    of_body = of_body | _given(carried.before, fixed)
    below = _below(test, integers_in(test, of_test))
    if below is None or below[0] not in carried.tested:
        return None
    counter, bound = below
    place = carried.tested.index(counter)
    start = carried.start[place]
    stride = _added(body, carried.before[place], carried.after[place], of_body)
    if start is None or stride is None or stride < 1:
        return None
    return max(0, -((start - bound) // stride))


def _given(variables: list[Any], values: list[int | None]) -> dict[Any, int]:
    return {v: n for v, n in zip(variables, values, strict=True) if n is not None}


def _below(test: Any, known: Mapping[Any, int]) -> tuple[Any, int] | None:
    """The variable and the bound below which it has to be for a loop to go on."""
    made = _maker(test, test.outvars[0])
    if made is None or made.primitive.name not in _COMPARISONS:
        return None
    low, high = made.invars
    name = made.primitive.name
    if name in ("gt", "ge"):
        low, high = high, low
    bound = _integer(high, known)
    if bound is None or isinstance(low, Literal):
        return None
    while (made := _maker(test, low)) is not None and facts_of(made.primitive).alias:
        low = made.invars[0]
    return low, bound + (name in ("le", "ge"))


_COMPARISONS = frozenset(["lt", "le", "gt", "ge"])


def _added(body: Any, before: Any, after: Any, known: Mapping[Any, int]) -> int | None:
    """What a step adds to a variable; None if it is not a known integer."""
    made = _maker(body, after)
    if made is None or made.primitive.name != "add" or before not in made.invars:
        return None
    first, second = made.invars
    return _integer(second if first is before else first, integers_in(body, known))


def _maker(jaxpr: Any, variable: Any) -> Any:
    """The equation that a variable is a result of."""
    return next((eqn for eqn in jaxpr.eqns if variable in eqn.outvars), None)


# --- known integers ----------------------------------------------------------------------------

_OF_TWO: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "max": max,
    "min": min,
}


def integers_in(program: Any, inputs: Mapping[Any, int] | None = None) -> dict[Any, int]:
    """The scalar integers of a program that are known without running it.

    Args:
      program: the program; with its constants, if it is a closed one.
      inputs: integers that are known of its inputs.
    """
    jaxpr = _open(program)
    known = dict(inputs or {})
    for var, value in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=False):
        if _is_integer(value):
            known[var] = int(value)
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        keeps = facts_of(eqn.primitive).alias
        if not (keeps or name in _OF_TWO) or not _is_integer(eqn.outvars[0].aval):
            continue
        values = [n for v in eqn.invars if (n := _integer(v, known)) is not None]
        if len(values) == len(eqn.invars):
            known[eqn.outvars[0]] = _OF_TWO[name](*values) if name in _OF_TWO else values[0]
    return known


def _integer(operand: Any, known: Mapping[Any, int]) -> int | None:
    if not isinstance(operand, Literal):
        return known.get(operand)
    return int(operand.val) if _is_integer(operand.aval) else None


def _is_integer(x: Any) -> bool:
    """Whether an array, or the type of one, is a single integer that can be looked at."""
    kind = getattr(getattr(x, "dtype", None), "kind", None)
    return kind in ("i", "u") and x.shape == () and not isinstance(x, Tracer)
