"""Types whose batch axis is not an array axis.

A registered container is one value to the user: a batch of it goes in, the per-example function
sees one element, and a batch of it comes out. Its registration determines its arrays and the batch
axis of each: the user's, with `register_container`, or that of JAX (of sparse matrices, say).

To the front end a key for each lane, a tile of an array, a container and a sparse matrix of JAX are
one thing: *parts*, each with its own specification, and a function that builds the whole from them.
Parts are arrays, or values that again have parts.

A type registered with ``jax.interpreters.batching.register_vmappable`` has a pair of functions that
map over the arrays inside. They run twice: first with a function that collects the arrays and
returns placeholders; then with one that returns the batched arrays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.jaxprs.error_format import brief
from batchax.jaxprs.types import AxesTree, Tree, Value, Values
from batchax.kernel.axis import Position


@dataclass(frozen=True)
class Parts:
    """Says what a value is made of."""

    values: Values  # of all lanes, or of an output those of one lane
    specs: Sequence[Any]  # what `in_axes`, or `out_axes`, says of each
    # Makes the whole again of what the parts have become: an argument of those of one lane, an
    # output of those of all lanes.
    join: Callable[[Sequence[Any]], Any]
    names: Sequence[str] = ()  # what messages call each part; by default as the whole, numbered

    def named(self, path: str) -> list[tuple[str, Any, Any]]:
        """Lists name, value and spec of each part, where `path` names the whole."""
        many = len(self.values) > 1
        numbered = [f"{path} (array {i})" if many else path for i in range(len(self.values))]
        return list(zip(self.names or numbered, self.values, self.specs, strict=True))


class AxisSpec:
    """Base of kinds of axis, in `in_axes` and `out_axes`, that say what a value is made of.

    A kind of axis for arguments alone, or for outputs alone, overrides one of the methods.
    """

    def of_argument(self, value: Value, path: str) -> Parts:
        """What an argument is made of, for which `in_axes` gives this."""
        raise ArgumentTypeError(
            f"in_axes gives {self!r} for {path}: that kind of axis is for outputs, in out_axes."
        )

    def of_output(self, value: Value, path: str, size: int) -> Parts:
        """What an output of one of `size` lanes is made of, for which `out_axes` gives this."""
        raise ArgumentTypeError(
            f"out_axes gives {self!r} for {path}: that kind of axis is for arguments, in in_axes."
        )


class _LaneIndex:
    """Stands for the index of each lane among the arrays of a container.

    `to_arrays` of `register_container` may return it with axis 0. `to_example` then gets an int32
    scalar: 0 in the first lane, for any chunks or mesh. Other arrays, or ``axis_size``, set the
    number of lanes.

    Example:
      >>> class Grid:  # points from `start`, a step apart, which are not stored
      ...     def __init__(self, start, step, size):
      ...         self.start, self.step, self.size = start, step, size
      >>> bx.register_container(
      ...     Grid,
      ...     to_arrays=lambda g, axis: ([jnp.zeros(g.size), bx.LANE_INDEX], [0, 0]),
      ...     to_example=lambda g, axis, arrays: g.start + g.step * arrays[1],
      ...     from_example=lambda g, axis: [],
      ...     to_batch=lambda g, axis, arrays: g,
      ... )
      >>> print(bx.vmap(lambda x: x**2)(Grid(1.0, 0.5, 4)))
      [1.   2.25 4.   6.25]
    """

    def __repr__(self) -> str:
        return "batchax.LANE_INDEX"

    def __reduce__(self) -> str:
        return "LANE_INDEX"  # a copy of it, or what a process is sent, is this object


LANE_INDEX = _LaneIndex()


def vmappable_parts_of_argument(value: Value, spec: AxesTree, path: str) -> Parts:
    """Takes an argument of a type that is registered with JAX apart."""
    spec = _position(value, spec, np.ndim(value), path, "in_axes")
    to_example, _ = _compat.own_batches(value)
    arrays, axes = [], []

    # The registration asks for each array of one example. The first call notes what it reads,
    # the second (`join`) receives that.
    def note(x: Value, axis: Position) -> Value:
        arrays.append(x)
        axes.append(axis)
        return _example_of(x, axis)

    with _naming_function(path, "in_axes", spec):
        to_example(note, lambda: note(LANE_INDEX, 0), value, spec)

    def join(examples: Sequence[Any]) -> Value:
        each = iter(examples)
        return to_example(lambda *_: next(each), lambda: next(each), value, spec)

    return Parts(arrays, axes, join)


def vmappable_parts_of_output(value: Value, spec: AxesTree, path: str, size: int | None) -> Parts:
    """Takes an output of a type that is registered with JAX apart, for one of `size` lanes."""
    if spec is None:  # it depends on no lane, or its arrays raise an error
        made_of, structure = jax.tree.flatten(value)
        return Parts(
            made_of, [None] * len(made_of), lambda outs: jax.tree.unflatten(structure, outs)
        )
    spec = _position(value, spec, np.ndim(value) + 1, path, "out_axes")
    _, to_batch = _compat.own_batches(value)
    arrays, axes = [], []

    def note(lanes: int, x: Value, axis: int) -> Value:
        arrays.append(x)
        axes.append(axis)
        shape = list(np.shape(x))
        shape.insert(axis % (len(shape) + 1), lanes)
        return _nothing(shape, x)

    with _naming_function(path, "out_axes", spec):
        to_batch(note, 1, value, spec)

    example = without_tracers(value, lambda x: _nothing(np.shape(x), x))

    def join(outs: Values) -> Value:
        each = iter(outs)
        return to_batch(lambda *_: next(each), size, example, spec)

    return Parts(arrays, axes, join)


def _position(value: Value, spec: AxesTree, ndim: int, path: str, what: str) -> AxesTree:
    """Returns `spec` as the registration takes it, which knows no int from the end."""
    spec = _checked(value, _compat.type_of_batch_axis(value), spec, path, what)
    return spec + ndim if isinstance(spec, int) and -ndim <= spec < 0 else spec


def _checked(value: Value, kind: type, spec: AxesTree, path: str, what: str) -> AxesTree:
    """Returns what the user gives as the axis of a container; raises if it is of another type."""
    spec = int(spec) if isinstance(spec, np.integer) else spec
    if not isinstance(spec, kind) or isinstance(spec, bool):
        raise ArgumentTypeError(
            f"{what} gives {brief(spec)} for {path}, but the batch axis of a "
            f"{type(value).__name__} is given by a {kind.__name__}. Pass one, or None if it does "
            "not depend on the batch."
        )
    return spec


@contextmanager
def _naming_function(path: str, what: str, spec: AxesTree) -> Iterator[None]:
    """Says which axis it was that a registration raises an error for."""
    try:
        yield
    except (ValueError, TypeError, IndexError) as error:
        raise AxisError(
            f"{what} gives {brief(spec)} for {path}, which rejects it: {error}"
        ) from None


def _example_of(x: Value, axis: Position) -> Value:
    """Returns what stands for one lane of `x`: of its type, for which nothing is computed."""
    if x is LANE_INDEX:
        return np.int32(0)
    if axis is None or type(x) in _compat.vmappables:
        return x
    shape = list(np.shape(x))
    del shape[axis]
    return _nothing(shape, x)


def without_tracers(value: Value, stand_in: Callable[[Any], Any]) -> Value:
    """Returns `value` with stand-ins for what was traced, in a trace that has ended by now."""

    def known(x: Value) -> Value:
        return stand_in(x) if isinstance(x, Tracer) else x

    if not jax.tree_util.all_leaves([value]):
        return jax.tree.map(known, value)
    again = copy.copy(value)
    for name, x in getattr(value, "__dict__", {}).items():
        object.__setattr__(again, name, jax.tree.map(known, x))
    return again


def _nothing(shape: Sequence[Any], like: Value) -> Value:
    """Returns zeros of that shape and the dtype of `like`, for which no memory is taken."""
    dtype = jax.typeof(like).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, like)
        zeros: Any = np.zeros((*shape, *data.shape[np.ndim(like) :]), data.dtype)
        return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(like))
    return np.broadcast_to(np.zeros((), dtype), shape)


@dataclass(frozen=True)
class Container:
    """Holds how batches of a type are split into arrays and rebuilt (see `register_container`)."""

    type: type
    spec_type: type
    to_arrays: Callable[[Any, Any], tuple[Sequence[Any], Sequence[int | None]]]
    to_example: Callable[[Any, Any, Sequence[Any]], Any]
    from_example: Callable[[Any, Any], Sequence[Any]]
    to_batch: Callable[[Any, Any, Sequence[Any]], Any]
    batch_axes: Callable[[Any, Any], Sequence[Any]] | None


class BatchOfRows:
    """Base of a batch that is no array, of which `vmap` itself knows how to take examples."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of rows, and what is known of the shape of a row."""
        raise NotImplementedError

    def check_is_one_batch(self, called: str = "Ragged") -> None:
        """Raises for what JAX made of batches and is not one: a derivative, a stack of several.

        Raises:
          ArgumentTypeError: it is one of these. The message begins with what it is `called`.

        :meta private:
        """
        raise NotImplementedError


class DictOfBatches(dict[Any, Any]):
    """Is a base of dicts that are more than one to JAX, and a plain one to `vmap`."""


_containers: dict[type, Container] = {}


@_compat.api_boundary
def register_container(
    type: type,
    *,
    to_arrays: Callable[[Any, Any], tuple[Sequence[Any], Sequence[int | None]]],
    to_example: Callable[[Any, Any, Sequence[Any]], Any],
    from_example: Callable[[Any, Any], Sequence[Any]],
    to_batch: Callable[[Any, Any, Sequence[Any]], Any],
    batch_axes: Callable[[Any, Any], Sequence[Any]] | None = None,
    spec_type: type = int,
) -> None:
    """Registers a type whose batch axis is not an array axis, for both vmaps.

    In the functions below, `spec` is the entry of the user for the container in ``in_axes`` or
    ``out_axes``: an instance of `spec_type`, or None in ``out_axes`` for arrays without a batch
    axis.

    Args:
      type: The container type. Its instances are leaves, whether or not they are pytrees. Instances
        of subclasses are not.
      to_arrays: ``(batch, spec) -> (arrays, axes)``: the arrays of a batch, and the batch axis of
        each, or None for a shared array. ``batchax.LANE_INDEX`` with axis 0 is the index of each
        lane.
      to_example: ``(batch, spec, arrays) -> example``: the argument of the function of one example,
        from the arrays of `to_arrays` without the batch axis.
      from_example: ``(example, spec) -> arrays``: the arrays of an instance that the function
        returned.
      to_batch: ``(example, spec, arrays) -> batch``: the batch to return, from the arrays of
        `from_example` with the batch axis first, or where `batch_axes` places it. The arrays in
        `example` have shapes and dtypes, and no values.
      batch_axes: ``(example, spec) -> axes``: the batch axis of each array for `to_batch`. Default:
        0.
      spec_type: The type of specifications. Default: int. Tuples, lists, and dicts are not allowed,
        because they describe pytrees.

    An array may itself be a container, with the axis that its registration returns. If the type
    is a pytree, ``jax.vmap`` still maps its leaves.

    Raises:
      ArgumentTypeError: `type` or `spec_type` is not a type, or `spec_type` describes pytrees.

    Example:
      An array whose axes have names, of which one counts the batch:

      >>> class Named:
      ...     def __init__(self, data, *names):
      ...         self.data, self.names = data, names
      >>> bx.register_container(
      ...     Named,
      ...     spec_type=str,
      ...     to_arrays=lambda x, name: ([x.data], [x.names.index(name)]),
      ...     to_example=lambda x, name, arrays: Named(
      ...         arrays[0], *(n for n in x.names if n != name)
      ...     ),
      ...     from_example=lambda x, name: [x.data],
      ...     to_batch=lambda x, name, arrays: Named(
      ...         arrays[0], *(x.names if name is None else (name, *x.names))
      ...     ),
      ... )
      >>> x = Named(jnp.ones((3, 8)), "time", "batch")
      >>> twice = bx.vmap(lambda x: Named(2 * x.data, *x.names), "batch", "batch")(x)
      >>> twice.names, twice.data.shape
      (('batch', 'time'), (8, 3))
    """
    for name, value in (("type", type), ("spec_type", spec_type)):
        if not isinstance(value, _type):
            raise ArgumentTypeError(
                f"register_container: `{name}` must be a type, got {brief(value)}."
            )
    if issubclass(spec_type, (tuple, list, dict, NoneType, bool)):
        raise ArgumentTypeError(
            f"register_container: `spec_type` is {spec_type.__name__}, which has another "
            "meaning in in_axes and out_axes. Make a class for your specifications."
        )
    _containers[type] = Container(
        type, spec_type, to_arrays, to_example, from_example, to_batch, batch_axes
    )
    _lend_to_jax(_containers[type])


@_compat.api_boundary
def unregister_container(type: type) -> None:
    """Removes the registration of a type by `register_container`.

    Args:
      type: A registered type.

    Raises:
      ArgumentTypeError: `type` is not registered.

    Example:
      >>> class Box:
      ...     def __init__(self, x):
      ...         self.x = x
      >>> bx.register_container(
      ...     Box,
      ...     to_arrays=lambda box, axis: ([box.x], [axis]),
      ...     to_example=lambda box, axis, arrays: Box(*arrays),
      ...     from_example=lambda box, axis: [box.x],
      ...     to_batch=lambda box, axis, arrays: Box(*arrays),
      ... )
      >>> print(bx.vmap(lambda box: 2 * box.x)(Box(jnp.arange(3))))
      [0 2 4]
      >>> bx.unregister_container(Box)
    """
    if type not in _containers:
        name = getattr(type, "__name__", repr(type))
        raise ArgumentTypeError(f"unregister_container: {name} is not a registered container.")
    del _containers[type]
    _compat.forget_batches(type)


_type = type  # where a parameter of that name hides it


def parts_of_argument(value: Value, spec: AxesTree, path: str) -> Parts | None:
    """Takes an argument apart that is a container; returns None for any other."""
    container = _containers.get(_type(value))
    if container is None:
        if type(value) not in _compat.vmappables:
            return None
        return vmappable_parts_of_argument(value, spec, path)
    spec = _checked(value, container.spec_type, spec, path, "in_axes")
    arrays, axes = map(list, container.to_arrays(value, spec))
    _check_one_each(container, "to_arrays", arrays, axes, path)
    return Parts(
        arrays,
        axes,
        lambda examples: container.to_example(value, spec, examples),
        [f"{path} (array {i})" for i in range(len(arrays))],
    )


def parts_of_output(value: Value, spec: AxesTree, path: str, size: int | None) -> Parts | None:
    """Takes a container apart that is an output of one of `size` lanes; returns None for others."""
    container = _containers.get(_type(value))
    if container is None:
        if type(value) not in _compat.vmappables:
            return None
        return vmappable_parts_of_output(value, spec, path, size)
    if spec is not None:
        spec = _checked(value, container.spec_type, spec, path, "out_axes")
    arrays = list(container.from_example(value, spec))
    axes: list[Any] = [None if spec is None else 0] * len(arrays)
    if spec is not None and container.batch_axes is not None:
        axes = list(container.batch_axes(value, spec))
        _check_one_each(container, "batch_axes", arrays, axes, path)
    example = without_tracers(value, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    return Parts(arrays, axes, lambda outs: container.to_batch(example, spec, outs))


def _check_one_each(
    container: Container, maker: str, arrays: Values, axes: Sequence[Any], path: str
) -> None:
    if len(arrays) != len(axes):
        raise ArgumentTypeError(
            f"`{maker}`, as registered for {container.type.__name__}, returned {len(axes)} axes "
            f"for the {len(arrays)} arrays of {path}: it must return an axis, or None, for each."
        )


def _lend_to_jax(container: Container) -> None:
    """Makes ``jax.vmap`` take batches of the type apart in the same way, if it is no pytree."""
    # Of a pytree JAX has always mapped the leaves, and programs may count on that.
    try:
        empty = object.__new__(container.type)
        if not jax.tree_util.all_leaves([empty]):
            return
    except Exception:  # JAX asked it for its leaves, which it does not have yet
        return

    def to_example(
        cont: Callable[..., Any], index: Callable[[], Value], value: Value, spec: AxesTree
    ) -> Value:
        if spec is None:
            return value
        parts = parts_of_argument(value, spec, "the argument")
        assert parts is not None
        of_lane = lambda x, a: index() if x is LANE_INDEX else cont(x, a)
        return parts.join([of_lane(x, a) for _, x, a in parts.named("")])

    def to_batch(cont: Callable[..., Any], size: int, example: Value, spec: AxesTree) -> Value:
        parts = parts_of_output(example, spec, "the output", size)
        assert parts is not None
        return parts.join([cont(size, x, a) for _, x, a in parts.named("")])

    _compat.lend_batches(container.type, container.spec_type, to_example, to_batch)


def arrays_inside(tree: Tree) -> list[Any]:
    arrays = []
    for x in jax.tree.leaves(tree, is_leaf=is_container):
        parts = parts_of_output(x, None, "out", None)
        arrays += jax.tree.leaves(x) if parts is None else arrays_inside(parts.values)
    return arrays


def is_container(value: Value) -> bool:
    """Whether `value` is of a type that is registered, with batchax or with JAX."""
    return (
        _type(value) in _containers
        or isinstance(value, BatchOfRows)
        or _type(value) in _compat.vmappables
    )


def is_container_spec(spec: object) -> bool:
    types = {container.spec_type for container in list(_containers.values())}
    return _type(spec) in types or _type(spec) in _compat.types_of_batch_axes()


def check_by_position(value: Value, path: str) -> None:
    """Raises an error for a container whose batch dimensions have no number or place."""
    container = _containers.get(_type(value))
    spec_type = _compat.type_of_batch_axis(value) if container is None else container.spec_type
    if spec_type is int and hasattr(value, "shape"):
        return
    lacks = "has no shape" if spec_type is int else f"has its axis given by a {spec_type.__name__}"
    raise ArgumentTypeError(
        f"{path} is a {_type(value).__name__}, which {lacks}: its batch dimensions cannot be "
        "counted from a rank. Declare None for what is not batched, or use batchax.vmap."
    )
