"""What the compiler makes of chunks: no copy of a whole input or output, no work twice."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx

ROWS, COLUMNS = 6, 10

# What may be of the size of a whole input or output: the arrays themselves, a result
# before the first chunk, and writing a chunk in place.
WHOLE_ALLOWED = {
    *("parameter", "tuple", "get-tuple-element", "while"),
    *("broadcast", "dynamic-update-slice", "fusion", "call"),
}

# A chunk without its lanes' neighbors: `name = type[sizes]{layout} operation(...)`.
_INSTRUCTION = re.compile(r"= \w+\[([\d,]*)\](?:\{[^}]*\})? ([\w-]+)\(")


def instructions(fun, *args):
    """The operations of the optimised program, those inside fusions included, and sizes."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    found = _INSTRUCTION.findall(text)
    assert found
    return [(name, math.prod(map(int, filter(None, dims.split(","))))) for dims, name in found]


def whole(fun, *args, lanes):
    """The operations whose results are as large as an input of all lanes."""
    size = lanes * ROWS * COLUMNS
    return {name for name, count in instructions(fun, *args) if count >= size}


def dots(fun, *args):
    """How many matrix products there are of each result size."""
    return Counter(count for name, count in instructions(fun, *args) if name == "dot")


def model(x, w):
    return jnp.tanh(x @ w) @ w


def array(lanes, axis):
    shape = [ROWS, COLUMNS]
    shape.insert(axis, lanes)
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)


W = jax.ShapeDtypeStruct((COLUMNS, COLUMNS), jnp.float32)


def gradient(f):
    return lambda x, w, cotangents: jax.vjp(f, x, w)[1](cotangents)


@pytest.mark.parametrize("lanes", [8, 9], ids=["even", "remainder"])
@pytest.mark.parametrize("in_axis", [0, 1, 2])
@pytest.mark.parametrize("out_axis", [0, 1, 2])
@pytest.mark.each_commit(5)
def test_nothing_whole_is_copied_or_transposed(lanes, in_axis, out_axis):
    f = bx.vmap(model, (in_axis, None), out_axis, batch_size=4)
    x, y = array(lanes, in_axis), array(lanes, out_axis)
    assert whole(f, x, W, lanes=lanes) <= WHOLE_ALLOWED
    assert whole(gradient(f), x, W, y, lanes=lanes) <= WHOLE_ALLOWED


def test_the_test_above_sees_copies():
    def mapped(x, w):
        out = lax.map(lambda x: model(x, w), jnp.moveaxis(x, 2, 0), batch_size=4)
        return jnp.moveaxis(out, 0, 1)

    x, y = array(9, 2), array(9, 1)
    assert not whole(mapped, x, W, lanes=9) <= WHOLE_ALLOWED
    assert not whole(gradient(mapped), x, W, y, lanes=9) <= WHOLE_ALLOWED
    plain = bx.vmap(model, (2, None), 1)
    assert not whole(plain, x, W, lanes=9) <= WHOLE_ALLOWED


def test_reduced_outputs_need_nothing_whole():
    f = bx.vmap(model, (1, None), bx.Reduce("mean"), batch_size=4)
    assert whole(f, array(9, 1), W, lanes=9) <= {"parameter", "tuple", "get-tuple-element", "while"}


@pytest.mark.parametrize("derivative", [False, True], ids=["forward", "gradient"])
def test_without_remainder_the_body_is_compiled_once(derivative):
    f = bx.vmap(model, (0, None), batch_size=4)
    run = gradient(f) if derivative else f

    def count(lanes):
        x = array(lanes, 0)
        return dots(run, x, W, x) if derivative else dots(run, x, W)

    at_once = count(4)
    # As many products as for the lanes of one chunk, of the same sizes, however many follow.
    assert count(8) == count(16) == at_once
    assert sum(at_once.values()) == (5 if derivative else 2)
    # A last chunk of one lane adds its own products, of its own size.
    rest = dots(run, array(1, 0), W, array(1, 0)) if derivative else dots(run, array(1, 0), W)
    assert count(9) == count(8) + rest
