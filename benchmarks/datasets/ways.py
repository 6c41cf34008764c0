"""One dataset, one function, and what people write to apply one to the other.

Each way reads a .npy file, begins with a function that is not compiled, and ends when its results
are on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import batchax as bx
from benchmarks.datasets.workloads import DatasetWorkload

Way = Callable[[DatasetWorkload, Path, Path], None]


def mapped(work: DatasetWorkload, x: Path, out: Path, progress: Any = False) -> None:
    """By `bx.map`, to Zarr."""
    bx.map(
        work.make(),
        x,
        out=out.with_suffix(".zarr"),
        batch_size=work.batch_size,
        commit_rows=work.commit_rows,
        progress=progress,
    )


def mapped_to_npy(work: DatasetWorkload, x: Path, out: Path) -> None:
    """By `bx.map`, to a .npy file."""
    options = dict(batch_size=work.batch_size, commit_rows=work.commit_rows, progress=False)
    bx.map(work.make(), x, out=out.with_suffix(".npy"), **options)


def loop_to_npy(work: DatasetWorkload, x: Path, out: Path) -> None:
    """Slices of a mapped file, `jit` of `vmap`, a mapped file of results."""
    dataset, compute = np.load(x, mmap_mode="r"), _by_batches(work)
    shape = len(dataset), work.results
    results = np.lib.format.open_memmap(out.with_suffix(".npy"), "w+", np.float32, shape)
    for start in range(0, len(dataset), work.commit_rows):
        rows = slice(start, start + work.commit_rows)
        results[rows] = compute(dataset[rows])
    results.flush()


def loop_to_zarr(work: DatasetWorkload, x: Path, out: Path) -> None:
    """The same, to an array of zarr-python, whose chunks are the slices."""
    import zarr

    dataset, compute = np.load(x, mmap_mode="r"), _by_batches(work)
    results = zarr.create_array(
        out.with_suffix(".zarr"),
        shape=(len(dataset), work.results),
        chunks=(work.commit_rows, work.results),
        dtype="float32",
        compressors=None,
    )
    for start in range(0, len(dataset), work.commit_rows):
        rows = slice(start, start + work.commit_rows)
        results[rows] = compute(dataset[rows])
    _sync(out.with_suffix(".zarr"))


def dask_blocks(work: DatasetWorkload, x: Path, out: Path) -> None:
    """Dask's `map_blocks` in threads, to a mapped file."""
    import dask.array as da

    dataset, compute = np.load(x, mmap_mode="r"), _by_batches(work)
    blocks = da.from_array(dataset, chunks=(work.commit_rows, work.columns))
    size = blocks.chunks[0], (work.results,)
    computed = blocks.map_blocks(
        compute, dtype=np.float32, chunks=size, meta=np.empty((0, 0), "f4")
    )
    shape = len(dataset), work.results
    results = np.lib.format.open_memmap(out.with_suffix(".npy"), "w+", np.float32, shape)
    da.store(computed, results, lock=False, scheduler="threads")
    results.flush()


def xarray_ufunc(work: DatasetWorkload, x: Path, out: Path) -> None:
    """xarray's `apply_ufunc(dask="parallelized")`, in threads, to a mapped file."""
    import dask.array as da
    import xarray

    dataset, compute = np.load(x, mmap_mode="r"), _by_batches(work)
    rows = xarray.DataArray(dataset, dims=["row", "column"]).chunk(row=work.commit_rows)
    computed = xarray.apply_ufunc(
        compute,
        rows,
        input_core_dims=[["column"]],
        output_core_dims=[["result"]],
        dask="parallelized",
        output_dtypes=[np.float32],
        dask_gufunc_kwargs={"output_sizes": {"result": work.results}},
    )
    shape = len(dataset), work.results
    results = np.lib.format.open_memmap(out.with_suffix(".npy"), "w+", np.float32, shape)
    da.store(computed.data, results, lock=False, scheduler="threads")
    results.flush()


def huggingface_map(work: DatasetWorkload, x: Path, out: Path) -> None:
    """`datasets.Dataset.map`, from Arrow to Arrow. Its input is made beforehand (`prepare`)."""
    import datasets

    datasets.disable_progress_bars()
    compute = _by_batches(work)
    dataset = datasets.load_from_disk(str(x.with_suffix(".arrow"))).with_format("numpy")
    made = dataset.map(
        lambda rows: {"y": compute(rows["x"])},
        batched=True,
        batch_size=work.commit_rows,
        remove_columns=["x"],
        cache_file_name=str(out.with_suffix(".arrow")),
        writer_batch_size=work.commit_rows,
        new_fingerprint="benchmark",  # it is else a hash of the function, which is no part of this
    )
    assert len(made) == len(dataset)
    _sync(out.with_suffix(".arrow"))


def prepare(ways: dict[str, Way], x: Path) -> None:
    """What some ways read instead of the .npy file."""
    if huggingface_map in ways.values():
        import pyarrow as pa

        import datasets

        array = np.load(x, mmap_mode="r")
        numbers = pa.array(np.asarray(array).reshape(-1))
        column = pa.FixedSizeListArray.from_arrays(numbers, array.shape[1])
        dataset = datasets.Dataset(pa.table({"x": column}))
        dataset.save_to_disk(str(x.with_suffix(".arrow")))


NEEDS = {
    "Dask, `map_blocks`": ("dask",),
    "xarray, `apply_ufunc`": ("dask", "xarray"),
    "Hugging Face, `datasets.map`": ("datasets",),
}
OURS = "bx.map to Zarr"
WAYS: dict[str, Way] = {
    OURS: mapped,
    "bx.map to .npy": mapped_to_npy,
    "a loop to .npy": loop_to_npy,
    "a loop to Zarr": loop_to_zarr,
    "Dask, `map_blocks`": dask_blocks,
    "xarray, `apply_ufunc`": xarray_ufunc,
    "Hugging Face, `datasets.map`": huggingface_map,
}
OTHERS = [name for name in WAYS if not name.startswith("bx.map")]


def _by_batches(work: DatasetWorkload) -> Callable[[Any], np.ndarray]:
    """A slice computed as `bx.map` computes it: a batch at a time."""
    batched = jax.jit(jax.vmap(work.make()))

    def compute(rows: Any) -> np.ndarray:
        starts = range(0, len(rows), work.batch_size)
        parts = [batched(np.asarray(rows[i : i + work.batch_size])) for i in starts]
        return np.concatenate(parts)

    return compute


def _sync(path: Path) -> None:
    """Waits until what is at `path` is on the disk."""
    for file in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
