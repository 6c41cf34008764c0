"""Running steps until a predicate says so, over arrays with the axis of the steps anywhere."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.bounded_loop import Values, bounded_loop
from batchax.execution.eager import jitted
from batchax.execution.references import without_references
from batchax.execution.watched import Steps
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.axis import Position
from batchax.kernel.inner import written_into


@dataclass(frozen=True)
class BoundedSteps:
    """What a loop does that goes on while its predicate is true. Equal to one that does the same.

    Attributes:
      test: the program of the predicate, without constants: of values that are the same at
        each step, and of the carry.
      body: the program of one step, without constants: from values that are the same at each
        step, the carry and one entry of each of the xs to the carry and the ys.
      n_carry: number of values in the carry.
      in_axes: where each of the xs has the axis of the steps; None: the same at each.
      out_axes: where each of the ys gets it, counted from the front.
      steps: the largest number of steps.
      reverse: whether the last entry comes first.
    """

    test: ClosedJaxpr = field(compare=False)
    body: ClosedJaxpr = field(compare=False)
    n_carry: int
    in_axes: tuple[Position, ...]
    out_axes: tuple[int, ...]
    steps: Steps
    reverse: bool = False
    key: Hashable = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (value_key(self.test), value_key(self.body)))

    def run(
        self,
        test_consts: Sequence[Any],
        consts: Sequence[Value],
        carry: Sequence[Value],
        xs: Sequence[Value],
    ) -> list[Any]:
        """The last carry and the stacked ys: zeros where no step was taken."""
        # One program, compiled once: outside of `jit` each call stages its functions anew.
        run = jitted(self, functools.partial(_run, self), inline=True)
        return run(list(test_consts), list(consts), list(carry), list(xs))


def _run(
    loop: BoundedSteps,
    test_consts: list[Any],
    consts: list[Value],
    carry: list[Value],
    xs: list[Value],
) -> list[Any]:
    axes = [a for a in loop.in_axes if a is not None]
    scanned = [x for x, a in zip(xs, loop.in_axes, strict=True) if a is not None]
    shared = [x for x, a in zip(xs, loop.in_axes, strict=True) if a is None]

    def turned(arrays: Sequence[Value], axes: Sequence[int]) -> list[Any]:
        if not loop.reverse:
            return list(arrays)
        return [lax.rev(x, [a]) for x, a in zip(arrays, axes, strict=True)]

    def test(consts: Values, carry: Values) -> Any:
        return written_into(loop.test, [*consts, *carry])[0]

    def step(consts: Values, carry: Values, x: Values) -> tuple[Values, Values]:
        entries, same = iter(x), iter(consts[len(consts) - len(shared) :])
        parts = [next(same) if a is None else next(entries) for a in loop.in_axes]
        own = consts[: len(consts) - len(shared)]
        outs = written_into(loop.body, [*own, *carry, *parts])
        return outs[: loop.n_carry], outs[loop.n_carry :]

    results = bounded_loop(
        step,
        [*consts, *shared],
        carry,
        turned(scanned, axes),
        test=test,
        test_consts=test_consts,
        count=np.int32(loop.steps.most),
        steps=loop.steps,
        x_axes=axes,
        y_axes=loop.out_axes,
    )
    return [*results.carry, *turned(results.ys, loop.out_axes)]


def run_until(
    test: Any,
    body: Any,
    carry: Sequence[Value],
    xs: Sequence[Value],
    in_axes: tuple[Position, ...],
    out_axes: tuple[int, ...],
    steps: Steps,
    reverse: bool = False,
) -> list[Any]:
    """Runs staged steps while the staged predicate is true; see `BoundedSteps`.

    The xs come to vary over what the steps were staged for, inside ``shard_map``.

    Raises:
      UnsupportedError: a reference is used.
    """
    entries = body.in_avals[len(carry) :]
    test, test_consts = _hoisted(test)
    body, consts = _hoisted(body, xs)
    loop = BoundedSteps(test, body, len(carry), in_axes, out_axes, steps, reverse)
    return loop.run(test_consts, consts, carry, list(map(_compat.varying_as, xs, entries)))


def _hoisted(staged: ClosedJaxpr, xs: Sequence[Value] = ()) -> tuple[ClosedJaxpr, list[Any]]:
    """A program with its constants as leading inputs, and the constants."""
    if any(map(_compat.is_reference, (*staged.consts, *xs))):
        raise UnsupportedError(
            "a reference (jax.new_ref) is used in a loop that ends on a value and keeps what its "
            "derivative needs, which a reference would not hold. Put the array into the carry."
        )
    (program,), consts = _compat.hoist_constants(without_references(staged, None, 0))
    return program, consts
