"""Primitives that arrange elements, against the loop over examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import batchax as bx

from support.operations import no_more_operations
from support.oracle import check, check_all, example, same, same_type, shares

# Functions of one array of shape (2, 3).
ONE_ARRAY = {
    "broadcast leading": lambda x: lax.broadcast(x, (4,)),
    "broadcast inside": lambda x: lax.broadcast_in_dim(x, (2, 4, 3), (0, 2)),
    "broadcast trailing": lambda x: lax.broadcast_in_dim(x, (2, 3, 4), (0, 1)),
    "broadcast size one": lambda x: lax.broadcast_in_dim(x[:, :1], (4, 2, 5), (1, 2)),
    "broadcast number": lambda x: jnp.broadcast_to(x[0, 0], (2, 4)),
    "expand_dims": lambda x: lax.expand_dims(x, (0, 2, 4)),
    "None index": lambda x: x[None, :, None],
    "reshape flat": lambda x: x.reshape(6),
    "reshape other": lambda x: x.reshape(3, 2),
    "reshape split": lambda x: lax.reshape(x, (2, 1, 3, 1)),
    "reshape permuting": lambda x: lax.reshape(x, (3, 2), dimensions=(1, 0)),
    "reshape permuting flat": lambda x: lax.reshape(x, (6,), dimensions=(1, 0)),
    "ravel, Fortran order": lambda x: jnp.ravel(x, order="F"),
    "transpose": lambda x: x.T,
    "transpose of three": lambda x: jnp.transpose(x[None], (2, 0, 1)),
    "moveaxis": lambda x: jnp.moveaxis(x[:, None], 0, -1),
    "squeeze": lambda x: lax.squeeze(x[None, :, None], (0, 2)),
    "squeeze all": lambda x: jnp.squeeze(x[:1, :1]),
    "rev": lambda x: lax.rev(x, (0,)),
    "rev both": lambda x: x[::-1, ::-1],
    "flip and roll": lambda x: jnp.roll(jnp.flip(x, 1), 1, axis=0),
    "tile": lambda x: lax.tile(x, (2, 3)),
    "jnp.tile": lambda x: jnp.tile(x, (2, 1, 2)),
    "repeat": lambda x: jnp.repeat(x, 2, axis=1),
    "split": lambda x: lax.split(x, (1, 2), axis=1),
    "split leading": lambda x: lax.split(x, (1, 1), axis=0),
    "unstack": lambda x: jnp.unstack(x, axis=0),
    "unstack trailing": lambda x: jnp.unstack(x, axis=1),
    "pad": lambda x: lax.pad(x, np.array(1, x.dtype), [(1, 0, 0), (0, 2, 1)]),
    "pad cutting": lambda x: lax.pad(x, np.array(1, x.dtype), [(-1, 1, 0), (2, -1, 0)]),
    "concatenate with itself": lambda x: jnp.concatenate([x, x[:1]], axis=0),
    "concatenate with a constant": lambda x: jnp.concatenate([jnp.ones((2, 1), x.dtype), x], 1),
    "stack with itself": lambda x: jnp.stack([x, x[::-1]], axis=1),
    "barrier": lambda x: lax.optimization_barrier((x, x[0])),
    "name": lambda x: checkpoint_name(x, "here"),
    "copy": lambda x: jnp.array(x, copy=True),
    "device_put": lambda x: jax.device_put(x),
}


def on_axes(shape, position, **options):
    """A batch of four examples of `shape`, the batch axis at `position` or absent."""
    if position is None:
        return example(shape, **options)
    shape = list(shape)
    shape.insert(position % (len(shape) + 1), 4)
    return example(tuple(shape), **options)


def keys(shape):
    return jax.random.split(jax.random.key(0), shape)


@pytest.mark.parametrize("names", shares(ONE_ARRAY, 6), ids=" ".join)
def test_one_array(names):
    cases = {}
    last = dict(in_axes=-1, out_axes=-1, derivatives=False)
    for name in names:
        cases[name] = (ONE_ARRAY[name], on_axes((2, 3), 1), dict(in_axes=1, nested=True))
        cases[f"{name}, batch last"] = (ONE_ARRAY[name], on_axes((2, 3), -1), last)
    check_all(cases)


@pytest.mark.parametrize("name", ONE_ARRAY)
def test_no_more_operations_than_jax(name):
    for in_axis in (0, 1, 2):
        no_more_operations(ONE_ARRAY[name], on_axes((2, 3), in_axis), in_axes=in_axis)


def test_typed_keys():
    def fun(k, p):
        a = lax.expand_dims(k, (1,)).reshape(3, 2)
        b = jnp.concatenate([a, lax.rev(a, (0,))], axis=1).T
        c = jnp.stack([b[0], b[1]])
        first, second = lax.split(jnp.broadcast_to(c, (2, 2, 3)), (1, 1), axis=0)
        chosen = jnp.where(p, first, second)
        return chosen, lax.squeeze(first, (0,)), lax.optimization_barrier(second), k[:, 1:]

    flags = jnp.array([True, False, True, False])
    shared = dict(in_axes=(None, 0), out_axes=(0, None, None, None))
    cases = {
        "first": (fun, keys((4, 2, 3)), flags, {}),
        "inside": (fun, keys((2, 4, 3)), flags, dict(in_axes=(1, 0), out_axes=1)),
        "shared": (fun, keys((2, 3)), flags, shared),
    }
    check_all(cases)


WEAK = {
    "pad": lambda v: lax.pad(lax.full_like(v, 1.0, shape=(2,)), v, [(1, 1, 0)]),
    "stack": lambda v: jnp.stack([v, 2.0]),
    "concatenate": lambda v: lax.concatenate([lax.expand_dims(v, (0,)), lax.full((1,), 2.0)], 0),
    "broadcast": lambda v: lax.broadcast(v, (3,)),
    "select": lambda v: lax.select(v > 1, v, 2.0),
    "clamp": lambda v: lax.clamp(1.0, v, 2.0),
    "reshape": lambda v: lax.reshape(v, (1,)),
}


@pytest.mark.parametrize("name", WEAK)
def test_weak_types_are_kept(name):
    fun = lambda i: WEAK[name](i * 1.0)
    i = np.arange(4)
    ours, jaxs = (jax.eval_shape(v(fun), i) for v in (bx.vmap, jax.vmap))
    assert ours.weak_type
    same_type(ours, jaxs)
    if name == "pad":
        same_type(bx.vmap(fun)(i), jaxs)


def test_stack_puts_whole_arrays_after_each_other():
    x = np.ones(5)
    (equation, *_) = jax.make_jaxpr(bx.vmap(lambda x, y: jnp.stack([x, y])))(x, x).eqns
    assert [v.aval.shape for v in equation.outvars] == [(2, 5)]


def test_padding_with_infinity_reaches_no_gradient():
    fun = lambda x, v: lax.pad(x, v, [(1, 1, 0)])[1:-1].sum()
    values = jnp.array([jnp.inf, jnp.nan, 1.0, 0.0])
    gradient = jax.jit(jax.grad(lambda x, v: bx.vmap(fun)(x, v).sum(), (0, 1)))
    got = gradient(example((4, 3)), values)
    same(got, (jnp.ones((4, 3)), jnp.zeros(4)))


def test_device_put_of_several():
    fun = lambda x, w: jax.device_put((x, x[0], w), jax.devices()[0])
    # JAX wants the batch axis at one position in all operands.
    axes = {"in_axes": (1, None), "out_axes": (1, 0, None)}
    check(fun, example((3, 4)), example((3,)), against_jax=False, **axes)


def test_device_put_of_a_sharded_example():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P("d"))
    out = bx.vmap(lambda x: jax.device_put(x * 2, place))(example((4, 3)))
    same(out, example((4, 3)) * 2)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "d")), 2)
