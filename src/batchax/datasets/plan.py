"""Which rows are committed at once, what is recorded of them, and their checksums."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np

from batchax.datasets.addresses import needed
from batchax.errors import ArgumentTypeError, AxisError, StorageError, UnsupportedError
from batchax.jaxprs.error_format import brief
from batchax.rows.converters import plain_parts
from batchax.rows.ragged import Ragged

NOT_FINITE = " is not finite"
ALONE = "result"  # the name of a column, where the function returns one array
ENDLESS = np.iinfo(np.int32).max  # rows of a stream, as far as anybody knows


class Unit(NamedTuple):
    """Identifies rows that are committed at once."""

    number: int  # its place in the plan
    start: int  # its first row
    stop: int  # the row after its last

    @property
    def rows(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Leaf:
    """Describes an array of results for all rows."""

    name: str  # its path in what the function returns: "" if it is alone, else "y", "0", "a/b"
    shape: tuple[int, ...]  # of all rows, without the axis along which lengths of rows differ
    dtype: np.dtype
    axis: int = 0  # along which the rows lie
    ragged: int | None = None  # the axis of a row along which lengths differ
    grows: bool = False  # whether rows are counted as they come; by `shape` there are none
    rows_name: str = ""  # the name of the axis of rows, in arrays of xarray
    passed: Any = None  # the Arrow type of a column of the inputs that is passed through
    flat: bool = False  # whether rows of the inputs have any number of rows here

    @property
    def dimension_names(self) -> list[str]:
        """Names each axis. Others are numbered: equal sizes need not mean the same axis."""
        name = self.name.rpartition("/")[2] or "dim"
        names = [f"{name}_{i}" for i in range(len(self.shape))]
        names[self.axis] = self.rows_name
        return names

    def of_rows(self, rows: int) -> tuple[int, ...]:
        return *self.shape[: self.axis], rows, *self.shape[self.axis + 1 :]

    def without_elements(self, rows: int) -> Rows:
        return Rows(np.zeros((0, *self.shape[1:]), self.dtype), np.zeros(rows, np.int64))


class Rows(NamedTuple):
    data: np.ndarray  # the elements of one row after another along axis 0
    lengths: np.ndarray  # of each row


Data: TypeAlias = np.ndarray | Rows
"""Rows of one input or result: of one shape, or of different lengths."""

ArrowArray: TypeAlias = Any  # a `pyarrow.Array`, or chunks of one: pyarrow has no types
ArrowTable: TypeAlias = Any  # a `pyarrow.Table`
ArrowType: TypeAlias = Any  # a `pyarrow.DataType`

ForeignArray: TypeAlias = Any
"""An array of h5py, zarr-python, TensorStore, or xarray: shape, dtype, slices, and what only that
library's have."""


@dataclass(frozen=True, slots=True)  # there may be millions
class Bad:
    row: int
    error: str
    traceback: str = ""

    @property
    def kind(self) -> str:
        return self.error.partition(":")[0]

    @property
    def is_nonfinite(self) -> bool:
        return self.error.endswith(NOT_FINITE) and not self.traceback


def alike(bad: Iterable[Bad]) -> list[Bad]:
    """Shares one traceback, of kilobytes, between rows that fail alike."""
    first: dict[str, str] = {}
    rows = []
    for b in bad:
        traceback = first.setdefault(b.traceback.removesuffix(b.error), b.traceback)
        rows.append(b if traceback is b.traceback else replace(b, traceback=traceback))
    return rows


def packed(bad: Iterable[Bad]) -> dict[str, list[Any]]:
    """Packs rows without a result for JSON, with each traceback once."""
    places: dict[str, int] = {}
    rows = [[b.row, b.error, places.setdefault(b.traceback, len(places))] for b in bad]
    return {"rows": rows, "tracebacks": list(places)}


def unpacked(entry: dict[str, list[Any]]) -> list[Bad]:
    texts = entry["tracebacks"]
    return [Bad(row, error, texts[place]) for row, error, place in entry["rows"]]


@dataclass(frozen=True)
class Record:
    """Records a finished unit in the journal."""

    unit: Unit  # its rows
    checksums: Sequence[int]  # crc32c of the results, one for each leaf
    attempt: int = 0  # how many times it was begun before, by anyone
    seconds: float = 0.0  # how long it took to compute
    quarantined: Sequence[Bad] = ()  # the rows that have no result
    # for each reduction over the rows, the part of this unit
    reduced: Mapping[str, Any] = field(default_factory=dict)
    ended: float = 0.0  # when that was written down, in seconds since 1970; the journal sets it
    # by which it is withdrawn, of all attempts that wrote the same; the journal sets them
    ids: Sequence[Any] = field(default=(), compare=False)
    writer: str = field(default="", compare=False)  # whose journal says it, if it was read there
    # crc32c of the rows of a stream that it was computed of, one for each array of them
    read: Sequence[int] = ()


def kept(x: Ragged, rows: int) -> Rows:
    lengths = np.asarray(x.lengths)[:rows].astype(np.int64)
    data = np.moveaxis(np.asarray(x.data), x.element_axis, 0)
    return Rows(np.ascontiguousarray(data[: lengths.sum()]), lengths)


def as_ragged(x: Rows, axis: int, longest: int | None = None) -> Ragged:
    """Wraps rows as a batch; `longest` bounds lengths, by default the greatest."""
    lengths = x.lengths if longest is None else x.lengths.astype(np.int32)
    return Ragged(np.moveaxis(x.data, 0, axis), lengths, longest, axis=axis)


def reject_several_axes(axis: int | tuple[int, ...], name: str) -> None:
    if isinstance(axis, tuple):
        raise UnsupportedError(
            f"{name} has rows that are ragged along the axes {axis}, and map reads and writes rows "
            "that are ragged along one. Pad them to one shape, and pass their sizes as other "
            "arguments. Or call vmap for a batch of them at a time."
        )


def crc32c(data: bytes | np.ndarray, so_far: int = 0) -> int:
    """Continues the crc32c `so_far` with bytes, or an array in C order."""
    google_crc32c = needed("google_crc32c", "a checksum of what is written")
    if isinstance(data, np.ndarray):
        # As plain bytes: types that NumPy has not of itself, bfloat16 for one, lend out no memory.
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return google_crc32c.extend(so_far, data)


def checksum(result: Data | ArrowArray) -> int:
    """Returns the crc32c of a result: an array, the data and lengths of rows, or an Arrow array."""
    if isinstance(result, Rows):
        # Stores hand lengths back in the type of integers that they keep them in.
        return crc32c(np.asarray(result.lengths, np.int64), crc32c(result.data))
    if not isinstance(result, np.ndarray | np.generic):
        # Of an Arrow array, the values count, and not how buffers are laid out.
        parts, crc = plain_parts(result), 0
        for part in parts:
            crc = crc32c(part, crc)
        return crc
    return crc32c(np.asarray(result))


_SEAL = b',"crc32c":"%08x"}'
_SEAL_SIZE = len(_SEAL % 0)


def sealed(entry: Mapping[str, Any]) -> bytes:
    """Encodes a non-empty entry as a line of JSON with its checksum."""
    text = json.dumps(entry, separators=(",", ":")).encode()[:-1]
    return text + _SEAL % crc32c(text) + b"\n"


def is_whole(line: bytes) -> bool:
    """Returns whether a line, without its end, has a valid checksum."""
    text, seal = line[:-_SEAL_SIZE], line[-_SEAL_SIZE:]
    return seal == _SEAL % crc32c(text)


def unsealed(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    return json.loads(b"[" + b",".join(lines) + b"]")


@contextlib.contextmanager
def foreign(path: object) -> Iterator[None]:
    """Names `path` if complete lines do not hold what batchax writes."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StorageError(
            f"{path} holds what batchax did not write: {type(error).__name__}: {error}. Check "
            "who put it there, and delete it, or its folder, to recompute that."
        ) from error


# Of work, by an estimate, that a unit is worth committing for: engines add 0.3 to 1.0% to so much
# (benchmark: `cluster`).
_SECONDS = 0.5
# Of rows and results that a unit may take. Several are in memory at a time; and of so few the
# allocator keeps the memory, while larger ones are mapped again, and every page of them is cleared.
_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Plan:
    """Divides rows into units of one size, or of whole batches with similar numbers of elements.

    It depends on sizes and arguments only: the same call makes the same plan anywhere.
    """

    rows: int  # of the dataset
    batch_size: int  # rows that the program computes at a time
    unit_rows: int  # rows of a unit, a multiple of `batch_size`; of units that differ, on average
    ends: tuple[int, ...] | None = None  # the row after each unit, if they differ
    open: bool = False  # whether rows are counted as they come: there are not more than `rows`
    extended: bool = False  # whether rows were added after the job began, so that outputs grow

    def __len__(self) -> int:
        return -(-self.rows // self.unit_rows) if self.ends is None else len(self.ends)

    @property
    def units(self) -> Iterator[Unit]:
        return map(self.unit, range(len(self)))

    @property
    def chunk_rows(self) -> int:
        """Returns the rows of a chunk in stores: units are multiples, except for the last."""
        return self.unit_rows if self.ends is None else self.batch_size

    def unit(self, number: int) -> Unit:
        if not 0 <= number < len(self):
            raise IndexError(f"unit {number} of a plan of {len(self)}")
        if self.ends is not None:
            return Unit(number, self.ends[number - 1] if number else 0, self.ends[number])
        start = number * self.unit_rows
        return Unit(number, start, min(start + self.unit_rows, self.rows))

    def has(self, unit: Unit) -> bool:
        if not 0 <= unit.number < len(self):
            return False
        whole = self.unit(unit.number)
        return unit == whole or (self.open and unit.start == whole.start < unit.stop < whole.stop)

    def ended(self, rows: int) -> Plan:
        return replace(self, rows=rows, open=False)

    def by_elements(self, elements: np.ndarray) -> Plan:
        """Divides rows of different lengths into units with similar numbers of elements."""
        if len(self) < 2:
            return self
        ends = np.append(np.arange(self.batch_size, self.rows, self.batch_size), self.rows)
        done = np.cumsum(elements, dtype=np.int64)[ends - 1]  # after each batch
        # A batch belongs to the unit in whose share of all elements its last one is.
        share = (done - 1).clip(0) * len(self) // max(1, int(done[-1]))
        last = np.append(share[1:] != share[:-1], True)
        return replace(self, ends=tuple(ends[last].tolist()))

    @classmethod
    def of(
        cls,
        rows: int,
        batch_size: int,
        row_bytes: float,
        row_seconds: float,
        commit_rows: int | None = None,
    ) -> Plan:
        """Plans units that are worth committing, several of which fit into memory."""
        if commit_rows is not None:
            return cls(rows, batch_size, whole_batches(commit_rows, batch_size))
        # Enough batches to be worth a commit, but no more than fit.
        batches = _SECONDS / (row_seconds * batch_size) if row_seconds > 0 else math.inf
        fit = _BYTES / (row_bytes * batch_size) if row_bytes > 0 else math.inf
        least = max(1, -(-rows // batch_size))  # that hold all rows
        count = min(math.ceil(min(batches, least)), math.floor(min(fit, least)))
        return cls(rows, batch_size, batch_size * max(1, count))

    @classmethod
    def from_json(cls, plan: dict[str, Any]) -> Plan:
        ends = plan.get("ends")
        made = cls(**{**plan, "ends": None if ends is None else tuple(ends)})
        rows, sizes = made.rows, [made.batch_size, made.unit_rows]
        good = all(type(n) is int for n in (rows, *sizes)) and rows >= 0 and min(sizes) > 0
        if good and ends is not None:
            stops = [0, *ends]
            good = stops[-1] == rows and all(a < b for a, b in itertools.pairwise(stops))
        if not good:
            raise ValueError("the units of its plan do not divide its rows")
        return made


def whole_batches(commit_rows: SupportsIndex, batch_size: int) -> int:
    try:
        rows_each = index(commit_rows)
    except TypeError:
        raise ArgumentTypeError(
            f"commit_rows must be a whole number of rows, and is {brief(commit_rows)}."
        ) from None
    below = rows_each // batch_size * batch_size
    if rows_each != below or rows_each < 1:
        fitting = f"{below} or {below + batch_size}" if below > 0 else f"{batch_size}"
        raise AxisError(
            f"commit_rows={rows_each} is not a multiple of batch_size={batch_size}: rows are "
            f"committed in whole batches. Use commit_rows={fitting}, or another batch_size."
        )
    return rows_each
