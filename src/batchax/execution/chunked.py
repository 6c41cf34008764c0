"""A few lanes at a time: what `batch_size` asks for, run section by section."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, Var

from batchax import _compat
from batchax.cache import Cache
from batchax.errors import ArgumentTypeError, OptionError, UnsupportedError
from batchax.execution.call import Call, Strategy, shared_reference, without_references
from batchax.execution.chunk_derivatives import in_parts
from batchax.execution.chunk_loop import (
    ChunkLoop,
    Lanes,
    chunk_loop,
    chunk_loop_p,
    collect,
    of_only_chunk,
    results_before,
)
from batchax.execution.chunk_run import chosen_chunk, run
from batchax.execution.devices.placing import combined
from batchax.execution.devices.shards import Shards, lanes_for_all
from batchax.execution.memory import Auto, parse_limit
from batchax.execution.names import HostCalls, expose_names, is_exposed
from batchax.execution.progress import LoopProgress, Steps, find_progress
from batchax.execution.sections import (
    Env,
    Found,
    LanesToRun,
    SectionBody,
    Setting,
    Stage,
    Target,
    bytes_per_lane,
    finish,
    placed_at,
    plan_stage,
    run_shared,
    run_whole,
    section_for,
    variables,
)
from batchax.execution.slices import scan_slices
from batchax.frontend.in_axes import is_position
from batchax.frontend.options import check_count, check_one_of, is_word, not_one_of
from batchax.frontend.outputs import AUTO, OutputArray, Reduce, check_unbatched, place
from batchax.jaxprs.bodies import calls_in, control_flow
from batchax.jaxprs.error_format import brief, line_of, name_of, spoken
from batchax.jaxprs.types import ClosedJaxpr, Eqn, Jaxpr, Value, Values
from batchax.kernel.axis import Axis, Divergence, Position, Positions
from batchax.kernel.inner import closed_over, of_what_is_read
from batchax.progress import How
from batchax.rules.calls import calls_library, in_turn


def run_loop(loop: ChunkLoop, operands: Values, keep: bool) -> list[Value]:
    """Runs a chunk loop. With `keep`, reverse mode saves what every chunk computed."""
    if not keep:
        return chunk_loop(loop, operands)
    if isinstance(loop.chunk, int) and loop.size <= loop.chunk and not loop.gathers:
        # Of the only chunk what JAX keeps is what it keeps without chunks.
        return run(loop, _compat.varying_alike(operands))
    loop, of_all = in_parts(loop, operands)
    return of_all(_run_keeping(loop, operands))


def _run_keeping(loop: ChunkLoop, operands: Values) -> list[Value]:
    """Runs a chunk loop as a scan, whose residuals JAX saves for each chunk."""
    operands = _compat.varying_alike(operands)
    avals = [jax.typeof(x) for x in operands]
    if isinstance(loop.chunk, Auto):
        loop = replace(loop, chunk=chosen_chunk(loop, avals))
    assert isinstance(loop.chunk, int)
    chunk = min(loop.chunk, max(loop.size, 1))  # a shard may have fewer lanes than a chunk
    loop = replace(loop, chunk=chunk)
    program = loop.program(avals, chunk)
    types = program.out_avals
    axes = [spec.axis if isinstance(spec, Lanes) else None for spec in loop.operands]

    steps = Steps(-(-loop.size // chunk), loop.progress)

    def step(index: Value, results: list[Value], parts: Sequence[Any], width: int) -> list[Value]:
        (start,) = _compat.varying_alike([index * np.int32(chunk)], like=operands)
        outs = loop.body.function(width)(start, *parts)
        return collect(loop, results, outs, index)

    def in_loop(index: Value, results: list[Value], parts: Sequence[Any]) -> list[Value]:
        if full > 1:  # a loop of one step is none, to a compiler
            steps.begin(index)
            results = steps.through(results, index)
        return step(index, results, parts, chunk)

    results = _compat.varying_alike(results_before(loop, program), like=operands)
    # The remaining lanes are a chunk of their width, after the scan.
    full, rest = divmod(loop.size, chunk)
    results = scan_slices(in_loop, results, operands, axes, chunk, full)
    if rest:
        parts = [
            x if a is None else lax.slice_in_dim(x, full * chunk, loop.size, axis=a)
            for x, a in zip(operands, axes, strict=True)
        ]
        if calls_library(program.jaxpr):  # two such calls must not run at once: `rules/calls.py`
            results, parts = in_turn(results, parts)
        results = step(jnp.int32(full), results, parts, rest)
    steps.end(steps.most, results=results)
    return [lax.convert_element_type(x, t.dtype) for x, t in zip(results, types, strict=True)]


_Chunked = tuple[SectionBody, dict[Target, list[Any]], dict[Target, Found]]
"""What was run; what it returned, for targets that depend on the batch; the other targets."""


def run_chunks(setting: Setting, stage: Stage, env: Env) -> dict[Target, Found] | None:
    """Computes the targets of a stage in chunks. None if nothing is left to do for any lane."""
    targets = stage.targets
    body = SectionBody(setting.lanes, env, stage.free, targets)
    if not body.section.eqns and not targets:
        return None
    if body.of_only_chunk is None:
        body, outs, by_target = _in_loop(setting, stage, env, body)
    else:
        body, outs, by_target = _only_chunk(body, body.of_only_chunk)
    # Each shard has results of its lanes: sums and extremes are combined over the shards.
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


def _only_chunk(body: SectionBody, results: Values) -> _Chunked:
    outs = body.of_targets(results)
    by_target = {t: Found(outs.pop(t)[0], None) for t in body.shared}
    outs = {t: list(map(of_only_chunk, xs, body.specs[t])) for t, xs in outs.items()}
    return body, outs, by_target


def _in_loop(setting: Setting, stage: Stage, env: Env, body: SectionBody) -> _Chunked:
    # Unbatched results are computed once, for the first lane.
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


InSections = Callable[[Shards | None], Axis]
"""The axis of all lanes, for loops and branches that run in sections, on shards or not."""


def run_cuts(
    setting: Setting, stage: Stage, by_target: Mapping[Target, Found], env: Env, whole: InSections
) -> None:
    """Runs the cuts of a stage, whose operands chunks computed, and adds results to `env`."""
    held, loops = [], []
    for eqn in stage.cuts:
        streamed = _operands(stage, by_target, env, eqn)
        # A loop without collectives runs with lanes at most a chunk wide.
        if control_flow(eqn.primitive).test and not is_exposed(setting.axis, eqn):
            loops.append(eqn)
        elif streamed is None:
            held.append(eqn)
        else:
            # The collective was summed over lanes by the chunks; other axes remain.
            others = tuple(a for a in eqn.params["axes"] if a != setting.axis.name)
            if others:
                streamed = eqn.primitive.bind(streamed, **{**eqn.params, "axes": others})
            env[eqn.outvars[0]] = streamed, None
    if loops:
        narrow = setting.axis.divergence.with_max_width(setting.lanes.batch_size)
        run_whole(replace(setting.lanes.axis, divergence=narrow), loops, env)
    if setting.shards is None:
        run_whole(whole(None), held, env)
        return
    local = replace(whole(setting.shards), size=setting.lanes.axis.size, divergence=_rejecting)
    apart = [eqn for eqn in held if not _together(local, eqn, env)]
    _run_gathered(setting.shards, whole(None), apart, env)


def _operands(stage: Stage, by_target: Mapping[Target, Found], env: Env, eqn: Eqn) -> Value | None:
    """Adds computed operands of a cut to `env`, or returns its result if chunks computed that."""
    streamed = None
    for v in variables(eqn):
        target = stage.collected.get((id(eqn), v))
        if target is None:
            continue
        x = by_target[target]
        if isinstance(target.how, Reduce) and x.position is not None:
            streamed = lax.convert_element_type(x.value, v.aval.dtype)
        else:
            env[v] = x
    return streamed


def _together(local: Axis, eqn: Eqn, env: Env) -> bool:
    """Tries to run a loop or branch in lockstep on each shard.

    Returns False if lanes may diverge: shards could not synchronize there.
    """
    # Their rules batch the programs in them with `kernel.inner`, unless lanes diverge.
    chunks = eqn.primitive is chunk_loop_p and not eqn.params["loop"].gathers
    if not (chunks or control_flow(eqn.primitive).repeated):
        return False
    try:
        run_whole(local, [eqn], env)
    except LanesPart:
        return False
    return True


class LanesPart(Exception):
    """Signals that lanes may diverge in an equation where they must not."""


@dataclass(frozen=True)
class _Rejecting:
    """Stands in for a divergence policy, and raises where lanes diverge."""

    @property
    def explicit(self) -> bool:
        return False

    def why_lockstep(self, axis: Axis, loop: object) -> str:
        return ""

    def run_nest(self, axis: Axis, loop: object) -> None:
        """All lanes take each step, unless they diverge in one."""

    def run(self, axis: Axis, divergent: object) -> NoReturn:
        raise LanesPart

    def with_max_width(self, width: int) -> _Rejecting:
        return self


_rejecting: Divergence = _Rejecting()


def _run_gathered(shards: Shards, axis: Axis, eqns: Sequence[Eqn], env: Env) -> None:
    """Runs equations for the lanes of all shards, on each of them."""
    calls = next((eqn for eqn in eqns if _compat.calls_back(eqn.effects)), None)
    if calls is not None:
        raise UnsupportedError(
            f"{line_of(calls)}: {spoken(calls)} holds both a callback with effects and a "
            f"collective over the batch axis {axis.name!r}: each device would run it for all "
            "lanes, and make all calls. Move one of the two out of it, or remove mesh."
        )
    of_all: Env = {}
    for v in {v for eqn in eqns for v in variables(eqn)}:
        x, position = env[v]
        if position is not None:
            # Lanes that only fill up a shard are removed before, and added after.
            x = shards.without_repeated(shards.gathered(x, position), position)
        of_all[v] = x, position
    run_whole(axis, eqns, of_all)
    for v in (v for eqn in eqns for v in eqn.outvars):
        x, position = of_all[v]
        if position is not None:
            x = shards.part_of_this(shards.filled_up(x, position), position)
        env[v] = x, position


def without_donations(eqns: Iterable[Eqn]) -> list[Eqn]:
    """Removes donations from calls of ``jax.jit`` in equations.

    A donated array may be read again by other sections and chunks.
    """
    # Within a whole compiled program JAX ignores inner donations, but calls in sections may be
    # computed at once.
    return list(map(_keeping, eqns))


def _keeping(eqn: Eqn) -> Eqn:
    donated = eqn.params.get("donated_invars", ())
    if not any(donated):
        return eqn
    return eqn.replace(params=eqn.params | {"donated_invars": (False,) * len(donated)})


class SectionRunner:
    """Runs a program section by section.

    On one of several `shards`, `axis` has the lanes of all.
    """

    def __init__(
        self,
        axis: Axis,
        batch_size: int | Auto,
        keep: bool,
        staged: ClosedJaxpr,
        args: Values,
        positions: Positions,
        described: Sequence[OutputArray],
        shards: Shards | None = None,
        progress: LoopProgress | None = None,
    ) -> None:
        local = axis if shards is None else replace(axis, size=shards.each)
        program = without_references(staged, axis.name, axis.size)
        # A lane that repeats another makes a difference only where lanes meet.
        meet = axis.name is not None or any(isinstance(o.spec, Reduce) for o in described)
        repeated = shards.most_repeated if shards is not None and meet else 0
        in_parts = isinstance(batch_size, Auto) or batch_size < local.size
        calls = _host_calls(axis, program.jaxpr, positions, shards, in_parts)
        indexed = any(isinstance(o.spec, Reduce) and o.spec.reduction.index for o in described)
        index, values = None, list(zip(args, positions, strict=True))
        # Expose the lane index as an input if anything depends on which lanes a chunk holds.
        if repeated or indexed or calls or any(is_exposed(axis, eqn) for eqn in program.jaxpr.eqns):
            program = expose_names(axis, program, calls or HostCalls())
            index = program.jaxpr.invars[0]
            all_lanes = np.array([0, axis.size], np.int32)
            values.insert(0, (all_lanes if shards is None else shards.own_lanes(), 0))
        # A derivative rule reads values of its program, wherever in it they are.
        whole = any(map(closed_over, program.jaxpr.eqns))
        self._jaxpr = program.jaxpr if whole else of_what_is_read(program)
        self._described = described
        self._known: Env = {
            v: (c, None) for v, c in zip(self._jaxpr.constvars, program.consts, strict=True)
        }
        self._known.update(zip(self._jaxpr.invars, values, strict=True))
        batch_bytes = bytes_per_lane(
            v for v, (_, a) in self._known.items() if a is not None and v is not index
        )
        lanes = LanesToRun(local, batch_size, index, repeated, progress)
        self._setting = Setting(axis, lanes, keep, shards, batch_bytes)

    def outputs(self) -> tuple[list[Value], list[Position]]:
        setting, env, lanes = self._setting, dict(self._known), self._setting.lanes
        needed = section_for(self._jaxpr.eqns, self._jaxpr.outvars, ()).eqns
        eqns: Sequence[Eqn] = without_donations(needed)
        left = dict(enumerate(zip(self._jaxpr.outvars, self._described, strict=True)))
        outs: dict[int, Found] = {}
        looped = False
        # Each stage computes shared values once, then what chunks can, and then the cuts: equations
        # in which all lanes take part. What depends on cuts is left to the next stage.
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
        axis, keep = self._setting.axis, self._setting.keep
        how = self._setting.lanes.batch_size, keep, shards
        return replace(axis, bodies=BodiesInSections(axis, *how))


def _host_calls(
    axis: Axis,
    jaxpr: Jaxpr,
    positions: Positions,
    shards: Shards | None,
    in_parts: bool,
) -> HostCalls | None:
    """Returns the host callbacks, if any, where lanes run in chunks or on several devices.

    Raises UnsupportedError for ordered ones on devices.
    """
    calls = [call for eqn in jaxpr.eqns for call in calls_in(eqn)]
    if not calls:
        return None
    if shards is None or shards.count == 1:
        return HostCalls.of(axis, jaxpr, positions) if in_parts else None
    for call in calls:
        if _compat.in_order(call.effects):
            raise UnsupportedError(
                f"{_compat.user_line(call.source_info)}: a callback has ordered=True, but lanes "
                "are sharded over devices (by mesh or by the arguments), which run at the same "
                "time. Remove ordered or mesh."
            )
    own = shards.own_lanes() if shards.most_repeated else None
    return HostCalls.of(axis, jaxpr, positions, devices=shards.names, own=own)


def _read(env: Env, v: Var | Literal) -> Found:
    return Found(v.val, None) if isinstance(v, Literal) else Found(*env[v])


def _placed(
    setting: Setting, v: Var | Literal, output: OutputArray, x: Found, by_chunks: bool
) -> Found:
    value = x.value
    if not (by_chunks and x.position is not None):  # which leave it there
        # A value that all lanes share is reduced over the lanes of all shards, but where it is
        # repeated, each shard repeats it for its own.
        axis = setting.axis if isinstance(output.spec, Reduce) else setting.lanes.axis
        value = place(axis, output, value, x.position)
    return Found(value, placed_at(v, output.spec, x.position))


@dataclass(frozen=True)
class BodiesInSections:
    """Runs the jaxprs of loops and branches section by section where lanes synchronize.

    A step then has as many lanes at a time as the code around the loop.
    """

    axis: Axis  # of all lanes
    batch_size: int | Auto
    keep: bool
    shards: Shards | None

    def run(
        self, program: ClosedJaxpr, args: Values, axes: Positions
    ) -> tuple[list[Value], list[Position]]:
        outputs = [OutputArray("", AUTO)] * len(program.out_avals)
        how = self.axis, self.batch_size, self.keep
        return SectionRunner(*how, program, args, axes, outputs, self.shards).outputs()


@dataclass(frozen=True)
class Chunking:
    batch_size: int | Auto  # at most that many at a time
    keep: bool  # whether reverse mode saves what each chunk computed
    progress: LoopProgress | None = None

    def applies_to(self, size: object) -> bool:
        """Returns whether a batch of that size has several chunks, or may have."""
        if not isinstance(size, int):
            raise UnsupportedError(
                f"batch_size does not support a symbolic size: the number of lanes is {size}. "
                "Remove batch_size, or export the function for a known size. If it is the length "
                "of a row, call the function outside of jit."
            )
        if self.progress is not None:  # of one chunk, too
            return size > 0
        # `Auto` may choose any size below the number of lanes.
        return size > 1 if isinstance(self.batch_size, Auto) else size > self.batch_size

    def runner(self, call: Call, shards: Shards | None = None) -> SectionRunner:
        how = self.batch_size, self.keep, call.staged, call.values, call.positions
        return SectionRunner(call.axis, *how, call.described, shards, self.progress)


def find_chunking(
    fun: Callable[..., Any],
    batch_size: Any,
    memory_limit: object,
    residuals: object,
    progress: How = False,
) -> Chunking | None:
    """Validates the options of `vmap`; None if all lanes run at once.

    Raises ArgumentTypeError for a wrong type, OptionError for another word or too low a number.
    """
    check_one_of("residuals", residuals, "recompute", "keep")
    if memory_limit is not None and not is_word(batch_size, "auto"):
        raise ArgumentTypeError(
            f'memory_limit goes with batch_size="auto"; batch_size is {brief(batch_size)}. Pass '
            'batch_size="auto", or remove memory_limit.'
        )
    callback = find_progress(progress, fun, "chunks")
    if batch_size is None:
        if residuals != "recompute":
            raise ArgumentTypeError(
                f"residuals is {residuals!r}, but batch_size is None: all lanes run at once, and "
                "their residuals are stored. Pass batch_size, or remove residuals."
            )
        if callback is not None:
            raise ArgumentTypeError(
                f"progress is {brief(progress)}, but batch_size is None: all lanes run at once, "
                "and there are no chunks to count. Pass batch_size, or remove progress."
            )
        return None
    if is_word(batch_size, "auto"):
        name = name_of(fun)
        return Chunking(Auto(parse_limit(memory_limit), name), residuals == "keep", callback)
    if isinstance(batch_size, str):
        raise not_one_of("batch_size", batch_size, "auto", None, other="a positive int")
    if is_position(batch_size) and batch_size == 0:
        raise OptionError(
            "batch_size is 0. Pass None to run all lanes at once, as 0 does in jax.lax.map."
        )
    check_count("batch_size", batch_size, 1, or_none=True, other='"auto"')
    return Chunking(int(batch_size), residuals == "keep", callback)


@dataclass(frozen=True)
class InChunks(Strategy):
    chunking: Chunking

    @property
    def cache(self) -> Cache | None:  # a choice of chunk size is noted for each call
        return None if isinstance(self.chunking.batch_size, Auto) else kept_in_chunks

    def prepared(self, call: Call) -> Call:
        """Prepares lanes so that chunks are taken from them, even if sharded.

        If the function calls ``shard_map`` and `spmd_axis_name` spreads chunks over devices,
        `batch_size` counts lanes of one device.
        """
        check_no_references((*call.staged.consts, *call.values))
        axis, chunking = call.axis, self.chunking
        parts, values = lanes_for_all(axis, call.values, call.positions, call.staged.jaxpr)
        if parts > 1 and not isinstance(chunking.batch_size, Auto) and axis.size % parts == 0:
            chunking = replace(chunking, batch_size=parts * chunking.batch_size)
        elif parts > 1:
            axis = replace(axis, spmd_name=None)
        axis = replace(axis, mesh_axis=None)
        return replace(call.with_values(values), axis=axis, strategy=InChunks(chunking))

    def passes_constants(self, call: Call) -> bool:
        return not call.traced

    def run(self, call: Call) -> tuple[list[Value], None]:
        return self.chunking.runner(call).outputs()[0], None


kept_in_chunks = Cache("calls outside of jit, cut into sections and batched", most=64)


def check_no_references(values: Iterable[Value]) -> None:
    if any(map(_compat.is_reference, values)):
        raise UnsupportedError(shared_reference("a value that the function closes over"))
