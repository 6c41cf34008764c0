"""Calls of `batchax.map` to be killed: of each kind of output, with all that a job keeps."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx
from batchax.datasets.inspect import status

ROWS, UNIT = 45, 4  # the last unit has one row
SIZES = dict(batch_size=2, commit_rows=UNIT, progress=False)


def write_inputs(folder: Path) -> None:
    """What the jobs read. JAX computes nothing here: the process is to be forked."""
    import pyarrow
    import pyarrow.parquet

    draw = np.random.default_rng(0)
    np.save(folder / "x.npy", draw.standard_normal((ROWS, 3)).astype(np.float32))
    rows = [draw.standard_normal(n).astype(np.float32) for n in draw.integers(0, 7, ROWS)]
    ids = [f"row {i}" if i % 5 else None for i in range(ROWS)]
    pyarrow.parquet.write_table(pyarrow.table({"t": rows, "id": ids}), folder / "t.parquet")


def zarr(x: Path, out: Path, **more: Any) -> bx.Report:
    w = np.arange(6, dtype=np.float32).reshape(3, 2)
    return bx.map(lambda x: jnp.tanh(x @ w), x / "x.npy", out=out / "y.zarr", **SIZES, **more)


def zarr_group(x: Path, out: Path, **more: Any) -> bx.Report:
    """A small reduction, which is in the journal, and one that has a file beside it."""

    def fun(key, x):
        noise = jax.random.normal(key, (40,))
        return {"y": x * noise[:3], "mean": x.sum(), "in": {"second": jnp.outer(noise, noise)}}

    axes = {"y": 0, "mean": bx.Reduce("mean"), "in": {"second": bx.Reduce("sum")}}
    options = dict(key=jax.random.key(3), out_axes=axes, **SIZES, **more)
    return bx.map(fun, x / "x.npy", out=out / "y.zarr", **options)


def npy(x: Path, out: Path, **more: Any) -> bx.Report:
    return bx.map(
        lambda x: x[::-1] * 2, x / "x.npy", out=out / "y.npy", out_axes=1, **SIZES, **more
    )


def parquet(x: Path, out: Path, **more: Any) -> bx.Report:
    def fun(t, x):
        return {"twice": t * 2, "sum": t.sum(), "x": x, "pairs": jnp.stack([t, t * x.sum()], 1)}

    return bx.map(fun, f"{x}/t.parquet:t", x / "x.npy", out=out / "y.parquet", **SIZES, **more)


def quarantine(x: Path, out: Path, **more: Any) -> bx.Report:
    """Rows that fail, one by one and a unit of them, and one that is not finite."""

    def on_host(i, x):
        if int(i) in (3, 17, 24, 25, 26, 27, 44):
            raise ValueError(f"row {int(i)} is spoilt")
        return x

    def fun(i, x):
        y = jax.pure_callback(on_host, x, i, x, vmap_method="sequential")
        return {"y": jnp.where(i == 8, jnp.nan, y), "sum": x.sum()}

    axes = {"y": 0, "sum": bx.Reduce("sum")}
    options = dict(on_error="quarantine", on_nonfinite="quarantine", version="1", **SIZES, **more)
    i = np.arange(ROWS, dtype=np.int32)
    return bx.map(fun, i, x / "x.npy", out=out / "y.zarr", out_axes=axes, **options)


def zeros(x: Path, out: Path, **more: Any) -> bx.Report:
    """Chunks of nothing but fill values, which some libraries do not write."""
    return bx.map(jnp.zeros_like, x / "x.npy", out=out / "y.zarr", **SIZES, **more)


def stream_zarr(x: Path, out: Path, **more: Any) -> bx.Report:
    """Rows of which nobody knows how many there are, and a reduction over them."""

    def fun(row):
        return {"y": jnp.tanh(row["x"]), "sum": row["x"].sum()}

    axes = {"y": 1, "sum": bx.Reduce("sum")}
    rows = ({"x": row} for row in np.load(x / "x.npy"))
    return bx.map(fun, rows, out=out / "y.zarr", out_axes=axes, **SIZES, **more)


def stream_npy(x: Path, out: Path, **more: Any) -> bx.Report:
    rows = np.load(x / "x.npy")
    batches = (rows[i : i + 7] for i in range(0, ROWS, 7))
    how = dict(batched=True, on_nonfinite="quarantine", **SIZES, **more)
    return bx.map(lambda x: jnp.log(x[0] + 2), batches, out=out / "y.npy", **how)


def stream_parquet(x: Path, out: Path, **more: Any) -> bx.Report:
    rows = iter(np.load(x / "x.npy"))
    return bx.map(lambda x: x * 3, rows, out=out / "y.parquet", stream_id="x", **SIZES, **more)


def shards(x: Path, out: Path, **more: Any) -> bx.Report:
    """Several compressed chunks for a unit, each with shards, which divide no array evenly."""
    codecs = [{"name": "bytes"}, {"name": "zstd"}, {"name": "crc32c"}]
    shard = {"name": "sharding_indexed", "configuration": {"chunk_shape": [1, 2], "codecs": codecs}}
    options = {"codecs": codecs, "y": {"chunk_shape": [2, 2], "codecs": [shard]}}
    fun = lambda x: {"y": x * 3, "s": x.sum()}
    return bx.map(fun, x / "x.npy", out=out / "y.zarr", store_options=options, **SIZES, **more)


def rows_of_output(x: Path, out: Path, **more: Any) -> bx.Report:
    """Rows that are dropped, and several of one, with a column that is passed through."""
    some = lambda t: bx.OutputRows({"y": t, "twice": jnp.stack([t, t], 1)}, (t > 0).sum())
    options = {"compression": "zstd", "row_group_size": 2}
    keep = {"id": f"{x}/t.parquet:id"}
    how = dict(out=out / "y.parquet", keep=keep, store_options=options, **SIZES, **more)
    return bx.map(some, x / "x.npy", **how)


def _added(kind: str) -> tuple[Any, Any]:
    """Calls of some rows, and of more; and the call of all, which leaves the same."""

    def one(x: np.ndarray, out: Path, **more: Any) -> bx.Report:
        fun = lambda x: {"y": jnp.sin(x), "sum": x.sum()} if kind != "npy" else jnp.sin(x)
        axes = 0 if kind == "npy" else {"y": 0, "sum": bx.Reduce("sum")}
        return bx.map(fun, x, out=out / f"y.{kind}", out_axes=axes, **SIZES, **more)

    def whole(x: Path, out: Path) -> bx.Report:
        return one(np.load(x / "x.npy"), out)

    def added(x: Path, out: Path) -> bx.Report:
        rows, all_rows = np.load(x / "x.npy"), None
        for count in (11, 30, ROWS):  # the last units of which are not full
            with contextlib.suppress(bx.JobError):  # more are there
                if status(out / f"y.{kind}").rows > count:
                    continue
            all_rows = one(rows[:count], out, resume="extend")
        assert all_rows is not None
        return all_rows

    added.__name__ = f"added_{kind}"
    return added, whole


def _started_over() -> tuple[Any, Any]:
    """Another function's output, which this one's takes the place of."""

    def fun(x: Path, out: Path, other: bool = False, **more: Any) -> bx.Report:
        given = jnp.cos if other else jnp.sin
        return bx.map(given, x / "x.npy", out=out / "y.zarr", **SIZES, **more)

    def started_over(x: Path, out: Path) -> bx.Report:
        first = out.with_name(f"{out.name}-first")
        if not first.exists():
            fun(x, out, other=True)
            first.touch()
        try:
            return fun(x, out)
        except bx.JobError:  # it is still the other one's
            return fun(x, out, overwrite=True)

    return started_over, fun


JOBS = [zarr, zarr_group, npy, parquet, quarantine, zeros, shards, rows_of_output]
AGAIN = [*map(_added, ["zarr", "npy", "parquet"]), _started_over()]  # and what they are to leave
STREAMS = [stream_zarr, stream_npy, stream_parquet]  # which one process alone reads
