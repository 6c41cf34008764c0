"""The arguments of a map: where rows come from, and what all rows share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from batchax.datasets.addresses import reading
from batchax.datasets.plan import Data, Rows
from batchax.datasets.source import Labels, Source, native
from batchax.datasets.sources import (
    Keep,
    Stream,
    StreamLeaf,
    as_source,
    is_one_by_one,
    is_stream,
    passed_columns,
)
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.frontend.arguments import few_lines
from batchax.frontend.containers import is_container
from batchax.frontend.in_axes import check_in_axes, is_position, spread_in_axes
from batchax.frontend.options import converted
from batchax.jaxprs.error_format import brief
from batchax.jaxprs.types import AxesTree, Tree


@dataclass(frozen=True)
class Input:
    path: str  # where it is among the arguments
    source: Source  # its rows
    axis: int  # along which they lie

    @property
    def rows(self) -> int:
        return self.source.shape[self.axis]

    @property
    def row_bytes(self) -> int:
        shape = [n for i, n in enumerate(self.source.shape) if i != self.axis]
        length = 1 if self.longest is None else self.longest
        return math.prod(shape) * length * self.source.dtype.itemsize

    @property
    def longest(self) -> int | None:
        lengths = self.source.lengths
        return None if lengths is None else int(lengths.max(initial=0))


@dataclass(frozen=True)
class Inputs:
    """Holds the arguments of a map. `arguments` makes those of the batched function."""

    mapped: Sequence[Input]  # the leaves that have rows
    rows: int  # how many rows they have
    shared: Sequence[Any]  # the arrays that all rows share
    shared_paths: Sequence[str]  # where each of these is among the arguments
    # those of the arguments whose rows come one after another; then all are such
    streams: Sequence[Stream]
    arguments: Callable[[Sequence[Any], Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    passed: dict[str, Source]  # columns that are passed through to the output, by name

    @property
    def sources(self) -> list[Source]:
        return [*(m.source for m in self.mapped), *self.passed.values()]

    @property
    def labels(self) -> Labels | None:
        labels = (m.source.labels(m.axis) for m in self.mapped)
        return next((x for x in labels if x is not None), None)

    @property
    def names(self) -> dict[str, str]:
        return {m.path: m.source.name for m in self.mapped}


class NoRowsError(ArgumentTypeError):
    """Signals that all streams are empty, so the types of their rows are unknown."""


def find_inputs(
    fun: Callable[..., Any],
    in_axes: AxesTree,
    args: tuple[Any, ...],
    batched: bool = False,
    start: int = 0,
    keep: Keep = (),
) -> Inputs:
    check_in_axes(fun, in_axes)
    is_leaf = lambda x: is_container(x) or is_one_by_one(x)
    leaves, rebuild = spread_in_axes(fun, in_axes, args, {}, objects=False, is_leaf=is_leaf)
    mapped: list[Input] = []
    shared: dict[str, Any] = {}
    streams: list[Stream] = []
    makers: list[Callable[[Sequence[Any], Sequence[Any]], Any]] = []
    for leaf in leaves:
        if leaf.spec is None:
            if isinstance(leaf.value, Iterator):
                raise UnsupportedError(
                    f"{leaf.path} are rows that come one after another, and in_axes is None, for "
                    "what all rows share. Pass 0, or an array."
                )
            makers.append(_shared(leaf.value, leaf.path, shared))
            continue
        if not is_position(leaf.spec):
            raise ArgumentTypeError(
                f"in_axes gives {brief(leaf.spec)} for {leaf.path}: the rows of a dataset are "
                "taken along an axis, so pass its number, or None for what all rows share. For a "
                "random key of each row pass key= to map."
            )
        _reject_tables(leaf.value, leaf.path)
        with reading(leaf.path):  # a closed file raises its library's errors
            one_by_one = is_stream(leaf.value)
        if one_by_one:
            streams.append(Stream(leaf.value, leaf.path, batched, start))
            each, structure = jax.tree.flatten(streams[-1].argument)
        else:
            each, structure = jax.tree.flatten(as_source(leaf.value, leaf.path))
        makers.append(functools.partial(_rows, len(mapped), structure))
        for source in each:
            mapped.append(Input(leaf.path, source, _axis(leaf.path, source, int(leaf.spec))))
    _check_streams(streams, mapped, batched)
    given = keep if isinstance(keep, tuple) else True  # an array would compare by element
    inputs = Inputs(
        mapped,
        _count(mapped),
        list(shared.values()),
        list(shared),
        streams,
        lambda rows, own: rebuild([make(rows, own) for make in makers]),
        {},
    )
    if streams and given:
        raise UnsupportedError(
            f"keep passes columns of files and arrays through, and {streams[0].name} is a stream. "
            "Remove it, or pass arrays."
        )
    arguments = [(leaf.path, leaf.value) for leaf in leaves if leaf.spec is not None]
    inputs.passed.update(passed_columns(keep, arguments, inputs.labels))
    for column in inputs.passed.values():
        if column.shape != (inputs.rows,):
            raise AxisError(
                f"{column.name} has the shape {column.shape}, and is a column with a value for "
                f"each of {inputs.rows} rows."
            )
    return inputs


_TABLES = {"DataFrame", "LazyFrame", "Dataset", "Table", "RecordBatch"}
_GROUPS = ("GroupBy", "Resampler", "Resample", "Rolling", "Expanding", "Coarsen", "DataTree")


def _reject_tables(x: object, path: str) -> None:
    """Rejects tables of pandas, polars, xarray, and Arrow, whose columns are separate arrays."""
    library, kind = type(x).__module__.split(".")[0], type(x).__name__
    if library not in ("pandas", "polars", "xarray", "pyarrow"):
        return
    if kind.endswith(_GROUPS):
        raise ArgumentTypeError(
            f"{path} is a {kind} of {library}, which has groups and no rows. Pass the arrays that "
            "it was made of; or iter(x) of it, if each group is to be a row."
        )
    if kind not in _TABLES:
        return
    names = next(
        getattr(x, at) for at in ("data_vars", "column_names", "columns") if hasattr(x, at)
    )
    column = brief(next(iter(names), "a"))
    of = f"{path}[{column}]" + ".to_numpy()" * (library in ("pandas", "polars"))
    raise ArgumentTypeError(
        f"{path} is a {kind} of {library}, each column of which is an array. Pass a dict with the "
        f"columns that the function takes, {{{column}: {of}, ...}}."
    )


def _rows(first: int, structure: Any, rows: Sequence[Any], _: Sequence[Any]) -> Tree:
    return structure.unflatten(rows[first : first + structure.num_leaves])


def _check_streams(streams: Sequence[Stream], mapped: Sequence[Input], batched: bool) -> None:
    if batched and not streams:
        raise ArgumentTypeError(
            "batched=True describes the items of a stream, but no argument is a stream. "
            "Remove batched."
        )
    if streams and all(stream.argument is None for stream in streams):
        raise NoRowsError(
            f"{streams[0].name} has no rows, so the shapes and dtypes of its rows are unknown."
        )
    if any(stream.argument is None for stream in streams):
        raise AxisError(
            "the arguments end after different numbers of rows: some of the streams have none."
        )
    if streams and not all(isinstance(m.source, StreamLeaf) for m in mapped):
        raise UnsupportedError(
            "some of the arguments that are mapped are streams, and some are arrays. Pass all as "
            "streams (iter(x) of an array), or none. Pass None in in_axes for shared arguments."
        )
    for m in mapped:
        if streams and m.axis:
            raise AxisError(
                f"in_axes gives {m.axis} for {m.path}: rows of a stream are along axis 0."
            )


def _shared(
    value: Tree, path: str, shared: dict[str, Any]
) -> Callable[[Sequence[Any], Sequence[Any]], Any]:
    named, structure = jax.tree_util.tree_flatten_with_path(value)
    leaves, places = [x for _, x in named], {}
    for i, (keys, x) in enumerate(named):
        if isinstance(x, (Path, Source)):
            x = as_source(x, path).whole()
        elif not isinstance(x, (np.ndarray, jax.Array)) and _on_disk(x):
            x = np.asarray(x[...])
        name = path + jax.tree_util.keystr(keys)
        if isinstance(x, (np.ndarray, jax.Array)):
            places[i] = len(shared)
            shared[name] = _as_computed(x, name)

    def make(_: Sequence[Any], own: Sequence[Any]) -> Tree:
        return structure.unflatten(
            [own[places[i]] if i in places else x for i, x in enumerate(leaves)]
        )

    return make


def _as_computed(x: np.ndarray | jax.Array, name: str) -> np.ndarray | jax.Array:
    if isinstance(x, jax.Array):
        return x
    try:
        return converted(x, jax.dtypes.canonicalize_dtype(native(x.dtype, name)))
    except OverflowError as error:
        raise ArgumentTypeError(f"{name}: {error}.") from None


def _on_disk(x: object) -> bool:
    return all(hasattr(x, name) for name in ("shape", "dtype", "__getitem__"))


def _axis(path: str, source: Source, axis: int) -> int:
    ndim = len(source.shape)
    if not ndim:
        raise AxisError(
            f"in_axes gives axis {axis} for {path}, which is a number, and so has no rows. Pass "
            "None if all rows share it, or an array in place of a list: numpy.asarray(x)."
        )
    if not -ndim <= axis < ndim:
        raise AxisError(
            f"in_axes gives axis {axis} for {path}, which has shape {source.shape}: an axis must "
            "be in [-ndim, ndim). Pass None if all rows share it."
        )
    if source.lengths is not None and axis % ndim:
        raise AxisError(
            f"in_axes gives axis {axis} for {path}, whose rows have different lengths, and lie "
            "along axis 0. Pass 0."
        )
    return axis % ndim


def _count(mapped: Sequence[Input]) -> int:
    if not mapped:
        raise AxisError(
            "nothing is mapped. Call map with the rows, map(f, xs), and with an axis in "
            "in_axes for at least one argument. For a function of a batch, use "
            "batchax.vmap(f, batch_size=...)."
        )
    counts = {m.rows for m in mapped}
    if len(counts) > 1:
        line = "  {0.source.name}: shape {0.source.shape}, axis {0.axis}, {0.rows} rows".format
        raise AxisError(
            "all arguments must have the same number of rows, but they have\n"
            f"{few_lines([*map(line, mapped)])}\nPass None in "
            "in_axes for an argument that all rows share. A list of rows that differ in length is "
            "a Ragged: pass batchax.Ragged.from_rows(rows)."
        )
    return counts.pop()


def rows_of(data: Data, axis: int, index: np.ndarray, places: np.ndarray) -> Data:
    """Selects rows of those that were read. `places` are the rows whose slots they take."""
    together = len(index) > 0 and bool((np.diff(index) == 1).all())
    if isinstance(data, Rows):
        ends = np.cumsum(data.lengths)
        starts = ends - data.lengths
        # In the slot of a shorter row, a row is cut to its length: so many fit into a batch.
        lengths = np.minimum(data.lengths[index], data.lengths[places])
        if together and (index == places).all():
            return Rows(data.data[starts[index[0]] : ends[index[-1]]], lengths)
        parts = [data.data[starts[i] :][:n] for i, n in zip(index, lengths, strict=True)]
        return Rows(np.concatenate([data.data[:0], *parts]), lengths)
    # A slice needs no copy.
    if together:
        return data[(slice(None),) * axis + (slice(index[0], index[-1] + 1),)]
    return np.take(data, index, axis)


def elements_of_batches(lengths: np.ndarray, batch_size: int) -> np.ndarray:
    missing = -len(lengths) % batch_size
    filled = np.concatenate([lengths, np.repeat(lengths[-1:], missing)]).astype(np.int64)
    return filled.reshape(-1, batch_size).sum(1)
