"""All kinds of findings, most expensive first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from batchax.explain.account import Finding
from batchax.explain.findings.chunks import chunk_sizes, memory
from batchax.explain.findings.copies import repeated, transposed
from batchax.explain.findings.draft import Draft, pays
from batchax.explain.findings.fallbacks import one_lane_after_another, rules_of_jax
from batchax.explain.findings.lanes_apart import branches, loops
from batchax.explain.findings.ragged_rows import groups, padding, spare_room
from batchax.explain.findings.slow_operations import factorisations, gathers
from batchax.explain.wording import count, show_options, show_seconds

Kind = Callable[[Draft], Iterator[Finding]]

_TOLD_IF_DEAR: tuple[Kind, ...] = (
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


def find_findings(draft: Draft) -> tuple[Finding, ...]:
    """What costs more than it would have to, or that one would not expect, most expensive first.

    Left out is what costs less than a microsecond or than one percent of the call.
    """
    least = max(_LEAST, _LEAST_SHARE * draft.price)
    findings = [f for f in _merged(_TOLD_IF_DEAR, draft) if f.cost >= least]
    findings += _merged(_TOLD_ALWAYS, draft)
    findings = [f for finding in findings for f in _as_measured(finding, draft)]
    return tuple(sorted(findings, key=lambda finding: -finding.cost))


def _as_measured(finding: Finding, draft: Draft) -> Iterator[Finding]:
    """A finding whose advice was followed: with what that brings, or without the advice."""
    if not finding.advice or finding.advice not in draft.tried:
        yield finding
        return
    now = draft.timings[0]
    then = next((t for t in draft.timings if t.advice == finding.advice), None)
    what = show_options(finding.advice)
    if then is None:
        told = f" {what} was refused."
    else:
        told = f" It took {show_seconds(now.seconds)}, with {what} {show_seconds(then.seconds)}."
    if then is not None and pays(now, then):
        yield replace(finding, message=finding.message + told)
    elif finding.otherwise:
        otherwise = finding.otherwise
        yield replace(
            finding, message=finding.message + told, remedy=otherwise, advice={}, otherwise=""
        )


def _merged(kinds: Sequence[Kind], draft: Draft) -> list[Finding]:
    """What is found, with all that is said in the same words as one finding."""
    alike: dict[tuple[str, str, str], list[Finding]] = {}
    for kind in kinds:
        for finding in kind(draft):
            key = finding.kind, finding.message, finding.remedy
            alike.setdefault(key, []).append(finding)
    return _without_nested([_as_one(findings) for findings in alike.values()])


def _without_nested(findings: Sequence[Finding]) -> list[Finding]:
    """What is found, with what is inside of something of its kind told there, if it says the same.

    Loops in a loop wait for the same lanes, and are mended by what mends the outermost.
    """
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
