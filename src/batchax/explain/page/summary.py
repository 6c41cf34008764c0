"""The top of the page: what was done to how many equations, what it costs, what memory holds."""

from __future__ import annotations

from collections import Counter

from batchax.explain.account import Account, Devices, Memory
from batchax.explain.page.details import to_line
from batchax.explain.page.markup import SIGNS, Html, glyph, link_to, percent, size, tag
from batchax.explain.text import costliest_lines
from batchax.explain.wording import SERVICES, count, show_devices, show_flops

_KINDS = ("argument", "output", "temporary", "constant")


def summary(explanation: Account) -> list[Html | None]:
    """Equations by service, and the cost of all lanes and of one."""
    counts = Counter(eqn.service for eqn in explanation.walk())
    total = sum(counts.values())
    once = counts["once"]
    said = (
        f"{count(total, 'equation')}: {total - once:,} batched, {once:,} done once for all lanes."
    )
    shares = tag(
        "div",
        [tag("i", class_=key, style=f"flex-grow:{counts[key]}") for key in SERVICES if counts[key]],
        class_="stack thin",
        aria_hidden="true",
    )
    services = [
        tag("li", glyph(key), " ", tag("b", f"{counts[key]:,}"), f" {SERVICES[key]}")
        for key in SIGNS
        if counts[key]
    ]
    return [
        tag("p", said, class_="lead"),
        shares,
        tag("ul", services, class_="services", role="list"),
        _costs(explanation),
        _lines(explanation),
        _devices(explanation.devices) if explanation.devices else None,
    ]


def _lines(explanation: Account) -> Html | None:
    """The user's lines that cost most."""
    costliest = costliest_lines(explanation)
    if not costliest:
        return None
    rows = [
        tag(
            "tr",
            tag("td", percent(share, 1.0), class_="figure"),
            tag("td", tag("code", line.source.text)),
            tag("td", to_line(line.source)),
        )
        for line, share in costliest
    ]
    table = tag("table", tag("caption", "Lines that cost most"), tag("tbody", rows))
    return tag("div", table, class_="wide")


def _devices(devices: Devices) -> Html:
    first, *others = show_devices(devices)
    said = tag("p", tag("b", "Devices: "), first, ".")
    return tag("div", said, tag("ul", [tag("li", x) for x in others]), class_="devices")


def _costs(explanation: Account) -> Html:
    work, lanes, compiled = explanation.work, explanation.lanes or 1, explanation.compiled
    heads = ["", "all lanes", "per lane", *(["by the compiler's count"] if compiled else [])]
    rows = []
    for word, show, key in (("FLOPs", show_flops, "flops"), ("Bytes", size, "bytes")):
        number = getattr(work, key)
        cells = [show(number), show(number / lanes)]
        if compiled:
            cells.append(show(getattr(compiled, key)))
        rows.append(
            tag("tr", tag("th", word, scope="row"), [tag("td", c, class_="figure") for c in cells])
        )
    note = (
        "Bytes are read and written as if each operation ran by itself."
        + " The compiler counts what is left after fusing, and a loop as one step." * bool(compiled)
    )
    return tag(
        "div",
        tag(
            "table",
            tag("caption", "Cost of one call"),
            tag("thead", tag("tr", [tag("th", h, scope="col") for h in heads])),
            tag("tbody", rows),
            class_="costs",
        ),
        tag("p", note, class_="note"),
        class_="wide",
    )


def memory(account: Memory) -> list[Html | None]:
    """Peak memory as a bar, and below it what is held then."""
    parts = [
        ("argument", "arguments", account.arguments),
        ("output", "outputs", account.outputs),
        ("temporary", "temporaries", account.temporaries),
    ]
    whole = max(account.peak, sum(part[2] for part in parts)) or 1
    bar = tag(
        "div",
        [
            tag("i", class_=kind, style=f"width:{100 * number / whole:.4f}%", title=word)
            for kind, word, number in parts
        ],
        class_="stack",
        aria_hidden="true",
    )
    key = [
        tag(
            "li",
            tag("i", class_=f"swatch {kind}", aria_hidden="true"),
            f" {word} ",
            tag("b", size(number)),
            f" ({percent(number, whole)})",
        )
        for kind, word, number in parts
    ]
    return [
        tag(
            "p",
            "Peak: ",
            tag("b", size(account.peak)),
            ", by the compiler's account.",
            class_="lead",
        ),
        bar,
        tag("ul", key, class_="services", role="list"),
        _held(account, whole) if account.held else None,
    ]


def _held(account: Memory, whole: int) -> Html:
    heads = [tag("th", h, scope="col") for h in ("kind", "made by", "type", "bytes", "equation")]
    rows = [
        tag(
            "tr",
            tag(
                "td",
                tag("i", class_=f"swatch {held.kind}", aria_hidden="true"),
                f" {held.kind}",
            ),
            tag("th", tag("code", held.what), scope="row"),
            tag("td", tag("code", held.type)),
            tag("td", _measure(held.kind, held.bytes, whole)),
            tag("td", link_to(held.equation) if held.equation else "-"),
        )
        for held in account.held
    ]
    table = tag(
        "table",
        tag("caption", "Held at the worst moment"),
        tag("thead", tag("tr", heads)),
        tag("tbody", rows),
    )
    return tag("div", table, class_="wide")


def _measure(kind: str, number: int, whole: int) -> Html:
    style = f"--share:{number / whole:.5f}"
    bar = tag("span", tag("i", class_=kind, style=style), class_="share", aria_hidden="true")
    return tag("span", bar, f" {size(number)}, {percent(number, whole)}", class_="measure")
