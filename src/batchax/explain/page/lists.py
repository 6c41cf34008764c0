"""The lists of the page: what was found, the user's lines, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from batchax.explain.account import Account, Equation, Source, Timing, Work
from batchax.explain.page.details import source_anchor
from batchax.explain.page.markup import Html, link_to, percent, size, tag
from batchax.explain.wording import count, show_flops, show_seconds

_MANY = 12
"""More links than this are folded away."""


def findings(explanation: Account) -> Html:
    """What costs more than it would have to, dearest first, each with what to do."""
    if not explanation.findings:
        return tag("p", "Nothing found that costs more than it would have to.")
    primitives = {eqn.number: eqn.primitive for eqn in explanation.walk()}
    items = []
    for finding in sorted(explanation.findings, key=lambda f: -f.cost):
        known = finding.equation in primitives
        label = f"Go to equation {finding.equation}, {primitives.get(finding.equation)}"
        items.append(
            tag(
                "li",
                tag("h3", finding.kind),
                tag("p", finding.message),
                tag("p", tag("b", "What to do: "), finding.remedy, class_="remedy"),
                tag("p", link_to(finding.equation, label)) if known else None,
                class_="finding",
            )
        )
    return tag("ol", items, class_="findings", role="list")


def sources(explanation: Account) -> list[Html]:
    """The user's lines by file, with what each made and its share of the cost."""
    made: dict[Source, list[Equation]] = {}
    for eqn in explanation.walk():
        made.setdefault(eqn.source, []).append(eqn)
    own = {source: sum(map(_alone, eqns), Work()) for source, eqns in made.items()}
    whole = sum(own.values(), Work())
    known = sorted((s for s in made if s.file), key=lambda s: (s.file, s.line))
    shown = []
    for file, lines in groupby(known, key=lambda s: s.file):
        rows = [_line(source, made[source], own[source], whole) for source in lines]
        heads = ("line", "code", "share of FLOPs", "share of bytes", "equations")
        table = tag(
            "table",
            tag("caption", f"Lines of {file}", class_="sr"),
            tag("thead", tag("tr", [tag("th", h, scope="col") for h in heads])),
            tag("tbody", rows),
            class_="lines",
        )
        shown += [tag("h3", tag("code", file)), tag("div", table, class_="wide")]
    left = sum(len(eqns) for source, eqns in made.items() if not source.file)
    if left:
        shown.append(tag("p", f"{count(left, 'equation')} without a known line.", class_="note"))
    return shown


def _alone(eqn: Equation) -> Work:
    """The work of an equation without that of its parts, which have lines of their own."""
    inside = sum((part.work for part in eqn.parts), Work())
    return Work(
        max(eqn.work.flops - inside.flops, 0.0),
        max(eqn.work.bytes - inside.bytes, 0.0),
    )


def _line(source: Source, eqns: list[Equation], work: Work, whole: Work) -> Html:
    links = tag(
        "span", [(link_to(eqn.number, f"{eqn.number} {eqn.primitive}"), " ") for eqn in eqns]
    )
    if len(eqns) > _MANY:
        links = tag("details", tag("summary", count(len(eqns), "equation")), links)
    return tag(
        "tr",
        tag("th", source.line or "?", scope="row"),
        tag("td", tag("code", source.text), class_="code"),
        tag("td", _share(work.flops, whole.flops, show_flops(work.flops))),
        tag("td", _share(work.bytes, whole.bytes, size(work.bytes))),
        tag("td", links, class_="links"),
        id=source_anchor(source),
        tabindex="-1",
    )


def _share(part: float, whole: float, figure: str) -> Html:
    style = f"--share:{part / whole if whole else 0:.5f}"
    bar = tag("span", tag("i", style=style), class_="share", aria_hidden="true")
    return tag("span", bar, f" {percent(part, whole)} ({figure})", class_="measure")


def timings(explanation: Account) -> Html:
    """What the charts show, as a table."""
    order: Sequence[Timing] = sorted(
        explanation.timings,
        key=lambda t: (t.batch_size == "loop", t.batch_size is None, str(t.batch_size).zfill(20)),
    )
    words = {None: "all at once", "loop": "Python loop"}
    rows = [
        tag(
            "tr",
            tag("th", words.get(t.batch_size) or f"{t.batch_size:,}", scope="row"),
            tag("td", show_seconds(t.seconds), class_="figure"),
            tag(
                "td", f"{show_seconds(t.spread[0])} to {show_seconds(t.spread[1])}", class_="figure"
            ),
            tag("td", size(t.peak) if t.peak is not None else "-", class_="figure"),
        )
        for t in order
    ]
    heads = ("lanes at a time", "median time", "fastest to slowest", "peak memory")
    table = tag(
        "table",
        tag("caption", "Measured"),
        tag("thead", tag("tr", [tag("th", h, scope="col") for h in heads])),
        tag("tbody", rows),
    )
    return tag("div", table, class_="wide")
