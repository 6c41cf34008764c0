"""Short rows sorted by a network: the order of `lax.sort`, to the last bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import batchax as bx
from batchax.rules import sorting_network

from support.oracle import same

RNG = np.random.default_rng(0)
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, 1.0]
SUBNORMAL = [1e-45, -1e-45, 6e-8, -6e-8, 5e-324]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """So few elements are sorted so, three rows of seven at a time."""
    monkeypatch.setattr(sorting_network, "_LEAST", 0)
    monkeypatch.setattr(sorting_network, "_COMPILING", (0.0, 0.0))
    monkeypatch.setattr(sorting_network, "_BLOCK", 21)
    monkeypatch.setattr(sorting_network, "may_be_spread", lambda values: False)


def keys(dtype, rows, size, more=()):
    """Numbers with equal ones among them, and all that is odd of their kind."""
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        values = [*SPECIAL, *more, *RNG.normal(size=8)]
    else:
        info = jnp.iinfo(dtype)
        values = [info.min, info.max, info.max // 2 + 1, 0, 1, 2]
    return jnp.asarray(RNG.choice(np.array(values, dtype), (rows, size)))


def bits(x):
    return np.asarray(x).view(f"uint{8 * x.dtype.itemsize}")


CASES = [  # the dtypes of two keys, how many there are, what is among them
    ("float32", "int8", 7, ()),
    ("float64", "float32", 16, SUBNORMAL),
    ("bfloat16", "uint32", 3, SUBNORMAL),
    ("int64", "float16", 33, ()),
    ("uint64", "int32", 12, ()),
]


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.each_commit(1)
def test_bits_are_those_of_lax_sort(x64):
    """Stable; by one key and by two; of sizes that are powers of two, and others."""
    with jax.enable_x64(x64):
        cases = [
            (keys(one, 8, size, more), keys(other, 8, size, more), keys("uint8", 8, size))
            for one, other, size, more in CASES
        ]

        def of(vmap):
            one_key = lambda *xs: lax.sort(xs, num_keys=1)
            two = lambda *xs: lax.sort(xs, num_keys=2)
            return [
                (vmap(one_key)(*xs), vmap(two)(*xs), vmap(jnp.argsort, 1, 1)(xs[0].T))
                for xs in cases
            ]

        got, expected = jax.jit(lambda: (of(bx.vmap), of(jax.vmap)))()
        for x, y in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(bits(x), bits(y))


def test_derivatives_nests_meshes_and_what_lanes_share():
    x = jnp.asarray(RNG.normal(size=(4, 6, 5)), jnp.float32)
    weights = jnp.asarray(RNG.normal(size=5), jnp.float32)

    def of(vmap):
        by = lambda row, w: lax.sort((row, w * row, w), num_keys=1)
        loss = lambda row, w: sum(jnp.sum(jnp.sin(y) * jnp.arange(5.0)) for y in by(row, w))
        batched = vmap(vmap(by, (0, None)), (0, None))
        total = lambda x, w: vmap(vmap(loss, (0, None)), (0, None))(x, w).sum()
        return (
            batched(x, weights),
            jax.grad(total, (0, 1))(x, weights),
            jax.jvp(lambda x: batched(x, weights), [x], [jnp.cos(x)])[1],
            vmap(vmap(jax.grad(loss), (0, None)), (0, None))(x, weights),
            jax.vmap(vmap(functools.partial(jnp.argsort, axis=0), 1, 1))(x),
        )

    got, expected = jax.jit(lambda: (of(bx.vmap), of(jax.vmap)))()
    same(got, expected, dict(rtol=1e-5, atol=1e-6))

    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    on_device = jax.shard_map(
        bx.vmap(jnp.argsort), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d")
    )
    chunks = bx.vmap(jnp.argsort, batch_size=2)
    for batched in (bx.vmap(jnp.argsort), on_device, jax.jit(on_device), chunks):
        np.testing.assert_array_equal(batched(x[:, 0]), np.argsort(x[:, 0], kind="stable"))


def test_where_it_takes_less_time(monkeypatch):
    """Of many short rows that are on one device."""
    monkeypatch.undo()

    def compared(rows, size, dtype=np.float32, around=lambda f: f):
        batched = jax.jit(around(bx.vmap(jnp.argsort)))
        return ".while" not in batched.lower(jnp.ones((rows, size), dtype)).as_text()

    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("d")
    on_each = lambda f: jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    assert not compared(8192, 16, around=on_each)
    assert compared(4096, 16)  # on any of several devices
    monkeypatch.setattr(sorting_network, "may_be_spread", lambda values: False)
    assert not compared(4097, 16)
    assert compared(256, 16)
    assert compared(2600, 16)  # compiling takes longer than a hundred calls gain
    assert not compared(2600, 16, np.int32)  # of integers it takes half as long
    lowered = jax.jit(bx.vmap(jax.grad(lambda a: jnp.linalg.solve(a, a[0]).sum()))).lower
    sorts = "stablehlo.sort"  # of the permutation, by which the gradient of solve is ordered
    assert sorts not in lowered(jnp.ones((10_000, 4, 4))).as_text()
    assert sorts in lowered(jnp.ones((5_000, 4, 4))).as_text()
    assert compared(1024, 512)
    assert compared(2600, 16, np.complex64)


def test_of_a_number_of_rows_that_is_not_known():
    (b,) = jax.export.symbolic_shape("b")
    rows = jax.ShapeDtypeStruct((b, 16), np.float32)
    exported = jax.export.export(jax.jit(bx.vmap(jnp.argsort)))(rows)
    x = RNG.normal(size=(5, 16)).astype("f")
    np.testing.assert_array_equal(exported.call(x), np.argsort(x, kind="stable"))
