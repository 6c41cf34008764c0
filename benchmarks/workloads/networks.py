"""Layers and networks, forward."""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

import batchax as bx
from benchmarks.workload import normal, workload

FAMILY = "networks"


def mlp_parameters(*sizes):
    return [
        (normal(a, b, seed=i) / a**0.5, normal(b, seed=i) / 10)
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]


def mlp(parameters, x):
    for w, b in parameters[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = parameters[-1]
    return x @ w + b


def attention_parameters(width):
    return [normal(width, width, seed=i) / width**0.5 for i in range(4)]


def self_attention(parameters, x, heads=4):
    wq, wk, wv, wo = parameters
    length, width = x.shape
    q, k, v = ((x @ w).reshape(length, heads, -1) for w in (wq, wk, wv))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -1e9)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(length, width) @ wo


def normalised(x):
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.var(x, axis=-1, keepdims=True) + 1e-5)


@workload(
    FAMILY,
    lambda n: (normal(n, 512), normal(512), normal(512)),
    lanes=1024,
    in_axes=(0, None, None),
)
def layer_norm(x, gain, bias):
    return normalised(x) * gain + bias


@workload(
    FAMILY,
    lambda n: (mlp_parameters(64, 128, 128, 10), normal(n, 64)),
    lanes=1024,
    in_axes=(None, 0),
)
def mlp_forward(parameters, x):
    return mlp(parameters, x)


@workload(
    FAMILY,
    lambda n: (
        jax.tree.map(lambda p: p + jnp.zeros((n,) + (1,) * p.ndim), mlp_parameters(16, 32, 4)),
        normal(32, 16),
    ),
    lanes=64,
    in_axes=(0, None),
)
def ensemble_of_mlps(parameters, xs):
    return mlp(parameters, xs)


@workload(
    FAMILY, lambda n: (attention_parameters(64), normal(n, 32, 64)), lanes=64, in_axes=(None, 0)
)
def attention_block(parameters, x):
    return x + self_attention(parameters, normalised(x))


@workload(FAMILY, lambda n: (normal(3, 3, 3, 8), normal(n, 32, 32, 3)), lanes=32, in_axes=(None, 0))
def convolution_of_images(kernel, image):
    return convolve(image[None], kernel)[0]


@workload(
    FAMILY, lambda n: (normal(n, 3, 3, 3, 8), normal(4, 16, 16, 3)), lanes=16, in_axes=(0, None)
)
def convolution_with_own_kernels(kernel, images):
    return convolve(images, kernel)


@workload(FAMILY, lambda n: (normal(n, 3, 3, 3, 8), normal(n, 16, 16, 3)), lanes=16)
def convolution_of_images_with_own_kernels(kernel, image):
    return convolve(image[None], kernel)[0]


@workload(FAMILY, lambda n: (normal(n, 3, 3, 1, 8), normal(n, 28, 28, 1)), lanes=64)
def convolution_of_grey_images_with_own_kernels(kernel, image):
    return convolve(image[None], kernel)[0]


@workload(
    FAMILY, lambda n: (normal(3, 3, 16, 32), normal(n, 14, 14, 16)), lanes=64, in_axes=(None, 0)
)
def gradient_of_each_example_of_a_kernel(kernel, image):
    return jax.grad(lambda kernel: jnp.sum(jnp.tanh(convolve(image[None], kernel))))(kernel)


def convolve(images, kernel):
    return lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@workload(
    FAMILY,
    lambda n: ((normal(32, 32), normal(16, 32)), normal(n, 20, 16)),
    lanes=256,
    in_axes=(None, 0),
)
def recurrent_network(parameters, xs):
    w, u = parameters

    def step(h, x):
        h = jnp.tanh(h @ w * 0.1 + x @ u)
        return h, jnp.sum(h)

    return lax.scan(step, jnp.zeros(32), xs)


def reshaped(f):
    """Attention in blocks of 64 as written with `jax.vmap`."""
    return lambda tokens: jax.vmap(f)(tokens.reshape(-1, 64, 32)).reshape(-1, 32)


@workload(
    FAMILY,
    lambda n: (normal(n * 64, 32),),
    lanes=64,
    by_hand=reshaped,
    in_axes=bx.tiles(size=64),
    out_axes=bx.tiles(),
)
def local_attention_in_tiles(block):
    return jax.nn.softmax(block @ block.T / 32**0.5) @ block
