"""Calls of rows in padded arrays: checkpoints, functions with rules of their own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

import batchax as bx
from batchax.errors import UnsupportedError

from support.high_operations import OLD
from support.oracle import shares
from support.rows import check_rows, check_rows_of_all, chosen, ragged

check = partial(check_rows, layout="padded", rules=True)
check_all = partial(check_rows_of_all, layout="padded", rules=True)
WEIGHTS = jnp.asarray(np.random.default_rng(3).normal(size=(3, 2)), float)


def of_gradient(fun):
    """The gradient, within the function of a row, of a function of it."""

    def gradient(x):
        return jax.grad(lambda x: sum(jnp.sin(y).sum() for y in jax.tree.leaves(fun(x))))(x)

    return gradient


@jax.custom_jvp
def scaled_logarithm(x):
    return jnp.log(jnp.abs(x))


@scaled_logarithm.defjvp
def _(primals, tangents):
    # Not the derivative: that the rule is used, and takes the mean over its own row, must show.
    (x,), (t,) = primals, tangents
    return scaled_logarithm(x), t / x * jnp.mean(x)


@jax.custom_jvp
def scaled_mantissa(x):
    return jnp.frexp(x)[0]


@scaled_mantissa.defjvp
def _(primals, tangents):
    # `frexp` calls `ldexp` with tangents, which takes bits apart.
    out, dot = jax.jvp(lambda x: jnp.frexp(x)[0], primals, tangents)
    return out, dot * jnp.mean(primals[0])


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def applied(fun, x):
    return fun(x)


@applied.defjvp
def _(fun, primals, tangents):
    return fun(primals[0]), 3 * tangents[0] * primals[0].mean(0)


@jax.custom_jvp
def product(x, y):
    return x * y, x.sum()


def _product_jvp(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    dot = jnp.zeros_like(x)
    dot = dot if isinstance(dx, SymbolicZero) else dot + 2 * dx * y
    dot = dot if isinstance(dy, SymbolicZero) else dot + 5 * x * dy
    whole = SymbolicZero(jax.typeof(x.sum())) if isinstance(dx, SymbolicZero) else dx.sum()
    return product(x, y), (dot, whole)


product.defjvp(_product_jvp, symbolic_zeros=True)


@jax.custom_vjp
def total_of_gradient(x):
    return jnp.sin(x) * x.sum()


# A cotangent that is summed over the row, as no derivative is.
total_of_gradient.defvjp(
    lambda x: (total_of_gradient(x), x), lambda x, ct: (ct.sum() * jnp.cos(x),)
)


@jax.custom_vjp
def layer(x, w):
    return jnp.log(jnp.abs(x)) @ w, x.sum()


layer.defvjp(
    lambda x, w: (layer(x, w), (x, w)),
    lambda kept, cts: (
        cts[0] @ kept[1].T / kept[0] + cts[1],
        2 * jnp.log(jnp.abs(kept[0])).T @ cts[0],
    ),
)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def power(x, k):
    return x**k


power.defvjp(lambda x, k: (x**k, (x,)), lambda k, kept, ct: (k * kept[0] ** (k - 1) * ct * 2,))


@jax.custom_vjp
def with_symbolic_zeros(x, y):
    return x * y.mean(0), y.sum()


def _forward(x, y):
    assert isinstance(x.perturbed, bool)
    return with_symbolic_zeros(x.value, y.value), (x.value, y.value)


def _reverse(kept, cts):
    x, y = kept
    ct = jnp.zeros_like(x) if isinstance(cts[0], SymbolicZero) else cts[0]
    whole = 0.0 if isinstance(cts[1], SymbolicZero) else cts[1]
    return 7 * ct * y.mean(0), (ct * x).sum(0) / jnp.sqrt(jnp.abs(y)) + whole


with_symbolic_zeros.defvjp(_forward, _reverse, symbolic_zeros=True)


@jax.custom_jvp
def running(x):
    return jax.lax.scan(lambda c, r: (c * 0.5 + jnp.log(jnp.abs(r)), c), jnp.zeros(3), x)


@running.defjvp
def _(primals, tangents):
    def step(carry, row):
        value, dot = carry
        x, t = row
        new = value * 0.5 + jnp.log(jnp.abs(x)), dot * 0.5 + 3 * t / x
        return new, carry

    outs, parts = jax.lax.scan(step, (jnp.zeros(3), jnp.zeros(3)), (primals[0], tangents[0]))
    return (outs[0], parts[0]), (outs[1], parts[1])


def cube_root(x):
    """Of each element of ``exp(x)``, by Newton's method, with the derivative of what it solves."""
    return jax.lax.custom_root(
        lambda y: y**3 - jnp.exp(x),
        jnp.ones_like(x) * x.shape[0],
        lambda f, y: jax.lax.fori_loop(0, 12, lambda _, y: y - f(y) / (3 * y**2), y),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


BOTH = {
    "derivative of what an iteration solves": cube_root,
    "checkpoint with a policy": jax.checkpoint(
        lambda x: jnp.sin(x @ WEIGHTS).mean(0), policy=jax.checkpoint_policies.dots_saveable
    ),
    "checkpoint, differentiated": of_gradient(jax.checkpoint(lambda x: jnp.sin(x).mean(0) * x)),
    "jvp rule": scaled_logarithm,
    "jvp rule, differentiated": of_gradient(scaled_logarithm),
    "jvp rule that is linear by an object on JAX 0.12": scaled_mantissa,
    "jvp rule for a function": lambda x: applied(jnp.sin, x),
    "jvp rule with both moving": lambda x: product(x, jnp.sin(x)),
    "jvp rule, first zero": lambda x: product(jnp.ones((x.shape[0], 3)), x),
    "jvp rule, second zero": lambda x: product(x, jnp.full((x.shape[0], 3), 0.5)),
    "vjp rule, differentiated": lambda x: jax.lax.stop_gradient(of_gradient(total_of_gradient)(x)),
    "jvp rule with a loop over the row": running,
    "a loop in a checkpoint": jax.checkpoint(
        lambda x: jax.lax.scan(lambda c, r: (c / r, jnp.sqrt(jnp.abs(r))), jnp.ones(3), x)
    ),
    "sequential_vmap": bx.sequential_vmap(lambda x: jnp.sin(x) * x.sum()),
}


@pytest.mark.parametrize("names", shares(BOTH, 3), ids=" ".join)
def test_a_call_acts_on_a_row_as_if_alone(names):
    check_all(chosen(BOTH, names), ragged(3, lengths=(3, 0, 2, 3)))


@jax.custom_vjp
def running_product(x):
    return jnp.cumprod(x, 0)


running_product.defvjp(
    lambda x: (running_product(x), x), lambda x, ct: jax.vjp(lambda x: jnp.cumprod(x, 0), x)[1](ct)
)


REVERSE = {
    "that differentiates a product of all before": running_product,
    "sums its cotangent": total_of_gradient,
    "with an argument that is no array": lambda x: power(jnp.sin(x), 3),
    "with symbolic zeros": lambda x: with_symbolic_zeros(x, jnp.exp(x)),
    "with a zero cotangent": lambda x: with_symbolic_zeros(x, jnp.exp(x))[0],
}


def test_a_reverse_rule_acts_on_a_row_as_if_alone():
    check_all(REVERSE, ragged(3, lengths=(3, 1, 2, 3)), modes=("vjp",))


def test_the_next_derivatives_of_a_row(next_derivatives):
    fun = lambda x: (running_product(x), with_symbolic_zeros(x, jnp.exp(x)), scaled_logarithm(x))
    check(fun, ragged(3, lengths=(3, 1, 2, 3)), modes=("vjp",))


def test_a_reverse_rule_gives_shared_weights_nothing_from_padding():
    check(layer, ragged(3, lengths=(3, 0, 2, 3)), WEIGHTS, in_axes=(0, None), modes=("vjp",))


# What a derivative rule does to a row for which it needs the length as a number.
NUMBERS = {
    "len": lambda x: x * len(x),
    "if": lambda x: x if x.shape[0] > 2 else 2 * x,
    "convolution": lambda x: jax.vjp(
        lambda k: jnp.convolve(k, k, "same") if len(x) else k, jnp.ones_like(x)
    )[1](x)[0],
}


def with_rule_of(kind, change):
    """`sin`, with a rule of this kind that changes a row."""
    if kind == "forward":
        function = jax.custom_jvp(jnp.sin)
        function.defjvp(lambda p, t: (jnp.sin(p[0]), jnp.cos(p[0]) * change(t[0])))
        return function
    function = jax.custom_vjp(jnp.sin)
    if kind == "reverse":
        function.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(change(x)),))
    else:
        function.defvjp(lambda x: (jnp.sin(x), jnp.cos(change(x))), lambda kept, ct: (ct * kept,))
    return function


@pytest.mark.parametrize("change", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("kind", ["forward", "of residuals", "reverse"])
def test_a_derivative_rule_that_needs_a_length_as_a_number(kind, change):
    function = with_rule_of(kind, change)
    x = ragged(lengths=(2, 4, 6), poison=False)

    def gradient(layout):
        total = lambda data: bx.vmap(function, layout=layout)(x.with_data(data)).data[:12].sum()
        return x.with_data(jax.jit(jax.grad(total))(x.data))

    if kind == "reverse":  # it runs after the batch
        with pytest.raises(UnsupportedError, match='layout="grouped"') as raised:
            gradient("auto")
        assert "CannotPad" not in repr(raised.value)
    alone = jax.jit(jax.grad(lambda row: function(row).sum()))
    expected = list(map(alone, x.rows()))
    for layout in ("auto", "grouped")[kind == "reverse" :]:
        for got, row in zip(gradient(layout).rows(), expected, strict=True):
            np.testing.assert_allclose(got, row, rtol=1e-5)


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("flags", ["", "next"])
def test_a_rule_that_closes_over_a_value_of_the_row_is_refused_with_the_way_out(
    kind, flags, request
):
    if flags:
        if OLD and kind == "vjp":
            pytest.skip("JAX 0.10 refuses it itself")
        request.getfixturevalue("next_derivatives")

    def row(x):
        mean = x.mean(0)
        if kind == "jvp":
            double = jax.custom_jvp(lambda y: y * 2)
            double.defjvp(lambda p, t: (p[0] * 2, t[0] * mean))
        else:
            double = jax.custom_vjp(lambda y: y * 2)
            double.defvjp(lambda y: (y * 2, None), lambda kept, ct: (ct * mean,))
        return double(x)

    x = ragged(3, poison=False)
    np.testing.assert_allclose(bx.vmap(row, layout="padded")(x)[0], 2 * x[0])
    loss = jax.jit(lambda data: bx.vmap(row, layout="padded")(x.with_data(data)).data.sum())
    with pytest.raises(UnsupportedError, match="Pass the value as an argument"):
        jax.grad(loss)(x.data)


@pytest.mark.parametrize("kind", ["jvp"] if OLD else ["jvp", "function"])
def test_the_next_derivatives_of_what_closes_over_a_number_of_the_row(kind, next_derivatives):
    def row(x):
        scale = jnp.sin(2.0)
        if kind == "jvp":
            double = jax.custom_jvp(lambda y: y * 2)
            double.defjvp(lambda p, t: (p[0] * 2, t[0] * p[0] * scale))
        else:
            double = jax.custom_vjp(lambda y: y * scale)
            double.defvjp(lambda y: (y * 2, y), lambda kept, ct: (ct * kept,))
        return double(x)

    x = ragged(3, poison=False)
    loss = lambda data: bx.vmap(row)(x.with_data(data)).data.sum()
    alone = jax.grad(lambda row_: row(row_).sum())
    for got, own in zip(x.with_data(jax.jit(jax.grad(loss))(x.data)).rows(), x.rows(), strict=True):
        np.testing.assert_allclose(got, alone(own), rtol=1e-5)


@bx.custom_vmap
def ours(x):
    return jnp.sin(x) * x.sum()


@ours.def_vmap
def _(axis_size, in_batched, x):
    return 7 * x, True


@jax.custom_batching.custom_vmap
def of_jax(x):
    return jnp.sin(x) * x.sum()


@of_jax.def_vmap
def _(axis_size, in_batched, x):
    return 7 * x, True


def test_a_batching_rule_serves_arrays_of_one_size_and_rows_are_computed_by_the_function():
    check(ours, ragged(3))
    check(of_jax, ragged(3), derivatives=False)
    check(of_gradient(ours), ragged(3))
    x = ragged(3)
    for fun in (ours, of_jax):
        got = bx.vmap(lambda x, fun=fun: fun(x.sum(0)), layout="padded")(x)
        expected = [7 * np.asarray(row).sum(0) for row in x.rows()]
        np.testing.assert_allclose(got, expected, rtol=1e-5)


# --- what is remembered outside of jit ----------------------------------------------------------
