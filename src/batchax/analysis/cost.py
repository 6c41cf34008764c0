"""What the equations of a jaxpr cost: operations on numbers, bytes moved, gathers; and their time.

Operations are counted as XLA's own analysis counts them, where it does: an operation on each
element, two for each product in a contraction, one fewer than the elements for a reduction, none
for moving data. Functions that XLA expands into a series are counted as that expansion, of 32 bits.
An opaque call, or one pass of a loop (factorizations, Fourier transforms, running totals, random
bits), is counted by the textbook.

Times are a weight for each amount of a `Cost`, one set of weights for each use. All are rough,
measured on a CPU with a few cores. Choices that are made before anything is compiled, and the order
of findings, depend on their proportions; no result does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any, NewType

from jax.extend.core import Literal

from batchax import _compat
from batchax.analysis.calibrated import CALIBRATED
from batchax.analysis.inner import Inner, integers_given, integers_in, programs_in
from batchax.cache import Cache
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import Aval, Eqn, Jaxpr, Program

Nanoseconds = NewType("Nanoseconds", float)
"""Of the work of lanes on a core of a CPU: what other devices do counts as much."""
Lanes = NewType("Lanes", int)
Bytes = NewType("Bytes", int)


def _as_one(symbol: object) -> int:
    return 1


_of_symbol: ContextVar[Callable[[Any], int]] = ContextVar("_of_symbol", default=_as_one)


@contextlib.contextmanager
def reading_symbols(of_symbol: Callable[[Any], int]) -> Iterator[None]:
    """Reads a symbolic size inside as the number that `of_symbol` returns."""
    token = _of_symbol.set(of_symbol)
    try:
        yield
    finally:
        _of_symbol.reset(token)


def reads_symbols() -> bool:
    """Returns whether costs depend on more than the program now."""
    return _of_symbol.get() is not _as_one


def number_of(size: object) -> int:
    """Returns a size, or one for a symbol without a value."""
    return size if isinstance(size, int) else _of_symbol.get()(size)


def size_of(aval: Aval) -> int:
    return _product(getattr(aval, "shape", ()))


def bytes_of(avals: Iterable[Aval]) -> Bytes:
    return Bytes(sum(size_of(a) * a.dtype.itemsize for a in avals if hasattr(a, "dtype")))


def terms_of_contraction(eqn: Eqn) -> int:
    """Returns how many products each element of a `dot_general` sums."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return _product(eqn.invars[0].aval.shape[d] for d in contracted)


def products_of_convolution(eqn: Eqn) -> int:
    """Counts the products that a `conv_general_dilated` sums, without those with padding."""
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
    size: int,
    window: int,
    places: int,
    stride: int,
    padding: Sequence[int],
    dilation: int,
    window_dilation: int,
) -> int:
    """Counts pairs of position and window element that meet an element, in one dimension."""
    size, window, places, before = map(number_of, (size, window, places, padding[0]))
    pairs = 0
    for offset in range(window):
        first = offset * window_dilation - before
        if dilation == 1:  # places p with 0 <= first + p * stride < size
            low, high = max(0, -(first // stride)), min(places, -((first - size) // stride))
            pairs += max(0, high - low)
        else:
            # With a dilated image, positions between its elements meet zeros.
            at = (first + place * stride for place in range(places))
            pairs += sum(p % dilation == 0 and 0 <= p // dilation < size for p in at)
    return pairs


def size_of_window(eqn: Eqn) -> int:
    return _product(eqn.params["window_dimensions"])


def matrices_of(aval: Aval) -> tuple[int, int, int]:
    """Returns the number of matrices in an array, and their rows and columns."""
    *batch, m, n = map(number_of, aval.shape)
    return math.prod(batch), m, n


def length_along(aval: Aval, dimension: int) -> int:
    return number_of(aval.shape[dimension]) if aval.shape else 1


def _product(sizes: Iterable[Any]) -> int:
    return math.prod(map(number_of, sizes))


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

_SCALAR_FUNCTIONS = _names("atan2 cbrt cos pow sin tan")
"""Those that XLA for CPU computes for one number at a time: a lane alone takes about as long for
them. Others fill vector registers. Programs: Adam; search: a sine."""

SCATTERS = _names("scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub")

_RANDOM_WORD = 120  # threefry-2x32 of one counter: 20 rounds of 5 operations, keys, a xor
_SEVERAL: dict[str, float] = {
    "nextafter": 24,
    "random_fold_in": _RANDOM_WORD,
    "random_seed": 3,
}
"""For each element of the result, where it is not one operation."""


def elementwise(eqn: Eqn) -> tuple[float, float]:
    """Counts one operation, or that in the tables, for each element of the largest result."""
    flops, transcendentals = TRANSCENDENTAL.get(
        eqn.primitive.name, (_SEVERAL.get(eqn.primitive.name, 1), 0)
    )
    size = max((size_of(v.aval) for v in eqn.outvars), default=0)
    return flops * size, transcendentals * size


def _power(eqn: Eqn) -> tuple[float, float]:
    """Counts squares and products, by the binary digits of the exponent."""
    exponent = eqn.params["y"]
    # One square for each digit after the first, and one product for each further 1.
    products = max(0, abs(exponent).bit_length() - 1 + abs(exponent).bit_count() - 1)
    return (products + (exponent < 0)) * size_of(eqn.outvars[0].aval), 0


def _selection(eqn: Eqn) -> tuple[float, float]:
    """Counts a choice fewer than cases. A number, unlike a boolean, is compared for each."""
    choices = len(eqn.invars) - 2
    by_number = eqn.invars[0].aval.dtype != bool
    return size_of(eqn.outvars[0].aval) * choices * (1 + by_number), 0


# --- operations whose cost depends on more than their results ----------------------------------


def _read(eqn: Eqn) -> int:
    return size_of(eqn.invars[0].aval)


def _reduction(operations: float) -> Callable[[Any], tuple[float, float]]:
    """Combines elements two at a time, with so many operations each."""

    def cost(eqn: Eqn) -> tuple[float, float]:
        return operations * max(0, _read(eqn) - size_of(eqn.outvars[0].aval)), 0

    return cost


def _reduction_by_program(eqn: Eqn) -> tuple[float, float]:
    return _reduction(len(_compat.jaxpr_of(eqn.params["jaxpr"]).eqns))(eqn)


def _sort(eqn: Eqn) -> tuple[float, float]:
    length = length_along(eqn.invars[0].aval, eqn.params.get("dimension", -1))
    return _read(eqn) * math.ceil(math.log2(max(length, 1))), 0


def _top_k(eqn: Eqn) -> tuple[float, float]:
    return _read(eqn) * math.ceil(math.log2(number_of(eqn.params["k"]) + 1)), 0


def _random_bits(eqn: Eqn) -> tuple[float, float]:
    """Counts one encrypted counter for each number of up to 64 bits."""
    return _RANDOM_WORD * size_of(eqn.outvars[0].aval), 0


def _last_result(eqn: Eqn) -> tuple[float, float]:
    """Counts the bits of an XLA generator, which follow its new state."""
    return _RANDOM_WORD * size_of(eqn.outvars[-1].aval), 0


def _fourier(eqn: Eqn) -> tuple[float, float]:
    """Counts 5 n log2 n for a complex transform of n numbers, half of it for real ones."""
    lengths = math.prod(map(number_of, eqn.params["fft_lengths"]))
    real = any(v.aval.dtype.kind != "c" for v in (eqn.invars[0], eqn.outvars[0]))
    largest = max(_read(eqn), size_of(eqn.outvars[0].aval))
    return (2.5 if real else 5) * largest * math.log2(max(lengths, 2)), 0


def _of_matrices(count: Callable[[int, int], float]) -> Callable[[Any], tuple[float, float]]:
    """Counts `count` operations for each matrix of m rows and n columns, m the larger."""

    def cost(eqn: Eqn) -> tuple[float, float]:
        batch, m, n = matrices_of(eqn.invars[0].aval)
        return batch * count(max(m, n), min(m, n)), 0

    return cost


def _qr(m: int, n: int) -> float:
    return 2 * m * n * n - 2 * n**3 / 3


def _product_with_reflectors(eqn: Eqn) -> tuple[float, float]:
    """Applies each reflector, a column of the first operand, to the last operand."""
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
    """Counts the square of its length for each right-hand side."""
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

_REDUCTIONS = _names(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
)

FLOPS: dict[str, _Count] = {
    "conv_general_dilated": lambda eqn: (2 * products_of_convolution(eqn), 0),
    "dot_general": lambda eqn: (2 * size_of(eqn.outvars[0].aval) * terms_of_contraction(eqn), 0),
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
        _names("reduce_window reduce_window_max reduce_window_min reduce_window_sum"),
        lambda eqn: (size_of(eqn.outvars[0].aval) * (size_of_window(eqn) - 1), 0),
    ),
    **dict.fromkeys(
        _names("select_and_scatter select_and_scatter_add select_and_gather_add"),
        # a comparison for each element of a window, and one addition
        lambda eqn: (_read(eqn) * size_of_window(eqn), 0),
    ),
    **dict.fromkeys(_names("cummax cummin cumprod cumsum"), lambda eqn: (_read(eqn), 0)),
    "cumlogsumexp": lambda eqn: (8 * _read(eqn), 2 * _read(eqn)),
    # order
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    # updates
    **dict.fromkeys(SCATTERS - {"scatter"}, lambda eqn: (size_of(eqn.invars[2].aval), 0)),
    "addupdate": lambda eqn: (size_of(eqn.invars[1].aval), 0),
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
    """Counts for a slice or gather its result, read and written, and the indices."""
    return 2 * bytes_of([eqn.outvars[0].aval]) + bytes_of(v.aval for v in eqn.invars[1:])


def _what_is_written(eqn: Eqn) -> int:
    """Counts for an update in place the update, read and written, and the indices."""
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


def bytes_moved(eqn: Eqn, differs: Sequence[bool] | None = None) -> int:
    """Counts bytes that an operation alone reads and writes, without fusion.

    `differs` excludes operands that lanes share.
    """
    if eqn.primitive.name in _BYTES:
        return _BYTES[eqn.primitive.name](eqn)
    read = eqn.invars if differs is None else itertools.compress(eqn.invars, differs)
    return bytes_of(v.aval for v in (*read, *eqn.outvars))


PART_OF_OTHERS = VIEWS | {"broadcast_in_dim", "convert_element_type"}
"""Primitives that are never separate operations."""


def is_fused(primitive: _compat.Primitive) -> bool:
    """Returns whether XLA fuses it with adjacent operations, so its result is not written."""
    facts = facts_of(primitive)
    return facts.elementwise or facts.reduces or primitive.name in ("broadcast_in_dim", "iota")


def calls_of(eqn: Eqn) -> int:
    """Counts library calls, one for each matrix, in units of the shortest."""
    calls = _CALLS.get(eqn.primitive.name, 0)
    return calls and calls * matrices_of(eqn.invars[0].aval)[0]


def windows_of(eqn: Eqn) -> int:
    """Counts windows that are read or written at computed positions."""
    name = eqn.primitive.name
    if name == "gather" or name in SCATTERS:
        return math.prod(map(number_of, eqn.invars[1].aval.shape[:-1]))
    return int(name in ("dynamic_slice", "dynamic_update_slice"))


_NUMBERS = 8  # that are read by themselves in the time in which a row is found


def places_of(eqn: Eqn) -> int:
    """Counts memory positions that depend on data: one for a window, two if it is written."""
    if eqn.primitive.name == "sort":
        return 2 * round(_sort(eqn)[0])  # the numbers that it compares
    if eqn.primitive.name == "gather" and size_of(eqn.outvars[0].aval) == windows_of(eqn):
        return -(-windows_of(eqn) // _NUMBERS)
    return windows_of(eqn) * (1 if eqn.primitive.name in ("gather", "dynamic_slice") else 2)


STEPS = 16  # that a loop may be taken to run, where a guess of their number is wanted


@dataclass(frozen=True)
class Cost:
    """Holds an estimated cost. Costs can be added, and multiplied by a number."""

    # Operations of any dtype; a contraction has two for each product.
    flops: int = 0
    transcendentals: int = 0  # sines, exponentials, roots; not among the `flops`
    bytes: int = 0  # read and written by each operation alone, without fusion
    serial: int = 0  # those of the flops that run one after another
    fused: int = 0  # those of the bytes that fusion saves
    places: int = 0  # positions in memory that depend on data
    calls: int = 0  # of libraries, in units of the shortest
    # Operations begun, of any size, except for fused ones, of which each run of a loop's program
    # counts one.
    launches: int = 0
    contracted: int = 0  # those of the flops that contractions do
    # What one lane by itself leaves empty of the vector registers that its operations on few
    # numbers fill: of flops, and of the transcendentals
    idle: int = 0
    idle_transcendentals: int = 0
    scalar_functions: int = 0  # the transcendentals that are computed one by one
    # Of reductions, and the terms that they combine, which for one lane wait for one another
    sums: int = 0
    terms: int = 0
    at_least: bool = False  # there are loops with an unknown number of steps
    at_most: bool = False  # there are branches, and the most expensive one counts

    def __add__(self, other: Cost) -> Cost:
        amounts = map(operator.add, _amounts(self), _amounts(other))
        least, most = self.at_least or other.at_least, self.at_most or other.at_most
        return Cost(*amounts, at_least=least, at_most=most)

    def __mul__(self, times: int) -> Cost:
        amounts = (n * times for n in _amounts(self))
        return Cost(*amounts, at_least=self.at_least, at_most=self.at_most)

    __rmul__ = __mul__


_amounts = operator.attrgetter(*(f.name for f in fields(Cost) if f.type == "int"))  # what adds up


def cost_of_equation(
    eqn: Eqn,
    integers: Mapping[Any, int] | None = None,
    differs: Sequence[bool] | None = None,
    steps: int = 1,
) -> Cost:
    """Estimates the cost of an equation, including the jaxprs that it runs.

    A `while` of unknown length counts `steps` times (`at_least`); of a `cond` the most expensive
    branch counts, separately for operations and bytes (`at_most`). With `differs`, the result is
    one lane's share: what lanes share is read or done once.
    """
    # XLA's cost analysis treats loops and branches alike. Inside `shard_map` the cost is that of
    # one shard. An unknown primitive is one operation on each element of its largest result.
    inner = programs_in(eqn, integers)
    if not inner:
        return _of_operation(eqn, differs)
    costs = [cost_of_program(p.jaxpr, p.integers, p.differing(differs), steps) for p in inner]
    if inner[0].is_branch:
        return _max_step(costs)
    fused = [Cost(launches=int(p.role != "call")) for p in inner]
    runs = zip(costs, fused, inner, strict=True)
    total = _sum(_repeated(c + one, p.times, steps) for c, one, p in runs)
    return total + cost_around(eqn, inner)


def cost_around(eqn: Eqn, inner: Sequence[Inner]) -> Cost:
    """Estimates what a loop or branch costs besides the jaxprs `inner`."""
    if inner[0].role == "body":
        return Cost(bytes=_cut_and_joined(eqn))
    if inner[0].role == "condition" and inner[0].jaxpr.outvars[0].aval.shape:
        # A predicate for each lane: it is taken again, and what is done stays as it is.
        again = cost_of_program(inner[0].jaxpr, inner[0].integers)
        carry = [v.aval for v in eqn.outvars]
        return again + Cost(sum(map(size_of, carry)), bytes=3 * bytes_of(carry))
    return Cost()


_costs = Cache("what programs cost", most=8192)


def cost_of_program(
    jaxpr: Program,
    integers: Mapping[Any, int] | None = None,
    differs: Sequence[bool] | None = None,
    steps: int = 1,
) -> Cost:
    """Estimates the cost of a jaxpr, including jaxprs inside it.

    `integers` are known values of its inputs; `differs` and `steps` are as for an equation.
    """
    return costs_of_program(jaxpr, integers, differs, steps)[0]


def costs_of_program(
    jaxpr: Program,
    integers: Mapping[Any, int] | None = None,
    differs: Sequence[bool] | None = None,
    steps: int = 1,
) -> tuple[Cost, Cost]:
    """Estimates as `cost_of_program`; also the cost of the operations that are not fused."""
    program, given = _compat.jaxpr_of(jaxpr), integers_given(jaxpr, integers)
    marks = None if differs is None else tuple(differs)
    key = (*map(given.get, (*program.constvars, *program.invars)), marks, steps)

    def count() -> tuple[Cost, Cost]:
        costs = list(costs_of_equations(program, integers_in(program, given), marks, steps))
        return _sum(costs), _sum(cost for cost in costs if cost.launches)

    # With symbols read, the cost depends on more than the key.
    return count() if reads_symbols() else _costs.get(key, count, owner=program)


def costs_of_equations(
    jaxpr: Jaxpr, integers: Mapping[Any, int], differs: Sequence[bool] | None, steps: int
) -> Iterator[Cost]:
    """Yields the cost of each equation, except for those that run once for all lanes."""
    own = set(itertools.compress(jaxpr.invars, differs or ()))
    for eqn in jaxpr.eqns:
        marks = [not isinstance(v, Literal) and v in own for v in eqn.invars]
        if differs is None or any(marks):
            yield cost_of_equation(eqn, integers, None if differs is None else marks, steps)
            own.update(eqn.outvars)


def _of_operation(eqn: Eqn, differs: Sequence[bool] | None) -> Cost:
    name = eqn.primitive.name
    flops, transcendentals = 0.0, 0.0
    if name in FLOPS or (eqn.outvars and name not in MOVES):
        flops, transcendentals = FLOPS.get(name, elementwise)(eqn)
    moved = bytes_moved(eqn, differs)
    empty = _empty(eqn)
    terms, is_scalar = _terms(eqn), name in _SCALAR_FUNCTIONS
    return Cost(
        round(flops),
        round(transcendentals),
        moved,
        serial=round(flops) if name in SERIAL else 0,
        fused=moved if is_fused(eqn.primitive) else 0,
        places=places_of(eqn),
        calls=calls_of(eqn),
        launches=int(not (name in PART_OF_OTHERS or is_fused(eqn.primitive))),
        contracted=round(flops) if name == "dot_general" else 0,
        idle=round(flops * empty),
        sums=int(terms > 0),
        terms=terms,
        idle_transcendentals=0 if is_scalar else round(transcendentals * empty),
        scalar_functions=round(transcendentals) if is_scalar else 0,
    )


_REGISTER = 8  # numbers that a vector register holds
_DRAWS = {n for n, count in FLOPS.items() if count is _random_bits} | {"random_fold_in"}


def _empty(eqn: Eqn) -> float:
    """Returns the empty places of a vector register for each number of one lane."""
    if not eqn.outvars:
        return 0.0
    numbers = max(1, size_of(eqn.outvars[0].aval))
    if eqn.primitive.name in _DRAWS:
        # A loop of few numbers is unrolled, and not vectorized. Programs: tree search (mctx).
        return _REGISTER - 1 if numbers < 2 * _REGISTER else 0.0
    return max(0.0, _REGISTER / numbers - 1) if facts_of(eqn.primitive).elementwise else 0.0


def _terms(eqn: Eqn) -> int:
    """Returns how many numbers are combined into one, or into each of few."""
    name = eqn.primitive.name
    is_dot = name == "dot_general" and size_of(eqn.outvars[0].aval) == 1
    return _read(eqn) if is_dot or name in _REDUCTIONS else 0


def _sum(costs: Iterable[Cost]) -> Cost:
    return functools.reduce(operator.add, costs, Cost())


def _repeated(cost: Cost, times: Any, steps: int) -> Cost:
    if times is None or not (isinstance(times, int) or reads_symbols()):
        return steps * cost + Cost(at_least=True)
    return cost * number_of(times)


def _max_step(costs: list[Cost]) -> Cost:
    return Cost(
        *map(max, zip(*map(_amounts, costs), strict=True)),
        at_least=any(c.at_least for c in costs),
        at_most=any(c.at_most for c in costs) or len(set(costs)) > 1,
    )


def _cut_and_joined(eqn: Eqn) -> int:
    """Counts the bytes that a scan moves to slice its inputs and stack its results."""
    (body,) = bodies_of(eqn)
    cut = (eqn.invars[i] for i in body.sliced_operands)
    joined = (eqn.outvars[i] for i in body.stacked_results)
    return 2 * bytes_of(v.aval for v in (*cut, *joined))


@dataclass(frozen=True)
class Weights:
    """Holds nanoseconds for each unit of a cost."""

    transcendental: float
    fused: float  # byte that need not be moved if operations are fused
    byte: float = 0.05  # of the others
    flop: float = 0.012  # of which many run at a time
    serial: float = 0.3  # flop that waits for the one before
    place: float = 4.0
    call: float = 100.0  # of a library, the shortest one
    contracted: float = 0.0  # flop of a contraction, besides what `flop` counts
    idle: float = 0.0
    sum: float = 0.0
    term: float = 0.0
    idle_transcendental: float = 0.0
    scalar_function: float = 0.0  # besides what `transcendental` counts

    def time(self, cost: Cost) -> Nanoseconds:
        computed = self.flop * (cost.flops - cost.serial) + self.serial * cost.serial
        moved = self.byte * (cost.bytes - cost.fused) + self.fused * cost.fused
        other = (
            self.place * cost.places + self.call * cost.calls + self.contracted * cost.contracted
        )
        other += self.idle * cost.idle + self.idle_transcendental * cost.idle_transcendentals
        other += self.sum * cost.sums + self.term * cost.terms
        other += self.scalar_function * cost.scalar_functions
        return Nanoseconds(self.transcendental * cost.transcendentals + computed + moved + other)


# Rough figures. How well they decide, benchmarks tell: for lanes together `divergence` and `rules`,
# for rows `rows`. By those of findings nothing is run: they order the report, and advise.

VECTORIZED = Weights(transcendental=0.2, fused=0.0)
"""The share of one of many lanes that run at once. Functions fill vector registers, and what acts
on each element is one loop with what reads it."""

ROWS = Weights(transcendental=0.6, fused=0.05)
"""Rows, packed or padded. Between operations they are masked, or moved to the other layout, which
keeps many from being one loop. Arrays are long, and of functions some fill vector registers."""

MASKED = Weights(
    transcendental=0.6,
    scalar_function=2.1,
    fused=0.0,
    byte=0.022,
    flop=0.05,
    contracted=-0.03,  # products are those of a library
    place=1.3,
)
"""The share of a lane in a step of a loop that all lanes take.

These and `ALONE` are fitted to the loops of the search and of `programs`, each run both ways with
equal counts: for most the ratio of the two is within 1.5x of what was measured."""

ALONE = Weights(
    transcendental=1.1,
    scalar_function=1.4,
    idle_transcendental=1.5,
    fused=0.0,
    byte=0.026,
    flop=0.026,
    idle=0.03,
    contracted=0.05,
    place=3.6,
    sum=4.0,
    term=0.8,
)
"""The same step of one lane by itself, in a loop that is one function. What it does with many
numbers takes as long. On few it leaves most of a vector register empty, a sum waits for each of its
terms, and products are not those of a library."""

FINDINGS = Weights(transcendental=0.03, byte=0.1, fused=0.1, flop=0.03)
"""Weights of findings, most expensive first, by the operations and bytes that a listing
shows: in it functions are operations as others, and arrays of all lanes lie in memory, not in a
  cache."""

PLANS = Weights(transcendental=0.5, fused=0.1, byte=0.1, flop=0.05, serial=0.05, place=0, call=0)
"""How many rows on disk make a unit. On an average machine, for a plan is the same on all; where it
was begun it goes on, so these are not what is measured today."""

# Nanoseconds, too, of what not every use counts.
LAUNCH = Nanoseconds(CALIBRATED["cpu"].launch)  # to begin an operation; most are fused with others
GPU_SPEED = CALIBRATED["cpu"].element / CALIBRATED["gpu"].element  # of cores that do as much
GPU_LAUNCH = Nanoseconds(GPU_SPEED * CALIBRATED["gpu"].launch)
STEP = 1_000.0  # of a loop that runs operations of one lane
CALLBACK = 10_000.0  # a call of Python
BLOCK = 6_000.0  # to begin a block of rows, and to write what it computed
COMPILED_STEP = 10_000_000.0  # to compile an operation once more
RUNS_OF_ROWS = 1_000  # of a compiled program of rows, over which the time to compile is spread
