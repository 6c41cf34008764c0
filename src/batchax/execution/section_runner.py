"""Running a staged program section by section, for all lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import Literal

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.devices.shards import Shards
from batchax.execution.donated import without_donations
from batchax.execution.loop_progress import LoopProgress
from batchax.execution.memory import Auto
from batchax.execution.names import HostCalls, expose_names, is_exposed
from batchax.execution.references import without_references
from batchax.execution.section_body import Found, LanesToRun
from batchax.execution.section_chunks import run_chunks
from batchax.execution.section_cuts import run_cuts
from batchax.execution.section_plan import Setting, placed_at, plan_stage
from batchax.execution.sections import Env, bytes_per_lane, run_shared, section_for
from batchax.execution.watched import Steps
from batchax.frontend.outputs import AUTO, OutputArray, Reduce, check_unbatched, place
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr, Value
from batchax.kernel.axis import Axis, Position
from batchax.rules.lane_calls import calls_in


class SectionRunner:
    """Runs a program section by section.

    On one of several `shards` `axis` has the lanes of all.
    """

    def __init__(
        self,
        axis: Axis,
        batch_size: int | Auto,
        keep: bool,
        staged: Any,
        args: Sequence[Value],
        positions: Sequence[Position],
        described: Sequence[OutputArray],
        shards: Shards | None = None,
        progress: LoopProgress | None = None,
    ) -> None:
        local = axis if shards is None else replace(axis, size=shards.each)
        staged = without_references(staged, axis.name, axis.size)
        # A lane that repeats another makes a difference only where lanes meet.
        meet = axis.name is not None or any(isinstance(o.spec, Reduce) for o in described)
        repeated = shards.most_repeated if shards is not None and meet else 0
        in_parts = isinstance(batch_size, Auto) or batch_size < local.size
        calls = _host_calls(axis, staged.jaxpr, positions, shards, in_parts)
        indexed = any(isinstance(o.spec, Reduce) and o.spec.reduction.index for o in described)
        index, values = None, list(zip(args, positions, strict=True))
        if repeated or indexed or calls or any(is_exposed(axis, eqn) for eqn in staged.jaxpr.eqns):
            staged = expose_names(axis, staged, calls or HostCalls())
            index = staged.jaxpr.invars[0]
            all_lanes = np.array([0, axis.size], np.int32)
            values.insert(0, (all_lanes if shards is None else shards.own_lanes(), 0))
        self._jaxpr, self._described = staged.jaxpr, described
        self._known: Env = {
            v: (c, None) for v, c in zip(self._jaxpr.constvars, staged.consts, strict=True)
        }
        self._known.update(zip(self._jaxpr.invars, values, strict=True))
        batch_bytes = bytes_per_lane(
            v for v, (_, a) in self._known.items() if a is not None and v is not index
        )
        lanes = LanesToRun(local, batch_size, index, repeated, progress).apart()
        self._setting = Setting(axis, lanes, keep, shards, batch_bytes)

    def outputs(self) -> tuple[list[Any], list[Position]]:
        """What the program returns, placed, and where it carries the batch axis."""
        setting, env, lanes = self._setting, dict(self._known), self._setting.lanes
        needed = section_for(self._jaxpr.eqns, self._jaxpr.outvars, ()).eqns
        eqns: Sequence[Eqn] = without_donations(needed)
        left = dict(enumerate(zip(self._jaxpr.outvars, self._described, strict=True)))
        outs: dict[int, Found] = {}
        looped = False
        while True:
            eqns = run_shared(setting.axis, eqns, env)
            stage = plan_stage(setting, eqns, env, left)
            by_target = run_chunks(setting, stage, env)
            looped = looped or (by_target is not None and not lanes.are_one_chunk)
            by_target = by_target or {}
            ready = {i: _read(env, left[i][0]) for i in stage.known}
            ready |= {i: by_target[target] for i, target in stage.wanted.items()}
            ready = dict(sorted(ready.items()))
            of_outputs = [left[i][1] for i in ready]
            check_unbatched(setting.axis, of_outputs, [x.position for x in ready.values()])
            for i, x in ready.items():
                outs[i] = _placed(setting, *left.pop(i), x, i in stage.wanted)
            if not stage.cuts:
                break
            env.update((target.variable, by_target[target]) for target in stage.kept)
            run_cuts(setting, stage, by_target, env, self._in_sections)
            eqns = stage.left_of(eqns)
        placed = [outs[i] for i in range(len(outs))]
        values = [x.value for x in placed]
        if not looped:  # all lanes are one chunk, or nothing was left to do for any
            Steps(1, lanes.progress).end(1, results=values)
        return values, [x.position for x in placed]

    def _in_sections(self, shards: Shards | None) -> Axis:
        """The axis, for loops and branches with sections inside."""
        axis, keep = self._setting.axis, self._setting.keep
        how = self._setting.lanes.batch_size, keep, shards
        return replace(axis, bodies=BodiesInSections(axis, *how))


def _host_calls(
    axis: Axis,
    jaxpr: Jaxpr,
    positions: Sequence[Position],
    shards: Shards | None,
    in_parts: bool,
) -> HostCalls | None:
    """The calls of the host, if there are any, and if lanes run `in_parts` or on devices.

    Raises:
      UnsupportedError: they are to be in order, and devices would make them.
    """
    calls = [call for eqn in jaxpr.eqns for call in calls_in(eqn)]
    if not calls:
        return None
    if shards is None or shards.count == 1:
        return HostCalls.of(axis, jaxpr, positions) if in_parts else None
    for call in calls:
        if _compat.in_order(call.effects):
            raise UnsupportedError(
                f"{_compat.user_line(call.source_info)}: a callback is to be called in order "
                "(ordered=True), and lanes are spread over devices (mesh was given, or the "
                "arguments are sharded), which run at the same time. Leave out ordered or mesh."
            )
    own = shards.own_lanes() if shards.most_repeated else None
    return HostCalls.of(axis, jaxpr, positions, devices=shards.names, own=own)


def _read(env: Env, v: Any) -> Found:
    return Found(v.val, None) if isinstance(v, Literal) else Found(*env[v])


def _placed(setting: Setting, v: Any, output: OutputArray, x: Found, by_chunks: bool) -> Found:
    """An output where it is wanted."""
    value = x.value
    if not (by_chunks and x.position is not None):  # which leave it there
        # A value that all lanes share is reduced over the lanes of all shards, but where it is
        # repeated, each shard repeats it for its own.
        axis = setting.axis if isinstance(output.spec, Reduce) else setting.lanes.axis
        value = place(axis, output, value, x.position)
    return Found(value, placed_at(v, output.spec, x.position))


@dataclass(frozen=True)
class BodiesInSections:
    """Runs the programs inside loops and branches in which lanes meet section by section, too.

    So a step has as many lanes at a time as what is around the loop, and meets all of them.

    Attributes:
      axis: the axis of all lanes.
      batch_size: how many run at a time.
      keep: whether reverse mode keeps what each chunk computed.
      shards: what lanes are spread over.
    """

    axis: Axis
    batch_size: int | Auto
    keep: bool
    shards: Shards | None

    def run(
        self, program: ClosedJaxpr, args: Sequence[Value], axes: Sequence[Position]
    ) -> tuple[list[Any], list[Position]]:
        """What a program returns for all lanes, and where that carries the batch axis."""
        outputs = [OutputArray("", AUTO)] * len(program.out_avals)
        how = self.axis, self.batch_size, self.keep
        return SectionRunner(*how, program, args, axes, outputs, self.shards).outputs()
