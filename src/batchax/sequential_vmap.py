"""`sequential_vmap`: a function that runs one example at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from batchax import _compat
from batchax.custom_vmap import custom_vmap
from batchax.frontend.options import check_callable
from batchax.jaxprs.types import Tree, Value
from batchax.kernel import recording
from batchax.scan import scan

P = ParamSpec("P")
R = TypeVar("R")


@_compat.api_boundary
def sequential_vmap(fun: Callable[P, R]) -> custom_vmap[P, R]:
    """Makes `fun` run one example at a time wherever it is batched.

    Example:
      >>> @bx.sequential_vmap
      ... def largest(m):  # one matrix in memory at a time
      ...     return jnp.max(m @ m.T)
      >>> print(bx.vmap(lambda x: largest(jnp.outer(x, x)))(jnp.ones((4, 3))))
      [3. 3. 3. 3.]

    Use it for functions that need too much memory for several lanes, or whose effects must run in
    order. It also helps where one lane needs less work than many, as in a branch that is not taken
    or a loop that ends early. Unlike ``jax.custom_batching.sequential_vmap``, it has a reverse
    mode, which stores the arguments of all lanes and recomputes each lane. Effects run in the order
    of the lanes.

    Args:
      fun: A function of one example, with arguments as for `custom_vmap`.

    Returns:
      A `custom_vmap` function whose batching rule is a loop.

    Raises:
      ArgumentTypeError: (a TypeError) `fun` is not callable.
    """
    check_callable("sequential_vmap", "a function of one example", fun)
    sequential = custom_vmap(fun)

    @sequential.def_vmap
    def loop_over_lanes(
        axis_size: int, in_batched: list[Any], *args: Tree, **kwargs: Tree
    ) -> tuple[Tree, bool]:
        recording.note(service="lanes", rule="sequential_vmap")
        values = [*args, *kwargs.values()]
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)

        def step(carry: None, values: list[Value]) -> tuple[None, Any]:
            own, by_name = values[: len(args)], values[len(args) :]
            named = dict(zip(kwargs, by_name, strict=True))
            return carry, sequential(*own, **named)  # pyright: ignore[reportCallIssue]

        # Within the step it is called for one lane, and loops again over an axis outside.
        _, out = scan(step, in_axes=(axes,), length=axis_size)(None, values)
        return out, True

    return sequential
