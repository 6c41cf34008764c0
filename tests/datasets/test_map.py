"""`map` against the loop over rows: arguments, axes, results, keys, reductions, rows that fail."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchax as bx

CLOSE = dict(rtol=1e-5, atol=1e-6)
FLOAT = jax.dtypes.canonicalize_dtype(float)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr("batchax.progress.Progress.say", lambda *_: None)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(FLOAT)


def fun(x, w):
    return {"y": jnp.tanh(x @ w), "norm": (x**2).sum(), "most": x.max()}


def loop(fun, *rows):
    outs = [jax.tree.map(np.asarray, fun(*row)) for row in zip(*rows, strict=True)]
    return jax.tree.map(lambda *xs: np.stack(xs), *outs)


@pytest.mark.parametrize("out", [None, "y.zarr"])
@pytest.mark.parametrize(
    ("rows", "batch_size", "commit_rows"), [(23, 4, 8), (5, 8, None), (8, 8, 8)]
)
def test_a_tree_of_results_is_that_of_the_loop(tmp_path, out, rows, batch_size, commit_rows):
    x, w = numbers(rows, 6), numbers(6, 3, seed=1)
    report = bx.map(
        fun,
        x,
        w,
        in_axes=(0, None),
        out=out and tmp_path / out,
        batch_size=batch_size,
        commit_rows=commit_rows,
    )
    expected = loop(lambda x: fun(x, w), x)
    got = read(report.outputs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), got, expected)
    assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(lambda a: a.dtype, expected)
    assert (report.rows, report.reused, report.quarantined) == (rows, 0, 0)


def read(outputs):
    def one(x):
        if isinstance(x, np.ndarray):
            return x
        import zarr

        return np.load(x) if str(x).endswith(".npy") else zarr.open_array(x, mode="r")[...]

    return jax.tree.map(one, outputs)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
@pytest.mark.compiles(80)
def test_any_axes_any_sizes(data):
    rows = data.draw(st.integers(1, 40), "rows")
    shapes = data.draw(st.lists(st.lists(st.integers(1, 3), max_size=2), min_size=1, max_size=3))
    arrays, axes = [], []
    for i, shape in enumerate(shapes):
        axis = data.draw(st.integers(0, len(shape)))
        axes.append(data.draw(st.sampled_from([axis, axis - len(shape) - 1])))
        arrays.append(numbers(*shape[:axis], rows, *shape[axis:], seed=i))
    out_axes = [data.draw(st.integers(-1 - len(shape), len(shape))) for shape in shapes]
    each = lambda *xs: [x * (i + 2) for i, x in enumerate(xs)]
    report = bx.map(
        each,
        *arrays,
        in_axes=tuple(axes),
        out_axes=out_axes,
        batch_size=data.draw(st.integers(1, 9), "batch_size"),
        progress=False,
    )
    expected = jax.vmap(each, tuple(axes), out_axes)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, report.outputs, expected)


@pytest.mark.parametrize(
    "fun",
    [
        lambda key, x: jax.random.uniform(key) + x,
        lambda x, key: jax.random.uniform(key) + x,
        lambda x, *, key: jax.random.uniform(key) + x,
    ],
)
@pytest.mark.parametrize("in_axes", [0, (0,), {"x": 0}])
@pytest.mark.each_commit(3)
def test_keys_do_not_depend_on_batches(fun, in_axes):
    x, key = numbers(13), jax.random.key(7)
    keys = [jax.random.fold_in(key, i) for i in range(13)]
    expected = np.array([jax.random.uniform(k) + v for k, v in zip(keys, x, strict=True)])
    for batch_size in (1, 4, 13):
        got = bx.map(fun, x, key=key, in_axes=in_axes, batch_size=batch_size).outputs
        np.testing.assert_allclose(got, expected, **CLOSE)


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="64 bits hold them")
def test_integers_that_do_not_fit_fail_their_row():
    x = np.arange(9)
    np.testing.assert_array_equal(bx.map(lambda x: x, x).outputs, x)
    x[6] = 2**40
    with pytest.raises(bx.RowError, match=r"row 6 of x.*int64 does not fit into int32"):
        bx.map(lambda x: x, x, batch_size=4)
    report = bx.map(lambda x: x, x, batch_size=4, on_error="quarantine")
    np.testing.assert_array_equal(report.outputs, [0, 1, 2, 3, 4, 5, 0, 7, 8])
    rows = bx.Ragged(np.arange(5.0), [2, 3])  # what is no integer is rounded
    np.testing.assert_allclose(bx.map(jnp.sum, rows).outputs, [1, 9])


def test_rows_with_results_that_are_not_finite():
    x = numbers(21, 2)
    x[5, 1], x[20, 0] = np.nan, np.inf
    report = bx.map(lambda x: (x, 3), x, batch_size=4, on_nonfinite="quarantine")
    assert [b.row for b in report.bad] == [5, 20]
    assert "out[0] is not finite" in report.bad[0].error
    assert np.isnan(report.outputs[0][[5, 20]]).all()
    with pytest.raises(bx.RowError, match="row 5"):
        bx.map(lambda x: x, x, batch_size=4, on_nonfinite="raise")
    assert bx.map(lambda x: x, x, batch_size=4).quarantined == 0


def test_several_threads_at_a_time():
    x, failures = numbers(40, 3), []

    def work(factor):
        got = bx.map(lambda x: x * factor, x, batch_size=4, commit_rows=8).outputs
        if not np.array_equal(got, x * FLOAT.type(factor)):
            failures.append(factor)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures


def test_progress_is_told(capsys):
    seen = []
    bx.map(
        lambda x: x, numbers(20), batch_size=4, commit_rows=4, progress=lambda *a: seen.append(a)
    )
    assert seen == [(n, 20) for n in (4, 8, 12, 16, 20)]


MISTAKES = {
    "no function": (bx.ArgumentTypeError, "map expects a function", lambda x: bx.map(3, x)),
    "nothing mapped": (bx.AxisError, "nothing is mapped", lambda x: bx.map(fun)),
    "all shared": (bx.AxisError, "nothing is mapped", lambda x: bx.map(fun, x, in_axes=None)),
    "a list of rows": (
        bx.AxisError,
        r"(?s)x\[9\].*and 30 more arrays.*Ragged.from_rows",
        lambda x: bx.map(fun, [np.ones(n + 1) for n in range(40)]),
    ),
    "counts": (
        bx.AxisError,
        r"(?s)same number of rows.*x.*6 rows.*w\['w'\].*4 rows",
        lambda x: bx.map(fun, x, {"w": x[:4]}),
    ),
    "axis": (bx.AxisError, r"axis 2 for x", lambda x: bx.map(fun, x, in_axes=2)),
    "entries": (bx.AxisError, "in_axes has 2 entries", lambda x: bx.map(fun, x, in_axes=(0, 1))),
    "no file": (bx.StorageError, "there is no such file", lambda x: bx.map(fun, "none.npy")),
    "batch": (bx.OptionError, "batch_size must be", lambda x: bx.map(fun, x, batch_size=0)),
    "rows": (bx.OptionError, "commit_rows must be", lambda x: bx.map(fun, x, commit_rows=-1)),
    "error": (bx.OptionError, "on_error must be", lambda x: bx.map(fun, x, on_error="skip")),
    "finite": (
        bx.ArgumentTypeError,
        "on_nonfinite must be",
        lambda x: bx.map(fun, x, on_nonfinite=True),
    ),
    "retries": (bx.OptionError, "retries must be", lambda x: bx.map(fun, x, retries=-1)),
    "resume": (bx.ArgumentTypeError, "resume must be", lambda x: bx.map(fun, x, resume=True)),
    "executor": (bx.UnsupportedError, "executor", lambda x: bx.map(fun, x, executor=3)),
    "out axis": (
        bx.UnsupportedError,
        "out_axes gives None for out",
        lambda x: bx.map(lambda x: 3.0, x, out_axes=None),
    ),
    "keys": (
        bx.UnsupportedError,
        r"out are random keys.*key_data",
        lambda x: bx.map(lambda x: jax.random.key(0), x),
    ),
    "not an array": (TypeError, "out.*str", lambda x: bx.map(lambda x: "a", x)),
    "tiles": (
        bx.ArgumentTypeError,
        "along an axis, so pass its number",
        lambda x: bx.map(lambda x: x, x, in_axes=bx.tiles(2)),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    error, message, call = MISTAKES[name]
    with pytest.raises(error, match=message):
        call(numbers(6, 2))
