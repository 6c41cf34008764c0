"""What became part of the batched program: the equations of one example, as a tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchax import _compat
from batchax.explain.account import Service
from batchax.explain.attribution import Attribution, Tally
from batchax.jaxprs.inside import programs_inside
from batchax.jaxprs.own_primitives import shown
from batchax.jaxprs.primitive_facts import facts_of
from batchax.kernel.axis import Axis
from batchax.kernel.recording import Record, Recorder
from batchax.kernel.registry import find_rule, rule_origin


@dataclass(eq=False)
class Entry:
    """An equation with all its records: a program may be batched for chunks of several sizes."""

    records: list[Record] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    within: list[tuple[Record, Tally]] = field(default_factory=list)  # what rules do by programs
    parts: list[Entry] = field(default_factory=list)

    @property
    def shown(self) -> Record:
        """The record that tells of the most lanes."""
        return max(self.records, key=lambda r: (lanes_of(r.axis), -r.number))

    @property
    def eqn(self) -> Any:
        return self.records[0].eqn


def lanes_of(axis: Axis) -> int:
    """The number of lanes of an axis; one if that is a symbol."""
    return axis.size if isinstance(axis.size, int) else 1


def entries_of(recorder: Recorder, attribution: Attribution) -> list[Entry]:
    """What became part of the batched program, as a tree."""
    used = _used_runs(recorder, attribution)
    places = _places(recorder)
    roots: list[Entry] = []
    entries: dict[Any, Entry] = {}
    of_record: dict[Record | None, Entry] = {}
    for record in recorder.records:
        around = of_record.get(record.parent)
        if record.run not in used or (record.parent is not None and around is None):
            continue
        tally = attribution.tallies.get(record)
        if around is not None and record.parent is not None and not _runs_programs(around):
            of_record[record] = around
            if tally is not None:
                around.within.append((record, tally))
            continue
        key = places[record]
        if key not in entries:
            entries[key] = Entry()
            (roots if around is None else around.parts).append(entries[key])
        of_record[record] = entries[key]
        entries[key].records.append(record)
        if tally is not None:
            entries[key].tallies.append(tally)
    return roots


def number_of(op_name: str | None, recorder: Recorder, numbers: Mapping[Record, str]) -> str:
    """The equation, of those that have `numbers`, that a compiled operation is of; "" if none."""
    record = recorder.record_of(op_name or "")
    while record is not None and record not in numbers:
        record = record.parent
    return "" if record is None else numbers[record]


def _places(recorder: Recorder) -> dict[Record, Any]:
    """Where each equation is: records of one place are of one equation.

    For chunks of another size a program may be made anew. Then it has the same operations.
    """
    runs: dict[Any, list[Record]] = {}
    for record in recorder.records:
        runs.setdefault((record.parent, record.role, record.run), []).append(record)
    made: dict[Any, tuple[int, Any]] = {}  # for how many lanes, and the program
    places: dict[Record, Any] = {}
    for (parent, role, run), records in runs.items():
        around = parent and places[parent], role
        if run is None:
            places.update((r, (around, id(r.eqn))) for r in records)
            continue
        program, lanes = run.key, lanes_of(records[0].axis)
        operations = tuple(shown_name(r.eqn) for r in records)
        first = made.setdefault((around, operations), (lanes, program))
        if first[0] != lanes:
            program = first[1]
        places.update((r, (around, program, i)) for i, r in enumerate(records))
    return places


def _used_runs(recorder: Recorder, attribution: Attribution) -> set[Any]:
    """The runs through programs of which the batched program is made.

    Others were to find out which values are batched. Where no run shows in the batched program,
    because all that was to be done is to move an axis in mind, the last is the one.
    """
    used: set[Any] = set()
    for record in attribution.tallies:
        while record is not None:
            used.add(record.run)
            record = record.parent
    runs: dict[Any, list[Any]] = {}
    for record in recorder.records:
        runs.setdefault((record.parent, record.role), []).append(record.run)
    for (parent, _), of_role in runs.items():
        if used.isdisjoint(of_role) and (parent is None or parent.run in used):
            used.add(of_role[-1])
    return used


def _runs_programs(entry: Entry) -> bool:
    """Whether what is inside an equation is its own, and not how its rule goes about it."""
    eqn = entry.eqn
    own = facts_of(eqn.primitive).nests or eqn.primitive.name == "call_hi_primitive"
    return own or is_users(entry.shown) or bool(programs_inside(eqn))


def shown_name(eqn: Any) -> str:
    """The name of an equation's primitive; of a call also what is called."""
    name, called = shown(eqn.primitive), eqn.params.get("name")
    return f"{name} {called}" if isinstance(called, str) and called else name


def served_by(record: Record) -> tuple[Service, str]:
    """How an equation was batched, and the name of the rule that did it."""
    primitive = record.eqn.primitive
    if record.shared:
        return "once", ""
    origin, rule = rule_origin(primitive) or "", find_rule(primitive)
    if rule is not None and not origin.startswith("batchax."):
        return "user", _name_of(rule)
    module = origin.removeprefix("batchax.") or "no rule"
    if "service" in record.notes:
        return record.notes["service"], record.notes.get("rule", module)
    if rule is None:
        return ("jax", "jax") if _compat.jax_has_rule(primitive) else ("lanes", module)
    return "own", module


def _name_of(rule: Callable[..., Any]) -> str:
    return f"{rule.__module__}.{getattr(rule, '__qualname__', type(rule).__name__)}"


def is_users(record: Record) -> bool:
    return served_by(record)[0] in ("user", "lanes")
