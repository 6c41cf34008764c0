import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.rows import check_rows, ragged

WEIGHTS = jnp.asarray(np.random.default_rng(3).normal(size=(3, 2)), float)

FUNCTIONS = {
    "mean": lambda x: x.mean(0),
    "layer": lambda x: jnp.tanh(x @ WEIGHTS),
    "attention": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "root of the sum": lambda x: jnp.sqrt(jnp.abs(x)).sum(),
    "logsumexp": lambda x: jax.nn.logsumexp(x, 0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.each_commit(3)
def test_a_row_is_computed_as_if_alone(name):
    check_rows(FUNCTIONS[name], ragged(3))


def test_the_derivative_of_what_rows_share_has_no_nan_from_padding():
    def logarithms(x, w):
        return jnp.log(jnp.abs(x @ w))

    check_rows(logarithms, ragged(3), WEIGHTS, in_axes=(0, None))
