"""An explanation as text: for ``print``, in plain characters."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from batchax.analysis.differences import shown_place
from batchax.execution.memory import show_bytes
from batchax.explain.account import Account, Equation, Memory, Source, Value, Work
from batchax.explain.findings.operations import price
from batchax.explain.wording import (
    SERVICES,
    Again,
    alike,
    fold,
    marked,
    show_devices,
    show_flops,
    show_masked,
    show_repeats,
    show_seconds,
    show_timed,
    show_unmeasured,
    show_work,
)
from batchax.jaxprs.error_format import count
from batchax.jaxprs.types import Values


@dataclass(frozen=True)
class Line:
    """Holds a line, the equations that it made, and what these cost: each by itself."""

    source: Source
    equations: tuple[Equation, ...]
    work: Work


def lines_of(
    explanation: Account, by: Callable[[Source], Source] = lambda source: source
) -> list[Line]:
    """Lists the lines that made equations, in the order of the program.

    `by` maps the line that made an equation to the one it is counted for.
    """
    made: dict[Source, list[Equation]] = {}
    for eqn in explanation.walk():
        made.setdefault(by(eqn.source), []).append(eqn)
    return [
        Line(source, tuple(eqns), sum(map(_alone, eqns), Work())) for source, eqns in made.items()
    ]


def _alone(eqn: Equation) -> Work:
    """Returns the work of an equation without that of its parts, which have separate lines."""
    inside = sum((part.work for part in eqn.parts), Work())
    # Branches count their costliest only, so that parts may add up to more than the whole.
    return Work(
        max(eqn.work.flops - inside.flops, 0.0),
        max(eqn.work.bytes - inside.bytes, 0.0),
    )


def own_line(source: Source) -> Source:
    """Returns the user's own line: of a library's, the one that led there."""
    return source.called_from or source


def costliest_lines(explanation: Account) -> list[tuple[Line, float]]:
    """Lists the user's lines that cost most, each with its share of the whole.

    Where all is in one line, the lines of libraries that it led to.
    """
    lines = lines_of(explanation, own_line)
    if len(lines) == 1:
        lines = lines_of(explanation)
    whole = sum(price(line.work) for line in lines)
    if whole == 0 or len(lines) < 2:
        return []
    shares = [(line, price(line.work) / whole) for line in lines]
    shares.sort(key=lambda pair: -pair[1])
    return [(line, share) for line, share in shares[:_MOST] if share >= _LEAST_SHARE]


_MOST = 5  # lines that are named
_LEAST_SHARE = 0.05  # of the whole price, for a line to be named


_WIDTH = 100  # of a line of prose
_MOST_VALUES = 12  # arguments, or outputs, that are listed one by one

# Of an explanation of more lines than these, the text has what costs most.
_MOST_LINES = 60
_MOST_FINDINGS = 6
_MOST_EQUATIONS = 8


def as_text(explanation: Account, details: bool = False) -> str:
    """An explanation in plain characters, without line endings at the end.

    Args:
      explanation: of which function.
      details: whether it is all there, however long that is.
    """
    lines = [line.rstrip() for line in _lines(explanation)]
    if not details and len(lines) > _MOST_LINES:
        lines = [line.rstrip() for line in _lines(explanation, brief=True)]
    return "\n".join(lines)


def _lines(explanation: Account, brief: bool = False) -> Iterator[str]:
    lanes = count(explanation.lanes, "lane")
    yield f"{explanation.name}, batched over {lanes}{_options(explanation)}"
    yield ""
    yield from _findings(explanation, _MOST_FINDINGS if brief else None)
    yield ""
    yield from _summary(explanation)
    yield ""
    yield from _costliest(explanation) if brief else _program(explanation)
    if explanation.timings:
        yield ""
        yield from _timings(explanation)


def _options(explanation: Account) -> str:
    return "".join(f", {name}={value!r}" for name, value in explanation.options.items())


def _summary(explanation: Account) -> Iterator[str]:
    services: dict[str, int] = {}
    for eqn in explanation.walk():
        services[eqn.service] = services.get(eqn.service, 0) + 1
    by_service = [f"{services[s]} {words}" for s, words in SERVICES.items() if s in services]
    yield f"  equations  {', '.join(by_service)}"
    work, lanes = explanation.work, max(explanation.lanes, 1)
    each = Work(work.flops / lanes, work.bytes / lanes)
    yield f"  work       {show_work(work)}; per lane {show_work(each)}"
    if explanation.devices is not None:
        for i, sentence in enumerate(show_devices(explanation.devices)):
            yield from _wrapped(sentence, " " * 13 if i else "  devices    ", " " * 15)
    if explanation.compiled is not None:
        yield f"  compiled   {show_work(explanation.compiled)}, by the compiler's count"
    if explanation.memory is not None:
        yield from _memory(explanation.memory)
    for i, (line, share) in enumerate(costliest_lines(explanation)):
        lead = " " * 13 if i else "  lines      "
        yield f"{lead}{share:>4.0%}  {_place(line.source)}"


def _memory(memory: Memory) -> Iterator[str]:
    yield (
        f"  memory     {show_bytes(memory.peak)} at most: {show_bytes(memory.arguments)} "
        f"arguments, {show_bytes(memory.outputs)} outputs, "
        f"{show_bytes(memory.temporaries)} temporaries"
    )


def _findings(explanation: Account, most: int | None) -> Iterator[str]:
    if not explanation.findings:
        yield "Findings: none."
        return
    sources = {eqn.number: eqn.source for eqn in explanation.walk()}
    yield "Findings, most expensive first:"
    for i, finding in enumerate(explanation.findings[:most], 1):
        at = f" (equation {finding.equation})" if finding.equation else ""
        yield from _wrapped(f"{i}. {finding.message}{at}", "  ", "     ")
        if finding.equation in sources and sources[finding.equation].line:
            yield f"     at {_place(sources[finding.equation])}"
        yield from _wrapped(finding.remedy, "     -> ", "        ")
    if left := len(explanation.findings[most:]) if most else 0:
        yield f"  ... and {left} more that cost less: explanation.findings"


def _place(source: Source) -> str:
    """Shows a line of the user, with the line of a library's that it led to, if it did."""
    own = own_line(source)
    through = f"  (in {_where(source)})" if source.called_from else ""
    return f"{_where(own)}  {own.text}{through}"


def _where(source: Source) -> str:
    return shown_place(source.file, source.line)


def _wrapped(text: str, first: str, others: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=others, break_on_hyphens=False
    )


def _costliest(explanation: Account) -> Iterator[str]:
    """The operations that cost most, those of one line and kind taken together."""
    kinds: dict[Any, list[Equation]] = {}
    for eqn in explanation.walk():
        types = tuple(v.example for v in eqn.outputs)
        kinds.setdefault((eqn.source, eqn.primitive, types), []).append(eqn)
    prices = [(sum(price(_alone(eqn)) for eqn in same), same) for same in kinds.values()]
    prices.sort(key=lambda pair: -pair[0])
    whole = sum(cost for cost, _ in prices) or 1.0
    shown = prices[:_MOST_EQUATIONS]
    equations = sum(len(same) for same in kinds.values())
    yield f"The operations that cost most, of {equations:,}. explanation.details() lists all:"
    rows = []
    for cost, same in shown:
        eqn, often = same[0], f" ({len(same):,} of these)" * (len(same) > 1)
        cells = [f"{cost / whole:.0%}", eqn.number, _statement(eqn), _result_types(eqn)]
        rows.append([*map(_cut, cells, _WIDTHS), f"{_rule(eqn)}{often}"])
    widths = [max(len(row[k]) for row in rows) for k in range(len(_WIDTHS))] if rows else []
    for row, (_, same) in zip(rows, shown, strict=True):
        yield "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, [*widths, 0], strict=True))
        if same[0].source.line:
            yield f"        {_place(same[0].source)}"
        yield from _wrapped(_remarks(same[0]), "        ", "        ")


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else f"{cell[: width - 3]}..."


_WIDTHS = 4, 12, 40, 36


def _program(explanation: Account) -> Iterator[str]:
    yield "The program of one example -> of all lanes (* is the batch axis), the rule that batched"
    yield "each operation, and its cost for one lane and for all:"
    for argument in _values(explanation.arguments):
        yield f"  {argument}"
    shown = list(_shown(explanation.equations))
    widths = [min(most, max((len(c(e)) for e in shown), default=0)) for c, most in _COLUMNS]
    yield from _equations(explanation.equations, widths, "  ")
    yield f"  returns {', '.join(_values(explanation.outputs))}"


def _values(values: Values) -> list[str]:
    """Lists names and types, those of many that are alike as one, and not all of very many."""
    if len(values) <= _MOST_VALUES:
        return [f"{v.name}: {_types(v)}" for v in values]
    lines = [
        f"{name}: {_types(same[0])}" + f" ({len(same)} of these)" * (len(same) > 1)
        for name, same in alike(values)
    ]
    if len(lines) <= _MOST_VALUES:
        return lines
    named = sum(len(same) for _, same in alike(values)[: _MOST_VALUES - 1])
    size = sum(v.bytes for v in values)
    last = f"... and {len(values) - named} more; all together {show_bytes(size)}"
    return [*lines[: _MOST_VALUES - 1], last]


def _shown(equations: Sequence[Equation]) -> Iterator[Equation]:
    """Iterates over the equations that are listed, those inside of others included."""
    for entry in fold(equations):
        if isinstance(entry, Equation):
            yield entry
            yield from _shown(entry.parts)


def _equations(
    equations: Sequence[Equation],
    widths: Sequence[int],
    indent: str,
    line: Source | None = None,
) -> Iterator[str]:
    role = ""
    for entry in fold(equations):
        if isinstance(entry, Again):
            yield f"{indent}  ...  {show_repeats(entry)}"
            continue
        if entry.role != role:
            yield f"{indent}{_heading(entry.role, entry)}"
            line, role = (None if role else line), entry.role
        if entry.source != line and entry.source.line:
            # The line of a library's stands below the user's own that led there, which is not
            # repeated.
            own, before = entry.source.called_from, line and line.called_from
            if own is not None and own != before:
                yield f"{indent}{_where(own)}  {own.text}"
            line = entry.source
            lead = "  in " if own is not None else ""
            yield f"{indent}{lead}{_where(line)}  {line.text}"
        cells = [f"{cell(entry):<{w}}" for (cell, _), w in zip(_COLUMNS, widths, strict=True)]
        yield f"{indent}  {entry.number:>3}  {'  '.join(cells)}"
        if entry.parts:
            yield from _equations(entry.parts, widths, indent + "    ", line)


def _heading(role: str, eqn: Equation) -> str:
    often = "as often as it takes" if eqn.times is None else count(eqn.times, "time")
    return f"{role}, {often}:"


def _statement(eqn: Equation) -> str:
    results = ", ".join(v.name for v in eqn.outputs) or "_"
    return f"{results} = {eqn.primitive} {' '.join(v.name for v in eqn.inputs)}"


def _result_types(eqn: Equation) -> str:
    return ", ".join(map(_types, eqn.outputs))


def _types(value: Value) -> str:
    if value.axis is None:
        return value.example
    return f"{value.example} -> {marked(value)}"


def _rule(eqn: Equation) -> str:
    if eqn.service == "once":
        return "once"
    how = {"own": eqn.rule, "user": f"user's {eqn.rule}", "jax": "JAX's rule"}
    return how.get(eqn.service, "sequentially")


def _brief(work: Work) -> str:
    return f"{show_flops(work.flops)}, {show_bytes(round(work.bytes))}"


def _remarks(eqn: Equation) -> str:
    """Tells what its rule did besides: how lanes diverge, what it moved and repeated."""
    remarks = []
    divergence = eqn.notes.get("divergence")
    if divergence == "masked":
        why = show_masked(eqn)
        remarks.append(f"lanes masked: {why}" if why else "lanes masked")
    if divergence == "together" and eqn.primitive == "cond":
        remarks.append("all lanes take the same branch")
    if divergence in _LANES_RUN:
        widths = ", ".join(map(str, eqn.notes.get("widths", ())))
        remarks.append(_LANES_RUN[divergence].format(widths))
    if divergence == "grouped":
        decided = eqn.notes["decided"]
        branches_where = {"": [b for b in eqn.notes["apart"] if b not in decided], _OR_ALL: decided}
        for otherwise, some in branches_where.items():
            if some:
                branches = ", ".join(map(str, some))
                remarks.append(f"branch {branches} for the lanes that take it{otherwise}")
    if divergence == "grouped" and show_masked(eqn):
        remarks.append(f"others masked, {show_masked(eqn)}")
    if "small_matrices" in eqn.notes:
        remarks.append(_SMALL_MATRICES[eqn.notes["small_matrices"]])
    if eqn.moves:
        remarks.append(f"{show_bytes(eqn.moves)} transposed")
    if eqn.broadcasts:
        remarks.append(f"{show_bytes(eqn.broadcasts)} copied for each lane")
    return "; ".join(remarks)


_LANES_RUN = {
    "asked of all": "goes on while any lane does",
    "compact": "windows of {} lanes",
    "tiles": "tiles of {} lanes",
    "alone": "lanes run sequentially",
    "few alone": "lanes masked, until few are left, which run sequentially",
    "probed": "lanes masked, until running them sequentially takes less",
    "flat": "each lane advances independently",
}

_OR_ALL = ", or for all if most do"

_SMALL_MATRICES = {
    "together": "on a CPU, an element of all lanes at a time",
    "library": "a call of the library for each lane",
    "choice": "a call of the library for each lane, as results are read that are not unique",
}

_COLUMNS: tuple[tuple[Callable[[Equation], str], int], ...] = (
    (_statement, 60),
    (_result_types, 44),
    (_rule, 40),
    (lambda eqn: "-" if eqn.service == "once" else _brief(eqn.per_lane), 24),
    (lambda eqn: _brief(eqn.work), 24),
    (_remarks, 0),
)
"""The cells of a line of the listing, and how wide they are at most."""


def _timings(explanation: Account) -> Iterator[str]:
    yield "Measured:"
    for timing in explanation.timings:
        low, high = map(show_seconds, timing.spread)
        memory = "" if timing.peak is None else f", {show_bytes(timing.peak)}"
        made = timing.compiling
        compiled = "" if made is None else f", compiled in {show_seconds(made)}"
        shown = f"{show_timed(timing):<24} {show_seconds(timing.seconds):>9} ({low} to {high})"
        yield f"  {shown}{memory}{compiled}"
    yield from _wrapped(show_unmeasured(explanation), "  ", "  ")
