"""Where nothing is gained, what is compiled is what is compiled of `jax.vmap`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

LANES = 256


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), "float32")


def branches(index, x, _):
    return lax.switch(index, [jnp.tanh, jnp.sin], x)


def fifty(index, x, _):
    def often(f):
        def branch(x):
            for _ in range(50):
                x = f(x)
            return x

        return branch

    return lax.switch(index, [often(jnp.tanh), often(jnp.sin)], x)


def products(count, x, weights):
    step = lambda c: (c[0] + 1, jnp.tanh(weights @ c[1]))
    return lax.while_loop(lambda c: c[0] < count, step, (jnp.int32(0), x))[1]


def layers(count, x, weights):
    def step(c):
        i, x = c
        for _ in range(3):
            x = jnp.tanh(weights @ x)
        return i + 1, x

    return lax.while_loop(lambda c: c[0] < count, step, (jnp.int32(0), x))[1]


def gradient(fun):
    return jax.grad(lambda index, x, weights: jnp.sum(fun(index, x, weights) ** 2), 1)


def derivative(of):
    two = lambda x, weights: jnp.tanh(weights @ jnp.tanh(weights @ x))
    return lambda index, x, weights: of(two)(x, weights)


FUNCTIONS = {
    "branches": branches,
    "long branches": fifty,
    "products with short vectors": products,
    "layers of short vectors": layers,
    # Lanes come last out of a product of a shared matrix with a short vector of each.
    "jacfwd of layers": derivative(jax.jacfwd),
    "jacrev of layers": derivative(jax.jacrev),
    "Hessian of layers": derivative(jax.hessian),
}


def compiled(batched, *args):
    """The optimized program as lines, without names of values and places in source files."""
    text = jax.jit(batched).lower(*args).compile().as_text()
    text = text[re.search(r"(?m)^(%|ENTRY)", text).start() :]
    text = re.sub(r",? ?metadata=\{[^}]*\}", "", text)
    text = re.sub(r"(?m)^(ENTRY )?[%\w.\-]+ \((.*)$", r"\1(\2", text)
    text = re.sub(r"[\w.\-]+: (?=\w+\[|\()", "", text)
    numbers = {}
    return re.sub(r"%[\w.\-]+", lambda m: f"%{numbers.setdefault(m[0], len(numbers))}", text)


def both(fun):
    """What is compiled of `bx.vmap`, and of `jax.vmap`."""
    args = jnp.arange(LANES, dtype="int32") % 2, drawn(LANES, 16), drawn(16, 16) / 4
    batched = bx.vmap(lambda *args: fun(*args), (0, 0, None))
    return compiled(batched, *args), compiled(jax.vmap(fun, (0, 0, None)), *args)


@pytest.mark.parametrize("what", FUNCTIONS)
def test_the_same_is_compiled(what):
    ours, theirs = both(FUNCTIONS[what])
    assert ours == theirs


@pytest.mark.parametrize("branches", [2, 3])
def test_gradients_keep_what_sines_compute_of_lanes_that_took_the_branch(branches):
    """Others have zeros there: handed on as it is it was computed for them, too."""
    sines = lambda x: jnp.sin(jnp.sin(x))
    cases = [sines, lambda x: x, lambda x: sines(2 * x)][:branches]
    ours, theirs = both(gradient(lambda index, x, _: lax.switch(index, cases, x)))
    assert ours == theirs


def test_gradients_of_branches_have_no_more_operations_and_selections():
    ours, theirs = (program.splitlines() for program in both(gradient(branches)))
    assert len(ours) <= len(theirs)
    assert sum(" select(" in x for x in ours) <= sum(" select(" in x for x in theirs)
