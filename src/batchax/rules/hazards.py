"""What a program could do to lanes that it was not meant for.

Protecting masked lanes costs operations. Most small branches need none, and this
module says which do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from batchax import _compat

# Operations whose derivative does not depend on their operands: a zero cotangent
# stays zero whatever a masked lane holds.
_LINEAR = frozenset(
    """
    add add_any broadcast_in_dim clamp complex concatenate conj convert_element_type copy copy_p
    cumsum dynamic_slice dynamic_update_slice expand_dims gather imag max min neg pad real
    reduce_precision reduce_sum reshape rev safe_lanes scatter-add select_n slice split squeeze
    stack sub tile transpose unstack
    """.split()
)

# Besides those, operations that make a finite number or infinity of finite numbers:
# masked lanes can run them as they are without making a NaN.
_TOTAL = frozenset(
    """
    abs argmax argmin asinh atan cbrt ceil cos cosh cummax cummin dot_general eq erf erfc exp
    exp2 expm1 floor ge gt integer_pow is_finite le logistic lt mul ne reduce_and reduce_max
    reduce_min reduce_or reduce_prod round sign sin sinh sort square stop_gradient tan tanh
    """.split()
)

# Those that, of numbers that are not enormous, make numbers that are not: what they return,
# and their derivatives, are bounded, or sums of products of operands. A gather is not one,
# as it makes a NaN of an index out of bounds.
_MODERATE = frozenset(
    """
    add add_any argmax argmin atan broadcast_in_dim clamp concatenate convert_element_type copy
    copy_p cos dim_as_value dot_general dynamic_slice dynamic_update_slice eq erf expand_dims ge
    gt iota is_finite le logistic lt max min mul ne neg not pad reduce_max reduce_min reduce_sum
    reshape rev select_n sign sin slice split squeeze stack stop_gradient sub tanh tile transpose
    unstack
    """.split()
)

# Linear where one operand is a number written in the program: which operand may vary.
_LINEAR_IN = {"mul": (0, 1), "div": (0,)}

# Programs inside these are looked at by themselves.
_TRANSPARENT = frozenset("jit pjit closed_call core_call cond eval_jaxpr checkpoint scan".split())

_CALLS = frozenset("jit pjit closed_call core_call eval_jaxpr checkpoint".split())

_LOOPS = frozenset({"scan", "while", "bounded_loop"})
_CALLBACKS = frozenset({"pure_callback", "io_callback"})
# What the batching rule of a user's will do is not known: a loop, perhaps.
_BY_RULE = frozenset({"custom_batched_call", "custom_vmap_call"})
_ENDLESS = frozenset({"while", "bounded_loop"}) | _CALLBACKS | _BY_RULE
_COLLECTIVES_WITHOUT_EFFECT = frozenset({"ppermute", "pbroadcast", "pbroadcast_dynamic"})


@dataclass(frozen=True)
class Hazards:
    """What may go wrong in masked lanes.

    Attributes:
      nonlinear: a derivative depends on values: NaN or inf may reach gradients.
      partial: an operation without a value for some operands, such as a logarithm.
      immoderate: an operation that may make infinity, or a NaN, of numbers that are not
        enormous.
      endless: a loop that ends on values, or a callback: it must not see operands
        of lanes that do not run it.
      costly: a loop or a callback: worth skipping when no lane runs it.
      collective: lanes see each other. A collective counts all lanes of its
        axis, those that drop the result too, as in ``jax.vmap``: their operands
        stay as they are, and the program runs even if no lane needs it.
    """

    nonlinear: bool
    partial: bool
    immoderate: bool
    endless: bool
    costly: bool
    collective: bool


_known: weakref.WeakKeyDictionary[Any, Hazards] = weakref.WeakKeyDictionary()


def hazards(jaxpr: Any) -> Hazards:
    """The hazards of `jaxpr`, programs inside it included."""
    if jaxpr not in _known:
        eqns = list(_equations(jaxpr))
        names = set(map(_name, eqns))
        _known[jaxpr] = Hazards(
            nonlinear=not all(map(_is_linear, eqns)),
            partial=not all(map(_is_total, eqns)),
            immoderate=not names <= _MODERATE | _CALLS,
            endless=not names.isdisjoint(_ENDLESS),
            costly=not names.isdisjoint(_LOOPS | _CALLBACKS | _BY_RULE),
            collective=any(map(_is_collective, eqns)),
        )
    return _known[jaxpr]


def is_endless(eqn: Any) -> bool:
    """Whether an equation must not see operands of lanes that do not run it; see `Hazards`."""
    programs = _programs(tuple(eqn.params.values()))
    return _name(eqn) in _ENDLESS or any(hazards(program).endless for program in programs)


def find_collective(jaxpr: Any) -> Any:
    """An equation of `jaxpr`, or of a program inside it, in which lanes meet, or None."""
    if not hazards(jaxpr).collective:
        return None
    return next(filter(_is_collective, _equations(jaxpr)))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for program in _programs(tuple(eqn.params.values())):
            yield from _equations(program)


def _programs(value: Any) -> Iterator[Any]:
    """The jaxprs in a parameter: itself, or in tuples of any type."""
    if isinstance(value, _compat.JAXPR_TYPES):
        yield value.jaxpr if isinstance(value, _compat.ClosedJaxpr) else value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _programs(item)


def _name(eqn: Any) -> str:
    """The name of its primitive; a bounded loop whose steps are counted is like a scan."""
    name = eqn.primitive.name
    return "scan" if name == "bounded_loop" and eqn.params["test"] is None else name


def _is_linear(eqn: Any) -> bool:
    name = _name(eqn)
    if name in _LINEAR or name in _TRANSPARENT:
        return True
    varying = [i for i, v in enumerate(eqn.invars) if not _is_number(v)]
    if not any(_is_inexact(eqn.invars[i]) for i in varying):
        return True
    if not any(map(_is_inexact, eqn.outvars)):
        return True
    return len(varying) == 1 and varying[0] in _LINEAR_IN.get(name, ())


def _is_total(eqn: Any) -> bool:
    if eqn.primitive.name == "integer_pow":
        return eqn.params["y"] >= 0
    return _name(eqn) in _TOTAL or _is_linear(eqn)


def _is_number(v: Any) -> bool:
    return isinstance(v, Literal) and bool(np.all(np.isfinite(v.val)))


def _is_inexact(v: Any) -> bool:
    dtype = getattr(v.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def _is_collective(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in _COLLECTIVES_WITHOUT_EFFECT:
        return True
    inside = any(True for _ in _programs(tuple(eqn.params.values())))
    return not inside and name != "axis_index" and bool(_compat.named_axes(eqn.effects))
