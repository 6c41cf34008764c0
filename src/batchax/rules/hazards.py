"""What harm a program could do in masked lanes: those that run it and drop its results.

Protecting masked lanes costs operations. Most small branches need none, and this
module says which do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.core.primitives import scan_p

from batchax import _compat
from batchax.jaxprs.bodies import control_flow
from batchax.jaxprs.inside import programs_inside, with_inside
from batchax.jaxprs.primitive_facts import Facts, facts_of
from batchax.jaxprs.words import Eqn, Jaxpr
from batchax.memo import kept_with
from batchax.programs.inner import integers_in, programs_in

_FEW_STEPS = 16  # of a loop, that masked lanes may take rather than be given other operands

# Linear where one operand is a number written in the program: which operand may vary.
_LINEAR_IN = {"mul": (0, 1), "div": (0,)}


@dataclass(frozen=True)
class Hazards:
    """What may go wrong in masked lanes.

    Attributes:
      nonlinear: a derivative depends on values: NaN or inf may reach gradients.
      immoderate: an operation that may make infinity, or a NaN, of numbers that are not
        enormous.
      endless: a loop that ends on values, or a callback: it must not see operands
        of lanes that do not run it.
      costly: a loop or a callback: worth skipping when no lane runs it.
      collective: lanes see each other. A collective counts all lanes of its
        axis, those that drop the result too, as in ``jax.vmap``: their operands
        stay as they are, and the program runs even if no lane needs it.
    """

    nonlinear: bool
    immoderate: bool
    endless: bool
    costly: bool
    collective: bool


@kept_with("what may go wrong in masked lanes of programs")
def hazards(jaxpr: Jaxpr) -> Hazards:
    """The hazards of `jaxpr`, programs inside it included."""
    eqns = list(_equations(jaxpr))
    facts = list(map(_facts, eqns))
    return Hazards(
        nonlinear=not all(map(_is_linear, eqns)),
        immoderate=not all(f.moderate for f in facts),
        endless=any(f.endless for f in facts),
        costly=any(f.costly for f in facts),
        collective=any(map(_is_collective, eqns)),
    )


def is_endless(eqn: Eqn) -> bool:
    """Whether an equation must not see operands of lanes that do not run it; see `Hazards`.

    It may if it holds loops that a counter ends after a few steps, whatever their operands are:
    the stages of a Runge-Kutta method, say. To run them costs less than to replace operands.
    """
    programs = () if _facts(eqn).guarded else programs_inside(eqn)
    endless = _facts(eqn).endless or any(hazards(program).endless for program in programs)
    return endless and _waits(eqn, {})


def _waits(eqn: Eqn, integers: Mapping[Any, int]) -> bool:
    """Whether it, or what it runs, goes on for more than a few steps, for all that is known."""
    inner = programs_in(eqn, integers)
    if _facts(eqn).endless:
        tested = control_flow(eqn.primitive).test
        most = [p.most for p in inner if p.role == "body"] if tested else [None]
        if any(n is None or n > _FEW_STEPS for n in most):
            return True
    inside = [integers_in(p.jaxpr, p.integers) for p in inner]
    return any(_waits(e, n) for p, n in zip(inner, inside, strict=True) for e in p.jaxpr.eqns)


def find_collective(jaxpr: Jaxpr) -> Any:
    """An equation of `jaxpr`, or of a program inside it, in which lanes meet, or None."""
    if not hazards(jaxpr).collective:
        return None
    return next(filter(_is_collective, _equations(jaxpr)))


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """All equations of a program, but for those in programs that run in active lanes only."""
    return with_inside(jaxpr.eqns, lambda eqn: not _facts(eqn).guarded)


def _facts(eqn: Eqn) -> Facts:
    """What is true of its primitive; a bounded loop whose steps are counted is like a scan."""
    counted = eqn.primitive.name == "bounded_loop" and eqn.params["test"] is None
    return facts_of(scan_p if counted else eqn.primitive)


def _is_linear(eqn: Eqn) -> bool:
    if _facts(eqn).linear:
        return True
    varying = [i for i, v in enumerate(eqn.invars) if not _is_number(v)]
    if not any(_is_inexact(eqn.invars[i]) for i in varying):
        return True
    if not any(map(_is_inexact, eqn.outvars)):
        return True
    return len(varying) == 1 and varying[0] in _LINEAR_IN.get(eqn.primitive.name, ())


def _is_number(v: Any) -> bool:
    return isinstance(v, Literal) and bool(np.all(np.isfinite(v.val)))


def _is_inexact(v: Any) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_collective(eqn: Eqn) -> bool:
    facts = facts_of(eqn.primitive)
    if facts.names:
        return not facts.cast
    index = eqn.primitive.name == "axis_index"
    return not (index or programs_inside(eqn)) and bool(_compat.named_axes(eqn.effects))
