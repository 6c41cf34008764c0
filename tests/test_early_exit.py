"""`bx.scan` that ends early, against a Python loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.oracle import at_once, check_derivatives, example, same, total

LENGTH = 7


def until(carry):
    return jnp.sum(carry["c"]) > 2.0


def step(carry, x, w):
    c = jnp.tanh(w @ carry["c"]) + x
    return {"c": c, "n": carry["n"] + 1}, {"c": c * x, "n": carry["n"], "one": 1.0}


def in_python(carry, xs, w, in_axis=0, out_axis=0, reverse=False):
    """The loop over all entries, with a step that is not taken selected away."""
    ys, going_on, xs = [None] * LENGTH, True, jnp.moveaxis(xs, in_axis, 0)
    for t in reversed(range(LENGTH)) if reverse else range(LENGTH):
        going_on = going_on & ~until(carry)
        new, y = step(carry, xs[t], w)
        select = lambda x, y, go=going_on: jnp.where(go, x, y)
        carry = jax.tree.map(select, new, carry)
        ys[t] = jax.tree.map(lambda y, go=going_on: jnp.where(go, y, jnp.zeros_like(y)), y)
    stacked = jax.tree.map(lambda *y: jnp.stack(y), *ys)
    return carry, {**stacked, "c": jnp.moveaxis(stacked["c"], 0, out_axis)}


def scanned(carry, xs, w, in_axis=0, out_axis=0, reverse=False):
    out_axes = {"c": out_axis, "n": 0, "one": 0}
    f = bx.scan(step, (in_axis, None), out_axes, reverse=reverse, until=until)
    return f(carry, xs, w)


def start(c):
    return {"c": c, "n": 0}


def of_arrays(f, **options):
    """As a function of what may be differentiated, to what may be."""

    def g(c, xs, w):
        carry, ys = f(start(c), xs, w, **options)
        return carry["c"], ys["c"]

    return g


C, W = jnp.zeros(2), jnp.abs(example((2, 2), seed=1))
XS = 0.5 * jnp.abs(example((LENGTH, 2), seed=2))  # stops by itself


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_equals_a_python_loop(scale):
    args = (start(C), scale * XS, W)
    got, expected = at_once(scanned, in_python)(*args)
    same(got, expected)
    if scale == 1:
        same(scanned(*args), expected)  # outside of jit
    steps = int(got[0]["n"])
    assert {0.0: steps == LENGTH, 1.0: 1 < steps < LENGTH, 30.0: steps == 1}[scale]
    assert not got[1]["c"][steps:].any()


def test_derivatives():
    f, g = (of_arrays(h, in_axis=0, out_axis=1) for h in (scanned, in_python))
    check_derivatives(f, g, (C, XS, W), second=True, jit=True)


def test_a_step_that_was_not_taken_contributes_nothing():
    """Neither to its own lane nor to what all lanes share, though it would be NaN."""

    def f(x, w):
        step = lambda c, x: (jnp.log(c) * w, jnp.sqrt(x - 1.0) * w)
        return bx.scan(step, until=lambda c: c <= 1.0)(x[0], x)

    def by_hand(x, w, steps):
        c, ys = x[0], []
        for k in range(steps):
            c, y = jnp.log(c) * w, jnp.sqrt(x[k] - 1.0) * w
            ys.append(y)
        return c, jnp.stack(ys + [np.float32(0)] * (4 - steps))

    def steps(c):
        return 1 + steps(np.log(c) * 1.5) if c > 1.0 else 0

    xs = np.array([[9.0, 2.0, 3.0, 0.0], [3.0, 2.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0]], np.float32)
    counts, w = [steps(x[0]) for x in xs], np.float32(1.5)
    assert counts == [3, 2, 0]
    each = lambda run: lambda xs, w: [run(x, w, k) for x, k in zip(xs, counts, strict=True)]
    derived = lambda run: jax.grad(total(run), (0, 1))
    hands, gradients, got, of_each, of_sum = at_once(
        each(by_hand),
        each(lambda x, w, k: derived(lambda x, w: by_hand(x, w, k))(x, w)),
        each(lambda x, w, _: f(x, w)),
        bx.vmap(derived(f), (0, None)),
        derived(bx.vmap(f, (0, None))),
    )(xs, w)
    same(got, hands)
    stacked, weights = (jnp.stack(e) for e in zip(*gradients, strict=True))
    same(of_each, (stacked, weights))
    same(of_sum, (stacked, weights.sum()))


def test_length_alone_and_no_steps():
    f = bx.scan(lambda c: (c * 2, c), length=6, until=lambda c: c > 3)
    same(f(jnp.float32(1)), (jnp.float32(4), jnp.array([1, 2, 0, 0, 0, 0], jnp.float32)))
    f = bx.scan(lambda c, x: (c + x, c * x), 1, 1, until=lambda c: c.sum() > 3)
    xs = jnp.zeros((2, 0))
    same(f(jnp.ones(2), xs), (jnp.ones(2), xs))
    same(jax.grad(lambda c: f(c, xs)[0].sum())(jnp.ones(2)), jnp.ones(2))
    same(
        bx.vmap(f)(jnp.ones((3, 2)), jnp.zeros((3, 2, 0))), (jnp.ones((3, 2)), jnp.zeros((3, 2, 0)))
    )


MISTAKES = {
    "no function": (lambda: bx.scan(step, until=3), bx.ArgumentTypeError, "until must be a func"),
    "unroll": (
        lambda: bx.scan(step, until=until, unroll=2),
        bx.UnsupportedError,
        "unroll is 2, but a scan that may end early",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        call()
