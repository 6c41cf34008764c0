"""Where results go: what is written is read back, by others too; damage and mistakes are named."""

import errno
import os

import jax
import numpy as np
import pytest

import batchax as bx
from batchax.datasets.file_stores import NpyStore, ParquetStore, ZarrStore
from batchax.datasets.plan import Leaf, Plan
from batchax.datasets.stores import open_store

from support.store_tests import StoreTests

PLAN = Plan(10, 2, 4)  # units of 4, 4 and 2 rows


def leaf(name="", shape=(10, 3), dtype=np.float32, axis=0, ragged=None):
    return Leaf(name, shape, np.dtype(dtype), axis, ragged)


def values(of):
    """Of all rows, no two alike where the dtype can tell them apart."""
    return np.arange(int(np.prod(of.shape))).reshape(of.shape).astype(of.dtype)


def rows_of(of, unit):
    return np.take(values(of), range(unit.start, unit.stop), of.axis)


def written(out, leaves, plan=PLAN):
    store = open_store(out, leaves, plan)
    store.prepare()
    for number in reversed(range(len(plan))):
        unit = plan.unit(number)
        store.write(unit, [rows_of(each, unit) for each in leaves])
    store.end(plan.rows)
    return store


NUMBERS = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64"),
)


class TestZarr(StoreTests):
    store, suffix, ragged = ZarrStore, "zarr", False
    dtypes = (*NUMBERS, "bfloat16", "float8_e4m3fn", "complex64")


class TestNpy(StoreTests):
    store, suffix, dtypes = NpyStore, "npy", NUMBERS
    trees = ragged = mends = False  # units have no files of their own


class TestParquet(StoreTests):
    store, suffix, empty, dtypes = ParquetStore, "parquet", False, NUMBERS


KINDS = ("x.zarr", "x.npy", "x.parquet", None)


@pytest.fixture
def place(tmp_path):
    return lambda kind: None if kind is None else tmp_path / kind


TREE = [leaf("y"), leaf("a/b", (10,), np.int32), leaf("a/0", (2, 10), np.float64, 1)]


def test_others_read_zarr(place):
    zarr = pytest.importorskip("zarr")
    written(place("x.zarr"), TREE)
    group = zarr.open(str(place("x.zarr")), mode="r")
    for each in TREE:
        np.testing.assert_array_equal(group[each.name][:], values(each))
    assert group["y"].chunks == (4, 3)
    assert sorted(group["a"].array_keys()) == ["0", "b"]
    written(place("one.zarr"), [leaf()])
    np.testing.assert_array_equal(zarr.open(str(place("one.zarr")), mode="r")[:], values(leaf()))


def test_others_read_npy_and_parquet(place):
    parquet = pytest.importorskip("pyarrow.parquet")
    written(place("x.npy"), [leaf()])
    np.testing.assert_array_equal(np.load(place("x.npy")), values(leaf()))
    np.save(place("plain.npy"), values(leaf()))
    assert place("x.npy").read_bytes() == place("plain.npy").read_bytes()
    written(place("t"), [leaf("y"), leaf("s", (10,), np.int32)])
    assert sorted(os.listdir(place("t"))) == [f"part-0000000{i}.parquet" for i in range(3)]
    table = parquet.read_table(place("t"))
    assert table.column("y").to_pylist() == values(leaf()).tolist()
    assert table.column("s").to_pylist() == list(range(10))


def test_results_of_zeros_are_written(place):
    store, unit = open_store(place("x.zarr"), [leaf()], PLAN), PLAN.unit(0)
    store.prepare()
    with pytest.raises(bx.StorageError, match=r"c\.0\.0"):
        store.read(unit)
    store.write(unit, [np.zeros((4, 3), np.float32)])
    np.testing.assert_array_equal(store.read(unit)[0], np.zeros((4, 3)))


@pytest.mark.parametrize("kind", ["x.zarr", "x.npy", "x.parquet"])
def test_an_output_that_is_gone_or_another(kind, place):
    store = open_store(place(kind), [leaf()], PLAN)
    with pytest.raises(bx.StorageError, match="missing"):
        store.check()
    if kind != "x.parquet":
        written(place(kind), [leaf(shape=(10, 4))])
        with pytest.raises(bx.JobError, match=kind):
            store.check()


def test_a_result_of_another_shape_is_refused(place):
    for kind in KINDS:
        store = open_store(place(kind), [leaf("y")], PLAN)
        store.prepare()
        for wrong in (np.zeros((3, 3), np.float32), np.zeros((4, 3)), np.zeros((4, 2), np.float32)):
            with pytest.raises(bx.ArgumentTypeError, match="'y'"):
                store.write(PLAN.unit(0), [wrong])


REFUSED = [
    ("x.npy", [leaf(dtype="bfloat16")], "bfloat16"),
    ("x.npy", [leaf("a"), leaf("b")], "2: 'a', 'b'"),
    ("x.npy", [leaf(ragged=0)], "different lengths"),
    ("x.zarr", [leaf("y", ragged=0)], "different lengths"),
    ("x.zarr", [leaf("a"), leaf("a/b")], "name"),
    ("x.zarr", [leaf("a"), leaf("../b")], "name"),
    ("x.zarr", [leaf("a"), leaf("a")], "two results"),
    ("x.parquet", [leaf("y", dtype="complex64")], "complex64"),
    ("x", [leaf("y", dtype="bfloat16")], "bfloat16"),
    ("x.h5", [leaf()], "results are written to .zarr, .npy and .parquet"),
    ("x.csv", [leaf()], r"\.zarr, \.npy"),
    (7, [leaf()], "must be a path"),
    (None, [Leaf("", (10,), jax.random.key(0).dtype)], "key_data"),
]


@pytest.mark.parametrize(("out", "leaves", "message"), REFUSED)
def test_what_cannot_be_written_is_refused_by_name(out, leaves, message, tmp_path):
    with pytest.raises(bx.ArgumentTypeError, match=message):
        open_store(tmp_path / out if isinstance(out, str) else out, leaves, PLAN)
    assert not os.listdir(tmp_path)


def test_what_cannot_fit_the_disk_is_refused_before_work(place):
    for kind in ("x.zarr", "x.npy"):
        store = open_store(place(kind), [leaf(shape=(2**50, 3))], Plan(2**50, 2, 2**40))
        with pytest.raises(bx.StorageError, match="Free some space"):
            store.prepare()
        assert not os.path.lexists(place(kind))


@pytest.mark.parametrize("kind", ["x.zarr", "x.npy", "x.parquet"])
def test_a_place_that_cannot_be_written_to(kind, tmp_path):
    (tmp_path / "file").write_text("")
    store = open_store(tmp_path / "file" / kind, [leaf()], PLAN)
    with pytest.raises(bx.StorageError, match="file"):
        store.prepare()


def test_a_file_without_the_space_that_was_promised(place, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    written(place("x.npy"), [leaf()])
    np.testing.assert_array_equal(np.load(place("x.npy")), values(leaf()))
