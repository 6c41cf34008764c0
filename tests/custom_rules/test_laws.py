"""The identity rule changes nothing: every order of transformations is as without it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from jax import lax

import batchax as bx

from support.oracle import direction, example, is_inexact, same, same_type
from support.user_rules import with_identity_rule

# Transformations as values: what a law can draw, and apply in any order.

# One argument of a derivative that makes more of its results: kept to few entries.
MOST_ENTRIES = 6


def transformed(fun, args, steps, plain=False):
    """`fun` after `steps`, and arguments for it; `plain`: each vmap is that of JAX."""
    for name, *options in steps:
        fun, args = STEPS[name](fun, args, plain, *options)
    return fun, args


def others(leaf, k):
    """What `leaf` is in lane `k`."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(leaf) + jnp.uint32(k))
    if leaf.dtype == jnp.bool_:
        return leaf ^ bool(k % 2)
    if is_inexact(leaf):
        return leaf * (1 - 0.3 * k) + 0.1 * k
    return (leaf + k) % 3


def lanes(leaf, axis, size):
    """A batch of values such as `leaf`."""
    return jnp.stack([others(leaf, k) for k in range(size)], axis)


def split(args):
    """The leaves that derivatives exist for, and how to put others in their place."""
    leaves, tree = jax.tree.flatten(args)
    which = [i for i, x in enumerate(leaves) if is_inexact(x)]

    def put(values):
        full = list(leaves)
        for i, x in zip(which, values, strict=True):
            full[i] = x
        return jax.tree.unflatten(tree, full)

    return [leaves[i] for i in which], put


def floats(out):
    """Those of the results that have derivatives."""
    return [y for y in jax.tree.leaves(out) if is_inexact(y)]


def of_floats(fun, args):
    """`fun` as a function of what of `args` has derivatives, to what has of its results."""
    points, put = split(args)
    return lambda *xs: floats(fun(*put(xs))), points


def total(ys):
    return sum((jnp.sum(jnp.sin(jnp.abs(y))) for y in ys), jnp.float32(0))


def vmap(fun, args, plain, whose, batched, in_axis, out_axis, size, batch_size):
    """A batch of those arguments that `batched` says, in turn; at least of the first."""
    flags = [batched[i % len(batched)] for i in range(len(args))]
    flags[0] |= not any(flags)
    in_axes = tuple(in_axis if flag else None for flag in flags)
    stacked = tuple(
        jax.tree.map(lambda x: lanes(x, in_axis, size), a) if flag else a
        for a, flag in zip(args, flags, strict=True)
    )
    if plain or whose == "jax":
        return jax.vmap(fun, in_axes, out_axis), stacked
    return bx.vmap(fun, in_axes, out_axis, batch_size=batch_size), stacked


def scan(fun, args, plain):
    """The function for one example after another, in a loop."""
    xs = jax.tree.map(lambda x: lanes(x, 0, 2), args)
    return lambda *xs: lax.scan(lambda c, x: (c, fun(*x)), None, xs)[1], xs


def cond(fun, args, plain):
    return lambda *xs: lax.cond(jnp.sum(total(split(xs)[0])) > -1e9, fun, fun, *xs), args


def jvp(fun, args, plain):
    def run(*args):
        g, points = of_floats(fun, args)
        return jax.jvp(g, points, direction_at(points, 1))

    return run, args


def linearize(fun, args, plain):
    def run(*args):
        g, points = of_floats(fun, args)
        out, push = jax.linearize(g, *points)
        return out, push(*direction_at(points, 1))

    return run, args


def vjp(fun, args, plain):
    def run(*args):
        g, points = of_floats(fun, args)
        out, pull = jax.vjp(g, *points)
        return out, pull(direction_at(out, 2))

    return run, args


def grad(fun, args, plain):
    def run(*args):
        g, points = of_floats(fun, args)
        return jax.value_and_grad(lambda xs: total(g(*xs)))(points)

    return run, args


def directions(fun, args, plain, whose):
    """Two directions at once: of tangents at a point that is the same for both."""

    def run(*args):
        g, points = of_floats(fun, args)
        many = [jnp.stack([t, 2 * t]) for t in direction_at(points, 3)]
        push = lambda ts: jax.jvp(g, points, ts)[1]
        return (jax.vmap if plain or whose == "jax" else bx.vmap)(push)(many)

    return run, args


def pullbacks(fun, args, plain, whose):
    """Two cotangents at once."""

    def run(*args):
        g, points = of_floats(fun, args)
        out, pull = jax.vjp(g, *points)
        many = [jnp.stack([t, 2 * t]) for t in direction_at(out, 3)]
        return (jax.vmap if plain or whose == "jax" else bx.vmap)(pull)(many)

    return run, args


def of_one(derivative):
    """A derivative with respect to the smallest of the inexact arguments."""

    def step(fun, args, plain):
        def run(*args):
            g, points = of_floats(fun, args)
            small = min(range(len(points)), key=lambda i: points[i].size)

            def part(x):
                # Of many entries the first few: those of jacobians multiply.
                flat = points[small].ravel().at[: x.size].set(x).reshape(points[small].shape)
                return [
                    y.ravel()[:MOST_ENTRIES] for y in g(*points[:small], flat, *points[small + 1 :])
                ]

            return derivative(part)(points[small].ravel()[:3])

        return run, args

    return step


def direction_at(tree, seed):
    return jax.tree.map(lambda x: direction(x, seed), tree)


STEPS = {
    "vmap": vmap,
    "jit": lambda fun, args, plain: (jax.jit(lambda *xs: fun(*xs)), args),
    "checkpoint": lambda fun, args, plain: (jax.checkpoint(lambda *xs: fun(*xs)), args),
    "scan": scan,
    "cond": cond,
    "jvp": jvp,
    "linearize": linearize,
    "vjp": vjp,
    "grad": grad,
    "directions": directions,
    "pullbacks": pullbacks,
    "jacfwd": of_one(jax.jacfwd),
    "jacrev": of_one(jax.jacrev),
    "hessian": of_one(lambda part: jax.hessian(lambda x: total(part(x)))),
}

WHOSE = st.sampled_from(["bx", "jax"])
VMAP = st.tuples(
    st.just("vmap"),
    WHOSE,
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.sampled_from([0, -1]),
    st.sampled_from([0, -1]),
    st.sampled_from([2, 3]),
    st.sampled_from([None, None, 2]),
)
WITH_DIRECTIONS = st.tuples(st.sampled_from(["directions", "pullbacks"]), WHOSE)
OTHER = st.tuples(
    st.sampled_from([n for n in STEPS if n not in ("vmap", "directions", "pullbacks")])
)


@st.composite
def orders(draw, most=4):
    """Transformations in an order with at least one vmap."""
    before = draw(st.lists(st.one_of(VMAP, WITH_DIRECTIONS, OTHER), max_size=2))
    after = draw(st.lists(st.one_of(VMAP, WITH_DIRECTIONS, OTHER), max_size=most - 1 - len(before)))
    return [*before, draw(VMAP), *after]


VECTOR, MATRIX = example((3,), seed=1), example((2, 3), seed=2)
WEIGHTS, SCALAR = example((3, 3), seed=3), example((), seed=4)
INTEGER = jnp.int32(1)


def several_outputs(wrap):
    @wrap
    def f(x, m):
        y = jnp.tanh(m @ x)
        return y, jnp.sum(x * x), jnp.argmax(x), m.T

    return f, (VECTOR, MATRIX)


def outputs_of_one_argument_each(wrap):
    @wrap
    def f(x, y, i):
        return jnp.sin(x), jnp.cos(y) * 2, i + 1, jnp.ones(2)

    return f, (VECTOR, SCALAR, INTEGER)


def integers_and_keys(wrap):
    @wrap
    def f(x, i, key):
        return x[i] * jax.random.normal(key), i * 2, jax.random.fold_in(key, i), x[::-1]

    return f, (VECTOR, INTEGER, jax.random.key(3))


def trees(wrap):
    @wrap
    def f(p, xs):
        h = jnp.tanh(p["w"] @ xs[0] + p["b"])
        return {"h": h, "of": (xs[1] > 0, [h.sum() * xs[1], None])}

    return f, ({"w": MATRIX, "b": SCALAR}, [VECTOR, SCALAR])


def keywords(wrap):
    @wrap
    def f(x, m=MATRIX, *more, scale, shift=1.0):
        return sum((m @ x * scale + shift, *more))

    return (
        lambda x, s, m: (f(x, scale=s), f(x, m, s, scale=s * 2, shift=s), f(m=m, x=x, scale=3)),
        (VECTOR, SCALAR, MATRIX),
    )


def closing_over(wrap):
    def whole(x, w):
        inner = wrap(lambda x: jnp.tanh(w @ x) * 0.5)
        return inner(x) + inner(inner(x))

    return whole, (VECTOR, WEIGHTS)


def one_in_another(wrap):
    inner = wrap(lambda x, y: (jnp.sin(x) * y, y))

    @wrap
    def outer(x, w):
        a, b = inner(w @ x, x)
        return inner(a, b)[0] + x

    return outer, (VECTOR, WEIGHTS)


def in_loops(wrap):
    f = wrap(lambda x, w: (jnp.tanh(w @ x), x[0]))

    def whole(x, w, i):
        x, ys = lax.scan(lambda c, _: f(c, w), x, length=3)
        x = lax.fori_loop(0, 2, lambda k, c: f(c, w)[0], x)
        return x, ys, lax.switch(i, [lambda x: f(x, w)[0], lambda x: x, lambda x: 2 * x], x)

    return whole, (VECTOR, WEIGHTS, INTEGER)


def weak_and_narrow(wrap):
    @wrap
    def f(x, h, i):
        return jnp.where(i > 0, 1.0, 2.0), h * 2, x * 1, i, h.astype(jnp.float32) * x

    return f, (SCALAR, example((2,), jnp.bfloat16), INTEGER)


def linear_algebra(wrap):
    @wrap
    def f(m, x):
        a = m @ m.T + 2 * jnp.eye(3)
        return jnp.linalg.solve(a, x), jnp.linalg.cholesky(a)

    return f, (WEIGHTS, VECTOR)


def complex_numbers(wrap):
    @wrap
    def f(z, x):
        return z * jnp.exp(1j * x), jnp.abs(z), jnp.real(z) * x

    return f, (example((2,), jnp.complex64), SCALAR)


def own_derivatives(wrap):
    @jax.custom_vjp
    def scaled(x, y):
        return jnp.sin(x) * y

    scaled.defvjp(lambda x, y: (scaled(x, y), (x, y)), lambda r, g: (g * r[1], 3 * g * r[0]))
    return wrap(lambda x, y: (scaled(x, y), y)), (VECTOR, VECTOR + 1)


TABLE = [
    several_outputs,
    outputs_of_one_argument_each,
    integers_and_keys,
    trees,
    keywords,
    closing_over,
    one_in_another,
    in_loops,
    weak_and_narrow,
    linear_algebra,
    complex_numbers,
    own_derivatives,
]


def check_order(make, steps, whose, keep_unbatched, compiled, tolerance):
    wrap = functools.partial(with_identity_rule, vmap=whose, keep_unbatched=keep_unbatched)
    f, args = transformed(*make(wrap), steps)
    plain, _ = transformed(*make(lambda fun: fun), steps, plain=True)
    try:
        expected = jax.jit(plain)(*args)
    except (TypeError, NotImplementedError):  # JAX has no such derivative of the plain function
        reject()
    got = jax.jit(f)(*args) if compiled else f(*args)
    same(got, expected, tolerance, str(steps))
    jax.tree.map(same_type, got, expected)


RULES = {"whose": st.sampled_from([bx.vmap, jax.vmap]), "keep_unbatched": st.booleans()}


@settings(max_examples=12)
@given(
    make=st.sampled_from(TABLE),
    steps=orders(),
    compiled=st.sampled_from([True, True, False]),
    **RULES,
)
@pytest.mark.compiles(300)
def test_every_order(make, steps, whose, keep_unbatched, compiled):
    near = 0.05 if make is weak_and_narrow else 1e-4
    check_order(make, steps, whose, keep_unbatched, compiled, {"rtol": near, "atol": near})
