"""What is decided for programs of the benchmarks: the golden file `divergence/decisions.txt`.

``python -m support.decisions`` in `tests/` writes it again. Programs are traced and not compiled. A
line is a decision: the control flow, what its step or branch costs, what is decided, and the
thresholds that were read. So a changed threshold shows as changed lines.
"""

import contextlib
import functools
import sys
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from unittest import mock

import jax

import batchax as bx
from batchax.analysis.thresholds import TABLE
from batchax.divergence import policy, runner
from batchax.divergence.nest import price_inside
from benchmarks.divergence.measure import WORKLOADS as DIVERGING
from benchmarks.nests.measure import WORKLOADS as NESTS
from benchmarks.search.measure import PROGRAMS as DRAFTED

NOT_ASKED = "not asked: `why_lockstep` finds a step too cheap, or no lane may leave"
FILE = Path(__file__).parents[1] / "divergence" / "decisions.txt"
KINDS = "cpu-small", "cpu", "gpu", "compact"
"""Rows of the table. That of "compact" is read on a small CPU."""

# Of each kind of drafted program the last: of the most lanes, with the heaviest tail.
KINDS_DRAFTED = """
cond: a product with itself, 20 sines, ten products, a loop of products, a sort, a pseudoinverse
images: crop and flip, one of six augmentations
integers: Collatz, gcd
loop: a scalar, a sine, 32 sines, 32x32 of state, product 16, product 64, own product 16, a sort of
  64, Cholesky 8, a lookup
nested loop: halving while in a while, while of products in a scan, scan in a while,
  cond around a while, insertion sort
ODE: adaptive Heun
root: Newton, Kepler
sampling: rejection, walk, slices
scan: cond, environment
search: binary, down a tree
solver: conjugate gradients, Sinkhorn, Newton for a system, jax.scipy gmres
switch: ten cheap, products, experts
"""


def drafted():
    """The names of 42 drafted programs."""
    kinds = KINDS_DRAFTED.replace("\n ", "").strip().splitlines()
    for family, names in (line.split(": ") for line in kinds):
        yield from (
            [p for p in DRAFTED if p.startswith(f"{family}: {name},")][-1]
            for name in names.split(", ")
        )


@functools.cache
def programs():
    """What makes a batched function for an option, and the arguments of all lanes, by name.

    Arguments take as long to make as all is traced, and functions are traced again for each kind.
    """
    made = {}
    for name, workload in DIVERGING.items():
        args = workload.arguments(workload.lanes)
        for use in workload.uses():
            if use == "values" or "bounded" in name:
                make = lambda option, w=workload, use=use: w.uses()[use][option]
                made[f"divergence: {name}, {use}"] = make, args
    for name, nest in NESTS.items():
        if not nest.missing():
            make = lambda option, nest=nest: nest.ways()[option]
            made[f"nests: {name}"] = make, nest.data(nest.lanes, nest.steps)
    for name in drafted():
        program = DRAFTED[name]
        make = lambda option, program=program: program.batched_by(
            functools.partial(bx.vmap, divergence=option)
        )
        made[name] = make, program.data(program.lanes)
    return made


def lines(kind):
    """All lines of a kind of device."""
    for name, (make, args) in programs().items():
        option = "compact" if kind == "compact" else "auto"
        with _noted("cpu-small" if option == kind else kind) as notes:
            jax.make_jaxpr(make(option))(*args)
        yield f"{name} | {kind}"
        yield from (f"  {note}" for note in dict.fromkeys(notes or [NOT_ASKED]))


@contextlib.contextmanager
def _noted(kind):
    """The decisions that are taken, as on the default device of a kind that holds all lanes."""
    notes = []

    def decide(control_flow, thresholds, asked):
        read = set()
        if asked.default:
            asked = replace(asked, default=_Read(asked.default, read))
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
            return (
                f"{'bounded loop' if bounded else 'loop'} of {lanes}, {_of_step(control_flow.step)}"
            )
        case policy.NestedLoop(whole=policy.Loop(lanes=lanes), nest=nest):
            price = price_inside(nest)
            return (
                f"nested loop of {lanes}, begins {price.begin:.3g} ns, a lane {price.lane:.3g} ns"
            )
        case policy.BoundedTail(lanes=lanes, step=step):
            return f"bounded loop of {lanes}, differentiated, {_of_step(step)}"
    return f"branch of {control_flow.lanes}, a lane {control_flow.work:.3g} ns"


def _of_step(step):
    return f"a lane {step.work:.3g} ns, to move it {step.moving:.2g} steps"


def _decision(decision):
    match decision:
        case policy.Masked(reason):
            return f"Masked: {reason}"
        case policy.Window(widths, _, left):
            return f"Window {_widths(widths, left)}"
        case policy.Tiles(width, _, left):
            return f"Tiles of {width}, single kernel{f', leave {left}' * bool(left)}"
        case policy.Flattened(window):
            return f"Flattened {_widths(window.widths, window.leave_at)}"
        case policy.Alone():
            return "Alone, single kernel"
        case policy.FewAlone(left):
            return f"FewAlone, leave at {left}, single kernel"
        case policy.Probed(slowdown):
            return f"Probed, {slowdown:.3g} times as long if counts are equal"
        case policy.Gathered(all_from):
            return f"Gathered{'' if all_from is None else f', all from {all_from:.3g}'}"
        case policy.Serial(most):
            return f"Serial, up to {most}"


def _widths(widths, left):
    return ", then ".join(map(str, widths)) + f", leave at {left}" * bool(left)


if __name__ == "__main__":
    before = FILE.read_text().splitlines()
    now = [line for kind in KINDS for line in lines(kind)]
    FILE.write_text("".join(f"{line}\n" for line in now))
    # What is decided, without the thresholds that were read for it.
    old, new = ([line.partition(" [")[0] for line in text] for text in (before, now))
    changes = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changed = sum(max(j - i, n - m) for how, i, j, m, n in changes if how != "equal")
    said = f"{changed} decisions are others; lines differ in the thresholds that were read, too"
    print(f"{len(now)} lines in {FILE}; {said}", file=sys.stderr)
