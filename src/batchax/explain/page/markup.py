"""HTML that cannot go wrong: whatever is not made by `tag` is text, and is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from typing import Any

from batchax.execution.memory import show_bytes
from batchax.explain.account import Service, Value

SIGNS: dict[Service, tuple[str, str]] = {
    "own": ("●", "own"),
    "user": ("◆", "yours"),
    "jax": ("▲", "JAX"),
    "lanes": ("≡", "lanes"),
    "once": ("○", "once"),
}
"""For each service: its glyph, and a word for narrow places. What it means says `wording`."""

_VOID = frozenset({"meta", "input", "br", "col"})


class Html(str):
    """Markup, which goes into other markup as it is."""


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
    """An element.

    Args:
      name: such as ``"li"``.
      *children: `Html`, text (escaped), iterables of these, or None, which leaves no trace.
      **attributes: underscores stand for hyphens, one at the end for nothing (``class_``). True
        makes one without a value; False and None leave it out.

    Returns:
      The element, with everything that is not `Html` escaped.
    """
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_quoted(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{together(children)}</{name}>")


def together(children: Any) -> Html:
    """Children of an element, one after another."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, str) or not isinstance(children, Iterable):
        return Html(escape(str(children), quote=False))
    return Html("".join(together(child) for child in children))


def prose(text: str) -> Html:
    """A sentence in which code stands between backticks."""
    parts = text.split("`")
    if len(parts) % 2 == 0:  # one is by itself
        return together(text)
    return together(tag("code", part) if i % 2 else part for i, part in enumerate(parts))


def _quoted(value: Any) -> str:
    return escape(str(value), quote=True)


def hidden(*text: Any) -> Html:
    """Text for those who listen, where the eye has a sign."""
    return tag("span", text, class_="sr")


def glyph(service: Service) -> Html:
    """The sign of a service: its shape and colour both say which."""
    return tag("span", SIGNS[service][0], class_=f"glyph {service}", aria_hidden="true")


def link_to(number: str, *label: Any) -> Html:
    """A link to an equation in the flow."""
    return tag("a", label or number, href=f"#{anchor(number)}", class_="to")


def anchor(number: str) -> str:
    """The id of an equation's element."""
    return f"e{number}"


def typed(value: Value) -> Html:
    """The type of a value for all lanes, with the batch dimension marked."""
    if value.axis is None:
        return tag("code", value.batched)
    head, bracket, dims = value.batched.partition("[")
    sizes = dims.rstrip("]").split(",")
    if not bracket or value.axis >= len(sizes):
        return tag("code", value.batched)
    sizes[value.axis] = tag("b", sizes[value.axis], class_="axis")
    return tag("code", head, "[", [("," if k else "", size) for k, size in enumerate(sizes)], "]")


def extent(value: Value, lanes: int) -> int:
    """How many lanes a batched value has; 1 if it does not depend on the batch."""
    if value.axis is None:
        return 1
    sizes = value.batched.partition("[")[2].rstrip("]").split(",")
    size = sizes[value.axis] if value.axis < len(sizes) else ""
    return int(size) if size.isdigit() else lanes


def size(number: float) -> str:
    """A number of bytes for people, which per lane may be a fraction."""
    return show_bytes(round(number))


def percent(part: float, whole: float) -> str:
    """A share: "12 %", "<1 %"."""
    share = 100 * part / whole if whole else 0.0
    return "<1 %" if 0 < share < 1 else f"{share:.0f} %"


def doublings(number: float) -> float:
    """The length of a value's bar: each doubling of its bytes adds as much."""
    return math.log2(number) if number > 1 else 0.0
