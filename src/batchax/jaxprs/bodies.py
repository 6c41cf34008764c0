"""Which jaxprs a call, loop or branch runs, how values go in and come out, and what else is inside.

`register_control_flow` enters a loop or branches. Costs, hazards, the analysis of batchedness,
canonical forms, counts, `explain` and sections read the entry, so that only the batching rules of
a primitive, and the rule of its rows, take its parameters apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core.primitives import cond_p, linear_solve_p, scan_p, while_p

from batchax import _compat
from batchax.cache import Cache
from batchax.errors import UnsupportedError
from batchax.jaxprs.primitive_facts import body_parameter, facts_of
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Program, Value, Values

T = TypeVar("T")


@dataclass(frozen=True)
class Body:
    """Holds a program that an equation runs; its inputs: what stays the same, what is carried,
    slices.
    """

    # "body" of a loop, "condition" of a `while`, "branch 0" and so on of a `cond`, or "call"
    role: str
    program: Any  # as the equation holds it: with its constants or without
    # For each input the operand it comes from: itself, the first value of a carry, or the
    # array that is scanned over. Empty if unknown, of third parties.
    operands: tuple[int, ...]
    # For each output the result it goes to: itself (of a carry, after the last step), or what it is
    # a part of. Empty for a condition.
    results: tuple[int, ...]
    same: int  # inputs that are the same whenever the program runs
    carried: int = 0  # inputs that a loop carries; it returns the next ones first
    # How often it runs; None if that depends on values: on a condition, or on the operand `count`.
    times: Any = 1
    reverse: bool = False  # whether a loop takes slices from the last to the first
    count: int | None = None

    @property
    def jaxpr(self) -> Jaxpr:
        """Returns the program without its constants."""
        return _compat.jaxpr_of(self.program)

    @property
    def is_repeated(self) -> bool:
        return self.role in ("body", "condition")

    @property
    def is_branch(self) -> bool:
        """Whether one of several programs runs, and this may be another one."""
        return self.role.startswith("branch")

    def counted_by(self, operands: Sequence[T]) -> T:
        """Returns the operand `count`, of a loop whose `times` is None."""
        if self.count is None:
            raise UnsupportedError(
                "a loop does not say how many steps it takes: its Body in register_control_flow "
                "must have `times`, `count`, or a condition."
            )
        return operands[self.count]

    @property
    def carry_operands(self) -> tuple[int, ...]:
        return self.operands[self.same : self.same + self.carried]

    @property
    def sliced_operands(self) -> tuple[int, ...]:
        return self.operands[self.same + self.carried :]

    @property
    def stacked_results(self) -> tuple[int, ...]:
        return self.results[self.carried :] if self.is_repeated else ()


Bodies = Callable[[Eqn], tuple[Body, ...]]
Rebuild = Callable[[Eqn, Sequence[Body], list[Value], list[ClosedJaxpr], list[Value]], list[Value]]


@dataclass(frozen=True)
class ControlFlow:
    """Says which parameters of a primitive hold the jaxprs that it runs."""

    step: str = ""  # the parameter with the jaxpr of a step, of a loop
    # The parameter with the predicate, of a loop that ends on a value. Only `while` has it, as its
    # other parameters are read by name, too. Other loops whose steps depend on values have `count`.
    test: str = ""
    branches: str = ""  # the parameter with the branches; the first operand selects one
    # from an equation to the jaxprs that it runs
    bodies: Bodies | None = field(default=None, repr=False)
    # Applies an equation to other operands, with other jaxprs; see `bind_with`. What evaluates a
    # jaxpr in another way, such as the search for NaN, goes into the bodies of a primitive that has
    # it. None for primitives of batchax, which become operations first.
    rebuild: Rebuild | None = field(default=None, repr=False)

    @property
    def repeated(self) -> str:
        """Returns the parameter that holds what runs more or less often than once."""
        return self.step or self.branches


def control_flow(primitive: _compat.Primitive) -> ControlFlow:
    """Returns the entry of a loop or branches; one without parameters for any other primitive."""
    return _entries.get(primitive, _NONE)


def is_rebuilt(primitive: _compat.Primitive) -> bool:
    """Whether `bind_with` applies loops or branches of this primitive to other jaxprs."""
    return control_flow(primitive).rebuild is not None


def register_control_flow(primitive: _compat.Primitive, entry: ControlFlow) -> None:
    _entries[primitive] = entry


_NONE = ControlFlow()
_entries: dict[_compat.Primitive, ControlFlow] = {}


def bodies_of(eqn: Eqn) -> tuple[Body, ...]:
    """Returns the programs that an equation runs to compute its results; mostly none."""
    find, facts = control_flow(eqn.primitive).bodies, facts_of(eqn.primitive)
    if find is not None:
        return find(eqn)
    # The function with which a reduction or a scatter combines two elements is not run by itself.
    if facts.combines:
        return ()
    if facts.body:
        return (_call(eqn, eqn.params[body_parameter(eqn.primitive, eqn.params)]),)
    # Only the first: the others, such as a derivative rule, are not run to compute results.
    return tuple(_call(eqn, program) for program in programs_inside(eqn)[:1])


def program_called(eqn: Eqn) -> ClosedJaxpr:
    """Returns the program inside a call, one whose `Facts` say so."""
    return _compat.close(eqn.params[body_parameter(eqn.primitive, eqn.params)])


def _call(eqn: Eqn, program: Program) -> Body:
    inputs = len(_compat.jaxpr_of(program).invars)
    # A third party's primitive may pass its operands to its program in any way: if the numbers
    # differ, nothing is claimed.
    operands = range(len(eqn.invars)) if inputs == len(eqn.invars) else ()
    return Body("call", program, tuple(operands), tuple(range(len(eqn.outvars))), inputs)


def _linear_solve(eqn: Eqn) -> tuple[Body, ...]:
    counts, solve = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
    # Operands: the constants of matvec, vecmat, solve and transpose_solve in this order, then the
    # right-hand sides. Only `solve` runs here.
    first = counts.matvec + counts.vecmat
    consts = range(first, first + counts.solve)
    operands = (*consts, *range(sum(counts), len(eqn.invars)))
    return (Body("call", solve, operands, tuple(range(len(eqn.outvars))), len(operands)),)


def _scan(eqn: Eqn) -> tuple[Body, ...]:
    same, carried = _compat.scan_counts(eqn.params)
    operands, results = tuple(range(len(eqn.invars))), tuple(range(len(eqn.outvars)))
    program, times, reverse = (eqn.params[k] for k in ("jaxpr", "length", "reverse"))
    return (Body("body", program, operands, results, same, carried, times, reverse),)


def _while(eqn: Eqn) -> tuple[Body, ...]:
    n_test, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    # Operands: the constants of the predicate, those of the body, then the carry, which both take.
    carry = tuple(range(n_test + n_body, len(eqn.invars)))
    of_test, of_body = tuple(range(n_test)), tuple(range(n_test, n_test + n_body))
    results, carried = tuple(range(len(carry))), len(carry)
    test, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    return (
        Body("condition", test, of_test + carry, (), n_test, carried, None),
        Body("body", body, of_body + carry, results, n_body, carried, None),
    )


def _cond(eqn: Eqn) -> tuple[Body, ...]:
    # The first operand is the index of the branch.
    operands, results = tuple(range(1, len(eqn.invars))), tuple(range(len(eqn.outvars)))
    return tuple(
        Body(f"branch {i}", program, operands, results, len(operands))
        for i, program in enumerate(eqn.params["branches"])
    )


def held_programs(params: Mapping[str, Any], names: Sequence[str]) -> list[ClosedJaxpr]:
    """Lists the programs in the parameters of these names, each of which is one, some, or none."""
    values = (params[name] for name in names)
    listed = (value if isinstance(value, tuple) else (value,) for value in values)
    return [p for value in listed for p in value if isinstance(p, ClosedJaxpr)]


def describe_bodies(primitive: _compat.Primitive, names: Sequence[str], step: str = "") -> None:
    """Enters a primitive of batchax, with the parameters that hold the programs which it runs."""

    def find(eqn: Eqn) -> tuple[Body, ...]:
        programs = held_programs(eqn.params, names)
        if len(programs) == 1:
            return (_call(eqn, programs[0]),)
        # The operations that the primitive stands for decide which operands each program takes, and
        # how often it runs.
        return tuple(Body("call", program, (), (), 0) for program in programs)

    register_control_flow(primitive, ControlFlow(step=step, bodies=find))


def bind_with(
    eqn: Eqn, operands: Values, programs: Sequence[Any], more: Sequence[Any]
) -> list[Any]:
    """Binds a call, loop or branch again, with other programs for its bodies.

    `programs` has one in place of each of `bodies_of`, with inputs `more` in front of the others.
    """
    bodies = bodies_of(eqn)
    rebuild = control_flow(eqn.primitive).rebuild or _call_with
    return list(rebuild(eqn, bodies, list(operands), list(map(_compat.close, programs)), [*more]))


def _scan_with(
    eqn: Eqn,
    bodies: Sequence[Body],
    operands: list[Value],
    programs: Sequence[ClosedJaxpr],
    more: Values,
) -> list[Any]:
    (body,), (program,) = bodies, programs
    # `lax.scan` stages the step again, and counts by itself what is carried and what is not.
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


def _while_with(
    eqn: Eqn,
    bodies: Sequence[Body],
    operands: Values,
    programs: Sequence[ClosedJaxpr],
    more: Values,
) -> list[Any]:
    test, body = bodies
    # Both programs take `more` first, so it stands among the constants of both.
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


def _cond_with(
    eqn: Eqn,
    bodies: Sequence[Body],
    operands: Values,
    programs: Sequence[ClosedJaxpr],
    more: Values,
) -> list[Any]:
    index, *others = operands
    return cond_p.bind(index, *more, *others, **{**eqn.params, "branches": tuple(programs)})


def _call_with(
    eqn: Eqn,
    bodies: Sequence[Body],
    operands: Values,
    programs: Sequence[ClosedJaxpr],
    more: Values,
) -> Sequence[Any]:
    return bind_call(eqn.primitive, eqn.params, programs[0], [*more, *operands])


def bind_call(
    primitive: _compat.Primitive, params: Mapping[str, Any], program: ClosedJaxpr, operands: Values
) -> list[Any]:
    """Binds a call, one whose `Facts` say so, with another program, whose constants become
    operands.
    """
    holder = body_parameter(primitive, params)
    (program,), consts = _compat.hoist_constants(program)
    # Some calls hold a closed jaxpr, others (such as `remat`) an open one: the parameter keeps its
    # kind.
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


def programs_inside(eqn: Eqn) -> list[Any]:
    """Lists all programs in the parameters of an equation, without their constants.

    Among them are those with which it combines two elements, or is differentiated.
    """
    return list(map(_compat.jaxpr_of, programs_held(eqn)))


def programs_held(eqn: Eqn) -> list[Any]:
    """Lists the same, with their constants if the parameters hold these, too."""
    programs: list[Any] = []
    for value in eqn.params.values():
        kind = type(value)  # most are plain, or tuples of what is
        if kind not in _plain and not (kind is tuple and _plain.issuperset(map(type, value))):
            _add_programs(value, programs)
    return programs


def _add_programs(value: Value, programs: list[Any]) -> None:
    kind = type(value)
    if isinstance(value, (tuple, list)):
        if not _plain.issuperset(map(type, value)):
            for part in value:
                _add_programs(part, programs)
    elif isinstance(value, _compat.JAXPR_TYPES):
        programs.append(value)
    elif kind.__module__.partition(".")[0] in _LIBRARIES:
        _plain.add(kind)


# Types of parameters that hold no programs. Those of other libraries are not listed: users make
# classes, which would be kept.
_plain: set[type] = {int, bool, str, float, type(None)}
_LIBRARIES = frozenset({"builtins", "jax", "jaxlib", "numpy"})


def with_inside(
    eqns: Iterable[Eqn], enters: Callable[[Any], bool] = lambda eqn: True
) -> Iterator[Any]:
    """Iterates over equations, and after each over those inside it, if `enters` says so of it."""
    for eqn in eqns:
        yield eqn
        if enters(eqn):
            for program in programs_inside(eqn):
                yield from with_inside(program.eqns, enters)


def calls_host(eqn: Eqn) -> bool:
    """Returns whether an equation has a host callback, other than for progress."""
    return bool(calls_in(eqn))


def is_seen(program: ClosedJaxpr) -> bool:
    """Returns whether it is visible for which lanes a program runs, by callbacks or checks."""
    eqns = getattr(program, "jaxpr", program).eqns
    return any(calls_host(eqn) or _compat.checks(eqn.effects) for eqn in eqns)


def calls_in(eqn: Eqn) -> list[Any]:
    """Lists the equations in one, possibly itself, that call the host directly."""
    if not _compat.calls_back(eqn.effects):
        return []
    programs = programs_inside(eqn)
    if programs:
        return [call for p in programs for e in p.eqns for call in calls_in(e)]
    return [] if facts_of(eqn.primitive).once else [eqn]


@dataclass(frozen=True, eq=False)
class Anywhere:
    """Answers whether `is_true` of an equation, or of one inside it; keeps the answers for
    programs.
    """

    is_true: Callable[[Any], bool]

    def in_equation(self, eqn: Eqn) -> bool:
        return self.is_true(eqn) or any(map(self.in_program, programs_inside(eqn)))

    def in_program(self, program: Program) -> bool:
        jaxpr = _compat.jaxpr_of(program)
        find = lambda: any(map(self.in_equation, jaxpr.eqns))
        return _answers.get(self, find, owner=jaxpr)


_answers = Cache("what is true anywhere in programs", most=8192)
