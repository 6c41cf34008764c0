"""`stack` and `unstack`: ensembles as one tree."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import sparse

import batchax as bx

from support.oracle import example, same


class State(NamedTuple):
    position: Any
    steps: Any


def states():
    return [State({"x": example((3,), seed=i)}, i) for i in range(4)]


def test_there_and_back():
    stacked = bx.stack(states())
    assert isinstance(stacked, State)
    same(stacked.position["x"], jnp.stack([s.position["x"] for s in states()]))
    same(stacked.steps, jnp.arange(4))
    for got, state in zip(bx.unstack(stacked), states(), strict=True):
        same(got.position, state.position)
        assert int(got.steps) == state.steps


def test_a_bool_that_is_the_same_in_all_is_no_array():
    trees = [{"w": jnp.full(2, float(i)), "train": True} for i in range(3)]
    stacked = bx.stack(trees)
    assert stacked["train"] is True
    assert [tree["train"] for tree in bx.unstack(stacked)] == [True] * 3
    apply = lambda tree, x: tree["w"] * x if tree["train"] else x
    np.testing.assert_array_equal(bx.vmap(apply, (0, None))(stacked, 2.0), 2.0 * stacked["w"])
    different = bx.stack([{"on": True}, {"on": False}])["on"]
    np.testing.assert_array_equal(different, [True, False])
    in_list = bx.stack([{"on": [True, False]}] * 3)["on"]  # may be meant as entries of an array
    assert [x.shape for x in in_list] == [(3,), (3,)]
    with pytest.raises(bx.AxisError, match=r"tree\['train'\]\[0\]: shape \(\), axis 0"):
        bx.vmap(apply, (0, None))({**stacked, "train": [True, False]}, 2.0)


def test_an_ensemble_of_models():
    """What is no array, such as an activation function, is in each of them."""
    keys = jax.random.split(jax.random.key(0), 3)
    models = [eqx.nn.MLP(2, 1, 4, 1, key=key) for key in keys]
    x = example((5, 2), seed=1)
    arrays, rest = eqx.partition(bx.stack(models), eqx.is_array)
    run = lambda arrays: eqx.combine(arrays, rest)
    got = bx.vmap(lambda arrays: bx.vmap(run(arrays))(x))(arrays)
    same(got, jnp.stack([jax.vmap(model)(x) for model in models]))
    for model, again in zip(models, bx.unstack(bx.stack(models)), strict=True):
        same(jax.vmap(again)(x), jax.vmap(model)(x))
        assert again.activation is model.activation


def test_traced_differentiated_and_of_keys():
    f = lambda a, b: (bx.stack([{"a": a}, {"a": b}])["a"] ** 2).sum()
    x, y = example((3,), seed=1), example((3,), seed=2)
    same(jax.jit(jax.grad(f, (0, 1)))(x, y), (2 * x, 2 * y))
    same(jax.vmap(f)(jnp.stack([x, y]), jnp.stack([y, x])), jnp.stack([f(x, y)] * 2))
    keys = [jax.random.key(i) for i in range(3)]
    draws = bx.vmap(jax.random.normal)(bx.stack(keys))
    same(draws, jnp.stack([jax.random.normal(key) for key in keys]))
    assert [a.dtype for a in bx.unstack(bx.stack(keys))] == [keys[0].dtype] * 3


def test_of_one_and_of_none():
    (one,) = bx.unstack(bx.stack([{"x": 2.0}]))
    assert one["x"].shape == ()
    assert bx.unstack({"x": jnp.zeros((0, 3))}) == []


@dataclass(frozen=True)
class Opaque:
    """No pytree, and so a leaf."""

    values: tuple


X = jnp.ones(3)
MATRIX = sparse.BCOO.fromdense(jnp.eye(2))
REFUSED = {
    "no tree": (lambda: bx.stack([]), "stack needs at least one tree"),
    "keys": (lambda: bx.stack([{"a": 1.0}, {"b": 1.0}]), "trees[1] has no leaf ['a'], which"),
    "one more": (
        lambda: bx.stack([{"a": X}, {"a": X}, {"a": X, "b": X}]),
        "trees[0] has no leaf ['b'], which trees[2] has",
    ),
    "a number for a list": (lambda: bx.stack(X[0]), "stack expects a list of trees, got an array"),
    "a list and a tuple": (
        lambda: bx.stack([[X, X], (X, X)]),
        "trees[1] has the structure PyTreeDef((*, *)), but trees[0] PyTreeDef([*, *])",
    ),
    "shapes": (
        lambda: bx.stack([{"a": [X, X]}, {"a": [X, X[:2]]}]),
        "trees[1]['a'][1] is float32[2], but trees[0]['a'][1] is float32[3]",
    ),
    "dtypes": (
        lambda: bx.stack([X, X.astype(jnp.int32)]),
        "trees[1] is int32[3], but trees[0] is float32[3]",
    ),
    "a function": (lambda: bx.stack([{"f": jnp.sin}, {"f": jnp.cos}]), "trees[1]['f'] is"),
    "an array and a string": (lambda: bx.stack([{"f": X}, {"f": "x"}]), "trees[1]['f'] is 'x'"),
    "containers": (
        lambda: bx.stack([{"m": MATRIX}, {"m": MATRIX}]),
        "stack: trees[0]['m'] is a BCOO: a batch of those is more than a batch of the arrays",
    ),
    "rows": (lambda: bx.stack([[bx.Ragged.from_rows([X])]]), "trees[0][0] is a Ragged"),
    "references": (lambda: bx.stack([jax.new_ref(1.0)] * 2), "trees[0] is a reference"),
    "nothing to take apart": (lambda: bx.unstack({"f": "x"}), "the tree holds no array"),
    "a number": (lambda: bx.unstack([X, 1.0]), "tree[1] is a number, which has no first axis"),
    "sizes": (
        lambda: bx.unstack({"a": X, "b": X[:2]}),
        "tree['b'] has shape (2,), but tree['a'] has shape (3,)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, message = REFUSED[name]
    message = message.replace("float32", str(jnp.zeros(()).dtype))
    with pytest.raises((bx.AxisError, bx.ArgumentTypeError), match=re.escape(message)):
        call()


def test_leaves_that_are_no_arrays_are_compared_by_what_they_are():
    leaf = Opaque((1, 2))
    stacked = bx.stack([{"o": leaf, "x": 1.0}, {"o": Opaque((1, 2)), "x": 2.0}])
    assert stacked["o"] == leaf
    same(stacked["x"], jnp.array([1.0, 2.0]))
    array = np.arange(3)
    same(bx.stack([array, array]), jnp.stack([jnp.asarray(array)] * 2))
