"""Control flow: which jaxprs a call, loop or branch runs, and how values go in and come out.

`register_control_flow` enters a loop or branches. Costs, hazards, the analysis of batchedness,
canonical forms, counts, `explain` and sections read the entry, so that only the batching rules of
a primitive, and the rule of its rows, take its parameters apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core.primitives import cond_p, linear_solve_p, scan_p, while_p

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
    def is_branch(self) -> bool:
        """Whether one of several programs runs, and this may be another one."""
        return self.role.startswith("branch")

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


Bodies = Callable[[Eqn], tuple[Body, ...]]
Rebuild = Callable[[Eqn, Sequence[Body], list[Value], list[ClosedJaxpr], list[Value]], list[Value]]


@dataclass(frozen=True)
class ControlFlow:
    """How a primitive runs the jaxprs in its parameters.

    Attributes:
      step: the parameter that holds the jaxpr of a step, of a loop.
      test: the parameter that holds the predicate, of a loop that ends on a value, and whose
        operands `bodies` assigns. Empty for those of batchax, which stand for such a loop.
      branches: the parameter that holds the branches, one of which the first operand selects.
      bodies: from an equation to the jaxprs that it runs.
      rebuild: applies an equation to other operands, with other jaxprs; see `bind_with`. None for
        primitives of batchax.
    """

    step: str = ""
    test: str = ""
    branches: str = ""
    bodies: Bodies | None = field(default=None, repr=False)
    rebuild: Rebuild | None = field(default=None, repr=False)

    @property
    def repeated(self) -> str:
        """The parameter that holds what runs more or less often than once."""
        return self.step or self.branches


def control_flow(primitive: _compat.Primitive) -> ControlFlow:
    """The entry of a loop or branches; one without parameters for any other primitive."""
    return _entries.get(primitive, _NONE)


def register_control_flow(primitive: _compat.Primitive, entry: ControlFlow) -> None:
    """Enters a loop, branches, or a call of several jaxprs."""
    _entries[primitive] = entry


_NONE = ControlFlow()
_entries: dict[_compat.Primitive, ControlFlow] = {}


def bodies_of(eqn: Eqn) -> tuple[Body, ...]:
    """The programs that an equation runs to compute its results; none for most equations.

    A derivative rule beside a program is none of them, nor is the function with which a
    reduction or a scatter combines two elements.
    """
    find, facts = control_flow(eqn.primitive).bodies, facts_of(eqn.primitive)
    if find is not None:
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


def held_programs(params: Mapping[str, Any], names: Sequence[str]) -> list[ClosedJaxpr]:
    """The programs in the parameters of these names, each of which is one, some, or none."""
    values = (params[name] for name in names)
    listed = (value if isinstance(value, tuple) else (value,) for value in values)
    return [p for value in listed for p in value if isinstance(p, ClosedJaxpr)]


def describe_bodies(primitive: _compat.Primitive, names: Sequence[str], step: str = "") -> None:
    """Enters a primitive of batchax, with the parameters that hold programs which it runs.

    Of several programs the operands and the number of runs are not known: the operations that the
    primitive stands for determine these.
    """

    def find(eqn: Eqn) -> tuple[Body, ...]:
        programs = held_programs(eqn.params, names)
        if len(programs) == 1:
            return (_call(eqn, programs[0]),)
        return tuple(Body("call", program, (), (), 0) for program in programs)

    register_control_flow(primitive, ControlFlow(step=step, bodies=find))


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
    rebuild = control_flow(eqn.primitive).rebuild or _call_with
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


register_control_flow(scan_p, ControlFlow(step="jaxpr", bodies=_scan, rebuild=_scan_with))
register_control_flow(
    while_p,
    ControlFlow(step="body_jaxpr", test="cond_jaxpr", bodies=_while, rebuild=_while_with),
)
register_control_flow(cond_p, ControlFlow(branches="branches", bodies=_cond, rebuild=_cond_with))
# The other programs in it are for derivatives.
register_control_flow(linear_solve_p, ControlFlow(bodies=_linear_solve))

LOOPS_AND_BRANCHES = frozenset(p.name for p, entry in _entries.items() if entry.rebuild)
"""The primitives of JAX whose equations `bind_with` makes again, besides calls."""
