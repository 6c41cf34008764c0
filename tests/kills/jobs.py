"""Calls of `batchax.map` to be killed: of each kind of output, with all that a job keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import batchax as bx

ROWS, UNIT = 45, 4  # the last unit has one row
SIZES = dict(batch_size=2, commit_rows=UNIT, progress=False)


def write_inputs(folder: Path) -> None:
    """What the jobs read. JAX computes nothing here: the process is to be forked."""
    import pyarrow
    import pyarrow.parquet

    draw = np.random.default_rng(0)
    np.save(folder / "x.npy", draw.standard_normal((ROWS, 3)).astype(np.float32))
    rows = [draw.standard_normal(n).astype(np.float32) for n in draw.integers(0, 7, ROWS)]
    pyarrow.parquet.write_table(pyarrow.table({"t": rows}), folder / "t.parquet")


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
        return {"twice": t * 2, "sum": t.sum(), "x": x, "pairs": t[:, None] * jnp.append(t, x)}

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


JOBS = [zarr, zarr_group, npy, parquet, quarantine, zeros]
STREAMS = [stream_zarr, stream_npy, stream_parquet]  # which one process alone reads
