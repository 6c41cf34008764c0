"""Branches that run for few lanes or for all, decided at run time, and their derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

import batchax as bx
from batchax.analysis.thresholds import TABLE
from batchax.divergence import branches
from batchax.divergence.runner import Runner
from batchax.execution.chunk_loop import (
    ActiveMask,
    AllAtOnce,
    ChunkBody,
    ChunkLoop,
    Gathered,
    chunk_loop,
)
from batchax.jaxprs.primitive_facts import expanded

from support.forced import DECIDED, FORCED, MASKED_DERIVATIVES
from support.oracle import at_once, example, same

LANES = 40
SHARES = {"nobody": 0, "one": 1, "few": 17, "half": 20, "all": LANES}


def takers(count):
    """Which lanes take the branch."""
    return np.random.default_rng(count).permutation(LANES) < count


def data():
    """Squares, of which lanes that do not take the branch must not see the roots."""
    x = np.random.default_rng(0).normal(size=(LANES, 3))
    return jnp.asarray(x, float), jnp.asarray(np.eye(3)[::-1] + 0.1, float)


def model(taken, x, w):
    """Results that are computed, handed on, integers, and keys; the index of the lane."""

    def expensive(x, w, key):
        key = jax.random.fold_in(key, lax.axis_index("lanes"))
        inner = lax.cond(x[0] > 0, lambda x: jnp.log(x @ w), jnp.cos, jnp.abs(x) + 1)
        return inner.cumsum(), x, (x > 0).sum(), key

    other = lambda x, w, key: (2 * x, x, 7, key)
    y, z, n, key = lax.cond(taken, expensive, other, x, w, jax.random.key(3))
    return y, z * 2, n, jax.random.key_data(key)


def roots(taken, x, w):
    return lax.cond(taken, lambda x, w: jnp.sqrt(x @ w), lambda x, w: 2 * x, x, w)


def everything(divergence):
    """Uses of a batched function, as one function."""
    vmap = functools.partial(bx.vmap, divergence=divergence)
    f = vmap(roots, (0, 0, None))

    def uses(taken, x, w):
        number = lambda x, w: jnp.sum(jnp.sin(f(taken, x, w)))
        of_each = lambda t, x, w: jax.grad(lambda x: roots(t, x, w).sum())(x)
        masks = jnp.stack([taken, ~taken, taken & True])
        return {
            "values": vmap(model, (0, 0, None), axis_name="lanes")(taken, x, w),
            "gradient": jax.grad(number, (0, 1))(x, w),
            "of each": vmap(of_each, (0, 0, None))(taken, x, w),
            "scan": lax.scan(lambda x, t: (f(t, x, w), None), x, masks)[0],
            "outer": jax.vmap(f, (0, None, None))(masks, x, w),
            "shared mask": jax.vmap(f, (None, 0, None))(taken, jnp.stack([x, x + 1]), w),
            "both": vmap(f, (0, None, 0))(masks, x, jnp.stack([w, w + 1, w])),
            "chunks": vmap(roots, (0, 0, None), batch_size=24)(taken, x, w),
        }

    return uses


@functools.cache
def compiled(double):
    return [jax.jit(everything(d)) for d in (DECIDED, "predicate")]


@pytest.mark.each_commit(2)
@pytest.mark.parametrize("share", SHARES)
def test_results_are_those_of_masked_lanes(share):
    x, w = data()
    taken = takers(SHARES[share])
    x = jnp.where(taken[:, None], jnp.abs(x), x)
    x = x.at[3].set(jnp.where(taken[3], x[3], jnp.nan))
    ours, masked = (f(taken, x, w) for f in compiled(x.dtype))
    for use, expected in masked.items():
        same(ours[use], expected, {"rtol": 2e-4, "atol": 2e-5}, use)


def test_nobody_runs_or_some_or_all():
    """Chunks return ones, all lanes at once twos."""

    def of(number):
        return ChunkBody(lambda width: lambda start, mask: [jnp.full(width, number)])

    every = AllAtOnce(of(2), 0.5)
    loop = ChunkLoop(of(1), (ActiveMask(),), (Gathered(0),), LANES, 16, all_at_once=every)
    run = jax.jit(lambda mask: chunk_loop(loop, [mask])[0])
    for count in (0, 1, 17, 19, 20, LANES):
        taken = takers(count)
        expected = np.full(LANES, 2) if count >= 20 else taken * 1
        np.testing.assert_array_equal(run(taken), expected)
        np.testing.assert_array_equal(chunk_loop(loop, [jnp.asarray(taken)])[0], expected)


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


def everything_of_branch_derivatives(vmap):
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
    ours = everything_of_branch_derivatives(functools.partial(bx.vmap, divergence=WAYS[way]))
    masked = everything_of_branch_derivatives(functools.partial(bx.vmap, divergence="predicate"))
    got, expected = (at_once(*of.values())() for of in (ours, masked))
    for name, x, y in zip(ours, got, expected, strict=True):
        same(x, y, SOME, name)
    forward, reverse = (count("tanh", ours[k]) for k in ("values", "reverse"))
    assert (reverse == forward) == (worth == 0 or way == "masked")
    assert count("chunk_loop", ours["values"]) > 0


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


RNG = np.random.default_rng(0)
XS = RNG.normal(size=(6, 3)).astype(np.float32)
TAKEN_IN_STEPS = RNG.integers(0, 3, (6, 5))
MATRIX = RNG.normal(size=(3, 3)).astype(np.float32)


def layer(x, matrix):
    return jnp.tanh(matrix @ x)


def seldom(x, taken, matrix):
    def step(x, taken):
        x = lax.cond(taken == 1, layer, lambda x, _: x * 0.9, x + 0.1, matrix)
        return x, x.sum()

    return lax.scan(step, x, taken)


def with_own(x, taken, matrix):
    """Beside what all lanes share a branch has a matrix of the lane's, the same at each step."""
    own = jnp.outer(x, jnp.cos(x))

    def step(carry, entry):
        x, taken = carry, entry[0]
        far = lambda x, own, matrix: jnp.tanh(own @ x + matrix[1] * entry[1]) @ matrix
        x = lax.cond(taken == 1, far, lambda x, *_: x * 0.9, x + 0.1, own, matrix)
        return x, x.sum()

    return lax.scan(step, x, (taken, jnp.sin(taken.astype(x.dtype))))


@pytest.mark.parametrize("fun", [seldom, with_own])
@pytest.mark.each_commit(1, "seldom")
def test_gradients_of_branches_in_loops(fun):
    def gradients(vmap):
        def loss(x, matrix):
            outs = vmap(fun, (0, 0, None))(x, TAKEN_IN_STEPS, matrix)
            return sum(jnp.sum(y**2) for y in jax.tree.leaves(outs))

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(XS, MATRIX)

    same(gradients(functools.partial(bx.vmap, divergence=FORCED)), gradients(jax.vmap))
