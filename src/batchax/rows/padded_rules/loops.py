"""Loops over a row: as many steps as the longest row has, of which each row takes its own.

A step that a row does not take must leave everything as it is, in both directions. What it
computes is dropped; but were it not a number, or infinite, it would reach the gradient of what
all rows share (zero times infinity). So in these steps a row takes its first step once more,
which it took anyway, and a row that has none takes that of another. Where zeros do no harm
either, as in most recurrences, they need no filling in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax import _compat
from batchax.jaxprs.words import Jaxpr, Value
from batchax.rows.padded import Operation, Row, padded_rule
from batchax.rows.padded_rules.inside import arrays, run_inside, typed_rows
from batchax.rows.sizes import Sizes, has_symbols
from batchax.rules.hazards import hazards
from batchax.rules.masking import is_inexact, safe_lanes


@padded_rule("scan")
def _scan(
    op: Operation,
    *rows: Row,
    jaxpr: Jaxpr,
    length: Any,
    reverse: bool,
    unroll: int,
    **params: Any,
) -> list[Any]:
    """The carry after the last step, and what steps give out, as many as the row takes."""
    n_consts, n_carry = _compat.scan_counts(params)
    consts, carry, xs = rows[:n_consts], rows[n_consts:][:n_carry], rows[n_consts + n_carry :]
    body = _compat.close(jaxpr)
    carry_avals, y_avals = body.out_avals[: len(carry)], body.out_avals[len(carry) :]
    first = arrays(carry, carry_avals)
    parts = [jnp.asarray(x.value) for x in xs]
    steps, sizes, size = op.sizes.bound(length), op.sizes, None
    again: _Harmless | None = None
    if not op.sizes.is_exact(length):
        _check(op, body, length)
        size = op.sizes.size(length)
        first = _compat.varying_alike(first, like=[size])  # in a shard_map, of other rows elsewhere
        danger = hazards(body.jaxpr)
        if steps and (danger.nonlinear or danger.endless):
            operands = op, size, consts, first, xs
            again = _zeros(*operands) if _is_moderate(body) else _first_again(*operands, reverse)
            sizes, consts, parts = again.sizes, again.consts, again.parts

    def step(carry: list[Value], given: Any) -> tuple[list[Any], list[Any]]:
        i, parts = given
        active = None if size is None else lax.lt(i, jnp.asarray(size, i.dtype))
        before = carry
        if again is not None:
            before = [_keep(active, x, y) for x, y in zip(carry, again.carry, strict=True)]
        own = [Row(x, row.shape[1:], row.fill) for x, row in zip(parts, xs, strict=True)]
        inputs = [*consts, *typed_rows(before, carry_avals), *own]
        outs = arrays(run_inside(sizes, body, inputs), body.out_avals)
        new, ys = outs[: len(carry)], outs[len(carry) :]
        if active is None:
            return new, ys
        # Nothing comes back to a step that was not taken.
        ys = [safe_lanes(active, y, 0, "keep") if is_inexact(y) else y for y in ys]
        return [_keep(active, x, old) for x, old in zip(new, carry, strict=True)], ys

    counted = (jnp.arange(steps, dtype=np.int32), parts)
    last, ys = lax.scan(step, first, counted, steps, reverse, unroll)
    assert len(ys) == len(y_avals)
    return [*last, *ys]


def _keep(active: Any, new: Any, old: Any) -> Any:
    return old if new is old else lax.select(active, new, old)


@dataclass(frozen=True)
class _Harmless:
    """Operands of steps, such that those a row does not take do no harm.

    Attributes:
      sizes: the sizes of the row whose step it is.
      consts: what is the same in each step.
      carry: the carry of steps not taken.
      parts: what has a part for each step.
    """

    sizes: Sizes
    consts: Sequence[Row]
    carry: list[Value]
    parts: list[Any]


def _first_again(
    op: Operation,
    size: Any,
    consts: Sequence[Row],
    carry: Sequence[Value],
    xs: Sequence[Row],
    reverse: bool,
) -> _Harmless:
    """Steps not taken are the first one again, and that of another row where there is none."""
    some = jnp.asarray(size) > 0
    start = jnp.maximum(jnp.asarray(size) - 1, 0) if reverse else 0

    def of_a_row_with_steps(x: Value) -> Any:
        return safe_lanes(some, x, 0)

    def filled(x: Value) -> Any:
        constant = _without_derivative(x)
        first = lax.dynamic_index_in_dim(constant, start, 0, False) if reverse else constant[0]
        taken = jnp.arange(x.shape[0], dtype=np.int32) < jnp.asarray(size)
        mask = lax.broadcast_in_dim(taken, x.shape, (0,))
        other = of_a_row_with_steps(first)
        return lax.select(mask, x, lax.broadcast_in_dim(other, x.shape, tuple(range(1, x.ndim))))

    values = {k: of_a_row_with_steps(jnp.asarray(v)) for k, v in op.sizes.values.items()}
    safe = [
        row if row.known else replace(row, value=of_a_row_with_steps(row.value)) for row in consts
    ]
    first = [of_a_row_with_steps(_without_derivative(x)) for x in carry]
    return _Harmless(
        op.sizes.inside(values), safe, first, [filled(jnp.asarray(x.value)) for x in xs]
    )


def _zeros(
    op: Operation, size: Any, consts: Sequence[Row], carry: Sequence[Value], xs: Sequence[Row]
) -> _Harmless:
    """Steps not taken are of zeros, which padding often holds already, and the first carry."""
    parts = [op.filled(x, 0, (0,)) if is_inexact(x.value) else x.value for x in xs]
    first = list(map(_without_derivative, carry))
    return _Harmless(op.sizes, consts, first, list(map(jnp.asarray, parts)))


def _is_moderate(body: Any) -> bool:
    """Whether a step of zeros does no harm: it cannot make infinity or a NaN.

    Not where something is ragged within a step: an empty row has no element to take. Nor in
    types of a smaller range than float32 (whose largest exponent is 128), such as float16, where
    numbers that are not enormous may overflow.
    """
    ranges = [jnp.finfo(a.dtype).maxexp for a in body.in_avals if is_inexact(a)]
    danger = hazards(body.jaxpr)
    ragged = any(has_symbols(a.shape) for a in body.in_avals)
    return not (danger.immoderate or danger.endless or ragged) and min(ranges, default=128) >= 128


def _without_derivative(x: Value) -> Any:
    """`x` as in a lane that is not active; unlike ``lax.stop_gradient`` that can be transposed."""
    return safe_lanes(np.zeros((), bool), x, 0, "keep") if is_inexact(x) else x


def _check(op: Operation, body: Any, length: Any) -> None:
    """Refuses what has effects that a step not taken cannot be kept from."""
    if hazards(body.jaxpr).collective:
        raise op.refuse(
            f"it takes {length} steps, as many as the row has, with a collective in each: rows "
            "that have ended would have nothing to give. Put the collective outside the loop."
        )
    written = any(hasattr(aval, "inner_aval") for aval in body.in_avals)
    if written or _compat.calls_back(body.effects):
        raise op.refuse(
            f"it takes {length} steps, as many as the row has, with an effect in each (a print, "
            "a callback, a write to a reference), which would come also from rows that have "
            "ended. Return values instead, or put the effect outside the loop."
        )


@padded_rule("while")
def _while(
    op: Operation,
    *rows: Row,
    cond_nconsts: int,
    cond_jaxpr: Any,
    body_nconsts: int,
    body_jaxpr: Any,
) -> list[Any]:
    tested, consts = rows[:cond_nconsts], rows[cond_nconsts:][:body_nconsts]
    carry = rows[cond_nconsts + body_nconsts :]
    avals = _compat.close(body_jaxpr).out_avals

    def run(program: Any, consts: Sequence[Row], values: Sequence[Value]) -> list[Any]:
        outs = run_inside(op.sizes, program, [*consts, *typed_rows(values, avals)])
        return arrays(outs, program.out_avals)

    places = cond_jaxpr.out_avals[0].shape
    if not places:
        return lax.while_loop(
            lambda values: run(cond_jaxpr, tested, values)[0],
            lambda values: run(body_jaxpr, consts, values),
            arrays(carry, avals),
        )
    # A loop for each place of the row, as `vmap` of a `while_loop` over them makes: until all are
    # done, each keeps what it has when it is, and those in the padding are from the beginning.
    mask = op.sizes.mask(places, op.sizes.padded_axes(places))

    def active(values: Sequence[Value]) -> Any:
        (going,) = run(cond_jaxpr, tested, values)
        return going if mask is None else lax.bitwise_and(going, mask)

    def step(state: Any) -> Any:
        going, values = state
        values = [
            lax.select(lax.broadcast_in_dim(going, x.shape, range(going.ndim)), x, old)
            for x, old in zip(run(body_jaxpr, consts, values), values, strict=True)
        ]
        return active(values), values

    first = arrays(carry, avals)
    going = active(first)
    return lax.while_loop(lambda state: jnp.any(state[0]), step, (going, first))[1]
