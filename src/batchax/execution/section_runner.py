"""Running a staged program section by section, for all lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.extend.core.primitives import cond_p, scan_p, while_p

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.bounded_loop import bounded_loop_p
from batchax.execution.chunk_loop import chunk_loop_p
from batchax.execution.chunk_results import of_only_chunk
from batchax.execution.devices.results import combined
from batchax.execution.devices.shards import Shards
from batchax.execution.loop_progress import LoopProgress
from batchax.execution.memory import Auto
from batchax.execution.names import HostCalls, expose_names, is_exposed
from batchax.execution.placement import run_loop
from batchax.execution.reverse_sweep import reverse_sweep_p
from batchax.execution.section_body import Found, LanesToRun, SectionBody, Target
from batchax.execution.sections import (
    Env,
    bytes_per_lane,
    crossing,
    find_cuts,
    parting_loops,
    run_shared,
    run_whole,
    section_for,
    variables,
)
from batchax.execution.streaming import finish
from batchax.execution.watched import Steps
from batchax.frontend.outputs import AUTO, OutputArray, Reduce, check_unbatched, place
from batchax.jaxprs.spoken import line_of, spoken
from batchax.kernel.axis import Axis, AxisPosition
from batchax.kernel.captured import closed_over
from batchax.rules.collectives import REDUCTIONS
from batchax.rules.lane_calls import calls_in

_SMALL = 256  # bytes that a loop cut out may hold of each lane, however little the batch has


class SectionRunner:
    """Runs a program section by section; `env` holds what is known of it.

    On one of several `shards` `axis` has the lanes of all, and `local` those of the shard.
    """

    def __init__(
        self,
        axis: Axis,
        batch_size: int | Auto,
        keep: bool,
        staged: Any,
        args: Sequence[Any],
        positions: Sequence[AxisPosition],
        described: Sequence[OutputArray],
        shards: Shards | None = None,
        progress: LoopProgress | None = None,
    ) -> None:
        self.axis, self.keep, self.shards = axis, keep, shards
        self.local = axis if shards is None else replace(axis, size=shards.each)
        staged = _compat.without_references(staged, axis.name, axis.size)
        self.in_chunks = False
        self.lane, values = None, list(zip(args, positions, strict=True))
        self.described = described
        # A lane that repeats another makes a difference only where lanes meet.
        meet = axis.name is not None or any(isinstance(o.spec, Reduce) for o in described)
        repeated = shards.most_repeated if shards is not None and meet else 0
        calls = self._host_calls(staged.jaxpr, positions, batch_size)
        indexed = any(isinstance(o.spec, Reduce) and o.spec.reduction.index for o in described)
        if repeated or indexed or calls or any(is_exposed(axis, eqn) for eqn in staged.jaxpr.eqns):
            staged = expose_names(axis, staged, calls or HostCalls())
            self.lane = staged.jaxpr.invars[0]
            all_lanes = np.array([0, axis.size], np.int32)
            values.insert(0, (all_lanes if shards is None else shards.own_lanes(), 0))
        self.jaxpr = staged.jaxpr
        self.env: Env = {
            v: (c, None) for v, c in zip(self.jaxpr.constvars, staged.consts, strict=True)
        }
        self.env.update(zip(self.jaxpr.invars, values, strict=True))
        self.lanes = LanesToRun(self.local, batch_size, self.lane, repeated, progress).apart()
        self.batch_bytes = bytes_per_lane(
            v for v, (_, a) in self.env.items() if a is not None and v is not self.lane
        )

    def _host_calls(
        self, jaxpr: Any, positions: Sequence[AxisPosition], batch_size: int | Auto
    ) -> HostCalls | None:
        """The calls of the host, if there are any, and if lanes run in parts.

        Raises:
          UnsupportedError: they are to be in order, and devices would make them.
        """
        axis, shards = self.axis, self.shards
        calls = [call for eqn in jaxpr.eqns for call in calls_in(eqn)]
        if not calls:
            return None
        if shards is None or shards.count == 1:
            in_parts = isinstance(batch_size, Auto) or batch_size < self.local.size
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

    def outputs(self) -> tuple[list[Any], list[AxisPosition]]:
        """What the program returns, placed, and where it carries the batch axis."""
        outvars, described = self.jaxpr.outvars, self.described
        eqns: Sequence[Any] = section_for(self.jaxpr.eqns, outvars, ()).eqns
        outs: dict[int, Any] = {}
        positions: dict[int, AxisPosition] = {}
        while True:
            eqns = run_shared(self.axis, eqns, self.env)
            loops = self._loops_to_cut(eqns)
            cuts, blocked, free = find_cuts(self.axis, eqns, loops)
            known: dict[int, Found] = {}
            targets: dict[int, Target] = {}
            for i, (v, output) in enumerate(zip(outvars, described, strict=True)):
                if i in outs or (not isinstance(v, Literal) and v in blocked):
                    continue
                if self._is_placed(v, output):
                    known[i] = Found(*self._read(v))
                else:
                    targets[i] = Target(v, _how(v, output.spec))
            collected = self._collected(cuts)
            kept = [Target(v, 0) for v in self._kept(eqns, free, cuts)]
            inside = [*collected.values(), *kept]
            found = self._run(free, [*targets.values(), *inside], inside)

            ready = dict(sorted((known | {i: found[t] for i, t in targets.items()}).items()))
            of_outputs = [described[i] for i in ready]
            check_unbatched(self.axis, of_outputs, [x.position for x in ready.values()])
            for i, x in ready.items():
                final = i in targets and x.position is not None
                outs[i] = x.value if final else self._placed(described[i], x)
                positions[i] = _placed_at(outvars[i], described[i].spec, x.position)
            if not cuts:
                if not self.in_chunks:  # all lanes are one chunk, or nothing was left to do for any
                    Steps(1, self.lanes.progress).end(1, results=list(outs.values()))
                order = range(len(outvars))
                return [outs[i] for i in order], [positions[i] for i in order]
            for target in kept:
                self.env[target.variable] = found[target].value, found[target].position
            self._cut(cuts, collected, found)
            done = {id(eqn) for eqn in (*cuts, *(e for e in free if e.effects))}
            eqns = [eqn for eqn in eqns if id(eqn) not in done]

    def _loops_to_cut(self, eqns: Sequence[Any]) -> set[int]:
        """The loops to run with lanes drawn from all chunks, where lanes that are done leave.

        What each lane holds is then kept for all lanes at once. A loop is not cut out if that is
        much more than the batch itself: chunks are there to save memory.
        """
        if self.axis.divergence is None or isinstance(self.lanes.batch_size, Auto):
            return set()
        return parting_loops(eqns, self.env, 2 * self.batch_bytes + _SMALL)

    def _placed(self, output: OutputArray, x: Found) -> Any:
        # A value that all lanes share is reduced over the lanes of all shards, but where it is
        # repeated, each shard repeats it for its own.
        axis = self.axis if isinstance(output.spec, Reduce) else self.local
        return place(axis, output, x.value, x.position)

    def _read(self, v: Any) -> tuple[Any, AxisPosition]:
        return (v.val, None) if isinstance(v, Literal) else self.env[v]

    def _is_placed(self, v: Any, output: OutputArray) -> bool:
        """Whether an output is known, and needs no chunks to bring it where it is wanted."""
        if not isinstance(v, Literal) and (v not in self.env or v is self.lane):
            return False
        _, position = self._read(v)
        if position is None:
            return True
        reduces = isinstance(output.spec, Reduce)
        return self.shards is None if reduces else _how(v, output.spec) == position

    def _collected(self, cuts: Sequence[Any]) -> dict[Any, Target]:
        """What the collectives `cuts` need of each chunk, by operand variable."""
        collected = {}
        for eqn in cuts:
            for v in variables(eqn):
                streams = _streams(self.axis, eqn)
                known = v in self.env and v is not self.lane
                if not known or (streams and self.shards and self.env[v][1] is not None):
                    how = _STREAMED[eqn.primitive.name] if streams else 0
                    collected[id(eqn), v] = Target(v, how)
        return collected

    def _kept(self, eqns: Sequence[Any], free: Sequence[Any], cuts: Sequence[Any]) -> list[Any]:
        """Values from before a cut that are kept for after it, not computed again."""
        if not cuts:
            return []
        needed = crossing(eqns, free, cuts)
        if bytes_per_lane(needed) <= self.batch_bytes:
            return needed
        # What has effects is not computed again: it would do its input or output twice.
        effects = [v for eqn in free if eqn.effects for v in eqn.outvars]
        read = {v for eqn in eqns for v in variables(eqn)}
        return [v for v in effects if v in read]

    def _cut(
        self, cuts: Sequence[Any], collected: dict[Any, Target], found: dict[Target, Found]
    ) -> None:
        """Runs collectives over all lanes."""
        whole, loops = [], []
        for eqn in cuts:
            streamed = None
            for v in variables(eqn):
                target = collected.get((id(eqn), v))
                if target is None:
                    continue
                x = found[target]
                if isinstance(target.how, Reduce) and x.position is not None:
                    streamed = lax.convert_element_type(x.value, v.aval.dtype)
                else:
                    self.env[v] = x.value, x.position
            if eqn.primitive is while_p and not is_exposed(self.axis, eqn):
                loops.append(eqn)
            elif streamed is None:
                whole.append(eqn)
            else:
                others = tuple(a for a in eqn.params["axes"] if a != self.axis.name)
                if others:
                    streamed = eqn.primitive.bind(streamed, **{**eqn.params, "axes": others})
                self.env[eqn.outvars[0]] = streamed, None
        if loops:
            narrow = self.axis.divergence.at_most(self.lanes.batch_size)
            run_whole(replace(self.local, divergence=narrow), loops, self.env)
        if self.shards is None:
            run_whole(self._in_sections(), whole, self.env)
            return
        gathered = [eqn for eqn in whole if not self._run_together(eqn)]
        self._run_gathered(self.shards, gathered)

    def _in_sections(self, shards: Shards | None = None) -> Axis:
        """The axis, for loops and branches with sections inside."""
        how = self.lanes.batch_size, self.keep, shards
        return replace(self.axis, bodies=BodiesInSections(self.axis, *how))

    def _run_together(self, eqn: Any) -> bool:
        """Runs a loop or branch whose lanes meet on each shard, for its lanes.

        It is not if some lanes might go where others do not: the shards could not meet there.
        """
        gathers = eqn.primitive is chunk_loop_p and eqn.params["loop"].gathers
        if eqn.primitive not in _TOGETHER or gathers:
            return False
        axis = replace(self._in_sections(self.shards), size=self.local.size, divergence=_refusing)
        try:
            run_whole(axis, [eqn], self.env)
        except LanesPart:
            return False
        return True

    def _run_gathered(self, shards: Shards, eqns: Sequence[Any]) -> None:
        """Runs equations for the lanes of all shards, on each of them."""
        calls = next((eqn for eqn in eqns if _compat.calls_back(eqn.effects)), None)
        if calls is not None:
            raise UnsupportedError(
                f"{line_of(calls)}: {spoken(calls)} holds both a callback with effects and a "
                f"collective over the batch axis {self.axis.name!r}: each device would run it for "
                "all lanes, and make all calls. Move one of the two out of it, or leave mesh out."
            )
        env: Env = {}
        for v in {v for eqn in eqns for v in variables(eqn)}:
            x, position = self.env[v]
            if position is not None:
                x = shards.without_repeated(shards.gathered(x, position), position)
            env[v] = x, position
        run_whole(self._in_sections(), eqns, env)
        for v in (v for eqn in eqns for v in eqn.outvars):
            x, position = env[v]
            if position is not None:
                x = shards.part_of_this(shards.filled_up(x, position), position)
            self.env[v] = x, position

    def _run(
        self, eqns: Sequence[Any], targets: Sequence[Target], inside: Sequence[Target]
    ) -> dict[Target, Found]:
        """Runs equations chunk by chunk, for what is wanted of them, and `inside` for others."""
        targets = list(dict.fromkeys(targets))
        section = SectionBody(self.lanes, self.env, eqns, targets)
        if not section.section.eqns and not targets:
            return {}
        found: dict[Target, Found] = {}
        if section.of_only_chunk is None:
            self.in_chunks = True
            same: list[Target] = []
            if section.shared:  # batching found that all lanes have the same
                # What makes calls is not computed once more for the first lane.
                same = [t for t in section.shared if self._calls_back(eqns, t)]
                quiet = [t for t in section.shared if t not in same]
                if quiet:
                    found = SectionBody(
                        self.lanes, self.env, eqns, quiet, effects=False
                    ).of_first_lane()
                section = SectionBody(
                    self.lanes, self.env, eqns, [t for t in targets if t not in found], same=same
                )
            loop = replace(section.loop, results=section.results)
            # To keep residuals is to scan, and JAX runs the derivative rules of what it scans when
            # the values that they close over are gone.
            keep = self.keep and not any(map(closed_over, section.section.eqns))
            outs = section.of_targets(run_loop(loop, section.operands, keep))
            found |= {t: Found(outs.pop(t)[0][0], None) for t in same}
        else:
            outs = section.of_targets(section.of_only_chunk)
            found = {t: Found(outs.pop(t)[0], None) for t in section.shared}
            outs = {t: list(map(of_only_chunk, xs, section.specs[t])) for t, xs in outs.items()}
        if self.shards is not None:
            kinds = [spec for target in outs for spec in section.specs[target]]
            returned = [target not in inside for target in outs for _ in section.specs[target]]
            of_each = [x for xs in outs.values() for x in xs]
            of_all = iter(combined(self.shards, kinds, of_each, returned))
            outs = {target: [next(of_all) for _ in xs] for target, xs in outs.items()}
        for target, results in outs.items():
            if target.reduction is not None:
                part = section.reduced[target]
                out, aval = finish(target.reduction, part, results, self.axis.size), part.result
            else:
                (out,), (aval,) = results, section.types[target]
            found[target] = Found(_compat.weakly(out) if aval.weak_type else out, 0)
        return found

    def _calls_back(self, eqns: Sequence[Any], target: Target) -> bool:
        section = section_for(eqns, [target.variable], self.env, effects=False)
        return any(_compat.calls_back(eqn.effects) for eqn in section.eqns)


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
        self, program: _compat.ClosedJaxpr, args: Sequence[Any], axes: Sequence[AxisPosition]
    ) -> tuple[list[Any], list[AxisPosition]]:
        """What a program returns for all lanes, and where that carries the batch axis."""
        outputs = [OutputArray("", AUTO)] * len(program.out_avals)
        how = self.axis, self.batch_size, self.keep
        return SectionRunner(*how, program, args, axes, outputs, self.shards).outputs()


class LanesPart(Exception):
    """Lanes may go where others do not, in an equation for which that must not be."""


@dataclass(frozen=True)
class _Refusing:
    """In the place of a way to run lanes that part ways."""

    def run(self, axis: Axis, parting: Any) -> Any:
        """Raises `LanesPart`."""
        raise LanesPart

    def at_most(self, width: int) -> _Refusing:
        """Itself."""
        return self


_refusing = _Refusing()

# Whose rules batch the programs in them with `kernel.inner`, unless lanes part ways.
_TOGETHER = frozenset([scan_p, while_p, cond_p, chunk_loop_p, bounded_loop_p, reverse_sweep_p])


def _how(v: Any, spec: Any) -> Any:
    """How an output with this specification is wanted, should it depend on the batch."""
    if isinstance(spec, Reduce):
        return spec
    return 0 if spec is None or spec is AUTO else int(spec) % (len(v.aval.shape) + 1)


def _placed_at(v: Any, spec: Any, position: AxisPosition) -> AxisPosition:
    """Where an output carries the batch axis once it is placed."""
    if isinstance(spec, Reduce) or spec is None or (spec is AUTO and position is None):
        return None
    return _how(v, spec)


def _streams(axis: Axis, eqn: Any) -> bool:
    """Whether a collective is a reduction over all lanes, which each chunk can add to."""
    params = eqn.params
    return (
        eqn.primitive.name in _STREAMED
        and axis.name in params["axes"]
        and not any(isinstance(a, int) for a in params["axes"])
        and params.get("axis_index_groups") is None
    )


_STREAMED = {
    name: how
    for names, how in zip(REDUCTIONS, map(Reduce, ("sum", "max", "min")), strict=True)
    for name in names.split()
}
