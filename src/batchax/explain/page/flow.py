"""The program on the page: equations in order, with a rail from each value to where it is used.

A scope (the program, the body of a loop) is one grid. Each argument and equation is a row; a rail
is drawn in the gutter beside the rows, and spans them by row number. So rails stay right whatever
the height of rows, when parts are opened, on narrow windows and on paper; no script draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from batchax.explain.account import Account, Equation, Source, Value
from batchax.explain.page.details import details, how_often
from batchax.explain.page.markup import (
    SIGNS,
    Html,
    anchor,
    doublings,
    extent,
    glyph,
    hidden,
    size,
    tag,
    typed,
)
from batchax.explain.page.repeated import again
from batchax.explain.wording import SERVICES, Again, alike, count, fold, show_flops
from batchax.programs.source_lines import shown_place

_COLUMNS = 8
"""Rails side by side in a gutter. A longer-lived value that finds no place there has only stubs."""

_OPEN = 40
"""The body of a loop is open at first if it has no more equations than this."""


_LABELS = {"argument": "Arguments", "enters": "Values that enter", "result": "Results"}


@dataclass
class Scope:
    """A list of equations that see one another's values.

    Attributes:
      equations: in order.
      entries: what they use that comes from outside.
      rows: the equations, those that repeat others taken together.
      outputs: what leaves; empty where that is not known.
      around: the scope that holds the equation whose part this is.
      starts: of what a loop carries, the name of what it is at first.
    """

    equations: Sequence[Equation]
    entries: Sequence[Value]
    outputs: Sequence[Value] = ()
    around: Scope | None = None
    starts: dict[str, str] = field(default_factory=dict)
    makers: dict[str, Equation] = field(default_factory=dict)
    rows: Sequence[Equation | Again] = ()

    def __post_init__(self):
        self.rows = fold(self.equations)
        self.makers = {out.name: eqn for eqn in self.equations for out in eqn.outputs}

    def maker(self, name: str) -> Equation | None:
        """The equation that gives the value of this name, here or around."""
        eqn = self.makers.get(name)
        return self.around.maker(name) if eqn is None and self.around else eqn


@dataclass(frozen=True)
class Rail:
    """The way of one value down the gutter.

    Attributes:
      value: which.
      start: the row of what makes it.
      uses: the rows of what takes it, with the position among that one's operands.
      maker: the number of the equation that makes it, or "".
      nested: whether the row it starts from holds parts, and so ends far below where it begins.
    """

    value: Value
    start: int
    uses: tuple[tuple[int, int], ...]
    maker: str
    nested: bool


@dataclass(frozen=True)
class BarScale:
    """What bars are drawn to: the longest is as long as the column.

    Attributes:
      full: doublings of one byte that fill the column.
      lanes: the size of the batch.
    """

    full: float
    lanes: int

    def bar(self, value: Value) -> Html:
        """The bar of a value: its size for one example, and what the lanes add to that."""
        total = doublings(value.bytes)
        lanes = min(doublings(extent(value, self.lanes)), total)
        style = f"--one:{(total - lanes) / self.full:.4f};--lanes:{lanes / self.full:.4f}"
        kind = "bar" if value.axis is not None else "bar shared"
        parts = tag("i", class_="one"), tag("i", class_="many") if lanes else None
        bar = tag("span", parts, class_=kind, style=style, aria_hidden="true")
        return tag("span", bar, tag("span", size(value.bytes), class_="bytes"), class_="sized")


def flow(explanation: Account) -> Html:
    """The equations of a program, as a list with rails beside it."""
    scale = BarScale(_largest(explanation), explanation.lanes)
    top = Scope(explanation.equations, explanation.arguments, explanation.outputs)
    return _scope(top, scale)


def _largest(explanation: Account) -> float:
    values = [*explanation.arguments, *explanation.outputs]
    values += [v for eqn in explanation.walk() for v in (*eqn.inputs, *eqn.outputs)]
    return max((doublings(v.bytes) for v in values), default=0.0) or 1.0


def legend(explanation: Account) -> Html:
    """What signs, bars and rails mean."""
    full = _largest(explanation)
    ticks = [k for k in (0, 10, 20, 30, 40) if k <= 0.7 * full] + [full]
    ruler = tag(
        "span",
        [
            tag("i", tag("b", size(2**k)), style=f"--at:{k / full:.4f}", class_="tick")
            for k in ticks
        ],
        class_="ruler",
        role="img",
        aria_label=f"Scale of the bars: from {size(1)} to {size(2**full)}, each doubling as long",
    )
    services = [
        tag("li", glyph(key), " ", tag("b", word), ": ", SERVICES[key])
        for key, (_, word) in SIGNS.items()
    ]
    bar = lambda kind, *parts: tag("span", parts, class_=kind, aria_hidden="true")
    one, many = tag("i", class_="one"), tag("i", class_="many")
    return tag(
        "div",
        tag("ul", services, class_="services", role="list"),
        tag(
            "ul",
            tag(
                "li", bar("bar key", one, many), " a value for all lanes: light, its size for one "
            ),
            tag("li", bar("bar key shared", one), " a value that does not depend on the batch"),
            tag("li", tag("code", "f32[", tag("b", "8", class_="axis"), ",3]"), " its batch axis"),
            tag("li", tag("i", class_="line", aria_hidden="true"), " from maker to users, batched"),
            tag(
                "li", tag("i", class_="line shared", aria_hidden="true"), " the same for all lanes"
            ),
            role="list",
        ),
        tag("p", "Length of a bar: ", ruler, " Each doubling of the bytes adds the same length."),
        class_="legend",
    )


def _scope(scope: Scope, scale: BarScale) -> Html:
    first = len(_entering(scope)) + 1
    ways = list(_rails(scope, first))
    columns, width = _places(ways)
    users: dict[str, list[str]] = {}
    for eqn in scope.equations:
        for value in eqn.inputs:
            users.setdefault(value.name, []).append(eqn.number)
    seen: Source | None = None
    rows = []
    for row, entry in enumerate(scope.rows, first):
        if isinstance(entry, Again):
            rows.append(again(entry, row))
            continue
        rows.append(_equation(entry, row, scope, users, scale, entry.source != seen))
        seen = entry.source
    word = "argument" if scope.around is None else "enters"
    leaving = first + len(scope.rows)
    return tag(
        "div",
        _values(_entering(scope), 1, word, scale, scope.starts),
        tag("ol", rows, role="list", aria_label="Equations"),
        _values([(v.name, [v]) for v in scope.outputs], leaving, "result", scale),
        tag("div", [_drawn(way, columns.get(k)) for k, way in enumerate(ways)], class_="rails")
        if ways
        else None,
        class_="scope",
        style=f"--columns:{width}",
    )


_MANY = 24
"""Of more values that enter, those of one type whose places in a tree differ are one row."""


def _entering(scope: Scope) -> list[tuple[str, Sequence[Value]]]:
    """What enters, by rows: values that are alike, and what they are called together."""
    if len(scope.entries) <= _MANY:
        return [(v.name, [v]) for v in scope.entries]
    return alike(scope.entries)


def _values(
    rows: Sequence[tuple[str, Sequence[Value]]],
    row: int,
    word: str,
    scale: BarScale,
    starts: Mapping[str, str] | None = None,
) -> Html | None:
    if not rows:
        return None
    items = [
        tag(
            "li",
            tag("span", word, class_="word"),
            tag(
                "span",
                tag("b", name),
                _start((starts or {}).get(name)),
                tag("small", f" {len(values)} of these", title=", ".join(v.name for v in values))
                if len(values) > 1
                else None,
                class_="name",
            ),
            tag("span", typed(values[0]), class_="type"),
            scale.bar(values[0]),
            style=f"grid-row:{row + k}",
            class_="value",
            data_name="\n".join(v.name for v in values),
        )
        for k, (name, values) in enumerate(rows)
    ]
    return tag("ul", items, role="list", aria_label=_LABELS[word])


def _start(name: str | None) -> Html | None:
    """What a value that a loop carries is at first, or is taken from."""
    return None if name is None else tag("small", " from ", name)


def _rails(scope: Scope, first: int) -> Iterator[Rail]:
    uses: dict[str, list[tuple[int, int]]] = {}
    for row, entry in enumerate(scope.rows, first):
        for k, value in enumerate(entry.inputs):
            uses.setdefault(value.name, []).append((row, k))
    for k, value in enumerate(scope.outputs):
        uses.setdefault(value.name, []).append((first + len(scope.rows) + k, 0))
    for row, (_, values) in enumerate(_entering(scope), 1):
        for value in values:
            if value.name in uses:
                yield Rail(value, row, tuple(uses[value.name]), "", False)
    for row, entry in enumerate(scope.rows, first):
        nested = isinstance(entry, Equation) and bool(entry.parts)
        for value in entry.outputs:
            if value.name in uses:
                yield Rail(value, row, tuple(uses[value.name]), entry.number, nested)


def _places(ways: Sequence[Rail]) -> tuple[dict[int, int], int]:
    """A column for each rail, which it has for itself: short ones next to the rows."""
    taken = [0] * _COLUMNS  # a bit for each row
    columns: dict[int, int] = {}
    for k in sorted(range(len(ways)), key=lambda k: ways[k].uses[-1][0] - ways[k].start):
        rows = (1 << ways[k].uses[-1][0]) - (1 << ways[k].start)
        free = next((column for column, rest in enumerate(taken) if not rest & rows), None)
        if free is not None:
            taken[free] |= rows
            columns[k] = free
    return columns, 1 + max(columns.values(), default=0)


def _drawn(way: Rail, column: int | None) -> list[Html]:
    kind = "" if way.value.axis is not None else " shared"
    if column is None:
        kind, column = kind + " stub", 0
    last = way.uses[-1][0]
    mark = dict(data_value=way.value.name, data_from=way.maker or None, aria_hidden="true")
    place = lambda rows, extra="": f"grid-row:{rows};--c:{column}{extra}"
    out = [tag("i", class_=f"rail out{kind}{' low' * way.nested}", style=place(way.start), **mark)]
    if last > way.start + 1 and "stub" not in kind:
        rows = f"{way.start + 1}/{last}"
        out.append(tag("i", class_=f"rail down{kind}", style=place(rows), **mark))
    for row, k in way.uses:
        end = " end" * (row == last)
        style = place(row, f";--k:{k % 4}")
        out.append(tag("i", class_=f"rail in{kind}{end}", style=style, **mark))
    return out


def _equation(
    eqn: Equation,
    row: int,
    scope: Scope,
    users: dict[str, list[str]],
    scale: BarScale,
    new_line: bool,
) -> Html:
    makers = [scope.maker(v.name) for v in eqn.inputs]
    takes = {maker.number: None for maker in makers if maker}
    gives = {number: None for out in eqn.outputs for number in users.get(out.name, ())}
    word = tag("span", SIGNS[eqn.service][1], title=SERVICES[eqn.service])
    first, *others = eqn.outputs or (None,)
    summary = tag(
        "summary",
        tag("span", eqn.number, class_="number"),
        tag("span", glyph(eqn.service), word, class_="service"),
        tag(
            "span",
            [tag("b", v.name, class_="name") for v in eqn.outputs],
            " = ",
            tag("span", eqn.primitive, class_="primitive"),
            [(" ", v.name) for v in eqn.inputs],
            class_="does",
        ),
        _output(first, scale) if first else None,
        [_output(out, scale) for out in others],
        tag("span", _said(eqn.source) if new_line else "", class_="source"),
        tag("span", show_flops(eqn.work.flops), ", ", size(eqn.work.bytes), class_="cost"),
    )
    return tag(
        "li",
        tag(
            "details",
            summary,
            tag("div", details(eqn, makers, gives), class_="panel"),
            class_="equation",
        ),
        [_part(eqn, role, list(parts), scope, scale) for role, parts in _roles(eqn)],
        id=anchor(eqn.number),
        class_=f"row {eqn.service}",
        style=f"grid-row:{row}",
        data_takes=" ".join(takes) or None,
        data_gives=" ".join(gives) or None,
        data_values="\n".join(v.name for v in eqn.inputs) or None,
    )


def _output(value: Value, scale: BarScale) -> Html:
    axis = hidden(f"batch axis {value.axis},") if value.axis is not None else None
    shown = tag("span", typed(value), axis, class_="type")
    return tag("span", shown, scale.bar(value), class_="gives")


def _roles(eqn: Equation) -> Iterator[tuple[str, Iterator[Equation]]]:
    return groupby(eqn.parts, key=lambda part: part.role)


def _part(eqn: Equation, role: str, parts: list[Equation], around: Scope, scale: BarScale) -> Html:
    made = {out.name for part in parts for out in part.outputs}
    entries = {v.name: v for part in parts for v in part.inputs if not v.literal}
    entering = [v for name, v in entries.items() if name not in made]
    scope = Scope(parts, entering, (), around, dict(eqn.enters))
    inside = sum(1 for part in parts for _ in part.walk())
    times = how_often(parts[0].times)
    summary = tag(
        "summary",
        tag("b", role or "inside"),
        f" of {eqn.primitive} {eqn.number}: {count(inside, 'equation')}, {times}",
    )
    deep = eqn.number.count(".") >= 1 or inside > _OPEN
    return tag("details", summary, _scope(scope, scale), class_="part", open=not deep)


def _said(source: Source) -> str:
    """What a line says; where it is, if it cannot be read."""
    return source.text or (shown_place(source.file, source.line) if source.file else "")
