"""Messages about lists of models and of tokens are short, and say what to do with such a list."""

import dataclasses
import inspect
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
    assert says.index("Ragged") < says.index("Pass None")
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


class Long:
    """An object with a long text, such as a model."""

    def __repr__(self):
        return "x" * 10_000


BATCH = np.arange(3000.0).reshape(100, 30)
LARGE = [BATCH, {f"k{i}": i for i in range(300)}, Long(), [Long()]]
ROWS = bx.Ragged(np.ones(5, np.float32), [2, 3])
BATCHED = [np.ones(3, np.float32)]
SIN = jax.make_jaxpr(jnp.sin)(1.0)
same = lambda x, y=1.0: x
SHARES = lambda fun: lambda given: fun(given.pop("fun", same), **given)(*BATCHED)

# Each is called with a wrong value in place of each parameter that the function beside it has.
CALLED = {
    "vmap": (SHARES(bx.vmap), bx.vmap),
    "in chunks": (SHARES(lambda f, **k: bx.vmap(f, **{"batch_size": 2, **k})), bx.vmap),
    "explain": (SHARES(lambda f, **k: bx.explain(f, **k)), bx.explain),
    "check": (SHARES(lambda f, **k: bx.check(f, **k)), bx.check),
    "find_nonfinite": (SHARES(lambda f, **k: bx.find_nonfinite(f, **k)), bx.find_nonfinite),
    "scan": (
        lambda given: bx.scan(given.pop("fun", lambda c, x: (c, x)), **given)(0.0, *BATCHED),
        bx.scan,
    ),
    "bounded_while": (
        lambda given: bx.bounded_while(
            **{"cond_fun": lambda c: c < 3, "body_fun": lambda c: c + 1, "init_val": 0.0}
            | {"max_steps": 4}
            | given
        ),
        bx.bounded_while,
    ),
    "clipped_grad": (
        lambda given: bx.clipped_grad(**{"loss": lambda w, x: w * x, "max_norm": 1.0} | given)(
            1.0, *BATCHED
        ),
        bx.clipped_grad,
    ),
    "a rank": (lambda given: bx.auto_vmap(given["ranks"])(same)(*BATCHED), ["ranks"]),
    "tiles": (lambda given: bx.vmap(same, bx.tiles(**given))(*BATCHED), bx.tiles),
    "size": (lambda given: bx.size(**{"name": "n"} | given), bx.size),
    "Ragged": (
        lambda given: bx.vmap(same)(bx.Ragged(**{"data": np.ones(5), "lengths": [2, 3]} | given)),
        ["data", "lengths", "max_length", "axis"],
    ),
    "from_rows": (
        lambda given: bx.Ragged.from_rows(**{"rows": BATCHED} | given),
        ["rows", "max_length", "axis"],
    ),
    "to_padded": (lambda given: ROWS.to_padded(**given), ["fill_value"]),
    "with_capacity": (lambda given: ROWS.with_capacity(**given), ["capacity"]),
    "Reduce": (
        lambda given: SHARES(bx.vmap)({"out_axes": bx.Reduce(**{"kind": "sum"} | given)}),
        bx.Reduce,
    ),
    "Reduction": (
        lambda given: SHARES(bx.vmap)(
            {"out_axes": bx.Reduce(bx.Reduction(**{"combine": jnp.add, "neutral": 0} | given))}
        ),
        bx.Reduction,
    ),
    "Compact": (lambda given: bx.Compact(**given), bx.Compact),
    "batch_jaxpr": (
        lambda given: bx.batch_jaxpr(
            **{"closed_jaxpr": SIN, "axis_size": 3, "in_axes": (0,)} | given
        ),
        bx.batch_jaxpr,
    ),
    "same_program": (
        lambda given: bx.same_program(given.pop("f", same), given.pop("g", same), 1.0),
        ["f", "g"],
    ),
    "stack": (lambda given: bx.stack([given["trees"], 1.0]), ["trees"]),
    "gather": (lambda given: bx.gather(1.0, **given), ["to"]),
    "compress": (
        lambda given: bx.compress(**{"condition": np.ones(3, bool), "x": np.ones(3)} | given),
        bx.compress,
    ),
    "unique": (lambda given: bx.unique(np.ones(3), **given), ["max_size"]),
    "map_batches": (
        lambda given: bx.map_batches(given.pop("fun", same), *BATCHED, **given),
        bx.map_batches,
    ),
    "map": (
        lambda given: bx.map(
            given.pop("fun", same), *BATCHED, **{"out": None, "progress": False} | given
        ),
        bx.map,
    ),
}
OPTIONS = [
    (name, option)
    for name, (_, options) in CALLED.items()
    for option in (options if isinstance(options, list) else inspect.signature(options).parameters)
    if option not in ("sources", "arrays", "options", "out")  # `out` is a path, which is shown
]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_what_is_given_is_not_shown_at_length(name, option):
    for given in LARGE:
        says = ""
        try:
            CALLED[name][0]({option: given})
        except (TypeError, ValueError, bx.errors.BatchaxError) as error:
            says = str(error)
        assert len(says) < 700
        assert "ambiguous" not in says  # an array was compared with a word
