"""What a batching rule written by a user returned: checked, and said in the user's terms.

A rule of a primitive's (`register_rule`) and one of a function's (`custom_vmap`) say in their own
ways where the lanes of a result are; what results have to be is the same for both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import mapped_aval

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.jaxprs.spoken import show
from batchax.jaxprs.words import Aval, Value
from batchax.kernel.axis import Axis, Position, inserted


def describe_rule(rule: Any) -> str:
    """A rule as messages name it: with the file and line it was written at."""
    name = getattr(rule, "__qualname__", type(rule).__name__)
    code = getattr(inspect.unwrap(rule), "__code__", None)
    return f"`{name}`" if code is None else f"`{name}` ({code.co_filename}:{code.co_firstlineno})"


def describe_returned(out: Any) -> str:
    """What a function returned, for messages that expect a tuple."""
    if isinstance(out, jax.Array):
        return f"one array of shape {out.shape}"
    what = f"a {type(out).__name__}"
    return f"{what} of length {len(out)}" if isinstance(out, (tuple, list)) else what


def split_pair(where: str, result: Any, form: str, meaning: str) -> tuple[Any, Any]:
    """The two things that a rule has to return.

    Args:
      where: the rule, and what it is for, as the subject of a sentence.
      result: what it returned.
      form: what the two are called.
      meaning: what the second one says.
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
    """The results of a rule, if they fit what one example gives.

    Args:
      size: how many lanes there are.
      where: the rule, and what it is for, as the subject of a sentence.
      returned_by: what gives those types for one example.
      results: of each its name, the result, how its rule said where the lanes are, where that
        is, and the type that one example has.
      meaning: what a rule has to say of where the lanes are.

    Raises:
      AxisError: some do not; all of them are listed.
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


def _matched(size: int, leaf: Any, said: str, position: Position, aval: Aval) -> tuple[Any, str]:
    """A result of a rule with the type it must have, and what is wrong with it."""
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
    args: Sequence[Value],
    axes: Sequence[Position],
    params: dict[str, Any],
    types: Sequence[Aval] | None = None,
) -> tuple[list[Any], list[Position]]:
    """The results of a user's rule for a primitive, always as lists.

    Args:
      axis: the axis being mapped.
      primitive: what the rule is for.
      rule: the rule.
      args, axes, params: what it is given.
      types: of the results for one example, if they are known.

    Raises:
      ArgumentTypeError: it returned something of the wrong form.
      AxisError: it returned arrays that do not fit.
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
    args: Sequence[Value],
    axes: Sequence[Position],
    params: dict[str, Any],
) -> Sequence[Any]:
    """The types of what a primitive returns for one example."""

    def one_example(*xs: Any) -> Any:
        out = primitive.bind(*xs, **primitive.get_bind_params(params))
        return out if primitive.multiple_results else [out]

    types = map(jax.typeof, args)
    examples = [
        t if a is None else mapped_aval(axis.size, a, t) for t, a in zip(types, axes, strict=True)
    ]
    return _compat.stage(one_example, examples).out_avals


_MEANING = (
    "The position says where a result has the lanes; it is None for a result that is the same for "
    "all lanes, which has the shape it has for one example."
)


def _position(where: str, name: str, position: Any, aval: Aval) -> Position:
    """Where a rule says the lanes are, counted from the front."""
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
            f"{where} returned {name} = {position}, but with the lanes that result has {ndim} "
            f"dimension{'s' if ndim > 1 else ''}, of which the last is {ndim - 1}. {_MEANING}"
        )
    return int(position) % ndim


@contextmanager
def noting(text: str) -> Iterator[None]:
    """Adds a note to an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(text)
        raise
