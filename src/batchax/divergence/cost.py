"""What a program costs, by its own equations: enough to choose how lanes are run.

The unit is one elementary operation on one number, about a nanosecond of one core of a
processor. That is a guess made before anything is compiled; no result depends on it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal, jaxprs_in_params

from batchax import _compat
from batchax.engine.primitive_facts import facts_of
from batchax.programs.prices import LINEAR_ALGEBRA, RANDOM, SCATTERS, SERIES, TRANSCENDENTAL, VIEWS
from batchax.programs.shapes import matrices_of, size_of, terms_of_contraction

_STEPS_OF_WHILE = 16  # what a loop is taken to do if it does not say


@dataclass(frozen=True)
class _Prices:
    """What is paid for an operation on a number."""

    element: float
    """of most operations"""
    slow: float
    """of a sine, say"""
    contraction: float
    """of an addition or multiplication in one, which run many at a time"""
    shared: float
    """the same, where all lanes share one of the operands"""


_ALONE = _Prices(1.0, 10.0, 0.15, 0.15)
# All lanes at once: operations are fused and fill vector registers, and one matrix that
# many vectors are multiplied by is read once.
_TOGETHER = _Prices(0.02, 0.1, 0.15, 0.012)

_FREE = VIEWS | {"broadcast_in_dim", "convert_element_type"}  # fused with what uses them
_SLOW = TRANSCENDENTAL.keys() - {"rsqrt", "sqrt"} | {"rem"}

_known: weakref.WeakKeyDictionary[Any, dict[Any, float]] = weakref.WeakKeyDictionary()


def work(jaxpr: Any, lanes_differ: Sequence[bool] | None = None) -> float:
    """Elementary operations of a program, those of the programs inside it included.

    Args:
      jaxpr: the program, of one example.
      lanes_differ: if given, what is meant is the share of one of many lanes that run at
        once. For each input: whether each lane has its own.
    """
    key = None if lanes_differ is None else tuple(lanes_differ)
    known = _known.setdefault(jaxpr, {})
    if key not in known:
        known[key] = _sum(jaxpr, key)
    return known[key]


def _sum(jaxpr: Any, lanes_differ: Sequence[bool] | None) -> float:
    if lanes_differ is None:
        return sum(_of_equation(eqn, None) for eqn in jaxpr.eqns)
    differing = {v for v, differs in zip(jaxpr.invars, lanes_differ, strict=True) if differs}
    total = 0.0
    for eqn in jaxpr.eqns:
        marks = [not isinstance(v, Literal) and v in differing for v in eqn.invars]
        if any(marks):  # if not, it runs once for all lanes
            total += _of_equation(eqn, marks)
            differing.update(eqn.outvars)
    return total


def launches(jaxpr: Any) -> float:
    """How many operations a program runs, whatever they work on: each has its overhead."""
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = [launches(getattr(p, "jaxpr", p)) for p in jaxprs_in_params(eqn.params)]
        if name == "scan":
            total += sum(inner) * eqn.params["length"]
        elif name == "while":
            total += sum(inner) * _STEPS_OF_WHILE
        elif inner and not facts_of(eqn.primitive).combines:
            total += max(inner)
        else:
            total += name not in _FREE
    return total


def length(jaxpr: Any) -> int:
    """How many operations a program has, those of the programs inside it included."""
    inner = (p for eqn in jaxpr.eqns for p in jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(length(getattr(p, "jaxpr", p)) for p in inner)


def _of_equation(eqn: Any, lanes_differ: list[bool] | None) -> float:
    name = eqn.primitive.name
    prices = _ALONE if lanes_differ is None else _TOGETHER
    inner = [
        work(p, _inside(eqn, p, lanes_differ))
        for p in (getattr(p, "jaxpr", p) for p in jaxprs_in_params(eqn.params))
    ]
    if name == "scan":
        return sum(inner) * eqn.params["length"]
    if name == "while":
        return sum(inner) * _STEPS_OF_WHILE
    if name == "cond":
        return max(inner)
    if name == "dot_general":
        shared = lanes_differ is not None and not all(lanes_differ)
        return _contraction(eqn) * (prices.shared if shared else prices.contraction)
    if name in _OF_SHAPE:
        return _OF_SHAPE[name](eqn)
    if inner and not facts_of(eqn.primitive).combines:
        return max(inner)  # a derivative rule, beside a program, is not run
    size = max(map(size_of, (v.aval for v in (*eqn.invars, *eqn.outvars))), default=1)
    if name in _FREE:
        return 0.0
    if name in LINEAR_ALGEBRA:
        _, rows, columns = matrices_of(eqn.invars[0].aval)
        return 2.0 * size * math.sqrt(rows * columns) + 1000.0
    if name in SERIES:
        return 200.0 * size
    return size * (prices.slow if name in _SLOW else prices.element)


def _inside(eqn: Any, program: Any, lanes_differ: list[bool] | None) -> list[bool] | None:
    """For the inputs of a program in an equation, as `lanes_differ` for its operands."""
    if lanes_differ is None:
        return None
    name, unknown = eqn.primitive.name, [True] * len(program.invars)
    if name == "while":
        n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts = lanes_differ[n_test : n_test + n_body]
        return [*consts, *unknown[len(consts) :]] if len(consts) < len(unknown) else unknown
    if name == "scan":
        consts = lanes_differ[: _compat.scan_counts(eqn.params)[0]]
        return [*consts, *unknown[len(consts) :]]
    operands = lanes_differ[1:] if name == "cond" else lanes_differ
    return operands if len(operands) == len(unknown) else unknown


def _contraction(eqn: Any) -> float:
    return 2.0 * size_of(eqn.outvars[0].aval) * terms_of_contraction(eqn)


def _convolution(eqn: Any) -> float:
    kernel, out = eqn.invars[1].aval, eqn.outvars[0].aval
    features = kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * size_of(out) * size_of(kernel) / max(features, 1) * _ALONE.contraction


def _random(eqn: Any) -> float:
    return 30.0 * size_of(eqn.outvars[-1].aval)


def _sort(eqn: Any) -> float:
    size = size_of(eqn.invars[0].aval)
    return 5.0 * size * math.log2(size + 2)


def _moved(eqn: Any) -> float:
    """Of a slice or a gather: what it returns, not what it reads from."""
    return float(size_of(eqn.outvars[0].aval))


def _updated(eqn: Any) -> float:
    """Of an update in place: what is written."""
    return float(max((size_of(v.aval) for v in eqn.invars[1:]), default=1))


_OF_SHAPE: dict[str, Callable[[Any], float]] = {
    "conv_general_dilated": _convolution,
    **dict.fromkeys([*RANDOM, "random_fold_in"], _random),
    "sort": _sort,
    "slice": _moved,
    "dynamic_slice": _moved,
    "gather": lambda eqn: 4.0 * _moved(eqn),
    "dynamic_update_slice": _updated,
    **dict.fromkeys(
        SCATTERS,
        lambda eqn: 8.0 * _updated(eqn),
    ),
}
