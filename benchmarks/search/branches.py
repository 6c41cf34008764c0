"""Branches that lanes take by themselves, in loops and around them, and loops in loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.search.drafted import COUNTS, GRADIENT, VALUES, draft
from benchmarks.search.loops import _matrix
from benchmarks.workload import integers, keys, normal, uniform

BOTH = VALUES, GRADIENT


def _often(f: Callable[[Any], Any], times: int) -> Callable[[Any], Any]:
    def branch(x: Any) -> Any:
        for _ in range(times):
            x = f(x)
        return x

    return branch


def _products(times: int) -> Callable[[Any], Any]:
    return _often(lambda x: jnp.tanh(_matrix(x.size) @ x), times)


def _looped(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.fori_loop(0, 20, lambda _, x: f(x), x)


def _switch(branches: Sequence[Callable[[Any], Any]]) -> Callable[..., Any]:
    return lambda index, x: lax.switch(index, list(branches), x)


def _some(share: float, shape: tuple[int, ...]) -> Callable[[int], tuple[Any, ...]]:
    return lambda n: ((uniform(n) < share).astype(int), normal(n, *shape, seed=1))


def _any_of(count: int, shape: tuple[int, ...]) -> Callable[[int], tuple[Any, ...]]:
    return lambda n: (integers(n, below=count), normal(n, *shape, seed=1))


# A branch of each cost that a tenth of the lanes take, or all.

COSTS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], int, tuple[str, ...]]] = {
    "a product with itself": (lambda x: x * x, (64,), 1024, BOTH),
    "20 sines": (_often(jnp.sin, 20), (64,), 1024, BOTH),
    "one product": (_products(1), (64,), 512, BOTH),
    "ten products": (_products(10), (64,), 1024, BOTH),
    "a loop of products": (_looped(lambda x: jnp.tanh(_matrix(32) @ x)), (32,), 512, BOTH),
    "a sort": (jnp.sort, (256,), 256, (VALUES,)),
    "a loop": (_looped(lambda x: jnp.cos(x) + 0.1), (16,), 2048, BOTH),
    "eigenvalues": (lambda x: jnp.linalg.eigh(x + x.T)[1], (8, 8), 128, (VALUES,)),
    "singular values": (lambda x: jnp.linalg.svd(x)[0], (8, 8), 128, (VALUES,)),
    "a pseudoinverse": (jnp.linalg.pinv, (8, 8), 128, (VALUES,)),
}
for _name, (_branch, _shape, _lanes, _uses) in COSTS.items():
    _data = {"of a tenth": _some(0.1, _shape), "of all": _some(2.0, _shape)}
    _cond = _switch([lambda x: x, _branch])
    draft("cond", _name, _cond, _data, _lanes, uses=_uses, wrt=1)

_CHEAP = [jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.square, jnp.negative, jnp.abs, jnp.cbrt]
_TEN = [*_CHEAP, lambda x: x + 1, lambda x: 2 * x]
_LAYERS = [lambda x, k=k: jnp.tanh(normal(32, 32, seed=k) @ x / 6) for k in range(8)]

draft("switch", "ten cheap", _switch(_TEN), _any_of(10, (64,)), 128, 4096, uses=BOTH, wrt=1)
draft("switch", "three of scalars", _switch(_CHEAP[:3]), _any_of(3, ()), 65536, uses=BOTH, wrt=1)
draft("switch", "products", _switch(_LAYERS), _any_of(8, (32,)), 256, 4096, uses=BOTH, wrt=1)


def experts(weights: Any, index: Any, x: Any) -> Any:
    """A mixture of experts: two layers, whose weights are those of the expert."""
    expert = lambda k: lambda x: jax.nn.relu(x @ weights[0][k]) @ weights[1][k]
    return lax.switch(index, [expert(k) for k in range(8)], x)


def _experts(n: int) -> tuple[Any, ...]:
    weights = normal(8, 32, 64) / 6, normal(8, 64, 32, seed=1) / 8
    return weights, integers(n, below=8), normal(n, 32, seed=2)


draft("switch", "experts", experts, _experts, 64, uses=BOTH, wrt=2, in_axes=(None, 0, 0))


def augmented(key: Any, image: Any) -> Any:
    """One of six augmentations."""
    noise = lambda x: x + 0.1 * jax.random.normal(key, x.shape)
    blurred = lambda x: (x + jnp.roll(x, 1, 0) + jnp.roll(x, -1, 0)) / 3
    hidden = lambda x: lax.dynamic_update_slice(x, jnp.zeros((8, 8, 3)), (4, 4, 0))
    kinds = [lambda x: x, lambda x: x[:, ::-1], jnp.rot90, lambda x: 1.2 * x, noise, blurred]
    return hidden(lax.switch(jax.random.randint(key, (), 0, 6), kinds, image))


def cropped(key: Any, image: Any) -> Any:
    """A random crop of the padded image, flipped for half of the lanes."""
    where, flip = jax.random.split(key)
    start = jax.random.randint(where, (2,), 0, 9)
    padded = jnp.pad(image, ((4, 4), (4, 4), (0, 0)))
    crop = lax.dynamic_slice(padded, (start[0], start[1], 0), image.shape)
    return lax.cond(jax.random.bernoulli(flip), lambda x: x[:, ::-1], lambda x: x, crop)


_images = lambda n: (keys(n), uniform(n, 32, 32, 3))
draft("images", "crop and flip", cropped, _images, 64, 512)
draft("images", "one of six augmentations", augmented, _images, 64, 512)


# Branches in loops.


def cond_in_scan(x: Any) -> Any:
    def step(x: Any, _: Any) -> Any:
        x = lax.cond(x[0] > 0, lambda x: jnp.sin(x) - 0.5, lambda x: x + 0.3, x)
        return x, x[0]

    return lax.scan(step, x, None, length=20)


def products_in_scan(x: Any) -> Any:
    def step(x: Any, _: Any) -> Any:
        return lax.cond(x[0] > 0.9, _products(5), lambda x: 0.9 * x + 0.1, x), None

    return lax.scan(step, x, None, length=20)[0]


def environment(key: Any, place: Any) -> Any:
    """Steps of a walk that starts again at a place that takes 30 products to draw."""

    def reset(key: Any) -> Any:
        return lax.fori_loop(0, 30, lambda _, x: jnp.tanh(_matrix(16) @ x), normal_of(key))

    normal_of = lambda key: jax.random.normal(key, (16,))

    def step(state: Any, key: Any) -> Any:
        x = state + 0.3 * normal_of(key)
        done = jnp.abs(x[0]) > 1.5
        x = lax.cond(done, reset, lambda _: x, key)
        return x, (x[0], done)

    return lax.scan(step, place, jax.random.split(key, 30))


draft("scan", "cond", cond_in_scan, lambda n: (normal(n, 16),), 64, 2048, uses=BOTH)
draft("scan", "cond of products", products_in_scan, lambda n: (normal(n, 32),), 256, uses=BOTH)
draft("scan", "environment", environment, lambda n: (keys(n), normal(n, 16)), 64, 512)


# Loops in loops.


def halving(x: Any, count: Any) -> Any:
    """A step that is halved until it is short enough, in a loop: a line search."""

    def step(s: Any) -> Any:
        i, x = s
        h = lax.while_loop(lambda h: h * jnp.abs(x) > 0.3, lambda h: h / 2, jnp.ones_like(x))
        return i + 1, x - h * jnp.sin(x)

    return lax.while_loop(lambda s: s[0] < count, step, (jnp.int32(0), x))[1]


def while_in_scan(counts: Any, x: Any) -> Any:
    def step(x: Any, count: Any) -> Any:
        body = lambda s: (s[0] + 1, jnp.tanh(_matrix(x.size) @ s[1]))
        x = lax.while_loop(lambda s: s[0] < count, body, (jnp.int32(0), x))[1]
        return x, x[0]

    return lax.scan(step, x, counts)


def scan_in_while(count: Any, x: Any) -> Any:
    inner = lambda x: lax.scan(lambda x, _: (jnp.sin(x) + 0.1, None), x, None, length=5)[0]
    body = lambda s: (s[0] + 1, inner(s[1]))
    return lax.while_loop(lambda s: s[0] < count, body, (jnp.int32(0), x))[1]


def cond_around_while(count: Any, x: Any) -> Any:
    def loop(x: Any) -> Any:
        body = lambda s: (s[0] + 1, jnp.cos(s[1]) + 0.1)
        return lax.while_loop(lambda s: s[0] < count, body, (jnp.int32(0), x))[1]

    return lax.cond(count % 4 > 0, loop, jnp.negative, x)


def triangle(size: Any, x: Any) -> Any:
    """Insertion sort of the first elements."""

    def insert(i: Any, x: Any) -> Any:
        going = lambda s: (s[0] > 0) & (s[1][s[0] - 1] > s[1][s[0]])

        def swap(s: Any) -> Any:
            j, x = s
            a, b = x[j - 1], x[j]
            return j - 1, x.at[j - 1].set(b).at[j].set(a)

        return lax.while_loop(going, swap, (i, x))[1]

    return lax.fori_loop(1, jnp.minimum(size, x.size), insert, x)


def inner_bound(vmap: Any, count: Any, xs: Any) -> Any:
    """The bound of a loop in the inner of two `vmap`."""
    inner = lambda x: lax.fori_loop(0, count, lambda _, x: jnp.sin(x) + 0.1, x)
    return vmap(inner)(xs)


def inner_counts(vmap: Any, counts: Any, xs: Any) -> Any:
    def inner(count: Any, x: Any) -> Any:
        body = lambda s: (s[0] + 1, jnp.tanh(s[1] + 0.1))
        return lax.while_loop(lambda s: s[0] < count, body, (jnp.int32(0), x))[1]

    return vmap(inner)(counts, xs)


def _with(*shape: int) -> dict[str, Any]:
    return {
        kind: lambda n, counts=counts: (counts(n), normal(n, *shape))
        for kind, counts in COUNTS.items()
    }


def _many(inner: int, *shape: int) -> dict[str, Any]:
    return {
        kind: lambda n, counts=counts: (counts(n * inner).reshape(n, inner), normal(n, *shape))
        for kind, counts in COUNTS.items()
    }


_two = lambda data: {kind: data[kind] for kind in ("equal counts", "heavy tail")}
_reversed = {k: lambda n, c=c: (4 * normal(n), c(n)) for k, c in COUNTS.items()}
draft("nested loop", "halving while in a while", halving, _two(_reversed), 16, 64, 4096)
draft("nested loop", "while of products in a scan", while_in_scan, _two(_many(8, 16)), 64, 512)
draft("nested loop", "scan in a while", scan_in_while, _two(_with(16)), 64, 1024)
draft("nested loop", "cond around a while", cond_around_while, _two(_with(16)), 256)
draft("nested loop", "insertion sort", triangle, {"1 to 19 steps": _with(24)["1 to 19 steps"]}, 128)
draft("nested loop", "bound of the inner vmap", inner_bound, _two(_with(32, 4)), 64, nests=True)
draft(
    "nested loop", "counts of the inner vmap", inner_counts, _two(_many(32, 32, 4)), 32, nests=True
)
