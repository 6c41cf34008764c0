"""Batch dimensions broadcast as NumPy's do, and nothing is copied for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchax as bx

from support.oracle import at_once, example, same

# Core shapes of the arguments, function of one example.
FUNCTIONS = {
    "scalars": (((), ()), lambda x, y: jnp.sin(x) * y),
    "matvec": (((2, 3), (3,)), lambda m, v: jnp.tanh(m @ v)),
    "three": (((), (3,), (3, 3)), lambda s, v, m: v @ m @ v + s * v.size),
    "several outputs": (((3,), (3,)), lambda x, y: {"dot": x @ y, "both": (x + y, x[::-1])}),
    "one does not depend": (((3,), ()), lambda x, y: (x * 2, jnp.cos(y))),
    "neither": (((3,), ()), lambda x, y: jnp.arange(2)),
}


def looped(fun, cores, args):
    """`fun` for each example in a Python loop over the broadcast batch dimensions."""
    batches = [np.shape(x)[: np.ndim(x) - len(c)] for x, c in zip(args, cores, strict=True)]
    batch = np.broadcast_shapes(*batches)
    full = [
        np.broadcast_to(x, (*batch, *np.shape(x)[np.ndim(x) - len(c) :]))
        for x, c in zip(args, cores, strict=True)
    ]
    outs = [fun(*(x[index] for x in full)) for index in np.ndindex(batch)]
    return jax.tree.map(
        lambda *xs: jnp.asarray(np.stack(xs).reshape((*batch, *np.shape(xs[0])))), *outs
    )


@st.composite
def batches(draw, count, sizes=(2, 3)):
    """Batch shapes that broadcast."""
    full = draw(st.lists(st.sampled_from(sizes), max_size=3))
    shapes = []
    for _ in range(count):
        kept = draw(st.integers(0, len(full)))
        own = full[len(full) - kept :]
        shapes.append(tuple(1 if draw(st.booleans()) else n for n in own))
    return shapes


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_commit(3)
def test_values_against_the_loop(name):
    cores, fun = FUNCTIONS[name]
    jitted = jax.jit(fun)

    @settings(max_examples=15)  # of six functions, each shape a program
    @given(batches(len(cores)))
    def check(shapes):
        args = [
            example((*b, *c), seed=i) for i, (b, c) in enumerate(zip(shapes, cores, strict=True))
        ]
        got = jax.jit(bx.auto_vmap(*map(len, cores))(fun))(*args)
        same(got, looped(jitted, cores, args))

    check()


@settings(max_examples=12)  # each shape compiles one program
@given(batches(2, (0, 2, 3)))
def test_types_and_derivatives_against_nested_vmaps(shapes):
    x, y = (example((*b, 2), seed=i) for i, b in enumerate(shapes))
    one = lambda x, y: (jnp.sin(x) @ y, 2.0, x * 1)

    def nested(x, y):
        ndim = max(x.ndim, y.ndim) - 1
        batch = np.broadcast_shapes(x.shape[:-1], y.shape[:-1])
        x, y = (jnp.broadcast_to(a, (*batch, 2)) for a in (x, y))
        f = one
        for _ in range(ndim):
            f = jax.vmap(f)
        return f(x, y)

    def everything(g):
        total = lambda x, y: sum(jnp.sum(jnp.cos(out)) for out in g(x, y)[::2])
        return lambda x, y: (
            g(x, y),
            jax.grad(total, (0, 1))(x, y),
            jax.grad(jax.jit(total), (0, 1))(x, y),
            jax.jvp(total, (x, y), (x, y)),
        )

    got, want = at_once(*map(everything, (bx.auto_vmap(1, 1)(one), nested)))(x, y)
    same(got, want)
    assert list(map(jax.typeof, got[0])) == list(map(jax.typeof, want[0]))


def by_hand(fun, *axes):
    for in_axes in axes:
        fun = jax.vmap(fun, in_axes)
    return fun


MATMUL, DOT = (2, 1), (1, 1)
EACH = by_hand(jnp.matmul, (0, 0))
INVERTED = lambda v, m: jnp.linalg.inv(m) @ v
BOTH = lambda v, m: jnp.exp(m) @ jnp.sin(v)
# The function, the ranks, the shapes, and the same by hand: no argument is broadcast or repeated,
# and dimensions that the same arguments have are one.
HAND_WRITTEN = {
    "one dimension": (jnp.matmul, MATMUL, ((5, 2, 3), (5, 3)), EACH),
    "shared matrix": (jnp.matmul, MATMUL, ((2, 3), (5, 3)), by_hand(jnp.matmul, (None, 0))),
    "outer": (
        jnp.matmul,
        MATMUL,
        ((4, 1, 2, 3), (5, 3)),
        lambda m, v: by_hand(jnp.matmul, (None, 0), (0, None))(m.reshape(4, 2, 3), v),
    ),
    "three": (
        jnp.matmul,
        MATMUL,
        ((4, 1, 1, 2, 3), (5, 6, 3)),
        lambda m, v: by_hand(jnp.matmul, (None, 0), (0, None))(
            m.reshape(4, 2, 3), v.reshape(30, 3)
        ).reshape(4, 5, 6, 2),
    ),
    "both have three": (
        jnp.matmul,
        DOT,
        ((2, 3, 4, 3), (2, 3, 4, 3)),
        lambda x, y: EACH(x.reshape(24, 3), y.reshape(24, 3)).reshape(2, 3, 4),
    ),
    "one has three": (
        jnp.matmul,
        DOT,
        ((2, 3, 4, 3), (3,)),
        lambda x, y: by_hand(jnp.matmul, (0, None))(x.reshape(24, 3), y).reshape(2, 3, 4),
    ),
    "each keeps what it has": (
        BOTH,
        (1, 2),
        ((4, 1, 3), (5, 2, 3)),
        lambda v, m: by_hand(BOTH, (None, 0), (0, None))(v.reshape(4, 3), m),
    ),
    "what has no batch dimension is done once": (
        INVERTED,
        (1, 2),
        ((4, 3), (3, 3)),
        lambda v, m: by_hand(lambda i, v: i @ v, (None, 0))(jnp.linalg.inv(m), v),
    ),
}


@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_it_is_the_program_written_by_hand(case):
    fun, ranks, shapes, hand = HAND_WRITTEN[case]
    args = [jax.ShapeDtypeStruct(shape, jnp.zeros(()).dtype) for shape in shapes]
    comparison = bx.same_program(bx.auto_vmap(*ranks)(fun), hand, *args)
    assert comparison, str(comparison)
