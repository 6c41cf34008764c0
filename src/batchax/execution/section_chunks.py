"""Running the equations of a stage chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchax import _compat
from batchax.execution.chunk_results import of_only_chunk
from batchax.execution.devices.results import combined
from batchax.execution.placement import run_loop
from batchax.execution.section_body import Found, SectionBody, Target
from batchax.execution.section_plan import Setting, Stage
from batchax.execution.sections import Env, section_for
from batchax.execution.streaming import finish
from batchax.jaxprs.words import Eqn, Value
from batchax.kernel.captured import closed_over

_Chunked = tuple[SectionBody, dict[Target, list[Any]], dict[Target, Found]]
"""What was run; what it returned, for targets that depend on the batch; the other targets."""


def run_chunks(setting: Setting, stage: Stage, env: Env) -> dict[Target, Found] | None:
    """The targets of a stage; None if nothing is left to do for any lane."""
    targets = stage.targets
    body = SectionBody(setting.lanes, env, stage.free, targets)
    if not body.section.eqns and not targets:
        return None
    if body.of_only_chunk is None:
        body, outs, by_target = _in_loop(setting, stage, env, body)
    else:
        body, outs, by_target = _only_chunk(body, body.of_only_chunk)
    if setting.shards is not None:
        inside = stage.inside
        specs = [spec for target in outs for spec in body.specs[target]]
        returned = [target not in inside for target in outs for _ in body.specs[target]]
        of_each = [x for xs in outs.values() for x in xs]
        of_all = iter(combined(setting.shards, specs, of_each, returned))
        outs = {target: [next(of_all) for _ in xs] for target, xs in outs.items()}
    for target, results in outs.items():
        if target.reduction is not None:
            part = body.reduced[target]
            out, aval = finish(target.reduction, part, results, setting.axis.size), part.result
        else:
            (out,), (aval,) = results, body.types[target]
        by_target[target] = Found(_compat.weakly(out) if aval.weak_type else out, 0)
    return by_target


def _only_chunk(body: SectionBody, results: Sequence[Value]) -> _Chunked:
    outs = body.of_targets(results)
    by_target = {t: Found(outs.pop(t)[0], None) for t in body.shared}
    outs = {t: list(map(of_only_chunk, xs, body.specs[t])) for t, xs in outs.items()}
    return body, outs, by_target


def _in_loop(setting: Setting, stage: Stage, env: Env, body: SectionBody) -> _Chunked:
    by_target: dict[Target, Found] = {}
    same: list[Target] = []
    if body.shared:  # batching found that all lanes have the same
        lanes, eqns = setting.lanes, stage.free
        # What makes calls is not computed once more for the first lane.
        same = [t for t in body.shared if _calls_back(eqns, t, env)]
        quiet = [t for t in body.shared if t not in same]
        if quiet:
            by_target = SectionBody(lanes, env, eqns, quiet, effects=False).of_first_lane()
        rest = [t for t in body.targets if t not in by_target]
        body = SectionBody(lanes, env, eqns, rest, same=same)
    loop = replace(body.loop, results=body.results)
    # To keep residuals is to scan, and JAX runs the derivative rules of what it scans when the
    # values that they close over are gone.
    keep = setting.keep and not any(map(closed_over, body.section.eqns))
    outs = body.of_targets(run_loop(loop, body.operands, keep))
    by_target |= {t: Found(outs.pop(t)[0][0], None) for t in same}
    return body, outs, by_target


def _calls_back(eqns: Sequence[Eqn], target: Target, env: Env) -> bool:
    section = section_for(eqns, [target.variable], env, effects=False)
    return any(_compat.calls_back(eqn.effects) for eqn in section.eqns)
