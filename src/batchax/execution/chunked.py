"""A staged program run for all lanes, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import Literal

from batchax import _compat
from batchax.engine.arguments import is_position
from batchax.engine.axis import Axis, AxisPosition, move_axis
from batchax.engine.inner import example_aval
from batchax.engine.named_axes import uses_name
from batchax.engine.outputs import AUTO, OutputArray, Reduce, check_unbatched, place
from batchax.engine.replay import Program, closed_over, running
from batchax.errors import ArgumentTypeError, AxisError, UnsupportedError
from batchax.execution.chunk_loop import WHOLE, Body, Lanes, Loop
from batchax.execution.memory import Auto, parse_limit
from batchax.execution.names import expose_names
from batchax.execution.placement import run_loop
from batchax.execution.sections import (
    Env,
    bytes_per_lane,
    crossing,
    find_cuts,
    run_shared,
    run_whole,
    section_for,
    variables,
)
from batchax.execution.shards import (
    Shards,
    check_shared,
    find_shards,
    on_shards,
)
from batchax.execution.streaming import finish, partial_result, reduced_type
from batchax.rules.collectives import REDUCTIONS


@dataclass(frozen=True)
class Chunking:
    """How lanes are to be run.

    Attributes:
      batch_size: at most that many at a time.
      keep: whether reverse mode keeps what each chunk computed, rather than compute it
        again.
    """

    batch_size: int | Auto
    keep: bool

    def applies_to(self, size: Any) -> bool:
        """Whether a batch of that size has more than one chunk, or may have."""
        if not isinstance(size, int):
            raise UnsupportedError(
                f"batch_size was given, but the number of lanes is {size}, a symbolic size. "
                "Export the function for a known size, or leave batch_size out."
            )
        return size > 1 if isinstance(self.batch_size, Auto) else size > self.batch_size


class Found(NamedTuple):
    """A value for all lanes; of no `position` if it is the same for all."""

    value: Any
    position: AxisPosition


@dataclass(frozen=True)
class Target:
    """A variable wanted of a section: `how` it is wanted is a position or a `Reduce`."""

    variable: Any
    how: Any


def find_chunking(
    fun: Callable[..., Any], batch_size: Any, memory_limit: Any, residuals: Any
) -> Chunking | None:
    """What the options of `vmap` ask for; None if all lanes are to run at once.

    Raises:
      ArgumentTypeError: an option has the wrong type.
      AxisError: `batch_size` is less than one.
    """
    if residuals not in ("recompute", "keep"):
        raise ArgumentTypeError(f'residuals must be "recompute" or "keep", got {residuals!r}.')
    if memory_limit is not None and batch_size != "auto":
        raise ArgumentTypeError(
            f'memory_limit goes with batch_size="auto"; batch_size is {batch_size!r}.'
        )
    if batch_size is None:
        return None
    if batch_size == "auto":
        name = getattr(fun, "__name__", type(fun).__name__)
        return Chunking(Auto(parse_limit(memory_limit), name), residuals == "keep")
    if not is_position(batch_size):
        raise ArgumentTypeError(
            f'batch_size must be a positive int, "auto" or None, got {batch_size!r} of type '
            f"{type(batch_size).__name__}."
        )
    if batch_size < 1:
        raise AxisError(
            f"batch_size is {batch_size}, but at least one lane must run at a time. Give a "
            "positive int; None runs all lanes at once."
        )
    return Chunking(int(batch_size), residuals == "keep")


def run_in_chunks(
    chunking: Chunking,
    program: Program,
    described: Sequence[OutputArray],
    stage: Callable[[Sequence[Any]], _compat.ClosedJaxpr],
) -> list[Any]:
    """The outputs of a staged program for all lanes, where they are wanted.

    Args:
      chunking: how lanes are to be run.
      program: the program and its arguments.
      described: its outputs.
      stage: stages the program again, for examples of these types.

    Raises:
      AxisError: an output depends on the batch where it must not.
      UnsupportedError: the program cannot run in chunks.
    """
    axis, positions = program.axis, program.axes
    if any(map(_compat.is_reference, (*program.staged.consts, *program.args))):
        raise UnsupportedError(
            "batch_size was given, but the function is given, or closes over, a reference "
            "(jax.new_ref). Create it inside the function, or leave batch_size out."
        )
    shards = find_shards(axis, program.args, positions)

    def run(*args: Any) -> list[Any]:
        if shards is None:
            return _Runner(axis, chunking, program.staged, args, positions).outputs(described)[0]
        shared = [x for x, a in zip(args, positions, strict=True) if a is None]
        check_shared(shared, program.staged.consts)
        inner = replace(axis, spmd_name=None, mesh_axis=None)
        local = replace(inner, size=axis.size // shards.count)

        def run_shard(xs: Sequence[Any]) -> tuple[list[Any], list[AxisPosition]]:
            staged = stage(
                [example_aval(local, jax.typeof(x), a) for x, a in zip(xs, positions, strict=True)]
            )
            return _Runner(inner, chunking, staged, xs, positions, shards).outputs(described)

        return on_shards(shards, run_shard, args, positions)

    if program.traced:
        return run(*program.args)
    # Outside of `jit` operations are computed as they are met. Whatever is wrong must be
    # found before.
    whole = _compat.stage(run, [jax.typeof(x) for x in program.args])
    return eval_jaxpr(whole.jaxpr, whole.consts, *program.args)


class _Runner:
    """Runs a program section by section; `env` holds what is known of it.

    On one of several `shards` `axis` has the lanes of all, and `local` those of the shard.
    """

    def __init__(
        self,
        axis: Axis,
        chunking: Chunking,
        staged: _compat.ClosedJaxpr,
        args: Sequence[Any],
        positions: Sequence[AxisPosition],
        shards: Shards | None = None,
    ) -> None:
        self.axis, self.chunking, self.shards = axis, chunking, shards
        self.local = axis if shards is None else replace(axis, size=axis.size // shards.count)
        staged = _compat.without_references(staged, axis.name, axis.size)
        self.lane, values = None, list(zip(args, positions, strict=True))
        if axis.name is not None and any(uses_name(eqn, axis.name) for eqn in staged.jaxpr.eqns):
            staged = expose_names(axis, staged)
            self.lane = staged.jaxpr.invars[0]
            # Each chunk counts its lanes from the first.
            first = np.int32(0) if shards is None else shards.first_lane(self.local.size)
            values.insert(0, (first, 0))
        self.jaxpr = staged.jaxpr
        self.env: Env = {
            v: (c, None) for v, c in zip(self.jaxpr.constvars, staged.consts, strict=True)
        }
        self.env.update(zip(self.jaxpr.invars, values, strict=True))
        self.batch_bytes = bytes_per_lane(
            v for v, (_, a) in self.env.items() if a is not None and v is not self.lane
        )

    def outputs(self, described: Sequence[OutputArray]) -> tuple[list[Any], list[AxisPosition]]:
        """What the program returns, placed, and where it carries the batch axis."""
        outvars = self.jaxpr.outvars
        eqns: Sequence[Any] = section_for(self.jaxpr.eqns, outvars, ()).eqns
        outs: dict[int, Any] = {}
        positions: dict[int, AxisPosition] = {}
        while True:
            eqns = run_shared(self.axis, eqns, self.env)
            cuts, blocked, free = find_cuts(self.axis, eqns)
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
            found = self._run(free, [*targets.values(), *collected.values(), *kept])

            ready = dict(sorted((known | {i: found[t] for i, t in targets.items()}).items()))
            of_outputs = [described[i] for i in ready]
            check_unbatched(self.axis, of_outputs, [x.position for x in ready.values()])
            for i, x in ready.items():
                final = i in targets and x.position is not None
                outs[i] = x.value if final else self._placed(described[i], x)
                positions[i] = _placed_at(outvars[i], described[i].spec, x.position)
            if not cuts:
                order = range(len(outvars))
                return [outs[i] for i in order], [positions[i] for i in order]
            for target in kept:
                self.env[target.variable] = found[target].value, found[target].position
            self._cut(cuts, collected, found)
            done = {id(eqn) for eqn in (*cuts, *(e for e in free if e.effects))}
            eqns = [eqn for eqn in eqns if id(eqn) not in done]

    def _placed(self, output: OutputArray, x: Found) -> Any:
        # What all lanes share is reduced over all of them, but repeated for those here.
        axis = self.axis if isinstance(output.spec, Reduce) else self.local
        return place(axis, output, x.value, x.position)

    def _read(self, v: Any) -> tuple[Any, AxisPosition]:
        return (v.val, None) if isinstance(v, Literal) else self.env[v]

    def _is_placed(self, v: Any, output: OutputArray) -> bool:
        """Whether an output is known, and is not to be moved as one whole array."""
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
                    how = Reduce(_STREAMED[eqn.primitive.name]) if streams else 0
                    collected[id(eqn), v] = Target(v, how)
        return collected

    def _kept(self, eqns: Sequence[Any], free: Sequence[Any], cuts: Sequence[Any]) -> list[Any]:
        """Values from before a cut that are kept for after it, not computed again."""
        if not cuts:
            return []
        needed = crossing(eqns, free, cuts)
        if bytes_per_lane(needed) <= self.batch_bytes:
            return needed
        # Input and output are not done twice.
        effects = [v for eqn in free if eqn.effects for v in eqn.outvars]
        read = {v for eqn in eqns for v in variables(eqn)}
        return [v for v in effects if v in read]

    def _cut(
        self, cuts: Sequence[Any], collected: dict[Any, Target], found: dict[Target, Found]
    ) -> None:
        """Runs collectives over all lanes."""
        whole = []
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
            if streamed is None:
                whole.append(eqn)
            else:
                others = tuple(a for a in eqn.params["axes"] if a != self.axis.name)
                if others:
                    streamed = eqn.primitive.bind(streamed, **{**eqn.params, "axes": others})
                self.env[eqn.outvars[0]] = streamed, None
        if self.shards is None:
            run_whole(self.axis, whole, self.env)
        else:
            self._run_gathered(self.shards, whole)

    def _run_gathered(self, shards: Shards, eqns: Sequence[Any]) -> None:
        """Runs equations for the lanes of all shards, on each of them."""
        env: Env = {}
        for v in {v for eqn in eqns for v in variables(eqn)}:
            x, position = self.env[v]
            env[v] = (x if position is None else shards.gathered(x, position)), position
        run_whole(self.axis, eqns, env)
        first = shards.first_lane(self.local.size)
        for v in (v for eqn in eqns for v in eqn.outvars):
            x, position = env[v]
            if position is not None:
                x = lax.dynamic_slice_in_dim(x, first, self.local.size, position)
            self.env[v] = x, position

    def _run(self, eqns: Sequence[Any], targets: Sequence[Target]) -> dict[Target, Found]:
        """Runs equations chunk by chunk, for what is wanted of them."""
        targets = list(dict.fromkeys(targets))
        section = _SectionBody(self, eqns, targets)
        if not section.section.eqns and not targets:
            return {}
        found = {}
        if section.shared:  # a rule found that all lanes have the same
            found = _SectionBody(self, eqns, section.shared, effects=False).of_first_lane()
            section = _SectionBody(self, eqns, [t for t in targets if t not in found])
        loop = replace(section.loop, results=tuple(section.kinds.values()))
        # JAX runs rules of what it scans when the values they close over are gone.
        keep = self.chunking.keep and not any(map(closed_over, section.section.eqns))
        outs = run_loop(loop, section.operands, keep)
        if self.shards is not None:
            outs = map(self.shards.combined, loop.results, outs)
        for target, out, aval in zip(section.kinds, outs, section.types, strict=True):
            if isinstance(target.how, Reduce):
                aval = section.reduced[target]
                out = finish(target.how.kind, out, self.axis.size, aval)
            found[target] = Found(_compat.weakly(out) if aval.weak_type else out, 0)
        return found


class _SectionBody:
    """What one chunk does of a program, and of which kind its results are."""

    def __init__(
        self, runner: _Runner, eqns: Sequence[Any], targets: Sequence[Target], effects: bool = True
    ) -> None:
        self.runner, self.targets = runner, targets
        env = runner.env
        self.section = section_for(eqns, [t.variable for t in targets], env, effects)
        self.operands = [env[v][0] for v in self.section.invars]
        self.positions = [env[v][1] for v in self.section.invars]
        self.kinds: dict[Target, Any] = {}
        self.reduced: dict[Target, Any] = {}

        operand_kinds = tuple(
            WHOLE if a is None or v is runner.lane else Lanes(a)
            for v, a in zip(self.section.invars, self.positions, strict=True)
        )
        self.loop = Loop(
            Body(self._of_width), operand_kinds, (), runner.local.size, runner.chunking.batch_size
        )
        program = self.loop.program(list(map(jax.typeof, self.operands)), self.loop.width)
        self.types = program.out_avals

    @property
    def shared(self) -> list[Target]:
        """The targets that turned out not to depend on the batch."""
        return [t for t, kind in self.kinds.items() if kind is None]

    def of_first_lane(self) -> dict[Target, Found]:
        """The targets, which are the same in all lanes, from the first."""
        parts = [
            lax.slice_in_dim(x, 0, 1, axis=kind.axis) if isinstance(kind, Lanes) else x
            for x, kind in zip(self.operands, self.loop.operands, strict=True)
        ]
        outs, _ = self._interpret(1, jnp.int32(0), parts)
        return {t: Found(x, None) for t, x in zip(self.targets, outs, strict=True)}

    def _of_width(self, width: int) -> Callable[..., list[Any]]:
        def run(start: Any, *xs: Any) -> list[Any]:
            outs, positions = self._interpret(width, start, xs)
            return list(map(self._result, self.targets, outs, positions))

        return run

    def _interpret(
        self, width: int, start: Any, xs: Sequence[Any]
    ) -> tuple[list[Any], list[AxisPosition]]:
        axis = replace(self.runner.axis, size=width, name=None, mesh_axis=None)
        values = [
            x + start + lax.iota(np.int32, width) if v is self.runner.lane else x
            for v, x in zip(self.section.invars, xs, strict=True)
        ]
        program = Program(axis, self.section, values, self.positions)
        with running(program):
            return program.run()

    def _result(self, target: Target, x: Any, position: AxisPosition) -> Any:
        """What a chunk returns for one target; notes of which kind that is."""
        if position is None:
            self.kinds[target] = None
            return x
        if isinstance(target.how, Reduce):
            kind = target.how.kind
            self.reduced[target] = reduced_type(kind, x, position)
            x, self.kinds[target] = partial_result(kind, x, position)
            return x
        self.kinds[target] = Lanes(target.how)
        return move_axis(x, position, target.how)


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
    name: kind
    for names, kind in zip(REDUCTIONS, ("sum", "max", "min"), strict=True)
    for name in names.split()
}
