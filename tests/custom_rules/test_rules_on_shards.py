"""Functions with batching rules on a mesh of devices: inside `shard_map`, and under vmap of it."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import batchax as bx

from support.oracle import example, plainly, same
from support.user_rules import Telling

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap])
CHECKED = pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
XS, W = example((8, 3), seed=1), example((3,), seed=2)
LANES = P("d")
MESH = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))


def plain(x, w):
    return jnp.tanh(x * w) + w


def ten(x, w):
    return 10 * plain(x, w)


def on_shards(fun, checked, out_specs=LANES):
    """A function of lanes that are spread over the devices, and of what all of them have."""
    specs = (LANES, P())
    return jax.shard_map(fun, mesh=MESH, in_specs=specs, out_specs=out_specs, check_vma=checked)


def over_lanes(f, vmap):
    return vmap(f, (0, None))


def total(f):
    return lambda *args: jnp.sum(f(*args) ** 2)


OUTSIDE = {
    "value": lambda f: f,
    "grad": lambda f: jax.grad(total(f), (0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (2 * x, 3 * w)),
    "linearize": lambda f: lambda x, w: jax.linearize(f, x, w)[1](2 * x, 3 * w),
    "grad of checkpoint": lambda f: jax.grad(total(jax.checkpoint(f)), (0, 1)),
    "hvp": lambda f: lambda x, w: jax.jvp(jax.grad(total(f), (0, 1)), (x, w), (2 * x, 3 * w)),
}


@VMAPS
@pytest.mark.parametrize(
    ("which", "checked"), [*((which, True) for which in OUTSIDE), ("value", False), ("hvp", False)]
)
@pytest.mark.each_commit(6)
def test_each_device_runs_the_rule_for_its_lanes_and_a_vmap_around_for_its_own(
    vmap, checked, which
):
    f, outside = Telling(plain, ten), OUTSIDE[which]
    got = jax.jit(outside(on_shards(over_lanes(f.function, vmap), checked)))(XS, W)
    same(got, plainly(outside(over_lanes(ten, jax.vmap)), XS, W))
    assert f.seen == {(2, (True, False))}
    # And a vmap of functions on shards that have the rule: for its own lanes.
    many = jnp.stack([XS, 2 * XS, -XS])
    around = vmap(on_shards(f.function, checked), (0, None))
    got = jax.jit(outside(around))(many, W)
    same(got, plainly(outside(ten), many, W), {"rtol": 1e-4, "atol": 1e-4})
    assert {size for size, _ in f.seen} == {2, 3}


@VMAPS
@CHECKED
@pytest.mark.each_commit(2)
def test_derivatives_inside_of_shard_map(vmap, checked):
    """With `check_vma` JAX sums gradients of what all devices have over them, else not."""
    f = Telling(plain, ten)

    def step(f, vmap):  # gradients of each lane, and a mean of gradients over all devices
        def run(x, w):
            each = over_lanes(jax.grad(total(f), (0, 1)), vmap)(x, w)
            shared = jax.grad(lambda w: total(over_lanes(f, vmap))(x, w))(w)
            pushed = jax.jvp(over_lanes(f, vmap), (x, w), (2 * x, 3 * w))
            return each, lax.pmean(shared, "d"), pushed

        specs = ((LANES, LANES), P(), (LANES, LANES))
        return jax.jit(on_shards(run, checked, specs))(XS, W)

    same(step(f.function, vmap), step(ten, jax.vmap))
    assert {size for size, _ in f.seen} == {2}


@CHECKED
def test_one_example_on_each_device_is_by_the_function(checked):
    f = Telling(plain, ten)
    run = on_shards(f.function, checked)
    same(jax.jit(run)(XS, W), plain(XS, W))
    same(
        jax.jit(jax.grad(total(run), (0, 1)))(XS, W), plainly(jax.grad(total(plain), (0, 1)), XS, W)
    )
    same(
        jax.jit(jax.hessian(lambda w: total(run)(XS, w)))(W),
        plainly(jax.hessian(lambda w: total(plain)(XS, w)), W),
    )
    assert f.seen == set()


@VMAPS
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_batch_that_is_spread_over_devices(vmap, kind):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    f = Telling(plain, ten)
    under = jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext()
    with under:
        xs = jax.device_put(XS, jax.NamedSharding(mesh, P("d")))
        w = jax.device_put(W, jax.NamedSharding(mesh, P()))
        run = over_lanes(f.function, vmap)
        same(jax.device_get(jax.jit(run)(xs, w)), ten(XS, W))
        got = jax.jit(jax.grad(total(run), (0, 1)))(xs, w)
        same(jax.device_get(got), plainly(jax.grad(total(ten), (0, 1)), XS, W))
        inside = jax.jit(over_lanes(jax.grad(total(f.function)), vmap))(xs, w)
        want = over_lanes(jax.grad(total(ten)), jax.vmap)(XS, W)
        same(jax.device_get(inside), want)
    assert f.seen == {(8, (True, False))}
