"""Sliding windows, against the loop over examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from batchax import _compat

from support.batches import batch
from support.operations import no_more_operations
from support.oracle import check, quickly

SHAPE = (4, 5)
VALUES_ONLY = dict(derivatives=False, eager=False)
WINDOW = dict(
    window_dimensions=(2, 3),
    window_strides=(2, 1),
    padding=((0, 1), (1, 0)),
    base_dilation=(1, 2),
    window_dilation=(1, 1),
)
PLAIN = {k: WINDOW[k] for k in ("window_dimensions", "window_strides", "padding")}
START = {"reduce_window_sum": 0.0, "reduce_window_max": -jnp.inf, "reduce_window_min": jnp.inf}
COMPUTE = {"reduce_window_sum": lax.add, "reduce_window_max": lax.max, "reduce_window_min": lax.min}


def pool(name, window=WINDOW):
    return lambda x: lax.reduce_window(x, START[name], COMPUTE[name], **window)


@pytest.mark.parametrize("name", START)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_pooling(name, axis):
    x = batch(SHAPE, axis)
    check(pool(name), x, in_axes=axis, out_axes=-1, **VALUES_ONLY)
    no_more_operations(pool(name), x, in_axes=axis)


@pytest.mark.parametrize("name", START)
def test_derivatives_of_pooling(name):
    quickly(jax.jit(pool(name, PLAIN)), batch(SHAPE, 1), in_axes=1, nested=True)


def test_general_reduction_over_windows():
    fun = jax.jit(lambda x: lax.reduce_window(x, 1.0, lambda a, b: a * b, **WINDOW))
    for axis in (0, 2):
        check(fun, batch(SHAPE, axis), in_axes=axis, **VALUES_ONLY)


@pytest.mark.parametrize("in_axes", [(0, 0), (1, None), (None, 2), (0, 2)])
def test_windows_over_several_operands(in_axes):
    def largest(a, b):
        (x, i), (y, j) = a, b
        return lax.select(x >= y, x, y), lax.select(x >= y, i, j)

    fun = lambda x, i: lax.reduce_window((x, i), (-jnp.inf, np.int32(-1)), largest, **PLAIN)
    args = batch(SHAPE, in_axes[0]), batch(SHAPE, in_axes[1], jnp.int32)
    check(fun, *args, in_axes=in_axes, **VALUES_ONLY)


def test_windows_that_start_from_a_value_of_the_lane():
    fun = lambda x, start: lax.reduce_window(x, start, lambda a, b: a + b, **PLAIN)
    for axis in (1, None):
        args = batch(SHAPE, axis), batch((), 0, seed=1)
        check(fun, *args, in_axes=(axis, 0), against_jax=False, **VALUES_ONLY)


# How the derivatives of pooling pick and spread elements, with each side batched or not.
SIDES = [(0, 0), (1, 1), (0, 2), (0, None), (None, 1)]


@pytest.mark.parametrize("in_axes", SIDES)
@pytest.mark.parametrize("select", [lax.ge_p, lax.le_p])
def test_select_and_gather_add(in_axes, select):
    primitive = _compat.find_primitive("select_and_gather_add")
    fun = lambda tangents, operand: primitive.bind(tangents, operand, select_prim=select, **WINDOW)
    args = batch(SHAPE, in_axes[0]), batch(SHAPE, in_axes[1], seed=1)
    check(fun, *args, in_axes=in_axes, **VALUES_ONLY)
    no_more_operations(fun, *args, in_axes=in_axes)


@pytest.mark.parametrize("in_axes", SIDES)
def test_select_and_scatter_add(in_axes):
    primitive = _compat.find_primitive("select_and_scatter_add")
    fun = lambda source, operand: primitive.bind(source, operand, select_prim=lax.ge_p, **PLAIN)
    args = batch((2, 4), in_axes[0]), batch(SHAPE, in_axes[1], seed=1)
    check(fun, *args, in_axes=in_axes, **VALUES_ONLY)
    no_more_operations(fun, *args, in_axes=in_axes)


@pytest.mark.parametrize("in_axes", [(0, 0, None), (1, None, None), (None, 2, None), (1, 0, 0)])
def test_select_and_scatter(in_axes):
    # JAX has no rule for it, and calls it with programs for its two computations.
    primitive = _compat.find_primitive("select_and_scatter")
    number = jnp.zeros(())
    select, scatter = (
        jax.make_jaxpr(lax.ge)(number, number),
        jax.make_jaxpr(lax.add)(number, number),
    )

    def fun(operand, source, start):
        return primitive.bind(
            operand,
            source,
            start,
            select_jaxpr=select.jaxpr,
            select_consts=(),
            scatter_jaxpr=scatter.jaxpr,
            scatter_consts=(),
            window_dimensions=(2, 2),
            window_strides=(2, 2),
            padding=((0, 0), (0, 1)),
        )

    args = [batch(SHAPE, in_axes[0]), batch((2, 3), in_axes[1], seed=1), batch((), in_axes[2])]
    check(fun, *args, in_axes=in_axes, against_jax=False, **VALUES_ONLY)
