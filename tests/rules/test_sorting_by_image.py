"""Floats sorted as integers: bit for bit what `lax.sort` has, except for the bits of a NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

SPECIAL = [0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-4, -1e-4, 1.0, -1.0, 6e4, -6e4]


def bits(x):
    x = np.asarray(x)
    as_integers = x.view(f"int{8 * x.dtype.itemsize}")
    return np.where(np.isnan(x), 0, as_integers), np.isnan(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("zeros", [(), (-0.0, 0.0, -0.0), (1e-45, -1e-45, 6e-8, -6e-8)])
def test_bits_are_those_of_lax_sort(dtype, zeros):
    if dtype == "float64" and not jax.config.jax_enable_x64:
        dtype = "float32"
    rng = np.random.default_rng(0)
    values = [*SPECIAL, *zeros, *rng.normal(size=6), *[0.5] * 3]
    rows = jnp.asarray(np.stack([rng.permutation(values) for _ in range(500)]), dtype)
    for axis in 0, 1:
        mine = jax.jit(bx.vmap(jnp.sort, axis, axis))(rows)
        theirs = lax.sort(rows, dimension=1 - axis)
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(bits(mine), bits(theirs))


def test_derivatives_and_what_reaches_sort():
    x = jnp.asarray(np.random.default_rng(2).normal(size=(600, 9)), jnp.float32)

    def each(vmap):
        loss = lambda x: vmap(lambda r: jnp.sort(r) @ jnp.arange(9.0, dtype=r.dtype))(x).sum()
        double = lambda x: jnp.sum(jnp.sin(jax.grad(lambda x: loss(jnp.sin(x)))(x)))
        few = lambda r: (jnp.median(r), jnp.quantile(r, 0.3), jnp.flip(jnp.sort(r)))
        return (
            jax.grad(loss)(x),
            jax.grad(double)(x),
            vmap(few)(x),
            jax.vmap(vmap(jnp.sort))(x[None]),
        )

    got, expected = jax.jit(lambda: (each(bx.vmap), each(jax.vmap)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, expected)


def sorts(rows, size, dtype):
    """The sorts that are compiled of so many rows, as text."""
    x = jax.ShapeDtypeStruct((rows, size), dtype)
    return jax.jit(bx.vmap(jnp.sort)).lower(x).as_text().split('"stablehlo.sort"')[1:]


def test_a_cpu_sorts_integers_where_calls_gain_what_that_takes_to_compile():
    assert any("tensor<4999x9xi32>)" in s for s in sorts(4999, 9, "float32"))
    assert not any("xi32" in s for s in sorts(3999, 9, "float32"))
