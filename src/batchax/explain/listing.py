"""The listing: an entry for each equation of the per-example function, parts of loops nested."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Literal

from batchax.explain.account import Equation, Source, Value, Work
from batchax.explain.attribution import Attribution, Tally
from batchax.explain.entries import (
    Entry,
    entries_of,
    is_users,
    lanes_of,
    served_by,
    shown_name,
)
from batchax.explain.naming import Names
from batchax.jaxprs.bodies import bodies_of
from batchax.jaxprs.primitive_facts import facts_of
from batchax.kernel.axis import Axis, Position
from batchax.kernel.inner import batched_aval
from batchax.kernel.recording import Record, Recorder
from batchax.programs.shapes import bytes_of
from batchax.programs.source_lines import calling_line, is_installed, source_line

_LIBRARY = os.path.dirname(jax.__file__)


class Listing:
    """The equations of a function, and where to find the one a record is of.

    Attributes:
      equations: in order.
      numbers: the number in the listing, by record.
      names: what values are called.
    """

    def __init__(
        self, recorder: Recorder, attribution: Attribution, names: Names, lanes: int
    ) -> None:
        self.names, self._lanes = names, lanes
        self.numbers: dict[Record, str] = {}
        self._placed = _results(recorder)
        self._known: dict[str, Value] = {}  # by name
        entries = entries_of(recorder, attribution)
        self.equations = self._listed(entries, "", None)

    def _listed(
        self,
        entries: Sequence[Entry],
        prefix: str,
        around: Source | None,
        role: str = "",
        times: int | None = 1,
    ) -> tuple[Equation, ...]:
        equations = []
        for entry, source, role_of_it in self._flat(entries, None, around, role):
            number = f"{prefix}{len(equations) + 1}"
            equations.append(self._equation(entry, source, role_of_it, number, times))
        return tuple(equations)

    def _flat(
        self, entries: Sequence[Entry], caller: Source | None, around: Source | None, role: str
    ) -> Iterator[tuple[Entry, Source, str]]:
        """The entries with the lines and roles they are listed under, calls opened.

        Args:
          entries: of one program.
          caller: the line that all of them are listed under, if they are of a function of JAX's.
          around: the line of the call, loop or branch that they are inside of.
          role: what they are there.
        """
        for entry in entries:
            record = entry.shown
            source = caller or source_of(entry.eqn, around)
            role_of_it = record.role or role
            if not entry.parts or facts_of(entry.eqn.primitive).nests or is_users(record):
                yield entry, source, role_of_it
                continue
            program = _program_of(entry.parts[0])
            self.names.enter(program)
            self._name_alike(program.invars, _passed_to(entry.eqn))
            caller_of_parts = source if _is_library(program) else caller
            yield from self._flat(entry.parts, caller_of_parts, source, role_of_it)
            self._name_alike(entry.eqn.outvars, program.outvars)

    def _equation(
        self, entry: Entry, source: Source, role: str, number: str, around: int | None
    ) -> Equation:
        record, eqn = entry.shown, entry.eqn
        for r in (*entry.records, *(r for r, _ in entry.within)):
            self.numbers[r] = number
        tallies = [*entry.tallies, *(t for _, t in entry.within)] or [Tally(times=around)]
        emitted = max((t.emitted for t in entry.tallies), key=len, default=[])
        counts = [t.times for t in tallies]
        times = None if None in counts else max(c for c in counts if c is not None)
        inputs = self._values(eqn.invars, record.in_axes, record.axis, record.in_types)
        out_axes, out_types = record.out_axes, record.out_types
        if record.stand_in is not None:
            inputs = tuple(self._known.get(v.name, v) for v in inputs)
            placed = [
                (None, None) if isinstance(v, Literal) else self._placed.get(v, (None, None))
                for v in record.stand_in
            ]
            out_axes, out_types = [a for a, _ in placed], [t for _, t in placed]
        enters = self._name_inside(entry)
        parts = self._listed(entry.parts, f"{number}.", source, "body", times)
        outputs = self._values(eqn.outvars, out_axes, record.axis, out_types)
        self._known.update((v.name, v) for v in outputs)
        service, rule = served_by(record)
        if record.stand_in is not None and entry.within and all(r.shared for r, _ in entry.within):
            service, rule = "once", ""
        return Equation(
            number=number,
            primitive=shown_name(eqn),
            source=source,
            inputs=inputs,
            outputs=outputs,
            service=service,
            rule=rule,
            emitted=(*emitted, *(name for _, t in entry.within for name in t.emitted)),
            moves=sum(t.moves for t in tallies) * (eqn.primitive.name != "transpose"),
            broadcasts=sum(t.broadcasts for t in tallies)
            * (eqn.primitive.name != "broadcast_in_dim"),
            work=sum((t.work for t in tallies), _work_of_parts(parts, record)),
            lanes=self._lanes,
            times=times,
            role=role,
            enters=enters,
            parts=parts,
            notes={k: v for k, v in record.notes.items() if k not in ("service", "rule")},
        )

    def _name_inside(self, entry: Entry) -> tuple[tuple[str, str], ...]:
        """Names the inputs of the programs in a loop or branch.

        What they are given as it is keeps its name.

        Returns:
          What loops carry, or take apart: its name inside, and that of what it is at first.
        """
        operands, pairs, condition = entry.eqn.invars, (), ()
        for body in bodies_of(entry.eqn):
            if body.role == "call":
                continue
            inputs = self._entered(entry, body.program, "" if body.role == "body" else body.role)
            given = [operands[i] for i in body.operands]
            self._name_alike(inputs[: body.same], given[: body.same])
            if body.role == "condition":
                condition = inputs[body.same :]
            elif body.is_repeated:
                self._name_alike(condition, inputs[body.same :])
                pairs = self._named_pairs(inputs[body.same :], given[body.same :])
        return pairs

    def _entered(self, entry: Entry, given: Any, role: str) -> Sequence[Any]:
        """The inputs of a program in `entry`, which may have been run in another form.

        That has other inputs only in front: which lanes are active.
        """
        first = (part.records[0] for part in entry.parts)
        forms = (r.run.program for r in first if r.role == role and r.run is not None)
        program = next(forms, given.jaxpr)
        self.names.enter(program)
        added = len(program.invars) - len(given.jaxpr.invars)
        if added == 1:
            self.names.give(program.invars[0], "active")
        return program.invars[added:]

    def _name_alike(self, inside: Sequence[Any], outside: Sequence[Any]) -> None:
        if len(inside) != len(outside):
            return
        for variable, other in zip(inside, outside, strict=True):
            self.names.same(variable, other)

    def _named_pairs(
        self, inside: Sequence[Any], outside: Sequence[Any]
    ) -> tuple[tuple[str, str], ...]:
        if len(inside) != len(outside):  # a loop that was run in another form, as rows are
            return ()
        pairs = zip(inside, outside, strict=True)
        return tuple((self.names.of(v), self.names.of(other)) for v, other in pairs)

    def _values(
        self,
        variables: Sequence[Any],
        axes: Sequence[Position],
        axis: Axis,
        types: Sequence[Any] | None,
    ) -> tuple[Value, ...]:
        positions = [*axes, *[None] * (len(variables) - len(axes))]
        batched = types or [None] * len(variables)
        return tuple(
            value_of(self.names.of(v), v.aval, a, axis, t, self.names.is_number(v))
            for v, a, t in zip(variables, positions, batched, strict=True)
        )


def _results(recorder: Recorder) -> dict[Any, tuple[Position, Any]]:
    """Where results of what stands in for equations have the batch axis, and their types."""
    results: dict[Any, tuple[Position, Any]] = {}
    widest = sorted(recorder.records, key=lambda r: lanes_of(r.axis))
    for record in widest:
        if record.parent is not None and record.parent.stand_in is not None:
            for v, a in zip(record.eqn.outvars, record.out_axes, strict=False):
                results[v] = a, batched_aval(record.axis, v.aval, a)
    return results


def value_of(
    name: str,
    example: Any,
    position: Position,
    axis: Axis,
    batched: Any = None,
    literal: bool = False,
) -> Value:
    """A value, from its type for one example and where it has the batch axis.

    Its type in all lanes follows from these, if it is not given.
    """
    if batched is None:
        batched = example
        if position is not None and getattr(example, "shape", None) is not None:
            batched = batched_aval(axis, example, position)
    size = bytes_of([batched])
    return Value(name, type_name(example), type_name(batched), position, size, literal)


def type_name(aval: Any) -> str:
    """A type as programs are printed: ``f32[3]``."""
    try:
        return aval.str_short(short_dtypes=True)
    except (AttributeError, TypeError):
        return str(aval)


def source_of(eqn: Any, around: Source | None) -> Source:
    """The line that made an equation; of a library's, with the user's own that led there.

    JAX forgets where a function was called from that it stages by itself. Then that is the line of
    what the equation is inside of, `around`.
    """
    source, own = Source(*source_line(eqn)), calling_line(eqn)
    if own is not None:
        return replace(source, called_from=Source(*own))
    if around is None or not is_installed(source.file):
        return source
    led = around.called_from or around
    return source if is_installed(led.file) else replace(source, called_from=led)


def _program_of(part: Entry) -> Any:
    """The program that an equation inside another is part of."""
    run = part.records[0].run
    assert run is not None
    return run.program


def _passed_to(eqn: Any) -> Sequence[Any]:
    """What a call passes to the program that it runs: mostly, all of its operands."""
    if eqn.primitive.name != "custom_linear_solve":
        return eqn.invars
    # First the constants of each of its programs, of which the one that solves is run.
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return [*eqn.invars[first : first + lengths.solve], *eqn.invars[sum(lengths) :]]


def _is_library(program: Any) -> bool:
    """Whether a program is of a function of JAX's, whose lines say nothing to users.

    Staged once, it is shared by all who call it, with the lines of the one who did first.
    """
    file = getattr(getattr(program, "debug_info", None), "func_filename", None) or ""
    return file.startswith(_LIBRARY)


def _work_of_parts(parts: Sequence[Equation], record: Record) -> Work:
    """What the parts cost; of branches of which one runs, the costliest."""
    by_role: dict[str, Work] = {}
    for part in parts:
        by_role[part.role] = by_role.get(part.role, Work()) + part.work
    if record.eqn.primitive.name == "cond" and record.notes.get("divergence") == "together":
        return max(by_role.values(), key=lambda w: w.flops + w.bytes, default=Work())
    return sum(by_role.values(), Work())
