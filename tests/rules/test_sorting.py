"""Sorting and the largest few, against the loop over examples."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx

from support.batches import batch
from support.operations import no_more_operations, operations
from support.oracle import check, example, quickly

SHAPE = (2, 4)
VALUES_ONLY = dict(derivatives=False, eager=False)


def test_nan_and_signed_zeros():
    x = jnp.array([[jnp.nan, 1.0, -jnp.inf, 0.0], [0.0, -0.0, jnp.nan, -1.0]])
    check(lambda x: (jnp.sort(x), jnp.argsort(x)), x, **VALUES_ONLY)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("dimension", [0, 1])
def test_keys_that_all_lanes_share_are_sorted_once(position, dimension):
    keys = example(SHAPE)
    fun = lambda x: lax.sort((keys, x), dimension, num_keys=1)
    x = batch(SHAPE, position, seed=1)
    check(fun, x, in_axes=position, out_axes=(None, 0), against_jax=False, **VALUES_ONLY)
    check(lambda x: fun(x)[1], x, in_axes=position, **VALUES_ONLY)
    jaxpr = jax.make_jaxpr(bx.vmap(fun, in_axes=position, out_axes=(None, position)))(x)
    (sort,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sort")
    assert all(v.aval.shape == SHAPE for v in sort.invars)


def test_argsort_costs_no_more_than_under_jax():
    x = batch(SHAPE, 0)
    assert operations(bx.vmap(jnp.argsort), x)["sort"] == 1
    no_more_operations(jnp.argsort, x)


DERIVED = {
    "sort": jnp.sort,
    "by keys that lanes share": lambda x: lax.sort_key_val(example(SHAPE), x)[1],
    "top_k": lambda x: lax.top_k(x, 2),
    "approx_top_k": lambda x: lax.approx_min_k(x, 2)[0],
}


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives(name):
    quickly(jax.jit(DERIVED[name]), batch(SHAPE, 1), in_axes=1, nested=name != "approx_top_k")
