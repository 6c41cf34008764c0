"""Where results go: what a store is, and which store an `out` is."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the names of more dtypes, such as bfloat16)
import numpy as np

from batchax.datasets.addresses import PARTIAL, Address, Kinds, ObjectPath, address, needed
from batchax.datasets.disk import give_name, make_folder, remove_unfinished
from batchax.datasets.plan import Leaf, Plan, Rows, Unit
from batchax.errors import ArgumentTypeError, JobError, StorageError, UnsupportedError
from batchax.jaxprs.spoken import brief


class Held:
    """A file or folder that is to stay the one that it is.

    As long as it is open here, the system gives its number to no other. Of files in a folder, each
    of which is written once, what they were then is compared in the end.

    Args:
      path: of it, for messages.
      at: returns where it is now: others may give it its name.
    """

    def __init__(self, path: Path, at: Callable[[], Path]) -> None:
        self._path, self._at = path, at
        self._written: dict[int, tuple[Sequence[str], int | None]] = {}  # there may be millions
        self._lock = threading.Lock()
        try:
            self._file: int | None = os.open(at(), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{path} could not be opened: {error.strerror}.") from error

    def check(self) -> None:
        """Raises a JobError if something else has its path, or nothing."""
        if self._file is None:
            return
        try:
            same = os.path.samestat(os.fstat(self._file), os.stat(self._at()))
        except OSError:
            same = False
        if not same:
            raise JobError(
                f"{self._path} was deleted, moved, or replaced by something else while this "
                "process wrote to it, and so nothing more is written. Put it back, and make the "
                "call again; or delete it and the folder of its job to compute it again."
            )

    def written(self, number: int, files: Sequence[Path]) -> None:
        if files:
            at = self._at()
            names = [str(file.relative_to(at)) for file in files]
            stamp = _stamp(at, names)
            with self._lock:
                self._written[number] = names, stamp

    def check_written(self) -> None:
        """Raises a JobError if such files were changed since."""
        for names, stamp in self._written.values():
            if stamp is None or _stamp(self._at(), names) != stamp:
                raise written_over(self._path, names[0])

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def written_over(out: Any, what: str) -> JobError:
    return JobError(
        f"{out} does not hold what was written to it: {what} was overwritten or deleted during the "
        f"call. `batchax verify {out}` lists the damage, and the same call recomputes it."
    )


def _stamp(at: Path, names: Sequence[str]) -> int | None:
    """What tells files from what they are once somebody wrote to them; None if one is gone."""
    try:
        told = [os.stat(at / name) for name in names]
    except OSError:
        return None
    return hash(tuple((x.st_ino, x.st_size, x.st_mtime_ns) for x in told))


Results = Sequence[np.ndarray | Rows]


class Store:
    """Where results are kept. Different units may be written from several threads.

    A kind of store says what `prepare`, `check`, `put`, `read` and `result` do, and `clean` if
    writers leave things behind. Making one writes nothing, and raises an ArgumentTypeError if there
    is no form for one of the leaves. Whoever calls `prepare` or `clean` has the job's lock for
    itself: these remove what was left unfinished.

    Args:
      out: what the user gave.
      leaves: the arrays of results.
      unit_rows: rows of a chunk: of a unit, or of a batch, if units differ.

    Attributes:
      out, leaves, unit_rows: as given.
      kind: under which it was found.
      options: the `store_options` of the call.
      takes_options: whether it has any.
      lasts: whether what it keeps outlives the process, and so has checksums in the journal.
      can_grow: whether results may have rows that are counted as they come.
      can_flatten: whether a unit may have more rows, or fewer, than rows of the inputs.
      stays: whether it is one file or folder from `prepare` on, on a disk.
      renamed: whether that is called `partial` until it is whole.
    """

    kind = ""
    takes_options = False
    lasts = True
    can_grow = False
    can_flatten = False
    stays = False
    renamed = False
    _held: Held | None = None

    def __init__(
        self, out: Path, leaves: Sequence[Leaf], unit_rows: int, options: Any = None
    ) -> None:
        self.out, self.leaves, self.unit_rows = out, tuple(leaves), unit_rows
        self.options: dict[str, Any] = options or {}
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
        """Where it is until it is whole, if it is `renamed`."""
        return self.out.with_name(f"{self.out.name}{PARTIAL}")

    @property
    def at(self) -> Path:
        """Where it is now."""
        return self.partial if self.renamed and os.path.lexists(self.partial) else self.out

    def prepare(self) -> None:
        """Of a new job: makes what units are written to, all of it or, if killed, nothing.

        Raises:
          JobError: something is there already.
          StorageError: it cannot be made, or there is no room for it.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Of a job that goes on: makes sure that what `prepare` made is there.

        Raises:
          JobError: something else is there.
          StorageError: it is missing or damaged.
        """
        raise NotImplementedError

    def check_ended(self) -> None:
        """The same of a job that has ended, of what `end` made, too."""
        self.check()

    def clean(self) -> None:
        """Removes what writers that were killed left unfinished."""

    def hold(self) -> None:
        """Of who writes: from now on it is to be what it is."""
        if self.stays:
            self._held = Held(self.out, lambda: self.at)

    def check_held(self, at_end: bool = False) -> None:
        """Whether it is what it was, as far as that can be told at once.

        Args:
          at_end: whether all was written, and looking may take longer.

        Raises:
          JobError: somebody put something else in its place.
        """
        if self._held is not None:
            self._held.check()
            if at_end:
                self._held.check_written()

    def let_go(self) -> None:
        """It may be anything again."""
        if self._held is not None:
            self._held.close()

    @property
    def grows(self) -> bool:
        """Whether rows are counted as they come."""
        return any(leaf.grows for leaf in self.leaves)

    def end(self, rows: int) -> None:
        """All rows were written, and are so many: from now on it is a whole output for everyone.

        Until then nobody takes it, or a copy, for one. This may be called again, if it was killed.
        """
        if self.renamed:
            give_name(self.partial, self.out)

    def reopen(self) -> None:
        """Undoes `end`, since rows are to be added. This may be called again, if it was killed."""
        if self.renamed:
            give_name(self.out, self.partial)

    def put(self, unit: Unit, results: Results) -> None:
        """Writes the results of a unit over whatever is there, which may be damaged or half a one.

        They are durable when this returns: on the disk, under their names. `results` has one for
        each leaf, with its shape and dtype.
        """
        raise NotImplementedError

    def read(self, unit: Unit) -> list[np.ndarray | Rows]:
        """The results of a unit that was written.

        Raises:
          StorageError: they are damaged or missing; it names the file.
        """
        raise NotImplementedError

    def result(self) -> Any:
        """What the user is given: a path, or one for each name; of a store in memory, arrays."""
        raise NotImplementedError

    def write(self, unit: Unit, results: Results) -> None:
        """Writes the results of a unit, once they are seen to fit."""
        self.put(unit, [_fitting(*each, unit) for each in zip(self.leaves, results, strict=True)])
        if self._held is not None:
            self._held.written(unit.number, self.files_of(unit))

    def files_of(self, unit: Unit) -> list[Path]:
        """The files that hold this unit and nothing else, if there are such."""
        return []

    def names(self) -> Collection[Any]:
        """The paths of all files of the output, by one listing."""
        return {
            Path(at, name) for at, _, names in os.walk(self.at, followlinks=True) for name in names
        }

    def foreign(self) -> Any:
        """A path in the output that this store did not make, if there is one."""
        return next((path for path in self.names() if not self._is_own(path)), None)

    def _is_own(self, path: Any) -> bool:
        """Whether a file in the output has a name that this store gives to files."""
        return False

    def missing(self, units: Iterable[Unit]) -> dict[int, Any]:
        """The numbers of those units that were written and whose files are gone, with one of these.

        Stores write every chunk, also one that holds the fill value alone, so its name says that
        it was written.
        """
        files = {file: unit.number for unit in units for file in self.files_of(unit)}
        there = self.names() if files else ()
        return {number: file for file, number in files.items() if file not in there}

    def describe(self) -> dict[str, Any]:
        """For JSON, what `stores.reopen_store` makes the same store of."""
        text = lambda leaf: {"dtype": str(leaf.dtype), "passed": leaf.passed and str(leaf.passed)}
        leaves = [{**vars(leaf), **text(leaf)} for leaf in self.leaves]
        more = {"options": self.options} if self.options else {}
        return {"kind": self.kind, "unit_rows": self.unit_rows, "leaves": leaves, **more}

    def _check_options(self, names: Iterable[str], allowed: Iterable[str], more: str = "") -> None:
        """Raises an ArgumentTypeError if one of these options is unknown."""
        allowed = list(allowed)
        for name in names:
            if name not in allowed:
                raise ArgumentTypeError(
                    f"store_options has {name!r}, which {self.out} does not take. It takes "
                    f"{', '.join(allowed)}{more}."
                )

    def each(self, results: Sequence[Any]) -> Any:
        """Of one for each leaf: one if the function returns one array, else one for each name."""
        if [leaf.name for leaf in self.leaves] == [""]:
            return results[0]
        return {leaf.name: x for leaf, x in zip(self.leaves, results, strict=True)}


def described_leaves(description: dict[str, Any]) -> list[Leaf]:
    return [
        Leaf(**{**leaf, "dtype": np.dtype(leaf["dtype"]), **_tuples(leaf)})
        for leaf in description["leaves"]
    ]


def _tuples(leaf: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(x) for name, x in leaf.items() if isinstance(x, list)}


def part_of(leaf: Leaf, unit: Unit) -> tuple[slice, ...]:
    """The index of a unit's results in the array of all."""
    return *(slice(0, size) for size in leaf.shape[: leaf.axis]), slice(unit.start, unit.stop)


def called(leaf: Leaf) -> str:
    return f"the result {leaf.name!r}" if leaf.name else "the result"


def refuse_ragged(leaves: Sequence[Leaf], what: str) -> None:
    for leaf in leaves:
        if leaf.ragged is not None:
            raise ArgumentTypeError(
                f"{called(leaf)} has rows of different lengths, which {what} has no form for. "
                'Write it to a folder of Parquet files (out="scores/"), or to memory (out=None).'
            )


def make_place(out: Path, leaves: Sequence[Leaf] = ()) -> None:
    """Makes the folder that `out` is to be in.

    Raises:
      JobError: `out` is there already.
      StorageError: the folder cannot be made, or has no space for all of the leaves.
    """
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
            f"{out} needs {needs:,} bytes, and the disk has {free:,} left. Make room, or choose an "
            "out= on another disk."
        )


def _fitting(leaf: Leaf, result: np.ndarray | Rows, unit: Unit) -> np.ndarray | Rows:
    """A result as it was announced: anything else would be written over other rows."""
    if leaf.passed:
        return result
    if leaf.ragged is not None:
        rows = result if isinstance(result, Rows) else Rows(np.zeros(0), np.zeros(0))
        shape, expected = rows.data.shape[1:], leaf.shape[1:]
        of_lengths = leaf.without_elements(unit.rows).lengths.shape
        fits = rows.lengths.shape == of_lengths and len(rows.data) == rows.elements.sum()
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
    """Arrays of NumPy, filled unit by unit. Of rows of different lengths, `Rows`."""

    kind = "memory"
    lasts = False
    can_grow = True

    def __init__(self, out: Path, leaves: Sequence[Leaf], unit_rows: int) -> None:
        super().__init__(out, leaves, unit_rows)
        self._arrays: list[np.ndarray | None] = []
        self._parts: dict[tuple[int, int], Any] = {}  # of no array: by unit and leaf

    def prepare(self) -> None:
        self._arrays = [
            None if leaf.grows or leaf.ragged is not None else np.empty(leaf.shape, leaf.dtype)
            for leaf in self.leaves
        ]

    def check(self) -> None:
        raise JobError("results in memory are gone with their process: there is no job to go on.")

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

    def read(self, unit: Unit) -> list[np.ndarray | Rows]:
        if any((unit.number, i) not in self._parts for i in self._leaves_in_parts()):
            raise StorageError(f"rows {unit.start} to {unit.stop} were not written.")
        return [
            self._parts[unit.number, i] if array is None else array[part_of(leaf, unit)].copy()
            for i, (leaf, array) in enumerate(zip(self.leaves, self._arrays, strict=True))
        ]

    def result(self) -> Any:
        return self.each(
            [self._joined(i) if array is None else array for i, array in enumerate(self._arrays)]
        )

    def _leaves_in_parts(self) -> list[int]:
        return [i for i, array in enumerate(self._arrays) if array is None]

    def _joined(self, i: int) -> Any:
        leaf = self.leaves[i]
        units = [self._parts[key] for key in sorted(self._parts) if key[1] == i]
        if leaf.ragged is None:
            return np.concatenate([np.empty(leaf.shape, leaf.dtype), *units], leaf.axis)
        return Rows(*map(np.concatenate, zip(leaf.without_elements(0), *units, strict=True)))


FOLDER = "parquet"  # of a name without a suffix

STORES = Kinds(
    "batchax.stores",
    Store,
    {
        "zarr": "batchax.datasets.file_stores:ZarrStore",
        "npy": "batchax.datasets.file_stores:NpyStore",
        "parquet": "batchax.datasets.file_stores:ParquetStore",
    },
)
"""By the suffix of an output. Another package adds its own as entry points of that group."""

OF_OBJECTS = {
    "zarr": "batchax.datasets.object_files:ObjectZarr",
    "parquet": "batchax.datasets.object_files:ObjectParquet",
}
"""The same in a store of objects, where nothing can be written into the middle of a file."""


def open_store(
    out: str | Address | None,
    leaves: Sequence[Leaf],
    plan: Plan,
    kind: str | None = None,
    options: dict[str, Any] | None = None,
) -> Store:
    """The store of a job's results. Nothing is written yet.

    Args:
      out: "x.zarr", "x.npy", a folder for Parquet files, which has no suffix or ".parquet" or ends
        in a slash; a path with a suffix that another package writes; None for memory.
      plan: says how many rows are written at once.
      kind: of the store, if that is known: a path has lost the slash at its end.
      options: the `store_options` of the call.
    """
    if plan.extended:
        leaves = [replace(leaf, shape=leaf.of_rows(0), grows=True) for leaf in leaves]
    return _store(kind or kind_of(out), out, leaves, plan.chunk_rows, options)


def reopen_store(out: str | Address, description: dict[str, Any]) -> Store:
    leaves, unit_rows = described_leaves(description), description["unit_rows"]
    return _store(description["kind"], out, leaves, unit_rows, description.get("options"))


def _store(
    kind: str, out: Any, leaves: Sequence[Leaf], unit_rows: int, options: Any = None
) -> Store:
    in_memory = kind == MemoryStore.kind
    place = Path() if in_memory else address(out, "out")
    of_objects = isinstance(place, ObjectPath)
    store_class: Any = MemoryStore
    if not in_memory:
        store_class = _of_objects(kind) if of_objects else STORES.load(kind)
    if options and not store_class.takes_options:
        raise ArgumentTypeError(
            f"store_options: {'memory' if in_memory else f'.{kind}'} has no options. "
            'Remove it, or use out="y.zarr", or a folder of Parquet files (out="y/").'
        )
    store: Store = store_class(place, leaves, unit_rows, *[options] if options else [])
    store.kind = kind
    return store


def _of_objects(kind: str) -> type[Store]:
    module, _, name = OF_OBJECTS[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def kind_of(out: Any) -> str:
    """The kind of the store for an output."""
    if out is None:
        return MemoryStore.kind
    if isinstance(out, ObjectPath):
        out = str(out)
    if not isinstance(out, (str, os.PathLike)) or not os.fspath(out):
        raise ArgumentTypeError(f"out must be a path or None, and is {brief(out)}.")
    name = str(os.fspath(out))
    if "\0" in name:
        raise ArgumentTypeError(f"out={name!r}: a path has no zero bytes.")
    place = address(out, "out")
    kind = place.suffix[1:]
    if not kind and place.name[1:] in STORES:
        raise ArgumentTypeError(f"out={name!r} is a suffix without a name before it.")
    if isinstance(place, ObjectPath):
        if not kind or name.endswith("/"):
            return FOLDER
        if kind not in OF_OBJECTS:
            raise UnsupportedError(
                f"out={name!r}: in a store of objects, results are written to .zarr, or to "
                "Parquet files (.parquet, no suffix, or a slash at the end). Other files are "
                "written into, and an object is put whole: write to a disk, and copy it there."
            )
        return kind
    if kind in STORES:
        return kind
    if not kind or name.endswith("/"):
        if importlib.util.find_spec("pyarrow") is None:  # who forgot the suffix means another kind
            needed(
                "pyarrow", f"out={name!r} without a suffix ({STORES.listed()}) is Parquet, which"
            )
        return FOLDER
    why = (
        " HDF5 is read but not written: a writer that is killed damages the file."
        if kind in ("h5", "hdf5", "he5")
        else ""
    )
    raise ArgumentTypeError(
        f"out={name!r}: results are written to {STORES.listed()}, or a folder of Parquet files (no "
        f"suffix, or a slash at the end).{why}"
    )
