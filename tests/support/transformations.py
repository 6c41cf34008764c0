"""Transformations as values: what a law can draw, and apply in any order.

A step takes a function of pytrees and example arguments for it, and gives the transformed
function with example arguments for that. `transformed` applies a list of them.
"""

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax

import batchax as bx

from support.oracle import direction, is_inexact

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
