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
from batchax.cache import Cache
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Program, Value
from batchax.kernel.axis import Axis, Position, Positions

_MARK = "batchax_equation_"
_MARKS = re.compile(_MARK + r"(\d+)")


@dataclass(frozen=True, eq=False)
class Run:
    """Identifies one run through a jaxpr of one example, held without its constants."""

    program: Any

    @property
    def key(self) -> tuple[int, ...]:
        """Returns a key that runs through the same program share."""
        # Programs are copied when constants are removed, but their variables and equations are
        # kept.
        return tuple(map(id, (*self.program.invars, *self.program.eqns)))


@dataclass(eq=False)
class Record:
    number: int  # its index among the records, which its mark shows
    eqn: Eqn  # of one example
    axis: Axis
    in_axes: Positions = ()
    out_axes: Positions = ()
    parent: Record | None = None  # the record of the equation around it
    run: Run | None = None  # a program may run several times; None outside of any
    role: str = ""  # which program of its parent it is in, such as "branch 0"
    shared: bool = False  # whether it does not depend on the batch
    notes: dict[str, Any] = field(default_factory=dict)  # what its rule noted
    # Types for all lanes: only for packed rows, where the batch axis does not determine them.
    in_types: Sequence[Any] | None = None
    out_types: Sequence[Any] | None = None
    # Variables of the results in the records inside, if another form was batched (padded rows).
    stand_in: Sequence[Any] | None = None


@dataclass(frozen=True)
class PerExample:
    """Describes a program of one example that was batched."""

    axis: Axis
    # Keyed by the variable of the program around, as values must not be kept alive.
    arguments: Mapping[Any, tuple[Any, Position]]
    outputs: Sequence[Any]


class Recorder:
    """Collects notes while it is active: ``with recorder.active(): ...``."""

    def __init__(self) -> None:
        self.records: list[Record] = []  # one for each time an equation is batched
        self.programs: list[PerExample] = []
        self.facts: list[tuple[str, dict[str, Any]]] = []  # facts on the call as a whole
        # Used in place of the programs that `kernel.inner` remembers: a program that is taken from
        # there is not batched again, so nothing would be noted of it.
        self.built = Cache("programs inside programs, batched while notes are taken", most=4096)

    @contextmanager
    def active(self, inside: Record | None = None) -> Iterator[None]:
        """Activates this recorder, for operations `inside` an equation."""
        with _set(_place, _Place(self, inside)):
            yield

    def record_of(self, name_stack: object) -> Record | None:
        """Returns the record of the innermost mark in a name stack or operation name."""
        marks = _MARKS.findall(str(name_stack))
        return self.records[int(marks[-1])] if marks else None


@dataclass(frozen=True, eq=False)
class _Place:
    """Holds where notes are being taken."""

    recorder: Recorder
    record: Record | None
    run: Run | None = None
    role: str = ""
    paused: bool = False
    staged_for: Axis | None = None


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
    """Returns whether a recorder is active, also a paused one. If so, warnings are omitted."""
    return _place.get() is not None


@contextmanager
def equation(axis: Axis, eqn: Eqn, in_axes: Positions, shared: bool) -> Iterator[Record]:
    place = _active()
    assert place is not None
    # An equation of a form for padded rows has the mark of the one that it stands for (`meant`).
    parent = place.record or place.recorder.record_of(eqn.source_info.name_stack)
    with _recorded(place, eqn, axis, parent) as record:
        record.in_axes, record.shared = tuple(in_axes), shared
        yield record


@contextmanager
def inside(axis: Axis, eqn: Eqn) -> Iterator[None]:
    """Records `eqn` while the equation around runs it for lanes in front."""
    if _active() is None:
        yield
        return
    front = [None if isinstance(v, Literal) else 0 for v in eqn.invars]
    with equation(axis, eqn, front, False) as record:
        record.out_axes = (0,) * len(eqn.outvars)
        yield


@contextmanager
def meant(eqn: Eqn) -> Iterator[Record | None]:
    """Records the padded form of an equation while it is traced.

    It is batched later, and its operations are recorded as parts of `eqn`.
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
    # The mark goes into the name stack of each operation, and so into the compiled program.
    with _set(_place, inside), jax.named_scope(f"{_MARK}{number}"):
        yield record


def _otherwise(**changes: Any) -> AbstractContextManager[None]:
    """Changes the current place, if notes are taken."""
    place = _place.get()
    return _AS_IT_IS if place is None else _set(_place, replace(place, **changes))


_AS_IT_IS = nullcontext()


def run(program: Program) -> AbstractContextManager[None]:
    if not is_watched():
        return _AS_IT_IS
    return _otherwise(run=Run(_compat.without_constants(program)))


def part(role: str) -> AbstractContextManager[None]:
    """Names the program of an equation that its rule batches: "condition", "branch 0"."""
    return _otherwise(role=role)


def paused(staged_for: Axis | None = None) -> AbstractContextManager[None]:
    """Pauses notes while code is traced for inspection, or to be batched over `staged_for`."""
    return _otherwise(paused=True, staged_for=staged_for)


def found_program(axis: Axis, staged: ClosedJaxpr, mapped: Sequence[Any]) -> None:
    """Notes a program that is going to be batched, unless it is inside another equation."""
    place = _active()
    if place is not None and place.record is None:
        jaxpr = staged.jaxpr
        given = [m.value if m.given is None else m.given for m in mapped]
        values = [getattr(x, "data", x) for x in given]
        pairs = zip(values, zip(jaxpr.invars, (m.axis for m in mapped), strict=False), strict=False)
        consts = zip(staged.consts, ((v, None) for v in jaxpr.constvars), strict=True)
        # Values are replaced by their variables, as a record must not keep them alive.
        own = {_compat.staged_variable(x): placed for x, placed in (*pairs, *consts)}
        place.recorder.programs.append(PerExample(axis, own, tuple(jaxpr.outvars)))


def note(**facts: Any) -> None:
    """Adds notes to the record of the equation that is being batched."""
    place = _active()
    if place is not None and place.record is not None:
        place.record.notes.update(facts)


def note_new(**facts: Any) -> None:
    """Adds those notes to the record that it does not have."""
    place = _active()
    if place is not None and place.record is not None:
        place.record.notes = facts | place.record.notes


def fact(about: str, **details: Any) -> None:
    """Notes a fact on the call as a whole, unless that is inside another equation."""
    place = _active()
    if place is not None and place.record is None:
        place.recorder.facts.append((about, details))


def memory() -> tuple[Any, Any] | None:
    """Returns the cache for programs while notes are taken, and the record that they belong to."""
    place = _active()
    return None if place is None else (place.recorder.built, place.record)
