"""What derivatives of branches keep that run for the lanes that take them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

import batchax as bx
from batchax.divergence import branches
from batchax.divergence.runner import Runner
from batchax.jaxprs.own_primitives import expanded
from batchax.programs.thresholds import TABLE

from support.forced import DECIDED, FORCED, MASKED_DERIVATIVES
from support.oracle import at_once, example, same

N, D = 11, 6
X, Y, W = example((N, D), seed=1), example((N, D), seed=2), example((D, D), seed=3) / 3
TAKEN = np.arange(N) % 3 == 1
# A lane that does not take the branch would make a NaN in it.
X = X.at[0, 0].set(jnp.nan)
SOME = {"rtol": 1e-4, "atol": 1e-5}
WAYS = {
    "compact": bx.Compact(width=4),
    "auto": FORCED,
    "masked": MASKED_DERIVATIVES,
    # Whoever takes the branch: nobody is too few, or too many.
    "decided, in chunks": Runner(thresholds=DECIDED.thresholds._replace(max_share_gathered=1e6)),
    "decided, all at once": Runner(thresholds=DECIDED.thresholds._replace(max_share_gathered=1e-6)),
}


def expensive(x, y, w):
    order = jnp.argsort(x)
    return jnp.sort(w @ jnp.tanh(x)) * jnp.sqrt(jnp.abs(y[order])), order, y


def cheap(x, y, w):
    return 0 * y, jnp.arange(D), jnp.cos(y)


def f(taken, x, y, w):
    return lax.cond(taken, expensive, cheap, x, y, w)


def count(name, fun, *args):
    """How many equations of a primitive there are in a program."""

    def inside(jaxpr):
        deeper = (inside(p) for eqn in jaxpr.eqns for p in programs_in(eqn))
        return sum(eqn.primitive.name == name for eqn in jaxpr.eqns) + sum(deeper)

    return inside(jax.make_jaxpr(fun)(*args).jaxpr)


def programs_in(eqn):
    # JAX's new custom derivatives hold theirs in an object (``jax.experimental.hijax``).
    if eqn.primitive.name == "call_hi_primitive":
        return [expanded(eqn.params["_prim"], [v.aval for v in eqn.invars]).jaxpr]
    return jaxprs_in_params(eqn.params)


def everything(vmap):
    batched = vmap(f, in_axes=(0, 0, 0, None))

    def number(x, y, w):
        out, _, other = batched(TAKEN, x, y, w)
        return jnp.sum(jnp.sin(out)) + jnp.sum(other**2)

    gradient = jax.grad(number, (0, 1, 2))
    outer = lambda way, f: way(f, in_axes=(None, 0, None))(X, jnp.stack([Y, 2 * Y]), W)
    return {
        "values": lambda: batched(TAKEN, X, Y, W),
        "forward": lambda: jax.jvp(number, (X, Y, W), (0 * Y + 1, Y, W))[1],
        "reverse": lambda: gradient(X, Y, W),
        "of weights alone": lambda: jax.grad(number, 2)(X, Y, W),
        "twice": lambda: jax.jvp(lambda y, w: gradient(X, y, w)[1:], (Y, W), (Y, W))[1],
        "inside of jax.vmap": lambda: outer(jax.vmap, gradient),
        "inside of vmap": lambda: outer(vmap, gradient),
        "of each lane": lambda: vmap(jax.grad(lambda *xs: f(*xs)[0].sum(), 2), (0, 0, 0, None))(
            TAKEN, X, Y, W
        ),
    }


@pytest.mark.each_commit(3)
@pytest.mark.parametrize("worth", [0.0, float("inf")], ids=["kept", "again"])
@pytest.mark.parametrize("way", WAYS)
def test_derivatives_are_those_of_masked_lanes(way, worth, monkeypatch):
    monkeypatch.setattr(branches, "_WORTH", worth)
    # A width makes branches of any price run apart.
    monkeypatch.setitem(TABLE, "compact", TABLE["compact"]._replace(min_gain=0.0))
    ours = everything(functools.partial(bx.vmap, divergence=WAYS[way]))
    masked = everything(functools.partial(bx.vmap, divergence="predicate"))
    got, expected = (at_once(*of.values())() for of in (ours, masked))
    for name, x, y in zip(ours, got, expected, strict=True):
        same(x, y, SOME, name)
    forward, reverse = (count("tanh", ours[k]) for k in ("values", "reverse"))
    assert (reverse == forward) == (worth == 0 or way == "masked")
    loops = [count("chunk_loop", ours[k]) for k in ("values", "reverse")]
    assert [n > 0 for n in loops] == [True, way != "masked"]


def products(x):
    for _ in range(8):
        x = jnp.tanh(x @ x)
    return x


@pytest.mark.parametrize(
    ("expensive", "name", "kept"),
    [(lambda x: lax.sort((x[0], x[1]))[1] * x, "sort", True), (products, "tanh", False)],
    ids=["a sort", "products"],
)
def test_what_takes_long_and_little_room_is_kept(expensive, name, kept):
    batched = bx.vmap(lambda t, x: lax.cond(t, expensive, lambda x: x, x), divergence="compact")
    gradient = jax.grad(lambda x, t: batched(t, x).sum())
    args = jax.ShapeDtypeStruct((512, 64, 64), jnp.float32), jax.ShapeDtypeStruct((512,), bool)
    forward = count(name, lambda x, t: batched(t, x), *args)
    assert (count(name, gradient, *args) == forward) == kept


def test_branches_without_a_linear_part():
    """JAX computes values and tangents of such a window together, in forward mode alone."""

    def f(x):
        window = lambda x: lax.reduce_window(
            x, np.float32(0), lambda a, b: a + b / 2, (1,), (1,), "VALID"
        )
        return lax.cond(jnp.sum(x) > 0, window, jnp.sin, x)

    x = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    run = lambda way: jax.jvp(bx.vmap(f, divergence=way), (x,), (np.cos(x),))
    same(*jax.jit(lambda: (run(FORCED), run("predicate")))(), None)
