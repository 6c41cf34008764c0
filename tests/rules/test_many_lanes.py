"""From how many lanes on programs run each operation as all lanes do."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import batchax as bx
from batchax.divergence.runner import Runner
from batchax.programs.thresholds import TABLE
from batchax.rules.linalg import least_lanes

from support.oracle import same

FOUR = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")


def staged(fun, *examples):
    return [jax.make_jaxpr(fun)(*examples)]


def solved(x):
    return jnp.linalg.solve(x @ x.T / 4 + jnp.eye(4, dtype=x.dtype), x)


def refined(count, x):
    """Steps that hold a decomposition."""

    def step(c):
        i, x = c
        return i + 1, solved(x)

    return lax.while_loop(lambda c: c[0] < count, step, (0, x))[1]


def test_a_window_is_wide_enough_to_run_them_so():
    way = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000))

    def notes(lanes):
        args = jnp.zeros(lanes, int), jnp.zeros((lanes, 4, 4), "float32")
        equations = bx.explain(refined, divergence=way)(*args).equations
        return next(e.notes for e in equations if e.primitive == "while")

    lanes = 1 << 16
    (width,) = notes(lanes)["widths"]
    assert least_lanes(lanes, staged(solved, FOUR)) <= width < lanes
    masked = notes(256)
    assert masked["divergence"] == "masked"
    assert "library" in masked["why"]


def test_lanes_of_a_wide_window_get_what_each_gets_alone():
    way = Runner(thresholds=TABLE["cpu-small"]._replace(max_devices=1_000, min_core_work=0.0))
    count = np.arange(4096) % 3
    x = np.random.default_rng(1).normal(size=(4096, 4, 4)).astype("float32")
    out = jax.jit(bx.vmap(refined, divergence=way))(count, x)
    expected = np.copy(x)
    for k in range(2):
        goes_on = expected[count > k]
        products = np.einsum("nij,nkj->nik", goes_on, goes_on) / 4 + np.eye(4, dtype="float32")
        expected[count > k] = np.linalg.solve(products, goes_on)
    same(out, jnp.asarray(expected), dict(rtol=1e-3, atol=1e-3))
