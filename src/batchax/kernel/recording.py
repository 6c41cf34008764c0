"""Notes of what is done with each equation, for `explain`.

They are taken only while a `Recorder` is active. Then each equation that is batched gets a
`Record`, and what its rule emits carries the record's mark in its name stack. There it is found
again, in the staged program and in what a compiler made of it. Where a rule batches a program
inside its equation, such as the body of a loop, what is emitted carries the marks of the
equations in that program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.extend.core import Literal

from batchax import _compat
from batchax.jaxprs.words import Eqn, Value
from batchax.kernel.axis import Axis, Position
from batchax.memo import Memo
from batchax.programs.counted import mark_for, numbered, put_mark

_MARK = "batchax_equation_"
_MARKS = re.compile(_MARK + r"(\d+)")


@dataclass(frozen=True, eq=False)
class Run:
    """A run through `program`, a jaxpr of one example, without the values of its constants."""

    program: Any

    @property
    def key(self) -> tuple[int, ...]:
        """The same for runs through the same program."""
        return tuple(map(id, (*self.program.invars, *self.program.eqns)))


@dataclass(eq=False)
class Record:
    """An equation, and what it was batched as.

    Attributes:
      number: its place among all records, which its mark shows.
      eqn: the equation, of one example.
      axis: the axis it was batched over.
      in_axes, out_axes: where its operands and results carry that axis.
      parent: the record of the equation inside which it is, if any.
      run: the run through a program that it belongs to: a program may be run several times. None
        outside of any.
      role: which program of its parent that is, if its rule said so.
      shared: whether it does not depend on the batch.
      notes: what its rule said of it.
      in_types, out_types: the types of its operands and results for all lanes; only for packed
        rows, where they do not follow from the type of one lane and the batch axis.
      stand_in: only where another form of the equation was batched (for padded rows), in the
        records inside this one: the variables that hold its results there.
    """

    number: int
    eqn: Eqn
    axis: Axis
    in_axes: Sequence[Position] = ()
    out_axes: Sequence[Position] = ()
    parent: Record | None = None
    run: Run | None = None
    role: str = ""
    shared: bool = False
    notes: dict[str, Any] = field(default_factory=dict)
    in_types: Sequence[Any] | None = None
    out_types: Sequence[Any] | None = None
    stand_in: Sequence[Any] | None = None


@dataclass(frozen=True)
class PerExample:
    """The program of one example that was batched.

    Attributes:
      axis: the axis it was batched over.
      arguments: for each value it was given, the variable that stands for it, and its batch axis.
        The keys are variables of the program it was batched in: the values themselves must not
        be kept for longer than that.
      outputs: the variables of its outputs.
      program: the program, where runs are counted; None elsewhere.
      given: what it is given, constants first, where runs are counted: the variable of each value
        in the program it was batched in, or the value itself.
      positions: where these have the batch axis.
    """

    axis: Axis
    arguments: Mapping[Any, tuple[Any, Position]]
    outputs: Sequence[Any]
    program: Any = None
    given: Sequence[Any] = ()
    positions: Sequence[Position] = ()


class Recorder:
    """Takes notes while it is active: ``with recorder.active(): ...``.

    Attributes:
      records: a record for each equation, as often as it was batched.
      programs: what was batched.
      facts: what was said of the call as a whole, in order: what it is about, and details.
      counts: whether what is batched has marks, by which runs of loops and branches are counted.
      numbers: whether the loops and branches of what is batched are to have numbers for that; if
        not, they have.
    """

    def __init__(self, counts: bool = False, numbers: bool = True) -> None:
        self.counts, self.numbers = counts, numbers
        self.records: list[Record] = []
        self.programs: list[PerExample] = []
        self.facts: list[tuple[str, dict[str, Any]]] = []
        # Used in place of the programs that `kernel.inner` remembers: a program that is taken from
        # there is not batched again, so nothing would be noted of it.
        self.built = Memo("programs inside programs, batched while notes are taken", most=4096)

    @contextmanager
    def active(self, inside: Record | None = None) -> Iterator[None]:
        """While this takes notes of what happens, `inside` an equation."""
        with _set(_place, _Place(self, inside)):
            yield

    def record_of(self, name_stack: Any) -> Record | None:
        """The record whose mark is innermost in a name stack, or in an operation's name."""
        marks = _MARKS.findall(str(name_stack))
        return self.records[int(marks[-1])] if marks else None


@dataclass(frozen=True, eq=False)
class _Place:
    """Where notes are being taken."""

    recorder: Recorder
    record: Record | None
    run: Run | None = None
    role: str = ""
    paused: bool = False
    staged_for: Axis | None = None
    counts: bool = True


_place: ContextVar[_Place | None] = ContextVar("batchax_recording", default=None)


@contextmanager
def _set(variable: ContextVar[Any], value: Value) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _active() -> _Place | None:
    place = _place.get()
    return None if place is None or place.paused else place


def is_on() -> bool:
    place = _place.get()  # as `_active`, which to call takes time at each equation
    return place is not None and not place.paused


def is_watched() -> bool:
    """Whether a recorder is active, be it paused: what its notes tell needs no warning."""
    return _place.get() is not None


@contextmanager
def equation(axis: Axis, eqn: Eqn, in_axes: Sequence[Position], shared: bool) -> Iterator[Record]:
    """While an equation is batched and notes are taken."""
    place = _active()
    assert place is not None
    # An equation of a form for padded rows has the mark of the one that it stands for (`meant`).
    parent = place.record or place.recorder.record_of(eqn.source_info.name_stack)
    with _recorded(place, eqn, axis, parent) as record:
        record.in_axes, record.shared = tuple(in_axes), shared
        yield record


@contextmanager
def inside(axis: Axis, eqn: Eqn) -> Iterator[None]:
    """While `eqn` is run for lanes in front, by what runs the equation around it."""
    if _active() is None:
        yield
        return
    front = [None if isinstance(v, Literal) else 0 for v in eqn.invars]
    with equation(axis, eqn, front, False) as record:
        record.out_axes = (0,) * len(eqn.outvars)
        yield


@contextmanager
def meant(eqn: Eqn) -> Iterator[Record | None]:
    """While the form of an equation for padded rows is staged, which is batched in its place later.

    The operations of that form are then recorded as parts of this equation.
    """
    place = _place.get()
    if place is None or place.staged_for is None:
        yield None
        return
    with _recorded(place, eqn, place.staged_for, place.record) as record:
        yield record


@contextmanager
def _recorded(place: _Place, eqn: Eqn, axis: Axis, parent: Record | None) -> Iterator[Record]:
    number = len(place.recorder.records)
    record = Record(number, eqn, axis, parent=parent, run=place.run, role=place.role)
    place.recorder.records.append(record)
    inside = _Place(place.recorder, record, paused=place.paused, staged_for=place.staged_for)
    with _set(_place, inside), jax.named_scope(f"{_MARK}{number}"):
        yield record


def _otherwise(**changes: Any) -> AbstractContextManager[None]:
    """While notes, if any are taken, are taken with these changes."""
    place = _place.get()
    return _AS_IT_IS if place is None else _set(_place, replace(place, **changes))


_AS_IT_IS = nullcontext()


def run(program: Any) -> AbstractContextManager[None]:
    """While `program`, a jaxpr of one example, is run through once."""
    if not is_watched():
        return _AS_IT_IS
    return _otherwise(run=Run(_compat.without_constants(program)))


def runs(axis: Axis) -> None:
    """Where runs are counted, stages a mark that a program inside a loop or branch runs here."""
    place = _active()
    if place is None or not (place.recorder.counts and place.counts) or place.record is None:
        return
    if place.role == "condition":
        return
    branch = place.role.removeprefix("branch ")
    mark = mark_for(place.record.eqn, int(branch) if branch.isdigit() else None, axis.size)
    if mark is not None:
        put_mark(mark)


def uncounted(is_counted: bool = False) -> AbstractContextManager[None]:
    """While a part of a program is batched in which no run of all of it is to be counted."""
    return _otherwise(counts=is_counted)


def with_numbers(program: Any) -> Any:
    """A program that is going to be batched, whose loops have numbers where runs are counted."""
    place = _active()
    if place is None or place.record is not None:
        return program
    return numbered(program) if place.recorder.counts and place.recorder.numbers else program


def part(role: str) -> AbstractContextManager[None]:
    """While a rule batches that program of its equation: "condition", "branch 0"."""
    return _otherwise(role=role)


def paused(staged_for: Axis | None = None) -> AbstractContextManager[None]:
    """While no notes are to be taken: what is emitted is staged, to be looked at or batched later.

    `staged_for` is the axis that it will be batched over.
    """
    return _otherwise(paused=True, staged_for=staged_for)


def found_program(axis: Axis, staged: Any, mapped: Sequence[Any]) -> None:
    """Notes a program that is going to be batched, unless that is inside another equation."""
    place = _active()
    if place is not None and place.record is None:
        jaxpr = staged.jaxpr
        given = [m.value if m.given is None else m.given for m in mapped]
        values = [getattr(x, "data", x) for x in given]
        pairs = zip(values, zip(jaxpr.invars, (m.axis for m in mapped), strict=False), strict=False)
        consts = zip(staged.consts, ((v, None) for v in jaxpr.constvars), strict=True)
        own = {_compat.staged_variable(x): placed for x, placed in (*pairs, *consts)}
        more: dict[str, Any] = {}
        if place.recorder.counts:
            of_it = [*staged.consts, *(m.value for m in mapped)]
            at = [*[None] * len(staged.consts), *(m.axis for m in mapped)]
            variables = map(_compat.staged_variable, of_it)
            pairs = zip(of_it, variables, strict=True)
            of_it = [x if v is None else v for x, v in pairs]
            more = {"program": staged, "given": of_it, "positions": at}
        place.recorder.programs.append(PerExample(axis, own, tuple(jaxpr.outvars), **more))


def note(**facts: Any) -> None:
    """Adds notes to the record of the equation that is being batched, if notes are taken."""
    place = _active()
    if place is not None and place.record is not None:
        place.record.notes.update(facts)


def fact(about: str, **details: Any) -> None:
    """Notes something of the call as a whole, unless that is inside another equation."""
    place = _active()
    if place is not None and place.record is None:
        place.recorder.facts.append((about, details))


def memory() -> tuple[Any, Any] | None:
    """Where to remember programs while notes are taken, and for which equation; else None."""
    place = _active()
    return None if place is None else (place.recorder.built, place.record)
