"""Elementwise work, shapes, reductions, running totals, transforms and random numbers."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workload import keys, normal, uniform, workload


@workload("elementwise", lambda n: (normal(n, 256),), lanes=4096)
def elementwise_chain(x):
    y = jnp.tanh(x) * jnp.exp(-x * x) + jnp.log1p(jnp.abs(x))
    return jnp.where(y > 0.5, jnp.sqrt(jnp.abs(y)), jnp.sin(y)) / (1 + y * y)


@workload(
    "elementwise",
    lambda n: (normal(n), normal(n, 256), normal(256, seed=1)),
    lanes=4096,
    in_axes=(0, 0, None),
)
def elementwise_of_mixed_ranks(scale, x, shift):
    return jnp.maximum(scale * x + shift, scale) - shift * scale


@workload(
    "elementwise",
    lambda n: (normal(64, 32, n), normal(64, n, 32)),
    lanes=256,
    in_axes=(2, -2),
    out_axes=-1,
)
def axes_not_leading(x, y):
    return jnp.tanh(x) + jnp.exp(-y * y) * jnp.mean(x, axis=0)


@workload("shapes", lambda n: (normal(n, 32, 32, 3),), lanes=256)
def image_patches(image):
    padded = jnp.pad(image, ((1, 1), (1, 1), (0, 0)))
    shifted = jnp.roll(padded, 3, axis=1)[::-1, ::2]
    joined = jnp.concatenate([image[:, ::2], shifted[:32, :16]], axis=-1)
    patches = joined.reshape(8, 4, 4, 4, 6).transpose(0, 2, 1, 3, 4)
    return jnp.tile(patches.reshape(32, -1), (1, 2))


@workload("reductions", lambda n: (normal(n, 64, 32),), lanes=512)
def reductions(x):
    return (
        jnp.sum(x, axis=0),
        jnp.mean(x),
        jnp.var(x, axis=1),
        jnp.max(x, axis=1) - jnp.min(x, axis=1),
        jnp.prod(jnp.abs(x), axis=0),
        jnp.any(x > 3),
        jnp.argmax(x, axis=1),
        jnp.argmin(x),
    )


@workload("reductions", lambda n: (normal(n, 40, 3),), lanes=256)
def distances_of_points(x):
    return jnp.linalg.norm(x[:, None] - x + 1e-6, axis=-1)


@workload(
    "reductions",
    lambda n: (normal(n, 100, 3), normal(3, 3, seed=1), normal(3, seed=2)),
    lanes=512,
    in_axes=(0, None, None),
)
def points_turned_and_moved(x, matrix, by):
    return x @ matrix + by


@workload("reductions", lambda n: (normal(n, 2),), lanes=10_000)
def nearest_of_ten_centers(x):
    return jnp.argmin(jnp.sum((x - jnp.arange(20.0).reshape(10, 2)) ** 2, -1))


@workload("reductions", lambda n: (normal(n, 3), normal(n, 3, seed=1)), lanes=10_000)
def angles_of_vectors(x, y):
    return jnp.arccos(jnp.dot(x, y) / (jnp.linalg.norm(x) * jnp.linalg.norm(y)))


@workload("reductions", lambda n: (normal(n, 1024),), lanes=1024)
def softmax_and_logsumexp(x):
    return jax.nn.softmax(x), jax.nn.logsumexp(x), jax.nn.log_softmax(x)[0]


@workload("reductions", lambda n: (normal(n, 64, 64),), lanes=32)
def running_totals(x):
    return (
        jnp.cumsum(x, axis=0),
        lax.cummax(x, axis=1, reverse=True),
        lax.cumlogsumexp(x, axis=0),
        jnp.cumprod(jnp.cos(x), axis=1),
    )


@workload("sorting", lambda n: (normal(n, 512),), lanes=256)
def sort_and_argsort(x):
    return jnp.sort(x), jnp.argsort(-x)


@workload("sorting", lambda n: (normal(n, 512), normal(n, 512, seed=1)), lanes=256)
def sort_by_two_keys(x, y):
    return lax.sort((jnp.round(x), y, x - y), num_keys=2)


@workload("sorting", lambda n: (normal(n, 512),), lanes=512)
def top_k_and_median(x):
    values, indices = lax.top_k(x, 8)
    return values, indices, jnp.median(x)


@workload("transforms", lambda n: (normal(n, 32, 32),), lanes=512)
def spectral_filter(x):
    frequencies = jnp.fft.fftfreq(32)
    spectrum = jnp.fft.fft2(x) * jnp.exp(-10 * (frequencies[:, None] ** 2 + frequencies**2))
    return jnp.fft.ifft2(spectrum).real, jnp.abs(jnp.fft.rfft(x[0]))


@workload("random", lambda n: (keys(n),), lanes=1024)
def random_normals_per_lane(key):
    return jax.random.normal(key, (256,))


@workload("random", lambda n: (keys(n), normal(n, 64)), lanes=1024)
def random_choices_per_lane(key, logits):
    choose, keep = jax.random.split(key)
    chosen = jax.random.categorical(choose, logits, shape=(16,))
    return chosen, jax.random.bernoulli(keep, 0.5, (16,))


@workload(
    "random", lambda n: (jax.random.key(0), uniform(n, low=0.5)), lanes=1024, in_axes=(None, 0)
)
def random_numbers_shared_by_lanes(key, scale):
    return scale * jax.random.normal(key, (256,))


@workload("named axis", lambda n: (normal(n, 256),), lanes=2048, axis_name="batch")
def batch_normalisation(x):
    mean = lax.pmean(x, "batch")
    variance = lax.pmean((x - mean) ** 2, "batch")
    return (x - mean) * lax.rsqrt(variance + 1e-5)


@workload(
    "named axis",
    lambda n: (normal(n, 64),),
    lanes=256,
    axis_name="batch",
)
def contrast_with_all_lanes(x):
    everyone = lax.all_gather(x, "batch")
    mine = lax.axis_index("batch")
    scores = everyone @ x
    return scores[mine] - jax.nn.logsumexp(scores), lax.pmax(scores[0], "batch")


@workload(
    "nested",
    lambda n: (normal(n, 16), normal(256, 16, seed=1)),
    lanes=512,
    nests=True,
    in_axes=(0, None),
)
def pairwise_distances(vmap, x, others):
    return vmap(lambda y: jnp.sqrt(jnp.sum((x - y) ** 2)))(others)


@workload("nested", lambda n: (normal(n, 32, 8), normal(n, 24, 8, seed=1)), lanes=128, nests=True)
def kernel_matrices(vmap, x, y):
    kernel = lambda a, b: jnp.exp(-0.5 * jnp.dot(a - b, a - b))
    return vmap(vmap(kernel, in_axes=(None, 0)), in_axes=(0, None))(x, y)
