"""Results as tables of Arrow and pandas, and as arrays of xarray with the coordinates of rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import xarray

import batchax as bx

FLOAT = jax.dtypes.canonicalize_dtype(float)
X = np.random.default_rng(0).standard_normal((5, 3)).astype(FLOAT)
DAYS = pd.date_range("2024-01-01", periods=5)
LABELLED = xarray.DataArray(
    X,
    dims=["day", "x"],
    coords={"day": DAYS, "week": ("day", np.arange(5) // 3), "x": [7, 8, 9], "station": 3},
)


def both(x):
    return {"sum": x.sum(), "twice": 2 * x}


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=[None, "y.zarr", "y.parquet"])
def report(request):
    return bx.map(both, LABELLED, out=request.param, progress=False)


def test_xarray_in_and_out(report):
    y = report.to_xarray()
    assert isinstance(y, xarray.Dataset)
    assert y["sum"].dims == ("day",)
    assert y["twice"].dims == ("day", "twice_1")
    assert set(y.coords) == {"day", "week", "station"}  # of rows, and of all
    np.testing.assert_allclose(y["twice"].sel(day="2024-01-04"), 2 * X[3])
    pd.testing.assert_index_equal(y.indexes["day"], LABELLED.indexes["day"])
    expected = LABELLED.sum("x").groupby("week").mean()
    np.testing.assert_allclose(y["sum"].groupby("week").mean(), expected, rtol=1e-5)


def test_pandas_out(report):
    frame = report.to_pandas()
    assert list(frame.columns) == ["sum", "twice", "week"]
    np.testing.assert_allclose(frame.loc["2024-01-02", "sum"], X[1].sum(), rtol=1e-5)
    np.testing.assert_allclose(np.stack(frame["twice"]), 2 * X)


def test_arrow_out(report):
    table = report.to_arrow()
    assert table.column_names == ["sum", "twice"]
    np.testing.assert_allclose(table["sum"].to_numpy(), X.sum(1), rtol=1e-5)
    again = bx.map(jnp.sum, table["twice"], progress=False).outputs
    np.testing.assert_allclose(again, 2 * X.sum(1), rtol=1e-5)


def test_one_array_and_rows_along_other_axes():
    labelled = LABELLED.transpose("x", "day")
    y = bx.map(lambda x: 2 * x, labelled, in_axes=1, out_axes=1, progress=False).to_xarray()
    assert y.dims == ("dim_0", "day")
    np.testing.assert_allclose(y.sel(day="2024-01-05"), 2 * X[4])
    report = bx.map(lambda x: 2 * x, X, out_axes=1, progress=False)
    assert report.to_xarray().dims == ("dim_0", "row")
    np.testing.assert_allclose(np.stack(report.to_pandas()["result"]), 2 * X)
    np.testing.assert_allclose(np.stack(report.to_arrow()["result"].to_pylist()), 2 * X, rtol=1e-6)


def test_rows_of_different_lengths():
    rows = [np.arange(n).astype(FLOAT) for n in (2, 0, 3)]
    report = bx.map(lambda x: x + 1, bx.Ragged.from_rows(rows), progress=False)
    expected = [(row + 1).tolist() for row in rows]
    assert report.to_arrow()["result"].to_pylist() == expected
    assert [row.tolist() for row in report.to_pandas()["result"]] == expected
    with pytest.raises(bx.ArgumentTypeError, match="for which xarray has no array"):
        report.to_xarray()


def test_what_there_is_no_table_of():
    report = bx.map(lambda x: x * 1j, X, progress=False)
    with pytest.raises(bx.ArgumentTypeError, match=r"result is of dtype complex.*no type"):
        report.to_arrow()
    report = bx.map(jnp.sum, X, out_axes=bx.Reduce("sum"), progress=False)
    with pytest.raises(bx.ArgumentTypeError, match="no rows for a table"):
        report.to_arrow()
