"""Decompositions give a lane of 10,000 what the function gives for that example alone."""

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import lax
from jax.lax import linalg as ll

import batchax as bx

LA = jnp.linalg
LANES = 10_000
KINDS = 16  # of matrices, one after another, again and again


def matrices():
    """Of each kind a matrix, and the same symmetric, and one far from singular."""
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((KINDS, 3, 3))
    plain[1] = np.eye(3)
    plain[2] = 0
    plain[3, :, 1] = 2 * plain[3, :, 0]
    plain[4] = np.ones((3, 3))
    plain[5] = np.diag([1, 1, 2])
    plain[6] = np.diag([2, 0, 0])
    plain[7] = [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    plain[8] = [[2, -1, -1], [-1, 2, -1], [-1, -1, 2]]
    plain[9, 0, 0] = np.nan
    plain[10] *= 1e-6
    plain[11] *= 1e6
    plain[12, 2] = plain[12, 0]
    regular = rng.standard_normal((KINDS, 3, 3)) / 4 + 2 * np.eye(3)
    regular[9, 1, 2] = np.nan
    symmetric = plain + plain.swapaxes(1, 2)
    definite = regular @ regular.swapaxes(1, 2)
    return {"a": plain, "s": symmetric, "r": regular, "p": definite}


def gradient(f):
    return jax.grad(lambda *xs: sum(jnp.sum(x * jnp.cos(x)) for x in jax.tree.leaves(f(*xs))))


def complex_of(x):
    return lax.complex(x["s"], x["a"] - x["a"].T)


# Of whatever matrices, of which some have results that are not unique.
CHOICES = {
    "eigh": lambda x: LA.eigh(x["s"]),
    "eigh of upper": lambda x: LA.eigh(x["s"], UPLO="U")[1],
    "eigh of complex": lambda x: LA.eigh(complex_of(x)),
    "eigenvector of the least": lambda x: LA.eigh(x["s"])[1][:, 0],
    "jsl.eigh": lambda x: jsl.eigh(x["s"]),
    "svd": lambda x: LA.svd(x["a"]),
    "svd, thin": lambda x: LA.svd(x["a"][:, :2], full_matrices=False),
    "svd, wide": lambda x: LA.svd(x["a"][:2]),
    "svd, vectors": lambda x: jsl.svd(x["a"])[2],
    "null space": lambda x: LA.svd(x["a"])[2][-1],
    "qr": lambda x: LA.qr(x["a"]),
    "qr, complete": lambda x: LA.qr(x["a"][:, :2], mode="complete")[0],
    "orthonormal basis": lambda x: jsl.qr(x["a"], mode="economic")[0],
    "polar": lambda x: jsl.polar(x["a"], method="svd"),
    "gradient of eigvalsh": gradient(lambda x: LA.eigvalsh(x["s"])),
    "gradient of an eigenvector": gradient(lambda x: LA.eigh(x["s"])[1][0]),
    "gradient of svdvals": gradient(lambda x: LA.svdvals(x["a"])),
}
# What is unique of whatever matrices, and so is computed together.
UNIQUE = {
    "eigvalsh": lambda x: LA.eigvalsh(x["s"]),
    "eigvalsh of complex": lambda x: LA.eigvalsh(complex_of(x)),
    "svdvals": lambda x: LA.svdvals(x["a"]),
    "values of svd": lambda x: LA.svd(x["a"])[1],
    "matrix_rank": lambda x: LA.matrix_rank(x["a"]),
    "norms": lambda x: (LA.norm(x["a"], 2), LA.norm(x["a"], "nuc")),
    "pinv": lambda x: LA.pinv(x["a"]),
    "pinv, hermitian": lambda x: LA.pinv(x["s"], hermitian=True),
    "det": lambda x: LA.det(x["a"]),
}
# Of matrices far from singular, of which rounding makes no more than rounding.
REGULAR = {
    "qr, upper": lambda x: LA.qr(x["r"], mode="r"),
    "lu": lambda x: jsl.lu(x["r"]),
    "lu_factor": lambda x: jsl.lu_factor(x["r"]),
    "permutation": lambda x: ll.lu(x["r"])[2],
    "slogdet": lambda x: LA.slogdet(x["r"]),
    "inv": lambda x: LA.inv(x["r"]),
    "solve": lambda x: LA.solve(x["r"], x["p"]),
    "solve of definite": lambda x: jsl.solve(x["p"], x["r"], assume_a="pos"),
    "lstsq": lambda x: LA.lstsq(x["r"], x["p"])[0],
    "cond": lambda x: LA.cond(x["r"]),
    "cholesky": lambda x: LA.cholesky(x["p"]),
    "solve_triangular": lambda x: jsl.solve_triangular(x["r"], x["p"], lower=True),
    "expm": lambda x: jsl.expm(x["r"]),
    "whitened": lambda x: jsl.solve_triangular(LA.cholesky(x["p"]), x["r"], lower=True),
    "gradient of inv": gradient(lambda x: LA.inv(x["r"])),
    "gradient of pinv": gradient(lambda x: LA.pinv(x["r"])),
    "gradient of slogdet": gradient(lambda x: LA.slogdet(x["p"])[1]),
}
FUNCTIONS = CHOICES | UNIQUE | REGULAR
PARTS = 6


def of_part(part):
    names = [*FUNCTIONS][part::PARTS]
    return lambda x: {name: FUNCTIONS[name](x) for name in names}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.each_commit(2)
@pytest.mark.compiles(60)
def test_a_lane_gets_what_it_gets_alone(part):
    f, few = of_part(part), {k: jnp.asarray(x) for k, x in matrices().items()}
    alone = jax.jit(f)
    expected = [alone({k: x[i] for k, x in few.items()}) for i in range(KINDS)]
    every = {k: jnp.tile(x, (LANES // KINDS, 1, 1)) for k, x in few.items()}
    ways = {"all": {}, "chunks": dict(batch_size=3000), "mesh": dict(mesh="all")}
    for way, options in ways.items():
        got = jax.jit(bx.vmap(f, **options))(every)
        for kind, lane in ((k, k + n * KINDS) for k in range(KINDS) for n in (0, 400)):
            take = lambda x, lane=lane: np.asarray(x[lane])
            for name, want in expected[kind].items():
                for x, y in zip(jax.tree.leaves(want), jax.tree.leaves(got[name]), strict=True):
                    alike(np.asarray(x), take(y), f"{name}, {way}, kind {kind}")


def alike(expected, got, where):
    eps = np.finfo(expected.dtype).eps if expected.dtype.kind in "fc" else 0
    size = max(1.0, float(np.max(np.abs(expected), initial=0, where=np.isfinite(expected))))
    np.testing.assert_allclose(got, expected, rtol=300 * eps, atol=300 * eps * size, err_msg=where)
