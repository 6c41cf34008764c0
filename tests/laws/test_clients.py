"""Libraries that users batch with do not notice which vmap they have.

First a small real program of each, with gradients, in one way to run a batch, and each night in
every way, against the loop over examples. Then the libraries' own uses of ``jax.vmap``, with
batchax in its place.
"""

import itertools
import sys

import blackjax
import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import optax
import optimistix
import pytest
from flax import linen, nnx
from numpyro.infer.hmc import hmc
from numpyro.infer.util import initialize_model

import batchax as bx

from support.oracle import example, same, together

LANES = 4  # two chunks of one size: one program to compile
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes most of the time
WAYS = {"plain": {}, "chunked": dict(batch_size=2), "compact": dict(divergence="compact")}
KEYS = jax.random.split(jax.random.key(0), LANES)
DTYPE = jnp.result_type(float)
PROGRAMS = {}


def program(make):
    """Enters a function that makes a function of one example, and a batch for it, of a dtype."""
    PROGRAMS[make.__name__] = make
    return make


def points(dtype, *shape, low=-2.0, high=2.0):
    return example((LANES, *shape), dtype, seed=len(shape), low=low, high=high)


@program
def nnx_training_step_of_an_ensemble(dtype):
    def make(key):
        options = dict(param_dtype=dtype, rngs=nnx.Rngs(key))
        return nnx.Sequential(nnx.Linear(2, 4, **options), nnx.relu, nnx.Linear(4, 1, **options))

    graph = nnx.graphdef(make(KEYS[0]))

    def train(state, x):
        model = nnx.merge(graph, state)
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        loss, gradient = nnx.value_and_grad(lambda model: jnp.sum(model(x) ** 2))(model)
        optimizer.update(model, gradient)
        return loss, nnx.state(model)

    return train, (jax.vmap(lambda key: nnx.state(make(key)))(KEYS), points(dtype, 2))


@program
def optax_line_search(dtype):
    optimizer = optax.lbfgs(memory_size=2)

    def minimise(x, a):
        f = lambda x: jnp.sum((x - a) ** 4) + jnp.prod(x) ** 2

        def step(carry, _):
            x, state = carry
            value, gradient = optax.value_and_grad_from_state(f)(x, state=state)
            updates, state = optimizer.update(
                gradient, state, x, value=value, grad=gradient, value_fn=f
            )
            return (optax.apply_updates(x, updates), state), value

        return jax.lax.scan(step, (x, optimizer.init(x)), None, length=2)[1]

    return minimise, (points(dtype, 2), points(dtype))


@program
def diffrax_gradient_of_an_adaptive_solve(dtype):
    def solve(start, rate):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, rate: -rate * y**3),
            diffrax.Heun(),
            t0=0.0,
            t1=1.0,
            dt0=0.3,
            y0=start,
            args=rate,
            stepsize_controller=diffrax.PIDController(rtol=1e-2, atol=1e-2),
            max_steps=32,
        )
        return solution.ys[-1], solution.stats["num_steps"]

    run = jax.value_and_grad(solve, argnums=(0, 1), has_aux=True)
    return run, (points(dtype), points(dtype, low=0.5, high=5.0)[::-1])


@program
def optimistix_gradient_of_a_root(dtype):
    def root(a):
        found = optimistix.root_find(
            lambda y, a: y**3 - a,
            optimistix.Newton(rtol=1e-3, atol=1e-3),
            jnp.ones((), dtype),
            args=a,
            max_steps=32,
        )
        return found.value, found.stats["num_steps"]

    return jax.value_and_grad(root, has_aux=True), (points(dtype, low=0.5, high=90.0),)


@program
def lineax_gradient_of_solves(dtype):
    def solve(matrix, b):
        operator = lineax.MatrixLinearOperator(matrix @ matrix.T, lineax.positive_semidefinite_tag)
        direct = lineax.linear_solve(lineax.MatrixLinearOperator(matrix), b, lineax.LU()).value
        iterated = lineax.linear_solve(operator, b, lineax.CG(rtol=1e-5, atol=1e-5)).value
        return direct.sum() + iterated.sum()

    matrices = points(dtype, 2, 2) + 4 * jnp.eye(2, dtype=dtype)
    return jax.value_and_grad(solve, argnums=(0, 1)), (matrices, points(dtype, 2))


def log_density(x):
    return -jnp.sum((x[1:] - x[:-1] ** 2) ** 2) - 0.5 * jnp.sum(x**2)


@program
def blackjax_nuts(dtype):
    sampler = blackjax.nuts(log_density, 0.3, jnp.ones(2, dtype), max_num_doublings=2)

    def step(key, x):
        state, info = sampler.step(key, sampler.init(x))
        return state, info.num_integration_steps

    return step, (KEYS, points(dtype, 2))


def model(y=None):
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("n", 2):
        return numpyro.sample("y", dist.Normal(mean, scale), obs=y)


@program
def numpyro_hmc(dtype):
    def step(key, y):
        begin, go_on = jax.random.split(key)
        info = initialize_model(begin, model, model_args=(y,))
        init, sample = hmc(info.potential_fn, algo="HMC")
        options = dict(num_warmup=1, step_size=0.3, trajectory_length=1.0, rng_key=go_on)
        state = sample(init(info.param_info, **options))
        return state.z, state.z_grad, state.potential_energy

    return step, (KEYS, points(dtype, 2))


def run_in(ways, name):
    fun, args = PROGRAMS[name](DTYPE)
    staged = jax.jit(fun)  # once: `vmap` stages what it is given, too
    batched = {way: bx.vmap(staged, **WAYS[way]) for way in ways}
    alone = lambda *args: jax.lax.map(lambda lane: staged(*lane), args)
    found = jax.jit(together({**batched, "alone": alone}), compiler_options=QUICK)(*args)
    want = found.pop("alone")
    tolerance = dict(rtol=1e-8, atol=1e-8)
    if jnp.float32 == DTYPE:  # what steps are chosen by an error estimate is sensitive
        tolerance = dict(rtol=2e-3, atol=2e-3)
    for way, got in found.items():
        same(got, want, tolerance, way)


@pytest.mark.parametrize(("name", "way"), zip(PROGRAMS, itertools.cycle(WAYS), strict=False))
@pytest.mark.each_commit(3)
def test_program(name, way):
    run_in([way], name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_in_every_way(name):
    run_in(WAYS, name)


# The libraries' own calls of `jax.vmap`.


def equinox_calls():
    mlp = lambda key: eqx.nn.MLP(2, 1, 4, 1, key=key)

    def run(model, x):
        return model(x)

    each = eqx.if_array(0)
    ensemble = eqx.filter_vmap(mlp)(KEYS)
    x = example((LANES, 2))
    gradient = eqx.filter_grad(lambda model, x: model(x).sum())
    share = lambda x: x / jax.lax.psum(1, "i")
    return eqx.filter(
        [
            eqx.filter_vmap(run, in_axes=(each, 0))(ensemble, x),
            eqx.filter_vmap(run, in_axes=(None, 0), out_axes=1)(mlp(KEYS[0]), x),
            eqx.filter_vmap(gradient, in_axes=(each, None))(ensemble, x[0]),
            eqx.filter_vmap(share, in_axes=None, axis_size=3, axis_name="i", out_axes=None)(x),
        ],
        eqx.is_array,
    )


def flax_calls():
    @nnx.vmap
    def make(key):
        return nnx.Linear(2, 3, rngs=nnx.Rngs(key))

    @nnx.vmap(in_axes=(0, None))
    def run(model, x):
        return nnx.value_and_grad(lambda model: jnp.sum(model(x) ** 2))(model)

    @nnx.split_rngs(splits=LANES)
    @nnx.vmap(in_axes=(nnx.StateAxes({nnx.RngState: 0, ...: None}), 0))
    def drop(layer, x):
        return layer(x)

    class Heads(linen.Module):
        @linen.compact
        def __call__(self, x):
            heads = linen.vmap(
                linen.Dense,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=None,
                axis_size=3,
            )
            return heads(2)(x)

    x = example((LANES, 2))
    heads = Heads().init(KEYS[0], x)
    dropped = drop(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), x)
    return run(make(KEYS), x[0]), dropped, Heads().apply(heads, x)


def numpyro_calls():
    infer, y = numpyro.infer, jnp.ones(2)
    samples = infer.Predictive(model, num_samples=4, parallel=True)(KEYS[0])
    likelihood = infer.log_likelihood(model, samples, y, parallel=True)
    guide = infer.autoguide.AutoNormal(model)
    elbo = infer.Trace_ELBO(num_particles=3)
    svi = infer.SVI(model, guide, numpyro.optim.Adam(1e-2), elbo)
    loss = svi.update(svi.init(KEYS[2], y), y)[1]
    return samples, likelihood, loss


def blackjax_calls():
    mean = jnp.array([0.5, 1.0])
    smc = blackjax.adaptive_tempered_smc(
        lambda x: -0.5 * jnp.sum(x**2),
        lambda x: -jnp.sum((x - mean) ** 2),
        blackjax.hmc.build_kernel(),
        blackjax.hmc.init,
        blackjax.smc.extend_params(
            dict(step_size=0.1, inverse_mass_matrix=jnp.ones(2), num_integration_steps=2)
        ),
        blackjax.smc.resampling.systematic,
        0.5,
        num_mcmc_steps=2,
    )
    return smc.step(KEYS[0], smc.init(example((8, 2))))


@pytest.mark.parametrize(
    "calls",
    [equinox_calls, flax_calls, numpyro_calls, blackjax_calls],
    ids=["Equinox", "Flax", "NumPyro", "BlackJAX"],
)
@pytest.mark.each_commit(1)
def test_with_vmap_of_batchax(calls, monkeypatch):
    want = jax.jit(lambda: calls(), compiler_options=QUICK)()
    batched = []

    def vmap(*args, **options):
        batched.append(args)
        return bx.vmap(*args, **options)

    libraries = {"blackjax", "equinox", "flax", "numpyro"}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in libraries and getattr(module, "vmap", None) is jax.vmap:
            monkeypatch.setattr(module, "vmap", vmap)
    monkeypatch.setattr(jax, "vmap", vmap)
    got = jax.jit(lambda: calls(), compiler_options=QUICK)()
    assert len(batched) > 2
    same(got, want, dict(rtol=1e-4, atol=1e-5))
