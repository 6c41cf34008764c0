"""Errors that a library makes of those of host callbacks, outside of jit, are its own."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import optimistix as optx
import pytest

import batchax as bx


def checked(x):
    return eqx.error_if(x, x > 2, "too large") * 2


def solved(x):
    residual = lambda y, _: y**2 + 1 + x
    return optx.root_find(residual, optx.Newton(1e-6, 1e-6), x, max_steps=3, throw=True).value


def inverted(x):
    """A program without callbacks: the primitive of the solver has one when it is lowered."""
    operator = lx.MatrixLinearOperator(jnp.diag(jnp.stack([x, x])))
    return lx.linear_solve(operator, jnp.ones(2), lx.LU()).value


def error_of(vmap, fun, xs):
    with pytest.raises(RuntimeError) as caught:
        jax.block_until_ready(vmap(fun)(xs))
    return caught.value


@pytest.mark.parametrize("fun", [checked, solved, inverted])
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"divergence": "compact"}])
@pytest.mark.each_commit(4)
def test_errors_are_those_of_the_library(fun, options, monkeypatch):
    monkeypatch.setenv("EQX_ON_ERROR", "raise")
    xs = jnp.arange(4.0)
    expected = error_of(jax.vmap, fun, xs)
    got = error_of(lambda f: bx.vmap(f, **options), fun, xs)
    assert type(got) is type(expected)
    assert str(got).splitlines()[0] == str(expected).splitlines()[0]


@pytest.mark.parametrize("around", ["grad", "vjp", "jax.vmap", "far"])
def test_errors_under_a_transformation_and_of_a_late_lane(around, monkeypatch):
    monkeypatch.setenv("EQX_ON_ERROR", "raise")
    xs = jnp.arange(4.0)
    run, xs = {
        "grad": (lambda vmap: jax.grad(lambda x: vmap(checked)(x).sum()), xs),
        "vjp": (lambda vmap: lambda x: jax.vjp(vmap(checked), x)[0], xs),
        "jax.vmap": (lambda vmap: jax.vmap(vmap(checked)), xs.reshape(2, 2)),
        "far": (lambda vmap: vmap(checked), jnp.zeros(300).at[290].set(5)),
    }[around]
    errors = [error_of(lambda f, vmap=vmap: run(vmap), checked, xs) for vmap in (jax.vmap, bx.vmap)]
    assert type(errors[0]) is type(errors[1])
    assert "too large" in str(errors[1])


def errors_in_a_process(program):
    """What a program prints, in a process of its own: there JAX raises such an error again at each
    `jax.effects_barrier`.
    """
    environment = {**os.environ, "EQX_ON_ERROR": "raise", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.stdout, done.stderr
    return done.stdout.splitlines()


def test_errors_of_operations_that_wait_for_others():
    """JAX runs them when their operands are there, which may be after the call."""
    program = """
import batchax as bx, equinox as eqx, jax, jax.numpy as jnp

@jax.jit
def late(x):
    ones = jnp.ones((700, 700), "float32")
    return x + 0 * jax.lax.fori_loop(0, 60, lambda _, y: y @ y * 1e-3, ones)[0, 0]

checked = lambda x: eqx.error_if(x, x > 2, "too large") * 2
xs = jnp.arange(4.0, dtype="float32")
pairs = lambda vmap: lambda xs: vmap(bx.vmap(checked))(xs.reshape(2, 2))
late(xs).block_until_ready()
for run in (
    bx.vmap(checked),
    pairs(bx.vmap),
    pairs(jax.vmap),
    jax.grad(lambda xs: bx.vmap(checked)(xs).sum()),
    bx.vmap(jax.grad(lambda x: checked(x) ** 2)),
):
    try:
        jax.block_until_ready(run(late(xs)))
    except Exception as error:
        print(type(error).__name__, "too large" in str(error))
"""
    assert errors_in_a_process(program) == ["EquinoxRuntimeError True"] * 5


def test_a_check_of_an_unused_value_is_not_made():
    """As in `jit`: what no result needs is not computed. The derivative needs no value here."""
    xs = jnp.arange(4.0)
    for run in (bx.vmap(jax.grad(checked)), jax.jit(jax.vmap(jax.grad(checked)))):
        assert run(xs).tolist() == [2, 2, 2, 2]


def test_over_a_mesh():
    program = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import batchax as bx, equinox as eqx, jax.numpy as jnp
try:
    bx.vmap(lambda x: eqx.error_if(x, x > 2, "too large") * 2, mesh="all")(jnp.arange(4.0))
except Exception as error:
    print(type(error).__name__, "too large" in str(error))
"""
    assert errors_in_a_process(program) == ["EquinoxRuntimeError True"]


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
