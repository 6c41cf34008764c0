"""What makes up the memory that a compiled program holds at its worst moment.

The totals are the compiler's. Which values they are made of is found by following each value
through the schedule of the compiled program, from the instruction that makes it to the last one
that reads it, with what shares memory taken as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from batchax.programs.hlo import UnreadableProgram, read_module
from batchax.programs.liveness import Buffer, Lives, lives_of

Kind = Literal["argument", "output", "temporary", "constant"]


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
class Memory:
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
class Peak(Memory):
    """What a compiled program holds at its worst moment.

    `bytes` is what the device must hold, not what is alive at one moment: arguments and outputs
    have their memory for as long as the program runs.

    Attributes:
      values: what is alive at the worst moment, the largest first; empty if the text of the
        compiled program cannot be read.
    """

    values: tuple[LiveValue, ...] = ()

    @property
    def explained(self) -> float:
        """The share of the compiler's temporaries that `values` account for.

        A compiler that packs values less than perfectly leaves it below one; one that makes
        temporaries in memory that an output takes later, above.
        """
        found = sum(v.bytes for v in self.values if v.kind == "temporary")
        return found / self.temporaries if self.temporaries else 1.0


def memory_of(compiled: Any) -> Memory:
    """The compiler's account of the memory of a compiled program."""
    return Memory(*_totals(compiled))


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
        lives = lives_of(read_module(compiled.as_text()))
    except (UnreadableProgram, NotImplementedError):
        return Peak(*totals)
    return Peak(*totals, _values(lives))


def _values(lives: Lives) -> tuple[LiveValue, ...]:
    moment = lives.worst_moment()
    held = [b for b in lives.buffers() if b.kind != "temporary" or b.holds_at(moment)]
    return tuple(sorted(map(_value, held), key=_by_bytes, reverse=True))


_by_bytes: Callable[[LiveValue], int] = lambda value: value.bytes


def _value(buffer: Buffer) -> LiveValue:
    made = buffer.telling()
    return LiveValue(
        made.name,
        made.opcode,
        buffer.bytes,
        buffer.shape,
        made.op_name,
        made.source,
        buffer.kind,
    )
