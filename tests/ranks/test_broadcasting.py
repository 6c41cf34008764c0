"""Batch dimensions broadcast as NumPy's do, and nothing is copied for it."""

import itertools

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


SIZES = st.sampled_from([2, 3])


@st.composite
def batches(draw, count):
    """Batch shapes that broadcast."""
    full = draw(st.lists(SIZES, max_size=3))
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
@given(batches(2))
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


@pytest.mark.parametrize(
    ("shapes", "batch"),
    [
        (((0, 3), (3,)), (0,)),
        (((0, 3), (1, 3)), (0,)),
        (((2, 0, 3), (2, 1, 3)), (2, 0)),
        (((1, 3), (1, 1, 3)), (1, 1)),
        (((1, 3), (3,)), (1,)),
    ],
)
def test_no_lanes_and_one_lane(shapes, batch):
    x, y = (jnp.ones(shape) for shape in shapes)
    got = bx.auto_vmap(1, 1)(lambda x, y: (x @ y, x + y))(x, y)
    same(got, (jnp.full(batch, 3.0), jnp.full((*batch, 3), 2.0)))


def primitives(fun, *args):
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found.append((eqn.primitive.name, [v.aval.shape for v in eqn.outvars]))
            for inner in jax.tree.leaves(
                eqn.params, is_leaf=lambda p: hasattr(p, "jaxpr") or hasattr(p, "eqns")
            ):
                if hasattr(inner, "jaxpr"):
                    walk(inner.jaxpr)

    walk(jax.make_jaxpr(fun)(*args).jaxpr)
    return found


def test_each_argument_keeps_the_dimensions_it_has():
    f = bx.auto_vmap(1, 2)(lambda v, m: jnp.exp(m) @ jnp.sin(v))
    found = dict(primitives(f, jnp.ones((4, 1, 3)), jnp.ones((5, 2, 3))))
    assert found["sin"] == [(4, 3)]
    assert found["exp"] == [(5, 2, 3)]
    assert "broadcast_in_dim" not in found


def test_what_has_no_batch_dimension_is_done_once():
    f = bx.auto_vmap(1, 2)(lambda v, m: jnp.linalg.inv(m) @ v)
    found = primitives(f, jnp.ones((4, 5, 3)), jnp.eye(3))
    assert ("lu", [(3, 3), (3,), (3,)]) in found


def test_one_vmap_for_dimensions_that_the_same_arguments_have():
    calls = []
    f = bx.auto_vmap(1, 1)(lambda x, y: (calls.append(x.shape), x @ y)[1])

    def groups(*shapes):
        found = primitives(f, *(jnp.ones((*b, 3)) for b in shapes))
        (shape,) = next(out for name, out in found if name == "dot_general")
        return shape

    assert groups((2, 3, 4), (2, 3, 4)) == (24,)
    assert groups((2, 3, 4), ()) == (24,)
    assert groups((2, 3, 1, 1), (4, 5)) == (6, 20)
    assert groups((2, 1, 3), (2, 1, 3)) == (6,)
    assert groups((2, 1, 3), (1, 4, 3)) in {(3, 2, 4), (2, 4, 3)}


def by_hand(fun, *axes):
    for in_axes in axes:
        fun = bx.vmap(fun, in_axes)
    return fun


HAND_WRITTEN = {
    "one dimension": (((5,), (5,)), by_hand(jnp.matmul, (0, 0))),
    "shared matrix": (((), (5,)), by_hand(jnp.matmul, (None, 0))),
    "outer": (((4, 1), (5,)), by_hand(jnp.matmul, (None, 0), (0, None))),
    "three": (((4, 1, 1), (5, 6)), None),
}


@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_compiled_it_is_the_program_written_by_hand(case):
    (first, second), hand = HAND_WRITTEN[case]
    m, v = jnp.ones((*first, 2, 3)), jnp.ones((*second, 3))
    if case == "outer":
        reference = lambda m, v: hand(m[:, 0], v)
    elif case == "three":
        flat = by_hand(jnp.matmul, (None, 0), (0, None))
        reference = lambda m, v: flat(m[:, 0, 0], v.reshape(30, 3)).reshape(4, 5, 6, 2)
    else:
        reference = hand

    def operations(f):
        text = jax.jit(f).lower(m, v).compile().as_text()
        lines = [line.split(" = ")[1] for line in text.splitlines() if " = " in line]
        names = [line.split("(")[0].split()[-1] for line in lines]
        return sorted(n for n in names if n not in {"parameter", "bitcast", "tuple"})

    assert operations(bx.auto_vmap(2, 1)(jnp.matmul)) == operations(reference)


def test_all_patterns_of_two_dimensions():
    x, y, z = (np.asarray(example(shape, seed=i)) for i, shape in enumerate([(3,), (3,), ()]))
    one = lambda x, y, z: x * z + y
    shapes = [(), (2,), (1,), (3, 1), (1, 2), (3, 2)]
    patterns = list(itertools.islice(itertools.product(shapes, repeat=3), 0, None, 7))
    batches = [
        [
            np.broadcast_to(v, (*s, *v.shape))
            * (1 + np.arange(np.prod(s, dtype=int), dtype=v.dtype)).reshape((*s, *(1,) * v.ndim))
            for v, s in zip((x, y, z), pattern, strict=True)
        ]
        for pattern in patterns
    ]
    f = bx.auto_vmap(1, 1, 0)(one)
    found = jax.jit(lambda batches: [f(*args) for args in batches])(batches)
    for pattern, args, got in zip(patterns, batches, found, strict=True):
        same(got, looped(one, ((3,), (3,), ()), args), where=f"{pattern}: ")
