"""Programs that are exported for another platform than the one that traces mask their lanes."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.forced import FORCED, KERNELS, LAST, MASKED_DERIVATIVES

N = 12
COUNTS = jnp.asarray([3, 0, 40, 7, 7, 1, 0, 12, 5, 5, 90, 2])
POINTS = jnp.asarray(np.random.default_rng(0).normal(size=(N, 4)), "float32")


def loop(count, x):
    return lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1]


def nested(count, x):
    return lax.scan(lambda x, k: (loop((count + k) % 5, x), x[0]), x, jnp.arange(3))


def bounded(count, x):
    step = lambda c: (c[0] + 1, jnp.tanh(c[1]))
    return bx.bounded_while(lambda c: c[0] < count, step, (0, x), 100)[1]


def branch(count, x):
    return lax.cond(count > 4, lambda x: jnp.sort(jnp.tanh(x)) + x[0], lambda x: 2 * x, x)


def in_a_branch(count, x):
    return lax.cond(count > 4, lambda x: loop(count, x), lambda x: branch(count, x) + 1, x)


def gradient(count, x):
    return jax.grad(lambda x: branch(count, x) @ x)(x)


def moved(text):
    """How many operations of a program loop, branch, or move lanes."""
    kinds = "while|case|if|gather|scatter|dynamic_slice|dynamic_update_slice|dynamic_gather"
    return Counter(re.findall(rf"stablehlo\.({kinds})\b", text))


def exported(fun, args, *platforms):
    return jax.export.export(jax.jit(fun), platforms=platforms)(*args)


@pytest.mark.parametrize("fun", [loop, nested, bounded, branch, in_a_branch, gradient])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lanes_are_masked_on_other_platforms(fun, platform):
    args = COUNTS, POINTS
    masked = exported(bx.vmap(fun, divergence="predicate"), args, platform).mlir_module()
    decided = 0
    for way in (FORCED, LAST, KERNELS, MASKED_DERIVATIVES):
        lanes = bx.vmap(fun, divergence=way)
        text = exported(lanes, args, platform).mlir_module()
        assert moved(text) == moved(masked), way
        assert "small_call" not in text
        decided += moved(exported(lanes, args, "cpu").mlir_module()) != moved(masked)
    assert decided > 1
    twice = jax.vmap(bx.vmap(fun, divergence=FORCED), (None, 0))
    plain = jax.vmap(bx.vmap(fun, divergence="predicate"), (None, 0))
    args = COUNTS, jnp.stack([POINTS, -POINTS])
    others = [exported(f, args, platform).mlir_module() for f in (twice, plain)]
    assert moved(others[0])["scatter"] == moved(others[1])["scatter"]
    assert moved(others[0])["while"] == moved(others[1])["while"]


def test_each_platform_has_its_own_program():
    args = COUNTS, POINTS
    lanes = bx.vmap(in_a_branch, divergence=FORCED)
    of_all = exported(lanes, args, "cpu", "cuda", "tpu")
    text = of_all.mlir_module()
    of_cpu, of_gpu = (moved(exported(lanes, args, p).mlir_module()) for p in ("cpu", "cuda"))
    assert moved(text)["while"] >= of_cpu["while"] + of_gpu["while"]
    expected = jax.vmap(in_a_branch)(*args)
    for program in (of_all, exported(lanes, args, "cpu")):
        np.testing.assert_allclose(program.call(*args), expected, rtol=1e-5)


def test_what_a_user_asks_for_is_exported():
    args = COUNTS, POINTS
    masked = exported(bx.vmap(loop, divergence="predicate"), args, "cuda").mlir_module()
    asked = exported(bx.vmap(loop, divergence=bx.Compact(width=4)), args, "cuda").mlir_module()
    assert moved(asked)["while"] > moved(masked)["while"]


def test_derivatives_of_what_is_exported():
    args = COUNTS, POINTS

    def pulled(count, x, out):
        return jax.vjp(lambda x: bx.vmap(branch, divergence=FORCED)(count, x), x)[1](out)[0]

    masked = lambda count, x, out: jax.vjp(
        lambda x: bx.vmap(branch, divergence="predicate")(count, x), x
    )[1](out)[0]
    args = COUNTS, POINTS, jnp.cos(POINTS)
    texts = [exported(f, args, "cuda").mlir_module() for f in (pulled, masked)]
    assert moved(texts[0])["while"] == moved(texts[1])["while"] == 0
    np.testing.assert_allclose(
        exported(pulled, args, "cpu").call(*args), jax.jit(masked)(*args), rtol=1e-5
    )
