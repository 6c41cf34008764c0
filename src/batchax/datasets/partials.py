"""Parts of reductions, in the journal: arrays within its line, or beside it if they are large."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from batchax.datasets.addresses import Address, ObjectPath
from batchax.datasets.checksums import crc32c
from batchax.datasets.durable import open_own, own_folder
from batchax.datasets.places import place_of
from batchax.errors import ArgumentTypeError, StorageError

FOLDER = "partials"  # of a job
_IN_LINE = 4096  # bytes of all arrays of a record; the journal is read whole when a job goes on


def written(reduced: Mapping[str, Any], path: Address) -> dict[str, Any]:
    """What a line of the journal says of these arrays; large ones are durable at `path` by then."""
    arrays = {name: np.asarray(x) for name, x in reduced.items()}
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ArgumentTypeError(
                f"the reduction {name!r} is kept as an array of numbers, and is "
                f"{type(reduced[name]).__name__}."
            )
    entries = {
        name: {"dtype": x.dtype.name, "shape": x.shape, "crc32c": crc32c(x)}
        for name, x in arrays.items()
    }
    content = {name: x.tobytes() for name, x in arrays.items()}
    if sum(map(len, content.values())) <= _IN_LINE:
        for name, data in content.items():
            entries[name]["data"] = base64.b64encode(data).decode()
        return entries
    place = place_of(path)
    place.make_folder(path.parent)
    place.replace(path, b"".join(content.values()))
    start = 0
    for name, data in content.items():
        entries[name] |= {"file": path.name, "start": start}
        start += len(data)
    return entries


class Reduced(Mapping[str, np.ndarray]):
    """The arrays that `written` wrote, each read when it is asked for."""

    def __init__(self, entries: Mapping[str, Any], folder: Address):
        self._entries = entries
        self._folder = folder

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        dtype = _dtype(entry["dtype"])
        size = dtype.itemsize * int(np.prod(entry["shape"]))
        data = (
            _read(self._folder / entry["file"], entry["start"], size) if "file" in entry else None
        )
        if data is None:
            data = base64.b64decode(entry["data"])
        array = np.frombuffer(data, dtype)
        if crc32c(array) != entry["crc32c"]:
            raise _damaged(self._folder / entry["file"])
        return array.reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _read(path: Address, start: int, size: int) -> bytes:
    try:
        if isinstance(path, ObjectPath):
            data = place_of(path).read(path)[start : start + size]
        else:
            with open(open_own(own_folder(path.parent) / path.name, os.O_RDONLY), "rb") as file:
                file.seek(start)
                data = file.read(size)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} could not be read: {error.strerror or error}.") from error
    if len(data) != size:
        raise _damaged(path)
    return data


def _damaged(path: Address) -> StorageError:
    return StorageError(
        f"{path} is damaged: it holds a part of a reduction. Run `batchax verify` on the "
        "output, and then the same call again, which computes the rows of that part anew."
    )


def _dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # those that JAX adds to NumPy's

        return np.dtype(getattr(ml_dtypes, name))
