"""Gradients of one example whose dear branches keep their operands alone for the way back.

``vmap(grad(f))`` is given a program in which JAX has taken the gradient already: a ``scan``, and
one back over it, with a ``cond`` in each. The first hands on what the other needs of its branch,
the weights, too, of which each lane would have copies for each step. Here the second ``cond`` is
given the operands of the first instead, and computes its branch again, as `computed_again.py` has
it for gradients of all lanes. So both are dear branches as any others: lanes wait before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal
from jax.extend.core.primitives import cond_p, scan_p

from batchax import _compat
from batchax.divergence.open_loops import Block, Loop, Opening
from batchax.jaxprs.inside import Anywhere
from batchax.jaxprs.joined import copied, fresh, joined
from batchax.jaxprs.words import ClosedJaxpr, Eqn
from batchax.kernel.captured import closed_over
from batchax.kernel.differing import Differs, differs_of
from batchax.programs.cost import STEPS, cost_of_program
from batchax.programs.dear_branches import dear_branches, may_be_dear, time_to_move
from batchax.programs.shapes import bytes_of
from batchax.programs.weights import LAUNCH, TOGETHER

# How many times as long as to keep what it hands on it may take to compute a branch again.
_AGAIN = 4.0
# How many times as long as it takes to begin its operations all lanes take for it at least.
_BEGUN = 2.0


def computing_again(
    program: ClosedJaxpr,
    differs: Differs,
    pays: Callable[[Eqn], bool],
    lanes: float = math.inf,
    is_body: bool = False,
) -> ClosedJaxpr:
    """`program`, in which the way back over a dear branch computes that again.

    Itself where there is none, or where what branches hand on is less than what they are given.

    Args:
      program: what one example does.
      differs: which of its operands differ between lanes.
      pays: whether it may pay that lanes of a loop are at places of their own.
      lanes: how many there are, if of so few some branches are not to be computed again.
      is_body: whether it is the body of a loop.
    """
    jaxpr = program.jaxpr
    if not _maybe_dear.in_program(jaxpr) or any(map(closed_over, jaxpr.eqns)):
        return program
    opens = lambda eqn: _maybe_dear.in_equation(eqn) and (eqn.primitive is not scan_p or pays(eqn))
    inside = lambda body, given, looped: computing_again(body, given, pays, lanes, looped)
    opening = Opening(opens, inside)
    block = opening.open(program, differs, is_body)
    # Branches that go back may be gone back over, too.
    changed = True
    while changed:
        pairs = _pairs_in(_Ways(block, ()))
        changed = any(_gives_operands(pair, lanes, opening.constants) for pair in pairs)
    if not block.is_other:
        return program
    return _compat.without_dead(opening.close(block, jaxpr.invars))


_maybe_dear = Anywhere(
    lambda eqn: (
        eqn.primitive is cond_p and any(may_be_dear(b.jaxpr) for b in eqn.params["branches"])
    )
)


@dataclass(frozen=True)
class _Ways:
    """Programs forth and back: of the first, each step is at the one of the other.

    Attributes:
      common: a program that both are in.
      loops: the loops in that, and in each other, that they are the bodies of.
    """

    common: Block
    loops: tuple[tuple[Loop, Loop], ...]

    @property
    def forth(self) -> Block:
        """The program that is run first."""
        return self.loops[-1][0].block if self.loops else self.common

    @property
    def back(self) -> Block:
        """The other."""
        return self.loops[-1][1].block if self.loops else self.common

    @property
    def around(self) -> _Ways:
        """The programs that the last loops are in."""
        return _Ways(self.common, self.loops[:-1])

    def origin(self, v: Any) -> Any:
        """The variable of the way forth whose value one on the way back has; None if none has."""
        if not self.loops:
            return v
        forth, back = self.loops[-1]
        for there, here in (
            (forth.stacked, back.sliced),
            (forth.sliced, back.sliced),
            (forth.same, back.same),
        ):
            outside = next((p.outside for p in here if p.inside is v), None)
            value = None if outside is None else self.around.origin(outside)
            if value is not None:
                inside = next((p.inside for p in there if p.outside is value), None)
                if inside is not None:
                    return inside
        return None

    def only_reader(self, v: Any, reader: Any) -> bool:
        """Whether a variable on the way back, and what it is made of, is for `reader` alone."""
        if not _is_only(reader, self.back.readers(v)):
            return False
        if not self.loops:
            return True
        forth, back = self.loops[-1]
        outside = next((p.outside for p in back.sliced if p.inside is v), None)
        if outside is None or not _is_only(forth.block, self.forth.readers(self.origin(v))):
            return False
        return self.around.only_reader(outside, back)

    def brought(self, v: Any) -> Any:
        """What a variable of the way forth is called on the way back."""
        if not self.loops or isinstance(v, Literal):
            return v
        around = self.around
        forth, back = self.loops[-1]
        for values, passed in ((forth.same, back.given), (forth.sliced, back.entry)):
            for p in values:
                if p.inside is v:
                    outside = around.brought(p.outside)
                    return outside if isinstance(outside, Literal) else passed(outside, around.back)
        stacked = around.brought(forth.all_of(v, around.forth))
        return back.entry(stacked, around.back)

    def stacked(self, v: Any) -> int:
        """How many values of a variable of the way forth are kept to bring it."""
        if not self.loops or isinstance(v, Literal):
            return 0
        forth, _ = self.loops[-1]
        for p in (*forth.same, *forth.sliced):
            if p.inside is v:
                return self.around.stacked(p.outside)
        return self.steps

    @property
    def steps(self) -> int:
        """How many steps all loops take."""
        count = 1
        for forth, _ in self.loops:
            count *= forth.length
        return count


def _is_only(x: Any, xs: Sequence[Any]) -> bool:
    return len(xs) == 1 and xs[0] is x


@dataclass(frozen=True)
class _Pair:
    """Branches, and those that go back over them."""

    ways: _Ways
    forth: Eqn
    back: Eqn


def _pairs_in(ways: _Ways) -> Iterator[_Pair]:
    """All that are in loops, in a program that may be the body of one."""
    yield from (pair for pair in _pairs(ways) if ways.common.is_body or pair.ways.loops)
    for loop in ways.common.loops:
        yield from _pairs_in(_Ways(loop.block, ()))


def _pairs(ways: _Ways) -> Iterator[_Pair]:
    for part in ways.back.parts:
        if isinstance(part, Loop):
            made = dict.fromkeys(_makers(ways, [p.outside for p in part.sliced]))
            for loop in made:
                if isinstance(loop, Loop) and loop is not part and loop.length == part.length:
                    yield from _pairs(_Ways(ways.common, (*ways.loops, (loop, part))))
        elif part.primitive is cond_p:
            for eqn in dict.fromkeys(_makers(ways, part.invars[1:])):
                if isinstance(eqn, Loop) or eqn.primitive is not cond_p or eqn.effects:
                    continue
                if ways.origin(part.invars[0]) is eqn.invars[0]:
                    yield _Pair(ways, eqn, part)


def _makers(ways: _Ways, atoms: Sequence[Any]) -> Iterator[Any]:
    """The parts of the way forth that compute what variables on the way back are."""
    for v in atoms:
        value = None if isinstance(v, Literal) else ways.origin(v)
        part = None if value is None else ways.forth.maker(value)
        if part is not None:
            yield part


def _gives_operands(pair: _Pair, lanes: float, constants: dict[Any, Any]) -> bool:
    """Whether branches on the way back are now given the operands of the others.

    They are if that is less to keep, and lanes may wait before any.
    """
    ways, first, last = pair.ways, pair.forth, pair.back
    results = {v: k for k, v in enumerate(first.outvars)}
    origins = [None if isinstance(v, Literal) else ways.origin(v) for v in last.invars]
    handed = {
        i: results[origin]
        for i, origin in enumerate(origins)
        if i and type(origin) is not Literal and origin in results
        if ways.only_reader(last.invars[i], last)
    }
    before = bytes_of(first.outvars[k].aval for k in handed.values()) * ways.steps
    if sum(ways.stacked(v) * bytes_of([v.aval]) for v in first.invars[1:]) > before or not handed:
        return False
    # Where both are given something they are given it once. It has a name of the way forth, if any.
    pairs = enumerate(zip(last.invars, origins, strict=True))
    named = {i: v if origin is None else origin for i, (v, origin) in pairs}
    kept = {id(named[i]): v for i, v in enumerate(last.invars) if i and i not in handed}
    given = {id(v): v for v in first.invars[1:]}
    inputs = {**given, **kept}
    branches = []
    for forth, back in zip(first.params["branches"], last.params["branches"], strict=True):
        own = {key: fresh(v.aval) for key, v in inputs.items()}
        eqns, outs = copied(forth, [own[id(v)] for v in first.invars[1:]], constants)
        operands = [
            outs[handed[i]] if i in handed else own[id(named[i])] for i in range(1, len(named))
        ]
        more, cotangents = copied(back, operands, constants)
        whole = joined(back.jaxpr, list(own.values()), [*eqns, *more], cotangents, constants)
        branches.append(_compat.without_dead(whole))
    again = last.replace(params={**last.params, "branches": tuple(branches)})
    forth_apart = differs_of(ways.forth.apart, first.invars)
    differs = [
        differs_of((ways.back if key in kept else ways.forth).apart, [v])[0]
        for key, v in inputs.items()
    ]
    dear = dear_branches(_without(first, handed.values()), forth_apart)
    if not forth_apart[0] or not (dear or dear_branches(again, [True, *differs])):
        return False
    work, begun = _time(again, differs)
    if work * lanes < _BEGUN * begun:  # all lanes take as long as one, and it would be longer
        return False
    more = work - _time(last, differs_of(ways.back.apart, last.invars[1:]))[0]
    if more > _AGAIN * time_to_move(first.outvars[k].aval for k in handed.values()):
        return False
    atoms = [v if key in kept else ways.brought(v) for key, v in inputs.items()]
    again = again.replace(invars=[last.invars[0], *atoms])
    block = ways.back
    block.parts[:] = [again if part is last else part for part in block.parts]
    block.changed = True
    return True


def _time(eqn: Eqn, differs: Sequence[bool]) -> tuple[float, float]:
    """Nanoseconds that all branches of a ``cond`` take for a lane, and to begin operations."""
    programs = (branch.jaxpr for branch in eqn.params["branches"])
    costs = [cost_of_program(p, differs=differs, steps=STEPS) for p in programs]
    return sum(map(TOGETHER.time, costs)), LAUNCH * sum(cost.launches for cost in costs)


def _without(eqn: Eqn, results: Collection[int]) -> Any:
    """A ``cond`` without some of its results."""
    some = [k for k in range(len(eqn.outvars)) if k not in results]
    branches = []
    for branch in eqn.params["branches"]:
        jaxpr = branch.jaxpr.replace(outvars=[branch.jaxpr.outvars[k] for k in some])
        branches.append(_compat.without_dead(_compat.close(jaxpr, branch.consts)))
    outvars = [eqn.outvars[k] for k in some]
    params = {**eqn.params, "branches": tuple(branches)}
    return eqn.replace(outvars=outvars, params=params)
