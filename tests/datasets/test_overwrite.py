"""`overwrite=True`: an output and its job are removed, and made again; only what is ours."""

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.datasets import disk, objects

from support import steps
from support.map_calls import stops_at, values

X = np.arange(40, dtype=np.float32)
OUTS = ["y.zarr", "y.npy", "y.parquet", "memory://overwrite/y.zarr", "memory://overwrite/y.parquet"]
HOW = dict(batch_size=8, commit_rows=8, progress=False)


def sin(x):
    return jnp.sin(x)


def cos(x):
    return jnp.cos(x)


@pytest.mark.parametrize("out", OUTS)
def test_another_function_starts_over(out):
    bx.map(sin, X, out=out, overwrite=True, **HOW)  # of nothing
    with pytest.raises(bx.JobError, match="another call"):
        bx.map(cos, X, out=out, **HOW)
    report = bx.map(cos, X[:24], out=out, overwrite=True, **HOW)
    assert (report.rows, report.reused) == (24, 0)
    np.testing.assert_allclose(values(out), np.cos(X[:24]), rtol=1e-6)
    with pytest.raises(TimeoutError):
        bx.map(sin, X, out=out, overwrite=True, **{**HOW, "progress": stops_at(20)})
    assert bx.map(sin, X, out=out, **HOW).reused >= 16  # it can be resumed
    with pytest.raises(TimeoutError):
        bx.map(cos, X, out=out, overwrite=True, **{**HOW, "progress": stops_at(20)})
    assert bx.map(sin, X, out=out, overwrite=True, **HOW).reused == 0  # of one that has not ended
    np.testing.assert_allclose(values(out), np.sin(X), rtol=1e-6)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("out", ["y.zarr", "y.npy", "memory://overwrite/y.zarr"])
@pytest.mark.compiles(170)  # a call at each step, each with its programs
def test_killed_while_it_removes_nothing_is_mixed(out, monkeypatch):
    """A call that ends at each step in turn: the next one finds the old job, whole, or none."""
    left, x = [0], X[:16]

    def at_step(*_):
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    for name, place in itertools.product(["remove", "remove_all", "discard"], [disk, objects]):
        whole = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args, f=whole: (at_step(), f(*args), at_step())[1])
    found = set()
    for count in range(1, 80, 2):
        left[0] = 0
        bx.map(sin, x, out=out, overwrite=True, **HOW)
        steps.watch(at_step)
        left[0] = count
        with contextlib.suppress(Killed, bx.StorageError):  # of a folder that is half made
            bx.map(cos, x, out=out, overwrite=True, **HOW)
        steps.watch()
        left[0] = 0
        fun, expected = cos, np.cos
        try:
            bx.map(cos, x, out=out, **HOW)
        except bx.JobError:  # it holds results of another call
            fun, expected = sin, np.sin
        found.add(expected)
        assert bx.map(fun, x, out=out, **HOW).reused == 16
        np.testing.assert_allclose(values(out), expected(x), rtol=1e-6)
    assert found == {np.sin, np.cos}


@pytest.mark.parametrize("out", OUTS[:3])
def test_what_is_not_ours_stays(out):
    Path("mine").write_bytes(b"mine")
    shutil.copy("mine", "y.npy")
    Path("y.zarr").mkdir()
    Path("y.parquet").mkdir()
    with pytest.raises(bx.JobError, match="is the output of something else"):
        bx.map(sin, X, out=out, overwrite=True, **HOW)
    os.remove("y.npy")
    os.rmdir("y.zarr")
    os.rmdir("y.parquet")
    bx.map(sin, X, out=out, **HOW)
    if out == "y.npy":
        np.save("y.npy", X)  # in its place
        match = "does not hold what was written"
    else:
        shutil.copy("mine", f"{out}/notes.txt")
        match = r"batchax did not make \S+notes\.txt"
    with pytest.raises(bx.JobError, match=match):
        bx.map(cos, X, out=out, overwrite=True, **HOW)
    assert np.load("y.npy")[3] == 3 if out == "y.npy" else Path(out, "notes.txt").exists()
    assert Path(f"{out}.job/done.json").exists()


@pytest.mark.parametrize("out", OUTS)
def test_a_job_at_work_stays(out):
    def inside(done, total):
        with pytest.raises(bx.JobError, match="at work"):
            bx.map(cos, X, out=out, overwrite=True, **HOW)

    bx.map(sin, X, out=out, overwrite=True, **{**HOW, "progress": inside})
    np.testing.assert_allclose(values(out), np.sin(X), rtol=1e-6)


def test_a_link_stays():
    bx.map(sin, X, out="y.npy", **HOW)
    os.rename("y.npy", "other.npy")
    os.symlink("other.npy", "y.npy")
    with pytest.raises(bx.StorageError, match=r"y\.npy is a link"):
        bx.map(cos, X, out="y.npy", overwrite=True, **HOW)
    assert np.load("y.npy").shape == (40,)


def test_inputs_are_not_removed():
    bx.map(sin, X, out="y.npy", **HOW)
    bx.map(lambda x: {"a": x}, X, out="z.zarr", **HOW)
    for source, out in [("y.npy", "y.npy"), ("z.zarr:a", "z.zarr")]:
        with pytest.raises(bx.ArgumentTypeError, match=rf"out='{out}' "):
            bx.map(cos, source, out=out, overwrite=True, **HOW)
    for shared in (Path("y.npy"), np.load("y.npy", mmap_mode="r")):
        with pytest.raises(bx.ArgumentTypeError, match=r"out='y\.npy' holds .*overwrite=True"):
            bx.map(
                lambda s, x: s.sum() + x, shared, X, in_axes=(None, 0), out="y.npy", overwrite=True
            )
    bx.map(lambda x: {"a": x}, X, out="memory://overwrite/i.zarr", **HOW)
    where = dict(out="memory://overwrite/i.zarr", overwrite=True, **HOW)
    with pytest.raises(bx.ArgumentTypeError, match=r"i\.zarr' holds x"):
        bx.map(cos, "memory://overwrite/i.zarr:a", **where)
    xarray, zarr = pytest.importorskip("xarray"), pytest.importorskip("zarr")
    lazy = xarray.DataArray(zarr.open("z.zarr/a", mode="r"), dims=["row"])
    with pytest.raises(bx.UnsupportedError, match="cannot see from which files x is read"):
        bx.map(cos, lazy, out="z.zarr", overwrite=True, **HOW)
    assert np.load("y.npy").shape == (40,)
    assert Path("z.zarr/a/zarr.json").exists()


def test_wrong_calls_remove_nothing():
    bx.map(sin, X, out="y.npy", **HOW)
    with pytest.raises(bx.UnsupportedError, match="overwrite=True removes what other shards"):
        bx.map(cos, X, out="y.npy", overwrite=True, executor="shard:0/2", **HOW)
    with pytest.raises(bx.ArgumentTypeError, match="array"):
        bx.map(lambda x: {"a": x, "b": x}, X, out="y.npy", overwrite=True, **HOW)
    with pytest.raises(bx.ArgumentTypeError, match="overwrite"):
        bx.map(cos, X, out="y.npy", overwrite="yes", **HOW)
    assert bx.map(sin, X, out="y.npy", **HOW).reused == 40
