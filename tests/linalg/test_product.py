"""Products of small matrices with lanes last, against NumPy's in double precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from batchax.linalg.product import pays, product

from support.matrices import DTYPES, with_wrong_elements

# Equations of one lane, with the shapes of its operands.
CASES = {
    "ij,jk->ik": ((4, 5), (5, 3)),
    "ji,jk->ik": ((5, 4), (5, 3)),
    "ij,kj->ik": ((4, 5), (3, 5)),
    "ji,kj->ik": ((4, 4), (4, 4)),
    "ij,j->i": ((4, 5), (5,)),
    "j,jk->k": ((5,), (5, 4)),
    "ij,jl->il": ((2, 1), (1, 3)),
}


def dimensions(equation):
    first, second = equation.split("->")[0].split(",")
    (shared,) = set(first) & set(second)
    return ((first.index(shared),), (second.index(shared),)), ((), ())


@functools.cache
def _all():
    last = lambda x: jnp.moveaxis(x, 0, -1)

    def run(pairs):
        return [
            jnp.moveaxis(product(last(a), last(b), dimension_numbers=dimensions(e))[0], -1, 0)
            for e, (a, b) in zip(CASES, pairs, strict=True)
        ]

    return jax.jit(run)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(2, "float32", "complex128")
def test_products_round_as_sums_of_products_do(dtype):
    rng = np.random.default_rng(0)
    grades = np.float64(10.0) ** rng.integers(-9, 9, (16, 1, 1))

    def draw(shape):
        x = rng.standard_normal((16, *shape))
        x = x + 1j * rng.standard_normal(x.shape) if np.dtype(dtype).kind == "c" else x
        return (x * grades.reshape(16, *[1] * len(shape))).astype(dtype)

    pairs = [[draw(shape) for shape in shapes] for shapes in CASES.values()]
    with jax.enable_x64(True):
        outs = [np.asarray(x) for x in _all()(pairs)]
    for equation, pair, out in zip(CASES, pairs, outs, strict=True):
        lanes = "n" + equation.replace(",", ",n").replace(">", ">n")
        wide = [x.astype("complex128" if x.dtype.kind == "c" else "float64") for x in pair]
        expected, size = np.einsum(lanes, *wide), np.einsum(lanes, *map(np.abs, wide))
        assert out.dtype == np.dtype(dtype)
        eps = float(np.finfo(dtype).eps)
        assert (np.abs(out - expected) <= 8 * eps * size).all(), equation


def test_wrong_elements_are_where_numpy_has_them():
    rng = np.random.default_rng(0)
    a = with_wrong_elements(rng.standard_normal((4, 4, 4)).astype("float32"))
    b = np.tile(np.eye(4, dtype="float32"), (len(a), 1, 1))
    last = lambda x: jnp.moveaxis(x, 0, -1)
    run = jax.jit(lambda a, b: product(last(a), last(b), dimension_numbers=dimensions("ij,jk->ik")))
    (ours,) = run(a, b)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(jnp.moveaxis(ours, -1, 0), a @ b)


def test_where_it_pays():
    def lanes(n, *shapes, dtype="float32", in_loop=0):
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        numbers = ((len(shapes[0]) - 1,), (0,)), ((), ())
        params = dict(dimension_numbers=numbers, precision=lax.Precision.DEFAULT)
        return pays(types, n, params, in_loop)

    assert lanes(2048, (4, 4), (4, 4))
    assert lanes(2048, (6, 6), (6, 2))
    assert not lanes(512, (4, 4), (4, 4))
    assert lanes(64, (4, 4), (4, 4), in_loop=80)
    assert not lanes(16, (4, 4), (4, 4), in_loop=80)
    assert not lanes(2048, (3, 3), (3, 3))
    assert not lanes(2048, (4, 2), (2, 4))
    assert not lanes(2048, (8, 8), (8, 8))
    assert not lanes(2048, (4, 4), (4,))
    assert lanes(2048, (4, 4), (4,), dtype="complex64")
    assert not lanes(2048, (8, 8), (8, 8), dtype="complex64", in_loop=80)
    assert not lanes(2048, (4, 0), (0, 4))
    assert not lanes(2048, (4, 4), (4, 4), dtype="bfloat16")
