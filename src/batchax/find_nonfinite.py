"""`find_nonfinite`: which lanes are bad, and what made them so."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Unpack, cast

from batchax import _compat
from batchax.frontend.batched import Batched
from batchax.frontend.in_axes import argument_names, check_in_axes
from batchax.frontend.options import check_callable
from batchax.nonfinite.find import NonFinite, check_fits, find, find_whole
from batchax.vmap import Options, find_vmap

P = ParamSpec("P")


@_compat.api_boundary
def find_nonfinite(
    fun: Callable[P, Any], in_axes: Any = 0, **options: Unpack[Options]
) -> Batched[P, NonFinite, NonFinite]:
    """Runs a function over a batch, and finds what makes results NaN or infinite, lane by lane.

    For each lane with such a result: the equation that made the first value on the way to it that
    is not finite, with the line of its source, the iteration of loops around it, and for the first
    few lanes what the equation was given; or the argument that it came in with. An infinity that
    reaches no result, and becomes no NaN on the way to one, such as that of a mask, is no fault.

    Each value has a handful of integers beside it, which costs one more reduction for each
    equation. Programs inside calls that are none of JAX, such as functions with a batching rule
    of the user, are one equation each.

    Args:
      fun: a function of one example, as for `vmap`; a derivative, for what its backward pass does.
        Or, without other arguments, what `vmap` made of one, also in `jax.jit`; or a function that
        contains a `vmap`, such as the gradient of a mean over lanes. If that could be a function of
        one example, too, it is taken for one.
      in_axes: as for `vmap`.
      **options: of `vmap`: `batch_size` for batches larger than memory, `axis_name`, `mesh`.
        `out_axes` may be among them, and has no say: results are looked at lane by lane.

    Returns:
      A function of the batch. It returns what was found, with the attributes `lanes` and `faults`.
      That is false if nothing was found; printed, it tells of each cause in a block, with the
      lanes that it is to blame for, and shows what the equation was given in one of them.

    Raises:
      ArgumentTypeError: `fun` is not callable, or the arguments are traced.
      BatchaxError: what `vmap` raises, for options and arguments that do not fit.

    Example:
      >>> def f(x):
      ...     return jnp.where(x > 0, jnp.sqrt(x), 0.0)
      >>> found = bx.find_nonfinite(jax.grad(f))(jnp.array([4.0, 0.0, -1.0]))
      >>> print(found)
      2 of 3 lanes have results that are not finite.
      ...
      >>> for fault in found.faults:
      ...     print(fault.lane, fault.kind, fault.primitive)
      1 nan div
      2 nan sqrt
    """
    check_callable("find_nonfinite", "a function of one example", fun)
    check_in_axes(fun, in_axes, "find_nonfinite")
    inside = find_vmap(fun) if (in_axes, options) == (0, {}) else None
    names = lambda args: argument_names(fun, len(args))

    @functools.wraps(fun)
    @_compat.api_boundary
    def of_batch(*args: Any, **kwargs: Any) -> NonFinite:
        if inside is None:
            call = fun, in_axes, dict(options), args, kwargs
            try:
                check_fits(*call)
            except Exception:
                # Not a function of one example, but perhaps one that contains a `vmap`.
                if (in_axes, options) == (0, {}):
                    # `jit` around all of it would remember a program without notes.
                    jitted = hasattr(fun, "lower")
                    whole = getattr(fun, "__wrapped__", fun) if jitted else fun
                    with contextlib.suppress(Exception):
                        return find_whole(whole, args, kwargs, names(args), not jitted)
                raise
            return find(*call)
        lengths_known = not inside.jitted
        if inside.alone:
            given = {k: v for k, v in inside.options.items() if k not in ("in_axes", "progress")}
            call = inside.fun, inside.options["in_axes"], given, args, kwargs
            check_fits(*call)
            return find(*call, lengths_known)
        return find_whole(inside.whole, args, kwargs, names(args), lengths_known)

    return cast(Any, of_batch)
