"""Rules that are told the name of the axis, and use it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx

from support.oracle import at_once, example, plainly, same, together

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])


def plain(x):
    return jnp.sin(x) - lax.pmean(x, "lanes") * x


def by_sums(axis_size, in_batched, x, *, axis_name):
    assert axis_name == "lanes"
    assert in_batched == [True]
    return jnp.sin(x) - x.mean(0) * x, True


def by_collective(axis_size, in_batched, x, *, axis_name):
    return jnp.sin(x) - lax.pmean(x, axis_name) * x, True


def by_vmap(axis_size, in_batched, x, *, axis_name):
    one = lambda x: jnp.sin(x) - lax.pmean(x, axis_name) * x
    return bx.vmap(one, axis_name=axis_name)(x), True


def by_jitted_collective(axis_size, in_batched, x, *, axis_name):
    return jax.jit(lambda x: jnp.sin(x) - lax.pmean(x, axis_name) * x)(x), True


RULES = pytest.mark.parametrize("rule", [by_sums, by_collective, by_vmap, by_jitted_collective])


def with_rule(rule, fun=plain):
    f = bx.custom_vmap(fun)
    f.def_vmap(rule)
    return f


@VMAPS
@RULES
@pytest.mark.each_commit(4)
def test_values_and_derivatives(vmap, rule):
    f, xs = with_rule(rule), example((4, 2))
    run = vmap(f, axis_name="lanes")
    want = jax.vmap(plain, axis_name="lanes")
    total = lambda g: lambda x: jnp.sum(jnp.cos(g(x)))
    uses = {
        "value": lambda f: f,
        "grad": lambda f: jax.grad(total(f)),
        "jacfwd": jax.jacfwd,
        "hessian": lambda f: jax.hessian(total(f)),
    }
    every = lambda f: together({name: use(f) for name, use in uses.items()})
    got, expected = at_once(every(run), every(want))(xs)
    same(got, expected)
    for name in ("value", "grad"):  # outside of jit
        same(uses[name](run)(xs), expected[name])


@RULES
@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.each_commit(4)
def test_in_chunks_such_a_rule_has_all_lanes(rule, batch_size):
    sizes = []

    def noted(axis_size, in_batched, x, *, axis_name):
        sizes.append(axis_size)
        return rule(axis_size, in_batched, x, axis_name=axis_name)

    f, xs = with_rule(noted), example((4, 2))
    around = lambda f: lambda x: 2 * f(jnp.cos(x)) + x
    run = bx.vmap(around(f), axis_name="lanes", batch_size=batch_size)
    want = jax.vmap(around(plain), axis_name="lanes")
    total = lambda g: lambda x: jnp.sum(jnp.cos(g(x)))
    same(run(xs), want(xs))
    same(jax.grad(total(run))(xs), plainly(jax.grad(total(want)), xs))
    inside = bx.vmap(jax.jit(around(f)), axis_name="lanes", batch_size=batch_size)
    same(inside(xs), want(xs))
    assert set(sizes) == {4}


@VMAPS
def test_what_a_rule_is_told(vmap):
    told = []

    def rule(axis_size, in_batched, x, *, axis_name, spmd_axis_name, unrelated=1):
        told.append((axis_size, axis_name, spmd_axis_name, unrelated))
        return x, True

    f, xs = with_rule(rule, lambda x: x), jnp.ones((2, 3))
    vmap(f)(xs)
    vmap(f, axis_name="lanes")(xs)
    vmap(f, axis_name=("a", 1))(xs)
    vmap(vmap(f, axis_name="inner"), axis_name="outer")(xs)
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        vmap(f, spmd_axis_name="devices")(xs)
        vmap(f, spmd_axis_name=("devices",), axis_name="lanes")(xs)
    assert told == [
        (2, None, None, 1),
        (2, "lanes", None, 1),
        (2, ("a", 1), None, 1),
        (3, "inner", None, 1),
        (2, None, "devices", 1),
        (2, "lanes", "devices", 1),
    ]


# per-example collective, whether the lanes of its operand differ
COLLECTIVES = {
    "psum": lambda x, name: lax.psum(x, name),
    "psum of several": lambda x, name: lax.psum((x, 2 * x), name)[1],
    "pmax": lambda x, name: lax.pmax(x, name),
    "pmin": lambda x, name: lax.pmin(x, name),
    "ppermute": lambda x, name: lax.ppermute(x, name, [(0, 1), (1, 2), (2, 0)]),
    "size": lambda x, name: x / lax.psum(1, name),
    "all_gather": lambda x, name: lax.all_gather(x, name).sum(0),
}


@VMAPS
@pytest.mark.parametrize("which", COLLECTIVES)
def test_collectives_in_a_rule_are_of_its_lanes(vmap, which):
    collective = COLLECTIVES[which]
    one = lambda x: collective(x, "lanes")
    if which == "all_gather":  # of what a lane gathers the lanes are not the first axis
        rule = lambda n, b, x, *, axis_name: (lax.all_gather(x, axis_name).sum(1), True)
    else:
        rule = lambda n, b, x, *, axis_name: (collective(x, axis_name), True)
    xs = example((3, 2))
    want = jax.vmap(one, axis_name="lanes")(xs)
    same(vmap(with_rule(rule, one), axis_name="lanes")(xs), want)


@VMAPS
def test_what_is_the_same_for_all_lanes_is_so_in_collectives(vmap):
    def rule(axis_size, in_batched, x, w, *, axis_name):
        return x + lax.psum(w, axis_name) + lax.psum(x.sum(), axis_name), True

    one = lambda x, w: x + lax.psum(w, "lanes") + lax.psum(x, "lanes") * lax.psum(1, "lanes")
    f = with_rule(rule, one)
    xs, w = example((3,)), example((3,), seed=1)[0]
    run = lambda vmap, f: vmap(f, (0, None), axis_name="lanes")(xs, w)
    same(run(vmap, f), run(jax.vmap, one))


def test_the_index_of_a_lane_has_no_place_in_a_rule():
    rule = lambda n, b, x, *, axis_name: (x * lax.axis_index(axis_name), True)
    f = with_rule(rule, lambda x: x * lax.axis_index("lanes"))
    with pytest.raises(bx.UnsupportedError, match="another result for each lane"):
        bx.vmap(f, axis_name="lanes")(jnp.ones(3))
    loop = lambda n, b, x, *, axis_name: (
        lax.fori_loop(0, 2, lambda i, c: lax.psum(c, axis_name), x),
        True,
    )
    f = with_rule(loop, lambda x: lax.fori_loop(0, 2, lambda i, c: lax.psum(c, "lanes"), x))
    with pytest.raises(bx.UnsupportedError, match="contains a collective over the lanes"):
        bx.vmap(f, axis_name="lanes")(jnp.ones(3))


@VMAPS
@pytest.mark.parametrize("in_axes", [0, None])
def test_7047_collectives_in_derivatives_of_ones_own(vmap, in_axes):
    """The argument may be the same for all lanes: nothing else says that there is an axis."""
    xs = example((4, 3), seed=1)
    given = xs if in_axes == 0 else xs[0]

    @bx.custom_vmap
    def summed(x):
        return lax.psum(x, "lanes")

    @summed.def_vmap
    def rule(axis_size, in_batched, x, *, axis_name):
        return x.sum(0), False

    tripled = lambda x: 3 * lax.psum(x, "lanes")
    summed.def_vjp(lambda x: (summed(x), None), lambda _, g: (tripled(g),))
    plain = jax.custom_vjp(lambda x: lax.psum(x, "lanes"))
    plain.defvjp(lambda x: (plain(x), None), lambda _, g: (tripled(g),))

    def run(f, vmap):
        each = lambda x: jax.value_and_grad(lambda x: jnp.sum(f(x) * jnp.arange(3.0)))(x)
        return vmap(each, in_axes, axis_name="lanes", axis_size=4)(given)

    same(run(summed, vmap), run(plain, jax.vmap))
    values = vmap(summed, in_axes, axis_name="lanes", axis_size=4)(given)
    total = xs.sum(0) if in_axes == 0 else 4 * xs[0]
    same(values, jnp.broadcast_to(total, (4, 3)))
