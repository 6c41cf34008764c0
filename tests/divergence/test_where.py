"""Where lanes diverge: not on other platforms in exported programs, nor where nothing is gained."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from benchmarks.hlo import normalised_hlo

from support.forced import FORCED, KERNELS, LAST, MASKED_DERIVATIVES

N = 12
COUNTS = jnp.asarray([3, 0, 40, 7, 7, 1, 0, 12, 5, 5, 90, 2])
POINTS = jnp.asarray(np.random.default_rng(0).normal(size=(N, 4)), "float32")


def loop(count, x):
    return lax.while_loop(lambda c: c[0] < count, lambda c: (c[0] + 1, jnp.tanh(c[1])), (0, x))[1]


def nested(count, x):
    return lax.scan(lambda x, k: (loop((count + k) % 5, x), x[0]), x, jnp.arange(3))


def bounded_of_exported(count, x):
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


@pytest.mark.parametrize("fun", [loop, nested, bounded_of_exported, branch, in_a_branch, gradient])
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


def tangents(vmap, fun):
    return lambda count, x: jax.jvp(lambda x: vmap(fun)(count, x), (x,), (x,))[1]


def gradients(vmap, fun):
    return lambda count, x: jax.grad(lambda x: jnp.sum(vmap(fun)(count, x) ** 2))(x)


def gradients_of_lanes(vmap, fun):
    return vmap(jax.grad(lambda count, x: jnp.sum(fun(count, x) ** 2), argnums=1))


def checkpointed(vmap, fun):
    return gradients(vmap, jax.checkpoint(fun))


def second(vmap, fun):
    first = gradients(vmap, fun)
    return lambda count, x: jax.jvp(lambda x: first(count, x), (x,), (x,))[1]


def of_two_axes(vmap, fun):
    both = lambda fun: jax.vmap(vmap(fun), (None, 0))
    return lambda count, x: gradients(both, fun)(count, jnp.stack([x, -x]))


def until_of_exported(count, x):
    step = lambda x, _: (jnp.tanh(x), x)
    xs = jnp.zeros(20)
    return bx.scan(step, until=lambda x: x[0] < 1 / (1 + count))(x, xs)[1].sum(0)


def scan_of_bounded(count, x):
    step = lambda x, k: (bounded_of_exported((count + k) % 5, x), None)
    return lax.scan(step, x, jnp.arange(3))[0]


DERIVATIVES = [
    (tangents, loop),
    (tangents, nested),
    (tangents, until_of_exported),
    *((of, bounded_of_exported) for of in (tangents, gradients, gradients_of_lanes)),
    *((of, bounded_of_exported) for of in (checkpointed, second, of_two_axes)),
    (gradients, until_of_exported),
    (gradients_of_lanes, scan_of_bounded),
]


def but_for_platforms(text):
    """How many operations loop, branch, or move lanes, except for branches of platforms."""
    return moved(text) - Counter({"case": moved(text)["case"]})


@pytest.mark.parametrize(("of", "fun"), DERIVATIVES)
def test_lanes_are_masked_in_derivatives_on_other_platforms(of, fun):
    args = COUNTS, POINTS
    masked = of(lambda fun: bx.vmap(fun, divergence="predicate"), fun)
    expected = but_for_platforms(exported(masked, args, "cuda").mlir_module())
    lanes = of(lambda fun: bx.vmap(fun, divergence=FORCED), fun)
    for platform in ("cuda", "rocm", "tpu"):
        there = exported(lanes, args, platform).mlir_module()
        assert but_for_platforms(there) == expected, platform
    here = exported(lanes, args, "cpu").mlir_module()
    assert fun in (nested, scan_of_bounded) or but_for_platforms(here) != expected


@pytest.mark.parametrize("of", [gradients, gradients_of_lanes])
def test_derivatives_are_the_same_in_a_program_of_several_platforms(of):
    args = COUNTS, POINTS
    lanes = of(lambda fun: bx.vmap(fun, divergence=FORCED), bounded_of_exported)
    masked = of(lambda fun: bx.vmap(fun, divergence="predicate"), bounded_of_exported)
    both = exported(lanes, args, "cpu", "cuda")
    np.testing.assert_allclose(both.call(*args), jax.jit(masked)(*args), rtol=2e-5)


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


def gradient_of_as_jax_vmap(fun):
    return jax.grad(lambda index, x, weights: jnp.sum(fun(index, x, weights) ** 2), 1)


def derivative(of):
    two = lambda x, weights: jnp.tanh(weights @ jnp.tanh(weights @ x))
    return lambda index, x, weights: of(two)(x, weights)


FUNCTIONS = {
    "branches": branches,
    "long branches": fifty,
    # Lanes come last out of a product of a shared matrix with a short vector of each.
    "jacfwd of layers": derivative(jax.jacfwd),
    "jacrev of layers": derivative(jax.jacrev),
    "Hessian of layers": derivative(jax.hessian),
}


def both(fun):
    """What is compiled of `bx.vmap`, and of `jax.vmap`."""
    args = jnp.arange(LANES, dtype="int32") % 2, drawn(LANES, 16), drawn(16, 16) / 4
    batched = bx.vmap(lambda *args: fun(*args), (0, 0, None))
    ways = (
        jax.jit(f).lower(*args).compile().as_text() for f in (batched, jax.vmap(fun, (0, 0, None)))
    )
    return [normalised_hlo(text) for text in ways]


@pytest.mark.parametrize("what", FUNCTIONS)
def test_the_same_is_compiled(what):
    ours, theirs = both(FUNCTIONS[what])
    assert ours == theirs


@pytest.mark.parametrize("branches", [2, 3])
def test_gradients_keep_what_sines_compute_of_lanes_that_took_the_branch(branches):
    """Others have zeros there: handed on as it is it was computed for them, too."""
    sines = lambda x: jnp.sin(jnp.sin(x))
    cases = [sines, lambda x: x, lambda x: sines(2 * x)][:branches]
    ours, theirs = both(gradient_of_as_jax_vmap(lambda index, x, _: lax.switch(index, cases, x)))
    assert ours == theirs


def test_gradients_of_branches_have_no_more_operations_and_selections():
    ours, theirs = (program.splitlines() for program in both(gradient_of_as_jax_vmap(branches)))
    assert len(ours) <= len(theirs)
    assert sum(" select(" in x for x in ours) <= sum(" select(" in x for x in theirs)
