"""All there is to know of one equation: beside the program, and below it if opened."""

from __future__ import annotations

from batchax.explain.account import Equation, Source, Value
from batchax.explain.page.markup import Html, glyph, link_to, size, tag, typed
from batchax.explain.wording import SERVICES, show_flops, show_masked


def how_often(times: int | None) -> str:
    """How often something runs, as the end of a sentence."""
    if times is None:
        return "run as often as it turns out"
    return "run once" if times == 1 else f"run {times:,} times"


def details(eqn: Equation, makers: list[Equation | None], gives: dict[str, None]) -> Html:
    """All there is to know of one equation."""
    rows = [_operand("takes", v, m) for v, m in zip(eqn.inputs, makers, strict=True)]
    rows += [_operand("gives", v, None) for v in eqn.outputs]
    lines = [s for s in (eqn.source.called_from, eqn.source) if s is not None]
    heads = [tag("th", text, scope="col") for text in ("", "value", "one example", "batched", "")]
    each = eqn.per_lane
    facts = [
        ("How", [glyph(eqn.service), f" {SERVICES[eqn.service]}"]),
        ("Rule", tag("code", eqn.rule) if eqn.rule else None),
        ("Became", tag("code", ", ".join(eqn.emitted)) if eqn.emitted else "nothing"),
        ("FLOPs", _of(show_flops, eqn.work.flops, each.flops, eqn)),
        ("Bytes", _of(size, eqn.work.bytes, each.bytes, eqn)),
        ("Axes moved", f"{size(eqn.moves)} transposed" if eqn.moves else None),
        ("Broadcast", f"{size(eqn.broadcasts)} written" if eqn.broadcasts else None),
        ("Runs", how_often(eqn.times).removeprefix("run ")),
        ("Used by", _listed(gives) if gives else None),
        *((str(key).capitalize(), str(value)) for key, value in eqn.notes.items() if key != "why"),
        ("Why", show_masked(eqn) or None),
    ]
    return Html(
        tag(
            "p",
            tag("b", f"{eqn.number} {eqn.primitive}"),
            [(" ", to_line(source)) for source in lines],
            class_="head",
        )
        + "".join(tag("pre", source.text) for source in lines if source.text)
        + tag(
            "div",
            tag(
                "table",
                tag("caption", "Operands and results", class_="sr"),
                tag("thead", tag("tr", heads)),
                tag("tbody", rows),
            ),
            class_="wide",
        )
        + tag("dl", [tag("div", tag("dt", t), tag("dd", d)) for t, d in facts if d is not None])
    )


def _of(show, total: float, each: float, eqn: Equation) -> str:
    if eqn.service == "once":
        return f"{show(total)}, once for all lanes"
    return f"{show(each)} per lane, {show(total)} for all"


def _listed(numbers: dict[str, None]) -> list[Html]:
    return [tag("span", link_to(number), " ") for number in numbers]


def to_line(source: Source) -> Html | None:
    """A link to a line's row, if it is known."""
    if not source.file:
        return None
    name = source.file.replace("\\", "/").rsplit("/", 1)[-1]
    line = f":{source.line}" if source.line else ""
    target = f"#{source_anchor(source)}"
    return tag("a", name, line, href=target, class_="place", title=source.file + line)


def source_anchor(source: Source) -> str:
    """The id of a source line's row: letters that are safe in links, and no two alike."""
    return f"s{source.line}-" + "".join(
        c if c.isascii() and c.isalnum() else f"_{ord(c):x}_" for c in source.file
    )


def _operand(word: str, value: Value, maker: Equation | None) -> Html:
    where = "the same for all lanes" if value.axis is None else f"axis {value.axis}"
    return tag(
        "tr",
        tag("th", word, scope="row"),
        tag(
            "td",
            tag("code", value.name),
            " from " if maker else None,
            maker and link_to(maker.number),
        ),
        tag("td", tag("code", value.example)),
        tag("td", typed(value), tag("small", f" {where}")),
        tag("td", size(value.bytes)),
    )
