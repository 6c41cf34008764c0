"""Chains of samplers: a scan over draws, and in it a loop whose length is drawn, too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.divergence import by_hand
from benchmarks.divergence.loops import heavy_tailed
from benchmarks.nests import peers
from benchmarks.nests.workload import Nest
from benchmarks.workload import keys, normal

SIZE = 50
STEP_SIZE = 0.01 * 10**0.5
DOUBLINGS = 10


def mixture() -> Any:
    """The log-density of FSM-MCMC's benchmark: two modes, and a correlation of 0.99."""
    covariance = np.full((SIZE, SIZE), 0.99) + 0.01 * np.eye(SIZE)
    precision = jnp.asarray(np.linalg.inv(covariance), jnp.float32)

    def around(x: Any, mode: float) -> Any:
        return -0.5 * (x - mode) @ precision @ (x - mode)

    return lambda x: around(x, 0.0) + jnp.logaddexp(around(x, 10.0), around(x, -10.0))


def nuts(draws: Any, start: Any) -> Any:
    """Three loops: over draws, over doublings of a tree, over its leaves."""
    import blackjax

    kernel = blackjax.nuts(
        mixture(), STEP_SIZE, inverse_mass_matrix=jnp.ones(SIZE), max_num_doublings=DOUBLINGS
    )

    def draw(state: Any, key: Any) -> Any:
        state, info = kernel.step(key, state)
        counts = info.num_integration_steps, info.num_trajectory_expansions
        return state, (state.position, counts)

    return lax.scan(draw, kernel.init(start), draws)[1]


def leaves(_: Any, out: Any) -> np.ndarray:
    """The leaves of each doubling: it doubles the tree, but for the last, which may end early."""
    total, doublings = (np.asarray(x)[..., None] for x in out[1])
    depth = np.arange(DOUBLINGS)
    full = 2**depth
    last = total - (2 ** np.maximum(doublings - 1, 0) - 1)
    return np.where(depth < doublings - 1, full, np.where(depth == doublings - 1, last, 0))


def elliptical_slice(draws: Any, start: Any, prior: Any, rows: Any, labels: Any) -> Any:
    """A classifier's weights: brackets shrink until a point is likely enough."""
    import blackjax

    def log_likelihood(weights: Any) -> Any:
        return -jnp.sum(jax.nn.softplus(-labels * (rows @ weights)))

    kernel = blackjax.elliptical_slice(log_likelihood, mean=jnp.zeros(start.shape), cov=prior)

    def draw(state: Any, key: Any) -> Any:
        state, info = kernel.step(key, state)
        return state, (state.position, info.subiter - 1)

    return lax.scan(draw, kernel.init(start), draws)[1]


def drawn_lengths(draws: Any, start: Any) -> Any:
    """Hamiltonian Monte Carlo whose trajectories' lengths are drawn, 20 steps at the mean."""
    import blackjax

    def length(key: Any) -> Any:
        return 1 + (20 * jax.random.exponential(key)).astype(jnp.int32)

    kernel = blackjax.dynamic_hmc(mixture(), STEP_SIZE, jnp.ones(SIZE), integration_steps_fn=length)

    def draw(state: Any, key: Any) -> Any:
        state, info = kernel.step(key, state)
        return state, (state.position, info.num_integration_steps)

    return lax.scan(draw, kernel.init(start, draws[0]), draws)[1]


def rejection(draws: Any) -> Any:
    """Points of the unit ball in six dimensions, of those of the cube around it."""

    def draw(_: Any, key: Any) -> Any:
        def another(carry: Any) -> Any:
            i, _ = carry
            return i + 1, jax.random.uniform(
                jax.random.fold_in(key, i), (6,), minval=-1.0, maxval=1.0
            )

        i, point = lax.while_loop(
            lambda carry: jnp.sum(carry[1] ** 2) > 1, another, (jnp.int32(0), jnp.ones(6))
        )
        return None, (point, i)

    return lax.scan(draw, None, draws)[1]


def bare(counts: Any, x: Any, weights: Any) -> Any:
    """So many products at each step, each of which needs the one before."""

    def outer(x: Any, count: Any) -> Any:
        x = by_hand.loop(count, x, weights)[0]
        return x, x[0]

    return lax.scan(outer, x, counts)[1], counts


def _draws(lanes: int, steps: int) -> Any:
    return jax.vmap(lambda key: jax.random.split(key, steps))(keys(lanes))


def _chains(lanes: int, steps: int) -> tuple[Any, ...]:
    return _draws(lanes, steps), 10 * normal(lanes, SIZE)


def _near(lanes: int, steps: int) -> tuple[Any, ...]:
    return _draws(lanes, steps), normal(lanes, SIZE)


def _classified(lanes: int, steps: int) -> tuple[Any, ...]:
    rows = normal(100, 20, seed=1)
    labels = jnp.sign(rows @ normal(20, seed=2) + normal(100, seed=3))
    return _draws(lanes, steps), normal(lanes, 20), 4 * jnp.eye(20), rows, labels


def _heavy(lanes: int, steps: int) -> tuple[Any, ...]:
    counts = heavy_tailed(lanes * steps, 400)
    order = np.random.default_rng(5).permutation(lanes * steps)
    return counts[order].reshape(lanes, steps), normal(lanes, 64), normal(64, 64, seed=1) / 8


WORKLOADS = [
    *(
        Nest(
            f"NUTS, {lanes} chains",
            nuts,
            _chains,
            lanes,
            draws,
            counts=leaves,
            draws=lambda out: out[0],
            # Theirs take as long as all others together, and say the same of other chains.
            peers=peers.of_nuts(mixture, STEP_SIZE, DOUBLINGS, SIZE) if lanes == 100 else {},
            needs=("blackjax",),
            turns=3,
        )
        for lanes, draws in ((100, 60), (64, 30), (512, 10))
    ),
    Nest(
        "elliptical slice, 400 chains",
        elliptical_slice,
        _classified,
        400,
        120,
        in_axes=(0, 0, None, None, None),
        draws=lambda out: out[0],
        peers=peers.of_elliptical_slice(),
        needs=("blackjax",),
        turns=5,
    ),
    Nest(
        "HMC, drawn lengths",
        drawn_lengths,
        _near,
        256,
        60,
        draws=lambda out: out[0],
        needs=("blackjax",),
        turns=5,
    ),
    Nest("rejection sampling", rejection, lambda n, steps: (_draws(n, steps),), 1024, 100, turns=5),
    Nest("scan of whiles, heavy-tailed", bare, _heavy, 512, 50, in_axes=(0, 0, None), turns=5),
]
