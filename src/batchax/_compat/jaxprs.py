"""Jaxprs as JAX holds them, and their effects.

The types of effects, and that of references, are private: they are recognized by the names of their
classes, and by an attribute.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.extend.core as jex_core
from jax._src.debugging import debug_effect as debug_effect
from jax.interpreters import partial_eval

Primitive = jex_core.Primitive
ClosedJaxpr = jex_core.ClosedJaxpr
JAXPR_TYPES = (jex_core.Jaxpr, jex_core.ClosedJaxpr)  # one class since JAX 0.11


def close(jaxpr: Any, consts: Any = ()) -> ClosedJaxpr:
    """A closed jaxpr from one that a parameter holds open (remat, shard_map).

    Since JAX 0.11 there is a single class and parameters are closed already: then the
    last line can go.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.with_consts(list(consts)) if consts else jaxpr  # pyright: ignore
    return ClosedJaxpr(jaxpr, list(consts))


def without_constants(jaxpr: Any) -> Any:
    """`jaxpr` without the values of its constants, which since JAX 0.12 are part of it."""
    consts = getattr(jaxpr, "consts", ())
    return jaxpr.with_consts([None] * len(consts)) if consts else jaxpr  # pyright: ignore


def constants_as_inputs(jaxpr: Any) -> Any:
    """`jaxpr`, open or closed, with its constants as leading inputs and none left.

    Since 0.11 JAX does so already for the rules of custom derivatives, whose constants it hands
    over beside them.
    """
    if not jaxpr.constvars:
        return jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def hoist_constants(*programs: ClosedJaxpr) -> tuple[list[ClosedJaxpr], list[Any]]:
    """`programs` with the constants of all of them as leading inputs, and the constants.

    Some primitives (remat, calls) take a body without constants only. And a primitive is
    differentiated and batched with respect to its operands only: what a derivative rule in its
    program closes over, a constant, must be one of them.
    """
    different = list({id(program): program for program in programs}.values())
    slots = [v for program in different for v in program.jaxpr.constvars]
    if not slots:
        return list(programs), []
    hoisted = {
        id(program): close(
            program.jaxpr.replace(constvars=[], invars=[*slots, *program.jaxpr.invars])
        )
        for program in different
    }
    consts = [x for program in different for x in program.consts]
    return [hoisted[id(program)] for program in programs], consts


def opened(body: ClosedJaxpr) -> tuple[Any, list[Any]]:
    """An open jaxpr and its constants, where JAX wants the two apart."""
    return body.jaxpr, list(body.consts)


def used_inputs(program: ClosedJaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Which inputs of `program` these of its outputs, or effects, depend on.

    Only the module that partial evaluation is written in spells it.
    """
    jaxpr = constants_as_inputs(program.jaxpr)
    _, used = partial_eval.dce_jaxpr(jaxpr, list(outputs))
    return list(used[len(used) - len(program.jaxpr.invars) :])


def without_dead(program: ClosedJaxpr) -> ClosedJaxpr:
    """`program`, and the loops and branches in it, without what no output or effect needs.

    Only the module that partial evaluation is written in spells it.
    """
    jaxpr = constants_as_inputs(program.jaxpr)
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    count = len(jaxpr.invars) - len(program.jaxpr.invars)
    live = live.replace(constvars=live.invars[:count], invars=live.invars[count:])
    return close(live, program.consts)


def scan_counts(params: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are its carry.

    Since JAX 0.11 the parameters hold trees with a leaf for each operand; before, two numbers.
    """
    if "ft_in" in params:
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def name_and_place(jaxpr: Any) -> str:
    """Which function a program was staged from: ``name at file:line``, or "".

    Only the description for messages, `jaxpr.debug_info`, says so.
    """
    return jaxpr.debug_info.func_src_info or ""


def name_within_jax(jaxpr: Any) -> str:
    """The name of the function a program was staged from if JAX defines it, otherwise ""."""
    name, _, path = name_and_place(jaxpr).partition(" at ")
    return name if path.startswith(os.path.dirname(jax.__file__)) else ""


def named_axes(effects: Any) -> set[Hashable]:
    """Names of the mapped axes that an equation with these effects uses."""
    return {e.name for e in effects if type(e).__name__ == "NamedAxisEffect"}


def observed(effects: Any) -> bool:
    """Whether these effects of an equation are anything but the use of a named axis."""
    return any(type(e).__name__ != "NamedAxisEffect" for e in effects)


def in_order(effects: Any) -> bool:
    """Whether calls of Python in a program with these effects are to happen in order."""
    return any(type(e).__name__ in ("OrderedIOEffect", "OrderedDebugEffect") for e in effects)


def ordered_by_lane(effects: Any) -> bool:
    """Whether a program with these effects does input or output, or what is to happen in order."""
    return in_order(effects) or any(type(e).__name__ == "IOEffect" for e in effects)


def calls_back(effects: Any) -> bool:
    """Whether a program with these effects calls Python where it can be seen."""
    return ordered_by_lane(effects) or any(type(e).__name__ == "DebugEffect" for e in effects)


def does_more_than_show(effects: Any) -> bool:
    """Whether a program with these effects does anything but show values to the host."""
    return any(type(e).__name__ != "DebugEffect" for e in effects)


def checks(effects: Any) -> bool:
    """Whether a program with these effects has a runtime check of ``checkify``."""
    return any(type(e).__name__ == "ErrorEffect" for e in effects)


@contextmanager
def callbacks_fail_silently() -> Iterator[None]:
    """While it is known that callbacks fail, JAX does not log each time that they do.

    The logger is that of a private module, and is known by the module's name.
    """
    logger = logging.getLogger("jax._src.callback")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_reference(x: Any) -> bool:
    """Whether `x` is a mutable reference."""
    return hasattr(jax.typeof(x), "inner_aval")


def makes_references(effects: Any) -> bool:
    """Whether a program with these effects creates references."""
    return any(type(e).__name__ == "InternalMutableArrayEffect" for e in effects)


def touches_references(eqn: Any) -> bool:
    """Whether an equation creates references, or is given one."""
    given = any(hasattr(v.aval, "inner_aval") for v in eqn.invars)
    return given or makes_references(eqn.effects)


def written_inputs(jaxpr: Any) -> set[int]:
    """Which inputs of `jaxpr`, or of an equation, are references that it writes to."""
    writes = [e.input for e in jaxpr.effects if type(e).__name__ in {"WriteEffect", "AccumEffect"}]
    return {i for i, v in enumerate(jaxpr.invars) if v in writes}
