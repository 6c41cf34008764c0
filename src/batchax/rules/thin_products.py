"""Products of long arrays with small matrices, as sums of outer products.

XLA calls a library for ``x @ w`` with `x` of shape (n, 3), which on a CPU takes two to five times
as long as adding three products of a column and a row, and stores what surrounds it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from batchax import _compat
from batchax.jaxprs.types import Aval, Value, Values
from batchax.kernel.axis import Axis, Position, Positions, move_axis
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import declare, own_primitive

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
    return results >= _LONG and jax.default_backend() == "cpu"


_LONG = 1 << 15


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
