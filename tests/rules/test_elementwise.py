"""Primitives that act on elements, against the loop over examples."""

import operator
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import batchax as bx
from batchax._compat import find_primitive
from batchax.kernel.registry import aligned

from support.operations import bind
from support.oracle import check_all, example, shares

F32, BF16, I32, U8, BOOL, C64 = map(
    jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64)
)
REAL, NUMBERS, BITS = (F32, BF16), (F32, I32, C64), (I32, U8, BOOL)
B = 2


# name: (function, dtypes, low, high, smooth)
UNARY = {
    "abs": (lax.abs, NUMBERS, 0.5, 2.0, True),
    "acos": (lax.acos, REAL, -0.8, 0.8, True),
    "acosh": (lax.acosh, REAL, 1.2, 3.0, True),
    "asin": (lax.asin, REAL, -0.8, 0.8, True),
    "asinh": (lax.asinh, (F32, C64), -2.0, 2.0, True),
    "atan": (lax.atan, REAL, -2.0, 2.0, True),
    "atanh": (lax.atanh, REAL, -0.8, 0.8, True),
    "bessel_i0e": (lax.bessel_i0e, REAL, 0.5, 2.0, True),
    "bessel_i1e": (lax.bessel_i1e, REAL, 0.5, 2.0, True),
    "cbrt": (lax.cbrt, REAL, 0.5, 2.0, True),
    "ceil": (lax.ceil, REAL, -2.0, 2.0, False),
    "clz": (lax.clz, (I32, U8), 0, 9, False),
    "conj": (lax.conj, (F32, C64), -1.0, 1.0, True),
    "convert_element_type": (
        lambda x: lax.convert_element_type(x, F32),
        (BF16, I32, BOOL),
        0,
        9,
        False,
    ),
    "copy": (lax.copy_p.bind, (F32, BOOL), -1.0, 1.0, True),
    "cos": (lax.cos, (F32, BF16, C64), -2.0, 2.0, True),
    "cosh": (lax.cosh, REAL, -2.0, 2.0, True),
    "digamma": (lax.digamma, REAL, 0.5, 3.0, True),
    "erf": (lax.erf, REAL, -2.0, 2.0, True),
    "erf_inv": (lax.erf_inv, REAL, -0.8, 0.8, True),
    "erfc": (lax.erfc, REAL, -2.0, 2.0, True),
    "exp": (lax.exp, (F32, BF16, C64), -2.0, 2.0, True),
    "exp2": (lax.exp2, REAL, -2.0, 2.0, True),
    "expm1": (lax.expm1, REAL, -2.0, 2.0, True),
    "floor": (lax.floor, REAL, -2.0, 2.0, False),
    "imag": (lax.imag, (C64,), -1.0, 1.0, True),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), NUMBERS, 0.5, 2.0, True),
    "is_finite": (lambda x: lax.is_finite(1 / x), REAL, -1.0, 1.0, False),
    "lgamma": (lax.lgamma, REAL, 0.5, 3.0, True),
    "log": (lax.log, (F32, BF16, C64), 0.5, 3.0, True),
    "log1p": (lax.log1p, REAL, -0.5, 2.0, True),
    "log2": (bind("log2", accuracy=None), REAL, 0.5, 3.0, True),
    "logistic": (lax.logistic, REAL, -2.0, 2.0, True),
    "name": (lambda x: checkpoint_name(x, "kept"), (F32, I32), -1.0, 1.0, True),
    "neg": (lax.neg, (F32, I32, C64), -1.0, 1.0, True),
    "not": (lax.bitwise_not, BITS, 0, 9, False),
    "one_minus_square": (bind("one_minus_square"), (F32, I32), -1.0, 1.0, True),
    "population_count": (lax.population_count, (I32, U8), 0, 9, False),
    "real": (lax.real, (C64,), -1.0, 1.0, True),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 7), (F32,), -2.0, 2.0, True),
    "round": (lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), REAL, -2.0, 2.0, False),
    "rsqrt": (lax.rsqrt, REAL, 0.5, 2.0, True),
    "sign": (lax.sign, NUMBERS, 0.5, 2.0, False),
    "sin": (lax.sin, (F32, BF16, C64), -2.0, 2.0, True),
    "sinh": (lax.sinh, REAL, -2.0, 2.0, True),
    "sqrt": (lax.sqrt, (F32, BF16, C64), 0.5, 2.0, True),
    "square": (lax.square, NUMBERS, -2.0, 2.0, True),
    "stop_gradient": (lax.stop_gradient, (F32, I32), -1.0, 1.0, False),
    "tan": (lax.tan, REAL, -1.0, 1.0, True),
    "tanh": (lax.tanh, (F32, BF16, C64), -2.0, 2.0, True),
}

NARY = {
    "add": (lax.add, (*NUMBERS, BF16), -2.0, 2.0, True),
    "add_any": (bind("add_any"), NUMBERS, -2.0, 2.0, True),
    "and": (lax.bitwise_and, BITS, 0, 9, False),
    "atan2": (lax.atan2, REAL, 0.5, 2.0, True),
    "clamp": (lax.clamp, (F32, I32), -2.0, 2.0, False),
    "complex": (lax.complex, (F32,), -2.0, 2.0, True),
    "div": (lax.div, NUMBERS, 0.5, 2.0, True),
    "eq": (lax.eq, (*NUMBERS, BOOL), 0, 2, False),
    "eq_to": (bind("eq_to"), REAL, -1.0, 1.0, False),
    "ge": (lax.ge, (F32, I32, BOOL), 0, 2, False),
    "gt": (lax.gt, (F32, I32, BOOL), 0, 2, False),
    "igamma": (lax.igamma, (F32,), 0.5, 2.0, False),
    "igamma_grad_a": (lax.igamma_grad_a, (F32,), 0.5, 2.0, False),
    "igammac": (lax.igammac, (F32,), 0.5, 2.0, False),
    "le": (lax.le, (F32, I32, BOOL), 0, 2, False),
    "le_to": (bind("le_to"), REAL, -1.0, 1.0, False),
    "lt": (lax.lt, (F32, I32, BOOL), 0, 2, False),
    "lt_to": (bind("lt_to"), REAL, -1.0, 1.0, False),
    "max": (lax.max, (F32, I32, BOOL), -2.0, 2.0, False),
    "min": (lax.min, (F32, I32, BOOL), -2.0, 2.0, False),
    "mul": (lax.mul, NUMBERS, -2.0, 2.0, True),
    "mulhi": (bind("mulhi"), (I32,), 0, 1 << 20, False),
    "ne": (lax.ne, (*NUMBERS, BOOL), 0, 2, False),
    "nextafter": (lax.nextafter, REAL, -2.0, 2.0, False),
    "or": (lax.bitwise_or, BITS, 0, 9, False),
    "polygamma": (lambda m, x: lax.polygamma(lax.round(m), x), (F32,), 1.0, 3.0, False),
    "polynomial": (bind("polynomial"), (F32, I32), -2.0, 2.0, True),
    "pow": (lax.pow, (F32, BF16, C64), 0.5, 2.0, True),
    "regularized_incomplete_beta": (lax.betainc, (F32,), 0.2, 0.8, False),
    "rem": (lax.rem, (F32, I32), 0.5, 2.0, True),
    "select_n": (lambda i, x, y: lax.select_n(i > 0, x, y), (F32, I32), -2.0, 2.0, False),
    "shift_left": (lax.shift_left, (I32, U8), 0, 7, False),
    "shift_right_arithmetic": (lax.shift_right_arithmetic, (I32, U8), 0, 7, False),
    "shift_right_logical": (lax.shift_right_logical, (I32, U8), 0, 7, False),
    "sub": (lax.sub, NUMBERS, -2.0, 2.0, True),
    "xor": (lax.bitwise_xor, BITS, 0, 9, False),
    "zeta": (lax.zeta, (F32,), 1.5, 3.0, False),
}

COUNT = {"clamp": 3, "polynomial": 3, "regularized_incomplete_beta": 3, "select_n": 3}
# With one pattern of axes, lanes in a compiled loop: all of the table have one rule.
SLOW_TO_COMPILE = {
    "igamma", "igammac", "igamma_grad_a", "polygamma", "regularized_incomplete_beta", "zeta"
}  # fmt: skip
SAME_SHAPE_ONLY = {"add_any", "clamp", "select_n"}


def present(table):
    """The primitives of `table` that this version of JAX has."""
    return [name for name in table if find_primitive(name) is not None]


def draw(entry, dtype, shape, seed=0):
    _, _, low, high, _ = entry
    if jnp.issubdtype(dtype, jnp.integer):
        low, high = max(1, int(low)), max(2, int(high), 3)
    return example(shape, dtype, seed, low, high)


def batch_of(entry, dtype, shape, axis, seed=0):
    """A batch of examples of `shape` with the batch axis at `axis`; one example if None."""
    shape = shape if axis is None else (*shape[:axis], B, *shape[axis:])
    return draw(entry, dtype, shape, seed)


def loose(dtype):
    """bfloat16 lanes may be computed with more precision when they are fused."""
    return dict(rtol=0.05, atol=0.05) if dtype == BF16 else None


@pytest.mark.parametrize("dtype", [F32, BF16, I32, U8, BOOL, C64], ids=str)
def test_unary(dtype):
    cases = {}
    for name in present(UNARY):
        fun, dtypes, *_ = entry = UNARY[name]
        if dtype in dtypes:
            axis = 1 if dtype == dtypes[0] else 0
            cases[name] = (fun, batch_of(entry, dtype, (3,), axis), dict(in_axes=axis))
    check_all(cases, derivatives=False, tolerance=loose(dtype))


def smooth(table):
    return [name for name in present(table) if table[name][-1]]


@pytest.mark.parametrize("names", shares(smooth(UNARY), 3), ids=" ".join)
def test_unary_derivatives(names):
    cases = {
        name: (UNARY[name][0], draw(UNARY[name], UNARY[name][1][0], (B,)), {}) for name in names
    }
    check_all(cases, second=True, tolerance=dict(rtol=1e-4, atol=1e-4))


def patterns(name):
    """Example shapes and axes of all operands: subsets batched, numbers beside arrays."""
    n = COUNT.get(name, 2)
    full, number = (3,), ()
    yield [full] * n, (None, *(1,) * (n - 1))
    if name in SLOW_TO_COMPILE:
        return
    yield [full] * n, (0,) * n
    yield [full] * n, (1, *(0,) * (n - 1))
    yield [full] * n, (0, *(None,) * (n - 1))
    if name not in SAME_SHAPE_ONLY:
        yield [number, *[full] * (n - 1)], (0, *(None,) * (n - 1))
        yield [*[full] * (n - 1), number], (*(1,) * (n - 1), None)
        yield [*[full] * (n - 1), number], (*(None,) * (n - 1), 0)


@pytest.mark.parametrize("names", shares(present(NARY), 6), ids=" ".join)
def test_nary(names):
    cases = {}
    for name in names:
        fun, dtypes, *_ = entry = NARY[name]
        for shapes, axes in patterns(name):
            args = [
                batch_of(entry, dtypes[0], s, a, i)
                for i, (s, a) in enumerate(zip(shapes, axes, strict=True))
            ]
            own = dict(in_axes=axes, tolerance=loose(dtypes[0]))
            own["unrolled"] = name not in SLOW_TO_COMPILE
            cases[f"{name} of {shapes} with {axes}"] = (fun, *args, own)
        for dtype in dtypes[1:]:
            args = [batch_of(entry, dtype, (3,), 0, i) for i in range(COUNT.get(name, 2))]
            cases[f"{name} of {dtype}"] = (fun, *args, dict(tolerance=loose(dtype)))
    # `jit` inside is tried with those that have derivatives.
    check_all(cases, derivatives=False, jit=False)


@pytest.mark.parametrize("names", shares(smooth(NARY), 3), ids=" ".join)
def test_nary_derivatives(names):
    cases = {}
    for name in names:
        fun, dtypes, *_ = entry = NARY[name]
        n = COUNT.get(name, 2)
        for axes in ((0,) * n, (None, *(0,) * (n - 1))):
            args = [batch_of(entry, dtypes[0], (3,), a, i) for i, a in enumerate(axes)]
            cases[f"{name} with {axes}"] = (fun, *args, dict(in_axes=axes))
    check_all(cases, second=True, tolerance=dict(rtol=1e-4, atol=1e-4))


@pytest.mark.parametrize("scalar", [2, 2.0, True])
def test_weak_types_of_python_scalars(scalar):
    ops = dict(add=operator.add, mul=operator.mul, max=jnp.maximum, pow=operator.pow,
               div=operator.truediv, lt=operator.lt)  # fmt: skip
    cases = {}
    for x in (jnp.arange(1.0, 4.0), jnp.arange(1, 4), jnp.arange(1, 4).astype(BF16)):
        for name, op in ops.items():
            cases[f"{name} of {x.dtype}"] = (partial(op, scalar), x, {})
            cases[f"{name} of {x.dtype} turned"] = (lambda x, op=op: op(x, scalar), x, {})
    check_all(cases, derivatives=False)


SHAPES = [(), (3,), (1,), (2, 3), (1, 3), (2, 1), (1, 1)]


@st.composite
def operands(draw_, n=2):
    """Example shapes that broadcast together (equal rank or numbers), and their axes."""
    rank = draw_(st.sampled_from([0, 1, 2, 2]))
    legal = [s for s in SHAPES if len(s) in (0, rank)]
    shapes = draw_(st.lists(st.sampled_from(legal), min_size=n, max_size=n))
    axes = [draw_(st.sampled_from([None, *range(len(s) + 1)])) for s in shapes]
    if all(a is None for a in axes):
        axes[0] = 0
    return shapes, tuple(axes)


@given(operands(3))
@settings(max_examples=25)
def test_broadcasting_of_any_shapes_and_axes(drawn):
    shapes, axes = drawn
    entry = NARY["add"]
    args = [
        batch_of(entry, F32, s, a, i) for i, (s, a) in enumerate(zip(shapes, axes, strict=True))
    ]
    fun = lambda x, y, z: lax.atan2(lax.mul(x, y), z)
    check_all({"any": (fun, *args, dict(in_axes=axes))}, derivatives=False, jit=False)


def test_aligning_moves_the_fewest_elements():
    x, y, z = jnp.ones((B, 3)), jnp.ones((3, B)), jnp.ones((3, B))
    out, position = aligned([x, y, z], [0, 1, 1])
    assert position == 1
    assert out[1] is y
    assert out[2] is z
    large, small = jnp.ones((3, B, 4)), jnp.ones((B, 1, 1))
    out, position = aligned([small, large], [0, 1])
    assert position == 1
    assert out[1] is large


def test_what_is_larger_than_its_operands_has_lanes_in_front():
    """A Jacobian of layers is made of products with these, which take 2.5x the time otherwise."""
    wide, column, n = jnp.ones((8, 8)), jnp.ones((1, 8, 100)), jnp.ones(100)
    for columns, at in ((False, 0), (True, 2)):
        args, position = aligned([wide, column], [None, 2], columns)
        assert position == at
        assert (args[0] * args[1]).shape[at] == 100
    assert aligned([wide, jnp.ones((8, 8, 100))], [None, 2])[1] == 2  # as large as the result
    assert aligned([jnp.ones((1, 8)), column], [None, 2])[1] == 2
    assert aligned([jnp.ones(8), n], [None, 0])[1] == 0
    w, x = jnp.ones((8, 8)), jnp.ones((64, 8))
    jacobian = jax.jacfwd(lambda x: jnp.tanh(w @ jnp.tanh(w @ x)))
    ours, theirs = (jax.jit(vmap(jacobian)).lower(x).as_text() for vmap in (bx.vmap, jax.vmap))
    assert ours.count("stablehlo.transpose") <= theirs.count("stablehlo.transpose")
