"""Calls: jit, checkpoint, and functions with a transposition or a batching rule of their own."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import batchax as bx

from support.operations import equations
from support.oracle import agree, check, example, loop, same

X = example((3, 2), seed=1)
W = example((2,), seed=2)


def names(fun, *args):
    return [eqn.primitive.name for eqn in equations(fun, *args)]


# jit


def test_jit_keeps_its_parameters():
    @functools.partial(jax.jit, keep_unused=True, donate_argnums=1)
    def named(x, unused):
        return x * 2

    (eqn,) = jax.make_jaxpr(bx.vmap(named))(X, X).eqns
    assert eqn.primitive.name == "jit"
    assert eqn.params["name"] == "named"
    assert eqn.params["keep_unused"]
    assert eqn.params["donated_invars"] == (False, True)


# checkpoint


@pytest.mark.parametrize("kept", [True, False])
def test_checkpoint_policies_decide_what_is_computed_again(kept):
    policy = jax.checkpoint_policies.save_only_these_names("kept" if kept else "other")

    @functools.partial(jax.checkpoint, policy=policy)
    def f(x):
        y = checkpoint_name(jnp.sin(x), "kept")
        return (y * y * y).sum()

    def sines(fun):
        # What is not needed is dropped first: what remains is computed twice or kept.
        return jax.jit(fun).lower(X).as_text().count("stablehlo.sine")

    outside = [sines(jax.value_and_grad(lambda x, v=v: v(f)(x).sum())) for v in (bx.vmap, jax.vmap)]
    inside = [sines(v(jax.value_and_grad(f))) for v in (bx.vmap, jax.vmap)]
    assert outside == inside == [1 if kept else 2] * 2
    agree(bx.vmap(jax.grad(f)), jax.vmap(jax.grad(f)), X)
    check(f, X, nested=True)


# custom_vmap of others


def test_custom_vmap_of_others():
    seen = []

    @jax.custom_batching.custom_vmap
    def f(x, tree):
        return x * tree["w"], tree["w"]

    @f.def_vmap
    def rule(axis_size, in_batched, x, tree):
        seen.append((axis_size, in_batched, jnp.shape(x), jnp.shape(tree["w"])))
        batched = in_batched[0] or in_batched[1]["w"]
        return (x * tree["w"] + 10, tree["w"]), (batched, in_batched[1]["w"])

    out, shared = bx.vmap(f, (1, None), (0, None))(X.T, {"w": W})
    same((out, shared), (X * W + 10, W))
    assert seen == [(3, [True, {"w": False}], (3, 2), (2,))]
    same(f(W, {"w": W})[0], W * W)


def test_custom_vmap_that_closes_over_a_batched_value():
    def per_example(x, y):
        @jax.custom_batching.custom_vmap
        def f(x):
            return x * y

        f.def_vmap(lambda n, batched, x: (x, batched[0]))
        return f(x)

    same(bx.vmap(per_example)(X, X + 1), X * (X + 1))
    got = bx.vmap(lambda x, y: jax.jvp(lambda x: per_example(x, y), (x,), (x,)))(X, X + 1)
    same(got, (X * (X + 1), X * (X + 1)))


def test_custom_vmap_with_a_wrong_rule():
    @jax.custom_batching.custom_vmap
    def f(x):
        return x

    f.def_vmap(lambda n, batched, x: ((x, x), (True, True)))
    with pytest.raises(bx.AxisError, match="custom_vmap must return"):
        bx.vmap(f)(X)


# linear functions with a transposition of their own


def divide(x, denominator):
    """x / denominator, linear in x, transposed to something seven times too large."""

    t = lambda r, c: 7 * c / r
    return jax.custom_derivatives.linear_call(lambda r, x: x / r, t, denominator, x)


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_linear_call(in_axes):
    args = [W + 3 if a is None else X + 4 for a in in_axes]
    batched = bx.vmap(divide, in_axes)
    same(batched(*args), loop(divide, args, in_axes))
    same(jax.jit(batched)(*args), loop(divide, args, in_axes))

    def transposed(f):
        return lambda x, d: jax.linear_transpose(lambda z: f(z, d), x)(X)[0]

    one_by_one = lambda x, d: loop(divide, (x, d), in_axes)
    same(transposed(batched)(*args), transposed(one_by_one)(*args))
    twice = jax.linear_transpose(
        lambda c: jax.linear_transpose(lambda z: batched(z, args[1]), args[0])(c)[0], X
    )
    same(twice(args[0])[0], batched(*args))
    got = bx.vmap(lambda x, d: jax.vjp(lambda z: divide(z, d), x)[1](x)[0], (0, 0))(X, X + 4)
    same(got, 7 * X / (X + 4))


# others


def test_composite():
    f = lax.composite(lambda x, w: jnp.sin(x) * w, name="test.scaled")
    same(bx.vmap(f, (0, None))(X, W), jnp.sin(X) * W)
    same(jax.jit(bx.vmap(bx.vmap(f)))(X[None], X[None]), (jnp.sin(X) * X)[None])
    assert "composite" not in names(bx.vmap(f, (0, None)), X, W)
    assert "composite" in names(bx.vmap(lambda x: x + f(W, W)), X)


def test_programs_over_references():
    from jax.experimental.pallas import run_state

    def f(x, w):
        def body(refs):
            a, b = refs
            a[0] = a[0] * 2 + b[...].sum()

        return run_state(body)((x, w))

    out_axes = (0, None)
    got = bx.vmap(f, (0, None), out_axes)(X, W)
    same(got, loop(f, (X, W), (0, None), out_axes))
    same(jax.jit(bx.vmap(f))(X, X), loop(f, (X, X), (0, 0)))
    same(bx.vmap(lambda x: f(W, x))(X), loop(lambda x: f(W, x), (X,), (0,)))
    forward = lambda g: jax.jvp(lambda x, w: g(x, w)[0], (X, W), (X + 1, W + 1))
    same(forward(bx.vmap(f, (0, None))), forward(lambda x, w: loop(f, (x, w), (0, None))))
