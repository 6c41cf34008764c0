"""Arrays in files: NumPy's .npy and .npz, HDF5, Zarr."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np

from batchax.datasets.failures import needed, reading
from batchax.datasets.hdf5_files import linked_files
from batchax.datasets.known_files import Files
from batchax.datasets.memory import InMemory
from batchax.datasets.npy_layout import Layout
from batchax.datasets.source import Index, Source, check_shape
from batchax.datasets.tensorstores import in_folder, limited_context, zarr_format
from batchax.errors import ArgumentTypeError, StorageError


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
