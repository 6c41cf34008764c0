"""Arrays that are written again: for each lane what lanes share, or with its axes in another order.

What counts is what the compiled program does: most repetition that the batched program asks for is
part of the operation that reads it, and takes no memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from batchax.execution.memory import show_bytes
from batchax.explain.account import Equation, Finding
from batchax.explain.findings.draft import Draft
from batchax.explain.text import marked
from batchax.explain.wording import count
from batchax.programs.hlo import Computation, Instruction
from batchax.programs.weights import FINDINGS

# Through these an array goes as it is, or in another order of its elements in memory.
_SAME = frozenset(["bitcast", "copy", "reshape"])


def repeated(draft: Draft) -> Iterator[Finding]:
    """Operands that are written for each lane though lanes share them."""
    by_equation: dict[str, list[Instruction]] = {}
    for instruction in draft.instructions():
        made = _made_by(draft, instruction, "broadcast")
        if made is not None and _repeats_lanes(draft, instruction, *made):
            by_equation.setdefault(draft.number_of(instruction), []).append(instruction)
    for number, instructions in by_equation.items():
        size = sum(i.shape.bytes for i in instructions)
        types = ", ".join(dict.fromkeys(i.shape.text for i in instructions))
        eqn = draft.equation(number)
        what = "an output that is the same in all lanes" if eqn is None else _shared_of(eqn)
        yield Finding(
            "copied for each lane",
            f"{what[0].upper()}{what[1:]} is written once for each of "
            f"{count(draft.lanes, 'lane')}: {types}, {show_bytes(size)}.",
            _remedy_of_repeated(eqn),
            number,
            2 * FINDINGS.byte * size * _times(eqn),  # written, and read
        )


def _times(eqn: Equation | None) -> int:
    return 1 if eqn is None else eqn.times or 1


def _made_by(
    draft: Draft, instruction: Instruction, opcode: str
) -> tuple[Instruction, Computation | None] | None:
    """The operation of that kind whose result an instruction writes as it is, and where it is."""
    if instruction.opcode == opcode:
        return instruction, None
    if instruction.opcode != "fusion" or draft.module is None:
        return None
    inside = draft.module.computations[instruction.called[0]]
    by_name = {i.name: i for i in inside.instructions}
    made = by_name[inside.root]
    while made.opcode in _SAME and made.operands:
        made = by_name[made.operands[0]]
    return (made, inside) if made.opcode == opcode else None


def _repeats_lanes(
    draft: Draft, instruction: Instruction, made: Instruction, where: Computation | None
) -> bool:
    """Whether an array, not a number, is written as often as there are lanes at a time."""
    if where is None:
        scopes = draft.module.computations.values() if draft.module else ()
        where = next(c for c in scopes if any(i is instruction for i in c.instructions))
    source = next((i for i in where.instructions if i.name == made.operands[0]), None)
    if source is None or not source.shape.bytes or "[]" in source.shape.text:
        return False
    return round(instruction.shape.bytes / source.shape.bytes) in draft.lanes_at_once


def _shared_of(eqn: Equation) -> str:
    shared = [v.name for v in eqn.inputs if v.axis is None and "[]" not in v.example]
    if len(shared) == 1:
        return f"`{shared[0]}`, which `{eqn.primitive}` takes and all lanes share,"
    return f"what `{eqn.primitive}` takes and all lanes share"


def _remedy_of_repeated(eqn: Equation | None) -> str:
    if eqn is None:
        return "Give out_axes=None for it, or out_axes=batchax.AUTO: it is returned once then."
    if eqn.primitive in ("while", "scan", "bounded loop"):
        return (
            "It is part of the carry, which some step makes depend on the lane. Leave what does "
            "not change out of the carry: a loop may close over it."
        )
    if eqn.primitive in ("concatenate", "stack", "pad"):
        return (
            f"`{eqn.primitive}` puts it next to what lanes have of their own. Use both parts by "
            "themselves instead: w[:k] @ x + w[k:] @ y in place of w @ jnp.concatenate([x, y])."
        )
    return (
        "Use it in the operations that take it as it is, such as a product with what lanes have of "
        f"their own, before `{eqn.primitive}`; or keep it out of `{eqn.primitive}`."
    )


def transposed(draft: Draft) -> Iterator[Finding]:
    """Arrays whose batch axis is moved."""
    told: set[str] = set()  # results
    for instruction in draft.instructions():
        if _made_by(draft, instruction, "transpose") is None:
            continue
        number, size = draft.number_of(instruction), instruction.shape.bytes
        eqn = draft.equation(number)
        moved = _output_of(draft, instruction, told) if eqn is None else _argument_of(draft, eqn)
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


def _argument_of(draft: Draft, eqn: Equation) -> tuple[str, str] | None:
    """What of an equation's operands has its batch axis elsewhere than wanted."""
    if eqn.primitive == "transpose":
        return None  # the user's own
    names = {v.name: v for v in draft.arguments}
    for value in eqn.inputs:
        if not value.axis:
            continue
        what = f"The batch axis of {value.name}, {marked(value)}, is moved"
        if value.name in names:
            return what, f"Store {value.name} with the batch axis first, and give in_axes=0 for it."
        sources = [v for v in draft.arguments if v.axis]
        if not sources:
            return what, "Compute it so that the batch axis is first."
        listed = " and ".join(v.name for v in sources)
        return what, f"Store {listed} with the batch axis first, and give in_axes=0."
    return None


def _output_of(draft: Draft, instruction: Instruction, told: set[str]) -> tuple[str, str] | None:
    """Which output is moved to where `out_axes` wants it, if it is none of those told of."""
    final = {v.name: v for eqn in draft.equations for v in eqn.outputs}
    dtype = _dtype(instruction.shape.text)
    for output in draft.outputs:
        made = final.get(output.name)
        if made is None or None in (made.axis, output.axis) or output.axis == made.axis:
            continue
        alike = _dtype(output.batched) == dtype and output.bytes == instruction.shape.bytes
        if alike and output.result not in told:
            told.add(output.result)
            return (
                f"out_axes wants the batch axis of {output.result} at {output.axis}, and it is "
                f"computed as {marked(made)}",
                f"Give out_axes={made.axis} for it.",
            )
    return None


def _dtype(text: str) -> str:
    """The element type of ``f32[3]``, as JAX has it: the compiler's ``s32`` are its ``i32``."""
    dtype = text.partition("[")[0]
    return "bool" if dtype == "pred" else re.sub("^s", "i", dtype)
