"""Where the carry of a loop has the batch axis, and what it varies over: found by its body.

A carry starts as its initial value is, and becomes batched only if some iteration makes it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchax.jaxprs.words import Aval, Value
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.inner import ANYWHERE, ZERO_IF_MAPPED, batch_inner, returning
from batchax.kernel.named_axes import Varying, settle_varying, types_varying, vary_over
from batchax.rules.contraction import takes_less_as_rows


def settle(
    axis: Axis,
    body: Any,
    consts_at: Any,
    carry_at: Any,
    xs_at: Any,
    varying: Varying = (),
    lowest: int = 0,
) -> tuple[Any, list[Position], list[Position]]:
    """The batched body, and where it receives and returns the batch axis of each carry.

    A carry that is batched stays so. Its axis goes where the body leaves it, but
    never before dimension `lowest`, so that it is moved once and not in each
    iteration. `varying` says over which axes of a mesh the operands vary; each carry
    comes to vary, from the start, over all that some iteration makes it vary over.
    """
    first, n = len(consts_at), len(carry_at)
    varying = varying or (frozenset(),) * (first + n + len(xs_at))
    before, after = varying[:first], varying[first + n :]

    def batched(vary: Varying) -> tuple[Any, Varying]:
        made = _settle_axes(
            axis, body, consts_at, carry_at, xs_at, (*before, *vary, *after), lowest
        )
        return made, types_varying(made[0].out_avals[:n])

    program, carry_at, ys_at = settle_varying(varying[first : first + n], batched)
    carry = types_varying(program.in_avals[first : first + n])
    return returning(program, (*carry, *[frozenset()] * len(ys_at))), carry_at, ys_at


def _settle_axes(
    axis: Axis, body: Any, consts_at: Any, carry_at: Any, xs_at: Any, varying: Varying, lowest: int
) -> tuple[Any, list[Position], list[Position]]:
    """As `settle`, for operands of which it is known what they vary over."""

    def allowed(a: Position) -> Position:
        return a if a is None else max(a, lowest)

    def batch(axis: Axis, carry_at: Any, outs_at: Any) -> tuple[Any, Any]:
        return batch_inner(axis, body, (*consts_at, *carry_at, *xs_at), outs_at, varying)

    def pinned(carry_at: Any) -> list[Any]:
        return [*(free if a is None else a for a in carry_at), *[free] * (outs - n)]

    def settled(axis: Axis, carry_at: Any, made: Any, *, moves: bool) -> tuple[Any, Any, Any]:
        batched, out = made
        while list(out[:n]) != carry_at:
            # What has the axis goes where the body leaves it, once; what comes to have it, too.
            carry_at = [
                allowed(new) if old is None or (moves and new is not None) else old
                for old, new in zip(carry_at, out[:n], strict=True)
            ]
            moves = False
            batched, out = batch(axis, carry_at, pinned(carry_at))
        return batched, carry_at, out

    n, carry_at, free = len(carry_at), list(map(allowed, carry_at)), ANYWHERE
    outs = len(body.out_avals)
    # Programs of lanes that part ways are long: they are made once the axes are found.
    together = axis if axis.divergence is None else replace(axis, divergence=None)
    made = batch(together, carry_at, [free] * outs)
    if axis.columns and not lowest and takes_less_as_rows(made[0], axis.size):
        axis, together = (replace(a, columns=False) for a in (axis, together))
        free, carry_at = ZERO_IF_MAPPED, [None if a is None else 0 for a in carry_at]
        made = batch(together, carry_at, [free] * outs)
    batched, carry_at, out = settled(together, carry_at, made, moves=True)
    if axis.divergence is not None:
        made = batch(axis, carry_at, pinned(carry_at))
        batched, carry_at, out = settled(axis, carry_at, made, moves=False)
    return batched, carry_at, list(out[n:])


def match_carry(
    axis: Axis, values: Sequence[Value], sources: Any, destinations: Any, types: Sequence[Aval] = ()
) -> list[Any]:
    """Values with their batch axes where they are to be; None is left as it is.

    They vary over what values of these `types` do, if any are given.
    """
    values = [
        x if to is None else match_axis(axis, x, a, to)
        for x, a, to in zip(values, sources, destinations, strict=True)
    ]
    return vary_over(values, types_varying(types[: len(values)])) if types else values


def split_operands(
    items: Any, n_first: int, n_second: int
) -> tuple[list[Any], list[Any], list[Any]]:
    items = list(items)
    return items[:n_first], items[n_first : n_first + n_second], items[n_first + n_second :]
