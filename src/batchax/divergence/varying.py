"""Programs whose values all vary over a mesh, inside ``shard_map``.

A loop counter that starts from zero is the same on all devices, and its type says so. Once lanes
leave the loop one by one it differs between devices, and so does all that is computed from it or
selected by it. So the programs of the loop are traced again, for values that vary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from batchax import _compat
from batchax.jaxprs.types import ClosedJaxpr, Tree, Values
from batchax.kernel.axis import Axis, WhileLoop
from batchax.kernel.inner import batch_inner, returning
from batchax.kernel.named_axes import Varying, varying_of


def with_varying_values(loop: WhileLoop) -> WhileLoop:
    """`loop` with operands and programs whose values vary over all that any operand varies over."""
    given = (*loop.test_consts, *loop.body_consts, *loop.carry)
    over = frozenset().union(*varying_of(given))
    if not over:
        return loop

    def varying(program: ClosedJaxpr) -> ClosedJaxpr:
        return _of_values(program, (over,) * len(program.in_avals))

    def cast(values: Values) -> list[Any]:
        return [_compat.varying_over(x, over) for x in values]

    return replace(
        loop,
        test=varying(loop.test),
        body=varying(loop.body),
        test_consts=cast(loop.test_consts),
        body_consts=cast(loop.body_consts),
        carry=cast(loop.carry),
    )


def _of_values(program: ClosedJaxpr, varying: Varying) -> ClosedJaxpr:
    """`program` of values that vary over these axes, as its results do then."""
    # Nothing is batched: the interpreter is run for the casts that it makes.
    nothing_batched = [None] * len(varying)
    program, _ = batch_inner(Axis(1), program, nothing_batched, varying=varying)
    return returning(program, (varying[0],) * len(program.out_avals))


def alike(state: Tree, like: Sequence[Any]) -> Tree:
    """A first carry whose values, inside ``shard_map``, vary over all that `like` varies over.

    The types of a carry must be the same before and after a step.
    """
    leaves, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, _compat.varying_alike(leaves, like=like))
