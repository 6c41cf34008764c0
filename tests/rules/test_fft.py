"""Fourier transforms, against the loop over examples."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx

from support.batches import batch
from support.operations import no_more_operations
from support.oracle import agree, quickly

SHAPE = (2, 4, 6)
TRANSFORMS = {
    "fft": (lax.FftType.FFT, (6,), jnp.complex64),
    "ifft of two": (lax.FftType.IFFT, (4, 6), jnp.complex64),
    "rfft": (lax.FftType.RFFT, (6,), jnp.float32),
    "rfft of three": (lax.FftType.RFFT, (2, 4, 6), jnp.float32),
    "irfft": (lax.FftType.IRFFT, (4, 10), jnp.complex64),
    "irfft of odd length": (lax.FftType.IRFFT, (11,), jnp.complex64),
}


def transform(name):
    kind, lengths, dtype = TRANSFORMS[name]
    return lambda x: lax.fft(x, kind, lengths), dtype


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_transform(name, axis):
    fun, dtype = transform(name)
    x = batch(SHAPE, axis, dtype)
    quickly(fun, x, in_axes=axis, out_axes=1, derivatives=False)
    no_more_operations(fun, x, in_axes=axis)


@pytest.mark.parametrize("name", ["fft", "rfft", "irfft"])
def test_derivatives(name):
    fun, dtype = transform(name)
    quickly(fun, batch(SHAPE, 3, dtype), in_axes=3, nested=True)


def test_the_batch_axis_stays_where_it_is_before_the_transformed_dimensions():
    x = batch(SHAPE, 1)
    jaxpr = jax.make_jaxpr(bx.vmap(jnp.fft.rfft, in_axes=1, out_axes=1))(x)
    assert "transpose" not in str(jaxpr)


def test_no_lanes():
    x = jnp.zeros((0, 4))
    agree(bx.vmap(jnp.fft.rfft), jax.vmap(jnp.fft.rfft), x)
