"""Loops over rows.

A loop compiles in the time of one of its steps, where what is written out takes that for each; and
what a loop returns is computed once, where a compiler writes a sum into whatever needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax

from batchax.jaxprs.words import Value


def repeat(start: Any, stop: Any, body: Callable[[Any, Any], Any], state: Any) -> Any:
    """``state = body(i, state)`` for each number `i` from `start` on, below `stop`."""
    start = np.int32(start) if isinstance(start, int) else start
    step = lambda carry: (carry[0] + np.int32(1), body(*carry))
    return lax.while_loop(lambda carry: carry[0] < stop, step, (start, state))[1]


def each_pair(number: int, body: Callable[[Any, Any, Any], Any], state: Any) -> Any:
    """``state = body(i, j, state)`` for all `i` and `j` below `number`, `i` below `j`."""
    after = lambda i, state: repeat(i + 1, number, lambda j, x: body(i, j, x), state)
    return repeat(0, number - 1, after, state)


def row(x: Value, *at: Any) -> Any:
    """``x[at]``, of numbers that are in it."""
    for i in at:
        x = lax.dynamic_index_in_dim(x, i, 0, keepdims=False, allow_negative_indices=False)
    return x


def put(x: Value, new: Value, *at: Any) -> Any:
    """`x` with `new` at ``x[at]``."""
    rest = [np.int32(0)] * (x.ndim - len(at))
    new = lax.reshape(new, (1,) * len(at) + new.shape)
    return lax.dynamic_update_slice(x, new, [*at, *rest], allow_negative_indices=False)


def fold(combine: Callable[[Any, Any], Any], x: Value) -> Any:
    """All rows combined."""
    return repeat(1, x.shape[0], lambda i, so_far: combine(so_far, row(x, i)), x[0])


def sums(
    number: int, terms: Callable[[Any], Sequence[Value]], blank: Value, count: int
) -> list[Any]:
    """The sums of `count` terms over all numbers below `number`, each like `blank`, of zeros."""
    add = lambda k, so_far: [x + y for x, y in zip(so_far, terms(k), strict=True)]
    return repeat(0, number, add, [blank] * count)
