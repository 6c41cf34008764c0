"""The listing: an entry for each equation of the per-example function, with names and costs."""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal, Var

from batchax import _compat
from batchax.analysis.cost import Cost, bytes_of, cost_around, cost_of_equation
from batchax.analysis.differences import calling_line, is_installed, source_line
from batchax.analysis.inner import devices_of, integers_in, programs_in
from batchax.execution.bounded_loop import bounded_loop_p
from batchax.explain.account import Equation, Service, Source, Value, Work
from batchax.frontend.outputs import AUTO, OutputArray, Reduce
from batchax.jaxprs.bodies import Body, bodies_of, programs_inside
from batchax.jaxprs.evaluate import plan
from batchax.jaxprs.primitive_facts import facts_of, shown
from batchax.jaxprs.types import Aval, ClosedJaxpr, Eqn, Jaxpr
from batchax.kernel.axis import Axis, Position, Positions
from batchax.kernel.inner import batched_aval
from batchax.kernel.recording import PerExample, Record, Recorder
from batchax.kernel.registry import find_rule, rule_origin
from batchax.rows.ragged import Ragged
from batchax.staging import Staged

_LETTERS = string.ascii_lowercase


class Names:
    """Names each variable: by the argument it is, or by a letter."""

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._numbers: set[Any] = set()  # variables that are a literal outside
        self._letters = 0
        self._taken: set[str] = set()  # by arguments

    def give(self, variable: Var, name: str) -> None:
        self._names.setdefault(variable, name)
        self.take(name)

    def take(self, name: str) -> None:
        """Reserves a name that something else has."""
        self._taken.add(name)

    def enter(self, program: Jaxpr) -> None:
        """Forgets what is inside a program: called twice, it has other values each time."""
        made = (v for eqn in program.eqns for v in eqn.outvars)
        for variable in (*program.constvars, *program.invars, *made):
            self._names.pop(variable, None)
            self._numbers.discard(variable)

    def same(self, variable: Var, other: Var | Literal) -> None:
        """Says that a variable, inside a call, is what `other` is outside."""
        self._names[variable] = self.of(other)
        if self.is_number(other):
            self._numbers.add(variable)

    def is_number(self, variable: Var | Literal) -> bool:
        """Whether it is a literal, here or outside of the calls around, and called by its value."""
        return isinstance(variable, Literal) or variable in self._numbers

    def of(self, variable: Var | Literal) -> str:
        """Returns what a variable is called; a literal is called by its value."""
        if isinstance(variable, Literal):
            return _number(variable.val)
        if variable not in self._names:
            while letters(self._letters) in self._taken:
                self._letters += 1
            self._names[variable] = letters(self._letters)
            self._letters += 1
        return self._names[variable]


def letters(n: int) -> str:
    """Returns the name of the `n`-th variable: a, b, ..., z, ba, bb, ..."""
    name = _LETTERS[n % 26]
    while n >= 26:
        n = n // 26
        name = _LETTERS[n % 26] + name
    return name


def _number(value: object) -> str:
    if getattr(value, "shape", ()) != ():
        return "..."
    try:
        number = np.asarray(value).item()
    except TypeError:  # of a type that has no numbers, such as a random key
        return "..."
    return f"{number:g}" if isinstance(number, float) else str(number)


@dataclass
class Tally:
    """Says what an equation became, except for what is inside programs that it holds."""

    emitted: list[str] = field(default_factory=list)  # names of operations, in order
    work: Work = field(default_factory=Work)  # as often as they run, on all devices that do
    moves: int = 0  # bytes of arrays whose axes were transposed
    broadcasts: int = 0  # bytes written to repeat arrays
    times: int | None = 1  # how often they run; None if that is not known
    skipped: bool = False  # whether they are in a branch, of a ``cond``, that may not run

    def add(self, other: Tally) -> None:
        self.emitted += other.emitted
        self.work += other.work
        self.moves += other.moves
        self.broadcasts += other.broadcasts
        if self.times is not None and (other.times is None or other.times > self.times):
            self.times = other.times


class Attribution:
    """Sorts the operations of a batched program by the equations they are of; those of none under
    None.
    """

    def __init__(self, recorder: Recorder, program: ClosedJaxpr) -> None:
        self._recorder = recorder
        self.tallies: dict[Record | None, Tally] = {}
        self._walk(program, {}, None, 1, False, 1)

    def _walk(
        self,
        program: Jaxpr | ClosedJaxpr,
        integers: Mapping[Any, int],
        around: Record | None,
        times: int | None,
        skipped: bool,
        devices: int,
    ) -> None:
        integers = integers_in(program, integers)
        jaxpr = getattr(program, "jaxpr", program)
        for eqn, *_ in plan(jaxpr.eqns, jaxpr.outvars):
            # What a rule calls has no mark, and belongs to its caller.
            record = self._recorder.record_of(eqn.source_info.name_stack) or around
            with self._recorder.active(inside=record):
                inner = programs_in(eqn, integers)
            if not inner:
                cost = cost_of_equation(eqn, integers)
                self._add(record, eqn, devices * cost, times, skipped)
                continue
            # A loop or branch costs something itself: it moves its carry, and cuts what it takes
            # apart.
            if any(p.role != "call" for p in inner):
                self._add(record, eqn, devices * cost_around(eqn, inner), times, skipped)
            each, branches = devices * devices_of(eqn), []
            for p, runs in zip(inner, _run_here(eqn, len(inner)), strict=True):
                often = None if times is None or p.times is None else times * p.times
                if not p.is_branch:
                    self._walk(p.jaxpr, p.integers, record, often, skipped, each * runs)
                    continue
                outside, self.tallies = self.tallies, {}
                self._walk(p.jaxpr, p.integers, record, often, True, each * runs)
                branches.append(self.tallies)
                self.tallies = outside
            self._add_branches(branches)

    def _add(
        self, record: Record | None, eqn: Eqn, cost: Cost, times: int | None, skipped: bool
    ) -> None:
        # Where the number of steps is not known, one step is counted.
        often = 1 if times is None else times
        name, written = eqn.primitive.name, bytes_of(v.aval for v in eqn.outvars)
        # A broadcast that writes no more than it reads only adds dimensions of size one.
        repeats = name == "broadcast_in_dim" and written > bytes_of(v.aval for v in eqn.invars)
        tally = self.tallies.setdefault(record, Tally(times=times, skipped=skipped))
        tally.add(
            Tally(
                [shown(eqn.primitive)],
                Work(often * (cost.flops + cost.transcendentals), often * cost.bytes),
                moves=written * (name == "transpose"),
                broadcasts=written * repeats,
                times=times,
            )
        )

    def _add_branches(self, branches: Sequence[Mapping[Record | None, Tally]]) -> None:
        """Adds the operations of all branches, and what the costliest of them costs."""
        for record in dict.fromkeys(record for branch in branches for record in branch):
            own = [branch[record] for branch in branches if record in branch]
            one = max(own, key=lambda t: t.work.flops + t.work.bytes)
            tally = self.tallies.setdefault(record, Tally(times=one.times, skipped=one.skipped))
            for t in own:
                tally.add(t if t is one else Tally(t.emitted, times=t.times))


def _run_here(eqn: Eqn, programs: int) -> list[bool]:
    """Says which programs of an equation run on this platform: of those for several, one."""
    platforms = eqn.params.get("branches_platforms") or [None] * programs
    here = jax.default_backend()
    names = {here, "cuda", "rocm"} if here == "gpu" else {here}
    own = [names.intersection(p or ()) != set() for p in platforms]
    return own if any(own) else [p is None for p in platforms]


@dataclass(eq=False)
class Entry:
    """Holds an equation with all its records: chunks of several sizes have one for each size."""

    records: list[Record] = field(default_factory=list)
    tallies: list[Tally] = field(default_factory=list)
    within: list[tuple[Record, Tally]] = field(default_factory=list)  # what rules do by programs
    parts: list[Entry] = field(default_factory=list)

    @property
    def shown(self) -> Record:
        """Returns the record that tells of the most lanes."""
        return max(self.records, key=lambda r: (lanes_of(r.axis), -r.number))

    @property
    def eqn(self) -> Eqn:
        return self.records[0].eqn


def lanes_of(axis: Axis) -> int:
    return axis.size if isinstance(axis.size, int) else 1


def entries_of(recorder: Recorder, attribution: Attribution) -> list[Entry]:
    """Returns what became part of the batched program, as a tree."""
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
        # Work of jaxprs that a rule makes belongs to the equation of the rule.
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
    """Returns the number of the equation that a compiled operation is of; "" if none."""
    record = recorder.record_of(op_name or "")
    # What is inside of something that is listed as a whole has no number, and belongs to it.
    while record is not None and record not in numbers:
        record = record.parent
    return "" if record is None else numbers[record]


def _places(recorder: Recorder) -> dict[Record, Any]:
    """Returns where each equation is: records of one place are of one equation."""
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
        # Chunks of another size may make a second program, with the same operations.
        first = made.setdefault((around, operations), (lanes, program))
        if first[0] != lanes:
            program = first[1]
        places.update((r, (around, program, i)) for i, r in enumerate(records))
    return places


def _used_runs(recorder: Recorder, attribution: Attribution) -> set[Any]:
    """Returns the runs through programs of which the batched program is made."""
    # Other runs were to find out which values are batched: nothing that they emitted is left.
    used: set[Any] = set()
    for record in attribution.tallies:
        while record is not None:
            used.add(record.run)
            record = record.parent
    runs: dict[Any, list[Any]] = {}
    for record in recorder.records:
        runs.setdefault((record.parent, record.role), []).append(record.run)
    for (parent, _), of_role in runs.items():
        # A run may leave nothing, because all that was to be done is to move an axis in mind. Of
        # those the last counts.
        if used.isdisjoint(of_role) and (parent is None or parent.run in used):
            used.add(of_role[-1])
    return used


def _runs_programs(entry: Entry) -> bool:
    """Whether what is inside an equation is its own, and not how its rule goes about it."""
    eqn = entry.eqn
    own = facts_of(eqn.primitive).control or eqn.primitive.name == "call_hi_primitive"
    return own or is_users(entry.shown) or bool(programs_inside(eqn))


def shown_name(eqn: Eqn) -> str:
    name, called = shown(eqn.primitive), eqn.params.get("name")
    return f"{name} {called}" if isinstance(called, str) and called else name


def served_by(record: Record) -> tuple[Service, str]:
    """Returns how an equation was batched, and the name of the rule that did it."""
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


_LIBRARY = os.path.dirname(jax.__file__)


class Listing:
    """Lists the equations of a function, and says where the one a record is of stands."""

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
        """Iterates over entries with the lines and roles they are listed under, calls opened.

        `caller` is the line for all of them, if they are of a function of JAX; `around` that of
        what they are inside of.
        """
        for entry in entries:
            record = entry.shown
            source = caller or source_of(entry.eqn, around)
            role_of_it = record.role or role
            # Calls have no entry: what is inside stands in their place, with the operands' names.
            if not entry.parts or facts_of(entry.eqn.primitive).control or is_users(record):
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
        # An equation that emitted nothing runs as often as what is around it.
        tallies = [*entry.tallies, *(t for _, t in entry.within)] or [Tally(times=around)]
        emitted = max((t.emitted for t in entry.tallies), key=len, default=[])
        counts = [t.times for t in tallies]
        times = None if None in counts else max(c for c in counts if c is not None)
        inputs = self._values(eqn.invars, record.in_axes, record.axis, record.in_types)
        out_axes, out_types = record.out_axes, record.out_types
        # Where other operations stand in for the equation, they say how its values are placed.
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
            # A transposition, or a broadcast, of the user's is no cost of batching.
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
        """Names the inputs of the programs in a loop or branch; returns the pairs of names, inside
        and at first, of what loops carry or take apart.
        """
        operands, pairs, condition = entry.eqn.invars, (), ()
        for body in _bodies_of(entry.eqn):
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

    def _entered(self, entry: Entry, given: ClosedJaxpr, role: str) -> Sequence[Any]:
        """Returns the inputs of a program in `entry`, which may have been run in another form."""
        first = (part.records[0] for part in entry.parts)
        forms = (r.run.program for r in first if r.role == role and r.run is not None)
        program = next(forms, given.jaxpr)
        self.names.enter(program)
        # That form has other inputs only in front: which lanes are active.
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
        axes: Positions,
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
    """Returns batch axes and types of the results of what stands in for equations."""
    results: dict[Any, tuple[Position, Any]] = {}
    widest = sorted(recorder.records, key=lambda r: lanes_of(r.axis))
    for record in widest:
        if record.parent is not None and record.parent.stand_in is not None:
            for v, a in zip(record.eqn.outvars, record.out_axes, strict=False):
                results[v] = a, batched_aval(record.axis, v.aval, a)
    return results


def value_of(
    name: str,
    example: Aval,
    position: Position,
    axis: Axis,
    batched: Aval | None = None,
    literal: bool = False,
) -> Value:
    if batched is None:
        batched = example
        if position is not None and getattr(example, "shape", None) is not None:
            batched = batched_aval(axis, example, position)
    size = bytes_of([batched])
    return Value(name, type_name(example), type_name(batched), position, size, literal)


def type_name(aval: Aval) -> str:
    """Returns a type as programs are printed: ``f32[3]``."""
    try:
        return aval.str_short(short_dtypes=True)
    except (AttributeError, TypeError):
        return str(aval)


def source_of(eqn: Eqn, around: Source | None) -> Source:
    """Returns the line that made an equation; a library's with the user's line that led there."""
    source, own = Source(*source_line(eqn)), calling_line(eqn)
    if own is not None:
        return replace(source, called_from=Source(*own))
    # JAX forgets where a function that it stages by itself was called from. The line of what the
    # equation is inside of takes its place.
    if around is None or not is_installed(source.file):
        return source
    led = around.called_from or around
    return source if is_installed(led.file) else replace(source, called_from=led)


def _bodies_of(eqn: Eqn) -> tuple[Body, ...]:
    """Returns the programs that an equation runs; of a bounded loop with what goes into them."""
    if eqn.primitive is not bounded_loop_p:
        return bodies_of(eqn)
    form, test, body = (eqn.params[k] for k in ("form", "test", "body"))
    at = form.split(range(len(eqn.invars)))
    of_body = Body("body", body, (*at.consts, *at.carry, *at.xs), (), form.n_consts, form.n_carry)
    if test is None:
        return (of_body,)
    return Body("condition", test, (*at.test, *at.carry), (), form.n_test, form.n_carry), of_body


def _program_of(part: Entry) -> Jaxpr:
    run = part.records[0].run
    assert run is not None
    return run.program


def _passed_to(eqn: Eqn) -> Sequence[Any]:
    """Returns what a call passes to the program that it runs: mostly, all of its operands."""
    if eqn.primitive.name != "custom_linear_solve":
        return eqn.invars
    # First the constants of each of its programs, of which the one that solves is run.
    lengths = eqn.params["const_lengths"]
    first = lengths.matvec + lengths.vecmat
    return [*eqn.invars[first : first + lengths.solve], *eqn.invars[sum(lengths) :]]


def _is_library(program: Jaxpr) -> bool:
    """Whether a program is of a function of JAX, whose lines say nothing to users."""
    # Staged once, it is shared by all who call it, with the lines of the one who did first.
    file = getattr(getattr(program, "debug_info", None), "func_filename", None) or ""
    return file.startswith(_LIBRARY)


def _work_of_parts(parts: Sequence[Equation], record: Record) -> Work:
    """Returns what the parts cost; of branches of which one runs, the costliest."""
    by_role: dict[str, Work] = {}
    for part in parts:
        by_role[part.role] = by_role.get(part.role, Work()) + part.work
    if record.eqn.primitive.name == "cond" and record.notes.get("divergence") == "together":
        return max(by_role.values(), key=lambda w: w.flops + w.bytes, default=Work())
    return sum(by_role.values(), Work())


def arguments_of(staged: Staged, example: PerExample | None, names: Names) -> tuple[Value, ...]:
    """Returns the arguments, whose names their variables in the program get."""
    given = {} if example is None else example.arguments
    values = []
    for placeholder, path in zip(staged.placeholders, staged.paths, strict=True):
        variable, position = given.get(placeholder, (None, None))
        if variable is None:  # the program does not use it
            names.take(path)
        else:
            names.give(variable, path)
        example, batched = (variable or placeholder).aval, placeholder.aval
        types = type_name(example), type_name(batched)
        values.append(Value(path, *types, position, bytes_of([batched])))
    return tuple(values)


def outputs_of(
    example: PerExample, names: Names, described: Sequence[OutputArray], types: Sequence[Any]
) -> tuple[Value, ...]:
    """Returns the results, named as their variables, with their types as they are placed."""
    values = []
    for v, output, final in zip(example.outputs, described, types, strict=True):
        if isinstance(final, Ragged):
            position, final = final.element_axis, final.data
        else:
            position = _out_axis(output.spec, v.aval, final)
        aval = ShapedArray(final.shape, final.dtype)
        value = value_of(names.of(v), v.aval, None, example.axis)
        as_placed = type_name(aval), position, bytes_of([aval])
        values.append(Value(value.name, value.example, *as_placed, result=output.path))
    return tuple(values)


def _out_axis(spec: Any, example: Aval, final: Aval) -> int | None:
    if spec is None or isinstance(spec, Reduce):
        return None
    if spec is AUTO:
        # With AUTO an output that does not depend on the lane is returned once.
        return None if len(final.shape) == len(example.shape) else 0
    return spec % len(final.shape)
