"""The front door: every way of saying which axes, and what comes back."""

import copy
import functools
import gc
import pickle
import re
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import batchax as bx
from batchax.frontend.rows import Layout
from batchax.vmap import MoreOptions

from support.oracle import example, same, same_type


def agrees_with_jax(fun, *args, **options):
    got = bx.vmap(fun, **options)(*args)
    expected = jax.vmap(fun, **options)(*args)
    same(got, expected)
    jax.tree.map(same_type, got, expected)
    return got


@given(
    axes=st.tuples(st.sampled_from([None, 0, 1, 2, -1, -3]), st.sampled_from([None, 0, 1, -2])),
    out=st.integers(-3, 2),
)
@pytest.mark.compiles(60)
def test_every_input_and_output_axis(axes, out):
    if axes == (None, None):
        axes = (0, None)
    x, y = (
        example(tuple(np.insert((3, 2), a % 3, 4)) if a is not None else (3, 2), seed=i)
        for i, a in enumerate(axes)
    )
    agrees_with_jax(lambda x, y: jnp.sin(x) * y + 1, x, y, in_axes=axes, out_axes=out)


def test_prefix_trees():
    tree = {"a": example((4, 3)), "b": (example((3, 4)), example((2,)))}

    def f(tree, scale):
        a, (b, c) = tree["a"], tree["b"]
        return {"sum": a + b, "c": c * scale}

    in_axes = ({"a": 0, "b": (1, None)}, None)
    agrees_with_jax(f, tree, 2.0, in_axes=in_axes, out_axes={"sum": 1, "c": None})


def test_axes_by_parameter_name():
    f = lambda x, w, *, bias, scale=1.0: (x * w + bias) * scale
    x, w, bias = example((3, 4)), example((3,), seed=1), example((4,), seed=2)
    axes = {"x": 1, "w": None}
    expected = jnp.stack([f(x[:, i], w, bias=bias[i]) for i in range(4)])
    same(bx.vmap(f, in_axes=axes)(x, w, bias=bias), expected)
    same(bx.vmap(f, in_axes=axes)(x, w=w, bias=bias), expected)
    same(
        bx.vmap(f, in_axes=axes | {"bias": None})(x, w, bias=1.0),
        bx.vmap(f, axes)(x, w, bias=jnp.ones(4)),
    )
    same(bx.vmap(f, in_axes=axes)(w=w, x=x, bias=bias, scale=jnp.full(4, 2.0)), 2 * expected)


def test_axes_by_parameter_name_of_methods_varargs_and_partials():
    class Model:
        def __init__(self):
            self.w = jnp.arange(3.0)

        def apply(self, x, flag):
            return self.w * x if flag else x

        def __call__(self, x, flag):
            return self.apply(x, flag)

    model, x = Model(), example((3, 4))
    expected = jnp.stack([model.w * x[:, i] for i in range(4)])
    for fun in (model.apply, model):
        same(bx.vmap(fun, in_axes={"x": 1, "flag": None})(x, True), expected)
    partial = functools.partial(lambda k, x, *, p: k * x**p, 2.0, p=3)
    same(bx.vmap(partial, in_axes={"x": 1})(x), jnp.stack([2.0 * x[:, i] ** 3 for i in range(4)]))
    many = lambda first, *rest, **named: first + sum(rest) + sum(named.values())
    same(
        bx.vmap(many, {"rest": (None, 0), "k": None})(jnp.arange(3.0), 1.0, jnp.ones(3), k=2.0),
        jnp.arange(3.0) + 4,
    )


def test_axes_by_callable():
    tree = {"w": example((2, 3)), "b": example((5,), seed=1), "x": example((4, 2, 3), seed=2)}
    rule = lambda leaf: 0 if leaf.ndim == 3 else None
    got = bx.vmap(lambda t: t["x"] @ t["w"].T + t["b"].sum(), in_axes=(rule,))(tree)
    same(got, jnp.stack([x @ tree["w"].T + tree["b"].sum() for x in tree["x"]]))
    same(bx.vmap(lambda t: t["x"] * 2, in_axes=rule)(tree), tree["x"] * 2)


def test_what_the_function_does_to_unmapped_containers_stays_inside():
    cache = {"seen": [1]}

    def remember(cache, x):
        cache["seen"].append(x)
        return x * len(cache["seen"])

    for _ in range(2):
        np.testing.assert_array_equal(bx.vmap(remember, in_axes=(None, 0))(cache, np.ones(3)), 2)
    assert cache == {"seen": [1]}
    unordered = {1: "a", "b": 2}  # not a tree for JAX: passed as it is
    assert bx.vmap(lambda d, x: x * d["b"], in_axes=(None, 0))(unordered, np.ones(3))[0] == 2


_WAYS = {
    "plain": {},
    "chunks": dict(batch_size=2),
    "mesh": dict(mesh="all"),
}


@jax.custom_vjp
def _doubled(x):
    return 2 * x


_doubled.defvjp(lambda x: (2 * x, x), lambda x, g: (g * x,))


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.compiles(80)  # outside of `jit`, where alone it works
def test_branching_in_python_on_an_unmapped_value_that_is_differentiated(way):
    """As in `jax.vmap`, where a gradient around the call is computed at once, not traced."""
    xs = example((3,))

    def run(vmap, inside, w):
        def f(w, x):
            w_2 = _doubled(jax.nn.relu(w))
            if jax.jit(jnp.sin)(w_2) > 0 and jax.grad(lambda y: y * w if y > w_2 else y)(w) > 0:
                return x * w_2 * lax.psum(w, "i")
            inner = inside(lambda w, y: y * w if w_2 + 1 > 0 else y, (None, 0))
            return inner(w, jnp.stack([x, x])).sum()

        return jnp.sum(vmap(f, (None, 0), axis_name="i")(w, xs))

    ours = functools.partial(run, functools.partial(bx.vmap, **_WAYS[way]), bx.vmap)
    theirs = functools.partial(run, jax.vmap, jax.vmap)
    for w in (1.0, -1.0):
        same(jax.value_and_grad(ours)(w), jax.value_and_grad(theirs)(w))
    same(jax.grad(jax.grad(ours))(1.0), jax.grad(jax.grad(theirs))(1.0))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(jax.grad(ours))(1.0)


def test_effects_of_a_function_that_branches_on_what_is_differentiated():
    """They happen once, when it runs, and references that it makes are those of each lane."""
    seen = []

    def f(w, x):
        jax.debug.callback(seen.append, w)
        ref = jax.new_ref(w)
        if w > 0:
            ref[...] = ref[...] * x
        return ref[...]

    gradient = jax.grad(lambda w: jnp.sum(bx.vmap(f, (None, 0))(w, jnp.arange(3.0))))
    same(gradient(2.0), jnp.asarray(3.0))
    jax.effects_barrier()
    assert len(seen) == 1


def test_keys_are_not_reduced():
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(bx.ArgumentTypeError, match=r"Reduce.* for out\[1\], of dtype key<fry>"):
        bx.vmap(lambda k: (1.0, k), out_axes=(0, bx.Reduce("sum")))(keys)


def test_constant_and_unbatched_outputs():
    constant = np.arange(2.0)
    got = bx.vmap(lambda x: (x, 3.0, constant), out_axes=(0, None, None))(jnp.ones(4))
    assert got[1] == 3.0
    assert got[2] is constant
    agrees_with_jax(lambda x: (x, 3.0, True, 1), jnp.ones(4))
    agrees_with_jax(lambda x, y: (y * 2, x), jnp.ones(4), 3, in_axes=(0, None), out_axes=(None, 0))


def test_axis_size_alone():
    agrees_with_jax(lambda: jnp.arange(3), axis_size=4)
    agrees_with_jax(lambda: lax.axis_index("i"), axis_size=4, axis_name="i")
    agrees_with_jax(lambda x: x, jnp.ones(2), in_axes=None, axis_size=4, out_axes=None)


def test_positional_order_of_options_is_that_of_jax():
    f = lambda x: x + lax.axis_index("i")
    x = example((3, 4))
    same(bx.vmap(f, 1, 1, "i", 4, None)(x), jax.vmap(f, 1, 1, "i", 4, None)(x))


class Named:
    """A callable with attributes that no function can have, as pytrees have inside of loops."""

    def __init__(self):
        self.__name__ = self.__qualname__ = self.__annotations__ = object()

    def __call__(self, x):
        return x * 2


@pytest.mark.parametrize(
    "batched",
    [
        bx.vmap,
        lambda f: lambda x: bx.scan(lambda c, x: (c, f(x)))(0, x)[1],
        lambda f: bx.auto_vmap(0)(f),
        lambda f: bx.vmap(bx.sequential_vmap(f)),
        lambda f: lambda x: bx.vmap(bx.host_function(f, jax.ShapeDtypeStruct((), x.dtype)))(x),
    ],
    ids=["vmap", "scan", "auto_vmap", "sequential_vmap", "host_function"],
)
def test_callables_whose_name_is_not_a_string(batched):
    x = jnp.arange(3.0)
    same(batched(Named())(x), 2 * x)
    assert bx.vmap(Named()).__wrapped__.__class__ is Named


def test_unused_equations_are_not_run():
    program = jax.make_jaxpr(bx.vmap(lambda x: (jnp.exp(x), jnp.sin(x))[1]))(jnp.ones(3))
    assert [e.primitive.name for e in program.eqns] == ["sin"]


def test_no_tracer_or_array_is_kept_after_a_call():
    x = jnp.ones((3, 2))
    kept = weakref.ref(x)
    bx.vmap(lambda x: jax.jit(lambda y: y * 2)(x))(x)
    with jax.checking_leaks():
        jax.jit(lambda x: bx.vmap(lambda x: jnp.sin(x) * 2)(x))(jnp.ones(3))
    del x
    gc.collect()
    assert kept() is None


def test_entries_of_a_tuple_for_arguments_given_by_keyword():
    """As a call would bind them; what comes after the entries is mapped at 0."""
    xs, w, ys = np.arange(6.0).reshape(3, 2), np.arange(2.0), np.arange(3.0)
    fun = lambda x, w, y=0.0, *, z=0.0: x @ w + y + z
    by_hand = xs @ w + ys
    for in_axes in ((0, None, 0), [0, None, 0]):
        batched = bx.vmap(fun, in_axes)
        for got in (
            batched(xs, w, ys),
            batched(xs, w, y=ys),
            batched(xs, y=ys, w=w),
            batched(y=ys, w=w, x=xs),
            bx.vmap(fun, in_axes, batch_size=2)(xs, y=ys, w=w),
        ):
            np.testing.assert_allclose(got, by_hand)
        np.testing.assert_allclose(batched(xs, w=w, y=ys, z=ys), by_hand + ys)
    np.testing.assert_allclose(bx.vmap(fun, (0, None))(xs, w=w), xs @ w)
    carry, _ = bx.scan(lambda c, x, w: (c + x @ w, c), in_axes=(0, None))(0.0, xs, w=w)
    np.testing.assert_allclose(carry, (xs @ w).sum())


def test_types_list_the_values_of_options():
    """An editor completes what the checks accept."""
    hints = MoreOptions.__annotations__
    values = lambda name: re.findall(r"'(\w+)'", hints[name].__forward_arg__)
    assert values("layout") == [*Layout]
    for name in ("layout", "divergence", "residuals", "small_matrices"):
        with pytest.raises(bx.OptionError) as raised:
            bx.vmap(jnp.sin, **{name: "other"})(jnp.ones(3))
        assert set(re.findall(r'"(\w+)"', str(raised.value))) >= set(values(name))
        for value in values(name):
            chunks = {"batch_size": 1} if name == "residuals" else {}
            bx.vmap(jnp.sin, **{name: value}, **chunks)


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_size": 2}, {"divergence": bx.Compact(width=3)}, {"out_axes": bx.Reduce("sum")}],
    ids=str,
)
def test_what_it_returns_is_sent_by_value(options):
    def f(x):
        return lax.cond(x > 1, jnp.sin, lambda x: 2 * x, x)

    x = jnp.arange(4.0)
    sent = pickle.loads(cloudpickle.dumps(bx.vmap(f, **options)))
    same(sent(x), bx.vmap(f, **options)(x))
    assert list(bx.find_nonfinite(sent)(x.at[1].set(jnp.nan)).lanes)


def test_specifications_stay_what_they_are():
    for spec in (bx.AUTO, bx.LANE_INDEX, bx.ZERO_IF_MAPPED, bx.split_key):
        assert pickle.loads(pickle.dumps(spec)) is copy.deepcopy(spec) is spec
