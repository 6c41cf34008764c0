"""Where rows come from: what a source is, the files that it reads, and several as one."""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import glob
import hashlib
import io
import itertools
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from batchax.datasets import objects
from batchax.datasets.addresses import PARTIAL, Address, ObjectPath, needed, reading
from batchax.datasets.formats import ObjectFile
from batchax.datasets.journal import JOB, JobFiles
from batchax.datasets.plan import ArrowArray, Data, ForeignArray, Rows, crc32c
from batchax.datasets.stores import reopen_store
from batchax.errors import ArgumentTypeError, AxisError, StorageError
from batchax.rows.converters import from_dense


@dataclass(frozen=True)
class Labels:
    """Holds the name and coordinates of the rows of an xarray array."""

    dimension: str = "row"  # the name of the axis along which rows lie
    # the coordinates along it, and those of the whole array, by name
    coordinates: Mapping[str, Any] = field(default_factory=dict)


def labels_of(x: ForeignArray, axis: int) -> Labels | None:
    if type(x).__module__.split(".")[0] != "xarray":
        return None
    dimension = x.dims[axis]
    along = {str(name): c for name, c in x.coords.items() if c.dims in ((), (dimension,))}
    return Labels(str(dimension), along)


_BEFORE, _WRITE, _AFTER = 1, 2, 4  # flags of sync_file_range(2)
_SMALL = 2**24  # bytes: of so few, what they hold is read when a call is made


_File = tuple[str, int, int, int, int]
"""What is known of a file without reading it: where it is below a path, its size, when it was
written to, when it or what is known of it was changed, both in nanoseconds, and its inode. A
program can restore the first of these times after a write, but not the second."""


class Files:
    """Watches files of an input by size and time.

    `path` is a file, or a folder of which all files count; `linked` are other files that it is read
    from.
    """

    def __init__(self, path: Path, name: str, linked: Sequence[Path] = ()) -> None:
        # One file has one path, from whatever folder and through whatever links it is named.
        self.path, self._name = path.resolve(), name
        self.count = 1  # of how many inputs these are one
        self._linked = linked
        reject_unfinished(self.path, name)
        # Writes of other processes through memory maps must be flushed first, or they change the
        # time later.
        for file in (self.path, *linked):
            if file.is_file():
                _write_out(file)
        self._seen = self._look()

    def opened(self) -> io.FileIO:
        return open(self.path, "rb", buffering=0)

    def check(self) -> None:
        try:
            same = self._look() == self._seen
        except StorageError:  # some of it is gone
            same = False
        if not same:
            raise _changed(self._name, self.path)

    def check_content(self) -> None:
        """Checks as `check`, and compares the content of small files if `identity` was called."""
        self.check()
        # On a file system in memory, a write through a memory map does not change the time.
        if "_content" in vars(self) and self._digest() != self._content:
            raise _changed(self._name, self.path)

    def identity(self) -> dict[str, Any]:
        """Returns path, size, times, and digests of folder names and small content, for JSON."""
        seen = self._seen
        meta: dict[str, Any] = {"path": str(self.path), "size": sum(file[1] for file in seen)}
        meta["modified_ns"] = max((file[2] for file in seen), default=0)
        meta["changed_ns"] = max((file[3] for file in seen), default=0)
        if self.path.is_dir() or self._linked:  # files that were swapped are others
            meta["files"] = hashlib.sha256(repr(sorted(f[:4] for f in seen)).encode()).hexdigest()
        if meta["size"] * self.count <= _SMALL:
            meta["sha256"] = self._content
        return meta

    @cached_property
    def _content(self) -> str:
        return self._digest()

    def _digest(self) -> str:
        digest = hashlib.sha256()
        with reading(self._name):
            for name, *_ in sorted(self._seen):
                content = (self.path / name if name else self.path).read_bytes()
                digest.update(f"{name!r} {len(content)} ".encode() + content)
        self.check()
        return digest.hexdigest()

    def _look(self) -> list[_File]:
        with reading(self._name):
            if not self.path.is_dir():
                linked = [_described(str(path), os.stat(path)) for path in self._linked]
                return [_described("", os.stat(self.path)), *linked]
            return [
                _described(os.path.relpath(os.path.join(folder, file), self.path), status)
                for folder, _, names in os.walk(self.path, followlinks=True)
                for file in names
                for status in [os.stat(os.path.join(folder, file))]
            ]


def _changed(name: str, path: Address) -> StorageError:
    return StorageError(
        f"{name}: {path} was changed since it was opened. Let nothing write to it, and make the "
        "call again."
    )


def reject_unfinished(address: Address, name: str) -> None:
    """Rejects output that a job has not computed yet, or that was lost: it would count as zeros."""
    for path in (address, *address.parents):
        if path.name.endswith(PARTIAL) and path in (address, address.parent):
            raise StorageError(
                f"{name}: {path} is the output of a job that is not finished, or a copy of it. The "
                "call that began it continues with it. Rename it if it is something else."
            )
        job = JobFiles(path) if path.name else None
        if job is None or not (job.is_described or job.place.exists(job.preparing)):
            continue
        end, description = job.read_end(), job.read()
        if end is None or description is None:
            raise StorageError(
                f"{name}: {path} is the output of a job that is not finished, so missing rows "
                f"would count as zeros. `batchax status {path}` shows its progress. Make the call "
                "again that began it."
            )
        units = description.plan_at_end(end).units
        for file in reopen_store(path, description.store).missing(units).values():
            raise StorageError(
                f"{name}: {file} is missing, and its rows would count as zeros, or not at all. "
                f"Restore it, or make the call that wrote {path} again: it computes these rows."
            )


def _described(name: str, status: os.stat_result) -> _File:
    times = status.st_mtime_ns, status.st_ctime_ns
    return name, status.st_size, *times, status.st_ino


def _write_out(path: Path) -> None:
    """Flushes what another process wrote to a memory map of the file."""
    # The next write to a clean page is noticed and changes the time of the file. Writes to a dirty
    # page are not.
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        if sys.platform != "linux":
            return os.fsync(file.fileno())
        whole = ctypes.c_int64(0), ctypes.c_int64(0)
        # Unlike fsync it does not wait until the disk itself has it: microseconds if nothing waits.
        ctypes.CDLL(None).sync_file_range(file.fileno(), *whole, _BEFORE | _WRITE | _AFTER)


Index = tuple[slice, ...]


class ObjectFiles:
    """Watches objects of an input by version: one object, or all below it.

    Each read compares versions, so `check` does nothing.
    """

    count = 1  # as `Files` has it

    def __init__(self, path: ObjectPath, name: str) -> None:
        self.path, self._name = path, name
        reject_unfinished(path, name)
        with reading(name):
            try:
                self.seen = {path: objects.meta(path)}
            except FileNotFoundError:
                self.seen = dict(objects.below(path))
        if not self.seen:
            raise StorageError(f"{name}: there is no such object, and none below that name.")

    def check(self) -> None:
        """Does nothing."""

    check_content = check

    def identity(self) -> dict[str, Any]:
        identity = sorted((str(path), m.size, m.version.name) for path, m in self.seen.items())
        digest = hashlib.sha256(repr(identity).encode()).hexdigest()
        size = sum(m.size for m in self.seen.values())
        return {"path": str(self.path), "size": size, "versions": digest}

    def opened(self, path: ObjectPath | None = None) -> ObjectFile:
        path = path or self.path
        if path not in self.seen:
            raise StorageError(f"{self._name}: there is no such object.")
        return ObjectFile(self.seen[path].size, lambda part: self.read(path, part))

    def read(self, path: ObjectPath, part: tuple[int, int] | None = None) -> bytes:
        try:
            content, version = objects.read_version(path, part)
        except FileNotFoundError:
            content, version = b"", None
        if version is None or version.name != self.seen[path].version.name:
            raise _changed(self._name, path)
        return content


AnyFiles: TypeAlias = Files | ObjectFiles


_BLOCK = 2**24  # bytes that are read at a time, where all rows are: they need not fit memory


class Source:
    """Provides rows of one input to several threads.

    Subclasses define `get` and `origin`, and `lengths` if these differ. A class for a suffix is
    made as ``Kind(path, member, name)``, with what came after a colon as `member`. `shape` is that
    of all rows, without the axis of different lengths.
    """

    ragged = False  # whether rows have different lengths
    ragged_axis = 0  # of a row, along which they do
    gives_fresh = False  # whether `get` returns new arrays, although NumPy cannot tell
    lends = False  # whether what `get` returned stays as it is, and needs no copy
    in_process = False  # whether another process needs a copy of all rows
    files: Any = None  # `Files`, or None: they are checked after each read

    def __init__(self, name: str, shape: Iterable[int], dtype: DTypeLike) -> None:
        self.name = name
        self.shape: tuple[int, ...] = tuple(int(size) for size in shape)
        # Of a column that is passed through, elements are objects.
        self.dtype = np.dtype(object) if dtype is object else native(dtype, name)

    @property
    def all_files(self) -> Sequence[AnyFiles]:
        return [] if self.files is None else [self.files]

    def would_hold(self, path: Address) -> bool:
        """Returns whether it reads what is or would be written to `path`."""
        return any(f.path == path or f.path in path.parents for f in self.all_files)

    @cached_property
    def lengths(self) -> np.ndarray | None:
        return None

    def read(self, axis: int, start: int, stop: int, fresh: bool = True) -> Data:
        """Reads rows along `axis` as a contiguous array, or `Rows`.

        Unless `fresh`, it may be a view of the input that must not be written to.
        """
        if axis and self.ragged:
            raise AxisError(
                f"{self.name}: rows of different lengths lie along axis 0, not along axis {axis}."
            )
        index = *(slice(0, size) for size in self.shape[:axis]), slice(start, stop)
        part = f"{self.name}: rows {start} to {stop} along axis {axis}"
        return self._read(index, part, fresh)

    def arrow(self, start: int, stop: int) -> ArrowArray:
        return from_dense(np.asarray(self.read(0, start, stop)))

    def whole(self) -> Data:
        return self._read(tuple(slice(0, size) for size in self.shape[:1]), f"{self.name}: all")

    def get(self, index: Index) -> Data:
        """Returns the part that slices of leading axes select: an array, or `Rows`.

        Exceptions become a StorageError that names the rows.
        """
        raise NotImplementedError

    def origin(self) -> dict[str, Any] | None:
        """Identifies the rows for JSON; None: by a checksum of all rows."""
        return None if self.files is None else self.files.identity()

    def labels(self, axis: int) -> Labels | None:
        return None

    def identity(self) -> dict[str, Any]:
        origin = self.origin()
        return {
            **(self.content() if origin is None else origin),
            "shape": list(self.shape),
            "dtype": str(self.dtype),
        }

    def content(self, rows: int | None = None) -> dict[str, Any]:
        """Computes a checksum of all content, or of the first rows, by reading it."""
        count = (self.shape[0] if self.shape else 1) if rows is None else rows
        row = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        crc, step = 0, max(1, _BLOCK // max(1, row))
        # Read block by block, as all rows need not fit into memory.
        for start in range(0, count, step):
            stop = min(start + step, count)
            got = self.read(0, start, stop) if self.shape else self.whole()
            for part in got if isinstance(got, Rows) else (got,):
                crc = crc32c(part, crc)
        return {"crc32c": crc}

    def _read(self, index: Index, part: str, fresh: bool = True) -> Data:
        with reading(part):
            try:
                got = self.get(index)
            finally:  # that something was changed explains whatever else went wrong
                if self.files is not None:
                    self.files.check()
            if isinstance(got, Rows):
                return Rows(self._taken(got.data, fresh), np.array(got.lengths))
            got = self._taken(got, fresh)
        expected = *(i.stop - i.start for i in index), *self.shape[len(index) :]
        if got.shape != expected:
            raise StorageError(
                f"{part} have the shape {got.shape} instead of {expected}, so it was changed since "
                "it was opened."
            )
        return got

    def _taken(self, x: ArrayLike, fresh: bool) -> np.ndarray:
        x = np.asarray(x)
        # A copy is needed if the array may change later, or the caller may write to it.
        own = (x.flags.owndata or self.gives_fresh) and x.flags.writeable
        if (own or (self.lends and not fresh)) and x.flags.c_contiguous and x.dtype == self.dtype:
            return x
        return np.array(x, self.dtype, order="C")


class ByContent(Source):
    def __init__(self, source: Source) -> None:
        super().__init__(source.name.split(" (")[0], source.shape, source.dtype)
        self._source = source

    def content(self, rows: int | None = None) -> dict[str, Any]:
        return self._source.content(rows)


def check_shape(shape: tuple[int, ...] | None, name: str) -> None:
    """Rejects arrays without a shape, such as `h5py.Empty`."""
    if shape is None:
        raise ArgumentTypeError(f"{name} is empty, and has no shape: there are no rows in it.")


def native(dtype: DTypeLike, name: str) -> np.dtype:
    """Returns a numeric dtype in native byte order."""
    try:
        own = np.dtype(dtype)
        # NumPy's own object for it: h5py's say a byte order, and JAX hands on whose it saw first.
        if own.kind in "biufc" and own.isbuiltin != 2:
            own = np.dtype(own.newbyteorder("=").str)
    except TypeError:
        raise ArgumentTypeError(
            f"{name}: the dtype {dtype} is none of NumPy's. Convert it with numpy.asarray; of "
            "random keys, pass the numbers: jax.random.key_data(keys)."
        ) from None
    if own.itemsize > {"f": 8, "c": 16}.get(own.kind, own.itemsize):
        raise ArgumentTypeError(
            f"{name}: JAX has no numbers of dtype {own}. Convert them: "
            f"x.astype(numpy.{'complex128' if own.kind == 'c' else 'float64'})."
        )
    if own.kind not in "biufc" and own.isbuiltin != 2:  # 2: added to NumPy, such as bfloat16
        raise ArgumentTypeError(
            f"{name}: elements of dtype {own} are not numbers. Convert or remove them."
        )
    return own


def is_pattern(path: Address) -> bool:
    text = path.key if isinstance(path, ObjectPath) else str(path)
    return glob.has_magic(text) and not (isinstance(path, Path) and path.exists())


def matching(pattern: Address) -> list[Any]:
    """Lists the paths that match a pattern, sorted, without folders of jobs.

    ``**`` matches any folders. In object storage, these are objects and the names above them.
    """
    if isinstance(pattern, Path):
        named = map(Path, glob.glob(str(pattern), recursive=True))
        return sorted(path for path in named if _no_job(path.parts, pattern.parts))
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), pattern.key.split("/"))
    seen: set[ObjectPath] = set()
    for path, _ in objects.below(ObjectPath(pattern.scheme, pattern.bucket, "/".join(fixed))):
        seen.update((path, *path.parents))
    return sorted(filter(fits(pattern), seen))


def fits(pattern: Address) -> Callable[[Any], bool]:
    """Returns a test of whether `matching` would return a path."""
    parts = _parts(pattern.resolve() if isinstance(pattern, Path) else pattern)
    return lambda path: _fit_parts(_parts(path), parts) and _no_job(_parts(path), parts)


def _parts(path: Address) -> Sequence[str]:
    whole = isinstance(path, ObjectPath)
    return (path.scheme, path.bucket, *path.key.split("/")) if whole else path.parts


def _no_job(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Returns whether no name is the folder of a job, unless the pattern asks for those."""
    of_jobs = any(pattern.endswith(JOB) for pattern in patterns)
    return of_jobs or not any(name.endswith(JOB) for name in names)


def _fit_parts(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Matches as `glob`: two stars match any folders, and stars match no leading dot."""
    if not (names and patterns):
        return not names and all(pattern == "**" for pattern in patterns)
    (name, *more), (pattern, *rest) = names, patterns
    shown = pattern.startswith(".") or not name.startswith(".")
    if pattern == "**":
        return _fit_parts(names, rest) or (shown and _fit_parts(more, patterns))
    return shown and fnmatch.fnmatchcase(name, pattern) and _fit_parts(more, rest)


class ConcatenatedSource(Source):
    """Joins rows of several sources along axis 0. `fits` tests whether a path would be one."""

    lends = True

    def __init__(self, parts: Sequence[Source], fits: Callable[[Any], bool], name: str) -> None:
        first, *_ = parts
        kind = lambda x: (x.shape[1:], x.dtype, x.ragged, x.ragged_axis)
        for part in parts:
            if not part.shape:
                raise StorageError(f"{name}: {part.name} is a number, and has no rows.")
            if kind(part) != kind(first):
                raise StorageError(
                    f"{name}: rows of all files must be alike. {first.name} has rows of "
                    f"{_row_of(first)}, and {part.name} of {_row_of(part)}."
                )
        self.ragged, self.ragged_axis = first.ragged, first.ragged_axis
        self.in_process = any(part.in_process for part in parts)
        self._parts, self._fits = parts, fits
        self._ends = list(itertools.accumulate(part.shape[0] for part in parts))
        self._files = [files for part in parts for files in part.all_files]
        # Small files are hashed, and together they count as one input.
        for files in self._files:
            files.count = len(self._files)
        dtype = object if first.dtype == object else first.dtype
        super().__init__(name, (self._ends[-1], *first.shape[1:]), dtype)

    @property
    def all_files(self) -> Sequence[AnyFiles]:
        return self._files

    def would_hold(self, path: Address) -> bool:
        return self._fits(path) or super().would_hold(path)

    @cached_property
    def lengths(self) -> np.ndarray | None:
        lengths = [part.lengths for part in self._parts]
        return np.concatenate([x for x in lengths if x is not None]) if self.ragged else None

    def origin(self) -> dict[str, Any] | None:
        origins = [part.origin() for part in self._parts]
        return None if any(origin is None for origin in origins) else {"parts": origins}

    def get(self, index: Index) -> Data:
        if len(index) != 1:
            raise AxisError(
                f"{self.name}: files are joined along axis 0, so rows lie along that axis, and not "
                f"along axis {len(index) - 1}."
            )
        got = [
            part.read(0, start, stop, fresh=False)
            for part, start, stop in self._parts_of(index[0].start, index[0].stop)
        ]
        if not got:
            return self._parts[-1].read(0, self._parts[-1].shape[0], self._parts[-1].shape[0])
        if len(got) == 1:
            return got[0]
        if isinstance(got[0], Rows):
            return Rows(*map(np.concatenate, zip(*got, strict=True)))
        return np.concatenate(got)

    def arrow(self, start: int, stop: int) -> ArrowArray:
        arrow = needed("pyarrow", self.name)
        got = [part.arrow(*each) for part, *each in self._parts_of(start, stop)]
        with reading(self.name):  # of one type
            return arrow.concat_arrays(got or [self._parts[-1].arrow(0, 0)])

    def _parts_of(self, picked_start: int, picked_stop: int) -> Iterator[tuple[Source, int, int]]:
        """Yields the parts that hold rows, at least one, with their ranges."""
        first = bisect_right(self._ends, picked_start)
        for i in range(first, len(self._parts)):
            begin = self._ends[i] - self._parts[i].shape[0]
            if i > first and begin >= picked_stop:
                break
            start = max(picked_start - begin, 0)
            yield self._parts[i], start, max(start, min(picked_stop, self._ends[i]) - begin)


def _row_of(part: Source) -> str:
    lengths = " and lengths that differ" if part.ragged else ""
    return f"shape {part.shape[1:]}{lengths} and dtype {part.dtype}"
