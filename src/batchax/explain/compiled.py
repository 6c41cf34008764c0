"""What is read of the compiled program and its runs: memory, devices, counted steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from batchax import _compat
from batchax.analysis.counted import Counted, Mark, loop_number, with_marks
from batchax.analysis.liveness import LiveValue, values_at_peak
from batchax.divergence.policy import SHOWN, Alone, FewAlone, Probed
from batchax.errors import UnsupportedError
from batchax.execution.devices.shards import Shards
from batchax.execution.memory import memory_of
from batchax.explain.account import Collective, Devices, Equation, Held, Memory, StepCount, Work
from batchax.explain.findings.operations import FindingContext
from batchax.explain.listing import Attribution, Listing, Names, number_of, value_of
from batchax.explain.wording import show_masked
from batchax.jaxprs.bodies import Anywhere, programs_inside
from batchax.jaxprs.types import Eqn, Value
from batchax.kernel.named_axes import any_uses_axis
from batchax.kernel.recording import PerExample, Record, Recorder
from batchax.staging import Staged, stage
from batchax.vmap import vmap

_MOST_HELD = 12  # values in memory that are listed, the largest first
_ARGUMENT = re.compile(r"\w+\[(\d+)\]")


def find_memory(
    compiled: jax.stages.Compiled,
    recorder: Recorder,
    numbers: Mapping[Record, str],
    paths: Sequence[str],
) -> Memory:
    """Finds what a compiled program holds at its worst moment; `paths` names its arguments."""
    account, values = memory_of(compiled), values_at_peak(compiled)
    held = tuple(_held(v, recorder, numbers, paths) for v in values[:_MOST_HELD])
    return Memory(account.bytes, account.arguments, account.outputs, account.temporaries, held)


def _held(
    value: LiveValue, recorder: Recorder, numbers: Mapping[Record, str], paths: Sequence[str]
) -> Held:
    name = value.op_name or ""
    argument = _ARGUMENT.fullmatch(name)
    # The compiler names parameters ``args[3]``, by their place.
    if value.kind == "argument" and argument and int(argument[1]) < len(paths):
        what = paths[int(argument[1])]
    else:
        what = name.rpartition("/")[2] or value.opcode
    number = number_of(name, recorder, numbers)
    return Held(what, value.shape, value.bytes, value.kind, number)


def counted_by_compiler(compiled: jax.stages.Compiled) -> Work | None:
    try:
        counts = compiled.cost_analysis() or {}
    except NotImplementedError:
        return None
    if "flops" not in counts:
        return None
    # XLA counts exp, log and their like apart. Here they are one operation each.
    flops = counts["flops"] + counts.get("transcendentals", 0.0)
    return Work(flops, counts.get("bytes accessed", 0.0))


_COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute "
    "collective-broadcast".split()
)


def find_devices(
    context: FindingContext, staged: Staged, names: Names, shards: Shards, shared: Sequence[Any]
) -> Devices:
    """Describes what the lanes are spread over; lanes share the variables `shared`."""
    given = dict(zip(staged.paths, staged.arrays, strict=True))
    axis = context.recorder.programs[0].axis
    copies = (value_of(names.of(v), v.aval, None, axis) for v in shared)
    return Devices(
        axes=tuple(map(str, shards.names)),
        count=shards.count,
        each=shards.each,
        repeated=shards.count * shards.each - shards.lanes,
        replicated=tuple(
            # What the function closes over has no name that a user would know.
            x if x.name in given else replace(x, name=f"a closed-over {x.example}")
            for x in copies
            if not _is_sharded(given, x.name)
        ),
        collectives=None if context.module is None else tuple(_collectives(context)),
    )


def _is_sharded(given: Mapping[str, Any], name: str) -> bool:
    """Whether an argument is known to be spread over another mesh axis: no device has all of it."""
    sharding = getattr(given.get(name), "sharding", None)
    return sharding is not None and not sharding.is_fully_replicated


def _collectives(context: FindingContext) -> Iterator[Collective]:
    for instruction in context.instructions():
        # An asynchronous collective is two instructions, of which the second has its result.
        kind = instruction.opcode.removesuffix("-done")
        if kind in _COLLECTIVES:
            yield Collective(kind, instruction.shape.bytes, context.number_of(instruction))


_Key = tuple[int, int | None]
"""The number of a loop, and of a branch."""


def count_steps(
    batched: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    equations: Mapping[str, Equation],
    in_chunks: bool,
    lengths_known: bool = True,
) -> tuple[StepCount, ...]:
    if not any(e.primitive in _SHOWN for e in equations.values()):
        return ()
    staged = stage(batched, args, kwargs, (), partial(Recorder, counts=True), lengths_known)
    why = _uncountable(staged)
    if not why:
        try:
            return tuple(_counted(staged, equations, in_chunks))
        except UnsupportedError as error:
            why = f"{error}"
    return steps_unknown(equations, why)


def steps_unknown(equations: Mapping[str, Equation], why: str) -> tuple[StepCount, ...]:
    shown = (e for e in equations.values() if e.primitive in _SHOWN)
    return tuple(c for eqn in shown for c in _each(eqn, {}, {}, {}, 0, why))


_SHOWN = "scan", "while", "cond", "bounded loop", "derivative of a bounded loop"


def _uncountable(staged: Staged) -> str:
    """Says why nothing can be counted of a batched function; empty if it may be."""
    recorder, program = staged.recorder, staged.traced.jaxpr
    facts = {about for about, _ in recorder.facts}
    if "shards" in facts:
        return "lanes are on several devices"
    if "rows" in facts:
        return "rows are of different lengths"
    if _compat.ordered_by_lane(program.effects):
        return "it has a host callback, which would be called once more"
    if _writes.in_program(program):
        return "it has references"
    if len(recorder.programs) != 1:
        return "it is more than one call of vmap"
    # A variable of an inner program, such as that of a scan around `vmap`, has no value outside of
    # it.
    variables = {*program.jaxpr.invars, *program.jaxpr.constvars}
    variables.update(v for eqn in program.jaxpr.eqns for v in eqn.outvars)
    if any(_is_variable(v) and v not in variables for v in recorder.programs[0].given):
        return "vmap is called inside of something else"
    return ""


_writes = Anywhere(lambda eqn: _compat.makes_references(eqn.effects))


def _is_variable(x: Any) -> bool:
    return not hasattr(x, "dtype") and hasattr(x, "aval")


def _counted(
    staged: Staged, equations: Mapping[str, Equation], in_chunks: bool
) -> Iterator[StepCount]:
    recorder = staged.recorder
    # One program of one example: `_uncountable` excludes others.
    (example,) = recorder.programs
    variables = [v for v in example.given if _is_variable(v)]
    n_outs = len(staged.traced.jaxpr.jaxpr.outvars)
    counted = _counting(staged)

    @jax.jit
    # The values that `vmap` is given are computed by the program around it: they are results, too.
    def run(*arrays: Any) -> tuple[Any, Any]:
        outs, counts = counted(*arrays, more=variables)
        return outs[n_outs:], counts

    values, counts = run(*staged.arrays)
    values = dict(zip(variables, values, strict=True))
    given = [values[x] if _is_variable(x) else x for x in example.given]
    done = _by_key(counted.marks, counts)
    # The size of a chunk: the last one may be smaller.
    chunk = max((m.lanes for m in counted.marks), default=None) if in_chunks else None
    needed, masked = _needed(example, given, chunk)
    loops, seen = _loops(staged, example.axis.size), set[int]()
    # Numbers of loops whose steps are not counted, nor those of loops inside, and why: a section
    # runs for all chunks, and a kernel that runs lanes sequentially counts nothing.
    uncounted: dict[str, str] = {}
    for number, eqn in equations.items():
        loop, held = loops.get(number, (None, None))
        if loop is None and eqn.primitive == "while":
            yield from _each(eqn, {}, {}, {}, 0, "it runs lanes of an inner vmap, too")
        if loop is None or held is None or loop in seen:  # for another number of lanes
            continue
        seen.add(loop)
        if in_chunks and any_uses_axis(example.axis, *map(_compat.close, programs_inside(held))):
            uncounted[f"{number}."] = "lanes of all chunks meet in it"
        elif eqn.notes.get("divergence") in _SEQUENTIAL:
            uncounted[f"{number}."] = "lanes run sequentially in a single kernel"
        why = next((why for n, why in uncounted.items() if f"{number}.".startswith(n)), "")
        if why:
            yield from _each(eqn, {}, {}, {}, 0, why)
            continue
        own = [{b: x for (k, b), x in d.items() if k == loop} for d in (needed, done, masked)]
        # In chunks no window holds all lanes, so that the bound is what is needed.
        lanes = 0 if in_chunks else example.axis.size
        yield from _each(eqn, own[0], own[1], own[2], lanes)


_SEQUENTIAL = [SHOWN[kind] for kind in (Alone, FewAlone, Probed)]


def _counting(staged: Staged) -> Counted:
    recorder = staged.recorder

    def around(eqn: Eqn) -> AbstractContextManager[None]:
        return recorder.active(inside=recorder.record_of(eqn.source_info.name_stack))

    return Counted(staged.traced.jaxpr, around)


def _needed(
    example: PerExample, given: Sequence[Any], chunk: int | None
) -> tuple[dict[_Key, Any], dict[_Key, int]]:
    """Counts the steps that each lane takes by itself, and what masked lanes would do."""
    (program,), _ = _compat.hoist_constants(example.program)
    marks: list[Mark] = []

    def of_one_lane(*values: Any) -> Any:
        counted = Counted(with_marks(program))
        marks[:] = counted.marks
        return counted(*values)[1]

    axis = example.axis
    # The count of one lane is a result of the per-example program. Batched with masks only, the run
    # gives both: each lane's own steps, and the steps of the masked program.
    batched = vmap(
        of_one_lane,
        tuple(example.positions),
        axis_name=axis.name,
        axis_size=axis.size,
        batch_size=chunk,
        divergence="predicate",
    )
    staged = stage(batched, tuple(given), {}, (), partial(Recorder, counts=True, numbers=False))
    counted = _counting(staged)
    (own,), counts = jax.jit(counted)(*staged.arrays)
    own = np.asarray(own).astype(np.int64)
    of_lanes = {(m.loop, m.branch): own[:, i] for i, m in enumerate(marks)}
    return of_lanes, _by_key(counted.marks, counts)


def _by_key(marks: Sequence[Mark], counts: Value) -> dict[_Key, int]:
    sums: dict[_Key, int] = {}
    for mark, count in zip(marks, np.asarray(counts), strict=True):
        key = mark.loop, mark.branch
        sums[key] = sums.get(key, 0) + mark.lanes * int(count)
    return sums


def _loops(staged: Staged, lanes: int) -> dict[str, tuple[int, Any]]:
    """Returns the number of each loop, and of each set of branches, and its equation of one
    example.
    """
    recorder = staged.recorder
    listing = Listing(recorder, Attribution(recorder, staged.traced.jaxpr), Names(), lanes)
    loops = ((n, loop_number(r.eqn), r.eqn) for r, n in listing.numbers.items())
    return {number: (loop, eqn) for number, loop, eqn in loops if loop is not None}


def _each(
    eqn: Equation,
    needed: Mapping[int | None, Any],
    done: Mapping[int | None, int],
    masked: Mapping[int | None, int],
    lanes: int,
    why: str = "",
) -> Iterator[StepCount]:
    """Makes the counts of a loop, or of each of its branches."""
    notes = eqn.notes
    branches: Sequence[int | None] = [None]
    if eqn.primitive == "cond":
        parts = {p.role.removeprefix("branch ") for p in eqn.parts}
        listed = {int(b) for b in parts if b.isdigit()}
        # A branch may have no equation in the listing, and still be counted.
        branches = sorted(listed | {b for b in needed if b is not None})
    for branch in branches:
        way = notes.get("divergence", "together")
        if way == "grouped" and branch not in notes["apart"]:
            way = "masked"
        if way == "grouped" and branch in notes["decided"]:
            way = "decided"
        if eqn.service == "once":
            yield StepCount(eqn.number, branch, "once", why=why or "it runs once for all lanes")
        elif why or branch not in needed:
            yield StepCount(eqn.number, branch, way, why=why or "it is not run as it is")
        elif branch not in done and eqn.service != "own":
            yield StepCount(eqn.number, branch, way, why="a rule that is not batchax's runs it")
        else:
            each, computed = needed[branch], done.get(branch, 0)
            total, longest = int(each.sum()), int(each.max(initial=0))
            # In a window of all lanes no lane waits to refill a slot.
            whole = way == "flat" and notes["widths"] == (lanes,) and not _holds_flat(eqn)
            least = lanes * longest if whole else total
            yield StepCount(
                eqn.number,
                branch,
                way,
                total,
                computed,
                masked.get(branch),
                longest,
                least,
                masked_for=show_masked(eqn, branch) if way == "masked" else "",
            )


def _holds_flat(eqn: Equation) -> bool:
    """Whether lanes advance independently between loops inside it, too."""
    return any(e.notes.get("divergence") == "flat" for e in eqn.walk() if e is not eqn)
