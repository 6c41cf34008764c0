"""Errors of host callbacks, outside of jit, are raised by the call, with what the callback says."""

import os
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx


def checked(x):
    return eqx.error_if(x, x > 2, "too large") * 2


@pytest.mark.parametrize(
    "run",
    [
        bx.vmap(checked),
        bx.vmap(checked, batch_size=2),
        bx.vmap(checked, divergence="compact"),
        jax.grad(lambda x: bx.vmap(checked)(x).sum()),
        lambda x: jax.vmap(bx.vmap(checked))(x.reshape(2, 2)),
    ],
    ids=["plain", "chunks", "compact", "grad", "jax.vmap"],
)
@pytest.mark.each_commit(2)
def test_errors_say_what_the_library_says(run, monkeypatch):
    monkeypatch.setenv("EQX_ON_ERROR", "raise")
    with pytest.raises(RuntimeError, match="too large"):
        jax.block_until_ready(run(jnp.arange(4.0)))


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
        print("too large" in str(error))
"""
    assert errors_in_a_process(program) == ["True"] * 5


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
    print("too large" in str(error))
"""
    assert errors_in_a_process(program) == ["True"]


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

    with pytest.raises(jax.errors.JaxRuntimeError, match="no such number"):
        bx.vmap(fun)(jnp.arange(4.0, dtype="float32"))
