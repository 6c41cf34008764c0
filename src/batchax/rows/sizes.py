"""Symbolic sizes: their bounds, and how comparisons of them are answered.

A function of one row is staged with a symbolic leading size such as ``n``. What follows from it
is an expression, ``n - 1`` or ``2*n``. Arrays that hold a row have the *bound* of the
expression; its *size* is how much of that belongs to the row, which is known when rows are.

JAX's symbolic sizes say that ``n == 1`` is False, as they do of all they cannot tell, and that
``n > 0`` is True, as they take sizes to be positive. A row alone may have one element, or none.
So comparisons in the user's code are answered by looking at the lengths that rows may have: if the
answer is the same for all of them it is given, and if not the comparison raises. Questions that
JAX asks, whether shapes are known to be equal, are answered as JAX does. A size has no hash except
for JAX, which caches by types what it has traced: in a dict, what is compared depends on the hash.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer
from jax.extend.core import get_opaque_trace_state

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.bodies import Anywhere, programs_inside, with_inside
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import Aval, Eqn, Value, Values
from batchax.kernel.axis import Axis, Position, Positions
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import own_primitive
from batchax.rows.places_where import places_where

Dim: TypeAlias = int | _compat.RowDimension
"""The size of an axis of a row: a number, or an expression such as ``n - 1``."""

Shape: TypeAlias = Sequence[Dim]

is_symbolic: Callable[[Any], bool] = jax.export.is_symbolic_dim

_MOST_COMBINATIONS = 1 << 22  # of lengths that are tried, to see what an expression comes to


@dataclass(frozen=True)
class Limited:
    """A size that a program finds, and how large it may be."""

    called: str  # what found it
    limit: int  # how large it may be
    count: Any  # how large it is


@dataclass
class Sizes:
    """What the symbols of a program stand for."""

    bounds: Mapping[str, int]  # the greatest value of each symbol
    values: Mapping[str, Any]  # its value in the row at hand: an int32 scalar, traced or known
    # Symbols whose value is known to be the bound: nothing is padded along those.
    exact: frozenset[str] = frozenset()
    # For each symbol that the program finds, the size that it is at most.
    found_of: Mapping[str, Any] = field(default_factory=dict)
    # Those of them for which a limit was given.
    limited: list[Limited] = field(default_factory=list)
    # Whether the program may be one that is recomputed, and finds what was found.
    again: bool = False
    # Whether objects of JAX run as the operations they stand for, because their transpose is known.
    expands_objects: bool = False
    # How large sizes that the program finds are, where that is known.
    at_most: Mapping[str, int] = field(default_factory=dict)
    # Where their conditions are true, and how many elements are, where that was found before.
    before: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    _bounds: dict[Any, int] = field(default_factory=dict)
    _sizes: dict[Any, Any] = field(default_factory=dict)
    # A trace, and the masks computed in it: operations need the same ones again and again.
    _masks: tuple[Any, dict[Any, Any]] = field(default=(None, {}), init=False)

    def bound(self, dim: Dim) -> int:
        if not is_symbolic(dim):
            return int(dim)
        if dim not in self._bounds:
            self._bounds[dim] = self._find_bound(dim)
        return self._bounds[dim]

    def most_found(self, name: str, most: Any, limit: int | None) -> int:
        """The bound of a size that is found, of at most `most` elements."""
        bound = self.bound(most) if limit is None else min(self.bound(most), limit)
        return min(bound, self.at_most.get(name, bound))

    def find(self, name: str, most: Any, count: Value, limited: Limited | None) -> None:
        """Enters a size that the program has found, and what it is at most."""
        bound = self.most_found(name, most, None if limited is None else limited.limit)
        self.bounds = {**self.bounds, name: bound}
        self.values = {**self.values, name: jnp.minimum(count, bound)}
        self.found_of = {**self.found_of, name: most}
        self.limited += [] if limited is None else [limited]

    def _check_has(self, dim: Dim) -> None:
        if not _compat.symbols(dim) <= self.bounds.keys():
            raise UnsupportedError(
                f"the size {dim} was found in a loop, a branch or a derivative rule, and is used "
                "outside of it; or it is of another function around this one. Return from there "
                "what does not have that size."
            )

    def _find_bound(self, dim: Dim) -> int:
        self._check_has(dim)
        if str(dim) in self.bounds:
            return self.bounds[str(dim)]
        values = self.in_every_row(dim)
        if values is not None:
            return max(int(np.max(values[0])), 0)
        # Sizes too long to try all lengths. An expression that only grows with each symbol is
        # greatest where all of them are; of others nothing is known.
        names = sorted(_compat.symbols(dim))
        falls = "-" in str(dim) and len(names) > 1
        if "floordiv" in str(dim) or "mod" in str(dim) or falls:
            raise UnsupportedError(
                f"the size {dim} depends on ragged sizes of up to "
                f"{', '.join(str(self.bounds[name]) for name in names)}: its greatest value "
                "cannot be found. Make the Ragged with a smaller max_length."
            )
        return max(int(_compat.evaluate_size(dim, {n: self.bounds[n] for n in names})), 0)

    def in_every_row(self, *dims: Dim) -> list[Any] | None:
        """What `dims` come to in each row there may be; None where those are too many."""
        symbolic = [dim for dim in dims if is_symbolic(dim)]
        names = sorted(frozenset().union(*map(_compat.symbols, symbolic)))
        if math.prod(self.bounds[name] + 1 for name in names) > _MOST_COMBINATIONS:
            return None
        ranges = [np.arange(self.bounds[name] + 1, dtype=np.int64) for name in names]
        values = dict(zip(names, np.meshgrid(*ranges, indexing="ij"), strict=True))
        return [_compat.evaluate_size(dim, values) if is_symbolic(dim) else dim for dim in dims]

    def size(self, dim: Dim) -> Value:
        """The size of `dim` in the row at hand: an int, or an int32 scalar; never negative."""
        if not is_symbolic(dim):
            return int(dim)
        if dim not in self._sizes:
            own = self.values.get(str(dim))
            size = jnp.maximum(self.value(dim), 0).astype(np.int32) if own is None else own
            self._sizes[dim] = size
        return self._sizes[dim]

    def value(self, dim: Dim) -> Value:
        """What the expression `dim` comes to in the row at hand, as arithmetic."""
        if not is_symbolic(dim):
            return int(dim)
        self._check_has(dim)
        return _compat.evaluate_size(dim, dict(self.values))

    def inside(self, values: Mapping[str, Any] | None = None) -> Sizes:
        """These for a program that is staged within another.

        Sizes computed while that is staged are its tracers, and are not kept for the outer one.
        """
        kept = dict(self._sizes) if values is None else {}
        values = self.values if values is None else values
        return replace(self, values=values, limited=[], _sizes=kept, _bounds=dict(self._bounds))

    def is_exact(self, dim: Dim) -> bool:
        """Whether arrays have no padding along a dimension of that size."""
        return not is_symbolic(dim) or _compat.symbols(dim) <= self.exact

    def bounds_of(self, shape: Shape) -> tuple[int, ...]:
        return tuple(map(self.bound, shape))

    def padded_axes(self, shape: Shape) -> tuple[int, ...]:
        return tuple(i for i, dim in enumerate(shape) if not self.is_exact(dim))

    def mask(self, shape: Shape, axes: Sequence[int]) -> Value:
        """Which elements of such an array are within the row along `axes`; None for all."""
        along = tuple((axis, shape[axis]) for axis in axes if not self.is_exact(shape[axis]))
        if not along:
            return None
        bounds = self.bounds_of(shape)

        def compute() -> jax.Array:
            of = (lax.broadcast_in_dim(self.belongs(dim), bounds, (a,)) for a, dim in along)
            return functools.reduce(lax.bitwise_and, of)

        return self._once((bounds, along), compute)

    def belongs(self, dim: Dim) -> jax.Array:
        """Which elements along a dimension of that size belong to the row."""
        places = lambda: lax.iota(np.int32, self.bound(dim))
        return self._once(dim, lambda: lax.lt(places(), jnp.asarray(self.size(dim), np.int32)))

    def _once(self, key: Any, compute: Callable[[], jax.Array]) -> jax.Array:
        """What `compute` returned for `key` in this trace; a trace within it computes its own."""
        trace = trace_state()
        if self._masks[0] != trace:
            self._masks = trace, {}
        masks = self._masks[1]
        if key not in masks:
            masks[key] = compute()
        return masks[key]

    def filled_in(self, params: Any) -> Any:
        """Parameters of an equation with each size replaced by its bound."""
        if isinstance(params, dict):
            return {k: self.filled_in(v) for k, v in params.items()}
        if isinstance(params, (tuple, list)):
            plain = type(params) in (tuple, list)
            return type(params)(self.filled_in(v) for v in params) if plain else params
        return self.bound(params) if is_symbolic(params) else params


def _speaks_of_sizes(eqn: Eqn) -> bool:
    atoms = itertools.chain(eqn.invars, eqn.outvars)
    if any(has_symbols(getattr(v.aval, "shape", ())) for v in atoms):
        return True
    return _in_params(eqn.params)


depends_on_sizes = Anywhere(_speaks_of_sizes).in_equation
"""Whether an equation, or a program inside it, speaks of a symbolic size."""


def has_symbols(shape: Shape) -> bool:
    return any(map(is_symbolic, shape))


def ragged_axis(shape: Shape) -> int | None:
    return next((i for i, dim in enumerate(shape) if is_symbolic(dim)), None)


def ragged_axes(shape: Shape) -> list[int]:
    return [i for i, dim in enumerate(shape) if is_symbolic(dim)]


def _in_params(params: object) -> bool:
    if isinstance(params, dict):
        return any(map(_in_params, params.values()))
    parts: Any = params if type(params) in (tuple, list) else ()
    return any(map(_in_params, parts)) or (parts == () and is_symbolic(params))


_JAX = frozenset({"jax", "jaxlib", "batchax"})

# They act for their caller, the user or JAX.
_TOOLS = frozenset({"numpy", "scipy", "opt_einsum", *sys.stdlib_module_names})


def is_users(frame: FrameType) -> bool:
    """Whether what happens in `frame` happens on behalf of the user, not of JAX."""
    return not _belongs(_caller(frame), _JAX)


def line_around(frame: FrameType) -> str:
    """`file:line (function)` of the user's code that runs in `frame`, or called what does."""
    caller = _caller(frame)
    return _line(caller, caller.f_lineno)


def line_of(error: BaseException) -> str:
    """`file:line (function)` of the user's code that raised `error`; "" if there is none."""
    places = list(_places(error))
    return _line(*places[-1]) if places else ""


def names_of(error: BaseException) -> dict[str, Any]:
    """What the names of the user's code that raised `error` stood for."""
    names: dict[str, Any] = {}
    for frame, _ in list(_places(error))[-1:]:
        names |= {k: v for k, v in frame.f_globals.items() if k in frame.f_code.co_names}
        names |= frame.f_locals
    return names


def _places(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not (_is_tool(frame) or _belongs(frame, _JAX)):
            yield frame, line


def _caller(frame: FrameType) -> FrameType:
    """The innermost code around `frame` that is no mere tool."""
    around: FrameType | None = frame
    while around is not None:
        if not _is_tool(around):
            return around
        around = around.f_back
    return frame


def _is_tool(frame: FrameType) -> bool:
    # A method that `dataclasses` writes is in the user's module, and has no line.
    code = frame.f_code
    written = code.co_filename == "<string>" and code.co_name.startswith("__")
    return written or _belongs(frame, _TOOLS)


def _belongs(frame: FrameType, packages: frozenset[str]) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages


def _line(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_name})"


_MOST_COMPARED = 1 << 20  # lengths for which a comparison is evaluated; arrays hold them all


@dataclass(frozen=True)
class Comparison:
    """A question about sizes of rows, ``ask(size, other)``."""

    ask: Any
    size: Any
    other: Any

    def answers(self) -> np.ndarray | None:
        sizes = [x for x in (self.size, self.other) if _compat.is_row_size(x)]
        names = sizes[0].scope.lengths.values.keys()
        if len(names) != 1 or not all(_compat.symbols(size) <= names for size in sizes):
            return None
        values = _in_every_row(self.size, self.other)
        return None if values is None else np.asarray(self.ask(*values))


def comparison_of(error: BaseException | None) -> Comparison | None:
    """The question that rows have different answers to, if that is why a function failed."""
    while error is not None:
        comparison = getattr(error, "comparison", None)
        if isinstance(comparison, Comparison):
            return comparison
        error = error.__cause__
    return None


class UndecidedSizeError(UnsupportedError, jax.errors.InconclusiveDimensionOperation):
    """A question to which rows have different answers."""

    def __init__(self, line: str, question: str, comparison: Comparison | None = None) -> None:
        super().__init__(
            f"{line}: {question}. Where lengths are known rows of one length can run together: "
            'batchax.vmap(..., layout="grouped"). Or compute with the size: '
            "jnp.where(jnp.asarray(x.shape[0]) == 1, ...)."
        )
        self.question = question
        self.comparison = comparison


class HashedSizeError(UndecidedSizeError, TypeError):
    """A size that is hashed: not hashable, as Python calls it, for those who ask beforehand."""

    def __init__(self, line: str, size: Dim) -> None:
        super().__init__(line, f"the size {size} {_HASHED}")


_HASHED = "is hashed, as a key of a dict or set is: which key it is would differ from row to row"


# JAX's words, and Python's where `len` or `range` is given what is no number.
_NO_NUMBER = re.compile(
    r"Symbolic dimension '.*' used in a context that requires a constant"
    r"|'SizeOfRow' object cannot be interpreted as an integer"
)


_NO_EQUAL_PARTS = "array split does not result in an equal division"


ASKED_FOR_NUMBERS = jax.errors.InconclusiveDimensionOperation
"""What JAX raises where a size is no number."""


def needs_number(error: BaseException) -> bool:
    if isinstance(error, ASKED_FOR_NUMBERS) or _NO_EQUAL_PARTS in str(error):
        return True
    return isinstance(error, TypeError) and bool(_NO_NUMBER.search(str(error)))


def question_of(error: BaseException) -> str:
    """The question that `error` reports, or else its first line."""
    if isinstance(error, UndecidedSizeError):
        return error.question
    message = str(error)
    if _NO_NUMBER.search(message):
        return "`len(x)`, `range(n)`, `int(n)`, NumPy, and Python loops over an array take a number"
    if _NO_EQUAL_PARTS in message:
        return "`jnp.split` takes a multiple of the number of parts; slice the row instead"
    # `jax.jit` keeps the text of an error.
    hashed = re.search(f"the size [^\n]* {_HASHED}", message)
    return hashed[0] if hashed else message.split("\n")[0].rstrip(".")


@dataclass(frozen=True)
class Lengths:
    """The lengths that the rows of a call may have."""

    # For each size the lengths that occur, of row after row; or those that may occur.
    values: Mapping[str, np.ndarray]
    aligned: bool  # whether entries of the same place are of the same row
    # The greatest of each size that the function finds.
    found: dict[str, int] = field(default_factory=dict)

    def of(self, names: frozenset[str]) -> dict[str, np.ndarray] | None:
        """The lengths that sizes may have together; None where those are too many."""
        arrays = [
            self.values[name] if name in self.values else np.arange(self.found[name] + 1)
            for name in sorted(names)
        ]
        if not (self.aligned and names <= self.values.keys()):
            arrays = list(map(np.unique, arrays)) if self.aligned else arrays
            if np.prod([float(len(x)) for x in arrays]) > _MOST_COMPARED:
                return None
            arrays = np.meshgrid(*arrays)
        return dict(zip(sorted(names), arrays, strict=True))


def _comparison(ask: Callable[..., Any], sign: str) -> Callable[..., Any]:
    return lambda self, other: self._compared(ask, sign, other)


class SizeOfRow(_compat.RowDimension):
    """A size of rows, which answers the user's questions by the lengths that rows may have."""

    __slots__ = ()

    __eq__ = _comparison(operator.eq, "==")
    __ne__ = _comparison(operator.ne, "!=")
    __lt__ = _comparison(operator.lt, "<")
    __le__ = _comparison(operator.le, "<=")
    __gt__ = _comparison(operator.gt, ">")
    __ge__ = _comparison(operator.ge, ">=")

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        return _answer(frame, operator.ne, self, 0, f"bool({self})") if is_users(frame) else True

    def __hash__(self) -> int:
        # A size is equal to a number in some rows, and must then have its hash.
        frame = sys._getframe(1)
        if is_users(frame):
            raise HashedSizeError(line_around(frame), self)
        return self.hashed()

    def _compared(self, ask: Callable[..., Any], sign: str, other: Value) -> bool:
        frame = sys._getframe(2)
        if not is_users(frame):
            return self._compared_by_jax(ask, other)
        if isinstance(other, (jax.Array, Tracer, np.ndarray)):
            return ask(jnp.asarray(self), other)
        number = isinstance(other, (int, float, np.number))
        if not number and not (_compat.is_row_size(other) and other.scope is self.scope):
            return getattr(super(), f"__{ask.__name__}__")(other)
        return _answer(frame, ask, self, other, f"{self} {sign} {other}")

    def _compared_by_jax(self, ask: Callable[..., Any], other: Value) -> bool:
        """JAX's answer, which is for all rows there are; of those there may be, if it has none."""
        try:
            answer = getattr(super(), f"__{ask.__name__}__")(other)
        except ASKED_FOR_NUMBERS as error:
            answer = agreed(self, other, ask)
            if answer is None and not _compat.is_row_size(other):
                answer = _ARE_THERE_ANY.get((ask, other))
            if answer is None:
                error.comparison = Comparison(ask, self, other)  # type: ignore[attr-defined]
                raise
            return answer
        if ask in (operator.eq, operator.ne) and answer is (ask is operator.ne):
            return (ask is operator.eq) == _is_always(self, other)
        return answer


# JAX takes a size with a name to be positive. Here ``n - 1`` is positive, too, for the
# normalization of indices. For no elements the row alone raises, or has no result.
_ARE_THERE_ANY = {
    (operator.ge, 1): True,
    (operator.gt, 0): True,
    (operator.lt, 1): False,
    (operator.le, 0): False,
}


def _is_always(size: SizeOfRow, other: Dim) -> bool:
    """Whether two expressions that JAX cannot tell to be equal are, in all rows there may be."""
    if not _compat.is_row_size(other) or other.scope is not size.scope:
        return False
    return (
        _compat.symbols(size) == _compat.symbols(other) and agreed(size, other, operator.eq) is True
    )


def _answer(
    frame: FrameType, ask: Callable[..., Any], size: Dim, other: Dim, question: str
) -> bool:
    answer = agreed(size, other, ask)
    if answer is None:
        question = f"`{question}` may be true of one row and false of another"
        raise UndecidedSizeError(line_around(frame), question, Comparison(ask, size, other))
    return answer


def agreed(size: Dim, other: Dim, ask: Callable[..., Any] = operator.ge) -> bool | None:
    """The answer to ``ask(size, other)`` if it is one for all rows there may be, else None."""
    values = _in_every_row(size, other)
    answers = [] if values is None else np.unique(ask(*values))
    return bool(answers[0]) if len(answers) == 1 else None


def greatest(size: Dim) -> int | None:
    """The most that a size, or number, is in any row there may be; None if that is unknown."""
    if is_symbolic(size) and not _compat.is_row_size(size):  # of a function that is exported
        return None
    values = _in_every_row(size)
    return None if values is None else max(int(np.max(values[0])), 0)


def may_differ(size: Dim, other: Dim) -> bool:
    """Whether one may not be the other, in some row: JAX does not ask that of a reshape."""
    if not (_compat.is_row_size(size) or _compat.is_row_size(other)):
        return size != other
    if _compat.is_row_size(size) and _compat.is_row_size(other) and size == other:
        return False
    values = _in_every_row(size, other)
    return values is not None and bool(np.any(values[0] != values[1]))


def _in_every_row(*sizes: Dim) -> list[Any] | None:
    """What sizes come to in each row there may be; None where those are too many."""
    symbolic = [size for size in sizes if _compat.is_row_size(size)]
    if not symbolic:
        return list(sizes)
    lengths: Lengths = symbolic[0].scope.lengths
    values = lengths.of(frozenset().union(*map(_compat.symbols, symbolic)))
    if values is None:
        return None
    return [_compat.evaluate_size(x, values) if _compat.is_row_size(x) else x for x in sizes]


def _types(condition: Aval, *, size: Dim, **params: Any) -> Aval:
    return _compat.with_varying_axes(
        ShapedArray((size,), np.dtype(np.int32)), _compat.varying_axes(condition)
    )


def _operations(condition: Value, *, size: Dim, **params: Any) -> jax.Array:
    return places_where(condition, size)[0]


def _batched(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> tuple[Any, Position]:
    if is_symbolic(params["size"]):
        raise UnsupportedError(
            f"{params['called']} finds a size, which differs between the lanes of an inner vmap "
            "here, whose results are arrays of one size. Where that is jax.vmap use batchax.vmap, "
            "of a function that closes over no row."
        )
    operations = lambda condition: [_operations(condition, **params)]
    (out,), (at,) = batch_function(axis, operations, args, axes)
    return out, at


found_places_p = own_primitive(
    "found_places",
    called="places where a condition holds",
    operations=_operations,
    types=_types,
    rule=_batched,
    several=False,
)
"""The places where a vector of bools is true.

Its parameters are `size`, how many there are: a symbol that is new, or an int; `limit`, how many
there may be, or None for no limit; and `called`, what the user called.
"""


def finds_size(eqn: Eqn) -> bool:
    return eqn.primitive is found_places_p and is_symbolic(eqn.params["size"])


_finds = Anywhere(finds_size)

find_found = _finds.in_program
"""Whether a program finds a size."""

finds_inside = _finds.in_equation
"""Whether an equation, or a program inside it, does."""


def leaves_with_found(eqn: Eqn) -> str | None:
    """A size that is found in a loop or branch, and which its results have; None if there is none.

    It is not known there, or is another one by the same name.
    """
    if not _finds.in_equation(eqn) or facts_of(eqn.primitive).is_plain_call or finds_size(eqn):
        return None
    inner = (inside for program in programs_inside(eqn) for inside in with_inside(program.eqns))
    inside_it = {str(each.params["size"]) for each in inner if finds_size(each)}
    dims = (d for v in eqn.outvars for d in getattr(v.aval, "shape", ()) if is_symbolic(d))
    return next((name for d in dims for name in _compat.symbols(d) if name in inside_it), None)


def trace_state() -> object:
    """What differs between traces, and is the same throughout one."""
    return get_opaque_trace_state(convention="nnx")
