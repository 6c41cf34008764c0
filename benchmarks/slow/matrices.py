"""Many small matrices: by hand, lanes are last, and loops over rows and columns are written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import expm

from benchmarks.slow.workload import Slow
from benchmarks.workload import normal

FAMILY = "Small matrices"


def inverse_by_hand(m: Any) -> Any:
    """Of 3 x 3, by cofactors."""
    (a, b, c), (d, e, f), (g, h, i) = jnp.moveaxis(m, 0, -1)
    rows = [
        [e * i - f * h, c * h - b * i, b * f - c * e],
        [f * g - d * i, a * i - c * g, c * d - a * f],
        [d * h - e * g, b * g - a * h, a * e - b * d],
    ]
    inverse = jnp.stack([jnp.stack(row) for row in rows])
    return jnp.moveaxis(inverse / (a * rows[0][0] + b * rows[1][0] + c * rows[2][0]), -1, 0)


def determinant_by_hand(m: Any) -> Any:
    """Of 3 x 3, by cofactors."""
    (a, b, c), (d, e, f), (g, h, i) = jnp.moveaxis(m, 0, -1)
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)


def eliminated(m: Any, b: Any) -> Any:
    """The solutions, lanes last: Gauss and Jordan, with the largest pivot of each column."""
    n = len(m)
    rows = jnp.concatenate([m, b[:, None]], 1)
    for k in range(n):
        pivot = k + jnp.argmax(jnp.abs(rows[k:, k]), 0)
        chosen = jnp.take_along_axis(rows, pivot[None, None], 0)[0]
        here = jnp.arange(n)[:, None, None]
        rows = jnp.where(here == pivot, rows[k], rows).at[k].set(chosen / chosen[k])
        others = jnp.where(here == k, 0, rows[:, k][:, None])
        rows = rows - others * rows[k]
    return rows[:, n]


def solve_by_hand(m: Any, b: Any) -> Any:
    return eliminated(jnp.moveaxis(m, 0, -1), b.T).T


def solve_gradient_by_hand(m: Any, b: Any) -> Any:
    x = solve_by_hand(m, b)
    y = solve_by_hand(jnp.swapaxes(m, 1, 2), jnp.ones_like(b))
    return -y[:, :, None] * x[:, None, :], y


def cholesky_by_hand(m: Any) -> Any:
    a = jnp.moveaxis(m, 0, -1)
    n = len(a)
    columns: list[Any] = []
    for j in range(n):
        column = a[j:, j] - sum(c[j:] * c[j] for c in columns)
        column = column / jnp.sqrt(column[0])
        columns.append(jnp.concatenate([jnp.zeros_like(a[:j, j]), column]))
    return jnp.moveaxis(jnp.stack(columns, 1), -1, 0)


def eigenvalues_by_hand(m: Any) -> Any:
    """Jacobi's rotations, of each pair of rows in turn, seven times."""
    a = jnp.moveaxis(m, 0, -1)
    n = len(a)
    pairs = jnp.array([(p, q) for p in range(n) for q in range(p + 1, n)])

    def rotate(step: Any, a: Any) -> Any:
        p, q = pairs[step % len(pairs)]
        slope = (a[q, q] - a[p, p]) / (2 * jnp.where(a[p, q] == 0, 1, a[p, q]))
        t = jnp.where(slope < 0, -1, 1) / (jnp.abs(slope) + jnp.sqrt(slope**2 + 1))
        t = jnp.where(a[p, q] == 0, 0, t)
        c = 1 / jnp.sqrt(t**2 + 1)
        a = a.at[p].set(c * (a[p] - t * a[q])).at[q].set(c * (t * a[p] + a[q]))
        left, right = a[:, p], a[:, q]
        return a.at[:, p].set(c * (left - t * right)).at[:, q].set(c * (t * left + right))

    a = jax.lax.fori_loop(0, 7 * len(pairs), rotate, a)
    return jnp.sort(jnp.stack([a[i, i] for i in range(n)]), 0).T


def magnitudes(m: Any) -> Any:
    """Those of both QR factors, whose signs are a choice."""
    return tuple(map(jnp.abs, jnp.linalg.qr(m)))


def factors_by_hand(m: Any) -> Any:
    """Columns made orthogonal to those before them (Gram and Schmidt), with lanes last."""
    a, q, r = jnp.moveaxis(m, 0, -1), [], []
    for j in range(a.shape[1]):
        x, above = a[:, j], []
        for column in q:
            above.append((column * x).sum(0))
            x = x - above[-1] * column
        length = jnp.sqrt((x * x).sum(0))
        q.append(x / length)
        r.append([*above, length, *[jnp.zeros_like(length)] * (a.shape[1] - j - 1)])
    factors = jnp.stack(q, 1), jnp.swapaxes(jnp.array(r), 0, 1)
    return tuple(jnp.abs(jnp.moveaxis(x, -1, 0)) for x in factors)


def pseudoinverse_by_hand(m: Any) -> Any:
    """By the normal equations, of three unknowns."""
    transposed = jnp.swapaxes(m, 1, 2)
    return inverse_by_hand(transposed @ m) @ transposed


def product_by_hand(x: Any, y: Any) -> Any:
    a, b = jnp.moveaxis(x, 0, -1), jnp.moveaxis(y, 0, -1)
    return jnp.moveaxis(sum(a[:, k, None] * b[k] for k in range(len(b))), -1, 0)


def exponential_by_hand(m: Any) -> Any:
    """Taylor's series of a 64th of it, to the power of 64, with lanes last."""
    a = jnp.moveaxis(m, 0, -1) / 64
    product = lambda x, y: sum(x[:, k, None] * y[k] for k in range(len(y)))
    one = jnp.eye(len(a))[:, :, None]
    e = one + a / 7
    for k in range(6, 0, -1):
        e = one + product(a, e) / k
    for _ in range(6):
        e = product(e, e)
    return jnp.moveaxis(e, -1, 0)


def tridiagonal_by_hand(below: Any, d: Any, above: Any, b: Any) -> Any:
    """Thomas's algorithm, which has no pivots, for one right side each."""

    def down(before: Any, row: Any) -> Any:
        (c, x), (below, d, above, b) = before, row
        pivot = d - below * c
        after = above / pivot, (b - below * x) / pivot
        return after, after

    zeros = jnp.zeros_like(d[:, 0])
    rows = below.T, d.T, above.T, b[:, :, 0].T
    _, (c, x) = jax.lax.scan(down, (zeros, zeros), rows)
    up = lambda last, row: (row[1] - row[0] * last,) * 2
    return jax.lax.scan(up, zeros, (c, x), reverse=True)[1].T[:, :, None]


def _square(n: int) -> Callable[[int], tuple[Any, ...]]:
    return lambda lanes: (normal(lanes, n, n),)


def _system(n: int) -> Callable[[int], tuple[Any, ...]]:
    return lambda lanes: (normal(lanes, n, n) + n * jnp.eye(n), normal(lanes, n, seed=1))


def _pair(n: int, dtype: Any = float) -> Callable[[int], tuple[Any, ...]]:
    def data(lanes: int) -> tuple[Any, ...]:
        parts = [normal(lanes, n, n, seed=i) for i in range(4)]
        if dtype is float:
            return tuple(parts[:2])
        return parts[0] + 1j * parts[1], parts[2] + 1j * parts[3]

    return data


def _bands(n: int) -> Callable[[int], tuple[Any, ...]]:
    def data(lanes: int) -> tuple[Any, ...]:
        below, above = (normal(lanes, n, seed=i) for i in (1, 2))
        edge = jnp.arange(n)
        d = normal(lanes, n) + 4
        return below * (edge > 0), d, above * (edge < n - 1), normal(lanes, n, 1, seed=3)

    return data


def _definite(n: int) -> Callable[[int], tuple[Any, ...]]:
    def data(lanes: int) -> tuple[Any, ...]:
        x = normal(lanes, n, n)
        return (x @ jnp.swapaxes(x, 1, 2) + n * jnp.eye(n),)

    return data


def _gradient(batched: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda m, b: batched(m, b).sum(), (0, 1))


_LANES = 10_000
WORKLOADS = [
    Slow("inv, 3 x 3", FAMILY, jnp.linalg.inv, inverse_by_hand, _square(3), _LANES, 0.25),
    Slow("det, 3 x 3", FAMILY, jnp.linalg.det, determinant_by_hand, _square(3), _LANES, 0.25),
    *(
        Slow(
            f"solve, {n} x {n}",
            FAMILY,
            jnp.linalg.solve,
            solve_by_hand,
            _system(n),
            _LANES,
            goal,
        )
        for n, goal in ((3, 0.25), (6, 0.4))
    ),
    Slow(
        "gradient of solve, 4 x 4",
        FAMILY,
        jnp.linalg.solve,
        solve_gradient_by_hand,
        _system(4),
        _LANES,
        0.5,
        around=_gradient,
    ),
    *(
        Slow(
            f"cholesky, {n} x {n}",
            FAMILY,
            jnp.linalg.cholesky,
            cholesky_by_hand,
            _definite(n),
            _LANES,
            goal,
        )
        for n, goal in ((4, 0.25), (10, 0.6))
    ),
    *(
        Slow(f"product, {name}", FAMILY, jnp.matmul, product_by_hand, data, _LANES, goal)
        for name, data, goal in (
            ("4 x 4", _pair(4), 0.25),
            ("7 x 7", _pair(7), 0.4),
            ("complex 4 x 4", _pair(4, complex), 0.25),
        )
    ),
    Slow("expm, 4 x 4", FAMILY, expm, exponential_by_hand, _square(4), 2_000, 0.25),
    Slow(
        "tridiagonal solve of 16",
        FAMILY,
        jax.lax.linalg.tridiagonal_solve,
        tridiagonal_by_hand,
        _bands(16),
        _LANES,
        1.05,  # by loops 0.53x the time, which 100 calls do not gain back: 6.5x to compile
    ),
    Slow(
        "eigvalsh, 6 x 6",
        FAMILY,
        jnp.linalg.eigvalsh,
        eigenvalues_by_hand,
        _definite(6),
        _LANES,
        0.6,
    ),
    Slow(
        "pinv, 6 x 3",
        FAMILY,
        jnp.linalg.pinv,
        pseudoinverse_by_hand,
        lambda lanes: (normal(lanes, 6, 3),),
        _LANES,
        0.25,
    ),
    Slow(
        "QR factors, 6 x 6, vectorized",
        FAMILY,
        magnitudes,
        factors_by_hand,
        _square(6),
        _LANES,
        0.6,
        options={"small_matrices": "vectorized"},
    ),
]
