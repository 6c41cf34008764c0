"""What `in_axes` says of each leaf of the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import numpy as np

from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import is_container_spec
from batchax.frontend.objects import is_object
from batchax.frontend.parts import AxisSpec
from batchax.frontend.prefixes import SpecifiedLeaf, spread_specs
from batchax.jaxprs.words import Value


@dataclass(frozen=True)
class Terms:
    """How messages speak of what is mapped.

    Attributes:
      lanes: what the mapped axes count.
      size: the option that gives their number.
      each: when an argument is the same for each of them.
      axis: what the new axis of an output is called.
      outputs: what the mapped outputs are called.
      first: number of the first positional argument that `in_axes` covers.
    """

    lanes: str
    size: str
    each: str
    axis: str
    outputs: str
    first: int


LANES = Terms("lanes", "axis_size", "for all lanes", "batch axis", "out", 0)


STEPS = Terms("steps", "length", "at every step", "axis of the steps", "ys", 1)


def check_in_axes(fun: Callable[..., Any], in_axes: Any) -> None:
    """Refuses, before any call, an `in_axes` that no call could satisfy."""
    if in_axes is None or is_position(in_axes):
        return
    if isinstance(in_axes, dict):
        _check_parameter_names(fun, in_axes)
    elif not (
        is_input_spec(in_axes) or isinstance(in_axes, (tuple, list)) or is_container_spec(in_axes)
    ):
        raise ArgumentTypeError(
            "in_axes must be an int, None, a tuple or list with an entry for each positional "
            f"argument, a dict by parameter name, or a callable; got {show(in_axes)}."
        )
    for keys, leaf in jax.tree_util.tree_flatten_with_path(in_axes)[0]:
        if not (is_input_spec(leaf) or is_container_spec(leaf)):
            raise ArgumentTypeError(
                f"in_axes{jax.tree_util.keystr(keys)} must be an int, None or a callable from "
                f"leaves to those; got {show(leaf)}."
            )


def is_input_spec(spec: Any) -> bool:
    """Whether `spec` gives an axis by itself: an int, a kind of axis, or a rule for leaves."""
    return is_position(spec) or isinstance(spec, AxisSpec) or _is_rule(spec)


def _is_rule(spec: Any) -> bool:
    """Whether `spec` is a function from leaves to what is to be done with them."""
    return (
        callable(spec)
        and not isinstance(spec, AxisSpec)
        and not is_container_spec(spec)
        and jax.tree_util.all_leaves([spec])
    )


def is_position(spec: Any) -> TypeGuard[int]:
    """Whether `spec` is an int, of Python or NumPy, and not a bool."""
    return isinstance(spec, (int, np.integer)) and not isinstance(spec, bool)


def spread_in_axes(
    fun: Callable[..., Any],
    in_axes: Any,
    args: tuple[Value, ...],
    kwargs: dict[str, Any],
    terms: Terms = LANES,
    objects: bool = True,
) -> tuple[list[SpecifiedLeaf], Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The leaves of the arguments, each with what `in_axes` says of it.

    Also how to make arguments of what stands for the leaves, in their order. An axis for a tree is
    not said of `objects` in it, which are no arrays, if there may be some.

    Raises:
      AxisError: `in_axes` does not fit the arguments.
    """
    specs, keyword_specs, names = _by_argument(fun, in_axes, args, terms)
    leaves: list[SpecifiedLeaf] = []
    rebuilds = []
    for i, (arg, spec) in enumerate(zip(args, specs, strict=True)):
        path = f"args[{i + terms.first}]" + (f" ({names[i]!r})" if i < len(names) else "")
        arg_leaves, rebuild = spread_specs(spec, arg, path, "in_axes", is_input_spec, True)
        leaves += arg_leaves
        rebuilds.append(rebuild)
    for name, arg in kwargs.items():
        arg_leaves, rebuild = spread_specs(
            keyword_specs.get(name, 0), arg, f"kwargs[{name!r}]", "in_axes", is_input_spec, True
        )
        leaves += arg_leaves
        rebuilds.append(rebuild)
    for leaf in leaves:
        if _is_rule(leaf.spec):
            leaf.spec = _from_callable(leaf)
        elif objects and leaf.inside and is_position(leaf.spec) and is_object(leaf.value):
            leaf.spec = None

    def rebuild_all(values: Sequence[Value]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left = iter(values)
        rebuilt = [rebuild(left) for rebuild in rebuilds]
        return tuple(rebuilt[: len(args)]), dict(zip(kwargs, rebuilt[len(args) :], strict=True))

    return leaves, rebuild_all


def _by_argument(
    fun: Callable[..., Any], in_axes: Any, args: tuple[Value, ...], terms: Terms
) -> tuple[Sequence[Any], dict[str, Any], Sequence[str]]:
    """What is specified of each positional argument, and of keywords; and parameters' names.

    Names are those of the positional arguments, if axes go by name: messages have them, too.
    """
    if isinstance(in_axes, dict):
        return _by_name(fun, in_axes, args)
    if isinstance(in_axes, (tuple, list)):
        if len(in_axes) != len(args):
            which = " after the carry" if terms.first else ""
            raise AxisError(
                f"in_axes has {count(len(in_axes), 'entry', 'entries')}, but the function was "
                f"called with {count(len(args), 'positional argument')}{which}. Give one entry for "
                "each positional argument; arguments passed by keyword are mapped over axis 0 "
                "(use a dict by parameter name for another axis)."
            )
        return in_axes, {}, ()
    return [in_axes] * len(args), {}, ()


def _by_name(
    fun: Callable[..., Any], in_axes: dict[str, Any], args: tuple[Value, ...]
) -> tuple[Sequence[Any], dict[str, Any], Sequence[str]]:
    kinds = inspect.Parameter
    parameters = list(inspect.signature(fun).parameters.values())
    specs: list[Any] = []
    names: list[str] = []
    for parameter in parameters:
        if len(specs) == len(args):
            break
        if parameter.kind is kinds.VAR_POSITIONAL:
            rest = len(args) - len(specs)
            spec = in_axes.get(parameter.name, 0)
            if type(spec) not in (tuple, list):  # a named tuple is the axes of a tree
                spec = [spec] * rest
            elif len(spec) != rest:
                raise AxisError(
                    f"in_axes[{parameter.name!r}] has {len(spec)} entries, but {rest} arguments "
                    f"were passed for *{parameter.name}."
                )
            specs += spec
            names += [f"*{parameter.name}"] * rest
        elif parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD):
            specs.append(in_axes.get(parameter.name, 0))
            names.append(parameter.name)
    specs += [0] * (len(args) - len(specs))  # too many: the call itself will say so
    return specs, in_axes, names


def _check_parameter_names(fun: Callable[..., Any], in_axes: dict[str, Any]) -> None:
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            "in_axes is a dict by parameter name, but the parameters of "
            f"{getattr(fun, '__name__', fun)!r} cannot be read; give a tuple by position."
        ) from None
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in in_axes if name not in parameters]
    if unknown:
        raise AxisError(
            f"in_axes names {listed(map(repr, unknown))}, but the parameters of "
            f"{getattr(fun, '__name__', 'the function')!r} are {listed(map(repr, parameters))}. "
            "A dict given as in_axes goes by parameter name; to describe a dict argument write "
            "in_axes=({...},)."
        )


def _from_callable(leaf: SpecifiedLeaf) -> Any:
    axis = leaf.spec(leaf.value)
    if axis is None or (is_input_spec(axis) and not _is_rule(axis)) or is_container_spec(axis):
        return axis
    raise ArgumentTypeError(
        f"the callable given in in_axes must return an int or None, but for {leaf.path} it "
        f"returned {show(axis)}."
    )


def listed(items: Any) -> str:
    """Things one after another, for messages."""
    return ", ".join(str(item) for item in items)


def count(n: int, one: str, several: str | None = None) -> str:
    """`n` and what is counted, for messages: "1 entry", "2 values"."""
    return f"{n} {one if n == 1 else several or one + 's'}"


def show(value: Value) -> str:
    """A value that is not what it should be, for messages."""
    return f"{value!r} of type {type(value).__name__}"
