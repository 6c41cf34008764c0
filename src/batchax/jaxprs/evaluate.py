"""The evaluator, which runs a jaxpr equation by equation, and the rewriter, which makes new ones.

Batching, padding rows, masking lanes and comparing programs all walk through a program so; they
differ in what stands for a value, and in what they do with an equation. A jaxpr made of the
equations of others need not be traced again, which takes far longer.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import DropVar, Literal

from batchax import _compat
from batchax.jaxprs.types import Atom, Aval, ClosedJaxpr, Eqn, Jaxpr, Program, Values, Var


def evaluate(
    jaxpr: Jaxpr,
    consts: Values,
    args: Values,
    run_equation: Callable[[Any, list[Any]], Iterable[Any]],
    number: Callable[[Any], Any] = lambda literal: literal.val,
    keeps: Callable[[Any], Any] = operator.attrgetter("effects"),
) -> list[Any]:
    """Evaluates `jaxpr`, with `run_equation` for each equation that a result or an effect needs.

    `consts`, `args` and what `number` makes of a `Literal` may be anything that `run_equation`
    takes. `keeps` is as for `plan`.
    """
    env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    steps = plan(jaxpr.eqns, jaxpr.outvars, keeps)
    walk(steps, env, number, lambda step, operands: run_equation(step.eqn, operands))
    return values_of(jaxpr.outvars, env, number)


def values_of(
    atoms: Iterable[Any], env: Mapping[Any, Any], number: Callable[[Any], Any]
) -> list[Any]:
    """Lists what variables are in `env`, and what `number` makes of each `Literal`."""
    return [number(v) if type(v) is Literal else env[v] for v in atoms]


def variables_in(atoms: Iterable[Any]) -> list[Any]:
    return [v for v in atoms if type(v) is not Literal]


def variables_read(eqn: Eqn) -> list[Any]:
    return variables_in(eqn.invars)


def variables_used(jaxpr: Jaxpr) -> set[Any]:
    used = {v for eqn in jaxpr.eqns for v in variables_read(eqn)}
    return used.union(variables_in(jaxpr.outvars))


class Step(NamedTuple):
    """An equation, what it reads, what it makes, and what nothing after it reads."""

    eqn: Eqn
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    dead: Collection[Any]


_surroundings = operator.attrgetter("eqn.ctx")


def walk(
    steps: Iterable[Any],
    env: dict[Any, Any],
    number: Callable[[Any], Any],
    run_step: Callable[[Any, list[Any]], Iterable[Any]],
    literal: type = Literal,
) -> None:
    """Runs steps one after another, from what `env` holds; there it leaves what they make.

    Inputs of the type `literal` are not in `env`: `number` returns what they are.
    """
    names, stack = None, (outer := _compat.current_name_stack())
    # JAX has one object for all equations of the same surroundings, or of the same names.
    for surroundings, alike in itertools.groupby(steps, _surroundings):
        with surroundings.manager:
            for step in alike:
                source = step.eqn.source_info
                if source.name_stack is not names:
                    names = source.name_stack
                    stack = outer + names
                # Here and not in a function: this runs for each operand of each equation.
                operands = [number(v) if type(v) is literal else env[v] for v in step.inputs]
                with _compat.in_source(source.traceback, name_stack=stack):
                    outs = run_step(step, operands)
                env.update(zip(step.outputs, outs, strict=True))
                for v in step.dead:
                    del env[v]
                operands = outs = None  # these would keep dead values alive


def bind_equation(eqn: Eqn, operands: Values, **changes: Any) -> Sequence[Any]:
    """Emits an equation again, on other operands and with `changes` to its parameters."""
    primitive, params = eqn.primitive, {**eqn.params, **changes} if changes else eqn.params
    out = primitive.bind(*operands, **primitive.get_bind_params(params))
    return out if primitive.multiple_results else [out]


def plan(
    eqns: Sequence[Eqn],
    outvars: Iterable[Any],
    keeps: Callable[[Any], Any] = operator.attrgetter("effects"),
    reads: Callable[[Any], Iterable[Any]] | None = None,
) -> list[Step]:
    """Lists those of `eqns` that `outvars` need, each with the variables that are dead after it.

    `keeps` says which are needed anyhow, `reads` which variables one needs (by default its
    operands).
    """
    # From the last equation backwards: a variable whose last reader this is, is dead after it.
    # Dropping values then keeps eager runs within the memory that ordinary Python code needs.
    live = set(variables_in(outvars))
    steps = []
    for eqn in reversed(eqns):
        inputs, outputs = eqn.invars, eqn.outvars
        if live.isdisjoint(outputs) and not keeps(eqn):
            continue
        used = {v for v in inputs if type(v) is not Literal} if reads is None else set(reads(eqn))
        steps.append(Step(eqn, inputs, outputs, used.union(outputs) - live))
        live |= used
    return steps[::-1]


class Rewriter:
    """Makes a new program of the equations of another, and of programs inlined into it."""

    def __init__(self, read: ClosedJaxpr, eqns: Iterable[Eqn] = ()) -> None:
        # A variable belongs to one equation of a program. Equations of `read` are in the new
        # program once and keep their variables; those of an inlined program, perhaps there more
        # than once, are copied.
        self.read, self.eqns, self.names = read, list(eqns), {}
        # more are added by `inline`
        self.constants = dict(zip(read.jaxpr.constvars, read.consts, strict=True))
        self._copies = False

    def atom(self, v: Atom) -> Atom:
        """Returns what an operand is in the new program: a variable or a literal."""
        return v if isinstance(v, Literal) else self.names.get(v, v)

    def own(self, eqn: Eqn) -> Eqn:
        """Returns an equation of `read` as it is in the new program; it is not added."""
        if not self._copies and self.names.keys().isdisjoint(variables_read(eqn)):
            return eqn
        operands, results = [self.atom(v) for v in eqn.invars], list(eqn.outvars)
        if self._copies:
            # The caller of an inlined program may have named its results already.
            new = lambda v: v if isinstance(v, DropVar) else self.names.get(v) or fresh(v.aval)
            results = list(map(new, results))
            self.names.update(zip(eqn.outvars, results, strict=True))
        return eqn.replace(invars=operands, outvars=results)

    def inline(
        self,
        program: ClosedJaxpr,
        operands: Sequence[Any],
        results: Sequence[Any] = (),
        write: Callable[[Rewriter], None] | None = None,
    ) -> list[Any]:
        """Adds copies of the equations of `program`, applied to `operands`; returns its results.

        `results` names variables for them. `write` adds the equations through the rewriter of
        `program`; by default all, unchanged.
        """
        inner, jaxpr = Rewriter(program), program.jaxpr
        inner.eqns, inner._copies = self.eqns, True
        named = zip(jaxpr.outvars, results, strict=False)
        # A result that is a literal, or that is dropped, is not made by an equation that could
        # take the name.
        useful = lambda v, r: not (isinstance(v, Literal) or isinstance(r, DropVar))
        inner.names = {v: r for v, r in named if useful(v, r)}
        inner.names |= zip(jaxpr.invars, operands, strict=True)
        for v, x in inner.constants.items():
            inner.names[v] = fresh(v.aval)
            self.constants[inner.names[v]] = x
        # Inlined programs share the constants of the outermost one, which `program` lists.
        inner.constants = self.constants
        if write is None:
            self.eqns += map(inner.own, jaxpr.eqns)
        else:
            write(inner)
        return list(map(inner.atom, jaxpr.outvars))

    def replace(
        self, eqn: Eqn, program: ClosedJaxpr, write: Callable[[Rewriter], None] | None = None
    ) -> None:
        """Inlines `program`, of the operands of an equation of `read`, in place of the equation."""
        # Results keep their variables where they can: a derivative rule may close over them.
        results = () if self._copies else eqn.outvars
        outs = self.inline(program, list(map(self.atom, eqn.invars)), results, write)
        same = zip(eqn.outvars, outs, strict=True)
        self.names.update((v, out) for v, out in same if out is not v)

    def program(
        self, inputs: Sequence[Any] | None = None, outputs: Sequence[Any] | None = None
    ) -> ClosedJaxpr:
        """Closes the new program over its constants; `inputs` and `outputs` are those of `read` by
        default.
        """
        jaxpr = self.read.jaxpr
        inputs = list(jaxpr.invars if inputs is None else inputs)
        outputs = list(map(self.atom, jaxpr.outvars) if outputs is None else outputs)
        read = [v for eqn in self.eqns for v in variables_read(eqn)] + variables_in(outputs)
        given = set(inputs)
        # Only constants that something reads, each once, in the order in which they are read.
        used = [v for v in dict.fromkeys(read) if v in self.constants and v not in given]
        effects = frozenset().union(*(eqn.effects for eqn in self.eqns))
        jaxpr = jaxpr.replace(
            constvars=used, invars=inputs, eqns=self.eqns, outvars=outputs, effects=effects
        )
        return _compat.close(jaxpr, [self.constants[v] for v in used])


def fresh(aval: Aval) -> Var:
    return Var(aval)


Inside = Callable[[], dict[str, Any]]
"""The parameters of an equation, with the programs in them rewritten."""


def rewritten(
    program: Program,
    change: Callable[[Eqn, Inside], Any],
    change_inside: Callable[[Program], Any] | None = None,
) -> Any:
    """Returns `program` with each equation changed, and those of all programs inside it.

    `change` makes an equation, or several, of one and of a function that rewrites its parameters.
    `change_inside` rewrites programs in these, if not given likewise.
    """
    rewrite = change_inside or (lambda inner: rewritten(inner, change))

    def inside(value: Any) -> Any:
        if isinstance(value, _compat.JAXPR_TYPES):
            return rewrite(value)
        if isinstance(value, tuple):
            parts = list(map(inside, value))
            # Parameters without programs stay the same objects, so that caches know them again.
            if all(a is b for a, b in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    jaxpr = _compat.jaxpr_of(program)
    eqns = []
    for eqn in jaxpr.eqns:
        params = eqn.params
        changed = change(eqn, lambda params=params: {k: inside(v) for k, v in params.items()})
        eqns += changed if isinstance(changed, list) else [changed]
    jaxpr = jaxpr.replace(eqns=eqns)
    return _compat.close(jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else jaxpr
