"""Messages about lists of models and of tokens are short, and say what to do with such a list."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx


def message(call):
    with pytest.raises(bx.errors.AxisError) as info:
        call()
    return str(info.value)


def test_a_list_of_models_is_to_be_stacked():
    models = [{f"w{i}": np.ones((3 + i, 4)) for i in range(8)} for _ in range(8)]
    says = message(lambda: bx.vmap(lambda models, x: x)(models, jnp.ones((8, 3))))
    assert "pass batchax.stack(models)" in says
    assert "and 55 more arrays" in says
    assert len(says.splitlines()) < 18
    unlike = [{"w": np.ones(3)}, {"w": np.ones(4)}]
    assert "batchax.stack" not in message(lambda: bx.vmap(lambda models: models)(unlike))


def test_a_list_of_tokens_is_a_ragged_batch():
    tokens = [np.arange(1 + i) for i in range(1000)]
    says = message(lambda: bx.vmap(lambda tokens: tokens)(tokens))
    assert re.search(r"1000 of them, from 1 to 1000:", says)
    assert "batchax.Ragged.from_rows(tokens)" in says
    assert "and 990 more arrays" in says
    assert says.index("Ragged") < says.index("Give None")
    assert len(says.splitlines()) < 15

    numbers = [list(range(1 + i)) for i in range(50)]
    says = message(lambda: bx.vmap(lambda numbers: numbers)(numbers))
    assert "and 1265 more arrays" in says
    assert says.index("batchax.Ragged.from_rows(numbers)") < says.index("An axis must")
    assert len(says.splitlines()) < 15


def test_the_one_that_is_odd_is_shown():
    given = [*[np.ones((2, 5))] * 30, np.ones((3, 5))]
    says = message(lambda: bx.vmap(lambda given: given)(given))
    assert "given[30]: shape (3, 5), axis 0, size 3   <- not 2" in says
    assert "20 more" in says


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: object
    width: int = dataclasses.field(metadata=dict(static=True))


def test_stack_names_the_first_leaf_that_differs():
    layers = [{"up": Layer(jnp.ones((n, 2)), n)} for n in (3, 4)]
    says = message(lambda: bx.stack(layers))
    assert says.startswith("stack: trees[1]['up'].w is float")
    assert "PyTreeDef" not in says


BATCH = np.arange(3000.0).reshape(1000, 3)
LARGE = {
    "array": BATCH,
    "tree": [{f"layer{i}": [BATCH] * 3 for i in range(9)}] * 9,
    "text": "x" * 10_000,
}
GIVEN = {
    "in_axes": lambda x: bx.explain(jnp.sin, x),
    "an axis": lambda x: bx.vmap(jnp.sin, (x, 0)),
    "out_axes": lambda x: bx.vmap(jnp.sin, out_axes=(x,)),
    "a function": lambda x: bx.vmap(x),
    "max_steps": lambda x: bx.bounded_while(jnp.any, jnp.sin, 1.0, x),
    "batch_size": lambda x: bx.vmap(jnp.sin, batch_size=x),
    "layout": lambda x: bx.vmap(jnp.sin, layout=x),
    "divergence": lambda x: bx.vmap(jnp.sin, divergence=x),
    "until": lambda x: bx.scan(jnp.add, until=x),
    "unroll": lambda x: bx.scan(jnp.add, unroll=x),
    "argnums": lambda x: bx.clipped_grad(jnp.sum, 1.0, argnums=x),
    "lanes": lambda x: bx.check(jnp.sin, lanes=x),
    "size of a tile": lambda x: bx.tiles(size=x),
    "what a callable returns": lambda x: bx.vmap(jnp.sin, lambda leaf: [x])(jnp.ones(3)),
}


@pytest.mark.parametrize("option", GIVEN)
def test_what_is_given_is_not_shown_at_length(option):
    for value in LARGE.values():
        with pytest.raises((TypeError, ValueError)) as info:
            GIVEN[option](value)
        assert len(str(info.value)) < 700
