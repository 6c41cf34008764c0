"""What lanes that diverge do on a GPU without being asked: decided as there, and run here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.divergence.runner import Runner
from batchax.programs.thresholds import TABLE

from support.oracle import same

WEIGHTS = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32) / 8


@pytest.fixture
def device(monkeypatch):
    """Sets the kind of device on which programs are taken to run by default."""

    def choose(kind):
        monkeypatch.setattr(jax, "default_backend", lambda: kind)
        row = TABLE.get("cpu-small" if kind == "cpu" else kind)
        return Runner(thresholds=row and row._replace(max_devices=1_000))

    return choose


def products(count, x):
    step = lambda c: (c[0] + 1, jnp.tanh(WEIGHTS @ c[1]))
    return lax.while_loop(lambda c: c[0] < count, step, (jnp.int32(0), x))[1]


def bounded(count, x):
    step = lambda c: (c[0] + 1, jnp.tanh(WEIGHTS @ c[1]))
    return bx.bounded_while(lambda c: c[0] < count, step, (jnp.int32(0), x), 30)[1]


def cheap(count, x):
    step = lambda c: (c[0] + 1, jnp.sin(c[1]))
    return lax.while_loop(lambda c: c[0] < count, step, (jnp.int32(0), x))[1]


def nest(count, x):
    """A loop in each step of another, whose counts differ by lane and step."""

    def step(x, k):
        x = products((count * k) % 7, x)
        return x, x[0]

    return lax.scan(step, x, jnp.arange(4, dtype=jnp.int32))


def expensive(times):
    """A branch of so many products that some lanes take."""

    def branch(x):
        for _ in range(times):
            x = jnp.tanh(WEIGHTS @ x)
        return x

    return lambda count, x: lax.cond(count > 3, branch, lambda x: 2 * x, x)


def seldom(times):
    """The same in each step of a loop."""

    def of_steps(count, x):
        step = lambda x, k: (expensive(times)((count * k) % 5, x), None)
        return lax.scan(step, x, jnp.arange(4, dtype=jnp.int32))[0]

    return of_steps


def told(fun, lanes, how):
    args = jnp.zeros(lanes, jnp.int32), jnp.zeros((lanes, 64), jnp.float32)
    notes = notes_of(fun, how, args)
    return notes.get("divergence", "masked"), notes.get("widths", ()), notes


def notes_of(fun, how, args):
    """Those of the first loop or branch in which lanes may part."""
    equations = bx.explain(fun, divergence=how)(*args).equations
    return next((e.notes for e in equations if {"divergence", "why"} & set(e.notes)), {})


def test_what_pays_there(device):
    how = device("gpu")
    # A step takes as long for a thousand lanes as for one: the last lanes save nothing alone.
    assert told(products, 4096, how)[:2] == ("masked", ())
    assert told(products, 65_536, how)[:2] == ("compact", (65_536, 8192))
    assert told(bounded, 65_536, how)[:2] == ("compact", (65_536, 8192))
    assert told(cheap, 65_536, how)[:2] == ("masked", ())
    # Nobody waits for others at each step of a loop around, however few lanes there are.
    assert told(nest, 64, how)[:2] == ("flat", (64,))
    # What few lanes take costs all lanes little, if it costs much to begin.
    assert told(expensive(20), 8192, how)[0] == "masked"
    assert "110 us for all lanes" in str(told(expensive(20), 8192, how)[2]["why"])
    assert told(expensive(20), 131_072, how)[2]["decided"] == [1]


def test_elsewhere_all_is_masked(device):
    how = device("tpu")
    for fun in (products, bounded, nest, expensive(20)):
        assert told(fun, 65_536, how)[0] == "masked"
    assert told(products, 65_536, how)[2]["why"] == "what pays is measured on CPUs and GPUs alone"


def test_results_are_those_of_masked_lanes(device):
    device("gpu")
    limits = TABLE["gpu"]._replace(
        max_devices=1_000,
        min_tail_gain=0.0,
        min_work=0.0,
        min_branch_work=0.0,
        min_gain_per_operation=0.0,
    )
    how = Runner(
        thresholds=limits._replace(min_gain=0.0, min_unfused_share=0.0, window_shares=(2,))
    )
    counts = jnp.asarray([3, 0, 29, 7, 5, 1, 0, 12, 4], jnp.int32)
    points = np.random.default_rng(1).normal(size=(9, 64)).astype(np.float32)
    points[2, 5] = np.nan
    points = jnp.asarray(points)

    def everything(vmap):
        def gradient(fun):
            total = lambda x: jnp.sum(jnp.sin(vmap(fun)(counts, x)))
            return jax.grad(total)(points)

        values = [
            vmap(fun)(counts, points) for fun in (products, cheap, bounded, nest, expensive(2))
        ]
        tangent = jax.jvp(lambda x: vmap(nest)(counts, x), (points,), (points,))[1]
        outer = jax.vmap(lambda x: vmap(seldom(2))(counts, x))(jnp.stack([points, points + 1]))
        return (
            values,
            tangent,
            outer,
            gradient(bounded),
            gradient(expensive(2)),
            gradient(seldom(2)),
        )

    parted = lambda fun: bx.vmap(fun, divergence=how)
    for fun, expected in ((nest, "flat"), (products, "compact"), (expensive(2), "grouped")):
        assert notes_of(fun, how, (counts, points))["divergence"] == expected
    run = lambda vmap: jax.jit(lambda: everything(vmap))()
    same(run(parted), run(jax.vmap), None)
