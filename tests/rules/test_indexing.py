"""Slices at fixed and computed places, against the loop over examples."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import batchax as bx

from support.batches import on_axes
from support.operations import no_more_operations, operations
from support.oracle import at_once, check_all, example, quickly, same, same_type

STARTS = jnp.array([0, 1, -1, 7])  # the last two out of range: slices are moved to fit


def subsets(*choices):
    """Every combination of positions of the batch axis but the one with none."""
    return [c for c in itertools.product(*choices) if any(a is not None for a in c)]


def test_slice():
    def fun(x):
        return x[1:], x[:, ::2], lax.slice(x, (0, 1), (2, 3), (1, 2)), x[-1:, :0]

    cases = {}
    for position in (0, 1, 2):
        x = on_axes((2, 3), position)
        no_more_operations(fun, x, in_axes=position)
        cases[str(position)] = (fun, x, dict(in_axes=position, nested=position == 0))
    check_all(cases, out_axes=1)


@pytest.mark.parametrize("of_array", [None, 0, 2])
def test_dynamic_slice(of_array):
    def fun(x, i, j):
        return lax.dynamic_slice(x, (i, j), (2, 3))

    x, cases = on_axes((3, 4), of_array), {}
    for in_axes in subsets((of_array,), (None, 0), (None, 0)):
        i, j = (STARTS if a == 0 else np.array(1) for a in in_axes[1:])
        no_more_operations(fun, x, i, j, in_axes=in_axes)
        full = in_axes == (2, 0, None)
        own = dict(in_axes=in_axes, derivatives=full, second=full, nested=full)
        cases[str(in_axes)] = (fun, x, i, j, own)
    check_all(cases)


def test_dynamic_slice_of_whole_dimensions_needs_no_index():
    def fun(x, i, j):
        return lax.dynamic_slice(x, (i, j), (3, 4)), lax.dynamic_slice(x, (i, 0), (2, 4))

    x = example((3, 4))
    axes = {"in_axes": (None, 0, 0), "out_axes": (None, 0)}
    quickly(fun, x, STARTS, STARTS, against_jax=False, derivatives=False, **axes)
    indices = jax.make_jaxpr(bx.vmap(fun, **axes))(x, STARTS, STARTS).eqns
    (gather,) = [e for e in indices if e.primitive is lax.gather_p]
    assert gather.params["dimension_numbers"].start_index_map == (0,)


def test_start_shared_by_lanes_stays_a_dynamic_slice():
    def fun(x, i):
        return lax.dynamic_slice(x, (i, 0), (2, 2)), lax.dynamic_update_slice(x, x[:1], (i, 1))

    counts = operations(bx.vmap(fun, in_axes=(1, None)), example((3, 5, 4)), 1)
    assert counts["dynamic_slice"] == counts["dynamic_update_slice"] == 1
    assert counts["gather"] == counts["scatter"] == 0


@pytest.mark.parametrize("of_array", [None, 0, 1])
def test_dynamic_update_slice(of_array):
    def fun(x, u, i):
        return lax.dynamic_update_slice(x, u, (i, 0)), lax.dynamic_update_slice(x, u[:, :2], (i, i))

    cases = {}
    for in_axes in subsets((of_array,), (None, 0, 1), (None, 0)):
        x, u = on_axes((4, 3), of_array), on_axes((2, 3), in_axes[1], seed=1)
        i = STARTS if in_axes[2] == 0 else np.array(1)
        no_more_operations(fun, x, u, i, in_axes=in_axes)
        full = in_axes in {(1, 0, 0), (0, None, None)}
        own = dict(in_axes=in_axes, derivatives=full, nested=full)
        cases[str(in_axes)] = (fun, x, u, i, own)
    check_all(cases)


def test_whole_update_at_a_place_of_each_lane():
    def fun(x, i, u):
        return lax.dynamic_update_slice(x, u, (i, i))

    one = dict(in_axes=(None, 0, None))
    cases = {
        "all": (fun, example((4, 2, 3)), STARTS, example((4, 2, 3), seed=1), {}),
        "places": (fun, example((2, 3)), STARTS, example((2, 3), seed=1), one),
    }
    check_all(cases)


def test_index_dtypes():
    for dtype in (jnp.int8, jnp.uint32):

        def fun(x, i, k):
            y = lax.dynamic_slice(x, (i, i), (2, 2))
            return y, lax.dynamic_update_slice(x, y, (k, k))

        i, k = jnp.array([0, 1, 2, 9], dtype), jnp.array(1, dtype)
        quickly(fun, example((4, 3, 3)), i, k, in_axes=(0, 0, None), derivatives=False)


def test_typed_keys():
    def fun(k, i, n):
        y = lax.dynamic_slice(k, (i,), (2,))
        z = lax.dynamic_slice(k, (n,), (2,))
        return y, lax.dynamic_update_slice(k, z, (i,)), lax.dynamic_update_slice(k, y, (n,)), k[1:]

    k = jax.random.split(jax.random.key(0), (3, 4))
    one = dict(in_axes=(None, 0, None), out_axes=(0, 0, 0, None))
    cases = {
        "keys": (fun, k, STARTS, np.array(1), dict(in_axes=(1, 0, None))),
        "shared keys": (fun, k[:, 0], STARTS, np.array(1), one),
    }
    check_all(cases)


def test_weak_types_are_kept():
    # As in one example: JAX's own rule makes the first result weakly typed.
    def fun(x, i):
        weak, strong = i * jnp.arange(3) * 1.0, x
        return lax.dynamic_update_slice(weak, strong, (i,)), lax.dynamic_slice(weak, (i,), (2,))

    x, i = np.asarray(example((4, 2))), np.arange(4)
    for f, args in ((fun, (x[0], i[0])), (bx.vmap(fun), (x, i))):
        assert [a.weak_type for a in jax.eval_shape(f, *args)] == [False, True]


@pytest.mark.parametrize("size", [0, 1])
def test_empty_batch_and_batch_of_one(size):
    def fun(x, u, i, k):
        return (
            x[1:],
            lax.dynamic_slice(x, (i, 0), (2, 2)),
            lax.dynamic_slice(x, (k, 0), (2, 2)),
            lax.dynamic_update_slice(x, u, (i, 0)),
            lax.dynamic_update_slice(x, u, (k, k)),
        )

    x, u, i = jnp.zeros((3, size, 2)), jnp.ones((size, 2, 2)), jnp.zeros(size, int)
    axes = (1, 0, 0, None)
    got, expected = at_once(*[v(fun, in_axes=axes) for v in (bx.vmap, jax.vmap)])(x, u, i, 1)
    same(got, expected)
    jax.tree.map(same_type, got, expected)


def test_empty_arrays():
    def fun(x, i):
        return lax.dynamic_slice(x, (i, 0), (2, 0)), lax.dynamic_update_slice(x, x[:1], (i, 0))

    quickly(fun, jnp.zeros((4, 3, 0)), STARTS)


@settings(max_examples=12)
@given(st.data())
def test_any_slice(data):
    shape = data.draw(st.sampled_from([(3,), (2, 3), (3, 2, 2)]))
    sizes = [data.draw(st.integers(0, n)) for n in shape]
    starts = [data.draw(st.integers(-4, 4)) for _ in shape]
    batched = [data.draw(st.booleans()) for _ in shape]
    position = data.draw(st.sampled_from([None, *range(len(shape) + 1)]))
    if position is None and not any(batched):
        batched[0] = True
    x = on_axes(shape, position)
    offsets = np.array([0, 1, -1, 2])
    args = [jnp.asarray(s + offsets if b else s) for s, b in zip(starts, batched, strict=True)]

    def fun(x, *starts):
        y = lax.dynamic_slice(x, starts, sizes)
        return y, lax.dynamic_update_slice(x, y + 1, starts[::-1])

    in_axes = (position, *(0 if b else None for b in batched))
    case = (fun, x, *args, dict(in_axes=in_axes))
    check_all({"any": case}, derivatives=False, jit=False, unrolled=False)
