"""`resume="extend"`: rows that were added at the end of inputs are computed, and no others."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import batchax as bx
from batchax.datasets.inspect import status, verify

from support import steps
from support.map_calls import values

X = np.arange(45 * 3, dtype=np.float32).reshape(45, 3)
HOW = dict(batch_size=2, commit_rows=4, progress=False, resume="extend")
OUTS = ["y.zarr", "y.npy", "y.parquet", "memory://{}/y.zarr", "memory://{}/y.parquet"]


def sin(x):
    return jnp.sin(x)


def table(x):
    return pyarrow.table({"x": pyarrow.FixedSizeListArray.from_arrays(x.reshape(-1), x.shape[1])})


def left_by(folder):
    return {p.name: p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


@pytest.mark.parametrize("out", OUTS)
def test_rows_that_were_added_are_computed(out, tmp_path):
    out = out.format(tmp_path.name)
    for rows, reused in ((10, 0), (10, 10), (33, 8), (45, 32), (45, 45)):  # of whole units
        report = bx.map(sin, X[:rows], out=out, **HOW)
        assert (report.rows, report.reused) == (rows, reused)
        assert status(out).finished
        assert verify(out)
    np.testing.assert_allclose(values(out), np.sin(X), rtol=1e-6)
    assert bx.map(sin, X, out=out, **{**HOW, "resume": "auto"}).reused == 45
    if "memory" not in out:
        bx.map(sin, X, out=f"whole/{out}", **{**HOW, "resume": "auto"})
        if Path(out).is_dir():
            assert left_by(out) == left_by(f"whole/{out}")
        else:
            assert Path(out).read_bytes() == Path("whole", out).read_bytes()
    with pytest.raises(bx.JobError, match=r"was float32\[45, 3\], is float32\[10, 3\]"):
        bx.map(sin, X[:10], out=out, **HOW)


def test_reductions_go_on_from_their_parts():
    axes = {"y": 1, "mean": bx.Reduce("mean"), "most": bx.Reduce("max")}
    fun = lambda x: {"y": x, "mean": x, "most": x.sum()}
    for rows in (7, 30, 45):
        report = bx.map(fun, X[:rows], out="y.zarr", out_axes=axes, **HOW)
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
    how = {**HOW, "resume": "extend" if begun_so else "auto"}
    bx.map(sin, grow(kind, 20), out="y.zarr", **how)
    x = grow(kind, 45)
    if not begun_so and kind in ("npy", "parquet"):
        with pytest.raises(bx.JobError, match="calls without it kept no checksums of them"):
            bx.map(sin, x, out="y.zarr", **HOW)
        return
    with pytest.raises(bx.JobError, match="holds results of another call"):
        bx.map(sin, x, out="y.zarr", **{**HOW, "resume": "auto"})
    report = bx.map(sin, x, out="y.zarr", **HOW)
    assert report.reused == 20
    np.testing.assert_allclose(values("y.zarr"), np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("kind", ["npy", "parquet", "memory", "npys", "parquets"])
def test_earlier_rows_that_were_changed(kind):
    bx.map(sin, grow(kind, 20), out="y.zarr", **HOW)
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
        bx.map(sin, x, out="y.zarr", **HOW)
    assert status("y.zarr").finished


def test_what_cannot_grow_is_refused_by_name():
    ragged = bx.Ragged.from_rows([np.ones(n, np.float32) for n in range(1, 30)])
    how = {**HOW, "commit_rows": None}
    with pytest.raises(bx.UnsupportedError, match=r'resume="extend".*stream'):
        bx.map(sin, iter(X), out="y.zarr", **HOW)
    with pytest.raises(bx.UnsupportedError, match=r'resume="extend".*shard'):
        bx.map(sin, X, out="y.zarr", executor="shard:1/2", **HOW)
    bx.map(sin, X[:20], out="y.npy", out_axes=1, **HOW)
    with pytest.raises(bx.ArgumentTypeError, match=r"axis 1.*grows along axis 0"):
        bx.map(sin, X, out="y.npy", out_axes=1, **HOW)
    assert np.load("y.npy").shape == (3, 20)
    bx.map(sin, X[:6], out="z.zarr", store_options={"chunk_shape": [6, 3]},
           **{**HOW, "commit_rows": 8})  # fmt: skip
    with pytest.raises(
        bx.ArgumentTypeError, match=r"6 rows by chunk_shape.*6 rows are|rows of two"
    ):
        bx.map(sin, X, out="z.zarr", store_options={"chunk_shape": [6, 3]},
               **{**HOW, "commit_rows": 8})  # fmt: skip
    few = bx.Ragged.from_rows([np.ones(n, np.float32) for n in range(1, 10)])
    bx.map(jnp.sum, few, out="r.zarr", **how)
    with pytest.raises(bx.JobError, match="another call"):
        bx.map(jnp.sum, ragged, out="r.zarr", **how)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("out", ["y.zarr", "y.npy", "y.parquet"])
@pytest.mark.compiles(70)
def test_killed_at_each_step_while_rows_are_added(out):
    """The next call adds them; or the call without them finds what it had."""
    left, ends = [0], set()

    def at_step(*_):
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    steps.watch(at_step)
    try:
        for count in range(1, 34, 2):
            name = f"{count}-{out}"
            bx.map(sin, X[:10], out=name, **HOW)
            left[0] = count
            try:
                bx.map(sin, X[:14], out=name, **HOW)
            except (Killed, bx.StorageError):
                ends.add("killed")
            left[0] = 0
            rows = status(name).rows
            ends.add(rows)
            assert bx.map(sin, X[:rows], out=name, **{**HOW, "resume": "auto"}).rows == rows
            assert bx.map(sin, X[:14], out=name, **HOW).rows == 14
            assert verify(name)
            np.testing.assert_allclose(values(name), np.sin(X[:14]), rtol=1e-6)
    finally:
        steps.watch()
    assert {"killed", 10, 14} <= ends
