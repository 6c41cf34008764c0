"""`explain` of lanes on several devices: who runs what, holds what, and what is exchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax.explain.page import as_page

X, W = jnp.ones((8, 5), "float32"), jnp.ones((5, 2), "float32")


def affine(x, w):
    return jnp.tanh(x @ w)


def explained(fun, x, *others, compile=True, **options):
    in_axes = (0, *[None] * len(others))
    return bx.explain(fun, in_axes, compile=compile, **options)(x, *others)


@pytest.mark.parametrize("batch_size", [None, 1])
def test_what_lanes_compute_by_themselves_is_not_exchanged(batch_size):
    explanation = explained(affine, X, W, mesh="all", batch_size=batch_size)
    devices = explanation.devices
    assert (devices.axes, devices.count, devices.each) == (("devices",), 4, 2)
    assert (devices.repeated, devices.imbalance) == (0, 0.0)
    assert [(x.name, x.bytes) for x in devices.replicated] == [("w", 40)]
    assert devices.collectives == ()
    text = str(explanation)
    assert "devices    4 along devices: 2 lanes each\n" in text
    assert "a copy on each of w (40 B)\n" in text
    assert "exchanged: nothing\n" in text
    assert "4 along devices: 2 lanes each" in as_page(explanation)


def test_lanes_that_do_not_come_out_even_and_what_is_reduced():
    options = {"mesh": "all", "out_axes": bx.Reduce("sum")}
    explanation = explained(affine, X[:7], W, **options)
    devices = explanation.devices
    assert (devices.each, devices.repeated, devices.imbalance) == (2, 1, 1 / 8)
    assert [(c.kind, c.bytes) for c in devices.collectives] == [("all-reduce", 8)]
    assert "of which 1 in all repeat another, 12.5% of the work" in str(explanation)
    assert "exchanged: all-reduce 8 B\n" in str(explanation)


def test_what_is_sharded_over_other_axes_is_no_copy():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
    v, w = jnp.ones((2, 2), "float32"), jax.device_put(W, NamedSharding(mesh, P(None, "b")))
    devices = explained(lambda x, w: affine(x, w) @ v, X, w, mesh=(mesh, "a")).devices
    assert (devices.axes, devices.count, devices.each) == (("a",), 2, 4)
    assert [x.name for x in devices.replicated] == ["a closed-over f32[2,2]"]


def test_what_a_lane_reads_is_counted_once_though_devices_run_chunks():
    def f(t, x):
        return jax.lax.scan(lambda c, i: (c + t[i].sum(), None), 0.0, x)[0]

    table, x = jnp.ones((1000, 50)), jnp.ones((64, 10), int)
    messages = {
        finding.message
        for options in ({}, {"mesh": "all"}, {"mesh": "all", "batch_size": 4})
        for finding in bx.explain(f, (None, 0), compile=False, **options)(table, x).findings
        if "gather" in finding.kind
    }
    assert len(messages) == 1
    assert "640 windows of 50 elements" in messages.pop()
