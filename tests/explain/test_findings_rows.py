"""Findings, and what is listed, of calls whose rows have different lengths."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batchax as bx
from batchax.explain.explain import explain

LENGTHS = [3, 1, 40, 2, 5, 2, 39, 4]  # 96 elements; 320 places if padded to 40
WIDTH = 64


def rows(lengths=LENGTHS, spare=0):
    data = np.ones((sum(lengths) + spare, WIDTH), np.float32)
    return bx.Ragged(data, np.array(lengths, np.int32))


abstract = lambda x: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
packs = lambda x: jnp.tanh(x).sum(0)
pads = lambda x: jnp.cumsum(jnp.tanh(x), axis=0)


def groups(x):
    return jnp.linalg.svd(x)[1].sum()  # all vectors, of which none has an exact padded form


def found(fun, x, **options):
    return explain(fun, compile=False, **options)(x).findings


def two_scans(x):
    return jnp.cumsum(jnp.tanh(jnp.cumsum(x, 0) @ jnp.ones((WIDTH, WIDTH))), 0)


PADDED, GROUPED = "ragged rows run padded", "ragged rows run grouped by length"
IN_320 = "8 rows take 320 places for 96 elements"
# Rows are counted once, though there are several padded regions, and chunks.
FOUND = [
    (PADDED, pads, rows(), {}, [
        f"{IN_320}: 3.33 for each",
        "1 operation packed in 1 region and 1 operation padded in 1 region",
        # Six rows of up to 5, two of up to 40.
        f"buckets=2, which needs {(6 * 5 + 2 * 40) / 96:.2f} places",
    ]),
    (PADDED, packs, rows(), {"layout": "padded"}, []),
    (PADDED, pads, abstract(rows()), {}, ["320 places for at most 96 elements", "max_length"]),
    (PADDED, packs, rows(), {"batch_size": 4}, []),
    (PADDED, two_scans, rows(), {"buckets": 1}, [IN_320, "4 operations padded in 1 region"]),
    (PADDED, two_scans, rows(), {"batch_size": 3}, [IN_320]),
    (PADDED, two_scans, rows(), {"layout": "padded"}, [IN_320]),
    (PADDED, two_scans, rows([1, 2, 4, 8, 16, 32, 64]), {"buckets": 2},
     ["8 operations padded in 2 regions", "7 rows take 208 places for 127 elements"]),
    (GROUPED, groups, rows(), {}, ["8 rows run in 7 groups"]),
    (GROUPED, packs, rows(), {"layout": "grouped"}, []),
    ("packed rows have spare capacity", packs, rows(spare=200), {},
     ["296 places for 96 elements"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "fun", "x", "options", "told"), FOUND)
def test_is_found(kind, fun, x, options, told):
    (finding,) = [f for f in found(fun, x, **options) if f.kind == kind]
    for words in told:
        assert words in f"{finding.message} {finding.remedy}"


@pytest.mark.parametrize(
    ("fun", "x", "options"),
    [
        (packs, rows(), {}),
        (packs, abstract(rows()), {}),
        (pads, rows([7, 8, 8, 7]), {}),
        (pads, rows(), {"buckets": 2}),
        (groups, rows([7, 7]), {}),
        (packs, rows(spare=2), {}),
    ],
)
def test_is_not_found(fun, x, options):
    assert found(fun, x, **options) == ()


@pytest.mark.parametrize("options", [{}, {"batch_size": 1}], ids=str)
def test_rows_of_a_device_are_said_to_be(options):
    finding, *_ = found(two_scans, rows([40, *[1] * 15]), mesh="all", **options)  # and on chunks
    assert "4 rows on each device take 160 places for at most" in finding.message


@pytest.mark.parametrize("lengths", [[4, 9] * 200, range(1, 11)], ids=["few", "many, by answer"])
def test_figures_of_branches_by_length(lengths):
    def needs_number(x):
        return x.sum() if x.shape[0] > 5 else x.max()

    few = len(set(lengths)) == 2
    fun = groups if few else needs_number
    (finding,) = found(fun, abstract(rows(lengths)) if few else rows(lengths))
    assert f"Each of {len(lengths)} rows runs one of {10 if few else 2} branches" in finding.message
    assert ("svd" if few else "needs a length as a number") in finding.remedy


def test_the_operation_and_the_line_for_which_rows_are_grouped():
    (finding,) = found(groups, rows())
    assert "run together: the operation `svd` at " in finding.remedy
    assert "(groups) cannot be computed for rows of different lengths at once: " in finding.remedy

    many = bx.Ragged(rows().data, rows().lengths, 90)  # too many lengths for a program each
    with pytest.raises(
        bx.UnsupportedError, match=r"`svd` at .*test_findings_rows.py:[\d:]+ \(groups\)"
    ):
        jax.jit(bx.vmap(groups))(many)

    def branches(x):
        return x.sum() if x.shape[0] > 2 else x.max()

    (finding,) = found(branches, rows())
    assert re.search(r"test_findings_rows.py:[\d:]+ \(branches\): the function", finding.remedy)
    assert "`n > 2` may be true of one row and false of another" in finding.remedy


def test_lengths_are_traced_where_jit_traces_them():
    """The compiler counts what it counts of the program that runs."""

    @bx.vmap
    def batched(x):
        return jnp.cumsum(jnp.tanh(x), axis=0).sum()

    def flops(compiled):
        analysis = compiled.cost_analysis()
        return analysis["flops"] + analysis.get("transcendentals", 0.0)

    x = bx.Ragged(np.ones((96, 2), np.float32), np.array(LENGTHS, np.int32))
    compiled = jax.jit(batched).lower(x).compile()
    of_types = bx.Ragged(abstract(x).data, abstract(x).lengths, 40)
    calls = [(jax.jit(batched), x), (batched, abstract(x)), (batched, of_types), (batched, x)]
    inside, *others, outside = [explain(fun)(argument) for fun, argument in calls]
    assert inside.compiled.flops == flops(compiled) != outside.compiled.flops
    assert [str(other) for other in others] == [str(inside)] * 2
    assert [v.name for v in inside.arguments] == ["x.data", "x.lengths"]
    assert [v.name for v in outside.arguments] == ["x.data"]
    measured = explain(jax.jit(batched), measure=True)(x)
    assert measured.timings[0].peak == inside.memory.peak
