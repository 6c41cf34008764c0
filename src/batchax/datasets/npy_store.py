"""Results in a .npy file, whose space is taken before there are any."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from batchax.datasets.durable import replacing, writing
from batchax.datasets.failures import reading
from batchax.datasets.npy_layout import Layout
from batchax.datasets.parts import Leaf, Rows, Unit
from batchax.datasets.steps import AFTER_WRITE, BEFORE_WRITE, IN_WRITE, reached
from batchax.datasets.store import (
    Results,
    Store,
    called,
    make_place,
    refuse_ragged,
)
from batchax.errors import ArgumentTypeError, JobError, StorageError

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
                f"{called(self._leaf)} of a stream has its rows along axis {self._leaf.axis}, and "
                "a .npy file grows along axis 0 alone. Leave out out_axes, or use "
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
                f"{self._leaf.dtype}{self._leaf.shape}: somebody else wrote it. Choose another out="
                "."
            )
        return layout


def _take_space(file: int, size: int) -> None:
    """Makes a file this long, with room for all of it where the system can promise that."""
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
