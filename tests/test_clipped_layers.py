"""Clipped gradients of the layers that Opacus supports, against the loop over examples."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import batchax as bx
from batchax import _compat
from batchax.jaxprs.bodies import with_inside

LANES, T, D, V = 5, 4, 12, 40
RANDOM = np.random.default_rng(0)


def array(*shape):
    return RANDOM.normal(size=shape).astype(np.float32) / 2


SEQUENCES, IMAGES = array(LANES, T, D), array(LANES, 6, 6, 3)
TOKENS = RANDOM.integers(0, V, (LANES, T))
TOKENS[0] = 7  # an example that holds one token several times


def sequence(w, x):
    return jnp.sum(jnp.sin(jnp.tanh(x @ w["a"] + w["b"]) @ w["c"]) ** 2)


def indexed(w, tokens):
    """Rows read one by one, by an index out of range and one from the end, and by two indices."""
    beyond = w["table"].at[V + 2].get(mode="fill", fill_value=0)
    rows = w["table"][tokens[0]] + w["table"][-3] + beyond
    return jnp.sum(jnp.sin(rows * w["pairs"][tokens[0] % 5, tokens % 8]))


def clipping(w, tokens):
    return jnp.sum(jnp.sin(jnp.take(w["table"], tokens + 20, axis=0, mode="clip")) * w["a"])


def language(w, tokens):
    """The next token, by a table that is the last layer, too."""
    x = w["table"][tokens[:-1]]
    x = norm(w, x + attention(w, x))
    likely = jax.nn.log_softmax(x @ w["table"].T)
    return -jnp.mean(jnp.take_along_axis(likely, tokens[1:, None], 1))


def norm(w, x):
    x = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-3)
    return x * w["scale"] + w["shift"]


def attention(w, x):
    q, k, v = jnp.einsum("td,dchk->chtk", x, w["qkv"])
    weights = jax.nn.softmax(jnp.where(np.tri(len(x)), q @ k.swapaxes(1, 2), -1e9))
    return jnp.einsum("htk,hkd->td", weights @ v, w["out"])


def convolved(w, x):
    names = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x[None], w["a"], (1, 1), "SAME", dimension_numbers=names)
    x = x.reshape(36, 2, 6)  # two groups of channels
    x = (x - x.mean((0, 2), keepdims=True)) / (x.std((0, 2), keepdims=True) + 1e-3)
    x = jnp.tanh(x.reshape(1, 6, 6, 12) * w["scale"] + w["shift"])
    x = lax.conv_general_dilated(
        x, w["b"], (2, 2), ((1, 0), (0, 1)), rhs_dilation=(2, 2), dimension_numbers=names
    )
    return jnp.sum(jnp.sin(x))


def convolved_sequence(w, x):
    names = ("NCH", "OIH", "NCH")
    x = lax.conv_general_dilated(x.T[None], w["a"], (1,), "VALID", dimension_numbers=names)
    return jnp.sum(jnp.tanh(x) @ w["b"])


def lstm(w, x):
    def cell(state, x):
        h, c = state
        i, f, g, o = jnp.split(x @ w["x"] + h @ w["h"] + w["bias"], 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jnp.stack([jax.nn.sigmoid(o) * jnp.tanh(c), c]),) * 2

    last, states = lax.scan(cell, jnp.zeros((2, D), x.dtype), x)
    return jnp.sum(last**2) + jnp.sum(jnp.sin(states))


def stacked(w, x):
    """Layers with stacked parameters, each recomputed on the way back."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w["a"] + w["b"]), None))
    return jnp.sum(lax.scan(layer, x, w)[0] ** 2)


def twice(w, x):
    """The same matrix at two places, in two functions that are jitted."""
    f = jax.jit(lambda x: jnp.tanh(x @ w["a"]))
    return jnp.sum(f(f(x) + 1) ** 2)


TABLE = dict(table=array(V, D))
WEIGHTS = dict(a=array(D, 2 * D), b=array(2 * D), c=array(2 * D, D))
NORM = dict(scale=array(D), shift=array(D))
HEADS = dict(qkv=array(D, 3, 2, 6), out=array(2, 6, D))
GATES = dict(x=array(D, 4 * D), h=array(D, 4 * D), bias=array(4 * D))
STACK = dict(a=array(3, D, D), b=array(3, D))
KERNELS = dict(a=array(3, 3, 3, D), b=array(2, 2, D, 40), **NORM)
SHORT = dict(a=array(D, D, 2), b=array(3))

# By name: the loss of an example, parameters, examples, and whether gradients are in memory.
LAYERS = {
    "linear": (sequence, WEIGHTS, SEQUENCES, False),
    "rows of tables": (indexed, TABLE | dict(pairs=array(5, 8, D)), TOKENS, False),
    "clipped indices": (clipping, TABLE | dict(a=array(D)), TOKENS, False),
    "tied weights": (language, TABLE | HEADS | NORM, TOKENS, False),
    "conv2d and group norm": (convolved, KERNELS, IMAGES, True),
    "conv1d": (convolved_sequence, SHORT, SEQUENCES, False),
    "lstm": (lstm, GATES, SEQUENCES, False),
    "stacked layers": (stacked, STACK, SEQUENCES, False),
    "twice": (twice, dict(a=array(D, D)), SEQUENCES, False),
}
WAYS = {"at once": {}, "in chunks": dict(batch_size=2), "on devices": dict(mesh="all")}


def losses(ways, names=tuple(LAYERS)):
    """The clipped sums of layers by name, as one function."""

    def of(max_norm, weights, examples):
        return {
            name: bx.clipped_grad(LAYERS[name][0], max_norm, **ways)(weights[name], examples[name])
            for name in names
        }

    return of


def given(dtype=np.float32):
    to = lambda x: x.astype(dtype) if x.dtype.kind == "f" else x
    each = {name: jax.tree.map(to, case[1:3]) for name, case in LAYERS.items()}
    return {n: w for n, (w, _) in each.items()}, {n: x for n, (_, x) in each.items()}


@functools.cache
def by_loop(max_norm):
    """Gradients of one example after another, in double precision."""
    weights, examples = given()

    @jax.jit
    def of_one(xs):
        return {name: jax.grad(LAYERS[name][0])(weights[name], x) for name, x in xs.items()}

    each = [jax.tree.map(lambda x, i=i: x[i], examples) for i in range(LANES)]
    rows = [jax.tree.map(np.float64, of_one(xs)) for xs in each]
    totals = {}
    for name in LAYERS:
        own = [row[name] for row in rows]
        norms = [math.sqrt(sum((x**2).sum() for x in jax.tree.leaves(g))) for g in own]
        short = [min(1, max_norm / n) for n in norms]
        add = lambda *xs, short=short: sum(s * x for s, x in zip(short, xs, strict=True))
        totals[name] = jax.tree.map(add, *own), sum(n > max_norm for n in norms)
    return totals


def check(got, max_norm, tolerance=2e-5):
    for name, (total, clipped) in by_loop(max_norm).items():
        assert got[name].clipped == clipped, name
        for (path, x), want in zip(
            jax.tree.leaves_with_path(got[name].sum), jax.tree.leaves(total), strict=True
        ):
            atol = tolerance * max(1e-2, np.abs(want).max())
            np.testing.assert_allclose(np.float64(x), want, atol=atol, err_msg=f"{name} {path}")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.each_commit(1)
def test_clipped_sums_of_every_layer(way):
    call = jax.jit(losses(WAYS[way]))
    for max_norm in (0.5, 1e6):
        check(call(max_norm, *given()), max_norm)


def as_users_write_it(ways, names=tuple(LAYERS)):
    """The same by ``jax.grad`` and optax in `bx.vmap`, of which all is one function."""

    def clipped(name, w, x, max_norm):
        g = jax.grad(LAYERS[name][0])(w, x)
        short, _ = optax.clip_by_global_norm(max_norm).update(g, optax.EmptyState())
        return short, (optax.global_norm(g) > max_norm).astype(np.int32)

    def of(max_norm, weights, examples):
        one = lambda w, x: {n: clipped(n, w[n], x[n], max_norm) for n in names}
        got = bx.vmap(one, (None, 0), bx.Reduce("sum"), **ways)(weights, examples)
        return {n: bx.ClippedSum(total, LANES, count) for n, (total, count) in got.items()}

    return of


def test_by_optax():
    check(jax.jit(as_users_write_it({}))(0.5, *given()), 0.5)


def arrays_in(jaxpr):
    return [v.aval for eqn in with_inside(jaxpr.eqns) for v in eqn.outvars]


@pytest.mark.parametrize("written", [losses, as_users_write_it])
@pytest.mark.parametrize("name", LAYERS)
def test_no_gradient_of_an_example_is_made(name, written):
    """No array has the shape of a gradient of a matrix for each example."""
    weights, examples = (x[name] for x in given())
    call = written({}, (name,))
    program = _compat.without_dead(jax.make_jaxpr(call)(0.5, {name: weights}, {name: examples}))
    shapes = [sorted((LANES, *x.shape)) for x in jax.tree.leaves(weights) if x.size > 100]
    is_made = any(sorted(aval.shape) in shapes for aval in arrays_in(program.jaxpr))
    assert is_made == LAYERS[name][3]
