"""Functions that run one example at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import batchax as bx

from support.oracle import example, same

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])


@VMAPS
def test_axes_trees_and_keywords(vmap):
    @bx.sequential_vmap
    def f(tree, y, *, scale, mode="plain"):
        return {"out": tree["a"] * scale + y, "mode": 1 if mode == "plain" else 2}

    a, y, scale = example((2, 3)), example((2,), seed=1), example((3,), seed=2)
    run = lambda vmap, f: vmap(
        lambda a, y, s: f({"a": a}, y, scale=s), in_axes=(1, None, 0), out_axes=-1
    )(a, y, scale)
    same(run(vmap, f), run(jax.vmap, f.fun))


@VMAPS
def test_it_is_a_loop(vmap):
    f = bx.sequential_vmap(jnp.tanh)
    text = str(jax.make_jaxpr(vmap(f))(jnp.ones((5, 3))))
    assert "scan" in text
    assert "length=5" in text
    assert "tanh" in text
    assert "[5,3] = tanh" not in text
    text = str(jax.make_jaxpr(vmap(vmap(f)))(jnp.ones((5, 4, 3))))
    assert "length=5" in text
    assert "length=4" in text


def count(f, *args):
    seen = []
    jax.effects_barrier()
    out = f(seen)(*args)
    jax.effects_barrier()
    return out, seen


ORDERS = {
    "vmap": lambda vmap, f: vmap(f),
    "jit of vmap": lambda vmap, f: jax.jit(vmap(f)),
    "grad of vmap": lambda vmap, f: jax.grad(lambda x: vmap(f)(x).sum()),
    "vmap of grad": lambda vmap, f: vmap(jax.grad(f)),
    "jit of vmap of grad": lambda vmap, f: jax.jit(vmap(jax.grad(f))),
    "vmap of hessian": lambda vmap, f: vmap(jax.hessian(f)),
    "chunks": lambda vmap, f: bx.vmap(f, batch_size=3),
}


@VMAPS
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.each_commit(7)
def test_effects_happen_once_in_order_of_the_lanes(vmap, order, ordered):
    xs = jnp.arange(4.0)

    def make(seen):
        @bx.sequential_vmap
        def f(x):
            if ordered:
                io_callback(lambda v: seen.append(float(v)), None, x, ordered=True)
            else:
                jax.debug.callback(lambda v: seen.append(float(v)), x)
            return jnp.sin(x)

        return ORDERS[order](vmap, f)

    got, seen = count(make, xs)
    same(got, ORDERS[order](jax.vmap, jnp.sin)(xs))
    assert seen == [0, 1, 2, 3]


def test_a_branch_not_taken_and_a_loop_that_ends_early_are_not_run():
    seen = []

    @bx.sequential_vmap
    def f(x):
        def slow(x):
            jax.debug.callback(lambda v: seen.append(int(v)), x)
            return 10 * x

        x = lax.cond(x > 1, slow, lambda x: x, x)
        return lax.while_loop(lambda c: c[0] < x, lambda c: (c[0] + 1, c[1] + 2), (0, 0))[1]

    same(bx.vmap(f)(jnp.arange(4)), jnp.array([0, 2, 40, 60]))
    jax.effects_barrier()
    assert seen == [2, 3]


def test_reverse_mode_keeps_arguments_only():
    wide, back = example((4, 512)), example((512, 512), seed=1)

    def f(x):  # intermediate values 128 times its size
        return jnp.sum(jnp.tanh(jnp.tanh(x @ wide) @ back))

    def temporaries(g, lanes):
        total = jax.jit(jax.grad(lambda x: bx.vmap(g)(x).sum()))
        analysis = total.lower(jnp.ones((lanes, 4))).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    sequential = bx.sequential_vmap(f)
    small, large = temporaries(sequential, 8), temporaries(sequential, 64)
    assert large - small < 4 * 64 * 4 * 4  # a few arrays of the size of the arguments
    assert temporaries(f, 64) > 4 * large


@VMAPS
def test_29996_a_loop_over_lanes_that_is_computed_while_compiling(vmap):
    known = []

    @jax.jit
    def f(x):
        with jax.ensure_compile_time_eval():
            y = vmap(bx.sequential_vmap(jnp.cos))(jnp.arange(10.0))
            known.append(np.asarray(y))  # has a value already
            slope = jax.grad(lambda x: vmap(bx.sequential_vmap(jnp.sin))(x).sum())(jnp.arange(3.0))
            known.append(np.asarray(slope))
        return x + y

    same(f(jnp.asarray(3.4)), 3.4 + jnp.cos(jnp.arange(10.0)))
    same(known[0], jnp.cos(jnp.arange(10.0)))
    same(known[1], jnp.cos(jnp.arange(3.0)))
