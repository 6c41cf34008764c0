"""Errors that a library makes of those of host callbacks, outside of jit, are its own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
import pytest

import batchax as bx


def checked(x):
    return eqx.error_if(x, x > 2, "too large") * 2


def solved(x):
    residual = lambda y, _: y**2 + 1 + x
    return optx.root_find(residual, optx.Newton(1e-6, 1e-6), x, max_steps=3, throw=True).value


def error_of(vmap, fun, xs):
    with pytest.raises(RuntimeError) as caught:
        jax.block_until_ready(vmap(fun)(xs))
    return caught.value


@pytest.mark.parametrize("fun", [checked, solved])
@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 2}, {"divergence": "compact"}, {"mesh": "all"}]
)
def test_errors_are_those_of_the_library(fun, options, monkeypatch):
    monkeypatch.setenv("EQX_ON_ERROR", "raise")
    xs = jnp.arange(4.0)
    expected = error_of(jax.vmap, fun, xs)
    got = error_of(lambda f: bx.vmap(f, **options), fun, xs)
    assert type(got) is type(expected)
    assert str(got).splitlines()[0] == str(expected).splitlines()[0]


def test_errors_of_callbacks_are_those_of_jax():
    calls = []

    def refused(x):
        calls.append(float(x))
        if x > 1:
            raise ValueError("no such number")
        return np.float32(x)

    def fun(x):
        return jax.pure_callback(
            refused, jax.ShapeDtypeStruct((), np.float32), x, vmap_method="sequential"
        )

    error = error_of(bx.vmap, fun, jnp.arange(4.0, dtype="float32"))
    assert type(error) is jax.errors.JaxRuntimeError
    assert "no such number" in str(error)


def test_lanes_that_take_no_arguments():
    """They are all alike: the first is asked."""
    fun = bx.vmap(lambda: eqx.error_if(jnp.float32(1), jnp.array(True), "no"), axis_size=3)
    with pytest.raises(RuntimeError, match="no"):
        jax.block_until_ready(fun())
