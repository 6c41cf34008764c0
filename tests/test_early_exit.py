"""`bx.scan` that ends early, against a Python loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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


@pytest.mark.parametrize(
    ("vmap", "lanes"),
    [(bx.vmap, (0, 0, None)), (bx.vmap, (None, 2, 1)), (jax.vmap, (None, 1, None))],
)
@pytest.mark.each_commit(2)
def test_batched(vmap, lanes):
    """Lanes that end at different steps; the batch axis before and behind that of the steps."""
    axes = dict(zip(("c", "xs", "w"), lanes, strict=True))
    xs = jnp.stack([0.5 * XS, XS, 30 * XS], axes["xs"])
    c = C if axes["c"] is None else jnp.stack([C, C + 0.1, C], axes["c"])
    w = W if axes["w"] is None else jnp.stack([W, -W, W], axes["w"])
    f, g = (of_arrays(h, out_axis=1) for h in (scanned, in_python))
    pairs = (vmap, f), (jax.vmap, g)
    both = [v(h, lanes, -1) for v, h in pairs]
    of_sums = [jax.grad(total(h), (0, 1, 2)) for h in both]
    of_each = [v(jax.grad(total(h), (0, 1, 2)), lanes) for v, h in pairs]
    results = at_once(*both, *of_sums, *of_each)(c, xs, w)
    for got, expected in zip(results[::2], results[1::2], strict=True):
        same(got, expected)


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


def test_keys_are_scanned_and_stacked():
    draw = lambda c, key: (c + jax.random.uniform(key), (key, jax.random.bits(key)))
    keys = jax.random.split(jax.random.key(1), 5)
    carry, (used, bits) = bx.scan(draw, until=lambda c: c > 1.0)(0.0, keys)
    _, (_, all_bits) = lax.scan(draw, 0.0, keys)
    steps = int((bits != 0).sum())
    assert carry > 1.0
    assert 1 < steps < 5
    same((bits[:steps], used[:steps]), (all_bits[:steps], keys[:steps]))
    same(jax.random.key_data(used)[steps:], jnp.zeros((5 - steps, 2), jnp.uint32))


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


def test_inside_shard_map():
    """Devices stop at different steps, and read an array that is the same on all."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def f(c, xs):
        return bx.scan(lambda c, x: (c * x, c + x), 1, 1, until=lambda c: c.sum() > 5.0)(c, xs)

    def alone(c, xs):
        parts = [f(part, xs) for part in (c[:2], c[2:])]
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    sharded = jax.shard_map(f, mesh=mesh, in_specs=(spec("d"), spec()), out_specs=spec("d"))
    args = jnp.array([0.5, 0.5, 2.0, 2.0]), jnp.full((2, 4), 1.5)
    same(jax.jit(sharded)(*args), jax.jit(alone)(*args))
    same(*(jax.jit(jax.grad(total(h), (0, 1)))(*args) for h in (sharded, alone)))


def test_memory_of_the_gradient():
    """Beside the arrays that are scanned, about as many carries as the root of the steps."""

    def f(c, xs):
        step = lambda c, x: (jnp.sin(c) * c + x, None)
        return bx.scan(step, until=lambda c: c.sum() < -1)(c, xs)[0].sum()

    args = jnp.ones(1000), jnp.ones(10_000)
    compiled = jax.jit(jax.grad(f)).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * 1000 * (2 * 100 + 10) + 9 * 40_000


MISTAKES = {
    "no function": (lambda: bx.scan(step, until=3), bx.ArgumentTypeError, "until must be a func"),
    "unroll": (
        lambda: bx.scan(step, until=until, unroll=2),
        bx.UnsupportedError,
        "unroll is 2, but a scan that may end early",
    ),
    "predicate": (
        lambda: bx.scan(lambda c, x: (c, x), until=lambda c: c)(0.0, XS),
        bx.ArgumentTypeError,
        r"must return one truth value.*returned float(32|64)\[\]",
    ),
    "type": (
        lambda: bx.scan(lambda c, x: (c > 0, x), until=lambda c: True)(jnp.float32(0), XS),
        bx.ArgumentTypeError,
        r"carry: float32\[\] became bool\[\]",
    ),
    "reference": (
        lambda: jax.jit(
            lambda x: bx.scan(lambda c, x: (c, x[...]), until=lambda c: False)(0, jax.new_ref(x))
        )(XS),
        bx.UnsupportedError,
        "Put the array into the carry",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(mistake):
    call, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        call()


def test_derivatives_and_progress_of_no_steps():
    """The carry as it came, and its derivatives; whoever watches is told that there is nothing."""
    told = []

    def last(c, xs, progress=False):
        step = lambda c, x: (jnp.log(-c) * x.sum(), c)
        return bx.scan(step, 1, until=lambda c: c > 2, progress=progress)(c, xs)[0]

    cs, xs = jnp.array([1.0, 5.0, 2.0]), jnp.zeros((3, 2, 0))
    of = [last, jax.grad(last), jax.jacfwd(last)]
    every = lambda cs, xs: [bx.vmap(f, batch_size=b)(cs, xs) for f in of for b in (None, 2)]
    for i, found in enumerate(jax.jit(every)(cs, xs)):
        same(found, cs if i < 2 else jnp.ones(3))
    last(cs[0], xs[0], progress=lambda *counts: told.append(counts))
    jax.effects_barrier()
    assert told == [(0, 0)]
