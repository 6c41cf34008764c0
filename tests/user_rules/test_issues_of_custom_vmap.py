"""What users of JAX asked of `custom_vmap` in its issues."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import agree, at_once, example, loop, plainly, same

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap])


@bx.custom_vmap
def vector_dot(u, v):
    assert u.ndim == v.ndim == 1
    return u @ v


@vector_dot.def_vmap
def vector_dot_vmap_rule(axis_size, in_batched, u, v):
    u_batched, v_batched = in_batched
    told = []
    if u_batched:
        assert u.shape == (axis_size, 3)
        told.append("lhs batched")
    if v_batched:
        assert v.shape == (axis_size, 3)
        told.append("rhs batched")
    print(", ".join(told))
    return [jnp.sum(u * v, axis=-1)], [u_batched or v_batched]


U, V = example((4, 3), seed=1), example((4, 3), seed=2)
SIDES = [
    ((0, None), (U, V[0]), "lhs batched"),
    ((1, None), (U.T, V[0]), "lhs batched"),
    ((None, 0), (U[0], V), "rhs batched"),
    ((0, 0), (U, V), "lhs batched, rhs batched"),
]


@VMAPS
def test_9073_the_example_of_the_proposal(vmap, capsys):
    f = lambda u, v: jnp.exp(vector_dot(u, v))
    plain = lambda u, v: jnp.exp(u @ v)
    for in_axes, args, _ in SIDES:
        same(vmap(f, in_axes)(*args), loop(plain, args, in_axes))
    assert capsys.readouterr().out.splitlines() == [said for *_, said in SIDES]


@VMAPS
@pytest.mark.parametrize(("in_axes", "args", "said"), SIDES)
@pytest.mark.each_commit(4)
def test_9073_reverse_mode_of_the_example(vmap, in_axes, args, said, capsys):
    f = lambda u, v: jnp.exp(vector_dot(u, v))
    plain = lambda u, v: jnp.exp(u @ v)
    total = lambda f, vmap: lambda u, v: jnp.sum(vmap(f, in_axes)(u, v) ** 2)
    gradient = lambda f, vmap: jax.grad(total(f, vmap), (0, 1))
    agree(gradient(f, vmap), gradient(plain, jax.vmap), *args)
    assert set(capsys.readouterr().out.splitlines()) == {said}
    inside = lambda f, vmap: vmap(jax.grad(f, (0, 1)), in_axes)
    agree(inside(f, vmap), inside(plain, jax.vmap), *args)
    assert capsys.readouterr().out
    agree(jax.grad(f, (0, 1)), jax.grad(plain, (0, 1)), U[0], V[0])
    agree(jax.hessian(f), jax.hessian(plain), U[0], V[0])
    assert capsys.readouterr().out == ""


def all_at_once(fun):
    """A function whose operations are elementwise already: the rule is the function."""
    own = bx.custom_vmap(fun)
    own.def_vmap(lambda axis_size, in_batched, *args: (fun(*args), True))
    return own


def expanded(fun):
    """Every argument is given a batch axis, of size one if it has none."""
    own = bx.custom_vmap(fun)

    @own.def_vmap
    def rule(axis_size, in_batched, *args):
        args = [x if b else x[None] for x, b in zip(args, in_batched, strict=True)]
        return jax.vmap(fun)(*(jnp.broadcast_to(x, (axis_size, *x.shape[1:])) for x in args)), True

    return own


def broadcast(fun):
    """Every argument is repeated for each lane."""
    own = bx.custom_vmap(fun)

    @own.def_vmap
    def rule(axis_size, in_batched, *args):
        full = [
            x if b else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, b in zip(args, in_batched, strict=True)
        ]
        return jax.vmap(fun)(*full), True

    return own


@VMAPS
@pytest.mark.parametrize("pattern", [all_at_once, expanded, broadcast, bx.sequential_vmap])
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
@pytest.mark.each_commit(6)
def test_25259_reverse_mode_of_the_common_patterns(vmap, pattern, in_axes):
    plain = lambda x, y: jnp.sin(x) * y**2
    args = [a if axis == 0 else a[0] for a, axis in zip((U, V), in_axes, strict=True)]
    outside = lambda f, vmap: jax.grad(lambda *a: jnp.sum(vmap(f, in_axes)(*a) ** 2), (0, 1))
    inside = lambda f, vmap: vmap(jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1)), in_axes)
    for derivative in (outside, inside):
        agree(derivative(pattern(plain), vmap), derivative(plain, jax.vmap), *args)


@VMAPS
def test_13283_constants_of_staged_functions(vmap):
    table = np.arange(3.0, dtype=np.float32)
    own = all_at_once(lambda x: jnp.sin(x) * jnp.asarray(table) + jnp.arange(3.0))
    plain = lambda x: jnp.sin(x) * table + jnp.arange(3.0)
    same(jax.jit(vmap(own))(U), plainly(jax.vmap(plain), U))
    same(jax.jit(vmap(jax.jit(own)))(U), plainly(jax.vmap(plain), U))
    gradient = lambda f: jax.grad(lambda x: f(x).sum())
    same(jax.jit(gradient(vmap(own)))(U), gradient(plain)(U))


@VMAPS
def test_13283_a_linear_call_that_is_batched_by_a_loop(vmap):
    """What the issue wanted: a transpose of one's own, a known value, and batches."""
    c = 4.0

    def product(a, b):
        times = lambda residuals, a: a * residuals[0] * np.float32(c)
        return jax.custom_derivatives.linear_call(times, times, (b,), a)

    own, plain = bx.sequential_vmap(product), lambda a, b: a * b * c
    for in_axes, args in [((0, None), (U, V[0])), ((0, 0), (U, V))]:
        run = lambda f, vmap, axes=in_axes: jax.grad(lambda a, b: jnp.sum(vmap(f, axes)(a, b) ** 2))
        inside = lambda f, vmap, axes=in_axes: vmap(
            jax.grad(lambda a, b: jnp.sum(f(a, b) ** 2)), axes
        )
        of_both = lambda use: (use(own, vmap), use(plain, jax.vmap))
        values = vmap(own, in_axes), jax.vmap(plain, in_axes)
        results = at_once(*values, *of_both(run), *of_both(inside))(*args)
        for got, expected in zip(results[::2], results[1::2], strict=True):
            same(got, expected)
        same(run(own, vmap)(*args), results[3])  # outside of jit


@VMAPS
def test_13283_closures_over_values_that_are_traced(vmap):
    def run(w, xs, wrap, vmap):
        return vmap(wrap(lambda x: jnp.tanh(x * w) + w))(xs)

    plain = lambda w, xs: run(w, xs, lambda f: f, jax.vmap)
    own = lambda w, xs: run(w, xs, all_at_once, vmap)
    agree(own, plain, V[0], U)
    for transform in (jax.jacrev, jax.jacfwd):
        expected, got = at_once(transform(plain), transform(own))(V[0], U)
        same(got, expected)
        same(transform(own)(V[0], U), expected)  # outside of jit
    stepped = lambda f: lambda xs: lax.scan(lambda c, w: (c + f(w, xs).sum(), None), 0.0, V)[0]
    agree(jax.grad(stepped(own)), jax.grad(stepped(plain)), U)


@VMAPS
def test_14961_a_numpy_array_that_is_not_mapped_stays_one(vmap):
    kinds = []

    @bx.custom_vmap
    def shifted(x, table):
        kinds.append(type(table))
        return x + table.tolist()[0]  # a tracer has no such method that works

    @shifted.def_vmap
    def rule(axis_size, in_batched, x, table):
        kinds.append(type(table))
        assert in_batched == [True, False]
        return x + table.tolist()[0], True

    table = np.array([2.0, 3.0], np.float32)
    same(vmap(shifted, (0, None))(U, table), U + 2)
    same(vmap(jax.grad(lambda x, t: shifted(x, t).sum()), (0, None))(U, table), jnp.ones((4, 3)))
    same(jax.grad(lambda x: vmap(shifted, (0, None))(x, table).sum())(U), jnp.ones((4, 3)))
    assert set(kinds) == {np.ndarray}


def own_vjp(fun):
    """Addition whose derivatives show that they are its own: two and three."""
    add = jax.custom_vjp(fun)
    add.defvjp(lambda a, b: (add(a, b), None), lambda _, g: (2 * g, 3 * g))
    return add


@VMAPS
@pytest.mark.parametrize("order", ["custom_vmap of custom_vjp", "custom_vjp of custom_vmap"])
def test_14150_custom_vjp_and_custom_vmap_in_either_order(vmap, order):
    seen = []

    def by_rule(fun):
        own = bx.custom_vmap(fun)

        @own.def_vmap
        def rule(axis_size, in_batched, *args):
            seen.append(in_batched)
            return fun(*args), True

        return own

    add = lambda a, b: a + b
    add = by_rule(own_vjp(add)) if order.startswith("custom_vmap") else own_vjp(by_rule(add))
    same(vmap(add)(U, V), U + V)
    assert seen == [[True, True]]
    two_three = (jnp.full((4, 3), 2.0), jnp.full((4, 3), 3.0))
    same(jax.vjp(add, U, V)[1](jnp.ones((4, 3))), two_three)
    assert len(seen) == 1
    same(jax.vjp(vmap(add), U, V)[1](jnp.ones((4, 3))), two_three)
    same(jax.jit(jax.grad(lambda a, b: vmap(add)(a, b).sum(), (0, 1)))(U, V), two_three)
    same(vmap(jax.grad(lambda a, b: add(a, b).sum(), (0, 1)))(U, V), two_three)
    assert len(seen) > 1


@VMAPS
def test_29996_a_loop_over_lanes_that_is_computed_while_compiling(vmap):
    known = []

    @jax.jit
    def f(x):
        with jax.ensure_compile_time_eval():
            y = vmap(bx.sequential_vmap(jnp.cos))(jnp.arange(10.0))
            known.append(np.asarray(y))  # has a value already
            slope = jax.grad(lambda x: vmap(bx.sequential_vmap(jnp.sin))(x).sum())(jnp.arange(3.0))
            known.append(np.asarray(slope))
        return x + y

    same(f(jnp.asarray(3.4)), 3.4 + jnp.cos(jnp.arange(10.0)))
    same(known[0], jnp.cos(jnp.arange(10.0)))
    same(known[1], jnp.cos(jnp.arange(3.0)))


@pytest.mark.parametrize("vmaps", [(bx.vmap, bx.vmap), (bx.vmap, jax.vmap), (jax.vmap, bx.vmap)])
@pytest.mark.parametrize("axes", [((0, 0), (0, 0)), ((0, None), (None, 0)), ((None, 0), (0, 0))])
def test_24756_threads_compute_what_one_lane_at_a_time_does(vmaps, axes):
    def on_host(x, y):
        assert isinstance(x, np.ndarray)
        assert x.shape == y.shape == (3,)
        return np.sin(x) @ y, np.argmax(x).astype(np.int32)

    out = (jax.eval_shape(lambda: jnp.zeros(())), jax.ShapeDtypeStruct((), jnp.int32))
    inner, outer = axes
    shapes = {(0, 0): (2, 4, 3), (0, None): (4, 3), (None, 0): (2, 3)}
    args = [example(shapes[a], seed=k) for k, a in enumerate(zip(inner, outer, strict=True))]

    def run(threads):
        one = bx.host_function(on_host, out, threads=threads)
        return vmaps[1](vmaps[0](one, inner), outer)(*args)

    plain = lambda x, y: (jnp.sin(x) @ y, jnp.argmax(x).astype(jnp.int32))
    want = jax.vmap(jax.vmap(plain, inner), outer)(*args)
    same(run(1), want)
    same(run(4), want)
    same(jax.jit(lambda: run(3))(), want)


def test_7047_collectives_in_a_rule_that_asks_for_the_name():
    @bx.custom_vmap
    def centred(x):
        return x - lax.pmean(x, "lanes")

    @centred.def_vmap
    def rule(axis_size, in_batched, x, *, axis_name):
        assert axis_name == "lanes"
        return bx.vmap(lambda x: x - lax.pmean(x, axis_name), axis_name=axis_name)(x), True

    want = U - U.mean(0)
    for vmap in (bx.vmap, jax.vmap):
        same(vmap(centred, axis_name="lanes")(U), want)
        gradient = jax.grad(lambda x, v=vmap: jnp.sum(v(centred, axis_name="lanes")(x) ** 2))
        same(gradient(U), 2 * want)
        same(jax.jit(vmap(vmap(centred, axis_name="lanes")))(U[None]), want[None])


@VMAPS
@pytest.mark.parametrize("in_axes", [0, None])
def test_7047_collectives_in_derivatives_of_ones_own(vmap, in_axes):
    """The argument may be the same for all lanes: nothing else says that there is an axis."""

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
        return vmap(each, in_axes, axis_name="lanes", axis_size=4)(U if in_axes == 0 else U[0])

    same(run(summed, vmap), run(plain, jax.vmap))
    values = vmap(summed, in_axes, axis_name="lanes", axis_size=4)(U if in_axes == 0 else U[0])
    total = U.sum(0) if in_axes == 0 else 4 * U[0]
    same(values, jnp.broadcast_to(total, (4, 3)))
