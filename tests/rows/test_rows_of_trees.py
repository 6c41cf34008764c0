"""Rows that are trees: `Ragged.from_rows` makes a tree of batches, `unstack` rows again."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx


class Points(NamedTuple):
    at: jax.Array
    weight: jax.Array


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def rows(make, lengths=(3, 1, 0, 2)):
    keys = jax.random.split(jax.random.key(0), len(lengths))
    return [
        make(jax.random.normal(k, (n, 2)), jnp.arange(n))
        for k, n in zip(keys, lengths, strict=True)
    ]


KINDS = {
    "dict": lambda x, w: {"x": x, "w": w},
    "tuple": lambda x, w: (x, w),
    "NamedTuple": Points,
    "nested, with None": lambda x, w: {"points": Points(x, w), "mask": None},
    "NumPy": lambda x, w: {"x": np.asarray(x), "w": np.asarray(w)},
    "lists of numbers": lambda x, w: {"x": x, "w": [float(v) for v in w]},
}


def moment(row):
    x, w = (
        jax.tree.leaves(row)
        if not isinstance(row, dict) or "x" not in row
        else (row["x"], row["w"])
    )
    return jnp.tanh(w @ x)


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_sees_one_row(kind):
    all_rows = rows(KINDS[kind])
    batch = bx.Ragged.from_rows(all_rows)
    leaves = jax.tree.leaves(batch, is_leaf=lambda x: isinstance(x, bx.Ragged))
    assert all(isinstance(x, bx.Ragged) for x in leaves)
    assert {tuple(x.lengths) for x in leaves} == {(3, 1, 0, 2)}
    as_arrays = [jax.tree.map(jnp.asarray, r, is_leaf=lambda x: type(x) is list) for r in all_rows]
    expected = jnp.stack([moment(r) for r in as_arrays])
    np.testing.assert_allclose(bx.vmap(moment)(batch), expected, rtol=1e-5)
    named = jax.jit(bx.vmap(moment, in_axes=bx.ragged("n")))
    np.testing.assert_allclose(named(batch), expected, rtol=1e-5)


def test_unstack_beside_arrays():
    batch = {"x": bx.Ragged.from_rows([jnp.arange(2), jnp.arange(3)]), "y": jnp.arange(2), "z": "a"}
    first, second = bx.unstack(batch)
    same(first["x"], jnp.arange(2))
    assert (second["y"], second["z"]) == (1, "a")
    with pytest.raises(bx.AxisError, match=r"tree\['y'\] has shape \(3,\), but tree\['x'\]"):
        bx.unstack({**batch, "y": jnp.arange(3)})


X, W = jnp.ones((3, 2)), jnp.ones(3)
MISTAKES = {
    r"rows\[1\]\['x'\] has length 3, but rows\[1\]\['w'\] has length 2: the leaves of a row": [
        {"x": X, "w": W},
        {"x": X, "w": W[:2]},
    ],
    r"rows\[0\]\['label'\] is a number.*jnp.stack\(\[row\['label'\] for row in rows\]\)": [
        {"x": X, "label": 1.0}
    ],
    r"rows\[1\] has no leaf \['w'\], which rows\[0\] has": [{"x": X, "w": W}, {"x": X}],
    r"rows\[1\] has no leaf by itself, which rows\[0\] has": [X, {"x": X}],
    r"rows\[1\]\['x'\] has shape \(3,\) and rows\[0\]\['x'\] \(3, 2\)": [{"x": X}, {"x": W}],
    r"rows\[1\]\['x'\] has dtype int.., but rows\[0\]\['x'\] has float..": [
        {"x": X},
        {"x": X.astype(int)},
    ],
    r"rows\[0\]\['name'\] must be an array, got str": [{"x": X, "name": "a"}],
    "must be an array, got Ragged": [{"x": bx.Ragged.from_rows([X])}],
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_name_row_and_leaf(message):
    with pytest.raises(bx.BatchaxError, match=message):
        bx.Ragged.from_rows(MISTAKES[message])
