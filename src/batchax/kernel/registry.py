"""Which batching rule serves which primitive, rules of whole families, and checks of their results.

A rule is a function ``rule(axis, args, axes, **params) -> (out, out_axis)``, or ``(outs,
out_axes)`` for a primitive with several results. `axis` is the `Axis` being mapped, `args` the
operands (batched ones carry an extra axis), `axes` the position of that axis in each operand or
None, `params` the primitive's own parameters, which describe one example.

`vectorized`, `broadcasting`, `reducing` and `leading` register the rule of a primitive that acts on
each element, on elements of several operands that broadcast, that removes dimensions, or that takes
leading batch dimensions. Most primitives need no more, those of JAX and those of users.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import mapped_aval
from jax.interpreters import batching

from batchax import _compat
from batchax._compat import Primitive
from batchax.errors import ArgumentTypeError, AxisError, RuleReplacedWarning
from batchax.jaxprs.error_format import brief, count, listed, show
from batchax.jaxprs.primitive_facts import UNKNOWN, describe, facts_of, forget
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.types import Aval, ClosedJaxpr, Value, Values
from batchax.kernel.axis import (
    Axis,
    Position,
    Positions,
    expand_axis,
    expand_lanes,
    inserted,
    match_axis,
    move_axis,
    names_in,
    sharding_with_axis,
    shift_dims,
)


def describe_rule(rule: Any) -> str:
    """Names a rule in messages, with the file and line of its definition."""
    name = getattr(rule, "__qualname__", type(rule).__name__)
    code = getattr(inspect.unwrap(rule), "__code__", None)
    return f"`{name}`" if code is None else f"`{name}` ({code.co_filename}:{code.co_firstlineno})"


def describe_returned(out: object) -> str:
    """Describes a result in messages that expect a tuple."""
    if isinstance(out, jax.Array):
        return f"one array of shape {out.shape}"
    what = f"a {type(out).__name__}"
    return f"{what} of length {len(out)}" if isinstance(out, (tuple, list)) else what


def split_pair(where: str, result: object, form: str, meaning: str) -> tuple[Any, Any]:
    """Returns the pair that a rule must return, or raises.

    `where` is the subject of the message, `form` names the pair, and `meaning` explains its second
    part.
    """
    if not (isinstance(result, (tuple, list)) and len(result) == 2):
        raise ArgumentTypeError(
            f"{where} must return a pair `{form}`, but it returned "
            f"{describe_returned(result)}. {meaning}"
        )
    return result[0], result[1]


def fitted(
    size: int,
    where: str,
    returned_by: str,
    results: Sequence[tuple[str, Any, str, Position, Any]],
    meaning: str,
) -> list[Any]:
    """Returns the results of a rule, converted to the types that one example implies.

    `results` holds for each its name, value, placement as the rule wrote it, batch axis, and the
    type for one example. Raises AxisError that lists all results of the wrong type.
    """
    matched = [_matched(size, *result[1:]) for result in results]
    wrong = [
        f"  {name}: {problem}"
        for (name, *_), (_, problem) in zip(results, matched, strict=True)
        if problem
    ]
    if wrong:
        raise AxisError(
            f"{where} returned what does not fit what {returned_by} returns for one example:\n"
            + "\n".join(wrong)
            + f"\n{meaning}"
        )
    return [x for x, _ in matched]


def _matched(size: int, leaf: Value, said: str, position: Position, aval: Aval) -> tuple[Any, str]:
    """Converts a result of a rule to its type, or describes the problem."""
    try:
        x = leaf if hasattr(leaf, "aval") else jnp.asarray(leaf)
    except TypeError:
        return leaf, f"a {type(leaf).__name__}, which is not an array"
    got = jax.typeof(x)
    if not hasattr(aval, "dtype"):  # a token
        return x, ""
    shape = aval.shape if position is None else inserted(aval.shape, position, size)
    if got.shape != shape:
        return x, f"with {said} expected shape {shape}, got {got.shape}"
    # Python numbers are converted to any dtype, as JAX does for weak types.
    if got.dtype != aval.dtype and not (isinstance(leaf, (int, float, complex))):
        return x, f"expected dtype {aval.dtype}, got {got.dtype}"
    weak = getattr(aval, "weak_type", False)
    if got.dtype != aval.dtype or getattr(got, "weak_type", False) != weak:
        x = lax.convert_element_type(x, aval.dtype)
        x = _compat.weakly(x) if weak else x
    return x, ""


def run_rule(
    axis: Axis,
    primitive: _compat.Primitive,
    rule: Callable[..., Any],
    args: Values,
    axes: Positions,
    params: dict[str, Any],
    types: Sequence[Aval] | None = None,
) -> tuple[list[Any], list[Position]]:
    """Runs a user's rule and checks its results, which are always lists.

    `types` are those for one example, if known. Raises ArgumentTypeError for a wrong form, and
    AxisError for wrong shapes.
    """
    line = _compat.user_line(_compat.current_source(), running=True)
    if types is None:
        types = _types_for_one(axis, primitive, args, axes, params)
    of = f"the batching rule of the primitive `{primitive}`" + (f" (at {line})" if line else "")
    shown = describe_rule(rule)
    with noting(f"batchax: raised in {shown}, {of}."):
        result = rule(axis, args, axes, **params)
    where = f"{shown}, {of},"
    several = primitive.multiple_results
    form = "outs, out_axes" if several else "out, out_axis"
    outs, out_axes = split_pair(where, result, form, _MEANING)
    if not several:
        outs, out_axes = [outs], [out_axes]
    for name, returned in (("outs", outs), ("out_axes", out_axes)):
        if not (isinstance(returned, (tuple, list)) and len(returned) == len(types)):
            raise ArgumentTypeError(
                f"{where} must return a list of {len(types)} in {name}, one for each result of "
                f"`{primitive}`, but it returned {describe_returned(returned)}. {_MEANING}"
            )
    names = [f"[{i}]" if several else "" for i in range(len(types))]
    placed = [
        _position(where, f"out_ax{'es' if several else 'is'}{name}", a, aval)
        for name, a, aval in zip(names, out_axes, types, strict=True)
    ]
    results = [
        (f"out{'s' if several else ''}{name}", x, f"out_axis {a}", a, aval)
        for name, x, a, aval in zip(names, outs, placed, types, strict=True)
    ]
    return fitted(axis.size, where, f"`{primitive}`", results, _MEANING), placed


def _types_for_one(
    axis: Axis,
    primitive: _compat.Primitive,
    args: Values,
    axes: Positions,
    params: dict[str, Any],
) -> Sequence[Any]:
    def one_example(*xs: Value) -> list[Any]:
        out = primitive.bind(*xs, **primitive.get_bind_params(params))
        # `get_bind_params` restores functions that JAX stores in parameters as jaxprs.
        return out if primitive.multiple_results else [out]

    types = map(jax.typeof, args)
    examples = [
        t if a is None else mapped_aval(axis.size, a, t) for t, a in zip(types, axes, strict=True)
    ]
    return _compat.stage(one_example, examples).out_avals


_MEANING = (
    "The position says where a result has the lanes; it is None for an unbatched result, "
    "which has the shape it has for one example."
)


def _position(where: str, name: str, position: object, aval: Aval) -> Position:
    if position is None:
        return None
    if isinstance(position, bool) or not isinstance(position, (int, np.integer)):
        raise ArgumentTypeError(
            f"{where} must return an int or None as {name}, but it returned "
            f"{show(position)}. {_MEANING}"
        )
    ndim = len(getattr(aval, "shape", ())) + 1
    if not -ndim <= position < ndim:
        raise AxisError(
            f"{where} returned {name} = {position}, but with the lanes that result has "
            f"{count(ndim, 'dimension')}, of which the last is {ndim - 1}. {_MEANING}"
        )
    return int(position) % ndim


@contextmanager
def noting(text: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise


Rule = Callable[..., tuple[Any, Any]]
R = TypeVar("R", bound=Rule)


@dataclass(frozen=True)
class Registered:
    rule: Rule
    origin: str  # the module that registered it
    is_users: bool  # not a module of batchax, so results are checked
    number: int  # larger for later registrations
    # whether it takes `place`: the run through a program, and the equation
    looks_ahead: bool = False
    own: Registered | None = None  # the entry of batchax that a user's rule replaced


# Keyed by the primitive, or by name for primitives JAX defines but does not
# export until the module that owns them is imported.
_rules: dict[_compat.Primitive | str, Registered] = {}
# Of primitives with a rule of batchax: that in JAX's table, which is JAX's.
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
    """Registers the batching rule of a primitive: a decorator, or a call with both.

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

    The rule is called if an operand is batched, or if the parameters of the primitive name the
    axis. batchax checks what it returns. ``jax.vmap`` uses the rule, too, if JAX has none for the
    primitive and `primitive` is not a name. A later registration replaces an earlier one.

    Args:
      primitive: A ``jax.extend.core.Primitive``, or the name of one.
      rule: The rule ``(axis, args, axes, **params) -> (result, axis of the result)``, or lists of
        both. Default: None, which returns a decorator.

    Returns:
      The rule, unchanged; without `rule`, a decorator.

    Raises:
      ArgumentTypeError: `primitive` is not a primitive, or the rule has another form.

    Warns:
      RuleReplacedWarning: batchax has a rule for the primitive, which is replaced.
      UserWarning: JAX has no primitive of that name. The rule waits for one.
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
    """Removes the rule of a primitive that `register_rule` set.

    A replaced rule of batchax is used again. The rule that ``jax.vmap`` got is removed, too, and so
    are registrations by `vectorized`, `broadcasting`, or `reducing`.

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
                f"unregister_rule: no rule was registered for {show(primitive)}. Pass the "
                "primitive, or the name, that you passed to register_rule."
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
    """Raises ArgumentTypeError for a rule that does not take (axis, args, axes, **params)."""
    if not callable(rule):
        raise ArgumentTypeError(
            f"register_rule: a rule for `{primitive}` must be a function, got {show(rule)}."
        )
    try:
        parameters = inspect.signature(rule).parameters.values()
    except (TypeError, ValueError):
        return  # no signature is known, as for some callables in C
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
    """Warns that JAX has no primitive of this name, which may be misspelled."""
    near = difflib.get_close_matches(name, _compat.primitives_by_name(), 3)
    hint = f" Did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else ""
    warnings.warn_explicit(
        f"register_rule: JAX knows no primitive `{name}`.{hint} The rule waits for one of that "
        "name. If there will be one, import the module that makes it first, or pass the primitive "
        "itself: register_rule(primitive).",
        UserWarning,
        *_compat.user_file_and_line(_compat.current_source()),
    )


def _take_over(primitive: _compat.Primitive | str, rule: Rule) -> None:
    """Forgets programs that were built with the rule that `rule` replaces."""
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
    """Registers as `register_rule` a rule of batchax that takes a keyword `place`.

    It is None under ``jax.vmap``, which does not know the program.
    """

    def decorate(rule: Rule) -> Rule:
        register_rule(primitive)(rule)
        with _lock:
            _rules[primitive] = replace(_rules[primitive], looks_ahead=True)
        return rule

    return decorate


def serve_own(primitive: _compat.Primitive, rule: Rule, may_name_axis: bool) -> None:
    """Registers the rule of a primitive of batchax here and in ``jax.vmap``.

    `may_name_axis`: the rule also runs without batched operands, as it may contain a collective.
    """
    _serve_jax(primitive, replace=True, may_name_axis=may_name_axis)
    register_rule(primitive)(rule)
    with _lock:
        _rules[primitive] = replace(_rules[primitive], origin=rule.__module__)


def _serve_jax(primitive: _compat.Primitive, replace: bool, may_name_axis: bool = False) -> None:
    """Lets ``jax.vmap`` batch `primitive` by the current rule in the table."""

    def for_jax(
        axis_data: Any, args: Values, axes: Positions, /, **params: Any
    ) -> tuple[Value | Values, Position | Positions]:
        axis = _compat.axis_from(axis_data, Axis)
        # A collective over the axis must be batched even if no operand is.
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
    """Stores the rule that JAX's table has now: a later one is the user's."""
    declared = _compat.find_primitive(primitive) if isinstance(primitive, str) else primitive
    if declared is not None:
        rule = batching.fancy_primitive_batchers.get(declared)
        _of_jax[declared] = rule if rule is None or _compat.is_jaxs_rule(rule) else None


def is_replaced_in_jax(primitive: _compat.Primitive) -> bool:
    """Returns whether a user replaced the rule of `primitive` in JAX's table."""
    of_jax = _of_jax.get(primitive, _UNKNOWN)
    now = batching.fancy_primitive_batchers.get(primitive)
    if now is of_jax or of_jax is _UNKNOWN or now is None:
        return False
    # JAX registers some rules late, when their module is imported: those are not a user's.
    return of_jax is not None or not _compat.is_jaxs_rule(now)


def _module_outside_the_kernel() -> str:
    """Finds the module that registered a rule, directly or through a helper of the kernel."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("batchax.kernel."):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "")


def find(primitive: _compat.Primitive) -> Registered | None:
    """Finds the rule of `primitive`, registered by object or by name: the later one.

    None if a user replaced its rule in JAX's table, so that ``jax.vmap`` batches it.
    """
    by_itself, by_name = _rules.get(primitive), _rules.get(primitive.name)
    if by_itself is None or by_name is None:
        entry = by_itself or by_name
    else:
        entry = max(by_itself, by_name, key=lambda entry: entry.number)
    if entry is None or entry.is_users:
        return entry
    # Mostly JAX's table has what it had, which settles it.
    same = batching.fancy_primitive_batchers.get(primitive) is _of_jax.get(primitive)
    return entry if same or not is_replaced_in_jax(primitive) else None


def is_foreign(primitive: _compat.Primitive) -> bool:
    """Returns whether `primitive` has a rule that is not batchax's, and no facts."""
    entry = find(primitive)
    foreign = _compat.jax_has_rule(primitive) if entry is None else entry.is_users
    return foreign and facts_of(primitive) is UNKNOWN


def registrations() -> int:
    return _count


def find_rule(primitive: _compat.Primitive) -> Rule | None:
    entry = find(primitive)
    return None if entry is None else entry.rule


def rule_origin(primitive: _compat.Primitive) -> str | None:
    entry = find(primitive)
    return None if entry is None else entry.origin


def vectorized(primitive: Primitive) -> None:
    """Registers a primitive, of operands of one shape, as elementwise.

    It then also runs on all rows of a `Ragged` at once, packed or padded.

    Args:
      primitive: A ``jax.extend.core.Primitive``.

    Example:
      >>> from jax.extend.core import Primitive
      >>> cube_p = Primitive("cube")
      >>> _ = cube_p.def_impl(lambda x: x**3), cube_p.def_abstract_eval(lambda x: x)
      >>> bx.vectorized(cube_p)
      >>> print(bx.vmap(cube_p.bind)(jnp.arange(4)))
      [ 0  1  8 27]
    """

    def rule(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> tuple[Any, Any]:
        if len(args) == 1:
            return _alike(primitive, primitive.bind(*args, **params), axes[0])
        shapes = [example_shape(x, a) for x, a in zip(args, axes, strict=True)]
        if len(set(shapes)) > 1:
            raise ArgumentTypeError(
                f"vectorized is for a primitive whose operands have one shape, and those of "
                f"`{primitive}` have {listed(shapes)}. Use batchax.broadcasting."
            )
        args, position = matched(axis, args, axes)
        return _alike(primitive, primitive.bind(*args, **params), position)

    _register(primitive, rule, "vectorized", elementwise=True)


def broadcasting(primitive: Primitive) -> None:
    """Registers a primitive of several operands as elementwise with broadcasting.

    Dimensions of size one and scalars must broadcast, as for ``jax.lax.add``. The primitive then
    also runs on all rows of a `Ragged` at once, packed or padded.

    Args:
      primitive: A ``jax.extend.core.Primitive``.

    Example:
      >>> from jax.extend.core import Primitive
      >>> hypot_p = Primitive("hypot")
      >>> _ = hypot_p.def_impl(jnp.hypot), hypot_p.def_abstract_eval(lambda x, y: x)
      >>> bx.broadcasting(hypot_p)
      >>> print(bx.vmap(hypot_p.bind, (0, None))(jnp.array([3.0, 0.0]), jnp.float32(4.0)))
      [5. 4.]
    """

    def rule(axis: Axis, args: Values, axes: Positions, /, **params: Any) -> tuple[Any, Any]:
        args, out_axis = aligned(args, axes, axis.columns)
        return _alike(primitive, primitive.bind(*args, **params), out_axis)

    _register(primitive, rule, "broadcasting", elementwise=True)


def reducing(primitive: Primitive, neutral: object = None) -> None:
    """Registers a primitive that removes the dimensions in its parameter `axes`.

    Args:
      primitive: A primitive of one operand, or of several of one shape.
      neutral: A value that does not change the result, such as zero for a sum; or a function from
        the dtype of the operand to one. Rows of a `Ragged` are padded with it and reduced at once.
        Without it, rows are grouped by length.

    Example:
      >>> from jax.extend.core import Primitive
      >>> norm_p = Primitive("norm")  # of a vector
      >>> _ = norm_p.def_impl(lambda x, axes: jnp.sqrt(jnp.sum(x**2, axes)))
      >>> _ = norm_p.def_abstract_eval(lambda x, axes: jax.core.ShapedArray((), x.dtype))
      >>> bx.reducing(norm_p, neutral=0)
      >>> print(bx.vmap(lambda x: norm_p.bind(x, axes=(0,)))(jnp.array([[3.0, 4.0], [0.0, 2.0]])))
      [5. 2.]
    """

    of_dtype = neutral if neutral is None or callable(neutral) else lambda dtype: neutral
    _register(primitive, reducing_rule(primitive), "reducing", reduces=True, neutral=of_dtype)


def reducing_rule(primitive: Primitive) -> Rule:
    """Returns the rule that `reducing` registers."""

    def rule(axis: Axis, args: Values, axes_: Any, /, **params: Any) -> tuple[Any, Any]:
        if "axes" not in params:
            raise ArgumentTypeError(
                "reducing is for a primitive that has the dimensions it removes as a parameter "
                f"`axes`; `{primitive}` has {', '.join(map(repr, params)) or 'no parameters'}."
            )
        args, position = matched(axis, args, axes_) if len(args) > 1 else (args, axes_[0])
        dims = shift_dims(reduced_dims(primitive, params["axes"], args[0].ndim - 1), position)
        out_axis = position - sum(d < position for d in dims)
        if "input_shape" in params:
            params["input_shape"] = args[0].shape
        if "out_sharding" in params:
            sharding = params["out_sharding"]
            params["out_sharding"] = sharding_with_axis(sharding, out_axis, args, axes_)
        return _alike(primitive, primitive.bind(*args, **{**params, "axes": dims}), out_axis)

    return rule


def _register(primitive: Primitive, rule: Callable[..., Any], maker: str, **facts: Any) -> None:
    if not isinstance(primitive, _compat.Primitive):
        found = type(primitive).__name__
        raise ArgumentTypeError(f"{maker} expects a jax.extend.core.Primitive, got {found}.")
    rule.__name__ = rule.__qualname__ = f"batchax.{maker}"  # as messages about it call it
    register_rule(primitive)(rule)
    if is_foreign(primitive):  # those of JAX are in the tables of their families
        describe([primitive], **facts)


def reduced_dims(primitive: Primitive, dims: object, rank: int) -> tuple[int, ...]:
    """Normalizes the dimensions that a `reducing` primitive removes, counted from the front."""
    several = isinstance(dims, (tuple, list))
    if not (several and all(isinstance(d, (int, np.integer)) for d in dims)):
        raise ArgumentTypeError(
            "reducing is for a primitive whose parameter `axes` is a tuple of ints; that of "
            f"`{primitive}` is {brief(dims)}."
        )
    wrong = [d for d in dims if not -rank <= d < rank]
    if wrong:
        raise AxisError(
            f"the parameter `axes` of the primitive `{primitive}` is {dims}, but its operand has "
            f"{count(rank, 'dimension')} for one example."
        )
    return tuple(d % rank for d in dims)


def _alike(primitive: Primitive, out: Value | Values, out_axis: Any) -> tuple[Any, Any]:
    return (out, [out_axis] * len(out)) if primitive.multiple_results else (out, out_axis)


def leading_rule(
    primitive: Primitive,
    ranks: Sequence[int],
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    **params: Any,
) -> tuple[Any, Any]:
    """Batches a primitive that takes the same leading batch dimensions in all operands.

    `ranks` counts the trailing dimensions of each operand that it works on: 2 for a matrix.
    """
    # Where the batch axis may stay: anywhere before the dimensions that the primitive works on.
    in_place = range(np.ndim(args[0]) - (axes[0] is not None) - ranks[0] + 1)
    target = next((a for a in axes if a in in_place), 0)
    args = [match_axis(axis, x, a, target) for x, a in zip(args, axes, strict=True)]
    return _alike(primitive, primitive.bind(*args, **params), target)


def aligned(args: Values, axes: Any, columns: bool = False) -> tuple[list[Any], int]:
    """Moves batch axes to one position, so that operands broadcast against each other.

    Unbatched scalars stay scalars. With `columns`, lanes stay where they are.
    """
    # What has no axis may be a number of Python's.
    ranks = [np.ndim(x) if a is None else len(x.shape) - 1 for x, a in zip(args, axes, strict=True)]
    forms = set(zip(ranks, axes, strict=True)) - {(0, None)}
    if len(forms) == 1:  # aligned as they are: by far the most frequent case
        return list(args), forms.pop()[1]
    rank = max(ranks)
    whole = {a for n, a in forms if n == rank and a is not None}
    # With a single position among the operands of full rank, those need not be moved.
    target = whole.pop() if len(whole) == 1 else common_position(args, axes)
    if target and not columns and _widens(args, axes, rank):
        target = 0  # where products read lanes fastest; moving them costs little then
    out = []
    for x, a, n in zip(args, axes, ranks, strict=True):
        if a is None:
            out.append(expand_axis(x, target) if n else x)
        elif n == rank:
            out.append(move_axis(x, a, target))
        # One number for each lane gets dimensions of size one around its lanes.
        else:
            out.append(expand_lanes(x, target, rank))
    return out, target


def _widens(args: Values, axes: Positions, rank: int) -> bool:
    """Returns whether the result is larger than each operand that has lanes."""
    shapes = [example_shape(x, a) for x, a in zip(args, axes, strict=True)]
    full = (s for s in shapes if len(s) == rank)
    widest = [any(d != 1 for d in ds) for ds in zip(*full, strict=True)]
    wide = (s for s, a in zip(shapes, axes, strict=True) if a is not None and len(s) == rank)
    return not any(all(d != 1 or not w for d, w in zip(s, widest, strict=True)) for s in wide)


def matched(axis: Axis, args: Values, axes: Positions) -> tuple[list[Any], int]:
    target = common_position(args, axes)
    return [match_axis(axis, x, a, target) for x, a in zip(args, axes, strict=True)], target


def example_shape(x: Value, position: Position) -> tuple[int, ...]:
    shape = np.shape(x)
    return shape if position is None else shape[:position] + shape[position + 1 :]


def example_rank(args: Values, axes: Positions) -> int:
    """Returns the largest rank of the operands without their batch axes."""
    return max(np.ndim(x) - (a is not None) for x, a in zip(args, axes, strict=True))


def common_position(args: Values, axes: Positions) -> int:
    """Chooses the batch axis that moves the least data. Only operands of the largest rank count."""
    ndim = example_rank(args, axes) + 1
    full = [(x, a) for x, a in zip(args, axes, strict=True) if a is not None and x.ndim == ndim]
    positions = {a for _, a in full}
    if len(positions) <= 1:
        return positions.pop() if positions else 0
    # Counted in dimensions that are not of size one, as sizes may be symbolic.
    weight = Counter()
    for x, a in full:
        weight[a] += sum(d != 1 for d in x.shape)
    return min(weight, key=lambda a: (-weight[a], a))  # results are mostly wanted in front


def call_key(axis: Axis, program: ClosedJaxpr, *rest: Hashable) -> Hashable:
    """Returns a key for programs that compute the same in the same context.

    `rest` is what else the call depends on, such as argument types.
    """
    # A call outside of `jit` traces its function each time, so the program is compared by value.
    return axis, value_key(program), registrations(), _compat.trace_context(), *rest
