"""What loops and branches did, as a table with a bar for each: needed, of what was done."""

from __future__ import annotations

from batchax.explain.account import Account, Equation, StepCount
from batchax.explain.page.details import to_line
from batchax.explain.page.markup import Html, link_to, percent, tag
from batchax.explain.text import own_line
from batchax.explain.wording import STEPS_NOTE, show_gain, show_lanes_run


def steps(explanation: Account) -> list[Html]:
    """A row for each loop and branch."""
    listed = {eqn.number: eqn for eqn in explanation.walk()}
    heads = ("equation", "line", "lanes", "needed of done", "bound")
    table = tag(
        "table",
        tag("caption", "Lane-steps"),
        tag("thead", tag("tr", [tag("th", h, scope="col") for h in heads])),
        tag("tbody", [_row(listed[c.equation], c) for c in explanation.steps]),
    )
    return [tag("div", table, class_="wide"), tag("p", STEPS_NOTE, class_="note")]


def _row(eqn: Equation, counted: StepCount) -> Html:
    name = eqn.primitive if counted.branch is None else f"branch {counted.branch}"
    line = own_line(eqn.source)
    return tag(
        "tr",
        tag("th", link_to(eqn.number, f"{eqn.number} {name}"), scope="row"),
        tag("td", tag("code", line.text), " ", to_line(line)),
        tag("td", "; ".join(filter(None, [show_lanes_run(eqn, counted), show_gain(counted)]))),
        tag("td", _use(counted)),
        tag("td", "-" if counted.bound is None else percent(counted.bound, 1.0), class_="figure"),
    )


def _use(counted: StepCount) -> Html | str:
    if counted.why:
        return f"not counted: {counted.why}"
    if counted.of_use is None:
        return "nothing was done"
    style = f"--share:{min(counted.of_use, 1):.5f}"
    bar = tag("span", tag("i", style=style), class_="share", aria_hidden="true")
    figures = f" {counted.needed:,} of {counted.done:,}, {percent(counted.of_use, 1.0)}"
    return tag("span", bar, figures, class_="measure")
