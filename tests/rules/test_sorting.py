"""Sorting and the largest few, against the loop over examples."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx

from support.batches import batch, positions
from support.operations import no_more_operations, operations
from support.oracle import check, check_all, example, quickly

SHAPE = (2, 4)
VALUES_ONLY = dict(derivatives=False, eager=False)


@pytest.mark.parametrize("dimension", [0, 1])
def test_sort(dimension):
    fun, cases = lambda x: lax.sort(x, dimension), {}
    for axis in (0, 1, 2):
        no_more_operations(fun, batch(SHAPE, axis), in_axes=axis)
        cases[str(axis)] = (fun, batch(SHAPE, axis), dict(in_axes=axis))
    check_all(cases, out_axes=-1, derivatives=False)


def test_dtypes():
    dtypes = (jnp.bfloat16, jnp.int8, jnp.uint32, jnp.bool_, jnp.complex64)
    cases = {str(dtype): (lax.sort, batch(SHAPE, 0, dtype), {}) for dtype in dtypes}
    check_all(cases, derivatives=False)


def test_nan_and_signed_zeros():
    x = jnp.array([[jnp.nan, 1.0, -jnp.inf, 0.0], [0.0, -0.0, jnp.nan, -1.0]])
    check(lambda x: (jnp.sort(x), jnp.argsort(x)), x, **VALUES_ONLY)


@pytest.mark.parametrize("num_keys", [1, 2])
def test_sort_of_several_operands(num_keys):
    fun = lambda *xs: lax.sort(xs, num_keys=num_keys, is_stable=True)
    cases = {}
    for in_axes in positions(1, 1, 1)[::2]:
        # Keys with ties, so that the second key and stability show.
        args = [
            batch((4,), in_axes[0], jnp.int32, high=2),
            batch((4,), in_axes[1], jnp.int32, seed=1, high=3),
            batch((4,), in_axes[2], seed=2),
        ]
        cases[str(in_axes)] = (fun, *args, dict(in_axes=in_axes))
    check_all(cases, derivatives=False)


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


@pytest.mark.parametrize("along", [0, 1])
def test_top_k(along):
    fun = lambda x: lax.top_k(x, 2, axis=along)
    cases = {str(axis): (fun, batch(SHAPE, axis), dict(in_axes=axis)) for axis in (0, 1, 2)}
    check_all(cases, derivatives=False)


@pytest.mark.parametrize("along", [0, 1, -1, -2])
def test_approx_top_k(along):
    fun = lambda x: lax.approx_max_k(x, 2, reduction_dimension=along)
    cases = {str(axis): (fun, batch(SHAPE, axis), dict(in_axes=axis)) for axis in (0, 1, 2)}
    check_all(cases, derivatives=False)


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
