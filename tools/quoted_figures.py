"""Figures that pages quote of the tables in docs/benchmarks: `make docs` makes them those.

A figure says in a comment after it where it is from, by the page, the row and the column of its
table, and what comes before it there if there are several in a place; or by words of the page in
which `*` stands for it:

    0.14<!-- nests; NUTS, 100 chains; auto -->    1/7<!-- nests; `auto` takes * of the time -->

It keeps the form that it has: so many digits, a unit, a fraction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_QUOTED = re.compile(r"(?P<figure>(?:1/)?\d[\d.]*(?: (?:s|ms|MB|kB))?)<!-- (?P<source>.+?) -->")
_NUMBER = r"(\d[\d,.]*\d|\d)(?: (s|ms|MB|kB)\b)?"
_UNITS = {"": 1, "s": 1, "ms": 1e-3, "MB": 1e6, "kB": 1e3}


def quotes(text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Each figure that says where it is from, and what it is there, in the form that it has."""
    for match in _QUOTED.finditer(text):
        figure, *source = match["figure"], *map(str.strip, match["source"].split(";"))
        yield match, _in_the_form_of(figure, _found(*source))


def updated(text: str) -> str:
    """`text` with what its figures are now."""
    parts, end = [], 0
    for match, now in quotes(text):
        parts += [text[end : match.start()], now]
        end = match.end("figure")
    return "".join([*parts, text[end:]])


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
