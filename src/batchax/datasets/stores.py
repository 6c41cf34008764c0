"""Where results go: from what the user gave as `out` to a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchax.datasets.memory_store import MemoryStore
from batchax.datasets.npy_store import NpyStore
from batchax.datasets.parquet_store import ParquetStore
from batchax.datasets.parts import Leaf
from batchax.datasets.plan import Plan
from batchax.datasets.store import Store, described_leaves
from batchax.datasets.zarr_store import ZarrStore
from batchax.errors import ArgumentTypeError, JobError


def open_store(out: str | os.PathLike[str] | None, leaves: Sequence[Leaf], plan: Plan) -> Store:
    """The store of a job's results. Nothing is written yet.

    Args:
      out: "x.zarr", "x.npy", a folder for Parquet files, which has no suffix or ".parquet" or ends
        in a slash; None for memory.
      leaves: the arrays of results.
      plan: says how many rows are written at once.

    Raises:
      ArgumentTypeError: there is no such kind of store, or it has no form for one of the results.
      ImportError: a library that it needs is not installed.
    """
    return _store(out, leaves, plan.unit_rows)


def reopen_store(out: str | os.PathLike[str], description: dict[str, Any]) -> Store:
    """The store that `Store.describe` described."""
    store = _store(out, described_leaves(description), description["unit_rows"])
    if store.kind != description["kind"]:
        raise JobError(
            f"{out} would be a store of kind {store.kind}, and the job wrote one of kind "
            f"{description['kind']}."
        )
    return store


def _store(out: Any, leaves: Sequence[Leaf], unit_rows: int) -> Store:
    if out is None:
        return MemoryStore(leaves, unit_rows)
    if not isinstance(out, (str, os.PathLike)) or not os.fspath(out):
        raise ArgumentTypeError(f"out must be a path or None, and is {out!r}.")
    path = Path(out)
    if path.suffix == ".npy":
        return NpyStore(path, leaves, unit_rows)
    if path.suffix == ".zarr":
        return ZarrStore(path, leaves, unit_rows)
    if path.suffix in ("", ".parquet") or str(out).endswith("/"):
        return ParquetStore(path, leaves, unit_rows)
    hdf5 = path.suffix in (".h5", ".hdf5", ".he5")
    why = " HDF5 is read but not written: a writer that is killed damages the file." if hdf5 else ""
    raise ArgumentTypeError(
        f"out={str(out)!r}: results are written to .zarr, .npy, or a folder of Parquet files (no "
        f"suffix, or a slash at the end).{why}"
    )
