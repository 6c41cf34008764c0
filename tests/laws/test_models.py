"""Models given whole, as their libraries make them, in every way to run a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import batchax as bx

from support.oracle import example, same

LANES = 3
QUICK = {"xla_backend_optimization_level": 0}
CLOSE = dict(rtol=2e-4, atol=2e-5)
# Flax keeps averages in float32.
XS, YS = (example((LANES, n), seed=n).astype(np.float32) for n in (4, 2))
KEYS = jax.random.split(jax.random.key(0), LANES)
WAYS = {
    "plain": {},
    "chunks": dict(batch_size=2),
    "devices": dict(mesh="all"),
    "compact": dict(divergence="compact", batch_size=2),
}


class Net(nnx.Module):
    """What a module may hold: parameters, averages, random streams, functions, a bool."""

    def __init__(self, rngs, sizes=(4, 2)):
        self.layer = nnx.Linear(*sizes, rngs=rngs)
        self.norm = nnx.BatchNorm(sizes[1], momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.activation = nnx.tanh
        self.training = True

    def __call__(self, x):
        x = self.layer(x)
        return self.drop(self.norm(self.activation(x))) if self.training else x


def loss(model, x, y):
    return jnp.sum((model(x[None]) - y) ** 2)


@nnx.jit
def compiled(model, x, y):
    return model(x[None]) - y


def repeated(model, x, y):
    step = nnx.scan(
        lambda y, model: (model(x[None])[0] + y, y), in_axes=(nnx.Carry, None), length=3
    )
    return step(y, model)


def changed(model, x, y):
    """As `nnx.vmap` returns what a lane changes, under ``jax.vmap`` the function does."""
    return loss(model, x, y), nnx.state(model)


def gradient_step(model, x, y):
    model.layer.kernel[...] -= 0.1 * nnx.grad(loss)(model, x, y)["layer"]["kernel"][...]
    return model.layer.kernel[...]


def mapped_inside(model, x, y):
    return nnx.vmap(lambda model, x: model.layer(x), in_axes=(None, 0))(
        model, jnp.stack([x, 2 * x])
    )


NNX = {
    "gradient": nnx.grad(loss),
    "value and gradient": nnx.value_and_grad(loss),
    "jit": compiled,
    "scan": repeated,
    "changed": changed,
    "step": gradient_step,
    "vmap": mapped_inside,
}


def keys_as_numbers(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def numbers(tree):
    return [keys_as_numbers(x) for x in jax.tree.leaves(tree)]


def agrees(fun, in_axes, *args):
    """`fun` in each of the ways is what ``jax.vmap`` gives, compiled."""

    @jax.jit
    def all_ways(args):
        batched = {name: bx.vmap(fun, in_axes, **way) for name, way in WAYS.items()}
        return {k: numbers(f(*args)) for k, f in batched.items()}, numbers(
            jax.vmap(fun, in_axes)(*args)
        )

    got, expected = all_ways(args)
    for way in WAYS:
        same(got[way], expected, CLOSE, way)


@pytest.mark.parametrize("fun", NNX.values(), ids=NNX)
def test_nnx_model_that_all_lanes_share(fun):
    agrees(fun, (None, 0, 0), Net(nnx.Rngs(0)), XS, YS)


def test_nnx_models_of_their_own():
    models = nnx.vmap(lambda key: Net(nnx.Rngs(key)))(KEYS)
    agrees(nnx.grad(loss), (0, None, 0), models, XS[0], YS)


def test_nnx_calls_that_are_not_compiled():
    """What NNX knows of traces is checked while Python runs; here it runs outside of `jit`."""
    model = Net(nnx.Rngs(0))
    got = bx.vmap(nnx.grad(loss), (None, 0, 0), batch_size=2)(model, XS, YS)
    same(numbers(got), numbers(jax.vmap(nnx.grad(loss), (None, 0, 0))(model, XS, YS)), CLOSE)
    around = nnx.vmap(bx.vmap(lambda m, x: m.layer(x), (None, 0)), in_axes=(None, 0))
    same(around(model, XS[None])[0], model.layer(XS), CLOSE)
    total = lambda batched: lambda m: jnp.sum(batched(lambda m, x: m.layer(x), (None, 0))(m, XS))
    of_all = nnx.grad(total(bx.vmap))(model)
    same(numbers(of_all), numbers(nnx.grad(total(jax.vmap))(model)), CLOSE)
    assert bx.check(nnx.grad(loss), (None, 0, 0), derivatives=False)(model, XS, YS) is None
    ranks = bx.auto_vmap(None, 1, 1)(nnx.grad(loss))
    same(numbers(ranks(model, XS, YS)), numbers(got), CLOSE)


def test_nnx_random_streams():
    """One for all lanes draws the same for each; split, each lane has its own."""
    draw = lambda stream, x: x + jax.random.normal(stream(), x.shape, x.dtype)
    agrees(draw, (None, 0), nnx.Rngs(0), XS)
    agrees(draw, (0, 0), nnx.Rngs(0).split(LANES), XS)


def test_what_is_no_tree_stays_known():
    """A model may hold bools, strings and functions, and be branched on."""

    def run(config, x):
        if config["deep"] and config["name"] == "net" and config["times"] == 2:
            config["seen"].append(x)  # stays inside
            return config["activation"](x * config["times"])
        raise AssertionError

    config = dict(deep=True, name="net", times=2, activation=jnp.tanh, seen=[])
    for way in WAYS.values():
        got = bx.vmap(run, (None, 0), **way)(config, XS)
        same(got, np.tanh(2 * np.asarray(XS)), CLOSE)
    assert config["seen"] == []


def test_linen_model():
    model = linen.BatchNorm(use_running_average=False, axis_name="batch")
    variables = model.init(jax.random.key(0), XS)
    run = lambda v, x: model.apply(v, x, mutable=["batch_stats"])
    agrees_named = [
        f(run, (None, 0), axis_name="batch")(variables, XS) for f in (bx.vmap, jax.vmap)
    ]
    same(*map(numbers, agrees_named), CLOSE)
