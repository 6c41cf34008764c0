"""Sources and stores in object storage."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import itertools
import json
import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from batchax.datasets import objects
from batchax.datasets.addresses import ObjectPath, address, needed, reading
from batchax.datasets.disk import AFTER_WRITE, BEFORE_WRITE, IN_WRITE, OvertakenError, reached
from batchax.datasets.file_stores import ParquetStore, ZarrStore, _read_part
from batchax.datasets.files import (
    BEGUN,
    InParts,
    KeyValuesInMemory,
    Layout,
    ParquetColumn,
    in_folder,
    refuse_begun,
)
from batchax.datasets.objects import Version
from batchax.datasets.plan import Leaf, Rows, Unit
from batchax.datasets.source import (
    Index,
    Joined,
    Source,
    fits_objects,
    matching_objects,
    refuse_unfinished,
)
from batchax.datasets.store import Results, Store, written_over
from batchax.errors import ArgumentTypeError, JobError, StorageError, UnsupportedError

_DOCUMENTS = {"zarr.json": "zarr3", ".zarray": "zarr"}
_GROUPS = (".zgroup", "zarr.json")


def open_object(url: str, name: str, of_any_type: bool = False) -> Source:
    """A source of the rows of an array in a store of objects."""
    whole = address(url, name)  # which names what is not supported
    assert isinstance(whole, ObjectPath)
    kind, _, member = whole.key.rpartition("/")[2].partition(":")
    path = whole
    group, _, array = whole.key.partition(".zarr:")
    if array:  # a path in a group
        kind, member = "", ""
        path = ObjectPath(whole.scheme, whole.bucket, f"{group}.zarr/{array.strip('/')}")
    elif member:
        path = address(url[: len(url) - len(member) - 1], name)
        assert isinstance(path, ObjectPath)
    if glob.has_magic(path.key):
        return _joined(path, member, name, url, of_any_type)
    name, suffix = f"{name} ({whole})", kind.rpartition(".")[2] if "." in kind else ""
    if suffix in ("npz", "h5", "hdf5", "he5"):
        raise UnsupportedError(
            f"{name}: in a store of objects, .npy, .zarr and .parquet are read. Copy it to a local "
            "disk, or write it again as one of these."
        )
    if suffix == "npy":
        return NpyObject(path, name)
    there = ObjectFiles(path, name)
    if suffix == "parquet" or any(part.suffix == ".parquet" for part in there.seen):
        return ParquetObjects(there, member, name, of_any_type)
    return ZarrObjects(there, name)


def _joined(pattern: ObjectPath, member: str, name: str, url: str, of_any_type: bool) -> Source:
    with reading(f"{name} ({url})"):
        paths = matching_objects(pattern)
    if not paths:
        raise StorageError(f"{name} ({url}): no object fits the pattern.")
    of = f":{member}" if member else ""
    parts = [open_object(f"{each}{of}", name, of_any_type) for each in paths]
    return Joined(parts, fits_objects(pattern), f"{name} ({url})")


class ObjectFiles:
    """What is known of objects of input: which versions there were when they were opened.

    Args:
      path: an object, or of those below a name all.
      name: of the argument, for messages.

    Attributes:
      path: as given.
      seen: of each object what it was.
    """

    def __init__(self, path: ObjectPath, name: str) -> None:
        self.path, self._name = path, name
        refuse_unfinished(path, name)
        with reading(name):
            try:
                self.seen = {path: objects.meta(path)}
            except FileNotFoundError:
                self.seen = dict(objects.below(path))
        if not self.seen:
            raise StorageError(f"{name}: there is no such object, and none below that name.")

    def check(self) -> None:
        """What is read is compared with what was there, each time: there is nothing to look at."""

    check_content = check

    def identity(self) -> dict[str, Any]:
        told = sorted((str(path), m.size, m.version.name) for path, m in self.seen.items())
        digest = hashlib.sha256(repr(told).encode()).hexdigest()
        size = sum(m.size for m in self.seen.values())
        return {"path": str(self.path), "size": size, "versions": digest}

    def read(self, path: ObjectPath) -> bytes:
        content, version = self._there(path, lambda: objects.read_version(path))
        return self._same(path, content, version)

    def read_part(self, path: ObjectPath, start: int, length: int) -> bytes:
        get = lambda: objects.read_part(path, start, length)
        return self._same(path, *self._there(path, get))

    def _there(self, path: ObjectPath, get: Any) -> Any:
        try:
            return get()
        except FileNotFoundError:
            raise self._changed(path) from None

    def _same(self, path: ObjectPath, content: bytes, version: Any) -> bytes:
        if version.name != self.seen[path].version.name:
            raise self._changed(path)
        return content

    def _changed(self, path: ObjectPath) -> StorageError:
        return StorageError(
            f"{self._name}: {path} was changed since it was opened. Let nothing write to it, and "
            "make the call again."
        )


class ObjectFile(InParts):
    """An object as a file that is read."""

    def __init__(self, files: ObjectFiles, path: ObjectPath) -> None:
        self._files, self._path, self._at = files, path, 0
        self.size = files.seen[path].size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.size - self._at))
        if count:
            buffer[:count] = self._files.read_part(self._path, self._at, count)
        self._at += count
        return count

    def read_at(self, out: memoryview, offset: int) -> None:
        if len(out):
            out[:] = self._files.read_part(self._path, offset, len(out))


class NpyObject(Source):
    """A .npy file as an object."""

    gives_fresh = True

    def __init__(self, path: ObjectPath, name: str) -> None:
        self.files = ObjectFiles(path, name)
        if path not in self.files.seen:
            raise StorageError(f"{name}: there is no such object.")
        self._file = ObjectFile(self.files, path)
        with reading(name):
            self._layout = Layout.of(io.BufferedReader(self._file, 2**16))  # read at once
        super().__init__(name, self._layout.shape, self._layout.dtype)

    def origin(self) -> dict[str, Any]:
        return self.files.identity()

    def get(self, index: Index) -> np.ndarray:
        return self._layout.read(self._file, len(index) - 1, index[-1] if index else slice(0, 1))


class ParquetObjects(ParquetColumn):
    """A column of a Parquet file, or of all below a name."""

    def __init__(
        self, files: ObjectFiles, column: str, name: str, of_any_type: bool = False
    ) -> None:
        super().__init__(files, column, name, of_any_type)

    def _parts(self, path: ObjectFiles, name: str) -> tuple[list[Any], list[Any]]:
        files, begun = path, path.seen.get(path.path / BEGUN)
        refuse_begun(begun.size if begun else 0, path.path, name)
        paths = sorted(p for p in files.seen if p.suffix == ".parquet" or p == files.path)
        self._all, self._paths = files, paths
        return paths, [files] * len(paths)

    def _readable(self, i: int) -> Any:
        return io.BufferedReader(ObjectFile(self._all, self._paths[i]), 2**20)

    def origin(self) -> dict[str, Any]:
        return {**self._all.identity(), "column": self._column}


class ZarrObjects(Source):
    """An array of Zarr, of version 2 or 3. Chunks are read whole, and so are shards."""

    gives_fresh = True

    def __init__(self, files: ObjectFiles, name: str) -> None:
        needed("tensorstore", f"{name}: Zarr")
        self.files, path, here = files, files.path, set(files.seen)
        documents = [d for d in _DOCUMENTS if path / d in here]
        arrays = _arrays(files)
        if not documents or _is_group(files, path / documents[0]):
            listed = ", ".join(f"{path}/{array}" for array in arrays)
            if not any(path / d in here for d in _GROUPS) and not arrays:
                raise StorageError(
                    f"{name}: of what kind this is is not known. In a store of objects, .npy, "
                    ".zarr and .parquet are read."
                )
            raise StorageError(
                f"{name} is a group of Zarr arrays. Name one of them: {listed or 'it has none'}."
            )
        self._path, self._driver = path, _DOCUMENTS[documents[0]]
        self._document = documents[0], files.read(path / documents[0])
        told = json.loads(self._document[1])
        with reading(name):
            array = self._opened(KeyValuesInMemory())
            self._name_of = _names(told, self._driver)
            self._chunk = array.chunk_layout.write_chunk.shape
        super().__init__(name, array.shape, array.dtype.numpy_dtype)

    def origin(self) -> dict[str, Any]:
        return self.files.identity()

    def get(self, index: Index) -> Any:
        memory = KeyValuesInMemory()
        picked = [*index, *(slice(0, n) for n in self.shape[len(index) :])]
        along = [
            range(part.start // size, -(-part.stop // size))
            for part, size in zip(picked, self._chunk, strict=True)
        ]
        for place in itertools.product(*along):
            chunk = self._path / self._name_of(place)
            if chunk in self.files.seen:  # those that hold the fill value may be left out
                memory.put(chunk.key, self.files.read(chunk))
        return self._opened(memory)[index].read().result()

    def _opened(self, memory: KeyValuesInMemory) -> Any:
        tensorstore = needed("tensorstore", "Zarr")
        document, content = self._document
        memory.put((self._path / document).key, content)
        spec = in_folder(self._driver, self._path)
        return tensorstore.open(spec, context=memory.context, open=True, read=True).result()


def _names(told: dict[str, Any], driver: str) -> Any:
    """What the object of a chunk is called, from its place in the grid."""
    if driver == "zarr":
        between = told.get("dimension_separator", ".")
        return lambda place: between.join(map(str, place)) or "0"
    encoding = told["chunk_key_encoding"]
    default = encoding["name"] == "default"
    if not default and encoding["name"] != "v2":
        raise ArgumentTypeError(f"its chunks are named by {encoding['name']!r}, which is not known")
    between = encoding.get("configuration", {}).get("separator", "/" if default else ".")
    if default:
        return lambda place: between.join(["c", *map(str, place)])
    return lambda place: between.join(map(str, place)) or "0"


def _is_group(files: ObjectFiles, document: ObjectPath) -> bool:
    if document.name != "zarr.json":
        return False
    return json.loads(files.read(document)).get("node_type") == "group"


def _arrays(files: ObjectFiles) -> list[str]:
    documents = [p for p in files.seen if p.name in _DOCUMENTS and p.parent != files.path]
    arrays = [p.parent for p in documents if not _is_group(files, p)]
    return sorted(array.key[len(files.path.key) + 1 :] for array in arrays)


class Putting:
    """Puts objects over others, on the condition that these are what they were."""

    def __init__(self) -> None:
        self._there: dict[ObjectPath, Version] = {}  # of objects that were in the way
        self._put: dict[int, int] = {}  # of what was put, by numbers: there may be millions
        self._lock = threading.Lock()

    def put(self, path: ObjectPath, content: bytes) -> None:
        """Puts an object."""
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
            raise OvertakenError(f"{path} was written by another process.") from None

    def check(self, out: ObjectPath) -> None:
        there = {hash(path): hash(meta.version.name) for path, meta in objects.below(out)}
        if not self._put.items() <= there.items():
            raise written_over(out, "an object of it")


class InObjects(Store):
    """What stores of objects have in common."""

    out: Any
    stays = renamed = False

    def __init__(
        self, out: Any, leaves: Sequence[Leaf], unit_rows: int, options: Any = None
    ) -> None:
        super().__init__(out, leaves, unit_rows, options)
        self._putting = Putting()

    def check_held(self, at_end: bool = False) -> None:
        if at_end:
            self._putting.check(self.out)

    def names(self) -> Collection[Any]:
        return {path for path, _ in objects.below(self.out)}

    def clean(self) -> None:
        """What is put is whole."""


class ObjectZarr(InObjects, ZarrStore):
    """As `ZarrStore`, whose chunks have the same names and bytes."""

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
            memory = KeyValuesInMemory()
            for chunk in self._chunks(leaf, unit):
                memory.put((path / chunk).key, _read(path / chunk))
            with reading(f"{self.out}: rows {unit.start} to {unit.stop}"):
                chunked = self._open_chunks(path, leaf, memory.context)
                results.append(_read_part(chunked, leaf, unit))
        return results

    def put(self, unit: Unit, results: Results) -> None:
        reached(BEFORE_WRITE)
        chunks: dict[str, bytes] = {}
        for path, leaf, result in zip(self._paths, self.leaves, results, strict=True):
            memory = KeyValuesInMemory()
            chunked = self._open_chunks(path, leaf, memory.context)
            self._begin_to_write(chunked, leaf, unit, result).result()
            chunks |= memory.all()
        for i, (key, content) in enumerate(chunks.items()):
            self._putting.put(ObjectPath(self.out.scheme, self.out.bucket, key), content)
            if not i:
                reached(IN_WRITE)
        reached(AFTER_WRITE)


class ObjectParquet(InObjects, ParquetStore):
    """As `ParquetStore`. There are no folders, and no names that change: an object says that there
    is an output, and as long as that object is not empty, that the output is not whole.
    """

    def prepare(self) -> None:
        _create(self._begun, _NOT_ALL)

    def end(self, rows: int) -> None:
        self._put_columns()
        self._putting.put(self._begun, b"")

    def reopen(self) -> None:
        self._putting.put(self._begun, _NOT_ALL)

    def check(self) -> None:
        _read(self._begun)

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


_NOT_ALL = b"not all of these rows are done\n"


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
