"""`Reduce` outputs in chunks: the same reduction of the whole batch, never stored per lane."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.chunks import check_chunks, computed
from support.compiled import compiled_bytes
from support.oracle import agree, example, plainly, same, same_type

LANES = 7
X = example((LANES, 3), seed=1)
W = example((3,), seed=2)
KINDS = ("sum", "mean", "max", "min", "prod")
REDUCTIONS = {kind: getattr(jnp, kind) for kind in KINDS}


def reduced(kinds=KINDS):
    return tuple(map(bx.Reduce, kinds))


@pytest.mark.parametrize(
    ("batch_size", "residuals"), [(1, "recompute"), (3, "recompute"), (6, "keep")]
)
@pytest.mark.each_commit(1)
def test_every_reduction_with_derivatives(batch_size, residuals):
    def f(x, w):
        y = jnp.sin(x) * w
        return (y,) * 5

    check_chunks(
        f,
        X,
        W,
        in_axes=(0, None),
        out_axes=reduced(),
        batch_size=batch_size,
        residuals=residuals,
        second=True,
    )


# --- numerics --------------------------------------------------------------------------------


def test_a_mean_over_unequal_chunks_weighs_lanes_alike():
    # The mean of the means of (0, 0, 0), (0, 0, 0) and (7,) would be 7 / 3.
    x = jnp.zeros(LANES).at[-1].set(7.0)
    batched = bx.vmap(computed, 0, bx.Reduce("mean"), batch_size=3)
    assert batched(x) == 1.0
    same(jax.grad(batched)(x), jnp.full(LANES, 1 / LANES))
    n = bx.vmap(computed, 0, bx.Reduce("mean"), batch_size=3)(jnp.arange(LANES))
    assert (n, n.dtype) == (3.0, jnp.zeros(()).dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.each_commit(1)
def test_nan_and_infinity(dtype):
    for special in (jnp.nan, jnp.inf, -jnp.inf):
        for lane in (0, 4, LANES - 1):
            x = X.astype(dtype).at[lane, 1].set(special)
            got = jax.jit(bx.vmap(lambda x: (computed(x),) * 5, 0, reduced(), batch_size=3))(x)
            for kind, y in zip(KINDS, got, strict=True):
                expected = REDUCTIONS[kind](x, axis=0)
                np.testing.assert_allclose(
                    *(np.asarray(z.astype(jnp.float32)) for z in (y, expected)), rtol=0.02
                )
    # The extremes of batches that have nothing else.
    low, high = jnp.full(LANES, -jnp.inf), jnp.full(LANES, jnp.inf)
    extremes = jax.jit(
        bx.vmap(lambda x: (computed(x),) * 2, 0, reduced(("max", "min")), batch_size=3)
    )
    same(extremes(low), (-jnp.inf, -jnp.inf))
    same(extremes(high), (jnp.inf, jnp.inf))


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("residuals", ["recompute", "keep"])
@pytest.mark.compiles(60)
@pytest.mark.each_commit(1)
def test_ties_share_the_derivative(kind, residuals):
    sign = 1.0 if kind == "max" else -1.0
    x = sign * jnp.array([[3.0, 1.0], [2.0, 1.0], [3.0, 0.0], [1.0, 1.0], [3.0, 1.0]])
    f = bx.vmap(computed, 0, bx.Reduce(kind), batch_size=2, residuals=residuals)
    g = lambda x: REDUCTIONS[kind](x, axis=0)
    for wrap in (lambda h: h, jax.jit):
        same(wrap(jax.jacrev(f))(x), plainly(jax.jacrev(g), x))
        same(wrap(jax.jacfwd(f))(x), plainly(jax.jacfwd(g), x))
    tangent = jnp.arange(10.0).reshape(5, 2)
    same(jax.jvp(f, (x,), (tangent,)), jax.jvp(g, (x,), (tangent,)))


def test_derivatives_of_extremes_of_what_all_lanes_share():
    def total(v, **options):
        def loss(w):
            return v(lambda x, w: jnp.sin(x * w).sum(), (0, None), bx.Reduce("max"), **options)(
                X, w
            )

        return loss

    ours, plain = total(bx.vmap, batch_size=3), total(bx.vmap)
    same(jax.grad(ours)(W), plainly(jax.grad(plain), W))
    agree(jax.hessian(ours), jax.hessian(plain), W)


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.each_commit(1)
def test_products_with_zeros(zeros):
    x = jnp.array([2.0, 3.0, 5.0, 0.5, 4.0]).at[jnp.arange(zeros) * 3].set(0.0)
    for residuals in ("recompute", "keep"):
        f = bx.vmap(computed, 0, bx.Reduce("prod"), batch_size=2, residuals=residuals)
        same(f(x), jnp.prod(x))
        agree(jax.grad(f), jax.grad(jnp.prod), x)
        agree(jax.jacfwd(f), jax.grad(jnp.prod), x)
        agree(jax.hessian(f), jax.hessian(jnp.prod), x)


# --- use -------------------------------------------------------------------------------------


def test_the_gradient_of_a_large_set_in_the_memory_of_a_chunk():
    """What microbatching is used for: per-example gradients that are only added up.

    Of what lanes hold an array each; where the sum is a contraction, none is held (test_sums).
    """
    width = 64

    def clipped(w, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        return jnp.sort(gradient) / jnp.maximum(jnp.linalg.norm(gradient), 1)

    def mean(batch_size):
        return bx.vmap(clipped, (None, 0), bx.Reduce("mean"), batch_size=batch_size)

    w = example((width, width), seed=1) / 8
    few, many = (example((n, width), seed=2) for n in (64, 128))
    agree(mean(4), mean(None), w, many)
    assert compiled_bytes(mean(4), w, many) <= compiled_bytes(mean(4), w, few) + 64
    assert compiled_bytes(mean(4), w, many) < compiled_bytes(mean(None), w, many) / 10


def test_types_are_those_of_the_plain_program():
    f = lambda x, n: (x.astype(jnp.bfloat16), n > 2, n.astype(jnp.int8), x, n)
    n = jnp.arange(LANES)
    for kind in ("sum", "mean", "prod"):
        chunked, plain = (bx.vmap(f, 0, bx.Reduce(kind), batch_size=b) for b in (2, None))
        jax.tree.map(same_type, jax.eval_shape(chunked, X, n), jax.eval_shape(plain, X, n))
