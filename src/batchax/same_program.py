"""`same_program`: whether two functions are the same program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import jax

from batchax import _compat
from batchax.errors import ArgumentTypeError
from batchax.jaxprs.spoken import brief
from batchax.programs import hlo
from batchax.programs.canonical import Table
from batchax.programs.canonical_form import canonical
from batchax.programs.differences import Difference, first_difference, operations


@dataclass(frozen=True)
class Comparison:
    """Whether two functions are the same program, and where they first differ if not.

    A comparison is true where they are the same, and its text says what was found.

    Attributes:
      same: whether they are.
      operations: for each of the two, the names of its operations in order; of compiled programs,
        how often each operation occurs.
      difference: the first difference; None where there is none.
      compiled: whether the optimised programs were compared, or the staged ones.

    Example:
      >>> comparison = bx.same_program(lambda x: x * x, lambda x: x + x, jnp.ones(3))
      >>> bool(comparison)
      False
      >>> comparison.operations
      (('mul',), ('add',))
    """

    same: bool
    operations: tuple[Sequence[str] | Counter[str], Sequence[str] | Counter[str]] = field(
        repr=False
    )
    difference: Difference | None = field(repr=False)
    compiled: bool = False

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        first, _ = self.operations
        if self.difference is not None:
            level = "not the same compiled program" if self.compiled else "not the same program"
            return f"{level}: {self.difference}"
        if isinstance(first, Counter):
            return f"the same compiled program: {_counted(first)}"
        return f"the same program: {', '.join(first) or 'no operations'}"


@_compat.api_boundary
def same_program(
    f: Callable[..., Any], g: Callable[..., Any], /, *args: Any, compiled: bool = False
) -> Comparison:
    """Whether `f` and `g` do the same operations, and where they first differ if they do not.

    Both functions are staged for the types of the arguments; nothing is computed. What does not
    matter is not compared: names, calls (``jit``, ``checkpoint``, custom derivatives), equations
    that nothing needs or that occur twice, the order of operands that commute, transposes that
    cancel or that the next operation does away with, axes of size one, operations that change
    nothing, and whether a type is weak. Constants are compared by value, loops and branches
    by their bodies, and what ``shard_map`` runs on each device by what it is, where ``vmap`` with
    `mesh` wrote it, too.

    Functions that are the same program compute the same, up to the order in which a sum adds.
    Those that are not may still do so: a sum of products is not a contraction, as a program.
    Custom derivatives are not compared; differentiate both functions for that.

    Args:
      f: a function.
      g: the function to compare it with.
      *args: arguments for both: arrays, ``jax.ShapeDtypeStruct``, and pytrees of them.
      compiled: compare the programs that the compiler makes of them instead, where two ways to
        write the same often become one. Names and source lines do not count.

    Returns:
      The `Comparison`, true where the programs are the same. Printed, it lists their operations,
      or shows the first difference with the lines of both functions that made it.

    Raises:
      ArgumentTypeError: if `f` or `g` cannot be called. What a function raises for these
        arguments is raised as it is.

    Example:
      >>> def f(M, v):
      ...     return jnp.tanh(M @ v).sum()
      >>> def by_hand(M, vs):
      ...     return jnp.tanh(jnp.einsum("ij,bj->bi", M, vs)).sum(axis=1)
      >>> M, vs = jnp.ones((3, 5)), jnp.ones((8, 5))
      >>> print(bx.same_program(bx.vmap(f, (None, 0)), by_hand, M, vs))
      the same program: dot_general, tanh, reduce_sum
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
    if difference is None and not compiled:
        names = [_output(path) for path, _ in jax.tree_util.tree_leaves_with_path(out)]
        difference = first_difference(table, programs, names)  # pyright: ignore
    if compiled and difference is None:
        return _compare_compiled(f, g, args)
    return Comparison(difference is None, listed, difference)  # pyright: ignore


def _of_outputs(out: Any, other: Any) -> Difference | None:
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


def _output(path: Any) -> str:
    return f"out{jax.tree_util.keystr(path)}"


def _compare_compiled(f: Callable[..., Any], g: Callable[..., Any], args: Any) -> Comparison:
    texts = [
        # An argument that is not used stays, so that those of both programs match.
        jax.jit(lambda *a, fun=fun: fun(*a), keep_unused=True).lower(*args).compile().as_text()
        for fun in (f, g)
    ]
    first, second = (hlo.normalised_hlo(t or "") for t in texts)
    listed = hlo.operations(first), hlo.operations(second)
    if first == second and "{...}" in first:
        what = (
            "They hold constants that the compiler does not print, and that cannot be compared. "
            "Pass large arrays as arguments, rather than close over them."
        )
        return Comparison(False, listed, Difference(what), compiled=True)
    if first == second:
        return Comparison(True, listed, None, compiled=True)
    lines = (t.splitlines() for t in (first, second))
    a, b = next(((a, b) for a, b in zip_longest(*lines, fillvalue="") if a != b), ("", ""))
    counts = [
        f"{name} {listed[0][name]} and {listed[1][name]}"
        for name in sorted(listed[0] | listed[1])
        if listed[0][name] != listed[1][name]
    ]
    what = f"Operations that do not occur as often: {', '.join(counts)}." if counts else (
        "Each operation occurs as often in both."
    )  # fmt: skip
    what += f" The first line that differs:\n  first:  {a.strip()}\n  second: {b.strip()}"
    return Comparison(False, listed, Difference(what), compiled=True)


def _counted(operations: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" if n > 1 else name for name, n in operations.items())
