"""`check_rule` finds what is wrong with a rule, and nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx


def scaled(x, w):
    return jnp.sin(x) * w[0], x.sum()


def good(axis_size, in_batched, x, w):
    return jax.vmap(scaled, [0 if b else None for b in in_batched])(x, w), True


def where(both=None, change=lambda outs: outs):
    """A rule that is wrong where `both` arguments, or not both, are batched."""

    def rule(axis_size, in_batched, x, w):
        outs, flags = good(axis_size, in_batched, x, w)
        return (change(outs) if both is None or all(in_batched) == both else outs), flags

    return rule


def with_rule(rule, fun=scaled):
    f = bx.custom_vmap(fun)
    f.def_vmap(rule)
    return f


ARGS = jnp.array([0.3, 1.2]), jnp.array([2.0, 1.0])


@pytest.mark.compiles(100)
def test_a_right_rule_passes():
    bx.check_rule(with_rule(good), *ARGS)


# rule, transformation, what is batched, what is said of the difference
WRONG = {
    "value": (
        where(True, lambda outs: (outs[0] * 1.5, outs[1])),
        "vmap of vjp",  # where each lane has a cotangent of its own for both
        r"args\[0\] along axis 0, args\[1\] not",
        r"cotangent of args\[0\], entry \(3, 1\): ",
    ),
    "one lane": (
        where(change=lambda outs: (outs[0].at[2, 1].add(1), outs[1])),
        "vmap",
        r"args\[0\] along axis 0, args\[1\] not",
        r"out\[0\], entry \(2, 1\): .* \(1 of 16 entries differ\)",
    ),
    "order of lanes": (
        where(change=lambda outs: (outs[0], outs[1][::-1])),
        "vmap",
        r"args\[0\] along axis 0",
        r"out\[1\], entry \(2,\): ",
    ),
    "tangent": (
        where(change=lambda outs: (jax.lax.stop_gradient(outs[0]), outs[1])),
        "jvp of vmap",
        r"args\[0\] along axis 0, args\[1\] not",
        r"tangent of out\[0\], entry \(2, 0\): 0.0, expected",
    ),
    "second": (
        where(change=lambda outs: (second_order_lost(outs[0]), outs[1])),
        "jvp of vjp of vmap",
        r"args\[0\] along axis 0, args\[1\] not",
        r"tangent of the cotangent of args\[0\], entry",
    ),
    "raises": (
        where(True, lambda outs: 1 / 0),
        "vmap of vjp",
        r"args\[0\] along axis 0, args\[1\] not",
        "it raised ZeroDivisionError",
    ),
    "shape": (
        where(change=lambda outs: (outs[0].T, outs[1])),
        "vmap",
        r"args\[0\] along axis 0",
        r"(?s)it raised AxisError: .*out\[0\]: with out_batched True expected shape",
    ),
}


@jax.custom_jvp
def second_order_lost(x):
    return x


@second_order_lost.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return x, t * (1 + 0.1 * (x - jax.lax.stop_gradient(x)))


@pytest.mark.compiles(40)
@pytest.mark.parametrize("case", WRONG)
def test_the_first_difference_is_reported(case):
    rule, transformation, batched, message = WRONG[case]
    with pytest.raises(bx.RuleMismatchError, match=message) as caught:
        bx.check_rule(with_rule(rule), *ARGS)
    text = str(caught.value)
    assert text.startswith("the batching rule of scaled differs from a loop over the examples:")
    assert f"transformation: {transformation}\n" in text
    assert re.search(f"batched: {batched}", text)
    assert isinstance(caught.value, AssertionError)


def test_derivatives_can_be_left_out():
    rule = where(change=lambda outs: (jax.lax.stop_gradient(outs[0]), outs[1]))
    bx.check_rule(with_rule(rule), *ARGS, derivatives=False)


@pytest.mark.compiles(60)
def test_derivatives_that_the_function_does_not_have_are_left_out():
    on_host = bx.host_function(lambda x: np.cumsum(x), lambda x: x)
    f = with_rule(lambda n, b, x: (jnp.cumsum(x, 1), True), on_host)
    bx.check_rule(f, jnp.arange(3.0))
    wrong = with_rule(lambda n, b, x: (jnp.cumsum(x, 0), True), on_host)
    with pytest.raises(bx.RuleMismatchError, match="transformation: vmap\n"):
        bx.check_rule(wrong, jnp.arange(3.0))


@pytest.mark.compiles(150)
def test_other_kinds_of_arguments():
    @bx.custom_vmap
    def f(key, index, flags, x, scale, mode):
        noise = jax.random.uniform(key, (2,))
        return x[index] * scale + noise, flags.any() if mode == "any" else flags.all()

    @f.def_vmap
    def rule(axis_size, in_batched, *args):
        axes = [0 if b else None for b in in_batched[:4]]
        one = lambda *arrays: f.fun(*arrays, *args[4:])
        return bx.vmap(one, tuple(axes))(*args[:4]), True

    args = jax.random.key(0), jnp.array([0, 2]), jnp.array([True, False]), jnp.arange(3.0)
    bx.check_rule(f, *args, 2.0, "any", derivatives=False)

    @f.def_vmap
    def ignores_keys(axis_size, in_batched, key, *rest):
        key = key[0] if in_batched[0] else key
        return rule(axis_size, [False, *in_batched[1:]], key, *rest)

    with pytest.raises(bx.RuleMismatchError, match=r"args\[0\] along axis 0"):
        bx.check_rule(f, *args, 2.0, "any", derivatives=False)


def test_lanes_of_the_users_own():
    f = with_rule(lambda n, b, i: (jnp.zeros(n, jnp.int32), True), lambda i: i * 0)
    bx.check_rule(f, jnp.int32(1))
    ignores = with_rule(lambda n, b, i: (jnp.ones(n, jnp.int32), True), lambda i: i)
    bx.check_rule(ignores, jnp.int32(1))  # a scalar integer is the same in all lanes
    with pytest.raises(bx.RuleMismatchError, match=r"entry \(1,\): 1, expected 2"):
        bx.check_rule(ignores, jnp.int32(1), others=[(jnp.int32(2),)])
    with pytest.raises(bx.ArgumentTypeError, match=r"others\[0\] must have the structure"):
        bx.check_rule(ignores, jnp.int32(1), others=[()])


def test_tolerances():
    f = with_rule(lambda n, b, x: (x * 1.001, True), lambda x: x)
    with pytest.raises(bx.RuleMismatchError):
        bx.check_rule(f, jnp.ones(2))
    bx.check_rule(f, jnp.ones(2), rtol=1e-2)
    bx.check_rule(f, jnp.ones(2), atol=1e-2)


@pytest.mark.compiles(160)
def test_rounding_of_terms_that_cancel():
    """A derivative is exactly 0 in the loop, and rounding in the batch. More than that is wrong."""
    x, q = jnp.ones((3, 4)), jnp.array([1.0, -1.0, 0.5, 0.0])
    bx.check_rule(lambda x, q: jax.nn.softmax(x @ q) @ x, x, q)
    flat = with_rule(lambda n, batched, x: (x - x + 1e-3, True), lambda x: x - x)
    with pytest.raises(bx.RuleMismatchError, match=r"0\.001\S*, expected 0\.0"):
        bx.check_rule(flat, q)
