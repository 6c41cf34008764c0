"""Findings about how lanes and chunks run, and the order of all findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Literal

from batchax.analysis.cost import FINDINGS, LAUNCH, STEPS
from batchax.config import config
from batchax.divergence.compact import Compact
from batchax.divergence.costs import rule_of_user
from batchax.divergence.policy import SHOWN
from batchax.divergence.runner import Runner, for_any_machine
from batchax.errors import UnsupportedError
from batchax.execution.memory import free_memory, show_bytes
from batchax.explain.account import Equation, Finding, Work
from batchax.explain.findings.operations import (
    FindingContext,
    factorisations,
    gathers,
    lanes_at_a_time,
    one_lane_after_another,
    pays,
    price,
    price_fused,
    repeated,
    rules_of_jax,
    transposed,
)
from batchax.explain.findings.rows import groups, padding, spare_room
from batchax.explain.wording import show_options, show_seconds, show_work
from batchax.jaxprs.error_format import count
from batchax.kernel import recording
from batchax.kernel.axis import (
    AnyLoop,
    Axis,
    BoundedLoop,
    Branches,
    Divergence,
    PlacedOutputs,
    WhileLoop,
)
from batchax.kernel.inner import batched_aval
from batchax.kernel.recording import Record
from batchax.kernel.registry import find_rule


def branches(context: FindingContext) -> Iterator[Finding]:
    """Finds branches that run for all lanes. Their price is what they cost less the mean branch."""
    for eqn, record in context.walk():
        if eqn.notes.get("divergence") != "masked" or eqn.primitive != "cond":
            continue
        total = sum((part.work for part in eqn.parts), Work())
        n = len(record.eqn.params["branches"])
        unused = 1 - 1 / n
        wasted = unused * price_fused(eqn.parts)
        # What computes less than it takes to read operands and write results is part of one pass
        # over these: the branches cost nothing then.
        moved = sum(v.bytes for v in (*eqn.inputs, *eqn.outputs) if v.axis is not None)
        if wasted < FINDINGS.byte * moved:
            continue
        yield Finding(
            "branch runs for all lanes",
            f"`cond` runs each of its {n} branches for all {count(context.lanes, 'lane')}: "
            f"{show_work(total)}, where a lane uses one of them. If lanes take all branches "
            f"equally often, {unused:.0%} of that is wasted.",
            equation=eqn.number,
            cost=wasted,
            **_remedy_of_branches(context, record),
        )


def _remedy_of_branches(context: FindingContext, record: Record) -> dict[str, Any]:
    shared = (
        "If the predicate is the same in all lanes, compute it from arguments with in_axes=None: "
        "one branch runs then."
    )
    # The rule itself answers whether lanes would diverge, without running anything.
    answer = _decision_by(record, Runner.here(Compact()))
    masked = (
        f"{shared} If not, return only cheap values from the branches, and compute their common "
        "part once, after them: running lanes separately would cost more than masking here."
    )
    if answer is True and _masked_by_option(context):
        apart = _apart(context, record, f"a branch runs for the lanes that take it. {shared}")
        return {**apart, "otherwise": masked}
    if answer == "collective":
        remedy = (
            'Move the collective out of the branches: then divergence="compact" can run each for '
            f"the lanes that take it. {shared}"
        )
        return {"remedy": remedy}
    return {"remedy": masked}


_COMPACT, _AUTO = {"divergence": "compact"}, {"divergence": "auto"}


def _apart(context: FindingContext, record: Record, brings: str) -> dict[str, Any]:
    """Says what to do where lanes could diverge, and do not."""
    # By default lanes diverge where that is never slower. Elsewhere it depends on how many steps
    # each lane takes: the finding names another way as faster only if that was measured.
    if (
        context.options.get("divergence") == "predicate"
        and config.divergence == "auto"
        and _decision_by(record, for_any_machine("auto")) is True
    ):
        return {"remedy": f'Remove divergence="predicate": {brings}', "advice": _AUTO}
    if _COMPACT in context.tried:
        return {"remedy": f'Pass divergence="compact": {brings}', "advice": _COMPACT}
    remedy = (
        f'Pass divergence="compact" if lanes differ much: {brings} measure=True checks whether '
        "that is faster."
    )
    return {"remedy": remedy, "advice": _COMPACT}


def loops(context: FindingContext) -> Iterator[Finding]:
    """Finds loops that wait for their slowest lane."""
    for eqn, record in context.walk():
        if eqn.notes.get("divergence") not in _WAITING or eqn.primitive == "cond":
            continue
        if any(e.notes.get("divergence") in _LEFT for e in _around(context, eqn)):
            continue  # lanes leave that loop, and wait in this one for few others
        step, steps = _step_of(eqn)
        yield Finding(
            "loop waits for its slowest lane",
            f"`{eqn.primitive}` runs until the last of {lanes_at_a_time(context, record)} is done. "
            f"Each step costs {show_work(step)} for all lanes, done or not.",
            equation=eqn.number,
            # Half of the steps of all lanes are taken to be for nothing.
            cost=price(step) * steps / 2,
            **_remedy_of_loops(context, record),
        )


_CHUNKS = 16  # that are advised: with more, lanes wait less, and more of the time goes to chunks
_WAITING = ("masked", "asked of all")  # the latter by a predicate that looks at other lanes
_LEFT = frozenset(SHOWN.values())


def _around(context: FindingContext, eqn: Equation) -> Iterator[Equation]:
    """Iterates over the loops, branches and calls that an equation is inside."""
    number = eqn.number
    while "." in number:
        number = number.rpartition(".")[0]
        outer = context.equation(number)
        if outer is not None:
            yield outer


def _step_of(eqn: Equation) -> tuple[Work, int]:
    total = sum((part.work for part in eqn.parts), Work())
    counts = [part.times for part in eqn.parts]
    if not counts or None in counts:
        return total, STEPS
    steps = max(1, *(n for n in counts if n is not None))
    return Work(total.flops / steps, total.bytes / steps), steps


def _remedy_of_loops(context: FindingContext, record: Record) -> dict[str, Any]:
    answer = _decision_by(record, Runner.here(Compact()))
    if answer is True and _masked_by_option(context):
        return _apart(context, record, "finished lanes leave, and waiting lanes refill the slots.")
    if answer == "collective":
        remedy = (
            'Move the collective out of the loop: then divergence="compact" lets lanes leave it '
            "when they are done."
        )
        return {"remedy": remedy}
    size = context.each // _CHUNKS
    if size < 2:
        remedy = 'Pass divergence="serial" if lanes differ much: so few then end one by one.'
        return {"remedy": remedy}
    remedy = (
        "Sort the batch by how many steps lanes are likely to take, and pass "
        f"batch_size={size}: the loop of each chunk ends with its own last lane."
    )
    return {"remedy": remedy}


def _masked_by_option(context: FindingContext) -> bool:
    return context.options.get("divergence", "auto") in ("auto", "predicate")


def _decision_by(record: Record, divergence: Runner) -> Any:
    """Whether lanes would diverge; "collective" if something inside forbids it."""
    if rule_of_user.in_equation(record.eqn):  # it may use other lanes in unknown ways
        return False
    rule, recorder = find_rule(record.eqn.primitive), _DecisionRecorder(divergence)
    axis = replace(record.axis, divergence=recorder)
    invars = record.eqn.invars
    operands = [
        v.aval if a is None else batched_aval(axis, v.aval, a)
        for v, a in zip(invars, record.in_axes, strict=True)
    ]

    # The rule runs abstractly, with an axis whose divergence notes its calls.
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
    return recorder.took


class _DecisionRecorder(Divergence):
    """Wraps a divergence, and remembers whether it ran a loop or branch."""

    @property
    def explicit(self) -> bool:
        return True

    def __init__(self, divergence: Runner) -> None:
        self.took = False
        self._divergence = divergence

    def why_lockstep(self, axis: Axis, loop: AnyLoop) -> str:
        return self._divergence.why_lockstep(axis, loop)

    def run_nest(self, axis: Axis, loop: AnyLoop) -> PlacedOutputs | None:
        return self._noted(self._divergence.run_nest(self._own(axis), loop))

    def run(
        self, axis: Axis, divergent: WhileLoop | BoundedLoop | Branches
    ) -> PlacedOutputs | None:
        return self._noted(self._divergence.run(self._own(axis), divergent))

    def with_max_width(self, width: int) -> Divergence:
        return self._divergence.with_max_width(width)

    def _own(self, axis: Axis) -> Axis:
        # What is inside runs with the wrapped divergence: only the outermost loop counts.
        return replace(axis, divergence=self._divergence)

    def _noted(self, answer: PlacedOutputs | None) -> PlacedOutputs | None:
        self.took |= answer is not None
        return answer


_MOST_OVERHEAD = 0.05  # of a chunk's time, where its size is well chosen
_TOO_MUCH = 0.25  # of it, where it is not
_CACHE = 4 << 20  # bytes of temporaries that are hardly worth making chunks for


def chunk_sizes(context: FindingContext) -> Iterator[Finding]:
    """Finds a `batch_size` far from the best: the smallest that hides what each chunk costs."""
    # Measured sizes say more than the estimate below.
    if context.timings:
        yield from _measured(context)
        return
    size = context.options.get("batch_size")
    serial = context.options.get("divergence") == "serial"
    if not isinstance(size, int) or context.each <= 1 or serial:
        return
    if any(eqn.times is None for eqn, _ in context.walk()):
        return  # what a chunk computes is not known
    chunks = math.ceil(context.each / size)
    # A chunk of s lanes takes each + s * work. The best s is where `each` is the given share of
    # that.
    work = context.price / context.lanes  # of a lane
    each = LAUNCH * _started_operations(context)
    best = _power_of_two(each / (_MOST_OVERHEAD * max(work, 1e-3)), context.each)
    share = each / max(each + size * work, 1e-3)
    if chunks > 1 and share > _TOO_MUCH and best >= 2 * size:
        yield Finding(
            "chunk size far from the best",
            f"{count(chunks, 'chunk')} of {count(size, 'lane')}: to begin the operations of each "
            f"takes about {share:.0%} of its time.",
            _remedy_of_small(context, best),
            "",
            each * (chunks - math.ceil(context.each / best)),
            advice={"batch_size": best if best < context.each else None},
        )
    elif context.temporaries and context.temporaries > _CACHE and size >= 4 * best:
        each_lane = context.temporaries / min(size, context.each)
        # Chunks whose temporaries stay in the cache, as long as they are no smaller than the best.
        best = max(best, 1 << max(0, math.floor(math.log2(_CACHE / each_lane))))
        if size < 4 * best:
            return
        yield Finding(
            "chunk size far from the best",
            f"{'All' if chunks == 1 else 'Chunks of'} {count(min(size, context.each), 'lane')} "
            f"at a time need {show_bytes(context.temporaries)} of temporaries, and are hardly "
            "faster than smaller ones.",
            f"Pass batch_size={best}: {show_bytes(round(best * each_lane))} of them are enough.",
            "",
            FINDINGS.byte * context.temporaries,
            advice={"batch_size": best},
        )


def _measured(context: FindingContext) -> Iterator[Finding]:
    now, *others = context.timings
    tried = [t for t in others if t.batch_size != "loop" and not t.advice]
    best = min(tried, key=lambda t: t.seconds, default=now)
    if not pays(now, best):
        return
    size = best.batch_size
    lanes = "all lanes at once" if size is None else f"{count(int(size), 'lane')} at a time"
    what = "All lanes at once" if now.batch_size is None else f"batch_size={now.batch_size!r}"
    peaks = "" if best.peak is None else f", with {show_bytes(best.peak)} of memory"
    yield Finding(
        "chunk size far from the best",
        f"{what} took {show_seconds(now.seconds)}, {lanes} {show_seconds(best.seconds)}{peaks}.",
        "Remove batch_size." if size is None else f"Pass batch_size={size}.",
        "",
        (now.seconds - best.seconds) * 1e9,
    )


def _started_operations(context: FindingContext) -> int:
    """Counts the operations that a chunk begins, without those of branches that may not run."""
    shown = (context.tallies.get(record) for _, record in context.walk())
    return sum(len(t.emitted) for t in shown if t is not None and not t.skipped)


def _remedy_of_small(context: FindingContext, best: int) -> str:
    if best < context.each:
        return f"Pass batch_size={best}."
    return "Remove batch_size: all lanes together do little."


def _power_of_two(least: float, most: int) -> int:
    """Returns the smallest power of two that is no less than `least`, or `most`."""
    return min(most, 1 << max(0, math.ceil(math.log2(max(least, 1.0)))))


def memory(context: FindingContext) -> Iterator[Finding]:
    """Finds temporaries or outputs of all lanes that take half of what the device has free."""
    if context.memory is None or context.each <= 1:
        return
    free, lanes = free_memory(), count(context.each, "lane")
    temporaries, outputs = context.memory.temporaries, context.memory.outputs
    if context.options.get("batch_size") is None and temporaries >= free / 2:
        yield Finding(
            "temporaries fill the memory",
            f"All {lanes} at once need {show_bytes(temporaries)} of temporaries. The device has "
            f"{show_bytes(free)} free.",
            'Pass batch_size="auto": as many lanes run at a time as fit.',
            "",
            FINDINGS.byte * temporaries,
        )
    if outputs >= free / 2:
        yield Finding(
            "outputs fill the memory",
            f"The outputs of all {lanes} need {show_bytes(outputs)}, at any batch_size. The device "
            f"has {show_bytes(free)} free.",
            'Pass out_axes=bx.Reduce("sum"), or another reduction, for outputs of which you need '
            "one for the whole batch. Write the outputs to disk with bx.map if you need all.",
            "",
            FINDINGS.byte * outputs,
        )


Kind = Callable[[FindingContext], Iterator[Finding]]

_TOLD_IF_EXPENSIVE: tuple[Kind, ...] = (
    branches,
    loops,
    repeated,
    transposed,
    gathers,
    factorisations,
    chunk_sizes,
    memory,
    padding,
    spare_room,
)
# What one would not expect, however little it costs.
_TOLD_ALWAYS: tuple[Kind, ...] = (rules_of_jax, one_lane_after_another, groups)

_LEAST = 1_000.0  # nanoseconds that a finding is worth telling for
_LEAST_SHARE = 0.01  # of what the call costs
_MOST_NAMED = 5  # equations of one finding


def find_findings(context: FindingContext) -> tuple[Finding, ...]:
    """Lists what costs more than it would have to, or is unexpected, most expensive first.

    Left out is what costs less than a microsecond or than one percent of the call.
    """
    least = max(_LEAST, _LEAST_SHARE * context.price)
    findings = [f for f in _merged(_TOLD_IF_EXPENSIVE, context) if f.cost >= least]
    findings += _merged(_TOLD_ALWAYS, context)
    findings = [f for finding in findings for f in _as_measured(finding, context)]
    return tuple(sorted(findings, key=lambda finding: -finding.cost))


def _as_measured(finding: Finding, context: FindingContext) -> Iterator[Finding]:
    """Adds to a finding what following its advice brought, or drops the advice."""
    if not finding.advice or finding.advice not in context.tried:
        yield finding
        return
    now = context.timings[0]
    then = next((t for t in context.timings if t.advice == finding.advice), None)
    what = show_options(finding.advice)
    if then is None:
        more = f" {what} raised an error."
    else:
        more = f" It took {show_seconds(now.seconds)}, with {what} {show_seconds(then.seconds)}."
    if then is not None and pays(now, then):
        yield replace(finding, message=finding.message + more)
    elif finding.otherwise:
        otherwise = finding.otherwise
        yield replace(
            finding, message=finding.message + more, remedy=otherwise, advice={}, otherwise=""
        )


def _merged(kinds: Sequence[Kind], context: FindingContext) -> list[Finding]:
    """Lists what is found; all in the same words is one finding."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for kind in kinds:
        for finding in kind(context):
            key = finding.kind, finding.message, finding.remedy
            alike.setdefault(key, []).append(finding)
    return _without_nested([_as_one(findings) for findings in alike.values()])


def _without_nested(findings: Sequence[Finding]) -> list[Finding]:
    """Tells what is inside of something of its kind there, if it says the same."""
    # Loops in a loop wait for the same lanes, and are fixed by what fixes the outermost.
    inside: dict[int, list[Finding]] = {i: [] for i in range(len(findings))}
    for i, finding in enumerate(findings):
        around = (j for j, other in enumerate(findings) if _is_inside(finding, other))
        outermost = min(around, key=lambda j: len(findings[j].equation), default=None)
        if outermost is not None:
            del inside[i]
            inside[outermost].append(finding)
    return [_with_nested(findings[i], nested) for i, nested in inside.items()]


def _is_inside(finding: Finding, other: Finding) -> bool:
    same = (finding.kind, finding.remedy) == (other.kind, other.remedy)
    return same and finding.equation.startswith(f"{other.equation}.")


def _with_nested(finding: Finding, nested: Sequence[Finding]) -> Finding:
    if not nested:
        return finding
    more = f"{count(len(nested), 'equation')} inside of it"
    return replace(
        finding, message=f"{finding.message} The same holds for {more}: {_named(nested)}."
    )


def _named(findings: Sequence[Finding]) -> str:
    numbers = ", ".join(finding.equation for finding in findings[:_MOST_NAMED])
    return f"{numbers}{', ...' if len(findings) > _MOST_NAMED else ''}"


def _as_one(findings: Sequence[Finding]) -> Finding:
    first, *others = findings
    if not others:
        return first
    return replace(
        first,
        message=f"{first.message} The same holds for {count(len(others), 'equation')} more: "
        f"{_named(others)}.",
        cost=sum(finding.cost for finding in findings),
    )
