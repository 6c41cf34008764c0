"""What the rules of loops and branches ask of an axis where lanes part ways.

Lanes do where a loop ends at another step for some, or where they take different branches. The
rules know one way to go on: every lane runs what some lane runs, masked. An axis may carry another
way, which says for each loop and each set of branches whether it is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from batchax.jaxprs.words import ClosedJaxpr, Value
from batchax.kernel.axis import Axis, Position

PlacedOutputs = tuple[list[Any], list[Position]]
"""Values, and where each carries the batch axis."""


@dataclass(frozen=True, eq=False)
class WhileLoop:
    """A ``while`` of one example, whose predicate differs between lanes.

    Attributes:
      test: the program of the predicate, of `test_consts` and the carry.
      body: the program of a step, of `body_consts` and the carry.
      test_consts, test_at: operands of `test`, and where each has the batch axis.
      body_consts, body_at: those of `body`.
      carry: the first carry; all of it has the batch axis at the front.
    """

    test: ClosedJaxpr
    body: ClosedJaxpr
    test_consts: Sequence[Any]
    test_at: Sequence[Position]
    body_consts: Sequence[Any]
    body_at: Sequence[Position]
    carry: Sequence[Value]


@dataclass(frozen=True, eq=False)
class Branches:
    """A ``cond`` or ``switch`` of one example, whose index differs between lanes.

    Attributes:
      programs: the branches, all of them programs of `operands`.
      index: which branch each lane takes; the batch axis is its only one.
      operands, positions: what branches are given, and where each has the batch axis.
    """

    programs: Sequence[ClosedJaxpr]
    index: Any
    operands: Sequence[Value]
    positions: Sequence[Position]


@dataclass(frozen=True, eq=False)
class BoundedLoop:
    """A bounded loop of one example, or the sweep back over one, in which lanes part ways.

    Attributes:
      test: the program of the predicate, or None if the number of steps is known.
      steps: the program of a step; of a sweep, and that of going back over one.
      guarded: programs of the same, which are differentiated in place of them. Where they have
        lanes of an inner axis, derivatives may need operands of masked ones replaced, when values
        do not.
      form: what its operands are: a `Form` of `execution/bounded_loop.py`, or a `SweepForm`.
      args, axes: the operands, and where each has the batch axis.
    """

    test: ClosedJaxpr | None
    steps: Sequence[ClosedJaxpr]
    guarded: Sequence[ClosedJaxpr]
    form: Any
    args: Sequence[Value]
    axes: Sequence[Position]


@dataclass(frozen=True, eq=False)
class AnyLoop:
    """A loop of one example, in which there may be loops that lanes leave.

    A ``scan``, a ``while``, a bounded loop or the sweep back over one.

    Attributes:
      primitive, params: the equation.
      args, axes: its operands, and where each has the batch axis.
    """

    primitive: Any
    params: dict[str, Any]
    args: Sequence[Value]
    axes: Sequence[Position]


class Divergence(Protocol):
    """How lanes that diverge run. Hashable: jaxprs that are batched with it are cached."""

    @property
    def explicit(self) -> bool:
        """Whether the user asked for it.

        If so loops draw lanes from all chunks, and each device runs the lanes that it has. If not,
        all else is as it would be without.
        """
        ...

    def may_diverge(self, axis: Axis, loop: AnyLoop) -> bool:
        """Whether lanes may part ways in a loop, or in what is inside it.

        If not, it is batched as if there were no other way.
        """
        ...

    def run_nest(self, axis: Axis, loop: AnyLoop) -> PlacedOutputs | None:
        """The results of a loop for all lanes, in which each is at a place of its own.

        None where lanes take each step together, or nothing is gained.
        """
        ...

    def run(self, axis: Axis, parting: WhileLoop | BoundedLoop | Branches) -> PlacedOutputs | None:
        """The results of all lanes; None to have lanes masked."""
        ...

    def with_max_width(self, width: int) -> Divergence:
        """As this, with no more than so many lanes at a time."""
        ...
