"""Words and figures for people, and equations that repeat others taken together."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from batchax.execution.memory import show_bytes
from batchax.explain.account import Account, Devices, Equation, Timing, Value, Work
from batchax.jaxprs.error_format import count
from batchax.jaxprs.types import Values

_LEAST = 4
"""Fewer entries than this are listed, though others are like them."""


@dataclass(frozen=True)
class Again:
    """Holds equations that do what those just before them do, with other values."""

    equations: tuple[Equation, ...]
    like: tuple[Equation, ...]  # those that they repeat, once or more often

    @property
    def number(self) -> str:
        return self.equations[0].number

    @property
    def rounds(self) -> int:
        return len(self.equations) // len(self.like)

    @property
    def sizes(self) -> tuple[str, ...]:
        """Returns a result of each round, if rounds are of batches of other sizes, as buckets."""
        place = next((i for i, eqn in enumerate(self.like) if eqn.outputs), None)
        if place is None:
            return ()
        same = self.like[place], *self.equations[place :: len(self.like)]
        types = [eqn.outputs[0].batched for eqn in same]
        return tuple(types[1:]) if len(set(types)) > 1 else ()

    @property
    def work(self) -> Work:
        return sum((eqn.work for eqn in self.equations), Work())

    @property
    def inputs(self) -> tuple[Value, ...]:
        made = {v.name for v in self.outputs}
        taken = {v.name: v for eqn in self.equations for v in eqn.inputs if v.name not in made}
        return tuple(taken.values())

    @property
    def outputs(self) -> tuple[Value, ...]:
        return tuple(v for eqn in self.equations for v in eqn.outputs)


def fold(equations: Sequence[Equation]) -> list[Equation | Again]:
    """Lists the equations of one scope, with those that repeat the ones before them as one."""
    folded: list[Equation | Again] = []
    for _, of_role in groupby(equations, key=lambda eqn: eqn.role):
        eqns = list(of_role)
        kinds: dict[Hashable, int] = {}
        codes = np.array([kinds.setdefault(_kind(eqn), len(kinds)) for eqn in eqns])
        folded += _fold(eqns, codes)
    return folded


def _fold(equations: Sequence[Equation], codes: np.ndarray) -> list[Equation | Again]:
    # What repeats most is taken together first; then what is before, in and after it.
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
    """Finds the stretch whose repetitions, right after it, are the most entries in all.

    Returns where it starts, how long it is, and how often it is repeated; of those alike, the
    shortest.
    """
    best = 0, 1, 0
    for period in range(1, len(codes) // 2 + 1):
        # No period from here on can repeat more entries than the best one does.
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
    """Returns what equations that do the same share: all but numbers, names and literals."""
    # No sizes of the batch: rows in size buckets run the same program for each.
    types = tuple((v.example, v.axis) for v in (*eqn.inputs, *eqn.outputs))
    how = eqn.primitive, eqn.source, eqn.service, eqn.rule, eqn.role, eqn.times
    did = bool(eqn.moves), bool(eqn.broadcasts), repr(eqn.notes)
    return how, did, len(eqn.inputs), types, tuple(map(_kind, eqn.parts))


def alike(values: Values) -> list[tuple[str, Values]]:
    """Groups values by their types, and by names without places in lists and trees.

    Returns the name of each kind, with stars for places that differ, and its values.
    """
    kinds: dict[Hashable, list[Value]] = {}
    for v in values:
        kinds.setdefault((_PLACE.sub("*", v.name), v.example, v.batched, v.axis), []).append(v)
    return [(_common([v.name for v in same]), same) for same in kinds.values()]


_PLACE = re.compile(r"(\d+)(?=[^\[\]]*\])")


def _common(names: Sequence[str]) -> str:
    pieces = zip(*map(_PLACE.split, names), strict=True)
    return "".join(same[0] if len(set(same)) == 1 else "*" for same in pieces)


SERVICES = {
    "own": "batched by rules of batchax",
    "user": "by rules of the user",
    "jax": "by rules of JAX",
    "lanes": "sequentially",
    "once": "done once for all lanes",
}
"""How equations are batched, for people."""

_MOST_COPIES = 4  # replicated values that are named


def show_flops(flops: float) -> str:
    """Writes floating-point operations: "240 FLOP", "1.2 MFLOP"."""
    if flops < 1000:
        return f"{flops:.0f} FLOP"
    for prefix in "kMGT":
        flops /= 1000
        if flops < 999.5 or prefix == "T":
            return f"{flops:.3g} {prefix}FLOP"
    raise AssertionError


def show_work(work: Work) -> str:
    """Writes work: "1.2 MFLOP, 3 MiB read and written"."""
    return f"{show_flops(work.flops)}, {show_bytes(round(work.bytes))} read and written"


def show_repeats(again: Again) -> str:
    first, last = again.like[0].number, again.like[-1].number
    what = f"like {first}" if first == last else f"what {first} to {last} do"
    often = f"{again.rounds:,} more" if first == last else count(again.rounds, "more time")
    cost = f"{show_flops(again.work.flops)}, {show_bytes(round(again.work.bytes))}"
    where = f"{again.number} to {again.equations[-1].number}"
    sizes = f", on batches of other sizes ({', '.join(again.sizes)})" if again.sizes else ""
    return f"{often} {what}{sizes}: {where}, {cost}"


def show_devices(devices: Devices) -> list[str]:
    """Says what lanes are spread over, what devices hold and exchange: a sentence each."""
    sentence = (
        f"{devices.count} along {', '.join(devices.axes)}: {count(devices.each, 'lane')} each"
    )
    if devices.repeated:
        sentence += f", of which {devices.repeated} in all repeat another, {devices.imbalance:.1%}"
        sentence += " of the work"
    sentences = [sentence]
    if devices.replicated:
        largest = sorted(devices.replicated, key=lambda v: -v.bytes)
        held = [f"{v.name} ({show_bytes(v.bytes)})" for v in largest[:_MOST_COPIES]]
        others = largest[_MOST_COPIES:]
        if others:
            size = sum(v.bytes for v in others)
            held.append(f"and {count(len(others), 'other')} ({show_bytes(size)})")
        sentences.append(f"a copy on each of {', '.join(held)}")
    if devices.collectives is not None:
        moved = (
            f"{c.kind} {show_bytes(c.bytes)}" + f" (equation {c.equation})" * bool(c.equation)
            for c in devices.collectives
        )
        sentences.append(f"exchanged: {', '.join(moved) or 'nothing'}")
        sentences.append("memory, and what the compiler counts, are those of one of them")
    return sentences


def show_masked(eqn: Equation) -> str:
    """Says why lanes are masked in a loop or in branches; empty if unknown."""
    why = eqn.notes.get("why", "")
    if isinstance(why, str):
        return why
    branches: dict[str, list[str]] = {}
    for i, each in why.items():
        branches.setdefault(each, []).append(str(i))
    return "; ".join(f"branch {', '.join(some)}: {each}" for each, some in branches.items())


def marked(value: Value) -> str:
    """Writes the type of a value for all lanes, with a star at its batch axis."""
    before, bracket, dims = value.batched.partition("[")
    if value.axis is None or not bracket:
        return value.batched
    sizes = dims.rstrip("]").split(",")
    sizes[value.axis] += "*"
    return f"{before}[{','.join(sizes)}]"


def show_way(way: int | str | None) -> str:
    """Says how lanes were run for a `Timing`, whose `batch_size` or advice this is."""
    if isinstance(way, int):
        return f"{way:,} lanes at a time"
    special = {None: "all lanes at once", "loop": "a loop over examples"}
    return special.get(way) or str(way)


def show_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def show_timed(timing: Timing) -> str:
    return show_way(show_options(timing.advice) or timing.batch_size)


def show_unmeasured(explanation: Account) -> str:
    """Says what there was no time to measure; empty if nothing."""
    if not explanation.unmeasured:
        return ""
    ways = ", ".join(map(show_way, explanation.unmeasured))
    return f"No time was left to measure {ways}. Pass a longer time_limit."


def show_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size or unit == "us":
            return f"{seconds / size:.3g} {unit}"
    raise AssertionError
