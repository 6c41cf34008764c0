"""What sorting costs; its values are those of the families."""

import jax
import jax.numpy as jnp
from jax import lax

import batchax as bx

from support.batches import batch
from support.operations import no_more_operations, operations
from support.oracle import example

SHAPE = (2, 4)


def test_keys_that_all_lanes_share_are_sorted_once():
    keys, x = example(SHAPE), batch(SHAPE, 1, seed=1)
    fun = lambda x: lax.sort((keys, x), 1, num_keys=1)
    jaxpr = jax.make_jaxpr(bx.vmap(fun, in_axes=1, out_axes=(None, 1)))(x)
    (sort,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sort")
    assert all(v.aval.shape == SHAPE for v in sort.invars)


def test_argsort_costs_no_more_than_under_jax():
    x = batch(SHAPE, 0)
    assert operations(bx.vmap(jnp.argsort), x)["sort"] == 1
    no_more_operations(jnp.argsort, x)
