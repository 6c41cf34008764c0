"""What dear branches add to a cotangent at each step, put off until the loop is over.

Back over a ``scan`` of one example, a weight that all steps share has a cotangent that each step
adds to. Lanes at places of their own would each carry a sum of their own. But nothing in the loop
reads it: what a branch adds follows from its operands, which are stacked anyway, and from the
cotangents of its results, which are stacked besides. So the loop is made one without these sums,
and what is to be added up after it is told by every `Visit`: all are independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Literal
from jax.extend.core.primitives import broadcast_in_dim_p, cond_p, scan_p

from batchax import _compat
from batchax.jaxprs.bodies import Body, bodies_of
from batchax.jaxprs.evaluate import bind_equation, plan, walk
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr, Value
from batchax.user_rules.linear import linear_p


@dataclass(frozen=True)
class Operand:
    """An operand of a visit, stacked over some of the loops around it, the outermost first."""

    value: Any
    over: tuple[bool, ...] = ()


@dataclass(frozen=True, eq=False)
class Visit:
    """A branch at each step of the loops around it, and what it adds to some cotangents.

    Attributes:
      tangents: the program of its tangents: of operands, and tangents of some of them.
      index: the operand that says which branch it is.
      branches: how many there are.
      count: how many operands there are.
      of: the tangents whose cotangents are put off.
      operands: the operands, and then cotangents of the results of `tangents`.
      lengths: of the loops around it.
    """

    tangents: ClosedJaxpr
    index: int
    branches: int
    count: int
    of: tuple[int, ...]
    operands: tuple[Operand, ...]
    lengths: tuple[int, ...] = ()


@dataclass
class _Sum:
    """A value that is a sum: what is computed of it, None for zero, and what visits add."""

    rest: Any = None
    visits: list[tuple[Visit, int]] = field(default_factory=list)

    def plus(self, other: _Sum) -> _Sum:
        some = [x for x in (self.rest, other.rest) if x is not None]
        rest = lax.add(*some) if len(some) == 2 else next(iter(some), None)
        return _Sum(rest, self.visits + other.visits)


@dataclass(frozen=True, eq=False)
class PutOff:
    """A program whose results are sums, in part, that are added up afterwards.

    Attributes:
      program: returns what is computed of each result, then the operands of all visits.
      rest: for each result the number of what is computed of it; None: nothing.
      sums: for each result the visits that add to it, each by its number and the place in `of`.
      visits: all of them; the values of their operands are numbers of results of `program`.
    """

    program: ClosedJaxpr
    rest: Sequence[int | None]
    sums: Sequence[Sequence[tuple[int, int]]]
    visits: Sequence[Visit]


def put_off(program: ClosedJaxpr, flags: Sequence[bool]) -> PutOff:
    """`program` with as much put off of the results with `flags` as can be."""
    made: list[Any] = []

    def run(*xs: Any) -> list[Any]:
        outs = _run(program.jaxpr, program.consts, xs, flags)
        sums = [x if isinstance(x, _Sum) else _Sum(x) for x in outs]
        results: list[Any] = []

        def number(x: Any) -> int:
            results.append(x)
            return len(results) - 1

        rest = [None if s.rest is None else number(s.rest) for s in sums]
        visits = list(dict.fromkeys(visit for s in sums for visit, _ in s.visits))
        added = [[(visits.index(visit), k) for visit, k in s.visits] for s in sums]
        numbered = [
            replace(v, operands=tuple(replace(o, value=number(o.value)) for o in v.operands))
            for v in visits
        ]
        made[:] = [rest, added, numbered]
        return results

    staged = _compat.without_dead(_compat.stage(run, program.in_avals))
    return PutOff(staged, *made)


def _run(
    jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Any], flags: Sequence[bool]
) -> list[Any]:
    """The results; those that are put off, in part, are a `_Sum`."""
    later = _put_off_in(jaxpr, flags)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env |= dict(zip(jaxpr.invars, args, strict=True))

    def run_step(step: Any, operands: list[Any]) -> Sequence[Any]:
        eqn = step.eqn
        if not any(v in later for v in eqn.outvars):
            return bind_equation(eqn, operands)
        if _adds(eqn):
            one, other = (x if isinstance(x, _Sum) else _Sum(x) for x in operands)
            return [one.plus(other)]
        if _is_zero(eqn):
            return [_Sum()]
        if eqn.primitive is linear_p:
            return _visited(eqn, operands, later)
        if eqn.primitive is scan_p:
            return _scan(eqn, operands, later)
        return [_Sum(x) for x in bind_equation(eqn, operands)]

    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    walk(plan(jaxpr.eqns, jaxpr.outvars), env, read, run_step)
    return list(map(read, jaxpr.outvars))


def _put_off_in(jaxpr: Jaxpr, flags: Sequence[bool]) -> set[Any]:
    """The variables that are only added up to results with `flags`."""
    read: dict[Any, bool] = {}  # whether all that reads a variable adds it up so

    def reads(v: Any, adds: bool) -> None:
        if not isinstance(v, Literal):
            read[v] = read.get(v, True) and adds

    for v, flag in zip(jaxpr.outvars, flags, strict=True):
        reads(v, flag)
    for eqn in reversed(jaxpr.eqns):
        later = [read.get(v, False) for v in eqn.outvars]
        sums = _sums_of(eqn, later) if eqn.primitive is scan_p else {}
        if eqn.primitive is scan_p:
            for k, v in enumerate(eqn.outvars):
                read[v] = later[k] and k in sums.values()
        for i, v in enumerate(eqn.invars):
            reads(v, i in sums if sums else _adds(eqn) and later[0])
        if eqn.primitive not in (scan_p, linear_p) and len(eqn.outvars) > 1:
            read |= dict.fromkeys(eqn.outvars, False)
    return {v for v, adds in read.items() if adds and v not in jaxpr.invars}


def _sums_of(scan: Eqn, later: Sequence[bool]) -> dict[int, int]:
    """Which operands of a scan are sums that its steps only add to, and the results they become."""
    (body,) = bodies_of(scan)
    made = {v: e for e in body.jaxpr.eqns for v in e.outvars}
    sums = {}
    for k, i in enumerate(body.carry_operands):
        if later[k] and _terms(body, made, k) is not None:
            sums[i] = k
    return sums


def _terms(body: Body, made: dict[Any, Eqn], k: int) -> list[Any] | None:
    """What a step adds to the sum it carries at `k`; None if that is no sum, or read elsewhere."""
    before, terms, left = body.jaxpr.invars[body.same + k], [], [body.jaxpr.outvars[k]]
    reads = [v for e in body.jaxpr.eqns for v in e.invars] + list(body.jaxpr.outvars)
    while left:
        v = left.pop()
        eqn = None if isinstance(v, Literal) else made.get(v)
        if eqn is not None and _adds(eqn):
            if sum(v is u for u in reads) > 1:
                return None
            left += eqn.invars
        else:
            terms.append(v)
    once = sum(v is before for v in terms) == 1 == sum(v is before for v in reads)
    return [v for v in terms if v is not before] if once else None


def _adds(eqn: Eqn) -> bool:
    return eqn.primitive.name == "add_any"


def _is_zero(eqn: Eqn) -> bool:
    (x,) = eqn.invars[:1] or [None]
    return eqn.primitive is broadcast_in_dim_p and isinstance(x, Literal) and x.val == 0


def _visited(eqn: Eqn, operands: Sequence[Any], later: set[Any]) -> list[Any]:
    """What a branch returns on the way back, with what is put off of it as a visit."""
    params, count = eqn.params, eqn.params["count"]
    forward, tangents = params["forward"], params["transpose"]
    of = tuple(k for k, v in enumerate(eqn.outvars) if v in later)
    cond = _only_cond(forward.jaxpr)
    if cond is None:
        outs = linear_p.bind(*operands, **params)
        return [_Sum(x) if k in of else x for k, x in enumerate(outs)]
    index, branches = forward.jaxpr.invars.index(cond.invars[0]), len(cond.params["branches"])
    visit = Visit(tangents, index, branches, count, of, tuple(map(Operand, operands)))
    others = [k for k in range(len(eqn.outvars)) if k not in of]
    some = forward.jaxpr.replace(outvars=[forward.jaxpr.outvars[k] for k in others])
    kept = _compat.without_dead(_compat.close(some, forward.consts))
    rest = dict(zip(others, eval_jaxpr(kept.jaxpr, kept.consts, *operands), strict=True))
    return [
        _Sum(None, [(visit, of.index(k))]) if k in of else rest[k] for k in range(len(eqn.outvars))
    ]


def _only_cond(jaxpr: Jaxpr) -> Eqn | None:
    """The branches that a program is, one of which an operand of it says."""
    eqns = jaxpr.eqns
    if len(eqns) != 1 or eqns[0].primitive is not cond_p:
        return None
    return eqns[0] if eqns[0].invars[0] in jaxpr.invars else None


def _scan(eqn: Eqn, operands: Sequence[Any], later: set[Any]) -> list[Any]:
    """A scan whose steps leave out what is put off; visits have what they need stacked."""
    (body,), params = bodies_of(eqn), eqn.params
    sums = _sums_of(eqn, [v in later for v in eqn.outvars])
    consts = list(operands[: body.same])
    start: list[Any] = [operands[i] for i in body.carry_operands]
    xs = [operands[i] for i in body.sliced_operands]
    flags = [k in sums.values() for k in range(len(eqn.outvars))]
    # What steps add besides is carried: whether there is any is found by tracing one.
    made: dict[str, Any] = {}

    def step(carry: Any, x: Any) -> Any:
        given = [_Sum() if flags[k] else c for k, c in enumerate(carry)]
        program = _compat.close(body.program)
        outs = _run(program.jaxpr, program.consts, [*consts, *given, *x], flags)
        added = {k: outs[k] for k in sums.values()}
        new = [
            c
            if flags[k] and added[k].rest is None
            else lax.add(c, added[k].rest)
            if flags[k]
            else outs[k]
            for k, c in enumerate(carry)
        ]
        visits = list(dict.fromkeys(v for s in added.values() for v, _ in s.visits))
        stacked: list[Any] = []
        made.update(added=added, visits=visits, places={})
        for visit in visits:
            made["places"][visit] = [_place(o, consts, x, stacked) for o in visit.operands]
        return new, (outs[body.carried :], stacked)

    carried = [None if flags[k] else x for k, x in enumerate(start)]
    types = [v.aval for v in body.jaxpr.invars[body.same : body.same + body.carried]]
    carried = [_nothing(t) if c is None else c for c, t in zip(carried, types, strict=True)]
    options = {k: params[k] for k in ("length", "reverse", "unroll")}
    last, (ys, stacked) = lax.scan(step, carried, xs, **options)
    whole = {
        visit: replace(
            visit,
            lengths=(params["length"], *visit.lengths),
            operands=tuple(
                _outside(o, place, consts, xs, stacked)
                for o, place in zip(visit.operands, made["places"][visit], strict=True)
            ),
        )
        for visit in made["visits"]
    }
    results: list[Any] = [*last, *ys]
    for i, k in sums.items():
        before = operands[i] if isinstance(operands[i], _Sum) else _Sum(operands[i])
        added = made["added"][k]
        rest = None if added.rest is None else last[k]
        results[k] = before.plus(_Sum(rest, [(whole[v], j) for v, j in added.visits]))
    return results


def _nothing(aval: Any) -> Any:
    return _compat.varying_as(_compat.filled(aval, 0), aval)


def _place(operand: Operand, consts: Any, xs: Any, stacked: list[Any]) -> tuple[str, int]:
    """Where the value of an operand is outside of the scan."""
    for name, values in (("same", consts), ("xs", xs)):
        for k, x in enumerate(values):
            if x is operand.value:
                return name, k
    stacked.append(operand.value)
    return "stacked", len(stacked) - 1


def _outside(
    operand: Operand, place: tuple[str, int], consts: Any, xs: Any, stacked: Any
) -> Operand:
    name, k = place
    value = {"same": consts, "xs": xs, "stacked": stacked}[name][k]
    return Operand(value, (name != "same", *operand.over))
