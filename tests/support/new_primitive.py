"""A primitive of a test, as users make them."""

from functools import partial

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir


def new_primitive(name, fun, several=False):
    """A primitive that computes `fun`, with a derivative, and without any batching rule.

    several: whether `fun` returns a list of arrays, and not one.
    """
    p = Primitive(name)
    p.multiple_results = several

    def types(*xs, **params):
        outs = jax.eval_shape(partial(fun, **params), *xs)
        return jax.tree.map(lambda y: ShapedArray(y.shape, y.dtype), outs)

    p.def_impl(fun)
    p.def_abstract_eval(types)
    mlir.register_lowering(p, mlir.lower_fun(fun, multiple_results=several))
    ad.primitive_jvps[p] = lambda xs, ts, **params: jax.jvp(
        partial(fun, **params), tuple(xs), tuple(map(ad.instantiate_zeros, ts))
    )
    return p
