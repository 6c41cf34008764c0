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
from batchax.errors import ArgumentTypeError


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
    return _store(kind_of(out), out, leaves, plan.chunk_rows)


def reopen_store(out: str | os.PathLike[str], description: dict[str, Any]) -> Store:
    """The store that `Store.describe` described."""
    leaves, unit_rows = described_leaves(description), description["unit_rows"]
    return _store(description["kind"], out, leaves, unit_rows)


def _store(kind: str, out: Any, leaves: Sequence[Leaf], unit_rows: int) -> Store:
    if kind == MemoryStore.kind:
        return MemoryStore(leaves, unit_rows)
    stores = {store.kind: store for store in (NpyStore, ZarrStore, ParquetStore)}
    return stores[kind](Path(out), leaves, unit_rows)


def kind_of(out: Any) -> str:
    """The kind of the store for an output.

    Raises:
      ArgumentTypeError: there is none.
    """
    if out is None:
        return MemoryStore.kind
    if not isinstance(out, (str, os.PathLike)) or not os.fspath(out):
        raise ArgumentTypeError(f"out must be a path or None, and is {out!r}.")
    name = str(os.fspath(out))
    if "://" in name:
        raise ArgumentTypeError(f"out={name!r}: results are written to a local disk.")
    path = Path(name)
    if path.suffix in (".npy", ".zarr"):
        return path.suffix[1:]
    if path.suffix in ("", ".parquet") or name.endswith("/"):
        return ParquetStore.kind
    hdf5 = path.suffix in (".h5", ".hdf5", ".he5")
    why = " HDF5 is read but not written: a writer that is killed damages the file." if hdf5 else ""
    raise ArgumentTypeError(
        f"out={name!r}: results are written to .zarr, .npy, or a folder of Parquet files (no "
        f"suffix, or a slash at the end).{why}"
    )
