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
from batchax.frontend.arguments import Mapped
from batchax.kernel.axis import Axis
from batchax.kernel.inner import example_aval
from batchax.memo import Memo
from batchax.rows.checks import elements_of, known_lengths, same_lengths, shown_lengths
from batchax.rows.comparisons import Lengths, SizeOfRow
from batchax.rows.index import RowIndex
from batchax.rows.ragged import Ragged
from batchax.rows.row_size import RaggedSize, SizeAlone


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
        """How many rows there are."""
        return self.lengths.shape[0]

    @cached_property
    def index(self) -> RowIndex:
        """Where rows are in packed arrays."""
        return RowIndex.of(self.lengths, self.capacity, self.bound)

    @cached_property
    def noted(self) -> NotedSize:
        """What notes for `explain` say of it."""
        return NotedSize(self.rows, self.bound, self.capacity, known_lengths(self.lengths))


SizesOf = tuple[RowSize, ...]
"""The size of an argument along each of its ragged axes; none for those that have no rows."""


def index_in(batch: Ragged, sizes: SizesOf) -> RowIndex:
    """Where the rows of an argument of these sizes are."""
    if len(sizes) == 1:
        (size,) = sizes
        if batch.lengths is size.lengths and capacity_of(batch) == size.capacity:
            return size.index
    return RowIndex.of_axes(batch.each_length, capacity_of(batch), [s.bound for s in sizes])


def all_known(mapped: Sequence[Mapped]) -> bool:
    """Whether the lengths of all ragged arguments are known."""
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
                f"in_axes gives {m.spec!r} for {m.path}, whose rows have {axes}: give a name for "
                "each."
            )
        yield from (_Along(i, k, name) for k, name in enumerate(names))


def capacity_for(batches: Sequence[Ragged], lengths: Any, bound: int) -> int:
    """The room of packed arrays whose rows have such lengths, as these arguments do."""
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
            f"differ: row {i} has {x[i]} and {y[i]} elements along them. Give them different "
            "names."
        )
    raise AxisError(
        f"in_axes calls the size of the rows of {paths[0]} and of {paths[1]} {name!r}, but "
        f"their lengths differ: row {i} has {x[i]} and {y[i]} elements. Give them different names."
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


SIZES_DIFFER = "The rows of these arguments have sizes of their own:"


@contextmanager
def sizes_in_errors(
    mapped: Sequence[Mapped], sizes_of: Sequence[SizesOf], sizes: Sequence[RowSize]
) -> Iterator[None]:
    """Puts on top of errors about shapes which arguments have rows of different lengths."""
    try:
        yield
    except (TypeError, ValueError) as error:
        message = str(error.args[0]) if error.args else ""
        of_shapes = "shape" in message and not isinstance(error, BatchaxError)
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
    """How many elements its data has room for."""
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
