"""Types of the user's whose batch axis is not an array axis.

A registered container is one value to the user: a batch of it goes in, the
per-example function sees one element, and a batch of it comes out. What it is
made of, and where the batch axis of each part is, its registration says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from batchax import _compat
from batchax.errors import ArgumentTypeError, UnsupportedError


@dataclass(frozen=True)
class Container:
    """How batches of one type are taken apart and put together."""

    type: type
    spec_type: type
    to_arrays: Callable[[Any, Any], tuple[Sequence[Any], Sequence[int | None]]]
    to_example: Callable[[Any, Any, Sequence[Any]], Any]
    from_example: Callable[[Any, Any], Sequence[Any]]
    to_batch: Callable[[Any, Any, Sequence[Any]], Any]


class BatchOfRows:
    """Base of a batch that is no array, of which `vmap` itself knows how to take examples."""

    @property
    def shape(self) -> tuple[Any, ...]:
        """The number of rows, and what is known of the shape of a row."""
        raise NotImplementedError


_containers: dict[type, Container] = {}
_spec_types: set[type] = set()


def register_container(
    type: type,
    *,
    to_arrays: Callable[[Any, Any], tuple[Sequence[Any], Sequence[int | None]]],
    to_example: Callable[[Any, Any, Sequence[Any]], Any],
    from_example: Callable[[Any, Any], Sequence[Any]],
    to_batch: Callable[[Any, Any, Sequence[Any]], Any],
    spec_type: type = int,
) -> None:
    """Lets `vmap` map over a type whose batch axis is not an array axis.

    In what follows, `spec` is what the user wrote for the container in
    ``in_axes`` or ``out_axes``: an instance of `spec_type`. Where ``out_axes``
    says None, `spec` is None, and the arrays have no batch axis.

    Args:
      type: the container type. Its instances, batches and examples alike, are
        treated as leaves, whether or not they are pytrees; those of its
        subclasses are not.
      to_arrays: ``(batch, spec) -> (arrays, axes)``: the arrays a batch is made
        of and the position of the batch axis in each, None where an array is
        the same for every lane.
      to_example: ``(batch, spec, arrays) -> example``: what the per-example
        function receives; `arrays` are those of `to_arrays` without the axis.
      from_example: ``(example, spec) -> arrays``: the arrays of an instance that
        the per-example function returned.
      to_batch: ``(example, spec, arrays) -> batch``: the batch to return;
        `arrays` are those of `from_example` with the batch axis first.
      spec_type: the type of specifications, such as a name. Default: int. Not a
        tuple, list or dict: those describe trees.

    Raises:
      ArgumentTypeError: `type` or `spec_type` is not a type, or the latter is
        one that describes trees.

    Example:
      An array whose axes have names, of which one counts the batch::

        @dataclass
        class Named:
            data: jax.Array
            names: tuple[str, ...]

        bx.register_container(
            Named,
            spec_type=str,
            to_arrays=lambda x, name: ([x.data], [x.names.index(name)]),
            to_example=lambda x, name, arrays: Named(
                arrays[0], tuple(n for n in x.names if n != name)
            ),
            from_example=lambda x, name: [x.data],
            to_batch=lambda x, name, arrays: Named(
                arrays[0], x.names if name is None else (name, *x.names)
            ),
        )
        bx.vmap(f, in_axes="batch", out_axes="batch")(x)
    """
    for name, value in (("type", type), ("spec_type", spec_type)):
        if not isinstance(value, _type):
            raise ArgumentTypeError(f"register_container: `{name}` must be a type, got {value!r}.")
    if issubclass(spec_type, (tuple, list, dict, NoneType, bool)):
        raise ArgumentTypeError(
            f"register_container: `spec_type` is {spec_type.__name__}, which has a meaning of its "
            "own in in_axes and out_axes. Make a class for your specifications."
        )
    _containers[type] = Container(type, spec_type, to_arrays, to_example, from_example, to_batch)
    _spec_types.add(spec_type)


_type = type


def find_container(value: Any) -> Container | None:
    """The registration of the type of `value`, or None."""
    return _containers.get(_type(value))


def batch_arrays(
    container: Container, batch: Any, spec: Any, path: str
) -> tuple[list[Any], list[int | None]]:
    """The arrays of a batch and where each has its batch axis.

    Raises:
      ArgumentTypeError: `spec` is not of the type that the container takes, or
        what the registration returned has not one axis for each array.
    """
    _check_spec(container, spec, path, "in_axes")
    arrays, axes = map(list, container.to_arrays(batch, spec))
    if len(arrays) != len(axes):
        raise ArgumentTypeError(
            f"`to_arrays`, as registered for {container.type.__name__}, returned {len(arrays)} "
            f"arrays but {len(axes)} axes for {path}: it must return an axis, or None, for each."
        )
    return arrays, axes


def example_arrays(container: Container, example: Any, spec: Any, path: str) -> list[Any]:
    """The arrays of an instance that the per-example function returned.

    Raises:
      ArgumentTypeError: `spec` is neither None nor of the type the container takes.
    """
    if spec is not None:
        _check_spec(container, spec, path, "out_axes")
    return list(container.from_example(example, spec))


def _check_spec(container: Container, spec: Any, path: str, what: str) -> None:
    if not isinstance(spec, container.spec_type):
        name = container.type.__name__
        raise ArgumentTypeError(
            f"{what} gives {spec!r} for {path}, but the batch axis of a {name} is given by a "
            f"{container.spec_type.__name__}. Give one, or None if it does not depend on the batch."
        )


def is_container(value: Any) -> bool:
    """Whether `value` is an instance of a type that is registered, with batchax or with JAX."""
    return (
        _type(value) in _containers
        or isinstance(value, BatchOfRows)
        or _compat.has_own_batches(value)
    )


def check_not_of_jax(value: Any, path: str) -> None:
    """Refuses to map over a type that JAX's registration takes apart.

    As a tree it would be taken for an example of the shape of the batch, and be wrong silently.

    Raises:
      UnsupportedError: `value` is of one.
    """
    if _compat.has_own_batches(value):
        name = _type(value).__name__
        raise UnsupportedError(
            f"{path} is a {name}, whose type says itself where its batch axis is, in a way that "
            f"batchax does not know. Map over the arrays that it is made of, as {path}.data, and "
            f"make the {name} of one example inside the function; or give it None as its axis if "
            "all examples share it; or tell batchax of it by batchax.register_container."
        )


def add_spec_type(type: type) -> None:
    """Lets instances of `type` stand for axes in ``in_axes``."""
    _spec_types.add(type)


def is_container_spec(spec: Any) -> bool:
    """Whether `spec` is of a type that some registered container takes as its axis."""
    return _type(spec) in _spec_types
