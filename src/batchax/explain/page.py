"""An explanation as a page: one file that needs nothing else, and that opens offline.

`page.html` is the same for all explanations: style, sections, and a script that draws them. Here it
is given the explanation as JSON.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from batchax.analysis.differences import is_installed, shown_place
from batchax.explain.account import Account, Equation, Source, Work, as_plain
from batchax.explain.findings.operations import price
from batchax.explain.text import Line, costliest_lines, lines_of, own_line
from batchax.explain.wording import (
    SERVICES,
    Again,
    fold,
    show_devices,
    show_masked,
    show_options,
    show_repeats,
    show_unmeasured,
)

_MOST_LINKS = 40  # from a line to its equations: those that cost most


def as_page(explanation: Account) -> str:
    """Returns a whole HTML document, with its style and script in it, which fetches nothing."""
    data = json.dumps(explanation.to_dict() | {"shown": _shown(explanation)}, separators=(",", ":"))
    # A script element ends at "</script", and "<!--" changes how it is read: neither can occur.
    given = {"@policy@": _policy(), "@data@": data.replace("<", "\\u003c")}
    return re.sub("|".join(given), lambda match: given[match[0]], _template())


def as_embedded_page(explanation: Account) -> str:
    """Returns the page in an iframe, for notebooks, whose styles and its own do not meet."""
    # As high as a short page, at most as high as leaves the notebook in sight.
    height = min(900, 560 + 48 * sum(1 for _ in explanation.walk()))
    return (
        f'<iframe srcdoc="{escape(as_page(explanation))}" sandbox="allow-scripts" '
        f'title="How {escape(explanation.name)} was batched" '
        f'style="width:100%;height:{height}px;border:1px solid #8888;border-radius:6px"></iframe>'
    )


@cache
def _template() -> str:
    return files("batchax.explain").joinpath("page.html").read_text(encoding="utf-8")


@cache
def _policy() -> str:
    """Returns what a browser may use: the style and the script of the template, known by their
    hashes.
    """
    hashes = {}
    for name in ("style", "script"):
        (text,) = re.findall(rf"<{name}>(.*?)</{name}>", _template(), re.DOTALL)
        hashes[name] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; "
        f"script-src 'sha256-{hashes['script']}'; base-uri 'none'; form-action 'none'"
    )


def _shown(explanation: Account) -> dict[str, Any]:
    """Returns what the page says besides the explanation's own data: sentences, and lines."""
    equations = {eqn.number: eqn for eqn in explanation.walk()}
    by_itself = lines_of(explanation, _by_itself)
    options = {name: x for name, x in explanation.options.items() if x is not None}
    words = {None: "all at once", "loop": "Python loop"}
    return {
        "services": SERVICES,
        "options": [show_options({name: x}) for name, x in options.items()],
        "devices": show_devices(explanation.devices) if explanation.devices else [],
        "costliest": [
            {"source": as_plain(line.source), "share": share}
            for line, share in costliest_lines(explanation)
        ],
        "whole": as_plain(sum((line.work for line in by_itself), Work())),
        "lines": list(map(_line, _ordered_lines(explanation, by_itself))),
        "repeats": dict(_repeats(explanation.equations)),
        "masked": {n: why for n, eqn in equations.items() if (why := show_masked(eqn))},
        "timings": [
            show_options(t.advice) or words.get(t.batch_size, f"{t.batch_size}")
            for t in explanation.timings
        ],
        "unmeasured": show_unmeasured(explanation),
    }


def _by_itself(source: Source) -> Source:
    return replace(source, called_from=None)


def _ordered_lines(explanation: Account, by_itself: Sequence[Line]) -> list[Line]:
    """Lists the user's lines by file, libraries that they call counted; then lines of libraries."""
    place = lambda line: (line.source.file, line.source.line)
    own = [line for line in lines_of(explanation, own_line) if not is_installed(line.source.file)]
    of_libraries = [line for line in by_itself if is_installed(line.source.file)]
    ordered = [*sorted(own, key=place), *sorted(of_libraries, key=place)]
    return [line for line in ordered if line.source.file]


def _line(line: Line) -> dict[str, Any]:
    costliest = sorted(line.equations, key=lambda e: -price(e.work))[:_MOST_LINKS]
    linked = {eqn.number for eqn in costliest}
    return {
        "source": as_plain(line.source),
        "place": shown_place(line.source.file, line.source.line),
        "work": as_plain(line.work),
        "equations": [eqn.number for eqn in line.equations if eqn.number in linked],
        "count": len(line.equations),
    }


def _repeats(equations: Sequence[Equation]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterates over the first of equations that repeat others: how many these are, and what they
    repeat.
    """
    for entry in fold(equations):
        if isinstance(entry, Again):
            like = [eqn.number for eqn in entry.like]
            yield (
                entry.number,
                {"count": len(entry.equations), "like": like, "said": show_repeats(entry)},
            )
        else:
            yield from _repeats(entry.parts)
