"""Calls of an output that is there: `resume="extend"` computes rows that were added at the end of
inputs, and no others; `overwrite=True` removes the output and its job, and only what is ours.
"""

import contextlib
import itertools
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import batchax as bx
from batchax.datasets import disk, objects
from batchax.datasets.inspect import status, verify

from support import steps
from support.map_calls import stops_at, values

X = np.arange(45 * 3, dtype=np.float32).reshape(45, 3)
EXTEND = dict(batch_size=2, commit_rows=4, progress=False, resume="extend")
OUTS = ["y.zarr", "y.npy", "y.parquet", "memory://{}/y.zarr", "memory://{}/y.parquet"]


@pytest.fixture(params=OUTS)
def out(request, tmp_path):
    return request.param.format(tmp_path.name)


def sin(x):
    return jnp.sin(x)


def cos(x):
    return jnp.cos(x)


class Killed(BaseException):
    pass


class KilledAt:
    """Ends what is done at the step with the number that was set, as if the process were killed."""

    left = 0

    def __call__(self, *_):
        self.left -= 1
        if self.left == 0:
            raise Killed


@pytest.fixture
def killed():
    step = KilledAt()
    steps.watch(step)
    yield step
    steps.watch()


def table(x):
    return pyarrow.table({"x": pyarrow.FixedSizeListArray.from_arrays(x.reshape(-1), x.shape[1])})


def left_by(folder):
    return {p.name: p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def test_rows_that_were_added_are_computed(out):
    for rows, reused in ((10, 0), (10, 10), (33, 8), (45, 32), (45, 45)):  # of whole units
        report = bx.map(sin, X[:rows], out=out, **EXTEND)
        assert (report.rows, report.reused) == (rows, reused)
        assert status(out).finished
        assert verify(out)
    np.testing.assert_allclose(values(out), np.sin(X), rtol=1e-6)
    assert bx.map(sin, X, out=out, **{**EXTEND, "resume": "auto"}).reused == 45
    if "memory" not in out:
        bx.map(sin, X, out=f"whole/{out}", **{**EXTEND, "resume": "auto"})
        if Path(out).is_dir():
            assert left_by(out) == left_by(f"whole/{out}")
        else:
            assert Path(out).read_bytes() == Path("whole", out).read_bytes()
    with pytest.raises(bx.JobError, match=r"was float32\[45, 3\], is float32\[10, 3\]"):
        bx.map(sin, X[:10], out=out, **EXTEND)


def test_reductions_go_on_from_their_parts():
    axes = {"y": 1, "mean": bx.Reduce("mean"), "most": bx.Reduce("max")}
    fun = lambda x: {"y": x, "mean": x, "most": x.sum()}
    for rows in (7, 30, 45):
        report = bx.map(fun, X[:rows], out="y.zarr", out_axes=axes, **EXTEND)
        np.testing.assert_allclose(report.reduced["mean"], X[:rows].mean(0), rtol=1e-6)
        assert report.reduced["most"] == X[rows - 1].sum()
    np.testing.assert_array_equal(values("y.zarr/y"), X.T)


def grow(kind, rows):
    """An input of so many rows, written again, or into more files."""
    x = X[:rows]
    if kind == "npy":
        np.save("x.npy", x)
        return "x.npy"
    if kind == "parquet":
        pyarrow.parquet.write_table(table(x), "x.parquet")
        return "x.parquet:x"
    if kind == "memory":
        return x
    Path("parts").mkdir(exist_ok=True)
    for i in range(0, rows, 5):
        part = Path(f"parts/{i:03}.{kind.removesuffix('s')}")
        if not part.exists():
            if kind == "npys":
                np.save(part, x[i : i + 5])
            else:
                pyarrow.parquet.write_table(table(x[i : i + 5]), part)
    return "parts/*.npy" if kind == "npys" else "parts:x"


@pytest.mark.parametrize("kind", ["npy", "parquet", "memory", "npys", "parquets"])
@pytest.mark.parametrize("begun_so", [True, False])
def test_inputs_that_grow(kind, begun_so):
    how = {**EXTEND, "resume": "extend" if begun_so else "auto"}
    bx.map(sin, grow(kind, 20), out="y.zarr", **how)
    x = grow(kind, 45)
    if not begun_so and kind in ("npy", "parquet"):
        with pytest.raises(bx.JobError, match="calls without it kept no checksums of them"):
            bx.map(sin, x, out="y.zarr", **EXTEND)
        return
    with pytest.raises(bx.JobError, match="holds results of another call"):
        bx.map(sin, x, out="y.zarr", **{**EXTEND, "resume": "auto"})
    report = bx.map(sin, x, out="y.zarr", **EXTEND)
    assert report.reused == 20
    np.testing.assert_allclose(values("y.zarr"), np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("kind", ["npy", "parquet", "memory", "npys", "parquets"])
def test_earlier_rows_that_were_changed(kind):
    bx.map(sin, grow(kind, 20), out="y.zarr", **EXTEND)
    x = grow(kind, 45)
    if kind == "memory":
        x = X.copy()
        x[3] = 0
    else:
        file = sorted(Path().rglob("*.npy" if "npy" in kind else "*[0-9x].parquet"))[0]
        new = X[: 5 if kind.endswith("s") else 45].copy()
        new[3] = 0
        if "npy" in kind:
            np.save(file, new)
        else:
            pyarrow.parquet.write_table(table(new), file)
    with pytest.raises(bx.JobError, match=r"first 20 of .*: they were changed"):
        bx.map(sin, x, out="y.zarr", **EXTEND)
    assert status("y.zarr").finished


def test_what_cannot_grow_is_refused_by_name():
    ragged = bx.Ragged.from_rows([np.ones(n, np.float32) for n in range(1, 30)])
    how = {**EXTEND, "commit_rows": None}
    with pytest.raises(bx.UnsupportedError, match=r'resume="extend".*stream'):
        bx.map(sin, iter(X), out="y.zarr", **EXTEND)
    with pytest.raises(bx.UnsupportedError, match=r'resume="extend".*shard'):
        bx.map(sin, X, out="y.zarr", executor="shard:1/2", **EXTEND)
    bx.map(sin, X[:20], out="y.npy", out_axes=1, **EXTEND)
    with pytest.raises(bx.ArgumentTypeError, match=r"axis 1.*grows along axis 0"):
        bx.map(sin, X, out="y.npy", out_axes=1, **EXTEND)
    assert np.load("y.npy").shape == (3, 20)
    bx.map(sin, X[:6], out="z.zarr", store_options={"chunk_shape": [6, 3]},
           **{**EXTEND, "commit_rows": 8})  # fmt: skip
    with pytest.raises(
        bx.ArgumentTypeError, match=r"6 rows by chunk_shape.*6 rows are|rows of two"
    ):
        bx.map(sin, X, out="z.zarr", store_options={"chunk_shape": [6, 3]},
               **{**EXTEND, "commit_rows": 8})  # fmt: skip
    few = bx.Ragged.from_rows([np.ones(n, np.float32) for n in range(1, 10)])
    bx.map(jnp.sum, few, out="r.zarr", **how)
    with pytest.raises(bx.JobError, match="another call"):
        bx.map(jnp.sum, ragged, out="r.zarr", **how)


@pytest.mark.parametrize("out", OUTS[:3], indirect=True)
@pytest.mark.compiles(70)
def test_killed_at_each_step_while_rows_are_added(out, killed):
    """The next call adds them; or the call without them finds what it had."""
    ends = set()
    for count in range(1, 34, 2):
        name = f"{count}-{out}"
        bx.map(sin, X[:10], out=name, **EXTEND)
        killed.left = count
        try:
            bx.map(sin, X[:14], out=name, **EXTEND)
        except (Killed, bx.StorageError):
            ends.add("killed")
        killed.left = 0
        rows = status(name).rows
        ends.add(rows)
        assert bx.map(sin, X[:rows], out=name, **{**EXTEND, "resume": "auto"}).rows == rows
        assert bx.map(sin, X[:14], out=name, **EXTEND).rows == 14
        assert verify(name)
        np.testing.assert_allclose(values(name), np.sin(X[:14]), rtol=1e-6)
    assert {"killed", 10, 14} <= ends


# --- overwrite=True ----------------------------------------------------------------------------

Y = np.arange(40, dtype=np.float32)
HOW = dict(batch_size=8, commit_rows=8, progress=False)


def test_another_function_starts_over(out):
    bx.map(sin, Y, out=out, overwrite=True, **HOW)  # of nothing
    with pytest.raises(bx.JobError, match="another call"):
        bx.map(cos, Y, out=out, **HOW)
    report = bx.map(cos, Y[:24], out=out, overwrite=True, **HOW)
    assert (report.rows, report.reused) == (24, 0)
    np.testing.assert_allclose(values(out), np.cos(Y[:24]), rtol=1e-6)
    with pytest.raises(TimeoutError):
        bx.map(sin, Y, out=out, overwrite=True, **{**HOW, "progress": stops_at(20)})
    assert bx.map(sin, Y, out=out, **HOW).reused >= 16  # it can be resumed
    with pytest.raises(TimeoutError):
        bx.map(cos, Y, out=out, overwrite=True, **{**HOW, "progress": stops_at(20)})
    assert bx.map(sin, Y, out=out, overwrite=True, **HOW).reused == 0  # of one that has not ended
    np.testing.assert_allclose(values(out), np.sin(Y), rtol=1e-6)


@pytest.mark.parametrize("out", ["y.zarr", "y.npy", "memory://{}/y.zarr"], indirect=True)
@pytest.mark.compiles(170)  # a call at each step, each with its programs
def test_killed_while_it_removes_nothing_is_mixed(out, killed, monkeypatch):
    """A call that ends at each step in turn: the next one finds the old job, whole, or none."""
    x = Y[:16]
    for name, place in itertools.product(["remove", "remove_all", "discard"], [disk, objects]):
        whole = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *args, f=whole: (killed(), f(*args), killed())[1])
    found = set()
    for count in range(1, 80, 2):
        bx.map(sin, x, out=out, overwrite=True, **HOW)
        killed.left = count
        with contextlib.suppress(Killed, bx.StorageError):  # of a folder that is half made
            bx.map(cos, x, out=out, overwrite=True, **HOW)
        killed.left = 0
        fun, expected = cos, np.cos
        try:
            bx.map(cos, x, out=out, **HOW)
        except bx.JobError:  # it holds results of another call
            fun, expected = sin, np.sin
        found.add(expected)
        assert bx.map(fun, x, out=out, **HOW).reused == 16
        np.testing.assert_allclose(values(out), expected(x), rtol=1e-6)
    assert found == {np.sin, np.cos}


@pytest.mark.parametrize("out", OUTS[:3], indirect=True)
def test_what_is_not_ours_stays(out):
    Path("mine").write_bytes(b"mine")
    shutil.copy("mine", "y.npy")
    Path("y.zarr").mkdir()
    Path("y.parquet").mkdir()
    with pytest.raises(bx.JobError, match="is the output of something else"):
        bx.map(sin, Y, out=out, overwrite=True, **HOW)
    os.remove("y.npy")
    os.rmdir("y.zarr")
    os.rmdir("y.parquet")
    bx.map(sin, Y, out=out, **HOW)
    if out == "y.npy":
        np.save("y.npy", Y)  # in its place
        match = "does not hold what was written"
    else:
        shutil.copy("mine", f"{out}/notes.txt")
        match = r"batchax did not make \S+notes\.txt"
    with pytest.raises(bx.JobError, match=match):
        bx.map(cos, Y, out=out, overwrite=True, **HOW)
    assert np.load("y.npy")[3] == 3 if out == "y.npy" else Path(out, "notes.txt").exists()
    assert Path(f"{out}.job/done.json").exists()


def test_a_job_at_work_stays(out):
    def inside(done, total):
        with pytest.raises(bx.JobError, match="at work"):
            bx.map(cos, Y, out=out, overwrite=True, **HOW)

    bx.map(sin, Y, out=out, overwrite=True, **{**HOW, "progress": inside})
    np.testing.assert_allclose(values(out), np.sin(Y), rtol=1e-6)


def test_a_link_stays():
    bx.map(sin, Y, out="y.npy", **HOW)
    os.rename("y.npy", "other.npy")
    os.symlink("other.npy", "y.npy")
    with pytest.raises(bx.StorageError, match=r"y\.npy is a link"):
        bx.map(cos, Y, out="y.npy", overwrite=True, **HOW)
    assert np.load("y.npy").shape == (40,)


def test_inputs_are_not_removed():
    bx.map(sin, Y, out="y.npy", **HOW)
    bx.map(lambda x: {"a": x}, Y, out="z.zarr", **HOW)
    for source, out in [("y.npy", "y.npy"), ("z.zarr:a", "z.zarr")]:
        with pytest.raises(bx.ArgumentTypeError, match=rf"out='{out}' "):
            bx.map(cos, source, out=out, overwrite=True, **HOW)
    for shared in (Path("y.npy"), np.load("y.npy", mmap_mode="r")):
        with pytest.raises(bx.ArgumentTypeError, match=r"out='y\.npy' holds .*overwrite=True"):
            bx.map(
                lambda s, x: s.sum() + x, shared, Y, in_axes=(None, 0), out="y.npy", overwrite=True
            )
    bx.map(lambda x: {"a": x}, Y, out="memory://overwrite/i.zarr", **HOW)
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
    bx.map(sin, Y, out="y.npy", **HOW)
    with pytest.raises(bx.UnsupportedError, match="overwrite=True removes what other shards"):
        bx.map(cos, Y, out="y.npy", overwrite=True, executor="shard:0/2", **HOW)
    with pytest.raises(bx.ArgumentTypeError, match="array"):
        bx.map(lambda x: {"a": x, "b": x}, Y, out="y.npy", overwrite=True, **HOW)
    with pytest.raises(bx.ArgumentTypeError, match="overwrite"):
        bx.map(cos, Y, out="y.npy", overwrite="yes", **HOW)
    assert bx.map(sin, Y, out="y.npy", **HOW).reused == 40
