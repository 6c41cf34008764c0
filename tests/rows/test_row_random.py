"""Random draws of rows in padded arrays: bit for bit what each row would get alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.errors import UnsupportedError

from support.oracle import shares
from support.rows import check_rows, check_rows_of_all, ragged

EXACT = dict(rtol=0, atol=0)
check = partial(check_rows, layout="padded", tolerance=EXACT)
check_all = partial(check_rows_of_all, layout="padded", tolerance=EXACT)
KEYS = jax.random.split(jax.random.key(5), 4)


def data_of(keys):
    return jax.random.key_data(keys)


SHAPES = {
    "(n,)": lambda n: (n,),
    "(n, 3)": lambda n: (n, 3),
    "(3, n)": lambda n: (3, n),
    "(n, n)": lambda n: (n, n),
    "(2, n - 1, 2)": lambda n: (2, n - 1, 2),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.each_commit(3)
def test_bits_are_those_of_the_row_alone(shape):
    def bits(key, x, dtype):
        drawn = jax.random.bits(key, SHAPES[shape](x.shape[0]), dtype)
        drawn = jnp.moveaxis(drawn, 0 if shape.startswith("(n") else 1, 0)
        return drawn.sum(1) if shape == "(n, n)" else drawn

    def of_each_width(key, x):
        return [bits(key, x, dtype) for dtype in (np.uint8, np.uint16, np.uint32)]

    check(of_each_width, KEYS, ragged(3), derivatives=False)


DRAWS = {
    "normal": jax.random.normal,
    "bernoulli": lambda key, shape: jax.random.bernoulli(key, 0.3, shape),
    "randint": lambda key, shape: jax.random.randint(key, shape, 0, 10),
    "truncated_normal": lambda key, shape: jax.random.truncated_normal(key, -1.0, 1.0, shape),
    "poisson": lambda key, shape: jax.random.poisson(key, 2.0, shape),
    "categorical": lambda key, shape: jax.random.categorical(key, jnp.zeros(4), shape=shape),
    "choice by weight": lambda key, shape: jax.random.choice(
        key, 3, shape, p=jnp.array([0.2, 0.3, 0.5])
    ),
}


@pytest.mark.parametrize("names", shares(DRAWS, 3), ids=" ".join)
def test_draws_of_the_length_of_the_row_are_those_of_the_row_alone(names):
    # Compiled for another shape, functions of the drawn bits may round otherwise.
    near = dict(rtol=1e-6, atol=1e-6)
    run = lambda key, x: [DRAWS[name](key, (x.shape[0],)) for name in names]
    check(run, KEYS, ragged(3), derivatives=False, tolerance=near)


OF_ROWS = {
    "categorical of logits": lambda key, x: jax.random.categorical(key, x[:, 0]),
    "a key for each element": lambda key, x: jax.vmap(
        lambda i: jax.random.bits(jax.random.fold_in(key, i), (2,))
    )(jnp.arange(x.shape[0])),
    "split keys": lambda key, x: jax.vmap(lambda key: jax.random.bits(key, (2,)))(
        jax.random.split(key, x.shape[0])
    ),
    "wrapped again": lambda key, x: data_of(
        jax.random.clone(jax.random.wrap_key_data(data_of(jax.random.split(key, x.shape[0]))))
    ),
}


def test_draws_by_elements_of_the_row_are_those_of_the_row_alone():
    check_all(OF_ROWS, KEYS, ragged(3), derivatives=False)


def test_the_parameters_of_gamma_may_be_ragged():
    near = dict(rtol=1e-4, atol=1e-5)
    run = lambda key, x: jax.random.gamma(key, jnp.exp(x))
    check(run, KEYS[:2], ragged(lengths=(2, 3)), tolerance=near, modes=("vjp",))


RBG = jax.random.split(jax.random.key(5, impl="rbg"), 4)
REFUSED = {
    "implementation rbg": (lambda key, x: jax.random.normal(key, x.shape), RBG, True),
    # Its draws would not be those of the row.
    r"an array of shape \(3, n\), ragged behind": (
        lambda key, x: jax.random.gamma(key, jnp.exp(x.T)),
        KEYS,
        True,
    ),
    "jax_threefry_partitionable": (lambda key, x: jax.random.normal(key, x.shape), KEYS, False),
}


@pytest.mark.parametrize("why", REFUSED)
def test_draws_that_depend_on_how_much_is_drawn_are_refused(why):
    draw, keys, partitionable = REFUSED[why]
    refused = pytest.raises(UnsupportedError, match=why)
    with jax.threefry_partitionable(partitionable), refused:
        jax.jit(bx.vmap(draw, layout="padded"))(keys, ragged(3))
