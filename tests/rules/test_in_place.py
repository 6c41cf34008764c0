"""Arrays updated in place where lanes diverge: loops that some have finished, branches."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

import batchax as bx

from support.oracle import at_once, example, in_turn, lane, loop_function, same

SIZE = 300  # enough for an update of some elements to be made in place
N = jnp.array([7, 0, 2, 5])
X = example((4, SIZE))
UPDATES = {"scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"}


def whole_arrays(f, *args, in_axes=0):
    """The operations inside loops of the batched `f` that make as much as an array of all lanes."""
    found = set()

    def look(jaxpr, within):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            inner = [] if "scatter" in name else list(jaxprs_in_params(eqn.params))
            large = any(math.prod(v.aval.shape) >= 4 * SIZE for v in eqn.outvars)
            if within and large and not inner:
                found.add(name)
            for program in inner:
                look(getattr(program, "jaxpr", program), within or name == "while")

    look(jax.make_jaxpr(bx.vmap(f, in_axes=in_axes))(*args).jaxpr, False)
    return found


def check(f, *args, in_axes=0, updates=UPDATES):
    """Values and types against the loop over examples; and nothing whole inside of loops."""
    in_axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    batched = bx.vmap(f, in_axes=in_axes)
    got, alone = at_once(batched, in_turn(f, in_axes))(*args)
    same(got, alone)
    one = [
        x if a is None else jax.typeof(lane(x, 0, a)) for x, a in zip(args, in_axes, strict=True)
    ]
    types = zip(
        *(jax.tree.leaves(jax.eval_shape(*g)) for g in ((f, *one), (batched, *args))), strict=True
    )
    assert all((a.dtype, a.weak_type) == (b.dtype, b.weak_type) for a, b in types)
    assert whole_arrays(f, *args, in_axes=in_axes) <= updates


# Loops.


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool", "complex64", "uint8"])
@pytest.mark.each_commit(2)
def test_every_update(dtype):
    """Each kind of update, of an element, of several with duplicates, of a window."""
    some = jnp.array([5, 3, 5, 280])

    def f(n, x):
        arrays = {"set": x, "several": x, "window": x}
        if dtype != "bool":
            arrays |= {"add": x, "multiply": x}
        if dtype in ("float32", "int32"):
            arrays |= {"min": x, "max": x}

        def body(i, a):
            v = x[i]
            new = {
                "set": lambda y: y.at[i].set(v),
                "several": lambda y: y.at[some + i].set(y[some - i]),
                "window": lambda y: lax.dynamic_update_slice(y, y[3:9], (i * 60,)),
                "add": lambda y: y.at[some].add(v),
                "multiply": lambda y: y.at[some + i].multiply(v),
                "min": lambda y: y.at[some + i].min(v),
                "max": lambda y: y.at[some + i].max(v),
            }
            return {k: new[k](y) for k, y in a.items()}

        return lax.fori_loop(0, n, body, arrays)

    x = example((4, SIZE), dtype)
    check(f, N, x)


@pytest.mark.parametrize("mode", ["fill", "clip", "promise_in_bounds"])
def test_modes_and_types_of_indices(mode):
    far = 0 if mode == "promise_in_bounds" else 20

    def f(n, x, y):
        def body(i, carry):
            a, b, c, d = carry
            start = lax.convert_element_type(i * far - 1, "int32")
            rows = jnp.array([[1, 4], [2, 3]]) + i * far
            small = lax.convert_element_type(i, "int16") + jnp.int16(250)
            options = dict(mode=mode)
            window = lax.ScatterDimensionNumbers((0,), (), (0,))
            a = lax.scatter(a, start[None], jnp.full(3, i, x.dtype), window, **options)
            b = b.at[rows[:, 0], rows[:, 1]].add(x[i], **options)
            c = lax.scatter_mul(c, small[None], x[i], _element(), unique_indices=True, **options)
            d = d.at[jnp.array([1, 3, 200]) + far * i].set(
                x[i], unique_indices=True, indices_are_sorted=True, **options
            )
            return a, b, c, d

        return lax.fori_loop(1, n, body, (x, y, x, x))

    check(f, N, X, example((4, 20, 30)))


def _element():
    return lax.ScatterDimensionNumbers((), (0,), (0,))


def test_rows_reshapes_and_random_keys():
    def f(n, x, key):
        keys = jax.random.split(key, SIZE)

        def body(i, carry):
            x, y, keys = carry
            x = x.at[i].set(x[i - 1] * 2)
            y = y.reshape(-1).at[i * 3].set(x[i, 0]).reshape(y.shape)
            keys = keys.at[i].set(jax.random.fold_in(keys[i], i))
            return x, y, keys

        x, y, keys = lax.fori_loop(0, n, body, (x, x[None, 1:], keys))
        return x, y, jax.random.key_data(keys)

    check(f, N, X.reshape(4, 75, 4), jax.random.split(jax.random.key(0), 4))


def test_compiled_loop_copies_nothing():
    f = lambda n, x: lax.fori_loop(0, n, lambda i, x: x.at[i].set(x[i] * 2), x)
    text = jax.jit(bx.vmap(f)).lower(N, X).compile().as_text()
    loop = text[: text.index("ENTRY")]
    assert not re.search(r"f(32|64)\[4,300\]\S* (copy|select)\(", loop), text


# Loops within loops, and what else holds a program.


def insertion_sort(n, x):
    def insert(i, x):
        key = x[i]
        test = lambda c: (c[0] >= 0) & (c[1][jnp.maximum(c[0], 0)] > key)
        shift = lambda c: (c[0] - 1, c[1].at[c[0] + 1].set(c[1][c[0]]))
        i, x = lax.while_loop(test, shift, (i - 1, x))
        return x.at[i + 1].set(key)

    return lax.fori_loop(1, n, insert, x)


def search(n, x):
    """A loop within a loop that only reads, and would not end on other lanes' numbers."""
    links = jnp.where(jnp.arange(SIZE) < n, jnp.arange(SIZE) + 1, 0)

    def body(i, out):
        end = lax.while_loop(lambda j: links[j] != 0, lambda j: links[j], i)
        return out.at[i].set(end)

    return lax.fori_loop(0, n, body, links * 0)


def ring_buffer(n, x):
    def body(c):
        head, tail, queue, k = c
        return (head + 1) % 290, (tail + 2) % 290, queue.at[tail].set(queue[head] + 1), k + 1

    return lax.while_loop(lambda c: c[3] < n, body, (0, 1, x, 0))


def in_a_scan(n, x):
    row = lambda x, y: (x.at[(y * 100).astype(int)].add(y), x[3])

    def body(i, c):
        x, _ = c
        return lax.scan(row, x, jnp.abs(x[:5]) % 1)

    return lax.fori_loop(0, n, body, (x, x[:5]))


def in_calls(n, x):
    put = jax.jit(lambda x, i: x.at[i].set(i))
    twice = jax.checkpoint(lambda x, i: put(put(x, i), i + 1))
    return lax.fori_loop(0, n, lambda i, x: twice(x, 3 * i), x)


def with_a_shared_loop(n, x):
    """The number of steps of the inner loop is the same for all lanes."""
    steps = jnp.sum(jnp.arange(3))
    body = lambda i, x: lax.fori_loop(0, steps, lambda j, x: x.at[i + j].add(x[j]), x)
    return lax.fori_loop(0, n, body, x)


def with_branches(n, x):
    def body(i, x):
        return lax.switch(
            i % 4,
            [
                lambda x: x.at[i].set(-1.0),
                lambda x: x,
                lambda x: lax.dynamic_update_slice(x, x[:3], (i,)).at[0].multiply(2),
                lambda x: lax.fori_loop(0, i, lambda j, x: x.at[j].add(x[i]), x),
            ],
            x,
        )

    return lax.fori_loop(0, n, body, x)


PROGRAMS = [
    insertion_sort, search, ring_buffer, in_a_scan, in_calls,
    with_a_shared_loop, with_branches,
]  # fmt: skip


@pytest.mark.parametrize("f", PROGRAMS)
@pytest.mark.each_commit(5)
def test_programs(f):
    check(f, N, X)


@pytest.mark.parametrize("f", [insertion_sort, with_branches])
@pytest.mark.parametrize("vmaps", [(bx.vmap, bx.vmap), (bx.vmap, jax.vmap), (jax.vmap, bx.vmap)])
@pytest.mark.each_commit(3)
def test_lanes_of_two_axes(f, vmaps):
    outer, inner = vmaps
    n, x = jnp.array([[2, 0, 6], [4, 5, 1]]), example((2, 3, SIZE))
    got = jax.jit(outer(inner(f)))(n, x)
    single = jax.jit(f)
    x = np.asarray(x)
    alone = [[single(*a) for a in zip(*b, strict=True)] for b in zip(n, x, strict=True)]
    same(got, np.stack([np.stack(row) for row in alone]))
    if vmaps == (bx.vmap, bx.vmap):
        assert whole_arrays(inner(f), n, x) <= UPDATES


def test_shared_predicate_with_no_lane():
    """In a branch that no lane takes: a loop that ends in no lane, on an array of each."""

    def f(p, x, m):
        spin = lambda x: lax.while_loop(
            lambda c: c[0] != 1, lambda c: (c[0], c[1].at[0].set(1)), (m, x)
        )
        return lax.cond(p, lambda x: spin(x)[1], lambda x: x, x)

    got = jax.jit(bx.vmap(f, in_axes=(0, 0, None)))(N < 0, X, 0)
    same(got, X)


# Derivatives.


def test_forward_mode_through_loops():
    def f(n, x):
        def body(i, x):
            x = x.at[i + 1].set(jnp.sqrt(x[i] - 0.4) * x[2 * i])
            return lax.fori_loop(0, i, lambda j, x: x.at[j].add(x[i + 1] ** 2), x)

        return lax.fori_loop(0, n, body, x)

    x, t = jnp.abs(X), example((4, SIZE), seed=1)
    one = jax.jit(lambda n, x, t: jax.jvp(lambda x: f(n, x), (x,), (t,)))
    expected = loop_function(one, (0, 0, 0), 0)(N, x, t)
    same(jax.jit(lambda x, t: jax.jvp(lambda x: bx.vmap(f)(N, x), (x,), (t,)))(x, t), expected)
    same(jax.jit(bx.vmap(one))(N, x, t), expected)
    assert whole_arrays(one, N, x, t) <= UPDATES


def trapped(i, x, w):
    """Branches that are NaN, or whose derivatives are, for lanes that do not take them."""

    root = lambda x: (x.at[3].set(jnp.log(x[i]) * w).at[4].multiply(w), jnp.sqrt(x[i]))

    def power(x):
        x = lax.dynamic_update_slice(x, x[:3] * w, (i,))
        return x.at[jnp.array([1, 7])].add(x[i + 1] ** 1.5), w / x[2]

    def inner(x):
        step = lambda x, y: (x.at[5].add(jnp.log(x[i]) * y), x[i])
        x, ys = lax.scan(step, x, jnp.arange(2.0))
        return x, ys.sum()

    return lax.switch(i, [root, power, lambda x: (x, 1.0), inner][:4], x)


@pytest.mark.parametrize("indices", [[0, 1, 2, 3], [2, 2, 2, 2], [3, 0, 0, 1]])
@pytest.mark.each_commit(1)
def test_reverse_mode_through_branches(indices):
    i = np.array(indices)
    # Positive where a branch needs it, for the lane that takes it.
    x = np.where((np.arange(SIZE) < 8) & (i[:, None] != 2), np.abs(X) + 0.5, -1.0).astype(X.dtype)
    if indices[2] == 2:
        x[2] = 0.0
    c = (example((4, SIZE), seed=2), example((4,), seed=3))

    @jax.jit
    def one(i, x, w, *c):
        outs, pull = jax.vjp(lambda x, w: trapped(i, x, w), x, w)
        return outs, pull(c)

    def everything(i, x, w, *c):
        outs, pull = jax.vjp(lambda x, w: bx.vmap(trapped, in_axes=(0, 0, None))(i, x, w), x, w)
        return outs, pull(c)

    axes = (0, 0, None, 0, 0)
    ways = in_turn(one, axes), everything, bx.vmap(one, in_axes=axes)
    (outs, (dx, dw)), whole, inside = jax.tree.map(np.asarray, at_once(*ways)(i, x, 1.5, *c))
    same(whole, (outs, (dx, dw.sum())))
    same(inside, (outs, (dx, dw)))


def test_two_results_from_one_array():
    def f(i, x):
        return lax.switch(
            i,
            [
                lambda x: (x.at[0].set(1.0), x, x.at[2].set(x[1])),
                lambda x: (x.at[1].set(x[2]), x.at[5].set(3.0), x),
                lambda x: (x, x, x),
            ],
            x,
        )

    for x, axis in ((X, 0), (X.T, 1), (X[0], None)):
        check(f, N % 3, x, in_axes=(0, axis))


def test_shard_map_outside():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def f(n, x):
        def body(c):
            i, x = c
            x = lax.while_loop(
                lambda c: c[0] < i, lambda c: (c[0] + 1, c[1].at[c[0]].add(i)), (0, x)
            )[1]
            return i + 1, lax.cond(i % 2 == 0, lambda x: x.at[i + 9].set(2.0), lambda x: x, x)

        return lax.while_loop(lambda c: c[0] < n, body, (0, x))

    g = lambda n, x: lax.fori_loop(0, n, lambda i, x: x.at[i].add(i), x)
    for h, checked in ((f, False), (g, True), (g, False)):
        expected = jax.jit(in_turn(h, (0, 0)))(N, X)
        for specs in ((spec("d"), spec("d")), (spec("d"), spec())):
            sharded = jax.shard_map(
                bx.vmap(h), mesh=mesh, in_specs=specs, out_specs=spec("d"), check_vma=checked
            )
            same(jax.jit(sharded)(N, X), expected)
            assert checked or whole_arrays(h, N, X) <= UPDATES
