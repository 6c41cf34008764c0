"""Batch dimensions broadcast as NumPy's do, and nothing is copied for it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchax as bx

from support.oracle import example, same

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
    return jax.tree.map(lambda *xs: jnp.stack(xs).reshape(*batch, *xs[0].shape), *outs)


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
def test_values_against_the_loop(name):
    cores, fun = FUNCTIONS[name]
    jitted = jax.jit(fun)

    @given(batches(len(cores)))
    def check(shapes):
        args = [
            example((*b, *c), seed=i) for i, (b, c) in enumerate(zip(shapes, cores, strict=True))
        ]
        got = bx.auto_vmap(*map(len, cores))(fun)(*args)
        same(got, looped(jitted, cores, args))

    check()


@given(batches(2))
def test_values_against_numpy_vectorize(shapes):
    args = [example((*b, 3), seed=i) for i, b in enumerate(shapes)]
    f = np.vectorize(lambda x, y: np.outer(x, y) - 1, signature="(n),(m)->(n,m)")
    got = bx.auto_vmap("(n),(m)->(n,m)")(lambda x, y: jnp.outer(x, y) - 1)(*args)
    want = f(*map(np.asarray, args))
    same(got, jnp.asarray(want))


@settings(max_examples=12)  # each shape compiles four derivatives
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

    f = bx.auto_vmap(1, 1)(one)
    got, want = f(x, y), nested(x, y)
    same(got, want)
    assert list(map(jax.typeof, got)) == list(map(jax.typeof, want))
    total = lambda g: lambda x, y: sum(jnp.sum(jnp.cos(out)) for out in g(x, y)[::2])
    for derivative in (jax.grad(total(f), (0, 1)), jax.jit(jax.grad(total(f), (0, 1)))):
        same(derivative(x, y), jax.grad(total(nested), (0, 1))(x, y))
    same(
        jax.jvp(total(f), (x, y), (x, y)),
        jax.jvp(total(nested), (x, y), (x, y)),
    )


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
    x, y, z = example((3,)), example((3,), seed=1), example((), seed=2)
    one = lambda x, y, z: x * z + y
    shapes = [(), (2,), (1,), (3, 1), (1, 2), (3, 2)]
    f = bx.auto_vmap(1, 1, 0)(one)
    for a, b, c in itertools.islice(itertools.product(shapes, repeat=3), 0, None, 7):
        args = [
            jnp.broadcast_to(v, (*s, *v.shape))
            * (1 + jnp.arange(np.prod(s, dtype=int))).reshape((*s, *(1,) * v.ndim))
            for v, s in zip((x, y, z), (a, b, c), strict=True)
        ]
        same(f(*args), looped(jax.jit(one), ((3,), (3,), ()), args))
