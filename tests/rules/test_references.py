"""Mutable references inside batched functions, against the loop over examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx

from support.oracle import check, example, in_turn, same, shares, together

SHAPE = (4, 3, 5)


# Indexers of a (4, 3, 5) reference; i and j are numbers, k is a vector of two.
INDEXERS = {
    "all": lambda i, j, k: ...,
    "number": lambda i, j, k: i,
    "two numbers": lambda i, j, k: (i, j),
    "numbers apart": lambda i, j, k: (i, slice(None), j),
    "all numbers": lambda i, j, k: (i, j, i),
    "last number": lambda i, j, k: (Ellipsis, i),
    "number and slice": lambda i, j, k: (slice(1, 3), i, slice(0, 5, 2)),
    "array": lambda i, j, k: k,
    "array between": lambda i, j, k: (slice(None), k),
    "array last": lambda i, j, k: (slice(0, 2), slice(None), k),
    "arrays together": lambda i, j, k: (slice(None), k, k),
    "arrays apart": lambda i, j, k: (k, slice(None), k),
    "array and number": lambda i, j, k: (k, j),
    "number and array apart": lambda i, j, k: (j, slice(1, 3), k),
    "matrix": lambda i, j, k: (slice(None), k[:, None]),
    "static": lambda i, j, k: (1, slice(2), -1),
}
INDICES = jnp.array([1, 0, 2]), jnp.array([0, 1, 1]), jnp.array([[0, 2], [1, 2], [2, 0]])


def as_in_each_lane(fun, args, in_axes):
    """`bx.vmap(fun)` returns what `fun` does for each lane, repeated where it is not batched."""
    both = {"got": bx.vmap(fun, in_axes), "loop": in_turn(fun, in_axes)}
    results = jax.jit(together(both))(*args)
    same(results["got"], results["loop"])


@pytest.mark.parametrize("batched", ["reference", "indices", "all"])
def test_read(batched):
    def fun(x, *ijk):
        return {name: jax.new_ref(x)[at(*ijk)] for name, at in INDEXERS.items()}

    axis = {"reference": 1, "indices": None, "all": 2}[batched]
    in_axes = (axis, *[None if batched == "reference" else 0] * 3)
    shape = list(SHAPE)
    if axis is not None:
        shape.insert(axis, 3)
    args = (example(shape), *(i[0] if batched == "reference" else i for i in INDICES))
    as_in_each_lane(fun, args, in_axes)


@pytest.mark.parametrize("batched", ["reference", "indices", "value", "all"])
@pytest.mark.parametrize("names", shares(INDEXERS, 2), ids=" ".join)
@pytest.mark.each_commit(2)
def test_write(names, batched):
    """`swap` and `addupdate`: what is read, and what the reference holds after."""

    def write(at, x, values):
        ref = jax.new_ref(x)
        before = ref[at]
        value = values[: before.size].reshape(before.shape)
        old = jax.ref.swap(ref, at, value)
        jax.ref.addupdate(ref, at, 2 * value)
        return before, old, jax.ref.freeze(ref)

    def fun(x, values, *ijk):
        return {name: write(INDEXERS[name](*ijk), x, values) for name in names}

    in_axes = (1 if batched in ("reference", "all") else None,)
    in_axes += (1 if batched in ("value", "all") else None,)
    in_axes += (0 if batched in ("indices", "all") else None,) * 3
    x = example(SHAPE if in_axes[0] is None else (4, 3, 3, 5))
    values = example((60,) if in_axes[1] is None else (60, 3), seed=1)
    args = (x, values, *(i[0] if in_axes[2] is None else i for i in INDICES))
    as_in_each_lane(fun, args, in_axes)


def test_a_value_for_the_whole_reference_has_its_lanes_anywhere():
    def fun(x, y):
        ref = jax.new_ref(x)
        jax.ref.addupdate(ref, ..., y)
        return jax.ref.swap(ref, ..., y), ref[...]

    x, y = example((3, 3)), example((3, 3), seed=1)  # square: no shape tells of a mistake
    as_in_each_lane(fun, (x, y), (0, 1))


def test_numbers_out_of_range_are_taken_as_in_one_example():
    def fun(x, i):
        ref = jax.new_ref(x)
        read = ref[i]
        ref[i] = read + 1.0
        jax.ref.addupdate(ref, (i, i), 1.0)
        return read, ref[...]

    one = jax.jit(fun)
    for i in (-1, -9, 3, 7):
        x, indices = np.asarray(example((3, 3, 4))), np.array([i, 0, i])
        alone = [one(x[b], indices[b]) for b in range(3)]
        expected = tuple(map(np.stack, zip(*alone, strict=True)))
        same(jax.jit(bx.vmap(fun))(x, indices), expected, where=f"{i}: ")


def test_reference_stays_unbatched_where_nothing_batched_is_written():
    def fun(x, y):
        shared, own = jax.new_ref(jnp.zeros(3)), jax.new_ref(jnp.zeros(3))
        shared[1] = y
        jax.jit(lambda: jax.ref.addupdate(shared, 2, 1.0))()
        own[0] = x + shared[1]
        return shared[...], own[...]

    shared, own = bx.vmap(fun, (0, None), (None, 0))(jnp.arange(4.0), 2.0)
    same(shared, np.array([0.0, 2.0, 1.0], shared.dtype))
    same(own, np.array([[2.0 + i, 0, 0] for i in range(4)], own.dtype))


def test_what_is_batched_may_come_through_other_references():
    def fun(x):
        a, b = jax.new_ref(jnp.zeros(())), jax.new_ref(jnp.zeros(()))

        def body(_, carry):
            b[...] = a[...] + 1  # unbatched at first, batched in the second turn
            a[...] = b[...] * x
            return carry

        lax.fori_loop(0, 3, body, 0)
        return a[...], b[...]

    check(fun, example((4,)), derivatives=False)


def test_reference_as_a_mapped_argument():
    def fun(ref, x):
        old = ref[0]
        ref[0] = x
        jax.ref.addupdate(ref, slice(1, 3), old + jnp.ones(2))
        return ref[...] * 2

    for axis in (0, 1, -1):
        values = np.asarray(example((4, 3)))
        ref = jax.new_ref(jnp.asarray(np.moveaxis(values, 0, axis)))
        x = np.arange(4.0, dtype=values.dtype)
        batched = bx.vmap(fun, (axis, 0))
        out = (batched if axis == 0 else jax.jit(batched))(ref, jnp.asarray(x))
        after = np.column_stack([x, values[:, 1:] + values[:, :1] + 1])
        same(np.moveaxis(jax.ref.freeze(ref), axis, 0), after)
        same(out, after * 2)


def test_shared_reference():
    """Read freely, written only with what is the same for all lanes."""
    ref = jax.new_ref(jnp.arange(3.0))
    reads = lambda i, x: ref[i] * x
    same(bx.vmap(reads)(jnp.array([2, 0]), jnp.array([1.0, 5.0])), jnp.array([2.0, 0.0]))
    same(jax.jit(bx.vmap(reads))(jnp.array([2, 0]), jnp.ones(2)), jnp.array([2.0, 0.0]))

    def writes(x, y):
        ref[1] = y
        return x + ref[1]

    same(bx.vmap(writes, (0, None))(jnp.ones(2), jnp.asarray(7.0)), jnp.array([8.0, 8.0]))
    same(ref[...], jnp.array([0.0, 7.0, 2.0]))

    def swaps(x):
        ref[1] = x

    def adds(x):
        jax.ref.addupdate(ref, 1, x)

    def at_index(i):
        ref[i] = 1.0

    def in_a_loop(x):
        lax.fori_loop(0, 2, lambda i, _: jax.ref.set(ref, i, x), None)

    for f, x in ((swaps, jnp.ones(2)), (adds, jnp.ones(2)), (at_index, jnp.array([0, 1]))):
        with pytest.raises(bx.AxisError, match="all lanes share"):
            bx.vmap(f)(x)
    with pytest.raises(bx.AxisError, match="all lanes share"):
        bx.vmap(in_a_loop)(jnp.ones(2))
    with pytest.raises(bx.AxisError, match="all lanes share"):
        bx.vmap(lambda ref, x: jax.ref.set(ref, 0, x), (None, 0))(ref, jnp.ones(2))


def test_empty_reference():
    def fun(x):
        ref = jax.ref.empty_ref(jax.ShapeDtypeStruct((3,), x.dtype))
        ref[...] = x
        ref[0] = 1.0
        return jax.ref.freeze(ref)

    same(jax.jit(bx.vmap(fun))(jnp.zeros((2, 3))), jnp.array([[1.0, 0.0, 0.0]] * 2))


def test_views_are_refused():
    def fun(x):
        ref = jax.new_ref(jnp.zeros((3, 4)))
        ref.at[1][2] = x
        return ref[...]

    with pytest.raises(bx.UnsupportedError, match="index the reference itself"):
        bx.vmap(fun)(jnp.ones(2))


def test_a_reference_at_two_places_is_refused():
    def move(a, b):
        a[...] = a[...] + 1.0
        return b[...] * 2

    for v, named in ((jax.vmap, "both a and b"), (bx.vmap, r"a and b are the same")):
        ref = jax.new_ref(jnp.arange(4.0))
        with pytest.raises(ValueError, match=named):
            v(move)(ref, ref)
        with pytest.raises(ValueError, match=named):
            jax.jit(lambda v=v, ref=ref: v(move)(ref, ref))()
        same(ref[...], jnp.arange(4.0))
    with pytest.raises(bx.AxisError, match=r"d\['x'\] and d\['y'\]"):
        bx.vmap(lambda d: move(d["x"], d["y"]))({"x": ref, "y": ref})
    x = jnp.arange(4.0)
    same(bx.vmap(lambda a, b: a + b)(x, x), 2 * x)  # arrays may be the same
