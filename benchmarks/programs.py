"""Reading programs: what a jaxpr holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr

KINDS = {
    "equations": None,
    "transposes": ("transpose",),
    "broadcasts": ("broadcast_in_dim",),
    "contractions": ("dot_general", "conv_general_dilated", "ragged_dot_general"),
    "gathers": ("gather", "dynamic_slice"),
    "scatters": (
        "scatter",
        "scatter-add",
        "scatter_add",
        "scatter_sub",
        "scatter_mul",
        "scatter_min",
        "scatter_max",
        "dynamic_update_slice",
    ),
}
"""What is counted in a jaxpr: a name for reports, and the primitives (None: all)."""


def primitives(jaxpr: Any) -> Iterator[str]:
    """The name of each equation's primitive, in `jaxpr` and the programs inside it.

    A reshape that reads its operand in another order is a transpose and a reshape.
    """
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        if eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None:
            yield "transpose"
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


def counts(histogram: Counter[str]) -> dict[str, int]:
    """How many equations of each of `KINDS` a histogram of primitives holds."""
    return {
        kind: sum(n for name, n in histogram.items() if names is None or name in names)
        for kind, names in KINDS.items()
    }
