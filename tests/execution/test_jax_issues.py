"""What users of JAX asked for in its issues about batches larger than memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import example, plainly, same


def temporaries(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_29587_batch_size_on_vmap_with_static_arguments():
    """With `lax.map` every static argument had to be closed over in a wrapper."""

    @partial(bx.vmap, in_axes=[0, None], batch_size=10)
    def f(arr: jax.Array, static_arg: bool) -> jax.Array:
        return jnp.sin(arr) if static_arg else arr

    x = example((25, 3))
    same(f(x, True), jnp.sin(x))
    same(f(x, False), x)
    same(jax.jit(f, static_argnums=1)(x, True), jnp.sin(x))

    # Several mapped arguments and a configuration object, none of them wrapped.
    class Config:
        scale, activation = 2.0, staticmethod(jnp.tanh)

    @partial(bx.vmap, in_axes=(0, 1, None), out_axes=1, batch_size=10)
    def g(x, y, config):
        return config.activation(x * y) * config.scale

    same(g(x, x.T, Config()), (jnp.tanh(x * x) * 2).T)


def test_11319_chunks_of_any_axes_that_are_not_padded():
    """The workaround there padded all inputs with zeros up to whole chunks."""

    def f(x, y, w):
        return jnp.log(x) / y + w, 1 / x.sum()  # of padding: NaN and inf

    x = example((7, 3), low=1.0, high=2.0)
    y = example((3, 7), seed=1, low=1.0, high=2.0)
    w = example((3,), seed=2)
    options = dict(in_axes=(0, 1, None), out_axes=(1, 0))
    with jax.debug_nans(True), jax.debug_infs(True):
        got = bx.vmap(f, **options, batch_size=3)(x, y, w)
        total = lambda **o: lambda *a: sum(t.sum() for t in bx.vmap(f, **options, **o)(*a))
        gradient = jax.grad(total(batch_size=3), (0, 1, 2))(x, y, w)
    same(got, plainly(jax.vmap(f, **options), x, y, w))
    same(gradient, plainly(jax.grad(total(), (0, 1, 2)), x, y, w))


def test_11319_a_function_of_scalars_over_an_image():
    """vmap of vmap put all of the data on the device at once."""

    def pixel(value, weights):
        return jnp.tanh(value * weights).sum()

    def over_image(image, weights, batch_size):
        rows = bx.vmap(pixel, (0, None))
        return bx.vmap(rows, (0, None), batch_size=batch_size)(image, weights)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (128,))]
    few, all_at_once = (
        temporaries(lambda i, w: jax.vjp(partial(over_image, batch_size=b), i, w)[1](i), *args)
        for b in (2, None)
    )
    assert few < all_at_once / 8
    i, w = example((5, 4)), example((3,), seed=1)
    same(over_image(i, w, 2), over_image(i, w, None))


@pytest.mark.parametrize("size", [1, 9, 10, 12])
def test_19614_axes_and_remainders_as_in_the_request(size):
    """`batch_size` went to `lax.map`; the `in_axes` and `out_axes` of the request did not."""
    x, y = example((3, size)), example((size, 3), seed=1)
    f = lambda x, y: {"a": x * y, "b": (x + y).sum()}
    options = dict(in_axes=(1, 0), out_axes={"a": -1, "b": 0})
    got = jax.jit(bx.vmap(f, **options, batch_size=5))(x, y)
    same(got, plainly(jax.vmap(f, **options), x, y))


def test_19614_memory_is_saved_in_gradients_without_remat():
    """There: "you won't realize any memory savings because JAX will save all the forward
    activations", unless the function is wrapped in `jax.remat`."""

    def f(x, w):
        return jnp.sin(jnp.outer(x, w)).sum()

    def gradient(run):
        return jax.grad(lambda w, xs: run(xs, w).sum())

    mapped = gradient(lambda xs, w: lax.map(lambda x: f(x, w), xs, batch_size=4))
    chunked = gradient(lambda xs, w: bx.vmap(f, (0, None), batch_size=4)(xs, w))
    w = jax.ShapeDtypeStruct((128,), jnp.float32)
    few, many = (jax.ShapeDtypeStruct((n, 128), jnp.float32) for n in (32, 64))
    assert temporaries(chunked, w, many) <= temporaries(chunked, w, few) + 64
    assert temporaries(chunked, w, many) < temporaries(mapped, w, many) / 8


def test_19614_a_batch_size_of_zero_is_explained():
    """`lax.map(f, xs, batch_size=0)` divided by zero."""
    with pytest.raises(bx.errors.AxisError, match="None runs all lanes at once"):
        bx.vmap(jnp.sin, batch_size=0)


def test_2509_scanning_over_any_axis():
    """Another axis than the leading one, and one that differs by argument."""

    def step(carry, x, y, w):
        carry = jnp.tanh(carry + x * w) - y
        return carry, (carry, x.sum())

    x, y = example((3, 6)), example((6, 3), seed=1)
    init, w = example((3,), seed=2), example((3,), seed=3)
    run = bx.scan(step, in_axes=(1, 0, None), out_axes=(1, 0))
    expected = lax.scan(lambda c, s: step(c, *s, w), init, (x.T, y))
    carry, (carries, sums) = run(init, x, y, w)
    same((carry, (carries.T, sums)), expected)
    assert " transpose(" not in jax.jit(run).lower(init, x, y, w).compile().as_text()
    total = lambda *a: run(*a)[1][0].sum()
    plain = lambda i, x, y, w: lax.scan(lambda c, s: step(c, *s, w), i, (x.T, y))[1][0].sum()
    numbers = (0, 1, 2, 3)
    same(
        jax.jit(jax.grad(total, numbers))(init, x, y, w),
        plainly(jax.grad(plain, numbers), init, x, y, w),
    )
    assert np.isfinite(carry).all()
