"""Updates the figures that pages quote from the tables in docs/benchmarks. `make docs` runs it.

A source names the page, the row, and the column of a table, and the text before the figure if the
cell has several. Or it quotes words of the page, with `*` in place of the figure. A page gives the
sources in comments behind its figures:

    0.14<!-- nests; NUTS, 100 chains; auto -->    1/7<!-- nests; `auto` takes * of the time -->

or in one comment at its end, a line each, where brackets mark the figure in its words:

    <!-- figures
    chains take [0.14] of the time = nests; NUTS, 100 chains; auto
    -->

A figure keeps its form: the number of digits, the unit, the fraction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_QUOTED = re.compile(r"(?P<figure>(?:1/)?\d[\d.]*(?: (?:s|ms|MB|kB))?)x?<!-- (?P<source>.+?) -->")
_LISTED = re.compile(r"^(?P<words>.*\[[^\]]+\].*) = (?P<source>.+)$", re.MULTILINE)
_NUMBER = r"(\d[\d,.]*\d|\d)(?: (s|ms|MB|kB)\b)?"
_UNITS = {"": 1, "s": 1, "ms": 1e-3, "MB": 1e6, "kB": 1e3}


def quotes(text: str) -> Iterator[tuple[slice, str, str]]:
    """Yields where each figure stands, its source, and the figure that the source has now."""
    for match in _QUOTED.finditer(text):
        yield slice(*match.span("figure")), match["source"], _now(match["figure"], match["source"])
    body, _, listed = text.partition("<!-- figures\n")
    for match in _LISTED.finditer(listed):
        before, figure, after = re.split(r"[\[\]]", match["words"])
        if body.count(before + figure + after) != 1:
            raise LookupError(f"the page has not once: {before}{figure}{after}")
        start = body.index(before + figure + after) + len(before)
        yield (
            slice(start, start + len(figure)),
            match["source"],
            _now(figure, match["source"]),
        )


def updated(text: str) -> str:
    """Returns `text` with the figures that the tables have now, in its list of sources, too."""
    changed = [(place, source, now) for place, source, now in quotes(text) if text[place] != now]
    for place, source, now in sorted(changed, key=lambda quote: -quote[0].start):
        old = text[place]
        text = text[: place.start] + now + text[place.stop :]
        text = re.sub(
            rf"^(.*)\[{re.escape(old)}\](.* = {re.escape(source)})$",
            lambda match, now=now: f"{match[1]}[{now}]{match[2]}",
            text,
            flags=re.MULTILINE,
        )
    return text


def _now(figure: str, source: str) -> str:
    return _in_the_form_of(figure, _found(*map(str.strip, source.split(";"))))


def _found(page: str, *where: str) -> float:
    """The number at a place of a page."""
    text = (ROOT / "docs" / "benchmarks" / f"{page}.md").read_text()
    if len(where) == 1:
        before, after = map(re.escape, where[0].split("*"))
        found = re.search(f"{before}{_NUMBER}{after}", text)
    else:
        cell = _cell(text, *where[:2])
        found = re.search(
            f"^{''.join(map(re.escape, where[2:]))} ?{_NUMBER}", cell.replace("; ", "\n"), re.M
        )
    if found is None:
        raise LookupError(f"docs/benchmarks/{page}.md has no number at {'; '.join(where)}")
    unit = found[2] or where[-1].rpartition(", ")[2]  # of a whole column
    return float(found[1].replace(",", "")) * _UNITS.get(unit, 1)


def _cell(text: str, row: str, column: str) -> str:
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in x.strip("|").split("|")] for x in table.splitlines()]
        for line in lines[2:]:
            if line[0] == row and column in lines[0]:
                return line[lines[0].index(column)]
    return ""


def _in_the_form_of(figure: str, value: float) -> str:
    number, _, unit = figure.removeprefix("1/").partition(" ")
    value /= _UNITS[unit]
    if figure.startswith("1/"):
        value = max(value, 1 / value)
    if "." in number:
        return figure.replace(number, f"{value:.{len(number.partition('.')[2])}f}")
    digits = len(number.rstrip("0"))
    if _rounded(value, digits) == float(number):  # 1/20 may be 1/21
        return figure
    return figure.replace(number, f"{_rounded(value, max(2, digits)):.0f}")


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text()
        if (new := updated(text)) != text:
            page.write_text(new)
            sys.stdout.write(f"{page.relative_to(ROOT)} quotes other figures now.\n")
