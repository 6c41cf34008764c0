"""Marks by which it is counted how often programs inside loops and branches run.

Loops and branches of one example have numbers, in the names that JAX carries along. A mark is an
operation that says: this program of this loop is run here, for so many lanes. It does nothing;
`counted` evaluates a program that holds some, and counts them. Names and marks are put into
programs that are only counted: what users run has none.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.bodies import LOOPS_AND_BRANCHES
from batchax.jaxprs.words import ClosedJaxpr, Eqn
from batchax.programs.rewritten import Inside, rewritten

_LOOP = "batchax_loop_"
_NO_LOOP = "batchax_beside"
_NUMBER = re.compile(_LOOP + r"(\d+)\)*$")
_SOME = re.compile(_LOOP + r"(\d+)_but_([\d_]+)\)*$")
_RUN = "batchax_runs_"
_MARK = re.compile(_RUN + r"(\d+)_(\d*)_(\d+)\)*$")
_CALLS = frozenset(("debug_callback", "debug_print"))

# The parameters that hold what runs in each step, or in each branch.
_STEPS = {"scan": "jaxpr", "while": "body_jaxpr", "cond": "branches", "bounded_loop": "body"}
_COUNTED = LOOPS_AND_BRANCHES | {"bounded_loop", "reverse_sweep"}


class Mark(NamedTuple):
    """What a mark says.

    Attributes:
      loop: the number of a loop, or of branches.
      branch: which of them; None of a loop.
      lanes: how many lanes the program is run for.
    """

    loop: int
    branch: int | None
    lanes: int


def loop_number(eqn: Eqn) -> int | None:
    """The number of a loop, or of branches; None of what has none."""
    if eqn.primitive.name not in _COUNTED:
        return None
    match = _NUMBER.search(str(eqn.source_info.name_stack))
    return None if match is None else int(match[1])


def without_branches(eqn: Eqn, left_out: Sequence[int]) -> Any:
    """A ``cond`` with all of the branches of another but some, whose runs are counted elsewhere."""
    number = loop_number(eqn)
    if number is None:
        return eqn
    some = "_".join(map(str, left_out))
    return _compat.named_equation(eqn, f"{_LOOP}{number}_but_{some}", eqn.params)


def mark_for(eqn: Eqn, branch: int | None, lanes: int) -> Mark | None:
    """The mark of a program of an equation; None if its runs are not counted there."""
    number = loop_number(eqn)
    if number is None:
        some = _SOME.search(str(eqn.source_info.name_stack))
        if some is None or str(branch) in some[2].split("_"):
            return None
        number = int(some[1])
    return Mark(number, branch, lanes)


def numbered(program: ClosedJaxpr) -> ClosedJaxpr:
    """`program` with a number for each loop in it, and all branches, wherever they are."""
    numbers = itertools.count()

    def change(eqn: Eqn, inside: Inside) -> Any:
        counts = eqn.primitive.name in _COUNTED and not eqn.params.get("branches_platforms")
        return _compat.named_equation(eqn, f"{_LOOP}{next(numbers)}" if counts else None, inside())

    return rewritten(program, change)


def with_marks(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose loops have numbers, with a mark in each step and branch, of one lane."""

    def change(eqn: Eqn, inside: Inside) -> Any:
        number, params = loop_number(eqn), inside()
        if number is not None and eqn.primitive.name == "reverse_sweep":
            return _counted_beside(eqn, params, number)
        if number is not None:
            name = _STEPS[eqn.primitive.name]
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
    """A sweep back over the steps of a loop, and before it a loop that counts them.

    The sweep itself runs in several loops, and computes steps again on its way.
    """
    most = params["form"].steps.most

    @jax.jit
    def counted(count: Any) -> Any:
        def step(i: Any) -> Any:
            put_mark(Mark(number, None, 1))
            return i + 1

        return lax.while_loop(lambda i: i < jnp.minimum(count, most), step, jnp.zeros_like(count))

    count, *rest = eqn.invars
    (call,) = _compat.stage(lambda count: [counted(count)], [count.aval]).jaxpr.eqns
    sweep = _compat.named_equation(eqn, _NO_LOOP, params)
    return [call.replace(invars=[count]), sweep.replace(invars=[*call.outvars, *rest])]


def _marked(program: ClosedJaxpr, what: Mark) -> ClosedJaxpr:
    def run(*operands: Any) -> list[Any]:
        put_mark(what)
        return eval_jaxpr(program.jaxpr, program.consts, *operands)

    return _compat.stage(run, program.in_avals)


def put_mark(what: Mark) -> None:
    """Stages a mark."""
    branch = "" if what.branch is None else what.branch
    with jax.named_scope(f"{_RUN}{what.loop}_{branch}_{what.lanes}"):
        jax.debug.callback(_nothing)


def named_as_marked(step: ClosedJaxpr) -> AbstractContextManager[Any]:
    """Context for a loop to be staged in: it has the number that marks in its steps say, or none.

    What a primitive stands for may be several loops, of which one takes the steps.
    """
    marks = (mark_of(eqn) for eqn in step.jaxpr.eqns)
    numbers = [mark.loop for mark in marks if mark is not None]
    return jax.named_scope(f"{_LOOP}{numbers[0]}" if numbers else _NO_LOOP)


def _nothing() -> None:
    pass


def mark_of(eqn: Eqn) -> Mark | None:
    """What an equation says that is a mark; None of another."""
    if eqn.primitive.name != "debug_callback":
        return None
    match = _MARK.search(str(eqn.source_info.name_stack))
    if match is None:
        return None
    return Mark(int(match[1]), int(match[2]) if match[2] else None, int(match[3]))


def shows_only(eqn: Eqn) -> bool:
    """Whether an equation only shows something to the host: which need not be shown twice."""
    return eqn.primitive.name in _CALLS
