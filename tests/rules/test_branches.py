"""`cond` and `switch`, against the loop over examples."""

import jax
import jax.experimental
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import batchax as bx
from batchax.errors import UnsupportedError

from support.operations import equations
from support.oracle import (
    agree,
    example,
    loop_function,
    quickly,
    same,
)

P = jnp.array([True, False, True, True])
X = example((4, 3))
W = example((3, 3), seed=3)


def primitives(f, *args):
    """The names of the primitives `f` stages to, in order."""
    return [eqn.primitive.name for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns]


@settings(max_examples=4)
@given(
    st.lists(st.integers(-2, 5), min_size=4, max_size=4),
    st.sampled_from([(0, 0, 0), (0, None, 0), (0, 0, None), (0, None, None)]),
)
def test_switch_with_an_index_out_of_range(indices, in_axes):
    branches = [
        lambda x, y: (jnp.sin(x) + y, y),
        lambda x, y: (x * y, x),
        lambda x, y: (y, jnp.zeros(3)),
        lambda x, y: (jnp.log(jnp.abs(y)), x),
    ]
    f = lambda i, x, y: lax.switch(i, branches, x, y)
    args = [jnp.array(indices), *(X + i if a == 0 else X[0] + i for i, a in enumerate(in_axes[1:]))]
    quickly(f, *args, in_axes=in_axes)


def test_unbatched_stays_unbatched():
    def f(p, x, y):
        return lax.cond(p, lambda: (y, 3, x), lambda: (y, 3, -x))

    out_axes = (None, None, 0)
    got = bx.vmap(f, (0, 0, None), out_axes)(P, X, 2.0)
    same(got, (jnp.asarray(2.0), jnp.asarray(3), jnp.where(P[:, None], X, -X)))
    g = lambda p, x, y: lax.cond(p, lambda: (y, y, x), lambda: (y * 2, y, -x))
    quickly(g, True, X, 2.0, in_axes=(None, 0, None), out_axes=(None, None, 0))


# How many operations.

SIMPLE = {
    "linear": lambda p, x: lax.cond(p, lambda x: x + 1, lambda x: -x, x),
    "curved": lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x),
    "constant": lambda p, x: lax.cond(p, jnp.sin, lambda x: jnp.zeros(3), x),
    "passed on": lambda p, x: lax.cond(p, lambda x: x, lambda x: x * 2.0, x),
    "swap": lambda p, x: lax.cond(p, lambda x: (x, x + 1), lambda x: (x + 1, x), x),
    "shared": lambda p, x: lax.cond(p, lambda x: jnp.tanh(W @ x), lambda x: W @ x, x),
    "switch": lambda p, x: lax.switch(p * 2, [jnp.sin, jnp.cos, jnp.tanh], x),
    "common": lambda p, x: lax.cond(W[0, 0] > 0, jnp.sin, jnp.cos, x),
}


@pytest.mark.parametrize("name", SIMPLE)
def test_no_more_equations_than_jax(name):
    ours, theirs = (len(equations(v(SIMPLE[name]), P, X)) for v in (bx.vmap, jax.vmap))
    assert ours <= theirs


def test_common_branch_stays_a_branch():
    names = primitives(bx.vmap(SIMPLE["common"]), P, X)
    assert "cond" in names
    assert "select_n" not in names


# Inside and around other things.


# Effects.


def test_order_and_collectives_or_references_together_are_refused():
    def f(x, kind):
        ref = jax.new_ref(x)

        def branch():
            jax.experimental.io_callback(lambda _: None, None, x, ordered=True)
            if kind == "reference":
                ref[...] = 2 * x
            return lax.psum(x, "i") if kind == "collective" else x

        return lax.cond(x > 0, branch, lambda: x), ref[...]

    for kind in ("collective", "reference"):
        with pytest.raises(UnsupportedError, match=f"in order.* and a {kind}"):
            bx.vmap(f, (0, None), axis_name="i")(X[:, 0], kind)


# References.


def test_reference_of_each_lane_is_written_where_the_branch_is_taken():
    def f(p, x):
        r = jax.new_ref(x)

        def write():
            r[...] = r[...] * 2
            r[0] = jnp.log(x[1])

        lax.cond(p, write, lambda: r.__setitem__(1, 7.0))
        return r[...]

    x = jnp.abs(X) + 1
    agree(bx.vmap(f), loop_function(f, (0, 0), 0), P, x)
    agree(bx.vmap(f), loop_function(f, (0, 0), 0), P, x)


def test_reference_all_lanes_share():
    def f(p, r):
        lax.cond(p, lambda: r.__setitem__(..., 1.0), lambda: None)

    with pytest.raises(UnsupportedError, match="all lanes share"):
        bx.vmap(f, in_axes=(0, None), out_axes=None)(P, jax.new_ref(0.0))
    read = lambda p, r: lax.cond(p, lambda: r[...], lambda: 1.0)
    same(bx.vmap(read, in_axes=(0, None))(P, jax.new_ref(3.0)), jnp.where(P, 3.0, 1.0))


@pytest.mark.compiles(40)
def test_what_one_branch_keeps_for_its_derivative_is_selected_for_nobody():
    """The others leave it unwritten, and weights stay one array."""
    size, lanes = 32, 5
    x, w = example((lanes, size)), example((size, size), seed=1) / 4
    which = jnp.arange(lanes) % 3

    def f(which, x, w):
        twice = lambda x, w: jnp.tanh(w @ jnp.tanh(w @ x))
        of_sines = lambda x, w: twice(x, jnp.sin(w))  # no operand, which newer JAX would hand on
        return lax.switch(
            which, [lambda x, w: 2 * x, of_sines, lambda x, w: jnp.sqrt(w[0] * x)], x, w
        )

    number = lambda which, x, w: jnp.sum(f(which, x, w) ** 2)
    gradient = jax.grad(number, (1, 2))

    def slope(which, x, w):  # of the gradient, back and forth
        again = lambda x, w: sum(map(jnp.sum, gradient(which, jnp.sin(x), w)))
        return jax.grad(again, (0, 1))(x, w)

    def selected(*args):
        masked = bx.vmap(gradient, (0, 0, None), divergence="predicate")
        made = [
            (e.primitive.name, v.aval.shape) for e in equations(masked, *args) for v in e.outvars
        ]
        return made.count(("select_n", (lanes, *args[2].shape)))

    uses = (gradient, slope)
    both = lambda vmap: jax.jit(lambda *args: [vmap(g, (0, 0, None))(*args) for g in uses])
    got, expected = (both(vmap)(which, jnp.abs(x) + 1, jnp.abs(w)) for vmap in (bx.vmap, jax.vmap))
    same(got, expected, {"rtol": 1e-4, "atol": 1e-4})
    assert selected(which, x, w) == 1  # the gradient
    # A lane in the second branch has a NaN in the third, and none in its gradients.
    x = x.at[1].set(-1.0)
    for value in jax.tree.leaves(bx.vmap(gradient, (0, 0, None))(which[:2], x[:2], jnp.abs(w))):
        assert jnp.isfinite(value).all()


def test_a_decomposition_is_skipped_where_no_lane_takes_its_branch():
    f = lambda p, x: lax.cond(p, jnp.linalg.inv, lambda x: 2 * x, x)
    loss = lambda p, x: jnp.sum(f(p, x) ** 2)
    x = example((4, 3, 3)) + 3 * jnp.eye(3)
    assert "cond" in primitives(bx.vmap(f), P, x)
    for p in (P, jnp.zeros(4, bool), jnp.ones(4, bool)):
        for g in (f, jax.grad(loss, 1)):
            one, batched = jax.jit(g), jax.jit(bx.vmap(g))
            same(batched(p, x), jnp.stack([one(*each) for each in zip(p, x, strict=True)]))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA for CPU")
@pytest.mark.parametrize("lanes", [36, 128, 512])
def test_whether_a_lane_takes_a_branch_is_one_kernel(lanes):
    x = jnp.broadcast_to(2 * jnp.eye(4), (lanes, 4, 4))
    takes = jnp.zeros(lanes, bool).at[-1].set(True)
    inverse = bx.vmap(lambda b, x: lax.cond(b, jnp.linalg.inv, lambda x: x, x))
    compiled = jax.jit(inverse).lower(takes, x).compile()
    assert " conditional(" in compiled.as_text()
    assert "reduce-window" not in compiled.as_text()
    for some in (takes, ~takes, jnp.zeros(lanes, bool)):
        same(compiled(some, x), jnp.where(some[:, None, None], x / 4, x))


def test_gradient_of_one_result_of_branches_that_call_a_library():
    def f(x, m):
        c, ys = lax.scan(lambda c, r: (jnp.sin(c) + x[0], x * r), x[0], x[:2])
        solved = lambda y: jnp.linalg.solve(m, y).sum()
        taken = lambda: (solved(ys.sum(0)), jnp.linalg.cholesky(m) * c)
        return lax.cond(c > 0, taken, lambda: (solved(ys[0]), m))[1]

    def gradient(f):
        return jax.grad(lambda x, m: jnp.sum(jnp.sin(f(x, m))), (0, 1))

    m = jnp.eye(3) + 0.1 * jnp.ones((4, 3, 3))
    agree(gradient(bx.vmap(f)), gradient(loop_function(f, (0, 0), 0)), X, m)
