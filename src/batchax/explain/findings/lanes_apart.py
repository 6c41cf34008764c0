"""Lanes that part ways and are masked: branches that run for all, loops that go on for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Literal

from batchax.config import config
from batchax.divergence.compact import Compact
from batchax.divergence.limits import rule_of_user
from batchax.divergence.runner import Runner, for_any_machine
from batchax.errors import UnsupportedError
from batchax.explain.account import Equation, Finding, Work
from batchax.explain.findings.draft import Draft, lanes_at_a_time, price, price_fused
from batchax.explain.wording import count, show_work
from batchax.kernel import recording
from batchax.kernel.axis import Axis
from batchax.kernel.divergence import (
    AnyLoop,
    BoundedLoop,
    Branches,
    Divergence,
    PlacedOutputs,
    WhileLoop,
)
from batchax.kernel.inner import batched_aval
from batchax.kernel.recording import Record
from batchax.kernel.registry import find_rule
from batchax.programs.cost import STEPS
from batchax.programs.weights import FINDINGS


def branches(draft: Draft) -> Iterator[Finding]:
    """Branches that run for all lanes. Their price: what they cost less the mean branch.

    Those that compute less than it takes to read operands and write results are left out: they
    are part of one pass over these.
    """
    for eqn, record in draft.walk():
        if eqn.notes.get("divergence") != "masked" or eqn.primitive != "cond":
            continue
        total = sum((part.work for part in eqn.parts), Work())
        n = len(record.eqn.params["branches"])
        unused = 1 - 1 / n
        wasted = unused * price_fused(eqn.parts)
        moved = sum(v.bytes for v in (*eqn.inputs, *eqn.outputs) if v.axis is not None)
        if wasted < FINDINGS.byte * moved:
            continue
        yield Finding(
            "branch runs for all lanes",
            f"`cond` runs each of its {n} branches for all {count(draft.lanes, 'lane')}: "
            f"{show_work(total)}, where a lane uses one of them. If lanes take all equally often, "
            f"{unused:.0%} of that is for nothing.",
            equation=eqn.number,
            cost=wasted,
            **_remedy_of_branches(draft, record),
        )


def _remedy_of_branches(draft: Draft, record: Record) -> dict[str, Any]:
    """The remedy of a finding, and what it advises."""
    shared = (
        "If the predicate is the same in all lanes, compute it from arguments with in_axes=None: "
        "one branch runs then."
    )
    answer = _ask(record, Runner.here(Compact()))
    masked = (
        f"{shared} If not, have branches return what is cheap, and compute once, after them, what "
        "they have in common: to take lanes apart would cost more than masking does here."
    )
    if answer is True and _masked_by_option(draft):
        apart = _apart(draft, record, f"a branch runs for the lanes that take it. {shared}")
        return {**apart, "otherwise": masked}
    if answer == "collective":
        remedy = (
            'Move the collective out of the branches: then divergence="compact" can run each for '
            f"the lanes that take it. {shared}"
        )
        return {"remedy": remedy}
    return {"remedy": masked}


_COMPACT, _AUTO = {"divergence": "compact"}, {"divergence": "auto"}


def _apart(draft: Draft, record: Record, brings: str) -> dict[str, Any]:
    """What to do where lanes could be taken apart, and are not.

    The default takes them apart where that surely pays. Elsewhere it depends on how many steps
    each lane takes: that another way is faster is said where it was measured.
    """
    if (
        draft.options.get("divergence") == "predicate"
        and config.divergence == "auto"
        and _ask(record, for_any_machine("auto")) is True
    ):
        return {"remedy": f'Leave divergence="predicate" out: {brings}', "advice": _AUTO}
    if _COMPACT in draft.tried:
        return {"remedy": f'Give divergence="compact": {brings}', "advice": _COMPACT}
    remedy = (
        'Try divergence="compact", if lanes differ much: measure=True runs it, too, and says '
        f"whether it is faster. With it {brings}"
    )
    return {"remedy": remedy, "advice": _COMPACT}


def loops(draft: Draft) -> Iterator[Finding]:
    """Loops that wait for their slowest lane.

    Their price: half of the steps of all lanes, of which there are taken to be 16 where a loop
    does not say; where steps were counted, those that no lane needed. Where lanes needed nearly
    all, there is nothing to find.
    """
    for eqn, record in draft.walk():
        if eqn.notes.get("divergence") not in _WAITING or eqn.primitive == "cond":
            continue
        step, steps = _step_of(eqn)
        waits, told = steps / 2, ""
        counted = draft.counted(eqn.number)
        if counted is not None:
            if counted.waits_little:
                continue
            waits = counted.in_vain / draft.each
            told = f" Of {counted.done:,} lane-steps they needed {counted.needed:,}."
        yield Finding(
            "loop waits for its slowest lane",
            f"`{eqn.primitive}` goes on until the last of {lanes_at_a_time(draft, record)} is "
            f"done. Each step costs {show_work(step)} for all of them, whether they are done or "
            f"not.{told}",
            equation=eqn.number,
            cost=price(step) * waits,
            **_remedy_of_loops(draft, record),
        )


_CHUNKS = 16  # that are advised: with more, lanes wait less, and more of the time goes to chunks
_WAITING = ("masked", "asked of all")  # the latter by a predicate that looks at other lanes


def _step_of(eqn: Equation) -> tuple[Work, int]:
    """The work of one step, and the number of steps in one call."""
    total = sum((part.work for part in eqn.parts), Work())
    counts = [part.times for part in eqn.parts]
    if not counts or None in counts:
        return total, STEPS
    steps = max(1, *(n for n in counts if n is not None))
    return Work(total.flops / steps, total.bytes / steps), steps


def _remedy_of_loops(draft: Draft, record: Record) -> dict[str, Any]:
    """The remedy of a finding, and what it advises."""
    answer = _ask(record, Runner.here(Compact()))
    if answer is True and _masked_by_option(draft):
        return _apart(draft, record, "lanes that are done leave the loop, others take over.")
    if answer == "collective":
        remedy = (
            'Move the collective out of the loop: then divergence="compact" lets lanes leave it '
            "when they are done."
        )
        return {"remedy": remedy}
    size = max(1, draft.each // _CHUNKS)
    remedy = (
        "Sort the batch by how many steps lanes are likely to take, and give "
        f"batch_size={size}: the loop of each chunk ends with its own last lane."
    )
    return {"remedy": remedy}


def _masked_by_option(draft: Draft) -> bool:
    return draft.options.get("divergence", "auto") in ("auto", "predicate")


def _ask(record: Record, divergence: Runner) -> Any:
    """Whether lanes would be taken apart; "collective" if something inside forbids it."""
    if rule_of_user.in_equation(record.eqn):  # what it does with other lanes nobody knows
        return False
    rule, asked = find_rule(record.eqn.primitive), _Asked(divergence)
    axis = replace(record.axis, divergence=asked)
    invars = record.eqn.invars
    operands = [
        v.aval if a is None else batched_aval(axis, v.aval, a)
        for v, a in zip(invars, record.in_axes, strict=True)
    ]

    def run(*xs: Any) -> None:
        values = [v.val if isinstance(v, Literal) else x for v, x in zip(invars, xs, strict=True)]
        assert rule is not None
        rule(axis, values, record.in_axes, **record.eqn.params)

    try:
        with recording.paused():
            jax.eval_shape(run, *operands)
    except UnsupportedError:
        return "collective"
    except NameError:  # of an axis of the mesh: the call is inside ``shard_map``, this is not
        return False
    return asked.took


class _Asked(Divergence):
    """Another, which remembers whether it took anything that it was asked."""

    @property
    def explicit(self) -> bool:
        return True

    def __init__(self, divergence: Runner) -> None:
        self.took = False
        self._divergence = divergence

    def may_diverge(self, axis: Axis, loop: AnyLoop) -> bool:
        return self._divergence.may_diverge(axis, loop)

    def run_nest(self, axis: Axis, loop: AnyLoop) -> PlacedOutputs | None:
        return self._noted(self._divergence.run_nest(self._own(axis), loop))

    def run(self, axis: Axis, parting: WhileLoop | BoundedLoop | Branches) -> PlacedOutputs | None:
        return self._noted(self._divergence.run(self._own(axis), parting))

    def with_max_width(self, width: int) -> Divergence:
        return self._divergence.with_max_width(width)

    def _own(self, axis: Axis) -> Axis:
        return replace(axis, divergence=self._divergence)

    def _noted(self, answer: PlacedOutputs | None) -> PlacedOutputs | None:
        self.took |= answer is not None
        return answer
