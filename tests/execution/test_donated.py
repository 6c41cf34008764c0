"""Calls inside a function that donate what chunks, too, compute with, as NumPyro's loops do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

XS = np.array([0.5, -1.0, 2.0, 3.0, -0.25], np.float32)
C = np.array([1.0, 2.0, np.nan, 4.0], np.float32)

walk = jax.jit(lambda x, c: (x + c, c + 1), donate_argnums=1)  # one result is the same for all
more = jax.jit(lambda c: c + 1, donate_argnums=0)


def first_lane(x):
    return walk(x, jnp.asarray(C) * 1)


def read_before(x):
    c = jnp.asarray(C) * 1
    return x + c, more(c)


@jax.jit
def cut_by_a_collective(x):
    c = jnp.asarray(C) * 1
    total, after = walk(jax.lax.psum(x, "i"), c)
    return x + 0 * total + C, after


EXPECTED = XS[:, None] + C, np.broadcast_to(C + 1, (5, 4))


@pytest.mark.parametrize("function", [first_lane, read_before, cut_by_a_collective])
@pytest.mark.compiles(60)
def test_what_is_donated_inside_is_there_for_each_chunk(function):
    batched = bx.vmap(function, axis_name="i", batch_size=2)
    around = {
        "eager": lambda xs: batched(xs),
        "jax.vmap": lambda xs: [y[0] for y in jax.vmap(batched)(xs[None])],
        "jit": jax.jit(batched),
    }
    for name, call in around.items():
        for got, expected in zip(call(jnp.asarray(XS)), EXPECTED, strict=True):
            np.testing.assert_array_equal(got, expected, name)


@pytest.mark.nightly  # sampling is compiled twice, which takes 15 s
@pytest.mark.compiles(200)
def test_chains_of_numpyro_run_a_few_at_a_time():
    numpyro = pytest.importorskip("numpyro")
    infer = pytest.importorskip("numpyro.infer")
    model = lambda: numpyro.sample("x", numpyro.distributions.Normal(0, 1))

    def samples(chain_method):
        options = dict(num_warmup=2, num_samples=3, num_chains=3, progress_bar=False)
        chains = infer.MCMC(infer.NUTS(model), chain_method=chain_method, **options)
        chains.run(jax.random.key(0))
        return chains.get_samples()["x"]

    some = samples(functools.partial(bx.vmap, batch_size=2))
    np.testing.assert_allclose(some, samples("vectorized"), rtol=1e-4)
