"""Sources in memory and in local files: .npy, .npz, HDF5, Zarr, and Parquet."""

from __future__ import annotations

import functools
import json
import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BufferedIOBase, RawIOBase
from pathlib import Path
from typing import Any

import numpy as np

from batchax.datasets.addresses import Address, ObjectPath, needed, reading
from batchax.datasets.plan import Rows, checksum, elements_in, kept
from batchax.datasets.source import Files, Index, Labels, Source, check_shape, labels_of, native
from batchax.errors import ArgumentTypeError, StorageError
from batchax.rows.arrow import dense, is_lists, rows_of
from batchax.rows.building import elements_of


class InParts(RawIOBase):
    """A file that is no file of the system's, of which parts are read."""

    size: int  # in bytes

    def read_at(self, out: memoryview, offset: int) -> None:
        raise NotImplementedError


File = BufferedIOBase | RawIOBase

_ALIGNED = 64  # bytes
_GAP = 4096  # bytes; the system reads whole pages, so what lies between closer runs costs nothing
_SPAN = 2**20  # bytes that are read at a time where there are gaps


@dataclass(frozen=True)
class Layout:
    """An array in a file."""

    shape: tuple[int, ...]  # of the array
    dtype: np.dtype  # of its elements, in the file's byte order
    offset: int  # of its first element in the file
    fortran: bool = False  # whether the first axis is the one along which neighbors lie

    @classmethod
    def of(cls, file: File) -> Layout:
        """What the header of a file says."""
        formats = np.lib.format
        version = formats.read_magic(file)
        older = version == (1, 0)
        header = formats.read_array_header_1_0 if older else formats.read_array_header_2_0
        shape, fortran, dtype = header(file)
        layout = cls(shape, dtype, file.tell(), fortran)
        raw = getattr(file, "raw", file)
        size = raw.size if isinstance(raw, InParts) else os.fstat(file.fileno()).st_size
        if size < layout.size:
            raise StorageError(
                f"{getattr(file, 'name', 'the file')} is truncated: by its header it has "
                f"{layout.size} bytes, and {size} are there. Make it again, or copy it again."
            )
        return layout

    @property
    def size(self) -> int:
        return self.offset + self.dtype.itemsize * _product(self.shape)

    def read(self, file: File, axis: int, picked: slice) -> np.ndarray:
        """The indices that a slice picks along an axis; of an array without axes, the whole."""
        if not self.shape:
            return Layout((1,), self.dtype, self.offset).read(file, 0, slice(0, 1)).reshape(())
        if self.fortran:  # in C order it is the array with its axes reversed
            flipped = Layout(self.shape[::-1], self.dtype, self.offset)
            return flipped.read(file, len(self.shape) - 1 - axis, picked).T
        outer, inner, stride = self._runs(axis)
        count = picked.stop - picked.start
        out = _aligned(outer * count * inner).reshape(outer, count * inner)
        if out.size:
            _fill(file, out, self.offset + picked.start * inner, stride)
        part = *self.shape[:axis], count, *self.shape[axis + 1 :]
        return out.reshape(-1).view(self.dtype).reshape(part)

    def pieces(self, part: np.ndarray, axis: int, start: int) -> Iterator[tuple[int, memoryview]]:
        """Where the bytes of a part, which begins at `start` along an axis, go in the file."""
        outer, inner, stride = self._runs(axis)
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        if not flat.size:
            return
        for i, run in enumerate(flat.reshape(outer, -1)):
            at = self.offset + start * inner + i * stride
            half = 0 if outer > 1 else len(run) // 2  # so that there are two pieces at least
            if half:
                yield at, run[:half].data
            yield at + half, run[half:].data

    def _runs(self, axis: int) -> tuple[int, int, int]:
        inner = self.dtype.itemsize * _product(self.shape[axis + 1 :])
        return _product(self.shape[:axis]), inner, inner * self.shape[axis]


def _aligned(size: int) -> np.ndarray:
    """So many bytes, where JAX on a CPU takes them as they are; elsewhere it would copy them."""
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.ctypes.data % _ALIGNED
    return room[start : start + size]


def _fill(file: File, out: np.ndarray, first: int, stride: int) -> None:
    """Fills each row of `out` with bytes of a file, `stride` apart."""
    outer, run = out.shape
    if outer == 1 or run == stride:
        _read_at(file, out.reshape(-1), first)
    elif stride - run > _GAP:
        for i in range(outer):
            _read_at(file, out[i], first + i * stride)
    else:
        step = max(1, _SPAN // stride)
        for i in range(0, outer, step):
            count = min(step, outer - i)
            span = np.empty(count * stride, np.uint8)
            _read_at(file, span[: (count - 1) * stride + run], first + i * stride)
            out[i : i + count] = span.reshape(count, stride)[:, :run]


def _read_at(file: File, out: np.ndarray, offset: int) -> None:
    if isinstance(file, InParts):
        return file.read_at(out.data, offset)
    view = out.data
    while view:
        count = os.preadv(file.fileno(), [view], offset)
        if not count:
            raise OSError(f"the file ends at byte {offset}, in the middle of the array")
        view, offset = view[count:], offset + count


def _product(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


_MOST_LINKS = 16  # one behind another: as many as HDF5 itself follows


def linked_files(file: Any, member: str, name: str) -> list[Path]:
    """The files besides the first that a dataset is read from.

    HDF5 gives fill values, or the data of another run, in the place of a file that is not there or
    is another one now: so each must be there, and is watched.
    """
    own = Path(file.filename).resolve()
    return [path for path in dict.fromkeys(_behind(file, member, name, 0)) if path != own]


def _behind(file: Any, member: str, name: str, links: int) -> Iterator[Path]:
    h5py = needed("h5py", f"{name}: HDF5")
    if links > _MOST_LINKS:
        raise StorageError(f"{name}: {member} in {file.filename} is a link to a link, and so on.")
    at, parts = file, [part for part in member.split("/") if part not in ("", ".")]
    for i, part in enumerate(parts):
        link, rest = at.get(part, getlink=True), parts[i + 1 :]
        if isinstance(link, h5py.ExternalLink):
            target = "/".join([link.path, *rest])
            yield from _of_other(file, link.filename, target, name, links)
            return
        if isinstance(link, h5py.SoftLink):
            base = "" if link.path.startswith("/") else at.name
            yield from _behind(file, "/".join([base, link.path, *rest]), name, links + 1)
            return
        if link is None and links == 0:  # the caller says what there is
            return
        if link is None:
            raise StorageError(f"{name}: there is no {member} in {file.filename}.")
        at = at[part]
    for raw, *_ in getattr(at, "external", None) or ():
        if not Path(raw).is_absolute():
            raise StorageError(
                f"{name}: the values of {member} in {file.filename} are in the file {raw!r}, in "
                "the folder of whichever process reads them. Copy the dataset, or write an "
                "absolute path."
            )
        yield _there(file, raw, name)
    for source in at.virtual_sources() if getattr(at, "is_virtual", False) else ():
        if source.file_name == ".":
            yield from _behind(file, source.dset_name, name, links + 1)
        else:
            yield from _of_other(file, source.file_name, source.dset_name, name, links)


def _of_other(file: Any, path: str, member: str, name: str, links: int) -> Iterator[Path]:
    there = _there(file, path, name)
    yield there
    with needed("h5py", f"{name}: HDF5").File(there, "r") as other:
        yield from _behind(other, member, name, links + 1)


def _there(file: Any, path: str, name: str) -> Path:
    there = Path(file.filename).resolve().parent / path
    if not there.is_file():
        raise StorageError(
            f"{name}: {file.filename} has rows in {there}, which is not there: they would count as "
            "fill values. Restore it, or copy the dataset to one file."
        )
    return there.resolve()


@functools.cache
def limited_context() -> Any:
    """Nothing is cached, and few chunks are copied at a time: memory holds the units in flight."""
    tensorstore = needed("tensorstore", "Zarr")
    return tensorstore.Context(_LITTLE)


_LITTLE = {
    "cache_pool": {"total_bytes_limit": 0},
    "data_copy_concurrency": {"limit": 2},
    "file_io_concurrency": {"limit": 4},
}


class KeyValuesInMemory:
    """Files of an array in memory, by their names there: to encode chunks, and to decode them.

    Attributes:
      context: of TensorStore, in which these are what its memory holds.
    """

    def __init__(self) -> None:
        tensorstore = needed("tensorstore", "Zarr")
        self.context = tensorstore.Context(_LITTLE)
        self._files = tensorstore.KvStore.open({"driver": "memory"}, context=self.context).result()

    def put(self, name: str, content: bytes) -> None:
        self._files.write(name, content).result()

    def all(self) -> dict[str, bytes]:
        names = self._files.list().result()
        return {name.decode(): self._files.read(name).result().value for name in sorted(names)}


def in_folder(driver: str, folder: Address, **more: Any) -> dict[str, Any]:
    """What TensorStore is told to open. Its files are synced before they get their names.

    Of a store of objects, whose bytes it does not move itself, that is a folder in memory.
    """
    # A folder's name must end in a slash.
    if isinstance(folder, ObjectPath):
        return {"driver": driver, "kvstore": {"driver": "memory", "path": f"{folder.key}/"}, **more}
    if os.sep == "/" and "\\" in str(folder.absolute()):
        raise ArgumentTypeError(
            f"{folder} has a backslash in its path, which TensorStore takes for a slash, so the "
            "array would lie in another folder. Use a path without one."
        )
    store = {"driver": "file", "path": f"{folder.absolute()}/", "file_io_sync": True}
    return {"driver": driver, "kvstore": store, **more}


def zarr_format(folder: Path) -> str | None:
    """TensorStore's driver for the array or group in a folder, or None if there is neither."""
    if (folder / "zarr.json").exists():
        return "zarr3"
    return "zarr" if any((folder / name).exists() for name in (".zarray", ".zgroup")) else None


class InMemory(Source):
    """An array of NumPy, or what becomes one.

    Its identity is a checksum of what it holds, unless `origin` says where that came from.
    """

    in_process = True
    lends = True

    def __init__(self, x: Any, name: str, origin: dict[str, Any] | None = None) -> None:
        self._array, self._origin = np.asarray(x), origin
        super().__init__(name, self._array.shape, self._array.dtype)

    def origin(self) -> dict[str, Any] | None:
        return self._origin

    def get(self, index: Index) -> Any:
        return self._array[index]


class Mapped(Source):
    """An array that maps a file, of which parts are read, or copied where they do not lie one after
    another. What was read does not stay in this process's memory.

    Its identity is the file with size and time, and where in it the array lies.
    """

    gives_fresh = True
    in_process = True  # who pickles it, pickles what is mapped

    def __init__(self, x: np.memmap, whole: np.memmap, name: str) -> None:
        if whole.mode != "r":
            whole.flush()  # the file's time changes now, not when the system gets to it
        self._array, self._mapping = np.asarray(x), whole.base
        self._at = x.ctypes.data - whole.ctypes.data + whole.offset
        self.files = Files(Path(str(x.filename)), name)
        fortran = x.flags.f_contiguous and not x.flags.c_contiguous
        self._layout = None
        if fortran or x.flags.c_contiguous:
            self._layout = Layout(x.shape, x.dtype, self._at, fortran)
        super().__init__(name, x.shape, x.dtype)

    def origin(self) -> dict[str, Any]:
        place = {"at": self._at, "strides": list(self._array.strides)}
        return {**self.files.identity(), **place}

    def get(self, index: Index) -> np.ndarray:
        self.files.check()
        if self._layout is not None:
            # Whoever reads through a mapping what the file does not have any more is killed, and
            # it may be cut short at any moment.
            with open(self.files.path, "rb", buffering=0) as file:
                got = self._layout.read(file, len(index) - 1, index[-1] if index else slice(0, 1))
            return np.asarray(got, self.dtype, order="C")
        got = np.array(self._array[index], self.dtype, order="C")
        if isinstance(self._mapping, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            # Pages of the file count as this process's memory until they are given back.
            self._mapping.madvise(mmap.MADV_DONTNEED)
        return got


def refuse_masked(x: Any, name: str) -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{name} is a masked array, and what is masked would count as numbers. Fill it "
            "(x.filled), or drop those rows."
        )


def in_memory(x: Any, name: str) -> Source:
    refuse_masked(x, name)
    whole = x
    while isinstance(whole, np.memmap) and isinstance(whole.base, np.ndarray):
        whole = whole.base
    # Of mode "c", what was written is in memory alone, and results of arithmetic map nothing.
    if isinstance(whole, np.memmap) and whole.mode in ("r", "r+", "w+"):
        return Mapped(x, whole, name)
    return InMemory(x, name)


class InRagged(Source):
    """A `Ragged` whose values are known."""

    ragged = True
    in_process = True
    lends = True

    def __init__(self, x: Any, name: str) -> None:
        if elements_of(x.lengths) is None:
            raise ArgumentTypeError(f"{name}: lengths of rows must be known, and these are traced.")
        dtype = native(x.dtype, name)  # which refuses random keys before they are converted
        self._data, self._lengths = kept(x, len(x))
        self._offsets = np.concatenate([[0], np.cumsum(elements_in(self._lengths))])
        self.axes = x.axis
        super().__init__(name, (len(x), *self._data.shape[1:]), dtype)

    @cached_property
    def lengths(self) -> np.ndarray | None:
        return self._lengths

    def get(self, index: Index) -> Rows:
        start, stop = index[0].start, index[0].stop
        elements = slice(self._offsets[start], self._offsets[stop])
        return Rows(self._data[elements], self._lengths[start:stop])


class Sliced(Source):
    """An array of another library, of which slices are taken one at a time.

    Its identity is, of a dataset of h5py, the file with size and time, and its name; of an array of
    zarr-python or TensorStore in a local folder, all files in that folder, and for TensorStore the
    spec, which says what part it is; of any other array of TensorStore but one in memory, the spec
    alone. Of everything else (xarray, which does not tell what part of a file an array is) it is a
    checksum of what it holds, for which all of it is read once.
    """

    def __init__(self, x: Any, name: str) -> None:
        library = type(x).__module__.split(".")[0]
        self._tensorstore = library == "tensorstore"
        with reading(name):  # it may have been closed
            shape, dtype = x.shape, x.dtype.numpy_dtype if self._tensorstore else x.dtype
            path, self._told = _PLACES.get(library, lambda x: (None, None))(x)
            in_hdf5 = library == "h5py" and path is not None
            linked = linked_files(x.file, x.name, name) if in_hdf5 else []
        check_shape(shape, name)
        super().__init__(name, shape, dtype)
        self._lock = threading.Lock()  # h5py is for one thread at a time; others may be
        self.files = None if path is None else Files(path, name, linked)
        self.gives_fresh = self._tensorstore
        self._array = _from_zero(x) if self._tensorstore else _from_anywhere(x)

    def labels(self, axis: int) -> Labels | None:
        return labels_of(self._array, axis)

    def origin(self) -> dict[str, Any] | None:
        return self._told if self.files is None else {**self.files.identity(), **self._told}

    def get(self, index: Index) -> Any:
        if self._tensorstore:
            return self._array[index].read().result()
        with self._lock:
            return np.asarray(self._array[index])


def _from_zero(x: Any) -> Any:
    """An array of TensorStore whose rows are counted from 0: theirs may begin anywhere."""
    import tensorstore

    return x[tensorstore.d[:].translate_to[0]] if x.rank else x


def _from_anywhere(x: Any) -> Any:
    """An array that does not depend on the folder which this process is in, as zarr-python's do:
    where one is not, its chunks are not, and hold fill values.
    """
    root = getattr(getattr(x, "store", None), "root", None)
    if not isinstance(root, Path) or root.is_absolute():
        return x
    import zarr

    return zarr.open_array(type(x.store)(root.absolute()), path=x.path, mode="r")


_Place = tuple[Path | None, Any]
"""The file or folder of an array, and what else it is known by; by nothing, if that is None."""


def _in_hdf5(x: Any) -> _Place:
    path = Path(x.file.filename)
    return (path, {"member": x.name}) if path.is_file() else (None, None)


def _in_zarr(x: Any) -> _Place:
    root = getattr(x.store, "root", None)
    return (None, None) if root is None else (Path(root) / x.path, {})


def _in_tensorstore(x: Any) -> _Place:
    spec = x.spec().to_json()
    store = spec.get("kvstore", {"driver": "memory"})
    if not isinstance(store, dict) or store.get("driver") == "memory":
        return None, None
    told = {"spec": json.dumps(spec, sort_keys=True)}
    return (Path(store["path"]) if store.get("driver") == "file" else None), told


_PLACES = {"h5py": _in_hdf5, "zarr": _in_zarr, "tensorstore": _in_tensorstore}


_KEPT = 2  # row groups: a unit may need the end of one and the beginning of the next


BEGUN = "_begun"
"""In a folder of a store of objects, whose name cannot change: says something until all is done."""

SHAPES = b"batchax.shapes"
"""In a schema's metadata: of rows of a column, by number in the file, lengths along each axis."""


def told_shapes(metadata: Any, column: str) -> dict[int, list[int]]:
    told = json.loads((metadata or {}).get(SHAPES, b"{}"))
    return {int(row): sizes for row, sizes in told.get(column, {}).items()}


class Column(Source):
    """A column of a table: rows lie along axis 0, and are cheap to pick there alone."""

    lends = True

    def __init__(self, name: str, rows: int, kind: Any, of_any_type: bool = False) -> None:
        arrow = needed("pyarrow", name)
        if of_any_type:
            self.name, self.shape, self.dtype = name, (rows,), np.dtype(object)
            self.kind = _plain_type(arrow, kind, name)
            return
        sizes, element, ragged = [], kind, 0
        while is_lists(element):
            ragged, element = ragged + 1, element.value_type
        self.ragged = ragged > 0
        self.axes = tuple(range(ragged)) if ragged > 1 else 0
        while arrow.types.is_fixed_size_list(element):
            sizes.append(element.list_size)
            element = element.value_type
        numbers = arrow.types.is_integer, arrow.types.is_floating, arrow.types.is_boolean
        if not any(fits(element) for fits in numbers):
            raise ArgumentTypeError(
                f"{name} is of Arrow's type {kind}: elements must be numbers, lists of one size of "
                "numbers, or lists of these, or of such lists. Convert it with cast."
            )
        super().__init__(name, (rows, *sizes), element.to_pandas_dtype())

    def get(self, index: Index) -> Any:
        start, stop = index[0].start, index[0].stop
        got = self._convert(self._rows(start, stop))
        if isinstance(got, Rows):
            return got._replace(lengths=self._told(got.lengths, start))
        return got[(slice(None), *index[1:])]

    def arrow(self, start: int, stop: int) -> Any:
        with reading(f"{self.name}: rows {start} to {stop}"):
            got = self._rows(start, stop).cast(self.kind)
            return got.combine_chunks() if hasattr(got, "chunks") else got

    def content(self, rows: int | None = None) -> dict[str, Any]:
        if self.dtype != object:
            return super().content(rows)
        return {"crc32c": checksum(self.arrow(0, self.shape[0] if rows is None else rows))}

    def _told(self, lengths: np.ndarray, start: int) -> np.ndarray:
        return lengths

    def _rows(self, start: int, stop: int) -> Any:
        raise NotImplementedError

    def _convert(self, array: Any) -> np.ndarray | Rows:
        if hasattr(array, "chunks"):
            array = array.chunk(0) if array.num_chunks == 1 else array.combine_chunks()
        if not self.ragged:
            return dense(array, self.name)
        return Rows(*rows_of(array, self.name))

    def _lengths(self, array: Any) -> np.ndarray:
        converted = self._convert(array)
        assert isinstance(converted, Rows)
        return converted.lengths


def _plain_type(arrow: Any, kind: Any, name: str) -> Any:
    """The type that elements have in a Parquet file, without a dictionary."""
    types = arrow.types
    if types.is_dictionary(kind):
        return _plain_type(arrow, kind.value_type, name)
    if types.is_timestamp(kind) and kind.unit == "s":
        return arrow.timestamp("ms", kind.tz)
    if kind.num_fields or types.is_null(kind):
        raise ArgumentTypeError(
            f"{name} is of Arrow's type {kind}, and a column that is passed through has strings, "
            "numbers, dates or times. Leave it out of keep=, or cast it."
        )
    views = {"string_view": arrow.large_string(), "binary_view": arrow.large_binary()}
    return views.get(str(kind), kind)


class ArrowColumn(Column):
    """An array of Arrow, chunked or not, in memory or mapped: it is converted a part at a time."""

    def __init__(self, array: Any, name: str, of_any_type: bool = False) -> None:
        super().__init__(name, len(array), array.type, of_any_type)
        self._array = array

    @cached_property
    def lengths(self) -> np.ndarray | None:
        return self._lengths(self._array) if self.ragged else None

    def _rows(self, start: int, stop: int) -> Any:
        return self._array.slice(start, stop - start)


def refuse_begun(size: int, path: Any, name: str) -> None:
    if size:
        raise StorageError(
            f"{name}: {path} is the output of a job that had not finished when it was copied. "
            "Copy it again once the job has."
        )


class ParquetColumn(Column):
    """A column of a Parquet file, or of all such files in a folder, by name one after another.

    A row group is decoded at a time, and the latest are kept for the next unit.
    """

    has_members = True

    def __init__(self, path: Any, column: str, name: str, of_any_type: bool = False) -> None:
        self._parquet = needed("pyarrow.parquet", f"{name}: Parquet")
        self._column, self._lock = column, threading.Lock()
        paths, self._files = self._parts(path, name)
        self._path = path.resolve() if isinstance(path, Path) else path
        if not paths:
            raise StorageError(f"{name}: there are no .parquet files in {path}.")
        self._groups: list[tuple[int, int]] = []  # file, and row group in it
        self._shapes: dict[int, list[int]] = {}  # of rows that lists do not tell the shape of
        starts, kind = [0], None
        for i, part in enumerate(paths):
            with (
                reading(f"{name}: {part}"),
                self._parquet.ParquetFile(self._readable(i)) as file,
            ):
                schema, metadata = file.schema_arrow, file.metadata
                if column not in schema.names:
                    none = f"there is no column {column!r} in {part}"
                    asked = none if column else "say which column is meant, after ':'"
                    raise ArgumentTypeError(
                        f"{name}: {asked}; there are: {', '.join(schema.names)}."
                    )
                if kind is not None and schema.field(column).type != kind:
                    raise StorageError(
                        f"{name}: the column is of type {schema.field(column).type} in {part}, and "
                        f"of type {kind} in the files before. All must have one type."
                    )
                kind = schema.field(column).type
                for row, sizes in told_shapes(schema.metadata, column).items():
                    self._shapes[starts[-1] + row] = sizes
                for group in range(metadata.num_row_groups):
                    self._groups.append((i, group))
                    starts.append(starts[-1] + metadata.row_group(group).num_rows)
        self._starts, self._kind = starts, kind
        self._kept: dict[int, Any] = {}
        super().__init__(name, starts[-1], kind, of_any_type)

    def _parts(self, path: Any, name: str) -> tuple[list[Any], list[Any]]:
        begun = path / BEGUN
        if begun.is_file():
            refuse_begun(begun.stat().st_size, path, name)
        paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        files = [Files(part, name) for part in paths]
        for one in files:
            one.count = len(files)
        return paths, files

    def would_hold(self, path: Any) -> bool:
        # Of a folder all: a new file in it, or a new folder that is named like one, would be read.
        return path == self._path or self._path in path.parents

    def _readable(self, i: int) -> Any:
        return self._files[i].path

    @cached_property
    def lengths(self) -> np.ndarray | None:
        """Of each row: found by reading the column once."""
        if not self.ragged:
            return None
        with reading(f"{self.name}: the lengths of rows"):
            parts = [self._lengths(self._decode(i)) for i in range(len(self._groups))]
        axes = (len(self.axes),) if isinstance(self.axes, tuple) else ()
        return self._told(np.concatenate([np.zeros((0, *axes), np.int64), *parts]), 0)

    def _told(self, lengths: np.ndarray, start: int) -> np.ndarray:
        for row in range(start, start + len(lengths)) if self._shapes else ():
            if row in self._shapes:
                lengths[row - start] = self._shapes[row]
        return lengths

    @property
    def all_files(self) -> Sequence[Any]:
        return self._files

    def origin(self) -> dict[str, Any]:
        files = [part.identity() for part in self._files]
        return {"files": files, "column": self._column}

    def _rows(self, start: int, stop: int) -> Any:
        parts = []
        for i in range(bisect_right(self._starts, start) - 1, len(self._groups)):
            begin = self._starts[i]
            if begin >= stop:
                break
            at = max(start - begin, 0)
            parts += self._group(i).slice(at, stop - begin - at).chunks
        return needed("pyarrow", self.name).chunked_array(parts, self._kind)

    def _group(self, i: int) -> Any:
        with self._lock:
            if i not in self._kept:
                while len(self._kept) >= _KEPT:
                    self._kept.pop(next(iter(self._kept)))
                self._kept[i] = self._decode(i)
            return self._kept[i]

    def _decode(self, i: int) -> Any:
        """A row group's part of the column."""
        part, group = self._groups[i]
        try:
            with self._parquet.ParquetFile(
                self._readable(part), page_checksum_verification=True
            ) as file:
                return file.read_row_group(group, [self._column], use_threads=False).column(
                    self._column
                )
        finally:  # of many files, the one that was read
            self._files[part].check()


class NpyFile(Source):
    """A .npy file, of which parts are read: whoever maps it is killed if somebody cuts it short."""

    gives_fresh = True

    def __init__(self, path: Path, member: str, name: str) -> None:
        self.files = Files(path, name)
        with reading(name), open(path, "rb") as file:
            self._layout = Layout.of(file)
        super().__init__(name, self._layout.shape, self._layout.dtype)

    def origin(self) -> dict[str, Any]:
        return self.files.identity()

    def get(self, index: Index) -> np.ndarray:
        axis, picked = len(index) - 1, index[-1] if index else slice(0, 1)
        with open(self.files.path, "rb", buffering=0) as file:
            return self._layout.read(file, axis, picked)


class NpzArray(InMemory):
    """An array of an .npz file. It is small, or is put into a file that can be read in parts."""

    has_members = True
    in_process = False  # who has the path reads it

    def __init__(self, path: Path, member: str, name: str) -> None:
        files = Files(path, name)
        with reading(name), np.load(path, allow_pickle=False) as archive:
            if member not in archive:
                raise _not_in(name, member, sorted(archive))
            array = archive[member]
        super().__init__(array, name, {**files.identity(), "member": member})


class Hdf5Dataset(Source):
    """A dataset in an HDF5 file, which is open while it is read and no longer."""

    has_members = True
    gives_fresh = True

    def __init__(self, path: Path, member: str, name: str) -> None:
        self._h5py = needed("h5py", f"{name}: HDF5")
        self._member, self._lock = member, threading.Lock()
        with reading(name), self._h5py.File(path, "r") as file:
            linked = linked_files(file, member, name)
            dataset = file.get(member)
            if not hasattr(dataset, "dtype"):
                datasets: list[str] = []
                file.visititems(lambda at, x: datasets.append(at) if hasattr(x, "dtype") else None)
                raise _not_in(name, member, datasets)
            shape, dtype = dataset.shape, dataset.dtype
        self.files = Files(path, name, linked)
        check_shape(shape, name)
        super().__init__(name, shape, dtype)

    def origin(self) -> dict[str, Any]:
        return {**self.files.identity(), "member": self._member}

    def get(self, index: Index) -> Any:
        with self._lock, self._h5py.File(self.files.path, "r") as file:
            return file[self._member][index]


class ZarrFolder(Source):
    """A Zarr array in a folder, of version 2 or 3. Chunks that are not there hold fill values.

    Its identity is that of all files in the folder.
    """

    has_members = True  # which are in folders
    gives_fresh = True

    def __init__(self, path: Path, member: str, name: str) -> None:
        tensorstore = needed("tensorstore", f"{name}: Zarr")
        path = path / member
        driver = zarr_format(path)
        if driver is None:
            raise StorageError(f"{name}: there is no Zarr array in {path}.")
        with reading(name):
            arrays = _arrays_of_group(path)
        if arrays is not None:
            raise StorageError(
                f"{name} is a group of Zarr arrays. Name one of them: "
                f"{', '.join(f'{path}/{array}' for array in arrays) or 'it has none'}."
            )
        self.files = Files(path, name)
        with reading(name):
            self._array = tensorstore.open(
                in_folder(driver, path), context=limited_context(), open=True, read=True
            ).result()
        super().__init__(name, self._array.shape, self._array.dtype.numpy_dtype)

    def origin(self) -> dict[str, Any]:
        return self.files.identity()

    def get(self, index: Index) -> Any:
        return self._array[index].read().result()


def _arrays_of_group(folder: Path) -> list[str] | None:
    """The names of the arrays in a group, or None if the folder is an array."""
    if (folder / ".zarray").exists():
        return None
    document = folder / "zarr.json"
    if document.exists() and json.loads(document.read_text()).get("node_type") != "group":
        return None
    names = []
    for child in sorted(folder.iterdir()):
        if zarr_format(child):
            inside = _arrays_of_group(child)
            names += [child.name] if inside is None else [f"{child.name}/{x}" for x in inside]
    return names


def _not_in(name: str, member: str, members: list[str]) -> ArgumentTypeError:
    listed = ", ".join(members) or "nothing"
    asked = (
        f"there is no {member!r}; there are" if member else "say which array is meant, after ':'"
    )
    return ArgumentTypeError(f"{name}: {asked}: {listed}.")
