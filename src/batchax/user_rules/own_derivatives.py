"""Calls of a function with derivative rules of the user's, beside its batching rule.

The derivative rules are around the batching rule: a call that is differentiated runs
them, and what they call in turn is batched by its own rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from batchax.errors import ArgumentTypeError
from batchax.kernel.rule_results import describe_returned
from batchax.rules.masking import is_inexact
from batchax.user_rules.arguments import Arguments
from batchax.user_rules.linear import linear_with_transpose


@dataclasses.dataclass(frozen=True)
class DerivativeRules:
    """The derivative rules of a function, those that it has."""

    jvp: Callable[..., Any] | None = None
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    def replace(self, **rules: Callable[..., Any]) -> DerivativeRules:
        """These, and `rules`."""
        return dataclasses.replace(self, **rules)

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return self.jvp is not None or self.fwd is not None


def call_with_derivatives(
    rules: DerivativeRules,
    name: str,
    call: Callable[[Arguments, Sequence[Any]], Any],
    arguments: Arguments,
    operands: Sequence[Any],
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
        operands: Sequence[Any],
    ) -> None:
        self.rules, self.name, self.call, self.arguments = rules, name, call, arguments
        # Those whose derivatives are arrays; of integers and keys there are none.
        self.smooth = [i for i, x in enumerate(operands) if is_inexact(jax.typeof(x))]
        self.residual_parts: list[Any] = []

    def run(self, *operands: Any) -> Any:
        """The function."""
        return self.call(self.arguments, operands)

    def tangents(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
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

    def forward(self, *operands: Any) -> tuple[Any, list[Any]]:
        """The user's forward pass; residuals are those of its residuals that are arrays."""
        assert self.rules.fwd is not None
        args, kwargs = self.arguments.rebuild(operands)
        result = self.rules.fwd(*args, **kwargs)
        if not (isinstance(result, (tuple, list)) and len(result) == 2):
            raise ArgumentTypeError(
                f"the rule fwd given to {self.name}.def_vjp must return a pair (out, residuals), "
                f"but it returned {describe_returned(result)}."
            )
        leaves, structure = jax.tree.flatten(result[1])
        arrays = [_is_array(x) for x in leaves]
        rest = [None if a else x for x, a in zip(leaves, arrays, strict=True)]
        self.residual_parts[:] = [structure, arrays, rest]
        return result[0], [x for x, a in zip(leaves, arrays, strict=True) if a]

    def backward(self, residuals: Sequence[Any], cotangent: Any) -> tuple[Any, ...]:
        """The user's reverse pass; None for operands that have no cotangent."""
        assert self.rules.bwd is not None
        structure, arrays, rest = self.residual_parts
        own = iter(residuals)
        leaves = [next(own) if a else x for x, a in zip(rest, arrays, strict=True)]
        result = self.rules.bwd(jax.tree.unflatten(structure, leaves), cotangent)
        count = len(self.arguments.trees)
        if not (isinstance(result, (tuple, list)) and len(result) == count):
            raise ArgumentTypeError(
                f"the rule bwd given to {self.name}.def_vjp must return a tuple with a cotangent "
                f"for each of the {count} arguments of {self.name}, but it returned "
                f"{describe_returned(result)}. Give None for an argument whose cotangent is zero."
            )
        return tuple(self.arguments.operands_of(result))

    def linear_tangents(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        """The forward-mode rule, whose transpose is the reverse pass."""
        out, residuals = self.forward(*primals)
        types, structure = jax.tree.flatten(jax.tree.map(jax.typeof, out))
        smooth_outs = [k for k, aval in enumerate(types) if is_inexact(aval)]
        count = len(primals)

        def ahead(values: Sequence[Any], moving: Sequence[Any]) -> list[Any]:
            every = [np.zeros(np.shape(x), jax.dtypes.float0) for x in primals]
            for i, t in zip(self.smooth, moving, strict=True):
                every[i] = t
            leaves = jax.tree.leaves(self.tangents(values[:count], every)[1])
            return [leaves[k] for k in smooth_outs]

        def back(values: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
            every = [np.zeros(t.shape, jax.dtypes.float0) for t in types]
            for k, ct in zip(smooth_outs, cotangents, strict=True):
                every[k] = ct
            found = self.backward(values[count:], jax.tree.unflatten(structure, every))
            return [
                jax.numpy.zeros_like(primals[i]) if found[i] is None else found[i]
                for i in self.smooth
            ]

        dots = linear_with_transpose(
            ahead, back, [*primals, *residuals], [tangents[i] for i in self.smooth]
        )
        every = [np.zeros(t.shape, jax.dtypes.float0) for t in types]
        for k, dot in zip(smooth_outs, dots, strict=True):
            every[k] = dot
        return out, jax.tree.unflatten(structure, every)


def _is_array(x: Any) -> bool:
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


def _no_tangent(x: Any) -> Any:
    """The tangent of an argument that is constant: zero, or None if it is no array."""
    if not _is_array(x):
        return None
    aval = jax.typeof(x).to_tangent_aval()
    return np.zeros(aval.shape, aval.dtype)
