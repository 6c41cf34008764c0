"""`same_program`: whether two functions are the same program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import KeyPath

from batchax import _compat
from batchax.analysis.canonical import Table
from batchax.analysis.canonical_form import canonical
from batchax.analysis.differences import Difference, first_difference, operations
from batchax.errors import ArgumentTypeError
from batchax.jaxprs.error_format import brief
from batchax.jaxprs.types import Tree


@dataclass(frozen=True)
class Comparison:
    """Holds the result of `same_program`: whether two programs are the same.

    A comparison is true if they are the same. Its text lists the operations or the difference.

    Attributes:
      same: Whether they are the same.
      operations: The names of the operations of each, in order.
      difference: The first difference, or None.

    Example:
      >>> comparison = bx.same_program(lambda x: x * x, lambda x: x + x, jnp.ones(3))
      >>> bool(comparison)
      False
      >>> comparison.operations
      (('mul',), ('add',))
    """

    same: bool
    operations: tuple[Sequence[str], Sequence[str]] = field(repr=False)
    difference: Difference | None = field(repr=False)

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        first, _ = self.operations
        if self.difference is not None:
            return f"not the same program: {self.difference}"
        return f"the same program: {', '.join(first) or 'no operations'}"


@_compat.api_boundary
def same_program(f: Callable[..., Any], g: Callable[..., Any], /, *args: Tree) -> Comparison:
    """Compares the operations of two functions, and reports their first difference.

    Example:
      >>> def f(M, v):
      ...     return jnp.tanh(M @ v).sum()
      >>> def by_hand(M, vs):
      ...     return jnp.tanh(jnp.einsum("ij,bj->bi", M, vs)).sum(axis=1)
      >>> M, vs = jnp.ones((3, 5)), jnp.ones((8, 5))
      >>> print(bx.same_program(bx.vmap(f, (None, 0)), by_hand, M, vs))
      the same program: dot_general, tanh, reduce_sum

    Both functions are traced, and nothing is computed. The comparison ignores:

    - names, and calls (``jit``, ``checkpoint``, custom derivatives);
    - unused and repeated equations;
    - the order of operands that commute;
    - transposes that cancel, or that the next operation absorbs;
    - axes of size one, and weak types.

    It compares constants by value, and loops, branches, and ``shard_map`` by their bodies.

    Functions with the same program compute the same, up to the order of additions. Functions with
    different programs may still compute the same.

    Args:
      f: A function.
      g: The function to compare it with.
      *args: Arguments for both: pytrees of arrays or ``jax.ShapeDtypeStruct``.

    Returns:
      A `Comparison`, which is true if the programs are the same.

    Raises:
      ArgumentTypeError: `f` or `g` is not callable.
    """
    for name, fun in (("f", f), ("g", g)):
        if not callable(fun):
            raise ArgumentTypeError(
                f"`same_program` compares functions, but `{name}` is {brief(fun)}, which cannot be "
                "called."
            )
    staged = [jax.make_jaxpr(fun, return_shape=True)(*args) for fun in (f, g)]
    (first, out), (second, other) = staged
    table = Table()
    programs = tuple(canonical(table, p) for p in (first, second))
    listed = tuple(operations(table, p) for p in programs)
    difference = _of_outputs(out, other)
    if difference is None:
        names = [_output(path) for path, _ in jax.tree_util.tree_leaves_with_path(out)]
        difference = first_difference(table, programs, names)  # pyright: ignore
    return Comparison(difference is None, listed, difference)  # pyright: ignore


def _of_outputs(out: Tree, other: Tree) -> Difference | None:
    """How the outputs differ in structure or type, if they do."""
    first, second = (
        {_output(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (out, other)
    )
    for name in (*first, *second):
        if name not in second or name not in first:
            owner = "first" if name in first else "second"
            return Difference(f"Their outputs differ: only the {owner} function returns `{name}`.")
        kinds = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in (first[name], second[name])]
        if kinds[0] != kinds[1]:
            return Difference(f"Their outputs differ: `{name}` is {kinds[0]}, and {kinds[1]}.")
    a, b = map(jax.tree.structure, (out, other))
    return None if a == b else Difference(f"Their outputs differ: they return {a}, and {b}.")


def _output(path: KeyPath) -> str:
    return f"out{jax.tree_util.keystr(path)}"
