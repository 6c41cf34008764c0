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


def test_weak_types():
    weak = jax.jit(lambda: jnp.broadcast_to(2.0, (LANES,)))()
    assert jax.typeof(weak).weak_type
    fun = lambda x: (computed(x),) * 5
    check_chunks(fun, weak, out_axes=reduced(), batch_size=3, derivatives=False)
    check_chunks(lambda x: (1, 2.0, True, 2, 0.5), X, out_axes=reduced(), derivatives=False)


def test_inputs_and_one_value_reduced_in_several_ways():
    kinds = ("sum", "mean", "sum")
    check_chunks(lambda x: (x, x, x), X, out_axes=reduced(kinds), batch_size=2)
    check_chunks(
        lambda x: (x @ x, x @ x, x),
        X,
        out_axes=(bx.Reduce("max"), 0, bx.Reduce("mean")),
        batch_size=2,
    )


def test_of_trees_and_prefixes():
    def f(x, w):
        return {"loss": (x @ w) ** 2, "grad": (x, {"w": w * x})}, x

    out_axes = ({"loss": bx.Reduce("mean"), "grad": bx.Reduce("sum")}, 1)
    check_chunks(f, X, W, in_axes=(0, None), out_axes=out_axes, batch_size=3)


# --- numerics --------------------------------------------------------------------------------


def test_a_mean_over_unequal_chunks_weighs_lanes_alike():
    # The mean of the means of (0, 0, 0), (0, 0, 0) and (7,) would be 7 / 3.
    x = jnp.zeros(LANES).at[-1].set(7.0)
    batched = bx.vmap(computed, 0, bx.Reduce("mean"), batch_size=3)
    assert batched(x) == 1.0
    same(jax.grad(batched)(x), jnp.full(LANES, 1 / LANES))
    n = bx.vmap(computed, 0, bx.Reduce("mean"), batch_size=3)(jnp.arange(LANES))
    assert (n, n.dtype) == (3.0, jnp.zeros(()).dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_floats_are_added_up_in_float32(dtype):
    # Adding ones in these dtypes stops at 2,048 and at 256.
    x = jnp.ones(5000, dtype)
    for kind, expected in (("sum", 5000), ("mean", 1)):
        got = jax.jit(bx.vmap(computed, 0, bx.Reduce(kind), batch_size=1))(x)
        same(got, jnp.asarray(expected, dtype))
        assert got.dtype == dtype
    # So are the cotangents of what all lanes share, which is where weights get theirs.
    total = bx.vmap(lambda x, w: x * w, (0, None), batch_size=1)
    gradient = jax.jit(jax.grad(lambda w: total(x, w).astype(jnp.float32).sum()))
    same(gradient(jnp.ones((), dtype)), jnp.asarray(5000, dtype))


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


def test_empty_batches():
    empty = jnp.zeros((0, 3))
    got = bx.vmap(lambda x: (computed(x),) * 2, 0, reduced(("sum", "prod")), batch_size=2)(empty)
    same(got, (jnp.zeros(3), jnp.ones(3)))


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


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
@pytest.mark.each_commit(1)
def test_temporaries_do_not_grow_with_the_number_of_lanes(kind):
    def f(x, w):
        return jnp.tanh(jnp.outer(x, w)) @ w

    def gradient(x, w):
        chunked = bx.vmap(f, (0, None), bx.Reduce(kind), batch_size=4)
        return jax.value_and_grad(lambda w: chunked(x, w).sum())(w)

    w = example((256,), seed=1)
    needed = [compiled_bytes(gradient, example((n, 256)), w) for n in (32, 64)]
    # The derivative of an extreme needs to know which chunks hold it.
    entries = 8 * 256 * w.itemsize if kind in ("max", "min") else 0
    assert needed[1] <= needed[0] + entries + 64
    assert (
        needed[1] < 64 * 256 * 256 * w.itemsize / 4
    )  # of a quarter of all the intermediate values


def test_types_are_those_of_the_plain_program():
    def f(x, n):
        return x.astype(jnp.bfloat16), n > 2, n.astype(jnp.int8), x, n

    n = jnp.arange(LANES)
    for kind in ("sum", "mean", "prod"):
        chunked, plain = (bx.vmap(f, 0, bx.Reduce(kind), batch_size=b) for b in (2, None))
        jax.tree.map(same_type, jax.eval_shape(chunked, X, n), jax.eval_shape(plain, X, n))


def test_collectives_over_the_batch_next_to_reductions():
    def f(x):
        return x - jax.lax.pmean(x, "i"), (x - jax.lax.pmean(x, "i")) ** 2

    out_axes = (0, bx.Reduce("mean"))
    check_chunks(f, X, out_axes=out_axes, axis_name="i", batch_size=3, second=True)
