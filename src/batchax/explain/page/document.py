"""An explanation as a page: one file that needs nothing else, and that opens offline."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

from batchax.explain.account import Account
from batchax.explain.page.chart import charts
from batchax.explain.page.flow import flow, legend
from batchax.explain.page.lists import findings, sources, timings
from batchax.explain.page.markup import Html, tag
from batchax.explain.page.steps import steps
from batchax.explain.page.summary import memory, summary
from batchax.explain.wording import count

_LARGE = 300
"""From so many equations on, a browser lays out only what is in sight."""


def as_page(explanation: Account) -> str:
    """A whole document, with its style and script in it.

    Args:
      explanation: what to show.

    Returns:
      HTML that fetches nothing, and forbids itself to.
    """
    style, script = _resource("page.css"), _resource("page.js")
    policy = (
        f"default-src 'none'; style-src-elem 'sha256-{_digest(style)}'; "
        # Bars and rails have their lengths and places in `style` attributes.
        f"style-src-attr 'unsafe-inline'; script-src 'sha256-{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"{explanation.name}, batched over {count(explanation.lanes, 'lane')}"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("style", Html(style)),
    )
    size = sum(1 for _ in explanation.walk())
    body = tag(
        "body",
        tag("a", "Skip to the program", href="#program", class_="skip"),
        _header(explanation),
        tag("main", _sections(explanation)),
        tag("footer", tag("p", "Made by batchax. Nothing on this page is fetched from elsewhere.")),
        tag("script", Html(script)),
        class_="large" if size > _LARGE else None,
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def as_embedded_page(explanation: Account) -> str:
    """The page in a frame, for notebooks, whose styles and its own do not meet.

    Args:
      explanation: what to show.

    Returns:
      An iframe as high as a short page, at most as high as leaves the notebook in sight.
    """
    height = min(900, 560 + 48 * sum(1 for _ in explanation.walk()))
    return tag(
        "iframe",
        srcdoc=as_page(explanation),
        title=f"How {explanation.name} was batched",
        sandbox="allow-scripts",
        style=f"width:100%;height:{height}px;border:1px solid #8888;border-radius:6px",
    )


def _header(explanation: Account) -> Html:
    options = [(k, v) for k, v in explanation.options.items() if v is not None]
    return tag(
        "header",
        tag(
            "div",
            tag("p", "How it was batched", class_="kicker"),
            tag("h1", tag("code", explanation.name)),
            tag(
                "p",
                tag("b", count(explanation.lanes, "lane"), class_="axis"),
                [(" · ", tag("code", f"{key}={value!r}")) for key, value in options],
                class_="options",
            ),
        ),
        tag("button", "Dark", id="theme", type="button", aria_pressed="false", hidden=True),
    )


def _sections(explanation: Account) -> list[Html]:
    shown = [
        _section("findings", "Findings", findings(explanation)),
        _section("summary", "Summary", summary(explanation)),
        _section("program", "Program", _program(explanation)),
        _section("lines", "Source lines", sources(explanation)),
    ]
    if explanation.memory:
        shown.insert(2, _section("memory", "Memory", memory(explanation.memory)))
    if explanation.steps:
        shown.append(_section("steps", "Loops and branches", steps(explanation)))
    if explanation.timings:
        drawn = tag("div", charts(explanation), class_="charts")
        shown.append(_section("timings", "Timings", [drawn, timings(explanation)]))
    return shown


def _section(name: str, title: str, *content) -> Html:
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, content, id=name, aria_labelledby=f"{name}-title", tabindex="-1")


def _program(explanation: Account) -> list[Html]:
    how = (
        "Enter shows the details of an equation. Down and Up go to the next and the one before, "
        "Right opens what is inside, Left closes it or goes out. / goes to the search, whose Enter "
        "goes to the next that is found, and Escape shows all."
    )
    search = tag(
        "p",
        tag("label", "Find by name, primitive, rule, or line: ", for_="find"),
        tag("input", id="find", type="search", size=28, autocomplete="off", aria_keyshortcuts="/"),
        " ",
        tag("output", id="found", for_="find"),
        class_="find",
        hidden=True,
    )
    tools = tag(
        "p",
        tag("button", "Open all loops and branches", id="open", type="button"),
        tag("button", "Close all", id="close", type="button"),
        class_="tools",
        hidden=True,
    )
    inspector = tag(
        "aside",
        tag("p", "Point at an equation, or focus it, to see its details here.", class_="head"),
        id="inspector",
        aria_label="Details of the equation in focus",
        hidden=True,
    )
    return [
        legend(explanation),
        search,
        tag("p", how, class_="how", hidden=True),
        tools,
        tag(
            "div",
            tag("div", flow(explanation), class_="flow"),
            inspector,
            class_="beside",
        ),
    ]


@cache
def _resource(name: str) -> str:
    return files("batchax.explain.page").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
