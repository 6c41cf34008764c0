"""`bounded_while`: a while loop with a largest number of steps, and derivatives in reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

import jax
import numpy as np
from jax.extend.core.primitives import while_p
from jax.interpreters import ad

from batchax import _compat
from batchax.errors import ArgumentTypeError
from batchax.execution.progress import Steps, find_progress
from batchax.execution.steps import run_until
from batchax.frontend.advice import carry_in_errors
from batchax.frontend.options import check_count
from batchax.frontend.outputs import (
    carry_keys,
    check_predicate,
    check_structure,
    check_types,
    flatten_carry,
    settle,
)
from batchax.jaxprs.error_format import show
from batchax.jaxprs.types import ClosedJaxpr, Tree, Value, Values
from batchax.kernel.axis import Axis
from batchax.kernel.inner import stage_function

Carry = TypeVar("Carry")


@overload
def bounded_while(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    max_steps: int,
    *,
    progress: bool | Callable[[int, int], Any] = False,
) -> Carry: ...
@overload  # of numbers as the first carry, steps make arrays
def bounded_while(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Tree,
    max_steps: int,
    *,
    progress: bool | Callable[[int, int], Any] = False,
) -> Carry: ...
@_compat.api_boundary
def bounded_while(
    cond_fun: Callable[[Any], Any],
    body_fun: Callable[[Any], Any],
    init_val: Tree,
    max_steps: int,
    *,
    progress: bool | Callable[[int, int], Any] = False,
) -> Tree:
    """Runs a ``while_loop`` of at most `max_steps` steps, with reverse mode.

    Example:
      >>> def sqrt(a):  # Newton's method
      ...     far = lambda x: abs(x * x - a) > 1e-4 * a
      ...     return bx.bounded_while(far, lambda x: (x + a / x) / 2, a, max_steps=50)
      >>> print(bx.vmap(jax.grad(sqrt))(jnp.array([4.0, 16.0, 25.0])).round(3))
      [0.25  0.125 0.1  ]

    It computes the same as this Python code::

        val, steps = init_val, 0
        while steps < max_steps and cond_fun(val):
            val, steps = body_fun(val), steps + 1
        return val

    The time, also of derivatives, depends on the steps taken, not on `max_steps`. Derivatives of
    any order and both modes treat the number of steps as constant. Reverse mode saves about
    ``sqrt(2 * max_steps)`` carries, and recomputes the other steps once each. Without derivatives,
    or in forward mode only, ``lax.while_loop`` needs no bound.

    Under `vmap`, a finished lane keeps its carry. Later steps contribute neither values nor
    gradients. ``cond_fun(result)`` is true if `max_steps` ended the loop.

    Args:
      cond_fun: The predicate: a function from the carry to one truth value.
      body_fun: The step: a function from carry to carry. Both functions may close over arrays, and
        the loop is differentiable with respect to these.
      init_val: The first carry: a pytree of arrays and numbers, whose structure, shapes, and dtypes
        do not change.
      max_steps: The largest number of steps, an int.
      progress: Whether to show the number of steps; or a function of the finished steps and
        `max_steps`. About fifty calls at most, inside of `jit`, too.

    Returns:
      The carry after the last step.

    Raises:
      OptionError: (a ValueError) `max_steps` is negative, or more than 32 bits hold.
      ArgumentTypeError: (a TypeError) `cond_fun` or `body_fun` is not callable, `max_steps` is not
        an int, `cond_fun` does not return a truth value, or `body_fun` changes the structure,
        shapes, or dtypes of the carry.
      UnsupportedError: (a NotImplementedError) The loop is differentiated and has an
        ``io_callback``, or a ``jax.custom_vjp`` rule in it closes over a traced value.

    References:
      Saved carries: P. Stumm and A. Walther, New algorithms for optimal online checkpointing,
      SIAM J. Sci. Comput. 32(2), 2010, doi:10.1137/080742439.
    """
    for name, fun in (("cond_fun", cond_fun), ("body_fun", body_fun)):
        if not callable(fun):
            raise ArgumentTypeError(f"bounded_while expects functions, got {show(fun)} as {name}.")
    check_count("max_steps", max_steps, most=np.iinfo(np.int32).max)
    callback = find_progress(progress, body_fun, "steps")
    advice = "let cond_fun and body_fun close over other objects"
    carry, structure = flatten_carry(init_val, "init_val", "bounded_while", advice)
    keys = carry_keys(init_val)
    axis = Axis(max_steps)

    def test(*values: Value) -> list[Value]:
        return [check_predicate(cond_fun, cond_fun(jax.tree.unflatten(structure, values)))]

    def step(*values: Value) -> list[Value]:
        old = jax.tree.unflatten(structure, values)
        new = body_fun(old)
        check_structure(body_fun, old, new)
        return jax.tree.leaves(new)

    _compat.named_after(test, cond_fun)
    _compat.named_after(step, body_fun)

    def stage(carry: Values) -> tuple[ClosedJaxpr, ClosedJaxpr, None]:
        how = list(map(jax.typeof, carry)), [f"init_val{path}" for path in keys], "bounded_while"
        return stage_function(axis, test, *how), stage_function(axis, step, *how), None

    with _compat.name_stack_extended("bounded_while"), carry_in_errors():
        tested, staged, _, carry = settle(stage, carry)
        assert tested is not None
        check_types(body_fun, keys, carry, staged.out_avals)
        outs = run_until(tested, staged, carry, [], (), (), Steps(int(max_steps), callback))
    return jax.tree.unflatten(structure, outs)


# JAX's error for `while_loop` names an alternative to reverse mode. Here it names this, too.
_reject_reverse = ad.primitive_transposes[while_p]


def _reject_with_hint(*args: Any, **params: Any) -> Any:
    try:
        return _reject_reverse(*args, **params)
    except ValueError as error:
        error.add_note(
            "batchax.bounded_while(cond_fun, body_fun, init_val, max_steps) is a while loop that "
            "has one."
        )
        raise


ad.primitive_transposes[while_p] = _reject_with_hint
