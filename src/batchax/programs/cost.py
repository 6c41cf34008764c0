"""What the equations of a staged program cost, in operations on numbers and bytes moved."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchax.jaxprs.bodies import bodies_of
from batchax.programs.inner import Inner as Inner
from batchax.programs.inner import integers_in as integers_in
from batchax.programs.inner import programs_in as programs_in
from batchax.programs.prices import FLOPS, MOVES, bytes_moved, elementwise
from batchax.programs.shapes import bytes_of, size_of


@dataclass(frozen=True)
class Cost:
    """What work costs.

    Costs can be added, and multiplied by a number of times.

    Attributes:
      flops: operations on numbers, whatever their type; of a contraction two for each
        product. Moving data is none.
      transcendentals: evaluations of functions such as a sine, an exponential or a root,
        which are not among the `flops`.
      bytes: read and written by each operation alone, as if none were fused.
      at_least: whether a loop whose number of steps is not known was counted as one step.
      at_most: whether there are branches, of which the dearest was counted.
    """

    flops: int = 0
    transcendentals: int = 0
    bytes: int = 0
    at_least: bool = False
    at_most: bool = False

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.transcendentals + other.transcendentals,
            self.bytes + other.bytes,
            self.at_least or other.at_least,
            self.at_most or other.at_most,
        )

    def __mul__(self, times: int) -> Cost:
        return Cost(
            self.flops * times,
            self.transcendentals * times,
            self.bytes * times,
            self.at_least,
            self.at_most,
        )

    __rmul__ = __mul__


def cost_of_equation(eqn: Any, integers: Mapping[Any, int] | None = None) -> Cost:
    """What an equation costs, that of the programs it runs included.

    A `while` that does not count up to a known bound is counted as one step, which
    `at_least` says. Of the branches of a `cond` the dearest is counted, separately in
    operations and bytes, which `at_most` says if they differ. XLA's analysis does the same.
    A primitive that is in no table is taken for one operation on each element of its
    largest result. Inside `shard_map` the cost is that of one shard.

    Args:
      eqn: the equation.
      integers: the integers known in the program that it is from (see `integers_in`).
    """
    inner = programs_in(eqn, integers)
    if not inner:
        return _of_operation(eqn)
    costs = [cost_of_program(p.jaxpr, p.integers) for p in inner]
    if eqn.primitive.name == "cond":
        return _dearest(costs)
    total = _sum(_repeated(c, p.times) for c, p in zip(costs, inner, strict=True))
    return total + cost_around(eqn, inner)


def cost_around(eqn: Any, inner: Sequence[Inner]) -> Cost:
    """What a loop or branch costs besides running the programs `inner`, which it holds."""
    if eqn.primitive.name == "scan":
        return Cost(bytes=_cut_and_joined(eqn))
    if eqn.primitive.name == "while" and inner[0].jaxpr.outvars[0].aval.shape:
        # A predicate for each lane: it is taken again, and what is done stays as it is.
        again = cost_of_program(inner[0].jaxpr, inner[0].integers)
        carry = [v.aval for v in eqn.outvars]
        return again + Cost(sum(map(size_of, carry)), bytes=3 * bytes_of(carry))
    return Cost()


_known: weakref.WeakKeyDictionary[Any, dict[Any, Cost]] = weakref.WeakKeyDictionary()


def cost_of_program(jaxpr: Any, integers: Mapping[Any, int] | None = None) -> Cost:
    """What a program costs, that of the programs inside it included.

    Args:
      jaxpr: the program; a closed one knows its constants.
      integers: integers that are known of its inputs.
    """
    known = integers_in(jaxpr, integers)
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    key = tuple(known.get(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    costs = _known.setdefault(jaxpr, {})
    if key not in costs:
        costs[key] = _sum(cost_of_equation(eqn, known) for eqn in jaxpr.eqns)
    return costs[key]


def _of_operation(eqn: Any) -> Cost:
    name = eqn.primitive.name
    if name in MOVES or (not eqn.outvars and name not in FLOPS):
        return Cost(bytes=bytes_moved(eqn))
    flops, transcendentals = FLOPS.get(name, elementwise)(eqn)
    return Cost(round(flops), round(transcendentals), bytes_moved(eqn))


def _sum(costs: Iterable[Cost]) -> Cost:
    return functools.reduce(operator.add, costs, Cost())


def _repeated(cost: Cost, times: int | None) -> Cost:
    return cost + Cost(at_least=True) if times is None else cost * times


def _dearest(costs: list[Cost]) -> Cost:
    return Cost(
        max(c.flops for c in costs),
        max(c.transcendentals for c in costs),
        max(c.bytes for c in costs),
        any(c.at_least for c in costs),
        any(c.at_most for c in costs) or len(set(costs)) > 1,
    )


def _cut_and_joined(eqn: Any) -> int:
    """Bytes that a scan moves to cut what it scans over, and to join the results."""
    (body,) = bodies_of(eqn)
    cut = (eqn.invars[i] for i in body.sliced_operands)
    joined = (eqn.outvars[i] for i in body.stacked_results)
    return 2 * bytes_of(v.aval for v in (*cut, *joined))
