"""Types of which JAX has been told what a batch of them is, such as sparse matrices.

What is registered with ``jax.interpreters.batching.register_vmappable`` is a pair of functions that
are given a function for the arrays inside. They are run twice. First they are given one that notes
the arrays, for which placeholders stand; then one that returns what those have become. What they
compute besides is computed both times.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.parts import LANE_INDEX, Parts
from batchax.jaxprs.spoken import brief
from batchax.jaxprs.words import Value


def parts_of_argument(value: Value, spec: Any, path: str) -> Parts:
    """What an argument of such a type is made of.

    Raises:
      ArgumentTypeError: `spec` is not of the type that the registration takes.
      AxisError: the registration refuses it.
    """
    spec = _position(value, spec, np.ndim(value), path, "in_axes")
    to_example, _ = _compat.own_batches(value)
    arrays, axes = [], []

    def note(x: Value, axis: Any) -> Any:
        arrays.append(x)
        axes.append(axis)
        return _example_of(x, axis)

    with _asked(path, "in_axes", spec):
        to_example(note, lambda: note(LANE_INDEX, 0), value, spec)

    def join(examples: Sequence[Any]) -> Any:
        each = iter(examples)
        return to_example(lambda *_: next(each), lambda: next(each), value, spec)

    return Parts(arrays, axes, join)


def parts_of_output(value: Value, spec: Any, path: str, size: Any) -> Parts:
    """What an output of such a type is made of, for one of `size` lanes.

    Raises:
      ArgumentTypeError: `spec` is not of the type that the registration takes.
      AxisError: the registration refuses it.
    """
    if spec is None:  # it depends on no lane, or is refused with the arrays it is made of
        made_of, structure = jax.tree.flatten(value)
        return Parts(
            made_of, [None] * len(made_of), lambda outs: jax.tree.unflatten(structure, outs)
        )
    spec = _position(value, spec, np.ndim(value) + 1, path, "out_axes")
    _, to_batch = _compat.own_batches(value)
    arrays, axes = [], []

    def note(lanes: Any, x: Value, axis: Any) -> Any:
        arrays.append(x)
        axes.append(axis)
        shape = list(np.shape(x))
        shape.insert(axis % (len(shape) + 1), lanes)
        return _nothing(shape, x)

    with _asked(path, "out_axes", spec):
        to_batch(note, 1, value, spec)

    example = without_tracers(value, lambda x: _nothing(np.shape(x), x))

    def join(outs: Sequence[Value]) -> Any:
        each = iter(outs)
        return to_batch(lambda *_: next(each), size, example, spec)

    return Parts(arrays, axes, join)


def _position(value: Value, spec: Any, ndim: int, path: str, what: str) -> Any:
    """`spec` as the registration takes it: an int from the end is none for it."""
    kind, name = _compat.type_of_batch_axis(value), type(value).__name__
    spec = int(spec) if isinstance(spec, np.integer) else spec
    if not isinstance(spec, kind) or isinstance(spec, bool):
        raise ArgumentTypeError(
            f"{what} gives {brief(spec)} for {path}, but the batch axis of a {name} is given by a "
            f"{kind.__name__}. Give one, or None if it does not depend on the batch."
        )
    return spec + ndim if isinstance(spec, int) and -ndim <= spec < 0 else spec


@contextmanager
def _asked(path: str, what: str, spec: Any) -> Iterator[None]:
    """Says which axis it was that a registration refuses."""
    try:
        yield
    except (ValueError, TypeError, IndexError) as error:
        raise AxisError(
            f"{what} gives {brief(spec)} for {path}, which it refuses: {error}"
        ) from None


def _example_of(x: Value, axis: Any) -> Any:
    """What stands for one lane of `x`: of its type, for which nothing is computed."""
    if x is LANE_INDEX:
        return np.int32(0)
    if axis is None or _compat.has_own_batches(x):
        return x
    shape = list(np.shape(x))
    del shape[axis]
    return _nothing(shape, x)


def without_tracers(value: Value, stand_in: Callable[[Any], Any]) -> Any:
    """`value` with stand-ins for what was traced, in a trace that has ended by now."""

    def known(x: Value) -> Any:
        return stand_in(x) if isinstance(x, Tracer) else x

    if not jax.tree_util.all_leaves([value]):
        return jax.tree.map(known, value)
    again = copy.copy(value)
    for name, x in getattr(value, "__dict__", {}).items():
        object.__setattr__(again, name, jax.tree.map(known, x))
    return again


def _nothing(shape: Sequence[Any], like: Any) -> Any:
    """An array of zeros, of that shape and the dtype of `like`, for which no memory is taken."""
    dtype = jax.typeof(like).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, like)
        zeros: Any = np.zeros((*shape, *data.shape[np.ndim(like) :]), data.dtype)
        return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(like))
    return np.broadcast_to(np.zeros((), dtype), shape)
