"""Which store an output has, by its name."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchax.datasets.addresses import Address, ObjectPath, address, listed, needed
from batchax.datasets.file_stores import NpyStore, ParquetStore, ZarrStore
from batchax.datasets.plan import Leaf, Plan
from batchax.datasets.store import MemoryStore, Options, Store, described_leaves
from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.frontend.outputs import Reduce
from batchax.jaxprs.error_format import brief

FOLDER = "parquet"  # of a name without a suffix

STORES: dict[str, type[Store]] = {"zarr": ZarrStore, "npy": NpyStore, "parquet": ParquetStore}
"""By the suffix of an output."""

# In object storage, where nothing can be written into the middle of a file.
_PUT_WHOLE = "zarr", "parquet"


def open_store(
    out: str | Address | None,
    leaves: Sequence[Leaf],
    plan: Plan,
    kind: str | None = None,
    options: dict[str, Any] | None = None,
) -> Store:
    """Opens the store of results. `kind` is needed if `out` has lost its final slash."""
    if plan.extended:
        leaves = [replace(leaf, shape=leaf.of_rows(0), grows=True) for leaf in leaves]
    return _store(kind or kind_of(out), out, leaves, plan.chunk_rows, options)


def reopen_store(out: str | Address, description: dict[str, Any]) -> Store:
    leaves, unit_rows = described_leaves(description), description["unit_rows"]
    return _store(description["kind"], out, leaves, unit_rows, description.get("options"))


def _store(
    kind: str,
    out: str | Address | None,
    leaves: Sequence[Leaf],
    unit_rows: int,
    options: Options | None,
) -> Store:
    in_memory = kind == MemoryStore.kind
    store_class = MemoryStore if in_memory else STORES[kind]
    if options and not store_class.takes_options:
        raise ArgumentTypeError(
            f"store_options: {'memory' if in_memory else f'.{kind}'} has no options. "
            'Remove it, or use out="y.zarr", or a folder of Parquet files (out="y/").'
        )
    place = Path() if out is None else address(out, "out")
    store = store_class(place, leaves, unit_rows, options)
    store.kind = kind
    return store


def kind_of(out: object) -> str:
    if out is None:
        return MemoryStore.kind
    if isinstance(out, ObjectPath):
        out = str(out)
    if not isinstance(out, (str, os.PathLike)) or not os.fspath(out):
        hint = " Pass it as out_axes." if isinstance(out, Reduce) else ""
        raise ArgumentTypeError(f"out must be a path or None, and is {brief(out)}.{hint}")
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
        if kind not in _PUT_WHOLE:
            raise UnsupportedError(
                f"out={name!r}: object storage supports outputs in .zarr and in Parquet files "
                "(.parquet, no suffix, or a slash at the end). Other formats change files in "
                "place, which objects do not support. Write to a disk, and copy the output."
            )
        return kind
    if kind in STORES:
        return kind
    if not kind or name.endswith("/"):
        if importlib.util.find_spec("pyarrow") is None:  # who forgot the suffix means another kind
            needed("pyarrow", f"out={name!r} without a suffix ({listed(STORES)}) is Parquet, which")
        return FOLDER
    raise ArgumentTypeError(
        f"out={name!r}: results are written to {listed(STORES)}, or a folder of Parquet files (no "
        "suffix, or a slash at the end)."
    )
