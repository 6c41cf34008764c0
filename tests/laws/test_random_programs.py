"""Programs nobody wrote: what tables of rules miss shows up in their combinations."""

import jax
import jax.numpy as jnp
import pytest

import batchax as bx

from support.oracle import example, is_inexact, loop, same
from support.programs import random_program

LANES = 3
LOOSE = {"rtol": 2e-3, "atol": 2e-3}


def inputs(seed):
    return (
        example((3, LANES), seed=seed),
        example((LANES, 2, 3), seed=seed + 1),
        example((LANES,), jnp.int32, seed=seed + 2, low=-1, high=4),
        example((3, 3), seed=seed + 3),
    )


IN_AXES = (1, 0, 0, None)


@pytest.mark.parametrize("seed", range(18))
def test_values_and_gradients(seed):
    program = random_program(seed)
    args = inputs(seed)
    one = jax.jit(program)
    expected = loop(one, args, IN_AXES)
    batched = bx.vmap(program, IN_AXES)
    same(jax.jit(batched)(*args), expected, LOOSE, "values")
    same(jax.jit(jax.vmap(program, IN_AXES))(*args), expected, LOOSE, "jax.vmap")

    def total(f):
        def g(vector, matrix, weights):
            outs = f(vector, matrix, args[2], weights)
            return sum(jnp.sum(jnp.sin(o)) for o in outs if is_inexact(o))

        return g

    gradient = jax.grad(total(lambda *a: loop(one, a, IN_AXES)), argnums=(0, 1, 2))
    mine = jax.jit(jax.grad(total(batched), argnums=(0, 1, 2)))
    point = (args[0], args[1], args[3])
    same(mine(*point), gradient(*point), LOOSE, "gradients")


@pytest.mark.parametrize("seed", range(100, 108))
def test_nested_and_forward_mode(seed):
    program = random_program(seed, steps=6)
    args = inputs(seed)
    doubled = [jnp.stack([a, a[::-1]]) for a in args]
    expected = jax.jit(jax.vmap(jax.vmap(program, IN_AXES)))(*doubled)
    for outer, inner in ((bx.vmap, bx.vmap), (jax.vmap, bx.vmap), (bx.vmap, jax.vmap)):
        got = jax.jit(outer(inner(program, IN_AXES)))(*doubled)
        same(got, expected, LOOSE, f"{outer.__module__} of {inner.__module__}")

    def push(f):
        def g(vector):
            outs = f(vector, *args[1:])
            return [o for o in outs if is_inexact(o)]

        return jax.jit(lambda x: jax.jvp(g, (x,), (jnp.cos(x),)))

    same(push(bx.vmap(program, IN_AXES))(args[0]), push(jax.vmap(program, IN_AXES))(args[0]), LOOSE)
