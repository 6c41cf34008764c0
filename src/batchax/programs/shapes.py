"""How much the arrays and operations of a staged program hold, read off their shapes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import repeat
from typing import Any

from batchax.jaxprs.words import Aval, Eqn


def _as_one(symbol: Any) -> int:
    return 1


_of_symbol: ContextVar[Callable[[Any], int]] = ContextVar("_of_symbol", default=_as_one)


@contextlib.contextmanager
def reading_symbols(of_symbol: Callable[[Any], int]) -> Iterator[None]:
    """Inside, a size that is a symbol is read as the number that `of_symbol` gives for it."""
    token = _of_symbol.set(of_symbol)
    try:
        yield
    finally:
        _of_symbol.reset(token)


def reads_symbols() -> bool:
    """Whether what is read now depends on more than the program."""
    return _of_symbol.get() is not _as_one


def number_of(size: Any) -> int:
    """A size; one if it is a symbol that nobody reads."""
    return size if isinstance(size, int) else _of_symbol.get()(size)


def size_of(aval: Aval) -> int:
    """Number of elements of an array of this type."""
    return _product(getattr(aval, "shape", ()))


def bytes_of(avals: Iterable[Aval]) -> int:
    """The memory that arrays of these types take."""
    return sum(size_of(a) * a.dtype.itemsize for a in avals if hasattr(a, "dtype"))


def terms_of_contraction(eqn: Eqn) -> int:
    """How many products each element of a `dot_general` adds up."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return _product(eqn.invars[0].aval.shape[d] for d in contracted)


def products_of_convolution(eqn: Eqn) -> int:
    """How many products a `conv_general_dilated` adds up; those with padding are none."""
    lhs, kernel = (v.aval.shape for v in eqn.invars)
    out = eqn.outvars[0].aval.shape
    numbers = eqn.params["dimension_numbers"]
    # `rhs_spec`: features out, features in, space; the others: batch, features, space
    pairs = map(
        _pairs_of_window,
        *(
            [shape[d] for d in dims[2:]]
            for shape, dims in (
                (lhs, numbers.lhs_spec),
                (kernel, numbers.rhs_spec),
                (out, numbers.out_spec),
            )
        ),
        eqn.params["window_strides"],
        eqn.params["padding"],
        eqn.params["lhs_dilation"] or repeat(1),
        eqn.params["rhs_dilation"] or repeat(1),
    )
    batch, features = (out[d] for d in numbers.out_spec[:2])
    return _product([batch, features, kernel[numbers.rhs_spec[1]], *pairs])


def _pairs_of_window(
    size: Any,
    window: Any,
    places: Any,
    stride: int,
    padding: Sequence[int],
    dilation: int,
    window_dilation: int,
) -> int:
    """Along one dimension: how many pairs of place and element of the window meet an element."""
    if not all(isinstance(n, int) for n in (size, window, places, padding[0])):
        return 1
    pairs = 0
    for offset in range(window):
        first = offset * window_dilation - padding[0]
        if dilation == 1:  # places p with 0 <= first + p * stride < size
            low, high = max(0, -(first // stride)), min(places, -((first - size) // stride))
            pairs += max(0, high - low)
        else:
            at = (first + place * stride for place in range(places))
            pairs += sum(p % dilation == 0 and 0 <= p // dilation < size for p in at)
    return pairs


def size_of_window(eqn: Eqn) -> int:
    """Elements of the window of a `reduce_window` or an operation like it."""
    return _product(eqn.params["window_dimensions"])


def matrices_of(aval: Aval) -> tuple[int, int, int]:
    """Of an array of matrices: their number, and the rows and columns of each."""
    *batch, m, n = map(number_of, aval.shape)
    return math.prod(batch), m, n


def length_along(aval: Aval, dimension: int) -> int:
    """The size of one dimension."""
    return number_of(aval.shape[dimension]) if aval.shape else 1


def _product(sizes: Iterable[Any]) -> int:
    return math.prod(map(number_of, sizes))
