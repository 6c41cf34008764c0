"""What findings are made from, and findings about single operations: copies, gathers, fallbacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from batchax import _compat
from batchax.analysis.cost import (
    CALLBACK,
    FINDINGS,
    SCATTERS,
    STEP,
    calls_of,
    cost_of_equation,
    matrices_of,
    size_of,
    windows_of,
)
from batchax.analysis.hlo import Computation, Instruction, Module, UnreadableProgram, read_module
from batchax.execution.memory import show_bytes
from batchax.explain.account import Equation, Finding, Memory, Timing, Work
from batchax.explain.listing import Tally, number_of
from batchax.explain.wording import marked, show_flops
from batchax.jaxprs.error_format import count
from batchax.jaxprs.primitive_facts import facts_of
from batchax.jaxprs.types import Values
from batchax.kernel.recording import Record, Recorder
from batchax.linalg.table import chooses


def price(work: Work) -> float:
    return FINDINGS.flop * work.flops + FINDINGS.byte * work.bytes


def price_fused(equations: Sequence[Equation]) -> float:
    """Returns the price if elementwise operations are fused into what reads them, and move no
    bytes.
    """
    total = 0.0
    for eqn in equations:
        if eqn.parts:
            total += price_fused(eqn.parts)
        elif eqn.rule in _FUSED:
            total += FINDINGS.flop * eqn.work.flops
        else:
            total += price(eqn.work)
    return total


_SLOWER = 1.25  # times what was measured of another way: worth a word


def pays(now: Timing, then: Timing) -> bool:
    """Whether a way is so much faster than another that no round of it took as long."""
    return then.seconds * _SLOWER <= now.seconds and then.spread[1] <= now.spread[0]


_FUSED = frozenset(["rules.elementwise", "rules.shape", "rules.masking"])


@dataclass(frozen=True)
class FindingContext:
    """Holds an explanation to which findings are yet to be added."""

    equations: Sequence[Equation]
    numbers: Mapping[Record, str]  # the number in the listing
    tallies: Mapping[Record | None, Tally]  # what each equation became
    recorder: Recorder
    options: Mapping[str, Any]  # those that `vmap` was given
    lanes: int
    each: int  # lanes of one device: all, unless they are spread over several
    compiled: Any = None
    memory: Memory | None = None
    arguments: Values = field(default=())
    outputs: Values = field(default=())
    timings: Sequence[Timing] = field(default=())  # that of the program as it is first
    # advice that was followed to measure what it brings, even if it raised
    tried: Sequence[Mapping[str, Any]] = field(default=())

    @property
    def temporaries(self) -> int | None:
        return self.memory and self.memory.temporaries

    @cached_property
    def records(self) -> dict[str, list[Record]]:
        """Returns the records by number in the listing; that of the most lanes first."""
        by_number: dict[str, list[Record]] = {}
        for record, number in self.numbers.items():
            by_number.setdefault(number, []).append(record)
        for records in by_number.values():
            records.sort(key=lambda r: -r.axis.size if isinstance(r.axis.size, int) else 0)
        return by_number

    @cached_property
    def lanes_at_once(self) -> frozenset[int]:
        """Returns the numbers of lanes that run together: of all, or of a chunk."""
        return frozenset([self.lanes, *(r.axis.size for r in self.numbers)])

    def equation(self, number: str) -> Equation | None:
        return self._by_number.get(number)

    @cached_property
    def _by_number(self) -> dict[str, Equation]:
        return {eqn.number: eqn for top in self.equations for eqn in top.walk()}

    def walk(self) -> Iterator[tuple[Equation, Record]]:
        for top in self.equations:
            for eqn in top.walk():
                yield eqn, self.records[eqn.number][0]

    @cached_property
    def module(self) -> Module | None:
        if self.compiled is None:
            return None
        try:
            return read_module(self.compiled)
        except UnreadableProgram:
            return None

    @cached_property
    def price(self) -> float:
        """Returns the price of one call; a loop of unknown length counts as one step."""
        outside = self.tallies.get(None)
        work = Work() if outside is None else outside.work
        return price(sum((eqn.work for eqn in self.equations), work))

    def instructions(self) -> Iterator[Instruction]:
        """Iterates over instructions that write memory: none that are part of others."""
        if self.module is None:
            return
        inside: set[str] = set()
        everything = [i for c in self.module.computations.values() for i in c.instructions]
        for instruction in everything:
            # Computations that these call run by themselves; what others call is fused, or combines
            # two elements.
            if instruction.opcode not in ("while", "conditional", "call"):
                inside.update(instruction.called)
        for name, computation in self.module.computations.items():
            if name not in inside:
                yield from computation.instructions

    def number_of(self, instruction: Instruction) -> str:
        return number_of(instruction.op_name, self.recorder, self.numbers)


def lanes_at_a_time(context: FindingContext, record: Record) -> str:
    """Tells how many lanes run together: "8,192 lanes", "the 256 lanes that run at a time"."""
    size = record.axis.size
    if size == context.lanes or not isinstance(size, int):
        return count(context.lanes, "lane")
    return f"the {count(size, 'lane')} that run at a time"


# Through these an array goes as it is, or in another order of its elements in memory.
_SAME = frozenset(["bitcast", "copy", "reshape"])


def repeated(context: FindingContext) -> Iterator[Finding]:
    """Finds operands that are written for each lane though lanes share them."""
    by_equation: dict[str, list[Instruction]] = {}
    for instruction in context.instructions():
        made = _made_by(context, instruction, "broadcast")
        if made is not None and _repeats_lanes(context, instruction, *made):
            by_equation.setdefault(context.number_of(instruction), []).append(instruction)
    for number, instructions in by_equation.items():
        size = sum(i.shape.bytes for i in instructions)
        types = ", ".join(dict.fromkeys(i.shape.text for i in instructions))
        eqn = context.equation(number)
        what = "an output that is the same in all lanes" if eqn is None else _shared_of(eqn)
        yield Finding(
            "copied for each lane",
            f"{what[0].upper()}{what[1:]} is written once for each of "
            f"{count(context.lanes, 'lane')}: {types}, {show_bytes(size)}.",
            _remedy_of_repeated(eqn),
            number,
            2 * FINDINGS.byte * size * _times(eqn),  # written, and read
        )


def _times(eqn: Equation | None) -> int:
    return 1 if eqn is None else eqn.times or 1


def _made_by(
    context: FindingContext, instruction: Instruction, opcode: str
) -> tuple[Instruction, Computation | None] | None:
    """Returns the operation of that kind whose result an instruction writes as it is, and where it
    is.
    """
    if instruction.opcode == opcode:
        return instruction, None
    if instruction.opcode != "fusion" or context.module is None:
        return None
    inside = context.module.computations[instruction.called[0]]
    by_name = {i.name: i for i in inside.instructions}
    made = by_name[inside.root]
    while made.opcode in _SAME and made.operands:
        made = by_name[made.operands[0]]
    return (made, inside) if made.opcode == opcode else None


def _repeats_lanes(
    context: FindingContext, instruction: Instruction, made: Instruction, where: Computation | None
) -> bool:
    """Whether an array, not a number, is written as often as there are lanes at a time."""
    if where is None:
        scopes = context.module.computations.values() if context.module else ()
        where = next(c for c in scopes if any(i is instruction for i in c.instructions))
    source = next((i for i in where.instructions if i.name == made.operands[0]), None)
    if source is None or not source.shape.bytes or "[]" in source.shape.text:
        return False
    return round(instruction.shape.bytes / source.shape.bytes) in context.lanes_at_once


def _shared_of(eqn: Equation) -> str:
    shared = [v.name for v in eqn.inputs if v.axis is None and "[]" not in v.example]
    if len(shared) == 1:
        return f"`{shared[0]}`, which `{eqn.primitive}` takes and all lanes share,"
    return f"what `{eqn.primitive}` takes and all lanes share"


def _remedy_of_repeated(eqn: Equation | None) -> str:
    if eqn is None:
        return "Pass out_axes=None for it, or out_axes=batchax.AUTO: it is returned once then."
    if eqn.primitive in ("while", "scan", "bounded loop"):
        return (
            "It is part of the carry, which some step makes depend on the lane. Leave what does "
            "not change out of the carry: a loop may close over it."
        )
    if eqn.primitive in ("concatenate", "stack", "pad"):
        return (
            f"`{eqn.primitive}` joins it with batched values. Use both parts separately: "
            "w[:k] @ x + w[k:] @ y in place of w @ jnp.concatenate([x, y])."
        )
    return (
        "Use it in operations that take an unbatched value, such as a product with a batched one, "
        f"before `{eqn.primitive}`; or keep it out of `{eqn.primitive}`."
    )


def transposed(context: FindingContext) -> Iterator[Finding]:
    """Finds arrays whose batch axis is moved."""
    reported: set[str] = set()  # results
    for instruction in context.instructions():
        if _made_by(context, instruction, "transpose") is None:
            continue
        number, size = context.number_of(instruction), instruction.shape.bytes
        eqn = context.equation(number)
        moved = (
            _output_of(context, instruction, reported)
            if eqn is None
            else _argument_of(context, eqn)
        )
        if moved is None:
            continue
        what, remedy = moved
        yield Finding(
            "transposed array",
            f"{what}: {show_bytes(size)} are written again, as {instruction.shape.text}.",
            remedy,
            number,
            # Read and written, and one of both in short pieces.
            4 * FINDINGS.byte * size * _times(eqn),
        )


def _argument_of(context: FindingContext, eqn: Equation) -> tuple[str, str] | None:
    """Returns what of an equation's operands has its batch axis elsewhere than wanted."""
    if eqn.primitive == "transpose":
        return None  # the user's own
    names = {v.name: v for v in context.arguments}
    for value in eqn.inputs:
        if not value.axis:
            continue
        what = f"The batch axis of {value.name}, {marked(value)}, is moved"
        if value.name in names:
            return what, f"Store {value.name} with the batch axis first, and pass in_axes=0 for it."
        sources = [v for v in context.arguments if v.axis]
        if not sources:
            return what, "Compute it so that the batch axis is first."
        listed = " and ".join(v.name for v in sources)
        return what, f"Store {listed} with the batch axis first, and pass in_axes=0."
    return None


def _output_of(
    context: FindingContext, instruction: Instruction, reported: set[str]
) -> tuple[str, str] | None:
    """Returns which output, not in `reported`, is moved to where `out_axes` wants it."""
    final = {v.name: v for eqn in context.equations for v in eqn.outputs}
    dtype = _dtype(instruction.shape.text)
    for output in context.outputs:
        made = final.get(output.name)
        if made is None or None in (made.axis, output.axis) or output.axis == made.axis:
            continue
        # The compiled operation has no name of the output: it is known by type and size.
        alike = _dtype(output.batched) == dtype and output.bytes == instruction.shape.bytes
        if alike and output.result not in reported:
            reported.add(output.result)
            return (
                f"out_axes wants the batch axis of {output.result} at {output.axis}, and it is "
                f"computed as {marked(made)}",
                f"Pass out_axes={made.axis} for it.",
            )
    return None


def _dtype(text: str) -> str:
    """Returns the element type of ``f32[3]`` as JAX has it: ``i32`` for the compiler's ``s32``."""
    dtype = text.partition("[")[0]
    return "bool" if dtype == "pred" else re.sub("^s", "i", dtype)


_WRITES = SCATTERS | {"dynamic_update_slice"}
_FIRST_INDEX = dict.fromkeys(("dynamic_slice", "gather", *SCATTERS), 1)
_FIRST_INDEX["dynamic_update_slice"] = 2


def gathers(context: FindingContext) -> Iterator[Finding]:
    """Finds slices, gathers and updates at places that differ between lanes."""
    for eqn, record in context.walk():
        first = _FIRST_INDEX.get(eqn.primitive)
        if first is None or eqn.service != "own" or not _own_places(record, first):
            continue
        # A rule may have found a slice or a product that does without.
        if not any(name.startswith(("gather", "scatter")) for name in eqn.emitted):
            continue
        windows, each = _windows(record)
        times = context.lanes * _times_of_chunk(context, record, eqn.times)
        number = round(windows * times)
        writes = eqn.primitive in _WRITES
        became = "scatter" if writes else "gather"
        yield Finding(
            f"{became} at places of each lane",
            f"`{eqn.primitive}` {'writes' if writes else 'reads'} at other places in each of "
            f"{count(context.lanes, 'lane')}: a {became} of {count(number, 'window')} of "
            f"{count(each, 'element')}.",
            _remedy_of_gather(eqn.primitive, windows, each, writes),
            eqn.number,
            times * FINDINGS.time(cost_of_equation(record.eqn)),
        )


def _own_places(record: Record, first: int) -> bool:
    # A dynamic slice has one operand for each index; a gather has all in one.
    end = first + 1 if not record.eqn.primitive.name.startswith("dynamic") else None
    return any(a is not None for a in record.in_axes[first:end])


def _windows(record: Record) -> tuple[int, int]:
    """Returns how many windows one lane reads or writes, and the elements of each."""
    eqn, windows = record.eqn, windows_of(record.eqn)
    name = eqn.primitive.name
    # Of a write the update says how much is moved, not the result.
    moved = eqn.invars[1 if name == "dynamic_update_slice" else 2] if name in _WRITES else None
    return windows, size_of((moved or eqn.outvars[0]).aval) // max(1, windows)


def _remedy_of_gather(name: str, windows: int, each: int, writes: bool) -> str:
    together = "slice" if not writes else "update in place"
    remedy = (
        "If the places are the same in all lanes, compute them from arguments with in_axes=None: "
        f"it is one {together} for all of them then."
    )
    if windows > 1 and each == 1 and not writes:
        remedy += " If they follow one another, take them with one jax.lax.dynamic_slice."
    if windows > 1 and writes and name.startswith("scatter"):
        remedy += " If no lane writes twice to one place, say so with unique_indices=True."
    return remedy


# --- factorisations ----------------------------------------------------------------------------

_SMALL = 16  # rows and columns: of larger matrices the arithmetic outweighs the call
_BY_COLUMNS = 8  # up to here a loop over columns, each for all lanes, is faster


def factorisations(context: FindingContext) -> Iterator[Finding]:
    """Finds factorisations of small matrices. Their price is a call of the library for each."""
    for eqn, record in context.walk():
        calls = calls_of(record.eqn)
        if not calls or not record.in_axes or record.in_axes[0] is None:
            continue
        if eqn.notes.get("small_matrices") == "together":
            continue
        each, rows, columns = matrices_of(record.eqn.invars[0].aval)
        if eqn.service != "own" or eqn.primitive not in eqn.emitted or max(rows, columns) > _SMALL:
            continue
        times = context.lanes * _times_of_chunk(context, record, eqn.times)
        number = round(each * times)
        kept_by = eqn.notes.get("small_matrices", "")
        if context.options.get("small_matrices") == "library":
            kept_by = "choice" if chooses.is_true(record.eqn) else "option"
        option, remedy = _FASTER.get(kept_by, ("", ""))
        otherwise = _remedy_of_factorisation(eqn.primitive, max(rows, columns))
        yield Finding(
            "factorisation of small matrices",
            f"`{eqn.primitive}` of {number:,} matrices of {rows} x {columns}: a call of a library "
            f"for each, for {show_flops(eqn.work.flops / max(1, number))} of arithmetic.",
            remedy or otherwise,
            eqn.number,
            times * calls * FINDINGS.call,
            advice={"small_matrices": option} if option else {},
            otherwise=otherwise if option else "",
        )


# What makes it faster, by why the library runs: the option, or results that are read.
_FASTER = {
    "option": ("auto", 'Remove small_matrices="library".'),
    "choice": (
        "vectorized",
        'If any signs and bases of vectors are right, pass small_matrices="vectorized".',
    ),
}


def _remedy_of_factorisation(name: str, rows: int) -> str:
    shared = (
        "If the matrices are the same in all lanes, compute them from arguments with in_axes=None"
    )
    if name in ("cholesky", "triangular_solve") and rows <= _BY_COLUMNS:
        return (
            f"{shared}. If not, write it as a Python loop over columns: under vmap each of its "
            "operations is for all lanes, and there are no calls."
        )
    if name == "lu" and rows <= _BY_COLUMNS:
        return (
            f"{shared}. If they are symmetric and positive definite, use a Cholesky factorisation: "
            "it costs half, and as a Python loop over columns it has no calls."
        )
    if rows <= 2:
        return f"{shared}. If not, there is a formula: written out, it has no calls."
    return f"{shared}: they are factorised once then."


def _times_of_chunk(context: FindingContext, record: Record, times: int | None) -> float:
    """Returns how often each lane does what runs `times` times, among them once for each chunk."""
    size = record.axis.size
    chunks = max(1, context.each // size) if isinstance(size, int) and size else 1
    return max(1.0, (times or 1) / chunks)


def rules_of_jax(context: FindingContext) -> Iterator[Finding]:
    """Finds primitives that only JAX has a rule for. There is no price: it may serve as well."""
    served = [eqn for eqn, _ in context.walk() if eqn.service == "jax"]
    names = dict.fromkeys(f"`{eqn.primitive}`" for eqn in served)
    if len(names) == 1:
        what = f"{', '.join(names)} has no rule of batchax: that of JAX serves it"
        which = f"it moves or repeats more than it has to, add a rule with {_rule(served[0])}"
    else:
        what = f"{', '.join(names)} have no rules of batchax: those of JAX serve them"
        which = "one moves or repeats more than it has to, add a rule: @batchax.register_rule"
    for eqn in served:
        yield Finding(
            "fallback to the rule of JAX",
            f"{what}, as in jax.vmap.",
            f"Nothing needs to be done. If {which}.",
            eqn.number,
            0.0,
        )


def _rule(eqn: Equation) -> str:
    return f"@batchax.register_rule({_expression(eqn)})"


def one_lane_after_another(context: FindingContext) -> Iterator[Finding]:
    """Finds what runs in a loop over lanes: a step for each, and perhaps a call of Python."""
    for eqn, record in context.walk():
        if eqn.service != "lanes":
            continue
        why, remedy = _why(eqn, record)
        on_host = facts_of(record.eqn.primitive).on_host or eqn.primitive == "ffi_call"
        each = CALLBACK if on_host else STEP
        by_option = eqn.rule == "sequential_vmap"
        what = "A function" if by_option else f"`{eqn.primitive}`"
        yield Finding(
            "sequentially",
            f"{what} runs for the {count(context.lanes, 'lane')} one after another: {why}",
            remedy,
            eqn.number,
            each * max(context.lanes, eqn.times or 1),
        )


def _why(eqn: Equation, record: Record) -> tuple[str, str]:
    why, remedy = next(words for holds, *words in _REASONS if holds(eqn, record))
    return why, remedy.format(primitive=_expression(eqn))


def _expression(eqn: Equation) -> str:
    return f"{eqn.primitive.split()[0].replace('-', '_')}_p"


_REASONS: tuple[tuple[Callable[[Equation, Record], bool], str, str], ...] = (
    (
        lambda eqn, _: eqn.rule == "sequential_vmap",
        "batchax.sequential_vmap runs lanes sequentially.",
        "Nothing, if it is for memory or for the order of effects. Otherwise remove "
        "sequential_vmap.",
    ),
    (
        lambda eqn, _: eqn.primitive in ("pure_callback", "ffi_call"),
        "its vmap_method makes one call of Python for each.",
        'If the function takes arrays with a leading batch axis, pass vmap_method="broadcast_all" '
        'or "expand_dims": it is called once then.',
    ),
    (
        lambda _, record: facts_of(record.eqn.primitive).on_host,
        "each lane has its effect, in order of the lanes.",
        "Call it outside of the batched function, on the whole batch, if one call will do.",
    ),
    (
        lambda _, record: _compat.ordered_by_lane(record.eqn.effects),
        "lanes diverge in it, and it calls Python, which is seen outside.",
        "Move the call out of it, or use jax.debug.callback, which need not be in order: lanes run "
        "together then.",
    ),
    (
        lambda eqn, _: eqn.primitive == "conv_general_dilated",
        "lanes share neither images nor kernels, and for numbers of 64 bits a compiler for CPUs "
        "would multiply the images of all with the kernels of all, most of them times zero.",
        "Nothing: that takes longer. Convolutions of float32 run at once.",
    ),
    (
        lambda *_: True,
        "neither batchax nor JAX has a batching rule for it.",
        "Register a rule with @batchax.register_rule({primitive}), which computes all lanes at "
        "once.",
    ),
)
"""Whether a reason holds, the reason, and what to do about it; the first that holds is reported."""
