"""Where the files of a job lie: on a disk, or in a store of objects."""

from __future__ import annotations

from batchax.datasets.addresses import Address, ObjectPath
from batchax.datasets.disk import DISK
from batchax.datasets.object_place import IN_MEMORY, OBJECTS
from batchax.datasets.place import Place


def place_of(path: Address) -> Place:
    """What can be done where that is."""
    if isinstance(path, ObjectPath):
        return IN_MEMORY if path.scheme == "memory" else OBJECTS
    return DISK
