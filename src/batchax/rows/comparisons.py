"""What a function of one row is told when it compares the row's size.

JAX's symbolic sizes say that ``n == 1`` is False, as they do of all they cannot tell, and that
``n > 0`` is True, as they take sizes to be positive. A row alone may have one element, or none.
So what the user's code asks is answered by looking at the lengths that rows may have: if the
answer is the same for all of them it is given, and if not the question is refused. Questions that
JAX asks, whether shapes are known to be equal, are answered as JAX does. A size has no hash but for
JAX, which keeps by types what it has traced: in a dict, what is compared depends on the hash.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.rows.user_code import is_users, line_around

_MOST_COMBINATIONS = 1 << 20  # of lengths that a question is asked for; arrays hold them all


@dataclass(frozen=True)
class Asked:
    """A question about sizes of rows, ``ask(size, other)``."""

    ask: Any
    size: Any
    other: Any

    def answers(self) -> np.ndarray | None:
        """The answer for each length that rows may have; None if they have several sizes."""
        sizes = [x for x in (self.size, self.other) if _compat.is_row_size(x)]
        if len(sizes[0].scope.lengths.values) != 1 or any(map(_is_of_found, sizes)):
            return None
        values = _in_every_row(self.size, self.other)
        return None if values is None else np.asarray(self.ask(*values))


def _is_of_found(size: Any) -> bool:
    return not _compat.symbols(size) <= size.scope.lengths.values.keys()


def asked_by(error: BaseException | None) -> Asked | None:
    """The question that rows have different answers to, if that is why a function failed."""
    while error is not None:
        asked = getattr(error, "asked", None)
        if isinstance(asked, Asked):
            return asked
        error = error.__cause__
    return None


class UndecidedSizeError(UnsupportedError, jax.errors.InconclusiveDimensionOperation):
    """A question to which rows have different answers."""

    def __init__(self, line: str, question: str, asked: Asked | None = None) -> None:
        super().__init__(
            f"{line}: {question}. Where lengths are known rows of one length can run together: "
            'batchax.vmap(..., layout="grouped"). Or compute with the size: '
            "jnp.where(jnp.asarray(x.shape[0]) == 1, ...)."
        )
        self.question = question
        self.asked = asked


class HashedSizeError(UndecidedSizeError, TypeError):
    """A size that is hashed: not hashable, as Python calls it, for those who ask beforehand."""

    def __init__(self, line: str, size: Any) -> None:
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


def asked_for_number(error: Exception) -> bool:
    """Whether a function failed because a size is no number."""
    return isinstance(error, ASKED_FOR_NUMBERS) or (
        isinstance(error, TypeError) and bool(_NO_NUMBER.search(str(error)))
    )


def question_of(error: Exception) -> str:
    """What was asked, if `error` is that a size does not say; else what that says."""
    if isinstance(error, UndecidedSizeError):
        return error.question
    told = str(error)
    if _NO_NUMBER.search(told):
        return "`len(x)`, `range(n)`, `int(n)` and loops of Python over an array take a number"
    if _NO_EQUAL_PARTS in told:
        return "`jnp.split` into parts takes a multiple of how many they are; use `jnp.array_split`"
    hashed = re.search(f"the size [^\n]* {_HASHED}", told)  # `jax.jit` keeps the text of an error
    return hashed[0] if hashed else told.split("\n")[0].rstrip(".")


@dataclass(frozen=True)
class Lengths:
    """The lengths that the rows of a call may have.

    Attributes:
      values: for each size the lengths that occur, of row after row; or those that may occur.
      aligned: whether entries of the same place are of the same row.
      found: the greatest of each size that the function finds.
    """

    values: Mapping[str, np.ndarray]
    aligned: bool
    found: dict[str, int] = field(default_factory=dict)

    def of(self, names: frozenset[str]) -> dict[str, np.ndarray] | None:
        """The lengths that sizes may have together; None where those are too many."""
        arrays = [
            self.values[name] if name in self.values else np.arange(self.found[name] + 1)
            for name in sorted(names)
        ]
        if not (self.aligned and names <= self.values.keys()):
            arrays = list(map(np.unique, arrays)) if self.aligned else arrays
            if np.prod([float(len(x)) for x in arrays]) > _MOST_COMBINATIONS:
                return None
            arrays = np.meshgrid(*arrays)
        return dict(zip(sorted(names), arrays, strict=True))


class SizeOfRow(_compat.RowDimension):
    """A size of rows, which answers the user's questions by the lengths that rows may have."""

    __slots__ = ()

    def __eq__(self, other: Any) -> Any:
        return self._compared(operator.eq, "==", other)

    def __ne__(self, other: Any) -> Any:
        return self._compared(operator.ne, "!=", other)

    def __lt__(self, other: Any) -> Any:
        return self._compared(operator.lt, "<", other)

    def __le__(self, other: Any) -> Any:
        return self._compared(operator.le, "<=", other)

    def __gt__(self, other: Any) -> Any:
        return self._compared(operator.gt, ">", other)

    def __ge__(self, other: Any) -> Any:
        return self._compared(operator.ge, ">=", other)

    def __bool__(self) -> bool:
        frame = sys._getframe(1)
        return _answer(frame, operator.ne, self, 0, f"bool({self})") if is_users(frame) else True

    def __hash__(self) -> int:
        # Whoever asks may look for a number, of which nothing is said here.
        frame = sys._getframe(1)
        if is_users(frame):
            raise HashedSizeError(line_around(frame), self)
        return self.hashed()

    def _compared(self, ask: Any, sign: str, other: Any) -> Any:
        frame = sys._getframe(2)
        if not is_users(frame):
            return self._compared_by_jax(ask, other)
        if isinstance(other, (jax.Array, Tracer, np.ndarray)):
            return ask(jnp.asarray(self), other)
        number = isinstance(other, (int, float, np.number))
        if not number and not (_compat.is_row_size(other) and other.scope is self.scope):
            return getattr(super(), f"__{ask.__name__}__")(other)
        return _answer(frame, ask, self, other, f"{self} {sign} {other}")

    def _compared_by_jax(self, ask: Any, other: Any) -> Any:
        """JAX's answer, which is for all rows there are; of those there may be, if it has none."""
        try:
            answer = getattr(super(), f"__{ask.__name__}__")(other)
        except ASKED_FOR_NUMBERS as error:
            answer = agreed(self, other, ask)
            if answer is None and _is_of_found(self) and (ask, other) in _ARE_THERE_ANY:
                return True  # as JAX takes it of a size by a name of its own
            if answer is None:
                error.asked = Asked(ask, self, other)  # type: ignore[attr-defined]
                raise
            return answer
        if ask in (operator.eq, operator.ne) and answer is (ask is operator.ne):
            return (ask is operator.eq) == _is_always(self, other)
        return answer


_ARE_THERE_ANY = (operator.ge, 1), (operator.gt, 0)


def _is_always(size: Any, other: Any) -> bool:
    """Whether two expressions that JAX cannot tell to be equal are, in all rows there may be."""
    if not _compat.is_row_size(other) or other.scope is not size.scope:
        return False
    return (
        _compat.symbols(size) == _compat.symbols(other) and agreed(size, other, operator.eq) is True
    )


def _answer(frame: FrameType, ask: Any, size: Any, other: Any, question: str) -> bool:
    """What all rows there may be agree on."""
    answer = agreed(size, other, ask)
    if answer is None:
        question = f"`{question}` may be true of one row and false of another"
        raise UndecidedSizeError(line_around(frame), question, Asked(ask, size, other))
    return answer


def agreed(size: Any, other: Any, ask: Any = operator.ge) -> bool | None:
    """The answer to ``ask(size, other)`` if it is one for all rows there may be, else None."""
    values = _in_every_row(size, other)
    answers = [] if values is None else np.unique(ask(*values))
    return bool(answers[0]) if len(answers) == 1 else None


def greatest(size: Any) -> int | None:
    """The most that a size, or number, is in any row there may be; None if that is unknown."""
    values = _in_every_row(size)
    return None if values is None else max(int(np.max(values[0])), 0)


def may_differ(size: Any, other: Any) -> bool:
    """Whether one may not be the other, in some row: JAX does not ask that of a reshape."""
    if not (_compat.is_row_size(size) or _compat.is_row_size(other)):
        return size != other
    if _compat.is_row_size(size) and _compat.is_row_size(other) and size == other:
        return False
    values = _in_every_row(size, other)
    return values is not None and bool(np.any(values[0] != values[1]))


def _in_every_row(*sizes: Any) -> list[Any] | None:
    """What sizes come to in each row there may be; None where those are too many."""
    symbolic = [size for size in sizes if _compat.is_row_size(size)]
    if not symbolic:
        return list(sizes)
    lengths: Lengths = symbolic[0].scope.lengths
    values = lengths.of(frozenset().union(*map(_compat.symbols, symbolic)))
    if values is None:
        return None
    return [_compat.evaluate_size(x, values) if _compat.is_row_size(x) else x for x in sizes]
