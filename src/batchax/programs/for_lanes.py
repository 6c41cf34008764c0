"""Programs in the form in which many lanes of them can be in one function: see `one_function`.

XLA has no such function for what a library computes, such as sums of many lanes. Short ones are
written out, term by term.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.joined import copied
from batchax.jaxprs.words import ClosedJaxpr, Eqn
from batchax.memo import Memo
from batchax.programs.rewritten import Inside, rewritten

_TERMS = 8


def for_lanes(program: ClosedJaxpr) -> ClosedJaxpr:
    """`program`, with what has another form in that."""
    if not _is_other_form.in_program(program):
        return program
    return _programs.get("for lanes", lambda: rewritten(program, _change), owner=program.jaxpr)


def can_be_written(eqn: Eqn) -> bool:
    """Whether an equation has another form."""
    form = _FORMS.get(eqn.primitive.name)
    return form is not None and form.serves(eqn)


_is_other_form = Anywhere(can_be_written)
_programs = Memo("programs for lanes in one function", most=512)


def _change(eqn: Eqn, inside: Inside) -> Any:
    if not can_be_written(eqn):
        return eqn.replace(params=inside()) if _is_other_form.in_equation(eqn) else eqn
    form = _FORMS[eqn.primitive.name]
    run = lambda *xs: [form.write(eqn.params, *xs)]
    staged = _compat.stage(run, [v.aval for v in eqn.invars])
    *eqns, last = copied(staged, eqn.invars, {})[0]
    return [*eqns, last.replace(outvars=eqn.outvars)]


class _Form(NamedTuple):
    """Another form of an operation.

    Attributes:
      serves: whether an equation has it.
      write: it, of the parameters of the equation and its operands.
    """

    serves: Callable[[Eqn], bool]
    write: Callable[..., Any]


def _is_short(eqn: Eqn) -> bool:
    aval = eqn.invars[0].aval
    terms = [aval.shape[a] for a in eqn.params["axes"]]
    return aval.dtype in (np.float32, np.float64) and 0 < int(np.prod(terms)) <= _TERMS


def from_zero(total: Any) -> Any:
    """A sum of two terms or more, as if they were added to 0: there is no -0 in it.

    XLA's own sums begin with 0, but it takes a 0 away that is written out. Its derivative is that
    of `total`, where `total` is 0, too.
    """
    if np.issubdtype(total.dtype, np.complexfloating):
        return lax.complex(from_zero(lax.real(total)), from_zero(lax.imag(total)))
    zero = lax.full_like(total, 0)
    # -0 - (-0) is 0. A constant here would have no derivative.
    return lax.select(lax.eq(total, zero), total - lax.stop_gradient(total), total)


def _sum(params: Any, x: Any) -> Any:
    total = _term_by_term(lax.add)(params, x)
    return total if total.size == x.size else from_zero(total)


def _term_by_term(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def write(params: Any, x: Any) -> Any:
        axes = params["axes"]
        total = None
        for places in itertools.product(*(range(x.shape[a]) for a in axes)):
            first, end = [0] * x.ndim, list(x.shape)
            for a, place in zip(axes, places, strict=True):
                first[a], end[a] = place, place + 1
            term = lax.squeeze(lax.slice(x, first, end), axes)
            total = term if total is None else combine(total, term)
        return total

    return write


_FORMS = {
    "reduce_sum": _Form(_is_short, _sum),
    "reduce_prod": _Form(_is_short, _term_by_term(lax.mul)),
    "reduce_max": _Form(_is_short, _term_by_term(lax.max)),
    "reduce_min": _Form(_is_short, _term_by_term(lax.min)),
}
