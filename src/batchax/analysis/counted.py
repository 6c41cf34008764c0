"""Counts how often the jaxprs inside loops and branches run.

Loops and branches of one example have numbers, in the name stack. A mark is an operation without
effect: it records that a jaxpr of a loop runs here, for so many lanes. A jaxpr that holds marks is
evaluated with counts as results. Names and marks are put only into jaxprs that are counted, not
into those that users run.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Literal

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import bodies_of, control_flow
from batchax.jaxprs.evaluate import (
    Inside,
    Step,
    bind_equation,
    plan,
    rewritten,
    values_of,
    variables_read,
    variables_used,
    walk,
)
from batchax.jaxprs.primitive_facts import expanded, facts_of, operations_of, shown
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Tree, Value, Var

_LOOP = "batchax_loop_"
_NO_LOOP = "batchax_beside"
_NUMBER = re.compile(_LOOP + r"(\d+)\)*$")
_RUN = "batchax_runs_"
_MARK = re.compile(_RUN + r"(\d+)_(\d*)_(\d+)\)*$")
_CALLBACKS = frozenset(("debug_callback", "debug_print"))


class Mark(NamedTuple):
    """Identifies what a mark counts."""

    loop: int  # the number of a loop, or of branches
    branch: int | None  # which of them; None for a loop
    lanes: int  # for how many lanes the program runs


def loop_number(eqn: Eqn) -> int | None:
    """Returns the number of a loop, or of branches, in its name stack."""
    if not control_flow(eqn.primitive).repeated:
        return None
    match = _NUMBER.search(str(eqn.source_info.name_stack))
    return None if match is None else int(match[1])


def mark_for(eqn: Eqn, branch: int | None, lanes: int) -> Mark | None:
    """Returns the mark of a program of an equation, or None if its runs are not counted."""
    number = loop_number(eqn)
    return None if number is None else Mark(number, branch, lanes)


def numbered(program: ClosedJaxpr) -> ClosedJaxpr:
    """Numbers each loop in `program`, and all branches, also those inside."""
    numbers = itertools.count()

    def change(eqn: Eqn, inside: Inside) -> Eqn | list[Eqn]:
        flow = control_flow(eqn.primitive)
        # Which branch a platform takes is not a decision of the program.
        counts = flow.repeated and not eqn.params.get("branches_platforms")
        return _compat.named_equation(eqn, f"{_LOOP}{next(numbers)}" if counts else None, inside())

    return rewritten(program, change)


def with_marks(program: ClosedJaxpr) -> ClosedJaxpr:
    """Marks each step and branch of a numbered program, for one lane."""

    def change(eqn: Eqn, inside: Inside) -> Eqn | list[Eqn]:
        number, params = loop_number(eqn), inside()
        if number is not None and eqn.primitive.name == "reverse_sweep":
            return _counted_beside(eqn, params, number)
        if number is not None:
            name = control_flow(eqn.primitive).repeated
            held = params[name]
            marked = (
                tuple(_marked(p, Mark(number, i, 1)) for i, p in enumerate(held))
                if isinstance(held, tuple)
                else _marked(held, Mark(number, None, 1))
            )
            params = {**params, name: marked}
        return _compat.named_equation(eqn, None, params)

    return rewritten(program, change)


def _counted_beside(eqn: Eqn, params: dict[str, Any], number: int) -> list[Any]:
    """Puts a loop that counts steps before a reverse sweep."""
    # The sweep itself runs in several loops, and recomputes steps on its way.
    most = params["form"].steps.most

    @jax.jit
    def counted(count: jax.Array) -> jax.Array:
        def step(i: Value) -> Value:
            put_mark(Mark(number, None, 1))
            return i + 1

        return lax.while_loop(lambda i: i < jnp.minimum(count, most), step, jnp.zeros_like(count))

    count, *rest = eqn.invars
    (call,) = _compat.stage(lambda count: [counted(count)], [count.aval]).jaxpr.eqns
    sweep = _compat.named_equation(eqn, _NO_LOOP, params)
    # The count passes through the call, so that the call is not dead code.
    return [call.replace(invars=[count]), sweep.replace(invars=[*call.outvars, *rest])]


def _marked(program: ClosedJaxpr, what: Mark) -> ClosedJaxpr:
    def run(*operands: Value) -> list[Any]:
        put_mark(what)
        return eval_jaxpr(program.jaxpr, program.consts, *operands)

    return _compat.stage(run, program.in_avals)


def put_mark(what: Mark) -> None:
    branch = "" if what.branch is None else what.branch
    # The name stack of the callback is the mark. The callback itself does nothing.
    with jax.named_scope(f"{_RUN}{what.loop}_{branch}_{what.lanes}"):
        jax.debug.callback(_nothing)


def named_as_marked(step: ClosedJaxpr) -> AbstractContextManager[Any]:
    """Returns the context to trace a loop in, with the number of the marks in its steps."""
    # A primitive may stand for several loops, of which one takes the steps.
    marks = (mark_of(eqn) for eqn in step.jaxpr.eqns)
    numbers = [mark.loop for mark in marks if mark is not None]
    return jax.named_scope(f"{_LOOP}{numbers[0]}" if numbers else _NO_LOOP)


def _nothing() -> None:
    pass


def mark_of(eqn: Eqn) -> Mark | None:
    """Parses an equation that is a mark; None otherwise."""
    if eqn.primitive.name != "debug_callback":
        return None
    match = _MARK.search(str(eqn.source_info.name_stack))
    if match is None:
        return None
    return Mark(int(match[1]), int(match[2]) if match[2] else None, int(match[3]))


def shows_only(eqn: Eqn) -> bool:
    """Returns whether an equation only shows something to the host, so it can be dropped."""
    return eqn.primitive.name in _CALLBACKS


Around = Callable[[Any], AbstractContextManager[Any]]
"""What is to hold while the operations of an equation are staged."""


_CALLS = frozenset(("custom_jvp_call", "custom_vjp_call", "custom_linear_solve"))
"""Primitives that call a program, besides those that `bodies` lists."""


class Counted:
    """Runs a program, counts its marks, and drops what only shows something to the host.

    Raises UnsupportedError if something that holds marks cannot be inlined.
    """

    def __init__(self, program: ClosedJaxpr, around: Around = lambda eqn: nullcontext()) -> None:
        self.marks: list[Mark] = []  # those counted, in order
        self._program, self._around = program, around
        self._own: dict[int, ClosedJaxpr | None] = {}
        self._opened: dict[int, bool] = {}
        self._kept: list[Any] = []  # alive, since others may be given their ids
        self._opens(program.jaxpr)

    def __call__(self, *args: Value, more: Sequence[Any] = ()) -> tuple[list[Any], Any]:
        """Returns results, then values of the variables `more`; and the counts."""
        counts = jnp.zeros(len(self.marks), np.uint32)
        return self._run(self._program.jaxpr, self._program.consts, args, counts, more)

    def _opens(self, jaxpr: Jaxpr) -> bool:
        """Returns whether a jaxpr holds marks, or shows something to the host."""
        if id(jaxpr) not in self._opened:
            self._kept.append(jaxpr)
            # Set before recursion, as a jaxpr is shared by equations.
            self._opened[id(jaxpr)] = False
            # All are checked: each has separate marks.
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
        """Lists the variables that an equation needs, without those for derivatives only."""
        own = self._operations(eqn)
        if own is None:
            return variables_read(eqn)
        used = variables_used(own.jaxpr)
        pairs = zip(eqn.invars, own.jaxpr.invars, strict=True)
        return [v for v, inner in pairs if inner in used and not isinstance(v, Literal)]

    def _run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        counts: Value,
        more: Sequence[Var] = (),
    ) -> tuple[list[Any], Any]:
        # An unused value may not have been computed.
        env: dict[Any, Any] = defaultdict(lambda: None)
        env.update(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        outvars = [*jaxpr.outvars, *more]

        def run_step(step: Step, operands: list[Any]) -> Sequence[Any]:
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

        number = operator.attrgetter("val")
        walk(plan(jaxpr.eqns, outvars, _is_kept, self._reads), env, number, run_step)
        return values_of(outvars, env, number), counts

    def _open(self, eqn: Eqn, operands: list[Value], counts: Value) -> tuple[Sequence[Any], Any]:
        own = self._operations(eqn)
        if own is not None:
            return self._run(own.jaxpr, own.consts, operands, counts)
        flow, bodies = control_flow(eqn.primitive), bodies_of(eqn)
        if flow.repeated:
            run = self._cond if flow.branches else self._while if flow.test else self._counted_loop
            return run(eqn, operands, counts)
        follows = facts_of(eqn.primitive).body or eqn.primitive.name in _CALLS
        if len(bodies) != 1 or not follows:
            raise UnsupportedError(f"the steps inside {shown(eqn.primitive)} cannot be counted")
        program = _compat.close(bodies[0].program)
        given = [operands[i] for i in bodies[0].operands]
        return self._run(program.jaxpr, program.consts, given, counts)

    def _while(self, eqn: Eqn, operands: list[Value], counts: Value) -> tuple[Sequence[Any], Any]:
        test, body = bodies_of(eqn)
        of_test = [operands[i] for i in test.operands[: test.same]]
        of_body = [operands[i] for i in body.operands[: body.same]]
        programs = [_compat.close(b.program) for b in (test, body)]

        def with_predicate(carry: Sequence[Any], counts: Value) -> tuple[Any, Any]:
            (goes_on,), counts = self._run(
                programs[0].jaxpr, programs[0].consts, [*of_test, *carry], counts
            )
            return goes_on, counts

        def once(state: Tree) -> Tree:
            active, carry, counts = state
            new, counts = self._run(
                programs[1].jaxpr, programs[1].consts, [*of_body, *carry], counts
            )
            # A predicate of several lanes leads what is carried, and who is done keeps that.
            new = [_chosen(active, x, old) for x, old in zip(new, carry, strict=True)]
            more, counts = with_predicate(new, counts)
            return active & more, new, counts

        carry = [operands[i] for i in body.carry_operands]
        active, counts = with_predicate(carry, counts)
        goes_on = lambda state: state[0].any()
        with named_as_marked(programs[1]):
            _, carry, counts = lax.while_loop(goes_on, once, (jnp.asarray(active), carry, counts))
        return carry, counts

    def _counted_loop(
        self, eqn: Eqn, operands: list[Value], counts: Value
    ) -> tuple[Sequence[Any], Any]:
        (body,) = bodies_of(eqn)
        program, first = _compat.close(body.program), body.same + body.carried
        given = [operands[i] for i in body.operands]
        consts, carry, xs = given[: body.same], given[body.same : first], given[first:]

        def step(state: Tree, x: Value) -> Value:
            carry, counts = state
            outs, counts = self._run(program.jaxpr, program.consts, [*consts, *carry, *x], counts)
            return (outs[: body.carried], counts), outs[body.carried :]

        if body.times is None:
            once = lambda _, state: step(state, [])[0]
            with named_as_marked(program):
                carry, counts = lax.fori_loop(0, body.counted_by(operands), once, (carry, counts))
            return list(carry), counts
        with named_as_marked(program):
            (carry, counts), ys = lax.scan(step, (carry, counts), xs, body.times, body.reverse)
        return [*carry, *ys], counts

    def _cond(self, eqn: Eqn, operands: list[Value], counts: Value) -> tuple[Sequence[Any], Any]:
        index, *others = operands

        def branch(program: ClosedJaxpr) -> Callable[..., Any]:
            return lambda counts, *xs: self._run(program.jaxpr, program.consts, xs, counts)

        branches = [branch(_compat.close(body.program)) for body in bodies_of(eqn)]
        return lax.switch(index, branches, counts, *others)


def _is_kept(eqn: Eqn) -> bool:
    """Returns whether an equation runs although its results are unused.

    Marks inside do not count.
    """
    return mark_of(eqn) is not None or _compat.does_more_than_show(eqn.effects)


def _chosen(active: Value, new: Value, old: Value) -> Value:
    if not active.shape:
        return new
    active = lax.expand_dims(active, range(active.ndim, jnp.ndim(new)))
    return jnp.where(active, new, old)
