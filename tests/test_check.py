"""`check`: silent where a batched function is right, and exact about where it is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

FLOAT = jax.dtypes.canonicalize_dtype(float)


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), FLOAT)


def layer(w, x):
    return {"y": jnp.tanh(x @ w), "most": x.max()}


def halving(x):
    return lax.while_loop(lambda x: x > 1, lambda x: x / 2, x)


RIGHT = {
    "shared and mapped": (layer, (None, 0), (numbers(3, 2), numbers(10, 3)), {}),
    "another axis": (lambda x: x * 2, 1, (numbers(3, 10),), {}),
    "chunks": (layer, (None, 0), (numbers(3, 2), numbers(10, 3)), {"batch_size": 3}),
    "devices": (layer, (None, 0), (numbers(3, 2), numbers(10, 3)), {"mesh": "all"}),
    "a tree": (lambda t: t["a"] @ t["b"], 0, ({"a": numbers(5, 3), "b": numbers(5, 3)},), {}),
    "a loop": (halving, 0, (jnp.arange(1.0, 30.0),), {"divergence": "compact"}),
    "integers": (lambda n: n * n, 0, (jnp.arange(7),), {}),
    "one lane": (jnp.sin, 0, (numbers(1),), {}),
    "keys": (
        lambda k, x: x * jax.random.normal(k),
        (bx.split_key, 0),
        (jax.random.key(0), numbers(6)),
        {},
    ),
    "tiles": (lambda t: t - t.mean(), bx.tiles(size=2), (numbers(6),), {}),
    "a name": (lambda how, x: getattr(jnp, how)(x), (None, 0), ("exp", numbers(4)), {}),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.compiles(60)  # what is compiled for no other test before
@pytest.mark.each_commit(5)
def test_what_is_right_passes(name):
    fun, in_axes, args, options = RIGHT[name]
    checked = bx.check(fun, in_axes, **options)(*args)
    assert checked.lanes == tuple(range(checked.size))


def test_rows_of_different_lengths():
    rows = bx.Ragged.from_rows([np.arange(float(n), dtype=FLOAT) for n in (3, 1, 4)])
    assert bx.check(lambda t: (t * 2, t.sum()))(rows).lanes == (0, 1, 2)
    images = [np.ones((h, w), FLOAT) for h, w in ((2, 3), (1, 2), (3, 1))]
    checked = bx.check(lambda x: x * x.sum())(bx.Ragged.from_rows(images, axis=(0, 1)))
    assert checked.derivatives == ()  # by rows there are none


def with_rule(rule):
    @bx.custom_vmap
    def fun(x):
        return jnp.sin(x)

    fun.def_vmap(lambda size, batched, x: (rule(x), True))
    return fun


def test_a_value_that_differs():
    wrong = with_rule(lambda x: jnp.sin(x) + (jnp.arange(9.0) == 8) * jnp.array(0.5, FLOAT))
    x = numbers(9)
    with pytest.raises(bx.MismatchError, match=r"fun differs.*in lane 8, out: .*, expected ") as e:
        bx.check(wrong)(x)
    assert isinstance(e.value, AssertionError)
    assert bx.check(with_rule(jnp.sin), lanes=1)(x).lanes == (0,)


@pytest.mark.parametrize("size", [8, 1000])
def test_a_rule_that_is_wrong_in_one_lane(size):
    lane = 3 if size == 8 else size // 2
    factors = jnp.where(jnp.arange(size) == lane, 2, 1).astype(FLOAT)
    wrong = with_rule(lambda x: jnp.sin(x) * factors)
    with pytest.raises(bx.MismatchError, match=rf"in lane {lane}, out: .*Compared: ") as e:
        bx.check(wrong)(numbers(size))
    told = "all 8 lanes" if size == 8 else r"64 of 1,000 lanes (lanes=1000 compares all)"
    assert str(e.value).endswith(f" Compared: {told}.")
    with pytest.raises(bx.MismatchError, match=rf"lane {lane}, cotangent of x"):
        bx.check(sloped(factors))(jnp.ones(size, FLOAT))


@pytest.mark.parametrize("dtype", [FLOAT, int, "keys"])
def test_a_lane_that_is_not_among_those_compared_one_by_one(dtype):
    size, lane = 1000, 401
    assert lane not in bx.check(jnp.sin)(numbers(size)).lanes
    here = jnp.arange(size) == lane
    if dtype == "keys":
        fun = bx.custom_vmap(lambda key: key)
        x = jax.random.split(jax.random.key(0), size)
        fun.def_vmap(lambda size, batched, x: (jnp.where(here, x[::-1], x), True))
    else:
        fun = bx.custom_vmap(lambda x: 2 * x)
        x = numbers(size).astype(dtype)
        fun.def_vmap(lambda size, batched, x: (2 * x + here.astype(x.dtype), True))
    with pytest.raises(bx.MismatchError, match=rf"in lane {lane}, out"):
        bx.check(fun)(x)


def sloped(factors):
    @bx.custom_vmap
    def fun(x):
        return 1 * x

    fun.def_vmap(
        lambda size, batched, x: (lax.stop_gradient(x * (1 - factors)) + x * factors, True)
    )
    return fun


def test_what_was_compared():
    checked = bx.check(layer, (None, 0))(numbers(3, 2), numbers(300, 3))
    assert len(checked.lanes) == 64
    assert {0, 150, 299} < set(checked.lanes)
    assert checked.lanes == bx.check(layer, (None, 0))(numbers(3, 2), numbers(300, 3)).lanes
    assert repr(checked) == (
        "layer agrees with a loop over the examples. Compared: 64 of 300 lanes (lanes=300 compares "
        "all), values and derivatives by w, x. One loop compared the values of all lanes."
    )
    some = bx.check(layer, (None, 0), lanes=2, derivatives=False)(numbers(3, 2), numbers(9, 3))
    assert (some.lanes, some.size, some.derivatives) == ((0, 8), 9, ())
    assert "2 of 9 lanes (lanes=9 compares all), values, no derivatives." in str(some)
    many = bx.check(jnp.sin, lanes=2, derivatives=False)(numbers(1000))
    assert str(many).endswith("One loop compared the values of 128 lanes.")


def test_derivatives_by_arrays_in_a_tree_that_all_lanes_share():
    @bx.custom_vmap
    def fun(w, x):
        return w * x

    fun.def_vmap(lambda size, batched, w, x: (lax.stop_gradient(w) * x, True))
    params, x = {"w": jnp.ones((), FLOAT), "name": None}, numbers(8)
    with pytest.raises(bx.MismatchError, match=r"lane 0, cotangent of p\['w'\]: 0.0, expected"):
        bx.check(lambda p, x: fun(p["w"], x), (None, 0))(params, x)
    checked = bx.check(lambda p, x: p["w"] * x, (None, 0))(params, x)
    assert checked.derivatives == ("p['w']", "x")


def test_a_function_that_keeps_something_between_calls():
    calls = []

    def fun(x):
        calls.append(x)
        return x * len(calls)

    with pytest.raises(bx.MismatchError, match="in lane 0, out"):
        bx.check(fun)(jnp.ones(8, FLOAT))


def test_arrays_that_the_function_branches_on():
    fun = lambda w, x: x * 2 if w > 0 else x
    checked = bx.check(fun, (None, 0))(jnp.ones((), int), numbers(8))
    assert checked.lanes == tuple(range(8))
    assert checked.derivatives == ("x",)


def test_lanes_that_leak_into_others():
    leaky = with_rule(lambda x: jnp.sin(x) + (x[::-1] - lax.stop_gradient(x[::-1])))
    with pytest.raises(bx.MismatchError, match=r"of lane 0 have a derivative by x of lane 3"):
        bx.check(leaky)(jnp.ones(4, FLOAT))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: bx.check(3)(x), bx.ArgumentTypeError, "check expects a function"),
        (lambda x: bx.check(jnp.sin, x), bx.ArgumentTypeError, r"batchax.check\(sin\)\(\.\.\.\)"),
        (
            lambda x: bx.check(jnp.sin, axis_name="i")(x),
            bx.UnsupportedError,
            "function of one lane alone",
        ),
        (lambda x: jax.jit(lambda x: bx.check(jnp.sin)(x))(x), bx.ArgumentTypeError, "traced"),
        (lambda x: bx.check(jnp.sin, (0, 0))(x), bx.AxisError, "in_axes has 2 entries"),
        (lambda x: bx.check(lambda x, y: x + y)(x[:3], x), bx.AxisError, r"y: shape \(4,\)"),
        (lambda x: bx.check(jnp.sin, lanes=0)(x), bx.OptionError, "positive int, got 0"),
        (lambda x: bx.check(jnp.sin, lanes="all")(x), bx.ArgumentTypeError, "positive int, got"),
    ],
)
def test_mistakes(call, error, message):
    with pytest.raises(error, match=message):
        call(numbers(4))


def test_batches_of_nothing_and_lanes_of_no_argument():
    bx.check(jnp.sin)(numbers(0))
    bx.check(jnp.sin)(bx.Ragged(numbers(0), np.zeros(0, int)))
    bx.check(lambda: jnp.ones(3), axis_size=4)()


@pytest.mark.parametrize(
    ("fun", "in_axes", "args"),
    [
        (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0.0), 0, (jnp.arange(4.0),)),
        (lambda w, x: jnp.sqrt(w * x), (None, 0), (jnp.array(2.0), jnp.arange(4.0))),
    ],
)
def test_an_infinite_derivative_of_one_lane_is_no_leak(fun, in_axes, args):
    bx.check(fun, in_axes)(*args)


def test_derivatives_that_one_example_does_not_have_are_left_out():
    on_host = lambda x: jax.pure_callback(np.sin, x, x, vmap_method="expand_dims")
    bx.check(on_host)(numbers(4))
