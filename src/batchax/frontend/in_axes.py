"""What `in_axes` says of each leaf of the arguments."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np

from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import is_container, is_container_spec
from batchax.frontend.objects import is_flag, is_object, looks_like_array
from batchax.frontend.parts import AxisSpec
from batchax.frontend.prefixes import SpecifiedLeaf, spread_specs
from batchax.jaxprs.spoken import listed, name_of, show
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


def check_in_axes(fun: Callable[..., Any], in_axes: Any, called: str = "vmap") -> None:
    """Refuses, before any call, an `in_axes` that no call could satisfy.

    Messages say what a call looks like, of the transformation that is `called` so.
    """
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
            + as_a_call(called, fun, in_axes)
        )
    for keys, leaf in jax.tree_util.tree_flatten_with_path(in_axes)[0]:
        if not (is_input_spec(leaf) or is_container_spec(leaf)):
            raise ArgumentTypeError(
                f"in_axes{jax.tree_util.keystr(keys)} must be an int, None or a callable from "
                f"leaves to those; got {show(leaf)}." + as_a_call(called, fun, leaf)
            )


def as_a_call(called: str, fun: Any, given: Any) -> str:
    """How to give values that stand where axes belong; empty if `given` is none."""
    name, array = name_of(fun), hasattr(given, "shape") and hasattr(given, "dtype")
    if called == "scan" and (array or isinstance(given, (float, complex))):
        return (
            " The carry and the arrays are given to what scan returns: "
            f"batchax.scan({name})(init, xs)."
        )
    return f" A batch is given to what {called} returns: batchax.{called}({name})(...)." * array


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
    is_leaf: Callable[[Any], bool] = is_container,
) -> tuple[list[SpecifiedLeaf], Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The leaves of the arguments, each with what `in_axes` says of it.

    Also how to make arguments of what stands for the leaves, in their order. An axis for a tree is
    not said of `objects` in it, which are no arrays, if there may be some. `is_leaf` tells what is
    none of JAX's trees, though it may look like one.

    Raises:
      AxisError: `in_axes` does not fit the arguments.
    """
    specs, keyword_specs = _by_argument(fun, in_axes, args, kwargs, terms)
    leaves: list[SpecifiedLeaf] = []
    rebuilds = []

    def add(name: str, argument: Any, spec: Any, by_keyword: bool) -> None:
        its_leaves, rebuild = spread_specs(
            spec, argument, name, "in_axes", is_input_spec, True, is_leaf=is_leaf
        )
        for leaf in its_leaves:
            leaf.path = ArgumentPath(leaf.path, name, by_keyword)
        leaves.extend(its_leaves)
        rebuilds.append(rebuild)

    names = argument_names(fun, len(args), terms.first)
    for name, arg, spec in zip(names, args, specs, strict=True):
        add(name, arg, spec, False)
    for name, arg in kwargs.items():
        placed = name in keyword_specs and not isinstance(in_axes, dict)
        add(name, arg, keyword_specs.get(name, 0), not placed)
    for leaf in leaves:
        if objects and _is_shared(leaf):
            leaf.spec = None
        elif _is_rule(leaf.spec):
            leaf.spec = _from_callable(leaf)

    def rebuild_all(values: Sequence[Value]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left = iter(values)
        rebuilt = [rebuild(left) for rebuild in rebuilds]
        return tuple(rebuilt[: len(args)]), dict(zip(kwargs, rebuilt[len(args) :], strict=True))

    return leaves, rebuild_all


def _is_shared(leaf: SpecifiedLeaf) -> bool:
    """Whether the axis for a tree, or a rule for leaves, leaves this one to all lanes."""
    value, path = leaf.value, leaf.path
    if is_container(value):
        return False
    if _is_rule(leaf.spec):  # a rule is for arrays, so a string in a list is not meant as a batch
        return not looks_like_array(value) or (leaf.inside and is_flag(value, path))
    if not (leaf.inside and is_position(leaf.spec)):
        return False
    return is_object(value, path) or is_flag(value, path)


class ArgumentPath(str):
    """What messages call a leaf of the arguments; it knows which argument that is of.

    Attributes:
      argument: what they call the argument.
      by_keyword: whether it was given by its name, and `in_axes` says nothing of it but by name.
    """

    argument: str
    by_keyword: bool

    def __new__(cls, path: str, argument: str, by_keyword: bool) -> ArgumentPath:
        self = super().__new__(cls, path)
        self.argument, self.by_keyword = argument, by_keyword
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ArgumentPath, (str(self), self.argument, self.by_keyword)


def argument_names(fun: Callable[..., Any], count: int, first: int = 0) -> list[str]:
    """What messages call the positional arguments of a call: by the parameters of `fun`.

    Args:
      fun: the function; of parameters that cannot be read there are numbers instead.
      count: how many arguments there are.
      first: the number of the first of them.
    """
    names: list[str] = []
    for name, kind in _positional(fun):
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(count - len(names))]
        else:
            names.append(name)
    names += [f"args[{i + first}]" for i in range(len(names), count)]
    return names[:count]


class _Parameter(NamedTuple):
    """The name of a parameter, and its kind by ``inspect``."""

    name: str
    kind: Any


def _positional(fun: Callable[..., Any]) -> list[_Parameter]:
    """The parameters of `fun` that positional arguments are for, as far as can be known."""
    kinds = inspect.Parameter
    if type(fun) is types.FunctionType and not fun.__dict__:
        # Its code has them, in a twentieth of the time that a signature takes, which is a tenth
        # of what a call of a small function costs. Nothing says that they are others' parameters.
        code = fun.__code__
        names, count = code.co_varnames, code.co_argcount
        own = [_Parameter(name, kinds.POSITIONAL_OR_KEYWORD) for name in names[:count]]
        for i in range(code.co_posonlyargcount):
            own[i] = _Parameter(names[i], kinds.POSITIONAL_ONLY)
        if code.co_flags & inspect.CO_VARARGS:
            rest = names[count + code.co_kwonlyargcount]
            own.append(_Parameter(rest, kinds.VAR_POSITIONAL))
        return own
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return []
    by_name = (kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD)
    return [_Parameter(p.name, p.kind) for p in parameters if p.kind not in by_name]


def _by_argument(
    fun: Callable[..., Any],
    in_axes: Any,
    args: tuple[Value, ...],
    kwargs: dict[str, Any],
    terms: Terms,
) -> tuple[Sequence[Any], dict[str, Any]]:
    """What is specified of each positional argument, and of keywords."""
    if isinstance(in_axes, dict):
        return _by_name(fun, in_axes, args), in_axes
    if isinstance(in_axes, (tuple, list)):
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [name for name, kind in _positional(fun) if kind is either]
        rest = names[len(args) : len(in_axes)]  # given by keyword, if they are given
        if len(in_axes) == len(args) + len(rest) and all(name in kwargs for name in rest):
            return in_axes[: len(args)], dict(zip(rest, in_axes[len(args) :], strict=True))
        which = " after the carry" if terms.first else ""
        raise AxisError(
            f"in_axes has {count(len(in_axes), 'entry', 'entries')}, but the function was "
            f"called with {count(len(args), 'positional argument')}{which}{_by_keyword(kwargs)}. "
            "Give one entry for each positional argument, and for each parameter after these that "
            "is given by keyword; what else is given by keyword is mapped over axis 0 (use a dict "
            "by parameter name for another axis)."
        )
    return [in_axes] * len(args), {}


def _by_keyword(kwargs: dict[str, Any]) -> str:
    return f" and {listed(kwargs)} by keyword" if kwargs else ""


def _by_name(
    fun: Callable[..., Any], in_axes: dict[str, Any], args: tuple[Value, ...]
) -> Sequence[Any]:
    specs: list[Any] = []
    for parameter in _positional(fun):
        if len(specs) == len(args):
            break
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
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
        else:
            specs.append(in_axes.get(parameter.name, 0))
    return specs + [0] * (len(args) - len(specs))  # too many: the call itself will say so


def _check_parameter_names(fun: Callable[..., Any], in_axes: dict[str, Any]) -> None:
    try:
        parameters = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        raise ArgumentTypeError(
            "in_axes is a dict by parameter name, but the parameters of "
            f"{name_of(fun)!r} cannot be read; give a tuple by position."
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


def count(n: int, one: str, several: str | None = None) -> str:
    """`n` and what is counted, for messages: "1 entry", "2 values"."""
    return f"{n} {one if n == 1 else several or one + 's'}"
