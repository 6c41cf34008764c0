"""Findings about how rows of different lengths run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from batchax.analysis.cost import STEP
from batchax.explain.account import Finding, Work
from batchax.explain.findings.operations import FindingContext, price
from batchax.explain.wording import show_work
from batchax.jaxprs.error_format import count
from batchax.rows.buckets import bucket
from batchax.rows.building import elements_of
from batchax.rows.call import NotedSize
from batchax.rows.sizes import depends_on_sizes

_ENOUGH = 1.5  # places for each element, up to which padding, or unused capacity, is ignored
_MOST_BUCKETS = 8  # that are advised: each is a program to compile
_NEARLY = 1.2  # times the least waste: fewer buckets that come so close are advised instead
_HELPS = 0.9  # of the waste without buckets; they are not advised for a smaller gain


def _facts(context: FindingContext, about: str) -> list[dict[str, Any]]:
    return [details for kind, details in context.recorder.facts if kind == about]


def padding(context: FindingContext) -> Iterator[Finding]:
    """Finds regions that run padded. Their price is the share of their work that is for padding."""
    regions = _facts(context, "region")
    padded = [r for r in regions if r["layout"] == "padded" and _sized_operations(r)]
    if not padded or _facts(context, "groups"):  # grouped after an attempt to pad them
        return
    # Regions of one program hold the same rows.
    rows_of = list(dict.fromkeys(max(r["rows"], key=_places) for r in padded))
    places = sum(map(_places, rows_of))
    exact = all(s.lengths is not None for sizes in rows_of for s in sizes)
    elements = sum(map(_elements, rows_of))
    if not elements or places <= _ENOUGH * elements:
        return
    eqns = [e for e in context.equations if e.rule != "rows.packed"]
    work = sum((e.work for e in eqns), Work())
    rows = count(sum(sizes[0].rows for sizes in rows_of), "row")
    rows += " on each device" * bool(_facts(context, "dealt"))
    yield Finding(
        "ragged rows run padded",
        f"{_described(regions)} Padded, {rows} take {count(places, 'place')} for "
        f"{'' if exact else 'at most '}{count(elements, 'element')}: "
        f"{places / elements:.2f} for each, and {show_work(work)}.",
        equation="",
        cost=(1 - elements / places) * price(work),
        **_remedy(context, rows_of, places / elements, exact),
    )


_Sizes = tuple[NotedSize, ...]
"""The sizes of rows, along each of their ragged axes."""


def _places(sizes: _Sizes) -> int:
    return sizes[0].rows * math.prod(s.bound for s in sizes)


def _elements(sizes: _Sizes) -> int:
    """Counts the elements, or says how many there are at most."""
    if any(s.lengths is None for s in sizes):
        return sizes[0].capacity if len(sizes) == 1 else _places(sizes)
    return int(elements_of(tuple(s.lengths for s in sizes)).sum())  # pyright: ignore


def _sized_operations(region: dict[str, Any]) -> int:
    return sum(depends_on_sizes(step.eqn) for step in region["steps"])


def _described(regions: Sequence[dict[str, Any]]) -> str:
    """Tells the layouts of the regions and how many operations each has."""
    by_layout: dict[str, tuple[int, int]] = {}
    for region in regions:
        n = _sized_operations(region)
        if n:
            k, m = by_layout.get(region["layout"], (0, 0))
            by_layout[region["layout"]] = k + 1, m + n
    layouts = [
        f"{count(m, 'operation')} {layout} in {count(k, 'region')}"
        for layout, (k, m) in by_layout.items()
    ]
    return f"Rows run with {' and '.join(layouts)}."


def _remedy(
    context: FindingContext, rows_of: Sequence[_Sizes], waste: float, exact: bool
) -> dict[str, Any]:
    if context.options.get("layout") == "padded":
        remedy = 'Remove layout="padded": operations then run packed where that costs less.'
        return {"remedy": remedy, "advice": {"layout": "auto"}}
    if not exact:
        least = "Lower max_length to the longest row (x.with_max_length)"
        remedy = f"{least}, or pass buckets=4, so that rows of similar length run together."
        if context.options.get("buckets") is not None:
            return {"remedy": remedy}
        return {"remedy": remedy, "advice": {"buckets": 4}, "otherwise": f"{least}."}
    cut = "Cut the longest rows in two, or run them in a separate call."
    if context.options.get("buckets") is not None:
        number = 2 * len(rows_of)
        remedy = f"Pass buckets={number}: each bucket is padded to its own longest row."
        return {"remedy": remedy, "advice": {"buckets": number}, "otherwise": cut}
    best = _best_buckets(max(rows_of, key=_places), waste)
    if best is None:
        return {"remedy": cut}
    number, rest = best
    remedy = f"Pass buckets={number}, which needs {rest:.2f} places for each element."
    return {"remedy": remedy, "advice": {"buckets": number}, "otherwise": cut}


def _best_buckets(sizes: _Sizes, waste: float) -> tuple[int, float] | None:
    """Returns the fewest buckets that do nearly as well as eight do, and their waste; None if none
    help.
    """
    lengths = sizes[0].lengths if len(sizes) == 1 else tuple(s.lengths for s in sizes)
    wastes = [(k, bucket(lengths, k).waste) for k in range(2, _MOST_BUCKETS + 1)]
    least = min(w for _, w in wastes)
    number, rest = next((k, w) for k, w in wastes if w <= _NEARLY * least)
    return (number, rest) if rest < _HELPS * waste else None


def groups(context: FindingContext) -> Iterator[Finding]:
    """Finds rows that run grouped by their length, each group compiled separately."""
    for details in _facts(context, "groups"):
        lengths, each = details["lengths"], count(sum(details["rows"]), "row")
        if len(lengths) < 2:
            continue
        by_option = context.options.get("layout") == "grouped"
        operations = sum(1 for top in context.equations for _ in top.walk())
        yield Finding(
            "ragged rows run grouped by length",
            f"Each of {each} runs one of {len(lengths)} branches, by its length. All branches are "
            "compiled."
            if details["branches"]
            else f"{each} run in {count(len(lengths), 'group')} of equal length, one after "
            "another, each compiled separately.",
            'Remove layout="grouped" if the function can be computed padded.'
            if by_option
            else f"Rows of any length cannot run together: {details['why']}. Use fewer lengths: "
            "cut or pad rows to a multiple of some number beforehand, where that does no harm.",
            "",
            STEP * operations,
        )


def spare_room(context: FindingContext) -> Iterator[Finding]:
    """Finds packed arrays with more places than rows have elements."""
    regions = [
        r for r in _facts(context, "region") if r["layout"] == "packed" and _sized_operations(r)
    ]
    for size in dict.fromkeys(s for r in regions for sizes in r["rows"] for s in sizes):
        if size.lengths is None or not size.lengths.size:
            continue
        places, elements = size.capacity, int(np.sum(size.lengths))
        if places <= _ENOUGH * max(1, elements):
            continue
        work = sum((e.work for e in context.equations if e.rule == "rows.packed"), Work())
        yield Finding(
            "packed rows have spare capacity",
            f"Packed arrays have {count(places, 'place')} for {count(elements, 'element')}, and "
            f"operations on them go over all of these: {show_work(work)}.",
            f"Cut the array before: batchax.Ragged(x.data[:{elements}], x.lengths).",
            "",
            (1 - elements / places) * price(work),
        )
