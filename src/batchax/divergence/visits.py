"""What lanes visited in a loop, added up after it: blocks of visits, of any lanes and steps.

A weight that all lanes share is one operand of a chunk loop over all visits of a branch, and its
cotangent the sum that this has in reverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core.primitives import cond_p

from batchax import _compat
from batchax.divergence.put_off import Visit
from batchax.execution.chunk_loop import ChunkBody, ChunkLoop, chunk_loop
from batchax.execution.gathered_lanes import fitting_width
from batchax.execution.operand_specs import WHOLE, ActiveMask, Gathered
from batchax.jaxprs.evaluate import bind_equation, evaluate
from batchax.jaxprs.words import Aval, ClosedJaxpr, Value
from batchax.kernel.axis import Axis, Position, match_axis
from batchax.kernel.interpreter import interpret

_MOST = 128  # visits in a block: 32 to 256 take about as long


def sums_of_visits(
    axis: Axis, visit: Visit, operands: Sequence[Value], positions: Sequence[Position]
) -> list[Any]:
    """What the visits of all lanes add to each cotangent that is put off.

    Args:
      axis: the axis of the lanes.
      visit: those of one lane.
      operands, positions: the values of its operands, and where these have the batch axis.
    """
    every = _Visits(axis, visit, operands, positions)
    sums = [every.of_branch(number) for number in range(visit.branches)]
    some = [each for each in sums if each is not None]
    if not some:
        return [_zeros(t) for t in every.types]
    return [sum(each[1:], each[0]) for each in zip(*some, strict=True)]


class _Visits:
    """All visits: each is a lane, and a step of each loop around the branches.

    What has an entry for each is along axis 0. Of other operands each takes its own.

    Attributes:
      whole: operands that all share.
      types: of the cotangents that are put off.
    """

    def __init__(
        self, axis: Axis, visit: Visit, operands: Sequence[Value], positions: Sequence[Position]
    ) -> None:
        self.axis, self.visit = axis, visit
        self.sizes = (axis.size, *visit.lengths)
        self.count = math.prod(self.sizes)
        self.types = [visit.tangents.in_avals[visit.count + k] for k in visit.of]
        # Each with the axes of `sizes` that it has in front.
        self.values, self.over = [], []
        for x, operand, a in zip(operands, visit.operands, positions, strict=True):
            over = operand.over or (False,) * len(visit.lengths)
            self.values.append(x if a is None else match_axis(axis, x, a, 0))
            self.over.append((a is not None, *over))

    def of_branch(self, number: int) -> list[Any] | None:
        """What the visits of a branch add; None: nothing, whoever takes it."""
        visit, types = self.visit, self.types
        run = self._tangents(number)
        inputs = [*visit.tangents.in_avals[: visit.count], *types]
        program = _compat.stage(run, inputs)
        used = _compat.used_inputs(program, [True] * len(program.out_avals))
        if not any(used[visit.count :]):
            return None
        index = lax.clamp(np.int32(0), self._of_each(visit.index), np.int32(visit.branches - 1))
        mask = lax.eq(index, np.int32(number))
        own, shared = [], []
        for k in range(visit.count):
            if used[k]:
                (shared if not all(self.over[k]) else own).append(k)
        each = [self._of_each(k) for k in own]
        places = lax.iota(np.int32, self.count)
        rest = [self.values[k] for k in shared]
        body = ChunkBody(lambda width: self._chunk(width, program, own, shared))
        loop = ChunkLoop(
            body,
            (ActiveMask(), *[Gathered(0)] * (1 + len(own)), *[WHOLE] * (len(rest) + len(types))),
            (Gathered(0),) * len(program.out_avals),
            self.count,
            fitting_width(_MOST, self.count),
        )
        dots = lambda *ts: chunk_loop(loop, [mask, places, *each, *rest, *ts])
        cotangents = [self._of_each(k) for k in range(visit.count, len(self.values))]
        zeros = [_zeros(t) for t in types]
        return list(jax.vjp(dots, *zeros)[1](cotangents))

    def _tangents(self, number: int) -> Callable[..., list[Any]]:
        """Those of the results of a branch, of its operands and tangents of some."""
        visit = self.visit
        jaxpr, consts = visit.tangents.jaxpr, visit.tangents.consts

        def run_equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
            if eqn.primitive is cond_p and eqn.invars[0] is jaxpr.invars[visit.index]:
                branch = eqn.params["branches"][number]
                return eval_jaxpr(branch.jaxpr, branch.consts, *operands[1:])
            return bind_equation(eqn, operands)

        def run(*xs: Any) -> list[Any]:
            given = dict(zip(visit.of, xs[visit.count :], strict=True))
            types = visit.tangents.in_avals[visit.count :]
            moves = [given[k] if k in given else _zeros(t) for k, t in enumerate(types)]
            return evaluate(jaxpr, consts, [*xs[: visit.count], *moves], run_equation)

        return run

    def _chunk(
        self, width: int, program: ClosedJaxpr, own: Sequence[int], shared: Sequence[int]
    ) -> Callable[..., list[Any]]:
        """What some visits do, of their places, and operands that are their `own` or `shared`."""
        axis = replace(self.axis, size=width, name=None, divergence=None)
        count, total = self.visit.count, len(self.types)
        types = program.in_avals

        def of_one(place: Any, *xs: Any) -> list[Any]:
            mine, rest, dots = xs[: len(own)], xs[len(own) : -total], xs[-total:]
            given: list[Any] = [_zeros(t) for t in types[:count]]
            for k, x in zip(own, mine, strict=True):
                given[k] = x
            for k, x in zip(shared, rest, strict=True):
                given[k] = self._entry(x, self.over[k], place)
            return eval_jaxpr(program.jaxpr, program.consts, *given, *dots)

        wholes = [jax.typeof(self.values[k]) for k in shared]
        inputs = [jax.typeof(np.int32(0)), *(types[k] for k in own), *wholes, *types[count:]]
        one = _compat.without_dead(_compat.stage(of_one, inputs))
        at = [0, *[0] * len(own), *[None] * (len(wholes) + total)]

        def run(start: Any, counts: Any, *xs: Any) -> list[Any]:
            outs, out_axes = interpret(axis, one.jaxpr, one.consts, xs, at)
            return [match_axis(axis, x, a, 0) for x, a in zip(outs, out_axes, strict=True)]

        return run

    def _of_each(self, k: int) -> Any:
        """An operand, with an entry for each visit."""
        x, over = self.values[k], self.over[k]
        shape = np.shape(x)[sum(over) :]
        x = lax.expand_dims(x, [d for d, has in enumerate(over) if not has])
        x = jnp.broadcast_to(x, (*self.sizes, *shape))
        return lax.reshape(x, (self.count, *shape))

    def _entry(self, x: Any, over: Sequence[bool], place: Any) -> Any:
        """What a visit has of an operand that some others share."""
        at, index = [], place
        for size in reversed(self.sizes):
            at.append(lax.rem(index, np.int32(size)))
            index = lax.div(index, np.int32(size))
        for has, i in zip(over, reversed(at), strict=True):
            if has:
                x = lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
        return x


def _zeros(aval: Aval) -> Any:
    return jnp.zeros(aval.shape, aval.dtype)
