"""Functions of rows, family by family: each row gets what it gets alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.jaxprs.bodies import with_inside
from batchax.rows.layouts import Costs, choose_packed, flatten
from batchax.rows.sizes import Sizes

from support.oracle import example, same, shares
from support.rows import check_rows, check_rows_of_all, chosen, ragged, ways

LENGTHS = (4, 2)

# What runs in packed rows, in part: beside others, which share its row, it would be padded.
MOVED_PACKED = {
    "turned": lambda x: (jnp.flip(x), jnp.rot90(x), jnp.swapaxes(x, 0, 1) * 2),
    "flat by columns": lambda x: x.T.reshape(-1),
    "as three rows": lambda x: jnp.sin(x.reshape(3, -1)) * x.T,
}


# What there is of an empty row too.
MOVED_EMPTY = {
    "last three": lambda x: x[-3:],
    "halves": lambda x: (x[x.shape[0] // 2 :], x[: x.shape[0] // 2]),
    "every second": lambda x: (x[1::2], x[::-2]),
    "pad": lambda x: jnp.pad(x, ((1, 2), (0, 1)), constant_values=0.5),
    **chosen(MOVED_PACKED, ["turned", "flat by columns"]),
}


MOVED = {
    "between fixed bounds": lambda x: (x[1:-1], x[:2], x[2:5]),
    "roll by as much as data says": lambda x: jnp.roll(x, jnp.argmax(x[:, 0]), 0),
    "between constants": lambda x: jnp.concatenate([jnp.ones((1, 3)), x, x[1:], jnp.ones((2, 3))]),
    "pad by a variable": lambda x: lax.pad(x, x[0, 0], ((2, -1, 0), (0, 0, 0))),
    "one-sided window": lambda x: lax.pad(x[:1], 0.0, ((x.shape[0] - 1, 0, 0), (0, 0, 0))),
    "pairs to a square": lambda x: (
        jnp.outer(x[:, 0], x[:, 1]).reshape(-1).reshape(x.shape[0], x.shape[0]) @ x
    ),
}


SECOND_AXIS = {
    "difference": lambda x: x[:, 1:] - x[:, :-1],
    "reversed": lambda x: x[:, ::-1],
    "last": lambda x: x[:, -1],
    "in front of another": lambda x: jnp.concatenate([x, x[:1]], 0),
}


PLACES = jnp.array([0, -1, 3, -2, 1])  # of which one row has all, the other a few


TABLE = jnp.asarray(np.random.default_rng(1).normal(size=(5, 2)), float)


def bins(x):
    return (x[:, 0] * 2).astype(int)


READS = {
    "places, NaN where there is none": lambda x: jnp.take(x, PLACES, axis=0),
    "a fixed place that some rows lack": lambda x: x.at[3].get(mode="fill", fill_value=0.5),
    "a place far out": lambda x: x.at[jnp.array(9)].get(),
    "a column far out": lambda x: (x[:, jnp.array(7)], x.T[jnp.array(-9)]),
    "the greatest": lambda x: x[jnp.argmax(x[:, 0])],
    "places in each column": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 0), 0),
    "single elements": lambda x: x[jnp.array([0, -1]), jnp.array([1, 2])],
    "small unsigned indices": lambda x: x[jnp.array([0, 3], np.uint8)],
    "embedding": lambda x: TABLE[bins(x)],
    "window that moves": lambda x: lax.dynamic_slice(
        x, (jnp.argmax(x[:, 0]), 0), (x.shape[0] - 1, 3)
    ),
}


WRITES = {
    "set a fixed place that some rows lack": lambda x: x.at[jnp.array([3])].set(1.0),
    "add to a slice": lambda x: x.at[1:].add(x[:-1]),
    "set a slice": lambda x: x.at[:-1].set(x[1:] * 2),
    "set the last two": lambda x: x.at[-2:].set(0.5),
    "permuted": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 0])].set(x, unique_indices=True),
    "set parts of a square": lambda x: (x @ x.T).at[:-1, 1:].add(1.0) @ x,
    "set columns of a part": lambda x: x.at[1:].set(x[1:].at[:, jnp.array([1, 0])].set(0.5)),
    "greatest in bins": lambda x: jax.ops.segment_max(x, jnp.abs(bins(x)), num_segments=3),
    "updated by a window": lambda x: lax.dynamic_update_slice(x, x[1:] * 2, (1, 0)),
    "updated where data says": lambda x: lax.dynamic_update_slice(
        x, jnp.ones((1, 3)), (jnp.argmax(x[:, 0]), 0)
    ),
}


# What there is of an empty row too.
INDEXED_EMPTY = {
    "places of the row's own": lambda x: x[jnp.argsort(x[:, 1])],
    "embedding bag": lambda x: TABLE[bins(x)].sum(0),
    "sum into bins": lambda x: jax.ops.segment_sum(x, bins(x), num_segments=3),
    "each element reads in itself": lambda x: bx.vmap(lambda y, i: y[i])(x, jnp.argmax(x, 1)),
}


COLUMNS = {
    "as many as the row has elements": lambda x: jnp.sin(x)[:, : x.shape[0]].sum(1),
    "those behind": lambda x: jnp.sin(x)[:, x.shape[0] :],
    "the last": lambda x: x[:, -x.shape[0] :].sum(1),
    "some": lambda x: x[:, 1 : x.shape[0]].sum(1),
    "at places": lambda x: x[jnp.array([1, 0])][:, x.shape[0] :],
}
SHIFTS = {
    "differences": lambda x: jnp.diff(x, axis=0),
    "of logarithms": lambda x: jnp.log(jnp.abs(x[1:]) / jnp.abs(x[:-1])).sum(0),
    "gradient of differences": jax.grad(lambda x: jnp.sum(jnp.sin(jnp.diff(x, axis=0)))),
    "in another order": lambda x: x[jnp.argsort(x[:, 0])],
    "out of bounds": lambda x: jnp.take(x, jnp.arange(x.shape[0]) + 1, 0, mode="clip"),
    "filled": lambda x: x.at[jnp.arange(x.shape[0]) + 1].get(mode="fill", fill_value=7),
    "added": lambda x: jnp.zeros_like(x).at[jnp.argsort(x[:, 1]) // 2].add(jnp.sin(x)),
    "dropped": lambda x: x.at[jnp.arange(x.shape[0]) + 2].mul(3.0),
}


KERNEL = jnp.asarray(np.random.default_rng(5).normal(size=(2, 3, 3)), float)


def windows(initial, combine, size, step, padding, **options):
    def function(x):
        return lax.reduce_window(x, initial, combine, (size, 1), (step, 1), padding, **options)

    return function


POOLS = {
    "sum, as long": windows(0.0, lax.add, 3, 1, "SAME"),
    "sum, every second, as long": windows(0.0, lax.add, 3, 2, "SAME"),
    "mean": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (2, 1), "VALID") / 2,
    "greatest": windows(-jnp.inf, lax.max, 2, 2, "VALID"),
    "least, one-sided": windows(jnp.inf, lax.min, 2, 1, ((1, 0), (0, 0))),
    "sum, dilated": windows(
        0.0, lax.add, 2, 1, "VALID", base_dilation=(2, 1), window_dilation=(2, 1)
    ),
}


def convolved(step, padding, **options):
    def function(x):
        return lax.conv_general_dilated(x.T[None], KERNEL, (step,), padding, **options)[0]

    return function


CONVOLUTIONS = {
    "same": convolved(1, "SAME"),
    "every second, same": convolved(2, "SAME"),
    "dilated": convolved(1, ((2, 2),), lhs_dilation=(2,), rhs_dilation=(2,)),
    "cut off": convolved(1, ((-1, 1),), lhs_dilation=(2,)),
    "of each channel": lambda x: lax.conv_general_dilated(
        x.T[None], KERNEL[:1].reshape(3, 1, 3), (1,), "SAME", feature_group_count=3
    ),
    "by the row": lambda x: lax.conv_general_dilated(
        jnp.ones((1, 1, 9)), x.T[:1, None], (1,), ((0, 0),)
    )[0, 0],
}


def grouped(x, kernel, **groups):
    return lax.conv_general_dilated(x, kernel, (1,), "VALID", **groups)


def twice(x):
    return jnp.concatenate([x, 3 * x])


AS_MANY_GROUPS = {
    "channels": lambda x: grouped(x[None], twice(x)[:, None, :2], feature_group_count=x.shape[0]),
    "rows": lambda x: grouped(x[:, None], x[:, None, 1:], batch_group_count=x.shape[0]),
}


LARGER_GROUPS = {
    "feature_group_count=2 makes": lambda x: grouped(
        twice(x)[None], jnp.stack([x[:, :2], x[:, 1:]]), feature_group_count=2
    ),
    "batch_group_count=2 makes": lambda x: grouped(
        twice(x)[:, None], x[:1, None, :2].repeat(2, 0), batch_group_count=2
    ),
}


FIXED = jnp.eye(3) + 0.2


def positive(x):
    return 0.3 * x @ x.T + 2 * jnp.eye(x.shape[0])


def general(x):
    return x @ jnp.cos(x).T + 3 * jnp.eye(x.shape[0])


SQUARE = {
    "cholesky": lambda x: jnp.linalg.cholesky(positive(x)).sum(0),
    "pivots": lambda x: lax.linalg.lu(general(x))[1:],
    "lu_solve": lambda x: jsl.lu_solve(jsl.lu_factor(general(x)), x),
    "solve": lambda x: jnp.linalg.solve(general(x), x),
    "det": lambda x: jnp.linalg.det(general(x)),
    "slogdet": lambda x: jnp.linalg.slogdet(general(x)),
    "ragged right-hand sides": lambda x: jsl.solve_triangular(FIXED, x.T, lower=True).sum(0),
    "differentiated": lambda x: jax.grad(lambda x: jnp.linalg.slogdet(positive(x))[1])(x),
}


MANY = {
    "eigh": lambda x: jnp.linalg.eigh(x + x.mT)[0],
    "singular values": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "qr": jnp.linalg.qr,
    "det": jnp.linalg.det,
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.mT + jnp.eye(3)),
}


REFUSED = {
    "some eigenvalues": lambda x: jax.lax.linalg.eigh(positive(x), subset_by_index=(0, 1))[1],
    "svd with vectors of no singular value": lambda x: jnp.linalg.svd(x)[1],
    "qr": jnp.linalg.qr,
    "a tridiagonal matrix": lambda x: lax.linalg.tridiagonal_solve(x[:, 0], x[:, 1], x[:, 2], x),
    "lu of a matrix that is not square": lambda x: lax.linalg.lu(x)[0],
    "reflectors": lambda x: jnp.linalg.slogdet(general(x), method="qr"),
    "eigenvalues of what is not symmetric": lambda x: jnp.linalg.eigvals(general(x)),
    "an update of a factor": lambda x: lax.linalg.cholesky_update(general(x), x[:, 0]),
    "parts of several columns": lambda x: (x @ x.T).at[1:, jnp.array([1, 0])].set(1.0),
}


def real(x):
    """Both parts, which tell the sign of an angle."""
    return x.real + 2 * x.imag


def square(x):
    return jnp.sin(jnp.outer(x, jnp.cos(x))) + jnp.diag(2.0 + jnp.arange(x.shape[0]))


def definite(x):
    return jnp.outer(x, x) + jnp.diag(2.0 + jnp.arange(x.shape[0]))


def again(vectors, values, others):
    """What does not depend on the signs of vectors, and on all of them."""
    return (vectors * jnp.sin(values)) @ others


TRANSFORMS = {
    "odd irfft": lambda x: jnp.fft.irfft(x + 1j * x, n=2 * x.shape[0] - 1),
    "shorter rfft": lambda x: real(jnp.fft.rfft(x, n=3)),
    "two axes": lambda x: real(jnp.fft.rfft2(jnp.stack([x, x**2, 1 - x], 1))),
    "eigh": lambda x: (lambda w, v: again(v, w, v.T @ x))(*jnp.linalg.eigh(definite(x))),
    "svd": lambda x: (lambda u, s, v: again(u, s, v @ x))(*jnp.linalg.svd(square(x))),
    "svd of three columns": lambda x: (lambda u, s, v: again(u, s, v))(
        *jnp.linalg.svd(jnp.stack([x, jnp.cos(3 * x), x**2], 1), full_matrices=False)
    ),
}


ORDERS = {
    "argsort": lambda x: jnp.argsort(x, 0),
    "argsort downwards": lambda x: jnp.argsort(x, 0, descending=True),
    "lexsort": lambda x: jnp.lexsort((x[:, 0], x[:, 1])),
    "places of the greatest": lambda x: lax.top_k(jnp.append(x[:, 0], x[:2, 1]), 1),
    "sort": lambda x: jnp.sort(x, 0),
}


def hard_rows(dtype):
    """Rows of what is equal, and of what sorts last: that, too, is before the padding."""
    if dtype == np.bool_:
        values = [True, False, True, True, True, False, True]
    elif np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        values = [info.max, 0, info.max, info.min, 1, info.max, 1]
    else:
        values = [np.nan, 1, np.inf, -np.nan, np.inf, -np.inf, np.nan]
    data = np.stack([values, values[::-1], np.roll(values, 2)], 1).astype(dtype)
    rows = ragged(3, lengths=(4, 3), poison=False)
    return rows.with_data(jnp.asarray(data))


class Family(NamedTuple):
    functions: dict
    lengths: tuple = LENGTHS
    parts: int = 1  # that are programs of their own
    rows: Any = None  # how they are made
    options: Any = None  # of the comparison


ROUGHLY = dict(tolerance=dict(rtol=2e-3, atol=2e-4))
PADDED = dict(layout="padded", **ROUGHLY)
BOTH = dict(ways=ways("packed", "auto"))
# Some run in packed rows, in part, where they are by themselves: so many parts as functions.
FAMILIES = {
    "moved, packed": Family(MOVED_PACKED, parts=3),
    "moved": Family(MOVED, parts=2),
    "moved, an empty row": Family(MOVED_EMPTY, (0, *LENGTHS), 2),
    "ragged in the second axis": Family(SECOND_AXIS, rows=dict(axis=1)),
    "read": Family(READS, parts=2),
    "written": Family(WRITES, parts=2),
    "indexed, an empty row": Family(INDEXED_EMPTY, (0, *LENGTHS), 4),
    "columns": Family(COLUMNS, (4, 2, 1), rows=dict(shape=(5,), spare=0)),
    "shifted": Family(SHIFTS, (2, 5, 3, 9), 8, options=BOTH),
    "pooled": Family(POOLS, (5, 4), 2),
    "pooled, no row as long as a window": Family(
        {"whole": windows(0.0, lax.add, 3, 1, "VALID")}, (2, 0, 1), rows=dict(spare=0)
    ),
    "convolved": Family(CONVOLUTIONS, (5, 4), 6),
    "windows of an empty row": Family(
        chosen({**POOLS, "same": CONVOLUTIONS["same"]}, ["sum, as long", "same", "mean"]), (0, 4)
    ),
    "in groups": Family(AS_MANY_GROUPS, (5, 4)),
    "square": Family(SQUARE, (3, 1), 2, options=dict(modes=("vjp",), **PADDED)),
    "square, an empty row": Family(
        chosen(SQUARE, ["cholesky", "solve", "slogdet", "det"]),
        (2, 0, 1),
        options=dict(derivatives=False, **PADDED),
    ),
    "many matrices": Family(
        MANY, (2, 3), rows=dict(shape=(3, 3)), options=dict(modes=("vjp",), **PADDED)
    ),
    "transformed": Family(
        TRANSFORMS,
        (3, 1, 5, 2),
        2,
        dict(shape=(), spare=1),
        dict(modes=("vjp",), reverse_traced=True, **ROUGHLY),
    ),
}
CASES = {
    f"{name}, {k}": (name, part)
    for name, f in FAMILIES.items()
    for k, part in enumerate(shares(f.functions, f.parts))
}


@pytest.mark.parametrize(("family", "names"), CASES.values(), ids=CASES)
@pytest.mark.each_commit(18, "written, 1", "indexed, an empty row, 2")
def test_as_each_row_alone(family, names):
    of = FAMILIES[family]
    made, options = dict(of.rows or {}), of.options or {}
    rows = ragged(*made.pop("shape", (3,)), lengths=of.lengths, **made)
    if len(names) == 1:
        check_rows(of.functions[names[0]], rows, **options)
    else:
        check_rows_of_all(chosen(of.functions, names), rows, **options)


# What rows share, and further rows.


def test_rows_of_two_sizes_are_joined_and_multiplied():
    def both(x, y):
        joined = jnp.concatenate([x, y, x])
        return joined, (x[:, None] * y[None]).reshape(-1, 3), (x @ y.T)[::-1, 1:].sum(0)

    check_rows(both, ragged(3, lengths=LENGTHS), ragged(3, lengths=(1, 3), seed=1))


def test_integers_booleans_and_keys_are_moved_as_floats_are():
    def parts(x, flags, keys):
        joined = jnp.concatenate([x[1:], x[::-1]])
        drawn = jax.vmap(jax.random.uniform)(jnp.roll(keys, 1)[::-1][-2:])
        return joined, jnp.roll(flags, 1, 0), x.T.reshape(-1), drawn

    data = jax.random.split(jax.random.key(0), sum(LENGTHS))
    keys = bx.Ragged(data, np.array(LENGTHS, np.int32), 6)
    x = ragged(3, lengths=LENGTHS, dtype=np.int32)
    check_rows(parts, x, x.with_data(x.data > 1), keys)


def test_a_table_that_rows_share_gets_nothing_from_padding():
    def looked_up(x, table):
        return jnp.log(table[bins(x)]) * x[:, :2], table.at[bins(x)].add(x[:, :2])

    check_rows(looked_up, ragged(3, lengths=LENGTHS), jnp.abs(TABLE), in_axes=(0, None))


def test_indices_that_are_rows_read_and_write_what_rows_share_and_what_they_own():
    def function(x, at, table):
        read = table[at], x[at], x.at[at].get(mode="fill", fill_value=0.0)
        return *read, table.at[at].add(1.0), x.at[at].set(2.0)

    at = ragged(lengths=(3, 2), dtype=np.int32, seed=2)
    check_rows(function, ragged(3, lengths=LENGTHS), at, TABLE, in_axes=(0, 0, None))


def test_a_kernel_that_rows_share_gets_nothing_from_padding():
    def function(x, kernel):
        return jnp.log(jnp.abs(lax.conv_general_dilated(x.T[None], kernel, (1,), "SAME")))[0]

    check_rows(
        function,
        ragged(3, lengths=(5, 4)),
        KERNEL,
        in_axes=(0, None),
        tolerance={"rtol": 1e-4, "atol": 1e-4},
    )


def test_no_nan_from_padding_reaches_shared_weights():
    def likelihood(x, w):
        covariance = (x * w) @ x.T + 2 * jnp.eye(x.shape[0])
        return jnp.linalg.solve(covariance, x @ w), jnp.log(jnp.linalg.det(covariance))

    w = jnp.array([0.1, 0.2, 0.3])
    check_rows(likelihood, ragged(3, lengths=(3, 1)), w, in_axes=(0, None), **PADDED)


def test_a_solver_needs_no_transpose_where_it_is_not_transposed():
    def solved(x):
        return lax.custom_linear_solve(lambda v: (x + 2) * v, x, lambda _, b: b / (x + 2))

    check_rows(solved, ragged(), modes=("jvp",), **PADDED)


# Of other types, lengths and programs.


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.uint16, np.bool_, np.complex64])
def test_padding_comes_after_whatever_sorts_last(dtype):
    names = ["argsort", "lexsort", "sort"] if dtype == np.complex64 else list(ORDERS)
    if dtype == np.bool_:
        names.remove("places of the greatest")  # JAX takes no booleans there
    orders = lambda x: [ORDERS[name](x) for name in names]
    check_rows(orders, hard_rows(dtype), derivatives=False)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_shorter_than_a_shift_have_nothing_left(layout):
    x = ragged(3, lengths=(0, 1, 2, 4, 0, 1))
    for by in (1, 2, 3):
        out = jax.jit(bx.vmap(lambda x, by=by: x[by:] - x[:-by], layout=layout))(x)
        for got, row in zip(out.rows(), x.rows(), strict=True):
            same(got, row[by:] - row[: max(len(row) - by, 0)])


@pytest.mark.parametrize("name", ["differences", "in another order", "added"])
def test_they_need_no_padding(name):
    (n,) = jax.export.symbolic_shape("n")
    staged = jax.make_jaxpr(SHIFTS[name])(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    program = flatten(staged, {"n": 100})
    costs = Costs(Sizes({"n": 1000}, {}), Sizes({"n": 100}, {}), 64)
    chosen = choose_packed(program, [True], costs)
    moves = {"gather", "slice", "scatter-add", "sub"}
    steps = zip(program.steps, chosen, strict=True)
    assert {packed for step, packed in steps if step.eqn.primitive.name in moves} == {True}


FOUND = np.random.default_rng(1)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.5, 1.0])
def test_what_is_found_among_many_elements(share):
    there = FOUND.random((5, 700)) < share
    x = FOUND.normal(size=(5, 700)).astype(jnp.zeros(0).dtype)

    def f(there, x):
        (at,) = bx.nonzero(there)
        return at, jnp.sum(jnp.sin(x[at]) * at), x[at][1:]

    at, total, rest = jax.jit(bx.vmap(f))(there, x)
    for k in range(5):
        (own,) = np.nonzero(there[k])
        np.testing.assert_array_equal(at[k], own)
        np.testing.assert_allclose(total[k], np.sum(np.sin(x[k][own]) * own), 1e-4, 1e-2)
        np.testing.assert_array_equal(rest[k], x[k][own][1:])
    loss = lambda x: bx.vmap(lambda t, x: jnp.sum(jnp.sin(bx.compress(t, x))))(there, x).sum()
    gradient = jax.jit(jax.grad(loss))(jnp.asarray(x))
    np.testing.assert_allclose(gradient, np.where(there, np.cos(x), 0), 1e-5)


def test_few_that_are_found_run_with_little_room():
    def f(x):
        return jnp.sum(jnp.sin(bx.compress(x > 2, x)))

    program = jax.make_jaxpr(bx.vmap(f))(jnp.zeros((5, 1600)))
    every = list(with_inside(program.eqns))
    sines = {e.outvars[0].aval.shape for e in every if e.primitive.name == "sin"}
    assert sines == {(5, 100), (1, 1600)}
    assert "cond" in {e.primitive.name for e in every}


def test_vectors_of_a_singular_matrix_are_orthogonal():
    def vectors(x):
        u, s, v = jnp.linalg.svd(jnp.outer(x, x))
        w, e = jnp.linalg.eigh(0 * jnp.outer(x, x))
        eye = jnp.eye(x.shape[0])
        return jnp.abs(u.T @ u - eye).max(), jnp.abs(v @ v.T - eye).max(), s[0], w, e @ e.T @ x

    x = bx.Ragged(jnp.arange(1.0, 8.0), np.array([3, 4]), 40)
    of_u, of_v, largest, zeros, back = jax.jit(bx.vmap(vectors))(x)
    assert max(of_u.max(), of_v.max()) < 1e-5
    np.testing.assert_allclose(largest, [14.0, 126.0], rtol=1e-5)
    assert not np.asarray(zeros.data).any()
    np.testing.assert_allclose(back.data, x.data, rtol=1e-5)


# Refused.


@pytest.mark.usefixtures("longer_rows")
def test_windows_of_a_size_of_the_row_s_own_are_refused_by_name_where_lengths_are_traced():
    def function(x):
        return lax.reduce_window(jnp.tile(x, (2, 1)), 0.0, lax.add, x.shape, (1, 1), "VALID")

    with pytest.raises(bx.UnsupportedError, match=r"`reduce_window_sum`.*windows have n "):
        jax.jit(bx.vmap(function))(ragged(3, lengths=(5, 4)))


@pytest.mark.usefixtures("longer_rows")
@pytest.mark.parametrize("told", LARGER_GROUPS)
def test_groups_of_a_convolution_that_differ_in_size_are_refused_or_run_by_length(told):
    x = ragged(3, lengths=(5, 4))
    with pytest.raises(bx.UnsupportedError, match=told):
        jax.jit(bx.vmap(LARGER_GROUPS[told]))(x)
    check_rows(LARGER_GROUPS[told], x, traced=False, derivatives=False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_padding_makes_exact_is_refused(name):
    with pytest.raises(bx.UnsupportedError, match="for rows of different lengths at once"):
        jax.jit(bx.vmap(REFUSED[name], layout="padded"))(ragged(3))


# Of rows of three numbers, and a matrix with few terms for each result, which are added one by one.
THIN = {
    "points": lambda x, w: jnp.tanh(jnp.tanh(x @ w[:, :3]) @ w[:, 2:5]),
    "a vector": lambda x, w: jnp.sin(x @ w[:, 1]),
    "the matrix first": lambda x, w: (w[:, :2].T @ x.T).T,
    "more results than terms": lambda x, w: jnp.sin(x @ w).max(0),
    "two dimensions of results": lambda x, w: jnp.einsum("ni,iab->anb", x, w[:, :4, None] * 2),
}


def test_products_with_small_matrices_are_sums_of_terms():
    x, w = ragged(3), jnp.asarray(np.random.default_rng(2).normal(size=(3, 7)), float)
    check_rows_of_all(THIN, x, w, in_axes=(0, None))
    batched = bx.vmap(lambda x, w: [f(x, w) for f in THIN.values()], (0, None), layout="packed")
    assert "dot_general" not in str(jax.make_jaxpr(batched)(x, w))


def test_what_moves_along_rows_alone_gets_no_nan_from_the_matrix():
    """The matrix has no tangent: zero times the infinity of an element would be NaN."""
    x = bx.Ragged(jnp.array([[1.0, jnp.inf, 2.0], [1.0, 2.0, 3.0]]), np.array([1, 1]))
    total = lambda data: bx.vmap(lambda x: x @ jnp.eye(3)[:, :1], layout="packed")(
        x.with_data(data)
    )
    _, dots = jax.jvp(lambda data: total(data).data, (x.data,), (jnp.ones((2, 3)),))
    np.testing.assert_array_equal(dots, 1)


PARTS_OF_TABLES = {
    "from the start": lambda p, x: p[: x.shape[0]],
    "less one": lambda p, x: p[1 : x.shape[0]],
    "behind": lambda p, x: p[x.shape[0] :].sum(0),
    "reversed": lambda p, x: p[: x.shape[0]][::-1],
    "added up": lambda p, x: (p[: x.shape[0]].T * x).sum(),
    "of columns": lambda p, x: p.T[..., : x.shape[0]],
    "padded": lambda p, x: jnp.pad(p[None], ((0, 0), (0, x.shape[0])) + ((0, 0),) * (p.ndim - 1)),
    "written": lambda p, x: jnp.zeros_like(p).at[: x.shape[0]].set(1),
    "its gradient": lambda p, x: jax.grad(lambda p: (p[: x.shape[0]] ** 2).sum())(p),
}


@pytest.mark.parametrize("options", [{}, {"layout": "packed"}, {"buckets": 2}], ids=str)
@pytest.mark.parametrize("part", PARTS_OF_TABLES.values(), ids=PARTS_OF_TABLES)
def test_a_part_as_long_as_the_row_of_what_all_rows_share(part, options):
    """Such as positions that are added: each row reads from the start of the array."""
    rows = [jnp.arange(1.0, n + 1) for n in (2, 4, 3)]
    for shape in ((4,), (20,), (4, 2)):
        table = example(shape)
        expected = [part(table, row) for row in rows]
        call = bx.vmap(part, (None, 0), **options)
        for run in (call, jax.jit(call)):
            for got, own in zip(run(table, bx.Ragged.from_rows(rows)), expected, strict=True):
                np.testing.assert_allclose(got, own, rtol=1e-6)
