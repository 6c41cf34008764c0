"""Loops whose lanes end by themselves: steps of all costs, searches, root finders, solvers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import batchax as bx
from benchmarks.search.drafted import COUNTS, GRADIENT, VALUES, draft
from benchmarks.workload import integers, keys, normal, uniform

# A step of each cost, for as many steps as a lane is given.

STEPS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], tuple[int, ...]]] = {
    "a scalar": (lambda x: x * 0.9 + 0.1, (), (65536,)),
    "a sine": (lambda x: jnp.sin(x) + 0.1, (), (10000,)),
    "32 sines": (lambda x: jnp.sin(x) + 0.1, (32,), (64, 4096)),
    "256 tanh": (lambda x: jnp.tanh(x + jnp.roll(x, 1)), (256,), (16,)),
    "32x32 of state": (lambda x: 0.9 * x + 0.1 * jnp.roll(x, 1, 0), (32, 32), (64, 512)),
    "product 16": (lambda x: jnp.tanh(_matrix(16) @ x), (16,), (2048,)),
    "tanh of 8": (lambda x: x * 0.5 - 0.1 * jnp.tanh(x), (8,), (1024,)),
    "a softmax of 8": (jax.nn.softmax, (8,), (1024,)),
    "product 64": (lambda x: jnp.tanh(_matrix(64) @ x), (64,), (64, 1024)),
    "own product 16": (lambda x: jnp.tanh(x @ x.T / 16), (16, 16), (256,)),
    "a sort of 64": (lambda x: jnp.sort(jnp.sin(5 * x)), (64,), (256,)),
    "a convolution": (lambda x: jnp.tanh(jnp.convolve(x, jnp.ones(5) / 5, "same")), (64,), (256,)),
    "Cholesky 8": (
        lambda x: jnp.linalg.cholesky(x @ x.T / 8 + jnp.eye(8)),
        (8, 8),
        (256,),
    ),
    "a lookup": (lambda x: x.at[jnp.int32(jnp.abs(x[0]) * 100) % 32].add(0.1), (32,), (4096,)),
}


def _matrix(size: int) -> Any:
    return normal(size, size, seed=1) / size**0.5


def _counted(step: Callable[[Any], Any]) -> Callable[..., Any]:
    def fun(count: Any, x: Any) -> Any:
        body = lambda carry: (carry[0] + 1, step(carry[1]))
        return lax.while_loop(lambda carry: carry[0] < count, body, (jnp.int32(0), x))[1]

    return fun


for _name, (_step, _shape, _lanes) in STEPS.items():
    _data = {
        kind: lambda n, counts=counts, shape=_shape: (counts(n), normal(n, *shape))
        for kind, counts in COUNTS.items()
    }
    draft("loop", _name, _counted(_step), _data, *_lanes)


def _recurrent(count: Any, x: Any) -> Any:
    inputs, inside, outside = normal(64, 4), normal(48, 16, seed=1) / 4, normal(48, 4, seed=2)

    def step(carry: Any) -> Any:
        at, state = carry
        (r, u, c), (rs, us, cs) = (
            jnp.split(m @ v, 3) for m, v in ((outside, inputs[at % 64]), (inside, state))
        )
        new = jnp.tanh(c + jax.nn.sigmoid(r + rs) * cs)
        return at + 1, new + jax.nn.sigmoid(u + us) * (state - new)

    return lax.while_loop(lambda carry: carry[0] < count, step, (jnp.int32(0), x))[1]


_data = {
    kind: lambda n, counts=counts: (counts(n), normal(n, 16)) for kind, counts in COUNTS.items()
}
draft("loop", "a GRU of 16", _recurrent, _data, 1024)


def _bounded(count: Any, x: Any) -> Any:
    body = lambda carry: (carry[0] + 1, jnp.tanh(_matrix(64) @ carry[1]))
    start = jnp.int32(0), x
    return bx.bounded_while(lambda carry: carry[0] < count, body, start, max_steps=256)[1]


_data = {
    kind: lambda n, counts=counts: (counts(n), normal(n, 64)) for kind, counts in COUNTS.items()
}
draft("loop", "bounded product 64", _bounded, _data, 32, 128, uses=(GRADIENT,), wrt=1)

# Loops that end where a lane has found what it looks for.


def _until(far: Callable[[Any], Any], step: Callable[[Any], Any], most: int = 60) -> Any:
    def fun(*args: Any) -> Any:
        body = lambda carry: (carry[0] + 1, step(carry[1:]))
        going = lambda carry: (carry[0] < most) & far(carry[1:])
        return lax.while_loop(going, lambda c: _flat(body(c)), (jnp.int32(0), *args))

    return fun


def _flat(carry: Any) -> tuple[Any, ...]:
    count, rest = carry
    return (count, *rest)


def _positive(n: int) -> tuple[Any, ...]:
    return (uniform(n, low=0.1, high=1e4), jnp.ones(n))


_newton = _until(
    lambda s: jnp.abs(s[1] ** 2 - s[0]) > 1e-4 * s[0],
    lambda s: (s[0], (s[1] + s[0] / s[1]) / 2),
)
_kepler = _until(
    lambda s: jnp.abs(s[2] - s[1] * jnp.sin(s[2]) - s[0]) > 1e-5,
    lambda s: (
        s[0],
        s[1],
        s[2] - (s[2] - s[1] * jnp.sin(s[2]) - s[0]) / (1 - s[1] * jnp.cos(s[2])),
    ),
)
_halley = _until(
    lambda s: jnp.abs(s[1] ** 3 - s[0]) > 1e-4 * s[0],
    lambda s: (s[0], s[1] * (s[1] ** 3 + 2 * s[0]) / (2 * s[1] ** 3 + s[0])),
)
_collatz = _until(
    lambda s: s[0] > 1, lambda s: (jnp.where(s[0] % 2 == 0, s[0] // 2, 3 * s[0] + 1),)
)
_digits = _until(lambda s: s[0] > 0, lambda s: (s[0] // 10, s[1] + s[0] % 10))
_escape = _until(
    lambda s: s[2] ** 2 + s[3] ** 2 < 4,
    lambda s: (s[0], s[1], s[2] ** 2 - s[3] ** 2 + s[0], 2 * s[2] * s[3] + s[1]),
    100,
)
_agm = _until(
    lambda s: jnp.abs(s[0] - s[1]) > 1e-4, lambda s: ((s[0] + s[1]) / 2, jnp.sqrt(s[0] * s[1]))
)
_gcd = _until(lambda s: s[1] != 0, lambda s: (s[1], s[0] % s[1]))

draft("root", "Newton", _newton, _positive, 10000, 30000)
draft("root", "Halley", _halley, _positive, 30000)
draft(
    "root",
    "Kepler",
    _kepler,
    lambda n: (uniform(n, high=6.0), uniform(n, high=0.9, seed=1), jnp.full(n, 3.0)),
    512,
    16384,
)
draft("root", "arithmetic-geometric mean", _agm, lambda n: (*_positive(n)[:1], jnp.ones(n)), 16384)
draft("integers", "Collatz", _collatz, lambda n: (integers(n, below=1000) + 1,), 256, 16384)
draft("integers", "digits", _digits, lambda n: (integers(n, below=10**9), jnp.zeros(n, int)), 8192)
draft(
    "integers",
    "gcd",
    _gcd,
    lambda n: (integers(n, below=10**9), integers(n, below=10**9, seed=1)),
    4096,
)
draft(
    "loop",
    "Mandelbrot",
    _escape,
    lambda n: (
        uniform(n, low=-2, high=1),
        uniform(n, low=-1, high=1, seed=1),
        jnp.zeros(n),
        jnp.zeros(n),
    ),
    1024,
    65536,
)


def binary_search(table: Any, x: Any) -> Any:
    def halve(s: Any) -> Any:
        low, high = s
        middle = (low + high) // 2
        right = table[middle] < x
        return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

    return lax.while_loop(lambda s: s[0] < s[1], halve, (jnp.int32(0), jnp.int32(table.size)))[0]


def tree_descent(threshold: Any, left: Any, x: Any) -> Any:
    """Down a decision tree whose leaves are at several depths."""

    def down(node: Any) -> Any:
        return left[node] + (x[node % 8] > threshold[node])

    return lax.while_loop(lambda node: left[node] > 0, down, jnp.int32(0))


def _tree(n: int) -> tuple[Any, ...]:
    nodes = jnp.arange(255)
    inner = (2 * nodes + 2 < 255) & ((nodes < 31) | (nodes % 3 > 0))
    return uniform(255), jnp.where(inner, 2 * nodes + 1, 0), uniform(n, 8, seed=1)


def linear_search(words: Any, x: Any) -> Any:
    return lax.while_loop(lambda i: (i < 64) & (words[i % 64] != x), lambda i: i + 1, jnp.int32(0))


def rejection(key: Any) -> Any:
    """A point of the ball of four dimensions."""

    def draw(s: Any) -> Any:
        key, point = jax.random.split(s[0])
        return key, jax.random.uniform(point, (4,), minval=-1, maxval=1)

    return lax.while_loop(lambda s: jnp.sum(s[1] ** 2) > 1, draw, (key, jnp.ones(4)))[1]


def walk(key: Any) -> Any:
    """A walk of drawn steps until it leaves a slab, as that of a photon."""

    def step(s: Any) -> Any:
        key, x, n = s
        key, length, angle = jax.random.split(key, 3)
        cosine = jax.random.uniform(angle, minval=-1.0)
        return key, x + cosine * jax.random.exponential(length), n + 1

    start = key, jnp.float32(0), jnp.int32(0)
    return lax.while_loop(lambda s: (jnp.abs(s[1]) < 4) & (s[2] < 1000), step, start)[1:]


def conjugate_gradients(a: Any, b: Any) -> Any:
    def step(s: Any) -> Any:
        x, r, p, rr = s
        ap = a @ p
        alpha = rr / (p @ ap)
        r = r - alpha * ap
        return x + alpha * p, r, r + (r @ r) / rr * p, r @ r

    start = jnp.zeros_like(b), b, b, b @ b
    return lax.while_loop(lambda s: s[3] > 1e-6, step, start)[0]


def sinkhorn(cost: Any) -> Any:
    kernel = jnp.exp(-cost)

    def step(s: Any) -> Any:
        u, _, i = s
        new = 1 / (kernel @ (1 / (kernel.T @ u)))
        return new, jnp.max(jnp.abs(new - u)), i + 1

    start = jnp.ones(cost.shape[0]), jnp.float32(1), 0
    return lax.while_loop(lambda s: (s[1] > 1e-4) & (s[2] < 50), step, start)[0]


def power_iteration(a: Any) -> Any:
    def step(s: Any) -> Any:
        v, _, i = s
        w = a @ v
        w = w / jnp.linalg.norm(w)
        return w, jnp.sum((w - v) ** 2), i + 1

    start = jnp.ones(a.shape[0]) / 4, jnp.float32(1), 0
    return lax.while_loop(lambda s: (s[1] > 1e-5) & (s[2] < 100), step, start)[0]


def newton_system(a: Any, x: Any) -> Any:
    """The solution of a system of equations that are not linear, by solves with its Jacobian."""
    left = lambda x: a @ x + x**3 - 1

    def step(s: Any) -> Any:
        x, i = s
        return x - jnp.linalg.solve(jax.jacfwd(left)(x), left(x)), i + 1

    far = lambda s: (jnp.max(jnp.abs(left(s[0]))) > 1e-4) & (s[1] < 20)
    return lax.while_loop(far, step, (x, 0))[0]


def descent(x: Any) -> Any:
    """Gradient descent on Rosenbrock's function until the gradient is small."""
    value = lambda x: jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)

    def step(s: Any) -> Any:
        return s[0] - 1e-3 * jax.grad(value)(s[0]), s[1] + 1

    far = lambda s: (jnp.linalg.norm(jax.grad(value)(s[0])) > 3) & (s[1] < 200)
    return lax.while_loop(far, step, (x, 0))[0]


def adaptive_euler(rate: Any, y: Any) -> Any:
    """Heun's method with a step size by its error estimate."""
    slope = lambda y: jnp.stack([y[1], rate * (1 - y[0] ** 2) * y[1] - y[0]])

    def step(s: Any) -> Any:
        t, h, y, i = s
        a = slope(y)
        b = slope(y + h * a)
        error = jnp.max(jnp.abs(h * (b - a))) / 2
        good = error < 1e-2
        y = jnp.where(good, y + h * (a + b) / 2, y)
        return jnp.where(good, t + h, t), h * jnp.where(good, 1.2, 0.5), y, i + 1

    going = lambda s: (s[0] < 2) & (s[3] < 500)
    return lax.while_loop(going, step, (jnp.float32(0), jnp.float32(0.1), y, 0))[2]


def bfgs(x: Any) -> Any:
    from jax.scipy.optimize import minimize

    value = lambda x: jnp.sum((1 - x[:-1]) ** 2 + 5 * (x[1:] - x[:-1] ** 2) ** 2)
    return minimize(value, x, method="BFGS", options={"maxiter": 20}).x


def gmres(a: Any, b: Any) -> Any:
    return jax.scipy.sparse.linalg.gmres(lambda x: a @ x, b, tol=1e-3, maxiter=5)[0]


def cg(a: Any, b: Any) -> Any:
    return jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, tol=1e-3)[0]


def odeint(rate: Any, y: Any) -> Any:
    from jax.experimental.ode import odeint

    slope = lambda y, t: jnp.stack([y[1], rate * (1 - y[0] ** 2) * y[1] - y[0]])
    return odeint(slope, y, jnp.array([0.0, 1.0]), rtol=1e-4)[-1]


def slice_sampling(key: Any, x: Any) -> Any:
    """Ten draws of Neal's sampler: out until outside, then shrink until inside."""
    log = lambda x: -(x**2) / 2 - jnp.abs(x)

    def draw(state: Any, key: Any) -> Any:
        x = state
        below, place, again = jax.random.split(key, 3)
        level = log(x) + jnp.log(jax.random.uniform(below))
        low = x - jax.random.uniform(place)
        low = lax.while_loop(lambda a: log(a) > level, lambda a: a - 1, low)
        high = lax.while_loop(lambda a: log(a) > level, lambda a: a + 1, low + 1)

        def shrink(s: Any) -> Any:
            low, high, _, key = s
            key, use = jax.random.split(key)
            new = jax.random.uniform(use, minval=low, maxval=high)
            return jnp.where(new < x, new, low), jnp.where(new < x, high, new), new, key

        outside = lambda s: log(s[2]) < level
        new = lax.while_loop(outside, shrink, (low, high, jnp.full_like(x, 1e3), again))[2]
        return new, new

    return lax.scan(draw, x, jax.random.split(key, 10))[1]


def _definite(n: int, size: int) -> Any:
    x = normal(n, size, size)
    return x @ x.transpose(0, 2, 1) / size + jnp.eye(size)


_system = lambda size: lambda n: (_definite(n, size), normal(n, size))
_stiff = lambda n: (uniform(n, low=0.1, high=5.0), normal(n, 2))

draft(
    "search",
    "binary",
    binary_search,
    lambda n: (jnp.sort(normal(1000)), normal(n, seed=1)),
    1024,
    30000,
    in_axes=(None, 0),
)
draft("search", "down a tree", tree_descent, _tree, 1024, 30000, in_axes=(None, None, 0))
draft(
    "search",
    "linear",
    linear_search,
    lambda n: (integers(64, below=100), integers(n, below=100, seed=1)),
    4096,
    in_axes=(None, 0),
)
draft("sampling", "rejection", rejection, lambda n: (keys(n),), 256, 4096)
draft("sampling", "walk", walk, lambda n: (keys(n),), 512, 16_384)
draft("sampling", "slices", slice_sampling, lambda n: (keys(n), normal(n)), 256)
draft("solver", "conjugate gradients", conjugate_gradients, _system(16), 64, 1024)
draft("solver", "jax.scipy cg", cg, _system(16), 256, uses=(VALUES, GRADIENT), wrt=1)
draft("solver", "jax.scipy gmres", gmres, _system(8), 64)
draft("solver", "Sinkhorn", sinkhorn, lambda n: (uniform(n, 16, 16, high=4.0),), 64, 512)
draft("solver", "power iteration", power_iteration, lambda n: (_definite(n, 16),), 512)
draft(
    "solver", "Newton for a system", newton_system, lambda n: (_definite(n, 4), normal(n, 4)), 256
)
draft("solver", "descent", descent, lambda n: (normal(n, 8),), 1024)
draft("solver", "BFGS", bfgs, lambda n: (normal(n, 4),), 64)
draft("ODE", "adaptive Heun", adaptive_euler, _stiff, 64, 2048)
draft("ODE", "jax odeint", odeint, _stiff, 64, uses=(VALUES, GRADIENT))

# Searches, and solvers of few expensive operations, that a few lanes take much longer for.


def queens(order: Any) -> Any:
    """Places as many queens as the board has columns, tried in this order; how many tries."""
    n = order.size
    rows = jnp.arange(n)

    def step(carry: Any) -> Any:
        columns, tried, row, count = carry
        column = order[jnp.minimum(tried[row], n - 1)]
        apart = jnp.abs(columns - column)
        free = ~jnp.any((rows < row) & ((apart == 0) | (apart == jnp.abs(rows - row))))
        back = tried[row] >= n
        placed = ~back & free
        columns = jnp.where(placed, columns.at[row].set(column), columns)
        tried = tried.at[row].set(jnp.where(back, 0, tried[row] + 1))
        return columns, tried, row + jnp.where(back, -1, jnp.where(placed, 1, 0)), count + 1

    going = lambda carry: (carry[2] < n) & (carry[2] >= 0)
    none = jnp.zeros(n, jnp.int32)
    return lax.while_loop(going, step, (none, none, jnp.int32(0), jnp.int32(0)))[3]


def walks(keys: Any, children: Any) -> Any:
    """Walks down a tree of its own, time and again, until there are no children."""

    def walk(total: Any, start: Any) -> Any:
        down = lambda at: children[at, jnp.argmax(keys[children[at]])]
        end = lax.while_loop(lambda at: children[at, 0] > 0, down, start)
        return total + end, None

    return lax.scan(walk, jnp.int32(0), jnp.arange(100) % 8)[0]


def _trees(n: int) -> tuple[Any, ...]:
    """Of 128 nodes with four children each, as far as there are so many nodes."""
    children = 4 * jnp.arange(128)[:, None] + jnp.arange(1, 5)
    children = jnp.where(children < 128, children, 0).astype(jnp.int32)
    return normal(n, 128), jnp.tile(children, (n, 1, 1))


def van_der_waals(temperature: Any, pressure: Any) -> Any:
    """The volume of a gas, by Newton's method."""
    excess = lambda v: 8 * temperature / (3 * v - 1) - 3 / v**2 - pressure
    slope = jax.grad(excess)

    def step(carry: Any) -> Any:
        v, _, count = carry
        new = v - excess(v) / slope(v)
        new = jnp.where(new <= 0.34, (v + 0.34) / 2, new)
        return new, jnp.abs(new - v), count + 1

    start = 8 * temperature / (3 * pressure) + 0.4, jnp.float32(1), jnp.int32(0)
    return lax.while_loop(lambda c: (c[1] > 1e-5 * c[0]) & (c[2] < 500), step, start)[0]


def matching_pursuit(atoms: Any, signal: Any) -> Any:
    """Weights of few atoms that add up to a signal (Mallat and Zhang 1993)."""

    def step(carry: Any) -> Any:
        rest, weights, count = carry
        match = atoms.T @ rest
        best = jnp.argmax(jnp.abs(match))
        return rest - match[best] * atoms[:, best], weights.at[best].add(match[best]), count + 1

    much = 0.05 * jnp.linalg.norm(signal)
    going = lambda carry: (jnp.linalg.norm(carry[0]) > much) & (carry[2] < 500)
    return lax.while_loop(going, step, (signal, jnp.zeros(atoms.shape[1]), jnp.int32(0)))[1]


def _signals(n: int) -> tuple[Any, ...]:
    """Of 1 to 24 atoms each."""
    atoms = normal(64, 128, seed=1)
    atoms /= jnp.linalg.norm(atoms, axis=0)
    counts = integers(n, below=24) + 1
    ranks = jnp.argsort(jnp.argsort(uniform(n, 128, seed=2), 1), 1)
    return atoms, jnp.where(ranks < counts[:, None], normal(n, 128, seed=3), 0) @ atoms.T


def _permutations(n: int) -> tuple[Any, ...]:
    return (jnp.argsort(uniform(n, 10), 1).astype(jnp.int32),)


_gases = lambda n: (uniform(n, low=0.7, high=3), 10 ** uniform(n, low=-2, high=1, seed=1))
draft("search", "queens", queens, _permutations, 200)
draft("nested loop", "walk down a tree", walks, _trees, 64)
draft("root", "van der Waals", van_der_waals, _gases, 2048)
draft("solver", "matching pursuit", matching_pursuit, _signals, 300, in_axes=(None, 0))
