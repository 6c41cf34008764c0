"""Rows of traced lengths, of functions that have no form for any length: a branch for each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback, pallas

import batchax as bx
from batchax.errors import UnsupportedError
from batchax.rows.specialize import MOST_LENGTHS

from support.oracle import same
from support.rows import check_rows, images, ragged

FUNCTIONS = {
    "range": lambda x: sum(x[i] * i for i in range(len(x))),
    "linspace": lambda x: {"row": x * jnp.linspace(0, 1, len(x)), "last": x[-1]},
    "numbers of Python's": lambda x: (x.sum(), len(x), len(x) > 2, float(len(x))),
    "if": lambda x: x.sum() if x.shape[0] > 2 else x.prod(),
    "sorted at host": lambda x: jax.pure_callback(
        np.sort, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    ),
}
ROWS = dict(lengths=(3, 1, 4, 3), spare=1)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_commit(2, "range", "numbers of Python's")
def test_as_each_row_alone(name):
    modes = () if name in ("sorted at host", "numbers of Python's") else ("jvp", "vjp")
    check_rows(FUNCTIONS[name], ragged(**ROWS), modes=modes, reverse_traced=True)


def spectrum(x, s=1.0):
    return s * jnp.fft.fft(x).real / len(x)


SWITCHED = {**FUNCTIONS, "spectrum": spectrum}
del SWITCHED["if"]  # rows are parted by the answer


@pytest.mark.parametrize("function", SWITCHED.values(), ids=SWITCHED)
def test_there_is_no_program_for_all_lengths(function):
    """Or what is tested here is something else"""
    batched = lambda n: bx.vmap(function)(bx.Ragged(jnp.ones(9), n, 5))
    program = jax.make_jaxpr(batched)(jnp.array([4, 5])).jaxpr
    # Branches of a few operations are all computed, and one is selected.
    chosen = [e for e in program.eqns if e.primitive.name in ("cond", "select_n")]
    assert any(e.primitive.name != "select_n" or len(e.invars) > 3 for e in chosen)


def test_no_row_sees_another():
    """NaN in one row reaches no other, nor its gradient"""
    x = ragged(lengths=(3, 2, 4), spare=0, poison=False)
    data = x.data.at[3].set(jnp.nan)
    run = jax.jit(
        lambda data, n: jax.value_and_grad(
            lambda data: (lambda y: jnp.where(jnp.isnan(y), 0, y).sum())(
                bx.vmap(lambda x: jnp.abs(spectrum(x) + 9).sum())(bx.Ragged(data, n, 4))
            )
        )(data)
    )
    value, gradient = run(data, jnp.asarray(x.lengths))
    expected = run(x.data, jnp.asarray(x.lengths))[1]
    assert np.isfinite(value)
    others = np.array([0, 1, 2, 5, 6, 7, 8])
    same(gradient[others], expected[others])


def test_rows_that_a_function_does_not_take():
    """They have what ``jnp.take`` fills in: in a compiled program nothing can be raised"""
    x = bx.Ragged(jnp.arange(8.0), np.array([3, 1, 0, 4], np.int32), 4)
    best = lambda x: jax.lax.top_k(x, 2)
    by_number = lambda x: jax.lax.top_k(x + 0 * len(x), 2)
    both = jax.jit(lambda n: [bx.vmap(f)(bx.Ragged(x.data, n, 4)) for f in (best, by_number)])
    least = np.iinfo(np.int32).min
    for values, places in both(jnp.asarray(x.lengths)):
        np.testing.assert_array_equal(values, [[2, 1], [np.nan] * 2, [np.nan] * 2, [7, 6]])
        np.testing.assert_array_equal(places, [[2, 1], [least] * 2, [least] * 2, [3, 2]])
    with pytest.raises(ValueError, match="k argument to top_k"):  # where lengths are known
        bx.vmap(best)(x)


def refused(fun, bound=4, **options):
    x = bx.Ragged(jnp.ones(4), np.array([3, 1], np.int32), bound)
    vmap = bx.vmap(fun, axis_name="rows", **options)
    return jax.make_jaxpr(lambda n: vmap(bx.Ragged(x.data, n, bound)))(jnp.asarray(x.lengths))


def doubled(x_ref, out_ref):
    out_ref[...] = 2 * jnp.cumsum(x_ref[...])


def factor(x):
    """LAPACK's Cholesky factor of a matrix made of a row, whose columns lie one after another."""
    matrix = x[:, None] * x + 3 * jnp.eye(x.shape[0], dtype=x.dtype)
    call = jax.ffi.ffi_call(
        "lapack_spotrf_ffi",
        (jax.ShapeDtypeStruct(matrix.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.int32)),
        vmap_method="sequential",
        input_layouts=[(1, 0)],
        output_layouts=[(1, 0), ()],
    )
    return jnp.tril(call(matrix, uplo=np.uint8(ord("L")))[0])


OTHER_CODE = {
    "a kernel of Pallas": (
        lambda x: pallas.pallas_call(
            doubled, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )(x),
        lambda x: 2 * np.cumsum(x),
    ),
    "a call of the host": (
        lambda x: io_callback(np.sort, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        np.sort,
    ),
    "a foreign function": (
        lambda x: factor(x) @ jnp.arange(x.shape[0], dtype=x.dtype),
        lambda x: np.linalg.cholesky(np.outer(x, x) + 3 * np.eye(len(x))) @ np.arange(len(x)),
    ),
}


@pytest.mark.parametrize("options", [{}, {"batch_size": 2}], ids=["all", "chunks"])
@pytest.mark.parametrize("name", OTHER_CODE)
def test_code_of_others_gets_each_row_as_it_is(name, options):
    jax.block_until_ready(jnp.linalg.eigh(jnp.eye(2)))  # loads LAPACK
    function, expected = OTHER_CODE[name]
    x = ragged(**ROWS, dtype=np.float32, poison=False)
    got = jax.jit(lambda n: bx.vmap(function, **options)(bx.Ragged(x.data, n, 4)))(x.lengths)
    for y, row in zip(got.rows(), x.rows(), strict=True):
        np.testing.assert_allclose(y, expected(np.asarray(row)), rtol=1e-4, atol=1e-5)


def test_what_is_refused():
    by_number = FUNCTIONS["range"]
    refused(by_number)
    refused(by_number, bound=MOST_LENGTHS - 1)
    for options in ({"bound": MOST_LENGTHS}, {"layout": "padded"}, {"layout": "packed"}):
        with pytest.raises(UnsupportedError, match="lengths are traced") as error:
            refused(by_number, **options)
        notes = "".join(getattr(error.value, "__notes__", ()))
        assert ("max_length of at most 32" in notes) == ("bound" in options)
    with pytest.raises(UnsupportedError, match="lengths are traced"):  # all rows meet there
        refused(lambda x: jax.lax.psum(by_number(x).sum(), "rows"))
    with pytest.raises(UnsupportedError, match="needs the length of a row as a number"):
        refused(lambda x: x.sum().astype(int if len(x) > 2 else float))
    with pytest.raises(UnsupportedError, match="a callback with ordered=True is not"):
        refused(lambda x: jax.debug.callback(lambda x: None, x.sum() + len(x), ordered=True))
    with pytest.raises(TypeError, match="can only concatenate"):
        refused(lambda x: x.shape + 1)


SIZES = ((2, 3), (1, 2), (3, 1), (2, 2))


def test_rows_of_several_sizes():
    x = images(shapes=SIZES, spare=0)
    y = ragged(lengths=[w for _, w in SIZES], spare=0)
    functions = {
        "by lines": lambda x, y: jnp.fft.fft(x * y, axis=1).real,
        "outer": lambda x, y: jnp.outer(jnp.linspace(0, 1, x.shape[0]), jnp.abs(jnp.fft.rfft(y))),
        "sizes": lambda x, y: (x.shape[0] * len(y), x.sum() if x.shape[0] > 1 else y.sum()),
    }
    together = lambda x, y: [f(x, y) for f in functions.values()]
    in_axes = (bx.ragged("h", "w"), bx.ragged("w"))
    check_rows(together, x, y, in_axes=in_axes, modes=("vjp",), reverse_traced=True)
    with pytest.raises(UnsupportedError, match="lengths are traced") as error:
        jax.jit(bx.vmap(together, in_axes))(x.with_max_length((8, 8)), y)
    assert "of several sizes, so many together" in error.value.__notes__[0]


def by_length(x):
    n = x.shape[0]
    if n > 20:
        return x[:3].sum(), x * 2
    if n == 4:
        return x[3], x
    return (x**2).sum(), jnp.gradient(x)  # which wants two elements at least


def test_a_program_for_each_answer():
    """Not one for each length: these may be too many"""
    lengths = np.array([4, 1, 30, 3, 0, 5], np.int32)
    x = bx.Ragged(jnp.arange(1.0, 48.0), lengths, 100)

    def both(data, lengths):
        def loss(data):
            numbers, rows = bx.vmap(by_length)(bx.Ragged(data, lengths, 100))
            return jnp.where(jnp.isnan(numbers), 0, numbers).sum(), (numbers, rows)

        return jax.value_and_grad(loss, has_aux=True)(data)

    (_, (numbers, rows)), gradient = jax.jit(both)(x.data, jnp.asarray(lengths))
    start = np.cumsum(lengths) - lengths
    for i, n in enumerate(lengths):
        row = x.data[start[i] : start[i] + n]
        if n < 2:  # no row of that length is taken alone
            assert np.isnan(numbers[i])
            continue
        (value, alone), own = jax.value_and_grad(by_length, has_aux=True)(row)
        same(numbers[i], value)
        same(rows.rows()[i], alone)
        same(gradient[start[i] : start[i] + n], own)


def test_how_many_programs_there_are():
    program = jax.make_jaxpr(bx.vmap(by_length))(
        bx.Ragged(jnp.ones(9), jnp.asarray([4, 5]), 10_000)
    )
    assert len(str(program)) < 100_000
    in_numbers = lambda x: sum(range(len(x)))
    with pytest.raises(UnsupportedError, match="lengths are traced") as error:
        jax.make_jaxpr(bx.vmap(lambda x: in_numbers(x) if x.shape[0] > 5 else x.sum()))(
            bx.Ragged(jnp.ones(9), jnp.asarray([4, 5]), 10_000)
        )
    # The question has an answer for each part. The number is what one of them needs.
    assert f":{in_numbers.__code__.co_firstlineno} " in str(error.value)
    assert "take a number" in str(error.value)


def of_detrended_windows(x):
    times = jnp.arange(x.shape[0])
    matrix = jnp.stack([jnp.ones_like(x), times.astype(x.dtype)], 1)
    x = x - matrix @ jnp.linalg.lstsq(matrix, x)[0]
    return jnp.linalg.svd(x[times[:-3, None] + jnp.arange(4)], compute_uv=False)[:1]


def largest_if_short(x):
    return x[:2].sum() if x.shape[0] > 9 else jax.lax.top_k(x, 4)[0].sum()


@pytest.mark.parametrize("function", [of_detrended_windows, largest_if_short])
def test_a_part_whose_short_rows_a_function_does_not_take(function):
    """Other rows have their programs"""
    x = ragged(lengths=(5, 9, 40, 12), spare=0, poison=False)
    batched = lambda n: bx.vmap(function)(bx.Ragged(x.data, n, 40))
    found = jax.jit(batched)(jnp.asarray(x.lengths))
    alone = jax.jit(lambda rows: list(map(function, rows)))(x.rows())
    for i, expected in enumerate(alone):
        own = found.rows()[i] if isinstance(found, bx.Ragged) else found[i]
        same(own, expected, dict(rtol=1e-4, atol=1e-5))


@pytest.mark.parametrize("shape", ["line", "several", "weighted", "full"])
def test_polynomials_of_rows(shape):
    def fit(x):
        times = jnp.arange(x.shape[0]).astype(x.dtype)
        w = jnp.abs(x) + 1 if shape == "weighted" else None
        y = jnp.stack([x, x * x], 1) if shape == "several" else x
        fitted = jnp.polyfit(times, y, 1, w=w, full=shape == "full")
        return fitted if shape == "full" else (fitted,)

    x = ragged(lengths=(5, 9, 2, 40, 12, 3), spare=0, poison=False)
    found = jax.jit(lambda n: bx.vmap(fit)(bx.Ragged(x.data, n, 40)))(jnp.asarray(x.lengths))
    alone = jax.jit(lambda rows: list(map(fit, rows)))(x.rows())
    for i, expected in enumerate(alone):
        own = tuple(v.rows()[i] if isinstance(v, bx.Ragged) else v[i] for v in found)
        same(own, expected, dict(rtol=1e-3, atol=1e-4))


def test_many_known_lengths_have_a_program_for_each_answer():
    staged, known = [], []

    def fun(x):
        staged.append(x.shape)
        return {"part": 2 * x[1:], "of size": x.sum() if x.shape[0] > 4 else x.prod()}

    def batched(data):
        out = bx.vmap(fun)(x.with_data(data))
        known.append(isinstance(out["part"].lengths, np.ndarray))
        return out["part"].data, out["of size"]

    x = ragged(lengths=(3, 5, 4, 7, 9, 2, 11, 12, 6, 8, 3), poison=False, spare=0)
    parts, sums = jax.jit(batched)(x.data)
    assert len(staged) < len(set(np.asarray(x.lengths).tolist()))
    assert known == [True]
    rows = [np.asarray(row) for row in x.rows()]
    expected = np.concatenate([2 * row[1:] for row in rows])
    np.testing.assert_allclose(parts[: len(expected)], expected, rtol=1e-6)
    alone = [row.sum() if len(row) > 4 else row.prod() for row in rows]
    np.testing.assert_allclose(sums, alone, rtol=1e-5, atol=1e-5)


def test_known_rows_that_a_function_does_not_take_raise_however_many_lengths():
    x = ragged(lengths=(1, *range(2, 14)))
    with pytest.raises(ValueError, match="too small to calculate"):
        jax.eval_shape(lambda: bx.vmap(lambda x: jnp.gradient(x))(x))
