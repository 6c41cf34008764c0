"""`find_nonfinite`: which lanes are bad, and what made them so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, Unpack, cast

from batchax import _compat
from batchax.frontend.batched import Batched
from batchax.frontend.in_axes import argument_names, check_in_axes
from batchax.frontend.options import check_callable, wraps
from batchax.jaxprs.types import AxesTree, Tree
from batchax.nonfinite.find import NonFinite, calls_vmap, check_fits, find, find_whole
from batchax.vmap import Options, find_vmap

P = ParamSpec("P")


@_compat.api_boundary
def find_nonfinite(
    fun: Callable[P, Any], in_axes: AxesTree = 0, **options: Unpack[Options]
) -> Batched[P, NonFinite, NonFinite]:
    """Finds the origins of NaN and infinity in each lane of a batch.

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

    For each lane with a non-finite result, it reports the equation that computed the first
    non-finite value on the way to it, or the argument that contained it. The report has the source
    line, the iteration of loops, and the operands of the first few lanes. Infinities that do not
    reach an output, such as those of a mask, are not reported. A call of a function with a custom
    batching rule is one equation.

    Args:
      fun: A function of one example, as for `vmap`. Or, without other arguments, the result of
        `vmap`, or of `jax.jit`, `jax.grad`, and the like of it.
      in_axes: As for `vmap`. None: `fun` takes the whole batch and calls a `vmap`, such as the
        gradient of a mean over lanes. By default, such a function is taken for one of one example
        if it can be: then the findings are `ambiguous`.
      **options: Options of `vmap`, such as `batch_size`, `axis_name`, or `mesh`. `out_axes` has no
        effect.

    Returns:
      A function of the batch that returns the findings, with the attributes `lanes` and `faults`.
      They are false if all results are finite, and print a block for each cause.

    Raises:
      ArgumentTypeError: `fun` is not callable, or the arguments are traced.
      BatchaxError: An option or argument does not fit, as for `vmap`.
    """
    check_callable("find_nonfinite", "a function of one example", fun)
    check_in_axes(fun, in_axes, "find_nonfinite")
    plain = (in_axes, options) == (0, {})
    inside = None if options or not (plain or in_axes is None) else find_vmap(fun, in_axes)
    names = lambda args: argument_names(fun, len(args))

    @wraps(fun)
    @_compat.api_boundary
    def of_batch(*args: Tree, **kwargs: Tree) -> NonFinite:
        if inside is None:
            call = fun, in_axes, dict(options), args, kwargs
            try:
                check_fits(*call)
            except Exception:
                # Not a function of one example, but perhaps one that calls a `vmap`.
                if plain and (within := find_vmap(fun, None)) is not None:
                    of_whole = within.whole, args, kwargs, names(args), not within.jitted
                    with contextlib.suppress(Exception):
                        return find_whole(*of_whole)
                raise
            return replace(find(*call), ambiguous=plain and calls_vmap(fun, args, kwargs))
        lengths_known = not inside.jitted
        if inside.alone:
            given = {k: v for k, v in inside.options.items() if k not in ("in_axes", "progress")}
            call = inside.fun, inside.options["in_axes"], given, args, kwargs
            check_fits(*call)
            return find(*call, lengths_known)
        return find_whole(inside.whole, args, kwargs, names(args), lengths_known)

    return cast(Any, of_batch)
