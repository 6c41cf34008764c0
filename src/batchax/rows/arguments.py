"""The ragged arguments of a call, and the sizes that they share."""

from __future__ import annotations

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
from batchax.errors import AxisError, BatchaxError, UnsupportedError
from batchax.frontend.mapped import Mapped
from batchax.kernel.axis import Axis
from batchax.kernel.inner import example_aval
from batchax.memo import Memo
from batchax.rows.checks import known_lengths, shown_lengths
from batchax.rows.comparisons import Lengths, SizeOfRow
from batchax.rows.index import RowIndex
from batchax.rows.ragged import Ragged
from batchax.rows.row_size import RaggedSize, SizeAlone


@dataclass(frozen=True)
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
      batch: the first argument that has it.
      bound: no row is longer.
      of_lanes: whether a lane was given the size, and has no rows.
    """

    name: str
    symbol: Any
    batch: Ragged
    bound: int
    of_lanes: bool

    @cached_property
    def index(self) -> RowIndex:
        """Where the rows of the first argument are."""
        return RowIndex.of(self.batch.lengths, capacity_of(self.batch), self.bound)

    @cached_property
    def noted(self) -> NotedSize:
        """What notes for `explain` say of it."""
        lengths = known_lengths(self.batch.lengths)
        return NotedSize(len(self.batch), self.bound, capacity_of(self.batch), lengths)

    def index_in(self, batch: Ragged) -> RowIndex:
        """Where the rows of an argument are."""
        if batch.lengths is self.batch.lengths and capacity_of(batch) == capacity_of(self.batch):
            return self.index
        return RowIndex.of(batch.lengths, capacity_of(batch), self.bound)


def all_known(mapped: Sequence[Mapped]) -> bool:
    """Whether the lengths of all ragged arguments are known."""
    ragged = [m.value for m in mapped if isinstance(m.value, Ragged)]
    return all(known_lengths(x.lengths) is not None for x in ragged)


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
        for what, x in (("data", m.value.data), ("lengths", m.value.lengths)):
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


def find_sizes(mapped: Sequence[Mapped]) -> tuple[list[RowSize | None], list[RowSize]]:
    """The size of each argument, None for those that are not ragged; and all that there are.

    Raises:
      AxisError: arguments whose sizes have one name are known to differ in length.
    """
    groups: list[tuple[str | None, list[int]]] = []
    for i, m in enumerate(mapped):
        if not isinstance(m.value, Ragged):
            continue
        name = m.spec.name if isinstance(m.spec, RaggedSize) else None
        for known_as, members in groups:
            first = mapped[members[0]]
            if name is None and known_as is None and _same_lengths(m.value, first.value):
                members.append(i)
                break
            if name is not None and name == known_as:
                _check_equal(name, first, m)
                members.append(i)
                break
        else:
            groups.append((name, [i]))
    taken = {name for name, _ in groups if name is not None}
    fresh = (s for s in _NAMES if s not in taken)
    names = [name or next(fresh) for name, _ in groups]
    bounds = [min(mapped[i].value.max_length for i in members) for _, members in groups]
    batches = [mapped[members[0]].value for _, members in groups]
    symbols = _symbols(names, _lengths(names, batches, bounds))
    sizes_of: list[RowSize | None] = [None] * len(mapped)
    sizes = []
    described = zip(groups, names, symbols, batches, bounds, strict=True)
    for (_, members), name, symbol, batch, bound in described:
        of_lanes = all(isinstance(mapped[i].spec, SizeAlone) for i in members)
        size = RowSize(name, symbol, batch, bound, of_lanes)
        sizes.append(size)
        for i in members:
            sizes_of[i] = size
    return sizes_of, sizes


def _lengths(names: Sequence[str], batches: Sequence[Ragged], bounds: Sequence[int]) -> Lengths:
    """The lengths that rows of these sizes may have."""
    lengths = [known_lengths(batch.lengths) for batch in batches]
    if all(x is not None and len(x) for x in lengths):
        return Lengths(dict(zip(names, map(np.asarray, lengths), strict=True)), True)
    ranges = [
        np.arange(bound + 1) if x is None or not len(x) else np.unique(x)
        for x, bound in zip(lengths, bounds, strict=True)
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


def _same_lengths(a: Ragged, b: Ragged) -> bool:
    if a.lengths is b.lengths:
        return True
    x, y = known_lengths(a.lengths), known_lengths(b.lengths)
    return x is not None and y is not None and np.array_equal(x, y)


def _check_equal(name: str, first: Mapped, second: Mapped) -> None:
    x, y = known_lengths(first.value.lengths), known_lengths(second.value.lengths)
    if x is None or y is None or np.array_equal(x, y):
        return
    i = int(np.argmax(x != y))
    raise AxisError(
        f"in_axes calls the size of the rows of {first.path} and of {second.path} {name!r}, but "
        f"their lengths differ: row {i} has {x[i]} and {y[i]} elements. Give them different names."
    )


def row_avals(
    axis: Axis,
    mapped: Sequence[Mapped],
    sizes_of: Sequence[RowSize | None],
    sizes: Sequence[RowSize],
    dims: Sequence[Any],
) -> list[Any]:
    """The types of the arguments of one row, where its `sizes` are `dims`."""
    dim_of = {size.name: dim for size, dim in zip(sizes, dims, strict=True)}
    avals = []
    for m, size in zip(mapped, sizes_of, strict=True):
        if size is None:
            aval = example_aval(axis, jax.typeof(m.value), m.axis)
            if not isinstance(m.value, Tracer) and not any(aval.sharding.spec):
                # What is staged may run on each device, where this mesh is another one.
                aval = ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
            avals.append(aval)
            continue
        aval = jax.typeof(m.value.data)
        shape = list(aval.shape)
        shape[m.value.axis] = dim_of[size.name]
        row = ShapedArray(tuple(shape), aval.dtype, weak_type=False)
        lengths = _compat.varying_axes(jax.typeof(m.value.lengths))
        avals.append(_compat.with_varying_axes(row, _compat.varying_axes(aval) | lengths))
    return avals


SIZES_DIFFER = "The rows of these arguments have sizes of their own:"


@contextmanager
def sizes_in_errors(
    mapped: Sequence[Mapped], sizes_of: Sequence[RowSize | None], sizes: Sequence[RowSize]
) -> Iterator[None]:
    """Puts on top of errors about shapes which arguments have rows of different lengths."""
    try:
        yield
    except (TypeError, ValueError) as error:
        message = str(error.args[0]) if error.args else ""
        of_shapes = "shape" in message and not isinstance(error, BatchaxError)
        if len(sizes) > 1 and of_shapes and not message.startswith(SIZES_DIFFER):
            lines = [
                f"  {m.path}: {size.name} elements{_shown(size)}"
                for m, size in zip(mapped, sizes_of, strict=True)
                if size is not None
            ]
            remedy = 'Where they are the same, say so: in_axes=bx.ragged("n") for each of them.'
            message = "\n".join([SIZES_DIFFER, *lines, remedy, f"JAX says: {message}"])
            error.args = (message, *error.args[1:])
        raise


def _shown(size: RowSize) -> str:
    lengths = known_lengths(size.batch.lengths)
    return "" if lengths is None else f", {size.name} = {shown_lengths(lengths)}"


def capacity_of(batch: Ragged) -> int:
    return batch.data.shape[batch.axis]


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
