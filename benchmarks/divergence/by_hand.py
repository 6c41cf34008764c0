"""The design's example as one would write it by hand, and its work without divergence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

REFILL = 64  # lanes held by the loop that takes in others


def step(x: Any, weights: Any) -> Any:
    """One step of all lanes."""
    return jnp.tanh(x @ weights.T)


def loop(n: Any, x: Any, weights: Any) -> Any:
    """The function of one example: `n` products, each of which needs the one before."""
    i, x = lax.while_loop(
        lambda carry: carry[0] < n,
        lambda carry: (carry[0] + 1, jnp.tanh(weights @ carry[1])),
        (jnp.int32(0), x),
    )
    return x, i


def compaction(n: Any, x: Any, weights: Any) -> Any:
    """Runs until half the lanes are done, and goes on with an array of half the size."""
    lane, left, out = jnp.arange(n.size), n, x
    while lane.size > 1:
        half = lane.size // 2

        def enough(carry: Any, half: int = half) -> Any:
            return jnp.sum(carry[0] > 0) > half

        def masked(carry: Any) -> Any:
            left, x = carry
            active = left > 0
            return left - active, jnp.where(active[:, None], step(x, weights), x)

        left, x = lax.while_loop(enough, masked, (left, x))
        out = out.at[lane].set(x)
        survivors = jnp.argsort(left <= 0)[:half]  # stable: those that are left come first
        lane, left, x = lane[survivors], left[survivors], x[survivors]
    last = lax.fori_loop(0, left[0], lambda _, x: step(x, weights), x)
    return out.at[lane].set(last), n


def refill(n: Any, x: Any, weights: Any) -> Any:
    """A few lanes at a time: one that is done gives its place to the next."""
    lanes, width = n.size, min(REFILL, n.size)

    def run(carry: Any) -> Any:
        lane, left, values, fresh, out = carry
        active = left > 0
        values = jnp.where(active[:, None], step(values, weights), values)
        left = left - active
        done = left <= 0
        out = out.at[jnp.where(done, lane, lanes)].set(values, mode="drop")
        lane = jnp.where(done, fresh + jnp.cumsum(done) - 1, lane)
        left = jnp.where(done, n.at[lane].get(mode="fill", fill_value=0), left)
        values = jnp.where(done[:, None], x.at[lane].get(mode="clip"), values)
        return lane, left, values, fresh + jnp.sum(done), out

    first = jnp.arange(width)
    start = first, n[:width], x[:width], jnp.asarray(width, first.dtype), x
    return lax.while_loop(lambda carry: jnp.any(carry[0] < lanes), run, start)[-1], n


def uniform(width: int) -> Callable[[Any, Any, Any], Any]:
    """As many lane-steps in all, by `width` lanes that all take as many."""

    def run(n: Any, x: Any, weights: Any) -> Any:
        held = min(width, n.size)
        return lax.fori_loop(0, jnp.sum(n) // held, lambda _, x: step(x, weights), x[:held])

    return run
