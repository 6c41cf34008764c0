"""Zarr arrays in folders, opened by TensorStore with little memory of its own."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from batchax.datasets.addresses import Address, ObjectPath
from batchax.datasets.failures import needed
from batchax.errors import ArgumentTypeError


@functools.cache
def limited_context() -> Any:
    """Nothing is cached, and few chunks are copied at a time: memory holds the units in flight."""
    tensorstore = needed("tensorstore", "Zarr")
    return tensorstore.Context(_LITTLE)


_LITTLE = {
    "cache_pool": {"total_bytes_limit": 0},
    "data_copy_concurrency": {"limit": 2},
    "file_io_concurrency": {"limit": 4},
}


class InMemory:
    """Files of an array in memory, by their names there: to encode chunks, and to decode them.

    Attributes:
      context: of TensorStore, in which these are what its memory holds.
    """

    def __init__(self) -> None:
        tensorstore = needed("tensorstore", "Zarr")
        self.context = tensorstore.Context(_LITTLE)
        self._files = tensorstore.KvStore.open({"driver": "memory"}, context=self.context).result()

    def put(self, name: str, content: bytes) -> None:
        """Puts a file."""
        self._files.write(name, content).result()

    def all(self) -> dict[str, bytes]:
        """All that there are."""
        names = self._files.list().result()
        return {name.decode(): self._files.read(name).result().value for name in sorted(names)}


def in_folder(driver: str, folder: Address, **more: Any) -> dict[str, Any]:
    """What TensorStore is told to open. Its files are synced before they get their names.

    Of a store of objects, whose bytes it does not move itself, that is a folder in memory.
    """
    # A folder's name must end in a slash.
    if isinstance(folder, ObjectPath):
        return {"driver": driver, "kvstore": {"driver": "memory", "path": f"{folder.key}/"}, **more}
    if os.sep == "/" and "\\" in str(folder.absolute()):
        raise ArgumentTypeError(
            f"{folder} has a backslash in its path, which TensorStore takes for a slash, so the "
            "array would lie in another folder. Use a path without one."
        )
    store = {"driver": "file", "path": f"{folder.absolute()}/", "file_io_sync": True}
    return {"driver": driver, "kvstore": store, **more}


def zarr_format(folder: Path) -> str | None:
    """TensorStore's driver for the array or group in a folder, or None if there is neither."""
    if (folder / "zarr.json").exists():
        return "zarr3"
    return "zarr" if any((folder / name).exists() for name in (".zarray", ".zgroup")) else None
