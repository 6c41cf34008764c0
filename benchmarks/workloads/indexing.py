"""Reading and writing by index."""

import jax.numpy as jnp
from jax import lax

from benchmarks.workload import integers, normal, workload

FAMILY = "indexing"


@workload(
    FAMILY, lambda n: (normal(1000, 64), integers(n, 32, below=1000)), lanes=512, in_axes=(None, 0)
)
def embedding_lookup(table, tokens):
    return table[tokens] * 8.0


@workload(FAMILY, lambda n: (normal(n, 128, 16), integers(n, 32, below=128)), lanes=512)
def lookup_in_own_table(table, rows):
    return table[rows], table[rows, rows % 16]


@workload(FAMILY, lambda n: (normal(n, 256), normal(n, 32, 8)), lanes=512)
def take_along_own_order(x, y):
    order = jnp.argsort(y, axis=0)
    return jnp.take_along_axis(y, order, axis=0), x[jnp.argmax(x)]


@workload(FAMILY, lambda n: (integers(n, 256, below=64), normal(n, 256)), lanes=256)
def histogram(bins, weights):
    return jnp.bincount(bins, length=64), jnp.zeros(64).at[bins].add(weights)


@workload(
    FAMILY,
    lambda n: (normal(64, 8), integers(n, 32, below=64), normal(n, 32, 8)),
    lanes=256,
    in_axes=(None, 0, 0),
)
def scatter_into_shared_array(x, rows, updates):
    return x.at[rows].max(updates), x.at[rows[0], 2].set(0.0)


@workload(FAMILY, lambda n: (normal(n, 256), integers(n, below=192), normal(n, 8)), lanes=2048)
def slice_and_update_where_the_lane_says(x, start, new):
    window = lax.dynamic_slice(x, (start,), (64,))
    return window.sum(), lax.dynamic_update_slice(x, new, (start,)), x[start]


@workload(FAMILY, lambda n: (normal(n, 256), jnp.int32(17)), lanes=2048, in_axes=(0, None))
def slice_and_update_at_a_shared_place(x, start):
    window = lax.dynamic_slice(x, (start,), (64,))
    return lax.dynamic_update_slice(x, window * 2, (start + 64,)), x[5:200:3]


@workload(
    FAMILY,
    lambda n: (normal(n, 64), normal(128), normal(128, seed=1)),
    lanes=512,
    in_axes=(0, None, None),
)
def interpolation_in_a_shared_table(x, xs, ys):
    return jnp.interp(x, jnp.sort(xs), ys), jnp.searchsorted(jnp.sort(xs), x)
