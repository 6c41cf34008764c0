"""Sources in memory: arrays of NumPy and of other libraries."""

from __future__ import annotations

import json
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from batchax.datasets.addresses import reading
from batchax.datasets.files import Column, InMemory, Layout, linked_files
from batchax.datasets.plan import ArrowArray, ForeignArray, Rows, kept, reject_several_axes
from batchax.datasets.source import Files, Index, Labels, Source, check_shape, labels_of, native
from batchax.errors import ArgumentTypeError
from batchax.rows.building import elements_of
from batchax.rows.ragged import Ragged


class Mapped(Source):
    """Reads parts of an array that maps a file, and copies those that are not contiguous.

    Its identity is the file with size and time, and the position of the array in it.
    """

    gives_fresh = True
    in_process = True  # who pickles it, pickles what is mapped

    def __init__(self, x: np.memmap, whole: np.memmap, name: str) -> None:
        if whole.mode != "r":
            whole.flush()  # the file's time changes now, not when the system gets to it
        self._array = np.asarray(x)
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
        if self._layout is None:
            return np.array(self._array[index], self.dtype, order="C")
        # A process that reads mapped bytes after the file was cut short is killed, and that may
        # happen at any moment. So the file is read instead.
        with open(self.files.path, "rb", buffering=0) as file:
            got = self._layout.read(file, len(index) - 1, index[-1] if index else slice(0, 1))
        return np.asarray(got, self.dtype, order="C")


def reject_masked(x: object, name: str) -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{name} is a masked array, and what is masked would count as numbers. Fill it "
            "(x.filled), or drop those rows."
        )


def in_memory(x: ArrayLike, name: str) -> Source:
    reject_masked(x, name)
    whole: Any = x
    # The outermost map knows the file and its mode; slices of it do not.
    while isinstance(whole, np.memmap) and isinstance(whole.base, np.ndarray):
        whole = whole.base
    # Of mode "c", what was written is in memory alone, and results of arithmetic map nothing.
    if isinstance(x, np.memmap) and getattr(whole, "mode", None) in ("r", "r+", "w+"):
        return Mapped(x, whole, name)
    return InMemory(x, name)


class InRagged(Source):
    ragged = True
    in_process = True
    lends = True

    def __init__(self, x: Ragged, name: str) -> None:
        reject_several_axes(x.axis, name)
        if elements_of(x.lengths) is None:
            raise ArgumentTypeError(f"{name}: lengths of rows must be known, and these are traced.")
        dtype = native(x.dtype, name)  # raises for random keys before they are converted
        self._data, self._lengths = kept(x, len(x))
        self._offsets = np.concatenate([[0], np.cumsum(self._lengths)])
        self.ragged_axis = x.axis
        super().__init__(name, (len(x), *self._data.shape[1:]), dtype)

    @cached_property
    def lengths(self) -> np.ndarray | None:
        return self._lengths

    def get(self, index: Index) -> Rows:
        start, stop = index[0].start, index[0].stop
        elements = slice(self._offsets[start], self._offsets[stop])
        return Rows(self._data[elements], self._lengths[start:stop])


class Sliced(Source):
    """Takes slices of an array of another library, one at a time.

    Its identity is its file or folder, the spec of TensorStore, or a checksum of all rows.
    """

    def __init__(self, x: ForeignArray, name: str) -> None:
        library = type(x).__module__.split(".")[0]
        self._tensorstore = library == "tensorstore"
        with reading(name):  # it may have been closed
            shape, dtype = x.shape, x.dtype.numpy_dtype if self._tensorstore else x.dtype
            path, self._origin = _place(x, library)
            linked = linked_files(x, path, name) if library == "h5py" and path is not None else []
        check_shape(shape, name)
        super().__init__(name, shape, dtype)
        self._lock = threading.Lock()  # h5py is for one thread at a time; others may be
        self.files = None if path is None else Files(path, name, linked)
        self.gives_fresh = self._tensorstore
        self._array = _from_zero(x) if self._tensorstore else _from_anywhere(x)

    def labels(self, axis: int) -> Labels | None:
        return labels_of(self._array, axis)

    def origin(self) -> dict[str, Any] | None:
        return ({} if self.files is None else self.files.identity()) | (self._origin or {}) or None

    def get(self, index: Index) -> np.ndarray:
        if self._tensorstore:
            return self._array[index].read().result()
        with self._lock:
            return np.asarray(self._array[index])


def _from_zero(x: ForeignArray) -> ForeignArray:
    """Shifts the rows of a TensorStore array, which may start anywhere, to start at 0."""
    import tensorstore

    return x[tensorstore.d[:].translate_to[0]] if x.rank else x


def _from_anywhere(x: ForeignArray) -> ForeignArray:
    """Reopens a zarr array with an absolute path."""
    # Chunks of a relative path are not found in another folder, and zarr-python returns fill values
    # for them.
    root = getattr(getattr(x, "store", None), "root", None)
    if not isinstance(root, Path) or root.is_absolute():
        return x
    import zarr

    return zarr.open_array(type(x.store)(root.absolute()), path=x.path, mode="r")


def _place(x: ForeignArray, library: str) -> tuple[Path | None, dict[str, Any] | None]:
    """Returns the file or folder of an array, and what else identifies it; None if nothing does."""
    if library == "h5py" and Path(x.file.filename).is_file():
        return Path(x.file.filename), {"member": x.name}
    if library == "zarr" and getattr(x.store, "root", None) is not None:
        return Path(x.store.root) / x.path, {}
    if library == "tensorstore":
        spec = x.spec().to_json()
        store = spec.get("kvstore", {"driver": "memory"})
        if isinstance(store, dict) and store.get("driver") != "memory":
            origin = {"spec": json.dumps(spec, sort_keys=True)}
            return (Path(store["path"]) if store.get("driver") == "file" else None), origin
    return None, None


class ArrowColumn(Column):
    """Converts an Arrow array, chunked or not, in memory or mapped, one part at a time."""

    def __init__(self, array: ArrowArray, name: str, of_any_type: bool = False) -> None:
        super().__init__(name, len(array), array.type, of_any_type)
        self._array = array

    @cached_property
    def lengths(self) -> np.ndarray | None:
        return self._lengths(self._array) if self.ragged else None

    def _rows(self, start: int, stop: int) -> ArrowArray:
        return self._array.slice(start, stop - start)
