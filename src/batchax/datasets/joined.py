"""Arrays in several files, as one array of rows: what a pattern such as `data/*.npy` names."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from batchax.datasets import objects
from batchax.datasets.addresses import ObjectPath
from batchax.datasets.job_files import JOB
from batchax.datasets.parts import Rows
from batchax.datasets.source import Index, Source
from batchax.errors import AxisError, StorageError

Fits = Callable[[Any], bool]


def is_pattern(path: str) -> bool:
    """Whether a path names several, and is not that of a file which is called so."""
    return glob.has_magic(path) and not os.path.exists(path)


def matching(pattern: str) -> list[Path]:
    """What a pattern names, by name, but for the folders of jobs; ``**`` is folders in folders."""
    named = map(Path, glob.glob(pattern, recursive=True))
    return sorted(path for path in named if _no_job(path.parts, Path(pattern).parts))


def fits_files(pattern: str) -> Fits:
    """Whether a file would fit a pattern, once it is there."""
    resolved = Path(pattern).resolve()
    return lambda path: isinstance(path, Path) and _fits(path, resolved)


def fits_objects(pattern: ObjectPath) -> Fits:
    """The same of names of objects, of which slashes make folders."""
    place, parts = (pattern.scheme, pattern.bucket), pattern.key.split("/")
    return lambda path: (
        isinstance(path, ObjectPath)
        and (path.scheme, path.bucket) == place
        and _fit_parts(path.key.split("/"), parts)
        and _no_job(path.key.split("/"), parts)
    )


def _no_job(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether nothing is the folder of a job, or in one; or the pattern asks for those."""
    asked = any(pattern.endswith(JOB) for pattern in patterns)
    return asked or not any(name.endswith(JOB) for name in names)


def _fit_parts(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """As `glob` has it: two stars are any folders, and none of the stars stands for a first dot."""
    if not (names and patterns):
        return not names and all(pattern == "**" for pattern in patterns)
    (name, *more), (pattern, *rest) = names, patterns
    shown = pattern.startswith(".") or not name.startswith(".")
    if pattern == "**":
        return _fit_parts(names, rest) or (shown and _fit_parts(more, patterns))
    return shown and fnmatch.fnmatchcase(name, pattern) and _fit_parts(more, rest)


def matching_objects(pattern: ObjectPath) -> list[ObjectPath]:
    """What a pattern names in a store, by name: objects, and what these are in."""
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), pattern.key.split("/"))
    root = ObjectPath(pattern.scheme, pattern.bucket, "/".join(fixed))
    seen: set[ObjectPath] = set()
    for path, _ in objects.below(root):
        seen.update((path, *path.parents))
    return sorted(filter(fits_objects(pattern), seen))


def _fits(path: Path, pattern: Path) -> bool:
    """Whether a file of that path would fit a pattern, once it is there."""
    if "**" in pattern.parts:  # any folders may stand for that
        return fnmatch.fnmatch(str(path), str(pattern).replace("**/", "*"))
    each = zip(path.parts, pattern.parts, strict=False)
    return len(path.parts) == len(pattern.parts) and all(fnmatch.fnmatch(*x) for x in each)


class Joined(Source):
    """Rows of several sources, one after another, along axis 0.

    Args:
      parts: the sources.
      fits: whether what is written to a path would be one of them.
      name: for messages.

    Raises:
      StorageError: rows of them differ in shape, in dtype, or in whether their lengths differ.
    """

    lends = True

    def __init__(self, parts: Sequence[Source], fits: Fits, name: str) -> None:
        first, *_ = parts
        kind = lambda x: (x.shape[1:], x.dtype, x.ragged, x.axes)
        for part in parts:
            if not part.shape:
                raise StorageError(f"{name}: {part.name} is a number, and has no rows.")
            if kind(part) != kind(first):
                raise StorageError(
                    f"{name}: rows of all files must be alike. {first.name} has rows of "
                    f"{_row_of(first)}, and {part.name} of {_row_of(part)}."
                )
        self.ragged, self.axes = first.ragged, first.axes
        self.in_process = any(part.in_process for part in parts)
        self._parts, self._fits = parts, fits
        self._ends = list(itertools.accumulate(part.shape[0] for part in parts))
        self._files = [files for part in parts for files in part.all_files]
        for files in self._files:
            files.count = len(self._files)
        super().__init__(name, (self._ends[-1], *first.shape[1:]), first.dtype)

    @property
    def all_files(self) -> Sequence[Any]:
        return self._files

    def would_hold(self, path: Any) -> bool:
        return self._fits(path) or super().would_hold(path)

    @cached_property
    def lengths(self) -> np.ndarray | None:
        lengths = [part.lengths for part in self._parts]
        return np.concatenate([x for x in lengths if x is not None]) if self.ragged else None

    def origin(self) -> dict[str, Any] | None:
        origins = [part.origin() for part in self._parts]
        return None if any(origin is None for origin in origins) else {"parts": origins}

    def get(self, index: Index) -> Any:
        if len(index) != 1:
            raise AxisError(
                f"{self.name}: files are joined along axis 0, so rows lie along that axis, and not "
                f"along axis {len(index) - 1}."
            )
        got, picked = [], index[0]
        first = bisect_right(self._ends, picked.start)
        for i in range(first, len(self._parts)):
            begin = self._ends[i] - self._parts[i].shape[0]
            if i > first and begin >= picked.stop:
                break
            start = max(picked.start - begin, 0)
            stop = max(start, min(picked.stop, self._ends[i]) - begin)
            got.append(self._parts[i].read(0, start, stop, fresh=False))
        if not got:
            return self._parts[-1].read(0, self._parts[-1].shape[0], self._parts[-1].shape[0])
        if len(got) == 1:
            return got[0]
        if isinstance(got[0], Rows):
            return Rows(*map(np.concatenate, zip(*got, strict=True)))
        return np.concatenate(got)


def _row_of(part: Source) -> str:
    lengths = " and lengths that differ" if part.ragged else ""
    if isinstance(part.axes, tuple):
        lengths += f" along the axes {part.axes}"
    return f"shape {part.shape[1:]}{lengths} and dtype {part.dtype}"
