"""Results in Zarr arrays of version 3, written by TensorStore."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from batchax.datasets.addresses import ObjectPath
from batchax.datasets.durable import (
    make_folder,
    remove_unfinished,
    replace_file,
    replacing,
    writing,
)
from batchax.datasets.failures import needed, reading, reason
from batchax.datasets.parts import ENDLESS, Leaf, Rows, Unit
from batchax.datasets.places import place_of
from batchax.datasets.steps import AFTER_WRITE, BEFORE_WRITE, IN_WRITE, reached
from batchax.datasets.store import Results, Store, called, make_place, part_of, refuse_ragged
from batchax.datasets.tensorstores import InMemory, in_folder, limited_context
from batchax.errors import ArgumentTypeError, JobError, StorageError

_ANYWHERE = ObjectPath("memory", "any", "array")
_OWN = re.compile(r"zarr\.json|.*\.(unfinished|__lock)")  # or what killed writers left of them
GROUP = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()


class ZarrStore(Store):
    """An array, or a group of them. A chunk is what one unit has of an array, with its crc32c.

    The documents that say what is where (``zarr.json``) are written last, so nobody takes a part of
    an array for one. TensorStore writes a chunk beside the one that it is to be, syncs it, renames
    it and syncs the folder. A chunk that is not there was not written: those of zeros are, too.
    """

    can_grow = stays = True

    def __init__(self, out: Path, leaves: Sequence[Leaf], unit_rows: int) -> None:
        super().__init__(out, leaves, unit_rows)
        self._tensorstore = needed("tensorstore", f"{out}: Zarr")
        refuse_ragged(self.leaves, "Zarr")
        self._check_names()
        self._paths: list[Any] = [out / leaf.name for leaf in self.leaves]
        self._chunked = [self._open_chunks(*x) for x in zip(self._paths, self.leaves, strict=True)]

    def prepare(self) -> None:
        make_place(self.out, self.leaves)
        with replacing(self.out) as beside:
            try:
                for folder in (*self._groups(), *(leaf.name for leaf in self.leaves)):
                    make_folder(beside / folder)
            except BaseException:
                shutil.rmtree(beside, ignore_errors=True)
                raise

    def check(self) -> None:
        for path in (self.out, *self._paths):
            if not path.is_dir():
                raise StorageError(f"{path} is missing.")
        self._check_documents(ended=False)

    def check_ended(self) -> None:
        self._check_documents(ended=True)

    def _check_documents(self, ended: bool) -> None:
        """Documents are there once the job has ended, and say what this job made."""
        for path in self._groups():
            self._read_document(self.out / str(path), ended)
        for path, leaf in zip(self._paths, self.leaves, strict=True):
            document = self._read_document(path, ended)
            if document is not None:
                self._check_array(path, leaf, document)

    def _read_document(self, folder: Any, ended: bool) -> bytes | None:
        path = folder / "zarr.json"
        try:
            return place_of(path).read(path)
        except FileNotFoundError:
            if ended:
                raise StorageError(f"{path} is missing.") from None
            return None

    def _check_array(self, path: Any, leaf: Leaf, document: bytes) -> None:
        memory = InMemory()
        memory.put(f"{_ANYWHERE.key}/zarr.json", document)
        try:
            shape = None
            if leaf.grows:  # whatever there were in the end
                shape = leaf.of_rows(json.loads(document)["shape"][leaf.axis])
            self._open(_ANYWHERE, leaf, shape, memory.context, open=True)
        except Exception as error:
            raise JobError(
                f"{path} is not the array that this job made: {reason(error)} Choose another out=."
            ) from error

    def end(self, rows: int) -> None:
        for path, leaf in zip(self._paths, self.leaves, strict=True):
            self._put_document(path / "zarr.json", self._document(leaf, rows))
        for group in reversed(self._groups()):  # the outermost last
            self._put_document(self.out / str(group) / "zarr.json", GROUP)

    def clean(self) -> None:
        for path in (*self._paths, *(self.out / group for group in self._groups())):
            remove_unfinished(path)  # of a document

    def _document(self, leaf: Leaf, rows: int) -> bytes:
        """What says what is where, of an array with so many rows."""
        memory = InMemory()
        self._open(_ANYWHERE, leaf, leaf.of_rows(rows), memory.context, create=True)
        (document,) = memory.all().values()
        return document

    def _put_document(self, path: Any, document: bytes) -> None:
        replace_file(path, document)

    def files_of(self, unit: Unit) -> list[Path]:
        return [
            path / chunk
            for path, leaf in zip(self._paths, self.leaves, strict=True)
            for chunk in self._chunks(leaf, unit)
        ]

    def _is_own(self, path: Any) -> bool:
        if path.parent in self._paths and re.fullmatch(r"c(\.\d+)*", path.name):
            return True
        folders = [*self._paths, *(self.out / str(group) for group in self._groups())]
        return path.parent in folders and _OWN.fullmatch(path.name) is not None

    def _chunks(self, leaf: Leaf, unit: Unit) -> Iterator[str]:
        """The names of the chunks that hold a unit; of rows without elements there are none."""
        if 0 in leaf.of_rows(1):
            return
        for i in range(unit.start // self.unit_rows, -(-unit.stop // self.unit_rows)):
            place = [i * (axis == leaf.axis) for axis in range(len(leaf.shape))]
            yield f"c.{'.'.join(map(str, place))}"

    def result(self) -> Any:
        return self.each([str(path) for path in self._paths])

    def read(self, unit: Unit) -> list[np.ndarray | Rows]:
        with reading(f"{self.out}: rows {unit.start} to {unit.stop}"):
            parts = zip(self.leaves, self._chunked, strict=True)
            return [chunked[part_of(leaf, unit)].read().result() for leaf, chunked in parts]

    def put(self, unit: Unit, results: Results) -> None:
        reached(BEFORE_WRITE)
        with _writing(self.out):
            futures = []
            for leaf, chunked, result in zip(self.leaves, self._chunked, results, strict=True):
                future = self._begin_to_write(chunked, leaf, unit, result)
                future.commit.force()
                futures.append(future)
            reached(IN_WRITE)
            for future in futures:
                future.result()
        reached(AFTER_WRITE)

    def _begin_to_write(self, chunked: Any, leaf: Leaf, unit: Unit, result: Any) -> Any:
        rows = -(-unit.rows // self.unit_rows) * self.unit_rows  # of whole chunks
        whole = unit._replace(stop=unit.start + rows)
        return chunked[part_of(leaf, whole)].write(
            _padded(np.asarray(result), leaf.axis, rows),
            can_reference_source_data_indefinitely=True,
        )

    def _open_chunks(self, path: Any, leaf: Leaf, context: Any = None) -> Any:
        """The array with all chunks whole, before it is there.

        A chunk that sticks out of the array is else read before it is written, and cannot be
        written if it is damaged.
        """
        rows = ENDLESS if leaf.grows else leaf.shape[leaf.axis]
        rows = -(-rows // self.unit_rows) * self.unit_rows
        try:
            return self._open(path, leaf, leaf.of_rows(rows), context, assume_metadata=True)
        except Exception as error:
            raise ArgumentTypeError(
                f"{called(leaf)}, of dtype {leaf.dtype} and shape {leaf.shape}, cannot be written "
                f"to Zarr: {reason(error)}"
            ) from error

    def _open(
        self, path: Any, leaf: Leaf, shape: Any = None, context: Any = None, **how: bool
    ) -> Any:
        chunk = [max(1, size) for size in leaf.shape]
        chunk[leaf.axis] = self.unit_rows
        metadata = {
            "shape": list(leaf.shape if shape is None else shape),
            "data_type": str(leaf.dtype),
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
            # All chunks in one folder, which is there from the beginning: a folder that is made
            # for a chunk would have to be synced, too.
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "crc32c"},
            ],
        }
        missing = {"store_data_equal_to_fill_value": True, "fill_missing_data_reads": False}
        spec = in_folder("zarr3", path, metadata=metadata, **missing, **how)
        return self._tensorstore.open(spec, context=context or limited_context()).result()

    def _groups(self) -> list[PurePosixPath]:
        """The folders above arrays, the outer ones first."""
        if [leaf.name for leaf in self.leaves] == [""]:
            return []
        above = (parent for leaf in self.leaves for parent in PurePosixPath(leaf.name).parents)
        return sorted({PurePosixPath("."), *above})

    def _check_names(self) -> None:
        """Raises an ArgumentTypeError if a name cannot be a path in a group of Zarr's."""
        names = [leaf.name for leaf in self.leaves]
        for leaf in self.leaves:
            parts = leaf.name.split("/")
            above = ["/".join(parts[:i]) for i in range(1, len(parts))]
            strange = "\\" in leaf.name or any(  # TensorStore takes that for a slash
                part in ("", ".", "..", "zarr.json") or part.startswith("__") for part in parts
            )
            if (strange and names != [""]) or any(name in names for name in above):
                raise ArgumentTypeError(
                    f"{called(leaf)}: this cannot be the name of an array in a Zarr group, beside "
                    f"{', '.join(map(repr, names))}. Give it another name."
                )


def _padded(result: np.ndarray, axis: int, rows: int) -> np.ndarray:
    """A chunk, of which the last unit has a part only."""
    missing = rows - result.shape[axis]
    if not missing:
        return result
    return np.pad(result, [(0, missing * (i == axis)) for i in range(result.ndim)])


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Errors of TensorStore become what `writing` knows: it tells of the system's in words only."""
    codes = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM
    with writing(out):
        try:
            yield
        except ValueError as error:
            code = next((code for code in codes if os.strerror(code) in str(error)), errno.EIO)
            raise OSError(code, os.strerror(code) if code in codes else reason(error)) from error
