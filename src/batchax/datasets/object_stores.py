"""Results in a store of objects: Zarr arrays, and folders of Parquet files.

TensorStore and PyArrow make the bytes, the same as on a disk, and `objects.py` puts them. A unit is
put over whatever is there, but not over what somebody else has put since this process looked: who
is overtaken looks first whether the job is still its own.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from batchax.datasets import objects
from batchax.datasets.addresses import ObjectPath
from batchax.datasets.columns import BEGUN
from batchax.datasets.failures import reading
from batchax.datasets.held import written_over
from batchax.datasets.objects import Version
from batchax.datasets.parquet_store import ParquetStore
from batchax.datasets.parts import Leaf, Rows, Unit
from batchax.datasets.place import OvertakenError
from batchax.datasets.steps import AFTER_WRITE, BEFORE_WRITE, IN_WRITE, reached
from batchax.datasets.store import Results, part_of
from batchax.datasets.tensorstores import InMemory
from batchax.datasets.zarr_store import ZarrStore
from batchax.errors import JobError, StorageError


class Putting:
    """Puts objects over others, on the condition that these are what they were."""

    def __init__(self) -> None:
        self._there: dict[ObjectPath, Version] = {}  # of objects that were in the way
        self._put: dict[int, int] = {}  # of what was put, by numbers: there may be millions
        self._lock = threading.Lock()

    def put(self, path: ObjectPath, content: bytes) -> None:
        """Puts an object.

        Raises:
          OvertakenError: another one is there. If this is called again, it is put over that one.
        """
        there = self._there.pop(path, None)
        try:
            if there is None:
                version = objects.create(path, content)
            else:
                version = objects.replace(path, content, there)
            with self._lock:
                self._put[hash(path)] = hash(version.name)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                self._there[path] = objects.meta(path).version
            raise OvertakenError(f"{path} was written by somebody else.") from None

    def check(self, out: ObjectPath) -> None:
        """Raises a JobError if what was put in a folder is not there any more, as it was put."""
        there = {hash(path): hash(meta.version.name) for path, meta in objects.below(out)}
        if not self._put.items() <= there.items():
            raise written_over(out, "an object of it")


class ObjectZarr(ZarrStore):
    """As `ZarrStore`, whose chunks have the same names and bytes."""

    out: Any
    stays = False

    def __init__(self, out: Any, leaves: Sequence[Leaf], unit_rows: int) -> None:
        super().__init__(out, leaves, unit_rows)
        self._putting = Putting()

    def check_held(self, at_end: bool = False) -> None:
        if at_end:
            self._putting.check(self.out)

    def names(self) -> Collection[Any]:
        return {path for path, _ in objects.below(self.out)}

    def prepare(self) -> None:
        """Nothing: there are no folders, and the documents come last."""

    def check(self) -> None:
        self._check_documents(ended=False)

    def _put_document(self, path: Any, document: bytes) -> None:
        reached(BEFORE_WRITE)
        self._putting.put(path, document)
        reached(AFTER_WRITE)

    def read(self, unit: Unit) -> list[np.ndarray | Rows]:
        results = []
        for path, leaf in zip(self._paths, self.leaves, strict=True):
            memory = InMemory()
            for chunk in self._chunks(leaf, unit):
                memory.put((path / chunk).key, _read(path / chunk))
            with reading(f"{self.out}: rows {unit.start} to {unit.stop}"):
                chunked = self._open_chunks(path, leaf, memory.context)
                results.append(chunked[part_of(leaf, unit)].read().result())
        return results

    def put(self, unit: Unit, results: Results) -> None:
        reached(BEFORE_WRITE)
        chunks: dict[str, bytes] = {}
        for path, leaf, result in zip(self._paths, self.leaves, results, strict=True):
            memory = InMemory()
            chunked = self._open_chunks(path, leaf, memory.context)
            self._begin_to_write(chunked, leaf, unit, result).result()
            chunks |= memory.all()
        for i, (key, content) in enumerate(chunks.items()):
            self._putting.put(ObjectPath(self.out.scheme, self.out.bucket, key), content)
            if not i:
                reached(IN_WRITE)
        reached(AFTER_WRITE)

    def clean(self) -> None:
        """What is put is whole."""


class ObjectParquet(ParquetStore):
    """As `ParquetStore`. There are no folders, and no names that change: an object says that there
    is an output, and as long as that object is not empty, that the output is not whole.
    """

    out: Any
    stays = renamed = False

    def __init__(self, out: Any, leaves: Sequence[Leaf], unit_rows: int) -> None:
        super().__init__(out, leaves, unit_rows)
        self._putting = Putting()

    def check_held(self, at_end: bool = False) -> None:
        if at_end:
            self._putting.check(self.out)

    def names(self) -> Collection[Any]:
        return {path for path, _ in objects.below(self.out)}

    def prepare(self) -> None:
        _create(self._begun, b"not all of these rows are done\n")

    def end(self, rows: int) -> None:
        self._put_columns()
        self._putting.put(self._begun, b"")

    def check(self) -> None:
        _read(self._begun)

    def clean(self) -> None:
        """What is put is whole."""

    @property
    def _begun(self) -> Any:
        return self.out / BEGUN

    def _replace(self, part: Any, content: bytes) -> None:
        reached(BEFORE_WRITE)
        self._putting.put(part, content)
        reached(IN_WRITE)
        reached(AFTER_WRITE)

    def _readable(self, part: Any) -> Any:
        return io.BytesIO(_read(part))


def _create(path: ObjectPath, content: bytes) -> None:
    try:
        objects.create(path, content)
    except FileExistsError:
        raise JobError(
            f"{path} is there already, and nothing is ever written over. Choose another out=, or "
            "delete it."
        ) from None


def _read(path: ObjectPath) -> bytes:
    try:
        return objects.read(path)
    except FileNotFoundError:
        raise StorageError(f"{path} is missing.") from None
