"""`split_key`: one random key becomes a key for each lane."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx

from support.kinds_of_axis import check_kind
from support.oracle import example, same

TYPED, RAW = jax.random.key(3), jax.random.PRNGKey(3)
X = example((7,), seed=1)


def noisy(key, x):
    return jnp.sin(x) * jax.random.normal(key, (2,))


def each(fun, key, *xs):
    """`fun` of each example, with the key of its lane; random bits take long to compile."""
    lanes = jnp.arange(len(xs[0]))
    return jax.lax.map(lambda a: fun(jax.random.fold_in(key, a[0]), *a[1]), (lanes, xs))


@pytest.mark.parametrize("key", [TYPED, RAW], ids=["typed", "raw"])
@pytest.mark.each_commit(1)
def test_a_key_that_is_an_argument_by_name(key):
    check_kind(
        lambda **options: bx.vmap(noisy, {"key": bx.split_key}, **options),
        lambda key, x: each(noisy, key, x),
        key,
        X,
        derivatives=False,
    )


def test_nothing_else_is_mapped():
    got = bx.vmap(jax.random.normal, bx.split_key, axis_size=5)(TYPED)
    same(got, each(lambda key, _: jax.random.normal(key), TYPED, jnp.zeros(5)))
    assert bx.vmap(jax.random.normal, bx.split_key, axis_size=0)(TYPED).shape == (0,)


def test_lanes_that_leave_a_loop():
    """A lane keeps its key when it takes another's place."""

    def walk(key, bound):
        step = lambda s: (s[0] + 1, s[1] + jax.random.normal(jax.random.fold_in(key, s[0])))
        return jax.lax.while_loop(lambda s: s[0] < bound, step, (0, 0.0))[1]

    bounds = jnp.array([3, 40, 1, 0, 17, 5, 2, 60], jnp.int32)
    expected = each(walk, TYPED, bounds)
    for divergence in ("predicate", bx.Compact(width=2)):
        got = bx.vmap(walk, (bx.split_key, 0), divergence=divergence)(TYPED, bounds)
        same(got, expected)


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.each_commit(1)
def test_on_a_mesh(kind, options):
    """Lanes are counted over all shards."""
    devices = jax.devices()[:4]
    x = example((8,), seed=5)
    expected = each(noisy, TYPED, x)
    mesh = jax.make_mesh((4,), ("d",), (kind,), devices=devices)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("d")))
        for run in (lambda f: f, jax.jit):
            got = run(bx.vmap(noisy, (bx.split_key, 0), **options))(TYPED, sharded)
            same(jax.device_get(got), expected)


def test_keys_that_are_sharded_by_their_types():
    """From JAX 0.12 on functions of `jax.random` leave types with meshes, and come back."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Explicit,), devices=devices)
    with jax.set_mesh(mesh):
        keys = jax.device_put(jax.random.split(TYPED, 4), NamedSharding(mesh, P("d")))
        got = jax.jit(bx.vmap(lambda key: jax.random.normal(key, (2,))))(keys)
        assert jax.typeof(got).sharding.spec[0] == "d"
        expected = jnp.stack([jax.random.normal(k, (2,)) for k in jax.random.split(TYPED, 4)])
        same(jax.device_get(got), jax.device_get(expected))


def test_on_a_mesh_that_is_not_set():
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("d",), (AxisType.Explicit,), devices=devices)
    x = jax.device_put(example((4,), seed=5), NamedSharding(mesh, P("d")))
    message = r"key needs the index of each lane, and x is sharded over 'd'.*set_mesh"
    with pytest.raises(bx.UnsupportedError, match=message):
        bx.vmap(noisy, (bx.split_key, 0))(TYPED, x)


def test_steps_of_a_scan():
    step = lambda c, key: (c + jax.random.normal(key), c)
    carry, ys = bx.scan(step, bx.split_key, length=4)(0.0, TYPED)
    draws = [jax.random.normal(jax.random.fold_in(TYPED, i)) for i in range(4)]
    same(carry, sum(draws, jnp.zeros(())))
    assert ys.shape == (4,)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
@pytest.mark.each_commit(1)
def test_keys_of_streams_draw_what_an_example_draws(impl):
    key = jax.random.key(7, impl=impl)
    draw = lambda key, x: (jax.random.normal(key, (3,)) + x, jax.random.bits(key))
    expected = each(draw, key, X)
    for options in ({}, dict(batch_size=3), dict(mesh="all")):
        same(jax.jit(bx.vmap(draw, (bx.split_key, 0), **options))(key, X), expected)
    keys = jnp.stack([jax.random.fold_in(key, i) for i in range(len(X))])
    theirs = jax.vmap(draw)(keys, X)
    assert not np.array_equal(theirs[1], expected[1])  # which is why it is said


REFUSED = {
    "keys": (
        lambda: bx.vmap(noisy, (bx.split_key, 0))(jax.random.split(TYPED, 7), X),
        "key, which is an array of shape (7,) and dtype key<fry>: it takes one random key",
    ),
    "numbers": (lambda: bx.vmap(noisy, (bx.split_key, 0))(X, X), "it takes one random key"),
    "no array": (lambda: bx.vmap(noisy, (bx.split_key, 0))("key", X), "of type str: it takes one"),
    "alone": (lambda: bx.vmap(jax.random.normal, bx.split_key)(TYPED), "Pass axis_size"),
    "an output": (
        lambda: bx.vmap(noisy, (0, 0), bx.split_key)(jax.random.split(TYPED, 7), X),
        "out_axes gives batchax.split_key for out: that kind of axis is for arguments",
    ),
    "a tree of keys": (
        lambda: bx.vmap(lambda keys: 1.0, bx.split_key, axis_size=2)([TYPED, X]),
        "keys[1]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    with pytest.raises((bx.AxisError, bx.ArgumentTypeError), match=re.escape(message)):
        call()
