"""Programs made of the equations of others, without tracing them again: that takes far longer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import DropVar, Literal, Var

from batchax import _compat
from batchax.jaxprs.evaluate import variables_in, variables_read
from batchax.jaxprs.types import ClosedJaxpr, Eqn


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

    def atom(self, v: Any) -> Any:
        """Returns what an operand is in the new program: a variable or a literal."""
        return v if isinstance(v, Literal) else self.names.get(v, v)

    def own(self, eqn: Eqn) -> Any:
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


def fresh(aval: Any) -> Any:
    return Var(aval)


Inside = Callable[[], dict[str, Any]]
"""The parameters of an equation, with the programs in them rewritten."""


def rewritten(program: Any, change: Callable[[Eqn, Inside], Any]) -> Any:
    """Returns `program` with each equation changed, and those of all programs inside it.

    `change` makes an equation, or several, of one and of a function that rewrites its parameters.
    """

    def inside(value: Any) -> Any:
        if isinstance(value, _compat.JAXPR_TYPES):
            return rewritten(value, change)
        if isinstance(value, tuple):
            parts = list(map(inside, value))
            # Parameters without programs stay the same objects, so that caches know them again.
            if all(a is b for a, b in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    jaxpr = getattr(program, "jaxpr", program)
    eqns = []
    for eqn in jaxpr.eqns:
        params = eqn.params
        changed = change(eqn, lambda params=params: {k: inside(v) for k, v in params.items()})
        eqns += changed if isinstance(changed, list) else [changed]
    jaxpr = jaxpr.replace(eqns=eqns)
    return _compat.close(jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else jaxpr
