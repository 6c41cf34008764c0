"""What jax.jit, ahead-of-time compilation and export make of a batched function."""

import jax
import jax.numpy as jnp
import pytest
from jax import export, lax

import batchax as bx

from support.oracle import example, same

X = example((3, 4), seed=1)
W = example((4, 2), seed=2)


def layer(x, w):
    """Calls, a loop, a branch and a custom rule, for one example."""
    y = jax.nn.relu(x @ w)
    y, _ = lax.scan(lambda c, _: (jnp.sin(c) + y, None), y, None, length=3)
    return jax.checkpoint(jnp.tanh)(y), jnp.where(y.sum() > 0, x.max(), 0.0)


BATCHED = bx.vmap(layer, (0, None))
EXPECTED = jax.vmap(layer, (0, None))


def test_lowering_and_compiling_ahead_of_time():
    lowered = jax.jit(BATCHED).lower(jax.ShapeDtypeStruct((3, 4), X.dtype), W)
    compiled = lowered.compile()
    same(compiled(X, W), EXPECTED(X, W))
    theirs = jax.jit(EXPECTED).lower(jax.ShapeDtypeStruct((3, 4), X.dtype), W)
    ours, theirs = (c.compile().cost_analysis() for c in (lowered, theirs))
    assert ours["flops"] <= theirs["flops"]


def test_export_with_derivatives():
    exported = export.export(jax.jit(BATCHED))(X, W)
    total = lambda f: jax.grad(lambda x, w: sum(jnp.sin(t).sum() for t in f(x, w)), (0, 1))
    same(total(exported.call)(X, W), total(EXPECTED)(X, W))


@pytest.mark.parametrize("given", ["argument", "axis_size"])
def test_export_for_any_batch_size(given):
    (n,) = export.symbolic_shape("n")
    if given == "argument":
        f = BATCHED
    else:
        f = lambda x, w: bx.vmap(layer, (0, None), axis_size=x.shape[0])(x, w)

    exported = export.export(jax.jit(f))(jax.ShapeDtypeStruct((n, 4), X.dtype), W)
    assert exported.in_avals[0].shape == (n, 4)
    for size in (1, 3, 5):
        x = example((size, 4), seed=size)
        same(exported.call(x, W), EXPECTED(x, W))
