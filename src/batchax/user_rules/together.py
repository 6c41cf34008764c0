"""Calls of a program that are computed together.

To be differentiated a call makes another one, of the same rule and operands with more steps to
take, which by itself computes the rule again. In a program the two are seen: the first of them
computes the rule for both, and keeps for the second what that needs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from batchax import _compat
from batchax.jaxprs.evaluate import plan
from batchax.jaxprs.words import Eqn, Jaxpr, Value
from batchax.kernel.axis import Axis, Position, axis_to_front
from batchax.kernel.inner import batch_function, example_aval, stage_described
from batchax.kernel.interpreter import ProgramRun, interpret
from batchax.kernel.own_primitive import Flat, pullback_of
from batchax.user_rules.call import (
    BatchedFlat,
    Cotangents,
    Flags,
    MappedStep,
    Tangents,
    after,
    custom_call_p,
    spread,
)

Axes = Sequence[Position]
Batched = tuple[Sequence[Any], Axes]
"""Values, and where they have the batch axis."""


@dataclass(frozen=True)
class Values:
    """The call `eqn` of a function; a call before it computes `first` tangents of its results."""

    eqn: Eqn
    first: int


@dataclass(frozen=True)
class Pullbacks:
    """Calls that pull cotangents back through a call before them.

    Attributes:
      moving: the operands of the call before whose cotangents they compute.
      of: the results of that which their last operands are cotangents of.
      calls: the calls, each with its steps to many cotangents at once.
    """

    moving: tuple[int, ...]
    of: tuple[int, ...]
    calls: list[tuple[Any, Sequence[MappedStep]]] = field(default_factory=list)


def later_calls(run: ProgramRun, eqn: Eqn) -> Values | Pullbacks | None:
    """What the call `eqn` can keep something for in this run, if anything."""
    if custom_call_p not in run.found:
        run.found[custom_call_p] = _pairs(run.jaxpr)
    return run.found[custom_call_p].get(id(eqn))


def _pairs(jaxpr: Jaxpr) -> dict[int, Values | Pullbacks]:
    """What calls can keep something for, by their ids."""
    pairs: dict[int, Values | Pullbacks] = {}
    calls: dict[Any, Any] = {}  # by rule, steps and operands
    tangents: dict[Any, Any] = {}  # by those of what they are the tangents of
    for eqn in (step.eqn for step in plan(jaxpr.eqns, jaxpr.outvars)):
        if eqn.primitive is not custom_call_p:
            continue
        rule, steps = id(eqn.params["rule"]), eqn.params["steps"]
        operands = tuple(map(_identity, eqn.invars))
        key = (rule, steps, operands)
        if key in tangents:
            pairs.setdefault(id(tangents[key]), Values(eqn, len(tangents[key].outvars)))
        calls.setdefault(key, eqn)
        once = tuple(itertools.takewhile(lambda s: not isinstance(s, MappedStep), steps))
        match once:
            case [*before, Tangents(moving)] if once == steps:
                tangents.setdefault((rule, tuple(before), operands[: -len(moving)]), eqn)
            case [*before, Tangents(moving, results), Cotangents(linear, _, of)]:
                first = len(operands) - len(of)
                pulled = calls.get((rule, tuple(before), operands[:first]))
                directions = steps[len(once) :]
                if pulled is None or len(linear) != len(moving) or _vary(directions, first):
                    continue
                back = Pullbacks(moving, tuple(results[j] for j in of))
                pair = pairs.setdefault(id(pulled), back)
                if isinstance(pair, Pullbacks) and pair.moving == moving and pair.of == back.of:
                    own = [MappedStep(d.axis, d.mapped[first:]) for d in directions]
                    pair.calls.append((eqn, own))
    return pairs


def _vary(directions: Sequence[Any], first: int) -> bool:
    """Whether steps are not for many cotangents alone: the `first` operands differ, too."""
    return any(not isinstance(d, MappedStep) or any(d.mapped[:first]) for d in directions)


def _identity(v: Any) -> Any:
    return (v.aval, np.asarray(v.val).tobytes()) if isinstance(v, Literal) else v


def with_pullback(
    axis: Axis, function: BatchedFlat, args: Sequence[Value], later: Pullbacks
) -> tuple[Batched, Callable[..., Batched]]:
    """What a function of batches returns, and what `later` calls do, given their directions."""
    (outs, pull), out_flags = _compat.described(
        function, lambda arrays: pullback_of(arrays, args, later.moving, later.of)
    )

    def pullback(
        directions: Sequence[MappedStep], operands: Sequence[Value], axes: Axes
    ) -> Batched:
        count = len(later.of)
        flags = [a is not None for a in axes[-count:]]

        def reverse(*cotangents: Any) -> tuple[list[Any], Flags]:
            targets = [out_flags[k] for k in later.of]
            placed = map(functools.partial(spread, axis), cotangents, flags, targets)
            return list(pull(list(placed))), [True] * len(later.moving)

        in_front = map(functools.partial(to_front, axis), operands[-count:], axes[-count:])
        step = lambda before, step: step.batched(axis, before, flags)
        return positions(*functools.reduce(step, directions, reverse)(*in_front))

    return positions(outs, out_flags), pullback


def with_pullback_of_one(
    axis: Axis, function: Flat, args: Sequence[Value], axes: Axes, later: Pullbacks
) -> tuple[Batched, Callable[..., Batched]]:
    """As `with_pullback`, of a function of one example, which is batched operation by operation."""

    def forward(*xs: Any) -> tuple[list[Any], Any]:
        outs, pull = pullback_of(function, xs, later.moving, later.of)
        kept, structure = jax.tree.flatten(pull)
        return [*outs, *kept], structure

    types = [example_aval(axis, jax.typeof(x), a) for x, a in zip(args, axes, strict=True)]
    staged, structure = stage_described(axis, forward, types)
    outs, out_axes = interpret(axis, staged.jaxpr, staged.consts, args, axes)
    count = structure.num_leaves
    first = len(outs) - count
    same = [False] * count  # is what is kept, in all directions

    def reverse(*xs: Any) -> list[Any]:
        return list(jax.tree.unflatten(structure, xs[:count])(list(xs[count:])))

    def pullback(
        directions: Sequence[MappedStep], operands: Sequence[Value], axes: Axes
    ) -> Batched:
        steps = [MappedStep(d.axis, (*same, *d.mapped)) for d in directions]
        given = [*outs[first:], *operands[-len(later.of) :]]
        places = [*out_axes[first:], *axes[-len(later.of) :]]
        return batch_function(axis, after(steps, reverse), given, places)

    return (outs[:first], out_axes[:first]), pullback


def to_front(axis: Axis, x: Value, position: Position) -> Any:
    """A value with the batch axis first, if it has it."""
    return x if position is None else axis_to_front(axis, x, position)


def positions(outs: Sequence[Value], flags: Flags) -> Batched:
    """Values with the batch axis first where `flags` says that they have it."""
    return outs, [0 if batched else None for batched in flags]
