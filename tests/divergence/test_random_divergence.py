"""Drawn programs of loops and branches: lanes that diverge compute what masked ones do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support import forced
from support.oracle import same

N = 13
WAYS = [bx.Compact(width=2), forced.DECIDED, bx.Compact(width=4, threshold=0.25), forced.FORCED]
WAYS += [forced.KERNELS, forced.LAST, forced.ALONE, forced.MASKED_DERIVATIVES]


def drawn(rng, depth):
    """A function of a count and a vector."""
    if depth == 0:
        a, b = rng.normal(size=2)
        return lambda n, x: jnp.sin(x * a) + b
    first, second, most = drawn(rng, depth - 1), drawn(rng, depth - 1), int(rng.integers(2, 6))

    def loop(n, x):
        step = lambda c: (c[0] + 1, first(n + c[0], c[1]))
        return lax.while_loop(lambda c: c[0] < n % most, step, (0, x))[1]

    def bounded(n, x):
        step = lambda c: (c[0] + 1, second(n, c[1]))
        goes_on = lambda c: (c[0] < n % most) & (jnp.abs(c[1]).sum() < 50)
        return bx.bounded_while(goes_on, step, (0, first(n, x)), 5)[1]

    def memory(n, x):
        def step(c):
            i, cache, x = c
            cache = cache.at[(i * 7) % 80].set(x.sum())
            return i + 1, cache, first(n + i, x) + cache[(i * 3) % 80]

        return lax.while_loop(lambda c: c[0] < n % most, step, (0, jnp.zeros(80), x))[2]

    def branch(n, x):
        cases = [lambda x: first(n, x), lambda x: second(n + 2, x), jnp.cos]
        return lax.switch(n % 3, cases, x)

    def scan(n, x):
        step = lambda c, t: (first(n + t, c), c.sum())
        return lax.scan(step, x, jnp.arange(most))[0]

    nested = lambda n, x: jax.vmap(lambda v: first(n, v[None])[0])(x) + second(n, x)
    return [loop, bounded, memory, branch, scan, nested][rng.integers(6)]


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.each_commit(2)
def test_drawn_programs(seed):
    rng = np.random.default_rng(seed)
    fun = drawn(rng, 3)
    n = jnp.asarray(rng.integers(0, 30, N))
    x = jnp.asarray(rng.normal(size=(N, 4)), float)

    def both(divergence):
        of = lambda x: bx.vmap(fun, divergence=divergence)(n, x)
        return jax.jit(lambda x: jax.jvp(of, (x,), (jnp.ones_like(x),)))(x)

    same(both(WAYS[seed % len(WAYS)]), both("predicate"), {"rtol": 1e-4, "atol": 1e-5})
