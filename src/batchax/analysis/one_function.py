"""Which jaxprs XLA for CPU compiles as a single kernel: see `_compat.single_kernel`.

A primitive that is in no table here is taken not to be, since a jaxpr with it would not compile. A
single kernel cannot hold library calls, such as sums of many lanes: short ones are written out,
in sums of two terms.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes, lax
from jax.extend.core.primitives import copy_p

from batchax import _compat
from batchax.analysis.cost import SERIAL, windows_of
from batchax.analysis.inner import programs_in
from batchax.cache import Cache
from batchax.jaxprs.bodies import Anywhere
from batchax.jaxprs.evaluate import Inside, Rewriter, rewritten
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Jaxpr, Value

_TERMS = 8  # that are added one by one
_FACTORS = 16  # of which products add up
_NUMBERS = 4096  # at most, that are added in a kernel of one lane
# Pairs that a product multiplies where a kernel of many lanes is as fast as a library, which
# multiplies all lanes at once. Search: own product 16, conjugate gradients.
_PAIRS = 64


def lower_for_kernel(program: ClosedJaxpr) -> ClosedJaxpr:
    if not _is_other_form.in_program(program):
        return program
    return _programs.get("for lanes", lambda: rewritten(program, _change), owner=program.jaxpr)


def can_be_written(eqn: Eqn, short: bool = False) -> bool:
    """Returns whether an operation has a form for a kernel; `short`: for one of many lanes."""
    form = _FORMS.get(eqn.primitive.name)
    return form is not None and form.serves(eqn) and (not short or form.is_short(eqn))


_is_other_form = Anywhere(lambda eqn: can_be_written(eqn))
_programs = Cache("programs for lanes in one function", most=512)


def _change(eqn: Eqn, inside: Inside) -> Eqn | list[Eqn]:
    if not can_be_written(eqn):
        return eqn.replace(params=inside()) if _is_other_form.in_equation(eqn) else eqn
    form = _FORMS[eqn.primitive.name]
    types = tuple(v.aval for v in eqn.invars)
    run = lambda *xs: [form.write(eqn.params, *xs)]
    key = eqn.primitive, types, tuple(sorted(eqn.params.items())), _compat.trace_context()
    staged = _programs.get(key, lambda: _compat.stage(run, types))
    to = Rewriter(staged)
    to.inline(staged, eqn.invars, eqn.outvars)
    return to.eqns


class _Form(NamedTuple):
    """Describes another form of an operation."""

    serves: Callable[[Eqn], bool]  # whether an equation has it
    is_short: Callable[[Eqn], bool]  # whether it is short enough for a kernel of many lanes
    write: Callable[..., Any]  # of the parameters of the equation, and its operands


def _is_reduced(eqn: Eqn) -> bool:
    aval = eqn.invars[0].aval
    return aval.dtype in (np.float32, np.float64) and 0 < aval.size <= _NUMBERS


def is_short(aval: Aval, axes: Sequence[int]) -> bool:
    """Returns whether a reduction has so few elements that they are combined one by one."""
    return int(np.prod([aval.shape[a] for a in axes])) <= _TERMS


def _is_short(eqn: Eqn) -> bool:
    return is_short(eqn.invars[0].aval, eqn.params["axes"])


def from_zero(total: Value) -> Value:
    """Turns -0 into 0 in a sum of two or more terms, as if they were added to 0.

    It is linear, as the sum is, which may be of tangents: a comparison has no transpose.
    """
    # XLA removes an addition of 0, unless a barrier hides what is added.
    return jnp.add(total, lax.optimization_barrier(np.zeros((), total.dtype)))


def _from_zero(total: jax.Array) -> Value:
    # As `from_zero`, in a kernel, which a barrier would end.
    if np.issubdtype(total.dtype, np.complexfloating):
        return lax.complex(_from_zero(lax.real(total)), _from_zero(lax.imag(total)))
    zero = lax.full_like(total, 0)
    # -0 - (-0) is 0. A constant here would have no derivative, and a kernel is differentiated.
    return lax.select(lax.eq(total, zero), total - lax.stop_gradient(total), total)


def _sum(params: dict[str, Any], x: Value) -> Value:
    total = _all_in(lax.add)(params, x)
    return total if total.size == x.size else _from_zero(total)


def _all_in(combine: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Writes a reduction as operations on two terms: one by one, or on halves."""

    def write(params: dict[str, Any], x: Value) -> Value:
        axes = sorted(params["axes"])
        if not axes:  # of a scalar; what takes the place of an equation is equations
            return copy_p.bind(x)
        reduced = _one_by_one if is_short(x, axes) else _by_halves
        for axis in axes:
            x = reduced(combine, x, axis)
        return lax.squeeze(x, axes)

    return write


def as_terms(primitive: str, x: Value, axes: Sequence[int]) -> Value:
    """Writes a reduction of few elements as operations on two terms."""
    return _FORMS[primitive].write({"axes": axes}, x)


def _one_by_one(combine: Callable[[Any, Any], Any], x: Value, axis: int) -> Value:
    return functools.reduce(combine, lax.split(x, (1,) * x.shape[axis], axis))


def _by_halves(combine: Callable[[Any, Any], Any], x: Value, axis: int) -> Value:
    """Reduces `axis` to one element in as many steps as its size has binary digits."""
    rest: list[Any] = []
    while (n := x.shape[axis]) > 1:
        # The last element of an odd size is combined at the end.
        first, second, *odd = lax.split(x, (n // 2,) * 2 + (1,) * (n % 2), axis)
        x = combine(first, second)
        rest += odd
    return functools.reduce(combine, rest, x)


def _is_small_product(eqn: Eqn) -> bool:
    ((left, _right), batch) = eqn.params["dimension_numbers"]
    floats = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)} <= {
        np.dtype("float32"),
        np.dtype("float64"),
    }
    return floats and len(left) <= 1 and not any(batch) and 0 < _pairs(eqn) <= _NUMBERS


def _pairs(eqn: Eqn) -> int:
    """Returns how many pairs of numbers a product without batch dimensions multiplies."""
    ((_, right), _), (x, y) = eqn.params["dimension_numbers"], [v.aval for v in eqn.invars]
    return x.size * int(np.prod(np.delete(y.shape, right)))


def _is_short_product(eqn: Eqn) -> bool:
    ((left, _right), _), x = eqn.params["dimension_numbers"], eqn.invars[0].aval
    return int(np.prod([x.shape[a] for a in left])) <= _FACTORS and _pairs(eqn) <= _PAIRS


def _product(params: dict[str, Any], x: Value, y: Value) -> Value:
    contracted, _ = params["dimension_numbers"]
    dtype = params["preferred_element_type"] or x.dtype
    x, y = (lax.convert_element_type(z, dtype) for z in (x, y))
    left, right = map(list, contracted)
    shape = (*np.delete(x.shape, left), *np.delete(y.shape, right))
    n_left, n = x.ndim - len(left), x.shape[left[0]] if left else 1
    if not left:
        x, y, left, right = lax.expand_dims(x, (0,)), lax.expand_dims(y, (0,)), [0], [0]

    def spread(z: Value, axis: int, dimensions: range) -> Value:
        order = [*(i for i in range(z.ndim) if i != axis), axis]
        return lax.broadcast_in_dim(lax.transpose(z, order), (*shape, n), [*dimensions, len(shape)])

    x, y = spread(x, left[0], range(n_left)), spread(y, right[0], range(n_left, len(shape)))
    if n <= _FACTORS:
        # One split for all terms: a slice for each of them would trace several times slower. Of a
        # product of all, which is not fused with sums of its parts, steps take half as long again.
        pairs = zip(*(lax.split(z, (1,) * n, len(shape)) for z in (x, y)), strict=True)
        total = functools.reduce(lax.add, itertools.starmap(lax.mul, pairs))
    else:
        total = _by_halves(lax.add, lax.mul(x, y), len(shape))
    total = lax.squeeze(total, (len(shape),))
    return total if n == 1 else _from_zero(total)


_FORMS = {
    "dot_general": _Form(_is_small_product, _is_short_product, _product),
    "reduce_sum": _Form(_is_reduced, _is_short, _sum),
    "reduce_prod": _Form(_is_reduced, _is_short, _all_in(lax.mul)),
    "reduce_max": _Form(_is_reduced, _is_short, _all_in(lax.max)),
    "reduce_min": _Form(_is_reduced, _is_short, _all_in(lax.min)),
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
    """Returns whether a lowered jaxpr fits into a single kernel of one example."""
    return _may_be(jaxpr) and not _others_of_one.in_program(jaxpr)


def fits_lowered_kernel(jaxpr: Jaxpr) -> bool:
    """Returns whether a lowered jaxpr fits into a single kernel of many lanes."""
    # What one example updates at one position, lanes update at several.
    return _may_be(jaxpr) and not _others_of_lanes.in_program(jaxpr)


def _may_be(jaxpr: Jaxpr) -> bool:
    variables = (*jaxpr.constvars, *jaxpr.invars)
    return _compat.single_kernels() and not any(_is_small_float(v.aval) for v in variables)


def _is_small_float(aval: Aval) -> bool:
    # CPUs have no arithmetic for these. XLA inserts float32 around each operation of functions that
    # it compiles through MLIR, but not of this one. LLVM does so for some only: in jaxlib 0.12 a
    # bitcast of bfloat16 ends the process ("Do not know how to soft promote this operator's
    # operand!").
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
    # `Anywhere` looks at jaxprs in parameters only, and some equations stand for others: a reverse
    # sweep sorts its checkpoints.
    inner = programs_in(eqn)
    return not inner or any(others.in_program(program.jaxpr) for program in inner)


_others = Anywhere(lambda eqn: _is_other(eqn, _others))
_others_of_one = Anywhere(lambda eqn: not can_be_written(eqn) and _is_other(eqn, _others_of_one))
_UPDATES = frozenset(("dynamic_update_slice", "maybe_set", "scatter"))
_others_of_lanes = Anywhere(
    lambda eqn: (
        not can_be_written(eqn, short=True)
        and (eqn.primitive.name in _UPDATES or _is_other(eqn, _others_of_lanes))
    )
)
