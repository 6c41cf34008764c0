"""Samplers: chains of BlackJAX and NumPyro, with their warm-up."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.libraries.program import program
from benchmarks.workload import keys, normal

EFFECTS = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools(x: Any) -> Any:
    """Log-density of the hierarchical model, not centered: mean, log scale, eight effects."""
    mean, log_scale, effects = x["mean"], x["log_scale"], x["effects"]
    schools = mean + jnp.exp(log_scale) * effects
    prior = -0.5 * (mean / 5) ** 2 - 0.5 * jnp.sum(effects**2)
    scale = log_scale - jnp.log1p((jnp.exp(log_scale) / 5) ** 2)
    return prior + scale - 0.5 * jnp.sum(((EFFECTS - schools) / ERRORS) ** 2)


def _start(key: Any) -> Any:
    a, b, c = jax.random.split(key, 3)
    return {
        "mean": jax.random.normal(a),
        "log_scale": jax.random.normal(b),
        "effects": jax.random.normal(c, (8,)),
    }


def _draws(kernel: Any, state: Any, key: Any, count: int) -> Any:
    def draw(state: Any, key: Any) -> Any:
        state, _info = kernel.step(key, state)
        return state, state.position

    return lax.scan(draw, state, jax.random.split(key, count))[1]


def _keys(n: int) -> tuple[Any, ...]:
    return (keys(n),)


@program(
    "BlackJAX", "NUTS with window adaptation, 200 chains", _keys, 200, looked_at=True, serial=False
)
def adapted_nuts(key):
    import blackjax

    start, warm, draw = jax.random.split(key, 3)
    warmup = blackjax.window_adaptation(blackjax.nuts, eight_schools)
    (state, parameters), _ = warmup.run(warm, _start(start), num_steps=150)
    return _draws(blackjax.nuts(eight_schools, **parameters), state, draw, 50)


@program("BlackJAX", "NUTS, its draws alone", _keys, 200, looked_at=True, serial=False)
def nuts(key):
    import blackjax

    start, draw = jax.random.split(key)
    kernel = blackjax.nuts(eight_schools, 0.3, inverse_mass_matrix=jnp.ones(10))
    return _draws(kernel, kernel.init(_start(start)), draw, 100)


def _logistic(n: int) -> tuple[Any, ...]:
    rows = normal(200, 12, seed=1)
    return keys(n), rows, jnp.sign(rows @ normal(12, seed=2) + normal(200, seed=3))


@program(
    "BlackJAX",
    "window adaptation, logistic regression, 64 chains",
    _logistic,
    64,
    in_axes=(0, None, None),
    serial=False,
)
def adapted_regression(key, rows, labels):
    import blackjax

    def log_density(w):
        return -jnp.sum(jax.nn.softplus(-labels * (rows @ w))) - 0.5 * jnp.sum(w**2)

    warmup = blackjax.window_adaptation(
        blackjax.nuts, log_density, is_mass_matrix_diagonal=False, target_acceptance_rate=0.9
    )
    (state, parameters), _ = warmup.run(key, jnp.zeros(12), num_steps=120)
    return state.position, parameters["step_size"]


@program("BlackJAX", "random-walk Metropolis, 1,000 chains", _keys, 1000, uneven=False)
def random_walk(key):
    import blackjax

    start, draw = jax.random.split(key)
    kernel = blackjax.additive_step_random_walk(
        lambda x: -0.5 * jnp.sum((x[1:] - x[:-1] ** 2) ** 2 + (x[:-1] - 1) ** 2),
        blackjax.mcmc.random_walk.normal(0.2 * jnp.ones(4)),
    )
    return _draws(kernel, kernel.init(jax.random.normal(start, (4,))), draw, 200)


@program("BlackJAX", "HMC of drawn lengths, 128 chains", _keys, 128)
def dynamic_hmc(key):
    import blackjax

    start, first, draw = jax.random.split(key, 3)
    kernel = blackjax.dynamic_hmc(
        eight_schools,
        0.2,
        jnp.ones(10),
        integration_steps_fn=lambda key: jax.random.randint(key, (), 1, 30),
    )
    return _draws(kernel, kernel.init(_start(start), first), draw, 100)


@program("BlackJAX", "adaptive tempering, 64 runs", _keys, 64, serial=False, uneven=False)
def tempering(key):
    import blackjax
    import blackjax.smc.resampling as resampling

    prior = lambda x: -0.5 * jnp.sum(x**2) / 9
    likelihood = lambda x: jnp.logaddexp(-4 * jnp.sum((x - 2) ** 2), -4 * jnp.sum((x + 2) ** 2))
    sampler = blackjax.adaptive_tempered_smc(
        prior,
        likelihood,
        blackjax.hmc.build_kernel(),
        blackjax.hmc.init,
        {
            "step_size": jnp.array([0.2]),
            "inverse_mass_matrix": jnp.ones((1, 2)),
            "num_integration_steps": jnp.array([5]),
        },
        resampling.systematic,
        0.7,
        num_mcmc_steps=2,
    )
    start, key = jax.random.split(key)
    state = sampler.init(3 * jax.random.normal(start, (100, 2)))

    def step(carry):
        count, key, state = carry
        key, now = jax.random.split(key)
        return count + 1, key, sampler.step(now, state)[0]

    going_on = lambda carry: carry[2].tempering_param < 1
    count, _, state = lax.while_loop(going_on, step, (0, key, state))
    return count, state.particles


@program(
    "NumPyro",
    "NUTS, chain_method=vmap, 100 chains",
    lambda n: (jax.random.key(0),),
    100,
    takes_vmap=True,
    looked_at=True,
)
def numpyro_nuts(vmap, key):
    from numpyro.infer import MCMC, NUTS

    mcmc = MCMC(
        NUTS(_schools),
        num_warmup=100,
        num_samples=100,
        num_chains=100,
        chain_method=vmap,
        progress_bar=False,
    )
    mcmc.run(key)
    return mcmc.get_samples()


def _schools() -> None:
    import numpyro
    import numpyro.distributions as dist

    mean = numpyro.sample("mean", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfCauchy(5))
    with numpyro.plate("schools", 8):
        effects = numpyro.sample("effects", dist.Normal(0, 1))
        numpyro.sample("seen", dist.Normal(mean + scale * effects, ERRORS), obs=EFFECTS)


def _data_sets(n: int) -> tuple[Any, ...]:
    x = normal(n, 40, 3)
    return keys(n), x, jnp.einsum("nij,nj->ni", x, normal(n, 3, seed=1)) + normal(n, 40, seed=2)


@program("NumPyro", "calibration by simulation, 60 data sets", _data_sets, 60, serial=False)
def calibration(key, x, y):
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS

    def model():
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), 2).to_event(1))
        noise = numpyro.sample("noise", dist.Exponential(1.0))
        numpyro.sample("y", dist.Normal(x @ weights, noise), obs=y)

    mcmc = MCMC(NUTS(model), num_warmup=80, num_samples=60, progress_bar=False)
    mcmc.run(key)
    return mcmc.get_samples()["weights"].mean(0)


@program("NumPyro", "variational fits from 30 seeds", _keys, 30, uneven=False)
def variational(key):
    from numpyro import optim
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    svi = SVI(_schools, AutoNormal(_schools), optim.Adam(0.02), Trace_ELBO())
    return svi.run(key, 300, progress_bar=False).losses
