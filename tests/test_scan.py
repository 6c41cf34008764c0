"""`bx.scan` against `lax.scan` over transposed arrays."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import batchax as bx

from support.compiled import compilations
from support.mistakes import cases
from support.oracle import (
    at_once,
    example,
    same,
    same_type,
)


def spread_axes(axes, tree):
    """The axis of each leaf, as a list; None covers a whole subtree."""
    if axes is None or isinstance(axes, int):
        return [axes] * len(jax.tree.leaves(tree))
    is_none = lambda x: x is None
    return jax.tree.leaves(
        jax.tree.map(lambda a, t: spread_axes(a, t), axes, tree, is_leaf=is_none), is_leaf=is_none
    )


def with_lax(fun, in_axes, out_axes=0, length=None, reverse=False, unroll=1):
    """`lax.scan` over arrays whose axes were moved before and after."""

    def scanned(init, *args):
        per_arg = in_axes if isinstance(in_axes, (tuple, list)) else [in_axes] * len(args)
        leaves, structure = jax.tree.flatten(args)
        axes = [a for spec, arg in zip(per_arg, args, strict=True) for a in spread_axes(spec, arg)]
        pairs = list(zip(leaves, axes, strict=True))
        moved = [None if a is None else jnp.moveaxis(x, a, 0) for x, a in pairs]

        def step(carry, xs):
            full = [x if a is None else e for (x, a), e in zip(pairs, xs, strict=True)]
            return fun(carry, *jax.tree.unflatten(structure, full))

        carry, ys = lax.scan(step, init, moved, length, reverse, unroll)
        places = spread_axes(out_axes, ys)
        leaves_out = [
            jnp.moveaxis(y, 0, a) for y, a in zip(jax.tree.leaves(ys), places, strict=True)
        ]
        return carry, jax.tree.unflatten(jax.tree.structure(ys), leaves_out)

    return scanned


def recur(carry, x, params):
    """A step with a carry, a mapped argument and parameters."""
    carry = jnp.tanh(params["w"] @ carry + x)
    return carry, {"all": carry * x, "sum": jnp.sum(carry)}


INIT = example((3,), seed=1)
PARAMS = {"w": example((3, 3), seed=2)}
XS = example((3, 5), seed=3)


def both(fun, in_axes=0, out_axes=0, **options):
    return bx.scan(fun, in_axes, out_axes, **options), with_lax(fun, in_axes, out_axes, **options)


# Values, types and derivatives


def test_all_steps_are_written_out_whatever_ran_before():
    """True is 1 to whoever compares it, and a program that was kept for 1 has a loop."""
    for unroll in (1, True, 0, False):
        program = jax.make_jaxpr(bx.scan(recur, (-1, None), unroll=unroll))(INIT, XS, PARAMS)
        whole = unroll is True or (unroll is not False and unroll == 0)
        length = XS.shape[-1] if whole else 1
        assert re.findall(r"unroll=(\w+)", str(program)) == [str(length)]
        bx.scan(recur, (-1, None), unroll=unroll)(INIT, XS, PARAMS)


def step_of_many(carry, x, y):
    """Works for every dtype: entries are stored, and what is inexact moves the carry."""
    return carry + jnp.sum(x).astype(carry.dtype), {"x": x, "pair": (x[..., None], y * 2)}


@settings(max_examples=15)
@given(
    st.integers(0, 5),
    st.integers(-3, 2),
    st.integers(-3, 2),
    st.integers(-4, 3),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
    st.sampled_from(["float32", "int32", "bool", "complex64", "bfloat16"]),
)
def test_any_axes_lengths_and_dtypes(seed, a, b, c, length, reverse, dtype):
    shape = [2, 2]
    shape.insert(a % 3, length)
    x = example(tuple(shape), dtype, seed=seed)
    y = example((length,), seed=4)
    carry = example((), "complex64" if dtype == "complex64" else "float32")
    options = dict(in_axes=(a, 0), out_axes={"x": b, "pair": (c, 0)}, reverse=reverse)
    same(*at_once(*both(step_of_many, **options))(carry, x, y))


@pytest.mark.parametrize("out_axis", [0, 1])
def test_weak_types_are_those_of_lax_scan(out_axis):
    def step(carry, x):
        count, scale, moved = carry
        return (count + 1, scale * 2.0, moved + x), (jnp.ones((2,)) * x, x[None], jnp.full((1,), 2))

    init = (0, 1.0, 0)  # the last is promoted by what is added to it
    xs = jnp.arange(3.0)
    f, g = both(step, 0, out_axis)
    same(f(init, xs), g(init, xs))
    jax.tree.map(same_type, jax.eval_shape(f, init, xs), jax.eval_shape(g, init, xs))


def test_constant_outputs_and_outputs_without_arrays():
    f, g = both(lambda c, x: (c, (1.0, np.arange(3), None)), out_axes=(0, 1, 0))
    jax.tree.map(same_type, f(0.0, jnp.ones(4)), g(0.0, jnp.ones(4)))
    same(f(0.0, jnp.ones(4)), g(0.0, jnp.ones(4)))
    same(bx.scan(lambda c, x: (c + x, None))(0.0, jnp.ones(4)), (jnp.asarray(4.0), None))
    same(bx.scan(lambda c, x: (c + x, None), out_axes=None)(0.0, jnp.ones(4))[0], jnp.asarray(4.0))


def test_length_alone():
    f = bx.scan(lambda c: (c * 2, c), length=4)
    same(f(jnp.float32(1)), (jnp.float32(16), jnp.array([1, 2, 4, 8], jnp.float32)))
    f = bx.scan(lambda c, s: (c * s, c), None, length=0)
    same(f(jnp.float32(1), 3.0), (jnp.float32(1), jnp.zeros(0, jnp.float32)))


# What reaches the step


def test_arguments_that_stay_the_same_may_be_any_object():
    seen = []

    def step(carry, x, activation, options, table):
        seen.append(options)
        carry = activation(carry + x) if options["squash"] else carry + x
        if table.sum() > 2:  # a value: it may be branched on
            carry = carry * 2
        return carry, carry

    xs = example((2, 4))
    table = jnp.ones(3)
    f = bx.scan(step, (1, None, None, None), 1)
    got = f(jnp.zeros(2), xs, jnp.tanh, {"squash": True}, table)
    expected = with_lax(lambda c, x: (jnp.tanh(c + x) * 2,) * 2, 1, 1)(jnp.zeros(2), xs)
    same(got, expected)
    assert seen[0] == {"squash": True}


def test_axes_by_name_reach_keyword_arguments():
    def step(carry, x, *, scale, params):
        carry = carry + x * scale * params
        return carry, carry

    xs, scale = example((2, 4)), example((4,), seed=5)
    f = bx.scan(step, {"x": -1, "params": None}, 1)
    expected = with_lax(lambda c, x, s: (c + x * s * 3.0,) * 2, (1, 0), 1)
    same(f(jnp.zeros(2), xs, scale=scale, params=3.0), expected(jnp.zeros(2), xs, scale))
    g = bx.scan(lambda carry, *xs: (carry + sum(xs), None), {"xs": (0, 1)})
    same(g(jnp.zeros(2), xs.T, xs)[0], 2 * xs.sum(1))


# Compositions


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_effects_happen_in_the_order_of_the_steps(jit, reverse):
    seen = []

    def step(carry, x):
        from jax.experimental import io_callback

        io_callback(lambda v: seen.append(("io", int(v))), None, x, ordered=True)
        jax.debug.callback(lambda v: seen.append(("debug", int(v))), x * 10, ordered=True)
        return carry + x, x

    f = bx.scan(step, 0, 0, reverse=reverse)
    (jax.jit(f) if jit else f)(0, jnp.arange(3))
    jax.effects_barrier()
    steps = [2, 1, 0] if reverse else [0, 1, 2]
    assert [v for kind, v in seen if kind == "io"] == steps
    assert [v for kind, v in seen if kind == "debug"] == [10 * t for t in steps]


def test_explicitly_sharded_arrays():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    f, g = both(lambda c, x: (jnp.sin(c) + x, c * x), 1, 1)
    args = (example((4,)), example((4, 3)))
    expected = g(*args)
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(x, jax.P("d")) for x in args]
        got = jax.jit(f)(*sharded)
        assert jax.typeof(got[1]).sharding.spec[0] == "d"
        same(jax.tree.map(np.asarray, got), jax.tree.map(np.asarray, expected))


# Compiling once


def test_calls_outside_jit_compile_once():
    def step(carry, x, scale, squash):
        carry = jax.nn.relu(carry * scale + x) if squash else carry + x
        return carry, carry

    def call(scale, squash=True):
        f = bx.scan(step, (1, None, None), 1)
        return lambda: jax.block_until_ready(f(jnp.zeros(2), xs, scale, squash))

    xs = example((2, 4))
    scales = [jnp.float32(s) for s in (1, 2)]
    assert compilations(call(scales[0]))
    assert not compilations(call(scales[1]))
    assert compilations(call(scales[1], squash=False))
    expected = with_lax(lambda c, x: (jax.nn.relu(c * 2 + x),) * 2, 1, 1)(jnp.zeros(2), xs)
    same(call(scales[1])(), expected)


def test_programs_that_differ_in_what_they_close_over_are_not_confused():
    def scanned(number, table, seen):
        @jax.custom_jvp
        def double(x):
            return 2 * x

        double.defjvp(lambda primals, tangents: (double(*primals), number * tangents[0]))

        def step(carry, x):
            jax.debug.callback(seen.append, x)
            jax.debug.callback(lambda v: seen.append(v), x)
            return carry + double(x) * table.sum(), jnp.where(x > 0, number, 0.0)

        return lambda x: bx.scan(step)(0.0, x)

    x = jnp.ones(1)
    for number, table in ((1.0, [1.0]), (-0.0, [1.0]), (0.0, [2.0])):
        seen = []
        f = scanned(number, jnp.array(table), seen)
        carry, ys = f(x)
        jax.effects_barrier()
        assert len(seen) == 2
        same((carry, ys), (jnp.asarray(2 * table[0]), jnp.full(1, number)))
        assert jnp.signbit(ys[0]) == np.signbit(number)
        same(jax.grad(lambda x: f(x)[0])(x), jnp.full(1, number * table[0]))


# Memory


def hlo(fun, *args):
    return jax.jit(fun).lower(*args).compile()


def arrays_moved(text, shape):
    """Instructions of a compiled program that copy or transpose arrays of some size."""
    size = int(np.prod(shape))
    found = []
    for line in text.splitlines():
        words = line.split(" = ")
        if len(words) == 2 and (" transpose(" in line or " copy(" in line):
            dims = words[1].split("[")[1].split("]")[0]
            if dims and np.prod([int(d) for d in dims.split(",")]) >= size:
                found.append(line.strip())
    return found


def test_stacked_arrays_are_neither_copied_nor_transposed():
    xs = example((8, 64, 16))

    def step(c, x, w):
        c = jnp.tanh(c @ w + x)
        return c, (c, c * x)

    args = (jnp.zeros((8, 16)), xs, jnp.ones((16, 16)))
    f, g = both(step, (1, None), (1, 2))
    compiled = hlo(f, *args)
    assert not arrays_moved(compiled.as_text(), xs.shape)
    assert arrays_moved(hlo(g, *args).as_text(), xs.shape)  # the test can fail
    assert compiled.memory_analysis().temp_size_in_bytes < xs.nbytes / 2


# By case: where the two arrays have their steps, and the two results; and options.


OPTIONS_OF_ONE = {"plain": {}, "reverse": dict(reverse=True, unroll=2), "until": {}}


@pytest.mark.parametrize("way", OPTIONS_OF_ONE)
def test_an_output_that_is_the_same_at_every_step(way):
    """With None in out_axes it comes back once: of what is shared, and of a carry that stays."""

    def step(carry, x, w):
        total, scale = carry
        y = {"each": total * x[:2], "w": jnp.sin(w) * scale, "two": 2.0, "of": (w, scale)}
        return (total + w * x.sum(), scale), y

    options = dict(OPTIONS_OF_ONE[way], **({"until": lambda c: c[0] > 9} if way == "until" else {}))
    once = bx.scan(step, (1, None), {"each": 1, "w": None, "two": None, "of": None}, **options)
    each = bx.scan(step, (1, None), {"each": 1, "w": 0, "two": 0, "of": 0}, **options)

    def first_of_each(*args):
        carry, ys = each(*args)
        at = -1 if way == "reverse" else 0
        first = {k: jax.tree.map(lambda y: y[at], v) for k, v in ys.items() if k != "each"}
        return carry, {"each": ys["each"], **first}

    args = (jnp.zeros(()), jnp.full((), 0.5)), jnp.asarray(example((3, 5))), jnp.asarray(1.5)
    total = lambda f: lambda *args: sum(map(jnp.sum, jax.tree.leaves(f(*args))))
    with_gradient = lambda f: jax.jit(lambda *a: (f(*a), jax.grad(total(f), (0, 1, 2))(*a)))
    same(with_gradient(once)(*args), with_gradient(first_of_each)(*args))
    same(once(*args), first_of_each(*args))
    lanes = jnp.arange(2.0)
    got = [vmap(lambda w: once(args[0], args[1], w)[1])(lanes) for vmap in (jax.vmap, bx.vmap)]
    same(got[0], got[1])
    assert jax.tree.leaves(once((0.0, 0.5), args[1][:, :0], 1.5)[1]["w"])[0].shape == ()


def test_an_output_that_may_differ_between_steps_is_refused():
    """Whatever it depends on: the carry, what is scanned, what an effect reads."""

    def step(carry, x, ref):
        ref[...] += 1.0
        count = jax.experimental.io_callback(
            lambda: np.float32(0), jax.ShapeDtypeStruct((), np.float32)
        )
        return carry + 1.0, {"carry": carry, "x": x, "ref": ref[...], "host": count, "w": 1.0}

    run = lambda: bx.scan(step, (0, None), None)(0.0, jnp.ones(3), jax.new_ref(jnp.zeros(())))
    with pytest.raises(bx.AxisError, match=r"ys.'carry'., .*'host'., .*'ref'., .*'x'. may diff"):
        run()


# Mistakes


def keep(carry, *xs):
    return carry, xs


def branching(carry, x):
    return (carry if x > 0 else -carry), None


MISTAKES = {
    bx.ArgumentTypeError: {
        "no function": (lambda: bx.scan(3), ["scan expects", "int"]),
        "as a decorator": (
            lambda: bx.scan(out_axes=1),
            ["scan() was given no function", "@functools.partial(batchax.scan, out_axes=...)"],
        ),
        "values": (
            lambda: bx.scan(keep, 0.0, jnp.zeros(4)),
            ["in_axes must be", "got 0.0", "what scan returns: batchax.scan(keep)(init, xs)."],
        ),
        "int as a carry": (
            lambda: bx.scan(keep, 0, jnp.zeros(4)),
            ["out_axes must be an int or None", "what scan returns: batchax.scan(keep)(init, xs)."],
        ),
        "no array": (
            lambda: bx.scan(keep)(0, "text"),
            ["xs[0]", "of type str, not an array", "None in in_axes"],
        ),
        "out_axes Reduce": (
            lambda: bx.scan(keep, out_axes=(0, bx.Reduce("sum"))),
            ["out_axes[1] must be an int", "a sum over the steps"],
        ),
        "unroll": (lambda: bx.scan(keep, unroll=-1), ["unroll must be"]),
        "no pair": (
            lambda: bx.scan(lambda carry, x: carry)(0, jnp.zeros(3)),
            ["must return a pair (carry, ys)", "'<lambda>'", "returned one array of shape ("],
        ),
        "carry structure": (
            lambda: bx.scan(lambda carry, x: ((carry,), x))(0, jnp.zeros(3)),
            ["must have the structure", "  *\nbecame\n  (*,)"],
        ),
        "carry no array": (
            lambda: bx.scan(keep)({"a": "text"}, jnp.zeros(3)),
            ["carry['a']", "of type str", "carry"],
        ),
        "output no array": (
            lambda: bx.scan(lambda c, x: (c, "text"))(0, jnp.zeros(3)),
            ["the output ys is of type str"],
        ),
    },
    bx.AxisError: {
        "sizes": (
            lambda: bx.scan(keep, (1, 0))(0, jnp.zeros((2, 3)), jnp.zeros(4)),
            ["xs[0]: shape (2, 3), axis 1, size 3", "xs[1]: shape (4,)", "at every step"],
        ),
        "no length": (
            lambda: bx.scan(keep, None)(0, jnp.zeros(4)),
            ["number of steps is unknown", "pass length"],
        ),
        "entries": (
            lambda: bx.scan(keep, (0, 1))(0, jnp.zeros(3)),
            ["in_axes has 2 entries", "1 positional argument after the carry"],
        ),
        "name of the carry": (
            lambda: bx.scan(lambda carry, x: (carry, x), {"carry": 0}),
            ["in_axes names 'carry'"],
        ),
        "out_axes None": (
            lambda: bx.scan(keep, out_axes=(0, None))(0, jnp.zeros(3), jnp.zeros(3)),
            ["ys[1] may differ between steps, but out_axes says None for it", "into the carry"],
        ),
        "out_axes range": (
            lambda: bx.scan(keep, out_axes=2)(0, jnp.zeros((3, 4))),
            ["out_axes gives 2 for ys[0], which has 2 axes with the axis of the steps"],
        ),
    },
    bx.UnsupportedError: {
        "a reference along another axis": (
            lambda: jax.jit(lambda xs: bx.scan(lambda c, x: (c, x[...]), 1)(0, jax.new_ref(xs)))(
                jnp.zeros((2, 3))
            ),
            ["x is a reference", "axis 0"],
        ),
    },
    jax.errors.TracerBoolConversionError: {
        "branching on a value": (
            lambda: bx.scan(branching)(0.0, jnp.zeros(3)),
            ["for scan", "argument x"],
        ),
    },
}


@pytest.mark.parametrize(("error", "call", "parts"), cases(MISTAKES))
def test_mistakes(error, call, parts):
    with pytest.raises(error) as info:
        call()
    for part in parts:
        assert part in str(info.value), (part, str(info.value))
    assert "vmap" not in str(info.value)


# --- along the last axis, in blocks ------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("length", [3, 16, 37])
@pytest.mark.each_commit(1)
def test_columns_are_taken_in_blocks(length, reverse):
    """Values, types and derivatives are those of `lax.scan` over the transposed array."""
    rows = 20
    x, w = example((length, rows), seed=1), example((rows,), seed=2)
    k = np.arange(length * rows, dtype=np.int8).reshape(x.shape)
    ways = None, (1, 1), (1, 0), (0, 1)  # `lax.scan`, and axes of arguments and results

    def step(carry, x, k, w):
        h, count = carry
        h = jnp.tanh(h * w + x) + k
        return (h, count + 1), {"h": h, "even": k % 2 == 0, "count": count}

    def run(axes, x, w):
        init = jnp.zeros(rows), 0
        if axes is None:
            return lax.scan(lambda c, xs: step(c, *xs, w), init, (x, k), reverse=reverse)
        given, out = axes
        out_axes = {"h": out, "even": out, "count": 0}
        scanned = bx.scan(step, (given, given, None), out_axes, reverse=reverse)
        carry, ys = scanned(init, *(a.T if given else a for a in (x, k)), w)
        return carry, {n: y.T if out_axes[n] else y for n, y in ys.items()}

    def loss(axes, x, w):
        carry, ys = run(axes, x, w)
        return jnp.sum(ys["h"] ** 2) + jnp.sum(carry[0])

    def everything(axes, x, w):
        of = functools.partial(loss, axes)
        stacked, vmap = jnp.stack([x, x + 1]), jax.vmap if axes is None else bx.vmap
        return (
            run(axes, x, w),
            jax.jvp(of, (x, w), (x, w)),
            jax.jvp(jax.grad(of, (0, 1)), (x, w), (x, w)),
            vmap(functools.partial(run, axes), (0, None))(stacked, w),
        )

    expected, *results = at_once(*(functools.partial(everything, axes) for axes in ways))(x, w)
    for axes, got in zip(ways[1:], results, strict=True):
        same(got, expected, where=str(axes))
        jax.tree.map(same_type, got, expected)


def test_columns_of_keys_and_few_rows():
    """Blocks are for arrays with enough rows; keys have no zero to begin from."""
    keys = jax.random.split(jax.random.key(0), (17, 6))
    draw = lambda c, keys: (c + 1, jax.vmap(jax.random.normal)(keys))
    carry, ys = bx.scan(draw, 1, 1)(0, keys)
    same(ys, jax.vmap(jax.vmap(jax.random.normal))(keys))
    assert int(carry) == 6
    _, passed = bx.scan(lambda c, keys: (c, keys), 1, 1)(0, keys)
    same(jax.random.key_data(passed), jax.random.key_data(keys))
    passing = jax.jit(bx.scan(lambda c, x: (c, x), 1, 1))
    loops = lambda x: passing.lower(0, x).as_text().count("stablehlo.while")
    assert (loops(jnp.ones((17, 32))), loops(jnp.ones((3, 32)))) == (2, 1)
    assert loops(jnp.ones((17, 32, 2))) == 1
