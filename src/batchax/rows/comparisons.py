"""What a function of one row is told when it compares the row's size.

JAX's symbolic sizes say that ``n == 1`` is False, as they do of all they cannot tell, and that
``n > 0`` is True, as they take sizes to be positive. A row alone may have one element, or none.
So what the user's code asks is answered by looking at the lengths that rows may have: if the
answer is the same for all of them it is given, and if not the question is refused. Questions that
JAX asks, whether shapes are known to be equal, are answered as JAX does.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.rows.user_code import is_users, line_around, looks_up

_MOST_COMBINATIONS = 1 << 20


class UndecidedSizeError(UnsupportedError, jax.errors.InconclusiveDimensionOperation):
    """A question to which rows have different answers."""

    def __init__(self, line: str, question: str) -> None:
        super().__init__(
            f"{line}: {question}. Where lengths are known rows of one length can run together: "
            'batchax.vmap(..., layout="grouped"). Or compute with the size: '
            "jnp.where(jnp.asarray(x.shape[0]) == 1, ...)."
        )
        self.question = question


@dataclass(frozen=True)
class Lengths:
    """The lengths that the rows of a call may have.

    Attributes:
      values: for each size the lengths that occur, of row after row; or those that may occur.
      aligned: whether entries of the same place are of the same row.
    """

    values: Mapping[str, np.ndarray]
    aligned: bool

    def of(self, names: frozenset[str]) -> dict[str, np.ndarray] | None:
        """The lengths that sizes may have together; None where those are too many."""
        arrays = [self.values[name] for name in sorted(names)]
        if not self.aligned:
            if np.prod([float(len(x)) for x in arrays]) > _MOST_COMBINATIONS:
                return None
            arrays = np.meshgrid(*arrays)
        return dict(zip(sorted(names), arrays, strict=True))


_QUESTIONS = {
    "__eq__": (operator.eq, "=="),
    "__ne__": (operator.ne, "!="),
    "__lt__": (operator.lt, "<"),
    "__le__": (operator.le, "<="),
    "__gt__": (operator.gt, ">"),
    "__ge__": (operator.ge, ">="),
}


@_compat.answers_for_row_sizes(*_QUESTIONS)
def _compare(name: str, by_jax: Any, frame: FrameType, size: Any, other: Any) -> Any:
    if not is_users(frame):
        return by_jax(size, other)
    ask, sign = _QUESTIONS[name]
    if isinstance(other, (jax.Array, Tracer, np.ndarray)):
        return ask(jnp.asarray(size), other)
    number = isinstance(other, (int, float, np.number))
    if not number and not (_compat.is_row_size(other) and other.scope is size.scope):
        return by_jax(size, other)
    return _answer(frame, ask, size, other, f"{size} {sign} {other}")


@_compat.answers_for_row_sizes("__bool__")
def _is_true(name: str, by_jax: Any, frame: FrameType, size: Any) -> bool:
    if not is_users(frame):
        return by_jax(size)
    return _answer(frame, operator.ne, size, 0, f"bool({size})")


@_compat.answers_for_row_sizes("__hash__")
def _hash(name: str, by_jax: Any, frame: FrameType, size: Any) -> int:
    if is_users(frame) and looks_up(frame):
        raise UndecidedSizeError(
            line_around(frame),
            f"the size {size} is used as a key of a dict or set: which key it is differs from row "
            "to row",
        )
    return by_jax(size)


def _answer(frame: FrameType, ask: Any, size: Any, other: Any, question: str) -> bool:
    """What all rows there may be agree on."""
    answer = agreed(size, other, ask)
    if answer is None:
        question = f"`{question}` may be true of one row and false of another"
        raise UndecidedSizeError(line_around(frame), question)
    return answer


def agreed(size: Any, other: Any, ask: Any = operator.ge) -> bool | None:
    """The answer to ``ask(size, other)`` if it is one for all rows there may be, else None."""
    found = _in_every_row(size, other)
    answers = [] if found is None else np.unique(ask(*found))
    return bool(answers[0]) if len(answers) == 1 else None


def greatest(size: Any) -> int | None:
    """The most that a size, or number, is in any row there may be; None if that is unknown."""
    found = _in_every_row(size)
    return None if found is None else max(int(np.max(found[0])), 0)


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
