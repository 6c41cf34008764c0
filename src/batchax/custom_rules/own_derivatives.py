"""Calls of a function with a user's derivative rules, besides its batching rule.

The derivative rules are around the batching rule: a call that is differentiated runs them, and the
functions that they call are batched by their own rules.

A linear function with a given transpose is a primitive, as in `jax.custom_derivatives.linear_call`,
but it can be batched by ``jax.vmap`` and differentiated with respect to its other operands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from batchax import _compat
from batchax.cache import Cache
from batchax.custom_rules.rule import Arguments
from batchax.errors import ArgumentTypeError
from batchax.frontend.in_axes import is_array
from batchax.jaxprs.types import Aval, ClosedJaxpr, Tree, Value, Values
from batchax.kernel.axis import Axis, Positions
from batchax.kernel.inner import batch_inner, inline_jaxpr
from batchax.kernel.own_primitive import own_primitive, tangents_of, with_values
from batchax.kernel.registry import describe_returned, split_pair
from batchax.rules.custom_derivatives import batched_transpose, in_reverse_alone
from batchax.rules.masking import is_inexact

Linear = Callable[[Sequence[Any], Sequence[Any]], list[Any]]
"""A function of residuals, and of values it is linear in."""


def linear_with_transpose(
    forward: Linear,
    transpose: Linear,
    residuals: Values,
    operands: Values,
    key: Hashable | None = None,
) -> list[Any]:
    """Calls ``forward(residuals, operands)``, whose transpose is ``transpose(residuals, cts)``.

    Functions with equal keys compute the same, and are traced once for operands of the same types.
    """
    residuals = list(map(_compat.unconsumed, residuals))  # derivatives use keys again
    residual_types = tuple(map(jax.typeof, residuals))
    linear = tuple(jax.typeof(x).to_tangent_aval() for x in operands)

    def stage(function: Linear, types: Sequence[Aval]) -> ClosedJaxpr:
        count = len(residual_types)
        run = lambda *xs: function(xs[:count], xs[count:])
        return _compat.stage(run, [*residual_types, *types])

    def both() -> tuple[ClosedJaxpr, ClosedJaxpr]:
        ahead = stage(forward, linear)
        return ahead, stage(transpose, list(ahead.out_avals))

    if key is None:
        return _bind(*both(), residuals, operands)
    ahead, back = _staged.get((key, residual_types, linear, _compat.trace_context()), both)
    return _bind(ahead, back, residuals, operands)


_staged = Cache("linear functions, and their transposes", most=1024)


def _bind(ahead: ClosedJaxpr, back: ClosedJaxpr, residuals: Values, operands: Values) -> list[Any]:
    """Binds the call, with the constants of both programs as residuals."""
    (ahead, back), consts = _compat.hoist_constants(ahead, back)
    return linear_p.bind(
        *consts,
        *residuals,
        *operands,
        forward=ahead,
        transpose=back,
        count=len(consts) + len(residuals),
    )


def _run(*operands: Value, forward: ClosedJaxpr, **_: Any) -> list[Any]:
    return inline_jaxpr(forward, _of_one_mesh(operands))


def _of_one_mesh(operands: Values) -> Sequence[Any]:
    """Gives operands types on the mesh that some of them carry."""
    # Zeros that JAX starts a cotangent with, and arrays from before a mesh was set, carry none. JAX
    # writes a part into an array only if both carry the same.
    meshes = [jax.typeof(x).sharding.mesh for x in operands]
    mesh = next((m for m in meshes if AxisType.Explicit in m.axis_types), None)
    if mesh is None:
        return operands
    return [
        jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*[None] * x.ndim)))
        if tells_of.empty
        else x
        for x, tells_of in zip(operands, meshes, strict=True)
    ]


def _jvp(primals: Values, tangents: Values, **params: Any) -> tuple[list[Any], list[Any]]:
    count = params["count"]
    outs = linear_p.bind(*primals, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    if all(i >= count for i in moving):
        linear = map(ad.instantiate_zeros, tangents[count:])
        return outs, linear_p.bind(*primals[:count], *linear, **params)
    # By other operands it has the derivative of its operations.
    given = [tangents[i] for i in moving]

    def function(*xs: Value) -> list[Any]:
        return _run(*xs, **params)

    return outs, tangents_of(function, primals, moving, given, range(len(outs)))[1]


def _transpose(
    cotangents: Values, *operands: Value, forward: ClosedJaxpr, transpose: ClosedJaxpr, count: int
) -> list[Value]:
    others = operands[:count]
    given = map(ad.instantiate_zeros, cotangents)
    if in_reverse_alone.in_program(forward):
        # The transpose is inlined: batching the call would batch `forward`, which cannot run.
        outs = _run(*others, *given, forward=transpose)
    else:
        outs = linear_p.bind(*others, *given, forward=transpose, transpose=forward, count=count)
    return [
        out if ad.is_undefined_primal(x) else None
        for x, out in zip(operands, [*others, *outs], strict=True)
    ]


def _batched(
    axis: Axis,
    args: Values,
    axes: Positions,
    /,
    *,
    forward: ClosedJaxpr,
    transpose: ClosedJaxpr,
    count: int,
) -> tuple[list[Any], Positions]:
    ahead, out_axes = batch_inner(axis, forward, axes)

    def back(*xs: Value) -> list[Any]:
        positions = [*axes[:count], *out_axes]
        cotangents = range(count, len(xs))
        return batched_transpose(axis, transpose.jaxpr, xs, positions, cotangents, axes[count:])

    back_program = _compat.stage(back, [*map(jax.typeof, args[:count]), *ahead.out_avals])
    return _bind(ahead, back_program, args[:count], args[count:]), out_axes


linear_p = own_primitive(
    "linear_with_transpose",
    called="linear function with a transpose",
    operations=_run,
    types=lambda *avals, forward, transpose, count: list(forward.out_avals),
    programs=("forward",),
    rule=_batched,
    jvp=_jvp,
    transpose=_transpose,
)


@dataclass(frozen=True)
class DerivativeRules:
    """Holds the derivative rules of a function."""

    jvp: Callable[..., Any] | None = None
    fwd: Callable[..., Any] | None = None
    bwd: Callable[..., Any] | None = None

    def replace(self, **rules: Callable[..., Any]) -> DerivativeRules:
        return replace(self, **rules)

    @property
    def any(self) -> bool:
        return self.jvp is not None or self.fwd is not None


def call_with_derivatives(
    rules: DerivativeRules,
    name: str,
    call: Callable[[Arguments, Sequence[Any]], Any],
    arguments: Arguments,
    operands: Values,
) -> Tree:
    """Calls ``call(arguments, operands)``, differentiated by `rules`."""
    given = _Call(rules, name, call, arguments, operands)
    if rules.jvp is None:
        function = jax.custom_vjp(given.run)
        function.defvjp(given.forward, given.backward)
    else:
        function = jax.custom_jvp(given.run)
        function.defjvp(given.tangents if rules.fwd is None else given.linear_tangents)
    return function(*operands)


class _Call:
    """Adapts the rules to functions of the operands of one call."""

    def __init__(
        self,
        rules: DerivativeRules,
        name: str,
        call: Callable[[Arguments, Sequence[Any]], Any],
        arguments: Arguments,
        operands: Values,
    ) -> None:
        self.rules, self.name, self.call, self.arguments = rules, name, call, arguments
        # Those whose derivatives are arrays; of integers and keys there are none.
        self.smooth = [i for i, x in enumerate(operands) if is_inexact(jax.typeof(x))]

    def run(self, *operands: Value) -> Tree:
        return self.call(self.arguments, operands)

    def tangents(self, primals: Values, tangents: Values) -> tuple[Any, Any]:
        """Runs the user's forward-mode rule."""
        assert self.rules.jvp is not None
        values = self.arguments.in_order(primals)
        directions = self.arguments.with_constants(_no_tangent).in_order(tangents)
        where = f"the rule given to {self.name}.def_jvp"
        meaning = "The tangent has the structure of the result."
        return split_pair(where, self.rules.jvp(values, directions), "out, out_tangent", meaning)

    def forward(self, *operands: Value) -> tuple[Any, _Residuals]:
        assert self.rules.fwd is not None
        args, kwargs = self.arguments.rebuild(operands)
        where = f"the rule fwd given to {self.name}.def_vjp"
        meaning = "The residuals are what bwd gets first."
        out, residuals = split_pair(
            where, self.rules.fwd(*args, **kwargs), "out, residuals", meaning
        )
        return out, _Residuals.of(residuals)

    def backward(self, residuals: _Residuals, cotangent: Tree) -> tuple[Any, ...]:
        """Runs the user's reverse pass; None for operands without a cotangent."""
        assert self.rules.bwd is not None
        result = self.rules.bwd(residuals.rebuild(residuals.arrays), cotangent)
        count = len(self.arguments.trees)
        if not (isinstance(result, (tuple, list)) and len(result) == count):
            raise ArgumentTypeError(
                f"the rule bwd given to {self.name}.def_vjp must return a tuple with a cotangent "
                f"for each of the {count} arguments of {self.name}, but it returned "
                f"{describe_returned(result)}. Pass None for an argument whose cotangent is zero."
            )
        return tuple(self.arguments.operands_of(result))

    def linear_tangents(self, primals: Values, tangents: Values) -> tuple[Any, Any]:
        """Runs the forward-mode rule, with the reverse pass as its transpose."""
        out, residuals = self.forward(*primals)
        types, structure = jax.tree.flatten(jax.tree.map(jax.typeof, out))
        smooth_outs = [k for k, aval in enumerate(types) if is_inexact(aval)]
        count = len(primals)

        def ahead(values: Values, moving: Sequence[Any]) -> list[Any]:
            # Operands without tangents get zeros of type float0, as in JAX.
            every = [np.zeros(np.shape(x), jax.dtypes.float0) for x in primals]
            for i, t in zip(self.smooth, moving, strict=True):
                every[i] = t
            leaves = jax.tree.leaves(self.tangents(values[:count], every)[1])
            return [leaves[k] for k in smooth_outs]

        def back(values: Values, cotangents: Values) -> list[Any]:
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
    """Holds residuals between the passes; JAX sees the arrays only."""

    arrays: Values  # the leaves that are arrays
    rebuild: Callable[[Sequence[Any]], Any]  # from those to the pytree

    @classmethod
    def of(cls, tree: Tree) -> _Residuals:
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
    def tree_unflatten(cls, rebuild: Callable[[Sequence[Any]], Any], arrays: Values) -> _Residuals:
        return cls(arrays, rebuild)


def _no_tangent(x: Value) -> np.ndarray | None:
    """Returns the tangent of a constant: zero, or None if it is not an array."""
    if not is_array(x):
        return None
    aval = jax.typeof(x).to_tangent_aval()
    return np.zeros(aval.shape, aval.dtype)
