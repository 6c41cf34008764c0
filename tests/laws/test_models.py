"""Models given whole, as their libraries make them, in every way to run a batch."""

import functools
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import batchax as bx

from support.high_operations import centered, normalized, product
from support.oracle import example, same, together

LANES = 3
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


def mlp(key):
    return eqx.nn.MLP(4, 2, width_size=3, depth=1, dtype=XS.dtype, key=key)


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


NNX = {
    "value and gradient": nnx.value_and_grad(loss),
    "jit": compiled,
    "scan": repeated,
    "changed": changed,
}


def keys_as_numbers(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def numbers(tree):
    return [keys_as_numbers(x) for x in jax.tree.leaves(tree)]


def agrees(fun, in_axes, *args, **options):
    """`fun` in each of the ways is what ``jax.vmap`` gives, compiled."""

    @jax.jit
    def all_ways(args):
        batched = {name: bx.vmap(fun, in_axes, **way, **options) for name, way in WAYS.items()}
        return {k: numbers(f(*args)) for k, f in batched.items()}, numbers(
            jax.vmap(fun, in_axes, **options)(*args)
        )

    got, expected = all_ways(args)
    for way in WAYS:
        same(got[way], expected, CLOSE, way)


@pytest.mark.parametrize("fun", NNX.values(), ids=NNX)
def test_nnx_model_that_all_lanes_share(fun):
    agrees(fun, (None, 0, 0), Net(nnx.Rngs(0)), XS, YS)


@pytest.mark.parametrize(
    ("model", "grad"),
    [(Net(nnx.Rngs(0)), nnx.grad), (mlp(KEYS[0]), eqx.filter_grad)],
    ids=["nnx", "equinox"],
)
def test_clipped_gradients(model, grad):
    """Of a whole model, by its library's own gradient: those of the loop, in each way."""
    of = lambda m, x, y: loss(m, x, y) if grad is nnx.grad else jnp.sum((m(x) - y) ** 2)

    @eqx.filter_jit
    def both(model, xs, ys):
        each = [grad(of)(model, x, y) for x, y in zip(xs, ys, strict=True)]
        norms = [jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(e))) for e in each]
        scaled = [
            jax.tree.map(lambda g, n=n: jnp.minimum(1, 0.5 / n) * g, e)
            for e, n in zip(each, norms, strict=True)
        ]
        clipped = {k: bx.clipped_grad(of, 0.5, grad=grad, **way) for k, way in WAYS.items()}
        got = {k: f(model, xs, ys).sum for k, f in clipped.items()}
        return got, jax.tree.map(lambda *g: sum(g), *scaled)

    if grad is nnx.grad:
        model.training = False  # else calls one after another draw others, and average others
    got, expected = both(model, XS, YS)
    assert numbers(expected)
    for way in WAYS:
        assert jax.tree.structure(got[way]) == jax.tree.structure(expected)
        same(numbers(got[way]), numbers(expected), CLOSE, way)


# Libraries that the environments of the suite do not have: `make test-newest` installs them.


@pytest.mark.nightly
def test_haiku_models():
    """Parameters, a state that all lanes change together, a key for each lane; an ensemble."""
    hk = pytest.importorskip("haiku")

    @hk.transform_with_state
    def model(x):
        x = hk.BatchNorm(True, True, 0.9, cross_replica_axis="batch")(hk.Linear(8)(x)[None], True)
        return hk.Linear(2)(hk.dropout(hk.next_rng_key(), 0.5, jnp.tanh(x[0])))

    def loss(params, state, key, x, y):
        out, state = model.apply(params, state, key, x)
        return jnp.sum((out - y) ** 2), state

    init = lambda vmap: vmap(model.init, (0, 0), axis_name="batch")(KEYS, XS)
    params, state = init(bx.vmap)
    same(numbers((params, state)), numbers(init(jax.vmap)), CLOSE)
    params, state = jax.tree.map(lambda x: x[0], (params, state))
    step = jax.value_and_grad(loss, has_aux=True)
    agrees(step, (None, None, 0, 0, 0), params, state, KEYS, XS, YS, axis_name="batch")

    mlp = hk.transform(lambda x: hk.nets.MLP([8, 2], activation=jnp.tanh)(x))
    params = bx.vmap(mlp.init, (0, None))(KEYS, XS[0])
    agrees(lambda p, x: mlp.apply(p, None, x), (0, None), params, XS)


@pytest.mark.nightly
def test_penzai_models():
    """A model whole; the gradient by its parameters; those of an ensemble."""
    pz = pytest.importorskip("penzai.pz")
    from penzai.models.simple_mlp import MLP

    make = lambda key: MLP.from_config(name="mlp", init_base_rng=key, feature_sizes=[4, 8, 2])
    run = lambda m, x: m(pz.nx.wrap(x).tag("features")).unwrap("features")
    whole = make(KEYS[0])
    expected = numbers(jax.vmap(run, (None, 0))(whole, XS))  # `jit` takes no whole model
    for name, way in WAYS.items():
        same(numbers(bx.vmap(run, (None, 0), **way)(whole, XS)), expected, CLOSE, name)

    model, variables = pz.unbind_params(whole, freeze=True)
    loss = lambda values, x, y: jnp.sum((run(pz.bind_variables(model, values), x) - y) ** 2)
    agrees(jax.grad(loss), (None, 0, 0), variables, XS, YS)
    each = bx.vmap(lambda key: pz.unbind_params(make(key), freeze=True)[1])(KEYS)
    agrees(jax.grad(loss), (0, 0, 0), each, XS, YS)
    assert bx.clipped_grad(loss, 1e-3)(variables, XS, YS).clipped == LANES


# Leaves that are no arrays


def test_equinox_models_stacked_made_and_run():
    square = lambda m, x: jnp.sum(m(x) ** 2)

    @eqx.filter_jit
    def all_ways(xs):
        stacked = bx.stack([mlp(KEYS[i]) for i in range(LANES)])
        want = eqx.filter_vmap(mlp)(KEYS)
        expected = (
            eqx.filter_vmap(lambda m, x: m(x))(want, xs),
            numbers(eqx.filter_vmap(eqx.filter_grad(square))(want, xs)),
            numbers(eqx.filter(want, eqx.is_array)),
        )
        return expected, {
            name: (
                bx.vmap(lambda m, x: m(x), **way)(stacked, xs),
                numbers(bx.vmap(eqx.filter_grad(square), **way)(stacked, xs)),
                numbers(eqx.filter(bx.vmap(mlp, **way)(KEYS), eqx.is_array)),
            )
            for name, way in WAYS.items()
            if name in ("compact", "devices")  # the former in chunks, too
        }

    expected, got = all_ways(XS)
    for name, results in got.items():
        same(results, expected, CLOSE, name)


def test_objects_among_arguments_and_results():
    """Whatever looks at a function sees them, too; where results are kept they are refused."""
    settings, config = object(), {"activation": jnp.tanh, "x": XS}

    def run(config, x):
        return {"y": config["activation"](config["x"] * x), "made by": settings}

    assert bx.vmap(run)(config, XS)["made by"] is settings
    assert bx.vmap(run, out_axes=bx.Reduce("mean"), batch_size=2)(config, XS)["made by"] is settings
    assert bx.vmap(run, out_axes={"made by": None})(config, XS)["made by"] is settings
    assert len(bx.check(run)(config, XS).lanes) == LANES
    assert not len(bx.find_nonfinite(run)(config, XS).lanes)
    assert bx.explain(run)(config, XS).lanes == LANES
    rows = bx.Ragged.from_rows([np.ones(n, np.float32) for n in (2, 1, 2)])
    grouped = bx.vmap(lambda c, x: (x, c["activation"]), buckets=2)(config, rows)
    assert grouped[1] is jnp.tanh
    with pytest.raises(bx.ArgumentTypeError, match=r"ys\[1\] is of type"):
        bx.scan(lambda carry, x: (carry, (x, jnp.sin)))(0.0, XS)
    with pytest.raises(bx.ArgumentTypeError, match=r"out\['made by'\] is of type object"):
        bx.map(lambda x: {"x": x, "made by": settings}, np.asarray(XS), progress=False)


class Layer(eqx.Module):
    """A module without static fields: all of them are leaves."""

    weight: jax.Array
    activation: Callable
    name: str
    names: tuple[str, ...]
    settings: frozenset
    training: bool
    path: Path

    def __call__(self, x):
        return self.activation(self.weight * x)


SETTINGS, HERE = frozenset("ab"), Path("here")


def layer(weight):
    made_here = "".join(["la", "yer"])  # another string each time, and equal
    return Layer(weight, jnp.tanh, made_here, ("in", "out"), SETTINGS, True, HERE)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_fields_that_are_not_arrays(way):
    """Strings, collections and functions in a module pass, as in `eqx.filter_vmap`."""
    stacked = layer(jnp.asarray(XS))
    applied = eqx.filter_vmap(lambda m, x: m(x))(stacked, XS)
    for in_axes in (0, (lambda leaf: 0 if leaf.ndim else None, 0)):
        same(bx.vmap(lambda m, x: m(x), in_axes, **way)(stacked, XS), applied)
    again = jax.jit(lambda x: bx.vmap(lambda m: m, **way)(layer(x)).weight)(XS)
    same(again, XS)
    for made in (bx.vmap(layer, **way)(XS), bx.vmap(lambda m: m, 0, bx.AUTO, **way)(stacked)):
        assert jax.tree.structure(made) == jax.tree.structure(stacked)
        assert (made.name, made.names, made.path) == ("layer", ("in", "out"), HERE)
        same(made.weight, XS)
    slope = lambda vmap: eqx.filter_grad(lambda m: jnp.sum(vmap(Layer.__call__)(m, XS)))(stacked)
    got, expected = slope(lambda f: bx.vmap(f, **way)), slope(eqx.filter_vmap)
    same(got.weight, expected.weight, CLOSE)


def test_numbers_of_a_model_have_no_lanes():
    """As in `jax.vmap`: an axis for a number of Python's raises, by name."""
    numbered = eqx.tree_at(lambda m: m.path, layer(jnp.asarray(XS)), 2)
    for in_axes in (0, lambda leaf: 0):
        with pytest.raises(bx.AxisError, match=r"m\.path: shape \(\), axis 0"):
            bx.vmap(lambda m: m.weight, in_axes)(numbered)
    rule = lambda leaf: 0 if eqx.is_array(leaf) else None
    same(bx.vmap(lambda m: m.path * m.weight, rule)(numbered), 2 * XS)


# Operations that their authors describe by objects, with a rule for batches.

HIGH = {
    "several results": (lambda x, w: jnp.sum(jnp.sin(normalized(x)[0])) * normalized(x)[1], None),
    "shared weights": (lambda x, w: jnp.sum(jnp.tanh(product(x, w))), None),
    "own weights": (lambda x, w: jnp.sum(jnp.tanh(product(x, w))), 0),
    "collective": (lambda x, w: jnp.sum(jnp.sin(centered(x, "i"))), None),
    "shared collective": (lambda x, w: x.sum() * (8 + centered(w, "i").sum()), None),
    "branches": (
        lambda x, w: lax.cond(x[0] > 0, lambda: product(x, w).sum(), lambda: normalized(x)[1]),
        None,
    ),
}


@pytest.mark.parametrize("name", HIGH)
def test_operations_of_an_author(name):
    fun, of_weights = HIGH[name]
    weights = example((LANES, 4, 2) if of_weights == 0 else (4, 2), seed=3).astype(np.float32)

    def each(vmap):
        mapped = lambda f: vmap(f, in_axes=(0, of_weights), axis_name="i")
        total = lambda *args: jnp.sum(jnp.sin(mapped(fun)(*args)))
        return lambda *args: [
            jax.grad(total, (0, 1))(*args),
            mapped(jax.grad(fun, (0, 1)))(*args),
            mapped(fun)(*args),
        ]

    ways = {way: each(functools.partial(bx.vmap, **options)) for way, options in WAYS.items()}
    ways["jax.vmap"] = each(jax.vmap)
    results = jax.jit(together(ways))(XS, weights)
    for way in WAYS:
        same(results[way], results["jax.vmap"], CLOSE, way)
