"""The ragged arguments of a call, and the sizes that they share: `ragged`, `size`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.sharding import AxisType

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, BatchaxError, UnsupportedError
from batchax.frontend.advice import ABOUT_SHAPES, SIZES_DIFFER
from batchax.frontend.arguments import LocalRows, Mapped
from batchax.frontend.containers import AxisSpec, Parts
from batchax.frontend.in_axes import is_position
from batchax.jaxprs.spoken import brief, show
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis
from batchax.kernel.inner import example_aval
from batchax.memo import Memo
from batchax.rows.building import (
    as_lengths,
    elements_of,
    known_lengths,
    same_lengths,
    shown_lengths,
)
from batchax.rows.index import RowIndex
from batchax.rows.ragged import Ragged
from batchax.rows.sizes import Lengths, SizeOfRow


@dataclass(frozen=True)
class RaggedSize(AxisSpec):
    """In `in_axes`: the batch is a `Ragged`, whose rows have sizes of these names.

    In `out_axes`: the batch is to be a `Ragged`.
    """

    names: tuple[str, ...]
    names_rows = True

    def of_argument(self, value: Value, path: str) -> Parts:
        raise ArgumentTypeError(
            f"in_axes gives {self!r} for {path}, which is {show(value)}: that kind of "
            "axis is for a batchax.Ragged. Make one, with Ragged.from_padded, say; or pass an int."
        )

    def of_output(self, value: Value, path: str, size: Any) -> Parts:
        if jnp.ndim(value) < len(self.names):
            what = "a number" if not jnp.ndim(value) else "an array of one axis"
            raise AxisError(
                f"out_axes gives {self!r} for {path}, which is {what} for each lane: a row has "
                f"{'an axis' if len(self.names) == 1 else 'axes'} of its own. Pass an int."
            )
        return Parts([value], [0], lambda outs: _rows_of(outs[0], len(self.names)))

    def __repr__(self) -> str:
        return f"batchax.ragged({', '.join(map(repr, self.names))})"


class SizeAlone(RaggedSize):
    """Rows that nobody reads, for the size that they have."""


def _rows_of(batch: Any, axes: int) -> Ragged:
    """Rows that all have one size, if they are not rows of their own already."""
    if isinstance(batch, Ragged):
        return batch
    count, *rest = batch.shape
    sizes, rest = rest[:axes], rest[axes:]
    lengths = [np.full(count, size, np.int32) for size in sizes]
    data = jnp.reshape(batch, (math.prod((count, *sizes)), *rest))
    return Ragged(data, lengths, tuple(sizes), axis=tuple(range(axes)))


@_compat.api_boundary
def ragged(*names: str) -> RaggedSize:
    """Names the sizes of the rows of a `Ragged`, in `in_axes` or `out_axes`.

    Arguments with one name have rows of the same lengths, so the function may add them. Without
    names, arguments share a size if their lengths are one array, or are known to be equal. A
    `Ragged` with two ragged axes has two names: ``ragged("h", "w")`` for images, ``ragged("n",
    "n")`` for square matrices.

    In `out_axes`, the output is a `Ragged`, also if its rows have one size.

    Args:
      *names: Python identifiers, such as "n", one for each ragged axis.

    Returns:
      A value for `in_axes` and `out_axes` of `vmap`.

    Raises:
      ArgumentTypeError: A name is not an identifier, or there is none.

    Example:
      >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
      >>> y = bx.Ragged(jnp.ones(6, int), [1, 3, 2])
      >>> print(bx.vmap(lambda x, y: (x * y).sum(), bx.ragged("n"))(x, y))
      [0 6 9]
      >>> images = bx.Ragged.from_rows([jnp.ones((2, 3)), jnp.ones((4, 1))], axis=(0, 1))
      >>> bx.vmap(lambda x: x @ x.T, bx.ragged("h", "w"))(images)
      Ragged(2 rows of float32[n, n], lengths=([2, 4], [2, 4]), max_length=(4, 4))
    """
    if not names:
        raise ArgumentTypeError(
            'ragged() takes a name for the size of rows, such as ragged("n"), or for each of '
            'several, ragged("h", "w"); none is given.'
        )
    for name in names:
        check_size_name(name, "ragged")
    return RaggedSize(names)


def check_size_name(name: Any, maker: str) -> None:
    """Refuses what cannot be the name of a size.

    Raises:
      ArgumentTypeError: it is no identifier.
    """
    if not isinstance(name, str) or not name.isidentifier() or name in _OPERATIONS:
        raise ArgumentTypeError(
            f'{maker}() takes a name for the size of rows, such as {maker}("n"), got {brief(name)}.'
        )


_OPERATIONS = frozenset({"floordiv", "mod", "max", "min", "non_negative"})


@dataclass(frozen=True)
class LaneSize(AxisSpec):
    """In `in_axes`: an array of ints holds the size of each lane."""

    name: str
    max_size: int | None

    def of_argument(self, value: Value, path: str) -> Parts:
        sizes = self._checked(value, path)
        values = known_lengths(sizes)
        count = sizes.shape[0]
        if values is None:
            room, bound = count * (self.max_size or 0), self.max_size
        else:
            room, bound = int(values.sum()), self.max_size or int(values.max(initial=0))
        # Rows of those lengths that nobody reads. What the function is given is their size.
        rows = Ragged(jnp.zeros(room, bool), sizes, bound)
        return Parts([rows], [SizeAlone((self.name,))], lambda examples: examples[0].shape[0])

    def _checked(self, value: Value, path: str) -> Any:
        if isinstance(value, LocalRows):
            raise UnsupportedError(
                f"in_axes gives {self!r} for {path}, which is batchax.local(x): lanes of different "
                "sizes are dealt out to devices by sizes that all processes must know. Pass all "
                "sizes on all processes, without local."
            )
        try:
            shape, dtype = np.shape(value), jnp.result_type(value)
        except (TypeError, ValueError):
            shape, dtype = None, type(value).__name__
        if shape is None or len(shape) != 1 or not jnp.issubdtype(dtype, np.integer):
            raise ArgumentTypeError(
                f"in_axes gives {self!r} for {path}, of shape {shape} and dtype {dtype}. Pass an "
                "array of ints of shape (lanes,), the size of each lane."
            )
        if not isinstance(shape[0], int):
            raise UnsupportedError(
                f"in_axes gives {self!r} for {path}, of which there are {shape[0]}, a symbolic "
                "number, which must be known. Export the function for a known number of lanes."
            )
        sizes = as_lengths(value)
        values = known_lengths(sizes)
        if values is None and self.max_size is None:
            raise ArgumentTypeError(
                f"in_axes gives {self!r} for {path}, whose values are traced here. Pass a bound "
                f"for them, batchax.size({self.name!r}, max_size=...)."
            )
        most = np.inf if self.max_size is None else self.max_size
        if values is not None and len(values) and not (0 <= values.min() <= values.max() <= most):
            raise AxisError(
                f"in_axes gives {self!r} for {path}, whose sizes are {shown_lengths(values)}: each "
                f"must be {'0 or more' if self.max_size is None else f'in [0, {most}]'}."
            )
        return sizes

    def __repr__(self) -> str:
        bound = "" if self.max_size is None else f", max_size={self.max_size}"
        return f"batchax.size({self.name!r}{bound})"


@_compat.api_boundary
def size(name: str, max_size: int | None = None) -> LaneSize:
    """Passes the function a size for each lane, from an array of ints, in `in_axes`.

    The function sees a dimension, and can make arrays of that size. Outputs of that size are
    `Ragged`.

    Args:
      name: A Python identifier, such as "n". Rows with ``batchax.ragged(name)`` in `in_axes` have
        this size.
      max_size: An upper bound of the sizes, an int. Needed if sizes are traced, as under
        ``jax.jit``. Traced sizes are clipped to between 0 and `max_size`.

    Returns:
      A value for `in_axes` of `vmap`.

    Raises:
      ArgumentTypeError: `name` is not an identifier, or `max_size` is not an int.

    Example:
      >>> sizes = jnp.array([3, 0, 5])
      >>> print(bx.vmap(lambda n: jnp.arange(n).sum(), bx.size("n", max_size=5))(sizes))
      [ 3  0 10]
    """
    check_size_name(name, "size")
    if max_size is not None and not (is_position(max_size) and max_size >= 0):
        raise ArgumentTypeError(
            f"size(): max_size must be a non-negative int, got {brief(max_size)}."
        )
    return LaneSize(name, max_size)


@dataclass(frozen=True, eq=False)
class NotedSize:
    """What notes say of a size, which outlive the arrays that have it.

    Attributes:
      rows: how many rows there are.
      bound: no row is longer.
      capacity: the room that packed arrays have.
      lengths: those of the rows, or None where they are not known.
    """

    rows: int
    bound: int
    capacity: int
    lengths: np.ndarray | None


@dataclass(frozen=True)
class RowSize:
    """A size that rows have, which some of the ragged arguments share.

    Attributes:
      name: of its symbol.
      symbol: the symbolic size.
      lengths: of the rows, as the first argument that has it says.
      bound: no row is longer.
      capacity: the room of packed arrays.
      of_lanes: whether a lane was given the size, and has no rows.
    """

    name: str
    symbol: Any
    lengths: Any
    bound: int
    capacity: int
    of_lanes: bool

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def index(self) -> RowIndex:
        return RowIndex.of(self.lengths, self.capacity, self.bound)

    @cached_property
    def noted(self) -> NotedSize:
        """What notes for `explain` say of it."""
        return NotedSize(self.rows, self.bound, self.capacity, known_lengths(self.lengths))


SizesOf = tuple[RowSize, ...]
"""The size of an argument along each of its ragged axes; none for those that have no rows."""


def index_in(batch: Ragged, sizes: SizesOf) -> RowIndex:
    if len(sizes) == 1:
        (size,) = sizes
        if batch.lengths is size.lengths and capacity_of(batch) == size.capacity:
            return size.index
    return RowIndex.of_axes(batch.each_length, capacity_of(batch), [s.bound for s in sizes])


def all_known(mapped: Sequence[Mapped]) -> bool:
    ragged = [m.value for m in mapped if isinstance(m.value, Ragged)]
    return all(elements_of(x.lengths) is not None for x in ragged)


def check_meshes(mapped: Sequence[Mapped]) -> None:
    """Refuses rows whose types tell of a mesh, where they do not run.

    Rows of several lengths have no boundaries where shards have theirs.

    Raises:
      UnsupportedError: rows are sharded over axes of type Explicit, or no mesh is set.
    """
    outside = jax.sharding.get_abstract_mesh().empty
    for m in mapped:
        if not isinstance(m.value, Ragged):
            continue
        for what, x in (("data", m.value.data), *(("lengths", x) for x in m.value.each_length)):
            sharding: Any = getattr(jax.typeof(x), "sharding", None)
            if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
                continue
            if any(entry is not None for entry in sharding.spec):
                reason = f"sharded over a mesh with Explicit axes, as {sharding.spec}"
                remedy = "Put them on every device before, with jax.sharding.reshard(x, jax.P())"
            elif outside:
                reason = "on a mesh with Explicit axes, and no mesh is set"
                remedy = "Call it inside `with jax.set_mesh(mesh):`"
            else:
                continue
            raise UnsupportedError(
                f"{m.path}: the {what} are {reason}, where rows of several lengths do not run. "
                f"{remedy}, or use a mesh whose axes are of type Auto."
            )


@dataclass(frozen=True)
class _Along:
    """A ragged axis of an argument.

    Attributes:
      argument: its index.
      at: which of its ragged axes.
      name: what `in_axes` calls the size.
    """

    argument: int
    at: int
    name: str | None


def find_sizes(
    mapped: Sequence[Mapped], among: np.ndarray | None = None
) -> tuple[list[SizesOf], list[RowSize]]:
    """The sizes of each argument, none for those that are not ragged; and all that there are.

    Args:
      mapped: the arguments.
      among: the lengths that rows have, where those of others run otherwise; for one size.

    Raises:
      AxisError: arguments whose sizes have one name are known to differ in length; or `in_axes`
        has not a name for each ragged axis.
    """
    groups: list[list[_Along]] = []
    of = lambda along: mapped[along.argument].value.each_length[along.at]
    for along in _ragged_axes(mapped):
        for members in groups:
            first = members[0]
            if along.name is None and first.name is None and same_lengths(of(along), of(first)):
                members.append(along)
                break
            if along.name is not None and along.name == first.name:
                paths = mapped[first.argument].path, mapped[along.argument].path
                _check_equal(along.name, paths, of(first), of(along))
                members.append(along)
                break
        else:
            groups.append([along])
    taken = {members[0].name for members in groups}
    fresh = (s for s in _NAMES if s not in taken)
    names = [members[0].name or next(fresh) for members in groups]
    bounds = [
        min(mapped[each.argument].value.each_bound[each.at] for each in members)
        for members in groups
    ]
    lengths = [of(members[0]) for members in groups]
    if among is not None:
        bounds = [int(among.max())] * len(bounds)
    there_are = Lengths(dict.fromkeys(names, among), False) if among is not None else None
    symbols = _symbols(names, there_are or _lengths(names, lengths, bounds))
    size_of: dict[tuple[int, int], RowSize] = {}
    sizes = []
    described = zip(groups, names, symbols, lengths, bounds, strict=True)
    for members, name, symbol, length, bound in described:
        specs = [mapped[each.argument].spec for each in members]
        of_lanes = all(isinstance(spec, SizeAlone) for spec in specs)
        capacity = capacity_for([mapped[each.argument].value for each in members], length, bound)
        sizes.append(RowSize(name, symbol, length, bound, capacity, of_lanes))
        size_of.update({(each.argument, each.at): sizes[-1] for each in members})
    counts = [len(m.value.axes) if isinstance(m.value, Ragged) else 0 for m in mapped]
    return [tuple(size_of[i, k] for k in range(count)) for i, count in enumerate(counts)], sizes


def _ragged_axes(mapped: Sequence[Mapped]) -> Iterator[_Along]:
    for i, m in enumerate(mapped):
        if not isinstance(m.value, Ragged):
            continue
        count = len(m.value.axes)
        names = m.spec.names if isinstance(m.spec, RaggedSize) else (None,) * count
        if len(names) != count:
            axes = "one ragged axis" if count == 1 else f"{count} ragged axes, {m.value.axis}"
            raise AxisError(
                f"in_axes gives {m.spec!r} for {m.path}, whose rows have {axes}. Pass a name for "
                "each."
            )
        yield from (_Along(i, k, name) for k, name in enumerate(names))


def capacity_for(batches: Sequence[Ragged], lengths: Any, bound: int) -> int:
    packed = next((x for x in batches if len(x.axes) == 1), None)
    if packed is not None:
        return capacity_of(packed)
    values = known_lengths(lengths)
    return lengths.shape[0] * bound if values is None else int(values.sum())


def _lengths(names: Sequence[str], lengths: Sequence[Any], bounds: Sequence[int]) -> Lengths:
    """The lengths that rows of these sizes may have."""
    values = [known_lengths(x) for x in lengths]
    if all(x is not None and len(x) for x in values):
        return Lengths(dict(zip(names, map(np.asarray, values), strict=True)), True)
    ranges = [
        np.arange(bound + 1) if x is None or not len(x) else np.unique(x)
        for x, bound in zip(values, bounds, strict=True)
    ]
    return Lengths(dict(zip(names, ranges, strict=True)), False)


_known_symbols = Memo("symbolic sizes of rows", most=64)


def _symbols(names: Sequence[str], lengths: Lengths) -> tuple[Any, ...]:
    """Symbolic sizes, the same ones for calls whose rows may have the same lengths.

    What JAX has traced for types with these sizes, `jnp.tanh` of a row say, it then finds again.
    """
    values = tuple(lengths.values[name].tobytes() for name in names)
    key = (tuple(names), lengths.aligned, values)
    return _known_symbols.get(key, lambda: _compat.row_symbols(SizeOfRow, names, lengths))


_NAMES = ["n", "m", "k", "l", *(f"n{i}" for i in range(1, 1000))]


def _check_equal(name: str, paths: tuple[str, str], first: Any, second: Any) -> None:
    x, y = known_lengths(first), known_lengths(second)
    if x is None or y is None or np.array_equal(x, y):
        return
    i = int(np.argmax(x != y))
    if paths[0] == paths[1]:
        raise AxisError(
            f"in_axes calls two sizes of the rows of {paths[0]} {name!r}, but their lengths "
            f"differ: row {i} has {x[i]} and {y[i]} elements along them. Pass them different "
            "names."
        )
    raise AxisError(
        f"in_axes calls the size of the rows of {paths[0]} and of {paths[1]} {name!r}, but "
        f"their lengths differ: row {i} has {x[i]} and {y[i]} elements. Pass them different names."
    )


def row_avals(
    axis: Axis,
    mapped: Sequence[Mapped],
    sizes_of: Sequence[SizesOf],
    sizes: Sequence[RowSize],
    dims: Sequence[Any],
) -> list[Any]:
    """The types of the arguments of one row, where its `sizes` are `dims`."""
    dim_of = {size.name: dim for size, dim in zip(sizes, dims, strict=True)}
    avals = []
    for m, own in zip(mapped, sizes_of, strict=True):
        if not own:
            aval = example_aval(axis, jax.typeof(m.value), m.axis)
            if not isinstance(m.value, Tracer) and not any(aval.sharding.spec):
                # What is staged may run on each device, where this mesh is another one.
                aval = ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
            avals.append(aval)
            continue
        aval = jax.typeof(m.value.data)
        shape = m.value.shape_of_row([dim_of[size.name] for size in own])
        row = ShapedArray(shape, aval.dtype, weak_type=False)
        lengths = (_compat.varying_axes(jax.typeof(x)) for x in m.value.each_length)
        avals.append(_compat.with_varying_axes(row, _compat.varying_axes(aval).union(*lengths)))
    return avals


@contextmanager
def sizes_in_errors(
    mapped: Sequence[Mapped], sizes_of: Sequence[SizesOf], sizes: Sequence[RowSize]
) -> Iterator[None]:
    """Puts on top of errors about shapes which arguments have rows of different lengths."""
    try:
        yield
    except (TypeError, ValueError) as error:
        message = str(error.args[0]) if error.args else ""
        of_shapes = ABOUT_SHAPES.search(message) and not isinstance(error, BatchaxError)
        if len(sizes) > 1 and of_shapes and not message.startswith(SIZES_DIFFER):
            lines = [
                f"  {m.path}: {' x '.join(size.name for size in own)} elements"
                + "".join(map(_shown, own))
                for m, own in zip(mapped, sizes_of, strict=True)
                if own
            ]
            remedy = 'Where they are the same, say so: in_axes=bx.ragged("n") for each of them.'
            message = "\n".join([SIZES_DIFFER, *lines, remedy, f"JAX says: {message}"])
            error.args = (message, *error.args[1:])
        raise


def _shown(size: RowSize) -> str:
    lengths = known_lengths(size.lengths)
    return "" if lengths is None else f", {size.name} = {shown_lengths(lengths)}"


def capacity_of(batch: Ragged) -> int:
    return batch.data.shape[batch.element_axis]


def with_room(data: Any, axis: int, capacity: int) -> Any:
    """Packed rows in an array of another size."""
    spare = capacity - data.shape[axis]
    if spare < 0:
        return lax.slice_in_dim(data, 0, capacity, axis=axis)
    if spare:
        room = [(0, 0)] * data.ndim
        room[axis] = (0, spare)
        return jnp.pad(data, room)
    return data
