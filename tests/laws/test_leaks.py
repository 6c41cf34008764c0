"""Nothing that is remembered, or that a program holds, keeps a tracer of a trace that is over."""

import jax
import pytest

from support.features import FEATURES


@pytest.mark.parametrize("name", FEATURES)
def test_no_tracer_leaks(name):
    with jax.checking_leaks():
        jax.block_until_ready(FEATURES[name]())
