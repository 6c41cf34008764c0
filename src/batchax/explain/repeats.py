"""What repeats in a listing, as the layers of a network do: told once, and counted."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from batchax.explain.account import Equation, Value, Work

_LEAST = 4
"""Fewer entries than this are listed, though others are like them."""


@dataclass(frozen=True)
class Again:
    """Equations that do what those just before them do, with other values.

    Attributes:
      equations: in order.
      like: those that they repeat, once or more often.
    """

    equations: tuple[Equation, ...]
    like: tuple[Equation, ...]

    @property
    def number(self) -> str:
        """The number of the first of them."""
        return self.equations[0].number

    @property
    def rounds(self) -> int:
        """How often the others are repeated."""
        return len(self.equations) // len(self.like)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Where rounds are of batches of other sizes, as of size classes: a result of each."""
        place = next((i for i, eqn in enumerate(self.like) if eqn.outputs), None)
        if place is None:
            return ()
        same = self.like[place], *self.equations[place :: len(self.like)]
        types = [eqn.outputs[0].batched for eqn in same]
        return tuple(types[1:]) if len(set(types)) > 1 else ()

    @property
    def work(self) -> Work:
        """What they cost together."""
        return sum((eqn.work for eqn in self.equations), Work())

    @property
    def inputs(self) -> tuple[Value, ...]:
        """What they take from others."""
        made = {v.name for v in self.outputs}
        taken = {v.name: v for eqn in self.equations for v in eqn.inputs if v.name not in made}
        return tuple(taken.values())

    @property
    def outputs(self) -> tuple[Value, ...]:
        """All that they give."""
        return tuple(v for eqn in self.equations for v in eqn.outputs)


def fold(equations: Sequence[Equation]) -> list[Equation | Again]:
    """The equations of one scope, with those that repeat the ones before them taken together."""
    folded: list[Equation | Again] = []
    for _, of_role in groupby(equations, key=lambda eqn: eqn.role):
        eqns = list(of_role)
        kinds: dict[Hashable, int] = {}
        codes = np.array([kinds.setdefault(_kind(eqn), len(kinds)) for eqn in eqns])
        folded += _fold(eqns, codes)
    return folded


def _fold(equations: Sequence[Equation], codes: np.ndarray) -> list[Equation | Again]:
    start, period, rounds = _longest_repeat(codes)
    if period * rounds < _LEAST:
        return list(equations)
    first, end = start + period, start + period * (rounds + 1)
    like = equations[start:first]
    return [
        *_fold(equations[:start], codes[:start]),
        *_fold(like, codes[start:first]),
        Again(tuple(equations[first:end]), tuple(like)),
        *_fold(equations[end:], codes[end:]),
    ]


def _longest_repeat(codes: np.ndarray) -> tuple[int, int, int]:
    """The stretch whose repetitions, right after it, are the most entries in all.

    Returns:
      Where it starts, how long it is, and how often it is repeated. Of those alike, the shortest.
    """
    best = 0, 1, 0
    for period in range(1, len(codes) // 2 + 1):
        if len(codes) - period <= best[1] * best[2]:
            break
        alike = np.flatnonzero(codes[period:] != codes[:-period])
        # What lies between two that differ is the same as it is `period` entries later.
        ends = np.concatenate([[-1], alike, [len(codes) - period]])
        lengths = np.diff(ends) - 1
        longest = int(np.argmax(lengths))
        rounds = int(lengths[longest]) // period
        if period * rounds > best[1] * best[2]:
            best = int(ends[longest]) + 1, period, rounds
    return best


def _kind(eqn: Equation) -> Hashable:
    """What equations have in common that do the same: all but numbers, names and literals.

    Sizes of the batch are no part of it: rows in size classes run the same program for each.
    """
    types = tuple((v.example, v.axis) for v in (*eqn.inputs, *eqn.outputs))
    how = eqn.primitive, eqn.source, eqn.service, eqn.rule, eqn.role, eqn.times
    did = bool(eqn.moves), bool(eqn.broadcasts), repr(eqn.notes)
    return how, did, len(eqn.inputs), types, tuple(map(_kind, eqn.parts))


def alike(values: Sequence[Value]) -> list[tuple[str, Sequence[Value]]]:
    """Values by what they are called but for places in lists and trees, and by their types.

    Returns:
      The name of each kind, with stars for places that differ, and its values.
    """
    kinds: dict[Hashable, list[Value]] = {}
    for v in values:
        kinds.setdefault((_PLACE.sub("*", v.name), v.example, v.batched, v.axis), []).append(v)
    return [(_common([v.name for v in same]), same) for same in kinds.values()]


_PLACE = re.compile(r"(\d+)(?=[^\[\]]*\])")


def _common(names: Sequence[str]) -> str:
    pieces = zip(*map(_PLACE.split, names), strict=True)
    return "".join(same[0] if len(set(same)) == 1 else "*" for same in pieces)
