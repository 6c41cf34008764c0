"""From what a user passes to sources of rows: arrays, files, patterns, and streams."""

from __future__ import annotations

import contextlib
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.core import Tracer

from batchax.datasets.addresses import (
    ObjectPath,
    address,
    at_home,
    is_url,
    listed,
    masked,
    needed,
    reading,
)
from batchax.datasets.arrays import ArrowColumn, InRagged, Sliced, in_memory, reject_masked
from batchax.datasets.files import (
    Hdf5Dataset,
    InMemory,
    NpyFile,
    NpzArray,
    ParquetColumn,
    ZarrFolder,
    ZarrObjects,
    is_zarr,
)
from batchax.datasets.plan import ENDLESS, Data
from batchax.datasets.source import (
    ConcatenatedSource,
    Index,
    Labels,
    ObjectFiles,
    Source,
    fits,
    is_pattern,
    matching,
    native,
)
from batchax.errors import ArgumentTypeError, AxisError, StorageError, UnsupportedError
from batchax.frontend.containers import is_container
from batchax.jaxprs.error_format import brief
from batchax.jaxprs.types import Tree
from batchax.rows.ragged import Ragged

_ALIKE = "Pad rows that differ in length. Or pass all rows at once, as a Ragged or from Parquet."
Keep: TypeAlias = Sequence[str] | dict[str, Any]
"""Columns that are passed through: their names, or columns by name."""


def is_one_by_one(x: object) -> bool:
    """Returns whether Python iterates over it and it is not a pytree, for which JAX would warn."""
    return isinstance(x, Iterable) and jax.tree_util.all_leaves([x])


def is_stream(x: object) -> bool:
    if isinstance(x, (str, bytes, os.PathLike, Source, np.generic, set, frozenset)):
        return False  # the last two have no order that they had in another process
    if not jax.tree_util.all_leaves([x]):  # it is a tree, of arrays
        return False
    if all(hasattr(x, name) for name in ("shape", "dtype")) or _is_arrow(x):
        return False
    return hasattr(x, "__iter__") or _has_numbers(x)


def _is_arrow(x: object) -> bool:
    return type(x).__module__.split(".")[0] == "pyarrow" and hasattr(x, "slice")


def _has_numbers(x: object) -> bool:
    """Returns whether rows are available by number, so that skipped ones need not be made."""
    return hasattr(x, "__len__") and hasattr(x, "__getitem__")


class StreamLeaf(Source):
    """Stands for an array of each row of a stream, which only `Stream.take` reads."""

    def __init__(self, stream: Stream, leaf: int, name: str, rows: np.ndarray) -> None:
        super().__init__(name, (ENDLESS, *rows.shape[1:]), rows.dtype)
        self.stream, self.leaf = stream, leaf

    def get(self, index: Index) -> Data:
        raise UnsupportedError(f"{self.name} are rows that come one after another, and in order.")

    def origin(self) -> dict[str, Any]:
        """Identifies it as a stream: the journal has checksums of its rows."""
        return {"stream": self.stream.name}

    def content(self, rows: int | None = None) -> dict[str, Any]:
        return self.origin()

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "shape": [None, *self.shape[1:]]}


class Stream:
    """Reads the rows of an argument in order."""

    def __init__(self, x: Iterable[Tree], name: str, batched: bool, start: int) -> None:
        self.name, self._batched = name, batched
        self._by_number: Any = x if not batched and _has_numbers(x) else None
        self._iterator: Iterator[Any] = iter(()) if self._by_number is not None else iter(x)
        self._own = self._iterator is not x  # not an iterator that the user may continue to read
        self._structure: Any = None
        self._types: list[tuple[tuple[int, ...], np.dtype]] = []
        self._left: list[np.ndarray] = []  # rows of a batch that were not taken yet
        self._items = 0 if self._by_number is None else start  # that were taken, or passed over
        self.argument: Any = None
        first = self._item()
        if first is not None:
            self.size = len(first[0])  # rows of the first item
            self._left = first
            leaves = [
                StreamLeaf(self, i, f"{name}{path}", x)
                for i, (path, x) in enumerate(zip(self._paths, first, strict=True))
            ]
            self.argument = self._structure.unflatten(leaves)
            if self._by_number is None:
                self.skip(start)

    def take(self, rows: int) -> list[np.ndarray]:
        parts, count = [self._left], len(self._left[0])
        while count < rows:
            item = self._item()
            if item is None:
                break
            parts.append(item)
            count += len(item[0])
        whole = [x[0] if len(x) == 1 else np.concatenate(x) for x in zip(*parts, strict=True)]
        self._left = [x[rows:] for x in whole]
        return [x[:rows] for x in whole]

    def close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if self._own and close is not None:
            with contextlib.suppress(ValueError):  # a thread waits in it for a row
                close()

    @property
    def total(self) -> int | None:
        return None if self._by_number is None else len(self._by_number)

    def skip(self, rows: int) -> int:
        """Skips rows, without making those that have numbers; returns how many."""
        passed = 0
        while passed < rows:
            if not len(self._left[0]):
                if self._by_number is not None:
                    count = max(0, min(rows - passed, len(self._by_number) - self._items))
                    self._items += count
                    return passed + count
                item = self._item()
                if item is None:
                    break
                self._left = item
            count = min(rows - passed, len(self._left[0]))
            self._left = [x[count:] for x in self._left]
            passed += count
        return passed

    def _next(self) -> Tree:
        if self._by_number is None:
            return next(self._iterator)
        if self._items >= len(self._by_number):
            raise StopIteration
        return self._by_number[self._items]

    def _item(self) -> list[np.ndarray] | None:
        """Returns the arrays of the next item, with rows along axis 0; None at the end."""
        try:
            item = self._next()
        except StopIteration:
            return None
        name = f"{self.name}, item {self._items}"
        self._items += 1
        named, structure = jax.tree_util.tree_flatten_with_path(item, is_leaf=_is_leaf)
        paths = [jax.tree_util.keystr(keys) for keys, _ in named]
        arrays = [_array(x, f"{name}{path}") for path, (_, x) in zip(paths, named, strict=True)]
        if not self._batched:
            arrays = [x[None] for x in arrays]
        if self._structure is None:
            self._structure, self._paths = structure, paths
            if not arrays:
                raise ArgumentTypeError(f"{name} has no arrays.")
            self._types = [(x.shape[1:], x.dtype) for x in arrays]
        self._check(name, structure, arrays)
        return arrays

    def _check(self, name: str, structure: object, arrays: Sequence[np.ndarray]) -> None:
        if structure != self._structure:
            raise ArgumentTypeError(
                f"{name} is {structure}, and the first was {self._structure}: all must be alike."
            )
        counts = {x.shape[:1] for x in arrays}
        if len(counts) > 1 or () in counts:
            shapes = ", ".join(str(x.shape) for x in arrays)
            raise AxisError(
                f"{name} is to be a batch of rows along axis 0 of each array, and these have the "
                f"shapes {shapes}. If it is one row, leave out batched=True."
            )
        for path, x, (shape, dtype) in zip(self._paths, arrays, self._types, strict=True):
            if x.shape[1:] != shape or not np.can_cast(x.dtype, dtype, "same_kind"):
                raise AxisError(
                    f"{name}{path} has rows of shape {x.shape[1:]} and dtype {x.dtype}, and the "
                    f"first ones had {shape} and {dtype}: all must be alike. {_ALIKE}"
                )


def _is_leaf(x: object) -> bool:
    """Returns whether a list stands for an array, as in rows that loaders read from JSON."""
    while isinstance(x, list) and x:
        x = x[0]
    return isinstance(x, numbers.Number) or is_container(x)


def _array(x: object, name: str) -> np.ndarray:
    """Copies a row to an array: a loader may reuse its memory for the next row."""
    reject_masked(x, name)
    if is_container(x):
        raise ArgumentTypeError(f"{name} is a {type(x).__name__}, not an array. {_ALIKE}")
    try:
        array = np.asarray(x)  # without `copy`, which tensors of PyTorch do not know
        array = array if isinstance(x, (list, numbers.Number)) else array.copy()
    except Exception as error:
        raise ArgumentTypeError(f"{name} cannot be made an array of NumPy's: {error}") from error
    return np.asarray(array, native(array.dtype, f"{name}, of type {type(x).__name__}"))


def taken(leaves: Sequence[Any], rows: int, first: int) -> list[np.ndarray]:
    """Takes so many rows of all streams, or those that are left, as an array for each leaf."""
    parts = {leaf.stream: leaf.stream.take(rows) for leaf in leaves if not leaf.leaf}
    counts = [len(arrays[0]) for arrays in parts.values()]
    if len(set(counts)) > 1:
        raise AxisError(
            f"the arguments end after different numbers of rows: from row {first} on there are "
            f"{' and '.join(map(str, counts))} in them."
        )
    return [parts[leaf.stream][leaf.leaf] for leaf in leaves]


SOURCES: dict[str, Callable[..., Source]] = {  # by the suffix of a file
    "npy": NpyFile,
    "npz": NpzArray,
    "zarr": ZarrFolder,
    "h5": Hdf5Dataset,
    "hdf5": Hdf5Dataset,
    "he5": Hdf5Dataset,
    "parquet": ParquetColumn,
}


def as_source(x: object, name: str) -> Source:
    """Makes a source of the rows of `x`: an array or number; a `Ragged`; an object with `shape`,
    `dtype`, and slices (h5py, zarr-python, xarray, TensorStore); an Arrow array; a path; or a
    source.
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
    if _is_arrow(x) and hasattr(x, "type"):
        return ArrowColumn(x, name)
    with reading(name):  # a closed file raises its library's errors
        sliced = all(hasattr(x, attribute) for attribute in ("shape", "dtype", "__getitem__"))
    if sliced:
        return Sliced(x, name)
    raise ArgumentTypeError(
        f"{name} is of type {type(x).__name__}, which has no rows that can be read. Pass an array, "
        "a path to one, or what Python iterates over in an order; or make an array of it with "
        "numpy.asarray."
    )


def open_path(path: str, name: str, of_any_type: bool = False) -> Source:
    """Opens the rows of an array in a file, or of all files that match a pattern.

    A name in a file follows a colon: "x.npz:name", "x.h5:group/dataset", "x.zarr:sub/array",
    "x.parquet:column", or "folder:column" for a folder of Parquet files. `of_any_type` columns are
    passed through.
    """
    file, member = _split_url(path, name) if is_url(path) else _split(path)
    shown = f"{name} ({path})"
    if is_pattern(file):
        paths = matching(file)
        if not paths:
            kind, where = "object", ""
            if isinstance(file, Path):
                kind, where = "file", f", from the folder {Path.cwd()}"
            raise StorageError(f"{shown}: no {kind} fits the pattern{where}.")
        of = f":{member}" if member else ""
        parts = [open_path(f"{each}{of}", name, of_any_type) for each in paths]
        return ConcatenatedSource(parts, fits(file), shown)
    name = shown
    if isinstance(file, ObjectPath):
        return _open_objects(file, member, name, of_any_type)
    if not file.exists():
        full = f"{name}: there is no such file. Its path in full: {file.absolute()}."
        raise StorageError(masked(full))
    kind = _kind_of(file)
    if kind is None:
        raise ArgumentTypeError(f"{name}: the format is unknown. Supported are {listed(SOURCES)}.")
    if member and kind == "npy":
        raise StorageError(f"{name}: {file} has no arrays with names, such as {member!r}.")
    if of_any_type and kind == "parquet":
        return ParquetColumn(file, member, name, True)
    return SOURCES[kind](file, member, name)


def _open_objects(path: ObjectPath, member: str, name: str, of_any_type: bool) -> Source:
    kind = "" if ".zarr/" in path.key else path.suffix[1:]
    if kind in ("npz", "h5", "hdf5", "he5"):
        raise UnsupportedError(
            f"{name}: object storage supports .npy, .zarr, and .parquet. Copy it to a local "
            "disk, or convert it to one of these."
        )
    if kind == "npy":
        return NpyFile(path, member, name)
    there: Any = ObjectFiles(path, name)
    if kind == "parquet" or any(part.suffix == ".parquet" for part in there.seen):
        return ParquetColumn(there, member, name, of_any_type)
    return ZarrObjects(there, name)


def passed_columns(
    keep: Keep, arguments: Iterable[tuple[str, Any]], labels: Labels | None
) -> dict[str, Source]:
    """Makes sources of passed columns by name. `arguments` are names and values."""
    if not isinstance(keep, dict):
        if not (isinstance(keep, (list, tuple)) and all(isinstance(x, str) for x in keep)):
            raise ArgumentTypeError(
                'keep must be a list of names of columns, ["id"], or a dict of columns by name, '
                f'{{"id": "table.parquet:id"}}; got {brief(keep)}.'
            )
        keep = {name: _column_of(name, arguments, labels) for name in keep}
    return {str(name): _passed(x, f"keep[{name!r}]") for name, x in keep.items()}


def _column_of(name: str, arguments: Iterable[tuple[str, Any]], labels: Labels | None) -> object:
    coordinate = labels and labels.coordinates.get(name)
    if coordinate is not None and coordinate.dims:
        return coordinate
    tables = dict[str, None]()
    for _, x in arguments:
        if isinstance(x, (str, os.PathLike, ObjectPath)):
            text = str(x if isinstance(x, ObjectPath) else os.fspath(x))
            table, colon, column = text.rpartition(":")
            if colon and "/" not in column and ".h5" not in table and ".zarr" not in table:
                tables[table] = None
    if len(tables) == 1:
        return f"{next(iter(tables))}:{name}"
    which = "are columns of several files" if tables else "is a column of a Parquet file"
    raise ArgumentTypeError(
        f"keep: {name!r} names a column besides the arguments, and "
        f"{'they' if tables else 'none'} {which}. Pass the column itself: keep={{{name!r}: "
        f'"table.parquet:{name}"}}, or an array.'
    )


def _passed(x: Any, name: str) -> Source:
    if isinstance(x, (str, os.PathLike, ObjectPath)):
        text = str(x) if isinstance(x, ObjectPath) else at_home(os.fspath(x), name)
        return open_path(text, name, of_any_type=True)
    arrow = needed("pyarrow", name)
    if not isinstance(x, (arrow.Array, arrow.ChunkedArray)):
        values = x.to_numpy() if type(x).__module__.startswith("xarray") else x
        try:
            x = arrow.array(values)
        except (arrow.ArrowException, TypeError) as error:
            raise ArgumentTypeError(
                f"{name} is {brief(x)}, of which Arrow makes no column: {error}"
            ) from error
    return ArrowColumn(x, name, of_any_type=True)


def _kind_of(file: Path) -> str | None:
    """Returns the kind by suffix, or by the content of a folder."""
    kind = file.suffix[1:]
    if kind in SOURCES:
        return kind
    if file.is_dir() and any(file.glob("*.parquet")):
        return "parquet"
    return "zarr" if is_zarr(file) else None


def _split_url(url: str, name: str) -> tuple[ObjectPath, str]:
    path: Any = address(url, name)
    group, _, array = path.key.partition(".zarr:")
    if array:  # a path in a group
        return ObjectPath(path.scheme, path.bucket, f"{group}.zarr/{array.strip('/')}"), ""
    member = path.name.partition(":")[2]
    whole: Any = address(url[: len(url) - len(member) - 1], name) if member else path
    return whole, member


def _split(path: str) -> tuple[Path, str]:
    ends = [i for i, letter in enumerate(path) if letter == ":"]
    # Names may contain colons, so the longest existing path is taken.
    for end in [len(path), *reversed(ends)]:
        part = path[:end]
        if part and (Path(part).exists() or (is_pattern(Path(part)) and matching(Path(part)))):
            return Path(path[:end]), path[end + 1 :]
    return Path(path[: ends[-1]] if ends else path), ""
