"""What one chunk computes of a section, and the spec of each result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from batchax.execution.chunk_loop import ChunkBody, ChunkLoop
from batchax.execution.loop_progress import LoopProgress
from batchax.execution.memory import Auto
from batchax.execution.operand_specs import WHOLE, Lanes
from batchax.execution.sections import Env, section_for
from batchax.execution.streaming import Partial, partial_result
from batchax.frontend.outputs import Reduce, is_added
from batchax.frontend.reduction import Reduction
from batchax.jaxprs.words import Eqn, Value
from batchax.kernel.axis import Axis, Position, move_axis
from batchax.kernel.captured import MappedProgram, running
from batchax.sums.contracted import run_adding


@dataclass(frozen=True, eq=False)
class LanesToRun:
    """The lanes that chunks are taken from.

    Attributes:
      axis: their axis.
      batch_size: how many make a chunk.
      index: the variable that holds the index of a lane, or None if nothing uses it. Its value for
        all lanes are the index of the first, from which each chunk counts, and that after the last.
      repeated: how many lanes at the end may repeat another one, and are no part then of what
        lanes are reduced to.
      progress: who is told how many chunks are done.
    """

    axis: Axis
    batch_size: int | Auto
    index: Any
    repeated: int = 0
    progress: LoopProgress | None = None

    @property
    def are_one_chunk(self) -> bool:
        """Whether they need no loop."""
        return isinstance(self.batch_size, int) and self.axis.size <= self.batch_size

    def may_repeat(self, width: int) -> bool:
        """Whether chunks of `width` lanes may have some that repeat another.

        Not if those are in the last chunk, and it has another width: so reductions of all others
        stay as they are, and with them what a compiler makes of them, such as a product of
        matrices of a sum of outer products.
        """
        chunk = self.batch_size
        apart = isinstance(chunk, int) and self.axis.size % chunk >= self.repeated
        return self.repeated > 0 and not (apart and width == chunk)

    def apart(self) -> LanesToRun:
        """These in chunks of a size, a little less, with which `may_repeat` tells the last one."""
        size, chunk = self.axis.size, self.batch_size
        if isinstance(chunk, Auto) or not self.repeated:
            return self
        most = min(chunk, size - self.repeated)
        sizes = range(most, max(0, most - most // 4 - 1), -1)
        fitting = [c for c in sizes if size % c >= self.repeated]
        # The fewer lanes are in the last chunk the better: its reductions are the slower ones.
        return replace(self, batch_size=min(fitting, key=lambda c: size % c, default=chunk))


class Found(NamedTuple):
    """A value for all lanes; of no `position` if it is the same for all."""

    value: Value
    position: Position


@dataclass(frozen=True)
class Target:
    """A variable wanted of a section: `how` it is wanted is a position or a `Reduce`."""

    variable: Any
    how: Any

    @property
    def reduction(self) -> Reduction | None:
        """How it is reduced; None if it is not."""
        return self.how.reduction if isinstance(self.how, Reduce) else None


class SectionBody:
    """A section as a chunk loop: its body for one chunk, its operands, the specs of its results.

    The specs are known once the body has been staged, which the constructor does. If there is one
    chunk only, it runs it.
    """

    def __init__(
        self,
        lanes: LanesToRun,
        env: Env,
        eqns: Sequence[Eqn],
        targets: Sequence[Target],
        effects: bool = True,
        same: Sequence[Target] = (),
    ) -> None:
        """`same`: targets known not to depend on the batch, which are returned for each lane."""
        self.targets = targets
        self.section = section_for(eqns, [t.variable for t in targets], env, effects)
        indexed = any(t.reduction is not None and t.reduction.index for t in targets)
        if (lanes.repeated or indexed) and lanes.index not in self.section.invars:
            self.section = self.section.replace(invars=[lanes.index, *self.section.invars])
        self.operands = [env[v][0] for v in self.section.invars]
        positions = [env[v][1] for v in self.section.invars]
        self._chunk = _Chunk(lanes, self.section, positions, targets, same)
        self.specs, self.reduced = self._chunk.specs, self._chunk.reduced

        operand_kinds = tuple(
            WHOLE if a is None or v is lanes.index else Lanes(a)
            for v, a in zip(self.section.invars, positions, strict=True)
        )
        body = ChunkBody(self._chunk.of_width)
        size = lanes.axis.size
        self.loop = ChunkLoop(body, operand_kinds, (), size, lanes.batch_size, lanes.progress)
        self.of_only_chunk: list[Any] | None = None
        if lanes.are_one_chunk:
            self.of_only_chunk = body.function(size)(np.int32(0), *self.operands)
            types = list(map(jax.typeof, self.of_only_chunk))
        else:
            avals = list(map(jax.typeof, self.operands))
            types = self.loop.program(avals, self.loop.width).out_avals
        self.types = self.of_targets(types)

    @property
    def results(self) -> tuple[Any, ...]:
        """The specs of all results."""
        return tuple(spec for specs in self.specs.values() for spec in specs)

    def of_targets(self, results: Iterable[Value]) -> dict[Target, list[Any]]:
        """Results, or what belongs to each, by target: a reduced one may have several."""
        each = iter(results)
        return {t: [next(each) for _ in self.specs[t]] for t in self.targets}

    @property
    def shared(self) -> list[Target]:
        """The targets that turned out not to depend on the batch."""
        return [t for t, specs in self.specs.items() if specs == [None]]

    def of_first_lane(self) -> dict[Target, Found]:
        """The targets, which are the same in all lanes, from the first."""
        parts = [
            lax.slice_in_dim(x, 0, 1, axis=spec.axis) if isinstance(spec, Lanes) else x
            for x, spec in zip(self.operands, self.loop.operands, strict=True)
        ]
        outs, *_ = self._chunk.interpret(1, jnp.int32(0), parts)
        return {t: Found(x, None) for t, x in zip(self.targets, outs, strict=True)}


@dataclass(frozen=True, eq=False)
class _Chunk:
    """What is done for a chunk. Holds no values: programs that are kept for long hold on to it.

    Attributes:
      lanes: the lanes that chunks are taken from.
      section: the equations.
      positions: where operands have the batch axis.
      targets: what is wanted.
      same: those that do not depend on the batch, and are returned for each lane all the same.
      specs: the specs of each target, noted; None if it does not depend on the batch.
      reduced: notes of what a chunk adds to those that are reduced.
    """

    lanes: LanesToRun
    section: Any
    positions: Sequence[Position]
    targets: Sequence[Target]
    same: Sequence[Target] = ()
    specs: dict[Target, list[Any]] = field(default_factory=dict)
    reduced: dict[Target, Partial] = field(default_factory=dict)

    def of_width(self, width: int) -> Callable[..., list[Any]]:
        """The function of one chunk of `width` lanes; see `ChunkBody`."""

        def run(start: Any, *xs: Any) -> list[Any]:
            outs, positions, index, real = self.interpret(width, start, xs)
            outputs = zip(self.targets, outs, positions, strict=True)
            return [
                result
                for target, x, position in outputs
                for result in (
                    self._of_each(target, x, width)
                    if target in self.same
                    else self._results(target, x, position, index, real)
                )
            ]

        return run

    def interpret(
        self, width: int, start: Any, xs: Sequence[Value]
    ) -> tuple[list[Any], list[Position], Any, Any]:
        """The targets for `width` lanes, and where they have the batch axis.

        And the index of each lane, if anything uses it; and which lanes are real, None if all are.
        """
        chunk = dict(size=width, name=None, mesh_axis=None, bodies=None)
        looped = self.lanes.axis.in_loop or not self.lanes.are_one_chunk
        axis = replace(self.lanes.axis, in_loop=looped, **chunk)
        values = [
            x[0] + start + lax.iota(np.int32, width) if v is self.lanes.index else x
            for v, x in zip(self.section.invars, xs, strict=True)
        ]
        program = MappedProgram(axis, self.section, values, self.positions)
        index = real = None
        if self.lanes.index in self.section.invars:
            place = self.section.invars.index(self.lanes.index)
            index = values[place]
            if self.lanes.may_repeat(width):
                real = lax.lt(index, lax.broadcast(xs[place][1], (width,)))
        added = [is_added(target.how) for target in self.targets]
        with running(program):
            return *run_adding(program, added), index, real

    def _of_each(self, target: Target, x: Value, width: int) -> list[Any]:
        self.specs[target] = [Lanes(0)]
        return [lax.broadcast(x, (width,))]

    def _results(
        self, target: Target, x: Value, position: Position, index: Any, real: Any
    ) -> list[Any]:
        """What a chunk returns for one target. Notes the specs of that in `specs`."""
        reduction = target.reduction
        if position is None:
            self.specs[target] = [None]
        elif reduction is not None:
            arrays, part = partial_result(reduction, x, position, index, real)
            self.specs[target], self.reduced[target] = part.specs, part
            return arrays
        else:
            self.specs[target] = [Lanes(target.how)]
            x = move_axis(x, position, target.how)
        return [x]
