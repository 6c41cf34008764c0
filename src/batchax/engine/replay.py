"""Values that a custom derivative rule closes over.

JAX traces the derivative rules of ``custom_jvp`` and ``custom_vjp`` when they are
first needed, which may be long after the per-example function was staged::

    def per_example(x, p):
        y = jnp.sin(p)

        @jax.custom_jvp
        def f(z): ...
        f.defjvp(lambda primals, tangents: ... y ...)     # y is of the staged program

What such a rule closes over is then a placeholder of a program that has run. It
says which variable of the program it stood for, so its value can be had by running
the part of the program that computes it: once more, but only for rules that do
this, and without keeping every value of every program just in case.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Literal

from batchax import _compat
from batchax.engine.axis import Axis, AxisPosition
from batchax.engine.interpreter import interpret


@dataclass(frozen=True, eq=False)
class Program:
    """A staged program and what it was run on."""

    axis: Axis
    staged: _compat.ClosedJaxpr
    args: Sequence[Any]
    axes: Sequence[AxisPosition]

    def resolve(self, values: Sequence[Any]) -> tuple[list[Any], list[AxisPosition]]:
        """`values` with placeholders of this program replaced, and their axes."""
        variables = [_compat.staged_variable(x) for x in values]
        jaxpr = self.staged.jaxpr
        own = {*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)}
        needed = [v for v in variables if v is not None and v in own]
        if not needed:
            return list(values), [None] * len(values)
        jaxpr = jaxpr.replace(eqns=_slice(jaxpr, needed), outvars=needed)
        outs, axes = interpret(self.axis, jaxpr, self.staged.consts, self.args, self.axes)
        found = dict(zip(needed, zip(outs, axes, strict=True), strict=True))
        pairs = [found.get(v, (x, None)) for v, x in zip(variables, values, strict=True)]
        return [x for x, _ in pairs], [a for _, a in pairs]


_running: ContextVar[Program | None] = ContextVar("batchax_running", default=None)


@contextmanager
def running(program: Program) -> Iterator[None]:
    """While `program` is interpreted: rules may look up what they close over."""
    token = _running.set(program)
    try:
        yield
    finally:
        _running.reset(token)


def program_behind(*rules: Any) -> Program | None:
    """The running program, if any of `rules` closes over a placeholder of some program.

    A rule that needs no program must not hold one: it may live in a cache for long.
    """
    program = _running.get()
    return program if program is not None and _holds_tracer(list(rules)) else None


def resolve(program: Program | None, values: Sequence[Any]) -> tuple[list[Any], list[AxisPosition]]:
    """Constants of a rule as values, with the position of the batch axis in each."""
    if program is None:
        return list(values), [None] * len(values)
    return program.resolve(values)


def _slice(jaxpr: Any, needed: Sequence[Any]) -> list[Any]:
    """The equations that the variables `needed` depend on."""
    live, eqns = set(needed), []
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            live |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return eqns[::-1]


_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType, jax.Array)
_MOST_OBJECTS = 10_000  # a rule bound to something larger is taken to hold a tracer


def _holds_tracer(unseen: list[Any]) -> bool:
    """Whether a tracer can be reached from functions, their closures and containers."""
    seen: set[int] = set()
    while unseen:
        x = unseen.pop()
        if isinstance(x, Tracer):
            return True
        if isinstance(x, _LEAVES) or id(x) in seen:
            continue
        seen.add(id(x))
        if len(seen) > _MOST_OBJECTS:
            return True
        unseen += _parts(x)
    return False


def _parts(x: Any) -> list[Any]:
    if isinstance(x, types.FunctionType):
        cells = [c.cell_contents for c in x.__closure__ or () if _is_filled(c)]
        return [*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    if isinstance(x, types.MethodType):
        return [x.__self__, x.__func__]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, dict):
        return list(x.values())
    if isinstance(x, (list, tuple, set, frozenset)):
        return list(x)
    return [*getattr(x, "__dict__", {}).values(), *_compat.wrapped_parts(x)]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
