"""Where a call with derivative rules has the batch axis in its outputs.

What runs first decides, the function or a rule. Where it is the function, an output that is the
same for all lanes may have a derivative that differs between them, and only the rule knows. So the
rule is asked where its results have the batch axis: once, staged as it will be run later, and only
if there is such an output and what is batched may be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.jaxprs.words import Value
from batchax.kernel.axis import Axis, Position
from batchax.kernel.captured import may_be_differentiated
from batchax.rules.batched_transpose import match_or_zeros

Axes = Sequence[Position]


class CallOutputs:
    """Where the outputs of a call have their batch axis, once that is known."""

    def __init__(self, kind: str, axis: Axis, body: Any, in_axes: Axes) -> None:
        self.axis, self.types = axis, body.out_avals
        self.signature = kind, tuple(body.in_avals), tuple(in_axes), tuple(body.out_avals)
        self.axes: list[Position] = []
        self.known = False

    def settle(self, axes: Axes, also: Callable[[], Axes]) -> None:
        """Decides the axes: those of `axes`, and where it has None those of `also`.

        `also` says which outputs must have the axis although their values do not
        depend on the batch, because their derivatives do. It is asked only where
        there is a doubt, and may fail where a function cannot be differentiated.
        """
        if self.known:
            return
        inexact = (jnp.issubdtype(t.dtype, jnp.inexact) for t in self.types)
        if any(a is None and may for a, may in zip(axes, inexact, strict=True)):
            around = _around.get({})
            if self.signature in around:
                axes = union(axes, around[self.signature].axes or axes)
            else:
                axes = union(axes, also())
        self.axes, self.known = list(axes), True

    @contextmanager
    def in_rule(self) -> Iterator[None]:
        """While a rule runs: if it calls the function, that call has its outputs where these are.

        Such a call does not ask the rule, which would only call the function once more.
        """
        token = _around.set({**_around.get({}), self.signature: self})
        try:
            yield
        finally:
            _around.reset(token)

    def place(self, values: Sequence[Value], axes: Axes) -> list[Any]:
        """Values of outputs with their batch axes where `settle` decided.

        Raises:
          UnsupportedError: a value depends on the batch where that was not known.
        """
        for position, to in zip(axes, self.axes, strict=True):
            if to is None and position is not None:
                raise UnsupportedError(
                    "a derivative rule makes an output depend on the batch that does not "
                    "depend on it where the function is not differentiated. Let the function "
                    "return a value for each example there: add zero times a mapped argument."
                )
        return [
            match_or_zeros(self.axis, x, a, w)
            for x, a, w in zip(values, axes, self.axes, strict=True)
        ]


_around: ContextVar[dict[Any, CallOutputs]] = ContextVar("batchax_rules_around")
"""The calls whose rules are running, by what tells a call of the same function from others."""


def inside_rule() -> bool:
    """Whether a rule runs, which may say where calls have their outputs."""
    return bool(_around.get(None))


def union(first: Axes, second: Axes) -> list[Position]:
    """The positions of `first`, and where it has None those of `second`."""
    return [b if a is None else a for a, b in zip(first, second, strict=True)]


def if_differentiable(find: Callable[[], Axes], n_out: int) -> Axes:
    """What `find` finds, by a rule; None for each output where the rule fails."""
    try:
        return find()
    except Exception:
        # A rule that refuses to run must not fail a call that is not differentiated. If it is, the
        # rule runs again, and says so itself.
        return [None] * n_out


def if_later(find: Callable[[], Axes], n_out: int) -> Axes:
    """What `find` finds, by a rule, for a function that runs now; None where no rule follows."""
    if not (_compat.tracing() and may_be_differentiated()):
        return [None] * n_out
    return if_differentiable(find, n_out)
