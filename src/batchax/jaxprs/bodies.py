"""Programs inside programs: what a call, loop or branch runs, and how values go in and come out.

Nobody else takes the parameters of `scan`, `while` and `cond` apart, but for their batching rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core.primitives import cond_p, scan_p, while_p

from batchax import _compat
from batchax.jaxprs.inside import programs_inside
from batchax.jaxprs.primitive_facts import body_parameter, facts_of
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Value


@dataclass(frozen=True)
class Body:
    """A program that an equation runs to compute its results.

    Its inputs are, in this order: what is the same whenever it runs; what a loop carries, of
    which it returns the next first; and what a loop takes apart, a part for each step.

    Attributes:
      role: "body" of a loop, "condition" of a `while`, "branch 0" and so on of a `cond`; "call".
      program: the program, as the equation holds it: with its constants or without.
      operands: for each input the number of the operand of the equation that it comes from: the
        operand itself, the first value of what is carried, or what parts are taken of. Empty
        where nobody says, of primitives of third parties.
      results: for each output the number of the result of the equation that it goes to: the
        result itself (of what is carried, after the last step), or what it is a part of. Empty
        for a condition.
      same: how many inputs are the same whenever the program runs.
      carried: how many inputs are carried.
      times: how often the program runs; None if that depends on values.
    """

    role: str
    program: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    same: int
    carried: int = 0
    times: Any = 1

    @property
    def jaxpr(self) -> Any:
        """The program without its constants."""
        return getattr(self.program, "jaxpr", self.program)

    @property
    def is_repeated(self) -> bool:
        """Whether it is run by a loop."""
        return self.role in ("body", "condition")

    @property
    def carry_operands(self) -> tuple[int, ...]:
        """The operands that are carried."""
        return self.operands[self.same : self.same + self.carried]

    @property
    def sliced_operands(self) -> tuple[int, ...]:
        """The operands of which each step takes a part."""
        return self.operands[self.same + self.carried :]

    @property
    def stacked_results(self) -> tuple[int, ...]:
        """The results of which each step computes a part."""
        return self.results[self.carried :] if self.is_repeated else ()


def bodies_of(eqn: Eqn) -> tuple[Body, ...]:
    """The programs that an equation runs to compute its results; none for most equations.

    A derivative rule beside a program is none of them, nor is the function with which a
    reduction or a scatter combines two elements.
    """
    find, facts = _BODIES.get(eqn.primitive.name), facts_of(eqn.primitive)
    if find is not None and not _compat.is_namesake(eqn.primitive):
        return find(eqn)
    if facts.combines:
        return ()
    if facts.body:
        return (_call(eqn, eqn.params[body_parameter(eqn.primitive, eqn.params)]),)
    return tuple(_call(eqn, program) for program in programs_inside(eqn)[:1])


def program_called(eqn: Eqn) -> ClosedJaxpr:
    """The program inside a call, one whose `Facts` say so."""
    return _compat.close(eqn.params[body_parameter(eqn.primitive, eqn.params)])


def _call(eqn: Eqn, program: Any) -> Body:
    inputs = len(getattr(program, "jaxpr", program).invars)
    operands = range(len(eqn.invars)) if inputs == len(eqn.invars) else ()
    return Body("call", program, tuple(operands), tuple(range(len(eqn.outvars))), inputs)


def _linear_solve(eqn: Eqn) -> tuple[Body, ...]:
    counts, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    first = counts.matvec + counts.vecmat
    consts = range(first, first + counts.solve)
    operands = (*consts, *range(sum(counts), len(eqn.invars)))
    return (Body("call", solve, operands, tuple(range(len(eqn.outvars))), len(operands)),)


def _scan(eqn: Eqn) -> tuple[Body, ...]:
    same, carried = _compat.scan_counts(eqn.params)
    operands, results = tuple(range(len(eqn.invars))), tuple(range(len(eqn.outvars)))
    program, times = eqn.params["jaxpr"], eqn.params["length"]
    return (Body("body", program, operands, results, same, carried, times),)


def _while(eqn: Eqn) -> tuple[Body, ...]:
    n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = tuple(range(n_test + n_body, len(eqn.invars)))
    of_test, of_body = tuple(range(n_test)), tuple(range(n_test, n_test + n_body))
    results, carried = tuple(range(len(carry))), len(carry)
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    return (
        Body("condition", test, of_test + carry, (), n_test, carried, None),
        Body("body", body, of_body + carry, results, n_body, carried, None),
    )


def _cond(eqn: Eqn) -> tuple[Body, ...]:
    operands, results = tuple(range(1, len(eqn.invars))), tuple(range(len(eqn.outvars)))
    return tuple(
        Body(f"branch {i}", program, operands, results, len(operands))
        for i, program in enumerate(eqn.params["branches"])
    )


_BODIES: dict[str, Callable[[Any], tuple[Body, ...]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_linear_solve": _linear_solve,  # the other programs in it are for derivatives
}


def held_programs(params: Mapping[str, Any], names: Sequence[str]) -> list[ClosedJaxpr]:
    """The programs in the parameters of these names, each of which is one, some, or none."""
    values = (params[name] for name in names)
    listed = (value if isinstance(value, tuple) else (value,) for value in values)
    return [p for value in listed for p in value if isinstance(p, ClosedJaxpr)]


def describe_bodies(primitive: _compat.Primitive, names: Sequence[str]) -> None:
    """Says, for a primitive of batchax's own, which parameters hold programs that it runs.

    Of several programs nobody knows which operand is which, nor how often they run: that the
    operations say which it stands for.
    """

    def find(eqn: Eqn) -> tuple[Body, ...]:
        programs = held_programs(eqn.params, names)
        if len(programs) == 1:
            return (_call(eqn, programs[0]),)
        return tuple(Body("call", program, (), (), 0) for program in programs)

    _BODIES[primitive.name] = find


LOOPS_AND_BRANCHES = frozenset(p.name for p in (scan_p, while_p, cond_p))
"""The primitives of JAX whose equations `bind_with` makes again, besides calls."""


def bind_with(
    eqn: Eqn, operands: Sequence[Value], programs: Sequence[Any], more: Sequence[Any]
) -> list[Any]:
    """The results of an equation of a call, loop or branch, with other programs for its bodies.

    Args:
      eqn: the equation.
      operands: what it is applied to.
      programs: one in place of each of `bodies_of`, with inputs `more` in front of the others.
      more: their values, the same whenever a program runs.
    """
    bodies = bodies_of(eqn)
    rebuild = _REBUILT.get(eqn.primitive, _call_with)
    return list(rebuild(eqn, bodies, list(operands), list(map(_compat.close, programs)), [*more]))


def _scan_with(eqn: Eqn, bodies: Any, operands: Any, programs: Any, more: Any) -> list[Any]:
    (body,), (program,) = bodies, programs
    first = body.same + body.carried
    consts, carry, xs = (operands[: body.same], operands[body.same : first], operands[first:])

    def step(carry: list[Value], x: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = eval_jaxpr(program.jaxpr, program.consts, *more, *consts, *carry, *x)
        return outs[: body.carried], outs[body.carried :]

    options = {k: v for k, v in eqn.params.items() if k in SCAN_OPTIONS}
    last, ys = lax.scan(step, carry, xs, **options)
    return [*last, *ys]


# The others say which operands are which, and that changes.
SCAN_OPTIONS = frozenset("length reverse unroll _split_transpose".split())


def _while_with(eqn: Eqn, bodies: Any, operands: Any, programs: Any, more: Any) -> list[Any]:
    test, body = bodies
    return while_p.bind(
        *more,
        *(operands[i] for i in test.operands[: test.same]),
        *more,
        *(operands[i] for i in body.operands[: body.same]),
        *(operands[i] for i in body.carry_operands),
        cond_nconsts=len(more) + test.same,
        cond_jaxpr=programs[0],
        body_nconsts=len(more) + body.same,
        body_jaxpr=programs[1],
    )


def _cond_with(eqn: Eqn, bodies: Any, operands: Any, programs: Any, more: Any) -> list[Any]:
    index, *others = operands
    return cond_p.bind(index, *more, *others, **{**eqn.params, "branches": tuple(programs)})


def _call_with(eqn: Eqn, bodies: Any, operands: Any, programs: Any, more: Any) -> Sequence[Any]:
    return bind_call(eqn.primitive, eqn.params, programs[0], [*more, *operands])


def bind_call(
    primitive: _compat.Primitive, params: Mapping[str, Any], program: Any, operands: Sequence[Value]
) -> list[Any]:
    """The results of a call, one whose `Facts` say so, with another program inside.

    Its constants become operands.
    """
    holder = body_parameter(primitive, params)
    (program,), consts = _compat.hoist_constants(program)
    held = program if isinstance(params[holder], ClosedJaxpr) else program.jaxpr
    params = primitive.get_bind_params({**params, holder: held})
    return primitive.bind(*consts, *operands, **params)


_REBUILT: dict[_compat.Primitive, Callable[..., Sequence[Any]]] = {
    scan_p: _scan_with,
    while_p: _while_with,
    cond_p: _cond_with,
}
