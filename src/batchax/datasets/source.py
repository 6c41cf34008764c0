"""What all sources have in common: rows are read as fresh arrays, and failures are named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from batchax.datasets.checksums import crc32c
from batchax.datasets.failures import reading
from batchax.datasets.parts import Rows
from batchax.errors import ArgumentTypeError, AxisError, StorageError

Index = tuple[slice, ...]

_BLOCK = 2**24  # bytes that are read at a time, where all rows are: they need not fit memory


class Source:
    """One input, of which rows are read. Several threads may read at once.

    A kind of source says what `get` returns, and what it is known by: `origin`. Where rows have
    different lengths, `lengths` says which. If it is found by the suffix of a file, it is made as
    ``Kind(path, member, name)``, with what came after a colon as the member.

    Args:
      name: for messages, such as "args[0]['w'] (x.npy)".
      shape: of all rows. Where rows have different lengths, without the axes along which they do.
      dtype: of the elements: numbers of NumPy's, or of ml_dtypes.

    Attributes:
      name, shape: as given.
      dtype: the same in this machine's byte order.
      ragged: whether rows have different lengths.
      axes: the axis of a row along which they do, or several, in order.
      has_members: whether a file holds several arrays, one of which is named after a colon.
      gives_fresh: whether `get` returns arrays that nobody else has, although NumPy cannot tell.
      lends: whether what `get` returned stays as it is, so that who only looks at it needs no copy.
      in_process: whether its rows are handed to another process by a copy of them all.
      files: what it reads, if that is known. After each reading it is looked whether these are what
        they were.
    """

    ragged = False
    axes: int | tuple[int, ...] = 0
    has_members = False
    gives_fresh = False
    lends = False
    in_process = False
    files: Any = None  # `Files`, or none: a subclass that has some need not ask

    def __init__(self, name: str, shape: Any, dtype: Any) -> None:
        self.name = name
        self.shape: tuple[int, ...] = tuple(int(size) for size in shape)
        self.dtype = native(dtype, name)

    @property
    def all_files(self) -> Sequence[Any]:
        """All `Files` that it reads."""
        return [] if self.files is None else [self.files]

    def would_hold(self, path: Any) -> bool:
        """Whether what is written to `path` is, or would be, a part of what it reads."""
        return any(f.path == path or f.path in path.parents for f in self.all_files)

    @cached_property
    def lengths(self) -> np.ndarray | None:
        """Of each row, where rows have different lengths, as `Rows` has them."""
        return None

    def read(self, axis: int, start: int, stop: int, fresh: bool = True) -> Any:
        """The rows `start` to `stop` along `axis`, which stays where it is.

        Args:
          axis: along which the rows lie.
          start, stop: which.
          fresh: whether nobody else may have the array. If not, it is not to be written to, and may
            be a part of what is in memory.

        Returns:
          a contiguous array, or `Rows` where rows have different lengths.

        Raises:
          StorageError: they cannot be read.
        """
        if axis and self.ragged:
            raise AxisError(
                f"{self.name}: rows of different lengths lie along axis 0, not along axis {axis}."
            )
        index = *(slice(0, size) for size in self.shape[:axis]), slice(start, stop)
        part = f"{self.name}: rows {start} to {stop} along axis {axis}"
        return self._read(index, part, fresh)

    def whole(self) -> Any:
        """All of it, for what all rows share."""
        return self._read(tuple(slice(0, size) for size in self.shape[:1]), f"{self.name}: all")

    def get(self, index: Index) -> Any:
        """The part that the index picks: slices of leading axes, without steps and in range.

        Returns:
          an array, or `Rows` where rows have different lengths. Any exception becomes a
          StorageError that names the rows.
        """
        raise NotImplementedError

    def origin(self) -> dict[str, Any] | None:
        """Where the rows lie, and what changes when they do, for JSON: such as `Files.identity`.

        None: nothing says so, and the source is known by a checksum of all that it holds.
        """
        return None

    def labels(self, axis: int) -> Any:
        """What rows along the axis are called, if that is known (`tables.Labels`)."""

    def identity(self) -> dict[str, Any]:
        """What tells it from another one, for JSON."""
        origin = self.origin()
        return {
            **(self.content() if origin is None else origin),
            "shape": list(self.shape),
            "dtype": str(self.dtype),
        }

    def content(self) -> dict[str, Any]:
        """A checksum of all that it holds, for which all of it is read."""
        crc = 0
        for start, stop in self._blocks():
            got = self.read(0, start, stop) if self.shape else self.whole()
            for part in got if isinstance(got, Rows) else (got,):
                crc = crc32c(part, crc)
        return {"crc32c": crc}

    def _read(self, index: Index, part: str, fresh: bool = True) -> Any:
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

    def _taken(self, x: Any, fresh: bool) -> np.ndarray:
        x = np.asarray(x)
        own = (x.flags.owndata or self.gives_fresh) and x.flags.writeable
        if (own or (self.lends and not fresh)) and x.flags.c_contiguous and x.dtype == self.dtype:
            return x
        return np.array(x, self.dtype, order="C")

    def _blocks(self, size: int = _BLOCK) -> Iterator[tuple[int, int]]:
        """Rows that are read at a time, where all are read, one after another."""
        count = self.shape[0] if self.shape else 1
        row = self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))
        step = max(1, size // max(1, row))
        for start in range(0, count, step):
            yield start, min(start + step, count)


class ByContent(Source):
    """A source that is known by what it holds, wherever that is.

    Args:
      source: the source.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source.name.split(" (")[0], source.shape, source.dtype)
        self._source = source

    def content(self) -> dict[str, Any]:
        return self._source.content()


def check_shape(shape: Any, name: str) -> None:
    """Refuses what has no shape, as `h5py.Empty`: it has no rows, and is no number."""
    if shape is None:
        raise ArgumentTypeError(f"{name} is empty, and has no shape: there are no rows in it.")


def native(dtype: Any, name: str) -> np.dtype:
    """A dtype of numbers in this machine's byte order.

    Raises:
      ArgumentTypeError: it is of something else.
    """
    try:
        own = np.dtype(dtype)
        # NumPy's own object for it: h5py's say a byte order, and JAX hands on whose it saw first.
        if own.kind in "biufc" and own.isbuiltin != 2:
            own = np.dtype(own.newbyteorder("=").str)
    except TypeError:
        raise ArgumentTypeError(
            f"{name}: the dtype {dtype} is none of NumPy's. Convert it with numpy.asarray; of "
            "random keys, give the numbers: jax.random.key_data(keys)."
        ) from None
    if own.itemsize > {"f": 8, "c": 16}.get(own.kind, own.itemsize):
        raise ArgumentTypeError(
            f"{name}: JAX has no numbers of dtype {own}. Convert them: "
            f"x.astype(numpy.{'complex128' if own.kind == 'c' else 'float64'})."
        )
    if own.kind not in "biufc" and own.isbuiltin != 2:  # 2: added to NumPy, such as bfloat16
        raise ArgumentTypeError(
            f"{name}: elements of dtype {own} are no numbers. Convert them, or leave them out."
        )
    return own
