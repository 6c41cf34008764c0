"""Which layout each step of a program runs in: chosen by cost, as a minimum cut.

Packed, a step costs what its rows' elements cost; padded, what the longest row would cost for
every row. A value that one step leaves in one layout and another wants in the other has to be
moved between them. What is cheapest in sum is a minimum cut of a graph with an edge for each of
these costs (Picard and Ratliff, "Minimum cuts and related problems", 1975): on one side are the
packed steps, on the other the padded ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from batchax.rows.packing import REDUCED, can_pack, is_packable
from batchax.rows.sizes import Sizes, depends_on_sizes, has_symbols
from batchax.rows.steps import Constant, Step, Steps

Layout = Literal["packed", "padded"]


def other_layout(layout: Layout) -> Layout:
    """The one of the two that `layout` is not."""
    return "padded" if layout == "packed" else "packed"


# Rough costs in nanoseconds on a CPU. Only their proportions matter, and those little: the
# padding of uneven rows makes differences of several times.
_ELEMENT = 0.4  # read or written, in a loop over elements
_MULTIPLY_ADD = 0.02
_MOVED_ELEMENT = 0.1  # from one layout to the other, along with others of the same place
_MOVED_PLACE = 2.0
_SEGMENT_PLACE = 8.0  # an element of a row added to the row's result


@dataclass(frozen=True)
class Costs:
    """What steps cost in either layout.

    Attributes:
      packed: the sizes of one long row.
      padded: the bounds of each row.
      rows: how many there are.
    """

    packed: Sizes
    padded: Sizes
    rows: int

    def of(self, step: Step, layout: Layout) -> float:
        """Nanoseconds, roughly, for all rows."""
        eqn = step.eqn
        shapes = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
        touched = sum(self._elements(s, layout) for s in shapes if has_symbols(s))
        cost = _ELEMENT * touched
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            out = self._elements(eqn.outvars[0].aval.shape, layout)
            sizes = self.packed if layout == "packed" else self.padded
            dims = [eqn.invars[0].aval.shape[d] for d in contracted]
            cost += _MULTIPLY_ADD * out * math.prod(map(sizes.bound, dims))
        if eqn.primitive.name in REDUCED and layout == "packed":
            cost += _SEGMENT_PLACE * max(self.packed.bounds.values())
        return cost

    def move(self, shape: Sequence[Any]) -> float:
        """Nanoseconds, roughly, to move a value between layouts."""
        places = self.rows * max(self.padded.bounds.values())
        return _MOVED_PLACE * places + _MOVED_ELEMENT * self._elements(shape, "padded")

    def _elements(self, shape: Sequence[Any], layout: Layout) -> int:
        if layout == "packed" and has_symbols(shape):
            return math.prod(self.packed.bounds_of(shape))
        return self.rows * math.prod(self.padded.bounds_of(shape))


def differing_values(program: Steps, batched: Sequence[bool]) -> list[bool]:
    """For each value whether it differs between rows; `batched` says it of the arguments."""
    differs = dict.fromkeys(program.shapes, False)
    differs.update(enumerate(batched))
    for step in program.steps:
        own = any(differs[i] for i in step.used) or depends_on_sizes(step.eqn)
        differs.update(dict.fromkeys(step.outputs, own))
    return [differs[i] for i in range(len(differs))]


def choose_layouts(
    program: Steps, batched: Sequence[bool], costs: Costs, only: Layout | None = None
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
        possible.append(can_pack(step.eqn, dense))
    if only is not None:
        packed = [p is True and only == "packed" for p in possible]
    elif False in possible and True in possible:
        packed = _minimum_cut(program, possible, ragged, costs)
    else:
        packed = [p is True for p in possible]
    for p, is_packed in zip(possible, packed, strict=True):
        chosen.append(None if p is None else "packed" if is_packed else "padded")
    return chosen


# Capacities are of 32 bits: all finite ones together stay below what is forbidden.
_FORBIDDEN = 1 << 30


def _minimum_cut(
    program: Steps, possible: Sequence[bool | None], ragged: set[int], costs: Costs
) -> list[bool]:
    """For each step whether it is on the packed side."""
    edges: dict[tuple[int, int], float] = {}
    packed_side, padded_side = 0, 1
    node_of_step = {i: 2 + i for i in range(len(program.steps))}
    nodes = 2 + len(program.steps)
    consumers: dict[int, list[int]] = {}
    producer: Mapping[int, int] = {
        v: node_of_step[i] for i, step in enumerate(program.steps) for v in step.outputs
    }
    for i, step in enumerate(program.steps):
        if possible[i] is None:
            continue
        node = node_of_step[i]
        edges[packed_side, node] = costs.of(step, "padded")
        edges[node, padded_side] = costs.of(step, "packed") if possible[i] else math.inf
        for v in step.used:
            if v in ragged:
                consumers.setdefault(v, []).append(node)
    for v in program.outputs:  # what is returned is packed
        if isinstance(v, int) and v in ragged and is_packable(program.shapes[v]):
            consumers.setdefault(v, []).append(packed_side)
    for v, users in consumers.items():
        source = producer.get(v, packed_side)  # arguments are packed
        as_padded, as_packed = nodes, nodes + 1
        nodes += 2
        price = costs.move(program.shapes[v])
        edges[source, as_padded] = edges[as_packed, source] = price
        for user in users:
            edges[as_padded, user] = edges[user, as_packed] = math.inf
    finite = [cost for cost in edges.values() if cost < math.inf]
    scale = (_FORBIDDEN / 2 - len(finite)) / max(1.0, sum(finite))
    capacity = [1 + int(c * scale) if c < math.inf else _FORBIDDEN for c in edges.values()]
    places = np.array(list(edges), np.int32).T
    entries = np.array(capacity, np.int32), (places[0], places[1])
    graph = coo_array(entries, shape=(nodes, nodes)).tocsr()
    residual = graph - maximum_flow(graph, packed_side, padded_side).flow
    residual.data[residual.data < 0] = 0
    residual.eliminate_zeros()
    reached = set(breadth_first_order(residual, packed_side, return_predecessors=False).tolist())
    return [node_of_step[i] in reached for i in range(len(program.steps))]
