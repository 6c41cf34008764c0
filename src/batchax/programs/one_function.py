"""Which programs a compiler for processors makes one function of: see `_compat.in_one_function`.

What is in no table here is taken not to be: a program that holds it would not compile.
"""

from __future__ import annotations

import numpy as np
from jax import dtypes

from batchax import _compat
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Aval, Eqn, Jaxpr
from batchax.programs import prices
from batchax.programs.for_lanes import can_be_written
from batchax.programs.inner import programs_in

_ANYWHERE = frozenset(
    """
    argmax argmin bitcast_convert_type broadcast_in_dim clamp concatenate cond copy cummax
    cummin cumprod cumsum dynamic_slice dynamic_update_slice gather iota pad random_bits
    random_fold_in random_seed random_split random_unwrap random_wrap reduce_and reduce_or
    reduce_xor reshape rev scan slice split squeeze stack threefry2x32 tile transpose unstack
    while
    """.split()
)
_OF_INTEGERS = frozenset(("reduce_max", "reduce_min", "reduce_prod", "reduce_sum"))
"""Of floats a library computes the larger ones."""


def fits_one_function(jaxpr: Jaxpr) -> bool:
    """Whether all of a program can be in one function."""
    return _may_be(jaxpr) and not _others.in_program(jaxpr)


def fits_for_lanes(jaxpr: Jaxpr) -> bool:
    """Whether all of a program, `for_lanes`, can be in one function when many run it at once.

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
        return name in prices.SERIAL  # these are loops of very many steps
    if name in _OF_INTEGERS:
        dtype = eqn.invars[0].aval.dtype
        return dtypes.issubdtype(dtype, np.inexact)
    if name == "scatter":  # a compiler makes an update of one, and a call of several
        return prices.windows_of(eqn) != 1
    # `Anywhere` looks at programs that are parameters alone, and some equations stand for others: a
    # sweep back over a bounded loop sorts what it keeps.
    inner = programs_in(eqn)
    return not inner or any(others.in_program(program.jaxpr) for program in inner)


_others = Anywhere(lambda eqn: _is_other(eqn, _others))
_UPDATES = frozenset(("dynamic_update_slice", "scatter"))
_others_of_lanes = Anywhere(
    lambda eqn: (
        not can_be_written(eqn)
        and (eqn.primitive.name in _UPDATES or _is_other(eqn, _others_of_lanes))
    )
)
