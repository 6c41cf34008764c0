"""A `Ragged` made of rows, and rows taken from one: checks, joining, selecting."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import BatchOfRows, DictOfBatches, is_container
from batchax.frontend.options import checked_list, converted
from batchax.jaxprs.error_format import brief, show
from batchax.jaxprs.types import Tree, Value
from batchax.rows.index import Axes, Ints, RowIndex, pack_rows
from batchax.stack import structures_differ


def known_lengths(lengths: Value) -> np.ndarray | None:
    """`lengths` as a NumPy array, or None where their values are not known."""
    return None if isinstance(lengths, (Tracer, jax.ShapeDtypeStruct)) else np.asarray(lengths)


def same_lengths(a: Value, b: Value) -> bool:
    if a is b:
        return True
    x, y = known_lengths(a), known_lengths(b)
    return x is not None and y is not None and np.array_equal(x, y)


def as_data(data: Value, what: str = "data") -> Value:
    if isinstance(data, (jax.Array, Tracer, jax.ShapeDtypeStruct)):
        return data
    try:
        if isinstance(data, np.ndarray):
            converted(data, jax.dtypes.canonicalize_dtype(data.dtype))  # JAX keeps the last bits
        return jnp.asarray(data)
    except OverflowError as error:
        raise OverflowError(f"Ragged: {what}: {error}.") from None
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            f"Ragged: {what} must be an array, got {type(data).__name__}. For a list of rows use "
            "Ragged.from_rows(rows)."
        ) from None


def _as_row(row: Value, what: str) -> Value:
    """As `as_data`, on the host if it is there: JAX compiles a transfer for each shape."""
    if type(row) in (list, tuple) and all(type(x) in (bool, int, float, complex) for x in row):
        row = np.asarray(row)
    if not isinstance(row, np.ndarray) or row.dtype == object:
        return as_data(row, what)
    dtype = as_data(np.empty(0, row.dtype), what).dtype
    try:
        return converted(row, dtype)
    except OverflowError as error:
        raise OverflowError(f"Ragged: {what}: {error}.") from None


def as_lengths(lengths: Value, what: str = "lengths") -> Value:
    if not isinstance(lengths, (jax.Array, Tracer, jax.ShapeDtypeStruct)):
        try:
            lengths = np.asarray(lengths)
        except ValueError:
            lengths = np.zeros((), object)
        if lengths.size == 0 and lengths.ndim == 1:
            lengths = lengths.astype(np.int32)
        if np.issubdtype(lengths.dtype, np.integer):
            # A length beyond int32 becomes its largest number: still more than `data` can hold,
            # so the check of lengths raises.
            lengths = np.clip(lengths, -(2**31), 2**31 - 1).astype(np.int32)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ArgumentTypeError(
            f"Ragged: {what} must be integers, one for each row, got dtype {lengths.dtype}."
        )
    if lengths.ndim != 1:
        raise AxisError(
            f"Ragged: {what} must have one axis, with an entry for each row; its shape is "
            f"{lengths.shape}."
        )
    return lengths


def check_fill_value(fill_value: Value, data: Value) -> None:
    of_numbers = not jnp.issubdtype(data.dtype, jax.dtypes.prng_key)
    if fill_value is None or isinstance(fill_value, Tracer) or not of_numbers:
        return
    given = np.asarray(fill_value)
    fits = given.ndim == 0 and given.dtype.kind not in "OSUMm"
    if fits and jnp.issubdtype(data.dtype, jnp.integer):
        with np.errstate(invalid="ignore"):
            fits = given.dtype.kind != "c" and given.astype(data.dtype) == given
    elif fits and not jnp.issubdtype(data.dtype, jnp.complexfloating):
        fits = given.dtype.kind != "c"
    if not fits:
        raise ArgumentTypeError(
            f"Ragged.to_padded: fill_value must be a number of dtype {data.dtype}, which elements "
            f"of rows have, got {show(fill_value)}."
        )


def checked_axis(axis: int, array: Value, more: int = 0) -> int:
    """An axis of rows that have so many axes more than their array, not negative."""
    ndim = array.ndim + more
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise ArgumentTypeError(f"Ragged: axis must be an int, got {brief(axis)}.")
    if not -ndim <= axis < ndim:
        raise AxisError(
            f"Ragged: axis is {axis}, but a row has {ndim} axes; its array has shape "
            f"{tuple(array.shape)}."
        )
    return int(axis) % ndim


def checked_axes(axis: Axes, array: Value, packed: bool = False) -> Axes:
    """The ragged axis of a row, or its ragged axes, none of them negative.

    `array` is a row; or rows, `packed`, which have one axis for all that are ragged.
    """
    if not isinstance(axis, (tuple, list)):
        return checked_axis(axis, array)
    more = len(axis) - 1 if packed and array.ndim else 0
    axes = tuple(checked_axis(each, array, more) for each in axis)
    if not axes or list(axes) != sorted(set(axes)):
        raise AxisError(
            f"Ragged: axis is {brief(axis)}; ragged axes are different ones, and in order, such as "
            "(0, 1)."
        )
    return axes[0] if len(axes) == 1 else axes


def as_lengths_of(axis: Axes, lengths: Value) -> Ints | tuple[Ints, ...]:
    """The lengths along the ragged axis, or a tuple of those along each of several."""
    if isinstance(axis, int):
        return as_lengths(lengths)
    try:
        each = list(lengths)
    except TypeError:
        each = []
    if len(each) != len(axis):
        raise AxisError(
            f"Ragged: axis is {brief(axis)}, {len(axis)} ragged axes, but lengths are "
            f"{len(each)}. Pass "
            "the lengths along each, lengths=(heights, widths), say, each with an entry for each "
            "row."
        )
    each = tuple(as_lengths(x, f"lengths[{k}]") for k, x in enumerate(each))
    for k, x in enumerate(each):
        if x.shape != each[0].shape:
            raise AxisError(
                f"Ragged: lengths[0] is of {each[0].shape[0]} rows, and lengths[{k}] of "
                f"{x.shape[0]}. Pass each with an entry for each row."
            )
    return each


def as_bounds(axis: Axes, max_length: Bounds) -> tuple[int | None, ...]:
    """The bound of the lengths along each ragged axis, None for those that have none."""
    count = 1 if isinstance(axis, int) else len(axis)
    bounds: tuple[Any, ...] = (max_length,) * count
    if isinstance(max_length, (tuple, list)) and not isinstance(axis, int):
        bounds = tuple(max_length)
    if len(bounds) != count:
        raise AxisError(
            f"Ragged: max_length is {brief(max_length)}, for the ragged axes {brief(axis)}. Pass "
            "a bound for each, or one int."
        )
    for each in bounds:
        check_max_length(each)
    return tuple(None if each is None else int(each) for each in bounds)


def as_tuple(x: Value) -> tuple[Any, ...]:
    """The values for each ragged axis, as a tuple also where there is one."""
    return x if isinstance(x, tuple) else (x,)


def elements_of(lengths: Ints | tuple[Ints, ...]) -> np.ndarray | None:
    """How many elements each row has, or None where that is not known.

    Args:
      lengths: those along the ragged axis, or a tuple of those along each of several.
    """
    each = [known_lengths(x) for x in as_tuple(lengths)]
    if any(x is None for x in each):
        return None
    return np.prod([x for x in each if x is not None], axis=0, dtype=np.int64)


def check_lengths(
    lengths: Sequence[np.ndarray], capacity: int, most: Sequence[int | None], data: Value, at: int
) -> None:
    for k, each in enumerate(lengths):
        name = length_name(k, len(lengths))
        if (each < 0).any():
            i = int(np.argmax(each < 0))
            raise AxisError(f"Ragged: {name}[{i}] is {each[i]}; a length cannot be negative.")
    elements = elements_of(tuple(lengths))
    assert elements is not None
    total = int(elements.sum())
    if total > capacity:
        have = "the lengths add up to" if len(lengths) == 1 else "rows of these lengths have"
        raise AxisError(
            f"Ragged: {have} {total}{'' if len(lengths) == 1 else ' elements'}, but data, of shape "
            f"{tuple(data.shape)}, has {capacity} elements along axis {at}. Pass the rows one "
            "after another, without padding; for padded rows use "
            "Ragged.from_padded(padded, lengths)."
        )
    for k, (each, bound) in enumerate(zip(lengths, most, strict=True)):
        if bound is not None:
            check_each(each, bound, f"max_length, {bound}", length_name(k, len(lengths)))


def length_name(k: int, count: int) -> str:
    return "lengths" if count == 1 else f"lengths[{k}]"


def check_each(lengths: np.ndarray, most: int, what: str, name: str = "lengths") -> None:
    if (lengths > most).any():
        i = int(np.argmax(lengths > most))
        raise AxisError(f"Ragged: {name}[{i}] is {lengths[i]}, more than {what}.")


def check_max_length(most: int | None) -> None:
    if most is None:
        return
    if not isinstance(most, (int, np.integer)) or isinstance(most, bool):
        raise ArgumentTypeError(f"Ragged: max_length must be an int, got {show(most)}.")
    if most < 0:
        raise AxisError(f"Ragged: max_length is {most}; no row has fewer than 0 elements.")


def without(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(size for k, size in enumerate(shape) if k not in axes)


def shown_lengths(lengths: np.ndarray) -> str:
    values = [*map(str, lengths)]
    return "[" + ", ".join(values if len(values) < 9 else [*values[:6], "...", values[-1]]) + "]"


@_compat.api_boundary
class RowBatch:
    """What a `Ragged` holds."""

    data: Any
    lengths: Any
    axis: Any
    max_length: Any

    def __init__(
        self, data: Value, lengths: Value, max_length: Bounds = None, *, axis: Axes = 0
    ) -> None:
        raise NotImplementedError

    @property
    def axes(self) -> tuple[int, ...]:
        """The ragged axes of a row, also where there is one.

        :meta private:
        """
        return as_tuple(self.axis)

    @property
    def element_axis(self) -> int:
        """Where `data` has the elements of rows.

        :meta private:
        """
        return self.axes[0]

    @property
    def each_length(self) -> tuple[Any, ...]:
        """The lengths along each ragged axis.

        :meta private:
        """
        return as_tuple(self.lengths)

    @property
    def each_bound(self) -> tuple[int, ...]:
        """The bound of the lengths along each ragged axis.

        :meta private:
        """
        return as_tuple(self.max_length)

    def check_is_one_batch(self, called: str = "Ragged") -> None:
        """Raises for a derivative, and for a stack of several batches.

        :meta private:
        """
        if any(x.dtype == jax.dtypes.float0 for x in self.each_length):
            raise ArgumentTypeError(
                f"{called}: this is a derivative, whose lengths JAX leaves empty (dtype float0). "
                "Its rows are those of x.with_data(derivative.data), for the x it belongs to."
            )
        if any(x.ndim != 1 for x in self.each_length):
            raise ArgumentTypeError(
                f"{called}: the lengths have shape {self.each_length[0].shape}: this is a stack of "
                "batches of rows, which jax.vmap makes of results that are rows. Batch i of it is "
                "jax.tree.map(lambda leaf: leaf[i], x)."
            )


S = TypeVar("S", bound="Selecting")


@_compat.api_boundary
class Selecting(RowBatch):
    """The methods of `Ragged` that take rows out, and put rows together; lengths must be known."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows())

    def __getitem__(self, i: object) -> Any:
        """Selects one row as an array (an int), or several as a `Ragged`.

        Args:
          i: An int; a slice; a sequence or array of ints, or of a bool for each row.

        Raises:
          IndexError: There is no such row.
          ArgumentTypeError: `i` is none of these, or lengths are traced.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
          >>> print(x[1], x[-2:].lengths, x[[2, 0]].lengths)
          [1 2 3] [3 2] [2 1]
        """
        ends = self._known_ends()
        if isinstance(i, slice):
            return self._some(ends, range(len(ends))[i])
        is_indices = isinstance(i, (int, list, tuple, range)) or hasattr(i, "__array__")
        chosen = np.asarray(i if is_indices else None)
        if chosen.ndim == 0 and np.issubdtype(chosen.dtype, np.integer):
            return self._row(ends, _place(int(chosen), len(ends)))
        if chosen.ndim == 1:
            if chosen.dtype == bool and len(chosen) == len(ends):
                return self._some(ends, np.flatnonzero(chosen))
            if np.issubdtype(chosen.dtype, np.integer) or not chosen.size:
                return self._some(ends, [_place(int(k), len(ends)) for k in chosen])
        raise ArgumentTypeError(
            f"Ragged: x[i] is row i, for an int; some rows, for a slice, or a list of ints or of a "
            f"bool for each row; got {show(i)}."
        )

    @classmethod
    def concatenate(cls: type[S], batches: Sequence[S]) -> S:
        """Concatenates the rows of several batches.

        Args:
          batches: At least one `Ragged`. Rows may differ only in their length.

        Raises:
          AxisError: There are none, or their rows differ in dtype, or in another axis than the
            ragged one.
          ArgumentTypeError: One is not a `Ragged`, or lengths are traced.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2])
          >>> bx.Ragged.concatenate([x, x[:1]]).lengths.tolist()
          [1, 3, 2, 1]
        """
        batches = list(batches)
        if not batches:
            raise AxisError("Ragged.concatenate: batches is empty. Pass at least one Ragged.")
        for k, x in enumerate(batches):
            if not isinstance(x, Selecting):
                raise ArgumentTypeError(
                    f"Ragged.concatenate: batches[{k}] must be a Ragged, got {type(x).__name__}. "
                    "Of rows Ragged.from_rows(rows) makes one."
                )
        first = batches[0]
        kinds = [_kind(x) for x in batches]
        for k, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise AxisError(
                    f"Ragged.concatenate: batches[{k}] has rows of {kind}, and batches[0] of "
                    f"{kinds[0]}. Rows may differ in their length only."
                )
        parts = [x._packed(x._known_ends()) for x in batches]
        every = zip(*(x.each_length for x in batches), strict=True)
        lengths = [np.concatenate(list(map(np.asarray, each))) for each in every]
        most = tuple(map(max, zip(*(x.each_bound for x in batches), strict=True)))
        return cls(_one_after_another(parts, first.element_axis), lengths, most, axis=first.axes)

    def rows(self) -> list[Any]:
        """Lists the rows as arrays.

        Raises:
          ArgumentTypeError: Lengths are traced.

        Example:
          >>> [row.tolist() for row in bx.Ragged(jnp.arange(6), [1, 3, 2]).rows()]
          [[0], [1, 2, 3], [4, 5]]
        """
        ends = self._known_ends()
        return [self._row(ends, i) for i in range(len(ends))]

    def _some(self: S, ends: np.ndarray, chosen: Sequence[int] | np.ndarray) -> S:
        parts = [self._elements(ends, int(i)) for i in chosen] or [self._packed(ends[:0])]
        lengths = [np.asarray(x)[np.asarray(chosen, int)] for x in self.each_length]
        data = _one_after_another(parts, self.element_axis)
        return type(self)(data, lengths, self.each_bound, axis=self.axes)

    def _packed(self, ends: np.ndarray) -> Value:
        """The elements of rows, without those behind the last row."""
        return self._part(0, int(ends[-1]) if len(ends) else 0)

    def _known_ends(self) -> np.ndarray:
        self.check_is_one_batch()
        elements = elements_of(self.lengths)
        if elements is None:
            raise ArgumentTypeError(
                "Ragged: a row has its own shape, so lengths must be known, but these are traced. "
                "Take rows outside of jit, or use to_padded()."
            )
        return np.cumsum(elements)

    def _row(self, ends: np.ndarray, i: int) -> Value:
        sizes = [int(np.asarray(x)[i]) for x in self.each_length]
        return as_row(self._elements(ends, i), self.axes, sizes)

    def _elements(self, ends: np.ndarray, i: int) -> Value:
        return self._part(int(ends[i - 1]) if i else 0, int(ends[i]))

    def _part(self, start: int, stop: int) -> Value:
        return part_along(self.data, self.element_axis, start, stop)


def part_along(x: Value, axis: int, start: int, stop: int | None) -> Value:
    return x[(*[slice(None)] * axis, slice(start, stop))]


def as_row(elements: Value, axes: Sequence[int], lengths: Sequence[int]) -> Value:
    """The elements of a row, which follow one another along the first of its ragged axes, as it."""
    if len(axes) == 1:
        return elements
    at = axes[0]
    shape = (*elements.shape[:at], *lengths, *elements.shape[at + 1 :])
    numpy = np if isinstance(elements, np.ndarray) else jnp
    return numpy.moveaxis(elements.reshape(shape), range(at, at + len(axes)), axes)


def as_elements(row: Value, axes: Sequence[int]) -> Value:
    """The reverse of `as_row`."""
    if len(axes) == 1:
        return row
    numpy, at = np if isinstance(row, np.ndarray) else jnp, axes[0]
    row = numpy.moveaxis(row, axes, range(at, at + len(axes)))
    shape = row.shape
    size = int(np.prod(shape[at : at + len(axes)]))
    return row.reshape(*shape[:at], size, *shape[at + len(axes) :])


def _one_after_another(parts: Sequence[Any], axis: int) -> Value:
    """Joined along an axis: of NumPy if all are, as rows may be that were never on a device."""
    numpy = np if all(isinstance(x, np.ndarray) for x in parts) else jnp
    return numpy.concatenate(parts, axis=axis)


def _place(i: int, count: int) -> int:
    if not -count <= i < count:
        raise IndexError(f"Ragged: there is no row {i} of {count} rows")
    return i % count


def _kind(x: Value) -> str:
    shape = ["n" if n is None else str(n) for n in x.shape[1:]]
    return f"{x.data.dtype}[{', '.join(shape)}]"


_NAME = "Ragged.from_rows: rows"


def leaves_of_rows(rows: Sequence[Any]) -> tuple[list[tuple[str, list[Any]]], Any]:
    """For each leaf of the rows, its path and what the rows have there; and their structure."""
    flat = [jax.tree_util.tree_flatten_with_path(row, is_leaf=_is_leaf) for row in rows]
    first, structure = flat[0]
    if not first or any(isinstance(row, list) for row in rows):  # a list is an array, as for NumPy
        return [("", list(rows))], jax.tree.structure(0)
    for i, (_, other) in enumerate(flat):
        if other != structure:
            raise AxisError(structures_differ(_NAME, rows, i))
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return [(jax.tree_util.keystr(at[0][0]), [x for _, x in at]) for at in columns], structure


def join(path: str, rows: Sequence[Any], axis: Axes) -> tuple[Any, list[np.ndarray], Any]:
    """The elements of rows one after another, the lengths of rows along each axis, and the axes.

    `rows` are what each of the user's rows has in the leaf `path`, and `axis` is what the user
    gave.
    """
    for i, x in enumerate(rows):
        if is_container(x):
            raise ArgumentTypeError(f"{_NAME}[{i}]{path} must be an array, got {type(x).__name__}.")
    arrays = [_as_row(x, f"rows[{i}]{path}") for i, x in enumerate(rows)]
    first = arrays[0]
    if not path and not first.ndim:
        raise AxisError(
            f"{_NAME}[0] is a number, which has no axis for the elements of a row. Pass an array "
            "for each row, such as np.asarray([1.0])."
        )
    if path and not first.ndim:
        raise AxisError(
            f"{_NAME}[0]{path} is a number, which has no axis for the elements of a row. Stack "
            f"what each row has one of, jnp.stack([row{path} for row in rows]), and pass it as "
            "another argument."
        )
    checked = checked_axes(axis, first)
    axes = (checked,) if isinstance(checked, int) else checked
    for i, x in enumerate(arrays):
        if x.dtype != first.dtype:
            remedy = "Convert them to one dtype."
            if any(isinstance(row, (list, tuple)) for row in rows):
                both = jnp.result_type(x, first)
                remedy = f"Lists have the dtype of their numbers. Pass np.asarray(row, np.{both})."
            raise ArgumentTypeError(
                f"{_NAME}[{i}]{path} has dtype {x.dtype}, but rows[0]{path} has {first.dtype}. "
                f"{remedy}"
            )
        if x.ndim != first.ndim or without(x.shape, axes) != without(first.shape, axes):
            along = f"axis {axes[0]}" if len(axes) == 1 else f"axes {checked}"
            pairs = enumerate(zip(x.shape, first.shape, strict=False))
            differ = tuple(k for k, (n, m) in pairs if n != m or k in axes)
            remedy = f" Pass axis={differ}." if x.ndim == first.ndim else ""
            raise AxisError(
                f"{_NAME}[{i}]{path} has shape {x.shape} and rows[0]{path} {first.shape}: rows may "
                f"differ along {along} only.{remedy}"
            )
    lengths = [np.array([x.shape[k] for x in arrays], np.int32) for k in axes]
    elements = [as_elements(x, axes) for x in arrays]
    return _one_after_another(elements, axes[0]), lengths, axes


def check_same_lengths(
    first: tuple[str, Sequence[np.ndarray]], other: tuple[str, Sequence[np.ndarray]]
) -> None:
    (path, every), (there, all_others) = first, other
    for lengths, others in zip(every, all_others, strict=True):
        if not (lengths != others).any():
            continue
        i = int(np.argmax(lengths != others))
        raise AxisError(
            f"{_NAME}[{i}]{there} has length {others[i]}, but rows[{i}]{path} has length "
            f"{lengths[i]}: the leaves of a row have one length. Make another batch of the others, "
            f"Ragged.from_rows([row{there} for row in rows]), or if all have one length, "
            f"jnp.stack([row{there} for row in rows])."
        )


def _is_leaf(x: Value) -> bool:
    """Whether `x` is one array, as `Ragged` takes it, by JAX's account of trees or not."""
    numbers = type(x) in (list, tuple) and all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(x))
    return numbers or is_container(x)


class RaggedDict(DictOfBatches):
    """A dict with batches of rows in it, of which those with the same lengths share one array.

    A pytree with the leaves of a plain dict. A transformation puts another object into the place of
    each leaf, so the structure holds which lengths are one array, and what JAX builds has one
    again.
    """

    def copy(self) -> RaggedDict:
        return RaggedDict(self)

    def __or__(self, other: object) -> RaggedDict:
        return RaggedDict({**self, **other}) if isinstance(other, dict) else NotImplemented

    def __ror__(self, other: object) -> RaggedDict:
        return RaggedDict({**other, **self}) if isinstance(other, dict) else NotImplemented


def _flatten(batches: RaggedDict) -> tuple[list[Any], tuple[Any, ...]]:
    distinct: list[Any] = []

    def number(lengths: Ints) -> int:
        for i, other in enumerate(distinct):
            if _are_one(lengths, other):
                return i
        distinct.append(lengths)
        return len(distinct) - 1

    def numbered(x: Value) -> Tree:
        # A tree of what stands for leaves, such as their shardings, keeps the structure it has.
        if not _are_arrays(x):
            return x
        part = _part_of(x, x.lengths)
        part.shared = tuple(map(number, x.each_length))
        return part

    keys = sorted(batches)  # as JAX does it for a dict
    return [_map_rows(numbered, batches[key]) for key in keys], tuple(keys)


def _flatten_with_keys(batches: RaggedDict) -> tuple[Iterable[Any], tuple[Any, ...]]:
    children, keys = _flatten(batches)
    return zip(map(jax.tree_util.DictKey, keys), children, strict=True), keys


def _unflatten(keys: tuple[Any, ...], children: Iterable[Any]) -> Tree:
    first: dict[int, Any] = {}
    rows = False

    def relinked(x: Value) -> Tree:
        nonlocal rows
        rows = True
        if x.shared is None or not _are_arrays(x):
            return x
        each = x.each_length
        if x.rebuilt:  # an argument of a function has its lengths still
            each = tuple(map(_one_of, map(first.setdefault, x.shared, each), each))
        return _part_of(x, each if isinstance(x.lengths, tuple) else each[0])

    values = [_map_rows(relinked, x) for x in children]
    # Without rows it is a row, or a result for each batch.
    return (RaggedDict if rows else dict)(zip(keys, values, strict=True))


def _map_rows(function: Callable[[Any], Any], tree: Tree) -> Tree:
    if isinstance(tree, BatchOfRows):
        return function(tree)
    is_rows = lambda x: isinstance(x, BatchOfRows)
    return jax.tree.map(lambda x: function(x) if is_rows(x) else x, tree, is_leaf=is_rows)


def _one_of(first: Ints, lengths: Ints) -> Ints:
    """The first of lengths that were one array, unless it is seen that they no longer are.

    Those on a device are trusted: a look at them would wait for what computes them.
    """
    on_host = isinstance(first, np.ndarray) and isinstance(lengths, np.ndarray)
    same = _are_one(first, lengths) if on_host else first.shape == lengths.shape
    return first if same else lengths


def _are_one(a: Ints, b: Ints) -> bool:
    """Whether lengths are one array, or seen to be equal."""
    if a is b:
        return True
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.dtype != b.dtype:
        return False
    return a.shape == b.shape and (a.dtype == jax.dtypes.float0 or np.array_equal(a, b))


def _are_arrays(rows: Any) -> bool:
    return all(hasattr(lengths, "dtype") for lengths in rows.each_length)


def _part_of(rows: Any, lengths: Ints | tuple[Ints, ...]) -> Any:
    return rows.tree_unflatten((rows.max_length, rows.axis, None), (rows.data, lengths))


jax.tree_util.register_pytree_with_keys(RaggedDict, _flatten_with_keys, _unflatten, _flatten)


B = TypeVar("B", bound="Building")

Bounds = int | tuple[int | None, ...] | None


@_compat.api_boundary
class Building(RowBatch):
    """The methods of `Ragged` that make one."""

    @overload
    @classmethod
    def from_rows(
        cls: type[B], rows: Sequence[ArrayLike], max_length: Bounds = None, *, axis: Axes = 0
    ) -> B: ...
    @overload
    @classmethod
    def from_rows(
        cls, rows: Sequence[Any], max_length: Bounds = None, *, axis: Axes = 0
    ) -> Tree: ...
    @classmethod
    def from_rows(cls, rows: Sequence[Any], max_length: Bounds = None, *, axis: Axes = 0) -> Tree:
        """Builds a batch from arrays of different lengths, or from pytrees of such arrays.

        Args:
          rows: Arrays of one dtype that differ only in their size along `axis`. Or pytrees of one
            structure, such as dicts, whose leaves are such arrays of one length in each row.
          max_length: As for `Ragged`.
          axis: The ragged axis of a row, or of each leaf; several, ``(0, 1)``, for images.

        Returns:
          A `Ragged` of the rows. For pytrees: a pytree with a `Ragged` for each leaf, which
          `unstack` splits into rows. For dicts: a subclass of dict whose entries share their
          lengths, also under ``jax.jit``.

        Raises:
          AxisError: There is no row; two differ in structure or in another axis; or a leaf is a
            number, or has another length than the rest of its row.
          ArgumentTypeError: A row or leaf is not an array, or two differ in dtype.
          OverflowError: An integer does not fit into the dtype of JAX.

        Example:
          >>> x = bx.Ragged.from_rows([jnp.arange(3), jnp.arange(1)])
          >>> print(bx.vmap(jnp.sum)(x))
          [3 0]
          >>> rows = [{"x": np.ones((n, 2)), "w": np.arange(n)} for n in (3, 1)]
          >>> print(bx.vmap(lambda row: row["w"] @ row["x"])(bx.Ragged.from_rows(rows)))
          [[3. 3.]
           [0. 0.]]
          >>> images = [np.ones((2, 3)), np.ones((1, 4))]
          >>> bx.Ragged.from_rows(images, axis=(0, 1))
          Ragged(2 rows of float32[n, m], lengths=([2, 1], [3, 4]), max_length=(2, 4))
        """
        rows = checked_list("Ragged.from_rows", "rows", rows)
        if not rows:
            raise AxisError(
                "Ragged.from_rows needs at least one row: without any, neither dtype nor shape "
                "are known. For a batch of no rows, pass Ragged(data, lengths) with empty arrays."
            )
        leaves, structure = leaves_of_rows(rows)
        joined = [(path, *join(path, values, axis)) for path, values in leaves]
        first, _, lengths, _ = joined[0]
        for path, _, others, _ in joined[1:]:
            check_same_lengths((first, lengths), (path, others))
        batches: list[Any] = [cls(data, lengths, max_length, axis=at) for _, data, _, at in joined]
        for batch in batches:
            batch.lengths = batches[0].lengths
        tree = jax.tree.unflatten(structure, batches)
        return RaggedDict(tree) if type(tree) is dict else tree

    @classmethod
    def from_padded(
        cls: type[B], padded: Value, lengths: Value, max_length: Bounds = None, *, axis: Axes = 0
    ) -> B:
        """Builds a batch from rows that are padded to one size.

        Args:
          padded: An array of shape ``(B, ..., N, ...)``, with the ragged axis at `axis` of a row.
            Padding is dropped.
          lengths: The lengths, of shape ``(B,)``; a tuple for several axes. If they are traced,
            `data` of the result has ``B * N`` elements (``B * H * W``), and lengths are clipped
            to the size of a row.
          max_length: An upper bound of the lengths. Default: N.
          axis: The ragged axis of a row, or several, in order.

        Returns:
          A `Ragged` of B rows, without the padding.

        Raises:
          AxisError: Shapes do not fit, or a known length exceeds the size of a row.

        Example:
          >>> x = bx.Ragged.from_padded(jnp.array([[1, 2, 3], [4, 0, 0]]), lengths=[3, 1])
          >>> print(x.data)
          [1 2 3 4]
        """
        padded = as_data(padded, "padded")
        if padded.ndim < 2:
            raise AxisError(
                f"Ragged.from_padded: padded has shape {padded.shape}; it needs an axis for the "
                "rows and one for the elements of a row."
            )
        at = checked_axes(axis, jax.ShapeDtypeStruct(padded.shape[1:], padded.dtype))
        given = as_lengths_of(at, lengths)
        each, axes = as_tuple(given), as_tuple(at)
        count, sizes = padded.shape[0], [padded.shape[k + 1] for k in axes]
        for k, x in enumerate(each):
            if x.shape != (count,):
                raise AxisError(
                    f"Ragged.from_padded: padded has {count} rows, shape {padded.shape}, but "
                    f"{length_name(k, len(each))} has shape {x.shape}. Pass one length for each "
                    "row."
                )
        bounds = zip(as_bounds(at, max_length), sizes, strict=True)
        most = tuple(size if bound is None else bound for bound, size in bounds)
        elements = elements_of(given)
        if elements is None:
            sizes = list(map(min, sizes, most))
            capacity = count * math.prod(padded.shape[k + 1] for k in axes)
            each = [_clipped(x, size) for x, size in zip(each, sizes, strict=True)]
            for k, size in zip(axes, sizes, strict=True):
                padded = lax.slice_in_dim(padded, 0, size, axis=k + 1)
        else:
            for k, (x, size, bound) in enumerate(zip(each, sizes, most, strict=True)):
                x, name = np.asarray(x), length_name(k, len(each))
                check_each(x, size, f"the {size} elements that a row of `padded` has", name)
                check_each(x, bound, f"max_length, {bound}", name)
            capacity = int(elements.sum())
        index = RowIndex.of_axes(each, capacity, sizes)
        return cls(pack_rows(padded, index, at), each, most, axis=axes)

    @classmethod
    def from_offsets(
        cls: type[B], flat: Value, offsets: Value, max_length: int | None = None, *, axis: int = 0
    ) -> B:
        """Builds a batch from elements and offsets, as TensorFlow, PyTorch, and Arrow store them.

        Args:
          flat: The elements of all rows along `axis`.
          offsets: Non-decreasing integers of shape ``(B + 1,)``: row `i` has the elements
            ``offsets[i]:offsets[i + 1]``. Traced offsets are made non-decreasing, and clipped to
            the elements of `flat`.
          max_length: As for `Ragged`.
          axis: The ragged axis of a row.

        Returns:
          A `Ragged` of B rows.

        Raises:
          AxisError: Known offsets decrease, or are not within `flat`.

        Example:
          >>> x = bx.Ragged.from_offsets(jnp.arange(6), [0, 1, 4, 6])
          >>> print(x[1])
          [1 2 3]
        """
        flat, offsets = as_data(flat, "flat"), as_lengths(offsets, "offsets")
        at = checked_axis(axis, flat)
        if offsets.shape[0] < 1:
            raise AxisError(
                "Ragged.from_offsets: offsets must have one entry more than there are rows; it "
                "is empty."
            )
        values, size = known_lengths(offsets), flat.shape[at]
        if values is None:
            offsets = lax.cummax(jnp.clip(offsets.astype(jnp.int32), 0, size))
            flat = jnp.roll(flat, -offsets[0], axis=at)
            lengths = offsets[1:] - offsets[:-1]
        else:
            start, lengths = int(values[0]), np.diff(values)
            if start < 0 or (lengths < 0).any() or values[-1] > size:
                raise AxisError(
                    "Ragged.from_offsets: offsets must begin at 0 or later, never decrease, and "
                    f"end within the {size} elements of flat; got {shown_lengths(values)}."
                )
            flat = part_along(flat, at, start, None) if start else flat
        return cls(flat, lengths, max_length, axis=at)


def _clipped(lengths: Value, size: int) -> Ints:
    if not isinstance(lengths, Tracer):
        return lengths
    return jnp.clip(lengths.astype(jnp.int32), 0, size)
