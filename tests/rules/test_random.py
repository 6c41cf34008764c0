"""Random keys and samplers: each lane gets exactly what it gets alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax import random as jr

import batchax as bx
from batchax._compat import find_primitive
from batchax.rules import random

from support.oracle import agree, in_turn, same, shares

COUNTER_BASED = ["threefry2x32", "threefry4x32", "philox2x32", "philox4x32"]
IMPLEMENTATIONS = [*COUNTER_BASED, "rbg", "unsafe_rbg"]
B = 2
ONES = np.ones(2, np.float32)

BITS = {
    "bits8": lambda k: jr.bits(k, (3,), jnp.uint8),
    "bits": lambda k: jr.bits(k, (2, 3)),
    "split": lambda k: jr.split(k, (2, 2)),
    "fold_in": lambda k: jr.fold_in(k, 7),
    "key_data": lambda k: jr.key_data(jr.clone(k)),
    "many_keys": lambda k: jax.vmap(lambda k: jr.bits(k, (2,)))(jr.split(k, 2)),
}

# `ball` draws from generalized_normal, `beta` from loggamma, `categorical` from
# gumbel: what those draw from is not drawn again, since a gamma takes long to compile. `test_gamma`
# has gammas of several shapes.
SAMPLERS = {
    "ball": lambda k: jr.ball(k, 2),
    "bernoulli": lambda k: jr.bernoulli(k, 0.3, (4,)),
    "beta": lambda k: jr.beta(k, 0.7, 2.0),
    "binomial": lambda k: jr.binomial(k, 9.0, 0.3),
    "categorical": lambda k: jr.categorical(k, jnp.arange(4.0), shape=(3,)),
    "choice": lambda k: jr.choice(k, 6, (3,), replace=False),
    "choice_p": lambda k: jr.choice(k, 4, (3,), p=jnp.array([0.1, 0.2, 0.3, 0.4])),
    "dirichlet": lambda k: jr.dirichlet(k, ONES),
    "normal": lambda k: jr.normal(k, (2,)),
    "normal_bfloat16": lambda k: jr.normal(k, (2,), jnp.bfloat16),
    "orthogonal": lambda k: abs(jr.orthogonal(k, 2)),
    "permutation": lambda k: jr.permutation(k, 5),
    "poisson": lambda k: jr.poisson(k, 4.0),
    "poisson_large": lambda k: jr.poisson(k, 40.0),
    "randint": lambda k: jr.randint(k, (3,), -5, 100),
    "truncated_normal": lambda k: jr.truncated_normal(k, -1.0, 0.5, (2,)),
    "uniform": lambda k: jr.uniform(k, (3,)),
}


def keys_of(impl, shape=B):
    return jr.split(jr.key(3, impl=impl), shape)


def each_alone(fun, *args, in_axes=0):
    """`fun` for a batch equals `fun` of each lane."""
    all_alone({fun.__name__: (fun, args, in_axes)})


def all_alone(cases):
    """Each function for a batch equals that function of each lane; they are one program.

    cases: for each name, a function, its arguments and their axes.
    """
    calls = {}
    for name, (fun, args, axes) in cases.items():
        axes = axes if isinstance(axes, tuple) else (axes,) * len(args)
        calls[name] = bx.vmap(fun, axes), in_turn(fun, axes)
    given = {name: args for name, (_, args, _) in cases.items()}
    results = jax.jit(lambda given: {n: [f(*given[n]) for f in calls[n]] for n in calls})(given)
    for name, (got, expected) in results.items():
        same(got, expected, where=f"{name}: ")


def of_keys(functions, keys):
    return {name: (fun, (keys,), 0) for name, fun in functions.items()}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.each_commit(3)
def test_bits(impl):
    all_alone(of_keys(BITS, keys_of(impl)))


@pytest.mark.parametrize("names", shares(SAMPLERS, 5), ids=" ".join)
@pytest.mark.each_commit(2)
def test_samplers(names):
    all_alone(of_keys({name: SAMPLERS[name] for name in names}, keys_of("threefry2x32")))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.each_commit(1)
def test_seeds_and_data_on_any_side(impl):
    seeded = lambda s: jr.key_data(jax.vmap(lambda s: jr.key(s, impl=impl))(s))
    fold = lambda key, data: jax.vmap(jr.fold_in, (None, 0))(key, data)
    keys, data = keys_of(impl), {0: (B, 2), 1: (2, B), None: (2,)}
    data = {axis: np.arange(np.prod(shape)).reshape(shape) for axis, shape in data.items()}
    cases = {"seeds": (seeded, (data[1],), 1)}
    for axes in [(0, 0), (None, 0), (0, None), (0, 1), (None, 1)]:
        cases[f"fold_in with {axes}"] = (
            fold,
            (keys if axes[0] == 0 else keys[0], data[axes[1]]),
            axes,
        )
    all_alone(cases)


def test_lanes_do_not_share_bits():
    bits = np.asarray(bx.vmap(lambda k: jr.bits(k, (4,)))(keys_of("rbg", 8)))
    assert len(np.unique(bits)) == bits.size


def test_rng_bit_generator():
    keys = np.random.default_rng(0).integers(0, 1 << 32, (4, B), np.uint32)
    drawn = lambda algorithm: lambda k: lax.rng_bit_generator(k, (2,), algorithm=algorithm)
    all_alone({str(a): (drawn(a), (keys,), 1) for a in lax.RandomAlgorithm})


def test_rng_uniform_draws_for_each_lane_within_its_bounds():
    low = np.arange(4.0)
    x = np.asarray(jax.jit(bx.vmap(lambda a: lax.rng_uniform(a, a + 1.0, (50,))))(low))
    assert x.shape == (4, 50)
    assert ((x >= low[:, None]) & (x < low[:, None] + 1)).all()
    assert len(np.unique(x % 1)) > 100


@pytest.mark.parametrize("in_axes", [(0, 1), (None, 0), (0, None)])
@pytest.mark.each_commit(2)
def test_gamma(in_axes):
    keys = keys_of("threefry2x32")
    shapes = np.array([0.3, 1.0, 2.0] * B).reshape(B, 3)
    shape = {0: shapes, 1: shapes.T, None: shapes[0]}[in_axes[1]]
    each_alone(jr.gamma, keys if in_axes[0] == 0 else keys[0], shape, in_axes=in_axes)


def test_gamma_derivatives():
    keys, shape = keys_of("threefry2x32"), np.linspace(0.5, 3.0, B)
    slope = lambda vmapped: jax.grad(lambda a: (vmapped(keys, a) ** 2).sum())
    agree(slope(bx.vmap(jr.gamma)), slope(in_turn(jr.gamma, (0, 0))), shape)


WRITTEN_OUT = {
    **{f"bits{w}": lambda k, w=w: jr.bits(k, (2, 3), np.dtype(f"uint{w}")) for w in (8, 16, 32)},
    "one": jr.bits,
    "none": lambda k: jr.bits(k, (0, 2)),
    "split": lambda k: jr.key_data(jr.split(k, (2, 3))),
    "fold_in": lambda k: jr.key_data(jr.fold_in(k, np.int32(-7))),
    "words": lambda k: find_primitive("threefry2x32").bind(
        *jr.key_data(k), *jr.bits(k, (2, 3), np.uint32)
    ),
}


def has_loop(fun, *args, platform="cpu"):
    """Whether there is a loop over rounds; one behind a barrier has one step, with all of them."""
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return text.count("stablehlo.while") > text.count("optimization_barrier")


@pytest.mark.parametrize("name", WRITTEN_OUT)
@pytest.mark.each_commit(4)
def test_rounds_are_written_out(name):
    fun, keys = WRITTEN_OUT[name], keys_of("threefry2x32", (2, 3))
    batched = bx.vmap(bx.vmap(fun), in_axes=1, out_axes=1)
    assert not has_loop(batched, keys)
    agree(batched, jax.vmap(jax.vmap(fun)), keys)


def test_bits_are_not_computed_again_by_who_reads_them():
    """Fused into the search for a maximum, as of a categorical draw, rounds are not vectorized"""
    draw = bx.vmap(lambda key: jnp.argmax(jax.random.bits(key, (64,))))
    text = jax.jit(draw).lower(keys_of("threefry2x32", 8)).compile().as_text()
    assert "while(" in text


def test_other_streams_are_those_of_jax():
    keys = keys_of("threefry2x32")
    with jax.threefry_partitionable(False):
        assert has_loop(bx.vmap(BITS["bits"]), keys)
        each_alone(BITS["bits"], keys)


def test_what_a_cpu_draws_by_is_traced_once(monkeypatch):
    traced = []
    bits = random.WRITTEN_OUT["random_bits"]
    counted = lambda *keys, **how: traced.append(1) or bits(*keys, **how)
    monkeypatch.setitem(random.WRITTEN_OUT, "random_bits", counted)
    keys = jr.split(jr.key(0), 3)
    draw = lambda key: jr.bits(key, (5, 11))
    programs = [jax.jit(bx.vmap(lambda key: draw(key))).lower(keys).as_text() for _ in range(2)]
    assert programs[0] == programs[1]
    assert len(traced) == 1
