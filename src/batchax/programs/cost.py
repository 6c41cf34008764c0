"""What the equations of a staged program cost, in operations on numbers and bytes moved."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jax.extend.core import Literal

from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.words import Eqn, Jaxpr
from batchax.memo import Memo
from batchax.programs import prices
from batchax.programs.inner import Inner, integers_given, integers_in, programs_in
from batchax.programs.shapes import bytes_of, reads_symbols, size_of

STEPS = 16  # that a loop may be taken to run, where a guess of their number is wanted


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
      serial: those of the flops that are done one after another.
      fused: those of the bytes that are not moved if operations are fused with others.
      places: in memory, that depend on data: each is found by itself.
      calls: of a library, in units of the shortest.
      launches: operations begun, whatever their size, but for those that are fused with others:
        of these there is taken to be one in each run of a loop's program.
      at_least: whether there are loops of which nobody knows how many steps they take.
      at_most: whether there are branches, of which the most expensive was counted.
    """

    flops: int = 0
    transcendentals: int = 0
    bytes: int = 0
    serial: int = 0
    fused: int = 0
    places: int = 0
    calls: int = 0
    launches: int = 0
    at_least: bool = False
    at_most: bool = False

    def __add__(self, other: Cost) -> Cost:
        amounts = map(operator.add, _amounts(self), _amounts(other))
        least, most = self.at_least or other.at_least, self.at_most or other.at_most
        return Cost(*amounts, at_least=least, at_most=most)

    def __mul__(self, times: int) -> Cost:
        amounts = (n * times for n in _amounts(self))
        return Cost(*amounts, at_least=self.at_least, at_most=self.at_most)

    __rmul__ = __mul__


_amounts = operator.attrgetter(*(f.name for f in fields(Cost) if f.type == "int"))  # what adds up


def cost_of_equation(
    eqn: Eqn,
    integers: Mapping[Any, int] | None = None,
    differs: Sequence[bool] | None = None,
    steps: int = 1,
) -> Cost:
    """What an equation costs, that of the programs it runs included.

    A `while` that does not count up to a known bound is counted as so many `steps`, which
    `at_least` says. Of the branches of a `cond` the most expensive is counted, separately in
    operations and bytes, which `at_most` says if they differ. XLA's analysis does the same.
    A primitive that is in no table is taken for one operation on each element of its
    largest result. Inside `shard_map` the cost is that of one shard.

    Args:
      eqn: the equation.
      integers: the integers known in the program that it is from (see `integers_in`).
      differs: for each operand whether each lane has its own. If given, the result is the share
        of one of many lanes: what they have in common is read once for all of them, or done once.
      steps: of loops where their number is not known.
    """
    inner = programs_in(eqn, integers)
    if not inner:
        return _of_operation(eqn, differs)
    costs = [cost_of_program(p.jaxpr, p.integers, p.differing(differs), steps) for p in inner]
    if eqn.primitive.name == "cond":
        return _max_step(costs)
    fused = [Cost(launches=int(p.role != "call")) for p in inner]
    runs = zip(costs, fused, inner, strict=True)
    total = _sum(_repeated(c + one, p.times, steps) for c, one, p in runs)
    return total + cost_around(eqn, inner)


def cost_around(eqn: Eqn, inner: Sequence[Inner]) -> Cost:
    """What a loop or branch costs besides running the programs `inner`, which it holds."""
    if eqn.primitive.name == "scan":
        return Cost(bytes=_cut_and_joined(eqn))
    if eqn.primitive.name == "while" and inner[0].jaxpr.outvars[0].aval.shape:
        # A predicate for each lane: it is taken again, and what is done stays as it is.
        again = cost_of_program(inner[0].jaxpr, inner[0].integers)
        carry = [v.aval for v in eqn.outvars]
        return again + Cost(sum(map(size_of, carry)), bytes=3 * bytes_of(carry))
    return Cost()


_costs = Memo("what programs cost", most=8192)


def cost_of_program(
    jaxpr: Any,
    integers: Mapping[Any, int] | None = None,
    differs: Sequence[bool] | None = None,
    steps: int = 1,
) -> Cost:
    """What a program costs, that of the programs inside it included.

    Args:
      jaxpr: the program; a closed one knows its constants.
      integers: integers that are known of its inputs.
      differs, steps: as for an equation, of its inputs.
    """
    return costs_of_program(jaxpr, integers, differs, steps)[0]


def costs_of_program(
    jaxpr: Any,
    integers: Mapping[Any, int] | None = None,
    differs: Sequence[bool] | None = None,
    steps: int = 1,
) -> tuple[Cost, Cost]:
    """As `cost_of_program`; and of it what operations cost that are not fused with others."""
    program, given = getattr(jaxpr, "jaxpr", jaxpr), integers_given(jaxpr, integers)
    marks = None if differs is None else tuple(differs)
    key = (*map(given.get, (*program.constvars, *program.invars)), marks, steps)

    def count() -> tuple[Cost, Cost]:
        costs = list(costs_of_equations(program, integers_in(program, given), marks, steps))
        return _sum(costs), _sum(cost for cost in costs if cost.launches)

    return count() if reads_symbols() else _costs.get(key, count, owner=program)


def costs_of_equations(
    jaxpr: Jaxpr, integers: Mapping[Any, int], differs: Sequence[bool] | None, steps: int
) -> Iterator[Cost]:
    """What each equation of a program costs, but for those that run once for all lanes."""
    own = set(itertools.compress(jaxpr.invars, differs or ()))
    for eqn in jaxpr.eqns:
        marks = [not isinstance(v, Literal) and v in own for v in eqn.invars]
        if differs is None or any(marks):  # if not, it runs once for all lanes
            yield cost_of_equation(eqn, integers, None if differs is None else marks, steps)
            own.update(eqn.outvars)


def _of_operation(eqn: Eqn, differs: Sequence[bool] | None) -> Cost:
    name = eqn.primitive.name
    flops, transcendentals = 0.0, 0.0
    if name in prices.FLOPS or (eqn.outvars and name not in prices.MOVES):
        flops, transcendentals = prices.FLOPS.get(name, prices.elementwise)(eqn)
    moved = prices.bytes_moved(eqn, differs)
    return Cost(
        round(flops),
        round(transcendentals),
        moved,
        serial=round(flops) if name in prices.SERIAL else 0,
        fused=moved if prices.is_fused(eqn.primitive) else 0,
        places=prices.places_of(eqn),
        calls=prices.calls_of(eqn),
        launches=int(not (name in prices.PART_OF_OTHERS or prices.is_fused(eqn.primitive))),
    )


def _sum(costs: Iterable[Cost]) -> Cost:
    return functools.reduce(operator.add, costs, Cost())


def _repeated(cost: Cost, times: int | None, steps: int) -> Cost:
    return steps * cost + Cost(at_least=True) if times is None else cost * times


def _max_step(costs: list[Cost]) -> Cost:
    return Cost(
        *map(max, zip(*map(_amounts, costs), strict=True)),
        at_least=any(c.at_least for c in costs),
        at_most=any(c.at_most for c in costs) or len(set(costs)) > 1,
    )


def _cut_and_joined(eqn: Eqn) -> int:
    """Bytes that a scan moves to cut what it scans over, and to join the results."""
    (body,) = bodies_of(eqn)
    cut = (eqn.invars[i] for i in body.sliced_operands)
    joined = (eqn.outvars[i] for i in body.stacked_results)
    return 2 * bytes_of(v.aval for v in (*cut, *joined))
