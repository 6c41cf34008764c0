"""The lists of the page: what was found, the user's lines, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from batchax.explain.account import Account, Equation, Source, Timing, Work
from batchax.explain.findings.operations import price
from batchax.explain.page.details import source_anchor, to_line
from batchax.explain.page.markup import Html, link_to, percent, prose, size, tag
from batchax.explain.text import lines_of, own_line
from batchax.explain.wording import (
    count,
    show_flops,
    show_options,
    show_seconds,
    show_unmeasured,
)
from batchax.programs.source_lines import is_installed, shown_place

_MANY = 12
"""More links than this are folded away."""

_MOST_LINKS = 40
"""More than so many are not shown."""


def findings(explanation: Account) -> Html:
    """What costs more than it would have to, most expensive first, each with what to do."""
    if not explanation.findings:
        return tag("p", "Nothing found that costs more than it would have to.")
    equations = {eqn.number: eqn for eqn in explanation.walk()}
    items = []
    for finding in sorted(explanation.findings, key=lambda f: -f.cost):
        eqn = equations.get(finding.equation)
        items.append(
            tag(
                "li",
                tag("h3", finding.kind),
                tag("p", prose(finding.message)),
                tag("p", tag("b", "What to do: "), prose(finding.remedy), class_="remedy"),
                None if eqn is None else tag("p", _place(eqn)),
                class_="finding",
            )
        )
    return tag("ol", items, class_="findings", role="list")


def sources(explanation: Account) -> list[Html]:
    """The user's lines by file, with what each made and its share of the cost."""
    by_itself = lines_of(explanation, _by_itself)
    whole = sum((line.work for line in by_itself), Work())
    # A line of the user's counts for the libraries that it calls, whose lines come after those.
    own = [line for line in lines_of(explanation, own_line) if not is_installed(line.source.file)]
    of_libraries = [line for line in by_itself if is_installed(line.source.file)]
    place = lambda line: (line.source.file, line.source.line)
    ordered = [*sorted(own, key=place), *sorted(of_libraries, key=place)]
    shown = []
    for file, lines in groupby(
        (k for k in ordered if k.source.file), key=lambda line: line.source.file
    ):
        rows = [_line(line.source, line.equations, line.work, whole) for line in lines]
        heads = ("line", "code", "share of FLOPs", "share of bytes", "equations")
        table = tag(
            "table",
            tag("caption", f"Lines of {file}", class_="sr"),
            tag("thead", tag("tr", [tag("th", h, scope="col") for h in heads])),
            tag("tbody", rows),
            class_="lines",
        )
        shown += [tag("h3", tag("code", file)), tag("div", table, class_="wide")]
    left = sum(len(line.equations) for line in by_itself if not line.source.file)
    if left:
        shown.append(tag("p", f"{count(left, 'equation')} without a known line.", class_="note"))
    return shown


def _by_itself(source: Source) -> Source:
    return replace(source, called_from=None)


def _place(eqn: Equation) -> list[Html | str | None]:
    """Links to the equation that a finding is about, and to its line."""
    line = own_line(eqn.source)
    label = f"Go to equation {eqn.number}, {eqn.primitive}"
    if not line.file:
        return [link_to(eqn.number, label)]
    return [link_to(eqn.number, label), ", ", to_line(line), ": ", tag("code", line.text)]


def _line(source: Source, eqns: Sequence[Equation], work: Work, whole: Work) -> Html:
    costliest = {e.number for e in sorted(eqns, key=lambda e: -price(e.work))[:_MOST_LINKS]}
    links = tag(
        "span",
        [
            (link_to(eqn.number, f"{eqn.number} {eqn.primitive}"), " ")
            for eqn in eqns
            if eqn.number in costliest
        ],
        f"and {len(eqns) - _MOST_LINKS:,} that cost less" if len(eqns) > _MOST_LINKS else None,
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
        data_place=shown_place(source.file, source.line),
    )


def _share(part: float, whole: float, figure: str) -> Html:
    style = f"--share:{part / whole if whole else 0:.5f}"
    bar = tag("span", tag("i", style=style), class_="share", aria_hidden="true")
    return tag("span", bar, f" {percent(part, whole)} ({figure})", class_="measure")


def timings(explanation: Account) -> list[Html | None]:
    """What the charts show, as a table, and what is not in it."""
    order: Sequence[Timing] = sorted(
        explanation.timings,
        key=lambda t: (
            bool(t.advice),
            t.batch_size == "loop",
            t.batch_size is None,
            str(t.batch_size).zfill(20),
        ),
    )
    words = {None: "all at once", "loop": "Python loop"}
    rows = [
        tag(
            "tr",
            tag(
                "th",
                show_options(t.advice) or words.get(t.batch_size) or f"{t.batch_size:,}",
                scope="row",
            ),
            tag("td", show_seconds(t.seconds), class_="figure"),
            tag(
                "td", f"{show_seconds(t.spread[0])} to {show_seconds(t.spread[1])}", class_="figure"
            ),
            tag("td", size(t.peak) if t.peak is not None else "-", class_="figure"),
            tag("td", "-" if t.compiling is None else show_seconds(t.compiling), class_="figure"),
        )
        for t in order
    ]
    heads = ("lanes at a time", "median time", "fastest to slowest", "peak memory", "compiled in")
    table = tag(
        "table",
        tag("caption", "Measured"),
        tag("thead", tag("tr", [tag("th", h, scope="col") for h in heads])),
        tag("tbody", rows),
    )
    left = show_unmeasured(explanation)
    return [tag("div", table, class_="wide"), tag("p", left, class_="note") if left else None]
