"""Nothing that is remembered, or that a program holds, keeps a tracer of a trace that is over."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx

from support.features import FEATURES


@pytest.fixture(scope="module", autouse=True)
def _a_small_heap():
    """For each trace JAX looks for garbage, of which there is none in what was there before."""
    gc.collect()
    gc.freeze()


NEEDS_VALUES = {"check_rule"}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.each_commit(17)
def test_no_tracer_leaks(name):
    with jax.checking_leaks():
        if name in NEEDS_VALUES:
            FEATURES[name]()
        else:  # tracers leak while programs are made: none has to run
            jax.make_jaxpr(lambda: FEATURES[name]())()


@pytest.mark.parametrize("where", [lambda x: x, lambda x: jnp.sin(x)])
def test_one_that_leaks_would_be_found(where):
    kept = []
    f = bx.vmap(lambda x: kept.append(where(x)) or x)
    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked"):
        jax.make_jaxpr(lambda: f(np.ones(3)))()
