"""Axis specifications as prefixes of a tree of arguments or outputs.

`in_axes=0`, `in_axes=({"w": None}, 1)` and `out_axes=(0, None)` all say where
the batch axis of each leaf is; this module spreads such a specification over
the leaves it covers, and says exactly where it does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from batchax.errors import AxisError
from batchax.frontend.containers import DictOfBatches, is_container, is_container_spec
from batchax.jaxprs.spoken import listed
from batchax.jaxprs.words import Value


@dataclass
class SpecifiedLeaf:
    """One leaf and what the specification says of it.

    Attributes:
      path: what messages call it.
      value: the leaf.
      spec: what the specification says of it.
      inside: whether that is said of a tree which it is a leaf of, not of itself.
    """

    path: str
    value: Value
    spec: Any
    inside: bool = False


Rebuild = Callable[[Iterator[Any]], Any]
"""Puts a tree together again from replacements for its leaves, in order."""


def spread_specs(
    spec: Any,
    tree: Any,
    path: str,
    what: str,
    is_spec: Callable[[Any], bool],
    opaque_none: bool = False,
    unit: str = "axis",
    is_leaf: Callable[[Any], bool] = is_container,
    by_name: bool = False,
) -> tuple[list[SpecifiedLeaf], Rebuild]:
    """Spreads the prefix `spec` over the leaves of `tree`.

    Args:
      spec: an axis specification, or a tree of them that is a prefix of `tree`.
      tree: the arguments or outputs.
      path: how the user would write `tree`, for messages.
      what: "in_axes" or "out_axes", for messages.
      is_spec: tells a specification from a tree of them.
      opaque_none: whether a part with specification None is one leaf, whatever
        it is, instead of being taken apart into leaves.
      unit: what a single specification is, for messages.
      is_leaf: tells what is one leaf wherever it is under a single specification.
      by_name: whether a dict in `spec` may name some of the keys of a dict, or of the fields of a
        NamedTuple or dataclass. For the others 0 is specified.

    Returns:
      The leaves with their specifications, and how to rebuild the tree.

    Raises:
      AxisError: `spec` is not a prefix of `tree`.
    """
    if spec is None and opaque_none:
        return [SpecifiedLeaf(path, tree, None)], lambda values: anew(next(values))
    if spec is None or is_spec(spec) or is_container_spec(spec):
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
            f"each array that it is made of. Give the {unit} of {path} itself, such as 0."
        )
    tree = dict(tree) if isinstance(tree, DictOfBatches) else tree
    children, treedef = _one_level(tree)
    child_specs = _by_name(spec, tree, children, path, what) if by_name else None
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


def _by_name(
    spec: Any, tree: Any, children: Sequence[Any], path: str, what: str
) -> list[Any] | None:
    """What `spec` says of each part of `tree`, if it is a dict and they have names; else None."""
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


def _name_of(keys: Sequence[Any]) -> Any:
    """The key of a dict, or the name of a field; None for what is found by its place."""
    match keys[:1]:
        case (jax.tree_util.DictKey(key=name),) | (jax.tree_util.GetAttrKey(name=name),):
            return name
        case _:
            return None


def anew(tree: Any) -> Any:
    """`tree` with the same leaves in new containers, as a function under vmap sees it.

    It is put together where the function is traced. So what the function does to a list or dict
    stays inside, and a tree that knows the trace it was made in, as a module of Flax does, was made
    in that of the function; its leaves are no part of the trace, and a number among them stays
    known. Something that cannot be taken apart, such as a dict without an order, is passed as it
    is.
    """
    try:
        return jax.tree.map(lambda leaf: leaf, tree, is_leaf=is_container)
    except (TypeError, ValueError):
        return tree


def _one_level(tree: Any) -> tuple[Sequence[Any], Any]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)


def _mismatch(spec: Any, tree: Any, path: str, what: str, unit: str) -> str:
    return (
        f"{what} does not match {path}: it gives {_describe(spec)} there, but {path} is "
        f"{_describe(tree)}. Give one {unit} for the whole of {path}, or {what} of the same "
        "structure."
    )


def _describe(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"a {type(tree).__name__} with keys [{listed(sorted(map(repr, tree)))}]"
    if isinstance(tree, (tuple, list)):
        return f"a {type(tree).__name__} of length {len(tree)}"
    if tree is None:
        return "None"
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        return f"an array of shape {tuple(tree.shape)}"
    return f"a {type(tree).__name__}"
