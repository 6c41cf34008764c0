"""Samplers of others for the same targets, by their own code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.nests.workload import Peer

CHECKOUT = "FSM_MCMC"  # names a checkout of github.com/HWDance/jax-fsm-mcmc

if CHECKOUT in os.environ:
    sys.path.append(os.path.join(os.environ[CHECKOUT], "src"))

STATE_MACHINE = "FSM", "jax_dataclasses", "blackjax"


def of_nuts(
    target: Callable[[], Any], step_size: float, doublings: int, size: int
) -> dict[str, Peer]:
    """The No-U-Turn sampler, with as many draws of as many chains."""

    def state_machine(draws: Any, starts: Any) -> Callable[[], Any]:
        from FSM.mcmc.nuts_bundle import NutsFSM  # type: ignore[import-not-found]

        machine = NutsFSM(step_size, doublings, 1000, jnp.ones(size), target())
        return _run(machine, draws, starts)

    def numpyro(draws: Any, starts: Any) -> Callable[[], Any]:
        from numpyro.infer import NUTS

        log_density = target()
        kernel = NUTS(
            potential_fn=lambda x: -log_density(x),
            step_size=step_size,
            inverse_mass_matrix=jnp.ones(size),
            adapt_step_size=False,
            adapt_mass_matrix=False,
            max_tree_depth=doublings,
        )
        # Without its `MCMC`, which traces anew in each run; chains are vectorized by `init`.
        start = kernel.init(draws[:, 0], 0, starts, (), {})

        @jax.jit
        def run(state: Any) -> Any:
            def draw(state: Any, _: Any) -> Any:
                state = kernel.sample(state, (), {})
                return state, state.z

            return jnp.swapaxes(lax.scan(draw, state, length=draws.shape[1])[1], 0, 1)

        return lambda: run(start)

    return {
        "FSM-MCMC": Peer(state_machine, STATE_MACHINE),
        "NumPyro, vectorized": Peer(numpyro, ("numpyro",)),
    }


def of_elliptical_slice() -> dict[str, Peer]:
    """The elliptical slice sampler, with as many draws of as many chains."""

    def state_machine(draws: Any, starts: Any, prior: Any, rows: Any, labels: Any) -> Any:
        from FSM.mcmc.ellipticalslice_in_bundle import (  # type: ignore[import-not-found]
            EllipticalSliceFSM,
        )

        def log_likelihood(weights: Any) -> Any:
            return -jnp.sum(jax.nn.softplus(-labels * (rows @ weights)))

        mean = jnp.zeros(starts.shape[1])
        return _run(EllipticalSliceFSM(mean, prior, log_likelihood), draws, starts)

    return {"FSM-MCMC": Peer(state_machine, STATE_MACHINE)}


def _run(machine: Any, draws: Any, starts: Any) -> Callable[[], Any]:
    """All draws of all chains, as the authors' benchmarks run a machine."""
    from FSM.base.run_fsm_in import get_fsm_samples_chain  # type: ignore[import-not-found]

    chains, count, *_ = draws.shape
    step = jax.vmap(jax.jit(machine.step))
    states = jax.vmap(machine.init)(draws[:, 0], starts)

    def run() -> Any:
        index = jnp.zeros(chains, int)
        samples, _ = get_fsm_samples_chain(index, states, chains, count, starts.shape[1], step)
        return np.swapaxes(samples, 0, 1)

    return run


def on_threads(one_by_one: Callable[..., Any], pieces: list[Any]) -> Callable[[], Any]:
    """Each thread computes a piece of the lanes, one lane after the other."""
    compiled = jax.jit(one_by_one)

    def run() -> Any:
        with ThreadPoolExecutor(len(pieces)) as threads:
            found = list(threads.map(lambda args: jax.block_until_ready(compiled(*args)), pieces))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *found)

    return run
