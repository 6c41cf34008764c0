"""Patterns as inputs: the rows of many files, and arrays in files, by their names."""

import itertools
import os
from pathlib import Path

import h5py
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import zarr

import batchax as bx
from batchax.datasets.sources import as_source

X = np.arange(36, dtype=np.float32).reshape(12, 3)
CUTS = (0, 5, 5, 6, 12)  # one of the parts has no rows


def parts():
    return [X[start:stop] for start, stop in itertools.pairwise(CUTS)]


def folders():
    for i, part in enumerate(parts()):
        Path(f"year={i}").mkdir(exist_ok=True)
        yield f"year={i}", part


def npy():
    for i, part in enumerate(parts()):
        np.save(f"{i}.npy", part)
    return "[0-9].npy"


def npy_in_folders():
    for folder, part in folders():
        np.save(f"{folder}/x.npy", part)
    return "year=*/x.npy"


def npy_anywhere():
    npy_in_folders()
    return "**/x.npy"


def hdf5():
    for folder, part in folders():
        with h5py.File(f"{folder}/x.h5", "w") as file:
            file["g/x"] = part
    return "year=*/x.h5:g/x"


def zarrs():
    for folder, part in folders():
        if len(part):
            zarr.create_array(f"{folder}/x.zarr/g/a", data=part, chunks=(2, 3))
    return "year=*/x.zarr:g/a"


def parquet():
    for folder, part in folders():
        flat = pa.array(part.reshape(-1))
        table = pa.table({"x": pa.FixedSizeListArray.from_arrays(flat, 3)})
        pyarrow.parquet.write_table(table, f"{folder}/x.parquet")
    return "year=*/*.parquet:x"


def parquet_folders():
    parquet()
    return "year=*:x"


KINDS = [npy, npy_in_folders, npy_anywhere, hdf5, zarrs, parquet, parquet_folders]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_all_files_in_the_order_of_their_names(kind):
    source = as_source(kind(), "x")
    assert (source.shape, source.dtype) == (X.shape, X.dtype)
    for start in range(len(X) + 1):
        for stop in range(start, len(X) + 1):
            for fresh in (False, True):
                got = source.read(0, start, stop, fresh=fresh)
                np.testing.assert_array_equal(got, X[start:stop])
            got[:] = 0  # a fresh one is nobody else's
    np.testing.assert_array_equal(source.read(0, 0, len(X)), X)


def test_rows_of_different_lengths_in_files():
    rows = [[1.0, 2.0], [], [3.0], [4.0, 5.0, 6.0]]
    for i, some in enumerate((rows[:1], rows[1:])):
        table = pa.table({"x": pa.array(some, pa.list_(pa.float32()))})
        pyarrow.parquet.write_table(table, f"{i}.parquet")
    out = bx.map(jnp.sum, "*.parquet:x", batch_size=3, commit_rows=3, progress=False).outputs
    assert out.tolist() == [3, 0, 3, 15]


def test_a_file_that_is_called_like_a_pattern_is_that_file():
    npy()
    np.save("[0].npy", X[:1])
    np.testing.assert_array_equal(as_source("[0].npy", "x").whole(), X[:1])


def test_a_job_goes_on_if_the_files_are_the_same():
    pattern = npy()
    call = lambda: bx.map(jnp.sum, pattern, out="y.npy", batch_size=2, progress=False)
    assert call().reused == 0
    assert call().reused == len(X)
    np.save("7.npy", X[:1])
    with pytest.raises(bx.JobError, match=r"\S+ \(\[0-9\]\.npy\) was float32"):
        call()
    os.remove("7.npy")
    np.save("3.npy", -X[6:])
    with pytest.raises(bx.JobError, match=r"\S+ \(\[0-9\]\.npy\) is not what it was"):
        call()


def test_what_cannot_be_joined_is_told():
    pattern = npy()
    np.save("8.npy", X[:, :2])
    with pytest.raises(bx.StorageError, match=r"rows of all files must be alike.*\(8\.npy\) of sh"):
        as_source(pattern, "x")
    os.remove("8.npy")
    with pytest.raises(bx.AxisError, match=r"joined along axis 0.* not along axis 1"):
        bx.map(jnp.sum, pattern, in_axes=1, progress=False)
    with pytest.raises(bx.StorageError, match=r"z\*\.npy\): no file fits the pattern"):
        as_source("z*.npy", "x")
    with pytest.raises(bx.ArgumentTypeError, match=r"out='3.npy' lies in \S+ \(\[0-9\]\.npy\)"):
        bx.map(jnp.sum, pattern, out="3.npy", progress=False)
    np.save("9.npy", 1.0)
    with pytest.raises(bx.StorageError, match=r"9\.npy\) is a number, and has no rows"):
        as_source(pattern, "x")


def test_an_output_that_would_fit_the_pattern():
    """Refused before anything is written: else the same call could not go on, nor be made again"""
    np.save("0.npy", X)
    Path("deep/er").mkdir(parents=True)
    np.save("deep/er/0.npy", X)
    for pattern, out in (("*.npy", "y.npy"), ("deep/**/*.npy", "deep/a/y.npy")):
        before = sorted(map(str, Path().rglob("*")))
        with pytest.raises(bx.ArgumentTypeError, match=rf"out='{out}' lies in "):
            bx.map(jnp.sum, pattern, out=out, progress=False)
        assert sorted(map(str, Path().rglob("*"))) == before
    for pattern, out in (("*.npy", "far/y.npy"), ("0*.npy", "y.npy"), ("deep/**/*.npy", "z.npy")):
        assert bx.map(jnp.sum, pattern, out=out, progress=False).rows == len(X)


def test_folders_of_jobs_are_not_what_a_pattern_names():
    how = dict(batch_size=3, commit_rows=3, progress=False, on_nonfinite="quarantine")
    for root in (".", f"memory://{Path.cwd().name}"):
        for name in "ab":
            bx.map(lambda x: {"x": 1 / x}, X, out=f"{root}/d/{name}.parquet", **how)
        assert bx.map(jnp.sum, f"{root}/d/*:x", progress=False).rows == 2 * len(X)
        bx.map(lambda x: 1 / x, X, out=f"{root}/d/c.zarr", **how)  # in whose job ok.npy is
    np.save("d/x.npy", X)
    again = [bx.map(jnp.sum, "d/**/*.npy", out="d/s.zarr", **how).reused for _ in range(2)]
    assert again == [0, len(X)]
    for pattern in ("d/c.zarr.job/*.npy", "d/c*.job/*.npy"):  # who names it means it
        assert not bx.map(lambda x: x, pattern, progress=False).outputs[0]
