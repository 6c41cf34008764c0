"""What makes up the memory that a compiled program holds at its worst moment.

The totals are the compiler's, and so is the place in memory of each value. When values are alive
is found by following them through the schedule of the compiled program, from the instruction that
makes one to the last that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchax.programs.buffers import Kind
from batchax.programs.hlo import UnreadableProgram, read_module
from batchax.programs.liveness import held_at_worst


@dataclass(frozen=True)
class LiveValue:
    """A value that is held at the worst moment.

    Attributes:
      name: its name in the compiled program.
      opcode: what made it there, such as "fusion".
      bytes: the memory that it takes.
      shape: such as "f32[8,300]".
      op_name: the operation of the user's program that made it, such as "jit(f)/vmap/tanh".
      source: file and line of the user's, where the compiler was told.
      kind: "argument", "output", "temporary" or "constant".
    """

    name: str
    opcode: str
    bytes: int
    shape: str
    op_name: str | None
    source: tuple[str, int] | None
    kind: Kind


@dataclass(frozen=True)
class CompilersAccount:
    """The compiler's account of the memory of a program, in bytes.

    Attributes:
      arguments: what is passed in.
      outputs: what is returned.
      temporaries: the most that is held besides.
      aliased: the outputs that take the memory of an argument.
      code: the machine code and what is embedded in it.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int

    @property
    def bytes(self) -> int:
        """What the device must hold: arguments, outputs and temporaries, each once."""
        return self.arguments + self.outputs + self.temporaries - self.aliased


@dataclass(frozen=True)
class Peak(CompilersAccount):
    """What a compiled program holds at its worst moment.

    `bytes` is what the device must hold, not what is alive at one moment: arguments and outputs
    have their memory for as long as the program runs.

    Attributes:
      values: what is alive at the worst moment, the largest first; empty if the compiler does
        not say where it put them, as some backends do not.
    """

    values: tuple[LiveValue, ...] = ()

    @property
    def explained(self) -> float:
        """The share of the compiler's temporaries that `values` account for.

        What is missing is lost between values, which do not fit together without gaps, and
        tables of what is in a tuple.
        """
        accounted = sum(v.bytes for v in self.values if v.kind == "temporary")
        return accounted / self.temporaries if self.temporaries else 1.0


def memory_of(compiled: Any) -> CompilersAccount:
    """The compiler's account of the memory of a compiled program."""
    return CompilersAccount(*_totals(compiled))


def _totals(compiled: Any) -> tuple[int, int, int, int, int]:
    stats = compiled.memory_analysis()
    return (
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.generated_code_size_in_bytes,
    )


def peak_of(compiled: Any) -> Peak:
    """What a compiled program holds at its worst moment, and what that is made of.

    Args:
      compiled: as from `jax.jit(f).lower(...).compile()`.
    """
    totals = _totals(compiled)
    try:
        assignment = compiled.memory_analysis().serialized_buffer_assignment_proto
        held = held_at_worst(read_module(compiled), assignment)
    except UnreadableProgram:
        return Peak(*totals)
    values = [
        LiveValue(
            v.made.name,
            v.made.opcode,
            v.place.bytes,
            v.shape,
            v.origin.op_name,
            v.origin.source,
            v.place.kind,
        )
        for v in held
    ]
    return Peak(*totals, tuple(sorted(values, key=_by_bytes, reverse=True)))


_by_bytes: Callable[[LiveValue], int] = lambda value: value.bytes
