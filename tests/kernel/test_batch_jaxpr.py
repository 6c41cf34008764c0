"""`batch_jaxpr`: a staged program in, its batched form out."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import batchax as bx

from support.oracle import example, plainly, same

TABLE = jnp.arange(3.0)


def program(x, y):
    """Results that depend on both arguments, on one of them, and on none."""
    return jnp.sin(x) * y + TABLE, y * 2, TABLE.sum()


STAGED = jax.make_jaxpr(program)(jnp.ones(3), 1.0)


def run(batched, *args):
    closed, _ = batched
    return jaxpr_as_fun(closed)(*args)


def test_axes_of_the_wrong_kind():
    for axes in ((1.5,), ("0", bx.AUTO), (0, {})):
        with pytest.raises(bx.ArgumentTypeError, match="tuple or list"):
            bx.batch_jaxpr(STAGED, 4, *axes)


@pytest.mark.parametrize("in_axes", [(0, 0), (1, None), (None, 0), (None, None)])
def test_results_stay_where_they_are_made(in_axes):
    x = example({0: (4, 3), 1: (3, 4), None: (3,)}[in_axes[0]])
    y = example((4,) if in_axes[1] == 0 else ())
    batched = bx.batch_jaxpr(STAGED, 4, in_axes)
    closed, out_axes = batched
    assert [a is not None for a in out_axes] == [in_axes != (None, None), in_axes[1] == 0, False]
    assert [v.shape for v in closed.in_avals] == [x.shape, y.shape]
    outs = run(batched, x, y)
    assert [out.shape for out in outs] == [v.shape for v in closed.out_avals]
    if in_axes != (None, None):
        expected = jax.vmap(program, in_axes)(x, y)
        for got, axis, e in zip(outs, out_axes, expected, strict=True):
            same(got if axis is not None else jnp.stack([got] * 4), jnp.moveaxis(e, 0, axis or 0))


def test_collectives_and_inner_programs():
    def fun(x):
        return lax.scan(lambda c, _: (lax.psum(c, "i"), lax.axis_index("i")), x, None, length=2)

    staged = jax.make_jaxpr(fun, axis_env=[("i", 4)])(1.0)
    batched = bx.batch_jaxpr(staged, 4, (0,), 0, axis_name="i")
    total, indices = run(batched, jnp.arange(4.0))
    same(total, jnp.full(4, 24.0))
    same(indices, jnp.stack([jnp.arange(4, dtype=jnp.int32)] * 2, 1))


def test_zero_if_mapped():
    """First where it depends on the batch, and none where it does not."""
    x = example((3, 4))
    moved = jax.make_jaxpr(lambda x, y: (x.T, x * 2, y + 1))(jnp.ones((3, 2)), 1.0)
    for in_axes in ((2, None), (1, None), (None, None)):
        closed, axes = bx.batch_jaxpr(moved, 4, in_axes, bx.ZERO_IF_MAPPED)
        mapped = None if in_axes == (None, None) else 0
        assert axes == (mapped, mapped, None)
        assert closed.out_avals[0].shape == ((4, 2, 3) if mapped == 0 else (2, 3))
    mixed = bx.batch_jaxpr(STAGED, 4, (1, None), (bx.ZERO_IF_MAPPED, bx.AUTO, 0))
    assert mixed[1] == (0, None, 0)
    same(run(mixed, x, 2.0)[0], jax.vmap(program, (1, None))(x, 2.0)[0])


READS = {
    "a place": lambda x, i: x[i],
    "a window": lambda x, i: lax.dynamic_slice(x, (i,), (2,)),
    "a solution": lambda x, i: jnp.linalg.solve(jnp.outer(x, x) + i * jnp.eye(3), x),
}


@pytest.mark.parametrize("name", READS)
def test_each_of_any_number_of_lanes_reads_where_it_wants(name):
    staged = jax.make_jaxpr(READS[name])(example((3,)), jnp.int32(1))
    batched, _ = bx.batch_jaxpr(staged, None, 0, 0)
    types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in batched.in_avals]
    exported = jax.export.export(jax.jit(jaxpr_as_fun(batched)))(*types)
    x, i = example((4, 3)), jnp.array([2, 1, 1, 2], jnp.int32)
    same(exported.call(x, i)[0], plainly(jax.vmap(READS[name]), x, i))


def test_an_output_that_must_not_depend_on_the_batch():
    staged = jax.make_jaxpr(lambda w, x: (2 * w, w + x))(1.0, 2.0)
    _, out_axes = bx.batch_jaxpr(staged, 3, (None, 0), (None, 0))
    assert out_axes == (None, 0)
    with pytest.raises(bx.AxisError, match=r"out_axes\[1\] is None, but output 1 .* depends"):
        bx.batch_jaxpr(staged, 3, (None, 0), None)
