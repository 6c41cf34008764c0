"""A dict from `Ragged.from_rows`, whose entries share their lengths under ``jax.jit``, too."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.rows.building import RaggedDict

from support.oracle import example
from support.rows import ways

LENGTHS = (3, 1, 0, 2)
is_rows = lambda x: isinstance(x, bx.Ragged)


def rows_of(lengths=LENGTHS, seed=0):
    return [
        {"x": example((n, 2), seed=seed + i), "w": example((n,), seed=seed + i + 50)}
        for i, n in enumerate(lengths)
    ]


def moment(row):  # fails where the two have sizes of their own
    return jnp.tanh(row["w"][:, None] * row["x"]).sum(0)


ROWS = rows_of()
EXPECTED = np.stack([moment(row) for row in ROWS])

MADE = {
    "from_rows": lambda b: b,
    "result of jit": jax.jit(lambda b: b),
    "copied": lambda b: copy.deepcopy(copy.copy(b.copy())),
    "with more room": lambda b: jax.tree.map(lambda r: r.with_capacity(9), b, is_leaf=is_rows),
    "another bound": lambda b: b | {k: r.with_max_length(5) for k, r in b.items()},
    "beside labels": lambda b: {"label": jnp.arange(4)} | b,
    "of nothing and back": lambda b: jax.tree.map(
        lambda _, x: x, jax.tree.map(lambda x: str(x.shape), b), b
    ),
}


@pytest.mark.parametrize("made", MADE)
def test_lengths_are_one_under_jit(made):
    batch = MADE[made](bx.Ragged.from_rows(ROWS))
    run = lambda batch: bx.vmap(lambda row: moment(row[0] if type(row) is list else row))(batch)
    np.testing.assert_allclose(jax.jit(run)(batch), EXPECTED, rtol=1e-5)


def test_nested_rows_and_two_axes():
    nested = bx.Ragged.from_rows([{"a": row, "b": (row["w"], None)} for row in ROWS])
    run = jax.jit(bx.vmap(lambda row: (row["a"]["w"] * row["b"][0]).sum()))
    np.testing.assert_allclose(run(nested), [(r["w"] ** 2).sum() for r in ROWS], rtol=1e-5)

    pictures = [{"r": example((h, w)), "g": example((h, w), seed=9)} for h, w in [(2, 3), (1, 2)]]
    batch = bx.Ragged.from_rows(pictures, axis=(0, 1))
    run = jax.jit(bx.vmap(lambda p: (p["r"] * p["g"]).sum()))
    expected = [(p["r"] * p["g"]).sum() for p in pictures]
    np.testing.assert_allclose(run(batch), expected, rtol=1e-5)


OPTIONS = {
    **ways("chunks", "mesh", "buckets", "packed", "padded"),
    "each entry's axis": {"in_axes": ({"x": 0, "w": 0},)},
    "a callable": {"in_axes": lambda leaf: 0},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_and_gradients(option):
    batch, run = bx.Ragged.from_rows(ROWS), bx.vmap(moment, **OPTIONS[option])
    np.testing.assert_allclose(jax.jit(run)(batch), EXPECTED, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda b: run(b).sum(), allow_int=True))(batch)
    expected = bx.Ragged.from_rows([jax.grad(lambda r: moment(r).sum())(row) for row in ROWS])
    for key in batch:
        np.testing.assert_allclose(gradient[key].data, expected[key].data, rtol=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(batch)


def test_entries_that_another_batch_gave_keep_their_sizes():
    one, other = (jax.device_put(bx.Ragged.from_rows(rows_of(n))) for n in [(3, 1), (1, 2)])
    outer = lambda row: (row["x"][:, None] * row["w"][None, :, None]).sum((0, 1))
    expected = [
        np.outer(a["x"].sum(0), b["w"].sum())[:, 0]
        for a, b in zip(rows_of((3, 1)), rows_of((1, 2)), strict=True)
    ]
    of_two = {
        "merged": one | {"w": other["w"]},
        "picked": jax.tree.map(
            lambda a, b: a if a.data.ndim == 2 else b, one, other, is_leaf=is_rows
        ),
        "a leaf elsewhere": one | {"w": jax.tree.leaves(other, is_leaf=is_rows)[0]},
    }
    for mixed in of_two.values():
        assert isinstance(mixed, RaggedDict)
        np.testing.assert_allclose(jax.jit(bx.vmap(outer))(mixed), expected, rtol=1e-5)

    def sorted_apart(batch):  # each entry by itself, where lengths are traced
        order = {k: jnp.argsort(batch[k].lengths * s) for k, s in [("x", 1), ("w", -1)]}
        permuted = lambda r: bx.Ragged(r.data, r.lengths[order["x" if r.data.ndim == 2 else "w"]])
        each = [
            jax.tree.map(function, batch, is_leaf=is_rows)
            for function in (permuted, jax.jit(permuted))
        ]
        return each, jax.tree.map(lambda leaf: leaf, each)

    for found in jax.tree.leaves(
        jax.jit(sorted_apart)(one), is_leaf=lambda x: type(x) is RaggedDict
    ):
        assert (found["x"].lengths.tolist(), found["w"].lengths.tolist()) == ([1, 3], [3, 1])
