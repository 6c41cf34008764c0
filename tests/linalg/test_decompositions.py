"""Decompositions of small matrices with lanes last, against the library's of the same matrices."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg as ll

import batchax as bx

from support.matrices import (
    DTYPES,
    error,
    general,
    lanes_last,
    positive,
    product,
    with_wrong_elements,
)

cholesky = functools.partial(lanes_last, "cholesky")


@functools.cache
def compiled(run, *options):
    return jax.jit(functools.partial(run, *options))


def both(run, *args, options=()):
    """What `run` computes of arrays, ours and the library's."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, compiled(run, *options)(*args))


def of_cholesky(a):
    ours = cholesky(a.transpose(1, 2, 0))[0].transpose(2, 0, 1)
    return ours, jax.numpy.tril(ll.cholesky_p.bind(a))


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(5, "float32-5", "complex128-5")
def test_factors_are_as_near_as_the_librarys(dtype, n):
    kinds = positive(n, dtype)
    x = np.concatenate([*kinds.values(), with_wrong_elements(kinds["random"])])
    names = np.repeat([*kinds, "wrong"], [*map(len, kinds.values()), 6 * n * n])
    assert len(names) == len(x)
    # What is above the diagonal is not read.
    x = np.where(np.tri(n, dtype=bool), x, x.dtype.type(np.nan))
    ours, theirs = both(of_cholesky, x)
    assert ours.dtype == x.dtype
    fails = [np.isnan(y).any((-2, -1)) for y in (ours, theirs)]
    assert fails[1].any()
    assert not fails[1].all()
    lower = np.where(np.tri(n, dtype=bool), x, 0)
    full = lower + np.tril(lower, -1).conj().swapaxes(-1, -2)
    full[..., range(n), range(n)] = full[..., range(n), range(n)].real
    errors = [error(full, product(y, y.conj().swapaxes(-1, -2))) for y in (ours, theirs)]
    for kind in dict.fromkeys(names):
        mine = names == kind
        near = kind in ("rank-deficient", "near-singular", "ones", "integers", "triangular")
        if not near:  # where a pivot is about zero, its sign is that of what was rounded
            assert (fails[0] == fails[1])[mine].all(), kind
        good = mine & ~fails[0] & ~fails[1] & np.isfinite(full).all((-2, -1))
        if good.any():
            assert errors[0][good].max() <= 4 * max(errors[1][good].max(), 0.5), kind


def test_a_matrix_that_fails_is_nan_below_the_diagonal_and_others_are_not():
    x = np.stack([np.eye(2), [[1, 2], [2, 1]], [[-1, 0], [0, 1]], 4 * np.eye(2)]).astype("float32")
    ours = jax.jit(lambda a: cholesky(a.transpose(1, 2, 0))[0])(x).transpose(2, 0, 1)
    np.testing.assert_array_equal(np.isnan(ours).all((1, 2)), [False, True, True, False])
    np.testing.assert_array_equal(ours[::3], [np.eye(2), 2 * np.eye(2)])


lu = functools.partial(lanes_last, "lu")


def of_lu(a):
    ours = [jnp.moveaxis(x, -1, 0) for x in lu(jnp.moveaxis(a, 0, -1))]
    return ours, ll.lu(a)


def errors(x, factors):
    both, _, order = factors
    m, n = x.shape[1:]
    k = min(m, n)
    lower = np.tril(both, -1)[..., :k] + np.eye(m, k, dtype=x.dtype)
    upper = np.triu(both)[..., :k, :]
    return error(np.take_along_axis(x, order[..., None], 1), product(lower, upper))


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(5, "float32-5", "complex128-5")
def test_factors_are_as_near_as_the_librarys_of_lu(dtype, n):
    kinds = general(n, dtype)
    x = np.concatenate([*kinds.values()])
    names = np.repeat([*kinds], [*map(len, kinds.values())])
    ours, theirs = both(of_lu, x)
    assert [y.dtype for y in ours] == [y.dtype for y in theirs]
    mine, library = errors(x, ours), errors(x, theirs)
    for kind in kinds:
        these = names == kind
        assert mine[these].max() <= 4 * max(library[these].max(), 0.5), kind
        if kind not in ("integers", "rank-deficient", "near-singular", "orthogonal"):
            # Elsewhere which of two is the larger is decided by what was rounded.
            np.testing.assert_array_equal(ours[1][these], theirs[1][these], err_msg=kind)
            np.testing.assert_array_equal(ours[2][these], theirs[2][these], err_msg=kind)


def test_matrices_that_are_not_square_and_ties():
    for shape in [(2, 4), (4, 2)]:
        x = np.random.default_rng(0).integers(-3, 4, (40, *shape)).astype("float32")
        ours, theirs = both(of_lu, x)
        np.testing.assert_array_equal(ours[2][:, 0], theirs[2][:, 0])
        assert errors(x, ours).max() <= 4 * max(errors(x, theirs).max(), 0.5)


qr = functools.partial(lanes_last, "qr")


def of_qr(full, a):
    ours = qr(a.transpose(1, 2, 0), full_matrices=full, pivoting=False)
    return [x.transpose(2, 0, 1) for x in ours], ll.qr(a, full_matrices=full)


@pytest.mark.parametrize("shape", [(5, 5), (5, 3), (3, 5), (1, 1), (2, 1)])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(
    4, "float32-True-shape1", "complex128-False-shape0", "complex64-True-shape2"
)
def test_factors_are_the_librarys(dtype, full, shape):
    m, n = shape
    kinds = general(max(shape), dtype)
    x = np.concatenate([y[:, :m, :n] for y in kinds.values()]) + 0  # signs of zeros are not told
    names = np.repeat([*kinds], 4)
    (q, r), (q0, r0) = both(of_qr, x, options=(full,))
    assert (q.shape, r.shape, q.dtype) == (q0.shape, r0.shape, q0.dtype)
    assert (np.tril(r[:, :, :n], -1) == 0).all()
    results = [(q, r), (q0, r0)]
    apart = [error(x, product(a, b)) for a, b in results]
    eye = np.broadcast_to(np.eye(q.shape[-1], dtype=dtype), (len(x), *[q.shape[-1]] * 2))
    oblique = [error(eye, product(a.conj().swapaxes(-1, -2), a)) for a, _ in results]
    signs = [np.sign(np.diagonal(b.real, 0, 1, 2)) for _, b in results]
    for kind in kinds:
        mine = names == kind
        for ours, theirs in (apart, oblique):
            # The library overflows where matrices are huge, and is no measure there.
            fair = np.nan_to_num(theirs[mine], nan=1.0, posinf=1.0).max()
            # A sum of so many numbers rounds by half of their root.
            assert ours[mine].max() <= 4 * max(fair, np.sqrt(max(shape)) / 2), kind
        if kind in ("random", "graded rows", "graded columns", "permuted", "zero", "tiny"):
            np.testing.assert_array_equal(signs[0][mine], signs[1][mine], kind)
    # What is well-conditioned is the same except for rounding, columns that complete it, too.
    mine = names == "orthogonal"
    np.testing.assert_allclose(q[mine], q0[mine], atol=100 * np.finfo(dtype).eps)


svd = functools.partial(lanes_last, "svd")


def of_svd(full, a):
    s, u, v = svd(a.transpose(1, 2, 0), full_matrices=full, compute_uv=True)
    u0, s0, v0 = ll.svd(a, full_matrices=full)
    return (u.transpose(2, 0, 1), s.T, v.transpose(2, 0, 1)), (u0, s0, v0)


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (3, 5), (1, 1), (1, 3)])
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(3, "float32-True-shape1", "complex128-False-shape2")
def test_matrices_are_what_they_are_decomposed_into_as_the_librarys_are(dtype, full, shape):
    m, n = shape
    kinds = general(max(shape), dtype)
    x = np.concatenate([y[:, :m, :n] for y in kinds.values()])
    names = np.repeat([*kinds], 4)
    results = both(of_svd, x, options=(full,))
    size = lambda y: [z.shape for z in y] + [z.dtype for z in y]
    assert size(results[0]) == size(results[1])
    apart, left, right = [], [], []
    for u, s, v in results:
        assert (np.diff(s, axis=1) <= 0).all()
        assert (s >= 0).all()
        k = min(m, n)
        wide = u[:, :, :k].astype(np.complex128) * s[:, None].astype(np.float64)
        apart.append(error(x, product(wide, v[:, :k])))
        for y, z in ((left, u), (right, v.conj().swapaxes(-1, -2))):
            eye = np.broadcast_to(np.eye(z.shape[-1], dtype=dtype), (len(x), *[z.shape[-1]] * 2))
            y.append(error(eye, product(z.conj().swapaxes(-1, -2), z)))
    for kind in kinds:
        mine = names == kind
        for ours, theirs in (apart, left, right):
            assert ours[mine].max() <= 4 * max(theirs[mine].max(), 0.5), kind


@pytest.mark.parametrize("fun", [jnp.linalg.pinv, jnp.linalg.eigvalsh])
def test_an_infinity_is_nan_wherever_it_is(fun):
    """What LAPACK makes of one depends on its place: zeros, NaN, or it never returns."""
    x = np.tile(np.eye(3, dtype="float32") + 1, (5000, 1, 1))
    places = list(itertools.product(range(3), repeat=2))
    for k, (i, j) in enumerate(places):
        x[k, i, j] = x[k, j, i] = (-1) ** k * np.inf
    x[len(places)] = np.inf
    found = np.asarray(jax.jit(bx.vmap(fun))(x))
    wrong = np.arange(len(x)) <= len(places)
    others = tuple(range(1, found.ndim))
    np.testing.assert_array_equal(np.isnan(found).all(others), wrong)
    np.testing.assert_array_equal(np.isnan(found).any(others), wrong)


triangular_solve = functools.partial(lanes_last, "triangular_solve")

NAMES = ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal")
WAYS = tuple(itertools.product([False, True], repeat=5))


def of_triangular_solve(ways, a, b, c):
    last = lambda x: jnp.moveaxis(x, 0, -1)
    ours, theirs = [], []
    for way in ways:
        way = dict(zip(NAMES, way, strict=True))
        right = b if way["left_side"] else c
        ours.append(jnp.moveaxis(triangular_solve(last(a), last(right), **way)[0], -1, 0))
        theirs.append(ll.triangular_solve(a, right, **way))
    return ours, theirs


def operand(a, way):
    """The matrix that is solved with."""
    a = np.tril(a) if way["lower"] else np.triu(a)
    if way["unit_diagonal"]:
        a[:, range(a.shape[1]), range(a.shape[1])] = 1
    a = a.conj() if way["conjugate_a"] else a
    return a.swapaxes(-1, -2) if way["transpose_a"] else a


def residual(a, x, b, way):
    """For each system, beside its numbers, in units of what they round by."""
    args = (a, x) if way["left_side"] else (x, a)
    wide = [product(*args), product(*map(np.abs, args))]
    with np.errstate(invalid="ignore", over="ignore"):
        size = wide[1].max((1, 2)) + np.abs(b).max((1, 2))
        apart = np.abs(wide[0] - b).max((1, 2))
        return np.where(apart == 0, 0, apart / size) / float(np.finfo(b.dtype).eps)


@pytest.mark.parametrize("third", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(4)
def test_solutions_are_as_near_as_the_librarys(dtype, third):
    n, ways = 4, WAYS[third::4] if np.dtype(dtype).kind == "c" else WAYS[third::4][::2]
    kinds = general(n, dtype)
    x = np.concatenate([kinds[k] for k in kinds if k not in ("tiny", "huge")])
    b, c = np.tile(general(n, dtype, 1)["random"], (len(x) // 4, 1, 1)), x[::-1] + x.dtype.type(1)
    b, c = b[:, :, :3], c[:, :2]
    results = both(of_triangular_solve, x, b, c, options=(ways,))
    for way, ours, theirs in zip(ways, *results, strict=True):
        way = dict(zip(NAMES, way, strict=True))
        a, right = operand(x.copy(), way), b if way["left_side"] else c
        finite = [np.isfinite(y).all((1, 2)) for y in (ours, theirs)]
        np.testing.assert_array_equal(*finite, err_msg=way)
        both_errors = [residual(a, y, right, way)[finite[0]].max() for y in (ours, theirs)]
        assert both_errors[0] <= 4 * max(both_errors[1], 0.5), way


def test_wrong_elements_stay_in_their_lane_and_the_other_triangle_is_not_read():
    a = with_wrong_elements(general(3, "float32")["random"])
    b = np.ones((len(a), 3, 1), "float32")
    ways = ((True, True, False, False, False),)
    (ours,), (theirs,) = both(of_triangular_solve, a, b, b.swapaxes(1, 2), options=(ways,))
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    assert np.isnan(ours).any()
    assert np.isfinite(ours[1::2]).all()


eigh = functools.partial(lanes_last, "eigh")

EPS = {dtype: float(np.finfo(dtype).eps) for dtype in DTYPES}


def adjoint(x):
    return x.conj().swapaxes(-1, -2)


def of_eigh(lower, a):
    v, w = eigh(a.transpose(1, 2, 0), lower=lower)
    values, vectors = jnp.linalg.eigh(a, "L" if lower else "U", symmetrize_input=False)
    return (v.transpose(2, 0, 1), w.T), (vectors, values)


def hermitian(n, dtype):
    """Hermitian matrices of each kind."""
    rng = np.random.default_rng(n)
    kinds = {kind: (x / 2 + adjoint(x) / 2) for kind, x in general(n, dtype).items()}
    kinds |= {f"definite {kind}": x for kind, x in positive(n, dtype).items()}
    turns = np.linalg.qr(rng.standard_normal((4, n, n)))[0]
    repeated = (turns * np.where(np.arange(n) % 2, 1.0, 2.0)) @ adjoint(turns)
    kinds["repeated"] = ((repeated + adjoint(repeated)) / 2).astype(dtype)
    kinds["no diagonal"] = kinds["random"] * (1 - np.eye(n, dtype=dtype))
    return kinds


@pytest.mark.parametrize("n", [1, 2, 5, 6, 10])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(4, "float32-6", "complex128-5", "float64-2")
def test_matrices_are_what_they_are_decomposed_into_as_the_librarys_are_of_eigh(dtype, n):
    kinds = hermitian(n, dtype)
    x = np.concatenate(list(kinds.values()))
    names = np.repeat([*kinds], 4)
    given = np.where(np.tri(n, dtype=bool), x, x.dtype.type(np.nan))
    full = x.copy()
    full[..., range(n), range(n)] = full[..., range(n), range(n)].real
    apart, oblique = [], []
    for v, w in both(of_eigh, given, options=(True,)):
        assert (v.dtype, w.dtype) == (x.dtype, x.real.dtype)
        assert (np.diff(w, axis=1) >= 0).all()
        wide = v.astype(np.complex128) * w[:, None].astype(np.float64)
        apart.append(error(full, product(wide, adjoint(v))))
        oblique.append(
            error(np.broadcast_to(np.eye(n, dtype=dtype), v.shape), product(adjoint(v), v))
        )
    for kind in kinds:
        mine = names == kind
        for ours, theirs in (apart, oblique):
            # Processors round in other places, and each of n rotations does.
            assert ours[mine].max() <= 4 * max(theirs[mine].max(), np.sqrt(n) / 2, n / 4), kind


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_eigenvalues_of_graded_definite_matrices_are_accurate(dtype):
    """As far as the matrices are without their grades (Demmel and Veselic 1992)."""
    n = 5
    rng = np.random.default_rng(0)
    half = rng.integers(-3, 4, (4, n, n)) + 4 * np.eye(n)
    whole = half @ adjoint(half)
    grades = 2.0 ** -(np.arange(n) * (6 if dtype == "float32" else 16))
    x = (grades[:, None] * whole * grades).astype(dtype)
    ours, theirs = both(of_eigh, x, options=(True,))
    # The product of all eigenvalues is the determinant: a whole number times powers of two.
    exact = np.round(np.linalg.det(whole)) * np.prod(grades) ** 2
    off = [np.abs(np.prod(w.astype(np.float64), 1) / exact - 1) for _, w in (ours, theirs)]
    sizes = np.sqrt(np.diagonal(whole, axis1=1, axis2=2))
    condition = np.linalg.cond(whole / sizes[:, :, None] / sizes[:, None])
    assert (off[0] <= n * condition * EPS[dtype]).all()
    assert off[0].max() <= 4 * max(off[1].max(), n * EPS[dtype])


TRIANGLE = np.tri(3, dtype=bool)
# Of each: which matrices it computes, with what options, what it reads of them, and whether all of
# a lane is NaN where that is not finite, or what the library makes of it.
WRONG = {
    "lu": (of_lu, (), True, False),
    "qr": (of_qr, (False,), True, False),
    "svd": (of_svd, (True,), True, True),
    "eigh": (of_eigh, (True,), TRIANGLE, True),
    "eigh of the upper triangle": (of_eigh, (False,), TRIANGLE.T, True),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.each_commit(5)
def test_wrong_elements_stay_in_their_lane(dtype, name):
    run, options, reads, all_nan = WRONG[name]
    mixed = with_wrong_elements(hermitian(3, dtype)["random"])
    wrong = ~np.isfinite(np.where(reads, mixed, 0)).all((1, 2))
    assert wrong.any()
    ours = jax.jit(lambda x: jax.tree.leaves(run(*options, x)[0]))
    # What a lane is with neighbors that are slower or wrong is what it is among its like.
    got = ours(mixed)
    for x, y in zip(got, ours(np.where(wrong[:, None, None], 0, mixed)), strict=True):
        np.testing.assert_array_equal(x[~wrong], y[~wrong])
        assert np.isfinite(x[~wrong]).all()
    if all_nan:  # the library may never end where there is an infinity
        assert all(np.isnan(x[wrong]).all() for x in got)
        return
    for x, y in zip(got, jax.tree.leaves(both(run, mixed, options=options)[1]), strict=True):
        np.testing.assert_array_equal(np.isfinite(x[wrong]), np.isfinite(y[wrong]))


def test_blocks_of_lanes_are_what_one_block_is():
    x = np.concatenate([hermitian(2, "float32")["random"]] * 1000)
    run = jax.jit(lambda a: eigh(a.transpose(1, 2, 0), lower=True))
    v, w = map(np.asarray, run(np.concatenate([x] * 4)[:15001]))
    np.testing.assert_array_equal(v, np.concatenate([v[..., :4]] * 3751, -1)[..., :15001])
    np.testing.assert_array_equal(w, np.concatenate([w[..., :4]] * 3751, -1)[..., :15001])
