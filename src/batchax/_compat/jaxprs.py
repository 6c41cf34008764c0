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

from batchax._compat.types import ClosedJaxpr, Effects, Eqn, Jaxpr, Program, Value, Values

JAXPR_TYPES = (jex_core.Jaxpr, jex_core.ClosedJaxpr)  # one class since JAX 0.11


def close(jaxpr: Program, consts: Values = ()) -> ClosedJaxpr:
    """Closes a jaxpr that a parameter holds open (remat, shard_map)."""
    # Since JAX 0.11 there is a single class, and parameters are closed: then the last line can go.
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.with_consts(list(consts)) if consts else jaxpr  # pyright: ignore
    unclosed: Any = jaxpr
    return ClosedJaxpr(unclosed, list(consts))


def without_constants(jaxpr: Program) -> Program:
    """Removes the values of constants, which are part of a jaxpr since JAX 0.12."""
    consts = getattr(jaxpr, "consts", ())
    return jaxpr.with_consts([None] * len(consts)) if consts else jaxpr  # pyright: ignore


def constants_as_inputs(program: Program) -> Any:
    """Turns constants of a jaxpr, open or closed, into leading inputs."""
    jaxpr: Any = program
    # JAX 0.11 does so for rules of custom derivatives, and passes the constants along with them.
    if not jaxpr.constvars:
        return jaxpr
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def hoist_constants(*programs: ClosedJaxpr) -> tuple[list[ClosedJaxpr], list[Any]]:
    """Turns constants of all `programs` into leading inputs, and returns them."""
    # Some primitives (remat, calls) take bodies without constants. And a primitive is
    # differentiated and batched by its operands only, so what a derivative rule closes over must be
    # one.
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


def inputs_as_constants(program: ClosedJaxpr, consts: Values) -> ClosedJaxpr:
    """Gives these values to the leading inputs of a program."""
    jaxpr = constants_as_inputs(program.jaxpr)
    values = [*program.consts, *consts]
    first, rest = jaxpr.invars[: len(values)], jaxpr.invars[len(values) :]
    return close(jaxpr.replace(constvars=first, invars=rest), values)


def jaxpr_of(program: Program) -> Jaxpr:
    """Returns a program without the values of its constants."""
    jaxpr: Any = getattr(program, "jaxpr", program)
    return jaxpr


def opened(body: ClosedJaxpr) -> tuple[Any, list[Any]]:
    """Splits a closed jaxpr into an open one and its constants."""
    return body.jaxpr, list(body.consts)


def used_inputs(program: ClosedJaxpr, outputs: Sequence[bool]) -> list[bool]:
    """Returns which inputs these outputs of `program`, or its effects, depend on."""
    # Only JAX's module for partial evaluation has this.
    jaxpr = constants_as_inputs(program.jaxpr)
    _, used = partial_eval.dce_jaxpr(jaxpr, list(outputs))
    return list(used[len(used) - len(program.jaxpr.invars) :])


def without_dead(program: ClosedJaxpr) -> ClosedJaxpr:
    """Removes equations that no output or effect needs, also in loops and branches."""
    # Only JAX's module for partial evaluation has this.
    jaxpr = constants_as_inputs(program.jaxpr)
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    count = len(jaxpr.invars) - len(program.jaxpr.invars)
    live = live.replace(constvars=live.invars[:count], invars=live.invars[count:])
    return close(live, program.consts)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan are constants, and how many are its carry."""
    # Since JAX 0.11, the parameters hold pytrees with a leaf for each operand; before, two numbers.
    if "ft_in" in params:
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    return params["num_consts"], params["num_carry"]


def name_and_place(jaxpr: Program) -> str:
    """Returns the function that a program was traced from: ``name at file:line``, or ""."""
    # Only `jaxpr.debug_info`, which is for messages, has it.
    traced: Any = jaxpr
    return traced.debug_info.func_src_info or ""


def name_within_jax(jaxpr: Program) -> str:
    """Returns the name of the function a program was traced from if JAX defines it, else ""."""
    name, _, path = name_and_place(jaxpr).partition(" at ")
    return name if path.startswith(os.path.dirname(jax.__file__)) else ""


def named_axes(effects: Effects) -> set[Hashable]:
    """Returns names of mapped axes that an equation with these effects uses."""
    return {e.name for e in effects if type(e).__name__ == "NamedAxisEffect"}


def observed(effects: Effects) -> bool:
    """Returns whether there are effects other than the use of a named axis."""
    return any(type(e).__name__ != "NamedAxisEffect" for e in effects)


def in_order(effects: Effects) -> bool:
    """Returns whether there are Python callbacks that must run in order."""
    return any(type(e).__name__ in ("OrderedIOEffect", "OrderedDebugEffect") for e in effects)


def ordered_by_lane(effects: Effects) -> bool:
    """Returns whether there is input or output, or something that must run in order."""
    return in_order(effects) or any(type(e).__name__ == "IOEffect" for e in effects)


def calls_back(effects: Effects) -> bool:
    """Returns whether there are Python callbacks with visible effects."""
    return ordered_by_lane(effects) or any(type(e).__name__ == "DebugEffect" for e in effects)


def does_more_than_show(effects: Effects) -> bool:
    """Returns whether there are effects other than showing values on the host."""
    return any(type(e).__name__ != "DebugEffect" for e in effects)


def checks(effects: Effects) -> bool:
    return any(type(e).__name__ == "ErrorEffect" for e in effects)


@contextmanager
def callbacks_fail_silently() -> Iterator[None]:
    """Silences JAX's log of failing callbacks, while it is known that they fail."""
    # The logger is that of a private module, and is found by the module's name.
    logger = logging.getLogger("jax._src.callback")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_reference(x: Value) -> bool:
    return hasattr(jax.typeof(x), "inner_aval")


def makes_references(effects: Effects) -> bool:
    return any(type(e).__name__ == "InternalMutableArrayEffect" for e in effects)


def touches_references(eqn: Eqn) -> bool:
    """Returns whether an equation creates references, or takes one."""
    given = any(hasattr(v.aval, "inner_aval") for v in eqn.invars)
    return given or makes_references(eqn.effects)


def written_inputs(jaxpr: Any) -> set[int]:
    """Returns which inputs of a jaxpr or equation are references that it writes to."""
    writes = [e.input for e in jaxpr.effects if type(e).__name__ in {"WriteEffect", "AccumEffect"}]
    return {i for i, v in enumerate(jaxpr.invars) if v in writes}
