"""Which equations of a program run when, if lanes meet in it: a plan, made before they run.

A stage is what can run before the collectives that come first: chunk by chunk, and then those, for
all lanes. Whether a value depends on the batch is known once it is computed, and not before. So
stages are planned one at a time, of what the environment holds by then.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from batchax.execution.devices.shards import Shards
from batchax.execution.memory import Auto
from batchax.execution.section_body import LanesToRun, Target
from batchax.execution.sections import (
    Env,
    bytes_per_lane,
    crossing,
    find_cuts,
    parting_loops,
    variables,
)
from batchax.frontend.outputs import AUTO, OutputArray, Reduce
from batchax.jaxprs.words import Eqn
from batchax.kernel.axis import Axis, Position
from batchax.rules.collectives import REDUCTIONS

_SMALL = 256  # bytes that a loop cut out may hold of each lane, however little the batch has


@dataclass(frozen=True, eq=False)
class Setting:
    """What is the same for all stages of a program.

    Attributes:
      axis: the axis of all lanes.
      lanes: those to run here: all, or those of one shard.
      keep: whether reverse mode keeps what each chunk computed.
      shards: what lanes are spread over, if they are.
      batch_bytes: what the arguments hold of each lane.
    """

    axis: Axis
    lanes: LanesToRun
    keep: bool
    shards: Shards | None
    batch_bytes: int

    def knows(self, env: Env, v: Any) -> bool:
        """Whether the value of a variable is known; of a lane's index each chunk makes its own."""
        return isinstance(v, Literal) or (v in env and v is not self.lanes.index)


@dataclass(frozen=True, eq=False)
class Stage:
    """What runs until the first collectives have run, those included.

    Attributes:
      free: the equations that chunks run.
      cuts: the collectives, and loops that lanes leave, which then run for all lanes.
      known: the outputs that need no chunks to bring them where they are wanted, by number.
      wanted: the outputs that chunks bring there.
      collected: what the cuts need of each chunk, by the id of the equation, and the variable.
      kept: what is kept for later stages, which compute the rest again.
    """

    free: Sequence[Eqn]
    cuts: Sequence[Eqn]
    known: Collection[int]
    wanted: Mapping[int, Target]
    collected: Mapping[tuple[int, Any], Target]
    kept: Sequence[Target]

    @property
    def inside(self) -> list[Target]:
        """What chunks compute for those who come after them."""
        return [*self.collected.values(), *self.kept]

    @property
    def targets(self) -> list[Target]:
        """All that chunks compute."""
        return list(dict.fromkeys([*self.wanted.values(), *self.inside]))

    def left_of(self, eqns: Iterable[Eqn]) -> list[Any]:
        """The equations for later stages. What has effects is not run again."""
        done = {id(eqn) for eqn in (*self.cuts, *(e for e in self.free if e.effects))}
        return [eqn for eqn in eqns if id(eqn) not in done]


def plan_stage(
    setting: Setting, eqns: Sequence[Eqn], env: Env, outputs: Mapping[int, tuple[Any, OutputArray]]
) -> Stage:
    """The next stage.

    Args:
      setting: what is the same for all stages.
      eqns: the equations that are left; all of them depend on the batch.
      env: what is known.
      outputs: the outputs that are left: the variable of each, and how it is wanted.
    """
    cuts, blocked, free = find_cuts(setting.axis, eqns, _loops_to_cut(setting, eqns, env))
    at_hand, targets = [], {}
    for i, (v, output) in outputs.items():
        if isinstance(v, Literal) or v not in blocked:
            if _is_placed(setting, env, v, output):
                at_hand.append(i)
            else:
                targets[i] = Target(v, how_wanted(v, output.spec))
    collected = {
        (id(eqn), v): target
        for eqn in cuts
        for v in variables(eqn)
        if (target := _collected(setting, env, eqn, v)) is not None
    }
    kept = [Target(v, 0) for v in _kept(setting, eqns, free, cuts)]
    return Stage(free, cuts, at_hand, targets, collected, kept)


def _loops_to_cut(setting: Setting, eqns: Sequence[Eqn], env: Env) -> set[int]:
    """The loops to run with lanes drawn from all chunks, where lanes that are done leave.

    What each lane holds is then kept for all lanes at once. A loop is not cut out if that is much
    more than the batch itself: chunks are there to save memory.
    """
    divergence = setting.axis.divergence
    asked = divergence is not None and divergence.explicit
    if not asked or isinstance(setting.lanes.batch_size, Auto):
        return set()
    return parting_loops(eqns, env, 2 * setting.batch_bytes + _SMALL)


def _is_placed(setting: Setting, env: Env, v: Any, output: OutputArray) -> bool:
    """Whether an output is known, and needs no chunks to bring it where it is wanted."""
    if not setting.knows(env, v):
        return False
    position = None if isinstance(v, Literal) else env[v][1]
    if position is None:
        return True
    if isinstance(output.spec, Reduce):
        return setting.shards is None
    return how_wanted(v, output.spec) == position


def _collected(setting: Setting, env: Env, eqn: Eqn, v: Any) -> Target | None:
    """What a cut needs of each chunk, of one of the variables that it reads."""
    streams = _streams(setting.axis, eqn)
    if setting.knows(env, v) and not (streams and setting.shards and env[v][1] is not None):
        return None
    return Target(v, _STREAMED[eqn.primitive.name] if streams else 0)


def _kept(
    setting: Setting, eqns: Sequence[Eqn], free: Sequence[Eqn], cuts: Sequence[Eqn]
) -> list[Any]:
    """Variables from before the cuts that are kept for after them, not computed again."""
    if not cuts:
        return []
    needed = crossing(eqns, free, cuts)
    if bytes_per_lane(needed) <= setting.batch_bytes:
        return needed
    # What has effects is not computed again: it would do its input or output twice.
    effects = [v for eqn in free if eqn.effects for v in eqn.outvars]
    read = {v for eqn in eqns for v in variables(eqn)}
    return [v for v in effects if v in read]


def how_wanted(v: Any, spec: Any) -> Any:
    """How an output with this specification is wanted, should it depend on the batch."""
    if isinstance(spec, Reduce):
        return spec
    return 0 if spec is None or spec is AUTO else int(spec) % (len(v.aval.shape) + 1)


def placed_at(v: Any, spec: Any, position: Position) -> Position:
    """Where an output carries the batch axis once it is placed."""
    if isinstance(spec, Reduce) or spec is None or (spec is AUTO and position is None):
        return None
    return how_wanted(v, spec)


def _streams(axis: Axis, eqn: Eqn) -> bool:
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
