"""The derivative of a chunk loop with one scalar result that is differentiated: a loss.

Its cotangent is a single number, by which the gradient is multiplied. So the gradient can
be computed together with the loss, before that number is known, and no chunk is computed
twice: one loop, whose results are the loss and its gradient. The tangent is the inner
product of the gradient with the tangents of the operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from batchax import _compat
from batchax.execution.chunk_loop import ChunkLoop, OfWidth
from batchax.execution.operand_specs import Sum, cotangent_spec
from batchax.jaxprs.words import Value
from batchax.kernel.derivatives import with_values


def is_loss(
    loop: ChunkLoop, dependent: Sequence[int], outs: Sequence[Value], operands: Sequence[Value]
) -> bool:
    """Whether `dependent` results are one real scalar, a sum, and the operands are real, too."""
    return (
        len(dependent) == 1
        and isinstance(loop.results[dependent[0]], Sum)
        and outs[dependent[0]].shape == ()
        and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (*operands, outs[dependent[0]]))
    )


def loop_with_gradient(loop: ChunkLoop, which: int, moving: Sequence[int]) -> ChunkLoop:
    """A loop whose results are those of `loop`, and behind them the gradient of one.

    The gradient is with respect to the `moving` operands.
    """

    def differentiate(of: OfWidth) -> OfWidth:
        def of_width(width: int) -> Any:
            primal = of(width)

            def run(start: Any, *xs: Any) -> list[Any]:
                def of_moving(*values: Any) -> tuple[Any, list[Any]]:
                    outs = primal(start, *with_values(xs, moving, values))
                    return outs[which], outs

                value, pull, outs = jax.vjp(of_moving, *(xs[i] for i in moving), has_aux=True)
                return [*outs, *pull(lax.full_like(value, 1))]

            return run

        return of_width

    results = (*loop.results, *(cotangent_spec(loop.operands[i]) for i in moving))
    return loop.derivative("gradient", differentiate, results=results)


def can_run(loop: ChunkLoop, operands: Sequence[Value]) -> bool:
    """Whether the program of a loop can be staged.

    The program with a gradient cannot be where something in it has no reverse mode, such as a
    loop of unknown length. What is raised then is anything: JAX's own errors, or a user's.
    """
    avals = [jax.typeof(x) for x in _compat.varying_alike(operands)]
    try:
        loop.program(avals, loop.width)
    except Exception:
        return False
    return True


def inner_product(gradient: Sequence[Any], tangents: Sequence[Value]) -> Any:
    """The inner product of two lists of arrays: the tangent of a loss with this gradient."""
    products = [jnp.sum(g * t) for g, t in zip(gradient, tangents, strict=True)]
    return sum(products[1:], start=products[0])
