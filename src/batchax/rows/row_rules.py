"""Rules of the user for packed rows: those that `custom_vmap` functions have by `def_rows`.

Where rows are packed such a rule is given them as they are. Where they are padded, because of what
comes before or after, or in a derivative that one row takes by itself, they are packed for it, and
what it returns is padded: there the function of one padded row has a batching rule that does so,
and derivatives are those of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.custom_rules.call import Cotangents, DerivativeStep, after, custom_call_p
from batchax.custom_rules.rule import Form, UserRule
from batchax.custom_vmap import custom_vmap
from batchax.errors import ArgumentTypeError
from batchax.jaxprs.types import Aval, Eqn, Value, Values
from batchax.kernel.axis import Axis, Position, Positions
from batchax.kernel.inner import batch_function
from batchax.kernel.own_primitive import own_primitive
from batchax.kernel.registry import fitted
from batchax.rows.index import RowIndex, pack_rows, pad_rows
from batchax.rows.padded import Operation, Row
from batchax.rows.sizes import Sizes, has_symbols, is_symbolic, ragged_axis
from batchax.rules.masking import is_inexact


@dataclass(frozen=True, repr=False)
class Rows:
    """Where rows are in packed arrays: the first argument of a rule for rows."""

    index: RowIndex

    def __repr__(self) -> str:  # messages of JAX's show it to those who take it for a size
        return f"<Rows: where {len(self)} rows are; len(rows) is how many>"

    def __len__(self) -> int:
        return int(self.index.starts.shape[0])

    @property
    def capacity(self) -> int:
        """The size of packed arrays along the axis of elements, at least the sum of lengths."""
        return self.index.capacity

    @property
    def lengths(self) -> jax.Array:
        """How many elements each row has: int32 of shape (B,)."""
        return jnp.asarray(self.index.lengths)

    @cached_property
    def offsets(self) -> jax.Array:
        """Where each row begins, and where the last one ends: int32 of shape (B + 1,)."""
        starts, ends = jnp.asarray(self.index.starts), self.index.starts + self.index.lengths
        last = jnp.asarray(ends[-1:]) if len(self) else jnp.zeros(1, np.int32)
        return jnp.concatenate([starts, last])

    @cached_property
    def ids(self) -> jax.Array:
        """The row of each element, B for those of no row: int32 of shape (capacity,)."""
        return jnp.asarray(self.index.rows)

    @property
    def max_length(self) -> int:
        """A bound of the lengths that is known while a program is compiled."""
        return self.index.bound


_FORM = Form(
    "out_ragged",
    (True, False, None),
    "A result with out_ragged True has an entry for each element of the packed rows, where one row "
    "has its size; one with False an entry for each row, along axis 0; one with None is the same "
    "for all rows, and has the shape it has for one.",
)


def size_of_rule(eqn: Eqn) -> str | None:
    """The name of the size of rows that a call has a rule for; None if it has none for them."""
    if eqn.primitive is not custom_call_p or eqn.params["rule"].for_rows is None:
        return None
    jaxpr = eqn.params["jaxpr"]
    return _one_size([*jaxpr.in_avals[len(eqn.params["rule"].closed) :], *jaxpr.out_avals])


def _one_size(avals: Sequence[Aval]) -> str | None:
    sizes = [[d for d in aval.shape if is_symbolic(d)] for aval in avals]
    names = {str(d) for each in sizes for d in each}
    if len(names) != 1 or max(map(len, sizes)) > 1:
        return None
    (name,) = names
    return name if name.isidentifier() else None


def run_packed_rule(
    rule: UserRule,
    rows: Rows,
    said: Sequence[bool | None],
    closed: Values,
    operands: Values,
) -> tuple[list[Any], list[bool | None]]:
    """What a rule for rows returns: results, and whether each is packed.

    `said` is that of operands: whether it is packed (True), has the rows in front (False), or is
    the same for all rows (None). `closed` are the values of what the function closes over.
    """

    def call(*xs: Value) -> tuple[list[Any], list[bool | None]]:
        assert rule.for_rows is not None
        args, kwargs = rule.arguments.rebuild(xs)
        with rule.naming(rule.for_rows):
            result = rule.for_rows(rows, rule.arguments.said(said, None), *args, **kwargs)
        where = rule.where(rule.for_rows)
        leaves, paths, flags = rule.returned(where, result, _FORM)
        results = []
        for path, leaf, flag, aval in zip(paths, leaves, flags, rule.out_types, strict=True):
            if (flag is True) != has_symbols(aval.shape):
                shape = ", ".join(map(str, aval.shape)) + "," * (len(aval.shape) == 1)
                raise ArgumentTypeError(
                    f"{where} returned out_ragged{path} = {flag} for a result that has the shape "
                    f"({shape}) for one row. {_FORM.meaning}"
                )
            sizes = (rows.capacity if is_symbolic(d) else d for d in aval.shape)
            place = None if flag is not False else 0
            said_so = f"out_ragged {flag}"
            results.append((f"out{path}", leaf, said_so, place, aval.update(shape=tuple(sizes))))
        return fitted(len(rows), where, rule.name, results, _FORM.meaning), flags

    return rule.with_closed(rule.for_rows, call, closed, operands)


def in_packed_rows(
    eqn: Eqn, rows: Rows, values: Sequence[tuple[Value, bool | None]]
) -> tuple[list[Value], list[bool | None]]:
    """The call of an equation on packed rows: results, and a flag for each as in `values`."""
    rule: UserRule = eqn.params["rule"]
    count = len(rule.closed)
    closed = [x for x, _ in values[:count]]
    operands, said = zip(*values[count:], strict=True)
    return run_packed_rule(rule, rows, said, closed, operands)


def in_padding(op: Operation, rows: Sequence[Row], name: str) -> list[Any]:
    """The call of an equation on a padded row, which is packed with others where it is batched."""
    sizes, params = op.sizes, op.eqn.params
    rule: UserRule = params["rule"]
    given, made = params["jaxpr"].in_avals, rule.out_types
    count, bound = len(rule.closed), sizes.bounds[name]
    at = [ragged_axis(aval.shape) for aval in given[count:]]

    def alone(length: Value, *xs: Value) -> list[Any]:
        one = Rows(RowIndex.of(length[None], bound, bound))
        said = [None if k is None else True for k in at]
        outs, flags = run_packed_rule(rule, one, said, xs[:count], xs[count:])
        return [lax.squeeze(x, (0,)) if f is False else x for x, f in zip(outs, flags, strict=True)]

    types = [aval.update(shape=sizes.bounds_of(aval.shape)) for aval in made]

    @custom_vmap
    def one_row(length: Value, *xs: Value) -> list[Any]:
        return call_later(alone, types, length, *xs)

    @one_row.def_vmap
    def _(
        size: int, in_batched: Sequence[bool], length: Value, *xs: Value
    ) -> tuple[list[Any], list[bool]]:
        of_length, *batched = in_batched
        if any(batched[:count]):  # of that the rule knows nothing
            axes = [0 if b else None for b in (of_length, *batched)]
            return jax.vmap(alone, axes)(length, *xs), [True] * len(made)
        index = RowIndex.of(jnp.broadcast_to(length, (size,)), size * bound, bound)
        operands: list[Any] = []
        for x, b, k in zip(xs[count:], batched[count:], at, strict=True):
            if k is not None:
                x = x if b else jnp.broadcast_to(x, (size, *x.shape))
                x = pack_rows(x, index, k)
            operands.append(x)
        said = [
            True if k is not None else False if b else None
            for k, b in zip(at, batched[count:], strict=True)
        ]
        outs, flags = run_packed_rule(rule, Rows(index), said, xs[:count], operands)
        padded = [
            pad_rows(x, index, ragged_axis(aval.shape) or 0) if flag else x
            for x, flag, aval in zip(outs, flags, made, strict=True)
        ]
        return padded, [flag is not None for flag in flags]

    symbol = next(d for aval in (*given, *made) for d in aval.shape if str(d) == name)
    length = jnp.asarray(sizes.size(symbol), np.int32)
    steps = [_of_bounds(sizes, step) for step in params["steps"]]
    # What is behind the row is not the rule's to see where it is given that row alone.
    values = [op.filled(row, 0) if is_inexact(row.value) else row.value for row in rows]
    return after(steps, lambda *xs: one_row(length, *xs))(*values)


def _batch_later(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    function: Callable[..., Any],
    types: Sequence[Aval],
) -> tuple[list[Any], list[Position]]:
    return batch_function(axis, function, args, axes)


# A rule receives which operands differ between rows, which is known when they are batched. So it
# runs for a row alone only where rows are not batched.
call_later_p = own_primitive(
    "call_later",
    called="function with a rule for rows",
    operations=lambda *xs, function, types: function(*xs),
    types=lambda *avals, function, types: list(types),
    facts="endless costly",
    rule=_batch_later,
)


def call_later(function: Callable[..., list[Any]], types: Sequence[Any], *xs: Value) -> list[Any]:
    return call_later_p.bind(*xs, function=function, types=tuple(types))


def _of_bounds(sizes: Sizes, step: DerivativeStep) -> DerivativeStep:
    if not isinstance(step, Cotangents):
        return step
    types = tuple(t.update(shape=sizes.bounds_of(t.shape)) for t in step.linear_types)
    return replace(step, linear_types=types)
