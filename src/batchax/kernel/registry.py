"""Which batching rule serves which primitive.

A rule is a function ``rule(axis, args, axes, **params) -> (out, out_axis)``,
or ``(outs, out_axes)`` for a primitive with several results. `axis` is the
`Axis` being mapped, `args` the operands (batched ones carry an extra axis),
`axes` the position of that axis in each operand or None, `params` the
primitive's own parameters, which describe one example.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import jax
from jax.interpreters import batching

from batchax import _compat
from batchax.errors import ArgumentTypeError, RuleReplacedWarning
from batchax.jaxprs.primitive_facts import UNKNOWN, facts_of, forget
from batchax.jaxprs.spoken import show
from batchax.kernel.axis import Axis, names_in
from batchax.kernel.rule_results import describe_rule, run_rule

Rule = Callable[..., tuple[Any, Any]]
R = TypeVar("R", bound=Rule)


@dataclass(frozen=True)
class Registered:
    """A rule in the table.

    Attributes:
      rule: the rule.
      origin: the module that asked for it.
      is_users: whether that module is not one of batchax's. What the rule returns is then checked.
      number: which registration it was: the later one has the larger number.
      own: the entry of batchax's own that a user's rule replaced.
      looks_ahead: whether it takes a keyword `place`: the run through a program, and the equation.
    """

    rule: Rule
    origin: str
    is_users: bool
    number: int
    looks_ahead: bool = False
    own: Registered | None = None


# Keyed by the primitive, or by name for primitives JAX defines but does not
# export until the module that owns them is imported.
_rules: dict[_compat.Primitive | str, Registered] = {}
# Of primitives with a rule of batchax's own: that in JAX's table, which is JAX's.
_of_jax: dict[_compat.Primitive, Any] = {}
_UNKNOWN = object()
_count = 0
_lock = threading.RLock()


@overload
def register_rule(primitive: _compat.Primitive | str) -> Callable[[R], R]: ...
@overload
def register_rule(primitive: _compat.Primitive | str, rule: R) -> R: ...
@_compat.api_boundary
def register_rule(primitive: _compat.Primitive | str, rule: Any = None) -> Any:
    """Makes a function the batching rule of `primitive`: a decorator, or a call with both.

    Args:
      primitive: A ``jax.extend.core.Primitive``, or the name of one.
      rule: The rule. Default: None, which returns a decorator.

    Returns:
      The rule, unchanged; without `rule`, a decorator that registers its argument and returns
      it. A later registration for the same primitive replaces an earlier one, and
      `unregister_rule` removes both.

    The rule serves ``jax.vmap``, too, and what is made of it (``jax.lax.map`` with a
    ``batch_size``, ``jax.jacfwd``, ``jax.hessian``), if JAX has no rule for the primitive.
    A rule that JAX has, or gets later, is left to it, and batchax uses this one. Of a
    primitive known by name only, JAX has to be told the rule in its own way.

    It is called where an operand is batched, or where the primitive's parameters name the
    axis. What it returns is checked: an exception of batchax's says what is wrong with it.

    Raises:
      ArgumentTypeError: `primitive` is none, or the rule cannot be called in that form.

    Warns:
      RuleReplacedWarning: batchax has a rule for the primitive, which is replaced.
      UserWarning: JAX knows no primitive of that name. The rule waits for one.

    Example:
      >>> from jax.extend.core import Primitive
      >>> reverse_p = Primitive("reverse")  # of a vector
      >>> _ = reverse_p.def_impl(lambda x: x[::-1]), reverse_p.def_abstract_eval(lambda x: x)
      >>> @bx.register_rule(reverse_p)
      ... def _(axis, args, axes):
      ...     x = bx.axis_to_front(axis, args[0], axes[0])
      ...     return x[:, ::-1], 0
      >>> print(bx.vmap(reverse_p.bind)(jnp.array([[1, 2, 3], [4, 5, 6]])))
      [[3 2 1]
       [6 5 4]]
    """
    if not isinstance(primitive, (_compat.Primitive, str)):
        raise ArgumentTypeError(
            "register_rule expects a primitive (jax.extend.core.Primitive) or the name of "
            f"one, got {type(primitive).__name__}: write @register_rule(my_primitive)."
        )

    def decorate(rule: R) -> R:
        global _count
        _check_form(primitive, rule)
        origin = _module_outside_the_kernel()
        is_users = not origin.startswith("batchax.")
        if is_users and isinstance(primitive, str) and _compat.find_primitive(primitive) is None:
            _warn_of_name(primitive)
        with _lock:
            entry = Registered(rule, origin, is_users, _count + 1)
            if entry.is_users:
                _take_over(primitive, rule)
                before = _rules.get(primitive)
                own = before.own if before is not None and before.is_users else before
                entry = replace(entry, own=own)
            _rules[primitive] = entry
            if not entry.is_users:
                _note_rule_of_jax(primitive)
            if entry.is_users and isinstance(primitive, _compat.Primitive):
                _serve_jax(primitive, replace=False)
            # Last: what another thread built before this is remembered under the old count, and so
            # is not taken for something built by the new rule.
            _count += 1
        return rule

    return decorate if rule is None else decorate(rule)


@_compat.api_boundary
def unregister_rule(primitive: _compat.Primitive | str) -> None:
    """Undoes `register_rule`: `primitive` is batched as it was before any call of it.

    A rule of batchax's own that was replaced serves again. What ``jax.vmap`` got from
    `register_rule` is taken back, too, and so is what `vectorized`, `broadcasting` or `reducing`
    said of the primitive.

    Args:
      primitive: The primitive, or its name. Rules registered under either are removed.

    Raises:
      ArgumentTypeError: No rule was registered for it.

    Example:
      >>> from jax.extend.core import Primitive
      >>> twice_p = Primitive("twice")
      >>> _ = twice_p.def_impl(lambda x: 2 * x), twice_p.def_abstract_eval(lambda x: x)
      >>> _ = bx.register_rule(twice_p, lambda axis, args, axes: (3 * args[0], axes[0]))
      >>> print(bx.vmap(twice_p.bind)(jnp.arange(3)))
      [0 3 6]
      >>> bx.unregister_rule(twice_p)
    """
    global _count
    by_itself = _compat.find_primitive(primitive) if isinstance(primitive, str) else primitive
    name = primitive if by_itself is None else getattr(by_itself, "name", None)
    with _lock:
        entries = {k: _rules.get(k) for k in (by_itself, name) if k is not None}
        users = {k: entry for k, entry in entries.items() if entry is not None and entry.is_users}
        if not users:
            raise ArgumentTypeError(
                f"unregister_rule: no rule was registered for {show(primitive)}. Give the "
                "primitive, or the name, that register_rule was given."
            )
        for key, entry in users.items():
            if entry.own is None:
                del _rules[key]
            else:
                _rules[key] = entry.own
        if by_itself is not None and find(by_itself) is None:
            forget(by_itself)
            in_jax = batching.fancy_primitive_batchers.get(by_itself)
            if getattr(in_jax, "__module__", None) == __name__:  # from `_serve_jax`
                del batching.fancy_primitive_batchers[by_itself]
        jax.clear_caches()  # JAX keeps programs that were batched by the rule
        _count += 1


def _check_form(primitive: _compat.Primitive | str, rule: Rule) -> None:
    """Refuses a rule that cannot be called as one: in the form of JAX's own, say.

    Raises:
      ArgumentTypeError: it is no function, or takes other positional arguments.
    """
    if not callable(rule):
        raise ArgumentTypeError(
            f"register_rule: a rule for `{primitive}` must be a function, got {show(rule)}."
        )
    try:
        parameters = inspect.signature(rule).parameters.values()
    except (TypeError, ValueError):
        return
    kinds = inspect.Parameter
    if any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        return
    by_place = [p for p in parameters if p.kind not in (kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD)]
    needed = [p for p in by_place if p.default is kinds.empty]
    if len(by_place) < 3 or needed[:3] != by_place[:3]:
        names = ", ".join(p.name for p in by_place)
        raise ArgumentTypeError(
            f"register_rule: a rule for `{primitive}` is called as rule(axis, args, axes, "
            f"**params), and {describe_rule(rule)} takes ({names}). A rule in the form of "
            "jax.interpreters.batching, rule(args, dims, **params), needs only `axis` in front: "
            "it has the size and the name that are mapped."
        )


def _warn_of_name(name: str) -> None:
    """Says that JAX knows no primitive of this name: it may be misspelled, or yet to come."""
    near = difflib.get_close_matches(name, _compat.primitives_by_name(), 3)
    hint = f" Did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else ""
    warnings.warn_explicit(
        f"register_rule: JAX knows no primitive `{name}`.{hint} The rule waits for one of that "
        "name. If there will be one, import the module that makes it first, or give the primitive "
        "itself: register_rule(primitive).",
        UserWarning,
        *_compat.user_file_and_line(_compat.current_source()),
    )


def _take_over(primitive: _compat.Primitive | str, rule: Rule) -> None:
    """Forgets what was made of the rule that `rule` replaces, if there is one."""
    declared = _compat.find_primitive(primitive) if isinstance(primitive, str) else primitive
    replaced = _rules.get(primitive) if declared is None else find(declared)
    if replaced is None:
        return
    if not replaced.is_users:
        warnings.warn_explicit(
            f"batchax has a batching rule for the primitive `{primitive}` ({replaced.origin}), "
            f"which is replaced by {describe_rule(rule)} for the whole process.",
            RuleReplacedWarning,
            *_compat.user_file_and_line(_compat.current_source()),
        )
    elif declared is not None:
        forget(declared)
    jax.clear_caches()  # JAX keeps programs that were batched by the old rule


def register_looking(primitive: _compat.Primitive | str) -> Callable[[Rule], Rule]:
    """As `register_rule`, for a rule of batchax's own that takes a keyword `place`.

    It is the run through the program and the equation, or None, as ``jax.vmap`` knows neither.
    """

    def decorate(rule: Rule) -> Rule:
        register_rule(primitive)(rule)
        with _lock:
            _rules[primitive] = replace(_rules[primitive], looks_ahead=True)
        return rule

    return decorate


def serve_own(
    primitive: _compat.Primitive, rule: Rule, may_name_axis: bool, looks_ahead: bool
) -> None:
    """As `register_rule`, for a primitive of batchax's own: ``jax.vmap`` has the rule, too.

    Args:
      primitive: a primitive of batchax's own.
      rule: its rule.
      may_name_axis: whether it may contain a collective over the axis being mapped, and
        have the rule called for it, too, where no operand is batched.
      looks_ahead: whether the rule is given its place in the program, where that is known
        (``jax.vmap`` does not know it); see `Registered`.
    """
    _serve_jax(primitive, replace=True, may_name_axis=may_name_axis)
    register_rule(primitive)(rule)
    with _lock:
        entry = replace(_rules[primitive], origin=rule.__module__, looks_ahead=looks_ahead)
        _rules[primitive] = entry


def _serve_jax(primitive: _compat.Primitive, replace: bool, may_name_axis: bool = False) -> None:
    """Lets ``jax.vmap`` batch `primitive` by the rule in the table, whichever that is then."""

    def for_jax(axis_data: Any, args: Any, axes: Any, /, **params: Any) -> Any:
        axis = _compat.axis_from(axis_data, Axis)
        named = axis.name is not None and (
            may_name_axis or (is_foreign(primitive) and axis.name in names_in(params))
        )
        if all(a is None for a in axes) and not named:
            out = primitive.bind(*args, **params)  # JAX asks of each equation, batched or not
            return out, [None] * len(out) if primitive.multiple_results else None
        entry = find(primitive)
        assert entry is not None
        if not entry.is_users:
            return entry.rule(axis, args, axes, **params)
        outs, out_axes = run_rule(axis, primitive, entry.rule, args, axes, params)
        return (outs, out_axes) if primitive.multiple_results else (outs[0], out_axes[0])

    if replace or primitive not in batching.fancy_primitive_batchers:
        batching.fancy_primitive_batchers[primitive] = for_jax


def _note_rule_of_jax(primitive: _compat.Primitive | str) -> None:
    """Keeps what JAX's table has for `primitive` now: what is there later, a user put there."""
    declared = _compat.find_primitive(primitive) if isinstance(primitive, str) else primitive
    if declared is not None:
        rule = batching.fancy_primitive_batchers.get(declared)
        _of_jax[declared] = rule if rule is None or _compat.is_jaxs_rule(rule) else None


def is_replaced_in_jax(primitive: _compat.Primitive) -> bool:
    """Whether ``jax.vmap`` batches `primitive` by a rule that a user put into JAX's table."""
    of_jax = _of_jax.get(primitive, _UNKNOWN)
    now = batching.fancy_primitive_batchers.get(primitive)
    if now is of_jax or of_jax is _UNKNOWN or now is None:
        return False
    return of_jax is not None or not _compat.is_jaxs_rule(now)


def _module_outside_the_kernel() -> str:
    """The module that asked for a rule, be it by itself or through a maker of rules."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("batchax.kernel."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


def find(primitive: _compat.Primitive) -> Registered | None:
    """What is registered for `primitive`, by itself or by name: the later of the two.

    None, too, for a primitive whose rule in JAX's table a user replaced: ``jax.vmap`` batches it.
    """
    by_itself, by_name = _rules.get(primitive), _rules.get(primitive.name)
    if by_itself is None or by_name is None:
        entry = by_itself or by_name
    else:
        entry = max(by_itself, by_name, key=lambda entry: entry.number)
    if entry is not None and not entry.is_users and is_replaced_in_jax(primitive):
        return None
    return entry


def is_foreign(primitive: _compat.Primitive) -> bool:
    """Whether a rule not of batchax's own batches `primitive`, and no facts of it are entered."""
    entry = find(primitive)
    if entry is None:
        return _compat.jax_has_rule(primitive)
    return entry.is_users and facts_of(primitive) is UNKNOWN


def registrations() -> int:
    """How many rules have been registered: what was built with fewer may be out of date."""
    return _count


def find_rule(primitive: _compat.Primitive) -> Rule | None:
    """The rule registered for `primitive`, or None."""
    entry = find(primitive)
    return None if entry is None else entry.rule


def rule_origin(primitive: _compat.Primitive) -> str | None:
    """The module whose rule serves `primitive`, or None when there is no rule."""
    entry = find(primitive)
    return None if entry is None else entry.origin
