"""How many groups padded rows should be in: size classes, where lengths are traced.

Where lengths are traced all that is known of them is how many elements there are at most in
sum. Choices are made for rows that are evenly spread around the mean length, as widely as they can
be, if no lengths with that sum would take much longer in classes than padded to one bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from batchax.programs.weights import BLOCK, COMPILED_STEP, ROWS
from batchax.rows.blocks import SizeClasses
from batchax.rows.buckets import cheapest_ends
from batchax.rows.known_groups import KnownGroups
from batchax.rows.layouts import Costs, Layout, differing_values
from batchax.rows.sizes import Sizes
from batchax.rows.steps import RowProgram, RowStep

_MOST_CLASSES = 5  # that are chosen unasked: each computes blocks that are not full
_MOVED = 4  # places for each in blocks or packed rows: found by their indices, there and back
_MOST_LOSS = 1.15  # of the time of padded rows, for lengths that gain nothing
_WORTH_ON_CPU = 100_000.0  # nanoseconds of work, beside which to begin a block weighs little
_WORTH = 50_000_000.0  # the same where many rows run at a time
_RUNS = 1_000  # of a compiled program, over which the time to compile it is spread


def rows_in_block(program: RowProgram, batched: Sequence[bool], costs: Costs) -> int:
    """How many of the longest rows a block holds.

    The more, the less it weighs to begin a block; the fewer, the less is computed in vain, as the
    last block of each class is seldom full.
    """
    differs = differing_values(program, batched)
    steps = (s for s in program.steps if any(differs[i] for i in s.outputs))
    work = sum(costs.of(step, "padded", differs) for step in steps) / costs.rows
    worth = _WORTH_ON_CPU if jax.default_backend() == "cpu" else _WORTH
    rows = 1
    while rows * work < worth and rows * _LEAST_BLOCKS < costs.rows:
        rows *= 2
    return rows


_LEAST_BLOCKS = 16  # that rows of one length should make


def find_classes(
    program: RowProgram, batched: Sequence[bool], costs: Costs, most: int
) -> SizeClasses:
    """At most so many classes for the rows of a program."""
    room, rows = costs.packed.bounds, rows_in_block(program, batched, costs)
    return SizeClasses.of(costs.padded.bounds, room, costs.rows, most, rows)


def choose_classes(
    program: RowProgram,
    layouts: Sequence[Layout | None],
    batched: Sequence[bool],
    costs: Costs,
) -> SizeClasses | None:
    """The size classes that padded steps take least time in; None for one bound for all rows."""
    differs = differing_values(program, batched)
    steps = _padded_steps(program, layouts)
    bounds, room, time = costs.padded.bounds, costs.packed.bounds, _time_of(steps, costs, differs)
    mean = max(room[name] / bound for name, bound in bounds.items()) / costs.rows
    if not steps:
        return None
    least_length, greatest = max(0.0, 2 * mean - 1), min(1.0, 2 * mean)  # of the bound
    spread = max(greatest - least_length, 1e-9)

    padded = costs.rows * time(dict(bounds))
    best, least = None, padded
    for most in range(2, _MOST_CLASSES + 1):
        classes = find_classes(program, batched, costs, most)
        if len(classes.rows) < most:
            break
        times = [time(dict(each)) for each in classes.bounds]
        places = classes.blocks * classes.rows[0] * max(bounds.values())
        moved = ROWS.place * _MOVED * (places + max(room.values()))
        fixed = moved + _compiling(len(times), steps)
        if classes.blocks * (classes.rows[0] * times[0] + BLOCK) + fixed > _MOST_LOSS * padded:
            continue
        # Rows longer than the bound of the next class.
        longer = [min(1.0, max(0.0, (greatest - 0.5 ** (k + 1)) / spread)) for k in range(most - 1)]
        shares = [a - b for a, b in zip([*longer, 1.0], [0.0, *longer], strict=True)]
        # The last block of each class is half full, say.
        taken = fixed + sum(
            (share * costs.rows / held + 0.5) * (BLOCK + held * each)
            for share, held, each in zip(shares, classes.rows, times, strict=True)
        )
        if taken < least:
            best, least = classes, taken
    return best


_MOST_GROUPS = 8  # of rows of known lengths: what more of them gain is little
_LENGTHS_TRIED = 9  # whose time is reckoned; between them it is taken to lie on a line


def choose_groups(
    program: RowProgram,
    layouts: Sequence[Layout | None],
    batched: Sequence[bool],
    costs: Costs,
    lengths: Mapping[str, np.ndarray],
) -> KnownGroups | None:
    """The groups that padded steps take least time in; None for one bound for all rows.

    Rows are grouped by the size that is longest, for which others grow along.
    """
    differs = differing_values(program, batched)
    steps = _padded_steps(program, layouts)
    if not steps:
        return None
    time = _time_of(steps, costs, differs)
    longest = max(lengths, key=lambda name: costs.padded.bounds[name])
    candidates, number, counts = np.unique(
        np.maximum(lengths[longest], 1), return_inverse=True, return_counts=True
    )
    number = number.reshape(-1)
    others = {name: _greatest_until(number, np.maximum(x, 1)) for name, x in lengths.items()}
    tried = np.unique(np.linspace(0, len(candidates) - 1, _LENGTHS_TRIED).astype(int))
    times = [time({name: int(x[k]) for name, x in others.items()}) for k in tried]
    weights = np.interp(candidates, candidates[tried], np.maximum.accumulate(times))
    fixed = _compiling(1, steps)
    moved = 2 * ROWS.place * sum(costs.packed.bounds.values())  # into groups, and back
    best, least = None, costs.rows * time(dict(costs.padded.bounds))
    for most in range(1, _MOST_GROUPS + 1):
        ends = cheapest_ends(weights, counts, most)
        group = np.searchsorted(ends, number)
        taken = float(weights[ends][group].sum()) + (most > 1) * moved + (most - 1) * fixed
        if len(ends) == most and taken < least:
            least, best = taken, [np.flatnonzero(group == g) for g in range(most)]
    return None if best is None else KnownGroups.of(lengths, best)


def _greatest_until(number: np.ndarray, values: np.ndarray) -> np.ndarray:
    """For each group, of that `number`, the greatest of the values of it and those before."""
    greatest = np.zeros(number.max() + 1, values.dtype)
    np.maximum.at(greatest, number, values)
    return np.maximum.accumulate(greatest)


def _compiling(groups: int, steps: Sequence[RowStep]) -> float:
    """Nanoseconds of each run for which steps of so many groups are compiled."""
    return groups * len(steps) * COMPILED_STEP / _RUNS


def _padded_steps(program: RowProgram, layouts: Sequence[Layout | None]) -> list[RowStep]:
    pairs = zip(program.steps, layouts, strict=True)
    return [step for step, layout in pairs if layout == "padded"]


def _time_of(
    steps: Sequence[RowStep], costs: Costs, differs: Sequence[bool]
) -> Callable[[dict[str, int]], float]:
    """Nanoseconds for steps of one padded row, by the bounds of its sizes."""

    def time(bounds: dict[str, int]) -> float:
        each = replace(costs, padded=Sizes(bounds, {}))
        return sum(each.of(step, "padded", differs) for step in steps) / costs.rows

    return time
