"""Columns of tables: arrays of Arrow, and Parquet files.

Numbers are an array, lists of one size its further axes; lists of any size are rows of different
lengths, lists of such lists rows that are so along several axes.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from batchax.datasets.failures import needed, reading
from batchax.datasets.known_files import Files
from batchax.datasets.parts import Rows
from batchax.datasets.source import Index, Source
from batchax.errors import ArgumentTypeError, StorageError
from batchax.rows.arrow import dense, is_lists, rows_of

_KEPT = 2  # row groups: a unit may need the end of one and the beginning of the next


BEGUN = "_begun"
"""In a folder of a store of objects, whose name cannot change: says something until all is done."""

SHAPES = b"batchax.shapes"
"""In a schema's metadata: of rows of a column, by number in the file, lengths along each axis."""


def told_shapes(metadata: Any, column: str) -> dict[int, list[int]]:
    """What a file says of rows whose shape lists of lists do not tell (`arrow.untold`)."""
    told = json.loads((metadata or {}).get(SHAPES, b"{}"))
    return {int(row): sizes for row, sizes in told.get(column, {}).items()}


class Column(Source):
    """A column of a table: rows lie along axis 0, and are cheap to pick there alone."""

    lends = True

    def __init__(self, name: str, rows: int, kind: Any) -> None:
        arrow = needed("pyarrow", name)
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

    def _told(self, lengths: np.ndarray, start: int) -> np.ndarray:
        """Lengths of rows from `start` on, where something tells what lists do not."""
        return lengths

    def _rows(self, start: int, stop: int) -> Any:
        """Those rows, as an array of Arrow."""
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


class ArrowColumn(Column):
    """An array of Arrow, chunked or not, in memory or mapped: it is converted a part at a time."""

    def __init__(self, array: Any, name: str) -> None:
        super().__init__(name, len(array), array.type)
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

    def __init__(self, path: Any, column: str, name: str) -> None:
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
        super().__init__(name, starts[-1], kind)

    def _parts(self, path: Any, name: str) -> tuple[list[Any], list[Any]]:
        """The files, and what is known of each."""
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
        """The file with this number, for PyArrow."""
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
