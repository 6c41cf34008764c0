"""Loops that end at another step in each lane, and a reset that few lanes need.

Functions of one example return their result and how many steps they took (None: not known).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import batchax as bx
from benchmarks.divergence import by_hand
from benchmarks.divergence.workload import LoopWorkload
from benchmarks.workload import integers, keys, normal, uniform

SIZE = 64


def heavy_tailed(lanes: int, most: int) -> Any:
    """How many steps each lane takes: few of them nearly all, and one takes `most`."""
    drawn = np.random.default_rng(2).pareto(1.1, lanes) * 6 + 2
    drawn[min(7, lanes - 1)] = most
    return jnp.asarray(np.minimum(drawn, most), jnp.int32)


def _matrix() -> Any:
    return normal(SIZE, SIZE, seed=1) / 8


def _with_counts(lanes: int, most: int) -> tuple[Any, ...]:
    return heavy_tailed(lanes, most), normal(lanes, SIZE), _matrix()


def _with_equal_counts(lanes: int, count: int) -> tuple[Any, ...]:
    return jnp.full(lanes, count, jnp.int32), normal(lanes, SIZE), _matrix()


def mandelbrot(x: Any, y: Any, most: Any) -> Any:
    """How many steps a point takes to leave the disc of radius two."""

    def step(carry: Any) -> Any:
        i, a, b = carry
        return i + 1, a * a - b * b + x, 2 * a * b + y

    def inside(carry: Any) -> Any:
        i, a, b = carry
        return (i < most) & (a**2 + b**2 < 4)

    i = lax.while_loop(inside, step, (jnp.int32(0), 0 * x, 0 * y))[0]
    return i, i


def _plane(lanes: int, most: int) -> tuple[Any, ...]:
    side = round(lanes**0.5)
    x, y = jnp.meshgrid(jnp.linspace(-2.2, 0.8, side), jnp.linspace(-1.3, 1.3, side))
    return x.ravel(), y.ravel(), jnp.int32(most)


def newton(a: Any) -> Any:
    """Lambert's W: the solution of ``x * exp(x) == a``."""

    def left(x: Any) -> Any:
        return x * jnp.exp(x) - a

    def step(carry: Any) -> Any:
        i, x = carry
        return i + 1, x - left(x) / (jnp.exp(x) * (x + 1))

    def far(carry: Any) -> Any:
        i, x = carry
        return (jnp.abs(left(x)) > 1e-4 * (1 + a)) & (i < 100)

    i, x = lax.while_loop(far, step, (jnp.int32(0), jnp.ones_like(a)))
    return x, i


def bisection(a: Any) -> Any:
    """The solution of ``x**3 + x == a`` between 0 and `a`."""

    def halve(carry: Any) -> Any:
        i, low, high = carry
        middle = (low + high) / 2
        above = middle**3 + middle > a
        return i + 1, jnp.where(above, low, middle), jnp.where(above, middle, high)

    def wide(carry: Any) -> Any:
        _, low, high = carry
        return high - low > 1e-4 * (1 + high)

    i, low, _ = lax.while_loop(wide, halve, (jnp.int32(0), jnp.zeros_like(a), a))
    return low, i


def _spread(lanes: int, _: int) -> tuple[Any, ...]:
    return (jnp.exp(4 * normal(lanes)),)


def gcd(a: Any, b: Any) -> Any:
    def step(carry: Any) -> Any:
        i, a, b = carry
        return i + 1, b, a % b

    i, a, _ = lax.while_loop(lambda carry: carry[2] != 0, step, (jnp.int32(0), a, b))
    return a, i


def _pairs(lanes: int, _: int) -> tuple[Any, ...]:
    return integers(lanes, below=10**9, seed=1), integers(lanes, below=10**9, seed=2)


def bounded(n: Any, x: Any, weights: Any) -> Any:
    """As `by_hand.loop`, with a bound, and so with a gradient."""
    i, x = bx.bounded_while(
        lambda carry: carry[0] < n,
        lambda carry: (carry[0] + 1, jnp.tanh(weights @ carry[1])),
        (jnp.int32(0), x),
        1000,
    )
    return x, i


def bounded_runge_kutta(n: Any, y: Any, mu: Any) -> Any:
    """Steps of one size along Van der Pol's equation: each is cheap, and some lanes take many."""

    def slope(y: Any) -> Any:
        return jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])

    def step(carry: Any) -> Any:
        i, y = carry
        h = 0.01
        a = slope(y)
        b = slope(y + h / 2 * a)
        c = slope(y + h / 2 * b)
        return i + 1, y + h / 6 * (a + 2 * b + 2 * c + slope(y + h * c))

    i, y = bx.bounded_while(lambda carry: carry[0] < n, step, (jnp.int32(0), y), 1000)
    return y, i


def _with_stiffness(lanes: int, most: int) -> tuple[Any, ...]:
    return heavy_tailed(lanes, most), normal(lanes, 2), uniform(lanes, low=0.5, high=2.0)


def in_place(n: Any, x: Any) -> Any:
    """Writes one element of a long array in each step."""

    def write(carry: Any) -> Any:
        i, x = carry
        return i + 1, x.at[i].set(jnp.sin(x[i - 1]) + 1)

    i, x = lax.while_loop(lambda carry: carry[0] < n, write, (jnp.int32(1), x))
    return x, i


def _long_arrays(lanes: int, length: int) -> tuple[Any, ...]:
    counts = np.linspace(length / 2, length, lanes).astype(np.int32)
    return jnp.asarray(counts), jnp.zeros((lanes, length))


EPISODE = 20  # steps until an environment is reset


def environment(key: Any, age: Any, actions: Any) -> Any:
    """Steps on a height map. A new one, for which an equation is relaxed, is costly to make."""

    def relaxed(heights: Any) -> Any:
        around = sum(jnp.roll(heights, s, axis) for s in (-1, 1) for axis in (0, 1))
        return 0.9 * around / 4 + 0.1 * heights

    def reset(key: Any) -> Any:
        key, own = jax.random.split(key)
        rough = jax.random.normal(own, (32, 32))
        return key, jnp.int32(0), lax.fori_loop(0, 50, lambda _, h: relaxed(h), rough)

    def step(state: Any, action: Any) -> Any:
        (key, age, heights), place = state
        place = (place + action) % 32
        age = age + 1
        world = lax.cond(
            age >= EPISODE, lambda k, a, h: reset(k), lambda *same: same, key, age, heights
        )
        return (world, place), world[2][place[0], place[1]]

    start = (key, age, jnp.zeros((32, 32))), jnp.zeros(2, jnp.int32)
    return lax.scan(step, start, actions)[1], None


def _environments(lanes: int, steps: int) -> tuple[Any, ...]:
    actions = integers(lanes, steps, 2, below=3, seed=1) - 1
    return keys(lanes), jnp.arange(lanes, dtype=jnp.int32) % EPISODE, actions


def oscillator(mu: Any, y: Any, end: Any) -> Any:
    """Van der Pol's equation with steps as small as it needs: the stiffer, the more."""
    import diffrax

    def slope(t: Any, y: Any, mu: Any) -> Any:
        return jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(slope),
        diffrax.Tsit5(),
        0.0,
        end,
        0.01,
        y,
        args=mu,
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-6),
        max_steps=20_000,
        saveat=diffrax.SaveAt(t1=True),
    )
    return solution.ys[0], solution.stats["num_steps"]


def _oscillators(lanes: int, end: int) -> tuple[Any, ...]:
    mu = jnp.exp(uniform(lanes, low=-2, high=4.5))
    return mu, 1 + normal(lanes, 2), jnp.float32(end)


def chain(draws: Any, x: Any, precision: Any) -> Any:
    """Draws of a sampler whose trajectories have the length that each needs."""
    import blackjax

    scale = jnp.exp(jax.random.uniform(draws[0], (), minval=-2.0, maxval=1.0))

    def log_density(x: Any) -> Any:
        return -0.5 * (x / scale) @ precision @ (x / scale)

    kernel = blackjax.nuts(
        log_density,
        step_size=0.03,
        inverse_mass_matrix=jnp.ones(SIZE),
        max_num_doublings=8,
    )

    def draw(state: Any, key: Any) -> Any:
        state, info = kernel.step(key, state)
        return state, info.num_integration_steps

    state, steps = lax.scan(draw, kernel.init(x), draws)
    return state.position, steps


def _chains(lanes: int, draws: int) -> tuple[Any, ...]:
    rotation = np.linalg.qr(normal(SIZE, SIZE))[0]
    precision = rotation @ np.diag(np.geomspace(1, 100, SIZE)) @ rotation.T
    own = jax.vmap(lambda key: jax.random.split(key, draws))(keys(lanes))
    return own, normal(lanes, SIZE, seed=1) / 10, jnp.asarray(precision, jnp.float32)


WORKLOADS = {
    w.name: w
    for w in (
        LoopWorkload(
            "64x64 products, heavy-tailed counts",
            by_hand.loop,
            _with_counts,
            4096,
            2000,
            (0, 0, None),
            sequential=True,
            others={"compaction by hand": by_hand.compaction, "refill by hand": by_hand.refill},
            yardsticks={
                "uniform loop, 64 lanes": by_hand.uniform(64),
                "uniform loop, 4,096 lanes": by_hand.uniform(4096),
            },
        ),
        LoopWorkload(
            "64x64 products, equal counts",
            by_hand.loop,
            _with_equal_counts,
            4096,
            27,
            (0, 0, None),
            sequential=True,
            others={"compaction by hand": by_hand.compaction, "refill by hand": by_hand.refill},
        ),
        LoopWorkload("Mandelbrot", mandelbrot, _plane, 256 * 256, 500, (0, 0, None)),
        LoopWorkload("Newton", newton, _spread, 65_536, sequential=True),
        LoopWorkload("bisection", bisection, _spread, 65_536, sequential=True),
        LoopWorkload("gcd", gcd, _pairs, 65_536, sequential=True),
        LoopWorkload(
            "adaptive ODE solver", oscillator, _oscillators, 4096, 6, (0, 0, None), turns=5
        ),
        LoopWorkload("NUTS", chain, _chains, 256, 3, (0, 0, None), turns=5),
        LoopWorkload(
            "bounded loop", bounded, _with_counts, 512, 300, (0, 0, None), gradient=(1, 2)
        ),
        LoopWorkload(
            "bounded loop, 4,096 lanes",
            bounded,
            _with_counts,
            4096,
            300,
            (0, 0, None),
            gradient=(1,),
        ),
        LoopWorkload(
            "bounded Runge-Kutta", bounded_runge_kutta, _with_stiffness, 4096, 300, gradient=(1,)
        ),
        *(
            LoopWorkload(f"in place, {n:,} elements", in_place, _long_arrays, 4, n, turns=3)
            for n in (10_000, 20_000, 40_000)
        ),
        LoopWorkload("environments, 5% reset", environment, _environments, 1024, 10),
    )
}
