"""Which jaxprs XLA for CPU compiles as a single kernel: see `_compat.single_kernel`.

A primitive that is in no table here is taken not to be, since a jaxpr with it would not compile. A
single kernel cannot hold library calls, such as sums of many lanes: short ones are written out,
term by term.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax import dtypes, lax

from batchax import _compat
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.rewriter import Inside, Rewriter, rewritten
from batchax.jaxprs.words import Aval, ClosedJaxpr, Eqn, Jaxpr
from batchax.memo import Memo
from batchax.programs.cost import SERIAL, windows_of
from batchax.programs.inner import programs_in

_TERMS = 8
_FACTORS = 16  # of which products add up


def lower_for_kernel(program: ClosedJaxpr) -> ClosedJaxpr:
    if not _is_other_form.in_program(program):
        return program
    return _programs.get("for lanes", lambda: rewritten(program, _change), owner=program.jaxpr)


def can_be_written(eqn: Eqn) -> bool:
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
    to = Rewriter(staged)
    to.inline(staged, eqn.invars, eqn.outvars)
    return to.eqns


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


def _is_short_product(eqn: Eqn) -> bool:
    ((left, _right), batch), (x, y) = eqn.params["dimension_numbers"], [v.aval for v in eqn.invars]
    terms = int(np.prod([x.shape[a] for a in left]))
    floats = {x.dtype, y.dtype, eqn.outvars[0].aval.dtype} <= {
        np.dtype("float32"),
        np.dtype("float64"),
    }
    return floats and len(left) == 1 and not any(batch) and 0 < terms <= _FACTORS


def _product(params: Any, x: Any, y: Any) -> Any:
    ((left,), (right,)), _ = params["dimension_numbers"]
    dtype = params["preferred_element_type"] or x.dtype
    x, y = (lax.convert_element_type(z, dtype) for z in (x, y))
    shape = (*np.delete(x.shape, left), *np.delete(y.shape, right))
    total = None
    for k in range(x.shape[left]):
        first, second = (
            lax.index_in_dim(z, k, a, keepdims=False) for z, a in ((x, left), (y, right))
        )
        term = lax.mul(
            lax.broadcast_in_dim(first, shape, range(first.ndim)),
            lax.broadcast_in_dim(second, shape, range(first.ndim, len(shape))),
        )
        total = term if total is None else lax.add(total, term)
    return total if x.shape[left] == 1 else from_zero(total)


_FORMS = {
    "dot_general": _Form(_is_short_product, _product),
    "reduce_sum": _Form(_is_short, _sum),
    "reduce_prod": _Form(_is_short, _term_by_term(lax.mul)),
    "reduce_max": _Form(_is_short, _term_by_term(lax.max)),
    "reduce_min": _Form(_is_short, _term_by_term(lax.min)),
}


_ANYWHERE = frozenset(
    """
    argmax argmin bitcast_convert_type broadcast_in_dim clamp concatenate cond copy cummax
    cummin cumprod cumsum dynamic_slice dynamic_update_slice gather iota pad random_bits
    random_fold_in random_seed random_split random_unwrap random_wrap reduce_and reduce_or
    maybe_set reduce_xor reshape rev scan slice split squeeze stack threefry2x32 tile transpose
    unstack unvmap_all unvmap_any unvmap_max while
    """.split()
)
_OF_INTEGERS = frozenset(("reduce_max", "reduce_min", "reduce_prod", "reduce_sum"))
"""Of floats a library computes the larger ones."""


def fits_single_kernel(jaxpr: Jaxpr) -> bool:
    return _may_be(jaxpr) and not _others.in_program(jaxpr)


def fits_serial_kernel(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr, after `lower_for_kernel`, fits into a single kernel of one example."""
    return _may_be(jaxpr) and not _others_of_one.in_program(jaxpr)


def fits_lowered_kernel(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr, after `lower_for_kernel`, fits into a single kernel of many lanes.

    What one example updates at a place of its own, lanes update at several.
    """
    return _may_be(jaxpr) and not _others_of_lanes.in_program(jaxpr)


def _may_be(jaxpr: Jaxpr) -> bool:
    variables = (*jaxpr.constvars, *jaxpr.invars)
    return _compat.single_kernels() and not any(_is_small_float(v.aval) for v in variables)


def _is_small_float(aval: Aval) -> bool:
    """Whether these are floating-point numbers of fewer than 32 bits.

    Processors have no arithmetic for them. XLA puts float32 around each operation of a function
    that it makes by way of MLIR, and not of this one. LLVM does so then, but not for all: in XLA of
    jaxlib 0.12 bfloat16 as an integer ends the process ("Do not know how to soft promote this
    operator's operand!").
    """
    dtype = aval.dtype if hasattr(aval, "dtype") else None
    return dtype is not None and dtypes.issubdtype(dtype, np.floating) and dtype.itemsize < 4


def _is_other(eqn: Eqn, others: Anywhere) -> bool:
    name = eqn.primitive.name
    facts = facts_of(eqn.primitive)
    if any(_is_small_float(v.aval) for v in eqn.outvars):
        return True
    if name in _ANYWHERE or facts.alias or facts.is_plain_call:
        return False
    if facts.elementwise:
        return name in SERIAL  # these are loops of very many steps
    if name in _OF_INTEGERS:
        dtype = eqn.invars[0].aval.dtype
        return dtypes.issubdtype(dtype, np.inexact)
    if name == "scatter":  # a compiler makes an update of one, and a call of several
        return windows_of(eqn) != 1
    # `Anywhere` looks at programs that are parameters alone, and some equations stand for others: a
    # sweep back over a bounded loop sorts what it keeps.
    inner = programs_in(eqn)
    return not inner or any(others.in_program(program.jaxpr) for program in inner)


_others = Anywhere(lambda eqn: _is_other(eqn, _others))
_others_of_one = Anywhere(lambda eqn: not can_be_written(eqn) and _is_other(eqn, _others_of_one))
_UPDATES = frozenset(("dynamic_update_slice", "maybe_set", "scatter"))
_others_of_lanes = Anywhere(
    lambda eqn: (
        not can_be_written(eqn)
        and (eqn.primitive.name in _UPDATES or _is_other(eqn, _others_of_lanes))
    )
)
