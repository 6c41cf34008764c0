"""Sharding annotations and shard_map, on four devices."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx
from batchax.errors import AxisError, UnsupportedError
from batchax.kernel.registry import find_rule

from support.oracle import at_once, check_derivatives, example, same, same_type

MESH = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
X = example((4, 6, 2), seed=1)


def equation(fun, *args):
    """The one equation that is there apart from those that place the outputs."""
    eqns = jax.make_jaxpr(fun)(*args).eqns
    (eqn,) = [e for e in eqns if e.primitive is not lax.transpose_p]
    assert find_rule(eqn.primitive) is not None
    return eqn


def both(fun, *args, jit=True, **options):
    """Results of batchax.vmap and jax.vmap, which must have the same values and types."""
    wrap = jax.jit if jit else lambda f: f
    got, expected = (wrap(v(fun, **options))(*args) for v in (bx.vmap, jax.vmap))
    same(got, expected)
    jax.tree.map(same_type, got, expected)
    return got, expected


# annotations


def annotate(spec):
    return lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, spec))


@pytest.mark.parametrize("spmd", [None, "b", ("a", "b")])
@pytest.mark.parametrize("in_axes", [0, 1, 2])
@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a")])
@pytest.mark.each_commit(9)
def test_sharding_constraint(spmd, in_axes, spec):
    if spmd == ("a", "b") and "a" in spec:
        return
    options = dict(in_axes=in_axes, out_axes=in_axes, spmd_axis_name=spmd)
    x = jnp.ones((4, 4, 4))
    ours, theirs = (equation(v(annotate(spec), **options), x) for v in (bx.vmap, jax.vmap))
    assert ours.params["sharding"].is_equivalent_to(theirs.params["sharding"], 3)
    for name in ("unconstrained_dims", "layout", "context_mesh"):
        assert ours.params[name] == theirs.params[name], name
    got, expected = at_once(*[v(annotate(spec), **options) for v in (bx.vmap, jax.vmap)])(x)
    same(got, expected)
    assert got.sharding.is_equivalent_to(expected.sharding, 3)


def test_a_sharding_on_one_device_is_one_of_any_rank():
    one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    f = lambda x: lax.with_sharding_constraint(x, one)
    assert equation(bx.vmap(f), X).params["sharding"] == one


def test_unconstrained_dimensions():
    f = lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, P(P.UNCONSTRAINED, "a")))
    for spmd in (None, "b"):
        ours, theirs = (equation(v(f, 1, spmd_axis_name=spmd), X) for v in (bx.vmap, jax.vmap))
        assert ours.params["unconstrained_dims"] == theirs.params["unconstrained_dims"]
        assert ours.params["sharding"] == theirs.params["sharding"]


def test_a_mesh_axis_cannot_shard_both_the_batch_and_an_example():
    with pytest.raises(AxisError, match="'a'"):
        bx.vmap(annotate(P("a")), spmd_axis_name="a")(X)


def test_shardings_of_jit():
    @functools.partial(
        jax.jit,
        in_shardings=NamedSharding(MESH, P("a")),
        out_shardings=NamedSharding(MESH, P(None, "a")),
    )
    def f(x):
        return x * 2

    for spmd in (None, "b"):
        ours, theirs = (
            equation(v(f, 1, 1, spmd_axis_name=spmd), jnp.ones((4, 4, 4)))
            for v in (bx.vmap, jax.vmap)
        )
        for name in ("in_shardings", "out_shardings"):
            (s,), (t,) = ours.params[name], theirs.params[name]
            assert s.is_equivalent_to(t, 3), name
        both(f, jnp.ones((4, 4, 4)), in_axes=1, spmd_axis_name=spmd)


def test_layout_constraint():
    f = lambda x: with_layout_constraint(x, Layout((1, 0)))
    for in_axes in (0, 1, 2):
        ours, theirs = (equation(v(f, in_axes), X) for v in (bx.vmap, jax.vmap))
        position = ours.params["layout"].major_to_minor.index
        assert position(in_axes) == 0  # the batch is major to all dimensions of an example
        kept = [d for d in ours.params["layout"].major_to_minor if d != in_axes]
        assert [sorted(kept).index(d) for d in kept] == [1, 0]
        assert ours.primitive is theirs.primitive
    same(jax.jit(bx.vmap(f))(X), X)


# shard_map


def on_devices(fun, in_specs, out_specs, **options):
    return jax.shard_map(fun, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)


@pytest.mark.parametrize("in_axes", [(1, None), (2, 0), (None, 0)])
@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.each_commit(3)
def test_shard_map(in_axes, checked):
    size = 3
    shapes = [(4, 6), (4,)]
    args = [
        example(s if a is None else (*s[:a], size, *s[a:]), seed=i)
        for i, (s, a) in enumerate(zip(shapes, in_axes, strict=True))
    ]

    def per_example(x, w):
        body = lambda x, w: ((x * w[:, None]).sum(1) - lax.pmean(x, "a").sum(), lax.psum(w, "a"))
        return on_devices(body, (P("a"), P("a")), (P("a"), P()), check_vma=checked)(x, w)

    out_axes = (0, None if in_axes[1] is None else 0)
    batched, reference = (
        jax.jit(v(per_example, in_axes=in_axes, out_axes=out_axes)) for v in (bx.vmap, jax.vmap)
    )
    got, expected = batched(*args), reference(*args)
    same(got, expected)
    jax.tree.map(same_type, got, expected)
    check_derivatives(batched, reference, args, jit=True)


@pytest.mark.parametrize("in_axes", [0, 1])
def test_shard_map_with_the_batch_sharded(in_axes):
    per_example = lambda x: on_devices(lambda x: jnp.sin(x) - lax.psum(x, "a"), P("a"), P("a"))(x)
    x = jnp.moveaxis(example((4, 2), seed=5), 0, in_axes)
    options = dict(in_axes=in_axes, spmd_axis_name="b")
    ours, theirs = (equation(v(per_example, **options), x) for v in (bx.vmap, jax.vmap))
    for name in ("in_specs", "out_specs", "check_vma", "newly_manual_axes", "mesh"):
        assert ours.params[name] == theirs.params[name], name
    both(per_example, x, jit=in_axes != 0, **options)
    check_derivatives(
        bx.vmap(per_example, **options), jax.vmap(per_example, in_axes), (x,), second=True, jit=True
    )


def test_a_collective_cannot_span_a_batch_that_devices_share():
    def per_example(x):
        return on_devices(lambda x: lax.psum(x, ("a", "i")), P("a"), P(), check_vma=False)(x)

    with pytest.raises(UnsupportedError, match="'i'"):
        bx.vmap(per_example, axis_name="i", spmd_axis_name="b")(X)
    with pytest.raises(AxisError, match="2 devices"):
        bx.vmap(on_devices(lambda x: x, P("a"), P("a")), spmd_axis_name="b")(X[:3])


# meshes with axes of type Explicit: types of arrays say how they are sharded

EXPLICIT = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)


def explicit(shape, spec):
    return jax.device_put(example(shape, seed=7), NamedSharding(EXPLICIT, spec))


PROGRAMS = {
    "elementwise": lambda x, w: jnp.sin(x) * 2 + 1,
    "select": lambda x, w: jnp.where(x > 0, x, 0.0),
    "contraction": lambda x, w: x @ w,
    "shapes": lambda x, w: jnp.concatenate([x.reshape(2, 2).T.ravel(), jnp.zeros(2)]),
    "unbatched": lambda x, w: w.sum(),
    "jit": lambda x, w: jax.jit(jnp.sin)(x),
    "checkpoint": lambda x, w: jax.checkpoint(jnp.sin)(x),
    "custom rule": lambda x, w: jax.nn.relu(x),
    "scan": lambda x, w: lax.scan(lambda c, _: (c + x.sum(), c), jnp.zeros(4), None, length=2),
    "branch of logarithms": lambda x, w: lax.cond(x.sum() > 1, jnp.log, lambda x: x, x),
    "loop in a branch": lambda x, w: lax.cond(
        x.sum() > 1,
        lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c * 2, x),
        lambda x: x,
        x,
    ),
    "while": lambda x, w: lax.while_loop(lambda c: c.sum() < 10, lambda c: c + 1, x),
    "index": lambda x, w: x[1] + jnp.sort(x),
    "gradient": lambda x, w: jax.grad(lambda x: jnp.sin(x @ w).sum())(x),
    "collective": lambda x, w: lax.psum(x, "i") + lax.axis_index("i"),
    "reshard": lambda x, w: jax.sharding.reshard(x, P(None)),
    "out_sharding of a sum": lambda x, w: lax.reduce_sum(
        x.reshape(2, 2), (1,), out_sharding=P(None)
    ),
    "out_sharding of a product": lambda x, w: jnp.matmul(x, w[:, :2], out_sharding=P("b")),
    "out_sharding of shapes": lambda x, w: (
        jnp.broadcast_to(x, (2, 4), out_sharding=P("b", None)),
        lax.reshape(x, (2, 2), out_sharding=P(None, "b")),
        lax.clamp(x[0], x, 2.0),
    ),
    "out_sharding of a convolution": lambda x, w: lax.conv_general_dilated(
        x.reshape(1, 2, 2, 1),
        w.reshape(2, 2, 1, 3),
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        out_sharding=NamedSharding(EXPLICIT, P(None, None, None, None)),
    ),
    "nested": lambda x, w: bx.vmap(lambda y: y * 2 + w.sum())(x),
    "shard_map": lambda x, w: jax.shard_map(
        lambda y: y * 2, mesh=EXPLICIT, in_specs=P(None), out_specs=P(None)
    )(x),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_shardings_in_types(name):
    with jax.set_mesh(EXPLICIT):
        w = example((4, 3), seed=8)
        for spec in (P("a", None), P(None, None)):
            x = explicit((4, 4), spec)
            outside = name in ("elementwise", "contraction") and spec[0] is None
            outside |= name == "collective"  # under `jit` jax.vmap of JAX 0.12 raises
            options = dict(in_axes=(0, None), axis_name="i", jit=not outside)
            both(PROGRAMS[name], x, w, **options)


# On the batch of a mesh, jax.vmap refuses these.
REFUSED_BY_JAX = {
    "constants": lambda x, w: (
        lax.cond(x.sum() > 1, lambda: 2.0, lambda: 1.0)
        + lax.while_loop(
            lambda c: c[0] < x.max() * 3, lambda c: (c[0] + 1, c[1] * 2 + x[0]), (0.0, 0.0)
        )[1]
    ),
    "gradient of a scan": lambda x, w: jax.grad(
        lambda x: lax.scan(lambda c, y: (jnp.sin(c) + y, None), 0.0, x)[0]
    )(x),
    "table": lambda x, w: jax.grad(lambda w: (w[jnp.argmax(x)] * x[0]).sum())(w),
    "inverse": lambda x, w: jnp.linalg.inv(x.reshape(2, 2) + 4 * jnp.eye(2)),
    "random": lambda x, w: jax.random.gamma(jax.random.key(x[0].astype(int)), 2.0),
}


@pytest.mark.parametrize(
    ("name", "set_mesh"),
    [
        *((name, True) for name in REFUSED_BY_JAX),
        ("constants", False),
        ("gradient of a scan", False),
        ("inverse", False),
    ],
)
def test_values_without_a_mesh_meet_a_batch_that_names_one(name, set_mesh):
    # The type of a constant names no mesh: once it differs by lane, it is sharded as lanes are.
    fun, x, w = REFUSED_BY_JAX[name], example((4, 4), seed=7), example((4, 3), seed=8)
    want = jax.vmap(fun, in_axes=(0, None))(x, w)
    with jax.set_mesh(EXPLICIT) if set_mesh else contextlib.nullcontext():
        sharded = explicit((4, 4), P("a", None))
        got = jax.jit(bx.vmap(fun, in_axes=(0, None)))(sharded, jnp.asarray(w))
    same(got, want)
    assert jax.typeof(got).sharding.spec[0] == "a"


def test_constants_are_repeated_on_a_mesh_that_is_not_set_outside_of_jit():
    def fun(x):
        total = lax.fori_loop(0, 3, lambda i, c: c + x[0], 0.0)
        return total, lax.cond(x[0] > 0, lambda: 2.0, lambda: 1.0), jnp.zeros(3).at[0].set(x[0])

    x = example((4, 4), seed=7)
    got = bx.vmap(fun)(explicit((4, 4), P("a", None)))
    jax.tree.map(same, got, jax.vmap(fun)(x))


def test_an_output_that_is_a_constant_of_a_batch_that_names_a_mesh():
    x = explicit((4, 4), P("a", None))
    assert jax.jit(bx.vmap(lambda x: 1.0))(x).shape == (4,)


def test_shardings_in_types_of_examples():
    with jax.set_mesh(EXPLICIT):
        x = explicit((4, 4), P("a", "b"))
        both(lambda x: jnp.sin(x) + 1, x, in_axes=1, out_axes=1)
        both(lambda x, y: x * y, x, x)
        both(jnp.sin, x, spmd_axis_name="a")

        def gradient(v):
            return jax.grad(lambda x: v(lambda x: jnp.tanh(x).sum())(x).sum())

        got, expected = at_once(gradient(bx.vmap), gradient(jax.vmap))(x)
        same(got, expected)
        assert jax.typeof(got) == jax.typeof(x)


def test_shardings_in_types_that_disagree():
    with jax.set_mesh(EXPLICIT):
        x, y = explicit((4, 4), P("a", None)), explicit((4, 4), P("b", None))
        with pytest.raises(AxisError, match=r"args\[1\]: 'b'"):
            bx.vmap(jnp.add)(x, y)
        with pytest.raises(AxisError, match="spmd_axis_name"):
            bx.vmap(jnp.sin, spmd_axis_name="b")(x)
