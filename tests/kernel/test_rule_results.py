"""What a rule of a primitive returns is checked, and said in the user's terms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import batchax as bx

from support.oracle import same

VMAPS = pytest.mark.parametrize("vmap", [bx.vmap, jax.vmap], ids=["bx", "jax"])
like = jax.core.ShapedArray
X = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)


def with_rule(rule, several=False):
    """A function that binds a primitive with that rule: the same, or that and the sum."""
    p = Primitive("mine")
    p.multiple_results = several
    fun = (lambda x: [x, x.sum()]) if several else (lambda x: x)
    p.def_impl(fun)
    p.def_abstract_eval(
        lambda x: [like(x.shape, x.dtype), like((), x.dtype)] if several else like(x.shape, x.dtype)
    )
    mlir.register_lowering(p, mlir.lower_fun(fun, multiple_results=several))
    bx.register_rule(p)(rule)

    def bound(x):
        return p.bind(x)

    return bound


# rule, whether there are two results, error, what the message says
WRONG = {
    "no pair": (
        lambda axis, args, axes: args[0],
        False,
        bx.ArgumentTypeError,
        r"must return a pair `out, out_axis`, but it returned one array of shape \(3, 2\)",
    ),
    "nothing": (lambda axis, args, axes: None, False, bx.ArgumentTypeError, "returned a NoneType"),
    "three": (
        lambda axis, args, axes: (args[0], 0, 0),
        True,
        bx.ArgumentTypeError,
        "must return a pair `outs, out_axes`, but it returned a tuple of length 3",
    ),
    "one of two": (
        lambda axis, args, axes: ([args[0]], [0]),
        True,
        bx.ArgumentTypeError,
        "a list of 2 in outs, one for each result of `mine`, but it returned a list of length 1",
    ),
    "one position for two": (
        lambda axis, args, axes: ([args[0], args[0].sum(1)], 0),
        True,
        bx.ArgumentTypeError,
        "a list of 2 in out_axes, one for each result of `mine`, but it returned a int",
    ),
    "shape": (
        lambda axis, args, axes: (args[0].T, 0),
        False,
        bx.AxisError,
        r"out: with out_axis 0 expected shape \(3, 2\), got \(2, 3\)",
    ),
    "lanes unsaid": (
        lambda axis, args, axes: (args[0], None),
        False,
        bx.AxisError,
        r"out: with out_axis None expected shape \(2,\), got \(3, 2\)",
    ),
    "both": (
        lambda axis, args, axes: ([args[0].T, args[0]], [0, 0]),
        True,
        bx.AxisError,
        r"(?s)outs\[0\]: with .* got \(2, 3\)\n  outs\[1\]: with .* expected shape \(3,\), got",
    ),
    "position": (
        lambda axis, args, axes: (args[0], 2),
        False,
        bx.AxisError,
        "out_axis = 2, but with the lanes that result has 2 dimensions, of which the last is 1",
    ),
    "position of one": (
        lambda axis, args, axes: ([args[0], args[0].sum(1)], [0, 1]),
        True,
        bx.AxisError,
        r"out_axes\[1\] = 1, but with the lanes that result has 1 dimension, of",
    ),
    "no position": (
        lambda axis, args, axes: (args[0], True),
        False,
        bx.ArgumentTypeError,
        "must return an int or None as out_axis, but it returned True of type bool",
    ),
    "dtype": (
        lambda axis, args, axes: (args[0].astype(jnp.int32), 0),
        False,
        bx.AxisError,
        "out: expected dtype float32, got int32",
    ),
    "no array": (lambda axis, args, axes: ("text", 0), False, bx.AxisError, "out: a str, which is"),
}


@VMAPS
@pytest.mark.parametrize("case", WRONG)
def test_what_a_rule_returns(vmap, case):
    rule, several, error, message = WRONG[case]
    f = with_rule(rule, several)
    with pytest.raises(error, match=message) as caught:
        vmap(f)(X)
    said = str(caught.value)
    assert f"{__file__}:{rule.__code__.co_firstlineno}" in said  # the rule
    assert "the batching rule of the primitive `mine` (at " in said
    assert f"{__file__}:{f.__code__.co_firstlineno + 1}" in said  # the user's line


@VMAPS
def test_what_fits_has_the_type_of_one_example(vmap):
    """Also counted from the end, of NumPy, a number, or of a weak type."""
    for rule, expected in (
        (lambda axis, args, axes: (args[0].T, -1), X),
        (lambda axis, args, axes: (args[0], np.int64(axes[0])), X),
        (lambda axis, args, axes: (np.ones((3, 2), np.float32), 0), X * 0 + 1),
        (lambda axis, args, axes: (jnp.full((3, 2), 2.0, X.dtype), 0), X * 0 + 2),
    ):
        got = vmap(with_rule(rule))(X)
        same(got, expected)
        assert not got.weak_type
    shared = vmap(
        with_rule(lambda axis, args, axes: ([args[0], 7], [0, None]), True), out_axes=[0, None]
    )
    same(shared(X), [X, jnp.float32(7)])


@VMAPS
def test_an_exception_in_a_rule_names_the_rule_and_the_line(vmap):
    def broken(axis, args, axes):
        raise KeyError("mine")

    f = with_rule(broken)
    with pytest.raises(KeyError, match="mine") as caught:
        vmap(jax.jit(f))(X)
    (note,) = (n for n in caught.value.__notes__ if n.startswith("batchax: "))
    assert "broken` (" in note
    assert f"{__file__}:{f.__code__.co_firstlineno + 1}" in note


@VMAPS
@pytest.mark.parametrize(
    ("make", "bind", "message"),
    [
        (bx.vectorized, lambda p, x: p.bind(x, x[:1]), "`odd` have .* Use batchax.broadcasting"),
        (bx.reducing, lambda p, x: p.bind(x), r"parameter `axes`; `odd` has 'size'"),
        (bx.vectorized, lambda p, x: p.bind(x), r"expected shape \(3, 1\), got \(1, 2\)"),
    ],
    ids=["operands", "parameter", "not elementwise"],
)
def test_a_word_for_a_family_that_does_not_fit(vmap, make, bind, message):
    p = Primitive("odd")
    first = lambda x, *_, size: x[:size]
    p.def_impl(first)
    p.def_abstract_eval(lambda x, *_, size: like((size, *x.shape[1:]), x.dtype))
    p.multiple_results = False
    make(p)
    with pytest.raises(bx.BatchaxError, match=message):
        vmap(lambda x: bind(_Sized(p), x))(X)


class _Sized:
    """Binds with a parameter."""

    def __init__(self, p):
        self.bind = lambda *xs: p.bind(*xs, size=1)
