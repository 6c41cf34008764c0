"""The axis of each leaf of the arguments, from specifications that are prefixes of their pytree.

`in_axes=0`, `in_axes=({"w": None}, 1)` and `out_axes=(0, None)` all describe the batch axis of each
leaf. Such a specification is spread here over the leaves that it covers, with an error that names
the argument if it does not fit.

Leaves may be objects, such as the activation of a model. An axis for a whole pytree is for its
arrays, and all lanes share the other leaves. If a function returns the same object each time that
it is traced, the object is returned as it is.
"""

from __future__ import annotations

import inspect
import numbers
import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import jax
import numpy as np
from jax.core import Tracer

from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import AxisSpec, DictOfBatches, is_container, is_container_spec
from batchax.jaxprs.error_format import count, listed, name_of, show
from batchax.jaxprs.types import AxesTree, Tree, Value, Values


@dataclass
class SpecifiedLeaf:
    """Holds one leaf and what the specification says of it."""

    path: str
    value: Value
    spec: Any
    inside: bool = False  # whether `spec` describes a pytree with this leaf, not the leaf itself


Rebuild = Callable[[Iterator[Any]], Any]
"""Puts a tree together again from replacements for its leaves, in order."""


def spread_specs(
    spec: AxesTree,
    tree: Tree,
    path: str,
    what: str,
    is_spec: Callable[[Any], bool],
    opaque_none: bool = False,
    unit: str = "axis",
    is_leaf: Callable[[Any], bool] = is_container,
    by_name: bool = False,
) -> tuple[list[SpecifiedLeaf], Rebuild]:
    """Spreads the prefix `spec` over the leaves of `tree`; also returns how to rebuild the tree.

    `path`, `what` and `unit` are for messages. With `opaque_none`, a part with specification None
    is one leaf, whatever it is. With `by_name`, a dict in `spec` may name some keys or fields, and
    the others have 0.
    """
    if spec is None and opaque_none:
        return [SpecifiedLeaf(path, tree, None)], lambda values: anew(next(values))
    if spec is None or type(spec) is int or is_spec(spec) or is_container_spec(spec):
        if isinstance(tree, Tracer) or type(tree) is np.ndarray:  # as nearly all arguments are
            return [SpecifiedLeaf(path, tree, spec)], next
        pairs, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
        leaves = [
            SpecifiedLeaf(path + jax.tree_util.keystr(keys), value, spec, bool(keys))
            for keys, value in pairs
        ]
        count = len(leaves)
        return leaves, lambda values: jax.tree_util.tree_unflatten(
            treedef, [next(values) for _ in range(count)]
        )

    if is_container(tree) and type(spec) is type(tree):
        name = type(tree).__name__
        raise AxisError(
            f"{what} gives a {name} for {path}: a batch of those has one batch axis, not one for "
            f"each array that it is made of. Pass the {unit} of {path} itself, such as 0."
        )
    tree = dict(tree) if isinstance(tree, DictOfBatches) else tree
    children, treedef = _one_level(tree)
    child_specs = _specs_by_name(spec, tree, children, path, what) if by_name else None
    if child_specs is None:
        pairs, spec_treedef = _one_level(spec)
        if treedef != spec_treedef:
            raise AxisError(_mismatch(spec, tree, path, what, unit))
        child_specs = [child for _, child in pairs]
    leaves, rebuilds = [], []
    for (keys, child), child_spec in zip(children, child_specs, strict=True):
        below = path + jax.tree_util.keystr(keys)
        child_leaves, rebuild = spread_specs(
            child_spec, child, below, what, is_spec, opaque_none, unit, is_leaf, by_name
        )
        leaves += child_leaves
        rebuilds.append(rebuild)
    return leaves, lambda values: jax.tree_util.tree_unflatten(
        treedef, [rebuild(values) for rebuild in rebuilds]
    )


def _specs_by_name(
    spec: AxesTree, tree: Tree, children: Sequence[Any], path: str, what: str
) -> list[Any] | None:
    """Returns what `spec` says of each part of `tree`, if it is a dict and they have names; else
    None.
    """
    names = [_name_of(keys) for keys, _ in children]
    if type(spec) is not dict or not names or None in names:
        return None
    unknown = [name for name in spec if name not in names]
    if unknown:
        parts = "keys" if isinstance(tree, dict) else "fields"
        raise AxisError(
            f"{what} names {listed(map(repr, unknown))}, but the {parts} of {path} are "
            f"{listed(map(repr, names))}."
        )
    return [spec.get(name, 0) for name in names]


def _name_of(keys: Sequence[Any]) -> str | None:
    """Returns the key of a dict, or the name of a field; None for what is found by its place."""
    match keys[:1]:
        case (jax.tree_util.DictKey(key=name),) | (jax.tree_util.GetAttrKey(name=name),):
            return name
        case _:
            return None


def anew(tree: Tree) -> Tree:
    """Returns `tree` with the same leaves in new containers, as a function under vmap sees it."""
    # Put together where the function is traced: what the function does to a list or dict stays
    # inside, and a tree that knows the trace it was made in, as a module of Flax does, was made in
    # that of the function. What cannot be flattened, such as a dict without an order, is passed as
    # it is.
    try:
        return jax.tree.map(lambda leaf: leaf, tree, is_leaf=is_container)
    except (TypeError, ValueError):
        return tree


def _one_level(tree: Tree) -> tuple[Sequence[Any], Any]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)


def _mismatch(spec: AxesTree, tree: Tree, path: str, what: str, unit: str) -> str:
    return (
        f"{what} does not match {path}: it gives {_describe(spec)} there, but {path} is "
        f"{_describe(tree)}. Pass one {unit} for the whole of {path}, or {what} of the same "
        "structure."
    )


def _describe(tree: Tree) -> str:
    if isinstance(tree, dict):
        return f"a {type(tree).__name__} with keys [{listed(sorted(map(repr, tree)))}]"
    if isinstance(tree, (tuple, list)):
        return f"a {type(tree).__name__} of length {len(tree)}"
    if tree is None:
        return "None"
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return f"an array of shape {tuple(tree.shape)}"
    return f"a {type(tree).__name__}"


def is_object(value: Value, path: str = "") -> bool:
    """Whether a leaf is an object that is not an array, and was not meant as one."""
    # In a list, tuple or dict, a collection, a path, or a number of a type that JAX does not know
    # may be meant as a batch, and so may a string in a list: an axis for them raises. A field of a
    # module is what the module says it is, as in ``equinox.filter_vmap``.
    if looks_like_array(value):
        return False
    if callable(value) or isinstance(value, np.dtype) or _FIELD.match(path):
        return True
    if isinstance(value, (str, bytes)):
        return path.endswith("]") and _ENTRY.search(path) is None
    meant = (numbers.Number, os.PathLike, Iterable, Sized)
    return not isinstance(value, meant)


def looks_like_array(value: Value) -> bool:
    if callable(value) or isinstance(value, np.dtype):  # ``jnp.float32`` has a dtype
        return False
    return is_array(value) or any(hasattr(value, name) for name in _OF_ARRAYS)


_OF_ARRAYS = ("shape", "dtype", "__array__", "__jax_array__", "__dlpack__")
_FIELD = re.compile(r"\w*(\[[^\]]*\])*\.")  # a dot that is not in a key


def is_array(value: Value) -> bool:
    try:
        jax.typeof(value)
    except (TypeError, ValueError):  # of what has a `__jax_array__`, as a batch of rows does
        return False
    return True


def is_flag(value: Value, path: str) -> bool:
    """Whether a leaf of a tree is a bool of Python's, by which a model says how it is to run."""
    # One in a list or tuple may be meant as an entry of an array.
    return isinstance(value, bool) and _ENTRY.search(path) is None


_ENTRY = re.compile(r"\[\d+\]$")


def without_objects(tree: Tree) -> Tree:
    """Returns `tree` with None in place of its objects, for who looks at arrays."""
    # Of leaves alone: a model may be called, and holds arrays.
    return jax.tree_util.tree_map_with_path(
        lambda keys, x: None if is_object(x, jax.tree_util.keystr(keys)) else x, tree
    )


def is_same(x: Value, y: Value) -> bool:
    """Whether two objects are one, or equal strings, which hold no values of a trace."""
    return x is y or (isinstance(x, (str, bytes)) and type(x) is type(y) and x == y)


def check_same(
    objects: Sequence[tuple[str, Any]], again: Callable[[], Sequence[tuple[str, Any]]]
) -> None:
    """Raises an error for objects in outputs that differ when the function is traced once more."""
    if not objects:
        return
    second: list[tuple[str, Any]] = []
    # Another object each time may hold values of a trace, or of a lane.
    jax.eval_shape(lambda: second.extend(again()))
    same = dict(second)
    for path, x in objects:
        if not is_same(x, same.get(path)):
            raise ArgumentTypeError(
                f"the output {path} is of type {type(x).__name__}, not an array, and is another "
                "object each time that the function is traced. Return arrays, numbers, and objects "
                "from outside the function."
            )


@dataclass(frozen=True)
class Terms:
    """Holds how messages speak of what is mapped."""

    lanes: str  # what the mapped axes count
    size: str  # the option that gives their number
    each: str  # when an argument is the same for each of them
    axis: str  # what the new axis of an output is called
    outputs: str  # what the mapped outputs are called
    first: int  # number of the first positional argument that `in_axes` covers


LANES = Terms("lanes", "axis_size", "for all lanes", "batch axis", "out", 0)


STEPS = Terms("steps", "length", "at every step", "axis of the steps", "ys", 1)


def check_in_axes(fun: Callable[..., Any], in_axes: AxesTree, called: str = "vmap") -> None:
    """Raises an error, before any call, for an `in_axes` that no call could satisfy."""
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


def as_a_call(called: str, fun: Callable[..., Any], given: object) -> str:
    """Advises on values passed in place of axes; empty if `given` is not one."""
    name, array = name_of(fun), hasattr(given, "shape") and hasattr(given, "dtype")
    if called == "scan" and (array or isinstance(given, (float, complex))):
        return (
            " The carry and the arrays are given to what scan returns: "
            f"batchax.scan({name})(init, xs)."
        )
    return f" A batch is given to what {called} returns: batchax.{called}({name})(...)." * array


def is_input_spec(spec: object) -> bool:
    """Whether `spec` gives an axis by itself: an int, a kind of axis, or a rule for leaves."""
    return is_position(spec) or isinstance(spec, AxisSpec) or is_rule(spec)


def is_rule(spec: object) -> bool:
    """Whether `spec` is a function from leaves to their axes, not a tree of axes that has calls."""
    return (
        callable(spec)
        and not isinstance(spec, AxisSpec)
        and not is_container_spec(spec)
        and jax.tree_util.all_leaves([spec])
    )


def is_position(spec: object) -> TypeGuard[int]:
    return isinstance(spec, (int, np.integer)) and not isinstance(spec, bool)


def spread_in_axes(
    fun: Callable[..., Any],
    in_axes: AxesTree,
    args: tuple[Value, ...],
    kwargs: dict[str, Any],
    terms: Terms = LANES,
    objects: bool = True,
    is_leaf: Callable[[Any], bool] = is_container,
) -> tuple[list[SpecifiedLeaf], Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Lists the leaves of the arguments, each with what `in_axes` says of it.

    Also returns how to make arguments of values for the leaves. With `objects`, an axis for a tree
    is not that of its leaves that are not arrays.
    """
    specs, keyword_specs = _by_argument(fun, in_axes, args, kwargs, terms)
    leaves: list[SpecifiedLeaf] = []
    rebuilds = []

    def add(name: str, argument: Tree, spec: AxesTree, by_keyword: bool) -> None:
        if type(spec) is int and isinstance(argument, Tracer):  # as most are
            path = ArgumentPath(name, name, by_keyword)
            leaves.append(SpecifiedLeaf(path, argument, spec))
            rebuilds.append(next)
            return
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
        if type(leaf.spec) is int and isinstance(leaf.value, Tracer):  # as most are
            continue
        if objects and _is_shared(leaf):
            leaf.spec = None
        elif is_rule(leaf.spec):
            leaf.spec = _from_callable(leaf)

    def rebuild_all(values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
        left = iter(values)
        rebuilt = [rebuild(left) for rebuild in rebuilds]
        return tuple(rebuilt[: len(args)]), dict(zip(kwargs, rebuilt[len(args) :], strict=True))

    return leaves, rebuild_all


def _is_shared(leaf: SpecifiedLeaf) -> bool:
    """Whether the axis for a tree, or a rule for leaves, leaves this one to all lanes."""
    value, path = leaf.value, leaf.path
    if is_container(value):
        return False
    if is_rule(leaf.spec):  # a rule is for arrays, so a string in a list is not meant as a batch
        return not looks_like_array(value) or (leaf.inside and is_flag(value, path))
    if not (leaf.inside and is_position(leaf.spec)):
        return False
    return is_object(value, path) or is_flag(value, path)


class ArgumentPath(str):
    """Is what messages call a leaf of the arguments; knows which argument that is of."""

    argument: str  # what messages call the argument
    by_keyword: bool  # given by its name: `in_axes` says nothing of it but by name

    def __new__(cls, path: str, argument: str, by_keyword: bool) -> ArgumentPath:
        self = super().__new__(cls, path)
        self.argument, self.by_keyword = argument, by_keyword
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ArgumentPath, (str(self), self.argument, self.by_keyword)


def argument_names(fun: Callable[..., Any], count: int, first: int = 0) -> list[str]:
    """Returns what messages call the positional arguments: the parameters of `fun`, or numbers."""
    if type(fun) is types.FunctionType and not fun.__dict__ and fun.__code__.co_argcount >= count:
        # Its code lists them 20x faster than a signature, which costs a tenth of a call of a small
        # function. Nothing says that they are others' parameters.
        return list(fun.__code__.co_varnames[:count])
    names: list[str] = []
    for name, kind in _positional(fun):
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(count - len(names))]
        else:
            names.append(name)
    names += [f"args[{i + first}]" for i in range(len(names), count)]
    return names[:count]


class _Parameter(NamedTuple):
    """Is the name of a parameter, and its kind by ``inspect``."""

    name: str
    kind: Any


def _positional(fun: Callable[..., Any]) -> list[_Parameter]:
    """Lists the parameters of `fun` that positional arguments are for, as far as can be known."""
    kinds = inspect.Parameter
    if type(fun) is types.FunctionType and not fun.__dict__:
        code = fun.__code__  # as in `argument_names`
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
    in_axes: AxesTree,
    args: tuple[Value, ...],
    kwargs: dict[str, Any],
    terms: Terms,
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Returns what is specified of each positional argument, and of keywords."""
    if isinstance(in_axes, dict):
        return _by_name(fun, in_axes, args), in_axes
    if isinstance(in_axes, (tuple, list)):
        if len(in_axes) == len(args):  # as most have
            return in_axes, {}
        either = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = [name for name, kind in _positional(fun) if kind is either]
        rest = names[len(args) : len(in_axes)]  # given by keyword, if they are given
        if len(in_axes) == len(args) + len(rest) and all(name in kwargs for name in rest):
            return in_axes[: len(args)], dict(zip(rest, in_axes[len(args) :], strict=True))
        which = " after the carry" if terms.first else ""
        raise AxisError(
            f"in_axes has {count(len(in_axes), 'entry', 'entries')}, but the function was "
            f"called with {count(len(args), 'positional argument')}{which}{_by_keyword(kwargs)}. "
            "Pass one entry for each positional argument, and for each parameter after these that "
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
            f"{name_of(fun)!r} cannot be read. Pass a tuple by position."
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


def _from_callable(leaf: SpecifiedLeaf) -> AxesTree:
    axis = leaf.spec(leaf.value)
    if axis is None or (is_input_spec(axis) and not is_rule(axis)) or is_container_spec(axis):
        return axis
    raise ArgumentTypeError(
        f"the callable given in in_axes must return an int or None, except for {leaf.path} it "
        f"returned {show(axis)}."
    )
