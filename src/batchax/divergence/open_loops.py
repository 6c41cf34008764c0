"""A program of one example, opened so that its loops can be given more operands and results.

Calls are written out, and so are the bodies of scans, as far as they hold what is looked for. A
scan of which something was changed is made anew; all others stay the equations that they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax import lax
from jax.core import eval_jaxpr
from jax.extend.core import mapped_aval, unmapped_aval
from jax.extend.core.primitives import scan_p, while_p

from batchax import _compat
from batchax.jaxprs.bodies import SCAN_OPTIONS, Body, bodies_of
from batchax.jaxprs.joined import called, copied, copy_of, fresh, joined, named_inputs, renamed
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr
from batchax.kernel.differing import Differs, differing_in, differing_in_steps, differs_of

_CALLS = frozenset("call closed_call core_call jit".split())
_STAY = frozenset("checkpoint remat2 while".split())


@dataclass(eq=False)
class Passed:
    """A value outside of a loop, and what it is called inside."""

    outside: Any
    inside: Any


@dataclass(eq=False)
class Block:
    """A program, or the body of a loop.

    Attributes:
      jaxpr: the program that it was.
      apart: which of its variables differ between lanes.
      is_body: whether it is, or is in, the body of a loop.
      parts: its equations, and the loops among them that are opened.
      outputs: what it returns.
      changed: whether equations of it are others now.
    """

    jaxpr: Jaxpr
    apart: dict[Any, bool]
    is_body: bool
    parts: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    changed: bool = False

    @property
    def loops(self) -> list[Loop]:
        """The loops that are opened."""
        return [part for part in self.parts if isinstance(part, Loop)]

    @property
    def is_other(self) -> bool:
        """Whether it is another program now, or a loop in it is."""
        return self.changed or any(loop.block.is_other for loop in self.loops)

    def maker(self, v: Any) -> Any:
        """The part that computes a variable; None for an input."""
        return next((part for part in self.parts if any(v is u for u in part.outvars)), None)

    def readers(self, v: Any) -> list[Any]:
        """The parts that read a variable, and the block itself if it returns it."""
        some = [part for part in self.parts if any(v is u for u in part.invars)]
        return some + [self] * any(v is u for u in self.outputs)


@dataclass(eq=False)
class Loop:
    """A scan, opened.

    Attributes:
      eqn: the scan that it was.
      block: its body.
      same, carried, sliced: its operands; what is carried is its first value outside.
      last, stacked: its results.
    """

    eqn: Eqn
    block: Block
    same: list[Passed]
    carried: list[Passed]
    sliced: list[Passed]
    last: list[Passed]
    stacked: list[Passed]

    @property
    def length(self) -> int:
        """How many steps it takes."""
        return self.eqn.params["length"]

    @property
    def invars(self) -> list[Any]:
        """Its operands."""
        return [p.outside for p in (*self.same, *self.carried, *self.sliced)]

    @property
    def outvars(self) -> list[Any]:
        """Its results."""
        return [p.outside for p in (*self.last, *self.stacked)]

    def given(self, x: Any, around: Block) -> Any:
        """What a value outside is called inside, the same at each step."""
        return _passed(self.same, x, lambda: self._input(around.apart[x], x.aval))

    def entry(self, x: Any, around: Block) -> Any:
        """What an entry of a value outside, a part for each step, is called inside."""
        aval = mapped_aval(self.length, 0, x.aval)
        return _passed(self.sliced, x, lambda: self._input(around.apart[x], aval))

    def all_of(self, v: Any, around: Block) -> Any:
        """What all values of a variable inside, one of each step, are called outside."""
        for p in self.stacked:
            if p.inside is v:
                return p.outside
        x = fresh(unmapped_aval(self.length, 0, v.aval))
        self.stacked.append(Passed(x, v))
        self.block.outputs.append(v)
        self.block.changed = True
        around.apart[x] = self.block.apart[v]
        return x

    def _input(self, apart: bool, aval: Any) -> Any:
        v = fresh(aval)
        self.block.apart[v] = apart
        self.block.changed = True
        return v


def _passed(values: list[Passed], x: Any, make: Callable[[], Any]) -> Any:
    for p in values:
        if p.outside is x:
            return p.inside
    values.append(Passed(x, make()))
    return values[-1].inside


@dataclass(frozen=True, eq=False)
class Opening:
    """Opens programs, and closes them.

    Attributes:
      opens: whether an equation is to be opened, if it is a call or a scan.
      inside: what becomes of the body of one that stays what it is, of which some inputs differ
        between lanes, and which may be in a loop.
      constants: the values of constants of all that is opened.
    """

    opens: Callable[[Eqn], bool]
    inside: Callable[[ClosedJaxpr, Differs, bool], ClosedJaxpr]
    constants: dict[Any, Any] = field(default_factory=dict)

    def open(self, program: ClosedJaxpr, differs: Differs, is_body: bool) -> Block:
        """A program, of operands of which these differ between lanes."""
        jaxpr = program.jaxpr
        self.constants.update(zip(jaxpr.constvars, program.consts, strict=True))
        block = Block(jaxpr, dict.fromkeys(jaxpr.constvars, False), is_body)
        block.apart.update(zip(jaxpr.invars, differs, strict=True))
        names: dict[Any, Any] = {}
        self._open(jaxpr, block, names, renamed)
        block.outputs = [called(v, names) for v in jaxpr.outvars]
        return block

    def close(self, block: Block, inputs: Sequence[Any]) -> ClosedJaxpr:
        """The program that a block has become."""
        names: dict[Any, Any] = {}
        eqns = [eqn for part in block.parts for eqn in self._closed(part, names)]
        outputs = [called(v, names) for v in block.outputs]
        return joined(block.jaxpr, inputs, eqns, outputs, self.constants)

    def _open(
        self, jaxpr: Jaxpr, block: Block, names: dict[Any, Any], own: Callable[..., Any]
    ) -> None:
        for old in jaxpr.eqns:
            if old.primitive.name in _CALLS and self.opens(old):
                program = _compat.close(bodies_of(old)[0].program)
                given = [called(v, names) for v in old.invars]
                inside = named_inputs(program, given, self.constants)
                block.apart.update((inside[v], False) for v in program.jaxpr.constvars)
                self._open(program.jaxpr, block, inside, copy_of)
                results = [called(v, inside) for v in program.jaxpr.outvars]
                names.update(zip(old.outvars, results, strict=True))
                continue
            eqn = own(old, names)
            differs = differs_of(block.apart, eqn.invars)
            results = differing_in(eqn, differs).results
            block.apart.update(zip(eqn.outvars, results, strict=True))
            if not self.opens(eqn):
                block.parts.append(eqn)
            elif eqn.primitive is scan_p:
                block.parts.append(self._loop(eqn, differs))
            else:
                block.parts.append(self._changed(eqn, differs, block.is_body))
                block.changed |= block.parts[-1] is not eqn

    def _changed(self, eqn: Eqn, differs: Differs, is_body: bool) -> Any:
        """An equation that stays what it is, with another body."""
        if eqn.primitive.name not in _STAY:
            return eqn
        body, is_body = bodies_of(eqn)[-1], is_body or eqn.primitive is while_p
        program = _compat.close(body.program)
        changed: Any = self.inside(program, _given(body, differs), is_body)
        is_closed = isinstance(body.program, ClosedJaxpr)
        if changed is program or (changed.consts and not is_closed):
            return eqn
        new = changed if is_closed else changed.jaxpr
        held = {k: new for k, x in eqn.params.items() if x is body.program}
        return eqn.replace(params={**eqn.params, **held})

    def _loop(self, eqn: Eqn, differs: Differs) -> Loop:
        (body,) = bodies_of(eqn)
        program, same, last = _compat.close(body.program), body.same, body.same + body.carried
        inputs = [fresh(v.aval) for v in program.jaxpr.invars]
        names = named_inputs(program, inputs, self.constants)
        block = Block(program.jaxpr, {names[v]: False for v in program.jaxpr.constvars}, True)
        block.apart.update(zip(inputs, _given(body, differs), strict=True))
        self._open(program.jaxpr, block, names, copy_of)
        block.outputs = [called(v, names) for v in program.jaxpr.outvars]
        passed = list(map(Passed, eqn.invars, inputs))
        results = list(map(Passed, eqn.outvars, block.outputs))
        return Loop(
            eqn,
            block,
            passed[:same],
            passed[same:last],
            passed[last:],
            results[: body.carried],
            results[body.carried :],
        )

    def _closed(self, part: Any, names: dict[Any, Any]) -> Iterator[Any]:
        """The equations of a part; `names` says what results are called instead."""
        if not isinstance(part, Loop):
            yield renamed(part, names)
        elif not part.block.is_other:
            yield renamed(part.eqn, names)
        else:
            yield from self._scan(part, names)

    def _scan(self, loop: Loop, names: dict[Any, Any]) -> Iterator[Any]:
        every = [p.inside for p in (*loop.same, *loop.carried, *loop.sliced)]
        body, eqn = self.close(loop.block, every), loop.eqn
        same, last = len(loop.same), len(loop.same) + len(loop.carried)
        options = {k: v for k, v in eqn.params.items() if k in SCAN_OPTIONS}

        def run(*operands: Any) -> list[Any]:
            def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
                outs = eval_jaxpr(body.jaxpr, body.consts, *operands[:same], *carry, *xs)
                return outs[: len(carry)], outs[len(carry) :]

            carry, ys = lax.scan(step, list(operands[same:last]), list(operands[last:]), **options)
            return [*carry, *ys]

        operands = [called(v, names) for v in loop.invars]
        program = _compat.stage(run, [v.aval for v in operands])
        eqns, outs = copied(program, operands, self.constants)
        names.update(zip(loop.outvars, outs, strict=True))
        for each in eqns:
            yield each.replace(source_info=eqn.source_info, ctx=eqn.ctx)


def _given(body: Body, differs: Differs) -> Differs:
    """Which inputs of a body differ between lanes, at some step."""
    given, same = tuple(differs[k] for k in body.operands), body.same
    jaxpr = _compat.close(body.program).jaxpr
    carry = differing_in_steps(jaxpr, same, body.carried, given).results[: body.carried]
    return (*given[:same], *carry, *given[same + body.carried :])
