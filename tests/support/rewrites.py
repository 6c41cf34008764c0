"""A staged program written differently, or with one operation changed.

`rewritten` computes the same: equations in calls of ``jit``, commuting operands swapped,
operands transposed and back, and equations that occur twice or that nothing needs.
`mutated` is wrong in one place.
"""

import jax
import jax.extend.core
import numpy as np
from jax import lax
from jax.extend.core import Literal

COMMUTING = ("add", "mul", "max", "min", "and", "or", "xor", "eq", "ne")

# What a primitive becomes: an operation of the same types that computes something else.
MUTATIONS = {
    "sin": lambda x, **_: lax.cos(x),
    "cos": lambda x, **_: lax.sin(x),
    "tanh": lambda x, **_: lax.tanh(lax.mul(x, lax.full_like(x, 1.25))),
    "add": lambda x, y, **_: lax.sub(x, y),
    "sub": lambda x, y, **_: lax.sub(y, x),
    "div": lambda x, y, **_: lax.div(y, x),
    "mul": lambda x, y, **_: lax.add(x, y),
    "max": lambda x, y, **_: lax.min(x, y),
    "lt": lambda x, y, **_: lax.gt(x, y),
    "gt": lambda x, y, **_: lax.lt(x, y),
    "atan2": lambda x, y, **_: lax.atan2(y, x),
    "reduce_sum": lambda x, axes, **_: lax.reduce_max(x, axes),
    "reduce_max": lambda x, axes, **_: lax.reduce_min(x, axes),
    "cumsum": lambda x, axis, reverse: lax.cumsum(x, axis=axis, reverse=not reverse),
    "sort": lambda x, dimension, **_: lax.neg(lax.sort(x, dimension=dimension)),
    "rev": lambda x, dimensions: x,
    "dot_general": lambda x, y, **params: lax.neg(lax.dot_general_p.bind(x, y, **params)),
    "select_n": lambda which, *cases: lax.select_n_p.bind(which, *cases[::-1]),
    "transpose": lambda x, permutation: lax.neg(lax.transpose(x, permutation)),
}


def rewritten(program, rng):
    """A function of the inputs of `program` that computes the same."""

    def change(eqn, args):
        if eqn.primitive.name in COMMUTING and rng.random() < 0.5:
            args = args[::-1]
        args = [_turned_twice(x) if np.ndim(x) > 1 and rng.random() < 0.3 else x for x in args]
        if rng.random() < 0.2:
            _bind(eqn, [lax.neg(x) if _is_float(x) else x for x in args])  # nothing needs this
            _bind(eqn, args)
        if rng.random() < 0.3:
            return jax.jit(lambda *xs: _bind(eqn, xs))(*args)
        return _bind(eqn, args)

    return _run(program, change)


def mutated(program, which):
    """`program` with the equation number `which` of `mutable` ones changed."""
    target = mutable(program)[which]

    def change(eqn, args):
        if eqn is target:
            return [MUTATIONS[eqn.primitive.name](*args, **eqn.params)]
        return _bind(eqn, args)

    return _run(program, change)


def mutable(program):
    """The equations that `MUTATIONS` can change."""
    return [e for e in program.jaxpr.eqns if e.primitive.name in MUTATIONS and len(e.outvars) == 1]


def _run(program, change):
    def run(*inputs):
        jaxpr = program.jaxpr
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *inputs], strict=True))

        def value(v):
            return (
                lax.convert_element_type(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]
            )

        for eqn in jaxpr.eqns:
            outs = change(eqn, [value(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    return run


def _bind(eqn, args):
    if eqn.primitive.name.startswith(("custom_jvp", "custom_vjp")):
        return jax.extend.core.jaxpr_as_fun(eqn.params["call_jaxpr"])(*args)
    out = eqn.primitive.bind(*args, **eqn.params)
    return out if eqn.primitive.multiple_results else [out]


def _turned_twice(x):
    return jax.numpy.swapaxes(jax.numpy.swapaxes(x, 0, -1), 0, -1)


def _is_float(x):
    return jax.numpy.issubdtype(jax.numpy.result_type(x), jax.numpy.floating)
