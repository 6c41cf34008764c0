"""Matrices that decompositions are tested on, and how far a decomposition is from its matrix."""

import functools

import jax
import numpy as np
from jax.lax import linalg

from batchax.linalg.table import DECOMPOSITIONS, with_lanes_last

DTYPES = ["float32", "float64", "complex64", "complex128"]


def _random(rng, n, dtype):
    x = rng.standard_normal((n, n))
    return x + 1j * rng.standard_normal((n, n)) if np.dtype(dtype).kind == "c" else x


def _grades(n, dtype):
    return np.float64(10.0) ** -np.linspace(0, 6 if np.finfo(dtype).bits == 32 else 14, n)


def general(n, dtype, seed=0):
    """Square matrices of each kind, by its name: ``[matrices, n, n]``."""
    rng = np.random.default_rng([n, seed])
    draw = lambda: _random(rng, n, dtype)
    info, grades = np.finfo(dtype), _grades(n, dtype)
    kinds = {
        "random": draw,
        "graded rows": lambda: draw() * grades[:, None],
        "graded columns": lambda: draw() * grades,
        "graded both": lambda: grades[:, None] * draw() * grades,
        "rank-deficient": lambda: draw()[:, : n - 1] @ draw()[: n - 1],
        "near-singular": lambda: (
            draw()[:, : n - 1] @ draw()[: n - 1] + 8 * float(info.eps) * draw()
        ),
        "permuted": lambda: np.eye(n)[rng.permutation(n)] * rng.standard_normal(n),
        "triangular": lambda: np.triu(draw()) + np.eye(n),
        "orthogonal": lambda: np.linalg.qr(draw())[0],
        "integers": lambda: rng.integers(-2, 3, (n, n)).astype(float),
        "ones": lambda: np.ones((n, n)),
        "zero": lambda: np.zeros((n, n)),
        "tiny": lambda: draw() * float(info.tiny) * 2.0**20,
        "huge": lambda: draw() * (float(info.max) * 2.0**-20),
    }
    return {
        kind: np.stack([make() for _ in range(4)]).astype(dtype) for kind, make in kinds.items()
    }


def positive(n, dtype, seed=0):
    """Hermitian matrices of each kind, all but the last few of them positive definite."""
    made = {}
    for kind, x in general(n, dtype, seed).items():
        wide = x.astype(np.complex128 if np.dtype(dtype).kind == "c" else np.float64)
        size = np.abs(wide).max() or 1.0
        unit = wide / size
        gram = unit @ unit.conj().swapaxes(-1, -2)
        made[kind] = ((gram + 8 * n * float(np.finfo(dtype).eps) * np.eye(n)) * size).astype(dtype)
        if "graded" in kind:
            grades = _grades(n, dtype)[:: -1 if kind == "graded rows" else 1]
            made[kind] = (grades[:, None] * made["random"] * grades).astype(dtype)
    made["indefinite"] = (lambda x: x + x.conj().swapaxes(-1, -2))(general(n, dtype)["random"])
    return made


def with_wrong_elements(x):
    """Matrices with a NaN or infinity somewhere, each beside one without."""
    wrong = []
    for k, value in enumerate([np.nan, np.inf, -np.inf]):
        for place in np.ndindex(x.shape[-2:]):
            one = x[k % len(x)].copy()
            one[place] = value
            wrong += [one, x[k % len(x)]]
    return np.stack(wrong)


def product(x, y):
    """The product of matrices, in double precision."""
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return x.astype(wide) @ y.astype(wide)


def error(x, product):
    """For each matrix the relative distance, in units of what its numbers round by."""
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    # Beside the largest: squares of huge numbers overflow, those of tiny ones are zero.
    scale = np.abs(x).max(axis=(-2, -1), keepdims=True).astype(np.float64)
    scale = np.where(scale > 0, scale, 1)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.linalg.norm((x.astype(wide) - product) / scale, axis=(-2, -1))
        size = np.linalg.norm(x.astype(wide) / scale, axis=(-2, -1))
        return apart / np.where(size > 0, size, 1) / float(np.finfo(x.dtype).eps)


def lanes_last(primitive, *operands, **params):
    """What a CPU computes in the place of a primitive of JAX, of operands with lanes last."""
    run = functools.partial(DECOMPOSITIONS[primitive].run, **params)
    types = jax.eval_shape(run, *operands)
    library = lambda *xs: jax.vmap(functools.partial(LIBRARY[primitive], **params), -1, -1)(*xs)
    return with_lanes_last(primitive, operands, types, params, False, library)


# Of those that leave some lanes to the library.
LIBRARY = {
    "cholesky": lambda x: [linalg.cholesky(x, symmetrize_input=False)],
    "lu": linalg.lu,
    "qr": linalg.qr,
}
