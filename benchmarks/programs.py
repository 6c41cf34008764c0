"""Reading programs: what a jaxpr holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def primitives(jaxpr: Any) -> Iterator[str]:
    """The name of each equation's primitive, in `jaxpr` and the programs inside it."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for inner in _inner_programs(list(eqn.params.values())):
            yield from primitives(inner)


def _inner_programs(params: Any) -> Iterator[Any]:
    for value in params:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _inner_programs(value)
