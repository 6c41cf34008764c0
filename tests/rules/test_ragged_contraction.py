"""Ragged contractions in every mode and pattern of batched operands, against the loop."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import batchax as bx

from support.batches import SIZE
from support.oracle import check, example, quickly, same

VALUES_ONLY = dict(derivatives=False, eager=False)
MODES = {
    # name: (dimension numbers, lhs, rhs, the dimensions along which sizes may differ)
    "free": (((((1,), (1,)), ((), ())), [0], [0]), (6, 4), (3, 4, 5), ()),
    "free, with others": (
        ((((3,), (2,)), ((0,), (1,))), [2], [0]),
        (2, 2, 6, 4),
        (3, 2, 4, 5),
        (2, 2),
    ),
    "contracted": (((((1,), (1,)), ((0,), (0,))), [1], []), (2, 6, 4), (2, 6, 5), (2,)),
    "contracted, with others": (
        ((((1, 2), (1, 0)), ((), ())), [2], []),
        (4, 2, 6),
        (6, 2, 5),
        (2,),
    ),
    "batch": (((((2,), (1,)), ((0, 1), (0, 2))), [1], []), (2, 6, 4), (2, 4, 6), (2,)),
}
SIZES = jnp.array([[2, 3, 1], [1, 1, 4], [0, 6, 0]])


def contraction(mode):
    dims, ragged, groups = MODES[mode][0]
    numbers = lax.RaggedDotDimensionNumbers(dims, ragged, groups)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


def operands(mode, in_axes, sizes_differ=False):
    _, lhs, rhs, prefix = MODES[mode]
    arrays = []
    for i, (shape, a) in enumerate(((lhs, in_axes[0]), (rhs, in_axes[1]))):
        shape = shape if a is None else (*shape[:a], SIZE, *shape[a:])
        arrays.append(example(shape, seed=i))
    sizes = SIZES
    if sizes_differ:
        # Lane i, at place p of the prefix, has row i + p of SIZES.
        places = jnp.arange(SIZE).reshape(-1, *(1 for _ in prefix))
        places = places + jnp.arange(max(1, *prefix, 1) ** len(prefix)).reshape(prefix)
        sizes = SIZES[places % SIZE]
    sizes = sizes[0] if in_axes[2] is None else jnp.moveaxis(sizes, 0, in_axes[2])
    return [*arrays, sizes]


# Each operand batched or not, in front or elsewhere.
PATTERNS = [
    (0, 0, 0),
    (0, None, None),
    (None, 1, None),
    (None, None, 0),
    (1, None, 1),
    (2, 0, None),
    (2, None, 0),
    (None, 0, 0),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.each_commit(3)
def test_every_pattern(mode):
    fun = jax.jit(contraction(mode))
    for in_axes in PATTERNS:
        args = operands(mode, in_axes)
        check(fun, *args, in_axes=in_axes, against_jax=False, **VALUES_ONLY)


@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode][3]])
@pytest.mark.each_commit(2, "batch")
def test_sizes_that_differ_along_other_dimensions(mode):
    fun = jax.jit(contraction(mode))
    for in_axes in ((0, 0, 0), (1, None, None), (None, None, 1), (2, None, 0)):
        args = operands(mode, in_axes, sizes_differ=True)
        check(fun, *args, in_axes=in_axes, against_jax=False, **VALUES_ONLY)


def test_as_jax_where_jax_can():
    args = operands("free", (0, 0, 0))
    check(jax.jit(lax.ragged_dot), *args, **VALUES_ONLY)


def test_under_a_second_vmap():
    x, y, sizes = operands("free", (0, 0, 0))
    twice = bx.vmap(bx.vmap(lax.ragged_dot, in_axes=(0, None, None)), in_axes=(None, 0, 0))
    got = jax.jit(twice)(x, y, sizes)
    for i in range(SIZE):
        for j in range(SIZE):
            same(got[i, j], lax.ragged_dot(x[j], y[i], sizes[i]))


@pytest.mark.parametrize("in_axes", [(1, None, None), (None, 0, None), (0, None, 0)])
def test_derivatives(in_axes):
    fun = jax.jit(contraction("free"))
    args = operands("free", in_axes)
    quickly(fun, *args, in_axes=in_axes, against_jax=False)


def test_dtypes():
    for dtype in (jnp.bfloat16, jnp.int32):
        x, y, sizes = operands("free", (0, None, 0))
        args = x.astype(dtype), y.astype(dtype), sizes
        fun = jax.jit(lambda *xs: lax.ragged_dot(*xs, preferred_element_type=jnp.float32))
        check(fun, *args, in_axes=(0, None, 0), against_jax=False, **VALUES_ONLY)


def test_an_operand_that_all_lanes_share_is_not_repeated():
    x, y, sizes = operands("free", (0, None, 0))
    jaxpr = jax.make_jaxpr(bx.vmap(contraction("free"), in_axes=(0, None, 0)))(x, y, sizes)
    (eqn,) = jaxpr.eqns
    assert eqn.invars[1].aval.shape == y.shape


def test_no_lanes():
    x, y, sizes = operands("free", (0, 0, 0))
    got = bx.vmap(lax.ragged_dot)(x[:0], y[:0], sizes[:0])
    same(got, jnp.zeros((0, 6, 5)))
