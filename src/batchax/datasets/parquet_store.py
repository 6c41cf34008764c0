"""Results in a folder of Parquet files, one for each unit."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from batchax.datasets.columns import SHAPES, told_shapes
from batchax.datasets.durable import make_folder, remove_unfinished, replace_file
from batchax.datasets.failures import needed, reading
from batchax.datasets.parts import Leaf, Rows, Unit
from batchax.datasets.store import Results, Store, called, make_place
from batchax.errors import ArgumentTypeError, StorageError
from batchax.rows import arrow


class ParquetStore(Store):
    """A column for each leaf, with a list for each row where a result is no number.

    Axes of a result become lists of a fixed size. Rows of different lengths become lists of any
    size, with the axis along which these differ as the outermost, or lists of lists, of those axes.
    Where lists do not tell the shape of a row, the schema's metadata does. Pages carry checksums.
    The same results make the same bytes.
    """

    can_grow = stays = renamed = True

    def __init__(self, out: Path, leaves: Sequence[Leaf], unit_rows: int) -> None:
        super().__init__(out, leaves, unit_rows)
        self._parquet = needed("pyarrow.parquet", f"{out}: Parquet")
        self._arrow = needed("pyarrow", f"{out}: Parquet")
        for leaf in self.leaves:
            number = leaf.dtype.kind in "biuf" and leaf.dtype.isbuiltin == 1
            if not number or 0 in leaf.shape[: leaf.axis] + leaf.shape[leaf.axis + 1 :]:
                raise ArgumentTypeError(
                    f"{called(leaf)} is of dtype {leaf.dtype} and shape {leaf.shape}, for which "
                    'Parquet has no form. Use out="scores.zarr", or return something else.'
                )
        self._columns = [leaf.name or "result" for leaf in self.leaves]

    def prepare(self) -> None:
        make_place(self.out)
        make_place(self.partial)
        make_folder(self.partial)

    def end(self, rows: int) -> None:
        self._put_columns()
        super().end(rows)

    def _put_columns(self) -> None:
        """Of no rows, a file that has the columns."""
        nothing = list(map(_of_no_rows, self.leaves))
        if all(x is not None for x in nothing):  # a table without rows has columns
            self.put(Unit(0, 0, 0), nothing)

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
            if table.num_rows != unit.rows or table.column_names != self._columns:
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
        arrays = [_to_column(*pair) for pair in zip(self.leaves, results, strict=True)]
        table, file = self._arrow.table(arrays, names=self._columns), io.BytesIO()
        shapes = dict(zip(self._columns, map(_untold_shapes, results), strict=True))
        if any(shapes.values()):
            table = table.replace_schema_metadata({SHAPES: json.dumps(shapes)})
        self._parquet.write_table(
            table,
            file,
            row_group_size=max(1, unit.rows),
            use_dictionary=False,
            write_page_checksum=True,
            compression="none",
        )
        self._replace(self._part(unit), file.getvalue())

    def _replace(self, part: Any, content: bytes) -> None:
        replace_file(part, content)

    def _readable(self, part: Any) -> Any:
        """What PyArrow reads."""
        return part

    def _part(self, unit: Unit) -> Any:
        return self.at / f"part-{unit.number:08d}.parquet"


def _of_no_rows(leaf: Leaf) -> Any:
    """What there is of a result of no rows; None if there are some."""
    if leaf.shape[leaf.axis] or leaf.grows:
        return None
    empty = np.zeros(leaf.shape, leaf.dtype)
    return empty if leaf.ragged is None else leaf.without_elements(0)


def _to_column(leaf: Leaf, result: np.ndarray | Rows) -> Any:
    if isinstance(result, Rows):
        return arrow.from_rows(*result)
    return arrow.from_dense(np.ascontiguousarray(np.moveaxis(result, leaf.axis, 0)))


def _untold_shapes(result: np.ndarray | Rows) -> dict[int, list[int]]:
    if not isinstance(result, Rows):
        return {}
    return {int(row): result.lengths[row].tolist() for row in arrow.untold(result.lengths)}


def _from_column(leaf: Leaf, name: str, table: Any, part: str) -> np.ndarray | Rows:
    column = table.column(name).combine_chunks()
    if leaf.ragged is None:
        return np.array(np.moveaxis(arrow.dense(column, part), 0, leaf.axis), leaf.dtype, order="C")
    data, lengths = arrow.rows_of(column, part)
    for row, sizes in told_shapes(table.schema.metadata, name).items():
        lengths[row] = sizes
    return Rows(np.array(data, leaf.dtype), lengths)
