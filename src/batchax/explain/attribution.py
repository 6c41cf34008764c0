"""Which operations of the batched program each equation of the per-example function became."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from batchax.explain.account import Work
from batchax.jaxprs.evaluate import plan
from batchax.jaxprs.own_primitives import shown
from batchax.kernel.recording import Record, Recorder
from batchax.programs.cost import Cost, cost_around, cost_of_equation
from batchax.programs.inner import devices_of, integers_in, programs_in
from batchax.programs.shapes import bytes_of


@dataclass
class Tally:
    """What an equation became, but for what is inside programs that it holds.

    Attributes:
      emitted: the names of operations, in order.
      work: what they cost, as often as they run, on all devices that do.
      moves: bytes of arrays whose axes were transposed.
      broadcasts: bytes written to repeat arrays.
      times: how often they run; None if that is not known.
      skipped: whether they are in a branch, of a ``cond``, that may not run.
    """

    emitted: list[str] = field(default_factory=list)
    work: Work = field(default_factory=Work)
    moves: int = 0
    broadcasts: int = 0
    times: int | None = 1
    skipped: bool = False


class Attribution:
    """A batched program, its operations sorted by the equations they are of.

    Attributes:
      tallies: by equation, for those that emitted something; what belongs to none under None.
    """

    def __init__(self, recorder: Recorder, program: Any) -> None:
        self._recorder = recorder
        self.tallies: dict[Record | None, Tally] = {}
        self._walk(program, {}, None, 1, False, 1)

    def _walk(
        self,
        program: Any,
        integers: Mapping[Any, int],
        around: Record | None,
        times: int | None,
        skipped: bool,
        devices: int,
    ) -> None:
        integers = integers_in(program, integers)
        jaxpr = getattr(program, "jaxpr", program)
        for eqn, *_ in plan(jaxpr.eqns, jaxpr.outvars):
            # What a rule calls has no mark of its own, and belongs to what called it.
            record = self._recorder.record_of(eqn.source_info.name_stack) or around
            with self._recorder.active(inside=record):
                inner = programs_in(eqn, integers)
            if not inner:
                cost = cost_of_equation(eqn, integers)
                self._add(record, eqn, devices * cost, times, skipped)
                continue
            if any(p.role != "call" for p in inner):
                self._add(record, eqn, devices * cost_around(eqn, inner), times, skipped)
            each = devices * devices_of(eqn)
            for p in inner:
                often = None if times is None or p.times is None else times * p.times
                may_not = skipped or eqn.primitive.name == "cond"
                self._walk(p.jaxpr, p.integers, record, often, may_not, each)

    def _add(
        self, record: Record | None, eqn: Any, cost: Cost, times: int | None, skipped: bool
    ) -> None:
        tally = self.tallies.setdefault(record, Tally(times=times, skipped=skipped))
        often = 1 if times is None else times
        name = eqn.primitive.name
        tally.emitted.append(shown(eqn.primitive))
        tally.work += Work(often * (cost.flops + cost.transcendentals), often * cost.bytes)
        if tally.times is not None and (times is None or times > tally.times):
            tally.times = times
        written = bytes_of(v.aval for v in eqn.outvars)
        if name == "transpose":
            tally.moves += written
        elif name == "broadcast_in_dim" and written > bytes_of(v.aval for v in eqn.invars):
            tally.broadcasts += written
