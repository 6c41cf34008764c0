"""Each function of `jax.numpy` and its siblings on rows of traced lengths: as the row alone."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.row_operations import FEW, calls, function_of, kind_of, left_out, page, rows
from support.rows import ways

CALLS = calls()
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "operations.md"
TOGETHER = 12  # functions in one program, which takes less time to compile than many

pytestmark = pytest.mark.compiles(80)


def test_every_function_has_a_call():
    assert not left_out()


@pytest.mark.nightly
def test_the_page_is_what_runs():
    if jax.__version__ in PAGE.read_text().split("compiles one of these")[0]:
        assert PAGE.read_text() == page(), "run `make docs`"


def is_rows(y):
    return isinstance(y, bx.Ragged)


def tolerance(dtype):
    return 2e-4 if jnp.finfo(dtype).bits == 32 else 1e-9


def agree(got, alone, where):
    for i, row in enumerate(alone):
        for name, expected in row.items():
            leaves = jax.tree.leaves(got[name], is_leaf=is_rows)
            assert len(leaves) == len(jax.tree.leaves(expected)), name
            for y, e in zip(leaves, jax.tree.leaves(expected), strict=True):
                place = f"{name}, {where}, row {i}"
                mine, theirs = np.asarray(y.rows()[i] if is_rows(y) else y[i]), np.asarray(e)
                assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), place
                close = 0.0
                if np.issubdtype(theirs.dtype, np.inexact):
                    close = tolerance(theirs.dtype)
                np.testing.assert_allclose(mine, theirs, close, close, err_msg=place)


@pytest.mark.parametrize("first", range(0, len(CALLS), TOGETHER))
@pytest.mark.each_commit(1)
def test_as_the_row_alone(first):
    x = rows(FEW)
    functions = {name: function_of(name, CALLS[name]) for name in [*CALLS][first:][:TOGETHER]}
    any_length = {name: f for name, f in functions.items() if kind_of(f) == "any"}
    others = {name: f for name, f in functions.items() if name not in any_length}
    for chosen, options_of in (
        (any_length, ways("auto", "packed", "padded", "chunks")),
        (others, ways("auto", "chunks")),
    ):
        if not chosen:
            continue
        together = lambda x, chosen=chosen: {name: f(x) for name, f in chosen.items()}
        alone = [jax.jit(together)(row) for row in bx.Ragged(x.data, np.asarray(x.lengths)).rows()]
        for way, options in options_of.items():
            agree(jax.jit(bx.vmap(together, **options))(x), alone, way)


NOT_COMPARED = {
    # JAX halves intervals, and its derivatives are those of where it begins, ours of the result.
    "jax.scipy.linalg.eigh_tridiagonal",
    # Its derivative compares a maximum with what that is of. Programs that are not optimized, as
    # here, compute this twice, with other rounding where it is in one with others.
    "jax.numpy.hypot",
}


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, len(CALLS), TOGETHER))
def test_derivatives_as_of_the_row_alone(first):
    """Of what has derivatives, along one direction, with rows packed and padded as costs least."""
    x = rows(FEW)
    alone = bx.Ragged(x.data, np.asarray(x.lengths))
    functions = {name: function_of(name, CALLS[name]) for name in [*CALLS][first:][:TOGETHER]}
    chosen = {
        name: moving
        for name, f in functions.items()
        if name not in NOT_COMPARED and has_derivative(moving := along(f), alone)
    }
    together = lambda x: {name: f(x) for name, f in chosen.items()}
    agree(jax.jit(bx.vmap(together))(x), [jax.jit(together)(row) for row in alone.rows()], "jvp")


def along(f):
    """The derivative of what `f` returns of floats, along a direction that the row says."""

    def floats(x):
        return [y for y in jax.tree.leaves(f(x)) if jnp.issubdtype(jnp.result_type(y), jnp.inexact)]

    return lambda x: jax.jvp(floats, [x], [jnp.cos(5 * x)])[1]


def has_derivative(moving, x):
    try:
        rows = [jax.ShapeDtypeStruct((n,), x.data.dtype) for n in (*x.lengths.tolist(), FEW)]
        return all(jax.eval_shape(moving, row) for row in rows)
    except (NotImplementedError, TypeError):  # nor has it one alone
        return False


def test_a_batch_of_rows_for_each_lane_is_refused_by_name():
    with pytest.raises(bx.ArgumentTypeError, match=r"a batch of rows for each lane.*to_padded"):
        bx.vmap(lambda x: bx.vmap(lambda y: bx.compress(y > 0, y))(x))(np.ones((2, 3, 4)))
