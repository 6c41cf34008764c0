"""`Ragged`: a batch of rows of different lengths, held without padding."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import BatchOfRows
from batchax.frontend.options import translate_argument_names
from batchax.jaxprs.error_format import brief, show
from batchax.jaxprs.types import Value
from batchax.rows.building import (
    Bounds,
    Selecting,
    as_bounds,
    as_data,
    as_lengths_of,
    check_fill_value,
    check_lengths,
    checked_axes,
    elements_of,
    known_lengths,
    part_along,
    same_lengths,
    shown_lengths,
)
from batchax.rows.converters import Converters
from batchax.rows.index import Ints, RowIndex, pad_rows

_ADVICE = (
    "Map over the rows: batchax.vmap(jnp.sum)(x), or batchax.vmap(lambda row: row + 1)(x). For "
    "arrays, use x.data, the elements of all rows, or x.to_padded()."
)


class NoArray:
    """Raises for arithmetic, order comparisons, and functions and methods of arrays, by name."""

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _reject("NumPy wants an array")

    def __array_ufunc__(self, ufunc: np.ufunc, *args: Any, **kwargs: Any) -> NoReturn:
        _reject(f"numpy.{ufunc.__name__} is of arrays")

    @property
    def __jax_array__(self) -> Callable[..., NoReturn]:
        # Of operands of its primitives, JAX reads only this attribute, and then raises without
        # naming their type.
        if sys._getframe(1).f_code.co_name in ("typeof", "shaped_abstractify", "bind"):
            _reject("JAX wants an array")
        return functools.partial(_reject, "JAX wants an array")

    if not TYPE_CHECKING:  # else every name would be an attribute to type checkers

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(jax.Array, name):
                message = f"a Ragged is not an array: it has no {name!r}. {_ADVICE}"
            raise AttributeError(message, name=name, obj=self)


def _reject(why: str) -> NoReturn:
    raise ArgumentTypeError(f"a Ragged is a batch of rows, not an array, and {why}. {_ADVICE}")


def _rejecting(operator: str) -> Callable[..., NoReturn]:
    def reject(self: Any, *others: object) -> NoReturn:
        _reject(f"`{operator}` is of arrays")

    return reject


_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
    "matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
    "divmod": "divmod",
}  # fmt: skip
_UNARY = {"neg": "-", "pos": "+", "invert": "~", "abs": "abs"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_NUMBERS = {"float": "float", "int": "int", "complex": "complex", "index": "an index"}

for _name, _operator in {**_OPERATORS, **_UNARY, **_COMPARISONS, **_NUMBERS}.items():
    setattr(NoArray, f"__{_name}__", _rejecting(_operator))
for _name, _operator in _OPERATORS.items():
    setattr(NoArray, f"__r{_name}__", _rejecting(_operator))


@_compat.api_boundary
@jax.tree_util.register_pytree_with_keys_class
class Ragged(Converters, Selecting, NoArray, BatchOfRows):
    """Holds variable-length rows: all elements in one array, and the lengths.

    Example:
      >>> x = bx.Ragged(jnp.arange(6.0), lengths=[1, 3, 2])
      >>> print(bx.vmap(jnp.sum)(x))
      [0. 6. 9.]
      >>> print(bx.vmap(lambda row: row - row.mean())(x)[1])
      [-1.  0.  1.]
      >>> images = bx.Ragged(jnp.arange(8), ([2, 1], [3, 2]), axis=(0, 1))
      >>> print(images[0])
      [[0 1 2]
       [3 4 5]]

    As an argument of `vmap`, it is a batch of rows. The function sees one row, as an array of its
    own length. ``len(x)`` is the number of rows, ``x[i]`` row `i`, and ``x[1:3]``, ``x[[0, 2]]``,
    or a mask selects rows. It is a pytree with the leaves `data` and `lengths`, so ``jax.jit``,
    ``jax.device_put``, and libraries that save arrays accept it.

    Derivatives are with respect to `data`. ``jax.grad`` needs ``allow_int=True`` for the integers
    in `lengths`. Its result is a Ragged without usable lengths (dtype float0), from which
    `with_data` makes one with lengths.

    Args:
      data: An array of any dtype, random keys included. Along `axis`, it has the elements of row 0,
        then those of row 1, and so on. Elements after the last row belong to no row. `explain` and
        ``jax.eval_shape`` accept a ``jax.ShapeDtypeStruct`` for `data` and `lengths`.
      lengths: The number of elements of each row: integers of shape ``(B,)``.
      max_length: An upper bound of the lengths, an int. Default: the greatest length; for traced
        lengths, the size of `data`.
      axis: The ragged axis of a row. The rows of a Ragged with data of shape ``(3, 100)`` and axis
        1 have the shapes ``(3, n)``. Or several axes, in order: then `lengths` is a tuple with the
        lengths along each, `max_length` is an int or a tuple, and `data` has the ``h * w`` elements
        of each row, last axis fastest, along the first of the axes.

    Raises:
      ArgumentTypeError: (a TypeError) `data` is not an array, or `lengths` are not integers; or
        `lengths` are traced along several axes, without `max_length`.
      AxisError: (a ValueError) `lengths` is not one-dimensional, has a negative entry, or one
        beyond `max_length`; or the lengths add up to more than `data` has; or `axis` is out of
        range. Traced lengths are not checked: they are clipped to ``[0, max_length]``, and rows end
        where `data` ends.
    """

    shared: tuple[int, ...] | None = (
        None  # which lengths of a `RaggedDict` these are, if it is one's
    )
    rebuilt: bool = False  # whether JAX made it from the leaves of one in a `RaggedDict`

    def __init__(
        self,
        data: Value,
        lengths: Value,
        max_length: int | tuple[int | None, ...] | None = None,
        *,
        axis: int | tuple[int, ...] = 0,
    ) -> None:
        self.data = as_data(data)
        self.axis = checked_axes(axis, self.data, packed=True)
        if isinstance(axis, (tuple, list)) and isinstance(self.axis, int):  # said as several are
            axis = tuple(axis)
            (lengths,), (max_length,) = as_lengths_of(axis, lengths), as_bounds(axis, max_length)
        self.lengths = as_lengths_of(self.axis, lengths)
        bounds, capacity = as_bounds(self.axis, max_length), self.data.shape[self.element_axis]
        if elements_of(self.lengths) is not None:
            values = [np.asarray(x) for x in self.each_length]
            check_lengths(values, capacity, bounds, self.data, self.element_axis)
        self.max_length = tuple(map(self._bound, self.each_length, bounds))
        if isinstance(self.axis, int):
            (self.max_length,) = self.max_length

    def _bound(self, lengths: Ints, bound: int | None) -> int:
        values = known_lengths(lengths)
        if bound is None and values is None and len(self.axes) > 1:
            raise ArgumentTypeError(
                f"Ragged: the lengths along the axes {self.axis} are traced. Pass a bound for "
                "each, known while a program is compiled, such as max_length=(64, 64)."
            )
        if bound is not None:
            return bound
        return self.data.shape[self.element_axis] if values is None else int(values.max(initial=0))

    @property
    def shape(self) -> tuple[Any, ...]:
        """``(B, ...)`` with the shape of a row; ragged sizes are None."""
        return len(self), *self.shape_of_row([None] * len(self.axes))

    def shape_of_row(self, sizes: Sequence[Any]) -> tuple[Any, ...]:
        """The shape of a row that has these sizes along its ragged axes.

        :meta private:
        """
        shape = [*self.data.shape]
        del shape[self.element_axis]
        for axis, size in zip(self.axes, sizes, strict=True):
            shape.insert(axis, size)
        return tuple(shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the elements."""
        return self.data.dtype

    @property
    def offsets(self) -> Ints:
        """The offsets of the rows in `data`: int32 of shape ``(B + 1,)``."""
        index = self.index
        numpy = np if isinstance(index.starts, np.ndarray) else jnp
        return numpy.concatenate([index.starts_of_rows, numpy.reshape(index.total, 1)])

    @property
    def index(self) -> RowIndex:
        """Where the elements of each row are.

        :meta private:
        """
        self.check_is_one_batch()
        return RowIndex.of_axes(
            self.each_length, self.data.shape[self.element_axis], self.each_bound
        )

    def __len__(self) -> int:
        """The number of rows."""
        return self.each_length[0].shape[0]

    @translate_argument_names
    def to_padded(self, fill_value: Value = 0) -> jax.Array:
        """Pads the rows to an array of shape ``(B, ..., max_length, ...)``.

        Each ragged axis has its bound: images become ``(B, H, W)``.

        Args:
          fill_value: The padding, a number of the dtype of the elements. Rows of random keys are
            padded with keys of zeros.

        Raises:
          ArgumentTypeError: (a TypeError) The dtype does not have the number `fill_value`.

        Example:
          >>> print(bx.Ragged(jnp.arange(6), [1, 3, 2]).to_padded(-1))
          [[ 0 -1 -1]
           [ 1  2  3]
           [ 4  5 -1]]
        """
        check_fill_value(fill_value, self.data)
        return pad_rows(self.data, self.index, self.axis, fill_value)

    def with_data(self, data: Value) -> Ragged:
        """Replaces the elements. The rows share their size with these rows under `vmap`.

        Args:
          data: An array with the same number of elements along the (first) ragged axis.

        Example:
          >>> x = bx.Ragged(jnp.arange(6.0), [1, 3, 2])
          >>> loss = lambda x: bx.vmap(lambda row: jnp.sum(row**2))(x).sum()
          >>> g = jax.grad(loss, allow_int=True)(x)
          >>> print(x.with_data(g.data)[1])
          [2. 4. 6.]
        """
        return self._other(data, self.max_length)

    def _other(self, data: Value, max_length: Bounds) -> Ragged:
        other = Ragged(data, self.lengths, max_length, axis=self.axis)
        other.lengths = self.lengths  # the array itself, which tells that they are the same
        return other

    def astype(self, dtype: DTypeLike) -> Ragged:
        """Converts the elements to another dtype.

        Args:
          dtype: As for ``jax.Array.astype``.

        Example:
          >>> bx.Ragged(jnp.arange(6), [1, 3, 2]).astype("float32")
          Ragged(3 rows of float32[n,], lengths=[1, 3, 2], max_length=3)
        """
        return self.with_data(self.data.astype(dtype))

    def with_capacity(self, capacity: int) -> Ragged:
        """Pads `data` to `capacity` elements.

        Batches of one capacity, one number of rows, and one `max_length` share a compiled program.

        Args:
          capacity: The size of `data` along the (first) ragged axis.

        Raises:
          AxisError: The rows have more elements.
          ArgumentTypeError: `capacity` is not an int.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2]).with_capacity(100)
          >>> x.data.shape, len(x)
          ((100,), 3)
        """
        try:
            capacity = operator.index(capacity)
        except TypeError:
            raise ArgumentTypeError(
                f"Ragged.with_capacity: capacity must be an int, got {show(capacity)}."
            ) from None
        size = self.data.shape[self.element_axis]
        values = elements_of(self.lengths)
        least = size if values is None else int(values.sum())
        if capacity < least:
            raise AxisError(
                f"Ragged.with_capacity: the rows have {least} elements, and capacity is {capacity}."
            )
        room = list(self.data.shape)
        room[self.element_axis] = max(0, capacity - size)
        numpy, data = jnp, self.data
        if _on_host(data):  # a program of XLA would be compiled for each number of elements
            numpy, data = np, np.asarray(data)
        parts = [part_along(data, self.element_axis, 0, capacity), numpy.zeros(room, self.dtype)]
        padded = numpy.concatenate(parts, axis=self.element_axis)
        return self.with_data(jnp.asarray(padded) if isinstance(self.data, jax.Array) else padded)

    def with_max_length(self, max_length: int | tuple[int | None, ...]) -> Ragged:
        """Sets another bound of the lengths.

        Args:
          max_length: As for `Ragged`.

        Raises:
          AxisError: A row is longer.

        Example:
          >>> x = bx.Ragged(jnp.arange(6), [1, 3, 2]).with_max_length(16)
          >>> x.to_padded().shape
          (3, 16)
        """
        return self._other(self.data, max_length)

    def tree_flatten_with_keys(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        leaves, static = self.tree_flatten()
        keys = jax.tree_util.GetAttrKey("data"), jax.tree_util.GetAttrKey("lengths")
        return tuple(zip(keys, leaves, strict=True)), static

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (self.data, self.lengths), (self.max_length, self.axis, self.shared)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Iterable[Any]) -> Ragged:
        # Leaves may be anything here: transformations put placeholders into pytrees.
        ragged = object.__new__(cls)
        ragged.data, ragged.lengths = leaves
        ragged.max_length, ragged.axis, ragged.shared = static
        ragged.rebuilt = ragged.shared is not None
        return ragged

    def __repr__(self) -> str:
        shape = getattr(self.data, "shape", None)
        lengths = self.each_length
        typed = all(hasattr(x, "dtype") for x in lengths) and len(lengths) == len(self.axes)
        if shape is None or len(shape) <= self.element_axis or not typed:
            return f"Ragged(data={brief(self.data)}, lengths={brief(self.lengths)})"
        row = [*map(str, self.shape_of_row(_letters(lengths)))]
        comma = "," if len(row) == 1 else ""
        shown = ", ".join(map(_shown, lengths))
        return (
            f"Ragged({len(self)} rows of {self.data.dtype}[{', '.join(row)}{comma}], "
            f"lengths={shown if isinstance(self.axis, int) else f'({shown})'}, "
            f"max_length={self.max_length})"
        )


def rows_of_one_size(x: Value, axes: Sequence[int]) -> Ragged:
    """An array with the rows in front as rows that are ragged along these axes."""
    rows, at, count = x.shape[0], axes[0], len(axes)
    sizes = [x.shape[k + 1] for k in axes]
    x = jnp.moveaxis(x, [0, *(k + 1 for k in axes)], range(at, at + count + 1))
    data = x.reshape(*x.shape[:at], rows * math.prod(sizes), *x.shape[at + count + 1 :])
    lengths = [np.full(rows, size, np.int32) for size in sizes]
    return Ragged(data, lengths, tuple(sizes), axis=tuple(axes))


def _on_host(x: Value) -> bool:
    """Whether NumPy reads this without a transfer: it is an array of NumPy, or on the first CPU."""
    if not isinstance(x, jax.Array):
        return isinstance(x, np.ndarray)
    if isinstance(x, Tracer) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    first = jax.devices()[0]
    return first.platform == "cpu" and x.devices() == {first} and not x.committed


def _letters(every: Sequence[Any]) -> list[str]:
    """A letter for each ragged axis, the same for those along which rows have one length."""
    letters: list[str] = []
    for k, lengths in enumerate(every):
        same = (i for i, x in enumerate(every[:k]) if same_lengths(lengths, x))
        letters.append(next((letters[i] for i in same), "nmkl"[len(set(letters)) % 4]))
    return letters


def _shown(lengths: Ints) -> str:
    if lengths.dtype == jax.dtypes.float0:
        return "none, of a derivative"
    if isinstance(lengths, jax.ShapeDtypeStruct):
        return "unknown"
    values = known_lengths(lengths)
    if values is None:
        return "traced"
    # In a tree of other objects there may be no lengths.
    return shown_lengths(values) if values.ndim == 1 else "unknown"
