"""A traced jaxpr that runs, and the values that a custom derivative rule closes over.

JAX traces the derivative rules of ``custom_jvp`` and ``custom_vjp`` when they are first needed,
which may be long after the per-example function was traced::

    def per_example(x, p):
        y = jnp.sin(p)

        @jax.custom_jvp
        def f(z): ...
        f.defjvp(lambda primals, tangents: ... y ...)     # y is of the traced jaxpr

What such a rule closes over is then a tracer of a jaxpr that has run by now. It knows the variable
that it stood for, so its value is found by running that part of the jaxpr again. That costs
something only for rules that close over such values; to keep every value would always cost.

JAX runs a derivative rule outside of the derivative. A value that is differentiated is a constant
there, and what the rule does with it has no derivative. JAX raises an error when such a value is
used, but not for operations without a used result: those that a rule replaces.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ShapedArray, Trace, Tracer
from jax.extend.core import Literal
from jax.tree_util import PyTreeDef

from batchax import _compat
from batchax.cache import cached_on
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import bodies_of, programs_held, programs_inside
from batchax.jaxprs.error_format import line_of
from batchax.jaxprs.evaluate import plan
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Program, Value, Values, Var
from batchax.kernel.axis import Axis, Position, Positions
from batchax.kernel.interpreter import interpret


def reject_lost(program: ClosedJaxpr, trace: Trace) -> ClosedJaxpr:
    """Checks that a traced jaxpr does not close over a value of a trace around it.

    A constant that belongs to `trace` itself is allowed. Raises UnsupportedError for a value of a
    derivative around it, and UnexpectedTracerError for one of a function that JAX has traced.
    """
    if program.consts or any(map(programs_held, program.jaxpr.eqns)):
        _reject_lost(program, trace, _compat.name_and_place(program.jaxpr))
    return program


def _reject_lost(program: Program, trace: Trace, called_at: str) -> None:
    jaxpr, consts = _compat.jaxpr_of(program), getattr(program, "consts", ())
    if _compat.any_inside(consts, trace):
        for x, v in zip(consts, jaxpr.constvars, strict=False):
            if isinstance(x, Tracer) and _compat.is_inside(x, trace):
                reader = _reader(jaxpr, v)
                place = called_at if reader is None else line_of(reader)
                if _compat.staged_variable(x) is not None:
                    _compat.reject_escaped(x)  # JAX says where it was made
                raise UnsupportedError(of_what_is_around(place, jax.typeof(x).str_short()))
    for eqn in filter(programs_held, jaxpr.eqns):
        for inner in _run_by(eqn):
            if _holds_tracers(inner):
                _reject_lost(inner, trace, line_of(eqn))


def of_what_is_around(place: str, type_of: str) -> str:
    """Words the error for a tracer that `place` uses outside of its trace."""
    return (
        f"{place} uses a traced value ({type_of}) of what is differentiated or "
        "staged around it, and runs outside of that. If it is a rule of jax.custom_jvp or "
        "jax.custom_vjp, it closes over the value, whose part of the derivative would be lost. "
        "Pass the value to the function as an argument: its rules are then given it, too."
    )


@cached_on("whether programs hold traced values as constants")
def _holds_tracers(program: Program) -> bool:
    """Returns whether a program, or one that it runs, holds traced values as constants."""
    if any(isinstance(x, Tracer) for x in getattr(program, "consts", ())):
        return True
    eqns = filter(programs_held, _compat.jaxpr_of(program).eqns)
    return any(_holds_tracers(inner) for eqn in eqns for inner in _run_by(eqn))


def _run_by(eqn: Eqn) -> list[Any]:
    """Returns the jaxprs that an equation with programs runs on its operands.

    Third parties hold other jaxprs in parameters (Lineax: the jaxpr that made an operator).
    """
    bodies = bodies_of(eqn)
    # A jaxpr that the equation does not run has inputs that are not operands.
    return [body.program for body in bodies if len(body.operands) == len(body.jaxpr.invars)]


def _reader(jaxpr: Jaxpr, variable: Var) -> Eqn | None:
    """Finds the first equation that reads `variable`, also inside calls, loops, and branches."""
    for eqn in jaxpr.eqns:
        if not any(v is variable for v in eqn.invars):
            continue
        for body in bodies_of(eqn):
            for v, operand in zip(body.jaxpr.invars, body.operands, strict=False):
                if eqn.invars[operand] is variable:
                    # A body may pass the value on without reading it: then the call itself is the
                    # reader.
                    return _reader(body.jaxpr, v) or eqn
        return eqn
    return None


@dataclass(frozen=True, eq=False)
class MappedProgram:
    """Holds a traced jaxpr, the operands that it runs on, and their batch axes."""

    axis: Axis
    staged: Any  # a closed jaxpr, or a part of one that looks like it
    args: Values
    axes: Positions
    computes: bool = False  # whether what is staged of it will be computed at once

    @property
    def traced(self) -> bool:
        """Returns whether running it traces operations instead of computing them at once."""
        values = (*self.args, *self.staged.consts)
        return not self.computes and any(isinstance(x, Tracer) for x in values)

    def run(self) -> tuple[list[Any], list[Position]]:
        """Runs it; meanwhile rules find what they close over."""
        return self.run_as(self.staged.jaxpr)

    def run_as(self, jaxpr: Jaxpr) -> tuple[list[Any], list[Position]]:
        """Runs `jaxpr`, of the same operands, instead."""
        token = _running.set(self)
        try:
            return interpret(self.axis, jaxpr, self.staged.consts, self.args, self.axes)
        finally:
            _running.reset(token)

    def resolve(self, values: Values) -> tuple[list[Any], list[Position]]:
        """Replaces placeholders of this program in `values` where possible; with their axes."""
        variables = [_compat.staged_variable(x) for x in values]
        jaxpr = self.staged.jaxpr
        # Placeholders are variables of this program that a rule closed over while it was traced.
        needed = [v for v in variables if v is not None and v in self._variables]
        if not needed:
            return list(values), [None] * len(values)
        # Only the equations that the needed variables depend on run again.
        eqns = [step.eqn for step in plan(jaxpr.eqns, needed, keeps=lambda _: False)]
        jaxpr = jaxpr.replace(eqns=eqns, outvars=needed)
        # Rules run outside of the derivative whose values the program may have been run on. What
        # does not depend on these is found inside of it: a mask, or what has no derivative.
        read = {*needed, *(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))}
        inputs = zip(jaxpr.constvars, self.staged.consts, strict=False)
        inputs = *inputs, *zip(jaxpr.invars, self.args, strict=True)
        left = [x for v, x in inputs if v in read and isinstance(x, Tracer) and _compat.is_left(x)]
        if any(map(_compat.is_over, left)):
            return list(values), [None] * len(values)
        with _compat.within_trace_of(left):
            outs, axes = interpret(self.axis, jaxpr, self.staged.consts, self.args, self.axes)
        computed: dict[Any, tuple[Value, Position]] = dict(
            zip(needed, zip(outs, axes, strict=True), strict=True)
        )
        pairs = [computed.get(v, (x, None)) for v, x in zip(variables, values, strict=True)]
        return [x for x, _ in pairs], [a for _, a in pairs]

    def resolves(self, x: Tracer) -> bool:
        variable = _compat.staged_variable(x)
        return variable is not None and variable in self._variables

    @functools.cached_property
    def _variables(self) -> set[Any]:
        jaxpr = self.staged.jaxpr
        return {*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)}


_running: ContextVar[MappedProgram | None] = ContextVar("batchax_running", default=None)


def may_be_differentiated() -> bool:
    """Returns whether the operations that run now may be differentiated later."""
    program = _running.get()
    # A program that computes with values is not seen by transformations around it.
    return program is None or program.traced


def program_behind(*rules: object) -> MappedProgram | None:
    """Returns the running program if `rules` close over its placeholders, else None."""
    program = _running.get()
    # A rule that needs no program must not hold one: caches keep rules for long.
    return program if program is not None and closes_over_tracers(rules) else None


def closes_over_tracers(rule: object) -> bool:
    """Returns whether a function closes over a placeholder of a program, or may do so."""
    return any(True for _ in _tracers([rule]))


def captured_tracers(rule: Callable[..., Any] | None) -> list[Tracer]:
    """Lists the tracers in a function's closure and defaults, and in containers there.

    Attributes of other objects are not searched.
    """
    tracers = _tracers([rule], lambda x: ())
    # Keyed by `id`, as `==` of tracers is a traced operation.
    return list({id(t): t for t in tracers if t is not None}.values())


# The parameters of equations that hold functions which are traced later: derivative rules of JAX
# calls, and rules of calls of batchax.
_RULES = ("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "rule", "_prim")


def rules_of(eqn: Eqn) -> list[Any]:
    return [rule for name, rule in eqn.params.items() if name in _RULES]


def closed_over(eqn: Eqn) -> list[Any]:
    """Lists the variables that rules in `eqn`, and in jaxprs inside it, close over."""
    rules = rules_of(eqn)
    variables = list(map(_compat.staged_variable, _tracers(rules))) if rules else []
    for inner in programs_inside(eqn):
        variables += _closed_over_inside(inner)
    return [v for v in dict.fromkeys(variables) if v is not None]


@cached_on("variables that derivative rules in programs close over")
def _closed_over_inside(jaxpr: Jaxpr) -> list[Any]:
    return [v for eqn in jaxpr.eqns for v in closed_over(eqn)]


class Captured:
    """Holds the values, for all lanes, of what rules of the function `name` close over."""

    def __init__(self, name: str, program: MappedProgram | None) -> None:
        # the program of the placeholders, if rules close over any
        self.name, self.program = name, program
        self._values: dict[int, tuple[Value, Position]] = {}

    def find(self, rule: object) -> None:
        """Resolves now what `rule` closes over, as the rule runs after the derivative is over."""
        tracers = [] if self.program is None else [t for t in _tracers([rule]) if t is not None]
        if self.program is not None and tracers:
            pairs = zip(*self.program.resolve(tracers), strict=True)
            self._values = dict(zip(map(id, tracers), pairs, strict=True))

    def values(self, constants: Values) -> tuple[list[Any], list[Position]]:
        """Resolves constants of a rule to values and their batch axes.

        Raises UnsupportedError for a value of what is differentiated or traced around the rule.
        """
        if self.program is None:
            return list(constants), [None] * len(constants)
        # What was found in a step of a loop that has been staged since is of no use any more.
        usable = lambda x: not isinstance(x, Tracer) or _compat.is_live(x)
        here = {i: pair for i, pair in self._values.items() if usable(pair[0])}
        new = [x for x in constants if id(x) not in here]
        computed = zip(*self.program.resolve(new), strict=True)
        pairs = [here.get(id(x)) or next(computed) for x in constants]
        for x, _ in pairs:
            if isinstance(x, Tracer) and (_compat.is_left(x) or self.program.resolves(x)):
                type_of = jax.typeof(x).str_short()
                raise UnsupportedError(of_what_is_around(f"a rule of {self.name}", type_of))
        return [x for x, _ in pairs], [a for _, a in pairs]


_MOST_OBJECTS = 10_000  # a rule bound to something larger is taken to hold a tracer


def _tracers(
    unseen: list[Any], of_object: Callable[[Any], Iterable[Any]] | None = None
) -> Iterator[Any]:
    """Yields the tracers reachable from functions, their closures, and containers.

    Yields None last where the search exceeds `_MOST_OBJECTS`.
    """
    seen: set[int] = set()
    # A depth-first search with a stack: closures may refer to themselves, hence `seen`.
    while unseen:
        x = unseen.pop()
        number = id(x)
        if number in seen:
            continue
        seen.add(number)
        find_parts = _PARTS.get(type(x))
        if find_parts is None:
            if isinstance(x, Tracer):
                yield x
                continue
            find_parts = of_object or _parts_of_object
        # The search is cut off here, and the caller assumes a tracer.
        if len(seen) > _MOST_OBJECTS:
            yield None
            return
        unseen += [part for part in find_parts(x) if type(part) not in _LEAVES]


def _parts_of_function(f: types.FunctionType) -> list[Any]:
    parts = [*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()]
    for cell in f.__closure__ or ():
        try:
            parts.append(cell.cell_contents)
        except ValueError:  # one that is not filled yet
            continue
    return parts


def _parts_of_object(x: Value) -> Iterable[Any]:
    if isinstance(x, (tuple, list)):
        return x
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, (type, types.ModuleType, jax.Array)):
        return ()
    # Objects with `__slots__` or C wrappers show no `__dict__`; `wrapped_parts` knows those of JAX.
    return (*getattr(x, "__dict__", {}).values(), *_compat.wrapped_parts(x))


_LEAVES = frozenset(
    {str, bytes, bool, int, float, complex, type(None), object, ShapedArray, PyTreeDef}
)


def _own_parts(call: object) -> list[Any]:
    # `functools.wraps` copies attributes such as `__wrapped__` to the call, and these are skipped.
    return [part for name, part in vars(call).items() if not name.startswith("_")]


_PARTS: dict[type, Callable[[Any], Iterable[Any]]] = {
    jax.custom_jvp: _own_parts,
    jax.custom_vjp: _own_parts,
    types.FunctionType: _parts_of_function,
    types.MethodType: lambda m: (m.__self__, m.__func__),
    functools.partial: lambda p: (p.func, *p.args, *p.keywords.values()),
    type(jax.jit(int)): lambda f: (f.__wrapped__,),
    dict: dict.values,
    list: iter,
    tuple: iter,
    set: iter,
    frozenset: iter,
}
