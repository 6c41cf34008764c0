"""Zarr arrays in folders, opened by TensorStore with little memory of its own."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from batchax.datasets.failures import needed


@functools.cache
def limited_context() -> Any:
    """Nothing is cached, and few chunks are copied at a time: memory holds the units in flight."""
    tensorstore = needed("tensorstore", "Zarr")
    return tensorstore.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": 2},
            "file_io_concurrency": {"limit": 4},
        }
    )


def in_folder(driver: str, folder: Path, **more: Any) -> dict[str, Any]:
    """What TensorStore is told to open. Its files are synced before they get their names."""
    # A folder's name must end in a slash.
    store = {"driver": "file", "path": f"{folder.absolute()}/", "file_io_sync": True}
    return {"driver": driver, "kvstore": store, **more}


def zarr_format(folder: Path) -> str | None:
    """TensorStore's driver for the array or group in a folder, or None if there is neither."""
    if (folder / "zarr.json").exists():
        return "zarr3"
    return "zarr" if any((folder / name).exists() for name in (".zarray", ".zgroup")) else None
