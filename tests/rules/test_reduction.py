"""Reductions and running reductions, against the loop over examples."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax import _compat
from batchax.rules.elementwise import CUMULATIVE, REDUCTIONS

from support.batches import batch
from support.oracle import check, check_all, same

SHAPE = (2, 4)
LOGICAL = ("reduce_and", "reduce_or", "reduce_xor")
INEXACT = (jnp.float32, jnp.bfloat16, jnp.complex64)
DTYPES = {
    **dict.fromkeys(LOGICAL, (jnp.bool_, jnp.int32, jnp.uint8)),
    **dict.fromkeys(("reduce_sum", "reduce_prod"), (*INEXACT, jnp.int32)),
    **dict.fromkeys(("reduce_max", "reduce_min"), (*INEXACT, jnp.int32, jnp.bool_)),
    **dict.fromkeys(("argmax", "argmin"), (jnp.float32, jnp.bfloat16, jnp.int32, jnp.bool_)),
    **dict.fromkeys(("cumsum", "cumprod"), (*INEXACT, jnp.int32)),
    **dict.fromkeys(("cummax", "cummin"), (jnp.float32, jnp.bfloat16, jnp.int32)),
    "cumlogsumexp": (jnp.float32, jnp.bfloat16),
}


def reduction(name, axes, index_dtype=np.int32):
    """The primitive `name` as a function of one example."""
    primitive = _compat.find_primitive(name)
    # A sharding is a parameter of some of these, in some versions of JAX.
    params = {"axes": tuple(axes)}
    if name in ("argmax", "argmin"):
        params["index_dtype"] = np.dtype(index_dtype)
    elif "reduce_" in name and not name.endswith(("and", "or", "xor")):
        call = {"reduce_sum": jnp.sum, "reduce_prod": jnp.prod, "reduce_max": jnp.max}
        fun = call.get(name, jnp.min)
        return lambda x: fun(x, tuple(axes))
    return lambda x: primitive.bind(x, **params)


def cumulative(name, axis, reverse=False):
    return lambda x: getattr(lax, name)(x, axis, reverse)


@pytest.mark.parametrize("name", [*REDUCTIONS, *CUMULATIVE])
def test_dtypes(name):
    fun = cumulative(name, 1) if name in CUMULATIVE else reduction(name, (1,))
    cases = {str(dtype): (fun, batch(SHAPE, 1, dtype), {}) for dtype in DTYPES[name]}
    check_all(cases, in_axes=1, derivatives=False)


def test_ties_and_nan_take_the_first_place():
    x = jnp.array([[1.0, 1.0, 0.0], [jnp.nan, 5.0, jnp.nan], [-0.0, 0.0, -1.0]])
    check_all({f.__name__: (f, x, {}) for f in (jnp.argmax, jnp.nanargmin)})
    check(jnp.max, x, derivatives=False)


def test_initial_values_that_differ_between_lanes_make_lanes_run_one_after_another():
    """JAX's rule takes one initial value for all."""
    x, starts = batch((4,), 0), jnp.arange(3.0)
    fun = lambda x, start: lax.reduce(x, start, jnp.logaddexp, (0,))
    with pytest.warns(bx.SequentialFallbackWarning, match="reduce"):
        got = bx.vmap(fun)(x, starts)
    same(got, jnp.stack([fun(x[i], starts[i]) for i in range(3)]))
