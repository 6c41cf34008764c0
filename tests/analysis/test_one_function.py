"""Sums and products as a single kernel can hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from batchax import _compat
from batchax.analysis.one_function import fits_lowered_kernel, fits_serial_kernel, lower_for_kernel

from support.oracle import same

RANDOM = np.random.default_rng(0)
REDUCTIONS = [lax.reduce_sum, lax.reduce_prod, lax.reduce_max, lax.reduce_min]


def _alone(fun, *args):
    """The results of a function with its sums written out, and which kernels hold it."""
    lowered = lower_for_kernel(jax.make_jaxpr(fun)(*args))
    fits = fits_serial_kernel(lowered.jaxpr), fits_lowered_kernel(jax.make_jaxpr(fun)(*args).jaxpr)
    return jax.core.eval_jaxpr(lowered.jaxpr, lowered.consts, *args)[0], fits


@pytest.mark.parametrize("reduce", REDUCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(), (1,), (8,), (9,), (3, 5), (2, 3, 31)], ids=str)
def test_reductions(reduce, shape):
    x = np.asarray(RANDOM.uniform(0.5, 1.5, shape), jnp.zeros(()).dtype)
    for axes in {(), *([(0,), tuple(range(len(shape))), (len(shape) - 1,)] if shape else [])}:
        out, (alone, lanes) = _alone(lambda x, axes=axes: reduce(x, axes), x)
        same(out, reduce(jnp.asarray(x), axes))
        assert alone
        assert lanes == (np.prod([shape[a] for a in axes]) <= 8)


@pytest.mark.parametrize(
    ("x", "y", "axes"),
    [
        ((), (5,), 0),
        ((16,), (16,), 1),
        ((5, 4), (4, 3), 1),
        ((3, 17), (17, 4), 1),
        ((2, 5), (5, 33), 1),
        ((8,), (8, 8), ((0,), (1,))),
        ((4, 4), (4,), ((0,), (0,))),
        ((33,), (33, 33), ((0,), (1,))),
        ((4, 4, 2), (3, 4), ((1,), (1,))),
    ],
    ids=str,
)
def test_products(x, y, axes):
    x, y = (RANDOM.normal(size=shape).astype(jnp.zeros(()).dtype) for shape in (x, y))
    out, (alone, lanes) = _alone(lambda x, y: jnp.tensordot(x, y, axes), x, y)
    same(out, jnp.tensordot(x, y, axes))
    assert alone
    terms = round((x.size * y.size / out.size) ** 0.5)
    assert lanes == (out.size * terms <= 64 and terms <= 16)


def test_forms_are_few_operations():
    size = lambda fun, *args: len(lower_for_kernel(jax.make_jaxpr(fun)(*args)).jaxpr.eqns)
    assert size(jnp.dot, np.ones((16, 16)), np.ones(16)) <= 3 * 16
    assert size(jnp.sum, np.ones(8)) <= 2 * 8
    assert size(jnp.sum, np.ones(1024)) <= 3 * 10


def test_equal_forms_are_staged_once(monkeypatch):
    stage, forms = _compat.stage, []
    monkeypatch.setattr(_compat, "stage", lambda *args: forms.append(1) or stage(*args))
    program = jax.make_jaxpr(lambda x, y: x @ (x @ (x @ y)))(np.ones((11, 11)), np.ones(11))
    assert len(lower_for_kernel(program).jaxpr.eqns) > len(program.eqns)
    assert len(forms) == 1


def test_sums_of_negative_zeros_are_zeros():
    out, _ = _alone(lambda x: x.sum(), np.full(33, -0.0, np.float32))
    assert not np.signbit(out)


def test_an_update_at_an_index_fits_a_kernel_of_one_lane():
    # Lanes update several positions.
    assert _alone(lambda x: x.at[x.argmax()].set(0.0), np.ones(3, np.float32))[1] == (True, False)


def test_what_is_large_is_left_to_a_library():
    for fun, *args in (jnp.sum, np.ones(5000)), (jnp.dot, np.ones((70, 70)), np.ones(70)):
        assert _alone(fun, *map(jnp.asarray, args))[1] == (False, False)
