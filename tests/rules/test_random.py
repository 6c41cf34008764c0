"""Random keys and samplers: each lane gets exactly what it gets alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax import random as jr

import batchax as bx
from batchax._compat import find_primitive
from batchax.engine.registry import rule_origin

from support.oracle import loop, loop_function, same, shares, together

COUNTER_BASED = ["threefry2x32", "threefry4x32", "philox2x32", "philox4x32"]
IMPLEMENTATIONS = [*COUNTER_BASED, "rbg", "unsafe_rbg"]
B = 2
COV = np.array([[2.0, 0.3], [0.3, 1.0]], np.float32)
ONES = np.ones(2, np.float32)

BITS = {
    "bits8": lambda k: jr.bits(k, (3,), jnp.uint8),
    "bits": lambda k: jr.bits(k, (2, 3)),
    "split": lambda k: jr.split(k, (2, 2)),
    "fold_in": lambda k: jr.fold_in(k, 7),
    "key_data": lambda k: jr.key_data(jr.clone(k)),
    "many_keys": lambda k: jax.vmap(lambda k: jr.bits(k, (2,)))(jr.split(k, 2)),
    "permutation": lambda k: jr.permutation(k, 5),
    "uniform": lambda k: jr.uniform(k, (3,)),
    "bernoulli": lambda k: jr.bernoulli(k, 0.3, (4,)),
}

SAMPLERS = {
    "ball": lambda k: jr.ball(k, 2),
    "beta": lambda k: jr.beta(k, 0.7, 2.0),
    "binomial": lambda k: jr.binomial(k, 9.0, 0.3),
    "categorical": lambda k: jr.categorical(k, jnp.arange(4.0), shape=(3,)),
    "cauchy": lambda k: jr.cauchy(k, (2,)),
    "chisquare": lambda k: jr.chisquare(k, 3.0),
    "choice": lambda k: jr.choice(k, 6, (3,), replace=False),
    "choice_p": lambda k: jr.choice(k, 4, (3,), p=jnp.array([0.1, 0.2, 0.3, 0.4])),
    "dirichlet": lambda k: jr.dirichlet(k, ONES),
    "double_sided_maxwell": lambda k: jr.double_sided_maxwell(k, 0.1, 2.0),
    "exponential": lambda k: jr.exponential(k, (2,)),
    "f": lambda k: jr.f(k, 2.0, 3.0),
    "gamma": lambda k: jr.gamma(k, jnp.array([0.3, 2.0])),
    "generalized_normal": lambda k: jr.generalized_normal(k, 1.5, (2,)),
    "geometric": lambda k: jr.geometric(k, 0.3),
    "gumbel": lambda k: jr.gumbel(k, (2,)),
    "laplace": lambda k: jr.laplace(k, (2,)),
    "loggamma": lambda k: jr.loggamma(k, 0.2),
    "logistic": lambda k: jr.logistic(k, (2,)),
    "lognormal": lambda k: jr.lognormal(k, 0.5),
    "maxwell": lambda k: jr.maxwell(k, (2,)),
    "multinomial": lambda k: jr.multinomial(k, 5.0, jnp.array([0.2, 0.3, 0.5])),
    "multivariate_normal": lambda k: jr.multivariate_normal(k, ONES, COV),
    "normal": lambda k: jr.normal(k, (2,)),
    "normal_bfloat16": lambda k: jr.normal(k, (2,), jnp.bfloat16),
    "normal_complex": lambda k: jr.normal(k, (2,), jnp.complex64),
    "orthogonal": lambda k: abs(jr.orthogonal(k, 2)),
    "pareto": lambda k: jr.pareto(k, 2.0),
    "permutation_of_rows": lambda k: jr.permutation(k, COV, independent=True),
    "poisson": lambda k: jr.poisson(k, 4.0),
    "poisson_large": lambda k: jr.poisson(k, 40.0),
    "rademacher": lambda k: jr.rademacher(k, (3,)),
    "randint": lambda k: jr.randint(k, (3,), -5, 100),
    "rayleigh": lambda k: jr.rayleigh(k, 2.0),
    "t": lambda k: jr.t(k, 3.0),
    "triangular": lambda k: jr.triangular(k, 0.0, 0.5, 1.0),
    "truncated_normal": lambda k: jr.truncated_normal(k, -1.0, 0.5, (2,)),
    "wald": lambda k: jr.wald(k, 0.7),
    "weibull_min": lambda k: jr.weibull_min(k, 1.2, 0.8),
}


def keys_of(impl, shape=B):
    return jr.split(jr.key(3, impl=impl), shape)


def each_alone(fun, *args, in_axes=0, tolerance=None):
    """`fun` for a batch equals `fun` of each lane, both compiled or both not."""
    in_axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    got = jax.jit(bx.vmap(fun, in_axes))(*args)
    same(got, loop(jax.jit(fun), args, in_axes), tolerance)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_bits(impl):
    each_alone(together(BITS), keys_of(impl))


@pytest.mark.parametrize("names", shares(SAMPLERS, 4), ids=" ".join)
def test_samplers(names):
    each_alone(together({name: SAMPLERS[name] for name in names}), keys_of("threefry2x32"))


def test_samplers_of_streams():
    names = ["gamma", "normal", "categorical", "randint"]
    each_alone(together({name: SAMPLERS[name] for name in names}), keys_of("unsafe_rbg"))


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_raw_keys(impl):
    with jax.default_prng_impl(impl):
        keys = jnp.moveaxis(jr.split(jr.PRNGKey(5), B), 0, 1)
        each_alone(lambda k: jr.bits(jr.fold_in(jr.split(k)[0], 2), (2,)), keys, in_axes=1)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_seeds(impl):
    seeds = jnp.arange(2 * B).reshape(2, B)
    each_alone(lambda s: jr.key_data(jax.vmap(lambda s: jr.key(s, impl=impl))(s)), seeds, in_axes=1)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("in_axes", [(0, 0), (None, 0), (0, None), (0, 1), (None, 1)])
def test_fold_in_any_side(impl, in_axes):
    keys = keys_of(impl) if in_axes[0] == 0 else keys_of(impl)[0]
    data = jnp.arange(2 * B).reshape(B, 2) if in_axes[1] == 0 else jnp.arange(2 * B).reshape(2, B)

    def fold(key, data):
        return jax.vmap(jr.fold_in, (None, 0))(key, data)

    data = jnp.arange(2) if in_axes[1] is None else data
    each_alone(fold, keys, data, in_axes=in_axes)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_key_arrays_with_the_batch_anywhere(impl):
    keys = keys_of(impl, (2, B))

    def fun(ks):
        ks = jr.wrap_key_data(jr.key_data(ks) + jnp.uint32(1), impl=impl)
        return jax.vmap(lambda k: jr.bits(jr.split(k)[1], (2,)))(ks)

    each_alone(fun, keys, in_axes=1)


@pytest.mark.parametrize("impl", ["threefry2x32", "unsafe_rbg"])
def test_nested(impl):
    keys = keys_of(impl, (2, B))
    fun = BITS["bits"]
    got = bx.vmap(bx.vmap(fun), in_axes=1, out_axes=1)(keys)
    same(got, jnp.stack([jnp.stack([fun(k) for k in row]) for row in keys]))


def test_lanes_do_not_share_bits():
    bits = bx.vmap(lambda k: jr.bits(k, (4,)))(keys_of("rbg", 8))
    assert len(np.unique(bits)) == bits.size


@pytest.mark.parametrize("algorithm", lax.RandomAlgorithm)
def test_rng_bit_generator(algorithm):
    keys = jr.bits(jr.key(0), (4, B), np.uint32)
    each_alone(lambda k: lax.rng_bit_generator(k, (2,), algorithm=algorithm), keys, in_axes=1)


def test_rng_uniform_draws_for_each_lane_within_its_bounds():
    low = jnp.arange(4.0)
    x = bx.vmap(lambda a: lax.rng_uniform(a, a + 1.0, (50,)))(low)
    assert x.shape == (4, 50)
    assert ((x >= low[:, None]) & (x < low[:, None] + 1)).all()
    assert len(np.unique(np.asarray(x) % 1)) > 100


def test_no_lanes():
    for impl in IMPLEMENTATIONS:
        keys = keys_of(impl)[:0]
        assert bx.vmap(BITS["bits"])(keys).shape == (0, 2, 3)
        assert bx.vmap(BITS["split"])(keys).shape == (0, 2, 2)


@pytest.mark.parametrize("in_axes", [(0, 1), (None, 0), (0, None)])
def test_gamma(in_axes):
    keys = keys_of("threefry2x32") if in_axes[0] == 0 else jr.key(1)
    shape = {0: jnp.ones((B, 3)), 1: jnp.ones((3, B)), None: jnp.ones(3)}[in_axes[1]]
    each_alone(jr.gamma, keys, shape, in_axes=in_axes)


def test_gamma_derivatives():
    keys, shape = keys_of("threefry2x32"), jnp.linspace(0.5, 3.0, B)

    def slope(vmapped):
        return jax.jit(jax.grad(lambda a: (vmapped(keys, a) ** 2).sum()))(shape)

    same(slope(bx.vmap(jr.gamma)), slope(loop_function(jax.jit(jr.gamma), (0, 0), 0)))


@pytest.mark.parametrize("in_axes", [(0, None, 1), (None, 1, 0)])
def test_bounds_of_samplers(in_axes):
    keys = keys_of("threefry2x32") if in_axes[0] == 0 else jr.key(1)
    bounds = {0: jnp.ones((B, 2)), 1: jnp.ones((2, B)), None: jnp.ones(2)}
    low, high = -bounds[in_axes[1]], 3 * bounds[in_axes[2]]

    def fun(k, low, high):
        return jr.uniform(k, (2,), minval=low, maxval=high), jr.truncated_normal(k, low, high)

    each_alone(fun, keys, low, high, in_axes=in_axes)


@pytest.mark.parametrize(
    "name",
    """random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap
    random_wrap rng_bit_generator rng_uniform threefry2x32 threefry4x32 philox2x32
    philox4x32""".split(),
)
def test_served_by_rules_of_our_own(name):
    assert (rule_origin(find_primitive(name)) or "").startswith("batchax.")
