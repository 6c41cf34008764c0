"""Solvers and fits: diffrax, optimistix, lineax, optax, jaxopt, OTT, and what JAX itself has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.libraries.program import program
from benchmarks.workload import keys, normal, uniform

# --- differential equations


def _van_der_pol(t: Any, y: Any, stiffness: Any) -> Any:
    return jnp.stack([y[1], stiffness * (1 - y[0] ** 2) * y[1] - y[0]])


def _stiff(n: int) -> tuple[Any, ...]:
    """Mostly soft, and a few of 50 times the stiffness."""
    return 0.2 * jnp.exp(2.2 * jnp.abs(normal(n))), normal(n, 2, seed=1)


def _solved(stiffness: Any, y: Any, **more: Any) -> Any:
    import diffrax

    return diffrax.diffeqsolve(
        diffrax.ODETerm(_van_der_pol),
        diffrax.Tsit5(),
        0.0,
        3.0,
        None,
        y,
        args=stiffness,
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
        max_steps=4096,
        throw=False,
        **more,
    )


@program("diffrax", "van der Pol, 1,024 lanes", _stiff, 1024, looked_at=True)
def van_der_pol(stiffness, y):
    solution = _solved(stiffness, y)
    return solution.ys[0], solution.stats["num_steps"]


def _crossing(stiffness: Any, y: Any) -> Any:
    import diffrax

    event = diffrax.Event(lambda t, y, args, **_: y[0] + 1.5)
    solution = _solved(stiffness, y, event=event)
    return solution.ts[0], solution.ys[0]


program("diffrax", "van der Pol to an event, 1,024 lanes", _stiff, 1024, looked_at=True)(_crossing)
program("diffrax", "van der Pol to an event, 4,096 lanes", _stiff, 4096, looked_at=True)(_crossing)


@program(
    "diffrax",
    "Lotka-Volterra, 32 lanes",
    lambda n: (uniform(n, 2, low=0.5, high=4),),
    32,
    looked_at=True,
)
def predators(y):
    import diffrax

    slope = lambda t, y, _: jnp.stack([y[0] * (1.1 - 0.4 * y[1]), y[1] * (0.1 * y[0] - 0.4)])
    return diffrax.diffeqsolve(
        diffrax.ODETerm(slope),
        diffrax.Dopri5(),
        0,
        30,
        0.1,
        y,
        saveat=diffrax.SaveAt(ts=jnp.linspace(0, 30, 31)),
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-6),
    ).ys


@program(
    "diffrax",
    "decay to a level, 500 lanes of few steps",
    lambda n: (uniform(n, low=0.3, high=5),),
    500,
    uneven=False,
    looked_at=True,
)
def decay(rate):
    import diffrax

    return diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, rate: -rate * y),
        diffrax.Tsit5(),
        0.0,
        20.0,
        0.1,
        jnp.float32(1),
        args=rate,
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4),
        event=diffrax.Event(lambda t, y, args, **_: y - 0.1),
    ).ts[0]


@program(
    "diffrax",
    "Robertson, implicit, 128 lanes",
    lambda n: (10 ** uniform(n, low=-2, high=0.5),),
    128,
)
def robertson(rate):
    import diffrax

    def slope(t, y, _):
        a, b, c = y
        first, second = rate * a - 1e3 * b * c, 3e5 * b**2
        return jnp.stack([-first, first - second, second])

    return diffrax.diffeqsolve(
        diffrax.ODETerm(slope),
        diffrax.Kvaerno3(),
        0.0,
        10.0,
        1e-4,
        jnp.array([1.0, 0.0, 0.0]),
        stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
        throw=False,
    ).ys[0]


@program(
    "diffrax",
    "gradient of a fit, 128 lanes",
    lambda n: (10 ** uniform(n, low=-1, high=1.2), normal(n, 2, seed=1)),
    128,
)
def fitted(stiffness, y):
    import diffrax

    def loss(stiffness):
        end = diffrax.diffeqsolve(
            diffrax.ODETerm(_van_der_pol),
            diffrax.Tsit5(),
            0.0,
            2.0,
            0.01,
            y,
            args=stiffness,
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-5),
            max_steps=512,
            throw=False,
        ).ys[0]
        return jnp.sum(end**2)

    return jax.value_and_grad(loss)(stiffness)


@program("diffrax", "a stochastic equation, 500 paths", lambda n: (keys(n),), 500, uneven=False)
def stochastic(key):
    import diffrax

    path = diffrax.VirtualBrownianTree(0.0, 1.0, tol=1e-2, shape=(), key=key)
    terms = diffrax.MultiTerm(
        diffrax.ODETerm(lambda t, y, _: -y),
        diffrax.ControlTerm(lambda t, y, _: 0.3 * y, path),
    )
    return diffrax.diffeqsolve(terms, diffrax.Heun(), 0.0, 1.0, 0.02, jnp.float32(1)).ys[0]


# --- roots, minima and least squares


TIMES = jnp.linspace(0, 2, 20)


def _decay(parameters: Any, seen: Any) -> Any:
    amplitude, rate, offset = parameters
    return amplitude * jnp.exp(-rate * TIMES) + offset - seen


def _decays(n: int) -> tuple[Any, ...]:
    rates = uniform(n, 1, low=0.3, high=4, seed=1)
    seen = uniform(n, 1, low=1, high=3) * jnp.exp(-rates * TIMES) + 0.01 * normal(n, 20)
    return (seen,)


def _one_unsolvable(n: int) -> tuple[Any, ...]:
    """One series is missing, and holds NetCDF's fill value: its solve takes all 1,000 steps."""
    (seen,) = _decays(n)
    return (seen.at[7].set(9.97e36),)


def _least_squares(solver: str, seen: Any) -> Any:
    import optimistix as optx

    method = getattr(optx, solver)(rtol=1e-4, atol=1e-4)
    solution = optx.least_squares(
        _decay, method, jnp.array([1.0, 1.0, 0.0]), args=seen, max_steps=1000, throw=False
    )
    return solution.value, solution.stats["num_steps"]


@program("optimistix", "one unsolvable of 2,000", _one_unsolvable, 2000, looked_at=True)
def unsolvable(seen):
    return _least_squares("LevenbergMarquardt", seen)


@program("optimistix", "Dogleg, 500 decays", _decays, 500)
def dogleg(seen):
    return _least_squares("Dogleg", seen)


@program(
    "optimistix",
    "Newton, Kepler's equation, 10,000",
    lambda n: (uniform(n, high=6.2), uniform(n, high=0.97, seed=1)),
    10000,
)
def kepler(anomaly, eccentricity):
    import optimistix as optx

    f = lambda e, _: e - eccentricity * jnp.sin(e) - anomaly
    solver = optx.Newton(rtol=1e-5, atol=1e-5)
    return optx.root_find(f, solver, anomaly, max_steps=64, throw=False).value


@program(
    "optimistix", "bisection, 4,096", lambda n: (uniform(n, low=0.1, high=9),), 4096, uneven=False
)
def bisection(x):
    import optimistix as optx

    solver = optx.Bisection(rtol=1e-5, atol=1e-5)
    options = {"lower": 0.0, "upper": 4.0}
    f = lambda y, _: y**3 - x
    return optx.root_find(f, solver, jnp.float32(1), options=options, throw=False).value


@program("optimistix", "BFGS, Rosenbrock from 300 starts", lambda n: (2 * normal(n, 4),), 300)
def rosenbrock(start):
    import optimistix as optx

    f = lambda x, _: jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)
    solver = optx.BFGS(rtol=1e-4, atol=1e-4)
    return optx.minimise(f, solver, start, max_steps=500, throw=False).value


@program(
    "optimistix",
    "a fixed point, 256",
    lambda n: (uniform(n, low=0.2, high=0.995), normal(16, 16), normal(n, 16, seed=1)),
    256,
    in_axes=(0, None, 0),
)
def deep_equilibrium(gain, weights, x):
    import optimistix as optx

    orthogonal = jnp.linalg.qr(weights)[0]
    f = lambda z, _: jnp.tanh(gain * (orthogonal @ z) + x)
    solver = optx.FixedPointIteration(rtol=1e-5, atol=1e-5)
    return optx.fixed_point(f, solver, jnp.zeros(16), max_steps=1000, throw=False).value


def _systems(n: int) -> tuple[Any, ...]:
    """Of condition numbers from 1 to 10,000."""
    q = jnp.linalg.qr(normal(n, 24, 24))[0]
    powers = uniform(n, 1, high=4, seed=1) * jnp.linspace(0, 1, 24)
    return jnp.einsum("nij,nj,nkj->nik", q, 10**powers, q), normal(n, 24, seed=2)


@program("lineax", "conjugate gradients, 256 systems", _systems, 256)
def conjugate_gradients(a, b):
    import lineax as lx

    operator = lx.MatrixLinearOperator(a, lx.positive_semidefinite_tag)
    solver = lx.CG(rtol=1e-4, atol=1e-4, max_steps=400)
    return lx.linear_solve(operator, b, solver, throw=False).value


@program("JAX", "scipy.optimize, BFGS, 200 problems", lambda n: (2 * normal(n, 3),), 200)
def scipy_bfgs(start):
    from jax.scipy.optimize import minimize

    f = lambda x: jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)
    return minimize(f, start, method="BFGS").x


@program("JAX", "scipy.sparse, conjugate gradients, 64 grids", lambda n: (normal(n, 16, 16),), 64)
def scipy_cg(b):
    from jax.scipy.sparse.linalg import cg

    def laplace(x):
        padded = jnp.pad(x, 1)
        around = padded[2:, 1:-1] + padded[:-2, 1:-1] + padded[1:-1, 2:] + padded[1:-1, :-2]
        return 4 * x - around + 0.01 * jnp.abs(b[0, 0]) * x

    return cg(laplace, b, tol=1e-5, maxiter=300)[0]


def _minimized(loss: Any, start: Any, tolerance: float, most: int) -> Any:
    """The loop of optax's page on L-BFGS."""
    import optax

    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(carry):
        x, state = carry
        value, grad = value_and_grad(x, state=state)
        updates, state = optimizer.update(grad, state, x, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(x, updates), state

    def going_on(carry):
        count = optax.tree.get(carry[1], "count")
        error = optax.tree.norm(optax.tree.get(carry[1], "grad"))
        return (count == 0) | ((count < most) & (error >= tolerance))

    return lax.while_loop(going_on, step, (start, optimizer.init(start)))[0]


@program("optax", "L-BFGS, 32 starts", lambda n: (2 * normal(n, 4),), 32, looked_at=True)
def few_lbfgs(start):
    loss = lambda x: jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)
    return _minimized(loss, start, 1e-3, 100)


def _regressions(n: int) -> tuple[Any, ...]:
    x = normal(n, 60, 6) * 10 ** uniform(n, 1, 6, low=-1, high=1, seed=3)
    return x, jnp.sign(x[..., 0] + normal(n, 60, seed=2))


@program("optax", "L-BFGS, 256 regressions", _regressions, 256)
def regressions(x, y):
    loss = lambda w: jnp.mean(jax.nn.softplus(-y * (x @ w))) + 1e-3 * jnp.sum(w**2)
    return _minimized(loss, jnp.zeros(6), 1e-4, 60)


@program("optax", "Adam to a tolerance, 64", lambda n: (normal(n, 3),), 64, looked_at=True)
def to_a_tolerance(target):
    import optax

    optimizer = optax.adam(0.1)
    loss = lambda x: jnp.sum((x - target) ** 2 * jnp.array([1.0, 3.0, 9.0]))

    def step(carry):
        x, state, _ = carry
        grad = jax.grad(loss)(x)
        updates, state = optimizer.update(grad, state, x)
        return optax.apply_updates(x, updates), state, jnp.sum(grad**2)

    x = jnp.zeros(3)
    carry = (x, optimizer.init(x), jnp.float32(1))
    return lax.while_loop(lambda c: c[2] > 1e-6, step, carry)[0]


@program("optax", "SGD of 50 small networks", lambda n: (keys(n),), 50, uneven=False)
def ensemble(key):
    import optax

    x = jnp.linspace(-2, 2, 64)[:, None]
    a, b = jax.random.split(key)
    weights = {"in": jax.random.normal(a, (1, 16)), "out": jax.random.normal(b, (16, 1)) / 4}
    loss = lambda w: jnp.mean((jnp.tanh(x @ w["in"]) @ w["out"] - jnp.sin(3 * x)) ** 2)
    optimizer = optax.adamw(0.01)

    def step(carry, _):
        weights, state = carry
        value, grad = jax.value_and_grad(loss)(weights)
        updates, state = optimizer.update(grad, state, weights)
        return (optax.apply_updates(weights, updates), state), value

    return lax.scan(step, (weights, optimizer.init(weights)), length=100)[1]


# --- as dynamax, tinygp and others have them: a fit of one data set until it stands still


def _series(n: int) -> tuple[Any, ...]:
    return (jnp.cumsum(normal(n, 60), 1) * uniform(n, 1, low=0.1, high=2, seed=1),)


@program("JAX", "EM of a hidden Markov model, 64 series", _series, 64)
def hidden_markov(y):
    def expected(means, spread):
        evidence = -0.5 * ((y[:, None] - means) / spread) ** 2 - jnp.log(spread)
        stay = jnp.log(jnp.array([[0.95, 0.05], [0.05, 0.95]]))

        def forward(alpha, e):
            alpha = jax.nn.logsumexp(alpha[:, None] + stay, 0) + e
            return alpha, alpha

        def backward(beta, e):
            return jax.nn.logsumexp(stay + beta + e, 1), beta

        last, alphas = lax.scan(forward, jnp.log(jnp.ones(2) / 2) + evidence[0], evidence[1:])
        alphas = jnp.concatenate([jnp.log(jnp.ones((1, 2)) / 2) + evidence[:1], alphas])
        _, betas = lax.scan(backward, jnp.zeros(2), evidence, reverse=True)
        return jax.nn.logsumexp(last), jax.nn.softmax(alphas + betas, 1)

    def step(carry):
        means, spread, old, _, count = carry
        likelihood, weights = expected(means, spread)
        total = weights.sum(0) + 1e-3
        means = weights.T @ y / total
        spread = jnp.sqrt(jnp.sum(weights * (y[:, None] - means) ** 2) / y.size) + 1e-3
        return means, spread, likelihood, jnp.abs(likelihood - old), count + 1

    going_on = lambda carry: (carry[3] > 1e-3) & (carry[4] < 300)
    start = jnp.stack([y.min(), y.max()]), jnp.std(y), -jnp.inf, jnp.inf, 0
    return lax.while_loop(going_on, step, start)[:2]


@program("JAX", "a bound of an inner vmap, 256", lambda n: (jnp.arange(n) % 40,), 256)
def bounded_inside(count):
    def inner(x):
        step = lambda c: (c[0] + 1, jnp.sin(c[1]) + 0.1)
        return lax.while_loop(lambda c: c[0] < count, step, (0, x))[1]

    return jax.vmap(inner)(jnp.linspace(0, 1, 64))


def _one_at_a_time(n: int) -> tuple[Any, ...]:
    return normal(n, 64, 64), normal(64, 64, seed=1) / 8


@program(
    "JAX",
    "one at a time: batch_size=1 against lax.map",
    _one_at_a_time,
    512,
    in_axes=(0, None),
    options={"batch_size": 1},
    instead=lambda x, w: lax.map(lambda x: one_at_a_time(x, w), x),
    uneven=False,
    looked_at=True,
)
def one_at_a_time(x, w):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return x.sum(0)


# --- jaxopt


def _assets(n: int) -> tuple[Any, ...]:
    """Returns of 20 assets on 60 days, in units that differ."""
    scales = 10 ** (uniform(n, 1, 1, low=0, high=1, seed=1) * uniform(n, 1, 20, seed=2))
    return normal(n, 60, 20) * scales, uniform(n, 20, high=0.5, seed=3)


@program("jaxopt", "weights on a simplex, 128 portfolios", _assets, 128)
def on_a_simplex(returns, mean):
    import jaxopt

    def risk(weights, returns, mean):
        return jnp.mean((returns @ weights) ** 2) - mean @ weights

    solver = jaxopt.ProjectedGradient(
        fun=risk, projection=jaxopt.projection.projection_simplex, maxiter=500, tol=1e-3
    )
    return solver.run(jnp.ones(20) / 20, returns=returns, mean=mean).params


@program("jaxopt", "OSQP, 64 portfolios", _assets, 64)
def quadratic_programs(returns, mean):
    import jaxopt

    solution = jaxopt.OSQP(tol=1e-3, maxiter=2000).run(
        params_obj=(returns.T @ returns / 60 + 1e-2 * jnp.eye(20), -mean),
        params_eq=(jnp.ones((1, 20)), jnp.ones(1)),
        params_ineq=(-jnp.eye(20), jnp.zeros(20)),
    )
    return solution.params.primal


# --- tinygp


def _light_curves(n: int) -> tuple[Any, ...]:
    t = jnp.sort(10 * uniform(n, 30), 1)
    wave = jnp.sin(t * uniform(n, 1, low=0.3, high=4, seed=1))
    return t, wave + uniform(n, 1, low=0.05, high=0.5, seed=2) * normal(n, 30, seed=3)


@program("tinygp", "kernels of 32 light curves", _light_curves, 32)
def light_curve(t, y):
    import optax
    from tinygp import GaussianProcess, kernels

    def loss(theta):
        kernel = jnp.exp(theta["amplitude"]) * kernels.Matern32(jnp.exp(theta["scale"]))
        noise = jnp.exp(theta["noise"]) + 1e-3
        return -GaussianProcess(kernel, t, diag=noise, mean=theta["mean"]).log_probability(y)

    optimizer = optax.adam(0.1)

    def step(carry):
        theta, state, _, count = carry
        grad = jax.grad(loss)(theta)
        updates, state = optimizer.update(grad, state, theta)
        return optax.apply_updates(theta, updates), state, optax.tree.norm(grad), count + 1

    start = dict.fromkeys(("amplitude", "scale", "noise", "mean"), jnp.float32(0))
    carry = start, optimizer.init(start), jnp.float32(jnp.inf), 0
    going_on = lambda c: (c[2] > 0.3) & (c[3] < 300)
    return loss(lax.while_loop(going_on, step, carry)[0])


# --- OTT


def _clouds(n: int) -> tuple[Any, ...]:
    return (
        normal(n, 40, 2),
        normal(n, 50, 2, seed=1) + 1,
        10 ** uniform(n, low=-2, high=0.5, seed=2),
    )


@program("OTT", "Sinkhorn, 64 pairs of clouds", _clouds, 64)
def sinkhorn(x, y, epsilon):
    from ott.geometry import pointcloud
    from ott.solvers import linear

    geometry = pointcloud.PointCloud(x, y, epsilon=epsilon)
    solution = linear.solve(geometry, threshold=1e-3, max_iterations=2000)
    return solution.reg_ot_cost, solution.n_iters


def _clusters(n: int) -> tuple[Any, ...]:
    """Four clusters, from apart to one heap."""
    centers = normal(n, 4, 2, seed=1) * uniform(n, 1, 1, low=0.2, high=5, seed=2)
    return keys(n), (centers[:, :, None] + normal(n, 4, 25, 2)).reshape(n, 100, 2)


@program("OTT", "k-means, 64 data sets", _clusters, 64)
def clusters(key, x):
    from ott.tools import k_means

    return k_means.k_means(x, k=4, n_init=2, rng=key).error


# --- evosax


@program(
    "evosax",
    "CMA-ES to a level, 64 ellipsoids",
    lambda n: (keys(n), 10 ** uniform(n, 1, high=3, seed=1) ** jnp.linspace(0, 1, 6)),
    64,
)
def evolved(key, scales):
    from evosax.algorithms import CMA_ES

    strategy = CMA_ES(population_size=12, solution=jnp.zeros(6))
    parameters = strategy.default_params

    def going_on(carry):
        _, state = carry
        return (state.best_fitness > 1e-3) & (state.generation_counter < 300)

    def step(carry):
        key, state = carry
        key, ask, tell = jax.random.split(key, 3)
        population, state = strategy.ask(ask, state, parameters)
        fitness = jax.vmap(lambda x: jnp.sum(scales * (x - 1) ** 2))(population)
        return key, strategy.tell(tell, population, fitness, state, parameters)[0]

    first, key = jax.random.split(key)
    state = strategy.init(first, jnp.zeros(6), parameters)
    return lax.while_loop(going_on, step, (key, state))[1].generation_counter


# --- dynamax


def _regimes(n: int) -> tuple[Any, ...]:
    """Three states, from far apart to hardly told apart."""
    states = jnp.cumsum(uniform(n, 100) < 0.1, 1) % 3
    apart = uniform(n, 1, 1, low=0.5, high=5, seed=1)
    centers = jnp.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    return keys(n), apart * centers[states] + normal(n, 100, 2, seed=2)


@program("dynamax", "EM of a Gaussian HMM, 32 series", _regimes, 32)
def regimes(key, emissions):
    from dynamax.hidden_markov_model import GaussianHMM

    model = GaussianHMM(3, 2)
    parameters, properties = model.initialize(key=key, method="prior")

    def step(carry):
        parameters, old, _, count = carry
        statistics, likelihood = model.e_step(parameters, emissions)
        likelihood = likelihood + model.log_prior(parameters)
        kept = model.initialize_m_step_state(parameters, properties)
        every = jax.tree.map(lambda x: x[None], statistics)
        parameters, _ = model.m_step(parameters, properties, every, kept)
        return parameters, likelihood, likelihood - old, count + 1

    going_on = lambda carry: (carry[2] > 1e-2) & (carry[3] < 200)
    start = parameters, -jnp.inf, jnp.inf, 0
    return lax.while_loop(going_on, step, start)[1::2]
