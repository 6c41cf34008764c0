"""How many groups padded rows should be in: size classes, where lengths are traced.

Where lengths are traced all that is known of them is how many elements there are at most in
sum. Choices are made for rows that are evenly spread around the mean length, as widely as they can
be, if no lengths with that sum would take much longer in classes than padded to one bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from batchax.programs.weights import BLOCK, COMPILED_STEP, ROWS
from batchax.rows.blocks import SizeClasses
from batchax.rows.boxes import Weight, fewer_boxes
from batchax.rows.buckets import cheapest_ends
from batchax.rows.known_groups import KnownGroups
from batchax.rows.layouts import Costs, Layout, differing_values
from batchax.rows.merged import Names, can_hold
from batchax.rows.sizes import Sizes, has_symbols
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
    bounds = costs.padded.bounds
    time = lambda bounds: float(_times(steps, costs, differs, bounds).sum())
    if not steps:
        return None
    mean = max(_filled(costs, names) for names in [*zip(costs.alone), *costs.room])
    least_length, greatest = max(0.0, 2 * mean - 1), min(1.0, 2 * mean)  # of the bound
    spread = max(greatest - least_length, 1e-9)

    padded = costs.rows * time(bounds)
    best, least = None, padded
    for most in range(2, _MOST_CLASSES + 1):
        classes = find_classes(program, batched, costs, most)
        if len(classes.rows) < most:
            break
        times = [time(each) for each in classes.bounds]
        places = classes.blocks * classes.rows[0] * costs.places(bounds)
        moved = ROWS.place * _MOVED * (places + costs.held) + _joined(program, costs)
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


def _filled(costs: Costs, names: Names) -> float:
    """The share of each size that rows have at the mean, if they fill the room that there is."""
    several = math.prod(costs.padded.bounds[name] for name in names)
    room = costs.room[names] if names in costs.room else costs.packed.bounds["".join(names)]
    return (room / several / costs.rows) ** (1 / len(names))


def _joined(program: RowProgram, costs: Costs) -> float:
    """Nanoseconds to put results together, of rows of all groups, that are held padded."""
    shapes = [program.shapes[i] for i in program.outputs if isinstance(i, int)]
    several = [s for s in shapes if has_symbols(s) and not can_hold(costs.room, s)]
    return sum(costs.move(shape) for shape in several)


_MOST_GROUPS = 8  # of rows of known lengths: what more of them gain is little


def choose_groups(
    program: RowProgram,
    layouts: Sequence[Layout | None],
    batched: Sequence[bool],
    costs: Costs,
    lengths: Mapping[str, np.ndarray],
) -> KnownGroups | None:
    """The groups that padded steps take least time in; None for one bound for all rows."""
    differs = differing_values(program, batched)
    steps = _padded_steps(program, layouts)
    if not steps:
        return None
    needed = np.maximum(np.stack(list(lengths.values()), 1), 1)
    time, fixed = _time_by_size(steps, costs, differs, list(lengths)), _compiling(1, steps)
    # Into groups, and back.
    moved = 2 * ROWS.place * costs.held + _joined(program, costs)
    best, least = None, costs.rows * _times(steps, costs, differs, costs.padded.bounds).sum()
    for groups in _groupings(needed, time):
        sizes = np.stack([needed[rows].max(0) for rows in groups])
        taken = float(np.dot(time(sizes), list(map(len, groups)))) + (len(groups) - 1) * fixed
        taken += (len(groups) > 1) * moved
        if taken < least:
            best, least = groups, taken
    return None if best is None else KnownGroups.of(lengths, best)


def _groupings(needed: np.ndarray, time: Weight) -> Iterable[list[np.ndarray]]:
    """Rows of these sizes in groups that take least time, of each number of groups there may be."""
    if needed.shape[1] > 1:
        yield from fewer_boxes(needed, _MOST_GROUPS, time)
        return
    candidates, number, counts = np.unique(needed[:, 0], return_inverse=True, return_counts=True)
    for most in range(1, min(_MOST_GROUPS, len(candidates)) + 1):
        ends = cheapest_ends(time(candidates[:, None]), counts, most)
        group = np.searchsorted(ends, number.reshape(-1))
        yield [np.flatnonzero(group == g) for g in range(len(ends))]


def _time_by_size(
    steps: Sequence[RowStep], costs: Costs, differs: Sequence[bool], names: Sequence[str]
) -> Weight:
    """Nanoseconds for steps of one padded row, for each of some sizes of rows along `names`.

    Of each step it is taken to be a power of each size.
    """
    bounds = costs.padded.bounds
    most = np.array([bounds[name] for name in names])
    fewer = np.maximum(most // _SMALLER, 1)
    greatest = _times(steps, costs, differs, bounds)
    smaller = [
        _times(steps, costs, differs, {**bounds, name: int(n)})
        for name, n in zip(names, fewer, strict=True)
    ]
    shrink = np.log(np.where(most > fewer, most / fewer, np.e))
    powers = np.log(greatest / np.stack(smaller)).T / shrink
    # Steps that grow alike are one.
    powers, number = np.unique(np.round(4 * powers) / 4, axis=0, return_inverse=True)
    together = np.bincount(number.reshape(-1), greatest, len(powers))
    return lambda sizes: np.exp(np.log(sizes / most) @ powers.T) @ together


_SMALLER = 4  # of the greatest size, at which the time that steps take is reckoned, too


def _compiling(groups: int, steps: Sequence[RowStep]) -> float:
    """Nanoseconds of each run for which steps of so many groups are compiled."""
    return groups * len(steps) * COMPILED_STEP / _RUNS


def _padded_steps(program: RowProgram, layouts: Sequence[Layout | None]) -> list[RowStep]:
    pairs = zip(program.steps, layouts, strict=True)
    return [step for step, layout in pairs if layout == "padded"]


def _times(
    steps: Sequence[RowStep], costs: Costs, differs: Sequence[bool], bounds: Mapping[str, int]
) -> np.ndarray:
    """Nanoseconds for each step of one padded row, by the bounds of its sizes."""
    each = replace(costs, padded=Sizes(bounds, {}))
    return np.array([each.of(step, "padded", differs) for step in steps]) / costs.rows + 1e-3
