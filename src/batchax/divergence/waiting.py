"""Results of a loop as they are where lanes wait for each other: what they share, and types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.core import eval_jaxpr
from jax.extend.core.primitives import while_p

from batchax import _compat
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel import recording
from batchax.kernel.axis import Axis, Position
from batchax.kernel.divergence import PlacedOutputs, WhileLoop
from batchax.kernel.inner import remembered, stage_function
from batchax.kernel.interpreter import interpret
from batchax.kernel.varying import Varying, types_varying, varying_of

VARIES_LESS = "a result would vary over more axes of the mesh than it does"
"""Why lanes wait for each other where `Waiting.varies_less`."""


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

    @classmethod
    def of(cls, axis: Axis, loop: WhileLoop) -> Waiting:
        """Of a ``while``."""
        n_test, n_body = len(loop.test_consts), len(loop.body_consts)

        def run(*operands: Value) -> list[Value]:
            return while_p.bind(
                *operands,
                cond_nconsts=n_test,
                cond_jaxpr=loop.test,
                body_nconsts=n_body,
                body_jaxpr=loop.body,
            )

        types = [*loop.test.in_avals[:n_test], *loop.body.in_avals]
        stage = lambda: stage_function(axis, run, types)
        program = remembered(loop.body, ("while", loop.test, axis), stage)
        operands = [*loop.test_consts, *loop.body_consts, *loop.carry]
        return cls(axis, program, operands, [*loop.test_at, *loop.body_at, *[0] * len(loop.carry)])

    def results(self, which: Sequence[int]) -> PlacedOutputs:
        """These results, from what of the loop they need."""
        return self._run(which, self.operands) if which else ([], [])

    def varies_less(self, which: Sequence[int]) -> bool:
        """Whether one of these results varies over fewer axes of a mesh than some operand.

        Inside ``shard_map`` a count that starts from zero differs between devices once lanes have
        counts of their own, and so does what is computed from it: it would vary over all of them.
        """
        over = frozenset().union(*varying_of(self.operands))
        return bool(over) and any(varies != over for varies in self._varying(which))

    def _varying(self, which: Sequence[int]) -> Varying:
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
