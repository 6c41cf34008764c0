"""Convolution with images, kernels or both batched, against the loop over examples."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.linalg import pays
from batchax.rules import convolution as convolution_rule

from support import batches
from support.oracle import check, loop_function, same

# On a CPU lanes of wider ones run one after another.
batch = functools.partial(batches.batch, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def many_calls(monkeypatch):
    """As many as few lanes need, to make up for what compiling takes."""
    monkeypatch.setattr(pays, "CALLS", 10**9)


SIDES = [(0, None), (None, 0), (0, 0)]
PLACES = [(1, None), (4, None), (None, 1), (None, 3), (2, 4)]
GROUPS = {
    # name: (images, kernel, options); layout NCHW and OIHW
    "plain": ((2, 4, 5, 5), (4, 4, 3, 3), {}),
    "channel groups": ((2, 4, 5, 5), (6, 2, 3, 3), {"feature_group_count": 2}),
    "depthwise": ((2, 4, 5, 5), (4, 1, 3, 3), {"feature_group_count": 4}),
    "image groups": ((4, 3, 5, 5), (6, 3, 3, 3), {"batch_group_count": 2}),
    "dilated": (
        (2, 4, 5, 5),
        (6, 2, 3, 3),
        {
            "strides": (2, 1),
            "padding": ((1, 2), (0, 3)),
            "lhs_dilation": (1, 2),
            "rhs_dilation": (2, 1),
            "feature_group_count": 2,
        },
    ),
}


def convolution(strides=(1, 1), padding="SAME", **options):
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, **options)


def no_more_operations(kind, fun, *args, in_axes):
    """Counted once lowered: in a jaxpr JAX's `reshape` may hide a transpose.

    Kernels of each lane are sums of products, if they are not grouped.
    """
    if kind == "plain" and None not in in_axes:
        return
    ours, theirs = (
        jax.jit(vmap(fun, in_axes)).lower(*args).as_text().count("stablehlo.")
        for vmap in (bx.vmap, jax.vmap)
    )
    assert ours <= theirs


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("in_axes", [*SIDES, *PLACES])
@pytest.mark.each_commit(8)
def test_groups_and_places_of_the_batch_axis(kind, in_axes):
    images, kernel, options = GROUPS[kind]
    args = batch(images, in_axes[0]), batch(kernel, in_axes[1], seed=1)
    fun = convolution(**options)
    smooth = kind == "channel groups" and in_axes in SIDES
    check(fun, *args, in_axes=in_axes, out_axes=-1, derivatives=smooth, eager=False)
    no_more_operations(kind, fun, *args, in_axes=in_axes)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_numbers_of_64_bits_of_one_lane_reach_no_other(dtype):
    """Compilers for CPUs multiply images of all lanes with kernels of all, most of them by zero."""

    def f(w, x):
        return jnp.sum(jnp.abs(convolution()(x, w)) ** 2)

    with jax.enable_x64(True):
        x = batches.batch((1, 1, 4, 4), 2, dtype, seed=1).at[0, 0, 1, 2, 2].set(jnp.nan)
        w = batches.batch((2, 1, 3, 3), 1, dtype, seed=2)
        for given, axis in ((w, 1), (w[:, 0], None)):
            got = jax.jit(bx.vmap(jax.value_and_grad(f, (0, 1)), (axis, 2)))(given, x)
            same(got, loop_function(jax.value_and_grad(f, (0, 1)), (axis, 2), 0)(given, x))
            assert not np.isnan(got[1][0][::2]).any()


# What a CPU computes by slices; (images, kernel, options) as in `GROUPS`.
SLICED = {
    "one channel": ((2, 1, 6, 5), (3, 1, 3, 2), {"padding": ((1, -1), (0, 2))}),
    "kernel of one place": ((2, 3, 5, 4), (4, 3, 1, 1), {"strides": (2, 1), "padding": "VALID"}),
    "few results": ((3, 2, 6, 5), (4, 2, 5, 3), {"rhs_dilation": (1, 2), "padding": "VALID"}),
    "dilated": (
        (1, 2, 3, 4),
        (2, 2, 3, 5),
        {"lhs_dilation": (2, 1), "strides": (2, 3), "padding": ((1, 1), (2, 1))},
    ),
    "one dimension": ((3, 2, 7), (2, 2, 6), {"strides": (1,), "padding": ((1, 1),)}),
    "several channels": ((2, 3, 6, 5), (4, 3, 3, 2), {"strides": (1, 2)}),
    "many channels": ((1, 32, 3, 4), (2, 32, 2, 2), {}),
    "three dimensions": ((2, 1, 3, 4, 3), (2, 1, 2, 2, 2), {"strides": (1, 2, 1)}),
}


def sliced(kind):
    images, kernel, options = SLICED[kind]
    return images, kernel, convolution(**options)


@pytest.mark.parametrize("kind", SLICED)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.each_commit(6)
def test_by_slices_it_is_the_same_with_its_derivatives(kind, dtype):
    images, kernel, fun = sliced(kind)

    def both(x, w):
        """Values, the gradient of the batch, and gradients of examples in a batch of batches."""

        def of(vmap):
            one = lambda x, w: jnp.sum(fun(x, w) ** 3)
            inner = vmap(jax.grad(one, (0, 1)), (2, 0))
            return (
                vmap(fun, (2, 0), 1)(x, w),
                jax.grad(lambda x, w: jnp.sum(vmap(fun, (2, 0))(x, w) ** 3), (0, 1))(x, w),
                vmap(inner, (None, 0))(x, jnp.stack([w, 2 * w])),
            )

        return of(bx.vmap), of(jax.vmap)

    with jax.enable_x64(dtype == "float64"):
        x, w = (batches.batch(s, a, dtype, seed=1) for s, a in ((images, 2), (kernel, 0)))
        ours, theirs = jax.jit(both)(x, w)
        close = {"float32": 1e-3, "float64": 1e-11}[dtype]
        same(ours, theirs, dict(rtol=close, atol=close))
        lowered = jax.jit(bx.vmap(fun, (2, 0))).lower(x, w).as_text()
        in_turn = dtype == "float64" and kind == "many channels"
        assert ("stablehlo.convolution" in lowered) == in_turn


def test_blocks_of_lanes_are_the_same_as_all_at_once(monkeypatch):
    """Of four lanes, one or two at a time, by slices for kernels and for results."""
    for kind in ("several channels", "few results"):
        images, kernel, fun = sliced(kind)
        x, w = (batches.batch(s, 0, "float32", seed=1, size=4) for s in (images, kernel))
        batched = lambda: bx.vmap(lambda x, w, fun=fun: fun(x, w))
        whole = jax.jit(batched())(x, w)
        with monkeypatch.context() as patched:
            for block in (1, 2 * 4 * 6 * x[0].size):
                patched.setattr(convolution_rule, "_BLOCK", block)
                convolution_rule._by_platform.cache_clear()
                run = jax.jit(batched())
                assert block > 1 or "scan[" in str(jax.make_jaxpr(run)(x, w))
                same(run(x, w), whole)
        convolution_rule._by_platform.cache_clear()


def test_lanes_of_the_same_convolution_share_a_program():
    """Once staged it is emitted again for other arrays of the same types, and for no others."""

    twice = lambda x, w: (convolution()(x, w), convolution()(2 * x, w))
    x, w = batch((1, 2, 6, 6), 0), batch((2, 2, 3, 3), 0)
    outs = bx.vmap(twice)(x, w)
    same(outs, loop_function(twice, (0, 0), 0)(x, w))
    eqns = [e for e in jax.make_jaxpr(bx.vmap(twice))(x, w).eqns if "jaxpr" in e.params]
    first, second = (e.params["jaxpr"] for e in eqns)
    assert first is second
    fewer = jax.make_jaxpr(bx.vmap(twice))(x[:2], w[:2])
    assert fewer.out_avals[0].shape[0] == 2


def test_few_lanes_are_left_to_xla(monkeypatch):
    """100 calls of few lanes do not gain back what slices take longer to compile."""
    monkeypatch.setattr(pays, "CALLS", 100)
    batched = bx.vmap(convolution())
    for lanes, by_slices in ((16, False), (128, True)):
        x, w = jnp.ones((lanes, 1, 3, 16, 16), "f"), jnp.ones((lanes, 8, 3, 3, 3), "f")
        lowered = jax.jit(batched).lower(x, w).as_text()
        assert ("stablehlo.convolution" not in lowered) == by_slices


def test_the_memory_of_a_gradient_by_slices_is_that_of_operands():
    """No slice is kept for the derivative."""
    x, w = jnp.ones((4, 1, 1, 16, 16)), jnp.ones((4, 1, 1, 3, 3))
    total = lambda x, w: jnp.sum(bx.vmap(convolution())(x, w))
    _, pull = jax.vjp(total, x, w)
    assert sum(leaf.size for leaf in jax.tree.leaves(pull)) <= x.size + w.size + 4


PADDED = ((2, 1), (1, 1))
IN_LOOPS = {
    # name: (images, kernel, options, dtype, tolerance); enough features for the library of CPUs
    "channels first": ((2, 4, 6, 5), (8, 4, 3, 3), {"strides": (1, 2)}, "bfloat16", 3e-2),
    "mixed": (
        (4, 6, 5, 2),
        (4, 3, 4, 8),
        {"dimension_numbers": ("CHWN", "IHWO", "HNWC"), "lhs_dilation": (2, 1), "padding": PADDED},
        "float32",
        1e-4,
    ),
}


@pytest.mark.parametrize("kind", IN_LOOPS)
def test_in_loops_channels_are_last_with_the_same_results(kind):
    """In chunks, scans and while loops: XLA moves channels by itself outside of loops alone."""
    images, kernel, options, dtype, close = IN_LOOPS[kind]
    fun = convolution(**options)
    x, w = batch(images, 1, dtype=dtype), batch(kernel, None, dtype=dtype)

    def looped(x, w):
        total = lambda x: jnp.sum(fun(x, w).astype("float32") ** 2)
        down = lambda x: x - jax.grad(total)(x) / 1e3
        x, each = lax.scan(lambda x, _: (down(x), jnp.abs(fun(x, w)).sum()), x, length=2)
        x, _ = lax.while_loop(lambda c: c[1] < 2, lambda c: (down(c[0]), c[1] + 1), (x, 0))
        return x, each

    def of(vmap, **chunks):
        return [
            vmap(fun, (1, None), **chunks)(x, w),
            vmap(fun, (None, 0), **chunks)(x[:, 0], jnp.stack([w, 2 * w, w, -w])),
            vmap(looped, (1, None))(x, w),
        ]

    theirs = of(jax.vmap)
    same(jax.jit(lambda: of(bx.vmap, batch_size=2))(), theirs, dict(rtol=close, atol=close * 10))
    moved = "dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"
    for function, chunks in ((fun, {}), (fun, {"batch_size": 2}), (looped, {})):
        lowered = jax.jit(bx.vmap(function, (1, None), **chunks)).lower(x, w).as_text()
        assert (moved in lowered) == (function is looped or bool(chunks))


def _of_images(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    once = lambda x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)
    return (once(jnp.sin(once(x[None]))) ** 2).sum()


@pytest.mark.parametrize("rows", [False, True], ids=["chunks", "size buckets"])
def test_derivatives_of_loops_have_channels_last(rows):
    """XLA for CPUs has a loop over numbers for other orders: 13x the time of a gradient."""
    x, w = batches.batch((12, 14, 8), 0, "float32", size=4), batch((3, 3, 8, 8), None) / 20
    heights, widths = np.array([[12, 6, 2, 4], [14, 7, 4, 14]])
    sizes = jnp.asarray(heights), jnp.asarray(widths)
    parts = [image[:h, :k] for image, h, k in zip(x, heights, widths, strict=True)]
    data = jnp.concatenate([part.reshape(-1, 8) for part in parts])
    given = bx.Ragged(data, sizes, (12, 14), axis=(0, 1)) if rows else x
    options = {"buckets": 2} if rows else {"batch_size": 2}

    def loss(w, x):
        return bx.vmap(_of_images, (0, None), **options)(x, w).sum()

    gradient = jax.jit(jax.value_and_grad(loss))
    orders = re.findall(r"dim_numbers = (.*?), window", gradient.lower(w, given).as_text())
    assert len(orders) >= 5
    assert set(orders) == {"[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"}
    expected = jax.value_and_grad(lambda w: sum(_of_images(p, w) for p in (parts if rows else x)))
    for got, want in zip(gradient(w, given), expected(w), strict=True):
        np.testing.assert_allclose(got, want, 1e-4, 1e-4)


def test_the_slices_of_a_gradient_are_one_loop():
    loss = lambda x, w: jnp.sum(convolution(padding="SAME")(x[None], w) ** 2)
    gradient = bx.vmap(jax.grad(loss, 1), (0, None))
    given = np.ones((40, 3, 12, 12), np.float32), np.ones((4, 3, 3, 3), np.float32)
    text = jax.jit(gradient).lower(*given).as_text()
    # Written out, each of the nine is a kernel to compile.
    assert text.count("stablehlo.while") == 1
    assert text.count("stablehlo.slice") < 9
    got, expected = gradient(*given), jax.vmap(jax.grad(loss, 1), (0, None))(*given)
    np.testing.assert_allclose(got, expected, 1e-4, 1e-4)
