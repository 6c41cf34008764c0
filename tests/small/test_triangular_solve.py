"""Triangular systems with lanes last, against the library's solutions of the same systems."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg as ll

from support.matrices import DTYPES, general, lanes_last, product, with_wrong_elements

triangular_solve = functools.partial(lanes_last, "triangular_solve")

NAMES = ("left_side", "lower", "transpose_a", "conjugate_a", "unit_diagonal")
WAYS = [
    dict(zip(NAMES, values, strict=True)) for values in itertools.product([False, True], repeat=5)
]


@functools.cache
def _both(ways):
    def run(a, b, c):
        last = lambda x: jnp.moveaxis(x, 0, -1)
        ours, theirs = [], []
        for way in ways:
            way = dict(zip(NAMES, way, strict=True))
            right = b if way["left_side"] else c
            ours.append(jnp.moveaxis(triangular_solve(last(a), last(right), **way)[0], -1, 0))
            theirs.append(ll.triangular_solve(a, right, **way))
        return ours, theirs

    return jax.jit(run)


def both(a, b, c, ways):
    with jax.enable_x64(True):
        of = _both(tuple(tuple(way[name] for name in NAMES) for way in ways))(a, b, c)
        return [[np.asarray(y) for y in side] for side in of]


def operand(a, way):
    """The matrix that is solved with."""
    a = np.tril(a) if way["lower"] else np.triu(a)
    if way["unit_diagonal"]:
        a[:, range(a.shape[1]), range(a.shape[1])] = 1
    a = a.conj() if way["conjugate_a"] else a
    return a.swapaxes(-1, -2) if way["transpose_a"] else a


def residual(a, x, b, way):
    """For each system, beside its numbers, in units of what they round by."""
    args = (a, x) if way["left_side"] else (x, a)
    wide = [product(*args), product(*map(np.abs, args))]
    with np.errstate(invalid="ignore", over="ignore"):
        size = wide[1].max((1, 2)) + np.abs(b).max((1, 2))
        apart = np.abs(wide[0] - b).max((1, 2))
        return np.where(apart == 0, 0, apart / size) / float(np.finfo(b.dtype).eps)


@pytest.mark.parametrize("third", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.each_commit(4)
def test_solutions_are_as_near_as_the_librarys(dtype, third):
    n, ways = 4, WAYS[third::4] if np.dtype(dtype).kind == "c" else WAYS[third::4][::2]
    kinds = general(n, dtype)
    x = np.concatenate([kinds[k] for k in kinds if k not in ("tiny", "huge")])
    b, c = np.tile(general(n, dtype, 1)["random"], (len(x) // 4, 1, 1)), x[::-1] + x.dtype.type(1)
    b, c = b[:, :, :3], c[:, :2]
    for way, ours, theirs in zip(ways, *both(x, b, c, ways), strict=True):
        a, right = operand(x.copy(), way), b if way["left_side"] else c
        finite = [np.isfinite(y).all((1, 2)) for y in (ours, theirs)]
        np.testing.assert_array_equal(*finite, err_msg=way)
        both_errors = [residual(a, y, right, way)[finite[0]].max() for y in (ours, theirs)]
        assert both_errors[0] <= 4 * max(both_errors[1], 0.5), way


def test_wrong_elements_stay_in_their_lane_and_the_other_triangle_is_not_read():
    a = with_wrong_elements(general(3, "float32")["random"])
    b = np.ones((len(a), 3, 1), "float32")
    way = dict(zip(NAMES, [True, True, False, False, False], strict=True))
    (ours,), (theirs,) = both(a, b, b.swapaxes(1, 2), [way])
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs))
    assert np.isnan(ours).any()
    assert np.isfinite(ours[1::2]).all()
