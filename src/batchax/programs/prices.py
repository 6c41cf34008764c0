"""What the primitives of JAX cost, by family: operations on numbers, bytes moved, places found.

Counted as XLA's own analysis counts them, where it counts what a primitive does: an operation
on each element, two for each product in a contraction, one fewer than the elements for a
reduction, none for moving data. Functions that XLA expands into a series are counted as that
expansion, of 32 bits. What it takes for an opaque call or for one pass of a loop (factorisations,
Fourier transforms, running totals, random bits) is counted by the textbook.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from batchax import _compat
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.words import Eqn
from batchax.programs.shapes import (
    bytes_of,
    length_along,
    matrices_of,
    number_of,
    products_of_convolution,
    size_of,
    size_of_window,
    terms_of_contraction,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(
    """
    after_all all_gather all_gather_invariant all_gather_reduced all_to_all axis_index
    bitcast_convert_type broadcast_in_dim broadcast_to concatenate copy create_token dce_sink
    device_put dim_as_value dynamic_slice dynamic_update_slice empty empty2 freeze gather get imag
    iota layout_constraint lu_pivots_to_permutation name new_ref optimization_barrier pad
    pbroadcast pbroadcast_dynamic platform_index ppermute precv preduced psend pvary
    ragged_all_to_all random_clone random_unwrap random_wrap real reduced_vary_cast reshape
    reshard rev scatter sharding_constraint slice split squeeze stack stage stop_gradient swap
    tie tile to_edtype transpose unstack vary_unreduced_cast with_memory_space_constraint
    xla_metadata_value
    """
)
"""Primitives that compute nothing."""

TRANSCENDENTAL: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_names("atan2 atan cbrt cos erf exp expm1 log log1p"), (0, 1)),
    **dict.fromkeys(_names("pow rsqrt sin sqrt tan tanh"), (0, 1)),
    "acos": (3, 2),
    "acosh": (7, 4),
    "asin": (5, 2),
    "asinh": (11, 3),
    "atanh": (6, 2),
    "cosh": (3, 2),
    "exp2": (1, 1),
    "logistic": (3, 1),
    "sinh": (10, 3),
    # a polynomial, or a continued fraction
    "bessel_i0e": (83, 1),
    "bessel_i1e": (83, 1),
    "digamma": (73, 3),
    "erf_inv": (37, 2),
    "erfc": (62, 1),
    "igamma": (427, 2),
    "igamma_grad_a": (427, 2),
    "igammac": (427, 2),
    "lgamma": (53, 4),
    "random_gamma": (480, 4),  # of proposals most are accepted
    "regularized_incomplete_beta": (427, 2),
}
"""For each element: operations, and functions such as a sine or a root."""

SCATTERS = _names("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub")

_RANDOM_WORD = 120  # threefry-2x32 of one counter: 20 rounds of 5 operations, keys, a xor
_SEVERAL: dict[str, float] = {
    "nextafter": 24,
    "random_fold_in": _RANDOM_WORD,
    "random_seed": 3,
}
"""For each element of the result, where it is not one operation."""


def elementwise(eqn: Eqn) -> tuple[float, float]:
    """One operation, or what the tables say, for each element of the largest result."""
    flops, transcendentals = TRANSCENDENTAL.get(
        eqn.primitive.name, (_SEVERAL.get(eqn.primitive.name, 1), 0)
    )
    size = max((size_of(v.aval) for v in eqn.outvars), default=0)
    return flops * size, transcendentals * size


def _power(eqn: Eqn) -> tuple[float, float]:
    """Squares and products, by the binary digits of the exponent."""
    exponent = eqn.params["y"]
    products = max(0, abs(exponent).bit_length() - 1 + abs(exponent).bit_count() - 1)
    return (products + (exponent < 0)) * size_of(eqn.outvars[0].aval), 0


def _selection(eqn: Eqn) -> tuple[float, float]:
    """One choice fewer than cases; a number, unlike a boolean, is compared for each."""
    choices = len(eqn.invars) - 2
    by_number = eqn.invars[0].aval.dtype != bool
    return size_of(eqn.outvars[0].aval) * choices * (1 + by_number), 0


# --- operations whose cost depends on more than their results ----------------------------------


def _read(eqn: Eqn) -> int:
    return size_of(eqn.invars[0].aval)


def _reduction(operations: float) -> Callable[[Any], tuple[float, float]]:
    """Elements are combined two at a time, each time with so many operations."""

    def cost(eqn: Eqn) -> tuple[float, float]:
        return operations * max(0, _read(eqn) - size_of(eqn.outvars[0].aval)), 0

    return cost


def _reduction_by_program(eqn: Eqn) -> tuple[float, float]:
    program = eqn.params["jaxpr"]
    return _reduction(len(getattr(program, "jaxpr", program).eqns))(eqn)


def _windows(eqn: Eqn) -> tuple[float, float]:
    return size_of(eqn.outvars[0].aval) * (size_of_window(eqn) - 1), 0


def _select_and_scatter(eqn: Eqn) -> tuple[float, float]:
    """In each window comparisons, and an addition to the element found."""
    return _read(eqn) * size_of_window(eqn), 0


def _running_logsumexp(eqn: Eqn) -> tuple[float, float]:
    return 8 * _read(eqn), 2 * _read(eqn)


def _contraction(eqn: Eqn) -> tuple[float, float]:
    return 2 * size_of(eqn.outvars[0].aval) * terms_of_contraction(eqn), 0


def _convolution(eqn: Eqn) -> tuple[float, float]:
    return 2 * products_of_convolution(eqn), 0


def _sort(eqn: Eqn) -> tuple[float, float]:
    length = length_along(eqn.invars[0].aval, eqn.params.get("dimension", -1))
    return _read(eqn) * math.ceil(math.log2(max(length, 1))), 0


def _top_k(eqn: Eqn) -> tuple[float, float]:
    return _read(eqn) * math.ceil(math.log2(eqn.params["k"] + 1)), 0


def _scatter(eqn: Eqn) -> tuple[float, float]:
    return size_of(eqn.invars[2].aval), 0


def _update_of_reference(eqn: Eqn) -> tuple[float, float]:
    return size_of(eqn.invars[1].aval), 0


def _random_bits(eqn: Eqn) -> tuple[float, float]:
    """One counter is encrypted for each number of up to 64 bits."""
    return _RANDOM_WORD * size_of(eqn.outvars[0].aval), 0


def _last_result(eqn: Eqn) -> tuple[float, float]:
    """Of a generator of XLA's, after whose new state come the bits."""
    return _RANDOM_WORD * size_of(eqn.outvars[-1].aval), 0


def _fourier(eqn: Eqn) -> tuple[float, float]:
    """5 n log2 n of a complex transform of n numbers, half of it if they are real."""
    lengths = math.prod(map(number_of, eqn.params["fft_lengths"]))
    real = any(v.aval.dtype.kind != "c" for v in (eqn.invars[0], eqn.outvars[0]))
    largest = max(_read(eqn), size_of(eqn.outvars[0].aval))
    return (2.5 if real else 5) * largest * math.log2(max(lengths, 2)), 0


def _of_matrices(count: Callable[[int, int], float]) -> Callable[[Any], tuple[float, float]]:
    """`count` operations for each matrix of m rows and n columns, m being the larger."""

    def cost(eqn: Eqn) -> tuple[float, float]:
        batch, m, n = matrices_of(eqn.invars[0].aval)
        return batch * count(max(m, n), min(m, n)), 0

    return cost


def _qr(m: int, n: int) -> float:
    return 2 * m * n * n - 2 * n**3 / 3


def _product_with_reflectors(eqn: Eqn) -> tuple[float, float]:
    """Each of the reflectors, columns of the first operand, is applied to the last one."""
    _, _, count = matrices_of(eqn.invars[0].aval)
    return 4 * size_of(eqn.invars[2].aval) * count, 0


def _symmetric_product(eqn: Eqn) -> tuple[float, float]:
    _, _, terms = matrices_of(eqn.invars[0].aval)
    return 2 * size_of(eqn.outvars[0].aval) * terms, 0


def _eigh(eqn: Eqn) -> tuple[float, float]:
    return _of_matrices(lambda m, n: 9 * n**3)(eqn)


def _svd(eqn: Eqn) -> tuple[float, float]:
    if eqn.params.get("compute_uv", True):
        return _of_matrices(lambda m, n: 6 * m * n * n + 20 * n**3)(eqn)
    return _of_matrices(lambda m, n: 4 * m * n * n - 4 * n**3 / 3)(eqn)


def _triangular_solve(eqn: Eqn) -> tuple[float, float]:
    """Each right-hand side takes the square of its length."""
    rows = length_along(eqn.invars[0].aval, -1)
    return size_of(eqn.invars[1].aval) * rows, 0


_Count = Callable[[Any], tuple[float, float]]

_LINEAR_ALGEBRA: dict[str, _Count] = {
    "cholesky": _of_matrices(lambda m, n: n**3 / 3),
    "cholesky_update": _of_matrices(lambda m, n: 6 * n * n),
    "eig": _of_matrices(lambda m, n: 25 * n**3),
    "eigh": _eigh,
    "geqp3": _of_matrices(_qr),
    "geqrf": _of_matrices(_qr),
    "hessenberg": _of_matrices(lambda m, n: 10 * n**3 / 3),
    "householder_product": _of_matrices(_qr),
    "lu": _of_matrices(lambda m, n: m * n * n - n**3 / 3),
    "ormqr": _product_with_reflectors,
    "qr": _of_matrices(lambda m, n: 2 * _qr(m, n)),  # the factor Q is multiplied out
    "schur": _of_matrices(lambda m, n: 25 * n**3),
    "svd": _svd,
    "symmetric_product": _symmetric_product,
    "triangular_solve": _triangular_solve,
    "tridiagonal": _of_matrices(lambda m, n: 4 * n**3 / 3),
}

_CALLS: dict[str, int] = {
    **dict.fromkeys(_names("cholesky triangular_solve"), 1),
    **dict.fromkeys(_names("geqp3 geqrf householder_product lu ormqr"), 2),
    "qr": 4,
    **dict.fromkeys(_names("hessenberg tridiagonal"), 5),
    "eigh": 10,
    "svd": 15,
    **dict.fromkeys(_names("eig schur"), 20),
}
"""How much longer than the shortest a call of a library takes, for a matrix of a few rows."""

_MANY = 100  # operations of an element, from which on it is such a sum
SERIAL = _LINEAR_ALGEBRA.keys() | {n for n, (flops, _) in TRANSCENDENTAL.items() if flops > _MANY}
"""Calls of a library, and sums of very many terms: what they compute, they do one after another."""

FLOPS: dict[str, _Count] = {
    "conv_general_dilated": _convolution,
    "dot_general": _contraction,
    "integer_pow": _power,
    "ragged_dot_general": lambda eqn: (2 * _read(eqn) * length_along(eqn.outvars[0].aval, -1), 0),
    "select_n": _selection,
    # reductions
    **dict.fromkeys(
        _names("reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"),
        _reduction(1),
    ),
    **dict.fromkeys(_names("argmax argmin"), _reduction(9)),  # NaN and ties are looked for
    "reduce": _reduction_by_program,
    **dict.fromkeys(
        _names("reduce_window reduce_window_max reduce_window_min reduce_window_sum"), _windows
    ),
    **dict.fromkeys(
        _names("select_and_scatter select_and_scatter_add select_and_gather_add"),
        _select_and_scatter,
    ),
    **dict.fromkeys(_names("cummax cummin cumprod cumsum"), lambda eqn: (_read(eqn), 0)),
    "cumlogsumexp": _running_logsumexp,
    # order
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    # updates
    **dict.fromkeys(SCATTERS - {"scatter"}, _scatter),
    "addupdate": _update_of_reference,
    # random bits
    **dict.fromkeys(_names("random_bits random_split"), _random_bits),
    **dict.fromkeys(_names("rng_bit_generator rng_uniform"), _last_result),
    **dict.fromkeys(_names("philox2x32 philox4x32 threefry2x32 threefry4x32"), _random_bits),
    **_LINEAR_ALGEBRA,
    "fft": _fourier,
    "tridiagonal_solve": lambda eqn: (8 * size_of(eqn.invars[3].aval), 0),
}
"""Operations, and functions such as a sine, of an equation."""


# --- bytes -------------------------------------------------------------------------------------

VIEWS = _names(
    """
    after_all axis_index bitcast_convert_type create_token dce_sink dim_as_value
    layout_constraint name optimization_barrier pbroadcast platform_index preduced pvary
    random_clone random_unwrap random_wrap reduced_vary_cast reshape sharding_constraint squeeze
    stage stop_gradient tie to_edtype vary_unreduced_cast with_memory_space_constraint
    xla_metadata_value
    """
)
"""Primitives that move nothing."""


def _what_is_read(eqn: Eqn) -> int:
    """Of a slice or gather: its result, twice, and the indices."""
    return 2 * bytes_of([eqn.outvars[0].aval]) + bytes_of(v.aval for v in eqn.invars[1:])


def _what_is_written(eqn: Eqn) -> int:
    """Of an update in place: the update, twice, and the indices."""
    return 2 * bytes_of([eqn.invars[1].aval]) + bytes_of(v.aval for v in eqn.invars[2:])


def _what_is_scattered(eqn: Eqn) -> int:
    _, indices, updates = (v.aval for v in eqn.invars)
    times = 2 if eqn.primitive.name == "scatter" else 3  # what is there is read
    return times * bytes_of([updates]) + bytes_of([indices])


_BYTES: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(VIEWS, lambda eqn: 0),
    **dict.fromkeys(_names("dynamic_slice gather get slice"), _what_is_read),
    **dict.fromkeys(_names("addupdate dynamic_update_slice swap"), _what_is_written),
    **dict.fromkeys(SCATTERS, _what_is_scattered),
}


def has_price(primitive: _compat.Primitive) -> bool:
    """Whether something is said here of what `primitive` costs, or it acts on each element."""
    name = primitive.name
    return facts_of(primitive).elementwise or any(
        name in table for table in (MOVES, TRANSCENDENTAL, _SEVERAL, FLOPS)
    )


def bytes_moved(eqn: Eqn, differs: Sequence[bool] | None = None) -> int:
    """Bytes read and written by an operation alone, as if nothing were fused with it.

    Given which operands differ between lanes, those that do not are left out.
    """
    if eqn.primitive.name in _BYTES:
        return _BYTES[eqn.primitive.name](eqn)
    read = eqn.invars if differs is None else itertools.compress(eqn.invars, differs)
    return bytes_of(v.aval for v in (*read, *eqn.outvars))


PART_OF_OTHERS = VIEWS | {"broadcast_in_dim", "convert_element_type"}
"""Primitives that are never operations of their own."""


def is_fused(primitive: _compat.Primitive) -> bool:
    """Whether it is part of a loop with what is around it, and need not write what it makes."""
    facts = facts_of(primitive)
    return facts.elementwise or facts.reduces or primitive.name in ("broadcast_in_dim", "iota")


def calls_of(eqn: Eqn) -> int:
    """Calls of a library, each for one matrix, in units of the shortest."""
    calls = _CALLS.get(eqn.primitive.name, 0)
    return calls and calls * matrices_of(eqn.invars[0].aval)[0]


def windows_of(eqn: Eqn) -> int:
    """How many windows, at places found by an index, are read or written; 0 of most operations."""
    name = eqn.primitive.name
    if name == "gather" or name in SCATTERS:
        return math.prod(map(number_of, eqn.invars[1].aval.shape[:-1]))
    return int(name in ("dynamic_slice", "dynamic_update_slice"))


_NUMBERS = 8  # that are read by themselves in the time in which a row is found


def places_of(eqn: Eqn) -> int:
    """Places in memory that depend on data: of a window one, or two if it is written."""
    if eqn.primitive.name == "sort":
        return 2 * round(_sort(eqn)[0])  # the numbers that it compares
    if eqn.primitive.name == "gather" and size_of(eqn.outvars[0].aval) == windows_of(eqn):
        return -(-windows_of(eqn) // _NUMBERS)
    return windows_of(eqn) * (1 if eqn.primitive.name in ("gather", "dynamic_slice") else 2)
