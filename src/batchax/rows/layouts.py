"""Which layout each step of a program runs in: packed where it can be and pays, or padded.

Packed, a step costs what its rows' elements cost; padded, what the longest row would cost for
every row. A value that one step leaves in one layout and another wants in the other has to be
moved between them. What is cheapest in sum is a minimum cut of a graph with an edge for each of
these costs; the cheapest of three assignments is as good for the functions of the benchmarks, and
takes no solver: all that can be packed is; or not what lies between padded steps; or nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from batchax.jaxprs.words import Eqn
from batchax.programs.cost import Cost, cost_of_equation
from batchax.programs.shapes import reading_symbols
from batchax.programs.weights import ROWS
from batchax.rows.merged import Names, can_hold, groups_in, has_several, merge
from batchax.rows.packing import REDUCED, can_pack
from batchax.rows.row_rules import size_of_rule
from batchax.rows.sizes import Sizes, depends_on_sizes, has_symbols
from batchax.rows.steps import Constant, RowProgram, RowStep

Layout = Literal["packed", "padded"]


def other_layout(layout: Layout) -> Layout:
    """The one of the two that `layout` is not."""
    return "padded" if layout == "packed" else "packed"


@dataclass(frozen=True)
class Costs:
    """What steps cost in either layout.

    Attributes:
      packed: the sizes of one long row.
      padded: the bounds of each row.
      rows: how many there are.
      room: how many elements packed rows have room for that are ragged along several axes, by
        their sizes.
    """

    packed: Sizes
    padded: Sizes
    rows: int
    room: Mapping[Names, int] = field(default_factory=dict)

    def of(self, step: RowStep, layout: Layout, differs: Sequence[bool]) -> float:
        """Nanoseconds, roughly, for all rows; `differs` says of values whether rows do."""
        eqn = step.eqn
        own = [not isinstance(i, Constant) and differs[i] for i in step.inputs]
        sizes, times = (self.packed, 1) if layout == "packed" else (self.padded, self.rows)
        merged = merge(eqn) if layout == "packed" and has_several(eqn) else None
        if merged is not None:
            eqn, sizes, times = merged, Sizes({merged.size: self.room[merged.names]}, {}), 1
        elif layout == "packed" and size_of_rule(eqn) is not None:  # which tells rows apart
            each = {n: -(-size // self.rows) for n, size in self.packed.bounds.items()}
            sizes, times = Sizes(each, {}), self.rows
        if eqn.primitive.name == "sort" and layout == "padded":
            return self._of_sort(eqn, own)
        with reading_symbols(sizes.bound):
            cost = times * cost_of_equation(eqn, differs=own)
        reduced = eqn.primitive.name in REDUCED and not has_symbols(eqn.outvars[0].aval.shape)
        if reduced and layout == "packed":  # each element is added to the result of its row
            cost += Cost(places=2 * max(sizes.bounds.values()))
        return ROWS.time(cost)

    def _of_sort(self, eqn: Eqn, differs: Sequence[bool]) -> float:
        """As `of`: padding is equal numbers, each of which a sort looks at once."""
        bounds = {
            n: min(bound, -(-self.packed.bounds[n] // self.rows))
            for n, bound in self.padded.bounds.items()
        }
        with reading_symbols(Sizes(bounds, {}).bound):
            own = cost_of_equation(eqn, differs=differs)
        looked_at = math.prod(self.padded.bounds_of(eqn.invars[0].aval.shape))
        return self.rows * ROWS.time(own + Cost(places=looked_at)) / 2

    def places(self, bounds: Mapping[str, int]) -> int:
        """The places of a padded row of these bounds, along the axes that arguments have."""
        several = [math.prod(bounds[name] for name in names) for names in self.room]
        return max([*bounds.values(), *several])

    @property
    def held(self) -> int:
        """How many elements packed rows have room for, of the argument that has most."""
        return max([*(self.packed.bounds[name] for name in self.alone), *self.room.values()])

    @property
    def alone(self) -> set[str]:
        """The sizes of rows along one axis."""
        return set(self.packed.bounds).difference(*self.room)

    def move(self, shape: Sequence[Any]) -> float:
        """Nanoseconds, roughly, to move a value, of numbers of 32 bits, between layouts."""
        places = self.rows * max(self.padded.bounds.values())
        size = self.rows * math.prod(self.padded.bounds_of(shape))
        return ROWS.time(Cost(places=places, bytes=2 * 4 * size))


def differing_values(program: RowProgram, batched: Sequence[bool]) -> list[bool]:
    """For each value whether it differs between rows; `batched` says it of the arguments."""
    differs = dict.fromkeys(program.shapes, False)
    differs.update(enumerate(batched))
    for step in program.steps:
        own = any(differs[i] for i in step.used) or depends_on_sizes(step.eqn)
        differs.update(dict.fromkeys(step.outputs, own))
    return [differs[i] for i in range(len(differs))]


def choose_layouts(
    program: RowProgram, batched: Sequence[bool], costs: Costs, only: Layout | None = None
) -> list[Layout | None]:
    """The layout of each step; None for those that no ragged value takes part in.

    Args:
      program: the steps of a program of one row.
      batched: which arguments differ between rows.
      costs: of steps, and of moving values.
      only: the layout to use wherever it is possible.
    """
    differs = differing_values(program, batched)
    ragged = {i for i, shape in program.shapes.items() if has_symbols(shape)}
    chosen: list[Layout | None] = []
    possible: list[bool | None] = []
    for step in program.steps:
        if not depends_on_sizes(step.eqn):
            possible.append(None)
            continue
        dense = [
            not isinstance(i, Constant) and i not in ragged and differs[i] for i in step.inputs
        ]
        held = all(names in costs.room for names in groups_in(step.eqn))
        possible.append(held and can_pack(step.eqn, dense))
    if only is not None:
        packed = [p is True and only == "packed" for p in possible]
    elif False in possible and True in possible:
        packed = _cheaper(program, possible, ragged, differs, costs)
    else:
        packed = [p is True for p in possible]
    for p, is_packed in zip(possible, packed, strict=True):
        chosen.append(None if p is None else "packed" if is_packed else "padded")
    return chosen


def _cheaper(
    program: RowProgram,
    possible: Sequence[bool | None],
    ragged: set[int],
    differs: Sequence[bool],
    costs: Costs,
) -> list[bool]:
    """For each step whether it runs packed: all that can, or those at either end, or none."""
    packed = [p is True for p in possible]
    ends = [p and not b for p, b in zip(packed, _between(program, possible), strict=True)]
    ways = packed, ends, [False] * len(possible)
    price = functools.cache(functools.partial(costs.of, differs=differs))
    return min(ways, key=lambda each: _cost(program, each, possible, ragged, price, costs))


def _between(program: RowProgram, possible: Sequence[bool | None]) -> list[bool]:
    """For each step whether it uses what a padded step made, and a padded step what it made."""
    after: set[int] = set()  # values made by padded steps, or of those
    for step, may_be in zip(program.steps, possible, strict=True):
        if may_be is False or not after.isdisjoint(step.used):
            after.update(step.outputs)
    before: set[int] = set()  # values that padded steps use, or that those are made of
    for step, may_be in zip(reversed(program.steps), reversed(possible), strict=True):
        if may_be is False or not before.isdisjoint(step.outputs):
            before.update(step.used)
    return [
        not after.isdisjoint(step.used) and not before.isdisjoint(step.outputs)
        for step in program.steps
    ]


def _cost(
    program: RowProgram,
    packed: Sequence[bool],
    possible: Sequence[bool | None],
    ragged: set[int],
    price: Callable[[RowStep, Layout], float],
    costs: Costs,
) -> float:
    """Nanoseconds, roughly, of all steps, and of moving what is wanted in another layout."""
    made: dict[int, Layout] = {}
    moved: set[int] = set()
    total = 0.0
    for step, is_packed, may_be in zip(program.steps, packed, possible, strict=True):
        if may_be is None:
            continue
        layout: Layout = "packed" if is_packed else "padded"
        total += price(step, layout) if may_be else 0.0  # where there is no choice it is the same
        moved |= {v for v in step.used if v in ragged and made.get(v, "packed") != layout}
        made.update(dict.fromkeys(step.outputs, layout))
    for v in program.outputs:  # what is returned is packed, as arguments are
        if isinstance(v, int) and v in ragged and can_hold(costs.room, program.shapes[v]):
            moved |= {v} if made.get(v, "packed") != "packed" else set()
    return total + sum(costs.move(program.shapes[v]) for v in moved)
