"""Stores that write files: .npy, Zarr, and Parquet."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from batchax.datasets import objects
from batchax.datasets.addresses import Address, ObjectPath, needed, reading, reason
from batchax.datasets.disk import make_folder, replacing, writing
from batchax.datasets.formats import BEGUN, KeyValuesInMemory, Layout, in_folder
from batchax.datasets.objects import place_of
from batchax.datasets.plan import (
    ALONE,
    ENDLESS,
    ArrowArray,
    ArrowTable,
    Data,
    ForeignArray,
    Leaf,
    Rows,
    Unit,
)
from batchax.datasets.store import (
    Results,
    Store,
    called,
    make_place,
    part_of,
    reject_ragged,
)
from batchax.errors import ArgumentTypeError, JobError, StorageError
from batchax.jaxprs.types import Tree
from batchax.rows.converters import dense, from_dense, lists_of_rows, rows_of

_CANNOT = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}  # file systems without such a request


class NpyStore(Store):
    """Writes one array to a .npy file at computed offsets, without mapping it."""

    # It can grow, as NumPy's header has space for a larger number of rows.
    can_grow = stays = renamed = True

    def __init__(self, out: Path, *rest: Any) -> None:
        super().__init__(out, *rest)
        if len(self.leaves) != 1:
            names = ", ".join(repr(leaf.name) for leaf in self.leaves)
            raise ArgumentTypeError(
                f"{out} can hold one array, and the function returns {len(self.leaves)}: {names}. "
                f'Pass out="{out.with_suffix(".zarr")}", or a folder of Parquet files.'
                if names
                else f"{out} can hold one array, and the function returns none with rows. Remove "
                "out=: `reduced` of the report holds reduced results. To resume such a job, pass "
                f'out="{out.with_suffix(".zarr")}".'
            )
        reject_ragged(self.leaves, "a .npy file")
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
            self._write_header(self._leaf.of_rows(rows))
        super().end(rows)

    def _write_header(self, shape: tuple[int, ...]) -> None:
        header, offset, at = self._header(shape), self._layout().offset, self.at
        if len(header) != offset:
            raise StorageError(f"{at} has a header too short for the shape {shape}.")
        with writing(at), open(at, "r+b", buffering=0) as file:
            os.ftruncate(file.fileno(), Layout(shape, self._leaf.dtype, offset).size)
            os.fsync(file.fileno())
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

    def read(self, unit: Unit) -> list[Data]:
        layout, picked = self._layout(), slice(unit.start, unit.stop)
        rows = f"{self.out}: rows {unit.start} to {unit.stop}"
        with reading(rows), open(self.at, "rb", buffering=0) as file:
            return [layout.read(file, self._leaf.axis, picked)]

    def put(self, unit: Unit, results: Results) -> None:
        layout = self._layout()
        pieces = layout.pieces(np.asarray(results[0]), self._leaf.axis, unit.start)
        with writing(self.out), open(self.at, "r+b", buffering=0) as file:
            for offset, piece in pieces:
                _write_at(file.fileno(), piece, offset)
            os.fsync(file.fileno())

    def _layout(self) -> Layout:
        if not self.at.exists():
            raise StorageError(f"{self.out} is missing.")
        with reading(str(self.out)), open(self.at, "rb", buffering=0) as file:
            layout = Layout.of(file)
        expected = self._leaf.shape, self._leaf.dtype, False
        # One that grows may have any number of rows: none, or all at the end.
        shape = (0, *layout.shape[1:]) if self._leaf.grows else layout.shape
        if (shape, layout.dtype, layout.fortran) != expected:
            raise JobError(
                f"{self.out} holds {layout.dtype}{layout.shape}, and this job's results are "
                f"{self._leaf.dtype}{self._leaf.shape}: another program wrote it. Pass another "
                "out=."
            )
        return layout


def _take_space(file: int, size: int) -> None:
    # Reserve the space now, so that a full disk is found before anything is computed.
    try:
        os.posix_fallocate(file, 0, size)
    except (AttributeError, OSError) as error:  # a system, or a file system, without it
        if isinstance(error, OSError) and error.errno not in _CANNOT:
            raise
        os.ftruncate(file, size)


def _write_at(file: int, piece: memoryview, offset: int) -> None:
    while piece:
        count = os.pwrite(file, piece, offset)
        piece, offset = piece[count:], offset + count


_MEMORY = ObjectPath("memory", "any", "array")  # where an array is encoded and decoded
GROUP = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_OPTIONS = "codecs", "chunk_shape", "dimension_names"


class ZarrStore(Store):
    """Writes an array, or a group of arrays, to Zarr.

    A chunk is one unit's part of an array, with its crc32c.
    """

    # TensorStore encodes chunks in memory. The metadata (``zarr.json``) is written last, so a
    # partial array is not taken for a complete one. Chunks of zeros are written, too: a missing
    # chunk was not written.
    can_grow = stays = takes_options = True

    def __init__(self, out: Address, *rest: Any) -> None:
        super().__init__(out, *rest)
        self._tensorstore = needed("tensorstore", f"{out}: Zarr")
        in_folder("zarr3", out)  # which raises for a path that TensorStore could not read
        reject_ragged(self.leaves, "Zarr")
        self._check_names()
        self._given = self._options_of_arrays()
        self._chunk_shapes = {leaf.name: self._chunk_shape(leaf) for leaf in self.leaves}
        self._paths: list[Any] = [out / leaf.name for leaf in self.leaves]
        self._encoders = []  # of each leaf: where TensorStore writes its chunks, and the array
        for leaf in self.leaves:
            memory = KeyValuesInMemory()
            self._encoders.append((memory, self._open_chunks(leaf, memory)))

    def prepare(self) -> None:
        if self._puts is not None:
            return  # there are no folders, and the metadata comes last
        make_place(self.out, self.leaves)
        with replacing(self.out) as beside:
            for folder in (*self._groups(), *(leaf.name for leaf in self.leaves)):
                make_folder(beside / folder)

    def check(self) -> None:
        for path in (self.out, *self._paths):
            if isinstance(path, Path) and not path.is_dir():
                raise StorageError(f"{path} is missing.")
        self._check_documents(ended=False)

    def check_ended(self) -> None:
        self._check_documents(ended=True)

    def _check_documents(self, ended: bool) -> None:
        for path in self._group_paths:
            self._read_document(path, ended)
        for path, leaf in zip(self._paths, self.leaves, strict=True):
            document = self._read_document(path, ended)
            if document is not None:
                self._check_array(path, leaf, document)

    def _read_document(self, folder: Address, ended: bool) -> bytes | None:
        path = folder / "zarr.json"
        return self._read_file(path) if ended or place_of(path).exists(path) else None

    def _check_array(self, path: Address, leaf: Leaf, document: bytes) -> None:
        memory = KeyValuesInMemory()
        memory.put(f"{_MEMORY.key}/zarr.json", document)
        try:
            shape = None
            if leaf.grows:  # any number of rows
                shape = leaf.of_rows(json.loads(document)["shape"][leaf.axis])
            self._open(leaf, shape, memory, open=True)
        except Exception as error:
            raise JobError(
                f"{path} is not the array that this job made: {reason(error)} Choose another out=."
            ) from error

    def end(self, rows: int) -> None:
        for path, leaf in zip(self._paths, self.leaves, strict=True):
            memory = KeyValuesInMemory()
            self._open(leaf, leaf.of_rows(rows), memory, create=True)
            self._put_file(path / "zarr.json", memory.take(f"{_MEMORY.key}/zarr.json"))
        for group in reversed(self._group_paths):  # the outermost last
            self._put_file(group / "zarr.json", GROUP)

    def reopen(self) -> None:
        for path in (*self._group_paths, *self._paths):
            place_of(path).remove(path / "zarr.json")

    def clean(self) -> None:
        for path in (*self._paths, *self._group_paths):
            place_of(path).clean(path)

    def files_of(self, unit: Unit) -> list[Any]:
        return [
            path / chunk
            for path, leaf in zip(self._paths, self.leaves, strict=True)
            for chunk in self._chunks(leaf, unit)
        ]

    def _is_own(self, path: Address) -> bool:
        if path.parent in self._paths and re.fullmatch(r"c(\.\d+)*", path.name):
            return True
        left = r"zarr\.json|.*\.unfinished"  # or what killed writers left of it
        folders = [*self._paths, *self._group_paths]
        return path.parent in folders and re.fullmatch(left, path.name) is not None

    def _chunks(self, leaf: Leaf, unit: Unit) -> Iterator[str]:
        chunk = self._chunk_shapes[leaf.name]
        along = [range(-(-n // size)) for n, size in zip(leaf.shape, chunk, strict=True)]
        rows = chunk[leaf.axis]
        along[leaf.axis] = range(unit.start // rows, -(-unit.stop // rows))
        for place in itertools.product(*along):
            yield f"c.{'.'.join(map(str, place))}"

    def result(self) -> Tree:
        return self.each([str(path) for path in self._paths])

    def read(self, unit: Unit) -> list[Data]:
        results: list[Data] = []
        for path, leaf in zip(self._paths, self.leaves, strict=True):
            memory = KeyValuesInMemory()
            with reading(f"{self.out}: rows {unit.start} to {unit.stop}"):
                for chunk in self._chunks(leaf, unit):
                    memory.put(f"{_MEMORY.key}/{chunk}", self._read_file(path / chunk))
                rest = [slice(0, n) for n in leaf.shape[leaf.axis + 1 :]]
                chunked = self._open_chunks(leaf, memory)
                results.append(chunked[(*part_of(leaf, unit), *rest)].read().result())
        return results

    def put(self, unit: Unit, results: Results) -> None:
        parts = zip(self._paths, self.leaves, self._encoders, results, strict=True)
        for path, leaf, (memory, encoder), result in parts:
            x = np.asarray(result)
            sizes = _whole_chunks(x.shape, self._chunk_shapes[leaf.name])
            index = [slice(0, size) for size in sizes]
            index[leaf.axis] = slice(unit.start, unit.start + sizes[leaf.axis])
            if list(x.shape) != sizes:  # the last chunk is filled in part only
                x = np.pad(x, [(0, n - m) for n, m in zip(sizes, x.shape, strict=True)])
            encoder[tuple(index)].write(x).result()
            for chunk in self._chunks(leaf, unit):
                self._put_file(path / chunk, memory.take(f"{_MEMORY.key}/{chunk}"))

    def _open_chunks(self, leaf: Leaf, memory: KeyValuesInMemory) -> ForeignArray:
        """Opens the array with complete chunks only, before its metadata exists."""
        # TensorStore reads a chunk that extends past the array before it writes it.
        shape = leaf.of_rows(ENDLESS if leaf.grows else leaf.shape[leaf.axis])
        shape, given = _whole_chunks(shape, self._chunk_shapes[leaf.name]), self._given[leaf.name]
        try:
            return self._open(leaf, shape, memory, assume_metadata=True)
        except Exception as error:
            chunk = self._chunk_shapes[leaf.name]
            how = f" in chunks of shape {chunk} with store_options={given}" if given else ""
            raise ArgumentTypeError(
                f"{called(leaf)}, of dtype {leaf.dtype} and shape {leaf.shape}, cannot be written "
                f"to Zarr{how}: {reason(error)}"
            ) from error

    def _options_of_arrays(self) -> dict[str, dict[str, Any]]:
        """Merges options for all arrays with those under an array's name."""
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
        """Returns the shape of a chunk, which holds rows of one unit and is written whole."""
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
            fit = ", ".join([str(n) for n in range(1, unit + 1) if unit % n == 0][-4:])
            raise ArgumentTypeError(
                f"store_options: a chunk of {called(leaf)} has {rows} rows by chunk_shape={chunk}, "
                f"and {unit} rows are committed at once, so some chunks would have rows of two "
                f"commits. Use one of {fit} rows, or commit_rows= with a multiple of {rows}."
            )
        return chunk

    def _open(
        self, leaf: Leaf, shape: Sequence[int] | None, memory: KeyValuesInMemory, **how: bool
    ) -> ForeignArray:
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
        spec = in_folder("zarr3", _MEMORY, metadata=metadata, **missing, **how)
        return self._tensorstore.open(spec, context=memory.context).result()

    def _groups(self) -> list[PurePosixPath]:
        if [leaf.name for leaf in self.leaves] == [""]:
            return []
        above = (parent for leaf in self.leaves for parent in PurePosixPath(leaf.name).parents)
        return sorted({PurePosixPath("."), *above})

    @property
    def _group_paths(self) -> list[Any]:
        return [self.out / str(group) for group in self._groups()]

    def _check_names(self) -> None:
        names = [leaf.name for leaf in self.leaves]
        for leaf in self.leaves:
            parts = leaf.name.split("/")
            above = ["/".join(parts[:i]) for i in range(1, len(parts))]
            strange = "\\" in leaf.name or any(  # TensorStore takes that for a slash
                part in ("", ".", "..", "zarr.json") or part.startswith("__") for part in parts
            )
            if (strange and names != [""]) or any(name in names for name in above):
                others = "" if strange else f", next to {', '.join(map(repr, names))}"
                raise ArgumentTypeError(
                    f"{called(leaf)}: this cannot be the name of an array in a Zarr group{others}. "
                    "Choose another name."
                )


def _whole_chunks(shape: Sequence[int], chunk: Sequence[int]) -> list[int]:
    return [-(-n // size) * size for n, size in zip(shape, chunk, strict=True)]


class ParquetStore(Store):
    """Writes a column for each leaf, with a list for each row of non-scalar results.

    Axes of a result become lists of fixed size. Rows of different lengths become lists of any size,
    along the outermost axis.
    """

    # Pages carry checksums, and equal results make equal bytes. Object storage has no folders or
    # renames: there an object marks the output, and is not empty until the output is complete.
    can_grow = can_flatten = stays = renamed = takes_options = True

    def __init__(self, out: Address, *rest: Any) -> None:
        super().__init__(out, *rest)
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

    def _zeros(self, leaf: Leaf, rows: int) -> Data | ArrowArray:
        """Makes a result with so many rows, of which only shape and type matter."""
        if leaf.passed:
            return self._arrow.nulls(rows, leaf.passed)
        empty = np.zeros(leaf.of_rows(rows), leaf.dtype)
        return empty if leaf.ragged is None else leaf.without_elements(rows)

    def _try_options(self) -> None:
        """Writes a row in memory to check that the options keep the columns of the results."""
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
        if self._puts is not None:
            try:
                objects.put_new(self.out / BEGUN, _NOT_ALL)
            except FileExistsError:
                raise JobError(
                    f"{self.out / BEGUN} is there already, and nothing is ever written over. "
                    "Choose another out=, or delete it."
                ) from None
            return
        make_place(self.out)
        make_place(self.partial)
        make_folder(self.partial)

    def end(self, rows: int) -> None:
        if not any(leaf.shape[leaf.axis] or leaf.grows for leaf in self.leaves):
            # A table without rows has columns.
            self.put(Unit(0, 0, 0), [self._zeros(leaf, 0) for leaf in self.leaves])
        if self._puts is not None:
            self._put_file(self.out / BEGUN, b"")
        super().end(rows)

    def reopen(self) -> None:
        if self._puts is not None:
            self._put_file(self.out / BEGUN, _NOT_ALL)
        super().reopen()

    def check(self) -> None:
        if self._puts is not None:
            self._read_file(self.out / BEGUN)
        elif not self.at.is_dir():
            raise StorageError(f"{self.out} is missing.")

    def files_of(self, unit: Unit) -> list[Any]:
        return [self._part(unit)]

    def _is_own(self, path: Address) -> bool:
        own = r"part-\d{8}\.parquet|_begun|\..*\.unfinished"
        return path.parent == self.at and re.fullmatch(own, path.name) is not None

    def clean(self) -> None:
        place_of(self.at).clean(self.at)

    def result(self) -> Tree:
        return self.each([f"{self.out}:{column}" for column in self._columns])

    def read(self, unit: Unit) -> list[Data]:
        part = self._part(unit)
        with reading(str(part)):
            content = io.BytesIO(self._read_file(part))
            with self._parquet.ParquetFile(content, page_checksum_verification=True) as file:
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
        self._put_file(self._part(unit), self._encoded(self._table(results)))

    def _table(self, results: Results) -> ArrowTable:
        arrays = [_to_column(*pair) for pair in zip(self.leaves, results, strict=True)]
        return self._arrow.table(arrays, names=self._columns)

    def _encoded(self, table: ArrowTable) -> bytes:
        file, rows = io.BytesIO(), max(1, table.num_rows)
        how = {**_WRITTEN, "row_group_size": rows, **self.options}
        self._parquet.write_table(table, file, **how)
        return file.getvalue()

    def _part(self, unit: Unit) -> Address:
        return self.at / f"part-{unit.number:08d}.parquet"


_NOT_ALL = b"not all of these rows are done\n"
_WRITTEN = {"use_dictionary": False, "write_page_checksum": True, "compression": "none"}


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _to_column(leaf: Leaf, result: Data) -> ArrowArray:
    if leaf.passed:
        return result
    if isinstance(result, Rows):
        return lists_of_rows(*result)
    return from_dense(np.ascontiguousarray(np.moveaxis(result, leaf.axis, 0)))


def _from_column(leaf: Leaf, name: str, table: ArrowTable, part: str) -> Data:
    column = table.column(name).combine_chunks()
    if leaf.passed:
        return column
    if leaf.ragged is None:
        return np.array(np.moveaxis(dense(column, part), 0, leaf.axis), leaf.dtype, order="C")
    data, lengths = rows_of(column, part)
    return Rows(np.array(data, leaf.dtype), lengths)
