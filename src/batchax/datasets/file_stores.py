"""Stores that write files: .npy, Zarr, and Parquet."""

from __future__ import annotations

import contextlib
import errno
import inspect
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from batchax.datasets.addresses import ObjectPath, needed, reading, reason
from batchax.datasets.disk import (
    AFTER_WRITE,
    BEFORE_WRITE,
    IN_WRITE,
    make_folder,
    reached,
    remove_unfinished,
    replace_file,
    replacing,
    writing,
)
from batchax.datasets.files import (
    SHAPES,
    KeyValuesInMemory,
    Layout,
    in_folder,
    limited_context,
    told_shapes,
)
from batchax.datasets.objects import place_of
from batchax.datasets.plan import ALONE, ENDLESS, Leaf, Rows, Unit
from batchax.datasets.store import (
    Results,
    Store,
    called,
    make_place,
    part_of,
    refuse_ragged,
)
from batchax.errors import ArgumentTypeError, JobError, StorageError
from batchax.rows import arrow

_CANNOT = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}  # file systems without such a request


class NpyStore(Store):
    """One array. Rows are written at their places; the file is never mapped to memory.

    NumPy leaves room in the header for a larger number of rows, and so a file can grow.
    """

    can_grow = stays = renamed = True

    def __init__(self, out: Path, leaves: Sequence[Leaf], unit_rows: int) -> None:
        super().__init__(out, leaves, unit_rows)
        if len(self.leaves) != 1:
            names = ", ".join(repr(leaf.name) for leaf in self.leaves)
            raise ArgumentTypeError(
                f"{out} can hold one array, and the function returns "
                f"{f'{len(self.leaves)}: {names}' if names else 'none with rows'}. "
                'Use out="scores.zarr", or a folder of Parquet files.'
            )
        refuse_ragged(self.leaves, "a .npy file")
        (self._leaf,) = self.leaves
        if self._leaf.grows and self._leaf.axis:
            raise ArgumentTypeError(
                f"{called(self._leaf)} has its rows along axis {self._leaf.axis}, and a .npy file "
                'that grows (of a stream, or by resume="extend") grows along axis 0. Leave out '
                "out_axes, or use "
                'out="scores.zarr".'
            )
        if self._leaf.dtype.kind not in "biufc" or self._leaf.dtype.isbuiltin != 1:
            raise ArgumentTypeError(
                f"{called(self._leaf)} is of dtype {self._leaf.dtype}, which .npy files do not "
                'have. Use out="scores.zarr", or return it as float32.'
            )

    def prepare(self) -> None:
        make_place(self.out, self.leaves)
        make_place(self.partial)
        with replacing(self.partial) as beside, open(beside, "xb") as file:
            file.write(self._header(self._leaf.shape))
            file.flush()
            size = Layout(self._leaf.shape, self._leaf.dtype, file.tell()).size
            _take_space(file.fileno(), size)

    def end(self, rows: int) -> None:
        if self._leaf.grows:
            self._end_growing(rows)
        super().end(rows)

    def _end_growing(self, rows: int) -> None:
        header, shape = self._header(self._leaf.of_rows(rows)), self._leaf.of_rows(rows)
        offset, at = self._layout().offset, self.at
        if len(header) != offset:
            raise StorageError(f"{at} has no room in its header for {rows} rows.")
        with writing(at), open(at, "r+b", buffering=0) as file:
            os.ftruncate(file.fileno(), Layout(shape, self._leaf.dtype, offset).size)
            os.fsync(file.fileno())
            reached(BEFORE_WRITE)
            _write_at(file.fileno(), memoryview(header), 0)  # in one call, and in one sector
            os.fsync(file.fileno())

    def _header(self, shape: tuple[int, ...]) -> bytes:
        file = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(self._leaf.dtype)
        header = {"shape": shape, "fortran_order": False, "descr": descr}
        np.lib.format.write_array_header_1_0(file, header)
        return file.getvalue()

    def check(self) -> None:
        self._layout()

    def result(self) -> str:
        return str(self.out)

    def read(self, unit: Unit) -> list[np.ndarray | Rows]:
        layout, picked = self._layout(), slice(unit.start, unit.stop)
        rows = f"{self.out}: rows {unit.start} to {unit.stop}"
        with reading(rows), open(self.at, "rb", buffering=0) as file:
            return [layout.read(file, self._leaf.axis, picked)]

    def put(self, unit: Unit, results: Results) -> None:
        layout = self._layout()
        pieces = layout.pieces(np.asarray(results[0]), self._leaf.axis, unit.start)
        reached(BEFORE_WRITE)
        with writing(self.out), open(self.at, "r+b", buffering=0) as file:
            for i, (offset, piece) in enumerate(pieces):
                if i == 1:
                    reached(IN_WRITE)
                _write_at(file.fileno(), piece, offset)
            os.fsync(file.fileno())
        reached(AFTER_WRITE)

    def _layout(self) -> Layout:
        if not self.at.exists():
            raise StorageError(f"{self.out} is missing.")
        with reading(str(self.out)), open(self.at, "rb") as file:
            layout = Layout.of(file)
        expected = self._leaf.shape, self._leaf.dtype, False
        # Of one that grows, any number of rows will do: none, or all that there were in the end.
        shape = (0, *layout.shape[1:]) if self._leaf.grows else layout.shape
        if (shape, layout.dtype, layout.fortran) != expected:
            raise JobError(
                f"{self.out} holds {layout.dtype}{layout.shape}, and this job's results are "
                f"{self._leaf.dtype}{self._leaf.shape}: another program wrote it. Pass another "
                "out=."
            )
        return layout


def _take_space(file: int, size: int) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except AttributeError:
        os.ftruncate(file, size)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        os.ftruncate(file, size)


def _write_at(file: int, piece: memoryview, offset: int) -> None:
    while piece:
        count = os.pwrite(file, piece, offset)
        piece, offset = piece[count:], offset + count


_ANYWHERE = ObjectPath("memory", "any", "array")
_OWN = re.compile(r"zarr\.json|.*\.(unfinished|__lock)")  # or what killed writers left of them
GROUP = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_OPTIONS = "codecs", "chunk_shape", "dimension_names"


class ZarrStore(Store):
    """An array, or a group of them. A chunk is what one unit has of an array, with its crc32c.

    The documents that say what is where (``zarr.json``) are written last, so nobody takes a part of
    an array for one. TensorStore writes a chunk beside the one that it is to be, syncs it, renames
    it and syncs the folder. A chunk that is not there was not written: those of zeros are, too.
    """

    can_grow = stays = takes_options = True

    def __init__(
        self, out: Path, leaves: Sequence[Leaf], unit_rows: int, options: Any = None
    ) -> None:
        super().__init__(out, leaves, unit_rows, options)
        self._tensorstore = needed("tensorstore", f"{out}: Zarr")
        refuse_ragged(self.leaves, "Zarr")
        self._check_names()
        self._given = self._options_of_arrays()
        self._chunk_shapes = {leaf.name: self._chunk_shape(leaf) for leaf in self.leaves}
        self._paths: list[Any] = [out / leaf.name for leaf in self.leaves]
        self._chunked = [self._open_chunks(*x) for x in zip(self._paths, self.leaves, strict=True)]

    def prepare(self) -> None:
        make_place(self.out, self.leaves)
        with replacing(self.out) as beside:
            for folder in (*self._groups(), *(leaf.name for leaf in self.leaves)):
                make_folder(beside / folder)

    def check(self) -> None:
        for path in (self.out, *self._paths):
            if not path.is_dir():
                raise StorageError(f"{path} is missing.")
        self._check_documents(ended=False)

    def check_ended(self) -> None:
        self._check_documents(ended=True)

    def _check_documents(self, ended: bool) -> None:
        for path in self._groups():
            self._read_document(self.out / str(path), ended)
        for path, leaf in zip(self._paths, self.leaves, strict=True):
            document = self._read_document(path, ended)
            if document is not None:
                self._check_array(path, leaf, document)

    def _read_document(self, folder: Any, ended: bool) -> bytes | None:
        path = folder / "zarr.json"
        try:
            return place_of(path).read(path)
        except FileNotFoundError:
            if ended:
                raise StorageError(f"{path} is missing.") from None
            return None

    def _check_array(self, path: Any, leaf: Leaf, document: bytes) -> None:
        memory = KeyValuesInMemory()
        memory.put(f"{_ANYWHERE.key}/zarr.json", document)
        try:
            shape = None
            if leaf.grows:  # whatever there were in the end
                shape = leaf.of_rows(json.loads(document)["shape"][leaf.axis])
            self._open(_ANYWHERE, leaf, shape, memory.context, open=True)
        except Exception as error:
            raise JobError(
                f"{path} is not the array that this job made: {reason(error)} Choose another out=."
            ) from error

    def end(self, rows: int) -> None:
        for path, leaf in zip(self._paths, self.leaves, strict=True):
            self._put_document(path / "zarr.json", self._document(leaf, rows))
        for group in reversed(self._groups()):  # the outermost last
            self._put_document(self.out / str(group) / "zarr.json", GROUP)

    def reopen(self) -> None:
        for path in (*(self.out / str(group) for group in self._groups()), *self._paths):
            place_of(path).remove(path / "zarr.json")

    def clean(self) -> None:
        for path in (*self._paths, *(self.out / group for group in self._groups())):
            remove_unfinished(path)  # of a document

    def _document(self, leaf: Leaf, rows: int) -> bytes:
        memory = KeyValuesInMemory()
        self._open(_ANYWHERE, leaf, leaf.of_rows(rows), memory.context, create=True)
        (document,) = memory.all().values()
        return document

    def _put_document(self, path: Any, document: bytes) -> None:
        replace_file(path, document)

    def files_of(self, unit: Unit) -> list[Path]:
        return [
            path / chunk
            for path, leaf in zip(self._paths, self.leaves, strict=True)
            for chunk in self._chunks(leaf, unit)
        ]

    def _is_own(self, path: Any) -> bool:
        if path.parent in self._paths and re.fullmatch(r"c(\.\d+)*", path.name):
            return True
        folders = [*self._paths, *(self.out / str(group) for group in self._groups())]
        return path.parent in folders and _OWN.fullmatch(path.name) is not None

    def _chunks(self, leaf: Leaf, unit: Unit) -> Iterator[str]:
        """The names of the chunks that hold a unit; of rows without elements there are none."""
        chunk = self._chunk_shapes[leaf.name]
        along = [range(-(-n // size)) for n, size in zip(leaf.shape, chunk, strict=True)]
        rows = chunk[leaf.axis]
        along[leaf.axis] = range(unit.start // rows, -(-unit.stop // rows))
        for place in itertools.product(*along):
            yield f"c.{'.'.join(map(str, place))}"

    def result(self) -> Any:
        return self.each([str(path) for path in self._paths])

    def read(self, unit: Unit) -> list[np.ndarray | Rows]:
        with reading(f"{self.out}: rows {unit.start} to {unit.stop}"):
            parts = zip(self.leaves, self._chunked, strict=True)
            return [_read_part(chunked, leaf, unit) for leaf, chunked in parts]

    def put(self, unit: Unit, results: Results) -> None:
        reached(BEFORE_WRITE)
        with _writing(self.out):
            futures = []
            for leaf, chunked, result in zip(self.leaves, self._chunked, results, strict=True):
                future = self._begin_to_write(chunked, leaf, unit, result)
                future.commit.force()
                futures.append(future)
            reached(IN_WRITE)
            for future in futures:
                future.result()
        reached(AFTER_WRITE)

    def _begin_to_write(self, chunked: Any, leaf: Leaf, unit: Unit, result: Any) -> Any:
        result, chunk = np.asarray(result), self._chunk_shapes[leaf.name]
        sizes = _whole_chunks(result.shape, chunk)
        index = [slice(0, size) for size in sizes]
        index[leaf.axis] = slice(unit.start, unit.start + sizes[leaf.axis])
        return chunked[tuple(index)].write(
            _padded(result, sizes), can_reference_source_data_indefinitely=True
        )

    def _open_chunks(self, path: Any, leaf: Leaf, context: Any = None) -> Any:
        """The array with all chunks whole, before it is there.

        A chunk that sticks out of the array is else read before it is written, and cannot be
        written if it is damaged.
        """
        shape = leaf.of_rows(ENDLESS if leaf.grows else leaf.shape[leaf.axis])
        shape, given = _whole_chunks(shape, self._chunk_shapes[leaf.name]), self._given[leaf.name]
        try:
            return self._open(path, leaf, shape, context, assume_metadata=True)
        except Exception as error:
            chunk = self._chunk_shapes[leaf.name]
            how = f" in chunks of shape {chunk} with store_options={given}" if given else ""
            raise ArgumentTypeError(
                f"{called(leaf)}, of dtype {leaf.dtype} and shape {leaf.shape}, cannot be written "
                f"to Zarr{how}: {reason(error)}"
            ) from error

    def _options_of_arrays(self) -> dict[str, dict[str, Any]]:
        """The options of each array: those of all, and those under its name."""
        own = {name: x for name, x in self.options.items() if isinstance(x, dict)}
        shared = {name: x for name, x in self.options.items() if name not in own}
        names = [leaf.name for leaf in self.leaves if leaf.name]
        more = f", and a dict of these for an array: {', '.join(names)}" if names else ""
        self._check_options(shared, _OPTIONS, more)
        self._check_options(own, [*_OPTIONS, *names])
        for each in own.values():
            self._check_options(each, _OPTIONS)
        return {leaf.name: {**shared, **own.get(leaf.name, {})} for leaf in self.leaves}

    def _chunk_shape(self, leaf: Leaf) -> list[int]:
        """The shape of a chunk. It has rows of one unit, so it is written whole."""
        whole = [max(1, size) for size in leaf.shape]
        whole[leaf.axis] = unit = self.unit_rows
        chunk = self._given[leaf.name].get("chunk_shape", whole)
        sizes = isinstance(chunk, list) and all(type(n) is int and n > 0 for n in chunk)
        if not sizes or len(chunk) != len(leaf.shape):
            raise ArgumentTypeError(
                f"store_options: chunk_shape={chunk} must be a positive int for each axis of "
                f"{called(leaf)}, whose shape is {leaf.shape}."
            )
        rows, several = chunk[leaf.axis], leaf.grows or leaf.shape[leaf.axis] > unit
        if several and unit % rows:
            *most, last = [str(n) for n in range(1, unit + 1) if unit % n == 0][-4:]
            fit = f"{', '.join(most)} or {last}" if most else last
            raise ArgumentTypeError(
                f"store_options: a chunk of {called(leaf)} has {rows} rows by chunk_shape={chunk}, "
                f"and {unit} rows are committed at once, so some chunks would have rows of two "
                f"commits. Use {fit} rows, or commit_rows= with a multiple of {rows}."
            )
        return chunk

    def _open(
        self, path: Any, leaf: Leaf, shape: Any = None, context: Any = None, **how: bool
    ) -> Any:
        chunk, given = self._chunk_shapes[leaf.name], self._given[leaf.name]
        names = given.get("dimension_names", leaf.dimension_names if leaf.rows_name else None)
        metadata = {
            "shape": list(leaf.shape if shape is None else shape),
            "data_type": str(leaf.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            # All chunks in one folder, which is there from the beginning: a folder that is made
            # for a chunk would have to be synced, too.
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": given.get("codecs", _CODECS),
            **({} if names is None else {"dimension_names": names}),
        }
        missing = {"store_data_equal_to_fill_value": True, "fill_missing_data_reads": False}
        spec = in_folder("zarr3", path, metadata=metadata, **missing, **how)
        return self._tensorstore.open(spec, context=context or limited_context()).result()

    def _groups(self) -> list[PurePosixPath]:
        if [leaf.name for leaf in self.leaves] == [""]:
            return []
        above = (parent for leaf in self.leaves for parent in PurePosixPath(leaf.name).parents)
        return sorted({PurePosixPath("."), *above})

    def _check_names(self) -> None:
        """Raises an ArgumentTypeError if a name cannot be a path in a group of Zarr's."""
        names = [leaf.name for leaf in self.leaves]
        for leaf in self.leaves:
            parts = leaf.name.split("/")
            above = ["/".join(parts[:i]) for i in range(1, len(parts))]
            strange = "\\" in leaf.name or any(  # TensorStore takes that for a slash
                part in ("", ".", "..", "zarr.json") or part.startswith("__") for part in parts
            )
            if (strange and names != [""]) or any(name in names for name in above):
                raise ArgumentTypeError(
                    f"{called(leaf)}: this cannot be the name of an array in a Zarr group, beside "
                    f"{', '.join(map(repr, names))}. Pass it another name."
                )


def _whole_chunks(shape: Sequence[int], chunk: Sequence[int]) -> list[int]:
    """The shape of the chunks that hold an array of that shape."""
    return [-(-n // size) * size for n, size in zip(shape, chunk, strict=True)]


def _padded(result: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Whole chunks, the last of which results fill in part only."""
    if list(result.shape) == sizes:
        return result
    return np.pad(result, [(0, n - m) for n, m in zip(sizes, result.shape, strict=True)])


def _read_part(chunked: Any, leaf: Leaf, unit: Unit) -> np.ndarray:
    rest = [slice(0, n) for n in leaf.shape[leaf.axis + 1 :]]
    return chunked[(*part_of(leaf, unit), *rest)].read().result()


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Errors of TensorStore become what `writing` knows: it tells of the system's in words only."""
    codes = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM
    with writing(out):
        try:
            yield
        except ValueError as error:
            code = next((code for code in codes if os.strerror(code) in str(error)), errno.EIO)
            raise OSError(code, os.strerror(code) if code in codes else reason(error)) from error


class ParquetStore(Store):
    """A column for each leaf, with a list for each row where a result is no number.

    Axes of a result become lists of a fixed size. Rows of different lengths become lists of any
    size, with the axis along which these differ as the outermost, or lists of lists, of those axes.
    Where lists do not tell the shape of a row, the schema's metadata does. Pages carry checksums.
    The same results make the same bytes.
    """

    can_grow = can_flatten = stays = renamed = takes_options = True

    def __init__(
        self, out: Path, leaves: Sequence[Leaf], unit_rows: int, options: Any = None
    ) -> None:
        super().__init__(out, leaves, unit_rows, options)
        self._parquet = needed("pyarrow.parquet", f"{out}: Parquet")
        self._arrow = needed("pyarrow", f"{out}: Parquet")
        for leaf in self.leaves:
            number = leaf.dtype.kind in "biuf" and leaf.dtype.isbuiltin == 1
            if leaf.passed:
                continue
            if not number or 0 in leaf.shape[: leaf.axis] + leaf.shape[leaf.axis + 1 :]:
                raise ArgumentTypeError(
                    f"{called(leaf)} is of dtype {leaf.dtype} and shape {leaf.shape}, for which "
                    'Parquet has no form. Use out="scores.zarr", or return something else.'
                )
        self._columns = [leaf.name or ALONE for leaf in self.leaves]
        if self.options and not any(isinstance(leaf.passed, str) for leaf in self.leaves):
            self._try_options()

    def _zeros(self, leaf: Leaf, rows: int) -> Any:
        """So many rows, of which only the shapes and types matter."""
        if leaf.passed:
            return self._arrow.nulls(rows, leaf.passed)
        empty = np.zeros(leaf.of_rows(rows), leaf.dtype)
        return empty if leaf.ragged is None else leaf.without_elements(rows)

    def _try_options(self) -> None:
        """Writes a row in memory, to see that it is written and read as the results are."""
        parameters = inspect.signature(self._parquet.ParquetWriter.__init__).parameters
        mine = ["self", "where", "schema", "filesystem", "options"]
        self._check_options(
            self.options, ["row_group_size", *(n for n in parameters if n not in mine)]
        )
        row = self._table([self._zeros(leaf, 1) for leaf in self.leaves])
        try:
            schema = self._parquet.read_schema(io.BytesIO(self._encoded(row)))
        except Exception as error:
            raise ArgumentTypeError(
                f"store_options={self.options}: Parquet files cannot be written so: {reason(error)}"
            ) from error
        if schema != row.schema:
            raise ArgumentTypeError(
                f"store_options={self.options}: files would have other columns than the results "
                f"have: {_listed(schema)} instead of {_listed(row.schema)}. Leave out the option "
                "that changes them."
            )

    def prepare(self) -> None:
        make_place(self.out)
        make_place(self.partial)
        make_folder(self.partial)

    def end(self, rows: int) -> None:
        self._put_columns()
        super().end(rows)

    def _put_columns(self) -> None:
        """Of no rows, a file that has the columns."""
        if not any(leaf.shape[leaf.axis] or leaf.grows for leaf in self.leaves):
            # A table without rows has columns.
            self.put(Unit(0, 0, 0), [self._zeros(leaf, 0) for leaf in self.leaves])

    def check(self) -> None:
        if not self.at.is_dir():
            raise StorageError(f"{self.out} is missing.")

    def files_of(self, unit: Unit) -> list[Path]:
        return [self._part(unit)]

    def _is_own(self, path: Any) -> bool:
        own = r"part-\d{8}\.parquet|_begun|\..*\.unfinished"
        return path.parent == self.at and re.fullmatch(own, path.name) is not None

    def clean(self) -> None:
        remove_unfinished(self.at)

    def result(self) -> Any:
        return self.each([f"{self.out}:{column}" for column in self._columns])

    def read(self, unit: Unit) -> list[np.ndarray | Rows]:
        part = self._part(unit)
        with (
            reading(str(part)),
            self._parquet.ParquetFile(
                self._readable(part), page_checksum_verification=True
            ) as file,
        ):
            table = file.read(use_threads=False)
            rows = table.num_rows if any(x.flat for x in self.leaves) else unit.rows
            if table.num_rows != rows or table.column_names != self._columns:
                raise StorageError(
                    f"{part} has {table.num_rows} rows of {', '.join(table.column_names)}, and "
                    f"{unit.rows} of {', '.join(self._columns)} were written."
                )
            try:
                return [
                    _from_column(leaf, name, table, str(part))
                    for leaf, name in zip(self.leaves, self._columns, strict=True)
                ]
            except ArgumentTypeError as error:  # of other types than were written
                raise StorageError(f"{part} is damaged: {error}") from error

    def put(self, unit: Unit, results: Results) -> None:
        self._replace(self._part(unit), self._encoded(self._table(results)))

    def _table(self, results: Results) -> Any:
        arrays = [_to_column(*pair) for pair in zip(self.leaves, results, strict=True)]
        table = self._arrow.table(arrays, names=self._columns)
        shapes = dict(zip(self._columns, map(_untold_shapes, results), strict=True))
        if any(shapes.values()):
            table = table.replace_schema_metadata({SHAPES: json.dumps(shapes)})
        return table

    def _encoded(self, table: Any) -> bytes:
        file, rows = io.BytesIO(), max(1, table.num_rows)
        how = {**_WRITTEN, "row_group_size": rows, **self.options}
        self._parquet.write_table(table, file, **how)
        return file.getvalue()

    def _replace(self, part: Any, content: bytes) -> None:
        replace_file(part, content)

    def _readable(self, part: Any) -> Any:
        return part

    def _part(self, unit: Unit) -> Any:
        return self.at / f"part-{unit.number:08d}.parquet"


_WRITTEN = {"use_dictionary": False, "write_page_checksum": True, "compression": "none"}


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _to_column(leaf: Leaf, result: np.ndarray | Rows) -> Any:
    if leaf.passed:
        return result
    if isinstance(result, Rows):
        return arrow.from_rows(*result)
    return arrow.from_dense(np.ascontiguousarray(np.moveaxis(result, leaf.axis, 0)))


def _untold_shapes(result: np.ndarray | Rows) -> dict[int, list[int]]:
    if not isinstance(result, Rows):
        return {}
    return {int(row): result.lengths[row].tolist() for row in arrow.untold(result.lengths)}


def _from_column(leaf: Leaf, name: str, table: Any, part: str) -> np.ndarray | Rows:
    column = table.column(name).combine_chunks()
    if leaf.passed:
        return column
    if leaf.ragged is None:
        return np.array(np.moveaxis(arrow.dense(column, part), 0, leaf.axis), leaf.dtype, order="C")
    data, lengths = arrow.rows_of(column, part)
    for row, sizes in told_shapes(table.schema.metadata, name).items():
        lengths[row] = sizes
    return Rows(np.array(data, leaf.dtype), lengths)
