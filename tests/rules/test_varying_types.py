"""Inside shard_map, where types say over which axes of the mesh a value varies.

Functions of one example are run for lanes that a mesh holds (`vmap` inside of `shard_map`), and
call `shard_map` themselves for lanes that `spmd_axis_name` spreads over another axis of it.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx

from support.oracle import agree, at_once, example, same, same_type

X, W, K = example((8, 3), seed=1), example((3, 3), seed=2), jnp.arange(8)
IN_AXES = (0, None, 0)


def mesh_of(count, kind=AxisType.Auto):
    return jax.make_mesh((count,), ("d",), axis_types=(kind,))


def two_branches(x, w, k):
    """What a predicate that varies selects from constants varies as it does."""
    flag = lax.cond(x[0] > 0, lambda: True, lambda: True)
    flag = lax.cond(x[1] > 0, lambda: flag, lambda: x[2] > 0)
    one = jnp.ones((), x.dtype)
    start = lax.cond(x[0] > 0, lambda: one, lambda: 2 * one)
    _, sums = lax.scan(lambda c, e: (c + e, c), start, x)
    return jnp.where(flag, sums, w[0])


def counted(x, w, k):
    steps, y = lax.while_loop(lambda c: c[1].sum() < k, lambda c: (c[0] + 1, c[1] + 1), (0, abs(x)))
    return lax.cond(x[0] > 0, lambda: steps, lambda: k) * y


def endless(x, w, k):
    """A loop in a loop, whose lanes differ; the inner one is for as long as the outer has run."""

    def inner(y, j):
        return lax.while_loop(
            lambda c: c[0] < j % 3, lambda c: (c[0] + 1, c[1] * 1.1 + w[0]), (0, y)
        )[1]

    step = lambda c: (c[0] + 1, inner(c[1], c[0] + k) + inner(c[1], c[0]))
    return lax.while_loop(lambda c: c[0] < k % 4, step, (0, x))[1]


def in_branches(x, w, k):
    steps = lambda y: lax.fori_loop(0, 5, lambda i, c: jnp.tanh(w @ c), y)
    until = lambda y: lax.while_loop(lambda c: c.sum() < k, lambda c: c + 1.0, abs(y))
    taken = lax.switch(k % 3, [lambda: w[0] + 0 * x, lambda: steps(x), lambda: until(x)])
    return taken + lax.cond(w[0, 0] > 0, lambda: x, lambda: 2 * x)


def slices(x, w, k):
    i, square = jnp.argmax(w[0]), jnp.outer(x, x)
    return (
        lax.dynamic_slice(square, (1, 0), (2, 2)) @ lax.dynamic_slice(w, (0, k % 2), (2, 1))[:, 0]
        + lax.dynamic_update_slice(x, x[:2] * 2, (i,))[:2]
        + lax.dynamic_index_in_dim(w, k % 3, 0, keepdims=False)[:2]
    )


def over_shared(x, w, k):
    """Loops, calls and rules given what all devices have, and what they do not."""
    state, _ = lax.scan(lambda c, row: (jnp.tanh(c + row), c.sum()), x, w)
    total, _ = lax.scan(lambda c, row: (c * row.sum() + 1, c), 1.0, w)
    called = jax.jit(lambda a, b: jax.jit(lambda m: m @ m)(a) @ b)(w, x)
    again = jax.checkpoint(lambda x: jnp.tanh(w @ x) * w[0])(x)
    return state * total + called + again + scaled(x, w[0]) + jnp.sort(w, 0)[0] + jnp.median(x)


@jax.custom_jvp
def scaled(x, w):
    return jnp.sin(x) * w


scaled.defjvp(lambda p, t: (scaled(*p), t[0] * jnp.cos(p[0]) * p[1] + jnp.sin(p[0]) * t[1]))


def in_place(x, w, k):
    step = lambda c: (c[0] + 1, c[1].at[c[0]].add(w[0, 0]))
    return lax.while_loop(lambda c: c[0] < k % 3, step, (0, x))[1]


def vmaps_inside(x, w, k):
    rows = bx.vmap(lambda r: (r * x).sum())(w) + bx.vmap(lambda r: r @ x, batch_size=2)(w)
    stopped = bx.bounded_while(lambda c: c.sum() < 9, lambda c: jnp.abs(c) * 1.5 + w[0] ** 2, x, 5)
    carry, _ = bx.scan(lambda c, r: (jnp.tanh(c + r), c.sum()))(x, w)
    return rows + stopped + carry


def with_keys(x, w, k):
    key = jax.random.fold_in(jax.random.key(0), k)
    return jax.random.normal(key, (3,)) + jax.random.uniform(jax.random.key(1), (3,)) + w[0]


BODIES = [
    two_branches, counted, endless, in_branches, slices, over_shared, in_place, vmaps_inside,
    with_keys,
]  # fmt: skip
DIFFERENTIABLE = {two_branches, slices, over_shared}
WAYS = {"whole": {}, "chunks": {"batch_size": 1}, "compact": {"divergence": bx.Compact(width=1)}}


def inside(f, mesh, **options):
    """Lanes that devices hold, batched inside of `shard_map`."""
    specs = (P("d"), P(), P("d"))
    return jax.shard_map(
        bx.vmap(f, IN_AXES, **options), mesh=mesh, in_specs=specs, out_specs=P("d")
    )


def spread(f, mesh, checked=True, **options):
    """A function that calls `shard_map`, for lanes that are spread over the devices."""

    def one(*args):
        whole = dict(in_specs=P(), out_specs=P(), check_vma=checked)
        return jax.shard_map(f, mesh=mesh, **whole)(*args)

    return bx.vmap(one, IN_AXES, spmd_axis_name="d", **options)


def gradient(f):
    return jax.grad(lambda x, w, k: jnp.sum(jnp.sin(f(x, w, k))), (0, 1))


def ways(count):
    return WAYS if count > 1 else ["whole"]


def check_all(make, bodies, ways):
    """Values, and derivatives of those that have them, compiled as one program."""
    for way in ways:
        fs = {body: make(body, **WAYS[way]) for body in bodies}
        smooth = [body for body in bodies if body in DIFFERENTIABLE and way != "compact"]

        @jax.jit
        def all_of(*args):
            return [fs[b](*args) for b in fs], [gradient(fs[b])(*args) for b in smooth]

        values, gradients = all_of(X, W, K)
        for body, value in zip(fs, values, strict=True):
            same(value, expected(body), LOOSE, f"{body.__name__} {way}")
        for body, got in zip(smooth, gradients, strict=True):
            same(got, expected_gradient(body), LOOSE, f"gradient of {body.__name__} {way}")


LOOSE = {"rtol": 1e-4, "atol": 1e-5}


@functools.cache
def all_expected():
    """Values of all, and gradients of those that have them, for the same lanes on one device."""
    smooth = [body for body in BODIES if body in DIFFERENTIABLE]
    functions = [jax.vmap(body, IN_AXES) for body in BODIES]
    functions += [gradient(jax.vmap(body, IN_AXES)) for body in smooth]
    results = iter(at_once(*functions)(X, W, K))
    return {body: next(results) for body in BODIES}, {body: next(results) for body in smooth}


def expected(body):
    return all_expected()[0][body]


def expected_gradient(body):
    return all_expected()[1][body]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.each_commit(1)
def test_lanes_of_one_device(count):
    check_all(functools.partial(inside, mesh=mesh_of(count)), BODIES, ways(count))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.each_commit(1)
def test_lanes_spread_by_spmd_axis_name(count):
    check_all(functools.partial(spread, mesh=mesh_of(count)), BODIES, ways(count))
    if count == 4:
        unchecked = functools.partial(spread, mesh=mesh_of(count), checked=False)
        check_all(unchecked, [over_shared, slices], ["whole"])


def test_the_index_of_a_lane():
    f = lambda x: x * lax.axis_index("lanes") + lax.axis_index("d")

    def mapped(v, **options):
        vmapped = v(f, axis_name="lanes", **options)
        return jax.shard_map(vmapped, mesh=mesh_of(4), in_specs=P("d"), out_specs=P("d"))

    ways = mapped(jax.vmap), mapped(bx.vmap), mapped(bx.vmap, batch_size=1)
    want, *results = at_once(*ways)(X)
    for got in results:
        same(got, want)


def test_what_does_not_depend_on_the_batch_varies_over_nothing_more():
    def one(x, w):
        def body(x, w):
            total, _ = lax.scan(lambda c, r: (c + r, None), jnp.zeros(3), w)
            return jax.jit(lambda y, t: (y + t, t * 2))(x * w, total)

        return jax.shard_map(body, mesh=mesh_of(4), in_specs=P(), out_specs=P())(x, w)

    got, want = (
        jax.jit(v(one, (0, None), (0, None), spmd_axis_name="d"))(X, W) for v in (bx.vmap, jax.vmap)
    )
    same(got, want)
    jax.tree.map(same_type, got, want)


def test_a_custom_vjp_of_what_lanes_share():
    """A gradient of what all lanes share is the sum over the lanes of all devices."""

    @jax.custom_vjp
    def f(x, w):
        return jnp.sin(x) * w[0]

    def backward(saved, c):
        x, w = saved
        return c * jnp.cos(x) * w[0], jnp.zeros_like(w).at[0].set(c * jnp.sin(x))

    f.defvjp(lambda x, w: (f(x, w), (x, w)), backward)
    g = spread(lambda x, w, k: f(x, w), mesh_of(4))
    plain = jax.vmap(lambda x, w, k: jnp.sin(x) * w[0], IN_AXES)
    agree(gradient(g), gradient(plain), X, W, K)


def test_a_custom_vjp_of_what_devices_share_in_chunks():
    """Inside of a chunk loop all vary; what the rule returns for all devices counts once."""

    @jax.custom_vjp
    def f(x, w):
        return jnp.sin(x) * w[0]

    def backward(saved, c):
        x, w = saved
        total = lax.psum(c * jnp.sin(x), "d")
        return c * jnp.cos(x) * w[0], jnp.zeros_like(w).at[0].set(total)

    f.defvjp(lambda x, w: (f(x, w), (x, w)), backward)
    plain = jax.vmap(lambda x, w, k: jnp.sin(x) * w[0], IN_AXES)
    for options in ({}, {"batch_size": 1}):
        g = inside(lambda x, w, k: f(x, w), mesh_of(4), **options)
        agree(gradient(g), gradient(plain), X, W, K, tolerance=LOOSE)


MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)


def test_lanes_cannot_meet_over_the_axis_that_spreads_them():
    def one(operation):
        def f(x):
            return jax.shard_map(
                operation, mesh=MESH, in_specs=P("b"), out_specs=P("b"), check_vma=False
            )(x)

        return bx.vmap(f, spmd_axis_name="a")

    x = example((4, 6), seed=3)
    with pytest.raises(bx.AxisError, match=r"`psum\S*` is over 'a'"):
        jax.eval_shape(one(lambda x: lax.psum(x, "a")), x)
    got = jax.jit(one(lambda x: x * lax.psum(lax.axis_index("a"), "a")))(x)
    same(got, x)  # of what is the same in all lanes


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.each_commit(2)
def test_chunks_of_a_sharded_batch_with_a_shard_map_inside(kind, count):
    """Each lane needs all devices: chunks are taken from the whole batch."""
    mesh = mesh_of(count, kind)

    def body(x, w):
        return jnp.tanh(w @ x) - jnp.sum(x)

    def one(x, w):
        return jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())(x, w)

    def both(f):
        loss = lambda x, w: jnp.sum(jnp.sin(f(x, w)))
        return lambda x, w: (f(x, w), jax.grad(loss, (0, 1))(x, w))

    want = jax.jit(both(jax.vmap(body, (0, None))))(X, W)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("d")))
        w = jax.device_put(W, NamedSharding(mesh, P()))
        for spmd in (None, "d") if kind is AxisType.Auto else (None,):
            f = bx.vmap(one, (0, None), batch_size=3, spmd_axis_name=spmd)
            same(jax.device_get(jax.jit(both(f))(x, w)), want)
    if kind is AxisType.Auto:
        f = bx.vmap(one, (0, None), batch_size=3)
        same(jax.device_get(f(x, w)), want[0])  # each operation by itself, and no mesh is set
        f = bx.vmap(one, (0, None), batch_size=1, spmd_axis_name="d")
        same(jax.device_get(jax.jit(f)(x, w)), want[0])


def test_chunks_that_devices_cannot_share_evenly_have_each_lane_on_all_devices():
    mesh = mesh_of(4, AxisType.Auto)
    sums = jax.shard_map(lambda x: jnp.sum(x) + x, mesh=mesh, in_specs=P(), out_specs=P())
    batched = bx.vmap(sums, batch_size=2, spmd_axis_name="d")
    x = X[:6]
    same(jax.jit(batched)(x), x + jnp.sum(x, 1, keepdims=True))
