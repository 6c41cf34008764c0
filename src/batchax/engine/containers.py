"""Types of the user's whose batch axis is not an array axis.

A registered container is one value to the user: a batch of it goes in, the
per-example function sees one element, and a batch of it comes out. What it is
made of, and where the batch axis of each part is, its registration says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchax.errors import ArgumentTypeError


@dataclass(frozen=True)
class Container:
    """How batches of one type are taken apart and put together."""

    type: type
    spec_type: type
    to_arrays: Callable[[Any, Any], tuple[Sequence[Any], Sequence[int | None]]]
    to_example: Callable[[Any, Any, Sequence[Any]], Any]
    from_example: Callable[[Any, Any], Sequence[Any]]
    to_batch: Callable[[Any, Any, Sequence[Any]], Any]


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
    ``in_axes`` or ``out_axes``: an instance of `spec_type`.

    Args:
      type: the container type. Its instances, batches and examples alike, are
        treated as leaves.
      to_arrays: ``(batch, spec) -> (arrays, axes)``: the arrays a batch is made
        of and the position of the batch axis in each, None where an array is
        the same for every lane.
      to_example: ``(batch, spec, arrays) -> example``: what the per-example
        function receives; `arrays` are those of `to_arrays` without the axis.
      from_example: ``(example, spec) -> arrays``: the arrays of an instance that
        the per-example function returned.
      to_batch: ``(example, spec, arrays) -> batch``: the batch to return;
        `arrays` are those of `from_example` with the batch axis first.
      spec_type: the type of specifications, such as a name. Default: int.

    Raises:
      ArgumentTypeError: `type` or `spec_type` is not a type.
    """
    for name, value in (("type", type), ("spec_type", spec_type)):
        if not isinstance(value, _type):
            raise ArgumentTypeError(f"register_container: `{name}` must be a type, got {value!r}.")
    _containers[type] = Container(type, spec_type, to_arrays, to_example, from_example, to_batch)
    _spec_types.add(spec_type)


_type = type


def find_container(value: Any) -> Container | None:
    """The registration of the type of `value`, or None."""
    return _containers.get(_type(value))


def is_container(value: Any) -> bool:
    """Whether `value` is an instance of a registered container type."""
    return _type(value) in _containers


def is_container_spec(spec: Any) -> bool:
    """Whether `spec` is of a type that some registered container takes as its axis."""
    return _type(spec) in _spec_types
