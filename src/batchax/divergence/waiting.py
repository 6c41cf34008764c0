"""Results of a loop as they are where lanes wait for each other: what they share, and types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.core import eval_jaxpr

from batchax import _compat
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position
from batchax.kernel.divergence import PlacedOutputs
from batchax.kernel.inner import remembered, stage_function
from batchax.kernel.interpreter import interpret
from batchax.kernel.varying import Varying, types_varying


@dataclass(frozen=True, eq=False)
class Waiting:
    """A loop whose lanes wait for each other.

    Attributes:
      axis: the axis of the lanes.
      program: that of the loop for one example.
      operands, positions: what it is given, and where that has the batch axis.
    """

    axis: Axis
    program: ClosedJaxpr
    operands: Sequence[Value]
    positions: Sequence[Position]

    def results(self, which: Sequence[int]) -> PlacedOutputs:
        """These results, from what of the loop they need."""
        return self._run(which, self.operands) if which else ([], [])

    def varying(self, which: Sequence[int]) -> Varying:
        """Over which axes of a mesh these results vary, inside ``shard_map``."""
        types = tuple(map(jax.typeof, self.operands))
        key = "varying", self.axis, tuple(which), tuple(self.positions), types
        stage = lambda: _compat.stage(lambda *xs: self._run(which, xs)[0], types)
        return types_varying(remembered(self.program, key, stage).out_avals)

    def _run(self, which: Sequence[int], operands: Sequence[Value]) -> PlacedOutputs:
        program, axis = self._of(tuple(which)), replace(self.axis, divergence=None)
        with recording.paused(axis):
            return interpret(axis, program.jaxpr, program.consts, operands, self.positions)

    def _of(self, which: tuple[int, ...]) -> ClosedJaxpr:
        def run(*xs: Value) -> list[Value]:
            outs = eval_jaxpr(self.program.jaxpr, self.program.consts, *xs)
            return [outs[k] for k in which]

        def build() -> ClosedJaxpr:
            return _compat.without_dead(stage_function(self.axis, run, self.program.in_avals))

        return remembered(self.program, ("results", self.axis, which), build)
