"""Sources in files and objects: .npy, .npz, HDF5, Zarr, and Parquet."""

from __future__ import annotations

import io
import itertools
import json
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from batchax.datasets.addresses import Address, ObjectPath, needed, reading
from batchax.datasets.formats import BEGUN, LITTLE_MEMORY, KeyValuesInMemory, Layout, in_folder
from batchax.datasets.plan import ArrowArray, ArrowType, Data, ForeignArray, Rows, checksum
from batchax.datasets.source import (
    AnyFiles,
    Files,
    Index,
    ObjectFiles,
    Source,
    check_shape,
)
from batchax.errors import ArgumentTypeError, StorageError
from batchax.rows.converters import dense, is_lists, rows_of

Hdf5Node: TypeAlias = Any
"""A file, group, or dataset of h5py, which has no types."""

_MOST_LINKS = 16  # one behind another: as many as HDF5 itself follows


def linked_files(dataset: Hdf5Node, own: str | Path, name: str) -> list[Path]:
    """Lists the files besides `own` that an HDF5 dataset is read from."""
    # For a missing file, HDF5 returns fill values, and for a replaced one the data of another run.
    # So each must exist, and is watched.
    paths = dict.fromkeys(_behind(dataset, name, 0))
    return [path for path in paths if path != Path(own).resolve()]


def _behind(dataset: Hdf5Node, name: str, links: int) -> Iterator[Path]:
    yield Path(dataset.file.filename).resolve()  # another one behind an external link
    if links > _MOST_LINKS:
        raise StorageError(f"{name}: {dataset.name} is made of datasets made of others, and so on.")
    for raw, *_ in dataset.external or ():
        if not Path(raw).is_absolute():
            raise StorageError(
                f"{name}: the values of {dataset.name} in {dataset.file.filename} are in the file "
                f"{raw!r}, in the folder of whichever process reads them. Copy the dataset, or "
                "write an absolute path."
            )
        yield _there(dataset.file, raw, name)
    for source in dataset.virtual_sources() if dataset.is_virtual else ():
        if source.file_name == ".":
            yield from _behind(dataset.file[source.dset_name], name, links + 1)
            continue
        there = _there(dataset.file, source.file_name, name)
        with needed("h5py", f"{name}: HDF5").File(there, "r") as other:
            yield from _behind(other[source.dset_name], name, links + 1)


def _there(file: Hdf5Node, path: str, name: str) -> Path:
    there = Path(file.filename).resolve().parent / path
    if not there.is_file():
        raise StorageError(
            f"{name}: {file.filename} has rows in {there}, which is not there: they would count as "
            "fill values. Restore it, or copy the dataset to one file."
        )
    return there.resolve()


_DOCUMENTS = {"zarr.json": "zarr3", ".zarray": "zarr"}  # of arrays, and TensorStore's driver
_GROUPS = (".zgroup", "zarr.json")


def is_zarr(folder: Path) -> bool:
    return any((folder / name).exists() for name in (*_DOCUMENTS, *_GROUPS))


def _document_of_array(
    path: Address,
    exists: Callable[[Any], bool],
    inside: Callable[[], Iterable[Any]],
    read: Callable[[Any], bytes],
    name: str,
) -> str:
    """Returns the document name of a Zarr array; raises for a group, or without an array."""
    is_group = lambda p: p.name == "zarr.json" and json.loads(read(p)).get("node_type") == "group"
    for document in _DOCUMENTS:
        if exists(path / document) and not is_group(path / document):
            return document
    documents = [p for p in inside() if p.name in _DOCUMENTS and p.parent != path]
    arrays = sorted(str(p.parent) for p in documents if not is_group(p))
    if not arrays and not any(exists(path / group) for group in _GROUPS):
        raise StorageError(f"{name}: there is no Zarr array in {path}.")
    raise StorageError(
        f"{name} is a group of Zarr arrays. Name one of them: {', '.join(arrays) or 'it has none'}."
    )


_KEPT = 2  # row groups: a unit may need the end of one and the beginning of the next


class Column(Source):
    """Holds a column of a table: rows lie along axis 0, where only slices are cheap."""

    lends = True

    def __init__(self, name: str, rows: int, kind: ArrowType, of_any_type: bool = False) -> None:
        arrow = needed("pyarrow", name)
        if of_any_type:
            super().__init__(name, (rows,), object)
            self.kind = _plain_type(arrow, kind, name)
            return
        self.ragged = is_lists(kind)
        sizes, element = [], kind.value_type if self.ragged else kind
        while arrow.types.is_fixed_size_list(element):
            sizes.append(element.list_size)
            element = element.value_type
        numbers = arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean
        if not any(fits(element) for fits in numbers):
            raise ArgumentTypeError(
                f"{name} is of Arrow's type {kind}: elements must be numbers, lists of one size of "
                "numbers, or lists of these. Convert it with cast."
            )
        super().__init__(name, (rows, *sizes), element.to_pandas_dtype())

    def get(self, index: Index) -> Data:
        start, stop = index[0].start, index[0].stop
        got = self._convert(self._rows(start, stop))
        return got if isinstance(got, Rows) else got[(slice(None), *index[1:])]

    def arrow(self, start: int, stop: int) -> ArrowArray:
        with reading(f"{self.name}: rows {start} to {stop}"):
            got = self._rows(start, stop).cast(self.kind)
            return got.combine_chunks() if hasattr(got, "chunks") else got

    def content(self, rows: int | None = None) -> dict[str, Any]:
        if self.dtype != object:
            return super().content(rows)
        return {"crc32c": checksum(self.arrow(0, self.shape[0] if rows is None else rows))}

    def _rows(self, start: int, stop: int) -> ArrowArray:
        raise NotImplementedError

    def _convert(self, array: ArrowArray) -> Data:
        if hasattr(array, "chunks"):
            array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
        if not self.ragged:
            return dense(array, self.name)
        return Rows(*rows_of(array, self.name))

    def _lengths(self, array: ArrowArray) -> np.ndarray:
        got: Any = self._convert(array)
        return got.lengths


def _plain_type(arrow: ModuleType, kind: ArrowType, name: str) -> ArrowType:
    """Returns the type of elements in a Parquet file, without a dictionary."""
    types = arrow.types
    if types.is_dictionary(kind):
        return _plain_type(arrow, kind.value_type, name)
    if types.is_timestamp(kind) and kind.unit == "s":
        return arrow.timestamp("ms", kind.tz)
    if kind.num_fields or types.is_null(kind):
        raise ArgumentTypeError(
            f"{name} is of Arrow's type {kind}, and a column that is passed through has strings, "
            "numbers, dates or times. Remove it from keep=, or cast it."
        )
    views = {"string_view": arrow.large_string(), "binary_view": arrow.large_binary()}
    return views.get(str(kind), kind)


class ParquetColumn(Column):
    """Reads a column of a Parquet file, or of all in a folder, in the order of their names.

    Row groups are decoded one at a time, and the latest are cached for the next unit.
    """

    def __init__(
        self, path: Path | ObjectFiles, column: str, name: str, of_any_type: bool = False
    ) -> None:
        self._parquet = needed("pyarrow.parquet", f"{name}: Parquet")
        self._column, self._lock = column, threading.Lock()
        self._find_parts(path, name)
        self._groups: list[tuple[int, int]] = []  # file, and row group in it
        starts, kind = [0], None
        for i, part in enumerate(self._paths):
            with (
                reading(f"{name}: {part}"),
                self._parquet.ParquetFile(self._readable(i)) as file,
            ):
                schema, metadata = file.schema_arrow, file.metadata
                if column not in schema.names:
                    none = f"there is no column {column!r} in {part}"
                    asked = none if column else "add the name of a column after the path and ':'"
                    raise ArgumentTypeError(
                        f"{name}: {asked}; there are: {', '.join(schema.names)}."
                    )
                if kind is not None and schema.field(column).type != kind:
                    raise StorageError(
                        f"{name}: the column is of type {schema.field(column).type} in {part}, and "
                        f"of type {kind} in the files before. All must have one type."
                    )
                kind = schema.field(column).type
                for group in range(metadata.num_row_groups):
                    self._groups.append((i, group))
                    starts.append(starts[-1] + metadata.row_group(group).num_rows)
        self._starts, self._kind = starts, kind
        self._kept: dict[int, Any] = {}
        super().__init__(name, starts[-1], kind, of_any_type)

    def _find_parts(self, path: Path | ObjectFiles, name: str) -> None:
        """Finds the files or objects that hold the rows, and their metadata."""
        if isinstance(path, ObjectFiles):
            seen, self._path = path.seen, path.path
            unfinished = self._path / BEGUN in seen and seen[self._path / BEGUN].size
            self._paths: list[Any] = sorted(
                p for p in seen if p.suffix == ".parquet" or p == path.path
            )
            self._files: Sequence[AnyFiles] = [path] * len(self._paths)
        else:
            unfinished = (path / BEGUN).is_file() and (path / BEGUN).stat().st_size
            self._paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
            self._files, self._path = [Files(part, name) for part in self._paths], path.resolve()
            for one in self._files:
                one.count = len(self._files)
        # A partial output that was copied would look like a complete one.
        if unfinished:
            raise StorageError(
                f"{name}: {self._path} is the output of a job that had not finished when it was "
                "copied. Copy it again once the job has."
            )
        if not self._paths:
            raise StorageError(f"{name}: there are no .parquet files in {self._path}.")

    def would_hold(self, path: Address) -> bool:
        # Of a folder all: a new file in it, or a new folder that is named like one, would be read.
        return path == self._path or self._path in path.parents

    def _readable(self, i: int) -> Path | io.BufferedReader:
        files, path = self._files[i], self._paths[i]
        if isinstance(files, Files):
            return files.path
        return io.BufferedReader(files.opened(path), 2**20)

    @cached_property
    def lengths(self) -> np.ndarray | None:
        """Returns the length of each row, found by reading the column once."""
        if not self.ragged:
            return None
        with reading(f"{self.name}: the lengths of rows"):
            parts = [self._lengths(self._decode(i)) for i in range(len(self._groups))]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    @property
    def all_files(self) -> Sequence[AnyFiles]:
        return self._files

    def origin(self) -> dict[str, Any]:
        if isinstance(self._path, ObjectPath):
            return {**self._files[0].identity(), "column": self._column}
        files = [part.identity() for part in self._files]
        return {"files": files, "column": self._column}

    def _rows(self, start: int, stop: int) -> ArrowArray:
        parts = []
        for i in range(bisect_right(self._starts, start) - 1, len(self._groups)):
            begin = self._starts[i]
            if begin >= stop:
                break
            at = max(start - begin, 0)
            parts += self._group(i).slice(at, stop - begin - at).chunks
        return needed("pyarrow", self.name).chunked_array(parts, self._kind)

    def _group(self, i: int) -> ArrowArray:
        with self._lock:
            if i not in self._kept:
                while len(self._kept) >= _KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[i] = self._decode(i)
            return self._kept[i]

    def _decode(self, i: int) -> ArrowArray:
        part, group = self._groups[i]
        try:
            # The file is checked after it is read: a change while it is read must be noticed.
            with self._parquet.ParquetFile(
                self._readable(part), page_checksum_verification=True
            ) as file:
                return file.read_row_group(group, [self._column], use_threads=False).column(
                    self._column
                )
        finally:  # of many files, the one that was read
            self._files[part].check()


class NpyFile(Source):
    """Reads parts of a .npy file or object."""

    gives_fresh = True

    def __init__(self, path: Address, member: str, name: str) -> None:
        on_disk = isinstance(path, Path)
        self.files = Files(path, name) if on_disk else ObjectFiles(path, name)
        with reading(name), self.files.opened() as file:
            self._layout = Layout.of(file)
        super().__init__(name, self._layout.shape, self._layout.dtype)

    def get(self, index: Index) -> np.ndarray:
        axis, picked = len(index) - 1, index[-1] if index else slice(0, 1)
        # Files are not mapped: a process is killed if another one cuts a mapped file short.
        with self.files.opened() as file:
            return self._layout.read(file, axis, picked)


class InMemory(Source):
    """Holds a NumPy array, identified by a checksum, unless `origin` identifies it."""

    in_process = True
    lends = True

    def __init__(self, x: ArrayLike, name: str, origin: dict[str, Any] | None = None) -> None:
        self._array, self._origin = np.asarray(x), origin
        super().__init__(name, self._array.shape, self._array.dtype)

    def origin(self) -> dict[str, Any] | None:
        return self._origin

    def get(self, index: Index) -> np.ndarray:
        return self._array[index]


class NpzArray(InMemory):
    """Holds an array of an .npz file, which is read whole."""

    in_process = False  # who has the path reads it

    def __init__(self, path: Path, member: str, name: str) -> None:
        files = Files(path, name)
        with reading(name), np.load(path, allow_pickle=False) as archive:
            if member not in archive:
                raise _not_in(name, member, sorted(archive))
            array = archive[member]
        super().__init__(array, name, {**files.identity(), "member": member})


class Hdf5Dataset(Source):
    gives_fresh = True

    def __init__(self, path: Path, member: str, name: str) -> None:
        self._h5py = needed("h5py", f"{name}: HDF5")
        self._member, self._lock = member, threading.Lock()
        with reading(name), self._h5py.File(path, "r") as file:
            dataset = file.get(member)
            if not hasattr(dataset, "dtype"):
                _check_links(file, member, name)
                datasets: list[str] = []
                file.visititems(lambda at, x: datasets.append(at) if hasattr(x, "dtype") else None)
                raise _not_in(name, member, datasets)
            shape, dtype = dataset.shape, dataset.dtype
            linked = linked_files(dataset, path, name)
        self.files = Files(path, name, linked)
        check_shape(shape, name)
        super().__init__(name, shape, dtype)

    def origin(self) -> dict[str, Any]:
        return {**self.files.identity(), "member": self._member}

    def get(self, index: Index) -> np.ndarray:
        with self._lock, self._h5py.File(self.files.path, "r") as file:
            return file[self._member][index]


def _check_links(at: Hdf5Node, member: str, name: str) -> None:
    """Raises a StorageError that names the file if an external link is broken."""
    h5py, parts = needed("h5py", f"{name}: HDF5"), member.strip("/").split("/")
    for i, part in enumerate(parts):
        link, rest = at.get(part, getlink=True), parts[i + 1 :]
        if isinstance(link, h5py.ExternalLink):
            with h5py.File(_there(at.file, link.filename, name), "r") as other:
                return _check_links(other, "/".join([link.path, *rest]), name)
        if isinstance(link, h5py.SoftLink):
            start = at.file if link.path.startswith("/") else at
            return _check_links(start, "/".join([link.path, *rest]), name)
        if link is None:
            return
        at = at[part]


class ZarrFolder(Source):
    """Reads a Zarr array in a folder, of version 2 or 3.

    Missing chunks hold fill values. Its identity is that of all files in the folder.
    """

    gives_fresh = True

    def __init__(self, path: Path, member: str, name: str) -> None:
        tensorstore = needed("tensorstore", f"{name}: Zarr")
        path = path / member
        with reading(name):
            inside = lambda: path.rglob("*")
            document = _document_of_array(path, os.path.exists, inside, Path.read_bytes, name)
        self.files = Files(path, name)
        with reading(name):
            self._array = tensorstore.open(
                in_folder(_DOCUMENTS[document], path),
                context=tensorstore.Context(LITTLE_MEMORY),
                open=True,
                read=True,
            ).result()
        super().__init__(name, self._array.shape, self._array.dtype.numpy_dtype)

    def get(self, index: Index) -> np.ndarray:
        return self._array[index].read().result()


def _not_in(name: str, member: str, members: list[str]) -> ArgumentTypeError:
    listed = ", ".join(members) or "nothing"
    if member:
        return ArgumentTypeError(f"{name} has no array {member!r}. There are: {listed}.")
    example = f", as in ':{members[0]}'" if members else ""
    return ArgumentTypeError(
        f"{name}: add the name of an array after the path{example}. There are: {listed}."
    )


class ZarrObjects(Source):
    """Reads a Zarr array in object storage, of version 2 or 3, by whole chunks or shards."""

    gives_fresh = True

    def __init__(self, files: ObjectFiles, name: str) -> None:
        needed("tensorstore", f"{name}: Zarr")
        self.files, path, seen = files, files.path, files.seen
        document = _document_of_array(path, seen.__contains__, lambda: seen, files.read, name)
        self._path, self._driver = path, _DOCUMENTS[document]
        self._document = document, files.read(path / document)
        metadata = json.loads(self._document[1])
        with reading(name):
            array = self._opened(KeyValuesInMemory())
            self._name_of = _names(metadata, self._driver)
            self._chunk = array.chunk_layout.write_chunk.shape
        super().__init__(name, array.shape, array.dtype.numpy_dtype)

    def get(self, index: Index) -> np.ndarray:
        memory = KeyValuesInMemory()
        picked = [*index, *(slice(0, n) for n in self.shape[len(index) :])]
        along = [
            range(part.start // size, -(-part.stop // size))
            for part, size in zip(picked, self._chunk, strict=True)
        ]
        for place in itertools.product(*along):
            chunk = self._path / self._name_of(place)
            if chunk in self.files.seen:  # those that hold the fill value may be left out
                memory.put(chunk.key, self.files.read(chunk))
        return self._opened(memory)[index].read().result()

    def _opened(self, memory: KeyValuesInMemory) -> ForeignArray:
        tensorstore = needed("tensorstore", "Zarr")
        document, content = self._document
        memory.put((self._path / document).key, content)
        spec = in_folder(self._driver, self._path)
        return tensorstore.open(spec, context=memory.context, open=True, read=True).result()


def _names(metadata: dict[str, Any], driver: str) -> Callable[[Sequence[int]], str]:
    """Returns a function from a chunk's grid position to its object name."""
    if driver == "zarr":
        between = metadata.get("dimension_separator", ".")
        return lambda place: between.join(map(str, place)) or "0"
    encoding = metadata["chunk_key_encoding"]
    default = encoding["name"] == "default"
    if not default and encoding["name"] != "v2":
        raise ArgumentTypeError(f"its chunks are named by {encoding['name']!r}, which is not known")
    between = encoding.get("configuration", {}).get("separator", "/" if default else ".")
    if default:
        return lambda place: between.join(["c", *map(str, place)])
    return lambda place: between.join(map(str, place)) or "0"
