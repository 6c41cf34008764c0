"""`clipped_grad`: gradients of examples, each no longer than a norm, added up."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError, OptionError
from batchax.frontend.batched import Batched
from batchax.frontend.in_axes import argument_names, is_array, is_position
from batchax.frontend.options import check_callable, check_options, wraps
from batchax.frontend.outputs import Reduce
from batchax.jaxprs.error_format import brief, show
from batchax.jaxprs.types import Tree, Value
from batchax.vmap import MoreOptions, vmap

P = ParamSpec("P")


class ClippedSum(NamedTuple):
    """Holds the result of a function of `clipped_grad`.

    Attributes:
      sum: The sum of the clipped gradients, as ``jax.grad`` returns one.
      count: The number of examples, an int32 scalar.
      clipped: The number of examples whose gradient was longer than `max_norm`, an int32 scalar.

    Example:
      >>> loss = lambda w, x: w * x
      >>> print(bx.clipped_grad(loss, 1.0)(2.0, jnp.array([0.5, 3.0, -4.0])).clipped)
      2
    """

    sum: Any
    count: Any
    clipped: Any


@_compat.api_boundary
def clipped_grad(
    loss: Callable[P, Any],
    max_norm: float | jax.Array,
    in_axes: Sequence[Any] | dict[str, Any] | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    grad: Callable[..., Callable[..., Any]] = jax.grad,
    **options: Unpack[MoreOptions],
) -> Batched[P, ClippedSum, ClippedSum]:
    """Sums per-example gradients, each clipped to norm `max_norm`, as in DP-SGD.

    Example:
      >>> def loss(w, x, y):  # of one example
      ...     return (w @ x - y) ** 2
      >>> xs, ys = jnp.eye(4), jnp.array([0.0, 0.1, 5.0, -5.0])
      >>> total, count, clipped = bx.clipped_grad(loss, 1.0, batch_size=2)(jnp.zeros(4), xs, ys)
      >>> print(total, count, clipped)
      [ 0.  -0.2 -1.   1. ] 4 2

    The gradient of each example is multiplied by ``min(1, max_norm / norm)``, with the norm of all
    its leaves together. For layers that are matrix products, per-example gradients are not stored:
    norms are computed from the factors, and the sum is one product ("ghost clipping"), also in
    chunks and on several devices.

    Args:
      loss: A function of one example that returns a number.
      max_norm: The largest L2 norm of a gradient that is not clipped: a positive number, or traced.
      in_axes: As for `vmap`: a tuple or list with an entry for each positional argument of `loss`,
        or a dict by parameter name. Default: None for the arguments in `argnums`, 0 for others.
      argnums: The argument or arguments to differentiate with respect to, as for ``jax.grad``. They
        are shared by all examples.
      grad: The function that makes the gradient of a loss. For models, that of the library, such as
        ``equinox.filter_grad`` or ``flax.nnx.grad``. Default: ``jax.grad``.
      **options: Options of `vmap`, such as `batch_size` and `mesh`.

    Returns:
      A function of the batch, which returns a `ClippedSum`. A gradient or norm that is not finite
      makes the sum non-finite; `find_nonfinite` of ``jax.grad(loss)`` names the example. Norms of
      16-bit numbers are computed in 32 bits.

    Raises:
      ArgumentTypeError: `loss` or `grad` is not callable; `argnums` is not an int or ints that name
        positional arguments; `max_norm` is not a number; `in_axes` is not a tuple, list, or dict;
        `out_axes` or an unknown option is passed; `grad` returns a value or aux; or an argument has
        a leaf without a gradient.
      AxisError: `in_axes` maps an argument in `argnums`.
      OptionError: `max_norm` is not positive.

    References:
      M. Abadi et al., Deep learning with differential privacy, CCS 2016, arXiv:1607.00133. X. Li et
      al., Large language models can be strong differentially private learners, ICLR 2022,
      arXiv:2110.05679 (norms without gradients).
    """
    check_callable("clipped_grad", "a loss of one example", loss)
    check_callable("grad of clipped_grad", "what makes the gradient of a loss", grad)
    numbers = [argnums] if is_position(argnums) else argnums
    if not (isinstance(numbers, (tuple, list)) and all(map(is_position, numbers))):
        raise ArgumentTypeError(
            f"argnums must be an int, or a tuple of ints, got {brief(argnums)}."
        )
    if not (in_axes is None or isinstance(in_axes, (tuple, list, dict))):
        raise ArgumentTypeError(
            "in_axes of clipped_grad must be a tuple or list with an entry for each positional "
            f"argument, a dict by parameter name, or None, got {brief(in_axes)}."
        )
    if not numbers:
        raise ArgumentTypeError("argnums must name an argument, got none.")
    if "out_axes" in options:
        raise ArgumentTypeError("clipped_grad returns one sum for all lanes. Remove out_axes.")
    _check_norm(max_norm)
    ours = ("loss", "max_norm", "in_axes", "argnums", "grad", *MoreOptions.__annotations__)
    check_options("clipped_grad", ours, options)
    vmap(loss, **options)  # raises an error for values that vmap does not take

    @wraps(loss)
    def one_example(*args: Tree, **kwargs: Tree) -> ClippedSum:
        # The gradients of libraries are with respect to the first argument, and may know no other.
        of_loss = grad(loss) if argnums == 0 else grad(loss, argnums=argnums)
        gradient = of_loss(*args, **kwargs)
        chosen = [args[n] for n in numbers]
        if not _may_be_gradient(gradient, chosen[0] if is_position(argnums) else tuple(chosen)):
            raise ArgumentTypeError(
                "clipped_grad: what `grad` makes of the loss must return gradients alone, in the "
                f"structure of what they are with respect to; it returned {_short(gradient)}. Pass "
                "jax.grad, not jax.value_and_grad, and no has_aux=True: values and aux are those "
                "of batchax.vmap(loss)."
            )
        squares = [_squared_norm(g) for g in jax.tree.leaves(gradient)]
        norm = jnp.sqrt(functools.reduce(operator.add, squares, jnp.float32(0)))
        scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
        # Of a norm that is too large for its dtype: zero would leave the example out, unseen.
        scale = jnp.where(norm == np.inf, np.nan, scale)
        clipped = jax.tree.map(lambda g: scale.astype(g.dtype) * g, gradient)
        return ClippedSum(clipped, jnp.int32(1), (norm > max_norm).astype(np.int32))

    @wraps(loss)
    @_compat.api_boundary
    def of_batch(*args: Tree, **kwargs: Tree) -> ClippedSum:
        positions = [operator.index(n) for n in numbers]
        if not all(-len(args) <= n < len(args) for n in positions):
            raise ArgumentTypeError(
                f"clipped_grad: argnums is {brief(argnums)}, and {len(args)} arguments were passed "
                "by position. Pass those that gradients are with respect to by position."
            )
        shared = {n % len(args) for n in positions}
        if len(shared) < len(positions):
            raise ArgumentTypeError(
                f"clipped_grad: argnums {brief(argnums)} names an argument twice."
            )
        names = argument_names(loss, len(args))
        if grad is jax.grad:
            for i in sorted(shared):
                _check_differentiable(names[i], args[i])
        axes = in_axes
        if axes is None:
            axes = tuple(None if i in shared else 0 for i in range(len(args)))
        elif isinstance(axes, dict):
            axes = {names[i]: None for i in shared} | axes
        of_shared = axes if isinstance(axes, dict) else dict(zip(names, axes, strict=False))
        for name in (names[i] for i in sorted(shared)):
            if of_shared.get(name) is not None:
                raise AxisError(
                    f"in_axes gives {brief(of_shared[name])} for {name}, which gradients are with "
                    "respect to: all examples share it, so pass None."
                )
        total = vmap(one_example, axes, Reduce("sum"), **options)(*args, **kwargs)
        # A sum of int32 is one of int64 where JAX has that.
        return ClippedSum(total.sum, *(n.astype(np.int32) for n in total[1:]))

    return cast(Any, of_batch)


def _squared_norm(x: Value) -> jax.Array:
    # In this form that of a product is seen to be a product of norms
    # (`contractions/products.py`), which an `abs` between hides. The square of a number of 16 bits
    # may be too large for 16 bits.
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(jnp.square(jnp.abs(x) if jnp.iscomplexobj(x) else x))


def _may_be_gradient(gradient: Tree, x: Tree) -> bool:
    """Whether it may be one with respect to `x`, and is alone, not in a tuple with other values.

    The gradient of a model may have any type, so it is not checked.
    """
    if type(gradient) is tuple:
        alike = isinstance(x, tuple) and len(x) == len(gradient)
        return alike and all(map(_may_be_gradient, gradient, x))
    return not is_array(gradient) or (is_array(x) and np.shape(gradient) == np.shape(x))


def _short(tree: Tree) -> str:
    if type(tree) is tuple:
        return f"({', '.join(map(_short, tree))}{',' if len(tree) == 1 else ''})"
    return jax.typeof(tree).str_short() if is_array(tree) else type(tree).__name__


def _check_differentiable(name: str, tree: Tree) -> None:
    """Raises an error that names a leaf for which ``jax.grad`` has no gradient."""
    for keys, x in jax.tree.leaves_with_path(tree):
        dtype = jax.typeof(x).dtype if is_array(x) else None
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            of_what = f"type {type(x).__name__}" if dtype is None else f"dtype {dtype}"
            raise ArgumentTypeError(
                f"clipped_grad: jax.grad has no gradient for {name}{jax.tree_util.keystr(keys)} of "
                f"{of_what}. For a model, pass the gradient of its library: "
                "grad=equinox.filter_grad or grad=flax.nnx.grad. Or pass a pytree of "
                "floating-point arrays."
            )


def _check_norm(max_norm: float | jax.Array) -> None:
    if isinstance(max_norm, Tracer):
        return
    if (
        isinstance(max_norm, str)
        or np.ndim(max_norm)
        or np.asarray(max_norm).dtype.kind not in "iuf"
    ):
        raise ArgumentTypeError(f"max_norm must be a number, got {show(max_norm)}.")
    if not max_norm > 0:
        raise OptionError(f"max_norm must be positive, got {max_norm}.")
