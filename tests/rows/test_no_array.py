"""A batch of rows is no array, and says so, with `vmap`, to who takes it for one."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

X = bx.Ragged.from_rows([np.ones(2, np.float32), np.ones(3, np.float32)])

USES = {
    "jnp.sum": lambda: jnp.sum(X),
    "jnp.asarray": lambda: jnp.asarray(X),
    "np.sum": lambda: np.sum(X),
    "X + 1": lambda: X + 1,
    "numpy * X": lambda: np.ones(2) * X,
    "X @ X": lambda: X @ X,
    "X > 0": lambda: X > 0,
    "-X": lambda: -X,
    "float": lambda: float(X),
    "index": lambda: operator.index(X),
}


@pytest.mark.parametrize("use", list(USES))
def test_what_is_of_arrays_is_refused(use):
    with pytest.raises(
        TypeError, match=r"a Ragged is a batch of rows.*batchax\.vmap\(jnp.sum\)\(x\)"
    ):
        USES[use]()


def test_methods_of_arrays_are_refused_and_other_names_are_not_there():
    with pytest.raises(AttributeError, match=r"not an array: it has no 'sum'.*batchax\.vmap"):
        X.sum()
    with pytest.raises(AttributeError, match="'Ragged' object has no attribute 'mean_of_rows'"):
        X.mean_of_rows()
    assert not hasattr(X, "ndim")


def test_what_works_still_does():
    assert X == X
    assert X != 1
    assert bool(X)
    assert len(copy.deepcopy(X)) == len(pickle.loads(pickle.dumps(X))) == 2
    same = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf, x))(X)
    np.testing.assert_array_equal(same.data, X.data)
    np.testing.assert_array_equal(bx.vmap(jnp.add)(X, X).data, 2 * X.data)
