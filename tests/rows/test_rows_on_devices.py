"""Rows of different lengths dealt out to devices: what each computes is what it does alone."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import batchax as bx
from batchax.rows.run import Dealt, kept_on_devices

from support.oracle import example, same
from support.rows import attend, check_rows, ragged

LENGTHS = (3, 1, 5, 2, 7)
check = functools.partial(check_rows, mesh="all", reverse_traced=True)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 2}, {"buckets": 2}, {"layout": "padded"}, {"layout": "packed"}],
    ids=str,
)
@pytest.mark.each_commit(2)
def test_with_other_options(options):
    check(lambda x: attend(jnp.tanh(x)), ragged(3, lengths=LENGTHS), **options)


def _sum_of_powers(x):
    return sum(x[i] ** (i + 1) for i in range(len(x)))


by_length = pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.linalg.svd(x, full_matrices=False)[1].sum(),
        _sum_of_powers,
        lambda x: x.max() if x.shape[0] > 2 else x.sum(),
    ],
    ids=["padding is not exact", "the length is a number", "a comparison"],
)


@by_length
@pytest.mark.each_commit(2)
def test_each_device_has_a_program_for_each_length(fun):
    check(fun, ragged(3, lengths=LENGTHS, spare=0), ways={"": {}, "chunks": {"batch_size": 1}})


@by_length
@pytest.mark.parametrize("options", [{}, {"mesh": "all"}], ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.each_commit(2)
def test_a_program_for_each_length_on_a_mesh_that_is_set(kind, options, fun):
    """The rows were made before, so their types carry no mesh."""
    mesh, x = jax.make_mesh((4,), ("d",), axis_types=(kind,)), ragged(3, lengths=LENGTHS, spare=0)
    scale = jnp.asarray(3.0)
    batched = bx.vmap(lambda x, scale: fun(x) * scale, (0, None), **options)
    loss = lambda data, scale: batched(x.with_data(data), scale).sum()
    alone = [
        jax.value_and_grad(lambda x, scale: fun(x).sum() * scale, (0, 1))(row, scale)
        for row in x.rows()
    ]
    with jax.set_mesh(mesh):
        for call in (batched, jax.jit(batched)):
            same(np.sum(call(x, scale)), np.sum([value for value, _ in alone]))
        own, shared = jax.jit(jax.grad(loss, (0, 1)))(x.data, scale)
    same(x.with_data(own).rows(), [gradient for _, (gradient, _) in alone])
    same(shared, np.sum([gradient for _, (_, gradient) in alone]))


def test_devices_have_programs_for_the_lengths_that_there_are():
    x = ragged(3, lengths=LENGTHS, spare=400)
    got = bx.vmap(_sum_of_powers, mesh="all")(x)
    same(got, np.stack([_sum_of_powers(np.asarray(row)) for row in x.rows()]))
    none = bx.Ragged(jnp.ones((0, 3)), np.zeros(0, int), 40)
    assert jax.jit(lambda: bx.vmap(_sum_of_powers, mesh="all")(none))().shape == (0, 3)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 39])
def test_no_device_has_more_elements_than_another_by_more_than_a_row(count):
    generator = np.random.default_rng(count)
    real = {}

    @jax.jit
    def deal(lengths):
        dealt = {devices: Dealt.of(lengths, devices) for devices in (1, 2, 3, 4, 7)}
        real.update({devices: of.real for devices, of in dealt.items()})
        return {devices: (of.row, of.slot) for devices, of in dealt.items()}

    for _ in range(40):
        lengths = np.minimum(generator.geometric(0.1, count) - 1, 60).astype(np.int32)
        for devices, (row, slot) in jax.device_get(deal(lengths)).items():
            assert row.shape == (devices, -(-count // devices))
            assert sorted(row[real[devices]]) == list(range(count))
            np.testing.assert_array_equal(row.reshape(-1)[slot], np.arange(count))
            elements = lengths[row].sum(1)
            assert elements.max() - elements.min() <= lengths.max()
            room = -(-int(lengths.sum()) // devices) + lengths.max() + lengths.sum() // count
            assert elements.max() <= room


def test_one_program_serves_all_lengths():
    traced = []

    def f(x):
        traced.append(x)
        return attend(x)

    def on_devices(lengths):
        out = bx.vmap(f, mesh="all")(bx.Ragged(jnp.ones((9, 3)), jnp.asarray(lengths), 6))
        jax.block_until_ready(out.data)

    on_devices((3, 1, 5))
    staged, programs = len(traced), len(kept_on_devices)
    on_devices((2, 2, 5))
    assert len(traced) == staged + 1  # to know what the function does
    assert len(kept_on_devices) == programs


def test_programs_that_are_kept_hold_no_arrays():
    x = bx.Ragged(jnp.ones((11, 3)), jnp.asarray([3, 1, 5]), 6)
    bx.vmap(lambda row: jnp.sin(row) * 3, mesh="all")(x)
    gone = weakref.ref(x.data)
    del x
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("match", "fun", "options"),
    [
        ("axis_name='rows'", lambda x: x - lax.pmean(x.sum(), "rows"), {"axis_name": "rows"}),
        ('layout="grouped"', attend, {"layout": "grouped"}),
        ("Remove mesh", lambda x: jnp.linalg.svd(x)[1], {"layout": "padded"}),
    ],
)
def test_what_needs_all_rows_is_refused(match, fun, options):
    with pytest.raises(bx.UnsupportedError, match=match):
        bx.vmap(fun, mesh="all", **options)(ragged(3, lengths=LENGTHS))


@pytest.mark.parametrize("vmap", [jax.vmap, bx.vmap])
@pytest.mark.compiles(300)
@pytest.mark.each_commit(1, "vmap0")
def test_a_batch_of_batches_outside_of_jit(vmap):
    """Its axis is not spread over devices with that of the rows."""
    data, lengths = example((2, 13), seed=2), np.array([3, 1, 4, 2, 3], np.int32)

    def batch(data):
        rows = bx.Ragged(data, lengths)
        sums, rows = bx.vmap(lambda row: (row.sum(), 2 * row), mesh="all")(rows)
        return sums, rows.data

    parts = [np.split(np.asarray(x), np.cumsum(lengths)[:-1]) for x in data]
    sums = np.array([[row.sum() for row in rows] for rows in parts])
    same(vmap(batch)(data), (sums, 2 * data))
