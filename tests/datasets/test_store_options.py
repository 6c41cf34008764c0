"""`store_options=`: how a store writes results, by the options of the library that writes them."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet
import pytest
import xarray

import batchax as bx
from batchax.datasets.inspect import verify

from support.map_calls import stops_at

X = np.arange(33 * 5, dtype=np.float32).reshape(33, 5)
HOW = dict(batch_size=4, commit_rows=8, progress=False)
ZSTD = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 3}}]
SHARDS = {"chunk_shape": [2, 5], "codecs": ZSTD}
DISK, OBJECTS = "y.zarr", "memory://{}/y.zarr"


def twice(x):
    return 2 * x


def document(path):
    return json.loads(Path(path, "zarr.json").read_text())


@pytest.mark.parametrize("out", [DISK, OBJECTS])
@pytest.mark.parametrize(
    "options",
    [
        {"codecs": ZSTD},
        {"chunk_shape": (4, 2)},  # which divides neither the rows nor the columns
        {"codecs": [{"name": "sharding_indexed", "configuration": SHARDS}]},
        {"chunk_shape": [8, 5], "dimension_names": ["time", None], "codecs": ZSTD},
    ],
)
def test_zarr_is_written_as_asked_and_resumes(out, options, tmp_path):
    out = out.format(tmp_path.name)
    how = dict(out=out, store_options=options)
    with pytest.raises(TimeoutError):
        bx.map(twice, X, **how, **{**HOW, "progress": stops_at(16)})
    report = bx.map(twice, X, **how, **HOW)
    assert report.reused >= 16
    assert verify(out)
    np.testing.assert_array_equal(bx.map(twice, out, progress=False).outputs, 4 * X)
    if out == DISK:
        told = document(out)
        names = [codec["name"] for codec in told["codecs"]]
        asked = options.get("codecs", [{"name": "bytes"}, {"name": "crc32c"}])
        assert names == [codec["name"] for codec in asked]
        shape = told["chunk_grid"]["configuration"]["chunk_shape"]
        assert shape == [*options.get("chunk_shape", [8, 5])]
        chunks = [p for p in Path(out).iterdir() if p.name.startswith("c.")]
        assert len(chunks) == math.prod(-(-n // c) for n, c in zip(X.shape, shape, strict=True))
        assert told.get("dimension_names") == options.get("dimension_names")


def test_each_array_of_a_group_may_have_its_own():
    both = lambda x: {"y": x, "in": {"s": x.sum()}}
    options = {"codecs": ZSTD, "in/s": {"chunk_shape": [2]}, "y": {"codecs": [{"name": "bytes"}]}}
    bx.map(both, X, out="g.zarr", store_options=options, **HOW)
    assert [c["name"] for c in document("g.zarr/y")["codecs"]] == ["bytes"]
    assert [c["name"] for c in document("g.zarr/in/s")["codecs"]] == ["bytes", "zstd"]
    assert document("g.zarr/in/s")["chunk_grid"]["configuration"]["chunk_shape"] == [2]
    sums = bx.map(twice, "g.zarr/in/s", progress=False).outputs
    np.testing.assert_array_equal(sums, 2 * X.sum(1))


def test_chunks_of_a_unit_that_is_all_rows_may_have_any_size():
    bx.map(twice, X, out=DISK, store_options={"chunk_shape": [20, 3]}, progress=False)
    np.testing.assert_array_equal(bx.map(twice, DISK, progress=False).outputs, 4 * X)
    assert verify(DISK)


@pytest.mark.parametrize("out", ["y.parquet", "memory://{}/y.parquet"])
def test_parquet_is_written_as_asked_and_resumes(out, tmp_path):
    out = out.format(tmp_path.name)
    options = {"compression": "zstd", "row_group_size": 3, "use_dictionary": True}
    for _ in range(2):
        bx.map(twice, X, out=out, store_options=options, **HOW)
        assert verify(out)
        made = bx.map(twice, f"{out}:result", progress=False).outputs
        np.testing.assert_array_equal(made, 4 * X)
    if out == "y.parquet":
        told = pyarrow.parquet.ParquetFile(f"{out}/part-00000000.parquet").metadata
        assert [told.row_group(i).num_rows for i in range(told.num_row_groups)] == [3, 3, 2]
        assert told.row_group(0).column(0).compression == "ZSTD"


def test_other_options_are_another_call():
    bx.map(twice, X, out=DISK, store_options={"codecs": ZSTD}, **HOW)
    with pytest.raises(bx.JobError, match=r"store_options was .*zstd.*, is not given"):
        bx.map(twice, X, out=DISK, **HOW)
    with pytest.raises(bx.JobError, match=r"store_options was .*, is .*chunk_shape"):
        bx.map(twice, X, out=DISK, store_options={"chunk_shape": [4, 5]}, **HOW)


@pytest.mark.parametrize(
    ("out", "options", "match"),
    [
        ("y.zarr", {"chunk_shape": [3, 5]}, "has 3 rows.* 8 rows .*Use one of 1, 2, 4, 8 rows"),
        ("y.zarr", {"chunk_shape": [16, 5]}, "Use one of 1, 2, 4, 8 rows.* multiple of 16"),
        ("y.zarr", {"chunk_shape": [4]}, r"chunk_shape.*\(33, 5\)"),
        ("y.zarr", {"chunk_shape": [4, 0]}, "chunk_shape"),
        ("y.zarr", {"chunk_shape": 4}, "chunk_shape"),
        ("y.zarr", {"codecs": "zstd"}, "store_options.*codecs"),
        ("y.zarr", {"codecs": [{"name": "zstt"}]}, "store_options.*zstt"),
        ("y.zarr", {"codecs": [{"name": "sharding_indexed", "configuration": {
            "chunk_shape": [3, 5], "codecs": ZSTD}}]},
         r"in chunks of shape \[8, 5\].*store_options.*read size of 3"),
        ("y.zarr", {"dimension_names": ["a"]}, "store_options.*dimension_names"),
        ("y.zarr", {"compression": "zstd"}, "'compression'.*codecs, chunk_shape"),
        ("y.zarr", {"y": {"codecs": ZSTD}}, "'y'.*codecs, chunk_shape"),
        ("y.zarr", {"codecs": {1, 2}}, "store_options.*JSON"),
        ("y.zarr", ["codecs"], "store_options must be a dict"),
        ("y.parquet", {"codecs": ZSTD}, "'codecs'"),
        ("y.parquet", {"compression": "zstt"}, "store_options.*zstt"),
        ("y.parquet", {"row_group_size": 0}, "row_group_size"),
        ("y.parquet", {"store_schema": False}, "store_options.*other columns"),
        ("y.parquet", {"where": "elsewhere"}, "'where'"),
        ("y.npy", {"codecs": ZSTD}, r"store_options.*\.npy.*has no options"),
        (None, {"codecs": ZSTD}, "store_options.*memory.*has no options"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(out, options, match):
    with pytest.raises(bx.ArgumentTypeError, match=match):
        bx.map(twice, X, out=out, store_options=options, **HOW)
    assert not any(Path().iterdir())


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_xarray_give_their_axis_its_name(axis):
    x = xarray.DataArray(X[:, 0], dims=["hour"])
    out_axes = {"y": axis, "s": 0}
    bx.map(lambda x: {"y": x * jnp.arange(3), "s": x}, x, out="g.zarr", out_axes=out_axes, **HOW)
    opened = xarray.open_zarr("g.zarr", consolidated=False)
    assert opened["s"].dims == ("hour",)
    assert opened["y"].dims == (("hour", "y_1") if axis == 0 else ("y_0", "hour"))
    options = {"y": {"dimension_names": ["a", "b"]}}
    how = dict(out="h.zarr", out_axes=out_axes, store_options=options, **HOW)
    bx.map(lambda x: {"y": x * jnp.arange(3), "s": x}, x, **how)
    assert xarray.open_zarr("h.zarr", consolidated=False)["y"].dims == ("a", "b")
    with pytest.raises(bx.JobError, match="rows was hour, is day"):
        bx.map(lambda x: {"y": x * jnp.arange(3), "s": x}, x.rename(hour="day"), **how)
