"""Calls of a function with derivative rules of the user's, beside its batching rule.

The derivative rules are around the batching rule: a call that is differentiated runs
them, and what they call in turn is batched by its own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from batchax.errors import ArgumentTypeError
from batchax.frontend.in_axes import is_array
from batchax.jaxprs.words import Value
from batchax.kernel.own_primitive import with_values
from batchax.kernel.registry import describe_returned
from batchax.rules.masking import is_inexact
from batchax.user_rules.arguments import Arguments
from batchax.user_rules.linear import linear_with_transpose


@dataclass(frozen=True)
class DerivativeRules:
    """The derivative rules of a function, those that it has."""

    jvp: Callable[..., Any] | None = None
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    def replace(self, **rules: Callable[..., Any]) -> DerivativeRules:
        """These, and `rules`."""
        return replace(self, **rules)

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return self.jvp is not None or self.fwd is not None


def call_with_derivatives(
    rules: DerivativeRules,
    name: str,
    call: Callable[[Arguments, Sequence[Any]], Any],
    arguments: Arguments,
    operands: Sequence[Value],
) -> Any:
    """``call(arguments, operands)``, differentiated by `rules`."""
    given = _Call(rules, name, call, arguments, operands)
    if rules.jvp is None:
        function = jax.custom_vjp(given.run)
        function.defvjp(given.forward, given.backward)
    else:
        function = jax.custom_jvp(given.run)
        function.defjvp(given.tangents if rules.fwd is None else given.linear_tangents)
    return function(*operands)


class _Call:
    """The rules as functions of the operands of one call."""

    def __init__(
        self,
        rules: DerivativeRules,
        name: str,
        call: Callable[[Arguments, Sequence[Any]], Any],
        arguments: Arguments,
        operands: Sequence[Value],
    ) -> None:
        self.rules, self.name, self.call, self.arguments = rules, name, call, arguments
        # Those whose derivatives are arrays; of integers and keys there are none.
        self.smooth = [i for i, x in enumerate(operands) if is_inexact(jax.typeof(x))]

    def run(self, *operands: Any) -> Any:
        """The function."""
        return self.call(self.arguments, operands)

    def tangents(self, primals: Sequence[Value], tangents: Sequence[Value]) -> tuple[Any, Any]:
        """The user's forward-mode rule."""
        assert self.rules.jvp is not None
        values = self.arguments.in_order(primals)
        directions = self.arguments.with_constants(_no_tangent).in_order(tangents)
        result = self.rules.jvp(values, directions)
        if not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise ArgumentTypeError(
                f"the rule given to {self.name}.def_jvp must return a pair (out, out_tangent), "
                f"but it returned {describe_returned(result)}."
            )
        return result[0], result[1]

    def forward(self, *operands: Any) -> tuple[Any, _Residuals]:
        """The user's forward pass."""
        assert self.rules.fwd is not None
        args, kwargs = self.arguments.rebuild(operands)
        result = self.rules.fwd(*args, **kwargs)
        if not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise ArgumentTypeError(
                f"the rule fwd given to {self.name}.def_vjp must return a pair (out, residuals), "
                f"but it returned {describe_returned(result)}."
            )
        return result[0], _Residuals.of(result[1])

    def backward(self, residuals: _Residuals, cotangent: Any) -> tuple[Any, ...]:
        """The user's reverse pass; None for operands that have no cotangent."""
        assert self.rules.bwd is not None
        result = self.rules.bwd(residuals.rebuild(residuals.arrays), cotangent)
        count = len(self.arguments.trees)
        if not (isinstance(result, (tuple, list)) and len(result) == count):
            raise ArgumentTypeError(
                f"the rule bwd given to {self.name}.def_vjp must return a tuple with a cotangent "
                f"for each of the {count} arguments of {self.name}, but it returned "
                f"{describe_returned(result)}. Give None for an argument whose cotangent is zero."
            )
        return tuple(self.arguments.operands_of(result))

    def linear_tangents(
        self, primals: Sequence[Value], tangents: Sequence[Value]
    ) -> tuple[Any, Any]:
        """The forward-mode rule, whose transpose is the reverse pass."""
        out, residuals = self.forward(*primals)
        types, structure = jax.tree.flatten(jax.tree.map(jax.typeof, out))
        smooth_outs = [k for k, aval in enumerate(types) if is_inexact(aval)]
        count = len(primals)

        def ahead(values: Sequence[Value], moving: Sequence[Any]) -> list[Any]:
            every = [np.zeros(np.shape(x), jax.dtypes.float0) for x in primals]
            for i, t in zip(self.smooth, moving, strict=True):
                every[i] = t
            leaves = jax.tree.leaves(self.tangents(values[:count], every)[1])
            return [leaves[k] for k in smooth_outs]

        def back(values: Sequence[Value], cotangents: Sequence[Value]) -> list[Any]:
            every = [np.zeros(t.shape, jax.dtypes.float0) for t in types]
            for k, ct in zip(smooth_outs, cotangents, strict=True):
                every[k] = ct
            again = replace(residuals, arrays=values[count:])
            pulled = self.backward(again, jax.tree.unflatten(structure, every))
            return [
                jax.numpy.zeros_like(primals[i]) if pulled[i] is None else pulled[i]
                for i in self.smooth
            ]

        dots = linear_with_transpose(
            ahead, back, [*primals, *residuals.arrays], [tangents[i] for i in self.smooth]
        )
        every = [np.zeros(t.shape, jax.dtypes.float0) for t in types]
        for k, dot in zip(smooth_outs, dots, strict=True):
            every[k] = dot
        return out, jax.tree.unflatten(structure, every)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True, eq=False)
class _Residuals:
    """What the forward pass hands to the reverse pass: of its tree, JAX sees the arrays alone.

    Attributes:
      arrays: the leaves that are arrays.
      rebuild: from those to the tree.
    """

    arrays: Sequence[Value]
    rebuild: Callable[[Sequence[Any]], Any]

    @classmethod
    def of(cls, tree: Any) -> _Residuals:
        """For the residuals that the user's rule returned."""
        leaves, structure = jax.tree.flatten(tree)
        places = [i for i, x in enumerate(leaves) if is_array(x)]
        arrays = [leaves[i] for i in places]
        # What is kept until the reverse pass must not hold the tracers of this one.
        rest = with_values(leaves, places, [None] * len(places))
        return cls(
            arrays, lambda given: jax.tree.unflatten(structure, with_values(rest, places, given))
        )

    def tree_flatten(self) -> tuple[Any, Any]:
        return tuple(self.arrays), self.rebuild

    @classmethod
    def tree_unflatten(cls, rebuild: Any, arrays: Any) -> _Residuals:
        return cls(arrays, rebuild)


def _no_tangent(x: Value) -> Any:
    """The tangent of an argument that is constant: zero, or None if it is no array."""
    if not is_array(x):
        return None
    aval = jax.typeof(x).to_tangent_aval()
    return np.zeros(aval.shape, aval.dtype)
