"""`stack` and `unstack`: a list of models or states as one with a leading axis, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from batchax import _compat
from batchax.errors import ArgumentTypeError, AxisError
from batchax.frontend.containers import BatchOfRows, is_container
from batchax.frontend.in_axes import is_array, is_flag
from batchax.frontend.options import checked_list
from batchax.jaxprs.error_format import brief
from batchax.jaxprs.types import Tree, Value


@_compat.api_boundary
def stack(trees: Sequence[Any]) -> Tree:
    """Stacks a list of pytrees along a new leading axis.

    Example:
      >>> models = [{"w": jnp.full((3, 2), i), "name": "linear"} for i in range(4)]
      >>> bx.stack(models)["w"].shape
      (4, 3, 2)
      >>> apply = lambda w, x: w @ x
      >>> bx.vmap(apply, (0, None))(bx.stack(models)["w"], jnp.ones(2)).shape
      (4, 3)

    Args:
      trees: Pytrees of one structure, such as models or states. Corresponding arrays and numbers
        have one shape and dtype. Other leaves (functions, strings), and Python bools, must be the
        same in all, and are kept.

    Returns:
      A pytree of that structure, whose arrays have shape ``(len(trees), ...)``.

    Raises:
      AxisError: (a ValueError) The list is empty; or two pytrees differ in structure, or in the
        shape, dtype, or value of a leaf, which the message names.
      ArgumentTypeError: (a TypeError) A leaf is a `Ragged`, a sparse matrix, or another container;
        or `trees` is not a list.
    """
    trees = checked_list("stack", "trees", trees)
    if not trees:
        raise AxisError("stack needs at least one tree: without any, there is no structure.")
    flat = [_leaves(f"stack: trees[{i}]", tree) for i, tree in enumerate(trees)]
    (first, structure), *_ = flat
    for i, (_, other) in enumerate(flat):
        if other != structure:
            # Static data of pytrees may hold a shape: then the error about a leaf is clearer.
            _check_alike(first, flat[i][0], i)
            raise AxisError(structures_differ("stack: trees", trees, i))
    for i, (others, _) in enumerate(flat):
        _check_alike(first, others, i)
    stacked = []
    for k, (keys, leaf) in enumerate(first):
        leaves = [pairs[k][1] for pairs, _ in flat]
        flag = is_flag(leaf, jax.tree_util.keystr(keys)) and all(x is leaf for x in leaves)
        same = flag or not is_array(leaf)
        stacked.append(leaf if same else jnp.stack(leaves))
    return jax.tree.unflatten(structure, stacked)


@_compat.api_boundary
def unstack(tree: Tree) -> list[Any]:
    """Splits a pytree along the leading axis of its arrays: the inverse of `stack`.

    Args:
      tree: A pytree whose arrays have shapes ``(n, ...)`` with one `n`; a `Ragged` has `n` rows.
        Other leaves, and Python bools, are copied to each result.

    Returns:
      A list of `n` pytrees.

    Raises:
      AxisError: (a ValueError) There is no array, or the first axes are missing or differ in size.
      ArgumentTypeError: (a TypeError) A leaf is a sparse matrix or another container, or a `Ragged`
        with traced lengths.

    Example:
      >>> models = bx.unstack({"w": jnp.arange(6).reshape(3, 2)})
      >>> print(len(models), models[1]["w"])
      3 [2 3]
    """
    leaves, structure = _leaves("unstack: tree", tree, rows=True)
    named = [(jax.tree_util.keystr(keys), x) for keys, x in leaves]
    arrays = [(path, x) for path, x in named if _has_lanes(path, x)]
    if not arrays:
        raise AxisError("unstack: the tree holds no array, so the number of trees is not known.")
    path, first = arrays[0]
    for other, x in arrays:
        if not np.shape(x):
            raise AxisError(f"unstack: tree{other} is a number, which has no first axis.")
        if np.shape(x)[0] != np.shape(first)[0]:
            raise AxisError(
                f"unstack: tree{other} has shape {np.shape(x)}, but tree{path} has shape "
                f"{np.shape(first)}: their first axes must have one size."
            )
    count = np.shape(first)[0]
    columns = [list(x) if _has_lanes(path, x) else [x] * count for path, x in named]
    return [jax.tree.unflatten(structure, row) for row in zip(*columns, strict=True)]


def _has_lanes(path: str, x: Value) -> bool:
    return (is_array(x) and not is_flag(x, path)) or isinstance(x, BatchOfRows)


def _leaves(name: str, tree: Tree, rows: bool = False) -> tuple[Sequence[Any], Any]:
    """The leaves of a tree with their paths, and its structure."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_container)
    for keys, x in leaves:
        if is_array(x) and _compat.is_reference(x):
            raise ArgumentTypeError(
                f"{name}{jax.tree_util.keystr(keys)} is a reference (jax.new_ref). Stack what it "
                "holds, reference[...]."
            )
        if is_container(x) and not (rows and isinstance(x, BatchOfRows)):
            raise ArgumentTypeError(
                f"{name}{jax.tree_util.keystr(keys)} is a {type(x).__name__}: a batch of those is "
                "more than a batch of the arrays that it is made of. Stack those, and make it of "
                "them in the function."
            )
    return leaves, structure


def _check_alike(first: Sequence[Any], others: Sequence[Any], i: int) -> None:
    """Raises for the first leaf of pytree `i` that differs from the one at its place in another."""
    for (keys, leaf), (there, other) in zip(first, others, strict=False):
        path = jax.tree_util.keystr(keys)
        if path == jax.tree_util.keystr(there) and not _alike(leaf, other):
            raise AxisError(
                f"stack: trees[{i}]{path} is {_described(other)}, but trees[0]{path} is "
                f"{_described(leaf)}. Trees must have the same shapes and dtypes, and equal leaves "
                "that are not arrays."
            )


def _alike(x: Value, y: Value) -> bool:
    """Whether two leaves may be stacked, or, where they are no arrays, are the same."""
    if is_array(x) and is_array(y):
        a, b = jax.typeof(x), jax.typeof(y)
        return a.shape == b.shape and a.dtype == b.dtype
    return x is y or (not is_array(x) and not is_array(y) and bool(x == y))


def _described(x: Value) -> str:
    if not is_array(x):
        return brief(x)
    aval = jax.typeof(x)
    return f"{aval.dtype}{list(aval.shape)}"


def structures_differ(name: str, trees: Sequence[Any], i: int) -> str:
    """Where the structures of the first of some trees and of tree `i` part.

    Args:
      name: what a message calls the trees: the function and the argument.
      trees: all of them.
      i: the one that differs.
    """
    first, other = (
        [jax.tree_util.keystr(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        for tree in (trees[0], trees[i])
    )
    short = name.split()[-1]
    for here, there, j in ((first, other, i), (other, first, 0)):
        missing = next((path for path in here if path not in there), None)
        if missing is not None:
            return (
                f"{name}[{j}] has no leaf {missing or 'by itself'}, which {short}[{i - j}] has. "
                "Trees must have one structure."
            )
    structures = [jax.tree.structure(tree) for tree in (trees[0], trees[i])]
    return f"{name}[{i}] has the structure {structures[1]}, but {short}[0] {structures[0]}."
