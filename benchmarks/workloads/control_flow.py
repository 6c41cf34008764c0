"""Loops and branches whose predicates differ from lane to lane, and those that do not."""

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.workload import integers, normal, uniform, workload

FAMILY = "control flow"


@workload(FAMILY, lambda n: (uniform(n, low=0.1, high=100.0),), lanes=4096)
def newton_until_converged(a):
    def unfinished(state):
        x, i = state
        return (jnp.abs(x * x - a) > 1e-4 * a) & (i < 50)

    def improve(state):
        x, i = state
        return 0.5 * (x + a / x), i + 1

    return lax.while_loop(unfinished, improve, (a, 0))


@workload(FAMILY, lambda n: (normal(n, 32), integers(n, below=40)), lanes=512)
def while_with_vector_state(x, steps):
    def body(state):
        i, x, total = state
        x = jnp.tanh(x + 0.1 * jnp.roll(x, 1))
        return i + 1, x, total + jnp.sum(x)

    return lax.while_loop(lambda s: s[0] < steps, body, (0, x, 0.0))


@workload(FAMILY, lambda n: (normal(n, 64), jnp.int32(20)), lanes=512, in_axes=(0, None))
def while_with_shared_predicate(x, steps):
    return lax.while_loop(
        lambda s: s[0] < steps, lambda s: (s[0] + 1, jnp.sin(s[1]) + x), (0, jnp.zeros_like(x))
    )


@workload(FAMILY, lambda n: (normal(n, 64),), lanes=1024)
def power_iteration_with_fori_loop(x):
    decay = jnp.linspace(0.5, 1.0, 64)

    def body(i, v):
        v = decay * v + 0.01 * i
        return v / jnp.linalg.norm(v)

    return lax.fori_loop(0, 20, body, x)


@workload(FAMILY, lambda n: (normal(n, 64),), lanes=1024)
def cond_on_cheap_branches(x):
    return lax.cond(x[0] > 0, jnp.sin, lambda y: y * y, x)


@workload(FAMILY, lambda n: (normal(n, 32),), lanes=256)
def cond_on_a_loop(x):
    iterate = lambda y: lax.fori_loop(0, 10, lambda _, z: jnp.cos(z) + 0.1 * y, y)
    return lax.cond(jnp.sum(x) > 0, iterate, jnp.negative, x)


@workload(FAMILY, lambda n: (normal(n, 64), jnp.array(True)), lanes=1024, in_axes=(0, None))
def cond_with_shared_predicate(x, flag):
    return lax.cond(flag, jnp.sin, lambda y: y * y, x)


@workload(FAMILY, lambda n: (integers(n, below=4), normal(n, 128)), lanes=1024)
def switch_per_lane(index, x):
    return lax.switch(index, [jnp.sin, jnp.cos, jnp.tanh, lambda y: y + 1], x)


@workload(FAMILY, lambda n: (normal(n, 64, 4),), lanes=256)
def associative_scan(x):
    return lax.associative_scan(lambda a, b: a * 0.9 + b, x)


@workload(FAMILY, lambda n: (normal(n, 16),), lanes=256)
def scan_over_shared_inputs(x):
    shared = jnp.linspace(0.0, 1.0, 30)

    def step(carry, t):
        count, state = carry
        state = state + t * jnp.sin(state + count)
        return (count + 1, state), (t * t, state[0])

    return lax.scan(step, (0, x), shared)


@workload(FAMILY, lambda n: (normal(n, 6, 3),), lanes=256)
def runge_kutta_steps(state):
    def field(s):
        x, y, z = s[..., 0], s[..., 1], s[..., 2]
        return jnp.stack([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z], axis=-1)

    def step(s, _):
        h = 0.01
        k1 = field(s)
        k2 = field(s + h / 2 * k1)
        k3 = field(s + h / 2 * k2)
        k4 = field(s + h * k3)
        return s + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return lax.scan(step, state, None, length=20)[0]


@workload(FAMILY, lambda n: (uniform(n, low=0.5, high=3.0),), lanes=1024)
def while_inside_scan(rate):
    def step(x, _):
        x = lax.while_loop(lambda y: y < 5.0, lambda y: y * (1 + rate), x)
        return jax.nn.sigmoid(x), x

    return lax.scan(step, rate, None, length=5)
