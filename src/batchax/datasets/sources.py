"""Where rows come from: from an argument of the user's to a source of rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from batchax.datasets.addresses import ObjectPath, at_home, is_url
from batchax.datasets.columns import ArrowColumn
from batchax.datasets.failures import reading
from batchax.datasets.joined import Joined, fits_files, is_pattern, matching
from batchax.datasets.kinds import Kinds
from batchax.datasets.masking import masked
from batchax.datasets.memory import InMemory, InRagged, Sliced, in_memory
from batchax.datasets.source import Source, native
from batchax.datasets.tensorstores import zarr_format
from batchax.errors import ArgumentTypeError, StorageError
from batchax.rows.ragged import Ragged

SOURCES = Kinds(
    "batchax.sources",
    Source,
    {
        "npy": "batchax.datasets.files:NpyFile",
        "npz": "batchax.datasets.files:NpzArray",
        "zarr": "batchax.datasets.files:ZarrFolder",
        "h5": "batchax.datasets.files:Hdf5Dataset",
        "hdf5": "batchax.datasets.files:Hdf5Dataset",
        "he5": "batchax.datasets.files:Hdf5Dataset",
        "parquet": "batchax.datasets.columns:ParquetColumn",
    },
)
"""By the suffix of a file. Another package adds its own as entry points of that group."""


def as_source(x: Any, name: str) -> Source:
    """A source of the rows of `x`.

    Args:
      x: an array of NumPy or JAX, a number, a `Ragged`; anything with `shape`, `dtype` and slices
        (h5py, zarr-python, xarray, TensorStore); an array of Arrow; a path, as `open_path` takes
        it; or a source, as which it stays.
      name: of the argument, for messages.

    Raises:
      ArgumentTypeError: it is nothing of these, or does not hold numbers.
      StorageError: there is no such file, or it is damaged.
    """
    if isinstance(x, ObjectPath):
        return open_path(str(x), name)
    if isinstance(x, (str, os.PathLike)):
        return open_path(at_home(os.fspath(x), name), name)
    if isinstance(x, Source):
        return x
    if isinstance(x, Tracer):
        raise ArgumentTypeError(
            f"{name} is traced: rows of a dataset are read where values are known, so call this "
            "outside of jit and other transformations."
        )
    if isinstance(x, Ragged):
        return InRagged(x, name)
    if isinstance(x, jax.Array):
        native(x.dtype, name)  # random keys
        return InMemory(np.asarray(x), name)
    if isinstance(x, (np.ndarray, np.generic, int, float, complex)):
        return in_memory(x, name)
    if type(x).__module__.split(".")[0] == "pyarrow" and hasattr(x, "slice") and hasattr(x, "type"):
        return ArrowColumn(x, name)
    with reading(name):  # what was closed raises errors of its own
        sliced = all(hasattr(x, attribute) for attribute in ("shape", "dtype", "__getitem__"))
    if sliced:
        return Sliced(x, name)
    raise ArgumentTypeError(
        f"{name} is of type {type(x).__name__}, which has no rows that can be read: give an array, "
        "a path to one, or what Python iterates over in an order; or make an array of it with "
        "numpy.asarray."
    )


def open_path(path: str, name: str) -> Source:
    """A source of the rows of an array in a file.

    Args:
      path: "x.npy", "x.zarr", "x.zarr/sub/array"; and with the name of what is meant in a file of
        several: "x.npz:name", "x.h5:group/dataset", "x.zarr:sub/array", "x.parquet:column", or a
        folder of Parquet files, "folder:column". A suffix that another package reads is as good.
        A pattern, "data/*.npy" or "year=*/x.h5:name", names the rows of all files that it fits, by
        name one after another.
      name: of the argument, for messages.

    Raises:
      StorageError: there is no such file or array, or it is damaged.
      ArgumentTypeError: nobody reads such files, or there are no numbers in it.
      ImportError: a package that this needs is not installed, or is wrong.
    """
    if is_url(path):
        from batchax.datasets.object_sources import open_object

        return open_object(path, name)
    file, member = _split(path)
    if is_pattern(str(file)):
        return _joined(str(file), member, name, path)
    name = f"{name} ({path})"
    if not file.exists():
        full = f"{name}: there is no such file. Its path in full: {file.absolute()}."
        raise StorageError(masked(full))
    kind = _kind_of(file)
    if kind is None:
        raise ArgumentTypeError(
            f"{name}: of what kind this is is not known. Rows are read of {SOURCES.listed()}."
        )
    source: Any = SOURCES.load(kind)
    if member and not source.has_members:
        raise StorageError(f"{name}: {file} has no arrays with names, such as {member!r}.")
    return source(file, member, name)


def _joined(pattern: str, member: str, name: str, path: str) -> Source:
    paths = matching(pattern)
    if not paths:
        raise StorageError(
            f"{name} ({path}): no file fits the pattern, from the folder {Path.cwd()}."
        )
    of = f":{member}" if member else ""
    parts = [open_path(f"{each}{of}", name) for each in paths]
    return Joined(parts, fits_files(pattern), f"{name} ({path})")


def _kind_of(file: Path) -> str | None:
    """By the suffix; of a folder with another one, or without, by what is in it."""
    kind = file.suffix[1:]
    if kind in SOURCES:
        return kind
    if file.is_dir() and any(file.glob("*.parquet")):
        return "parquet"
    return "zarr" if zarr_format(file) else None


def _split(path: str) -> tuple[Path, str]:
    """The file, and what comes after a colon. A file's own name may have colons, too."""
    ends = [i for i, letter in enumerate(path) if letter == ":"]
    for end in [len(path), *reversed(ends)]:
        part = path[:end]
        if part and (Path(part).exists() or (is_pattern(part) and matching(part))):
            return Path(path[:end]), path[end + 1 :]
    return Path(path[: ends[-1]] if ends else path), ""
