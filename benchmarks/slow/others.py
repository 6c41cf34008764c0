"""Convolutions, sorts, scans along another axis, and random bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import batchax as bx
from benchmarks.slow.workload import HAND, Slow
from benchmarks.workload import normal

DIMENSIONS = ("NCHW", "OIHW", "NCHW")


def convolve(kernel: Any, image: Any) -> Any:
    out = lax.conv_general_dilated(
        image[None], kernel, (1, 1), "SAME", dimension_numbers=DIMENSIONS
    )
    return out[0]


def patches(image: Any, size: int) -> Any:
    """What the kernel sees at each place: [lanes, channels, size * size, places]."""
    n, c, h, w = image.shape
    half = size // 2
    padded = jnp.pad(image, ((0, 0), (0, 0), (half, half), (half, half)))
    slices = [padded[:, :, i : i + h, j : j + w] for i in range(size) for j in range(size)]
    return jnp.stack(slices, 2).reshape(n, c, size * size, h * w)


def own_kernels_by_hand(kernel: Any, image: Any) -> Any:
    n, o, c, size, _ = kernel.shape
    flat = kernel.reshape(n, o, c * size * size)
    seen = patches(image, size).reshape(n, c * size * size, -1)
    return (flat @ seen).reshape(n, o, *image.shape[2:])


def kernel_gradient(kernel: Any, image: Any) -> Any:
    return jax.grad(lambda kernel: (convolve(kernel, image) ** 2).sum())(kernel)


def kernel_gradients_by_hand(kernel: Any, image: Any) -> Any:
    (o, c, size, _), n = kernel.shape, len(image)
    seen = patches(image, size).reshape(n, c * size * size, -1)
    out = kernel.reshape(o, -1) @ seen
    return (2 * out @ jnp.swapaxes(seen, 1, 2)).reshape(n, *kernel.shape)


def sort_by_hand(x: Any) -> Any:
    return lax.sort(x.T, dimension=0, is_stable=False).T


def shuffle_by_hand(key: Any, x: Any) -> Any:
    return x[:, jax.random.permutation(key, jnp.arange(x.shape[1]))]


def argsort_by_hand(x: Any) -> Any:
    """With the rows last: what is compared is the same."""
    places = lax.broadcasted_iota("int32", x.T.shape, 0)
    return lax.sort((x.T, places), dimension=0, num_keys=1)[1].T


def top_by_hand(x: Any) -> Any:
    return lax.sort(x, is_stable=False)[:, : -TOP - 1 : -1]


TOP = 128


def decay(carry: Any, x: Any) -> Any:
    carry = jnp.tanh(0.9 * carry + x)
    return carry, carry


def scan_gradient(init: Any, xs: Any) -> Any:
    """Of a loop along the last axis."""

    def total(xs: Any) -> Any:
        return (bx.scan(decay, in_axes=-1, out_axes=-1)(init, xs)[1] ** 2).sum()

    return jax.grad(total)(xs)


def scan_by_hand(init: Any, xs: Any) -> Any:
    def total(xs: Any) -> Any:
        return (jnp.moveaxis(lax.scan(decay, init, jnp.moveaxis(xs, -1, 0))[1], 0, -1) ** 2).sum()

    return jax.grad(total)(xs)


def draw(key: Any) -> Any:
    return jax.random.normal(key, (64,))


def draw_by_hand(keys: Any) -> Any:
    return lax.map(draw, keys)


WORKLOADS = [
    Slow(
        "a kernel for each image",
        "Convolutions",
        convolve,
        own_kernels_by_hand,
        lambda n: (normal(n, 16, 8, 3, 3), normal(n, 8, 16, 16, seed=1)),
        lanes=512,
        goal=0.8,
    ),
    Slow(
        "a kernel's gradient for each image",
        "Convolutions",
        kernel_gradient,
        kernel_gradients_by_hand,
        lambda n: (normal(16, 8, 3, 3), normal(n, 8, 16, 16, seed=1)),
        lanes=512,
        goal=0.65,
        in_axes=(None, 0),
    ),
    *(
        Slow(
            f"sort of rows of {size}",
            "Sorting",
            jnp.sort,
            sort_by_hand,
            lambda n, size=size: (normal(n, size),),
            lanes=10_000,
            goal=1.0,
            rival=HAND,
        )
        for size in (16, 128)
    ),
    Slow(
        "argsort of rows of 16",
        "Sorting",
        jnp.argsort,
        argsort_by_hand,
        lambda n: (normal(n, 16),),
        lanes=10_000,
        goal=0.3,
    ),
    Slow(
        "rows of 64 shuffled by one key",
        "Sorting",
        lambda key, x: jax.random.permutation(key, x),
        shuffle_by_hand,
        lambda n: (jax.random.key(0), normal(n, 64)),
        lanes=10_000,
        goal=0.1,
        in_axes=(None, 0),
    ),
    Slow(
        f"top {TOP} of 1,024",
        "Sorting",
        lambda x: lax.top_k(x, TOP)[0],
        top_by_hand,
        lambda n: (normal(n, 1024),),
        lanes=1_000,
        goal=1.0,
        rival=HAND,
    ),
    Slow(
        "gradient of a scan along the last axis",
        "Scans",
        scan_gradient,
        scan_by_hand,
        lambda n: (jnp.zeros(n), normal(n, 512)),
        lanes=256,
        goal=1.0,
        rival=HAND,
        batched=False,
    ),
    Slow(
        "normals of rbg keys",
        "Random bits",
        draw,
        draw_by_hand,
        lambda n: (jax.random.split(jax.random.key(0, impl="rbg"), n),),
        lanes=10_000,
        goal=1.0,
    ),
]
