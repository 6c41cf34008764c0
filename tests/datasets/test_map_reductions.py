"""Reductions over the rows of a dataset: in units, without rows that fail, resumed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.datasets.row_function import RowFunction, program_of
from batchax.frontend.reductions import REDUCTIONS

from support.oracle import same

NAMED = {kind: getattr(jnp, kind, jax.nn.logsumexp) for kind in REDUCTIONS}
X = np.random.default_rng(0).normal(size=(21, 3)).astype(np.float32)
X[[4, 17], 0] = 9  # first of equals
X[:8, 1] = -np.inf  # a unit that has nothing else
SIZE = dict(batch_size=4, commit_rows=8, progress=False)


def composed(first, second):
    return first[0] * second[0], first[1] * second[0] + second[1]


affine = bx.Reduction(
    composed, (1, 0), lane=lambda x: (jnp.tanh(x), jnp.exp(x)), finish=lambda s, n: s[1]
)
AXES = {kind: bx.Reduce(kind) for kind in NAMED} | {"affine": bx.Reduce(affine), "rows": 0}


def each(x):
    return dict.fromkeys(AXES, x)


def expected(x):
    found = {kind: reference(x, axis=0) for kind, reference in NAMED.items()}
    lanes = [(np.tanh(row), np.exp(row)) for row in x.astype(np.float64)]
    last = functools.reduce(composed, lanes)[1]
    return found | {"affine": jnp.asarray(last, jnp.float32), "rows": None}


@pytest.mark.compiles(90)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool"])
@pytest.mark.each_commit(2)
def test_of_all_rows(dtype):
    x = X.astype(dtype) if dtype.startswith("float") else np.sign(np.nan_to_num(X)).astype(dtype)
    axes = {k: v for k, v in AXES.items() if k != "affine" or dtype == "float32"}
    got = bx.map(lambda x: dict.fromkeys(axes, x), x, out_axes=axes, **SIZE).reduced
    wanted = {k: v for k, v in expected(x).items() if k in axes}
    tolerance = dict(rtol=2e-3, atol=2e-3) if dtype == "float16" else None
    same(got, wanted, tolerance)


def failing(fails):
    """`each` of a row, unless the row of that number fails."""

    def on_host(number):
        if fails(number):
            raise ValueError(f"row {number}")
        return np.float32(0)

    def fun(x, number):
        zero = jax.pure_callback(
            on_host, jax.ShapeDtypeStruct((), np.float32), number, vmap_method="sequential"
        )
        return each(x + zero)

    return fun


@pytest.mark.parametrize("bad", [[2, 3, 20], list(range(8, 16)), [0]])
@pytest.mark.compiles(70)
def test_without_rows_that_fail(bad):
    fun = failing(lambda number: number in bad)
    numbers = np.arange(len(X))
    report = bx.map(fun, X, numbers, out_axes=AXES, on_error="quarantine", **SIZE)
    assert [b.row for b in report.bad] == bad
    good = np.delete(numbers, bad)
    wanted = expected(X[good])
    for kind in ("argmax", "argmin"):  # rows keep their numbers
        wanted[kind] = jnp.asarray(good[np.asarray(wanted[kind])], wanted[kind].dtype)
    same(report.reduced, wanted)


def test_without_all_rows():
    def fail(x):
        raise ValueError("no such row")

    def fun(x):
        x = jax.pure_callback(fail, jax.typeof(x), x, vmap_method="sequential")
        return dict.fromkeys(axes, x)

    axes = {kind: AXES[kind] for kind in ("argmax", "logsumexp", "sum", "any")}
    got = bx.map(fun, X[:6, 0], out_axes=axes, on_error="quarantine", **SIZE).reduced
    assert {k: x.item() for k, x in got.items()} == {
        "argmax": -1,
        "logsumexp": -np.inf,
        "sum": 0,
        "any": False,
    }


@pytest.mark.compiles(70)
def test_parts_are_kept_with_the_job(tmp_path):
    stop = [True]

    fun = failing(lambda number: stop and number == 13)
    run = functools.partial(
        bx.map,
        fun,
        X,
        np.arange(len(X)),
        out_axes=AXES,
        out=tmp_path / "y.npy",
        version="1",
        **SIZE,
    )
    with pytest.raises(bx.RowError, match="row 13"):
        run()
    stop.clear()
    report = run()
    assert report.reused == 8
    same(report.reduced, expected(X))
    same(run().reduced, expected(X))
    other = bx.Reduction(composed, (1, 0), lane=lambda x: (x, x), finish=lambda s, n: s[1])
    with pytest.raises(bx.JobError, match="out_axes"):
        run(out_axes=AXES | {"affine": bx.Reduce(other)})


def test_of_no_rows():
    names = [kind for kind, reduction in REDUCTIONS.items() if reduction.of_nothing]
    axes = {kind: AXES[kind] for kind in names}
    got = bx.map(lambda x: dict.fromkeys(names, x), X[:0], out_axes=axes, **SIZE).reduced
    same(got, {kind: NAMED[kind](X[:0], axis=0) for kind in names})
    for kind in ("argmax", "argmin"):
        with pytest.raises(bx.AxisError, match=f"there are no rows: {kind} of no values"):
            bx.map(lambda x: x, X[:0], out_axes=bx.Reduce(kind), **SIZE)


def test_sums_need_no_array_for_each_row():
    """Of all rows of a batch, of fewer, and without those whose products are not finite."""
    rng = np.random.default_rng(1)
    a, b = (rng.normal(size=(10, n)).astype(np.float32) for n in (64, 48))
    a[3, 0] = np.nan
    a[7] = np.inf

    def clipped(a, b):
        g = jnp.outer(a, b)
        g = g * jnp.minimum(1, 1 / jnp.linalg.norm(g))
        return {"sum": g, "mean": -2 * g, "row": g[0, 0]}

    axes = {"sum": bx.Reduce("sum"), "mean": bx.Reduce("mean"), "row": 0}
    report = bx.map(clipped, a, b, out_axes=axes, on_nonfinite="quarantine", **SIZE)
    assert [bad.row for bad in report.bad] == [3, 7]
    good = np.delete(np.arange(10), [3, 7])
    outer = np.einsum("ki,kj->kij", *(x[good].astype(np.float64) for x in (a, b)))
    outer /= np.maximum(1, np.linalg.norm(outer, axis=(1, 2)))[:, None, None]
    expected = {"sum": outer.sum(0), "mean": -2 * outer.mean(0), "row": None}
    same(report.reduced, jax.tree.map(jnp.float32, expected), dict(rtol=1e-4, atol=1e-5))

    function = RowFunction.of(clipped, (a, b), 0, axes, None, {})
    for masked in (False, True):
        compiled = program_of(function, 8).compiled(masked)
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * outer[:8].size
