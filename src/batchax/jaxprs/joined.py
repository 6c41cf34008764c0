"""Programs made of the equations of others, which are not traced again: that takes far longer.

A variable belongs to one equation of a program. Equations of a program that is put into another
once may keep theirs; of one that may be put in more than once they are `copied`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import DropVar, Literal, Var

from batchax import _compat
from batchax.jaxprs.evaluate import variables_in, variables_read
from batchax.jaxprs.words import ClosedJaxpr, Eqn, Jaxpr


def joined(
    like: Jaxpr,
    inputs: Sequence[Any],
    eqns: Sequence[Eqn],
    outputs: Sequence[Any],
    constants: Mapping[Any, Any],
) -> ClosedJaxpr:
    """The program of `inputs` that runs `eqns`, in order, and returns `outputs`.

    Args:
      like: a program that holds most of them.
      inputs: variables, each once.
      eqns: equations.
      outputs: variables or literals.
      constants: the values of variables that are neither inputs nor computed, and maybe of others.
    """
    read = [v for eqn in eqns for v in variables_read(eqn)] + variables_in(outputs)
    given = set(inputs)
    used = [v for v in dict.fromkeys(read) if v in constants and v not in given]
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    program = like.replace(
        constvars=used,
        invars=list(inputs),
        eqns=list(eqns),
        outvars=list(outputs),
        effects=effects,
    )
    return _compat.close(program, [constants[v] for v in used])


def copied(
    program: ClosedJaxpr, operands: Sequence[Any], constants: dict[Any, Any]
) -> tuple[list[Any], list[Any]]:
    """The equations of `program` with variables of their own, of these operands; and its results.

    What its constants are joins `constants`.
    """
    jaxpr, names = program.jaxpr, named_inputs(program, operands, constants)
    eqns = [copy_of(eqn, names) for eqn in jaxpr.eqns]
    return eqns, [called(v, names) for v in jaxpr.outvars]


def named_inputs(
    program: ClosedJaxpr, operands: Sequence[Any], constants: dict[Any, Any]
) -> dict[Any, Any]:
    """What inputs and constants of `program` are called in one that it is copied into.

    What its constants are joins `constants`.
    """
    jaxpr = program.jaxpr
    names = dict(zip(jaxpr.invars, operands, strict=True))
    for v, x in zip(jaxpr.constvars, program.consts, strict=True):
        names[v] = fresh(v.aval)
        constants[names[v]] = x
    return names


def copy_of(eqn: Eqn, names: dict[Any, Any]) -> Any:
    """An equation with operands as `names` has them, and results of its own, which it enters."""
    operands = [called(v, names) for v in eqn.invars]
    results = [v if isinstance(v, DropVar) else fresh(v.aval) for v in eqn.outvars]
    names.update(zip(eqn.outvars, results, strict=True))
    return eqn.replace(invars=operands, outvars=results)


def renamed(eqn: Eqn, names: Mapping[Any, Any]) -> Any:
    """An equation with operands as `names` has them; itself where it says nothing of any."""
    if names.keys().isdisjoint(variables_read(eqn)):
        return eqn
    return eqn.replace(invars=[called(v, names) for v in eqn.invars])


def called(v: Any, names: Mapping[Any, Any]) -> Any:
    """What stands for an operand: it itself where `names` says nothing."""
    return v if isinstance(v, Literal) else names.get(v, v)


def fresh(aval: Any) -> Any:
    """A variable that is in no program yet."""
    return Var(aval)
