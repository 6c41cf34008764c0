"""Under `jax.disable_jit` batches come out the same: what batchax compiles itself, it compiles."""

import jax
import jax.numpy as jnp
import pytest

import batchax as bx

from support.features import FEATURES, X
from support.oracle import same

COMPILED = ["chunks, as many as fit", "chunks, reduced", "compact branch", "bounded_while"]


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.each_commit(2)
def test_what_is_compiled(name):
    expected = FEATURES[name]()
    with jax.disable_jit():
        same(FEATURES[name](), expected)


def test_explain_measures():
    with jax.disable_jit():
        explanation = bx.explain(jnp.sin, measure=True)(X)
    assert [t.batch_size for t in explanation.timings] == [None, "loop", 4]
