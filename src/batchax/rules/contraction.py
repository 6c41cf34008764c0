"""Sums of products over contracted dimensions: `dot_general` and `ragged_dot_general`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad
from jax.sharding import NamedSharding

from batchax import _compat
from batchax.analysis.inner import depending
from batchax.jaxprs.bodies import with_inside
from batchax.jaxprs.primitive_facts import enter
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Value, Values
from batchax.kernel.axis import (
    Axis,
    Position,
    Positions,
    RuleOutputs,
    broadcast_axis,
    match_axis,
    move_axis,
    sharding_with_axis,
    shift_dims,
)
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import declare, own_primitive
from batchax.kernel.registry import matched, register_rule
from batchax.rules.linalg import with_lanes_last
from batchax.rules.reductions import pays as terms_pay
from batchax.rules.reductions import short_reduction

Dimensions = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


enter(
    """
    moderate: dot_general
    : scaled_dot
    """
)


_OF_VECTORS = (((0,), (0,)), ((), ()))  # the dimensions of their dot product


@register_rule(lax.dot_general_p)
def _dot_general(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    dimension_numbers: Dimensions,
    precision: Any,
    out_sharding: NamedSharding | None,
    **params: Any,
) -> RuleOutputs:
    (lhs, rhs), (lhs_axis, rhs_axis) = args, axes
    both = lhs_axis is not None and rhs_axis is not None
    vectors = both and lhs.ndim == rhs.ndim == 2 and dimension_numbers == _OF_VECTORS
    alike = both and {params["preferred_element_type"] or lhs.dtype, rhs.dtype} == {lhs.dtype}
    if vectors and alike and terms_pay(lhs, [d for d in (0, 1) if d != lhs_axis]):
        (x, y), position = matched(axis, args, axes)
        return short_reduction("reduce_sum", lax.mul(x, y), position, (0,))
    if both and max(lhs.ndim, rhs.ndim) == 3:
        kept = dict(
            dimension_numbers=dimension_numbers,
            precision=precision,
            out_sharding=out_sharding,
        )
        small = with_lanes_last(lax.dot_general_p, axis, args, axes, kept | params)
        if small is not None:
            out, position = small
            # Lanes stay last where they were: otherwise a sum over earlier dimensions is slow.
            were = lhs_axis == lhs.ndim - 1 or rhs_axis == rhs.ndim - 1
            return (out, position) if were else (move_axis(out, position, 0), 0)
    keeps = _keeps_place(axis, lhs, lhs_axis, rhs, rhs_axis, dimension_numbers)
    if keeps and _symmetric(precision):
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        lhs, rhs, lhs_axis, rhs_axis = rhs, lhs, rhs_axis, lhs_axis
        dimension_numbers = ((rhs_contract, lhs_contract), (rhs_batch, lhs_batch))
        precision = precision if precision is None else precision[::-1]
    dimension_numbers, position = batched_dimensions(
        dimension_numbers, (np.ndim(lhs), np.ndim(rhs)), (lhs_axis, rhs_axis)
    )
    if not (both or axis.in_loop):
        given = dict(dimension_numbers=dimension_numbers, precision=precision)
        given |= dict(out_sharding=out_sharding) | params
        small = int(rhs_axis is None)
        if _is_thin_and_long((lhs, rhs), small, given):
            return thin_product((lhs, rhs), small, **given), position
    out = lax.dot_general_p.bind(
        lhs,
        rhs,
        dimension_numbers=dimension_numbers,
        precision=precision,
        out_sharding=sharding_with_axis(out_sharding, position, args, axes),
        **params,
    )
    return out, position


def _is_thin_and_long(operands: Values, small: int, params: dict[str, Any]) -> bool:
    """Returns whether few terms are added, of many lanes and a matrix that they share."""
    types = list(map(jax.typeof, operands))
    known = all(isinstance(n, int) for aval in types for n in aval.shape)
    split = any(entry is not None for aval in types for entry in aval.sharding.spec)
    if not known or split or not is_thin(types, small, **params):
        return False
    (terms,) = (types[small].shape[at] for at in params["dimension_numbers"][0][small])
    return is_long(math.prod(math.prod(aval.shape) // terms for aval in types))


def _keeps_place(
    axis: Axis, lhs: Value, lhs_axis: Position, rhs: Value, rhs_axis: Position, numbers: Dimensions
) -> bool:
    """Returns whether swapping the operands keeps the lanes where they are."""
    # A matrix times row vectors gives rows if the vectors come first, and columns stay columns if
    # they come last. A loop then passes columns from step to step without a transpose.
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    if lhs_axis is None and rhs_axis == 0:
        vectors = len(rhs_contract) + len(rhs_batch) == np.ndim(rhs) - 1
        return vectors and (axis.lanes_first or _long_rows(lhs, lhs_contract))
    if axis.columns and rhs_axis is None and lhs_axis == np.ndim(lhs) - 1:
        vectors = len(lhs_contract) + len(lhs_batch) == np.ndim(lhs) - 1
        return vectors and bool(lhs_contract) and not _long_rows(rhs, rhs_contract)
    return False


_LONG, _LONG_WITH_INPUT = 32, 16


def _long_rows(matrix: Value, contracted: Sequence[int], least: int = _LONG) -> bool:
    """Returns whether vectors are so long, before and after, that rows are as fast as columns."""
    # Columns are as wide as there are lanes: on a CPU, products take 0.5x to 0.9x the time for
    # vectors of 4 to 24, and 1.0x to 2.0x from 32 on.
    terms = math.prod(np.shape(matrix)[d] for d in contracted)
    return min(terms, math.prod(np.shape(matrix)) // max(1, terms)) >= least


StepLayout = Literal["as it is", "as jax.vmap", "rows", "columns"]


def layout_of_steps(axis: Axis, program: ClosedJaxpr) -> StepLayout:
    """Returns where vectors should have their lanes in a loop body, `program`, batched with `axis`.

    "rows" have them first and "columns" last, in operations and from step to step.
    """
    lanes = axis.size
    if not (axis.columns and isinstance(lanes, int)):
        return "as it is"
    eqns = list(with_inside(program.jaxpr.eqns))
    products = [e for e in eqns if _is_of_vectors(e, lanes)]
    # In a GRU and an LSTM, products of an input and of the state meet in each gate. If one has
    # lanes first and the other last, rows take 0.6x to 0.7x the time. If both have them last, and
    # the state is passed on as rows, columns take 0.3x to 0.9x.
    if 0 < len(products) < sum(e.primitive is lax.transpose_p for e in eqns):
        rows = any(e.outvars[0].aval.shape[0] == lanes for e in products)
        return "rows" if rows else "columns"
    # With short columns nothing is gained: gradients took 1.0x to 1.3x the time. With many products
    # of a matrix and vectors of each lane, one XLA kernel adds as many outer products in reverse
    # mode, and reads columns from as many places: four layers of 8 took 1.3x to 3x the time, ten of
    # 24 1.4x. With at most three, columns take 0.5x to 0.9x.
    shapes = [x.aval.shape for e in products for x in (*e.invars, *e.outvars)]
    longest = max((math.prod(s) for s in shapes if lanes in s), default=0)
    few = len(products) <= _MANY and longest >= _SHORT
    return "as it is" if few or not products else "as jax.vmap"


_MANY, _SHORT = 3, 1024


def has_long_rows(body: ClosedJaxpr, positions: Positions) -> bool:
    """Returns whether a loop that passes lanes first has a product whose lanes are first, too.

    Products of other matrices, which are added to it, are then better rows, even short ones.
    """
    jaxpr = body.jaxpr
    shared = {v for v, a in zip(jaxpr.invars, positions, strict=True) if a is None}
    shared.update(jaxpr.constvars)
    products = [
        e
        for e in jaxpr.eqns
        if e.primitive is lax.dot_general_p
        and [v.aval.ndim for v in e.invars] == [2, 1]
        and e.invars[0] in shared
    ]
    # Where products of the state and of an input are added, one or the other is transposed in each
    # step, which takes longer than rows do. Search: a GRU of 16.
    is_computed = depending(jaxpr, [v for e in products for v in e.outvars])
    carries = jaxpr.invars[-len(jaxpr.outvars) :]
    state = [v for v, out in zip(carries, jaxpr.outvars, strict=True) if is_computed(out)]
    is_of_state = depending(jaxpr, state)
    of_state = [is_of_state(e.invars[1]) for e in products]
    least = _LONG if all(of_state) else _LONG_WITH_INPUT
    return any(
        _long_rows(e.invars[0].aval, e.params["dimension_numbers"][0][0], least) for e in products
    )


def _is_of_vectors(eqn: Eqn, lanes: int) -> bool:
    """Returns whether it is a product of a shared matrix with a vector of each lane."""
    if eqn.primitive is not lax.dot_general_p:
        return False
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    shapes = [x.aval.shape for x in (*eqn.invars, *eqn.outvars)]
    vectors = all(len(s) == 2 for s in shapes) and lanes in shapes[-1]
    return vectors and bool(contracted) and not batch


def _symmetric(precision: object) -> bool:
    """Returns whether operands may swap. A precision that names an algorithm is by operand."""
    return precision is None or isinstance(precision, tuple)


def batched_dimensions(
    dimension_numbers: Dimensions,
    ndims: tuple[int, int],
    axes: tuple[Position, Position],
    grouped: Sequence[int] = (),
) -> tuple[Dimensions, int]:
    """Returns dimension numbers with batch axes at `axes`, and the batch axis of the result.

    `ndims` are ranks with batch axes, and `grouped` are dimensions of one example's second operand
    that are neither contracted, batched, nor in the result.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    lhs_axis, rhs_axis = axes
    if lhs_axis is not None:
        lhs_contract, lhs_batch = (
            shift_dims(lhs_contract, lhs_axis),
            shift_dims(lhs_batch, lhs_axis),
        )
    if rhs_axis is not None:
        rhs_contract, rhs_batch = (
            shift_dims(rhs_contract, rhs_axis),
            shift_dims(rhs_batch, rhs_axis),
        )
        grouped = shift_dims(grouped, rhs_axis)
    contract = lhs_contract, rhs_contract
    # Two batched operands: lanes become the first batch dimension.
    if lhs_axis is not None and rhs_axis is not None:
        return (contract, ((lhs_axis, *lhs_batch), (rhs_axis, *rhs_batch))), 0
    # Otherwise lanes are a free dimension, which keeps its place among the free ones.
    lhs_free = [d for d in range(ndims[0]) if d not in {*lhs_contract, *lhs_batch}]
    rhs_free = [d for d in range(ndims[1]) if d not in {*rhs_contract, *rhs_batch, *grouped}]
    free: list[tuple[int, Any]] = [(0, d) for d in lhs_free] + [(1, d) for d in rhs_free]
    position = free.index((0, lhs_axis) if lhs_axis is not None else (1, rhs_axis))
    return (contract, (lhs_batch, rhs_batch)), len(lhs_batch) + position


_ragged_dot_general_p: Any = _compat.find_primitive("ragged_dot_general")


enter(": ragged_dot_general")


@register_rule(_ragged_dot_general_p)
def _ragged_dot_general(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    **params: Any,
) -> RuleOutputs:
    (lhs, rhs, sizes), (lhs_axis, rhs_axis, sizes_axis) = args, axes
    numbers = ragged_dot_dimension_numbers
    (contract, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    is_free = ragged not in contract and ragged not in batch

    if sizes_axis is not None:
        # Sizes may differ along the prefix of the ragged dimension, so the lanes
        # must be there: free and before it, or a batch dimension of both operands.
        if lhs_axis is None or (rhs_axis is None and is_free and lhs_axis > ragged):
            lhs, lhs_axis = match_axis(axis, lhs, lhs_axis, 0), 0
        if rhs_axis is None and not is_free:
            rhs, rhs_axis = broadcast_axis(axis, rhs, 0), 0

    dims, position = batched_dimensions(
        numbers.dot_dimension_numbers,
        (lhs.ndim, rhs.ndim),
        (lhs_axis, rhs_axis),
        numbers.rhs_group_dimensions,
    )
    if lhs_axis is not None:
        (ragged,) = shift_dims((ragged,), lhs_axis)
    grouped = numbers.rhs_group_dimensions
    batched_numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=dims,
        lhs_ragged_dimensions=[ragged],
        rhs_group_dimensions=grouped if rhs_axis is None else shift_dims(grouped, rhs_axis),
    )
    sizes = _sizes_along(_prefix(lhs.ndim, ragged, dims), lhs, lhs_axis, axis, sizes, sizes_axis)
    out = _ragged_dot_general_p.bind(
        lhs, rhs, sizes, ragged_dot_dimension_numbers=batched_numbers, **params
    )
    return out, position + (ragged in dims[0][0])  # groups that are contracted lead the result


def _prefix(ndim: int, ragged: int, dims: Dimensions) -> list[int]:
    """Lists the dimensions of the first operand along which group sizes may differ."""
    (contract, _), (batch, _) = dims
    if ragged in batch:
        return list(batch[: batch.index(ragged)])
    if ragged in contract:
        return [*batch, *contract[: contract.index(ragged)]]
    return [*batch, *(d for d in range(ragged) if d not in contract and d not in batch)]


def _sizes_along(
    prefix: list[int],
    lhs: Value,
    lhs_axis: Position,
    axis: Axis,
    sizes: Value,
    sizes_axis: Position,
) -> jax.Array:
    """Expands group sizes to one of two forms: shared, or along all of `prefix`."""
    if lhs_axis not in prefix:
        return sizes
    place = prefix.index(lhs_axis)
    rank = sizes.ndim - (sizes_axis is not None)
    if rank > 1:
        return match_axis(axis, sizes, sizes_axis, place)
    if sizes_axis is None:
        return sizes
    shape = [*(lhs.shape[d] for d in prefix), sizes.shape[1 - sizes_axis]]
    return lax.broadcast_in_dim(move_axis(sizes, sizes_axis, 0), shape, (place, len(prefix)))


# --- products of long arrays with small matrices ------------------------------------------------

# XLA calls a library for ``x @ w`` with `x` of shape (n, 3), which on a CPU takes two to five times
# as long as adding three products of a column and a row, and stores what surrounds it.

# Packed, rows of 3 through a (3, 3) matrix take 0.3x the time of the library, and their gradient
# 0.4x; (3, 32) 0.4x, (5, 5) 0.8x. With 6 to 8 terms the gradient of three layers in padded rows
# took 1.1x to 2x the time.
_MOST_TERMS, _MOST_RESULTS = 5, 64
_DTYPES = {np.dtype(np.float32), np.dtype(np.float64)}


def is_thin(
    operands: Sequence[Aval],
    small: int,
    *,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any,
) -> bool:
    """Whether terms are faster than ``lax.dot_general``, where operand `small` is a matrix.

    The other operand is long.
    """
    contracted, (batch, _) = dimension_numbers
    # An algorithm may ask for less, or more, than the products of this dtype.
    named = precision is not None and not isinstance(precision, (lax.Precision, tuple))
    dtypes = {np.dtype(x.dtype) for x in operands}
    if preferred_element_type is not None:
        dtypes.add(np.dtype(preferred_element_type))
    same = len(dtypes) == 1 and dtypes <= _DTYPES
    if out_sharding is not None or batch or named or not same or len(contracted[0]) != 1:
        return False
    shape, (at,) = operands[small].shape, contracted[small]
    return _pays(shape[at], math.prod(shape) // max(1, shape[at]))


def is_long(results: int) -> bool:
    """Returns whether terms are faster for so many results of dense lanes, on this backend."""
    # 20,000 vectors times a (3, 3) matrix take 0.14x to 0.5x the time, and 65,000 to 1.3 million
    # results of other matrices 0.2x to 1.0x; fewer than 30,000 took up to 2x.
    return results >= _LONG_PRODUCTS and jax.default_backend() == "cpu"


_LONG_PRODUCTS = 1 << 15


def _pays(terms: int, results: int) -> bool:
    return 2 <= terms <= _MOST_TERMS and results <= _MOST_RESULTS


def thin_product(
    operands: Sequence[Value], small: int, *, dimension_numbers: Any, precision: Any, **params: Any
) -> jax.Array:
    """Returns what ``lax.dot_general`` does of operands, of which `small` is the matrix."""
    (contracted, _) = dimension_numbers
    x = jnp.moveaxis(operands[1 - small], contracted[1 - small][0], -1)
    w = jnp.moveaxis(operands[small], contracted[small][0], 0)
    out = _product(x, w.reshape(w.shape[0], -1), precision if small else _swapped(precision))
    out = out.reshape(*x.shape[:-1], *w.shape[1:])
    free = range(x.ndim - 1, out.ndim)
    return out if small else jnp.moveaxis(out, free, range(len(free)))


def _swapped(precision: Any) -> Any:
    return precision[::-1] if isinstance(precision, tuple) else precision


def _product(x: Value, w: Value, precision: Any) -> jax.Array:
    if not _pays(*w.shape):
        return _by_library(x, w, precision=precision)
    return thin_product_p.bind(*_compat.varying_alike([x, w]), precision=precision)


def _by_library(x: Value, w: Value, *, precision: Any) -> jax.Array:
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), precision=precision)


def _add_terms(x: Value, w: Value, *, precision: Any) -> jax.Array:
    rows = lax.expand_dims(w, range(1, x.ndim))
    outer = (x[..., i, None] * rows[i] for i in range(w.shape[0]))
    return functools.reduce(lax.add, outer)


def _types(x: Aval, w: Aval, *, precision: Any) -> Aval:
    return x.update(shape=(*x.shape[:-1], w.shape[1]))


def _rule(
    axis: Axis, args: Values, axes: Positions, /, *, precision: Any
) -> tuple[Value, Position]:
    ((x, w), (position, of_matrix)) = args, axes
    if of_matrix is None:
        assert position is not None  # a rule is called for what is batched
        return thin_product_p.bind(move_axis(x, position, 0), w, precision=precision), 0
    terms = lambda x, w: [_add_terms(x, w, precision=precision)]
    (out,), (at,) = batch_function(axis, terms, args, axes)
    return out, at


def _jvp(primals: Values, tangents: Sequence[Any], *, precision: Any) -> tuple[jax.Array, Any]:
    (x, w), (dx, dw) = primals, tangents
    out = thin_product_p.bind(x, w, precision=precision)
    dots = [] if isinstance(dx, ad.Zero) else [_product(dx, w, precision)]
    # In reverse mode, this one is contracted along all of `x`.
    dots += [] if isinstance(dw, ad.Zero) else [_by_library(x, dw, precision=precision)]
    none = ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(lax.add, dots) if dots else none


def _transpose(cotangent: Value, x: Value, w: Value, *, precision: Any) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [None, None]
    if ad.is_undefined_primal(x):
        # The transpose of terms would add arrays that have zeros around a column.
        return [_product(cotangent, w.T, precision), None]
    library = functools.partial(_by_library, x, precision=precision)
    return [None, *jax.linear_transpose(library, w.aval)(cotangent)]


thin_product_p = declare("thin_product", several=False)
own_primitive(
    thin_product_p,
    called="a product with a small matrix",
    operations=_by_library,
    compute=jax.jit(_by_library, static_argnames="precision"),
    on_cpu=_add_terms,
    types=_types,
    facts="moderate",
    rule=_rule,
    jvp=_jvp,
    transpose=_transpose,
    several=False,
)
