"""Where results go: from what the user gave as `out` to a store."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchax.datasets.addresses import Address, ObjectPath, address
from batchax.datasets.failures import needed
from batchax.datasets.kinds import Kinds
from batchax.datasets.memory_store import MemoryStore
from batchax.datasets.parts import Leaf
from batchax.datasets.plan import Plan
from batchax.datasets.store import Store, described_leaves
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.jaxprs.spoken import brief

FOLDER = "parquet"  # of a name without a suffix

STORES = Kinds(
    "batchax.stores",
    Store,
    {
        "zarr": "batchax.datasets.zarr_store:ZarrStore",
        "npy": "batchax.datasets.npy_store:NpyStore",
        "parquet": "batchax.datasets.parquet_store:ParquetStore",
    },
)
"""By the suffix of an output. Another package adds its own as entry points of that group."""

OF_OBJECTS = {
    "zarr": "batchax.datasets.object_stores:ObjectZarr",
    "parquet": "batchax.datasets.object_stores:ObjectParquet",
}
"""The same in a store of objects, where nothing can be written into the middle of a file."""


def open_store(
    out: str | Address | None, leaves: Sequence[Leaf], plan: Plan, kind: str | None = None
) -> Store:
    """The store of a job's results. Nothing is written yet.

    Args:
      out: "x.zarr", "x.npy", a folder for Parquet files, which has no suffix or ".parquet" or ends
        in a slash; a path with a suffix that another package writes; None for memory.
      leaves: the arrays of results.
      plan: says how many rows are written at once.
      kind: of the store, if that is known: a path has lost the slash at its end.

    Raises:
      ArgumentTypeError: there is no such kind of store, or it has no form for one of the results.
      ImportError: a library that it needs is not installed, or a package that adds it is wrong.
    """
    return _store(kind or kind_of(out), out, leaves, plan.chunk_rows)


def reopen_store(out: str | Address, description: dict[str, Any]) -> Store:
    """The store that `Store.describe` described."""
    leaves, unit_rows = described_leaves(description), description["unit_rows"]
    return _store(description["kind"], out, leaves, unit_rows)


def _store(kind: str, out: Any, leaves: Sequence[Leaf], unit_rows: int) -> Store:
    if kind == MemoryStore.kind:
        return MemoryStore(Path(), leaves, unit_rows)
    place = address(out, "out")
    of_objects = isinstance(place, ObjectPath)
    store_class: Any = _of_objects(kind) if of_objects else STORES.load(kind)
    store: Store = store_class(place, leaves, unit_rows)
    store.kind = kind
    return store


def _of_objects(kind: str) -> type[Store]:
    module, _, name = OF_OBJECTS[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def kind_of(out: Any) -> str:
    """The kind of the store for an output.

    Raises:
      ArgumentTypeError: there is none.
    """
    if out is None:
        return MemoryStore.kind
    if isinstance(out, ObjectPath):
        out = str(out)
    if not isinstance(out, (str, os.PathLike)) or not os.fspath(out):
        raise ArgumentTypeError(f"out must be a path or None, and is {brief(out)}.")
    name = str(os.fspath(out))
    if "\0" in name:
        raise ArgumentTypeError(f"out={name!r}: a path has no zero bytes.")
    place = address(out, "out")
    kind = place.suffix[1:]
    if not kind and place.name[1:] in STORES:
        raise ArgumentTypeError(f"out={name!r} is a suffix without a name before it.")
    if isinstance(place, ObjectPath):
        if not kind or name.endswith("/"):
            return FOLDER
        if kind not in OF_OBJECTS:
            raise UnsupportedError(
                f"out={name!r}: in a store of objects, results are written to .zarr, or to "
                "Parquet files (.parquet, no suffix, or a slash at the end). Other files are "
                "written into, and an object is put whole: write to a disk, and copy it there."
            )
        return kind
    if kind in STORES:
        return kind
    if not kind or name.endswith("/"):
        if importlib.util.find_spec("pyarrow") is None:  # who forgot the suffix means another kind
            needed(
                "pyarrow", f"out={name!r} without a suffix ({STORES.listed()}) is Parquet, which"
            )
        return FOLDER
    why = (
        " HDF5 is read but not written: a writer that is killed damages the file."
        if kind in ("h5", "hdf5", "he5")
        else ""
    )
    raise ArgumentTypeError(
        f"out={name!r}: results are written to {STORES.listed()}, or a folder of Parquet files (no "
        f"suffix, or a slash at the end).{why}"
    )
