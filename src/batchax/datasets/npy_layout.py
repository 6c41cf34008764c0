"""Where the elements of an array lie in a .npy file, and reading and writing a part of it there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase, RawIOBase

import numpy as np

from batchax.errors import StorageError


class InParts(RawIOBase):
    """A file that is no file of the system's, of which parts are read.

    Attributes:
      size: in bytes.
    """

    size: int

    def read_at(self, out: memoryview, offset: int) -> None:
        """Fills `out` with what begins at `offset`."""
        raise NotImplementedError


File = BufferedIOBase | RawIOBase

_ALIGNED = 64  # bytes
_GAP = 4096  # bytes; the system reads whole pages, so what lies between closer runs costs nothing
_SPAN = 2**20  # bytes that are read at a time where there are gaps


@dataclass(frozen=True)
class Layout:
    """An array in a file.

    Attributes:
      shape: of the array.
      dtype: of its elements, in the file's byte order.
      offset: of its first element in the file.
      fortran: whether the first axis is the one along which neighbours lie.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    fortran: bool = False

    @classmethod
    def of(cls, file: File) -> Layout:
        """What the header of a file says.

        Raises:
          StorageError: the file is shorter than that.
        """
        formats = np.lib.format
        version = formats.read_magic(file)
        older = version == (1, 0)
        header = formats.read_array_header_1_0 if older else formats.read_array_header_2_0
        shape, fortran, dtype = header(file)
        layout = cls(shape, dtype, file.tell(), fortran)
        size = file.size if isinstance(file, InParts) else os.fstat(file.fileno()).st_size
        if size < layout.size:
            raise StorageError(
                f"{getattr(file, 'name', 'the file')} is truncated: by its header it has "
                f"{layout.size} bytes, and {size} are there. Make it again, or copy it again."
            )
        return layout

    @property
    def size(self) -> int:
        """The bytes that the file has at least."""
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
        """How often indices along the axis come, the bytes of one, and those of all."""
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
