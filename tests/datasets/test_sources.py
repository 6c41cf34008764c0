"""Where rows come from: every kind gives the same rows, fresh; mistakes and damage are named."""

import itertools
import os
import sys

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
import xarray
import zarr

import batchax as bx
from batchax.datasets import formats
from batchax.datasets.plan import crc32c
from batchax.datasets.sources import as_source

from support.processes import python
from support.source_tests import SourceTests, same

X = np.arange(60, dtype=np.float32).reshape(4, 5, 3)


def save(path, x):
    np.save(path, x)
    return path


def save_h5(path, x):
    with h5py.File(path, "w") as file:
        file["g/x"] = x
    return path


def save_zarr(path, x, version=3):
    array = zarr.create_array(str(path), shape=x.shape, dtype=x.dtype, chunks=(2,) * x.ndim,
                              zarr_format=version)  # fmt: skip
    array[...] = x
    return path


def open_tensorstore(path):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    return tensorstore.open(spec).result()


def lazy_xarray(path, x=X):
    xarray.Dataset({"x": (("a", "b", "c"), x)}).to_zarr(path, consolidated=False)
    return xarray.open_zarr(path, chunks=None, consolidated=False)["x"]


def big_endian(x):
    return x.astype(x.dtype.newbyteorder(">"))


KINDS = {
    "numpy": lambda at, x: x,
    "numpy, Fortran": lambda at, x: np.asfortranarray(x),
    "numpy, strided": lambda at, x: np.repeat(x, 2, 1)[:, ::2],
    "numpy, big endian": lambda at, x: big_endian(x),
    "jax": lambda at, x: jnp.asarray(x),
    "memmap": lambda at, x: np.load(save(at / "m.npy", x), mmap_mode="r"),
    "npy": lambda at, x: save(at / "x.npy", x),
    "npy, str": lambda at, x: str(save(at / "x.npy", x)),
    "npy, Fortran": lambda at, x: save(at / "x.npy", np.asfortranarray(x)),
    "npy, big endian": lambda at, x: save(at / "x.npy", big_endian(x)),
    "npz": lambda at, x: (np.savez(at / "x.npz", x=x), f"{at}/x.npz:x")[1],
    "h5": lambda at, x: f"{save_h5(at / 'x.h5', x)}:g/x",
    "h5, big endian": lambda at, x: f"{save_h5(at / 'x.h5', big_endian(x))}:g/x",
    "h5py": lambda at, x: h5py.File(save_h5(at / "x.h5", x), "r")["g/x"],
    "zarr 2": lambda at, x: save_zarr(at / "x.zarr", x, 2),
    "zarr 3": lambda at, x: save_zarr(at / "x.zarr", x, 3),
    "zarr, inside": lambda at, x: save_zarr(at / "x.zarr" / "a" / "b", x, 3),
    "zarr-python": lambda at, x: zarr.open(str(save_zarr(at / "x.zarr", x)), mode="r"),
    "zarr-python, in memory": lambda at, x: zarr.array(x),
    "tensorstore": lambda at, x: open_tensorstore(save_zarr(at / "x.zarr", x)),
    "tensorstore, in memory": lambda at, x: tensorstore.array(x),
    "tensorstore, moved": lambda at, x: tensorstore.array(x)[tensorstore.d[0].translate_by[7]],
    "xarray": lambda at, x: xarray.DataArray(x, dims=list("abc")),
    "xarray, in a file": lambda at, x: lazy_xarray(at / "x.zarr", x),
}


class TestKinds(SourceTests):
    dtypes = ("float32", "int32", "uint8", "bool")  # JAX rounds others to these
    lengths = (3, 0, 2, 4)

    @pytest.fixture(params=KINDS, ids=lambda kind: kind.replace(", ", "-").replace(" ", "-"))
    def source_of(self, request, tmp_path):
        count = itertools.count()

        def source_of(x):
            at = tmp_path / str(next(count))
            at.mkdir()
            return as_source(KINDS[request.param](at, x), "args[0]")

        return source_of

    @pytest.fixture
    def ragged_of(self):
        return lambda rows: as_source(bx.Ragged.from_rows(rows), "x")


def test_the_identity_of_memory_is_what_it_holds():
    assert as_source(X, "x").identity()["crc32c"] == crc32c(X)
    large = np.arange(5_000_000).reshape(-1, 2)  # read in more than one block
    assert as_source(large, "x").identity()["crc32c"] == crc32c(large)
    assert as_source(np.float32(3), "x").identity() == as_source(jnp.float32(3), "x").identity()


def test_parts_of_one_mapped_file_are_told_apart(tmp_path):
    mapped = np.load(save(tmp_path / "x.npy", X), mmap_mode="r")
    parts = [mapped[:2], mapped[2:], mapped[::2], mapped[:2, ::-1], mapped[:2].view(np.int32)]
    seen = [as_source(part, "x").identity() for part in parts]
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])
    private = np.load(tmp_path / "x.npy", mmap_mode="c")
    private[0] = 7
    assert as_source(private, "x").identity()["crc32c"] == crc32c(private)
    assert "crc32c" in as_source(mapped + 1, "x").identity()


def test_a_mapped_file_that_is_written_to(tmp_path):
    mapped = np.load(save(tmp_path / "x.npy", X), mmap_mode="r+")
    mapped[0] = 7
    source = as_source(mapped[:2], "x")
    known = source.identity()
    same(source.read(0, 0, 1), np.full((1, 5, 3), 7, np.float32))
    os.sync()
    assert as_source(mapped[:2], "x").identity() == known
    same(source.whole()[1:], X[1:2])


def test_parts_of_one_array_on_disk_are_told_apart(tmp_path):
    array = open_tensorstore(save_zarr(tmp_path / "x.zarr", X))
    assert as_source(array[:2], "x").identity() != as_source(array[2:], "x").identity()
    lazy = lazy_xarray(tmp_path / "lazy.zarr")
    assert as_source(lazy[:2], "x").identity() != as_source(lazy[2:], "x").identity()


def test_dtypes_are_numpys_own_objects(tmp_path):
    source = as_source(f"{save_h5(tmp_path / 'x.h5', X)}:g/x", "x")
    assert source.dtype.isbuiltin == 1  # h5py's is not, and .npy files are made of none other


def test_dtypes_of_machine_learning(tmp_path):
    x = jnp.arange(6, dtype=jnp.bfloat16)
    same(as_source(x, "x").read(0, 1, 3), np.asarray(x[1:3]))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(50, 7, 3), (3, 900, 5), (2, 300, 7, 2), (5, 1)])
def test_npy_files_of_every_layout(shape, order, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_SPAN", 700)
    x = np.asarray(np.arange(np.prod(shape)).reshape(shape), order=order)
    source = as_source(save(tmp_path / "x.npy", x), "x")
    for gap in (0, 100, 10**9):
        monkeypatch.setattr(formats, "_GAP", gap)
        for axis, size in enumerate(shape):
            for start, stop in ((0, size), (size // 3, size // 2 + 1), (size - 1, size)):
                same(source.read(axis, start, stop), x.take(range(start, stop), axis))


def test_a_few_columns_are_read_without_the_rest(tmp_path, monkeypatch):
    source = as_source(save(tmp_path / "x.npy", np.zeros((8, 100_000))), "x")
    read, seen = os.preadv, []

    def counted(file, buffers, offset):
        seen.append(read(file, buffers, offset))
        return seen[-1]

    monkeypatch.setattr(os, "preadv", counted)
    source.read(1, 500, 600)
    assert sum(seen) == 8 * 100 * 8


def test_ragged_rows_along_another_axis():
    x = bx.Ragged.from_rows([np.ones((2, 3)), np.zeros((2, 1))], axis=1)
    moved = as_source(x, "x")
    assert (moved.shape, moved.ragged_axis) == ((2, 2), 1)
    same(moved.read(0, 0, 1).data, np.ones((3, 2), moved.dtype))
    fun = lambda row: (row.shape[0], row.sum(1))
    twos, sums = bx.map(fun, x, progress=False).outputs
    np.testing.assert_array_equal(twos, [2, 2])
    np.testing.assert_array_equal(sums, [[3, 3], [0, 0]])


REFUSED = {
    "[1, 2]": ("list", lambda: [1, 2]),
    "None": ("NoneType", lambda: None),
    "objects": ("object", lambda: np.array([None, "a"])),
    "text": ("not numbers", lambda: np.array(["a", "b"])),
    "dates": ("datetime64", lambda: np.array(["2020-01-01"], "M8[D]")),
    "keys": ("key_data", lambda: jax.random.split(jax.random.key(0), 3)),
    "ragged keys": (
        "key_data",
        lambda: bx.Ragged(jax.random.split(jax.random.key(0), 3), np.array([1, 2])),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_holds_no_numbers_is_refused_by_name(what):
    message, make = REFUSED[what]
    with pytest.raises(bx.ArgumentTypeError, match=rf"args\[3\].*{message}"):
        as_source(make(), "args[3]")


def test_a_source_is_one():
    source = as_source(X, "args[0]")
    assert as_source(source, "args[1]") is source
    report = bx.map(jnp.sum, source, progress=False)
    np.testing.assert_allclose(report.outputs, X.sum((1, 2)))
    report = bx.map(lambda x, y: (x * y).sum(), source, source, in_axes=(0, None), progress=False)
    np.testing.assert_allclose(report.outputs, (X[:, None] * X).sum((1, 2, 3)))


def test_traced_arrays_are_refused():
    with pytest.raises(bx.ArgumentTypeError, match=r"args\[0\] is traced"):
        jax.jit(lambda x: as_source(x, "args[0]"))(X)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.npy", "no such file"),
        ("nothing.h5:x", "no such file"),
        ("x.npz:y", "has no array 'y'. There are: x"),
        ("x.npz", "add the name of an array after the path, as in ':x'. There are: x"),
        ("x.h5:g/y", "has no array 'g/y'. There are: g/x"),
        ("x.h5:g", "has no array 'g'"),
        ("group.zarr", "group of Zarr arrays.*group.zarr/a/b, .*group.zarr/c"),
        ("x.npy:y", "no arrays with names"),
        ("x.csv", "the format is unknown"),
        ("empty.zarr", "no Zarr array"),
        ("broken.npy", "cannot be read"),
        ("broken.h5:x", "cannot be read"),
        ("broken.npz:x", "cannot be read"),
        ("broken.zarr", "cannot be read"),
    ],
)
def test_paths_that_lead_nowhere(name, message, tmp_path):
    np.savez(tmp_path / "x.npz", x=X)
    save(tmp_path / "x.npy", X)
    save_h5(tmp_path / "x.h5", X)
    zarr.create_group(str(tmp_path / "group.zarr"))
    zarr.create_group(str(tmp_path / "group.zarr" / "a"))
    save_zarr(tmp_path / "group.zarr" / "a" / "b", X)
    save_zarr(tmp_path / "group.zarr" / "c", X)
    (tmp_path / "x.csv").write_text("1,2")
    (tmp_path / "empty.zarr").mkdir()
    (tmp_path / "broken.zarr").mkdir()
    for broken in ("broken.npy", "broken.h5", "broken.npz", "broken.zarr/zarr.json"):
        (tmp_path / broken).write_text("no such thing")
    with pytest.raises((bx.StorageError, bx.ArgumentTypeError), match=rf"args\[1\].*{message}"):
        as_source(tmp_path / name, "args[1]")


def test_names_with_colons(tmp_path):
    save(tmp_path / "a:b.npy", X)
    same(as_source(tmp_path / "a:b.npy", "x").whole(), X)
    save_h5(tmp_path / "c:d.h5", X)
    same(as_source(f"{tmp_path}/c:d.h5:g/x", "x").whole(), X)


def test_a_truncated_file_is_refused_when_opened(tmp_path):
    path = save(tmp_path / "x.npy", X)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(bx.StorageError, match=r"x\.npy is truncated.*368 bytes, and 367"):
        as_source(path, "x")


@pytest.mark.parametrize("kind", ["npy", "h5", "memmap"])
def test_a_file_that_changes_while_it_is_read(kind, tmp_path):
    source = as_source(KINDS[kind](tmp_path, X), "args[0]")
    file = next(tmp_path.iterdir())
    os.truncate(file, 200)
    with pytest.raises(bx.StorageError, match=rf"args\[0\].*{file.name} was changed"):
        source.read(0, 1, 2)
    file.unlink()
    with pytest.raises(bx.StorageError, match=rf"args\[0\].*{file.name}"):
        source.read(0, 1, 2)


def test_a_file_that_ends_while_it_is_read(tmp_path, monkeypatch):
    source = as_source(save(tmp_path / "x.npy", X), "args[0]")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(bx.StorageError, match=r"x\.npy.*rows 1 to 2 along axis 0.*ends at byte"):
        source.read(0, 1, 2)


def test_a_failure_of_another_library_names_the_rows(tmp_path):
    path = save_zarr(tmp_path / "x.zarr", X)
    chunk = path / "c" / "0" / "0" / "0"
    chunk.write_bytes(b"broken")
    source = as_source(path, "args[0]")
    with pytest.raises(bx.StorageError, match=r"x\.zarr.*rows 0 to 2 along axis 0") as caught:
        source.read(0, 0, 2)
    assert caught.value.__cause__ is not None
    assert "tensorstore_spec" not in str(caught.value)


def test_an_array_that_gives_other_shapes():
    class Strange:
        shape, dtype = (4, 3), np.dtype(np.float32)

        def __getitem__(self, index):
            return np.zeros((1, 1), np.float32)

    with pytest.raises(bx.StorageError, match=r"args\[0\].*shape \(1, 1\) instead of \(2, 3\)"):
        as_source(Strange(), "args[0]").read(0, 0, 2)


@pytest.mark.parametrize(
    ("kind", "module", "package"),
    [("zarr 3", "tensorstore", r"'batchax\[data\]'"), ("h5", "h5py", "h5py")],
)
def test_what_is_not_installed_is_asked_for(kind, module, package, tmp_path, monkeypatch):
    path = KINDS[kind](tmp_path, X)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        as_source(path, "x")


def test_nothing_of_storage_is_imported_with_the_package():
    code = (
        "import sys, batchax, batchax.datasets.sources, batchax.datasets.store; "
        "print({'tensorstore', 'pyarrow', 'h5py', 'google_crc32c'} & set(sys.modules))"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "set()", done.stderr


def test_what_is_in_memory_is_not_copied():
    x = np.arange(12.0)
    source = as_source(x, "x")
    assert np.shares_memory(source.read(0, 2, 4, fresh=False), x)
    assert not np.shares_memory(source.read(0, 2, 4), x)
