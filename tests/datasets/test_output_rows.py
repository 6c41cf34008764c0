"""`OutputRows`: a function of one row that drops its row, or has several of output."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import batchax as bx
from batchax.datasets.inspect import verify
from batchax.datasets.sources import as_source

from support.map_calls import stops_at

ROWS = 23
X = np.random.default_rng(0).integers(-9, 9, (ROWS, 3)).astype(np.float32)
IDS = [f"row {i}" for i in range(ROWS)]
HOW = dict(batch_size=2, commit_rows=4, progress=False)


@pytest.fixture(autouse=True)
def here():
    np.save("x.npy", X)


def positive(x):
    """The positive numbers of a row, at most two, each with the square of it."""
    order = jnp.argsort(x <= 0, stable=True)[:2]
    values = {"y": x[order], "pair": x[order][:, None] * jnp.array([1, 2])}
    return bx.OutputRows(values, (x > 0).sum())


def by_hand(x=X):
    """The plain loop."""
    rows = [(i, y) for i, row in enumerate(x) for y in row[row > 0][:2]]
    return [IDS[i] for i, _ in rows], np.array([y for _, y in rows])


@pytest.mark.parametrize("out", ["y.parquet", "memory://{}/y.parquet"])
def test_rows_that_are_dropped_and_several(out, tmp_path):
    out = out.format(tmp_path.name)
    how = dict(out=out, keep={"id": IDS})
    with pytest.raises(TimeoutError):
        bx.map(positive, "x.npy", **how, **{**HOW, "progress": stops_at(8)})
    report = bx.map(positive, "x.npy", **how, **HOW)
    assert (report.rows, report.reused >= 8) == (ROWS, True)
    assert verify(out)
    ids, y = by_hand()
    read = lambda name: as_source(report.outputs[name], name).whole()
    np.testing.assert_array_equal(read("y"), y)
    np.testing.assert_array_equal(read("pair"), y[:, None] * [1, 2])
    if out == "y.parquet":
        assert pyarrow.parquet.read_table(out)["id"].to_pylist() == ids


def test_all_rows_and_none():
    bx.map(lambda x: bx.OutputRows(x[None], True), X, out="all/", **HOW)
    np.testing.assert_array_equal(bx.map(lambda x: x, "all/:result", progress=False).outputs, X)
    bx.map(lambda x: bx.OutputRows(x, 0), X, out="none/", **HOW)
    made = pyarrow.parquet.read_table("none")
    assert (made.num_rows, made.column_names) == (0, ["result"])
    bx.map(lambda x: bx.OutputRows(x, 99), X, out="most/", **HOW)  # no more than there are
    assert pyarrow.parquet.read_table("most").num_rows == 3 * ROWS
    bx.map(lambda x: bx.OutputRows(x, 1), X[:0], out="no_rows/", **HOW)
    assert pyarrow.parquet.read_table("no_rows").column_names == ["result"]


def test_rows_that_fail_are_dropped():
    x = np.where(np.arange(ROWS)[:, None] == 5, np.nan, X)
    how = dict(on_nonfinite="quarantine", keep={"id": IDS})
    fun = lambda x: bx.OutputRows(x[None], 1)
    report = bx.map(fun, x, out="y/", **how, **HOW)
    assert report.quarantined == 1
    assert pyarrow.parquet.read_table("y")["id"].to_pylist() == [i for i in IDS if i != "row 5"]


def test_rows_that_are_added_and_workers():
    how = dict(out="y/", keep={"id": IDS[:10]}, resume="extend", executor="processes:1", **HOW)
    fun = _first_two
    bx.map(fun, X[:10], **how)
    how["keep"] = {"id": IDS}
    assert bx.map(fun, X, **how).reused == 8
    assert pyarrow.parquet.read_table("y")["id"].to_pylist() == np.repeat(IDS, 2).tolist()


def _first_two(x):
    return bx.OutputRows(x, 2)


def test_under_vmap_it_is_a_pytree():
    out = bx.vmap(positive)(X)
    ids, y = by_hand()
    counts = np.minimum(out.count, 2)
    assert np.repeat(IDS, counts).tolist() == ids
    np.testing.assert_array_equal(
        np.concatenate([v[:n] for v, n in zip(out.values["y"], counts, strict=True)]), y
    )
    assert len(jax.tree.leaves(out)) == 3


@pytest.mark.parametrize(
    ("fun", "options", "match"),
    [
        (positive, {"out": "y.zarr"}, r"OutputRows.*y\.zarr.*y\.parquet"),
        (lambda x: bx.OutputRows(x, 1), {"out": "y.npy"}, r"OutputRows.*y\.npy.*y\.parquet"),
        (positive, {}, "OutputRows.*memory"),
        (lambda x: {"a": bx.OutputRows(x, 1)}, {"out": "y/"}, "OutputRows inside"),
        (lambda x: bx.OutputRows({"a": x, "b": x[:2]}, 1), {"out": "y/"}, r"shapes \[\(3,\), \(2"),
        (lambda x: bx.OutputRows(x[0], 1), {"out": "y/"}, r"shapes \[\(\)\]"),
        (lambda x: bx.OutputRows(x, 1.5), {"out": "y/"}, "count must be an int"),
        (lambda x: bx.OutputRows(x, x > 0), {"out": "y/"}, "count must be an int"),
        (positive, {"out": "y/", "out_axes": bx.Reduce("sum")}, "out_axes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fun, options, match):
    with pytest.raises((bx.ArgumentTypeError, bx.UnsupportedError), match=match):
        bx.map(fun, X, **options, **HOW)
    with pytest.raises((bx.ArgumentTypeError, bx.UnsupportedError), match="OutputRows"):
        bx.map_batches(fun, X)
