"""Gradients of each lane, of functions with dear branches, computed again on the way back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.divergence import gathering, ways_back
from batchax.divergence.auto import Auto
from batchax.kernel.axis import Axis

from support import forced, oracle

LANES, STEPS = 6, 5
RNG = np.random.default_rng(0)
XS = RNG.normal(size=(LANES, 3)).astype(np.float32)
TAKEN = RNG.integers(0, 3, (LANES, STEPS))
MATRIX = (RNG.normal(size=(3, 3)) / 2).astype(np.float32)


@pytest.fixture(autouse=True)
def every_branch_is_dear(monkeypatch):
    """Programs of tests are small."""
    forced.wait_before_branches(monkeypatch)
    monkeypatch.setattr(ways_back, "_AGAIN", np.inf)


def layer(x, matrix):
    return jnp.tanh(matrix @ jnp.tanh(matrix @ x))


def step(x, taken, matrix):
    x = lax.cond(taken == 1, layer, lambda x, _: x * 0.9, x + 0.1, matrix)
    return x, x.sum()


def seldom(x, taken, matrix):
    return lax.scan(lambda x, k: step(x, k, matrix), x, taken)


def two_in_calls(x, taken, matrix):
    """Two at a step, each in a call; what they return is needed on the way back besides."""
    once = jax.jit(step)

    def turn(x, k):
        x, y = once(jnp.sin(x), k, matrix)
        return once(x * y, (k + 1) % 3, matrix.T)

    return jax.jit(lambda x: lax.scan(turn, x, taken, reverse=True))(x)


def nested(x, taken, matrix):
    """In a loop in another, with a matrix that the outer one carries, and one made at each step."""

    def turn(carry, k):
        x, own = carry
        inner = lambda x, j: step(x, (k + j) % 3, own * 2)
        x, ys = lax.scan(inner, x, jnp.arange(3))
        return (jnp.sin(x), own * 0.9), ys.sum()

    return lax.scan(turn, (x, matrix), taken)


def switched(x, taken, matrix):
    """Three branches, one with numbers that have no derivative, and another with a loop."""

    def far(n, x):
        return n + 1, lax.scan(lambda x, _: (layer(x, matrix), None), x, None, length=2)[0]

    near = [lambda n, x: (n, x[0] * jnp.sin(matrix.T @ x)), lambda n, x: (n, x / 2)]
    turn = lambda c, k: (lax.switch(k, [far, *near], *c), c)
    return lax.scan(turn, (0, x), taken)


def checkpoints(x, taken, matrix):
    """Where JAX computes again: of a whole loop, and of each step."""
    once = jax.checkpoint(lambda x, k: step(x, k, matrix))
    return jax.checkpoint(seldom)(x, taken, matrix), lax.scan(once, x, taken)


def total(fun, *args):
    outs = jax.tree.leaves(fun(*args))
    return sum(jnp.sum(y**2) for y in outs if jnp.issubdtype(y.dtype, np.inexact))


def of_example(fun, which=(0, 2)):
    return jax.grad(functools.partial(total, fun), which)


def descent(x, taken, matrix):
    """Gradients in loops: of a branch in a ``scan``, and of a loop in a ``while``."""
    loss = lambda x, k: total(step, x, k, matrix)
    x, _ = lax.scan(lambda x, k: (x - jax.grad(loss)(x, k) / 10, None), x, taken)
    turn = lambda _, x: x - of_example(seldom, 0)(x, taken, matrix) / 100
    return lax.fori_loop(0, taken[0] + 1, turn, x)


GRADIENTS = {
    "seldom": of_example(seldom),
    "two in calls": of_example(two_in_calls),
    "nested": of_example(nested),
    "switched": of_example(switched),
    "checkpoints": jax.jit(of_example(checkpoints)),
    "descent": descent,
}
OTHERS = {
    "value and gradient": jax.value_and_grad(functools.partial(total, seldom), (0, 2)),
    "Jacobian": jax.jacrev(lambda *xs: two_in_calls(*xs)[0], (0, 2)),
    "Hessian": jax.hessian(functools.partial(total, nested)),
    "gradient of gradient": of_example(of_example(seldom)),
}
AXES = (0, 0, None)
compact_vmap = functools.partial(bx.vmap, divergence="compact")


def agree(functions, vmap=compact_vmap, outer=lambda f: f, args=(XS, TAKEN, MATRIX)):
    """Ours, and that of ``jax.vmap``; of all functions as one program."""
    every = lambda *args: [f(*args) for f in functions]
    got, expected = (jax.jit(outer(v(every, AXES)))(*args) for v in (vmap, jax.vmap))
    oracle.same(got, expected)


def rewritten(function, differs=(True, True, False)):
    """The program of one example, before and after."""
    program = jax.make_jaxpr(function)(XS[0], TAKEN[0], MATRIX)
    return program, ways_back.computing_again(program, differs, lambda eqn: True)


def test_gradients(monkeypatch):
    """Lanes wait forth and back."""
    count, call = [], gathering.Gathering.__call__
    monkeypatch.setattr(
        gathering.Gathering, "__call__", lambda *xs: (count.append(1), call(*xs))[1]
    )
    agree([GRADIENTS["two in calls"]])
    assert len(count) >= 4


@pytest.mark.parametrize("name", [*GRADIENTS, *OTHERS])
@pytest.mark.nightly
def test_each_gradient(name):
    agree([(GRADIENTS | OTHERS)[name]])


@pytest.mark.parametrize("name", GRADIENTS)
def test_no_weights_are_kept(name):
    before, after = map(str, rewritten(GRADIENTS[name]))
    assert before != after
    # The outer loop of two carries a matrix, which is another one at each of its steps.
    kept = f"[{STEPS},3,3,3]" if name == "nested" else f"[{STEPS},3,3]"
    assert kept not in after


@pytest.mark.parametrize(
    "vmap",
    [
        functools.partial(bx.vmap, divergence=forced.FORCED),
        functools.partial(compact_vmap, batch_size=4),
        functools.partial(compact_vmap, mesh="all"),
    ],
)
@pytest.mark.nightly
def test_ways_to_run(vmap):
    agree([GRADIENTS["two in calls"]], vmap)


@pytest.mark.nightly
def test_derivatives_and_lanes_of_others():
    some = [GRADIENTS["seldom"]]
    agree(some, outer=lambda f: jax.grad(functools.partial(total, f), (0, 2)))
    outer = lambda f: jax.vmap(f, (None, None, 0))
    agree(some, outer=outer, args=(XS, TAKEN, np.stack([MATRIX, 2 * MATRIX])))


def test_outside_of_jit_and_of_each_example():
    """And with NaN in a lane, which stays there."""
    x = XS.copy()
    x[2] = np.nan
    fun = jax.jit(GRADIENTS["seldom"])
    expected = [fun(v, k, MATRIX) for v, k in zip(x, TAKEN, strict=True)]
    got = compact_vmap(GRADIENTS["seldom"], AXES)(x, TAKEN, MATRIX)
    oracle.same(got, jax.tree.map(lambda *xs: np.stack(xs), *expected))
    assert np.isfinite(np.delete(got[0], 2, 0)).all()


def test_a_branch_that_calls_the_host_calls_once():
    def fun(x, taken, matrix):
        def told(x, matrix):
            jax.debug.callback(lambda _: None, x[0])
            return layer(x, matrix)

        turn = lambda x, k: (lax.cond(k == 1, told, lambda x, _: x, x, matrix), None)
        return lax.scan(turn, x, taken)

    before, after = rewritten(of_example(fun))
    assert after is before


def test_what_is_left_as_it_is(monkeypatch):
    """A branch that all lanes take together; one of which less is kept; one that is too dear."""
    assert len(set(map(id, rewritten(GRADIENTS["seldom"], (True, False, False))))) == 1

    def short(x, taken, matrix):
        wide = lambda x: jnp.tanh(x.sum()) * jnp.ones(8)
        own = jnp.outer(jnp.ones(8), x).ravel()
        turn = lambda x, k: (jnp.tile(lax.cond(k == 1, wide, lambda x: x[:8], x), 3), None)
        return lax.scan(turn, own, taken)

    assert len(set(map(id, rewritten(of_example(short, 0))))) == 1
    monkeypatch.setattr(ways_back, "_AGAIN", 0.0)
    own = (True, True, True)
    assert len(set(map(id, rewritten(GRADIENTS["seldom"], own)))) == 1


@pytest.mark.parametrize("lanes", [2, 64])
def test_auto_computes_again_for_many_lanes(lanes):
    """A branch takes as long for a few as for one: then it is the longer, the more it computes."""

    def fun(x, taken, matrix):
        far = lambda x: functools.reduce(lambda x, _: jnp.tanh(matrix @ x), range(20), x)
        return lax.scan(lambda x, k: (lax.cond(k == 1, far, jnp.sin, x), None), x, taken)

    program = jax.make_jaxpr(of_example(fun, 0))(np.ones(64), TAKEN[0], np.ones((64, 64)))
    auto = Auto()
    again = auto.of_example(Axis(lanes, divergence=auto), program, (0, 0, None))
    assert (again is program) == (lanes == 2)
