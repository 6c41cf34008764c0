"""Formats that inputs and outputs share: .npy files, chunks of Zarr, and names in folders."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from batchax.datasets.addresses import Address, ObjectPath, needed
from batchax.errors import ArgumentTypeError, StorageError

BEGUN = "_begun"
"""Marks an unfinished folder in object storage, where a folder cannot be renamed."""


class ObjectFile(io.RawIOBase):
    """Reads an object as a file. `read` returns the bytes between two offsets."""

    def __init__(self, size: int, read: Callable[[tuple[int, int]], bytes]) -> None:
        self.size, self._read, self._at = size, read, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.size - self._at))
        self.read_at(memoryview(buffer)[:count], self._at)
        self._at += count
        return count

    def read_at(self, out: memoryview, offset: int) -> None:
        if len(out):
            out[:] = self._read((offset, offset + len(out)))


RawFile: TypeAlias = io.FileIO | ObjectFile

_ALIGNED = 64  # bytes
_GAP = 4096  # bytes; the system reads whole pages, so what lies between closer runs costs nothing
_SPAN = 2**20  # bytes that are read at a time where there are gaps


@dataclass(frozen=True)
class Layout:
    shape: tuple[int, ...]  # of the array
    dtype: np.dtype  # of its elements, in the file's byte order
    offset: int  # of its first element in the file
    fortran: bool = False  # whether the first axis is the one along which neighbors lie

    @classmethod
    def of(cls, raw: RawFile) -> Layout:
        formats = np.lib.format
        size = raw.size if isinstance(raw, ObjectFile) else os.fstat(raw.fileno()).st_size
        with io.BufferedReader(raw, 2**16) as file:  # one read
            older = formats.read_magic(file) == (1, 0)
            header = formats.read_array_header_1_0 if older else formats.read_array_header_2_0
            shape, fortran, dtype = header(file)
            layout = cls(shape, dtype, file.tell(), fortran)
        if size < layout.size:
            raise StorageError(
                f"{getattr(raw, 'name', 'the file')} is truncated: by its header it has "
                f"{layout.size} bytes, and {size} are there. Make it again, or copy it again."
            )
        return layout

    @property
    def size(self) -> int:
        return self.offset + self.dtype.itemsize * _product(self.shape)

    def read(self, file: RawFile, axis: int, picked: slice) -> np.ndarray:
        """Reads the indices that a slice selects along an axis; a scalar array as a whole."""
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
        """Yields the file offset and bytes of each run of a part that begins at `start`."""
        # Along an axis, a part is `outer` runs of bytes, `stride` apart.
        outer, inner, stride = self._runs(axis)
        flat = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        if not flat.size:
            return
        for i, run in enumerate(flat.reshape(outer, -1)):
            yield self.offset + start * inner + i * stride, run.data

    def _runs(self, axis: int) -> tuple[int, int, int]:
        inner = self.dtype.itemsize * _product(self.shape[axis + 1 :])
        return _product(self.shape[:axis]), inner, inner * self.shape[axis]


def _aligned(size: int) -> np.ndarray:
    """Allocates bytes aligned so that JAX on a CPU uses them without a copy."""
    room = np.empty(size + _ALIGNED, np.uint8)
    start = -room.ctypes.data % _ALIGNED
    return room[start : start + size]


def _fill(file: RawFile, out: np.ndarray, first: int, stride: int) -> None:
    """Fills each row of `out` with bytes of a file, `stride` apart."""
    outer, run = out.shape
    if outer == 1 or run == stride:
        _read_at(file, out.reshape(-1), first)
    # Wide gaps are skipped. Narrow ones are read with the runs around them, a span at a time.
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


def _read_at(file: RawFile, out: np.ndarray, offset: int) -> None:
    if isinstance(file, ObjectFile):
        return file.read_at(out.data, offset)
    view = out.data
    while view:
        # A system call may read fewer bytes than requested.
        count = os.preadv(file.fileno(), [view], offset)
        if not count:
            raise OSError(f"the file ends at byte {offset}, in the middle of the array")
        view, offset = view[count:], offset + count


def _product(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


# Nothing is cached, and few chunks are copied at a time: memory holds the units in flight.
LITTLE_MEMORY = {
    "cache_pool": {"total_bytes_limit": 0},
    "data_copy_concurrency": {"limit": 2},
    "file_io_concurrency": {"limit": 4},
}


class KeyValuesInMemory:
    """Holds files of an array in a TensorStore context, to encode and decode chunks."""

    def __init__(self) -> None:
        tensorstore = needed("tensorstore", "Zarr")
        self.context = tensorstore.Context(LITTLE_MEMORY)
        self._files = tensorstore.KvStore.open({"driver": "memory"}, context=self.context).result()

    def put(self, name: str, content: bytes) -> None:
        self._files.write(name, content).result()

    def take(self, name: str) -> bytes:
        content = self._files.read(name).result().value
        self._files.write(name, None).result()  # which deletes it
        return content


def in_folder(driver: str, folder: Address, **more: object) -> dict[str, Any]:
    """Makes a spec for TensorStore. Objects, which it does not read, use a folder in memory."""
    # A folder's name must end in a slash.
    if isinstance(folder, ObjectPath):
        return {"driver": driver, "kvstore": {"driver": "memory", "path": f"{folder.key}/"}, **more}
    if os.sep == "/" and "\\" in str(folder.absolute()):
        raise ArgumentTypeError(
            f"{folder} has a backslash in its path, which TensorStore takes for a slash, so the "
            "array would lie in another folder. Use a path without one."
        )
    store = {"driver": "file", "path": f"{folder.absolute()}/"}
    return {"driver": driver, "kvstore": store, **more}
