"""The arguments of a call that has rules of the user's: operands, and what is constant.

Only tracers are operands. What has a value already cannot be batched or differentiated,
and reaches the function and its rules as it is: a NumPy array stays one (JAX #14961), and
so does a string, a function or a Python number.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
from jax.core import Tracer

from batchax.errors import ArgumentTypeError
from batchax.jaxprs.program_key import value_key
from batchax.jaxprs.spoken import name_of
from batchax.jaxprs.words import Value


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, equal if all but the operands are.

    Attributes:
      tree: the structure of (positional arguments, keyword arguments).
      constants: the leaves; None in place of an operand.
      operand_leaves: which of the leaves are operands.
    """

    tree: Any
    constants: tuple[Any, ...] = field(compare=False)
    operand_leaves: tuple[int, ...]
    constants_key: Hashable

    def rebuild(self, operands: Sequence[Value]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these operands."""
        filled = list(self.constants)
        for i, x in zip(self.operand_leaves, operands, strict=True):
            filled[i] = x
        args, names, values = jax.tree.unflatten(self.tree, filled)
        return args, dict(zip(names.names, values, strict=True))

    def in_order(self, operands: Sequence[Value]) -> tuple[Any, ...]:
        """The arguments by position, then those that are given by keyword only."""
        args, kwargs = self.rebuild(operands)
        return (*args, *kwargs.values())

    def with_constants(self, change: Callable[[Any], Any]) -> Arguments:
        """These, with each constant changed."""
        constants = tuple(
            x if i in self.operand_leaves else change(x) for i, x in enumerate(self.constants)
        )
        return replace(self, constants=constants)

    @property
    def trees(self) -> list[Any]:
        """The structure of each argument, in that order."""
        args, _, kwargs = self.tree.children()
        return [*args.children(), *kwargs.children()]

    def operands_of(self, values: Sequence[Value]) -> list[Any]:
        """What of `values`, each a tree like its argument or None, is for an operand."""
        leaves = []
        for value, tree in zip(values, self.trees, strict=True):
            full = jax.tree.unflatten(tree, [0] * tree.num_leaves)
            spread = jax.tree.broadcast(value, full, is_leaf=_is_none)
            leaves += jax.tree.leaves(spread, is_leaf=_is_none)
        return [leaves[i] for i in self.operand_leaves]

    def said(self, of_operands: Sequence[Any], of_constants: Any) -> list[Any]:
        """What a rule is told of each leaf of the arguments.

        A list with a tree for each positional argument, then for each that is given by
        keyword only, in order of definition.
        """
        constants = (of_constants,) * len(self.constants)
        return list(replace(self, constants=constants).in_order(of_operands))


@dataclass(frozen=True)
class _Names:
    """The names of keyword arguments, which a dict would put in alphabetical order."""

    names: tuple[str, ...]


jax.tree_util.register_static(_Names)


def _is_none(x: Value) -> bool:
    return x is None


def split_arguments(
    fun: Callable[..., Any], args: Sequence[Value], kwargs: dict[str, Any]
) -> tuple[Arguments, list[Any]]:
    """The arguments of a call of `fun`, by position where they can be, and the operands.

    Raises:
      ArgumentTypeError: `fun` does not take these arguments.
    """
    args, kwargs = _by_position(fun, args, kwargs)
    leaves, tree = jax.tree.flatten((tuple(args), _Names(tuple(kwargs)), list(kwargs.values())))
    which = tuple(i for i, x in enumerate(leaves) if isinstance(x, Tracer))
    constants = tuple(None if isinstance(x, Tracer) else x for x in leaves)
    key = tuple(map(value_key, constants))
    return Arguments(tree, constants, which, key), [leaves[i] for i in which]


def _by_position(
    fun: Callable[..., Any], args: Sequence[Value], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # some callables written in C
        return args, kwargs
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        name = name_of(fun)
        raise ArgumentTypeError(f"{name}(): {error}") from None
    # A rule finds its arguments by position, so none may be left out. It need not have
    # parameters for keywords that are not given.
    by_keyword = bound.kwargs
    bound.apply_defaults()
    return bound.args, by_keyword
