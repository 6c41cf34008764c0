"""Rows inside ``jax.shard_map``: each device has rows of its own, of lengths of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx

from support.oracle import example, same
from support.rows import ways

OPTIONS = ways("auto", "padded", "buckets", "chunks", "compact")
DATA, LENGTHS, Y = example((16,)), jnp.array([3, 2, 5, 1], jnp.int32), example((4,))
SHARDS = 2


def on_shards(fun, *args):
    mesh = jax.make_mesh((SHARDS,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(*args)


def one_by_one(fun, *args):
    parts = zip(*(jnp.split(x, SHARDS) for x in args), strict=True)
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *[fun(*part) for part in parts])


def of_row(x, y):
    softened = (jax.nn.softmax(x) * jnp.sort(x)).sum()
    mean = lax.cond(y > 0, lambda: x.sum() / (x.shape[0] + 1), lambda: y)
    looped = lax.scan(lambda c, v: (c * 0.5 + jnp.sin(v), c), y, x)[0]
    return softened + mean, looped + lax.fori_loop(0, x.shape[0], lambda i, c: c + i, 0)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.each_commit(1, "padded")
def test_rows_of_each_shard(name):
    def total(over, data):
        def rows(data, lengths, y):
            return bx.vmap(of_row, **OPTIONS[name])(bx.Ragged(data, lengths, max_length=6), y)

        return sum(jnp.sum(jnp.sin(out)) for out in over(rows, data, LENGTHS, Y))

    def both(data):
        return [jax.value_and_grad(total, 1)(over, data) for over in (on_shards, one_by_one)]

    same(*jax.jit(both)(DATA))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.each_commit(3)
def test_sizes_and_tiles_of_each_shard(name):
    key = jax.random.key(0)

    def of_size(n, y):
        return (jnp.arange(n) * y).sum(), (jax.random.normal(key, (n,)) * y).sum()

    def sizes(lengths, y):
        return bx.vmap(of_size, (bx.size("n", max_size=6), 0), **OPTIONS[name])(lengths, y)

    def centred(x):
        tiles = bx.tiles(size=3, last="short")
        return bx.vmap(lambda block: block - block.mean(), tiles, tiles, **OPTIONS[name])(x)

    def both():
        return [
            (over(sizes, LENGTHS, Y), over(centred, DATA), jax.grad(squared, 1)(over, DATA))
            for over in (on_shards, one_by_one)
        ]

    def squared(over, x):
        return (over(centred, x) ** 2).sum()

    same(*jax.jit(both)())
    blocks = np.split(np.asarray(DATA), [3, 6, 8, 11, 14])
    same(one_by_one(centred, DATA), np.concatenate([b - b.mean() for b in blocks]))


@pytest.mark.parametrize("name", ["chunks", "compact"])
def test_rows_beside_an_array_that_is_sharded(name):
    rows = bx.Ragged(DATA[:11], np.asarray(LENGTHS))
    looped = lambda x, y: lax.while_loop(lambda c: c < x.sum() + y + 9, lambda c: c + 1.5, 0.0 * y)
    mesh = jax.make_mesh((SHARDS,), ("d",), axis_types=(AxisType.Auto,))
    y = jax.device_put(Y, NamedSharding(mesh, P("d")))
    same(bx.vmap(looped, **OPTIONS[name])(rows, y), bx.vmap(looped)(rows, Y))
