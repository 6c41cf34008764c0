"""Running what needs all lanes at once, between chunks: collectives, and what holds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax import lax
from jax.extend.core.primitives import cond_p, scan_p, while_p

from batchax import _compat
from batchax.errors import UnsupportedError
from batchax.execution.bounded_loop import bounded_loop_p
from batchax.execution.chunk_loop import chunk_loop_p
from batchax.execution.devices.shards import Shards
from batchax.execution.names import is_exposed
from batchax.execution.reverse_sweep import reverse_sweep_p
from batchax.execution.section_body import Found, Target
from batchax.execution.section_plan import Setting, Stage
from batchax.execution.sections import Env, run_whole, variables
from batchax.frontend.outputs import Reduce
from batchax.jaxprs.spoken import line_of, spoken
from batchax.jaxprs.words import Eqn
from batchax.kernel.axis import Axis
from batchax.kernel.divergence import Divergence

InSections = Callable[[Shards | None], Axis]
"""The axis of all lanes, for loops and branches that run in sections, on shards or not."""


def run_cuts(
    setting: Setting, stage: Stage, by_target: Mapping[Target, Found], env: Env, whole: InSections
) -> None:
    """Runs the cuts of a stage, of which chunks found the operands; adds their results to `env`."""
    held, loops = [], []
    for eqn in stage.cuts:
        streamed = _operands(stage, by_target, env, eqn)
        if eqn.primitive is while_p and not is_exposed(setting.axis, eqn):
            loops.append(eqn)
        elif streamed is None:
            held.append(eqn)
        else:
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
    local = replace(whole(setting.shards), size=setting.lanes.axis.size, divergence=_refusing)
    apart = [eqn for eqn in held if not _together(local, eqn, env)]
    _run_gathered(setting.shards, whole(None), apart, env)


def _operands(stage: Stage, by_target: Mapping[Target, Found], env: Env, eqn: Eqn) -> Any:
    """Adds what chunks found for a cut to `env`; or returns its result, if they computed that."""
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
    """Runs a loop or branch whose lanes meet on each shard, for its lanes.

    It is not if some lanes might go where others do not: the shards could not meet there.
    """
    gathers = eqn.primitive is chunk_loop_p and eqn.params["loop"].gathers
    if eqn.primitive not in _TOGETHER or gathers:
        return False
    try:
        run_whole(local, [eqn], env)
    except LanesPart:
        return False
    return True


# Whose rules batch the programs in them with `kernel.inner`, unless lanes part ways.
_TOGETHER = frozenset([scan_p, while_p, cond_p, chunk_loop_p, bounded_loop_p, reverse_sweep_p])


class LanesPart(Exception):
    """Lanes may go where others do not, in an equation for which that must not be."""


@dataclass(frozen=True)
class _Refusing:
    """In the place of a way to run lanes that part ways."""

    @property
    def explicit(self) -> bool:
        """Not asked for."""
        return False

    def may_diverge(self, axis: Axis, loop: Any) -> bool:
        """Always: whether lanes part ways in a loop is what it is asked for."""
        return True

    def run_nest(self, axis: Axis, loop: Any) -> None:
        """All lanes take each step, unless they part ways in one."""

    def run(self, axis: Axis, parting: Any) -> Any:
        """Raises `LanesPart`."""
        raise LanesPart

    def with_max_width(self, width: int) -> _Refusing:
        """Itself."""
        return self


_refusing: Divergence = _Refusing()


def _run_gathered(shards: Shards, axis: Axis, eqns: Sequence[Eqn], env: Env) -> None:
    """Runs equations for the lanes of all shards, on each of them."""
    calls = next((eqn for eqn in eqns if _compat.calls_back(eqn.effects)), None)
    if calls is not None:
        raise UnsupportedError(
            f"{line_of(calls)}: {spoken(calls)} holds both a callback with effects and a "
            f"collective over the batch axis {axis.name!r}: each device would run it for "
            "all lanes, and make all calls. Move one of the two out of it, or leave mesh out."
        )
    of_all: Env = {}
    for v in {v for eqn in eqns for v in variables(eqn)}:
        x, position = env[v]
        if position is not None:
            x = shards.without_repeated(shards.gathered(x, position), position)
        of_all[v] = x, position
    run_whole(axis, eqns, of_all)
    for v in (v for eqn in eqns for v in eqn.outvars):
        x, position = of_all[v]
        if position is not None:
            x = shards.part_of_this(shards.filled_up(x, position), position)
        env[v] = x, position
