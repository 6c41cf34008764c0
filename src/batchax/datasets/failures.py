"""Reading that fails, in a sentence; and libraries that may not be installed."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from typing import Any

from batchax.errors import BatchaxError, StorageError

_INSTALLED_BY = {
    "cloudpickle": ("cloudpickle", "'batchax[cluster]'"),
    "distributed": ("Dask", "'batchax[cluster]'"),
    "h5py": ("h5py", "h5py"),
    "obstore": ("obstore", "'batchax[objects]'"),
    "pandas": ("pandas", "pandas"),
    "pyarrow": ("PyArrow", "'batchax[parquet]'"),
    "tensorstore": ("TensorStore", "'batchax[data]'"),
    "xarray": ("xarray", "xarray"),
}


def needed(module: str, what: str) -> Any:
    """A library, imported where it is used.

    Raises:
      ImportError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library, package = _INSTALLED_BY[module.split(".")[0]]
        raise ImportError(f"{what} needs {library}: pip install {package}") from error


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever fails in this block becomes a StorageError that begins with `what`.

    Libraries raise errors of many types for a file that they cannot read.
    """
    try:
        yield
    except (BatchaxError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise StorageError(f"{what} cannot be read: {reason(error)}") from error


def reason(error: Exception) -> str:
    """What an error says, without the page of settings that TensorStore adds."""
    said = re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))[0]
    return f"{said or type(error).__name__}.".replace("..", ".")
