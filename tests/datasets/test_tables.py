"""Results as arrays of xarray, with the coordinates of rows."""

import jax
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


def test_one_array_and_rows_along_other_axes():
    labelled = LABELLED.transpose("x", "day")
    y = bx.map(lambda x: 2 * x, labelled, in_axes=1, out_axes=1, progress=False).to_xarray()
    assert y.dims == ("dim_0", "day")
    np.testing.assert_allclose(y.sel(day="2024-01-05"), 2 * X[4])
    report = bx.map(lambda x: 2 * x, X, out_axes=1, progress=False)
    assert report.to_xarray().dims == ("dim_0", "row")


def test_rows_of_different_lengths():
    rows = [np.arange(n).astype(FLOAT) for n in (2, 0, 3)]
    report = bx.map(lambda x: x + 1, bx.Ragged.from_rows(rows), progress=False)
    with pytest.raises(bx.ArgumentTypeError, match="for which xarray has no array"):
        report.to_xarray()
