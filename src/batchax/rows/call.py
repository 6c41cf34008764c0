"""A call of a function of one row: its ragged arguments, the sizes that they share, its outputs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.sharding import AxisType

from batchax import _compat
from batchax.cache import Cache
from batchax.errors import ArgumentTypeError, AxisError, BatchaxError, UnsupportedError
from batchax.execution.call import Call
from batchax.frontend.advice import ABOUT_SHAPES, SIZES_DIFFER
from batchax.frontend.arguments import LocalRows, Mapped
from batchax.frontend.containers import AxisSpec, Parts
from batchax.frontend.in_axes import is_position
from batchax.frontend.outputs import AUTO, FlatOutputs, OutputArray, Reduce
from batchax.jaxprs.bodies import calls_in
from batchax.jaxprs.error_format import brief, show
from batchax.jaxprs.types import Aval, ClosedJaxpr, Value, Values
from batchax.kernel.axis import Axis
from batchax.kernel.inner import example_aval, stage_described
from batchax.kernel.registry import call_key
from batchax.rows.building import (
    as_lengths,
    elements_of,
    known_lengths,
    same_lengths,
    shown_lengths,
)
from batchax.rows.index import Ints, RowIndex, pack_rows
from batchax.rows.numpy_patches import rows_of_one_length
from batchax.rows.packed_forms import shorter
from batchax.rows.padded import CannotPad
from batchax.rows.ragged import Ragged, rows_of_one_size
from batchax.rows.sizes import (
    Dim,
    Lengths,
    Shape,
    SizeOfRow,
    has_symbols,
    line_of,
    names_of,
    needs_number,
    question_of,
    ragged_axes,
)


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

    def of_output(self, value: Value, path: str, size: int) -> Parts:
        if jnp.ndim(value) < len(self.names):
            what = "a number" if not jnp.ndim(value) else "an array of one axis"
            raise AxisError(
                f"out_axes gives {self!r} for {path}, which is {what} for each lane: a row needs "
                f"{'an axis' if len(self.names) == 1 else 'axes'} for its elements. Pass an int."
            )
        axes = range(len(self.names))
        as_rows = lambda x: x if isinstance(x, Ragged) else rows_of_one_size(jnp.asarray(x), axes)
        return Parts([value], [0], lambda outs: as_rows(outs[0]))

    def __repr__(self) -> str:
        return f"batchax.ragged({', '.join(map(repr, self.names))})"


class SizeAlone(RaggedSize):
    """Rows whose elements are not used, only their size."""


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
            'several, ragged("h", "w"), got none.'
        )
    for name in names:
        check_size_name(name, "ragged")
    return RaggedSize(names)


def check_size_name(name: object, maker: str) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name in _OPERATIONS:
        raise ArgumentTypeError(
            f'{maker}() takes a name for the size of rows, such as {maker}("n"), got {brief(name)}.'
        )


def check_max_size(max_size: int | None, called: str) -> None:
    if max_size is not None and not (is_position(max_size) and max_size >= 0):
        raise ArgumentTypeError(
            f"{called}: max_size must be a non-negative int, got {brief(max_size)}."
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
        # Rows of those lengths, of which the function receives the size alone.
        rows = Ragged(jnp.zeros(room, bool), sizes, bound)
        return Parts([rows], [SizeAlone((self.name,))], lambda examples: examples[0].shape[0])

    def _checked(self, value: Value, path: str) -> Ints:
        if isinstance(value, LocalRows):
            raise UnsupportedError(
                f"in_axes gives {self!r} for {path}, which is batchax.local(x): lanes are "
                "distributed by sizes that all processes must know. Pass all sizes on all "
                "processes, without local."
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
    check_max_size(max_size, "size()")
    return LaneSize(name, max_size)


@dataclass(frozen=True, eq=False)
class NotedSize:
    """What notes say of a size, which outlive the arrays that have it."""

    rows: int  # how many rows there are
    bound: int  # no row is longer
    capacity: int  # how many elements packed arrays hold
    lengths: np.ndarray | None  # those of the rows, or None where they are not known


@dataclass(frozen=True)
class RowSize:
    """A size that rows have, which some of the ragged arguments share."""

    name: str  # of its symbol
    symbol: Any  # the symbolic size
    lengths: Any  # of the rows, as the first argument that has it says
    bound: int  # no row is longer
    capacity: int  # how many elements packed arrays hold
    of_lanes: bool  # whether a lane was given the size, and has no rows

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    @cached_property
    def index(self) -> RowIndex:
        return RowIndex.of(self.lengths, self.capacity, self.bound)

    def index_in(self, capacity: int) -> RowIndex:
        """Where rows are in an array of another size."""
        if capacity == self.capacity:
            return self.index
        return RowIndex.of(self.lengths, capacity, self.bound)

    @cached_property
    def noted(self) -> NotedSize:
        return NotedSize(self.rows, self.bound, self.capacity, known_lengths(self.lengths))


SizesOf = tuple[RowSize, ...]
"""The size of an argument along each of its ragged axes; none for those that have no rows."""


def index_in(batch: Ragged, sizes: SizesOf) -> RowIndex:
    if len(sizes) == 1:
        (size,) = sizes
        # Arguments that share a size have the same lengths, which then need not be one array.
        if capacity_of(batch) == size.capacity:
            return size.index
    return RowIndex.of_axes(batch.each_length, capacity_of(batch), [s.bound for s in sizes])


def check_meshes(mapped: Sequence[Mapped]) -> None:
    """Raises for rows whose types carry a mesh, where they do not run.

    Rows of several lengths do not begin and end where shards do.
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
    """A ragged axis of an argument."""

    argument: int  # its index
    at: int  # which of its ragged axes
    name: str | None  # what `in_axes` calls the size


def _find_sizes(
    mapped: Sequence[Mapped], among: np.ndarray | None
) -> tuple[list[SizesOf], list[RowSize]]:
    """The sizes of each argument, none for those that are not ragged; and all sizes."""
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
        symbols = _symbols(names, Lengths(dict.fromkeys(names, among), False))
    else:
        symbols = _symbols(names, _lengths(names, lengths, bounds))
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


def capacity_for(batches: Sequence[Ragged], lengths: Value, bound: int) -> int:
    packed = next((x for x in batches if len(x.axes) == 1), None)
    if packed is not None:
        return capacity_of(packed)
    values = known_lengths(lengths)
    return lengths.shape[0] * bound if values is None else int(values.sum())


def _lengths(names: Sequence[str], lengths: Sequence[Any], bounds: Sequence[int]) -> Lengths:
    values = [known_lengths(x) for x in lengths]
    if all(x is not None and len(x) for x in values):
        return Lengths(dict(zip(names, map(np.asarray, values), strict=True)), True)
    ranges = [
        np.arange(bound + 1) if x is None or not len(x) else np.unique(x)
        for x, bound in zip(values, bounds, strict=True)
    ]
    return Lengths(dict(zip(names, ranges, strict=True)), False)


_known_symbols = Cache("symbolic sizes of rows", most=64)


def _symbols(names: Sequence[str], lengths: Lengths) -> tuple[Any, ...]:
    """Symbolic sizes, the same ones for calls whose rows may have the same lengths.

    What JAX has traced for types with these sizes, `jnp.tanh` of a row say, it then finds again.
    """
    values = tuple(lengths.values[name].tobytes() for name in names)
    key = (tuple(names), lengths.aligned, values)
    return _known_symbols.get(key, lambda: _compat.row_symbols(SizeOfRow, names, lengths))


_NAMES = ["n", "m", "k", "l", *(f"n{i}" for i in range(1, 1000))]


def _check_equal(name: str, paths: tuple[str, str], first: Value, second: Value) -> None:
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


def _row_aval(axis: Axis, m: Mapped, dims: Shape) -> Aval:
    """The type of an argument of one row, with `dims` along its ragged axes."""
    if not dims:
        aval = example_aval(axis, jax.typeof(m.value), m.axis)
        if not isinstance(m.value, Tracer) and not any(aval.sharding.spec):
            # What is staged may run on each device, where this mesh is another one.
            aval = ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)
        return aval
    aval = jax.typeof(m.value.data)
    row = ShapedArray(m.value.shape_of_row(dims), aval.dtype, weak_type=False)
    varying = (_compat.varying_axes(jax.typeof(x)) for x in m.value.each_length)
    return _compat.with_varying_axes(row, _compat.varying_axes(aval).union(*varying))


def _name_sizes(error: Exception, arguments: Sequence[tuple[Mapped, SizesOf]]) -> None:
    """Puts on top of an error about shapes which arguments have rows of different lengths."""
    message = str(error.args[0]) if error.args else ""
    several = len({size.name for _, own in arguments for size in own}) > 1
    others = BatchaxError, jax.errors.ConcretizationTypeError  # a traced number, in no shape
    of_shapes = ABOUT_SHAPES.search(message) and not isinstance(error, others)
    if several and of_shapes and not message.startswith(SIZES_DIFFER):
        lines = [
            f"  {m.path}: {' x '.join(s.name for s in own)} elements" + "".join(map(_shown, own))
            for m, own in arguments
            if own
        ]
        remedy = 'If the lengths are equal, pass in_axes=bx.ragged("n") for each of them.'
        message = "\n".join([SIZES_DIFFER, *lines, remedy, f"JAX says: {message}"])
        error.args = (message, *error.args[1:])


def _shown(size: RowSize) -> str:
    lengths = known_lengths(size.lengths)
    return "" if lengths is None else f", {size.name} = {shown_lengths(lengths)}"


def capacity_of(batch: Ragged) -> int:
    return batch.data.shape[batch.element_axis]


def with_room(data: Value, axis: int, capacity: int) -> Value:
    spare = capacity - data.shape[axis]
    if spare < 0:
        return lax.slice_in_dim(data, 0, capacity, axis=axis)
    if spare and jnp.issubdtype(data.dtype, jax.dtypes.extended):  # random keys cannot be padded
        rest = lax.full((*data.shape[:axis], spare, *data.shape[axis + 1 :]), 0, data.dtype)
        return lax.concatenate(_compat.varying_alike([data, rest]), axis)
    if spare:
        room = [(0, 0)] * data.ndim
        room[axis] = (0, spare)
        return jnp.pad(data, room)
    return data


def place_ragged(output: OutputArray, shape: Shape) -> OutputArray:
    """Where an output of that shape for each row, with symbols, goes before it is packed."""
    if not has_symbols(shape):
        return output
    shown = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    if output.spec is AUTO or output.spec == 0:
        return replace(output, spec=0)
    if isinstance(output.spec, Reduce):
        raise AxisError(
            f"out_axes gives {output.spec} for {output.path}, whose shape for each row is "
            f"{shown}: rows of different lengths cannot be reduced over the batch. Reduce over "
            "the row in the function first."
        )
    raise AxisError(
        f"out_axes gives {output.spec} for {output.path}, whose shape for each row is {shown}: a "
        "ragged output has its rows along axis 0. Pass 0 or batchax.AUTO."
    )


FoundLengths = tuple[Any, int | None]
"""A size that each row has found, and how many elements all rows have at most, if it is known."""


def as_ragged(
    padded: Value,
    shape: Shape,
    sizes: Sequence[RowSize],
    arguments: Sequence[tuple[Mapped, SizesOf]],
    sizes_found: Mapping[str, FoundLengths] | None = None,
) -> Ragged:
    """Padded rows, the rows in front, as a `Ragged`; `shape` is that of one row.

    `sizes` are all that rows have, `arguments` those of the function, each with its sizes, and
    `sizes_found` those that rows have not, and found.
    """
    if isinstance(padded, Ragged):  # of rows of one length together, whose bound is their own
        padded = padded.to_padded()
    sizes_found = sizes_found or {}
    axes = tuple(ragged_axes(shape))
    dims = [shape[at] for at in axes]
    bounds = [padded.shape[at + 1] for at in axes]
    if len(dims) == 1:
        size = next((size for size in sizes if size.symbol == dims[0]), None)
        if size is not None:
            data = pack_rows(padded, size.index, axes[0])
            return Ragged(data, size.lengths, bounds[0], axis=axes[0])
    lengths = [
        sizes_found[str(dim)][0] if str(dim) in sizes_found else _lengths_of(dim, sizes)
        for dim in dims
    ]
    room = padded.shape[0] * math.prod(bounds)
    elements = elements_of(tuple(lengths))
    if elements is not None:
        room = int(elements.sum())
    elif any(str(dim) in sizes_found for dim in dims):
        most = sizes_found[str(dims[0])][1] if len(dims) == 1 else None
        room = room if most is None else min(room, most)
    else:
        room = min(room, _capacity(dims, bounds, sizes, arguments))
    index = RowIndex.of_axes(lengths, room, bounds)
    return Ragged(pack_rows(padded, index, axes), lengths, tuple(bounds), axis=axes)


class Shorter(NamedTuple):
    """Rows that have so many elements less than those of a size, and no fewer than none."""

    size: RowSize
    less: int
    axis: int
    lengths: Ints
    bound: int
    capacity: int  # how many elements all of them have at most

    @classmethod
    def of(
        cls, shape: Shape, sizes: Sequence[RowSize], arguments: Sequence[tuple[Mapped, SizesOf]]
    ) -> Shorter:
        (axis,) = ragged_axes(shape)
        named = shorter(shape[axis], {size.name: size.bound for size in sizes})
        assert named is not None
        size = next(size for size in sizes if size.name == named[0])
        lengths, bound = _lengths_of(shape[axis], sizes), max(size.bound - named[1], 0)
        elements = elements_of((lengths,))
        if elements is None:
            room = _capacity([shape[axis]], [bound], sizes, arguments)
        else:
            room = int(elements.sum())
        return cls(size, named[1], axis, lengths, bound, room)


def _lengths_of(dim: Dim, sizes: Sequence[RowSize]) -> Ints:
    for size in sizes:
        if dim == size.symbol:
            return size.lengths
    used = [size for size in sizes if size.name in _compat.symbols(dim)]
    lengths = {size.name: size.index.lengths for size in used}
    lengths_known = all(isinstance(x, np.ndarray) for x in lengths.values())
    numpy = np if lengths_known else jnp
    row_sizes = numpy.maximum(_compat.evaluate_size(dim, lengths), 0)
    return np.asarray(row_sizes, np.int32) if lengths_known else row_sizes


def _capacity(
    dims: Shape,
    bounds: Sequence[int],
    sizes: Sequence[RowSize],
    arguments: Sequence[tuple[Mapped, SizesOf]],
) -> int:
    """How many elements all rows have at most, with axes of the sizes `dims`."""
    rows = sizes[0].rows
    capacity = rows * math.prod(bounds)
    for m, own in arguments:  # one may have some of these axes, and no more elements
        left = list(map(str, dims))
        if own and all(size.name in left and not left.remove(size.name) for size in own):
            others = [bound for dim, bound in zip(dims, bounds, strict=True) if str(dim) in left]
            capacity = min(capacity, capacity_of(m.value) * math.prod(others))
    names = frozenset().union(*map(_compat.symbols, dims))
    used = [size for size in sizes if size.name in names]
    if len(used) == 1:
        # Often fewer are enough: ``a + b * length`` is at least the number of elements for every
        # length, and all lengths together are at most the capacity of rows of that size.
        total = used[0].capacity
        at = np.arange(used[0].bound + 1)
        each = [np.maximum(_compat.evaluate_size(dim, {used[0].name: at}), 0) for dim in dims]
        values = np.prod(each, axis=0)
        slope = int(np.max(-((values[0] - values[1:]) // at[1:]), initial=0))
        capacity = min(capacity, int(rows * values[0] + slope * total))
    return capacity


@dataclass(frozen=True, eq=False)
class RowCall(Call):
    """A function of one row, called for all rows, with a symbol for each size of rows."""

    sizes_of: Sequence[SizesOf] = ()  # of each argument, none for those that are not ragged
    sizes: Sequence[RowSize] = ()  # all that there are
    # Whether the lengths of rows are values like any other, the first ones; if not, a program for
    # other lengths is another one.
    gives_lengths: bool = False

    @classmethod
    def of(cls, call: Call, among: np.ndarray | None = None) -> RowCall:
        """For the sizes of rows; `among` are the lengths of the rows that run, for one size."""
        sizes_of, sizes = _find_sizes(call.mapped, among)
        return cls(
            call.axis, call.function, call.mapped, call.strategy, sizes_of=sizes_of, sizes=sizes
        )

    @property
    def shapes(self) -> list[tuple[Any, ...]]:
        return [getattr(aval, "shape", ()) for aval in self.staged.out_avals]

    @property
    def bounds(self) -> dict[str, int]:
        return {size.name: size.bound for size in self.sizes}

    @property
    def lengths(self) -> list[Any]:
        return [size.lengths for size in self.sizes]

    @property
    def arrays(self) -> list[Any]:
        return [m.value.data if isinstance(m.value, Ragged) else m.value for m in self.mapped]

    @property
    def values(self) -> list[Any]:
        return [*self.lengths, *self.arrays] if self.gives_lengths else self.arrays

    @property
    def noted(self) -> list[tuple[NotedSize, ...]]:
        return list(dict.fromkeys(tuple(s.noted for s in own) for own in self.sizes_of if own))

    @property
    def arguments(self) -> list[tuple[Mapped, SizesOf]]:
        return list(zip(self.mapped, self.sizes_of, strict=True))

    def _stage(self) -> tuple[ClosedJaxpr, FlatOutputs]:
        staged, outputs = self.staged_for([size.symbol for size in self.sizes])
        shapes = [a.shape for a in staged.out_avals]
        described = list(map(place_ragged, outputs.described, shapes))
        return staged, replace(outputs, described=described)

    def staged_for(self, dims: Shape) -> tuple[ClosedJaxpr, FlatOutputs]:
        """The function of one row, whose sizes are `dims`, and its outputs."""
        dim_of = {size.name: dim for size, dim in zip(self.sizes, dims, strict=True)}
        given = self.arguments[self.constants :]
        avals = [_row_aval(self.axis, m, [dim_of[s.name] for s in own]) for m, own in given]
        try:
            return stage_described(self.axis, self.function, avals, [m.path for m, _ in given])
        except (TypeError, ValueError) as error:
            _name_sizes(error, given)
            raise

    def staged_at(self, lengths: Sequence[Any]) -> tuple[ClosedJaxpr, FlatOutputs]:
        """As `staged_for`, for rows of some lengths among others."""
        with rows_of_one_length(self.axis.name):
            return self.staged_for(lengths)

    @property
    def lengths_known(self) -> bool:
        ragged = (m.value for m, own in self.arguments if own)
        return all(elements_of(x.lengths) is not None for x in ragged)

    @property
    def traced(self) -> bool:
        """Whether running it traces operations, rather than computing them at once."""
        lengths = (size.index.lengths for size in self.sizes)
        return any(isinstance(x, Tracer) for x in (*self._known_values, *lengths))

    @property
    def _known_values(self) -> list[Any]:
        """The arrays, and what the function closes over if it was staged."""
        return [*self.arrays, *(() if self.program is None else self.staged.consts)]

    @property
    def tells_of_mesh(self) -> bool:
        """Whether types of what it is given tell of a mesh: one that is set, or of its arrays."""
        if not jax.sharding.get_abstract_mesh().empty:
            return True
        given = self._known_values if self.traced else ()
        return any(not jax.typeof(x).sharding.mesh.empty for x in given)

    def with_constants_passed(self) -> RowCall:
        call = super().with_constants_passed()
        assert isinstance(call, RowCall)
        added: list[SizesOf] = [()] * (call.constants - self.constants)
        return replace(call, sizes_of=[*added, *self.sizes_of])

    def with_values(self, values: Values) -> RowCall:
        if self.gives_lengths:
            count = len(self.sizes)
            return self.with_rows(values[:count], values[count:])
        given = zip(self.mapped, values, strict=True)
        return replace(
            self, mapped=[_put(m, x, getattr(m.value, "each_length", None)) for m, x in given]
        )

    def with_rows(self, lengths: Sequence[Any], arrays: Values) -> RowCall:
        given = {size.name: x for size, x in zip(self.sizes, lengths, strict=True)}
        mapped = [
            _put(m, x, tuple(given[size.name] for size in own) or None)
            for (m, own), x in zip(self.arguments, arrays, strict=True)
        ]
        sizes = {
            size.name: replace(
                size,
                lengths=given[size.name],
                capacity=capacity_for(
                    [m.value for m, own in zip(mapped, self.sizes_of, strict=True) if size in own],
                    given[size.name],
                    size.bound,
                ),
            )
            for size in self.sizes
        }
        sizes_of = [tuple(sizes[size.name] for size in own) for own in self.sizes_of]
        return replace(self, mapped=mapped, sizes=list(sizes.values()), sizes_of=sizes_of)

    @property
    def key(self) -> Hashable:
        arguments = [
            (jax.typeof(x), m.axis, tuple(s.name for s in own), m.value.axis if own else None)
            for x, (m, own) in zip(self.arrays, self.arguments, strict=True)
        ]
        rows = [
            (
                size.name,
                size.bound,
                size.capacity,
                None if self.gives_lengths else size.index.lengths.tobytes(),
            )
            for size in self.sizes
        ]
        specs = tuple(output.spec for output in self.described)
        return call_key(self.axis, self.staged, self.strategy, specs, *arguments, *rows)


def _put(m: Mapped, array: Value, lengths: Values | None) -> Mapped:
    if lengths is None:
        return m.put(array)
    old = m.value.each_length
    if array is m.value.data and all(x is y for x, y in zip(lengths, old, strict=True)):
        return m
    return m.put(Ragged(array, lengths, m.value.each_bound, axis=m.value.axes))


def reject_ordered(program: ClosedJaxpr) -> None:
    for call in (call for eqn in program.jaxpr.eqns for call in calls_in(eqn)):
        if _compat.in_order(call.effects):
            raise UnsupportedError(
                f"{_compat.user_line(call.source_info)}: a callback with ordered=True is not "
                "supported for rows that run in groups, by their lengths. Remove ordered=True, or "
                'what groups the rows: buckets=, layout="grouped", or code of the function that '
                "needs lengths as numbers."
            )


def reject_effects(program: ClosedJaxpr) -> None:
    for call in (call for eqn in program.jaxpr.eqns for call in calls_in(eqn)):
        raise UnsupportedError(
            f"{_compat.user_line(call.source_info)}: mesh does not support callbacks with effects "
            "for rows of different lengths: some rows run on two devices, so a callback would be "
            "called twice. Return values instead, or remove mesh."
        )


def explained(call: RowCall, error: Exception, on_mesh: bool) -> Exception:
    """What to raise where a function fails for symbolic sizes, and lengths are not known."""
    needs, sizes = needs_number(error), call.sizes
    known = on_mesh and call.lengths_known
    of_lanes = all(size.of_lanes for size in sizes)  # the user may have passed sizes alone
    row, length, batch, size = (
        ("lane", "size", "array of sizes", "n")
        if of_lanes
        else ("row", "length", "Ragged", "x.shape[0]")
    )
    remedy = f"Call it outside of jit, or close over the {batch}, so that {length}s are known"
    remedy = "Remove mesh" if known else remedy + (", and remove mesh" if on_mesh else "")
    reason = f"mesh runs one program for all {length}s" if known else f"their {length}s are traced"
    if call.program is not None and isinstance(error, CannotPad):
        return UnsupportedError(
            f"{error}\n{row.capitalize()}s of one {length} could run together, but {reason} here. "
            f"{remedy}."
        )
    if isinstance(error, BatchaxError) and not needs:
        return error
    names = ", ".join(size.name for size in sizes)
    if needs or call.program is not None or _works_for_known(call):
        if str(error).startswith(SIZES_DIFFER):  # and they are alike for rows of known lengths
            return UnsupportedError(f"{_line(error)}{error}")
        before = _compat.looked_up_before(names_of(error))
        return UnsupportedError(
            f"{_line(error)}the function needs the {length} of a {row} as a number, but {row}s "
            f"have a symbolic size ({names}) here, because {reason}: "
            f"{question_of(error)}.\nTo compute with the {length}, pass {size} to jax.numpy: "
            f"jnp.arange({size}), jnp.sqrt({size}).\nFor a number, "
            f"{remedy[0].lower()}{remedy[1:]}. Then {row}s of one {length} run together, or of "
            "one bucket with buckets=."
            + (
                f"\n{before[0]} was looked up before the call, so it is JAX's function. Call it as "
                f"{before[1]}, which takes symbolic sizes while {row}s are traced."
                if before
                else ""
            )
        )
    error.add_note(
        f"{row.capitalize()}s have a symbolic size ({names}) in the function, as {reason}."
        + (
            " Arguments whose rows have the same lengths share a size if in_axes says so: "
            'batchax.ragged("n") for each of them.'
            if len(sizes) > 1 and not of_lanes and not str(error).startswith(SIZES_DIFFER)
            else ""
        )
    )
    return error


def _line(error: Exception) -> str:
    line = line_of(error)
    return f"{line}: " if line else ""


def why_grouped(error: Exception) -> str:
    """Why rows run grouped by their known lengths: the operation, and the user's line."""
    if isinstance(error, CannotPad):
        return str(error).rstrip(".")
    return f"{_line(error)}the function needs a length as a number: {question_of(error)}"


def _works_for_known(call: RowCall) -> bool:
    """Whether rows of some lengths could be staged, where rows of any length cannot."""
    most = max(size.bound for size in call.sizes)
    for length in (most, most - 1, 4, 3, 2, 1):
        # Sizes of different names may differ, so they do here. None is 1 if there are several: JAX
        # repeats a single element along any number of others.
        lengths = [min(length - i, size.bound) for i, size in enumerate(call.sizes)]
        if min(lengths) < min(len(lengths), 2):
            continue
        try:
            call.staged_for(lengths)
        except Exception:
            continue
        return True
    return False
