"""What is done with a `Reduction`: by all ways to run lanes, and on the host.

Lanes that run at once are one part. Parts are chunks, shards, units of a dataset.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from batchax.errors import ArgumentTypeError, UnsupportedError
from batchax.frontend.reduction import Reduction
from batchax.jaxprs.spoken import brief
from batchax.jaxprs.words import Value


def operation_of(reduction: Reduction) -> Operation | None:
    """What JAX and NumPy know of `combine`, if they do."""
    try:
        return _OPERATIONS.get(reduction.combine)
    except TypeError:  # an object of the user's that cannot be hashed
        return None


def states_of(
    reduction: Reduction, x: Value, axis: int, index: Any, real: Any = None
) -> tuple[Any, int]:
    """The states of lanes, and the axis along which they are.

    Args:
      x: outputs of lanes.
      axis: along which.
      index: of each lane; used if `reduction.index`.
      real: which of them count; None: all.
    """
    states, at = x, axis
    if reduction.lane is not None:
        own = state_type(
            reduction, jax.ShapeDtypeStruct((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)
        )
        # What has the shape of an output has its lanes where that has them.
        at = axis if _is_array(own) and own.ndim >= axis else 0
        given = (x, index) if reduction.index else (x,)
        of_lane = functools.partial(_of_lane, reduction)
        states = jax.vmap(of_lane, (axis, 0)[: len(given)], at)(*given)
    if real is not None:
        states = jax.tree.map(
            lambda s, none: lax.select(
                lax.broadcast_in_dim(real, s.shape, (at,)), s, lax.full_like(s, none)
            ),
            states,
            neutral_like(reduction, states),
        )
    return states, at


def _of_lane(reduction: Reduction, *given: Any) -> Any:
    assert reduction.lane is not None
    return jax.tree.map(jnp.asarray, reduction.lane(*given))


def _lane_types(reduction: Reduction, output: Any) -> list[Any]:
    return [output, jax.ShapeDtypeStruct((), np.int32)][: 1 + reduction.index]


def neutral_like(reduction: Reduction, state: Any) -> Any:
    """The number for each array of a state that `neutral` has for it."""
    numbers = jax.tree.broadcast(reduction.neutral, state)
    return jax.tree.map(lambda n, x: n(x.dtype) if callable(n) else n, numbers, state)


def folded(reduction: Reduction, states: Any, axis: int = 0) -> Any:
    """The state of all lanes whose states are along an axis, or that of all parts."""
    operation = operation_of(reduction)
    if operation is not None:
        return jax.tree.map(lambda s: operation.fold(s, axis).astype(s.dtype), states)
    states = jax.tree.map(lambda s: jnp.moveaxis(s, axis, 0), states)
    return _in_pairs(reduction, states) if reduction.fold is None else reduction.fold(states)


def _in_pairs(reduction: Reduction, states: Any) -> Any:
    """Neighbors first, then neighbors of these, and so on."""
    size = jax.tree.leaves(states)[0].shape[0]
    if not isinstance(size, int):
        raise UnsupportedError(
            f"{reduction!r} combines lanes two at a time, and how many there are is {size}, a "
            "symbolic size. Give it fold, a function that combines all along axis 0."
        )
    if not size:
        return jax.tree.map(
            lambda s, none: jnp.full(s.shape[1:], none, s.dtype),
            states,
            neutral_like(reduction, states),
        )
    part = lambda states, *cut: jax.tree.map(lambda s: s[slice(*cut)], states)
    while size > 1:
        rest = part(states, size - size % 2, size)
        states = jax.vmap(reduction.combine)(part(states, 0, size - 1, 2), part(states, 1, size, 2))
        if size % 2:
            states = jax.tree.map(lambda *s: jnp.concatenate(s), states, rest)
        size = -(-size // 2)
    return jax.tree.map(lambda s: s[0], states)


def finished(reduction: Reduction, state: Any, lanes: Any) -> Any:
    """The result, of the state of so many lanes."""
    return state if reduction.finish is None else reduction.finish(state, lanes)


def of_all(reduction: Reduction, x: Value, axis: int) -> Any:
    """The result, of the outputs of all lanes, which are along an axis."""
    if reduction.of_lanes is not None:
        return reduction.of_lanes(x, axis=axis)
    lanes = x.shape[axis]
    index = jnp.arange(lanes, dtype=np.int32) if reduction.index else None
    return finished(reduction, folded(reduction, *states_of(reduction, x, axis, index)), lanes)


def of_shared(reduction: Reduction, x: Value, lanes: Any) -> Any:
    """The result, of so many lanes with the same output."""
    if reduction.of_copies is not None:
        return reduction.of_copies(x, lanes)
    return of_all(reduction, jnp.broadcast_to(x, (lanes, *x.shape)), 0)


def state_type(reduction: Reduction, output: Any) -> Any:
    """The type of a state, from that of an output of one example."""
    if reduction.lane is None:
        return jax.ShapeDtypeStruct(output.shape, output.dtype)
    return jax.eval_shape(functools.partial(_of_lane, reduction), *_lane_types(reduction, output))


def check(reduction: Reduction, output: Any, path: str) -> None:
    """Refuses functions that do not fit each other, or an output.

    Args:
      output: the type of the output of one example.
      path: how messages call it.

    Raises:
      ArgumentTypeError: see `Reduction`.
    """
    state = state_type(reduction, output)
    both = jax.eval_shape(lambda s: combined(reduction, s, s), state)
    _check_same(reduction, "combine", both, state, path)
    if reduction.fold is not None and operation_of(reduction) is None:
        several = jax.tree.map(lambda s: jax.ShapeDtypeStruct((2, *s.shape), s.dtype), state)
        fold = jax.eval_shape(lambda s: folded(reduction, s), several)
        _check_same(reduction, "fold", fold, state, path)
    try:
        numbers = neutral_like(reduction, state)
    except ValueError:
        raise ArgumentTypeError(
            f"neutral of {reduction!r} is {brief(reduction.neutral)}, but a state of {path} is "
            f"{_shown(state)}: give a number, or one for each array of a state."
        ) from None
    for number, x in zip(jax.tree.leaves(numbers), jax.tree.leaves(state), strict=True):
        if jnp.issubdtype(x.dtype, jnp.integer) and not (
            jnp.iinfo(x.dtype).min <= number <= jnp.iinfo(x.dtype).max
        ):
            raise ArgumentTypeError(
                f"neutral of {reduction!r} is {brief(number)}, which is no {x.dtype}, as a state "
                f"of {path} has. Give a function of the dtype that returns one."
            )
    result = jax.eval_shape(lambda s: finished(reduction, s, 2), state)
    if not _is_array(result):
        function = "finish" if reduction.finish is not None else "lane, without finish,"
        raise ArgumentTypeError(
            f"{function} of {reduction!r} must return an array, and for {path} it returns "
            f"{_shown(result)}."
        )
    parts = jax.make_jaxpr(functools.partial(in_two_parts, reduction))(output, output)
    if any(isinstance(c, Tracer) for c in parts.consts):
        raise ArgumentTypeError(
            f"the functions of {reduction!r} close over a value that is traced, by jit or grad, "
            "and a Reduction is kept beyond that. Let the function of one example return what "
            "they need of it."
        )


def in_two_parts(reduction: Reduction, one: Any, other: Any) -> Any:
    """What it makes of two lanes, and of none: all that its functions compute."""
    lanes = (jnp.stack([one, other]), 0, np.arange(2, dtype=np.int32))
    states, at = states_of(reduction, *lanes, real=np.array([True, False]))
    parts = (jax.tree.map(lambda s, k=k: jnp.take(s, k, at), states) for k in (0, 1))
    return finished(reduction, combined(reduction, *parts), 2)


def combined(reduction: Reduction, one: Any, other: Any) -> Any:
    """The state of both."""
    if operation_of(reduction) is not None:
        return jax.tree.map(reduction.combine, one, other)
    return reduction.combine(one, other)


def _check_same(reduction: Reduction, name: str, returned: Any, state: Any, path: str) -> None:
    types = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    same = jax.tree.structure(returned) == jax.tree.structure(state)
    if not same or types(returned) != types(state):
        raise ArgumentTypeError(
            f"{name} of {reduction!r} must return a state as it takes them, {_shown(state)} for "
            f"{path}, and returns {_shown(returned)}."
        )


def on_host(reduction: Reduction, parts: list[Any]) -> Any:
    """The state of parts, arrays of NumPy: neighbors first, then neighbors of those.

    That order depends on nothing but how many there are.
    """
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        both = [_combined_on_host(reduction, one, other) for one, other in pairs]
        parts = [*both, *parts[len(both) * 2 :]]
    return parts[0]


def _combined_on_host(reduction: Reduction, one: Any, other: Any) -> Any:
    operation = operation_of(reduction)
    if operation is not None:
        with np.errstate(all="ignore"):
            return jax.tree.map(operation.of_numpy, one, other)
    with in_double_precision():
        return jax.tree.map(np.asarray, reduction.combine(one, other))


def finished_on_host(reduction: Reduction, state: Any, lanes: int, dtype: Any) -> np.ndarray:
    """The result, of a state in arrays of NumPy."""
    with np.errstate(all="ignore"), in_double_precision():
        return np.asarray(finished(reduction, state, lanes)).astype(dtype)


class Operation(NamedTuple):
    """What is known of a function that combines.

    Attributes:
      fold: the same of many, ``fold(x, axis)``.
      of_numpy: the same in NumPy.
      held: what a chunk loop calls it, if it holds one result for all chunks.
    """

    fold: Callable[..., Any]
    of_numpy: Callable[[Any, Any], Any]
    held: Literal["sum", "max", "min"] | None = None


_OPERATIONS: dict[Any, Operation] = {
    jnp.add: Operation(lambda x, axis: jnp.sum(x, axis, x.dtype), np.add, "sum"),
    jnp.multiply: Operation(lambda x, axis: jnp.prod(x, axis, x.dtype), np.multiply),
    jnp.maximum: Operation(jnp.max, np.maximum, "max"),
    jnp.minimum: Operation(jnp.min, np.minimum, "min"),
}


@contextlib.contextmanager
def in_double_precision() -> Iterator[None]:
    """What JAX computes is computed here and in double precision, as NumPy does."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        yield


def _is_array(tree: Any) -> bool:
    return jax.tree_util.all_leaves([tree]) and hasattr(tree, "shape")


def _shown(tree: Any) -> str:
    """Types of arrays, in words."""
    text = str(jax.tree.map(lambda x: _Words(f"{x.dtype}{list(x.shape)}"), tree))
    return text if text != "()" else "empty"


class _Words(str):
    __repr__ = str.__str__
