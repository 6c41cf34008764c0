"""Reading programs: what a jaxpr holds, and whether two compiled programs are the same."""

from __future__ import annotations

import re
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


def normalised_hlo(text: str) -> str:
    """Optimised HLO without what depends on names and source lines alone."""
    text = re.sub(r"/\*.*?\*/", "", text)
    text = re.sub(r',? ?metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', "", text)
    # Before the first computation: the module's name, and tables of source lines.
    lines = text.splitlines()
    first = next((i for i, x in enumerate(lines) if x.startswith(("%", "ENTRY"))), 0)
    lines = [re.sub(r"[\w.\-]+: ", "", x) if x.endswith("{") else x for x in lines[first:]]
    names: dict[str, str] = {}
    return re.sub(
        r"%[\w.\-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), "\n".join(lines)
    )


def operations(hlo: str) -> Counter[str]:
    """How often each operation occurs in normalised HLO."""
    return Counter(re.findall(r"= (?:\([^=]*?\)|\S+) ([a-z][\w\-]*)\(", hlo))
