"""What the compiled program holds, in the terms of the listing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from batchax.explain.account import Held, Memory, Work
from batchax.explain.entries import number_of
from batchax.kernel.recording import Record, Recorder
from batchax.programs.peak import LiveValue, peak_of

_MOST_HELD = 12  # values in memory that are told of, the largest first
_ARGUMENT = re.compile(r"\w+\[(\d+)\]")


def find_memory(
    compiled: Any, recorder: Recorder, numbers: Mapping[Record, str], paths: Sequence[str]
) -> Memory:
    """What a compiled program holds at its worst moment.

    Args:
      compiled: the program.
      recorder: the notes of how it was batched, whose marks its operations bear.
      numbers: the number in the listing, by record.
      paths: what its arguments are called.
    """
    peak = peak_of(compiled)
    held = tuple(_held(v, recorder, numbers, paths) for v in peak.values[:_MOST_HELD])
    return Memory(peak.bytes, peak.arguments, peak.outputs, peak.temporaries, held)


def _held(
    value: LiveValue, recorder: Recorder, numbers: Mapping[Record, str], paths: Sequence[str]
) -> Held:
    name = value.op_name or ""
    argument = _ARGUMENT.fullmatch(name)
    if value.kind == "argument" and argument and int(argument[1]) < len(paths):
        what = paths[int(argument[1])]
    else:
        what = name.rpartition("/")[2] or value.opcode
    number = number_of(name, recorder, numbers)
    return Held(what, value.shape, value.bytes, value.kind, number)


def counted_by_compiler(compiled: Any) -> Work | None:
    """FLOPs and bytes of a compiled program by the count of its compiler, if it makes one."""
    try:
        counts = compiled.cost_analysis() or {}
    except NotImplementedError:
        return None
    if "flops" not in counts:
        return None
    flops = counts["flops"] + counts.get("transcendentals", 0.0)
    return Work(flops, counts.get("bytes accessed", 0.0))
