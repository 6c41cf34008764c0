"""`map` of rows that come one after another, and nobody knows how many: the bytes of an array's."""

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.datasets import pipeline
from batchax.datasets.inspect import status, verify
from batchax.datasets.plan import Leaf
from batchax.datasets.store import Store

FLOAT = jax.dtypes.canonicalize_dtype(float)
X = np.random.default_rng(0).standard_normal((22, 3)).astype(FLOAT)
X[5] = np.nan
SIZES: dict[str, Any] = dict(batch_size=2, commit_rows=4, progress=False)
AXES = {"twice": 1, "in": {"max": 0}, "mean": bx.Reduce("mean")}


def fun(x):
    return {"twice": x * 2, "in": {"max": x.max()}, "mean": x[0]}


class Table:
    """As a dataset of Hugging Face: rows have numbers."""

    def __init__(self, rows=X):
        self.rows, self.asked = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        self.asked.append(i)
        return self.rows[i]


def in_batches(rows=X):
    return (rows[i : i + 5] for i in range(0, len(rows), 5))


def left(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in Path(out).rglob("*") if p.is_file()}


STREAMS = {
    "an iterator": (lambda: iter(X), {}),
    "a loader": (in_batches, {"batched": True}),
    "a dataset": (Table, {}),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("out", ["y.zarr", "y.parquet", None])
@pytest.mark.each_commit(4)
def test_the_bytes_of_the_map_of_an_array(stream, out):
    make, how = STREAMS[stream]
    axes = {**AXES, "twice": 0} if out == "y.parquet" else AXES
    whole = bx.map(fun, X, out=out and f"whole/{out}", out_axes=axes, **SIZES)
    report = bx.map(fun, make(), out=out, out_axes=axes, **SIZES, **how)
    assert (report.rows, report.left) == (22, 0)
    np.testing.assert_array_equal(report.reduced["mean"], whole.reduced["mean"])
    if out is None:
        jax.tree.map(np.testing.assert_array_equal, report.outputs, whole.outputs)
        return
    assert left(out) == left(f"whole/{out}")
    assert verify(out)
    assert status(out).rows == 22
    again = bx.map(fun, make(), out=out, out_axes=axes, **SIZES, **how)
    assert again.reused == 22


def test_npy_and_keys_and_rows_left_out():
    noisy = lambda x, key: x + jax.random.normal(key)
    how = dict(SIZES, key=jax.random.key(1), on_nonfinite="quarantine")
    whole = bx.map(noisy, X, out="x.npy", **how)
    report = bx.map(noisy, iter(X), out="y.npy", **how)
    assert Path("x.npy").read_bytes() == Path("y.npy").read_bytes()
    assert report.bad == whole.bad
    assert Path("x.npy.job/ok.npy").read_bytes() == Path("y.npy.job/ok.npy").read_bytes()


def stopped(rows, **how):
    """A call that ends after some units, and how many of its rows are kept."""

    def fail():
        yield from X[:rows]
        end = time.monotonic() + 60
        while status("y.npy").done < 12 and time.monotonic() < end:
            time.sleep(0.01)
        raise InterruptedError("no more for now")

    with pytest.raises(InterruptedError, match="no more for now"):
        bx.map(jnp.sum, fail(), out="y.npy", **SIZES, **how)
    now = status("y.npy")
    assert (now.finished, now.rows, now.to_do) == (False, None, None)
    assert f"{now.done} rows of a stream" in str(now)
    return now.done


def test_going_on_compares_what_is_done_and_computes_the_rest():
    done = stopped(13)
    assert done == 12
    others = X.copy()
    others[11] += 1
    told = r"a gives other rows from 8 to 12 than before.* with, from its first row on"
    with pytest.raises(bx.JobError, match=told):
        bx.map(jnp.sum, iter(others), out="y.npy", **SIZES)
    with pytest.raises(bx.JobError, match="ends after 10 rows, and more of them are done"):
        bx.map(jnp.sum, iter(X[:10]), out="y.npy", **SIZES)
    assert status("y.npy").done == 12
    report = bx.map(jnp.sum, iter(X), out="y.npy", **SIZES)
    assert (report.rows, report.reused) == (22, 12)
    bx.map(jnp.sum, X, out="x.npy", **SIZES)
    assert Path("x.npy").read_bytes() == Path("y.npy").read_bytes()
    with pytest.raises(bx.JobError, match="goes on after 22 rows, where it ended before"):
        bx.map(jnp.sum, iter([*X, X[0]]), out="y.npy", **SIZES)
    with pytest.raises(bx.JobError, match="ends after 20 rows, and more of them are done"):
        bx.map(jnp.sum, iter(X[:20]), out="y.npy", **SIZES)


def test_a_stream_with_a_name_is_not_read_where_it_is_done():
    assert stopped(13, stream_id="rows, seed 0") == 12
    for how in ({}, {"stream_id": "rows, seed 1"}):
        with pytest.raises(bx.JobError, match="stream_id was rows, seed 0, is"):
            bx.map(jnp.sum, iter(X), out="y.npy", **SIZES, **how)
    table = Table()
    assert bx.map(jnp.sum, table, out="y.npy", stream_id="rows, seed 0", **SIZES).reused == 12
    assert table.asked == [0, *range(12, 22)]  # the first says of what type rows are
    table.asked.clear()
    assert bx.map(jnp.sum, table, out="y.npy", stream_id="rows, seed 0", **SIZES).reused == 22
    assert table.asked == [0]
    np.testing.assert_allclose(np.load("y.npy"), X.sum(1), rtol=1e-5)


def test_units_that_are_missing_wait_until_the_others_were_compared(monkeypatch):
    """Else rows of another stream would be computed among those of this one."""
    bx.map(jnp.sum, iter(X), out="y.npy", **SIZES)
    file = np.load("y.npy", mmap_mode="r+")
    file[5] = 9.0
    del file
    assert [d.unit.number for d in verify("y.npy").damaged] == [1]
    others = X.copy()
    others[21] += 1
    with pytest.raises(bx.JobError, match="other rows from 20 to 22"):
        bx.map(jnp.sum, iter(others), out="y.npy", **SIZES)
    assert status("y.npy").done == 18
    monkeypatch.setattr(pipeline, "_MOST_HELD", 0)  # however many are missing, few are held
    assert bx.map(jnp.sum, iter(X), out="y.npy", **SIZES).reused == 18
    np.testing.assert_allclose(np.load("y.npy"), X.sum(1), rtol=1e-5)


class Fixed(Store):
    """One that knows nothing of arrays that grow."""


REFUSED = [
    (lambda: bx.map(jnp.sum, iter([])), bx.ArgumentTypeError, "has no rows, so the shapes"),
    (lambda: bx.map(jnp.sum, iter(X), X), bx.UnsupportedError, "some are arrays"),
    (lambda: bx.map(jnp.sum, X, batched=True), bx.ArgumentTypeError, "no argument is a stream"),
    (lambda: bx.map(jnp.sum, X, stream_id="x"), bx.ArgumentTypeError, "no argument is a stream"),
    (lambda: bx.map(jnp.sum, iter(X), stream_id=3), bx.ArgumentTypeError, "stream_id must be"),
    (lambda: bx.map(jnp.sum, iter(X), batched=1), bx.ArgumentTypeError, "batched must be"),
    (lambda: bx.map(jnp.sum, iter(X), out="y.npy", executor="processes:1"), bx.UnsupportedError,
     "other processes cannot read"),
    (lambda: bx.map(jnp.sin, iter(X), out="y.npy", out_axes=1, **SIZES), bx.ArgumentTypeError,
     r"rows along axis 1, and a \.npy file that grows .* grows along axis 0"),
    (lambda: Fixed(Path("y.fixed"), [Leaf("", (0,), np.dtype("f4"), grows=True)], 1),
     bx.ArgumentTypeError, "Fixed keeps arrays of one length"),
    (lambda: bx.map(lambda x, y: x, iter(X), iter(X[:5]), out="y.npy", **SIZES), bx.AxisError,
     "from row 4 on there are 4 and 1"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused(case):
    call, error, match = REFUSED[case]
    with pytest.raises(error, match=match):
        call()


def test_what_all_rows_share_is_no_stream():
    table = Table()
    scaled = bx.map(lambda t, x: x * len(t.rows), table, X, in_axes=(None, 0), progress=False)
    np.testing.assert_array_equal(scaled.outputs, X * 22)
    assert table.asked == []
