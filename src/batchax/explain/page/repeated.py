"""Equations that do what others do, as one row of the program: short, and folded away."""

from __future__ import annotations

from collections.abc import Iterator

from batchax.explain.account import Equation
from batchax.explain.page.markup import Html, anchor, link_to, tag
from batchax.explain.wording import Again, told_again


def again(repeated: Again, row: int) -> Html:
    """The row of equations that repeat those before them, which have all the details."""
    entries = [
        _entry(eqn, other)
        for i, eqn in enumerate(repeated.equations)
        for eqn, other in _pairs(eqn, repeated.like[i % len(repeated.like)])
    ]
    return tag(
        "li",
        tag(
            "details",
            tag("summary", "\u2026 ", told_again(repeated)),
            tag("ol", entries, role="list", aria_label="Equations that repeat others"),
        ),
        class_="again",
        style=f"grid-row:{row}",
    )


def _pairs(eqn: Equation, other: Equation) -> Iterator[tuple[Equation, Equation]]:
    """An equation and all inside it, each with what it is like."""
    return zip(eqn.walk(), other.walk(), strict=True)


def _entry(eqn: Equation, other: Equation) -> Html:
    made = ", ".join(v.name for v in eqn.outputs) or "_"
    taken = " ".join(v.name for v in eqn.inputs)
    return tag(
        "li",
        tag("span", eqn.number, class_="number"),
        f" {made} = {eqn.primitive} {taken}, like ",
        link_to(other.number),
        id=anchor(eqn.number),
        tabindex="-1",
    )
