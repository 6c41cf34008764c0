"""What is decided for programs of the benchmarks: the golden file `divergence/decisions.txt`.

``python -m support.decisions`` in `tests/` writes it again. Programs are traced and not compiled. A
line is a decision: the control flow, what its step or branch costs, what is decided, and the
thresholds that were read. So a changed threshold shows as changed lines.
"""

import contextlib
import sys
from pathlib import Path
from unittest import mock

import jax

from batchax.divergence import policy, runner
from batchax.divergence.cut import price_inside
from batchax.divergence.thresholds import TABLE
from benchmarks.divergence.measure import WORKLOADS as DIVERGING
from benchmarks.nests.measure import WORKLOADS as NESTS

FILE = Path(__file__).parents[1] / "divergence" / "decisions.txt"
KINDS = "cpu-small", "cpu", "gpu"


def programs():
    """The functions of one example, each with `in_axes` and the arguments of all lanes, by name."""
    for name, workload in DIVERGING.items():
        args = workload.arguments(workload.lanes)
        for use, ways in workload.uses().items():
            if use == "values" or "bounded" in name:
                yield f"divergence: {name}, {use}", ways["auto"], args
    for name, nest in NESTS.items():
        if not nest.missing():
            yield f"nests: {name}", nest.ways()["auto"], nest.data(nest.lanes, nest.steps)


def lines(kind):
    """All lines of a kind of device."""
    for name, fun, args in programs():
        with _noted(kind) as notes:
            jax.make_jaxpr(fun)(*args)
        yield f"{name} | {kind}"
        yield from (f"  {note}" for note in dict.fromkeys(notes))


@contextlib.contextmanager
def _noted(kind):
    """The decisions that are taken, as on the default device of a kind that holds all lanes."""
    notes = []

    def decide(control_flow, thresholds, asked):
        read = set()
        decision = policy.decide(control_flow, _Read(thresholds, read), asked)
        named = ", ".join(f for f in thresholds._fields if f in read)
        notes.append(f"{_shown(control_flow)} -> {_decision(decision)} [{named}]")
        return decision

    row = TABLE[kind]._replace(max_devices=1_000)
    platform = kind.partition("-")[0]
    with (
        mock.patch.object(runner, "decide", decide),
        mock.patch.object(runner, "thresholds_here", return_value=row),
        mock.patch.object(jax, "default_backend", return_value=platform),
    ):
        yield notes


class _Read:
    """Thresholds, and which of them are read."""

    def __init__(self, thresholds, read):
        self._thresholds, self._read = thresholds, read

    def __getattr__(self, name):
        if name in self._thresholds._fields:
            self._read.add(name)
            return getattr(self._thresholds, name)
        return getattr(type(self._thresholds), name).fget(self)  # made of several


def _shown(control_flow):
    match control_flow:
        case policy.Loop(lanes=lanes, bounded=bounded):
            return f"{'bounded loop' if bounded else 'loop'} of {lanes}, {_of_step(control_flow)}"
        case policy.NestedLoop(lanes=lanes, nest=nest):
            price = price_inside(nest)
            return (
                f"nested loop of {lanes}, begins {price.begin:.3g} ns, a lane {price.lane:.3g} ns"
            )
    return f"branch of {control_flow.lanes}, a lane {control_flow.work:.3g} ns"


def _of_step(loop):
    step = loop.step
    return f"a lane {step.work:.3g} ns, to move it {step.moving:.2g} steps"


def _decision(decision):
    match decision:
        case policy.Masked(reason):
            return f"Masked: {reason}"
        case policy.Window(widths, _, left):
            return f"Window {_widths(widths, left)}"
        case policy.Tiles(width, _, kernel, left):
            return f"Tiles of {width}{', single kernel' * kernel}{f', leave {left}' * bool(left)}"
        case policy.Flattened(window, kernel):
            widths = _widths(window.widths, window.leave_at)
            return f"Flattened {widths}{', single kernels inside' * kernel}"
        case policy.Gathered(all_from):
            return f"Gathered{'' if all_from is None else f', all from {all_from:.3g}'}"
        case policy.Serial(most):
            return f"Serial, up to {most}"


def _widths(widths, left):
    return ", then ".join(map(str, widths)) + f", leave at {left}" * bool(left)


if __name__ == "__main__":
    text = "".join(f"{line}\n" for kind in KINDS for line in lines(kind))
    FILE.write_text(text)
    print(f"{len(text.splitlines())} lines in {FILE}", file=sys.stderr)
