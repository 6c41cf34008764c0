"""Slices, gathers and scatters, against the loop over examples."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import batchax as bx

from support.batches import on_axes
from support.operations import operations
from support.oracle import check_all, example


def test_start_shared_by_lanes_stays_a_dynamic_slice():
    def fun(x, i):
        return lax.dynamic_slice(x, (i, 0), (2, 2)), lax.dynamic_update_slice(x, x[:1], (i, 1))

    counts = operations(bx.vmap(fun, in_axes=(1, None)), example((3, 5, 4)), 1)
    assert counts["dynamic_slice"] == counts["dynamic_update_slice"] == 1
    assert counts["gather"] == counts["scatter"] == 0


def test_weak_types_are_kept():
    # As in one example: JAX's own rule makes the first result weakly typed.
    def fun(x, i):
        weak, strong = i * jnp.arange(3) * 1.0, x
        return lax.dynamic_update_slice(weak, strong, (i,)), lax.dynamic_slice(weak, (i,), (2,))

    x, i = np.asarray(example((4, 2))), np.arange(4)
    for f, args in ((fun, (x[0], i[0])), (bx.vmap(fun), (x, i))):
        assert [a.weak_type for a in jax.eval_shape(f, *args)] == [False, True]


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


MODES = ["clip", "fill", "promise_in_bounds"]
METHODS = ["set", "add", "subtract", "mul", "min", "max"]

# Indices of each lane: negative ones count from the end, large ones are out of range.
INDICES = jnp.array([[0, 2], [-1, 1], [7, 0], [1, -9]])


def put(indices, position):
    """Indices of four lanes with the batch axis at `position`, or those of one lane."""
    return indices[0] if position is None else jnp.moveaxis(indices, 0, position)


def test_promises_survive_where_they_hold():
    def fun(x, i, u):
        y = x.at[i].get(unique_indices=True, indices_are_sorted=True)
        return y, x.at[i].add(u, unique_indices=True, indices_are_sorted=True)

    def promises(in_axes, *args):
        staged = jax.make_jaxpr(bx.vmap(fun, in_axes=in_axes))(*args)
        found = {}
        for eqn in staged.eqns:
            if eqn.primitive in (lax.gather_p, lax.scatter_add_p):
                found[eqn.primitive] = (
                    eqn.params["unique_indices"],
                    eqn.params["indices_are_sorted"],
                )
        return found[lax.gather_p], found[lax.scatter_add_p]

    x, i, u = example((4, 3)), jnp.array([[0, 2]] * 4), example((4, 2))
    assert promises((0, None, 0), x, i[0], u) == ((True, True), (True, True))
    assert promises((0, 0, 0), x, i, u) == ((True, True), (True, True))
    # Lanes that index one array may read the same element, and not in order.
    assert promises((None, 0, 0), x[0], i, u) == ((False, False), (True, True))
    # With lanes in another order than the operand's, pairs are not sorted.
    assert promises((1, 0, 0), x.T, i, u) == ((True, False), (True, False))


@settings(max_examples=10)
@given(st.data())
def test_any_gather_and_scatter(data):
    """Dimension numbers of every form, paired dimensions included, as nested vmaps make them."""
    rank = data.draw(st.integers(1, 3))
    kinds = [data.draw(st.sampled_from(["window", "removed", "paired"])) for _ in range(rank)]
    paired = [d for d, kind in enumerate(kinds) if kind == "paired"]
    removed = tuple(d for d, kind in enumerate(kinds) if kind == "removed")
    indexed = tuple(d for d, kind in enumerate(kinds) if kind != "paired")
    index_paired = tuple(data.draw(st.permutations(range(len(paired)))))
    lanes = [2] * len(paired) + [3]
    windows = kinds.count("window")
    window_dims = sorted(data.draw(st.permutations(range(windows + len(lanes))))[:windows])
    shape = tuple(2 if kind == "paired" else 3 for kind in kinds)
    sizes = tuple(2 if kind == "window" else 1 for kind in kinds)
    dims = lax.GatherDimensionNumbers(
        tuple(window_dims), removed, indexed, tuple(paired), index_paired
    )
    positions = data.draw(
        st.tuples(
            st.sampled_from([None, *range(rank + 1)]),
            st.sampled_from([None, *range(len(lanes) + 2)]),
            st.sampled_from([None, *range(windows + len(lanes) + 1)]),
        ).filter(lambda p: p != (None, None, None))
    )
    update_shape = iter(lanes)
    update_shape = tuple(
        2 if d in window_dims else next(update_shape) for d in range(windows + len(lanes))
    )
    x, u = on_axes(shape, positions[0]), on_axes(update_shape, positions[2], seed=1)
    i = on_axes((*lanes, len(indexed)), positions[1], dtype=jnp.int32, high=4, seed=2)
    mode = data.draw(
        st.sampled_from([lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP])
    )

    def fun(x, i, u):
        read = lax.gather(x, i, dims, sizes, mode=mode)
        written = lax.scatter_add(x, i, u, lax.ScatterDimensionNumbers(*dims), mode=mode)
        return read + u, written

    case = (fun, x, i, u, {})
    check_all({"any": case}, in_axes=positions, derivatives=False, unrolled=False, jit=False)
