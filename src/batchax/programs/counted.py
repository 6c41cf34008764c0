"""How often marks in a program are come by when it runs: the program, with counts as results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.evaluate import bind_equation, plan, variables_read, variables_used, walk
from batchax.jaxprs.own_primitives import expanded, operations_of, shown
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Value
from batchax.programs.marks import Mark, mark_of, named_as_marked, shows_only

Around = Callable[[Any], AbstractContextManager[Any]]
"""What is to hold while the operations of an equation are staged."""


_CALLS = frozenset(("custom_jvp_call", "custom_vjp_call", "custom_linear_solve"))
"""What calls a program, besides what is said to."""


class Counted:
    """A program that counts its marks, and shows nothing to the host.

    Attributes:
      marks: what is counted, in order.

    Raises:
      UnsupportedError: something that holds marks cannot be looked into.
    """

    def __init__(self, program: ClosedJaxpr, around: Around = lambda eqn: nullcontext()) -> None:
        self.marks: list[Mark] = []
        self._program, self._around = program, around
        self._own: dict[int, ClosedJaxpr | None] = {}
        self._opened: dict[int, bool] = {}
        self._kept: list[Any] = []  # alive, since others may be given their ids
        self._opens(program.jaxpr)

    def __call__(self, *args: Any, more: Sequence[Any] = ()) -> tuple[list[Any], Any]:
        """The results of the program, then the values of variables `more` of it; and the counts."""
        counts = jnp.zeros(len(self.marks), np.uint32)
        return self._run(self._program.jaxpr, self._program.consts, args, counts, more)

    def _opens(self, jaxpr: Any) -> bool:
        """Whether a program holds marks, or what shows something to the host."""
        if id(jaxpr) not in self._opened:
            self._kept.append(jaxpr)
            self._opened[id(jaxpr)] = False
            # All are looked at: each has marks of its own.
            answers = list(map(self._is_opened, jaxpr.eqns))
            self._opened[id(jaxpr)] = any(answers)
        return self._opened[id(jaxpr)]

    def _is_opened(self, eqn: Eqn) -> bool:
        mark = mark_of(eqn)
        if mark is not None:
            if mark not in self.marks:
                self.marks.append(mark)
            return True
        if shows_only(eqn):
            return True
        own = self._operations(eqn)
        if own is not None:
            return self._opens(own.jaxpr)
        answers = [self._opens(body.jaxpr) for body in bodies_of(eqn)]
        return any(answers)

    def _operations(self, eqn: Eqn) -> ClosedJaxpr | None:
        if id(eqn) not in self._own:
            self._kept.append(eqn)
            with self._around(eqn):
                if eqn.primitive.name == "call_hi_primitive":
                    own = expanded(eqn.params["_prim"], [v.aval for v in eqn.invars])
                else:
                    own = operations_of(eqn)
            self._own[id(eqn)] = own
        return self._own[id(eqn)]

    def _reads(self, eqn: Eqn) -> list[Any]:
        """The variables that an equation needs: not those that only its derivatives do."""
        own = self._operations(eqn)
        if own is None:
            return variables_read(eqn)
        used = variables_used(own.jaxpr)
        pairs = zip(eqn.invars, own.jaxpr.invars, strict=True)
        return [v for v, inner in pairs if inner in used and not isinstance(v, Literal)]

    def _run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], counts: Any, more: Any = ()
    ) -> tuple[list[Any], Any]:
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        outvars = [*jaxpr.outvars, *more]

        def run_step(step: Any, operands: list[Any]) -> Sequence[Any]:
            nonlocal counts
            eqn = step.eqn
            mark = mark_of(eqn)
            if mark is not None:
                counts = counts.at[self.marks.index(mark)].add(1)
                return []
            if shows_only(eqn):
                return []
            if not (self._is_opened(eqn) or any(x is None for x in operands)):
                return bind_equation(eqn, operands)
            outs, counts = self._open(eqn, operands, counts)
            return outs

        def read(v: Any) -> Any:
            # What nobody reads has perhaps not been computed.
            return v.val if isinstance(v, Literal) else env.get(v)

        walk(plan(jaxpr.eqns, outvars, _is_kept, self._reads), env, read, run_step)
        return list(map(read, outvars)), counts

    def _open(self, eqn: Eqn, operands: list[Value], counts: Any) -> tuple[Sequence[Any], Any]:
        own = self._operations(eqn)
        if own is not None:
            return self._run(own.jaxpr, own.consts, operands, counts)
        kinds = {"while": self._while, "scan": self._scan, "cond": self._cond}
        if eqn.primitive.name in kinds:
            return kinds[eqn.primitive.name](eqn, operands, counts)
        bodies = bodies_of(eqn)
        follows = facts_of(eqn.primitive).body or eqn.primitive.name in _CALLS
        if len(bodies) != 1 or not follows:
            raise UnsupportedError(f"nobody can look into {shown(eqn.primitive)}")
        program = _compat.close(bodies[0].program)
        given = [operands[i] for i in bodies[0].operands]
        return self._run(program.jaxpr, program.consts, given, counts)

    def _while(self, eqn: Eqn, operands: list[Value], counts: Any) -> tuple[Sequence[Any], Any]:
        test, body = bodies_of(eqn)
        of_test = [operands[i] for i in test.operands[: test.same]]
        of_body = [operands[i] for i in body.operands[: body.same]]
        programs = [_compat.close(b.program) for b in (test, body)]

        def asked(carry: Sequence[Any], counts: Any) -> tuple[Any, Any]:
            (goes_on,), counts = self._run(
                programs[0].jaxpr, programs[0].consts, [*of_test, *carry], counts
            )
            return goes_on, counts

        def once(state: Any) -> Any:
            active, carry, counts = state
            new, counts = self._run(
                programs[1].jaxpr, programs[1].consts, [*of_body, *carry], counts
            )
            # A predicate of several lanes leads what is carried, and who is done keeps that.
            new = [_chosen(active, x, old) for x, old in zip(new, carry, strict=True)]
            more, counts = asked(new, counts)
            return active & more, new, counts

        carry = [operands[i] for i in body.carry_operands]
        active, counts = asked(carry, counts)
        goes_on = lambda state: state[0].any()
        with named_as_marked(programs[1]):
            _, carry, counts = lax.while_loop(goes_on, once, (jnp.asarray(active), carry, counts))
        return carry, counts

    def _scan(self, eqn: Eqn, operands: list[Value], counts: Any) -> tuple[Sequence[Any], Any]:
        (body,) = bodies_of(eqn)
        program, first = _compat.close(body.program), body.same + body.carried
        consts, carry, xs = operands[: body.same], operands[body.same : first], operands[first:]

        def step(state: Any, x: Any) -> Any:
            carry, counts = state
            outs, counts = self._run(program.jaxpr, program.consts, [*consts, *carry, *x], counts)
            return (outs[: body.carried], counts), outs[body.carried :]

        how = {k: eqn.params[k] for k in ("length", "reverse")}
        with named_as_marked(program):
            (carry, counts), ys = lax.scan(step, (carry, counts), xs, **how)
        return [*carry, *ys], counts

    def _cond(self, eqn: Eqn, operands: list[Value], counts: Any) -> tuple[Sequence[Any], Any]:
        index, *others = operands

        def branch(program: ClosedJaxpr) -> Callable[..., Any]:
            return lambda counts, *xs: self._run(program.jaxpr, program.consts, xs, counts)

        branches = [branch(_compat.close(body.program)) for body in bodies_of(eqn)]
        return lax.switch(index, branches, counts, *others)


def _is_kept(eqn: Eqn) -> bool:
    """Whether an equation is run although nobody needs its results: not for marks inside it."""
    return mark_of(eqn) is not None or _compat.does_more_than_show(eqn.effects)


def _chosen(active: Any, new: Any, old: Any) -> Any:
    if not active.shape:
        return new
    active = lax.expand_dims(active, range(active.ndim, jnp.ndim(new)))
    return jnp.where(active, new, old)
