"""Reductions and running reductions, against the loop over examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax import _compat
from batchax.rules.elementwise import CUMULATIVE, REDUCTIONS

from support.batches import batch
from support.oracle import check, check_all, quickly, same

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


@pytest.mark.parametrize("name", ["reduce_sum", "reduce_max", "reduce_prod"])
def test_derivatives_of_reductions(name):
    fun = jax.jit(reduction(name, (0,)))
    quickly(fun, batch(SHAPE, 1), in_axes=1, out_axes=-1, second=True, nested=True)


def test_ties_and_nan_take_the_first_place():
    x = jnp.array([[1.0, 1.0, 0.0], [jnp.nan, 5.0, jnp.nan], [-0.0, 0.0, -1.0]])
    check_all({f.__name__: (f, x, {}) for f in (jnp.argmax, jnp.nanargmin)})
    check(jnp.max, x, derivatives=False)


def test_out_sharding_gains_the_batch_axis():
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        x = jax.device_put(batch(SHAPE, 0), jax.NamedSharding(mesh, spec("x", None, "y")))
        got = bx.vmap(lambda x: lax.reduce_sum(x, (1,), out_sharding=spec(None)))(x)
        assert jax.typeof(got).sharding.spec[0] == "x"
        same(jax.device_get(got), batch(SHAPE, 0).sum(axis=2))
