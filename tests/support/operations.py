"""Operations by name, and those of a batched program, to compare with `jax.vmap`."""

from collections import Counter

import jax

import batchax as bx
from batchax._compat import find_primitive
from batchax.jaxprs.bodies import with_inside


def bind(name, **params):
    """The primitive itself, as a function of its operands."""
    primitive = find_primitive(name)
    return lambda *args: primitive.bind(*args, **params)


def equations(fun, *args):
    """The equations of `fun`, those of inner programs included."""
    return list(with_inside(jax.make_jaxpr(fun)(*args).jaxpr.eqns))


def operations(fun, *args):
    """How often each primitive occurs in `fun`, inner programs included."""
    permutes = lambda eqn: eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
    return Counter(
        "transpose" if permutes(eqn) else eqn.primitive.name for eqn in equations(fun, *args)
    )


def no_more_operations(fun, *args, in_axes=0):
    """Checks that batchax emits no more equations, and no more transposes, than JAX."""
    ours = operations(bx.vmap(fun, in_axes=in_axes), *args)
    jaxs = operations(jax.vmap(fun, in_axes=in_axes), *args)
    assert ours.total() <= jaxs.total(), (ours, jaxs)
    assert ours["transpose"] <= jaxs["transpose"], (ours, jaxs)
