"""Lanes that are on several devices already run there, where that spares exchanges."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax.execution.on_devices import OnDevices

from support.oracle import example, same

CLOSE = dict(rtol=1e-5, atol=1e-5)
LANES = 8


def mesh_of(kind=AxisType.Auto):
    devices = np.array(jax.devices()[:4])
    return Mesh(devices.reshape(2, 2), ("a", "b"), axis_types=(kind, kind))


def put(x, *spec, kind=AxisType.Auto):
    return jax.device_put(x, NamedSharding(mesh_of(kind), P(*spec)))


def loops(x):
    return lax.while_loop(lambda c: (c**2).sum() < 50, lambda c: c * 1.3 + 0.1, x)


EXCHANGING = {
    "while": loops,
    "in a branch": lambda x: lax.cond(x[0] > 0, loops, jnp.sin, x),
    "fft": lambda x: jnp.fft.ifft(jnp.fft.fft(x) ** 2).real,
    "top_k": lambda x: lax.top_k(x, 2),
    "igamma": lambda x: jax.scipy.special.gammainc(1 + x**2, 2.0),
    "rbg": lambda x: jax.random.normal(jax.random.wrap_key_data(bits(x), impl="rbg"), (3,)),
}


def exchanging(x):
    return {name: f(x) for name, f in EXCHANGING.items()}


def bits(x):
    return lax.bitcast_convert_type(x[:4].astype(np.float32), np.uint32)


def arrays():
    x = np.array(example((LANES, 5)))
    x[3, 1] = np.nan
    return x


@pytest.fixture
def on_devices(monkeypatch):
    """The names of the axes that lanes were run over, of each call."""
    calls, run = [], OnDevices.run

    def noted(self, call):
        calls.append(self.shards.names)
        return run(self, call)

    monkeypatch.setattr(OnDevices, "run", noted)
    return calls


def exchanges(compiled):
    return re.findall(r"= [^=]*\b((?:all|collective)-[a-z]+)(?:-start)?\(", compiled.as_text())


@pytest.mark.parametrize("spec", ["a", ("a", "b")])
def test_each_device_runs_its_lanes_outside_of_jit(spec, on_devices):
    x = arrays()
    want = jax.jit(jax.vmap(exchanging))(x)
    del want["rbg"]  # lanes of jax.vmap draw other numbers than examples do
    got = bx.vmap(exchanging)(put(x, spec))
    assert on_devices == [(spec,) if isinstance(spec, str) else spec]
    for y in jax.tree.leaves(got):
        assert y.sharding.is_equivalent_to(put(x, spec).sharding, y.ndim)
    rbg = got.pop("rbg")
    same(got, want, CLOSE)
    same(rbg, bx.vmap(EXCHANGING["rbg"])(x))


def test_where_types_tell_nothing_is_exchanged_inside_jit(on_devices):
    x = put(arrays(), "a", kind=AxisType.Explicit)
    # What JAX does not run where types tell of a mesh, in some version: random bits, igamma.
    names = ("while", "in a branch", "fft", "top_k")
    some = lambda x: {name: EXCHANGING[name](x) for name in names}
    theirs, ours = (jax.jit(vmap(some)).lower(x).compile() for vmap in (jax.vmap, bx.vmap))
    assert {"all-reduce", "all-gather"} <= set(exchanges(theirs))
    assert exchanges(ours) == []
    assert set(on_devices) == {("a",)}
    got, want = ours(x), theirs(x)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
    same(got, want, CLOSE)


@bx.custom_vmap
def with_rule(x):
    return x


@with_rule.def_vmap
def _(axis_size, in_batched, x):
    return x - x.mean(0), True


W = example((5, 5))
LEFT = {
    "nothing to spare": lambda x: jnp.sort(x @ W) + jnp.linalg.solve(jnp.eye(5) * 2, x),
    "a loop that lanes do not leave": lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x),
    "a collective": lambda x: loops(x) - lax.pmean(x, "i"),
    "a rule of the user's": lambda x: with_rule(loops(x)),
    "a result that lanes share": lambda x: (loops(x), W * 2),
    "a call of the host": lambda x: jax.pure_callback(
        lambda x: x, x, loops(x), vmap_method="expand_dims"
    ),
    "a call that returns nothing": lambda x: (jax.debug.callback(lambda x: None, x), loops(x))[1],
    "a constraint": lambda x: loops(lax.with_sharding_constraint(x, NamedSharding(mesh_of(), P()))),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_would_be_another_thing_is_left(name, on_devices):
    x, f = np.nan_to_num(arrays()), LEFT[name]
    options = dict(axis_name="i", out_axes=bx.AUTO)
    got = bx.vmap(f, **options)(put(x, "a"))
    assert on_devices == []
    same(got, bx.vmap(f, **options)(x), CLOSE)


def test_arguments_that_are_elsewhere_too_are_left(on_devices):
    x = np.nan_to_num(arrays())
    f = lambda x, y: loops(x) * y
    square = example((4, 4))
    calls = [
        (lambda x: loops(x).sum(), (0,), (put(square, "a", "b"),)),
        (f, (0, 0), (put(square, "a"), put(square, "b"))),
        (f, (0, None), (put(square, "a"), put(square[0], "b"))),
        (loops, (0,), (jax.device_put(x, jax.devices()[1]),)),
    ]
    for fun, in_axes, args in calls:
        got = bx.vmap(fun, in_axes)(*args)
        same(got, bx.vmap(fun, in_axes)(*map(np.asarray, args)), CLOSE)
    jax.jit(bx.vmap(loops))(put(x, "a"))  # the axis is one of type Auto: nothing is known
    jax.grad(lambda x: bx.vmap(lambda x: jnp.fft.fft(x).real.sum())(x).sum())(put(x, "a"))
    assert on_devices == []
