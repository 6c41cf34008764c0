"""Where results go: what a store is, and which store an `out` is."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the names of more dtypes, such as bfloat16)
import numpy as np

from batchax.datasets import objects
from batchax.datasets.addresses import PARTIAL, Address, ObjectPath
from batchax.datasets.disk import (
    OvertakenError,
    give_name,
    make_folder,
    remove_unfinished,
    replace_file,
)
from batchax.datasets.plan import Data, Leaf, Rows, Unit
from batchax.errors import ArgumentTypeError, JobError, StorageError
from batchax.jaxprs.types import Tree


class OutputGuard:
    """Checks that a file or folder is not replaced, and that its files stay as written.

    `at` returns its current path, as another process may rename it.
    """

    def __init__(self, path: Path, at: Callable[[], Path]) -> None:
        self._path, self._at = path, at
        self._written: dict[int, tuple[Sequence[str], int | None]] = {}  # there may be millions
        self._lock = threading.Lock()
        # While it is open here, the system does not reuse its inode.
        try:
            self._file: int | None = os.open(at(), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path} could not be opened: {error.strerror}.") from error

    def check(self) -> None:
        """Raises a JobError if its path is missing, or something else."""
        if self._file is None:
            return
        try:
            same = os.path.samestat(os.fstat(self._file), os.stat(self._at()))
        except OSError:
            same = False
        if not same:
            raise JobError(
                f"{self._path} was deleted, moved, or replaced by something else while this "
                "process wrote to it, so batchax stopped writing. Restore it and repeat the call, "
                "or delete it and the folder of its job to start over."
            )

    def written(self, number: int, files: Sequence[Path]) -> None:
        if files:
            at = self._at()
            names = [os.path.relpath(file, at) for file in files]  # elsewhere, if it was moved
            stamp = _stamp(at, names)
            with self._lock:
                self._written[number] = names, stamp

    def check_written(self) -> None:
        """Raises a JobError if files were changed after they were written."""
        for names, stamp in self._written.values():
            if stamp is None or _stamp(self._at(), names) != stamp:
                raise written_over(self._path, names[0])

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def written_over(out: object, what: str) -> JobError:
    return JobError(
        f"{out} does not hold what was written to it: {what} was overwritten or deleted during the "
        f"call. `batchax verify {out}` lists the damage, and the same call recomputes it."
    )


def _stamp(at: Path, names: Sequence[str]) -> int | None:
    """Returns a stamp that changes if a file is written to; None if one is missing."""
    try:
        stats = [os.stat(at / name) for name in names]
    except OSError:
        return None
    return hash(tuple((x.st_ino, x.st_size, x.st_mtime_ns) for x in stats))


class ConditionalPuts:
    """Puts objects on the condition that no other process has put one there."""

    def __init__(self) -> None:
        self._there: dict[ObjectPath, objects.Version] = {}  # objects that were in the way
        self._put: dict[int, int] = {}  # what was put, by numbers: there may be millions
        self._lock = threading.Lock()

    def put(self, path: ObjectPath, content: bytes) -> None:
        before = self._there.pop(path, None)
        try:
            if before is None:
                version = objects.put_new(path, content)
            else:
                version = objects.put_over(path, content, before)
        except FileExistsError:
            # Remember the version in the way: after the caller has checked that it may write, the
            # next attempt replaces it.
            with contextlib.suppress(FileNotFoundError):
                self._there[path] = objects.meta(path).version
            raise OvertakenError(f"{path} was written by another process.") from None
        with self._lock:
            self._put[hash(path)] = hash(version.name)

    def check(self, out: ObjectPath) -> None:
        there = {hash(path): hash(meta.version.name) for path, meta in objects.below(out)}
        if not self._put.items() <= there.items():
            raise written_over(out, "an object of it")


Results = Sequence[Data]
Options = dict[str, Any]  # of the library that writes


class Store:
    """Keeps results.

    Several threads may write different units. Subclasses define `prepare`, `check`, `put`, `read`,
    and `result`. The constructor writes nothing, and raises an ArgumentTypeError for unsupported
    leaves. `unit_rows` are the rows of a chunk: those of a unit, or of a batch if units differ.
    """

    kind = ""  # under which it was found
    takes_options = False
    lasts = True  # whether results outlive the process, and so have checksums in the journal
    can_grow = False  # whether results may have rows that are counted as they come
    can_flatten = False  # whether a unit may have more rows, or fewer, than rows of the inputs
    stays = False  # whether it is one file or folder from `prepare` on, on a disk
    renamed = False  # whether that is called `partial` until it is whole
    _guard: OutputGuard | None = None

    def __init__(
        self, out: Address, leaves: Sequence[Leaf], unit_rows: int, options: Options | None = None
    ) -> None:
        self.out: Any = out  # on a disk, or in object storage
        self.leaves, self.unit_rows = tuple(leaves), unit_rows
        self.options: Options = options or {}
        self._puts = ConditionalPuts() if isinstance(out, ObjectPath) else None
        if self._puts is not None:
            self.stays = self.renamed = False
        names = [leaf.name for leaf in self.leaves]
        if self.grows and not self.can_grow:
            raise ArgumentTypeError(
                f'{out}: a stream has an unknown number of rows, and resume="extend" adds some; '
                f'{type(self).__name__} keeps arrays of one length. Use out="scores.zarr", or a '
                "folder of Parquet files."
            )
        if any(leaf.flat for leaf in self.leaves) and not self.can_flatten:
            raise ArgumentTypeError(
                f"the function returns OutputRows, any number of rows for each, and "
                f"{'memory' if self.kind == 'memory' else self.out} has one for each. Use a folder "
                'of Parquet files, out="y.parquet".'
            )
        for leaf in self.leaves:
            if not isinstance(leaf.dtype, np.dtype):
                raise ArgumentTypeError(
                    f"{called(leaf)} is of dtype {leaf.dtype}, which has no form in a file. Of "
                    "random keys return the numbers: jax.random.key_data(keys)."
                )
            if names.count(leaf.name) > 1:
                raise ArgumentTypeError(
                    f"{called(leaf)}: two results, or one and a column of keep=, have this name. "
                    "Pass one of them another."
                )

    @property
    def partial(self) -> Path:
        """Returns its path until it is complete, if it is `renamed`."""
        return self.out.with_name(f"{self.out.name}{PARTIAL}")

    @property
    def at(self) -> Any:
        return self.partial if self.renamed and os.path.lexists(self.partial) else self.out

    # The caller of `prepare` and `clean`, which remove unfinished files, holds the job's lock.
    def prepare(self) -> None:
        """Makes the output of a new job, or nothing if killed. Raises a JobError if it exists."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises a StorageError if the output is missing, and a JobError if it is another one."""
        raise NotImplementedError

    def check_ended(self) -> None:
        """Checks a finished job as well for what `end` made."""
        self.check()

    def clean(self) -> None:
        """Removes unfinished files of killed writers."""

    def guard(self) -> None:
        """Has `verify_unchanged` compare the output from now on."""
        if self.stays:
            self._guard = OutputGuard(self.out, lambda: self.at)

    def verify_unchanged(self, at_end: bool = False) -> None:
        """Raises a JobError if another process changed the output; `at_end`: any of its files."""
        if self._guard is not None:
            self._guard.check()
            if at_end:
                self._guard.check_written()
        if self._puts is not None and at_end:
            self._puts.check(self.out)

    def release(self) -> None:
        if self._guard is not None:
            self._guard.close()

    @property
    def grows(self) -> bool:
        return any(leaf.grows for leaf in self.leaves)

    def end(self, rows: int) -> None:
        """Completes the output, with so many rows, for other programs. May be called again."""
        if self.renamed:
            give_name(self.partial, self.out)

    def reopen(self) -> None:
        """Undoes `end` to add rows. May be called again."""
        if self.renamed:
            give_name(self.out, self.partial)

    def put(self, unit: Unit, results: Results) -> None:
        """Writes a unit's results, one for each leaf, durably, over a damaged one or none."""
        raise NotImplementedError

    def read(self, unit: Unit) -> list[Data]:
        """Reads back the results of a unit; a StorageError names a bad file."""
        raise NotImplementedError

    def result(self) -> Tree:
        """Returns the user's result: a path, or one for each name; arrays for memory."""
        raise NotImplementedError

    def write(self, unit: Unit, results: Results) -> None:
        self.put(unit, [_fitting(*each, unit) for each in zip(self.leaves, results, strict=True)])
        if self._guard is not None:
            self._guard.written(unit.number, self.files_of(unit))

    def files_of(self, unit: Unit) -> list[Any]:
        """Lists the files that hold this unit and nothing else, if any."""
        return []

    def _put_file(self, path: Any, content: bytes) -> None:
        (replace_file if self._puts is None else self._puts.put)(path, content)

    def _read_file(self, path: Address) -> bytes:
        try:
            return objects.place_of(path).read(path)
        except FileNotFoundError:
            raise StorageError(f"{path} is missing.") from None

    def names(self) -> Collection[Any]:
        """Lists the paths of all files of the output in one pass."""
        if self._puts is not None:
            return {path for path, _ in objects.below(self.out)}
        return {
            Path(at, name) for at, _, names in os.walk(self.at, followlinks=True) for name in names
        }

    def foreign(self) -> Address | None:
        return next((path for path in self.names() if not self._is_own(path)), None)

    def _is_own(self, path: Address) -> bool:
        """Returns whether this store gives files such a name."""
        return False

    def missing(self, units: Iterable[Unit]) -> dict[int, Any]:
        """Returns numbers of written units whose files are missing, each with a file."""
        files = {file: unit.number for unit in units for file in self.files_of(unit)}
        there = self.names() if files else ()
        return {number: file for file, number in files.items() if file not in there}

    def describe(self) -> dict[str, Any]:
        """Describes the store as JSON, for `reopen_store`."""
        text = lambda leaf: {"dtype": str(leaf.dtype), "passed": leaf.passed and str(leaf.passed)}
        leaves = [{**vars(leaf), **text(leaf)} for leaf in self.leaves]
        more = {"options": self.options} if self.options else {}
        return {"kind": self.kind, "unit_rows": self.unit_rows, "leaves": leaves, **more}

    def _check_options(self, names: Iterable[str], allowed: Iterable[str], more: str = "") -> None:
        allowed = list(allowed)
        for name in names:
            if name not in allowed:
                raise ArgumentTypeError(
                    f"store_options has {name!r}, which {self.out} does not take. It takes "
                    f"{', '.join(allowed)}{more}."
                )

    def each(self, results: Sequence[Any]) -> Tree:
        """Returns a single result as it is, and several by name."""
        if [leaf.name for leaf in self.leaves] == [""]:
            return results[0]
        return {leaf.name: x for leaf, x in zip(self.leaves, results, strict=True)}


def described_leaves(description: dict[str, Any]) -> list[Leaf]:
    tuples = lambda leaf: {name: tuple(x) for name, x in leaf.items() if isinstance(x, list)}
    return [
        Leaf(**{**leaf, "dtype": np.dtype(leaf["dtype"]), **tuples(leaf)})
        for leaf in description["leaves"]
    ]


def part_of(leaf: Leaf, unit: Unit) -> tuple[slice, ...]:
    return *(slice(0, size) for size in leaf.shape[: leaf.axis]), slice(unit.start, unit.stop)


def called(leaf: Leaf) -> str:
    return f"the result {leaf.name!r}" if leaf.name else "the result"


def reject_ragged(leaves: Sequence[Leaf], what: str) -> None:
    for leaf in leaves:
        if leaf.ragged is not None:
            raise ArgumentTypeError(
                f"{called(leaf)} has rows of different lengths, which {what} has no form for. "
                'Write it to a folder of Parquet files (out="scores/"), or to memory (out=None).'
            )


def make_place(out: Path, leaves: Sequence[Leaf] = ()) -> None:
    """Makes the folder of `out`; raises if `out` exists, or the disk has no space."""
    if os.path.lexists(out):
        raise JobError(
            f"{out} is there already, and nothing is ever written over. Choose another out=, or "
            "delete it."
        )
    make_folder(out.parent)
    remove_unfinished(out.parent, out.name)  # what `prepare` left if it was killed
    needs = sum(leaf.dtype.itemsize * int(np.prod(leaf.shape, dtype=np.int64)) for leaf in leaves)
    free = shutil.disk_usage(out.parent).free
    if needs > free:
        raise StorageError(
            f"{out} needs {needs:,} bytes, and the disk has {free:,} left. Free some space, or "
            "choose an out= on another disk."
        )


def _fitting(leaf: Leaf, result: Data, unit: Unit) -> Data:
    """Checks that a result has its shape and dtype: otherwise it would overwrite other rows."""
    if leaf.passed:
        return result
    if leaf.ragged is not None:
        rows = result if isinstance(result, Rows) else Rows(np.zeros(0), np.zeros(0))
        shape, expected = rows.data.shape[1:], leaf.shape[1:]
        fits = rows.lengths.shape == (unit.rows,) and len(rows.data) == rows.lengths.sum()
        data = rows.data
    else:
        data = np.asarray(result)
        shape, fits = data.shape, True
        rows = len(data) if leaf.flat else unit.rows
        expected = *leaf.shape[: leaf.axis], rows, *leaf.shape[leaf.axis + 1 :]
    if not fits or shape != expected or data.dtype != leaf.dtype:
        raise ArgumentTypeError(
            f"{called(leaf)} of rows {unit.start} to {unit.stop} is {data.dtype}{shape}, where "
            f"{leaf.dtype}{expected} was to be written."
        )
    return result if isinstance(result, Rows) else data


class MemoryStore(Store):
    """Fills NumPy arrays unit by unit; rows of different lengths become `Rows`."""

    kind = "memory"
    lasts = False
    can_grow = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._arrays: list[np.ndarray | None] = []
        self._parts: dict[tuple[int, int], Any] = {}  # of no array: by unit and leaf

    def prepare(self) -> None:
        self._arrays = [
            None if leaf.grows or leaf.ragged is not None else np.empty(leaf.shape, leaf.dtype)
            for leaf in self.leaves
        ]

    def put(self, unit: Unit, results: Results) -> None:
        for i, (leaf, array, result) in enumerate(
            zip(self.leaves, self._arrays, results, strict=True)
        ):
            if isinstance(result, Rows):
                self._parts[unit.number, i] = Rows(result.data.copy(), result.lengths.copy())
            elif array is None:
                self._parts[unit.number, i] = result.copy()
            else:
                array[part_of(leaf, unit)] = result

    def result(self) -> Tree:
        return self.each(
            [self._joined(i) if array is None else array for i, array in enumerate(self._arrays)]
        )

    def _joined(self, i: int) -> Data:
        leaf = self.leaves[i]
        units = [self._parts[key] for key in sorted(self._parts) if key[1] == i]
        if leaf.ragged is None:
            return np.concatenate([np.empty(leaf.shape, leaf.dtype), *units], leaf.axis)
        return Rows(*map(np.concatenate, zip(leaf.without_elements(0), *units, strict=True)))
