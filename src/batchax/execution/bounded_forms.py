"""What the operands and results are of a bounded loop, and of the sweep back over its steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from batchax.execution.watched import Steps
from batchax.jaxprs.words import Value


class Operands(NamedTuple):
    """The operands of a loop or a sweep, or something about each, such as where its batch axis is.

    Attributes:
      count: how many steps to take; of a loop, at most.
      test: constants of the predicate; a sweep has none.
      consts: what is the same at each step.
      carry: the first carry.
      checkpoints: of a sweep, what the loop recorded; see `Results`.
      returning: of a sweep, what is carried back, after the last step.
      xs: arrays with an entry for each step.
    """

    count: Any
    test: list[Any]
    consts: list[Value]
    carry: list[Value]
    checkpoints: list[Any]
    returning: list[Any]
    xs: list[Value]

    @property
    def flat(self) -> list[Any]:
        """All of them, as the primitives have them."""
        count, *groups = self
        return [count, *itertools.chain(*groups)]


def _split(operands: Sequence[Value], *sizes: int) -> Operands:
    """Operands, of groups of these sizes between the count and the xs."""
    rest = iter(operands)
    groups = (list(itertools.islice(rest, n)) for n in sizes)
    return Operands._make([next(rest), *groups, list(rest)])


class Results(NamedTuple):
    """What a bounded loop returns.

    Attributes:
      carry: the carry after the last step.
      ys: what the steps returned, stacked; zeros where no step was taken.
      checkpoints: if they were to be recorded, what was kept of some carries, stacked; before that
        the number of steps that each came after, `UNUSED` where none was kept.
      steps: how many steps were taken.
    """

    carry: list[Value]
    ys: list[Value]
    checkpoints: list[Any]
    steps: Any


@dataclass(frozen=True)
class Form:
    """What the operands and results of a bounded loop are.

    Attributes:
      n_test: number of constants of the predicate.
      n_consts: number of constants of the body.
      n_carry: number of values in the carry.
      steps: how many there are at most.
      x_axes: where each of the xs has the axis of the steps.
      y_axes: where each of the ys gets it.
      kept: the values of the carry that checkpoints have; None: no checkpoints are recorded.
      again: whether a derivative computes all carries again: what is run for it alone would record
        checkpoints for nothing, and be compiled.
    """

    n_test: int
    n_consts: int
    n_carry: int
    steps: Steps
    x_axes: tuple[int, ...]
    y_axes: tuple[int, ...]
    kept: tuple[int, ...] | None
    again: bool = False

    @property
    def n_results(self) -> int:
        """How many results there are."""
        n_kept = 0 if self.kept is None else 1 + len(self.kept)
        return self.n_carry + len(self.y_axes) + n_kept + 1

    def split(self, operands: Sequence[Value]) -> Operands:
        """The operands, by what they are."""
        return _split(operands, self.n_test, self.n_consts, self.n_carry, 0, 0)

    def results(self, outs: Sequence[Value]) -> Results:
        """What the primitive returned, a flat list, as `Results`."""
        a = self.n_carry
        b = a + len(self.y_axes)
        return Results(list(outs[:a]), list(outs[a:b]), list(outs[b:-1]), outs[-1])


@dataclass(frozen=True)
class SweepForm:
    """What the operands and results of a sweep are.

    Attributes:
      n_consts: number of constants of both programs.
      n_carry: number of values in the carry of the loop.
      kept: the values of the carry that checkpoints have; going back needs no others.
      n_back: number of values that are carried back.
      steps: how many there are at most.
      x_axes: where each of the xs has the axis of the steps.
      y_axes: where each of the ys gets it; None: they are added up.
    """

    n_consts: int
    n_carry: int
    kept: tuple[int, ...]
    n_back: int
    steps: Steps
    x_axes: tuple[int, ...]
    y_axes: tuple[int | None, ...]

    @property
    def n_results(self) -> int:
        """How many results there are."""
        return self.n_back + len(self.y_axes)

    def split(self, operands: Sequence[Value]) -> Operands:
        """The operands, by what they are."""
        sizes = self.n_consts, self.n_carry, 1 + len(self.kept), self.n_back
        return _split(operands, 0, *sizes)
