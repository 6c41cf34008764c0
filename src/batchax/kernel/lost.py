"""Values that are used where the trace that they are of is over, or inside of what runs now.

JAX runs a derivative rule outside of the derivative. A value by which the derivative is taken is a
constant there, and what the rule does with it has no derivative. JAX raises an error when such a
value is used, but not of operations whose results nobody needs: those that a rule replaces.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.inside import Anywhere, programs_held
from batchax.jaxprs.spoken import line_of
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr


def refuse_lost(program: ClosedJaxpr, trace: Any) -> ClosedJaxpr:
    """`program`, which must hold no such value.

    Args:
      program: the program.
      trace: the trace that staged it: what is of a trace inside of it is no constant of it.

    Raises:
      UnsupportedError: it holds one by which a derivative is taken.
      UnexpectedTracerError: it holds one of a function that JAX has staged.
    """
    _refuse_lost(program, trace)
    return program


def _refuse_lost(program: Any, trace: Any) -> None:
    jaxpr, consts = getattr(program, "jaxpr", program), getattr(program, "consts", ())
    for x, v in zip(consts, jaxpr.constvars, strict=False):
        if isinstance(x, Tracer) and _compat.is_inside(x, trace):
            reader = _reader(jaxpr, v)
            place = line_of(reader) if reader is not None else _compat.name_and_place(jaxpr)
            if _compat.staged_variable(x) is not None:
                _compat.refuse_escaped(x)  # JAX says where it was made
            raise UnsupportedError(of_what_is_around(place, jax.typeof(x).str_short()))
    if _tracers_inside.in_program(jaxpr):
        for eqn in jaxpr.eqns:
            for inner in _run_by(eqn):
                _refuse_lost(inner, trace)


def of_what_is_around(place: str, type_of: str) -> str:
    """What is wrong with the use of a tracer at `place`, which is outside of its trace."""
    return (
        f"{place} uses a traced value ({type_of}) of what is differentiated or "
        "staged around it, and runs outside of that. If it is a rule of jax.custom_jvp or "
        "jax.custom_vjp, it closes over the value, whose part of the derivative would be lost. "
        "Give the value to the function as an argument: its rules are then given it, too."
    )


_tracers_inside = Anywhere(
    lambda eqn: any(
        isinstance(x, Tracer) for program in _run_by(eqn) for x in getattr(program, "consts", ())
    )
)
"""Whether a program holds traced values as constants of programs that it runs."""


def _run_by(eqn: Eqn) -> list[Any]:
    """The programs that an equation runs, of its operands.

    Primitives of third parties hold others: Lineax's what made an operator, whose values are
    operands.
    """
    if not programs_held(eqn):
        return []
    bodies = bodies_of(eqn)
    return [body.program for body in bodies if len(body.operands) == len(body.jaxpr.invars)]


def _reader(jaxpr: Jaxpr, variable: Any) -> Eqn | None:
    """The first equation that reads `variable`: inside of calls, loops and branches, too."""
    for eqn in jaxpr.eqns:
        if not any(v is variable for v in eqn.invars):
            continue
        for body in bodies_of(eqn):
            for v, operand in zip(body.jaxpr.invars, body.operands, strict=False):
                if eqn.invars[operand] is variable:
                    return _reader(body.jaxpr, v) or eqn
        return eqn
    return None
