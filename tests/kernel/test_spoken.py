"""Messages name what users wrote, and its line, and no primitive that they did not write."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import batchax as bx
from batchax.jaxprs.error_format import line_of, spoken
from batchax.jaxprs.primitive_facts import _own

X = jnp.arange(15.0).reshape(5, 3)
HERE = r"test_spoken.py:\d+"


def newton(x, step=lambda c: c + 1):
    return bx.bounded_while(lambda c: c.sum() < 9, lambda c: jnp.abs(step(c)) + 1, x, 3)


def chunks(f):
    return bx.vmap(f, batch_size=2)


def with_rule(rule):
    f = bx.custom_vmap(lambda x: x)
    f.def_vmap(lambda n, batched, x, *, axis_name: (rule(x, axis_name), True))
    return f


def rows(f):
    return jax.jit(lambda lengths: bx.vmap(f)(bx.Ragged(X.ravel(), lengths)))


def divergent(body):
    loop = lambda x: lax.while_loop(lambda c: c.sum() < 9, body, x)
    return bx.vmap(loop, axis_name="i", divergence="compact")


def in_branch(f):
    expensive = lambda x: jnp.linalg.inv(jnp.outer(x, x) + jnp.eye(3)) @ x + f(x)
    inner = lambda x: lax.cond(x[0] > 1, expensive, lambda x: x, x)
    return bx.vmap(bx.vmap(inner, divergence="compact"), axis_name="i", batch_size=2)


def kept(x):
    return io_callback(np.asarray, jax.typeof(x), x)


def meeting_and_telling(x):
    jax.debug.callback(lambda: None)
    return lax.psum(x, "i")


def summed(f):
    return jax.grad(lambda x: f(x).sum())


# What is refused, and what the message says of what and where it is.
REFUSED = {
    "bounded loop of a row": (rows(newton), [9, 6], f"operation `bounded loop` at .*{HERE}"),
    "branch over the places of a row": (
        rows(bx.vmap(lambda v: lax.cond(v > 1, lambda v: 1 / v, jnp.sin, v))),
        [9, 6],
        f"operation `operands of masked lanes` at .*{HERE}",
    ),
    "collective in chunks in a loop": (
        divergent(lambda c: c + 1 + chunks(lambda v: v + lax.psum(v, "i"))(c)),
        X,
        f"{HERE}.*`psum` over a named axis is inside a loop",
    ),
    "collective in a bounded loop in a loop": (
        divergent(lambda c: newton(c, lambda d: lax.psum(d, "i"))),
        X,
        f"{HERE}.*`psum` over a named axis is inside a loop",
    ),
    "index in a bounded loop in a branch": (
        in_branch(lambda x: newton(x, lambda c: c + lax.axis_index("i"))),
        jnp.stack([X, X + 1, X]),
        f"{HERE}.*`bounded loop` uses the axis 'i' inside a branch",
    ),
    "chunks in a rule": (
        bx.vmap(with_rule(lambda x, i: chunks(lambda v: v + lax.psum(v, i))(x)), axis_name="i"),
        X,
        f"{HERE}.*`vmap in chunks` over 'i' contains",
    ),
    "bounded loop in a rule": (
        bx.vmap(with_rule(lambda x, i: newton(x, lambda c: lax.psum(c, i))), axis_name="i"),
        X,
        f"{HERE}.*`bounded loop` over 'i' contains",
    ),
    "calls and collectives of lanes that diverge on devices": (
        bx.vmap(lambda x: newton(x, meeting_and_telling), axis_name="i", mesh="all"),
        X,
        f"{HERE}.*`bounded loop` holds both a callback with effects and a collective",
    ),
    "derivative of a bounded loop that has a host callback": (
        summed(lambda x: newton(x, kept)),
        X,
        "a bounded loop that does input or output",
    ),
    "derivative of chunks that call the host": (
        summed(chunks(kept)),
        X,
        "a function that does input or output",
    ),
}


@pytest.mark.usefixtures("longer_rows")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_as_users_know_it(name):
    call, x, said = REFUSED[name]
    with pytest.raises(bx.UnsupportedError) as caught:
        call(jnp.asarray(x))
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(said, message), message
    for primitive in _own:
        assert not re.search(rf"\b{primitive.name}\b", message), message
    assert not message.startswith(":")


def test_the_line_is_that_of_what_is_inside_where_batchax_made_the_equation():
    nested = bx.vmap(chunks(lambda x: jnp.sin(x)), batch_size=2)
    eqns = jax.make_jaxpr(nested)(X[:, :, None]).jaxpr.eqns
    (outer,) = [eqn for eqn in eqns if eqn.primitive in _own]
    assert spoken(outer) == "`vmap in chunks`"
    assert re.search(HERE, line_of(outer))
    (sine,) = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns
    assert spoken(sine) == "`sin`"
