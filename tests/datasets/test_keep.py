"""`keep=`: columns of the inputs that are passed through to the output."""

import datetime
from pathlib import Path

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import tensorstore
import xarray

import batchax as bx
from batchax.datasets.inspect import verify
from batchax.datasets.plan import checksum

from support.map_calls import stops_at

ROWS = 23
X = np.arange(ROWS, dtype=np.float32)
HOW = dict(batch_size=2, commit_rows=4, progress=False)
TABLE = pyarrow.table(
    {
        "x": X,
        "id": pyarrow.array([f"row {i}" if i % 7 else None for i in range(ROWS)]),
        "n": np.arange(ROWS) + 2**40,
        "when": pyarrow.array(
            [datetime.datetime(2024, 1, 1 + i) for i in range(ROWS)], pyarrow.timestamp("s", "UTC")
        ),
        "kind": pyarrow.array([["a", "b", None][i % 3] for i in range(ROWS)]).dictionary_encode(),
        "ok": pyarrow.array([[True, False, None][i % 3] for i in range(ROWS)]),
        "raw": pyarrow.array([bytes([i]) * (i % 4) for i in range(ROWS)], pyarrow.large_binary()),
    }
)
NAMES = ["id", "n", "when", "kind", "ok", "raw"]


@pytest.fixture(autouse=True)
def here():
    pyarrow.parquet.write_table(TABLE, "t.parquet", row_group_size=5)


def twice(x):
    return 2 * x


def plain(table):
    return {name: table.column(name).to_pylist() for name in table.column_names}


@pytest.mark.parametrize("out", ["y.parquet", "memory://{}/y.parquet"])
def test_columns_of_any_type(out, tmp_path):
    out = out.format(tmp_path.name)
    with pytest.raises(TimeoutError):
        bx.map(twice, "t.parquet:x", out=out, keep=NAMES, **{**HOW, "progress": stops_at(8)})
    report = bx.map(twice, "t.parquet:x", out=out, keep=NAMES, **HOW)
    assert report.reused >= 8
    assert verify(out)
    assert report.outputs == f"{out}:result"
    np.testing.assert_array_equal(bx.map(twice, report.outputs, progress=False).outputs, 4 * X)
    if out == "y.parquet":
        made = pyarrow.parquet.read_table(out)
        assert plain(made.select(NAMES)) == plain(TABLE.select(NAMES))
    with pytest.raises(bx.JobError, match=r"keep was .*, is \['id'\]"):
        bx.map(twice, "t.parquet:x", out=out, keep=["id"], **HOW)


def test_damage_in_a_column_that_is_passed_through_is_found():
    bx.map(twice, "t.parquet:x", out="y.parquet", keep=["id"], **HOW)
    part = Path("y.parquet/part-00000001.parquet")
    part.write_bytes(part.read_bytes().replace(b"row 5", b"row 6"))
    assert [d.unit.number for d in verify("y.parquet").damaged] == [1]
    bx.map(twice, "t.parquet:x", out="y.parquet", keep=["id"], **HOW)
    assert plain(pyarrow.parquet.read_table("y.parquet"))["id"] == plain(TABLE)["id"]


def test_columns_in_a_dict():
    frame = TABLE.to_pandas()
    coordinate = xarray.DataArray(np.arange(ROWS), dims="row")
    keep = {
        "arrow": TABLE["id"],
        "series": frame["id"],
        "dates": pandas.Series(pandas.date_range("2024-01-01", periods=ROWS, freq="h")),
        "path": "t.parquet:id",
        "numbers": np.arange(ROWS),
        "texts": [f"{i}" for i in range(ROWS)],
        "coordinate": coordinate,
    }
    np.save("n.npy", np.arange(ROWS) * 3)
    bx.map(lambda x: {"y": x}, X, out="y/", keep={**keep, "file": "n.npy"}, **HOW)
    made = plain(pyarrow.parquet.read_table("y"))
    assert made["arrow"] == made["series"] == made["path"] == plain(TABLE)["id"]
    assert made["texts"] == keep["texts"]
    assert made["numbers"] == made["coordinate"] == [*range(ROWS)]
    assert made["file"] == [*range(0, 3 * ROWS, 3)]
    assert made["dates"][-1] == keep["dates"].iloc[-1]
    assert bx.map(lambda x: {"y": x}, X, out="y/", keep={**keep, "file": "n.npy"}, **HOW).reused
    keep["texts"] = keep["texts"][::-1]
    with pytest.raises(bx.JobError, match="keep\\['texts'\\] has other values"):
        bx.map(lambda x: {"y": x}, X, out="y/", keep={**keep, "file": "n.npy"}, **HOW)


def test_files_of_a_pattern_and_coordinates():
    Path("parts").mkdir()
    for i in range(0, ROWS, 6):
        pyarrow.parquet.write_table(TABLE.slice(i, 6), f"parts/{i:03}.parquet")
    bx.map(twice, "parts/*.parquet:x", out="y/", keep=["id", "kind"], **HOW)
    made = plain(pyarrow.parquet.read_table("y"))
    assert (made["id"], made["kind"]) == (plain(TABLE)["id"], plain(TABLE)["kind"])
    hours = pandas.date_range("2024-01-01", periods=ROWS, freq="h")
    x = xarray.DataArray(X, dims=["hour"], coords={"hour": hours})
    bx.map(twice, x, out="z/", keep=["hour"], **HOW)
    assert plain(pyarrow.parquet.read_table("z"))["hour"] == [*hours]


def test_numbers_to_zarr():
    bx.map(twice, "t.parquet:x", out="y.zarr", keep=["n"], **HOW)
    assert verify("y.zarr")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": "y.zarr/n/"}}
    made = np.asarray(tensorstore.open(spec).result())
    np.testing.assert_array_equal(made, np.arange(ROWS) + 2**40)
    made = bx.map(twice, "y.zarr/result", progress=False).outputs
    np.testing.assert_array_equal(made, 4 * X)


def test_rows_that_are_added_have_their_columns():
    pyarrow.parquet.write_table(TABLE.slice(0, 10), "t.parquet")
    how = dict(out="y/", keep=["id"], resume="extend", **HOW)
    bx.map(twice, "t.parquet:x", **how)
    pyarrow.parquet.write_table(TABLE, "t.parquet")
    assert bx.map(twice, "t.parquet:x", **how).reused == 8
    assert plain(pyarrow.parquet.read_table("y"))["id"] == plain(TABLE)["id"]
    longer = pyarrow.concat_tables([TABLE, TABLE])
    longer = longer.set_column(1, "id", pyarrow.array(["other"] * 2 * ROWS))
    pyarrow.parquet.write_table(longer, "t.parquet")
    with pytest.raises(bx.JobError, match=r"keep\['id'\].*they were changed"):
        bx.map(twice, "t.parquet:x", **how)


def test_no_rows():
    pyarrow.parquet.write_table(TABLE.slice(0, 0), "t.parquet")
    bx.map(twice, "t.parquet:x", out="y/", keep=["id"], **HOW)
    assert pyarrow.parquet.read_table("y").column_names == ["result", "id"]


@pytest.mark.parametrize(
    ("args", "options", "match"),
    [
        (("t.parquet:x",), {"out": "y/", "keep": "id"}, "keep must be a list"),
        (("t.parquet:x",), {"out": "y/", "keep": X}, "keep must be a list"),
        (("t.parquet:x",), {"out": "y/", "keep": ["idd"]}, "no column 'idd' .* there are: x, id"),
        ((X,), {"out": "y/", "keep": ["id"]}, r"keep: 'id' .*none is a column .*keep=\{'id'"),
        (("t.parquet:x",), {"out": "y.zarr", "keep": ["id"]}, r"keep\['id'\].*string.*y.parquet"),
        (("t.parquet:x",), {"out": "y.npy", "keep": ["n"]}, "keep passes.*'y.npy'"),
        (("t.parquet:x",), {"keep": ["n"]}, "keep passes"),
        (("t.parquet:x",), {"out": "y/", "keep": {"id": [1, "a"]}}, r"keep\['id'\] is"),
        (("t.parquet:x",), {"out": "y/", "keep": {"id": [[1], [2]]}}, r"keep\['id'\].*list"),
        (("t.parquet:x",), {"out": "y/", "keep": {"result": TABLE["id"]}}, "'result'.*keep"),
        (("t.parquet:x",), {"out": "y/", "keep": {"id": ["a"]}}, r"keep\['id'\].*\(1,\).* 23 rows"),
        ((iter(X),), {"out": "y/", "keep": {"id": ["a"]}}, "keep .*stream"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(args, options, match):
    with pytest.raises((bx.ArgumentTypeError, bx.AxisError, bx.UnsupportedError), match=match):
        bx.map(twice, *args, **options, **HOW)
    assert [p.name for p in Path().iterdir()] == ["t.parquet"]


def test_a_column_with_nulls_is_no_array_of_numbers():
    numbers = pyarrow.array([1, None, *range(2, ROWS)])
    with pytest.raises((bx.ArgumentTypeError, bx.StorageError), match=r"keep\['n'\].*null"):
        bx.map(twice, X, out="y.zarr", keep={"n": numbers}, **HOW)


@pytest.mark.parametrize("name", TABLE.column_names)
def test_the_checksum_of_a_column_does_not_depend_on_its_buffers(name):
    whole = pyarrow.concat_arrays(TABLE[name].cast(pyarrow.string()).chunks
                                  if name == "kind" else TABLE[name].chunks)  # fmt: skip
    part = whole.slice(3, 9)
    fresh = pyarrow.array(part.to_pylist(), part.type)
    assert checksum(part) == checksum(fresh)
    assert checksum(part) != checksum(whole.slice(4, 9))
