"""Functions of JAX that want the size of a row as a number, and get along without."""

import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import batchax as bx
from batchax.errors import UnsupportedError

from support.rows import check_rows, ragged, ways

KERNEL = np.random.default_rng(5).normal(size=3).astype(np.float32)
LAYOUTS = ways("packed", "padded", "auto")


def indexed(x):
    n = x.shape[0]
    return (
        x[n // 2],
        x[n - 1, 1],
        x[:, None][n - 1],
        x.at[n // 2, 0].set(2.0),
        x.at[n - 1].multiply(jnp.float32(3.0)),
        x[: n // 2].sum(0),
        x[n // 2 :: 2].sum(0),
        lax.dynamic_index_in_dim(x, n // 2, keepdims=False),
        x[jnp.array([0, n - 1])],
    )


def test_a_size_is_an_index():
    check_rows(indexed, ragged(3), ways=LAYOUTS)


def inside_derivatives(x):
    edges = jnp.linspace(-1, 1, 3)
    found = []
    for place in (
        lambda x: jnp.digitize(x, edges),
        lambda x: jnp.searchsorted(edges, x),
        jax.vmap(lambda x: jnp.nonzero(x > 0, size=2)[0]),
    ):
        both = jax.jit(lambda x, place=place: (jnp.sin(x), place(x)))  # traced, then differentiated
        found.append(jax.jvp(both, (x,), (x,))[1][0])
        found.append(jax.grad(lambda x, both=both: both(x)[0].sum())(x))
    return found


def test_places_in_a_function_that_is_differentiated():
    check_rows(inside_derivatives, ragged(3), ways=LAYOUTS)


@pytest.mark.compiles(100)
def test_a_row_is_convolved_with_what_is_shorter_or_longer():
    function = lambda *args: jnp.convolve(*args)

    def every(x, kernel):
        modes = "full", "same", "valid"
        return [function(x, kernel, mode) for mode in modes], function(kernel, x, "same")

    check_rows(every, ragged(), KERNEL, in_axes=(0, None))
    check_rows(every, ragged(), KERNEL[:2], in_axes=(0, None), derivatives=False)
    whole = lambda x, kernel: (function(x, kernel, "same").sum(), function(x, kernel).sum())
    check_rows(whole, ragged(), ragged(lengths=(4, 3, 2, 4), seed=1))


def test_least_squares_of_rows_have_one_decomposition():
    """Of short, square, and long tables, of one with equal columns, and of one with a NaN."""
    solved = lambda x, y: jnp.linalg.lstsq(x, y)
    x = ragged(3, lengths=(1, 2, 3, 5, 8, 7, 0))
    y = ragged(lengths=(1, 2, 3, 5, 8, 7, 0), seed=1)
    data = np.array(x.data)
    data[6:11, 2] = data[6:11, 1]
    data[20, 1] = np.nan
    named, tables = bx.ragged("n"), bx.Ragged(data, x.lengths, x.max_length)
    check_rows(
        solved,
        tables,
        y,
        in_axes=(named, named),
        derivatives=False,
        tolerance={"rtol": 1e-4, "atol": 1e-4},
    )
    solution = lambda x, y: solved(x, y)[0]
    check_rows(solution, x, y, in_axes=(named, named), tolerance={"rtol": 2e-3, "atol": 2e-3})
    traced = lambda n: bx.vmap(solution, (named, named))(
        bx.Ragged(x.data, n, 8), bx.Ragged(y.data, n, 8)
    )
    assert str(jax.make_jaxpr(traced)(x.lengths)).count("svd[") == 1


def shuffled(x, key):
    n = x.shape[0]
    return (
        jax.random.permutation(key, x),
        jax.random.permutation(key, x[:, 0]),
        jax.random.permutation(key, x, independent=True),
        jax.random.permutation(key, n),
    )


def test_a_row_is_shuffled_as_if_alone():
    check_rows(shuffled, ragged(3, lengths=(3, 5, 1, 4)), jax.random.key(1), in_axes=(0, None))


def test_long_rows_are_shuffled_more_often():
    keys = jax.random.split(jax.random.key(2), 3)
    x = ragged(lengths=(1626, 5, 1625))
    check_rows(lambda x, key: jax.random.permutation(key, x), x, keys, derivatives=False)


VERY_LONG = {
    "shuffled": lambda x: jax.random.permutation(jax.random.key(0), x),
    "convolved": lambda x: jnp.convolve(x, x),
}


@pytest.mark.parametrize("name", VERY_LONG)
def test_rows_that_may_be_too_long_to_try_all_lengths(name):
    x = bx.Ragged(np.zeros(9), [4, 5], max_length=1 << 21)
    with pytest.raises(UnsupportedError, match="needs the length of a row as a number"):
        jax.make_jaxpr(bx.vmap(VERY_LONG[name]))(x)


def affine(first, second):
    (a, b), (c, d) = first, second
    return a * c, b * c + d


SCANS = {
    "sums": lambda x: lax.associative_scan(jnp.add, x),
    "products, in reverse": lambda x: lax.associative_scan(jnp.multiply, 2 * x, reverse=True),
    "pairs": lambda x: lax.associative_scan(affine, (jnp.sin(x), x)),
    "along another axis": lambda x: lax.associative_scan(jnp.maximum, x.T, axis=-1),
    "of what is not ragged": lambda x: lax.associative_scan(jnp.add, x, axis=1),
    "matrices": lambda x: lax.associative_scan(jnp.matmul, x[:, :, None] * jnp.ones(3)),
}


@pytest.mark.parametrize("lengths", [(3, 0, 1, 4), (5,)])
@pytest.mark.each_commit(1)
def test_an_associative_scan_over_a_row(lengths):
    every = lambda x: [scan(x) for scan in SCANS.values()]
    check_rows(every, ragged(3, lengths=lengths))


def test_pairs_that_a_row_has_not_got_do_not_reach_the_gradient():
    # Zeros, as in padding, have no logarithm; and what is shared collects from all pairs.
    def fun(x, w):
        joined = lambda a, b: jnp.exp(jnp.log(a * w) + jnp.log(b) - jnp.log(w))
        return lax.associative_scan(joined, jnp.abs(x) + 0.5)

    weight = np.asarray(0.7, jnp.result_type(float))  # of one dtype with the rows
    check_rows(fun, ragged(lengths=(3, 5, 2)), weight, in_axes=(0, None))


PRODUCTS = {
    "all": jnp.prod,
    "of columns": lambda x: jnp.prod(x, 0).sum(),
    "of what is not ragged": lambda x: jnp.prod(x, 1).sum(),
    "of none": lambda x: (jnp.prod(x[:0], 0) * x.sum(0)).sum(),
    "running": lambda x: lax.cumprod(x).sum() + lax.cummax(x, 0, reverse=True).sum(),
    "by a function": lambda x: lax.reduce(x, jnp.zeros((), x.dtype), jnp.hypot, (0, 1)),
    "twice": lambda x: jax.grad(jnp.prod)(x).sum(),
}


@pytest.mark.parametrize("lengths", [(3, 0, 4), (0, 0)])
@pytest.mark.each_commit(1)
def test_the_gradient_of_a_product_of_a_row(lengths):
    every = lambda x: [jax.grad(product)(x) for product in PRODUCTS.values()]
    check_rows(every, ragged(2, lengths=lengths, spare=0), derivatives=False)


LOOPS = {
    "of what is not ragged": lambda x: lax.fori_loop(
        0, x.shape[0], lambda i, c: jnp.sin(c) + i, (x**2).sum()
    ),
    "over the elements": lambda x: lax.fori_loop(
        1, 2 * x.shape[0] - 1, lambda i, c: jnp.sin(c) * x[i // 2], x.sum(0)
    ),
    "of a row": lambda x: lax.fori_loop(
        x.shape[0] // 2, x.shape[0], lambda i, c: jnp.sin(c) + 1, x
    ),
    "differentiated": lambda x: jax.grad(
        lambda s: lax.fori_loop(0, x.shape[0], lambda i, c: jnp.sin(c) + i, s)
    )(x.sum()),
}


def test_a_loop_up_to_the_size_has_a_reverse_mode():
    every = lambda x: [loop(x) for loop in LOOPS.values()]
    check_rows(every, ragged(3, lengths=(3, 2, 1)), ways=LAYOUTS)


def test_other_loops_up_to_a_size_run_forward():
    def fun(x):
        counted = lax.while_loop(
            lambda c: c[0] < x.shape[0], lambda c: (c[0] + 1, c[1] * 2), (0, x)
        )
        return counted, lax.fori_loop(0, jnp.asarray(x.shape[0]), lambda i, c: c + x[i], 0.0)

    check_rows(fun, ragged(), modes=("jvp",))


# What needs a number, in code of the user or of others.
NUMBERS = {
    "len": lambda x: x.sum() / len(x),
    "a range": lambda x: sum(x[i] for i in range(x.shape[0])),
    "each element": lambda x: sum(e for e in x),
    "an array of NumPy's": lambda x: x + np.zeros(x.shape[0]),
    "a power": lambda x: x / x.shape[0] ** 0.5,
    "a float": lambda x: x / float(x.shape[0]),
    "axes of size one": lambda x: jnp.squeeze(x).sum(),
    "two halves": lambda x: jnp.split(x, 2)[0],
    "two rows": lambda x: x.reshape(2, -1),
    "the largest": lambda x: lax.top_k(x, 2)[0],
    "differences": lambda x: jnp.gradient(x),
    "another array": lambda x: x + jnp.ones(3),
    "roots": lambda x: jnp.poly(x),
    "a window": lambda x: x * jnp.hanning(x.shape[0]),
}


@pytest.mark.usefixtures("longer_rows")
@pytest.mark.parametrize("name", NUMBERS)
def test_what_needs_a_number_is_refused_with_the_line(name):
    line = rf"{re.escape(__file__)}:{NUMBERS[name].__code__.co_firstlineno} \("
    with pytest.raises(UnsupportedError, match=rf"{line}(.|\n)*lengths are known(.|\n)*buckets="):
        jax.make_jaxpr(bx.vmap(NUMBERS[name]))(ragged(lengths=(2, 4)))


@pytest.mark.usefixtures("longer_rows")
def test_a_function_that_was_looked_up_before_is_told_of():
    interp = jnp.interp
    with pytest.raises(
        UnsupportedError, match=r"interp was looked up .* Call it as jax\.numpy\.int"
    ):
        jax.make_jaxpr(bx.vmap(lambda x: interp(x, x, x)))(ragged(lengths=(2, 4)))


def test_a_covariance_of_no_observations_is_none():
    check_rows(lambda x: jnp.cov(x), ragged(lengths=(3, 0, 1)), derivatives=False)


MISTAKES = {
    "shapes": (lambda x: x @ jnp.ones((7, 7, 8)), TypeError),
    "a name": (lambda x: x.nothing, AttributeError),
    "a value": (lambda x: jnp.nonzero(x)[0], jax.errors.ConcretizationTypeError),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_for_rows_of_any_length_is_what_it_is(name):
    fun, error = MISTAKES[name]
    with pytest.raises(error) as caught:
        jax.make_jaxpr(bx.vmap(fun))(ragged(lengths=(2, 4)))
    assert not isinstance(caught.value, bx.BatchaxError)


def in_another_thread(call):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def test_a_program_with_symbolic_sizes_beside_rows_that_are_staged():
    (n,) = jax.export.symbolic_shape("n")
    spec = jax.ShapeDtypeStruct((n,), jnp.float32)

    def f(x):
        n = x.shape[0]
        said = n == 1, n != 1, n > 0, bool(n), n in {1, 2}, {n + 1: 7}[1 + n], type(2 * n)
        assert said == (False, True, True, True, False, 7, type(n))
        return x[: n // 2].sum() + lax.fori_loop(0, n, lambda i, c: c + i, 0) + n

    def refused(f):
        try:
            jax.eval_shape(f, spec)
        except Exception as error:
            return type(error), str(error)

    def program():
        refusals = [
            refused(lambda x: x[x.shape[0] - 1]),
            refused(lambda x: lax.associative_scan(jnp.add, x)),
            refused(lambda x: jax.grad(jnp.prod)(x)),
            refused(lambda x: jnp.convolve(x, jnp.ones(3))),
            refused(lambda x: jax.random.permutation(jax.random.key(0), x)),
        ]
        assert None not in refusals
        exported = jax.export.export(jax.jit(f))(spec)
        module = re.sub(r" loc\(.*|#loc.*\n", "", exported.mlir_module())
        return module, exported.out_avals, refusals

    def of_others():
        at_hand = jax.random.permutation, lax.associative_scan
        return pickle.loads(pickle.dumps(at_hand)) == at_hand, program()

    seen = []

    def one_row(x):
        seen.extend([program(), in_another_thread(of_others)])
        return lax.associative_scan(jnp.add, x)

    expected = program()
    got = jax.jit(bx.vmap(one_row))(ragged(lengths=(2, 3)))
    assert got.data.shape[0] == 8
    assert expected == program() == seen[0]
    assert seen[1] == (True, expected)


def test_a_function_that_is_replaced_while_rows_are_staged_stays_replaced(monkeypatch):
    def f(x):
        jax.random.permutation = len
        return x

    monkeypatch.setattr(jax.random, "permutation", jax.random.permutation)  # put back afterwards
    jax.jit(bx.vmap(f))(ragged(lengths=(2, 3)))
    assert jax.random.permutation is len


def test_nothing_of_jax_is_changed_but_for_rows_that_are_staged():
    command = [sys.executable, "-m", "support.held_by_jax"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
