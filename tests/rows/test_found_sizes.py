"""`compress`, `nonzero` and `unique`: results whose size a function finds, one for each lane."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError

from support.oracle import same
from support.rows import WAYS

FLOAT = jax.dtypes.canonicalize_dtype(float)
X = np.random.default_rng(0).normal(size=(5, 6)).astype(FLOAT)
X[1, 2], X[3] = np.nan, -1  # of lane 3 nothing is positive
LENGTHS = np.array([3, 0, 6, 1, 4])
ROWS = bx.Ragged.from_rows([x[:n] for x, n in zip(X, LENGTHS, strict=True)], max_length=6)

pytestmark = pytest.mark.compiles(140)


def positive(x):
    return bx.compress(x > 0, x)


def twice(x):
    y = positive(x)
    return bx.compress(y > 0.5, y, max_size=4)


def shared(x):
    there = x > 0
    (at,) = bx.nonzero(there)
    return bx.compress(there, jnp.cos(x)) * at + bx.compress(there, jnp.stack([x, -x]), 1)[0]


def over_places(x):
    step = lambda total, t: (total + bx.compress(x > t, x).sum(), None)
    return lax.scan(step, jnp.zeros((), x.dtype), x)[0]


def rising(x):
    y = positive(x)
    return bx.compress(y[1:] > y[:-1], y[1:])


def in_branch(x):
    return lax.cond(x.sum() > 0, lambda: positive(x).sum(), lambda: x.sum())


# Of each function, what NumPy returns for one lane.
FUNCTIONS = {
    "compress": (positive, lambda x: x[x > 0]),
    "nonzero": (lambda x: bx.nonzero(x > 0)[0], lambda x: np.nonzero(x > 0)[0]),
    "unique": (lambda x: bx.unique(jnp.round(x)), lambda x: np.unique(np.round(x))),
    "twice": (twice, lambda x: x[x > 0.5]),
    "of all but one": (rising, lambda x: x[x > 0][1:][np.diff(x[x > 0]) > 0]),
    "differences of differences": (
        lambda x: jnp.diff(positive(x), n=2),
        lambda x: np.diff(x[x > 0], n=2) if (x > 0).any() else x[:0],
    ),
    "one condition": (shared, lambda x: np.cos(x[x > 0]) * np.nonzero(x > 0)[0] + x[x > 0]),
    "sum": (lambda x: positive(x).sum(), lambda x: x[x > 0].sum()),
    "count": (
        lambda x: bx.nonzero(x > 0)[0].shape[0] + 0 * x.sum(),
        lambda x: (x > 0).sum() + 0 * x.sum(),
    ),
    "with the row": (
        lambda x: jnp.concatenate([positive(x), x]) * jnp.ones((2, 1)),
        lambda x: np.concatenate([x[x > 0], x]) * np.ones((2, 1)),
    ),
    "in a loop": (over_places, lambda x: sum((x[x > t].sum() for t in x), 0.0)),
    "in a branch": (in_branch, lambda x: x[x > 0].sum() if x.sum() > 0 else x.sum()),
    "under jit": (jax.jit(positive), lambda x: x[x > 0]),
}


def of_all(x):
    return {name: fun(x) for name, (fun, _) in FUNCTIONS.items()}


def lanes_of(y):
    """The results of each lane, as NumPy has them."""
    parts = jax.tree.map(lambda y: y.rows() if isinstance(y, bx.Ragged) else y, y, is_leaf=is_rows)
    return jax.tree.map(np.asarray, parts)


def is_rows(y):
    return isinstance(y, bx.Ragged)


def agree(got, lanes):
    with np.errstate(invalid="ignore"):
        for i, x in enumerate(lanes):
            for name, (_, alone) in FUNCTIONS.items():
                expected = np.asarray(alone(x))
                mine = np.asarray(got[name][i])
                assert mine.shape == expected.shape, (name, i)
                np.testing.assert_allclose(mine, expected, 1e-5, 1e-6, err_msg=f"{name}, {i}")


def plain(run):
    return run


@pytest.mark.parametrize("run", [plain, jax.jit])
@pytest.mark.parametrize("way", ["auto", "chunks", "compact", "mesh"])
@pytest.mark.each_commit(1, "chunks-jit")
def test_arrays(way, run):
    agree(lanes_of(run(bx.vmap(of_all, **WAYS[way]))(X)), X)


TRACED = "auto", "chunks", "mesh"
KNOWN = *TRACED, "compact", "buckets", "grouped"


@pytest.mark.parametrize(
    ("way", "run"), [*((w, plain) for w in KNOWN), *((w, jax.jit) for w in TRACED)]
)
@pytest.mark.each_commit(1, "auto-jit")
def test_rows(way, run):
    agree(lanes_of(run(bx.vmap(of_all, **WAYS[way]))(ROWS)), ROWS.rows())


def smooth(x, s):
    y = jnp.sqrt(s * bx.compress(x > 0, x))  # of what is not there the derivative is infinite
    return (y * jnp.arange(y.shape[0])).sum() + (bx.unique(y) ** 2).sum()


@pytest.mark.parametrize("way", ["auto", "chunks"])
@pytest.mark.each_commit(1)
def test_derivatives(way):
    """By the array and by what lanes share; of each lane, and of all; twice"""
    s = np.asarray(1.5, FLOAT)
    alone = [np.arange((x > 0).sum()) for x in X]
    root = [np.sqrt(s * x[x > 0]) for x in X]
    by_x = np.zeros_like(X)
    for x, to, r, i in zip(X, by_x, root, alone, strict=True):
        to[x > 0] = s * (i / (2 * r) + 1)
    by_s = sum((r / (2 * s) * i + x[x > 0]).sum() for x, r, i in zip(X, root, alone, strict=True))
    batched = bx.vmap(smooth, (0, None), **WAYS[way])

    def compute(x, s, lengths):
        rows = bx.Ragged(ROWS.data, lengths, 6)
        of_rows = lambda data: bx.vmap(smooth, (0, None))(rows.with_data(data), s).sum()
        again = jax.checkpoint(smooth)
        return (
            jax.grad(lambda x, s: batched(x, s).sum(), (0, 1))(x, s),
            bx.vmap(jax.grad(smooth), (0, None), **WAYS[way])(x, s),
            bx.vmap(jax.grad(again), (0, None))(x, s),
            jax.jvp(lambda x: batched(x, s).sum(), (x,), (jnp.ones_like(x),))[1],
            jax.vmap(jax.grad(lambda s: batched(x, s).sum()))(s[None])[0],
            jax.grad(of_rows)(rows.data),
        )

    whole, each, again, tangent, mapped, of_rows = jax.jit(compute)(X, s, LENGTHS)
    same(whole, (by_x, by_s.astype(FLOAT)))
    same(each, by_x)
    same(again, by_x)
    same(tangent, by_x.sum())
    same(mapped, by_s.astype(FLOAT))
    same(of_rows, np.concatenate([g[:n] for g, n in zip(by_x, LENGTHS, strict=True)]))


def test_vmaps_around_and_inside():
    xs = np.stack([X, 1 - X])
    around = jax.jit(jax.vmap(bx.vmap(positive)))(xs)
    inside = bx.vmap(lambda x: bx.vmap(positive)(x).lengths)(xs)
    same(around.lengths, np.sum(xs > 0, 2, dtype=np.int32))
    same(inside, around.lengths)
    for data, x in zip(around.data, xs, strict=True):
        same(data[: (x > 0).sum()], x[x > 0])
    with pytest.raises(UnsupportedError, match=r"lanes of an inner vmap .* use batchax.vmap"):
        bx.vmap(lambda x: jax.vmap(positive)(x))(xs)
    inner = lambda y: bx.vmap(lambda t: bx.compress(y > t, y).sum())(jnp.arange(3.0))
    with pytest.raises(UnsupportedError, match="closes over an array of a function around it"):
        bx.vmap(lambda x: inner(positive(x)))(X)


def test_of_one_example():
    """What NumPy returns, where values are known: constants in a batched function, too"""
    there, x = X[0] > 0, jnp.asarray(X[0])
    for function, reference in (
        (lambda x: bx.compress(there, x), lambda x: np.compress(there, x)),
        (
            lambda x: bx.compress(there[:2], x.reshape(3, 2), axis=1),
            lambda x: x.reshape(3, 2)[:, there[:2]],
        ),
        (lambda x: bx.compress([1, 0], x), lambda x: x[:1]),
        (bx.nonzero, np.nonzero),
        (lambda x: bx.nonzero(x.reshape(2, 3) > 0), lambda x: np.nonzero(x.reshape(2, 3) > 0)),
        (lambda x: bx.unique(x > 0), lambda x: np.unique(x > 0)),
        (bx.unique, np.unique),
    ):
        for ours, theirs in zip(
            jax.tree.leaves(function(x)), jax.tree.leaves(reference(X[0])), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    same(bx.vmap(lambda x: bx.compress(there, x))(X), X[:, there])
    same(jax.grad(lambda x: (positive(x) ** 2).sum())(x), np.where(there, 2 * X[0], 0))
    batched = bx.vmap(lambda x: bx.nonzero(x.reshape(2, 3) > 0))(X)
    for k, ours in enumerate(batched):
        for row, x in zip(ours.rows(), X, strict=True):
            same(row, np.nonzero(x.reshape(2, 3) > 0)[k].astype(row.dtype))


def test_more_than_there_may_be():
    limited = lambda x: bx.compress(x > 0, x, max_size=1)
    for given in (X, ROWS):
        for f in (limited, lambda x: limited(x).sum()):
            with pytest.raises(AxisError, match=r"compress: max_size is 1, and lane \d has [2-6]"):
                bx.vmap(f)(given)
        got = jax.jit(bx.vmap(limited))(given)
        assert got.max_length == 1
        lanes = given.rows() if given is ROWS else given
        for row, x in zip(got.rows(), lanes, strict=True):
            same(row, np.asarray(x)[np.asarray(x) > 0][:1])
    with pytest.raises(AxisError, match=r"max_size is 1, and there are"):
        limited(X[0])
    assert bx.vmap(lambda x: bx.unique(x > 0, max_size=2))(X).max_length == 2


def test_no_lanes_and_no_elements():
    for x in (X[:0], X[:, :0]):
        got = bx.vmap(positive)(x)
        assert (len(got), got.max_length, got.data.size) == (len(x), x.shape[1], 0)
        assert bx.vmap(lambda x: bx.unique(x).sum())(x).shape == (len(x),)


REFUSED = {
    "a size that it finds as a number": lambda x: jnp.gradient(positive(x)),
    r"a size that it finds as a number.* `len": lambda x: len(positive(x)),
    "(?s)full_matrices.*bx.size in in_axes": lambda x: jnp.linalg.svd(jnp.stack([positive(x)] * 3))[
        1
    ],
    r"\(found0_6,\) are reshaped to \(2,\)": lambda x: positive(x).reshape(2),
    "which is found in it": lambda x: lax.cond(
        x[0] > 0, lambda f: f(x), lambda f: f(-x), jax.tree_util.Partial(jax.jit(positive))
    ),
    "under jax.jit that is called more than once": lambda x: (lambda f: f(x).sum() + f(-x).sum())(
        jax.jit(lambda x: bx.compress(x > 1, x))
    ),
    "condition has 6 elements.* 5 along axis 0": lambda x: bx.compress(x > 0, x[1:]),
    "condition must have one axis": lambda x: bx.compress(x[None] > 0, x),
    "axis 1 is out of range": lambda x: bx.compress(x > 0, x, axis=1),
    "non-negative int, got 1.5": lambda x: bx.compress(x > 0, x, max_size=1.5),
    "must have at least one axis": lambda x: bx.nonzero(x[0]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises((bx.BatchaxError, TypeError), match=message):
        bx.vmap(REFUSED[message])(X)


def test_refused_outside_of_vmap(tmp_path):
    for run, x in ((jax.jit(positive), X[0]), (jax.vmap(positive), X), (jax.jit(bx.unique), X)):
        with pytest.raises(UnsupportedError, match=r"Call it in a function under batchax.vmap"):
            run(x)
    bx.map(lambda x: positive(x).sum(), X, out=tmp_path / "sums.npy", progress=False)
    np.testing.assert_allclose(np.load(tmp_path / "sums.npy"), np.where(X > 0, X, 0).sum(1), 1e-5)
    with pytest.raises(ArgumentTypeError, match="x must be an array, got str"):
        bx.compress([True], "a")
    with pytest.raises(AxisError, match="cannot be reduced"):
        bx.vmap(positive, out_axes=bx.Reduce("sum"))(X)
    with pytest.raises(UnsupportedError, match=r"buckets: the lengths.*finds sizes"):
        jax.jit(bx.vmap(positive, buckets=2))(ROWS)


def test_refused_where_any_number_of_elements_is_exported():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(UnsupportedError, match="of the size n it is not known how long"):
        jax.eval_shape(bx.vmap(positive), jax.ShapeDtypeStruct((3, n), FLOAT))


def test_what_was_traced_before_has_no_sizes_of_another_call():
    """JAX keeps what it has traced of a function under `jit`, and symbols mean nothing elsewhere"""
    counted = jax.jit(lambda x: positive(x).sum())
    for batched in (bx.vmap(counted), bx.vmap(lambda x: counted(x) + 0 * positive(-x).sum())):
        for _ in range(2):
            same(batched(X), np.where(X > 0, X, 0).sum(1))


def test_a_swallowed_question():
    """A function that catches what asks for a size is run again nevertheless"""

    def careful(x):
        try:
            return positive(x).sum()
        except Exception:
            return x.sum()

    same(bx.vmap(careful)(X), np.where(X > 0, X, 0).sum(1))
