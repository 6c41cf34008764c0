"""Code that others wrote, batched unchanged: models, optimisers, solvers, samplers.

Each is compared with the Python loop over the batch and with `jax.vmap`. More of the libraries, in
other ways to run a batch, is in `test_clients.py`.
"""

import functools

import blackjax
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import batchax as bx

from support.oracle import example, plainly, same

LANES = 3
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes most of the time
CLOSE = dict(rtol=2e-4, atol=2e-5)
XS = example((LANES, 4), seed=1)
YS = example((LANES, 2), seed=2)
KEYS = jax.random.split(jax.random.key(0), LANES)


def agree(fun, *args, in_axes=0, tolerance=CLOSE):
    """`fun` batched by batchax is the loop over examples, and what `jax.vmap` gives."""
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)

    # One compilation for both, because what is the same in them is compiled once.
    @functools.partial(jax.jit, compiler_options=QUICK)
    def both(*args):
        return bx.vmap(fun, in_axes=axes)(*args), jax.vmap(fun, in_axes=axes)(*args)

    got, expected = both(*args)
    same(got, expected, tolerance, "jax.vmap")
    alone = jax.jit(fun, compiler_options=QUICK)
    lanes = [
        alone(
            *(
                arg if a is None else jax.tree.map(lambda x: x[i], arg)
                for arg, a in zip(args, axes, strict=True)
            )
        )
        for i in range(LANES)
    ]
    same(got, jax.tree.map(lambda *xs: jnp.stack(xs), *lanes), tolerance, "loop")
    return got


def mlp(key):
    return eqx.nn.MLP(4, 2, width_size=8, depth=1, key=key)


def test_equinox_mlp_as_an_argument_that_is_the_same_for_all_lanes():
    """The module goes in whole: axis None lets its activation functions through."""
    model = mlp(jax.random.key(1))
    got = bx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, XS)
    same(got, jnp.stack([model(x) for x in XS]), CLOSE)
    same(bx.vmap(model)(XS), got, CLOSE)  # a module is callable


@pytest.mark.compiles(60)
def test_equinox_ensemble_made_and_run_by_vmap():
    ensemble = eqx.filter(eqx.filter_vmap(mlp)(KEYS), eqx.is_array)
    made = eqx.filter(bx.vmap(lambda key: eqx.filter(mlp(key), eqx.is_array))(KEYS), eqx.is_array)
    same(made, ensemble)
    static = eqx.filter(mlp(KEYS[0]), eqx.is_array, inverse=True)

    def run(arrays, x):
        return eqx.combine(arrays, static)(x)

    agree(run, ensemble, XS)
    agree(run, ensemble, XS[0], in_axes=(0, None))


def test_equinox_axes_by_a_callable():
    """`eqx.if_array(0)` maps the arrays of a module and leaves the rest."""
    ensemble = eqx.filter_vmap(mlp)(KEYS)
    got = bx.vmap(lambda model, x: model(x), in_axes=(eqx.if_array(0), 0))(ensemble, XS)
    expected = eqx.filter_vmap(lambda model, x: model(x))(ensemble, XS)
    same(got, expected, CLOSE)


def test_equinox_gradient_for_each_example():
    model, static = eqx.partition(mlp(jax.random.key(1)), eqx.is_array)

    def loss(arrays, x, y):
        return jnp.mean((eqx.combine(arrays, static)(x) - y) ** 2)

    agree(jax.grad(loss), model, XS, YS, in_axes=(None, 0, 0))


@pytest.mark.nightly
def test_equinox_attention_with_a_mask_and_dropout():
    attention = eqx.nn.MultiheadAttention(2, 4, dropout_p=0.3, key=jax.random.key(1))
    tokens = example((LANES, 5, 4), seed=3)
    mask = example((LANES, 5, 5), jnp.bool_, seed=4) | jnp.eye(5, dtype=bool)

    def attend(tokens, mask, key):
        return attention(tokens, tokens, tokens, mask=mask, key=key)

    agree(attend, tokens, mask, KEYS)


def test_equinox_recurrent_and_normalising_layers():
    cell = eqx.nn.GRUCell(4, 3, key=jax.random.key(1))
    norm = eqx.nn.LayerNorm(3)
    convolution = eqx.nn.Conv1d(4, 2, 3, key=jax.random.key(2))

    def layers(sequence):
        state, _ = jax.lax.scan(lambda h, x: (cell(x, h), None), jnp.zeros(3), sequence)
        return norm(state), convolution(sequence.T)

    agree(layers, example((LANES, 5, 4), seed=3))


def test_equinox_batch_norm_over_a_named_axis():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode="batch")
    options = dict(axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    got = bx.vmap(norm, **options)(XS, state)
    same(got, plainly(jax.vmap(norm, **options), XS, state), CLOSE)


class Net(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.relu(linen.Dense(8)(x))
        x = linen.Dropout(0.5, deterministic=not train)(x)
        x = linen.LayerNorm()(x)
        return linen.Dense(2)(x)


@pytest.mark.nightly
def test_flax_linen_with_parameters_shared_and_mapped():
    net = Net()
    shared = jax.jit(net.init)(jax.random.key(0), XS[0])
    agree(net.apply, shared, XS, in_axes=(None, 0))
    agree(
        lambda p, x, k: net.apply(p, x, True, rngs={"dropout": k}),
        shared,
        XS,
        KEYS,
        in_axes=(None, 0, 0),
    )
    ensemble = agree(lambda key: net.init(key, XS[0]), KEYS)
    agree(net.apply, ensemble, XS)
    agree(jax.grad(lambda p, x, y: jnp.sum((net.apply(p, x) - y) ** 2)), ensemble, XS, YS)


@pytest.mark.nightly
def test_flax_linen_convolution_and_attention():
    class Vision(linen.Module):
        @linen.compact
        def __call__(self, image):
            x = linen.Conv(3, (3, 3), strides=2)(image)
            x = linen.GroupNorm(num_groups=1)(x)
            x = linen.avg_pool(x, (2, 2), strides=(2, 2))
            x = linen.max_pool(x, (2, 2))
            x = x.reshape(-1, 3)
            return linen.MultiHeadDotProductAttention(num_heads=1, qkv_features=4)(x, x)

    images = example((LANES, 8, 8, 2), seed=3)
    params = jax.jit(Vision().init)(jax.random.key(0), images[0])
    agree(Vision().apply, params, images, in_axes=(None, 0))


def test_flax_nnx_state_mapped_and_shared():
    def make(key):
        return nnx.Linear(4, 2, rngs=nnx.Rngs(key))

    graph, state = nnx.split(make(jax.random.key(0)))

    def run(state, x):
        return nnx.merge(graph, state)(x)

    agree(run, state, XS, in_axes=(None, 0))
    ensemble = agree(lambda key: nnx.state(make(key)), KEYS)
    agree(run, ensemble, XS)


@pytest.mark.parametrize(
    "optimizer",
    [optax.adamw(1e-2), optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))],
    ids=["adamw", "clipped sgd"],
)
def test_optax_training_steps_of_an_ensemble(optimizer):
    def loss(params, x, y):
        return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - y) ** 2)

    def train(params, state, x, y):
        def step(carry, _):
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, x, y)
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, state), None, length=3)

    params = {"w": example((LANES, 4, 2), seed=3), "b": example((LANES, 2), seed=4)}
    state = agree(optimizer.init, params)
    agree(train, params, state, XS, YS)
    agree(train, params, state, XS[0], YS[0], in_axes=(0, 0, None, None))


def log_density(x):
    return -jnp.sum((x[1:] - x[:-1] ** 2) ** 2) - 0.5 * jnp.sum(x**2)


def test_blackjax_step_of_several_chains():
    sampler = blackjax.hmc(log_density, 0.1, jnp.ones(4), 5)
    states = agree(sampler.init, XS)
    agree(sampler.step, KEYS, states)
