"""Which batching rule serves which primitive.

A rule is a function ``rule(axis, args, axes, **params) -> (out, out_axis)``,
or ``(outs, out_axes)`` for a primitive with several results. `axis` is the
`Axis` being mapped, `args` the operands (batched ones carry an extra axis),
`axes` the position of that axis in each operand or None, `params` the
primitive's own parameters, which describe one example.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from jax.interpreters import batching

from batchax import _compat
from batchax.engine.axis import Axis
from batchax.errors import ArgumentTypeError

Rule = Callable[..., tuple[Any, Any]]

# Keyed by the primitive, or by name for primitives JAX defines but does not
# export until the module that owns them is imported.
_rules: dict[_compat.Primitive | str, Rule] = {}
_origins: dict[_compat.Primitive | str, str] = {}
_own: set[_compat.Primitive] = set()


def register_rule(primitive: _compat.Primitive | str) -> Callable[[Rule], Rule]:
    """Decorator that makes a function the batching rule of `primitive`.

    Args:
      primitive: a ``jax.extend.core.Primitive``, or the name of one.

    Returns:
      A decorator that registers its argument and returns it unchanged. A later
      registration for the same primitive replaces an earlier one.

    Example:
      A primitive whose per-example operand is a vector::

        @bx.register_rule(my_norm_p)
        def _(axis, args, axes):
            x = bx.axis_to_front(axis, args[0], axes[0])
            return my_batched_norm_p.bind(x), 0
    """
    if not isinstance(primitive, (_compat.Primitive, str)):
        raise ArgumentTypeError(
            "register_rule expects a primitive (jax.extend.core.Primitive) or the name of "
            f"one, got {type(primitive).__name__}: write @register_rule(my_primitive)."
        )

    def decorate(rule: Rule) -> Rule:
        _rules[primitive] = rule
        _origins[primitive] = _module_outside_the_engine()
        return rule

    return decorate


def register_own_rule(
    primitive: _compat.Primitive, may_name_axis: bool = False
) -> Callable[[Rule], Rule]:
    """As `register_rule`, for a primitive of batchax's own: ``jax.vmap`` has the rule, too.

    Args:
      primitive: a primitive of batchax's own.
      may_name_axis: whether it may contain a collective over the axis being mapped, and
        have the rule called for it, too, where no operand is batched.
    """

    def decorate(rule: Rule) -> Rule:
        def for_jax(axis_data: Any, args: Any, axes: Any, **params: Any) -> Any:
            axis = _compat.axis_from(axis_data, Axis)
            if all(a is None for a in axes) and (axis.name is None or not may_name_axis):
                out = primitive.bind(*args, **params)  # JAX asks of each equation, batched or not
                return out, [None] * len(out) if primitive.multiple_results else None
            return rule(axis, args, axes, **params)

        batching.fancy_primitive_batchers[primitive] = for_jax
        _own.add(primitive)
        return register_rule(primitive)(rule)

    return decorate


def is_own(primitive: _compat.Primitive) -> bool:
    """Whether `primitive` is one of batchax's own."""
    return primitive in _own


def _module_outside_the_engine() -> str:
    """The module that asked for a rule, be it by itself or through a maker of rules."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("batchax.engine."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


def find_rule(primitive: _compat.Primitive) -> Rule | None:
    """The rule registered for `primitive`, or None."""
    return _rules.get(primitive) or _rules.get(primitive.name)


def rule_origin(primitive: _compat.Primitive) -> str | None:
    """The module whose rule serves `primitive`, or None when there is no rule."""
    return _origins.get(primitive) or _origins.get(primitive.name)
