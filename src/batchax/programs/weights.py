"""How long operations take: a time for each amount of a `Cost`, one set of them for each use.

All are rough, measured on a processor with a few cores. Choices that are made before anything is
compiled, and the order of findings, depend on their proportions; no result does.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchax.programs.cost import Cost


@dataclass(frozen=True)
class Weights:
    """Nanoseconds for each of these."""

    transcendental: float
    fused: float  # byte that need not be moved if operations are fused
    byte: float = 0.05  # of the others
    flop: float = 0.012  # of which many run at a time
    serial: float = 0.3  # flop that waits for the one before
    place: float = 4.0
    call: float = 100.0  # of a library, the shortest one

    def time(self, cost: Cost) -> float:
        """Nanoseconds, roughly."""
        computed = self.flop * (cost.flops - cost.serial) + self.serial * cost.serial
        moved = self.byte * (cost.bytes - cost.fused) + self.fused * cost.fused
        other = self.place * cost.places + self.call * cost.calls
        return self.transcendental * cost.transcendentals + computed + moved + other


# Rough figures. How well they decide, benchmarks tell: for lanes together `divergence` and `rules`,
# for rows `rows`. By those of findings nothing is run: they order what is told, and advise.

TOGETHER = Weights(transcendental=0.2, fused=0.0)
"""The share of one of many lanes that run at once. Functions fill vector registers, and what acts
on each element is one loop with what reads it."""

ROWS = Weights(transcendental=2.0, fused=0.05)
"""Rows, packed or padded. Between operations they are masked, or moved to the other layout, which
keeps many from being one loop. Arrays are long, and of functions some fill vector registers."""

ALONE = Weights(transcendental=4.0, fused=0.0, flop=0.06, place=15.0)
"""A lane by itself, in a loop that is one function: nothing fills vector registers."""

FINDINGS = Weights(transcendental=0.03, byte=0.1, fused=0.1, flop=0.03)
"""What is told of a program, most expensive first, by the operations and bytes that a listing
shows: in it functions are operations as others, and arrays of all lanes lie in memory, not in a
  cache."""

PLANS = Weights(transcendental=0.5, fused=0.1, byte=0.1, flop=0.05, serial=0.05, place=0, call=0)
"""How many rows on disk make a unit. On an average machine, for a plan is the same on all; where it
was begun it goes on, so these are not what is measured today."""

# Nanoseconds, too, of what not every use counts.
LAUNCH = 300.0  # to begin an operation; most are fused with others
GPU_LAUNCH = 600_000.0  # an H100 takes 3 us, in which it does what takes a core 0.6 ms
STEP = 1_000.0  # of a loop that runs operations of one lane
CALLBACK = 10_000.0  # a call of Python
BLOCK = 6_000.0  # to begin a block of rows, and to write what it computed
COMPILED_STEP = 10_000_000.0  # to compile an operation once more
