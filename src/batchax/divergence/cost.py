"""What a program costs, estimated from its equations: enough to choose how lanes are run.

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

from batchax.jaxprs.bodies import Body, bodies_of
from batchax.programs.prices import LINEAR_ALGEBRA, RANDOM, SCATTERS, SERIES, TRANSCENDENTAL, VIEWS
from batchax.programs.shapes import matrices_of, size_of, terms_of_contraction

_STEPS_OF_WHILE = 16  # how many steps a loop is taken to run if their number is not known


@dataclass(frozen=True)
class _Prices:
    """What is paid for an operation on a number."""

    element: float
    """of most operations"""
    slow: float
    """of a sine, say"""
    contraction: float
    """of an addition or multiplication in a contraction, where many run at a time"""
    shared: float
    """the same, where all lanes share one of its operands"""


_ALONE = _Prices(1.0, 10.0, 0.15, 0.15)
# A lane's share, of many that run at once: operations are fused and fill vector registers, and a
# matrix that all lanes share is read once for all of them.
_TOGETHER = _Prices(0.02, 0.1, 0.15, 0.012)

_FREE = VIEWS | {"broadcast_in_dim", "convert_element_type"}  # fused with what uses them
_SLOW = TRANSCENDENTAL.keys() - {"rsqrt", "sqrt"} | {"rem"}

_known: weakref.WeakKeyDictionary[Any, dict[Any, float]] = weakref.WeakKeyDictionary()


def work(jaxpr: Any, lanes_differ: Sequence[bool] | None = None) -> float:
    """Elementary operations of a program, those of the programs inside it included.

    Args:
      jaxpr: the program, of one example.
      lanes_differ: for each input, whether each lane has its own. If given, the result is the
        share of one of many lanes that run at once; if not, the cost of one example alone.
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
    """How many operations a program runs, of any size: each has the same overhead."""
    total = 0.0
    for eqn in jaxpr.eqns:
        bodies = bodies_of(eqn)
        total += _run(bodies, [launches(b.jaxpr) for b in bodies]) if bodies else _is_one(eqn)
    return total


def _is_one(eqn: Any) -> bool:
    """Whether an equation is an operation of its own, not fused with what uses its result."""
    return eqn.primitive.name not in _FREE


def _run(bodies: Sequence[Body], costs: Sequence[float]) -> float:
    """What running programs costs: the steps of loops, the dearest branch."""
    if not bodies[0].is_repeated:
        return max(costs)
    times = (_STEPS_OF_WHILE if b.times is None else b.times for b in bodies)
    return sum(cost * n for cost, n in zip(costs, times, strict=True))


def length(jaxpr: Any) -> int:
    """How many operations a program has, to be compiled: each counts once, in loops too."""
    inner = (p for eqn in jaxpr.eqns for p in jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(length(getattr(p, "jaxpr", p)) for p in inner)


def _of_equation(eqn: Any, lanes_differ: list[bool] | None) -> float:
    name = eqn.primitive.name
    prices = _ALONE if lanes_differ is None else _TOGETHER
    bodies = bodies_of(eqn)
    if bodies:
        return _run(bodies, [work(b.jaxpr, _inside(b, lanes_differ)) for b in bodies])
    if name == "dot_general":
        shared = lanes_differ is not None and not all(lanes_differ)
        return _contraction(eqn) * (prices.shared if shared else prices.contraction)
    if name in _OF_SHAPE:
        return _OF_SHAPE[name](eqn)
    size = max(map(size_of, (v.aval for v in (*eqn.invars, *eqn.outvars))), default=1)
    if name in _FREE:
        return 0.0
    if name in LINEAR_ALGEBRA:
        _, rows, columns = matrices_of(eqn.invars[0].aval)
        return 2.0 * size * math.sqrt(rows * columns) + 1000.0
    if name in SERIES:
        return 200.0 * size
    return size * (prices.slow if name in _SLOW else prices.element)


def _inside(body: Body, lanes_differ: list[bool] | None) -> list[bool] | None:
    """`lanes_differ` for the inputs of a program in an equation, from that of its operands.

    A carry, and an entry of a scanned array, is taken to differ.
    """
    if lanes_differ is None:
        return None
    same = [lanes_differ[i] for i in body.operands[: body.same]]
    return [*same, *[True] * (len(body.jaxpr.invars) - len(same))]


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
